"""Tables in columns id, time, features and targets: a row per step of a sequence, or per sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from ...errors import nearest, one_line
from .columns import Roles, TableColumns
from .index import ARROW_INDEX, UNNAMED
from .ordering import number_words, refuse_repeated_times, sort_rows
from .parsing import is_number
from .sheet import CELLS_LISTED, Options, Problems, Sheet, quote_names, refuse_bad_values
from .source import LoadedFile
from .texts import WordList
from .wide import name_rows, sheet_of_wide
from .words import check_categorical, encode_words

AUTO = ("auto",)  # of --categorical: every column of words
USUAL_NAMES = {"id": ("id",), "time": ("time", "timestamp"), "target": ("target", "label", "class")}
# Of a time column, if it holds dates. The index of a data frame may have no name of its own.
DATE_NAMES = ("date", "datetime", "ds", UNNAMED, ARROW_INDEX)
OTHERWISE_CALLED = (
    ", which the training file has: pass --{0} NAME if it is called otherwise, --{0} '' if there "
    "is none"
)
KIND_ADVICE = "Pass --kind classify if they are classes, --kind regress if they are quantities."


def assign_roles(
    names: Sequence[str],
    options: Options,
    problems: Problems,
    holds_dates: Callable[[str], bool] = lambda name: False,
) -> Roles:
    """Find the columns that the options ask for, or that have a usual name.

    A column called date, datetime or ds is the time if it `holds_dates`.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        problems.refuse(
            f"{problems.path}: column names appear more than once: {quote_names(twice)}. Give each "
            "column its own name."
        )
    notes: list[str] = []
    of_flag = options.advise(" for --{0}", OTHERWISE_CALLED)
    id = find_column("id", options.id, names, problems, notes, of_flag)
    asked_time = options.time
    if asked_time is None:
        asked_time = find_dates(names, problems, notes, holds_dates)
    time = find_column("time", asked_time, names, problems, notes, of_flag)
    targets = find_targets(names, options, problems, notes)
    taken = {id, time, *targets}
    if options.features is None:
        features = tuple(name for name in names if name not in taken)
    else:
        features = options.features
        roles = Roles(id, time, targets, features, ())
        check_features(features, roles, names, options, problems, notes)
    if not features and not problems.groups:
        problems.add(
            f"{problems.path}: no column is left as a feature. Columns: {quote_names(names)}."
        )
    problems.raise_if_any()
    roles = Roles(id, time, targets, features, tuple(notes))
    return (
        roles if options.categorical in ((), AUTO) else check_categorical(roles, options, problems)
    )


def find_dates(
    names: Sequence[str],
    problems: Problems,
    notes: list[str],
    holds_dates: Callable[[str], bool],
) -> str | None:
    """The column of dates with a usual name, which is the time; None if there is none.

    It is refused beside a column called time: only the user knows which of the two orders the rows.
    """
    dates = []
    for name in names:
        plain = name.casefold().replace("_", "").replace(" ", "")
        if (name in DATE_NAMES or plain in DATE_NAMES) and holds_dates(name):
            dates.append(name)
    found = dates + [name for name in names if name.casefold() in USUAL_NAMES["time"]]
    if not dates:
        return None
    if len(found) > 1:
        problems.add(
            f"{problems.path}: {quote_names(found)} could each be the time column. Pass --time "
            "NAME, and leave the other out with --features."
        )
    notes.append(f"time column: '{one_line(found[0])}'")
    return found[0]


def find_column(
    role: str,
    asked: str | None,
    names: Sequence[str],
    problems: Problems,
    notes: list[str],
    purpose: str = " for --{}",
) -> str:
    """The column for a role: the one asked for, or one with a usual name; "" for none.

    purpose: of a column that is not there, in words, with {} for the role.
    """
    if asked is not None:
        if not asked or asked in names:
            return asked
        problems.add(
            f"{problems.path}: there is no column '{one_line(asked)}'{purpose.format(role)}."
            f"{suggest_column(asked, names)} Columns: {quote_names(names)}."
        )
        return ""
    found = [name for name in names if name.casefold() in USUAL_NAMES.get(role, ())]
    if not found:
        return ""
    if len(found) > 1:
        problems.add(
            f"{problems.path}: {quote_names(found)} could each be the {role} column. Pass --{role} "
            "NAME."
        )
    else:
        notes.append(f"{role} column: '{one_line(found[0])}'")
    return found[0]


def suggest_column(name: str, names: Sequence[str]) -> str:
    """A sentence with the column that may have been meant; "" if none is near."""
    near = nearest(name, names)
    return f" Did you mean '{one_line(near)}'?" if near else ""


def suggest_feature(name: str, unused: Sequence[str]) -> str:
    """The end of "there is no column ...": the one that may have been meant."""
    near = nearest(name, unused[:200])  # in a wide table, a search of all would take long
    return f"; did you mean '{one_line(near)}'?" if near else "."


def find_targets(
    names: Sequence[str], options: Options, problems: Problems, notes: list[str]
) -> tuple[str, ...]:
    """The target columns. To predict the next step none is needed.

    Those that are named and exist are found even then, so that they are not taken for features.
    """
    if options.kind == "next":
        for name, option in options.ahead if options.use == "train" else ():
            find_column(option, name, names, problems, notes)
        return tuple(name for name in options.target or () if name in names)
    if options.target is not None:
        found = [find_column("target", name, names, problems, notes) for name in options.target]
        return tuple(name for name in found if name)
    target = find_column("target", None, names, problems, notes)
    if not target:
        problems.add(
            f"{problems.path}: there is no column called target, label or class."
            f"{suggest_column('target', names)} Pass --target NAME{or_next(options)}. "
            f"Columns: {quote_names(names)}."
        )
        return ()
    return (target,)


def or_next(options: Options) -> str:
    """The end of an advice: the kind that needs no target, where rows are steps in time."""
    return "" if options.rows == "samples" else ", or --kind next to predict the next step"


def check_features(
    features: tuple[str, ...],
    roles: Roles,
    names: Sequence[str],
    options: Options,
    problems: Problems,
    notes: list[str],
) -> None:
    """Refuse features that are not columns, or that have another role.

    features: those that were asked for; names: all columns of the file.
    """
    taken = {roles.id, roles.time, *roles.targets}
    used = taken.union(features)
    unused = [name for name in names if name not in used]
    all_names = set(names)
    lacking = [name for name in features if name not in all_names]
    if options.use == "train":
        told = {name for name, _ in options.ahead}  # of their own options
        for name in [name for name in lacking if name not in told]:
            problems.add(
                f"{problems.path}: there is no column '{one_line(name)}' for --features"
                f"{suggest_feature(name, unused)} Columns: {quote_names(names)}.",
                "features",
            )
    elif lacking:
        hint = ""
        for name in lacking[:CELLS_LISTED]:
            near = nearest(name, unused[:200])  # in a wide table, a search of all would take long
            if near:
                hint += f" Should '{one_line(near)}' be called '{one_line(name)}'?"
        which = f"column {quote_names(lacking)} is"
        if len(lacking) > 1:
            which = f"columns {quote_names(lacking)} are"
        others = f" Not needed: {quote_names(unused)}." if unused else ""
        problems.add(
            f"{problems.path}: {which} missing. The model needs: {quote_names(features)}."
            f"{others}{hint}"
        )
    for name in taken.intersection(features):
        role = "time"
        if name in roles.targets:
            role = "target"
        elif name == roles.id:
            role = "id"
        advice = options.advise("Leave it out of --features.", f"Pass another --{role}.")
        problems.add(
            f"{problems.path}: column '{one_line(name)}' is both the {role} and an input. {advice}"
        )
    if unused:
        notes.append(f"columns left out: {quote_names(unused)}")


def sheet_from_columns(
    source: LoadedFile,
    roles: Roles,
    columns: TableColumns,
    options: Options,
    problems: Problems,
    where: Callable[[int, str], str],
) -> Sheet:
    """The sequences of a long table; rows are sorted by id and time if there are times.

    Without times, rows with one id are adjacent, in the order of the file.
    If options.rows is "samples" each row is one of its own.
    What is wrong is added to `problems`, which `refuse_bad_values` raises together at the end.

    where: puts a line of the file and a column in words.
    """
    if options.wide:
        y = collect_targets(roles.targets, columns, options, problems)
        return sheet_of_wide(source, roles, columns, options, problems, where, y)
    notes = list(roles.notes)
    shape: tuple[int, ...] | None = None
    # Bad ids or times would only make more complaints.
    is_sorted = columns.time is not None and not problems.groups
    codes = np.zeros(len(columns.lines), np.int64)  # the ids as numbers
    if roles.id and options.rows == "steps":
        codes = number_words(columns.words[roles.id])
    if is_sorted:
        notes.append(sort_rows(roles, columns, codes))
    if options.rows == "samples":
        shape = (len(roles.features),)
        starts = np.arange(len(columns.lines))
        advice = options.advise(
            "Give each its own id; sequences of rows need a recurrent network (--cell).",
            "Give each its own id, or pass --id '' to leave the column out.",
        )
        ids = name_rows(roles.id, columns, problems, where, "sample", advice)
    elif roles.id:
        starts, ids = split_by_id(roles, columns, codes, problems, where)
    else:
        starts = np.zeros(1, np.int64)
        ids = ["all"]
        notes.append("no id column: the whole file is one sequence")
    if is_sorted:
        refuse_repeated_times(columns, roles, starts, problems, where)
    elif shape is None and columns.time is None:
        notes.append("no time column: steps are rows, in the order of the file")
    categories = {}
    for name in roles.categorical:
        columns.numbers[name], categories[name] = encode_words(columns.words[name])
        if columns.inputs is not None:
            columns.inputs[:, roles.features.index(name)] = columns.numbers[name]
    role_columns = {"id": roles.id, "time": roles.time}
    if columns.has_dates:
        role_columns["stamps"] = "1"  # a mark: times are dates
    if columns.date_order:
        role_columns["dates"] = columns.date_order
    sheet = Sheet(
        source.path,
        source.sha256,
        roles.features,
        columns.all_inputs(roles.features),
        np.diff(np.append(starts, len(columns.lines))),
        ids,
        where,
        columns.lines,
        targets=roles.targets,
        y=collect_targets(roles.targets, columns, options, problems),
        time=columns.time,
        stamps=columns.stamps,
        notes=tuple(filter(None, notes)),
        columns=role_columns,
        shape=shape,
        categories=categories,
        rows_by_line=True,
    )
    return refuse_bad_values(sheet, options, problems)


def split_by_id(
    roles: Roles,
    columns: TableColumns,
    codes: np.ndarray,
    problems: Problems,
    where: Callable[[int, str], str],
) -> tuple[np.ndarray, list[str]]:
    """(the first row of each sequence, its id). An id that appears again later is a problem.

    With a time column it is none: rows that are not sorted yet have other problems.

    codes: the words of the id column as numbers; where: puts a line of the file and a column in
    words.
    """
    words = columns.words[roles.id]
    starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
    ids = [words[start] for start in starts.tolist()]
    seen: set[str] = set()
    for start, name in zip(starts, ids, strict=True):
        place = where(int(columns.lines[start]), roles.id)
        if not name:
            problems.add(f"{place}: the id is missing. Fill it in.", "blank id")
        elif name in seen and not roles.time:
            problems.add(
                f"{place}: id '{one_line(name)}' appears again after other ids. Sort the rows, or "
                "name the column that orders them with --time.",
                "again",
            )
        seen.add(name)
    return starts, ids


def collect_targets(
    targets: tuple[str, ...], columns: TableColumns, options: Options, problems: Problems
) -> np.ndarray | WordList | None:
    """The targets as labels [N] or numbers [N, k]; None if there are none to learn."""
    if not targets or options.kind == "next":
        return None
    labels = {name: columns.words[name] for name in targets if name in columns.words}
    if not labels:
        return np.stack([columns.numbers[name] for name in targets], 1)
    if options.kind is None:
        refuse_if_kind_unclear(labels, options, problems)
    if len(targets) > 1:
        problems.add(
            f"{problems.path}: labels must be in one column; --target names {len(targets)}: "
            f"{quote_names(targets)}."
        )
    words = labels[targets[0]]
    if isinstance(words, WordList):
        return words
    return np.array(words, dtype=object)


def refuse_if_kind_unclear(
    labels: dict[str, Sequence[str]], options: Options, problems: Problems
) -> None:
    """Report labels with numbers among them: only the user knows if these are classes.

    Labels that are all words make a classification.
    """
    for name, cells in labels.items():
        different = [cell for cell in different_words(cells) if cell]
        numbers = [cell for cell in different if is_number(cell, options)]
        words = [cell for cell in different if not is_number(cell, options)]
        if words and not numbers:
            continue
        content = "nothing"
        if numbers:
            content = f"{len(numbers):,} different numbers ({list_some(numbers)})"
        if numbers and words:
            content = f'numbers ("{one_line(numbers[0])}") and words ("{one_line(words[0])}")'
        problems.add(
            f"{problems.path} column '{one_line(name)}': the target holds {content}. {KIND_ADVICE}"
        )


def different_words(words: Sequence[str]) -> list[str]:
    """The different ones of many words, in the order of their first appearance."""
    return list(words.different) if isinstance(words, WordList) else list(dict.fromkeys(words))


def list_some(numbers: list[str]) -> str:
    """The first few numbers of a column: "0, 1, 2, ..."."""
    few = ", ".join(map(one_line, numbers[:CELLS_LISTED]))
    return few + (", ..." if len(numbers) > CELLS_LISTED else "")

"""Tables in columns id, time, features and targets: a row per step of a sequence, or per sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...errors import nearest, one_line
from .parsing import is_number
from .sheet import CELLS_LISTED, Options, Problems, Sheet, quote_names, refuse_bad_values
from .source import LoadedFile

USUAL_NAMES = {"id": ("id",), "time": ("time", "timestamp"), "target": ("target", "label", "class")}
OTHERWISE_CALLED = (
    "with the {0}, as the training file has: pass --{0} NAME if it is called otherwise, --{0} '' "
    "if there is none"
)
KIND_ADVICE = "Pass --kind classify if they are classes, --kind regress if they are quantities."


@dataclass(frozen=True)
class Roles:
    """Which column is what; "" for none. `notes` say what was chosen."""

    id: str
    time: str
    targets: tuple[str, ...]
    features: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class TableColumns:
    """The columns of a table that have a role.

    numbers    [N] by name;  words [N] by name
    time       [N], and `stamps` as they are written, or None; `has_dates`: they are dates
    lines      [N] the line of the file for each row
    """

    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    words: dict[str, list[str]] = field(default_factory=dict)
    time: np.ndarray | None = None
    stamps: list[str] | None = None
    has_dates: bool = False
    lines: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


def assign_roles(names: Sequence[str], options: Options, problems: Problems) -> Roles:
    """Find the columns that the options ask for, or that have a usual name."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        problems.refuse(
            f"{problems.path}: column names appear more than once: {quote_names(twice)}. Give each "
            "column its own name."
        )
    notes: list[str] = []
    of_flag = options.advise("for --{0}", OTHERWISE_CALLED)
    id = find_column("id", options.id, names, problems, notes, of_flag)
    time = find_column("time", options.time, names, problems, notes, of_flag)
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
    return Roles(id, time, targets, features, tuple(notes))


def find_column(
    role: str,
    asked: str | None,
    names: Sequence[str],
    problems: Problems,
    notes: list[str],
    purpose: str = "for --{}",
) -> str:
    """The column for a role: the one asked for, or one with a usual name; "" for none.

    purpose: of a column that is not there, in words, with {} for the role.
    """
    if asked is not None:
        if not asked or asked in names:
            return asked
        problems.add(
            f"{problems.path}: there is no column '{one_line(asked)}' {purpose.format(role)}."
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
        for name in lacking:
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
    """The sequences of a long table: rows with one id are adjacent, and time increases in each.

    If options.rows is "samples" each row is one of its own.
    What is wrong is added to `problems`, which `refuse_bad_values` raises together at the end.

    where: puts a line of the file and a column in words.
    """
    notes = list(roles.notes)
    shape: tuple[int, ...] | None = None
    if options.rows == "samples":
        shape = (len(roles.features),)
        starts = np.arange(len(columns.lines))
        ids = name_samples(roles.id, columns, options, problems, where)
    elif roles.id:
        starts, ids = split_by_id(roles.id, columns, problems, where)
    else:
        starts = np.zeros(1, np.int64)
        ids = ["all"]
        notes.append("no id column: the whole file is one sequence")
    if shape is not None:
        pass  # samples have no time
    elif columns.time is None:
        notes.append("no time column: steps are rows, in the order of the file")
    elif not problems.groups:  # ids out of order, or bad times, would only make more complaints
        check_order(columns.time, starts, columns.lines, problems, lambda i: where(i, roles.time))
    role_columns = {"id": roles.id, "time": roles.time}
    if columns.has_dates:
        role_columns["stamps"] = "1"  # a mark: times are dates
    sheet = Sheet(
        source.path,
        source.sha256,
        roles.features,
        np.stack([columns.numbers[name] for name in roles.features], 1),
        np.diff(np.append(starts, len(columns.lines))),
        ids,
        where,
        columns.lines,
        targets=roles.targets,
        y=collect_targets(roles.targets, columns, options, problems),
        time=columns.time,
        stamps=columns.stamps,
        notes=tuple(notes),
        columns=role_columns,
        shape=shape,
        rows=number_rows(columns.lines),
    )
    return refuse_bad_values(sheet, options, problems)


def number_rows(lines: np.ndarray) -> np.ndarray:
    """The number of each row in its file, from 0, in whatever order the rows are now.

    lines: the line of each. Blank lines and line breaks within cells do not count.
    """
    return np.unique(lines, return_inverse=True)[1].reshape(-1)


def split_by_id(
    column: str, columns: TableColumns, problems: Problems, where: Callable[[int, str], str]
) -> tuple[np.ndarray, list[str]]:
    """(the first row of each sequence, its id). An id that appears again later is a problem.

    column: the name of the id column; where: puts a line of the file and a column in words.
    """
    words = columns.words[column]
    numbered: dict[str, int] = {}  # ids as numbers, which are compared faster
    numbers = (numbered.setdefault(word, len(numbered)) for word in words)
    codes = np.fromiter(numbers, np.int64, len(words))
    starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
    ids = [words[start] for start in starts]
    seen: set[str] = set()
    for start, name in zip(starts, ids, strict=True):
        place = where(int(columns.lines[start]), column)
        if not name:
            problems.add(f"{place}: the id is missing. Fill it in.", "blank id")
        elif name in seen:
            problems.add(
                f"{place}: id '{one_line(name)}' appears again after other ids. Sort the rows by "
                "id and time.",
                "again",
            )
        seen.add(name)
    return starts, ids


def name_samples(
    column: str,
    columns: TableColumns,
    options: Options,
    problems: Problems,
    where: Callable[[int, str], str],
) -> list[str]:
    """The name of each row: its id, which no other row has, or its number from 0.

    column: the name of the id column, or "".
    """
    if not column:
        return list(map(str, range(len(columns.lines))))
    advice = options.advise(
        "Give each its own id; sequences of rows need a recurrent network (--cell).",
        "Give each its own id, or pass --id '' to leave the column out.",
    )
    names = columns.words[column]
    seen: set[str] = set()
    for line, name in zip(columns.lines, names, strict=True):
        place = where(int(line), column)
        if not name:
            problems.add(f"{place}: the id is missing. Fill it in.", "blank id")
        elif name in seen:
            problems.add(
                f"{place}: id '{one_line(name)}' appears again, but each row is a sample of its "
                f"own. {advice}",
                "again",
            )
        seen.add(name)
    return names


def check_order(
    time: np.ndarray,
    starts: np.ndarray,
    lines: np.ndarray,
    problems: Problems,
    where: Callable[[int], str],
) -> None:
    """Report times that do not increase within a sequence; where: puts a line in words."""
    inside = np.ones(len(time), bool)  # rows with a row before them in their sequence
    inside[starts] = False
    now = time[1:]
    before = time[:-1]
    back = "the time is earlier than in the row above. Sort the rows by id and time."
    twice = "the time is the same as in the row above. Remove one of the rows."
    for wrong, complaint in ((now < before, back), (now == before, twice)):
        for row in np.flatnonzero(wrong & inside[1:]) + 1:
            problems.add(f"{where(int(lines[row]))}: {complaint}", complaint)


def collect_targets(
    targets: tuple[str, ...], columns: TableColumns, options: Options, problems: Problems
) -> np.ndarray | None:
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
    return np.array(labels[targets[0]], dtype=object)


def refuse_if_kind_unclear(
    labels: dict[str, list[str]], options: Options, problems: Problems
) -> None:
    """Report labels with numbers among them: only the user knows if these are classes.

    Labels that are all words make a classification.
    """
    for name, cells in labels.items():
        number = None
        word = None
        for cell in dict.fromkeys(cells):
            if is_number(cell, options):
                number = cell if number is None else number
            elif cell:
                word = cell if word is None else word
        if number is None and word is not None:
            continue
        content = "nothing"
        if number is not None:
            content = f'numbers ("{one_line(number)}")'
            if word is not None:
                content += f' and words ("{one_line(word)}")'
        problems.add(
            f"{problems.path} column '{one_line(name)}': the target holds {content}. {KIND_ADVICE}"
        )

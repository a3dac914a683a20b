"""Long tables: one row for each step of each sequence, in columns id, time, features and targets."""

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


@dataclass(frozen=True)
class Roles:
    """Which column is what; "" where there is none."""

    id: str
    time: str
    targets: tuple[str, ...]
    features: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class TableColumns:
    """The columns that have a role: numbers [N] by name, words [N] by name; lines [N] is where the rows stand."""

    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    words: dict[str, list[str]] = field(default_factory=dict)
    time: np.ndarray | None = None
    stamps: list[str] | None = None
    has_dates: bool = False
    lines: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


def assign_roles(names: Sequence[str], options: Options, problems: Problems) -> Roles:
    """Match the asked or usual names with the columns; a name that is not there is told with the nearest one."""
    here = set(names)
    twice = [n for n, count in Counter(names).items() if count > 1]
    if twice:
        problems.refuse(
            f"{problems.path}: column names appear more than once: {quote_names(twice)}. Give each column its own name."
        )
    notes = []

    def find(role: str, asked: str | None) -> str:
        if asked is not None:
            if asked and asked not in here:
                near = nearest(asked, names)
                hint = f" Did you mean '{one_line(near)}'?" if near else ""
                problems.add(
                    f"{problems.path}: there is no column '{one_line(asked)}' for --{role}.{hint} Columns: {quote_names(names)}."
                )
                return ""
            return asked
        found = [n for n in names if n.casefold() in USUAL_NAMES.get(role, ())]
        if len(found) > 1:
            problems.add(
                f"{problems.path}: {quote_names(found)} could each be the {role} column. Pass --{role} NAME."
            )
        if len(found) == 1:
            notes.append(f"{role} column: '{one_line(found[0])}'")
        return found[0] if found else ""

    id, time = find("id", options.id), find("time", options.time)
    if options.kind == "next":
        targets: tuple[str, ...] = tuple(n for n in (options.target or ()) if n in here)
    elif options.target is None:
        one = find("target", None)
        targets = (one,) if one else ()
        if not one:
            near = nearest("target", names)
            hint = f" Did you mean '{one_line(near)}'?" if near else ""
            problems.add(
                f"{problems.path}: there is no column called target, label or class.{hint} Pass --target NAME, or --kind next to predict "
                f"the next step. Columns: {quote_names(names)}."
            )
    else:
        targets = tuple(n for n in (find("target", t) for t in options.target) if n)
    taken = {id, time, *targets}
    if options.features is None:
        features = tuple(n for n in names if n not in taken)
    else:
        features = options.features
        lacking = [n for n in features if n not in here]
        used = taken.union(features)
        unused = [n for n in names if n not in used]
        if lacking:
            alike = {n: nearest(n, unused[:200]) for n in lacking[:CELLS_LISTED]}
            hint = "".join(
                f" Is '{one_line(m)}' what is called '{one_line(n)}'?"
                for n, m in alike.items()
                if m
            )
            problems.add(
                f"{problems.path}: missing columns: {quote_names(lacking)}; extra columns: {quote_names(unused) or 'none'}. Expected the features {quote_names(features)}.{hint}"
            )
        for name in taken.intersection(features):
            role = "the target" if name in targets else "the id" if name == id else "the time"
            problems.add(
                f"{problems.path}: column '{one_line(name)}' is {role} and an input at once. Leave it out of --features."
            )
        if unused:
            notes.append(f"columns left out: {quote_names(unused)}")
    if not features and not problems.groups:
        problems.add(
            f"{problems.path}: no column is left to be a feature. Columns: {quote_names(names)}."
        )
    problems.raise_if_any()
    return Roles(id, time, targets, features, tuple(notes))


def sheet_from_columns(source: LoadedFile, of: Roles, columns: TableColumns, options: Options, problems: Problems, where: Callable[[int, str], str]) -> Sheet:  # fmt: skip
    """The sequences of a long table: rows of one id stand together, and time runs forward in each."""
    lines, rows, notes = columns.lines, len(columns.lines), list(of.notes)
    if of.id:
        numbered: dict[str, int] = {}
        codes = np.fromiter(
            (numbered.setdefault(c, len(numbered)) for c in columns.words[of.id]), np.int64, rows
        )
        starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
        ids = [columns.words[of.id][i] for i in starts]
        met: set[str] = set()
        for start, name in zip(starts, ids, strict=True):
            place = where(int(lines[start]), of.id)
            if not name:
                problems.add(f"{place}: the id is missing. Fill it in.", "blank id")
            elif name in met:
                problems.add(
                    f"{place}: id '{one_line(name)}' appears again after other ids. Sort the rows by id and time.",
                    "again",
                )
            met.add(name)
    else:
        starts, ids = np.zeros(1, np.int64), ["all"]
        notes.append("no id column: the whole file is one sequence")
    lengths = np.diff(np.append(starts, rows))
    if columns.time is not None and not problems.groups:
        inside = np.ones(rows, bool)
        inside[starts] = False
        now, before = columns.time[1:], columns.time[:-1]
        for odd, words in (
            (now < before, "the time goes back: it is before that of the row above. Sort the rows by id and time."),
            (now == before, "the time is that of the row above: it appears twice in this sequence. Remove one of the rows."),
        ):  # fmt: skip
            for row in np.flatnonzero(odd & inside[1:]) + 1:
                problems.add(f"{where(int(lines[row]), of.time)}: {words}", words)
    elif columns.time is None:
        notes.append("no time column: steps are rows, in the order of the file")
    y: np.ndarray | None = None
    if of.targets and options.kind != "next":
        text = {t: columns.words[t] for t in of.targets if t in columns.words}
        if text and options.kind is None:
            refuse_if_kind_unclear(text, options, problems)
        if text:
            if len(of.targets) > 1:
                problems.add(
                    f"{problems.path}: labels come in one column; --target names {len(of.targets)}: {quote_names(of.targets)}."
                )
            y = np.array(text[of.targets[0]], dtype=object)
        else:
            y = np.stack([columns.numbers[t] for t in of.targets], 1)
    recording = Sheet(
        source.path, source.sha256, of.features, np.stack([columns.numbers[f] for f in of.features], 1), lengths, ids, where, lines,
        targets=of.targets, y=y, time=columns.time, stamps=columns.stamps, notes=tuple(notes),
        columns={"id": of.id, "time": of.time} | ({"stamps": "1"} if columns.has_dates else {}),
    )  # fmt: skip
    return refuse_bad_values(recording, options, problems)


def refuse_if_kind_unclear(
    words: dict[str, list[str]], options: Options, problems: Problems
) -> None:
    """Labels that are words make a classification; where numbers are among them only the user knows."""
    for name, cells in words.items():
        different = dict.fromkeys(cells)
        numeric = next((c for c in different if is_number(c, options)), None)
        word = next((c for c in different if c and not is_number(c, options)), None)
        if numeric is not None or word is None:
            mixed = f' and words ("{one_line(word)}")' if word is not None else ""
            what = f'numbers ("{one_line(numeric)}"){mixed}' if numeric is not None else "nothing"
            problems.add(
                f"{problems.path} column '{one_line(name)}': the target holds {what}. Pass --kind classify if they are classes, --kind regress if they are quantities."
            )

"""Long tables: one row for each step of each sequence, in columns id, time, features and targets."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...errors import nearest, said, shown
from .parsing import is_number, numbers, times
from .sheet import CELLS, Options, Problems, Recording, finish, listed
from .source import Source

USUAL = {"id": ("id",), "time": ("time", "timestamp"), "target": ("target", "label", "class")}
BLOCK = 1 << 12  # rows turned into numbers at a time: the text of a block is gone before the next is read


@dataclass(frozen=True)
class Roles:
    """Which column is what; "" where there is none."""

    id: str
    time: str
    targets: tuple[str, ...]
    features: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass
class Columns:
    """The columns that have a role: numbers [N] by name, words [N] by name; lines [N] is where the rows stand."""

    numbers: dict[str, np.ndarray] = field(default_factory=dict)
    words: dict[str, list[str]] = field(default_factory=dict)
    time: np.ndarray | None = None
    stamps: list[str] | None = None
    dated: bool = False
    lines: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


def roles(names: Sequence[str], options: Options, problems: Problems) -> Roles:
    """Match the asked or usual names with the columns; a name that is not there is told with the nearest one."""
    here = set(names)
    twice = [n for n, count in Counter(names).items() if count > 1]
    if twice:
        problems.refuse(
            f"{problems.path}: column names appear more than once: {listed(twice)}. Give each column its own name."
        )
    notes = []

    def find(role: str, asked: str | None) -> str:
        if asked is not None:
            if asked and asked not in here:
                near = nearest(asked, names)
                hint = f" Did you mean '{shown(near)}'?" if near else ""
                problems.add(
                    f"{problems.path}: there is no column '{shown(asked)}' for --{role}.{hint} Columns: {listed(names)}."
                )
                return ""
            return asked
        found = [n for n in names if n.casefold() in USUAL.get(role, ())]
        if len(found) > 1:
            problems.add(f"{problems.path}: {listed(found)} could each be the {role} column. Pass --{role} NAME.")
        if len(found) == 1:
            notes.append(f"{role} column: '{shown(found[0])}'")
        return found[0] if found else ""

    id, time = find("id", options.id), find("time", options.time)
    if options.kind == "next":
        targets: tuple[str, ...] = tuple(n for n in (options.target or ()) if n in here)
    elif options.target is None:
        one = find("target", None)
        targets = (one,) if one else ()
        if not one:
            near = nearest("target", names)
            hint = f" Did you mean '{shown(near)}'?" if near else ""
            problems.add(
                f"{problems.path}: there is no column called target, label or class.{hint} Pass --target NAME, or --kind next to predict "
                f"the next step. Columns: {listed(names)}."
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
            alike = {n: nearest(n, unused[:200]) for n in lacking[:CELLS]}
            hint = "".join(f" Is '{shown(m)}' what is called '{shown(n)}'?" for n, m in alike.items() if m)
            problems.add(
                f"{problems.path}: missing columns: {listed(lacking)}; extra columns: {listed(unused) or 'none'}. Expected the features {listed(features)}.{hint}"
            )
        for name in taken.intersection(features):
            role = "the target" if name in targets else "the id" if name == id else "the time"
            problems.add(
                f"{problems.path}: column '{shown(name)}' is {role} and an input at once. Leave it out of --features."
            )
        if unused:
            notes.append(f"columns left out: {listed(unused)}")
    if not features and not problems.groups:
        problems.add(f"{problems.path}: no column is left to be a feature. Columns: {listed(names)}.")
    problems.stop()
    return Roles(id, time, targets, features, tuple(notes))


def long_table(source: Source, of: Roles, columns: Columns, options: Options, problems: Problems, where: Callable[[int, str], str]) -> Recording:  # fmt: skip
    """The sequences of a long table: rows of one id stand together, and time runs forward in each."""
    lines, rows, notes = columns.lines, len(columns.lines), list(of.notes)
    if of.id:
        numbered: dict[str, int] = {}
        codes = np.fromiter((numbered.setdefault(c, len(numbered)) for c in columns.words[of.id]), np.int64, rows)
        starts = np.flatnonzero(np.concatenate([[True], codes[1:] != codes[:-1]]))
        ids = [columns.words[of.id][i] for i in starts]
        met: set[str] = set()
        for start, name in zip(starts, ids, strict=True):
            place = where(int(lines[start]), of.id)
            if not name:
                problems.add(f"{place}: the id is missing. Fill it in.", "blank id")
            elif name in met:
                problems.add(
                    f"{place}: id '{shown(name)}' appears again after other ids. Sort the rows by id and time.", "again"
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
            _ask(text, options, problems)
        if text:
            if len(of.targets) > 1:
                problems.add(
                    f"{problems.path}: labels come in one column; --target names {len(of.targets)}: {listed(of.targets)}."
                )
            y = np.array(text[of.targets[0]], dtype=object)
        else:
            y = np.stack([columns.numbers[t] for t in of.targets], 1)
    recording = Recording(
        source.path, source.sha256, of.features, np.stack([columns.numbers[f] for f in of.features], 1), lengths, ids, where, lines,
        targets=of.targets, y=y, time=columns.time, stamps=columns.stamps, notes=tuple(notes),
        columns={"id": of.id, "time": of.time} | ({"stamps": "1"} if columns.dated else {}),
    )  # fmt: skip
    return finish(recording, options, problems)


def _ask(words: dict[str, list[str]], options: Options, problems: Problems) -> None:
    """Labels that are words make a classification; where numbers are among them only the user knows."""
    for name, cells in words.items():
        different = dict.fromkeys(cells)
        numeric = next((c for c in different if is_number(c, options)), None)
        word = next((c for c in different if c and not is_number(c, options)), None)
        if numeric is not None or word is None:
            mixed = f' and words ("{shown(word)}")' if word is not None else ""
            what = f'numbers ("{shown(numeric)}"){mixed}' if numeric is not None else "nothing"
            problems.add(
                f"{problems.path} column '{shown(name)}': the target holds {what}. Pass --kind classify if they are classes, --kind regress if they are quantities."
            )


def read_csv(source: Source, options: Options, problems: Problems) -> Recording:
    """A table in UTF-8 text with a separator; every row has as many fields as the header has names."""
    text = source.text()
    sep = options.sep or ("\t" if source.path.lower().endswith(".tsv") else ",")
    blocks = _blocks(text, sep, problems)
    start, rows = next(blocks, (np.zeros(0, np.int64), []))
    if not rows:
        problems.refuse(f"{source.path}: the file holds no text.")
    check_separator(rows, sep, problems)
    if options.header:
        names = [n.strip() for n in rows[0]]
        check_header(names, options, problems)
        start, rows = start[1:], rows[1:]
    else:
        names = [f"c{k + 1}" for k in range(len(rows[0]))]
    if not rows:
        problems.refuse(f"{source.path} has a header but no rows.")
    lengths = {len(r) for r in rows[:100]}
    if options.header and lengths == {len(names) + 1}:
        problems.refuse(
            f"{source.path}: the header has {len(names)} names, rows have {len(names) + 1} fields. Name every column in line 1."
        )
    of = roles(names, options, problems)
    index = {n: k for k, n in enumerate(names)}
    wordy = [n for n in (of.id, *(of.targets if options.kind in (None, "classify") else ())) if n]
    numeric = [*of.features, *(of.targets if options.kind == "regress" else ())]
    parts: dict[str, list[np.ndarray]] = {n: [] for n in numeric}
    columns = Columns(words={n: [] for n in wordy}, stamps=[] if of.time else None)
    same: dict[str, str] = {}  # one string for all cells that read alike
    lines, where = [], lambda line, column: f"{source.path}:{line} column '{shown(column)}'"
    while rows:
        if set(map(len, rows)) != {len(names)}:
            start, rows = _even(start, rows, len(names), problems)
        cells = list(zip(*rows, strict=True)) if rows else [()] * len(names)
        for name in numeric:
            values, wrong = numbers(cells[index[name]], options)
            parts[name].append(values)
            for i, what in wrong:
                problems.add(f"{where(int(start[i]), name)}: {what}", ("cells", name))
        for name in wordy:
            columns.words[name] += [same.setdefault(c, c) for c in map(str.strip, cells[index[name]])]
        if columns.stamps is not None:
            columns.stamps += map(str.strip, cells[index[of.time]])
        lines.append(start)
        start, rows = next(blocks, (start, []))
    columns.lines = np.concatenate(lines)
    columns.numbers = {n: np.concatenate(p) for n, p in parts.items()}
    if columns.stamps is not None:
        columns.time, columns.dated, wrong = times(columns.stamps, options)
        for i, what in wrong:
            problems.add(f"{where(int(columns.lines[i]), of.time)}: {what}", "time")
    if not len(columns.lines):
        problems.stop()
    return long_table(source, of, columns, options, problems, where)


def _blocks(text: str, sep: str, problems: Problems) -> Iterator[tuple[np.ndarray, list[list[str]]]]:
    """(the line each row begins on, rows), some thousands at a time."""
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=sep, strict=True)
    starts: list[int] = []
    rows: list[list[str]] = []
    blank, line = 0, 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as e:
            if "end of data" in str(e) or "field larger" in str(e):
                problems.refuse(f'{problems.path}:{line}: a quote (") opens in this row and is never closed. Close it, or remove it.')  # fmt: skip
            problems.refuse(f'{problems.path}:{line}: the quotes (") of this row do not pair up: {said(e)}. Fix the row, or double the quotes inside a cell.')  # fmt: skip
        if row is None or len(rows) == BLOCK:
            yield np.array(starts, np.int64), rows
            starts, rows = [], []
        if row is None:
            return
        if not row:
            blank = blank or line
        else:
            if blank:
                problems.refuse(f"{problems.path}:{blank}: the line is blank, and rows follow it. Remove it.")
            starts.append(line)
            rows.append(row)
        line = reader.line_num + 1


def check_separator(rows: list[list[str]], sep: str, problems: Problems) -> None:
    """One column in which another separator stands equally often in the first two lines."""
    if len(rows) < 2 or len(rows[0]) > 1:
        return
    first, second = rows[0][0], sep.join(rows[1])
    for other in ";\t|, ":
        if other != sep and 0 < first.count(other) == second.count(other):
            name = {"\t": "tab", " ": "space"}.get(other, other)
            flag = {"\t": "$'\\t'"}.get(other, f"'{other}'")
            problems.refuse(
                f"{problems.path}: there is one column '{shown(first)}'; the file looks {name}-separated. Pass --sep {flag}."
            )


def check_header(names: list[str], options: Options, problems: Problems) -> None:
    """Numbers among the names are data, unless a name that was asked for or is usual stands there too."""
    asked = {options.id, options.time, *(options.target or ()), *(options.features or ())} - {None, ""}
    known = any(n in asked or n.casefold() in sum(USUAL.values(), ()) for n in names)
    digits = [n for n in names if is_number(n, options)]
    if digits and not known:
        problems.refuse(
            f'{problems.path}:1: the first row looks like data ("{shown(digits[0])}"), not names. Pass --no-header (columns are then c1, c2, ...), or add a header.'
        )
    for k, name in enumerate(names):
        if not name:
            problems.add(f"{problems.path}:1: column {k + 1} has no name. Name it, or remove the column.", "names")
    problems.stop()


def _even(start: np.ndarray, rows: list[list[str]], width: int, problems: Problems) -> tuple[np.ndarray, list[list[str]]]:  # fmt: skip
    """The rows of the right width; the others are problems."""
    for line, row in zip(start, rows, strict=True):
        if len(row) != width:
            problems.add(f"{problems.path}:{line}: expected {width} fields, got {len(row)}. Fix the row.", "fields")
    keep = [i for i, row in enumerate(rows) if len(row) == width]
    return start[keep], [rows[i] for i in keep]

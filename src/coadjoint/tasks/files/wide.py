"""Wide tables: one row for each sequence, one column for each time step of its one feature.

id,t0,t1,t2,label
a,0.1,0.4,0.2,up
b,0.3,0.1,,down        a shorter sequence ends in empty cells
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ...errors import ConfigError, DataError, one_line
from .columns import Roles, TableColumns
from .sheet import Options, Problems, Sheet, quote_names, refuse_bad_values
from .source import LoadedFile
from .texts import WordList

FEATURE = "value"  # the one feature of a wide table
WIDE_SUFFIXES = (".csv", ".tsv", ".txt", ".parquet", ".pq", ".arrow", ".feather")
NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)


def wide_options(options: Options, suffix: str, path: str) -> Options:
    """The options that read the columns of a wide table; path, suffix: of the file.

    A file that is not a table is refused, and so are options that contradict a wide table.
    """
    if options.rows == "samples":
        raise ConfigError(
            "--wide reads each row of a table as a sequence; for a network without time each row "
            "is a sample already. Leave it out."
        )
    if options.time:
        raise ConfigError(
            "--time names a column with the time of each row, but in a wide table a row is a whole "
            "sequence. Leave it out."
        )
    if options.categorical:
        raise ConfigError(
            "--categorical names features of words, but the columns of --wide are the steps of one "
            "feature of numbers. Leave it out."
        )
    if suffix not in WIDE_SUFFIXES:
        tables = ", ".join(WIDE_SUFFIXES)
        complaint = options.advise(
            f"--wide reads tables ({tables}), not {suffix} files. Leave it out.",
            f"the network was trained on a wide table; expected one of {tables}.",
        )
        raise DataError(f"{path}: {complaint}")
    features = options.features if options.steps is None else None  # steps are chosen by name
    return replace(options, time="", features=features)


def choose_steps(roles: Roles, options: Options, problems: Problems) -> Roles:
    """The roles of a wide table: its features are the columns of the time steps, in order.

    Columns that are called like no others are left out. Names that suggest several features are
    refused. A file that is read like another has its columns, or more of that kind, or fewer at
    the end.
    """
    names = list(roles.features)
    if options.steps is not None:
        return choose_known_steps(roles, options.steps, problems)
    if options.features is not None:
        return roles
    groups = group_by_form(names)
    if len(groups) > 1 or any(holds_several_features(group) for group in groups):
        firsts = [group[0] for group in groups] if len(groups) > 1 else groups[0][:2]
        problems.refuse(
            f"{problems.path}: columns such as {quote_names(firsts)} look like several features in "
            "one row, and --wide reads the steps of one. Name its columns with --features, or "
            "write a long table, with a row for each step."
        )
    steps = names
    if groups:
        steps = sorted(groups[0], key=numbers_in)
    return with_steps(roles, steps)


def choose_known_steps(roles: Roles, known: Sequence[str], problems: Problems) -> Roles:
    """The roles of a file that is read like another, whose time steps are the columns `known`."""
    names = set(roles.features)
    present = [name for name in known if name in names]
    lacking = [name for name in known[: len(present)] if name not in names]
    if lacking or not present:
        problems.refuse(
            f"{problems.path}: columns {quote_names(lacking or known)} are missing. In a wide "
            "table only the last steps may be: their sequences are shorter."
        )
    forms = {form_of(name) for name in known}
    more: list[str] = []
    if len(forms) == 1 and len(present) == len(known):
        more = [name for name in roles.features if name not in known and form_of(name) in forms]
    return with_steps(roles, [*present, *sorted(more, key=numbers_in)])


def with_steps(roles: Roles, steps: Sequence[str]) -> Roles:
    """The roles with these features, and notes on another order and on columns left out."""
    chosen = set(steps)
    in_file = [name for name in roles.features if name in chosen]
    notes = list(roles.notes)
    if in_file != list(steps):
        notes.append("the columns of the time steps are read in the order of their numbers")
    left_out = [name for name in roles.features if name not in chosen]
    if left_out:
        notes.append(f"columns left out, which are not called like steps: {quote_names(left_out)}")
    return replace(roles, features=tuple(steps), notes=tuple(notes))


def group_by_form(names: Sequence[str]) -> list[list[str]]:
    """Names with numbers in them, by their form; groups of a single name are left out."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if NUMBER.search(name):
            groups.setdefault(form_of(name), []).append(name)
    return [group for group in groups.values() if len(group) > 1]


def form_of(name: str) -> str:
    """A name without its numbers: "t#" for t12, "#-#-#" for 2024-05-01."""
    return NUMBER.sub("#", name)


def numbers_in(name: str) -> list[float]:
    """The numbers in a name."""
    return [float(number) for number in NUMBER.findall(name)]


def holds_several_features(names: Sequence[str]) -> bool:
    """Whether more than one number varies in names of one form, which are not dates."""
    numbers = np.array([numbers_in(name) for name in names])
    varying = int((numbers != numbers[0]).any(0).sum())
    has_words = any(map(str.isalpha, form_of(names[0]).replace("T", "")))
    return varying > 1 and has_words


def counts_up(numbers: Sequence[str]) -> bool:
    """Whether names are 0, 1, 2, ... or 1, 2, 3, ..., as pandas calls columns without names."""
    for start in (0, 1):
        if all(number == str(start + i) for i, number in enumerate(numbers)):
            return True
    return False


def sheet_of_wide(
    source: LoadedFile,
    roles: Roles,
    columns: TableColumns,
    options: Options,
    problems: Problems,
    where: Callable[[int, str], str],
    y: np.ndarray | WordList | None,
) -> Sheet:
    """The sequences of a wide table; each ends with its last value.

    y: the targets of the rows; where: puts a line of the file and a column in words.
    """
    values = columns.all_inputs(roles.features)
    known = ~np.isnan(values)
    # One after the last value of each row; 0 if there is none.
    lengths = values.shape[1] - np.argmax(known[:, ::-1], 1)
    lengths[~known.any(1)] = 0
    for row in np.flatnonzero(lengths == 0):
        place = where(int(columns.lines[row]), roles.features[0])
        problems.add(f"{place}: the row has no value at any step. Remove it.", "no step")
    problems.raise_if_any()
    kept = np.arange(values.shape[1]) < lengths[:, None]
    sequence, step = np.nonzero(kept)

    def where_in_row(i: int, column: str) -> str:
        """The place of value i; the feature is in the column of its step."""
        name = roles.features[step[i]] if column == FEATURE else column
        return where(int(columns.lines[sequence[i]]), name)

    advice = options.advise(
        "Give each its own id; a long table needs no --wide.",
        "Give each its own id, or pass --id '' to leave the column out.",
    )
    sheet = Sheet(
        source.path,
        source.sha256,
        (FEATURE,),
        values[kept][:, None],
        lengths,
        name_rows(roles.id, columns, problems, where, "sequence", advice),
        where_in_row,
        np.arange(len(sequence)),
        targets=roles.targets,
        y=y,
        y_per="sequence",
        notes=roles.notes,
        columns={"id": roles.id, "time": ""},
        layout=describe_steps(roles.features),
        steps=roles.features,
    )
    return refuse_bad_values(sheet, options, problems)


def describe_steps(steps: Sequence[str]) -> str:
    """What the columns of a wide table were taken for."""
    return f"one row for each sequence, its steps in columns {steps[0]} to {steps[-1]}"


def name_rows(
    column: str,
    columns: TableColumns,
    problems: Problems,
    where: Callable[[int, str], str],
    unit: str,
    advice: str,
) -> list[str]:
    """The name of each row: its id, which no other row has, or its number from 0.

    column: the name of the id column, or "". unit: what a row is. advice: what to do about an id
    that appears again.
    """
    if not column:
        return list(map(str, range(len(columns.lines))))
    names = list(columns.words[column])
    seen: set[str] = set()
    for line, name in zip(columns.lines, names, strict=True):
        place = where(int(line), column)
        if not name:
            problems.add(f"{place}: the id is missing. Fill it in.", "blank id")
        elif name in seen:
            problems.add(
                f"{place}: id '{one_line(name)}' appears again, but each row is a {unit} of its "
                f"own. {advice}",
                "again",
            )
        seen.add(name)
    return names

"""The rows of a table in order of their sequences and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...errors import one_line
from .columns import Roles, TableColumns
from .sheet import Problems
from .texts import WordList, take_texts


def sort_rows(roles: Roles, columns: TableColumns, codes: np.ndarray) -> str:
    """Sort the rows of a table with times by id and time, in place; sequences keep their order.

    codes: the ids as numbers, which are sorted too. Returns a note on it, or "" if the rows were in
    order. Rows of one time stay as they are.
    """
    assert columns.time is not None
    if are_in_order(columns.time, codes):
        return ""
    order = np.lexsort((columns.time, codes))
    moved = int((order != np.arange(len(order))).sum())
    codes[:] = codes[order]
    columns.time = columns.time[order]
    columns.lines = columns.lines[order]
    for values in columns.numbers.values():
        values[:] = values[order]
    for name, words in columns.words.items():
        columns.words[name] = take_texts(words, order)
    if columns.stamps is not None:
        columns.stamps = take_texts(columns.stamps, order)
    key = f"time ('{one_line(roles.time)}')"
    if roles.id:
        key = f"id and {key}"
    return f"{moved:,} of {len(order):,} rows were out of order: rows are sorted by {key}"


def are_in_order(time: np.ndarray, codes: np.ndarray) -> bool:
    """Whether rows are sorted by the numbers of their ids, and by time within a sequence."""
    is_later = codes[1:] > codes[:-1]
    is_same = codes[1:] == codes[:-1]
    is_same &= time[1:] >= time[:-1]
    return bool((is_later | is_same).all())


def number_words(words: Sequence[str]) -> np.ndarray:
    """The words as numbers, which are compared faster, in order of their first appearance."""
    if isinstance(words, WordList):
        return words.numbers.copy()
    numbered: dict[str, int] = {}
    numbers = (numbered.setdefault(word, len(numbered)) for word in words)
    return np.fromiter(numbers, np.int64, len(words))


def refuse_repeated_times(
    columns: TableColumns,
    roles: Roles,
    starts: np.ndarray,
    problems: Problems,
    where: Callable[[int, str], str],
) -> None:
    """Report rows of one sequence that have the same time; rows are sorted.

    starts: the first row of each sequence; where: puts a line of the file and a column in words.
    """
    assert columns.time is not None
    inside = np.ones(len(columns.time), bool)  # rows with a row before them in their sequence
    inside[starts] = False
    again = np.flatnonzero((columns.time[1:] == columns.time[:-1]) & inside[1:]) + 1
    advice = "Remove one of the rows."
    if not roles.id:
        advice = "Remove one of the rows, or name the column that tells sequences apart with --id."
    for row in again:
        other = where(int(columns.lines[row - 1]), roles.time).split(" column ")[0]
        problems.add(
            f"{where(int(columns.lines[row]), roles.time)}: the time is the same as in {other}, "
            f"another row of the sequence. {advice}",
            "same time",
        )

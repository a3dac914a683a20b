"""Cells of text as numbers and times.

Whole columns are parsed at once where all cells are well formed, and cell by cell to say which one
is not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ...errors import one_line
from .dates import NO_TIME, is_date, parse_dates
from .sheet import Options

# Texts of a missing number, in any case.
MISSING_TEXTS = frozenset({"", "nan", "na", "n/a", "#n/a", "null", "none", "?"})
TRUTH = {"true": 1.0, "false": 0.0}  # in any case
# Characters of plain numbers, by the decimal separator.
NUMBER_CHARACTERS = {".": b"0123456789+-eE.", ",": b"0123456789+-eE,"}
EXACT_BELOW = 2**53  # beyond it, doubles skip whole numbers
FIX_OR_BLANK = "Fix the value, or leave the cell blank and pass --missing"
FIX = f"{FIX_OR_BLANK} drop|ffill|mask."

# Patterns of cells that look like numbers but are not, and what to do about them.
NEAR_NUMBERS = (
    (r"[+-]?inf(inity)?", "is not finite. Fix the value."),
    (r"[+-]?0x[0-9a-f]+", "is hexadecimal, which is not supported. Write it in decimal."),
    (r"[+-]?\d+(_\d+)+(\.\d+)?", "has underscores. Write the digits alone."),
    (
        r"[+-]?\d{1,3}(,\d{3})+",
        "is ambiguous. Pass --thousands ',' if the comma groups digits, --decimal ',' if it is the "
        "decimal separator.",
    ),
    (r"[+-]?\d{1,3}(,\d{3})+\.\d*", "has grouped digits. Pass --thousands ','."),
    (r"[+-]?\d{1,3}(\.\d{3})+,\d*", "has grouped digits. Pass --decimal ',' --thousands '.'."),
    (r"[+-]?\d*,\d+(e[+-]?\d+)?", "has a decimal comma. Pass --decimal ','."),
    (
        r"[+-]?\d*\.\d+(e[+-]?\d+)?",
        "is not a number with the given decimal and thousands separators. Check --decimal and "
        "--thousands.",
    ),
)


@lru_cache
def number_pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    """The pattern of a finite number with these separators; "" for no thousands separator."""
    point = re.escape(decimal)
    comma = re.escape(thousands)
    digits = rf"(?:\d{{1,3}}(?:{comma}\d{{3}})+|\d+)" if thousands else r"\d+"
    return re.compile(rf"[+-]?(?:{digits}(?:{point}\d*)?|{point}\d+)(?:[eE][+-]?\d+)?", re.ASCII)


def parse_number(cell: str, options: Options) -> float | str:
    """The number in a cell, NaN where it is missing, or a text that says what is wrong.

    True and False are 1 and 0.
    """
    text = cell.strip()
    if text.casefold() in MISSING_TEXTS:
        return math.nan
    if text.casefold() in TRUTH:
        return TRUTH[text.casefold()]
    if not number_pattern(options.decimal, options.thousands).fullmatch(text):
        for pattern, advice in NEAR_NUMBERS:
            if re.fullmatch(pattern, text, re.ASCII | re.IGNORECASE):
                return f'"{one_line(cell)}" {advice}'
        in_a_new_file = f"{FIX_OR_BLANK} {options.ways_to_fill}."
        return f'"{one_line(cell)}" is not a number. {options.advise(FIX, in_a_new_file)}'
    if options.thousands:
        text = text.replace(options.thousands, "")
    value = float(text.replace(options.decimal, "."))
    if math.isinf(value):
        return f'"{one_line(cell)}" is not finite: the largest number is 1.8e308. Fix the value.'
    if abs(value) >= EXACT_BELOW and text.lstrip("+-").isdigit() and int(text) != int(value):
        return f"{explain_inexact(cell)}{or_without_column(options)}."
    return value


def or_without_column(options: Options) -> str:
    """The end of the advice to scale a number; a trained model needs all its columns."""
    return options.advise(", or leave the column out with --features", " in both files")


def explain_inexact(cell: object) -> str:
    """Why a whole number is refused; the caller completes the last sentence and its full stop."""
    return (
        f'"{one_line(cell)}" cannot be represented exactly: whole numbers are exact up to 2^53 = '
        f"{EXACT_BELOW}. Scale it"
    )


def number_in_cell(cell: object, options: Options) -> float | str:
    """The number in a cell of any type, NaN where it is missing, or what is wrong with it."""
    if isinstance(cell, str):
        return parse_number(cell, options)
    if cell is None:
        return math.nan
    if not isinstance(cell, int | float):
        return f'"{one_line(cell)}" is not a number.'
    if math.isinf(cell):
        return f'"{cell}" is not finite. Fix the value.'
    if isinstance(cell, int) and int(float(cell)) != cell:
        return f"{explain_inexact(cell)}{or_without_column(options)}."
    return float(cell)


def is_number(cell: str, options: Options) -> bool:
    """Whether a cell holds a number; a missing one is none, and neither are True and False."""
    value = parse_number(cell, options)
    is_truth = cell.strip().casefold() in TRUTH
    return isinstance(value, float) and not math.isnan(value) and not is_truth


def is_text(cell: str, options: Options) -> bool:
    """Whether a cell holds a word: nothing that is, or looks like, a number or a missing one."""
    value = parse_number(cell, options)
    return isinstance(value, str) and "is not a number." in value


def without_truth(cell: str) -> str:
    """True and False as 1 and 0, any other cell as it is."""
    truth = TRUTH.get(cell.casefold())
    return cell if truth is None else f"{truth:.0f}"


def parse_numbers(
    cells: Sequence[str], options: Options
) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """(values [n] with NaN where missing and 0 where wrong, [(index, what is wrong)]).

    All cells are parsed at once if possible, then with the missing ones set aside, and only then
    one by one, which is slow and finds what is wrong.
    """
    wrong: list[tuple[int, str]] = []
    values = parse_all_at_once(cells, options)
    if values is None:
        # Blank cells, or True and False, are what usually stands in the way.
        stripped = [without_truth(cell.strip()) for cell in cells]
        gaps = [i for i, cell in enumerate(stripped) if cell.casefold() in MISSING_TEXTS]
        for i in gaps:
            stripped[i] = "0"
        values = parse_all_at_once(stripped, options)
        if values is not None:
            values[gaps] = math.nan
            wrong = find_mixed_truth(cells, values)
    suspects: Sequence[int] | np.ndarray = range(len(cells))
    if values is None:
        values = np.empty(len(cells))
    else:
        suspects = np.flatnonzero(np.abs(values) >= EXACT_BELOW)  # perhaps inexact, or infinite
    for i in suspects:
        value = parse_number(cells[i], options)
        if isinstance(value, str):
            wrong.append((int(i), value))
            value = 0.0
        values[i] = value
    return values, wrong


def find_mixed_truth(cells: Sequence[str], values: np.ndarray) -> list[tuple[int, str]]:
    """[(index, what is wrong)] of the first True or False in a column with other numbers.

    values: those of the cells.
    """
    if np.isin(values, (0, 1)).sum() + np.isnan(values).sum() == len(values):
        return []
    for i, cell in enumerate(cells):
        if cell.strip().casefold() in TRUTH:
            return [(i, f'"{one_line(cell)}" is a word in a column of numbers. Write 1 and 0.')]
    return []


def parse_all_at_once(cells: Sequence[str], options: Options) -> np.ndarray | None:
    """The numbers of all cells, if they are plain: digits, signs, the decimal separator, exponents.

    None otherwise.
    """
    if options.thousands:
        return None
    text = "".join(cells).encode("utf-8", "replace")
    other_characters = text.translate(None, delete=NUMBER_CHARACTERS[options.decimal])
    if other_characters:
        return None
    if options.decimal != ".":
        cells = [cell.replace(",", ".") for cell in cells]
    try:
        return np.array(cells, dtype=np.float64)
    except ValueError:  # blank cells, or signs and points in the wrong places
        return None


def parse_whole(cells: Sequence[str]) -> np.ndarray | None:
    """The whole numbers in cells of digits and signs alone; None otherwise.

    As int64 they are exact beyond 2^53.
    """
    if "".join(cells).encode("utf-8", "replace").translate(None, b"0123456789+-"):
        return None
    try:
        return np.array(cells, dtype=np.int64)
    except (ValueError, OverflowError):
        return None


class Times(NamedTuple):
    """A column of times.

    time       [n] numbers, or microseconds since 1970 if they are dates, which `has_dates` says
    order      of day and month, if dates are written in either order: see `dates.Dates`
    wrong      [(index, what is wrong)]
    """

    time: np.ndarray
    has_dates: bool
    order: str
    wrong: list[tuple[int, str]]


def parse_times(cells: Sequence[str], options: Options) -> Times:
    """The times in a column: numbers, or dates; the first cell that is not blank decides."""
    first = next((cell for cell in cells if cell.strip()), "")
    if is_date(first):
        dates = parse_dates(cells, options.dates)
        return Times(dates.time, True, dates.order, dates.wrong)
    whole = parse_whole(cells)
    if whole is not None:
        return Times(whole, False, "", [])
    values, wrong = parse_numbers(cells, options)
    advice = (
        "is not a time: expected a number, or a date such as 2024-05-31, 2024-05-31 12:30 (ISO "
        "8601), 31.05.2024 or 05/31/2024."
    )
    complaints = dict(wrong)
    for i, text in wrong:
        if "is not a number" in text:
            complaints[i] = f'"{one_line(cells[i])}" {advice}'
    for gap in np.flatnonzero(np.isnan(values)):
        complaints.setdefault(int(gap), NO_TIME)
    return Times(values, False, "", sorted(complaints.items()))

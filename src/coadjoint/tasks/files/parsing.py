"""Cells of text as numbers and times.

Whole columns are parsed at once where all cells are well formed, and cell by cell to say which one
is not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ...errors import one_line
from .sheet import Options

# Texts of a missing number, in any case.
MISSING_TEXTS = frozenset({"", "nan", "na", "n/a", "#n/a", "null", "none", "?"})
# Characters of plain numbers, by the decimal separator.
NUMBER_CHARACTERS = {".": b"0123456789+-eE.", ",": b"0123456789+-eE,"}
EXACT_BELOW = 2**53  # beyond it, doubles skip whole numbers
FIX_OR_BLANK = "Fix the value, or leave the cell blank and pass --missing"
FIX = f"{FIX_OR_BLANK} drop|ffill|mask."
NO_TIME = "the time is missing. Fill it in."

# Patterns of cells that look like numbers but are not, and what to do about them.
NEAR_NUMBERS = (
    (r"[+-]?inf(inity)?", "is not finite. Fix the value."),
    (r"[+-]?0x[0-9a-f]+", "is hexadecimal, which is not supported. Write it in decimal."),
    (r"[+-]?\d+(_\d+)+(\.\d+)?", "has underscores. Write the digits alone."),
    (r"true|false", "is a word, not a number. Write 1 and 0."),
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
    """The number in a cell, NaN where it is missing, or a text that says what is wrong."""
    text = cell.strip()
    if text.casefold() in MISSING_TEXTS:
        return math.nan
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
    """Whether a cell holds a number; a missing one is none."""
    value = parse_number(cell, options)
    return isinstance(value, float) and not math.isnan(value)


def parse_numbers(
    cells: Sequence[str], options: Options
) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """(values [n] with NaN where missing and 0 where wrong, [(index, what is wrong)]).

    All cells are parsed at once if possible, then with the missing ones set aside, and only then
    one by one, which is slow and finds what is wrong.
    """
    values = parse_all_at_once(cells, options)
    if values is None:
        # Blank cells are what usually stands in the way.
        stripped = list(map(str.strip, cells))
        gaps = [i for i, cell in enumerate(stripped) if cell.casefold() in MISSING_TEXTS]
        for i in gaps:
            stripped[i] = "0"
        values = parse_all_at_once(stripped, options)
        if values is not None:
            values[gaps] = math.nan
    suspects: Sequence[int] | np.ndarray = range(len(cells))
    if values is None:
        values = np.empty(len(cells))
    else:
        suspects = np.flatnonzero(np.abs(values) >= EXACT_BELOW)  # perhaps inexact, or infinite
    wrong = []
    for i in suspects:
        value = parse_number(cells[i], options)
        if isinstance(value, str):
            wrong.append((int(i), value))
            value = 0.0
        values[i] = value
    return values, wrong


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


STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?))?\s*(Z|[+-]\d\d:?\d\d)?",
    re.ASCII | re.IGNORECASE,
)


def parse_times(
    cells: Sequence[str], options: Options
) -> tuple[np.ndarray, bool, list[tuple[int, str]]]:
    """(times [n], whether they are dates, [(index, what is wrong)]).

    Times are numbers, or ISO 8601 stamps, which become microseconds since 1970; the first cell that
    is not blank decides.
    """
    first = next((cell for cell in cells if cell.strip()), "")
    if STAMP.fullmatch(first.strip()):
        return parse_stamps(cells)
    try:
        # Cells of digits and signs alone are whole numbers: as int64 they are exact beyond 2^53.
        if not "".join(cells).encode("utf-8", "replace").translate(None, b"0123456789+-"):
            return np.array(cells, dtype=np.int64), False, []
    except (ValueError, OverflowError):
        pass
    values, wrong = parse_numbers(cells, options)
    advice = "is not a time: expected a number or an ISO 8601 stamp such as 2024-05-01T12:30:00Z."
    complaints = dict(wrong)
    for i, text in wrong:
        if "is not a number" in text:
            complaints[i] = f'"{one_line(cells[i])}" {advice}'
    for gap in np.flatnonzero(np.isnan(values)):
        complaints.setdefault(int(gap), NO_TIME)
    return values, False, sorted(complaints.items())


def parse_stamps(cells: Sequence[str]) -> tuple[np.ndarray, bool, list[tuple[int, str]]]:
    """(times [n] in microseconds since 1970, True, [(index, what is wrong)]) of ISO 8601 stamps.

    All must have the same time zone, or none.
    """
    plain = ["1970-01-01"] * len(cells)  # without time zones, which numpy does not read
    shift = np.zeros(len(cells), np.int64)  # what is added to come to UTC, in microseconds
    first_zone: str | None = None
    wrong: list[tuple[int, str]] = []
    for i, cell in enumerate(cells):
        match = STAMP.fullmatch(cell.strip())
        if not match:
            not_a_stamp = (
                f'"{one_line(cell)}" is not an ISO 8601 time like those before. Fix the value.'
            )
            wrong.append((i, not_a_stamp if cell.strip() else NO_TIME))
            continue
        day, clock, zone = match.groups()
        # hh:mm:ss.ffffff has 15 characters: digits below a microsecond are cut off.
        plain[i] = f"{day}T{clock[:15]}" if clock else day
        zone = normalise_zone(zone)
        if first_zone is None:
            first_zone = zone
        if zone != first_zone:
            wrong.append(
                (
                    i,
                    f'mixed time zones: "{one_line(cell)}" has {quote_zone(zone)} and the first '
                    f"row has {quote_zone(first_zone)}. Write all times in UTC.",
                )
            )
        shift[i] = -zone_offset(zone)
    try:
        values = np.array(plain, dtype="datetime64[us]").astype(np.int64)
    except ValueError:  # a date such as February 30: look for it one by one
        values = np.zeros(len(cells), np.int64)
        for i, text in enumerate(plain):
            try:
                values[i] = np.datetime64(text, "us").astype(np.int64)
            except ValueError:
                impossible = f'"{one_line(cells[i])}" is not a valid date and time. Fix the value.'
                wrong.append((i, impossible))
    return values + shift, True, sorted(wrong)


def normalise_zone(zone: str | None) -> str:
    """A time zone such as Z, +01:00 or None as +hhmm or -hhmm; "" if there is none."""
    plain = (zone or "").upper().replace(":", "")
    return "+0000" if plain in ("Z", "-0000") else plain


def quote_zone(zone: str) -> str:
    """A time zone of `normalise_zone` for a message: in quotes, or the word none for ""."""
    return f"'{zone}'" if zone else "none"


def zone_offset(zone: str) -> int:
    """The microseconds that a time zone, "+hhmm" or "-hhmm", is ahead of UTC; 0 for "" (none)."""
    if not zone:
        return 0
    minutes = int(zone[1:3]) * 60 + int(zone[3:5])
    return 60_000_000 * (minutes if zone[0] == "+" else -minutes)

"""Cells of text as numbers and times: whole columns at once where all is well, cell by cell to name what is not."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...errors import one_line
from .sheet import Options

MISSING_TEXTS = frozenset(
    {"", "nan", "na", "n/a", "#n/a", "null", "none", "?"}
)  # what stands for a missing number, in any case
NUMBER_CHARACTERS = {".": b"0123456789+-eE.", ",": b"0123456789+-eE,"}
EXACT_BELOW = 2**53  # beyond it, doubles skip integers
FIX = "Fix the value, or leave the cell blank and pass --missing drop|ffill|mask."

NEAR_NUMBERS = tuple(  # cells that are no plain number, and what to do about them
    (re.compile(pattern, re.ASCII | re.IGNORECASE), words)
    for pattern, words in (
        (r"[+-]?inf(inity)?", "is not finite. Fix the value."),
        (r"[+-]?0x[0-9a-f]+", "is hexadecimal, not a number here. Write it in decimal."),
        (r"[+-]?\d+(_\d+)+(\.\d+)?", "has underscores, so it is not a number here. Write the digits alone."),
        (r"true|false", "is a word, not a number. Write 1 and 0."),
        (
            r"[+-]?\d{1,3}(,\d{3})+",
            "is not a number with a decimal point. Pass --thousands ',' if the comma groups digits, --decimal ',' if it is the decimal sign.",
        ),
        (r"[+-]?\d{1,3}(,\d{3})+\.\d*", "is not a plain number. Pass --thousands ','."),
        (r"[+-]?\d{1,3}(\.\d{3})+,\d*", "is not a plain number. Pass --decimal ',' --thousands '.'."),
        (r"[+-]?\d*,\d+(e[+-]?\d+)?", "is not a number with a decimal point. Pass --decimal ','."),
        (r"[+-]?\d*\.\d+(e[+-]?\d+)?", "is not a number with the decimal sign and grouping that were asked for. Check --decimal and --thousands."),
    )
)  # fmt: skip


@lru_cache
def number_pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    d, t = re.escape(decimal), re.escape(thousands)
    whole = rf"(?:\d{{1,3}}(?:{t}\d{{3}})+|\d+)" if thousands else r"\d+"
    return re.compile(rf"[+-]?(?:{whole}(?:{d}\d*)?|{d}\d+)(?:[eE][+-]?\d+)?", re.ASCII)


def parse_number(cell: str, options: Options) -> float | str:
    """The number in a cell, NaN where it is missing, or the words that say what is wrong."""
    text = cell.strip()
    if text.casefold() in MISSING_TEXTS:
        return math.nan
    if not number_pattern(options.decimal, options.thousands).fullmatch(text):
        for pattern, words in NEAR_NUMBERS:
            if pattern.fullmatch(text):
                return f'"{one_line(cell)}" {words}'
        return f'"{one_line(cell)}" is not a number. {FIX}'
    text = text.replace(options.thousands, "") if options.thousands else text
    value = float(text.replace(options.decimal, "."))
    if math.isinf(value):
        return f'"{one_line(cell)}" is not finite: the largest number is 1.8e308. Fix the value.'
    if abs(value) >= EXACT_BELOW and text.lstrip("+-").isdigit() and int(text) != int(value):
        return f"{explain_inexact(cell)}, or leave the column out with --features."
    return value


def explain_inexact(cell: object) -> str:
    return f'"{one_line(cell)}" cannot be represented exactly: whole numbers are exact up to 2^53 = {EXACT_BELOW}. Scale it'


def number_in_cell(cell: Any, options: Options) -> float | str:
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
        return f"{explain_inexact(cell)}, or leave the column out with --features."
    return float(cell)


def is_number(cell: str, options: Options) -> bool:
    value = parse_number(cell, options)
    return isinstance(value, float) and not math.isnan(value)


def parse_numbers(
    cells: Sequence[str], options: Options
) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """(values [n] with NaN where missing and 0 where wrong, [(index, what is wrong)])."""
    values = parse_all_at_once(cells, options)
    if values is None:
        stripped = [c.strip() for c in cells]
        gaps = [i for i, c in enumerate(stripped) if c.casefold() in MISSING_TEXTS]
        for i in gaps:
            stripped[i] = "0"
        values = parse_all_at_once(stripped, options)
        if values is not None:
            values[gaps] = math.nan
    suspects: Sequence[int] | np.ndarray = range(len(cells))
    if values is None:
        values = np.empty(len(cells))
    else:
        suspects = np.flatnonzero(np.abs(values) >= EXACT_BELOW)
    wrong = []
    for i in suspects:
        value = parse_number(cells[i], options)
        values[i] = 0.0 if isinstance(value, str) else value
        if isinstance(value, str):
            wrong.append((int(i), value))
    return values, wrong


def parse_all_at_once(cells: Sequence[str], options: Options) -> np.ndarray | None:
    """All cells at once if they are made of digits, signs, the decimal sign and exponents only, else None."""
    if options.thousands or "".join(cells).encode("utf-8", "replace").translate(
        None, NUMBER_CHARACTERS[options.decimal]
    ):
        return None
    try:
        return np.array(
            cells if options.decimal == "." else [c.replace(",", ".") for c in cells],
            dtype=np.float64,
        )
    except ValueError:  # blank cells, or signs and points in the wrong places
        return None


STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)(?:[T ](\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?))?\s*(Z|[+-]\d\d:?\d\d)?",
    re.ASCII | re.IGNORECASE,
)


def parse_times(
    cells: Sequence[str], options: Options
) -> tuple[np.ndarray, bool, list[tuple[int, str]]]:
    """(times [n], whether they are stamps, [(index, what is wrong)]): numbers, or microseconds of ISO 8601 stamps."""
    first = next((c for c in cells if c.strip()), "")
    if not STAMP.fullmatch(first.strip()):
        try:
            if not "".join(cells).encode("utf-8", "replace").translate(None, b"0123456789+-"):
                return np.array(cells, dtype=np.int64), False, []
        except (ValueError, OverflowError):
            pass
        values, wrong = parse_numbers(cells, options)
        advice = (
            "is not a time: expected a number or an ISO 8601 stamp such as 2024-05-01T12:30:00Z."
        )
        said = {
            i: f'"{one_line(cells[i])}" {advice}' if "is not a number" in text else text
            for i, text in wrong
        }
        said |= {
            int(i): "the time is missing. Fill it in."
            for i in np.flatnonzero(np.isnan(values))
            if i not in said
        }
        return values, False, sorted(said.items())
    return parse_stamps(cells)


def parse_stamps(cells: Sequence[str]) -> tuple[np.ndarray, bool, list[tuple[int, str]]]:
    plain, shift = ["1970-01-01"] * len(cells), np.zeros(len(cells), np.int64)
    usual: str | None = None
    wrong: list[tuple[int, str]] = []
    for i, cell in enumerate(cells):
        found = STAMP.fullmatch(cell.strip())
        if not found:
            missing = not cell.strip()
            wrong.append((i, "the time is missing. Fill it in." if missing else f'"{one_line(cell)}" is not an ISO 8601 time as in the rows before. Fix the value.'))  # fmt: skip
            continue
        day, clock, zone = found.groups()
        plain[i] = f"{day}T{clock[:15]}" if clock else day
        zone = (zone or "").upper().replace(":", "")
        zone = "+0000" if zone in ("Z", "-0000") else zone
        usual = zone if usual is None else usual
        if zone != usual:
            words = lambda z: f"'{z}'" if z else "none"
            wrong.append((i, f'mixed time zones: "{one_line(cell)}" has {words(zone)} and the first row has {words(usual)}. Write all times in UTC.'))  # fmt: skip
        if zone:
            minutes = int(zone[1:3]) * 60 + int(zone[3:5])
            shift[i] = -60_000_000 * (minutes if zone[0] == "+" else -minutes)
    try:
        values = np.array(plain, dtype="datetime64[us]").astype(np.int64)
    except ValueError:
        values = np.zeros(len(cells), np.int64)
        for i, text in enumerate(plain):
            try:
                values[i] = np.datetime64(text, "us").astype(np.int64)
            except ValueError:
                wrong.append(
                    (
                        i,
                        f'"{one_line(cells[i])}" is not a date and time that exists. Fix the value.',
                    )
                )
    return values + shift, True, sorted(wrong)

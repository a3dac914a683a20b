"""Dates and times as people write them, as microseconds since 1970.

2024-01-31, 2024/01/31, 2024.01.31      year first; also 20240131T1200 with a time of day
2024-01, 2024Q1, Jan 2024               months and quarters, by their first day
31.01.2024, 01/31/2024, 31-01-2024      day or month first: whichever the whole column allows
31 Jan 2024, Jan 31, 2024               English names of months
... 12:30, T12:30:05.25, 1:30 PM        with a time of day
... Z, +01:00, UTC                      with a time zone
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...errors import one_line

ORDERS = ("day-first", "month-first")
NO_TIME = "the time is missing. Fill it in."
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTH = (
    r"(?P<word>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|"
    r"sept?(?:ember)?|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
CLOCK = (
    r"(?:(?:T|,?\s+)(?P<hour>\d{1,2}):(?P<minute>\d\d)(?::(?P<second>\d\d)(?:\.(?P<part>\d{1,9}))?)?"
    r"(?:\s*(?P<half>[ap])\.?m\.?)?)?(?:\s*(?P<zone>Z|UTC|GMT|[+-]\d\d(?::?\d\d)?))?"
)
# The forms of a date; those with a clock may be followed by a time of day and a zone.
FORMS = (
    r"(?P<year>\d{4})(?P<sep>[-/.])(?P<month>\d{1,2})(?P=sep)(?P<day>\d{1,2})" + CLOCK,
    r"(?P<first>\d{1,2})(?P<sep>[-/.])(?P<second_number>\d{1,2})(?P=sep)(?P<year>\d{4})" + CLOCK,
    rf"(?P<day>\d{{1,2}})[ -]{MONTH}[ -](?P<year>\d{{4}})" + CLOCK,
    rf"{MONTH}[ -](?P<day>\d{{1,2}}),?[ -](?P<year>\d{{4}})" + CLOCK,
    r"(?P<year>\d{4})[-/](?P<month>\d{1,2})",
    rf"{MONTH}[ -](?P<year>\d{{4}})",
    r"(?P<year>\d{4})[- ]?Q(?P<quarter>[1-4])",
    r"(?P<year>\d{4})(?P<month>\d\d)(?P<day>\d\d)T(?P<hour>\d\d):?(?P<minute>\d\d)"
    r"(?::?(?P<second>\d\d)(?:\.(?P<part>\d{1,9}))?)?(?P<zone>Z|[+-]\d\d(?::?\d\d)?)?",
)
PATTERNS = tuple(re.compile(form, re.ASCII | re.IGNORECASE) for form in FORMS)


class Dates(NamedTuple):
    """A column of dates.

    time   [n] microseconds since 1970, in UTC where the cells have a time zone
    order  "day-first" or "month-first" if the column is written in either, else ""
    wrong  [(index, what is wrong)]
    """

    time: np.ndarray
    order: str
    wrong: list[tuple[int, str]]


def is_date(cell: str) -> bool:
    """Whether a cell holds a date in any of the forms; it need not be a day that exists."""
    text = cell.strip()
    return any(pattern.fullmatch(text) for pattern in PATTERNS)


def parse_dates(cells: Sequence[str], order: str | None = None) -> Dates:
    """Read a column of dates, all written in the form of the first that is not blank.

    Where day and month are both numbers and the year is last, the column decides which is first: a
    number above 12 is a day. A column without such a number is refused, unless `order` decides.
    All cells must have a time zone, or none.
    """
    first = next((cell for cell in map(str.strip, cells) if cell), "")
    pattern = next((p for p in PATTERNS if p.fullmatch(first)), PATTERNS[0])
    matches: list[re.Match[str] | None] = []
    wrong: list[tuple[int, str]] = []
    for i, cell in enumerate(cells):
        match = pattern.fullmatch(cell.strip())
        matches.append(match)
        if match is None:
            wrong.append((i, explain_unread(cell, first)))
    if pattern is PATTERNS[1]:
        order, complaints = choose_order(matches, order)
        wrong += complaints
        if complaints:
            return Dates(np.zeros(len(cells), np.int64), "", sorted(wrong))
    else:
        order = ""
    plain = ["1970-01-01"] * len(cells)  # without time zones, which numpy does not read
    shift = np.zeros(len(cells), np.int64)  # what is added to come to UTC, in microseconds
    has_zone: bool | None = None  # as the first date has
    for i, match in enumerate(matches):
        if match is None:
            continue
        found = match.groupdict()
        plain[i] = iso_text(found, order)
        zone = found.get("zone")
        if has_zone is None:
            has_zone = zone is not None
        if (zone is not None) != has_zone:
            which = "a time zone, and the first row has none"
            if has_zone:
                which = "no time zone, and the first row has one"
            wrong.append(
                (i, f'mixed time zones: "{one_line(cells[i])}" has {which}. Write all in UTC.')
            )
        shift[i] = -zone_offset(zone)
    values, impossible = to_microseconds(plain, cells)
    return Dates(values + shift, order, sorted(wrong + impossible))


def explain_unread(cell: str, first: str) -> str:
    """Why a cell cannot be read as a date like the first one."""
    if not cell.strip():
        return NO_TIME
    return f'"{one_line(cell)}" is not written like "{one_line(first)}" before it. Fix the value.'


def choose_order(
    matches: Iterable[re.Match[str] | None], asked: str | None
) -> tuple[str, list[tuple[int, str]]]:
    """("day-first" or "month-first", what is wrong) of dates such as 31.01.2024 or 01/31/2024.

    There is a complaint if the order cannot be known. asked: the order that the user named.
    """
    days_at: dict[str, tuple[int, str]] = {}  # a date that shows this order, and its index
    example = (0, "")
    for i, match in enumerate(matches):
        if match is None:
            continue
        example = example if example[1] else (i, match.group())
        if int(match["first"]) > 12:
            days_at.setdefault("day-first", (i, match.group()))
        if int(match["second_number"]) > 12:
            days_at.setdefault("month-first", (i, match.group()))
    shown = [order for order in days_at if order != asked]
    if len(days_at) == 2 or (asked and shown):
        i, text = days_at[shown[-1]]
        what = f"the column is read {asked}"
        if not asked:
            what = f'"{one_line(days_at[shown[0]][1])}" is {shown[0]}'
        return asked or shown[0], [(i, f'"{one_line(text)}" is {shown[-1]}, but {what}.')]
    order = asked or next(iter(days_at), "")
    if not order:
        i, text = example
        complaint = (
            f'"{one_line(text)}": is the day first or the month? No date of the column tells. '
            "Pass --dates day-first or --dates month-first."
        )
        return "", [(i, complaint)]
    return order, []


def iso_text(found: dict[str, str | None], order: str) -> str:
    """A date and time of day as numpy reads them: 2024-01-31T12:30:05.250000.

    found: the groups of a form; order: of day and month, where both are numbers with the year last.
    """
    year = found["year"]
    day = int(found.get("day") or 1)
    if found.get("word"):
        month = MONTHS.index(str(found["word"])[:3].lower()) + 1
    elif found.get("quarter"):
        month = 3 * int(found["quarter"] or 1) - 2
    elif order == "day-first":
        day = int(found["first"] or 0)
        month = int(found["second_number"] or 0)
    elif order == "month-first":
        day = int(found["second_number"] or 0)
        month = int(found["first"] or 0)
    else:
        month = int(found["month"] or 0)
    date = f"{year}-{month:02d}-{day:02d}"
    if not found.get("hour"):
        return date
    hour = int(found["hour"] or 0)
    half = (found.get("half") or "").lower()
    if half and not 1 <= hour <= 12:
        hour = 99  # no such time, which numpy refuses
    elif half:
        hour = hour % 12 + 12 * (half == "p")
    # Digits below a microsecond are cut off.
    part = (found.get("part") or "0")[:6]
    return f"{date}T{hour:02d}:{found['minute']}:{found.get('second') or '00'}.{part}"


def to_microseconds(
    plain: Sequence[str], cells: Sequence[str]
) -> tuple[np.ndarray, list[tuple[int, str]]]:
    """(microseconds since 1970, [(index, what is wrong)]) of dates in the form of `iso_text`.

    cells: the dates as they are written, for messages.
    """
    try:
        return np.array(plain, dtype="datetime64[us]").astype(np.int64), []
    except ValueError:  # a date such as February 30: look for it one by one
        pass
    values = np.zeros(len(plain), np.int64)
    wrong = []
    for i, text in enumerate(plain):
        try:
            values[i] = np.datetime64(text, "us").astype(np.int64)
        except ValueError:
            wrong.append(
                (i, f'"{one_line(cells[i])}" is not a valid date and time. Fix the value.')
            )
    return values, wrong


def zone_offset(zone: str | None) -> int:
    """The microseconds that a time zone, such as +01:00, -0500 or Z, is ahead of UTC."""
    if not zone or zone[0] not in "+-":
        return 0
    digits = zone[1:].replace(":", "").ljust(4, "0")
    minutes = int(digits[:2]) * 60 + int(digits[2:])
    return 60_000_000 * (minutes if zone[0] == "+" else -minutes)


def months_of(time: np.ndarray) -> np.ndarray | None:
    """The months since 1970 of dates that all lie on the same day of the month; None of others.

    Days counted from the end of the month will do too. So months, quarters and years are even steps
    although months have unequal lengths. time: [n] microseconds since 1970.
    """
    month = time.astype("datetime64[us]").astype("datetime64[M]")
    starts = month.astype("datetime64[us]").astype(np.int64)
    ends = (month + 1).astype("datetime64[us]").astype(np.int64)
    if (time - starts == time[0] - starts[0]).all() or (time - ends == time[0] - ends[0]).all():
        months: np.ndarray = month.astype(np.int64)
        return months
    return None

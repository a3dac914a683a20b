"""The times after the end of a series, by its own step and in its own form."""

from __future__ import annotations

from datetime import datetime

import numpy as np

from ..tasks.files.dates import months_of
from ..tasks.files.sheet import Sheet

# The forms of dates that are written again; others are written as 2024-01-31 12:30:00.
FORMS = (
    "%Y-%m-%d",
    "%Y/%m/%d",
    "%Y.%m.%d",
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%d-%m-%Y",
    "%d %b %Y",
    "%d %B %Y",
    "%b %d, %Y",
    "%B %d, %Y",
    "%b %Y",
    "%B %Y",
    "%Y-%m",
    "%Y/%m",
)
CLOCKS = ("", " %H:%M", " %H:%M:%S", "T%H:%M", "T%H:%M:%S", "T%H:%M:%SZ", " %I:%M %p")
MONTHS_OF_QUARTER = 3


def future_times(sheet: Sheet, sequence: int, steps: int) -> list[str] | None:
    """Return the times of the next `steps` rows of a sequence; None if the file has no times.

    Numbers go on by the median step, dates too, unless all lie on the same day of the month: those
    go on by months. A sequence of one row has no step of its own: the file's is used.
    """
    if sheet.time is None or sheet.stamps is None:
        return None
    start = int(sheet.starts[sequence])
    stop = start + int(sheet.lengths[sequence])
    time = sheet.time[start:stop]
    last = sheet.stamps[stop - 1]
    if not sheet.has_dates:
        step = usual_step(time, sheet.time)
        return write_numbers(last, time[-1], step, steps)
    months = months_of(time)
    if months is None or len(time) == 1 or np.median(np.diff(months)) < 1:
        step = usual_step(time, sheet.time)
        numbers = time[-1] + np.rint(step * np.arange(1, steps + 1)).astype(np.int64)
    else:
        step = float(np.median(np.diff(months)))
        numbers = add_months(time, np.rint(step * np.arange(1, steps + 1)).astype(np.int64))
    # A time zone moves all times alike, as it is written in the last one.
    form = form_of(last, time[-1], sheet.columns.get("dates", ""))
    return [write_date(number, form) for number in numbers]


def usual_step(time: np.ndarray, every_time: np.ndarray) -> float:
    """Return the median step of a sequence; that of the whole file if it has one row."""
    steps = np.diff(time if len(time) > 1 else np.sort(every_time))
    return float(np.median(steps)) if len(steps) else 1.0


def write_numbers(last: str, value: float, step: float, steps: int) -> list[str]:
    """Return value + step, value + 2 step, ... with as many decimals as the last stamp has."""
    is_whole = float(value).is_integer() and float(step).is_integer()
    numbers = [value + step * (h + 1) for h in range(steps)]
    if is_whole and "." not in last:
        return [str(int(number)) for number in numbers]
    return [str(float(f"{number:.12g}")) for number in numbers]


def add_months(time: np.ndarray, months: np.ndarray) -> np.ndarray:
    """Return the last of `time` moved by months, on its day of the month or as far from its end."""
    month = time.astype("datetime64[us]").astype("datetime64[M]")
    starts = month.astype("datetime64[us]").astype(np.int64)
    later = month[-1] + months
    if (time - starts == time[0] - starts[0]).all():
        moved = later.astype("datetime64[us]").astype(np.int64) + (time[-1] - starts[-1])
    else:
        end = (month[-1] + 1).astype("datetime64[us]").astype(np.int64)
        moved = (later + 1).astype("datetime64[us]").astype(np.int64) + (time[-1] - end)
    return np.asarray(moved)


def as_date(number: int) -> datetime:
    """Return microseconds since 1970 as a date."""
    date: datetime = np.datetime64(int(number), "us").astype(datetime)
    return date


def form_of(stamp: str, number: int, order: str) -> str:
    """Return the form in which a date is written like `stamp`.

    order: "day-first" or "month-first", where both would fit.
    """
    date = as_date(number)
    if stamp.upper().replace("-", "") == f"{date.year}Q{quarter_of(date)}":
        return "quarter"
    forms = list(FORMS)
    if order == "month-first":
        forms = [form.replace("%d/%m", "%m/%d").replace("%d-%m-", "%m-%d-") for form in forms]
    for form in forms:
        for clock in CLOCKS:
            if date.strftime(form + clock) == stamp:
                return form + clock
    return "%Y-%m-%d %H:%M:%S"


def quarter_of(date: datetime) -> int:
    """Return the quarter of a date, from 1."""
    return (date.month - 1) // MONTHS_OF_QUARTER + 1


def write_date(number: int, form: str) -> str:
    """Return microseconds since 1970 in a form."""
    date = as_date(number)
    if form == "quarter":
        return f"{date.year}Q{quarter_of(date)}"
    return date.strftime(form)

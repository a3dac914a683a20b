"""The season of series: by the step of their dates, else by their autocorrelation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .files.dates import months_of
from .files.sheet import Sheet

MINUTE = 60e6  # microseconds
# Seasons by the step of dates in minutes: hours in a day, days in a week, ...
SEASONS = {1: 60, 5: 288, 10: 144, 15: 96, 20: 72, 30: 48, 60: 24, 1440: 7, 10080: 52}
SEASONS_IN_MONTHS = {1: 12, 3: 4}
FEWEST_SEASONS = 2  # that a series must have
CLEAR = 0.3  # least autocorrelation at the season
MOST_SEASON = 400
# Series whose earlier rows are inputs by default: see docs/forecasting.md.
FEWEST_ROWS = 40
MOST_COLUMNS = 3
MOST_SHORT_ROWS = 320  # of a series that needs no season for it
TRAINED_SHARE = 0.8  # of the rows, by which the season is guessed
SEASONS_TO_LEARN = 3  # in these rows


class Season(NamedTuple):
    """The rows of a season, and how they are known; 1 if there is none."""

    rows: int
    reason: str


def guess_season(sheet: Sheet, series: Sequence[np.ndarray]) -> Season:
    """Return the season of series [T] of a sheet: by the step of dates, else by autocorrelation."""
    longest = max(series, key=len)
    by_dates = season_of_dates(sheet)
    if 1 < by_dates <= len(longest) // FEWEST_SEASONS:
        return Season(by_dates, f"season {by_dates}, by the step of the dates")
    found = season_of_values(longest)
    if found > 1:
        return Season(found, f"season {found}, by autocorrelation")
    return Season(1, "no season found: the seasonal naive is the naive forecast")


def season_of_dates(sheet: Sheet) -> int:
    """Return the season that the step of dates suggests; 1 if none does."""
    if sheet.time is None or not sheet.has_dates or sheet.lengths[0] <= 1:
        return 1
    time = sheet.time[: int(sheet.lengths[0])]
    months = months_of(time)
    if months is not None and np.median(np.diff(months)) >= 1:
        return SEASONS_IN_MONTHS.get(int(np.median(np.diff(months))), 1)
    return SEASONS.get(round(float(np.median(np.diff(time))) / MINUTE), 1)


def season_of_values(values: np.ndarray) -> int:
    """Return the lag of the highest peak of the autocorrelation of a series; 1 without a clear one.

    A straight line is subtracted before; missing values count as the line.
    """
    T = len(values)
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 4 * FEWEST_SEASONS:
        return 1
    line = np.polyfit(known, values[known], 1)
    rest = np.nan_to_num(values - np.polyval(line, np.arange(T)))
    power = np.abs(np.fft.rfft(rest, 2 * T)) ** 2
    r = np.fft.irfft(power)[: min(T // FEWEST_SEASONS, MOST_SEASON) + 2]
    if r[0] <= 0:
        return 1
    r = r / r[0]
    inner = np.arange(2, len(r) - 1)
    is_peak = (r[inner] > r[inner - 1]) & (r[inner] >= r[inner + 1]) & (r[inner] > CLEAR)
    peaks = inner[is_peak]
    if not len(peaks):
        return 1
    # Multiples of a season are peaks as well: the first that is nearly as high as the highest.
    high = peaks[r[peaks] > 0.9 * r[peaks].max()]
    return int(high[0])


def lags_of_season(sheet: Sheet) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the lags for a single series, and a note on them; none for other data.

    They are the row before and, with a season of s rows, the two rows s - 1 and s before: seen from
    the row that is predicted, one season back and the row before that. A long series without a
    season has none.
    """
    T = len(sheet.u)
    is_series = len(sheet.lengths) == 1 and T >= FEWEST_ROWS
    is_narrow = sheet.u.shape[1] <= MOST_COLUMNS and not sheet.categories
    if not is_series or not is_narrow or np.isnan(sheet.u).any():
        return (), ()
    seen = int(TRAINED_SHARE * T)
    season = guess_season(sheet, [sheet.u[:seen, 0]])
    if season.rows < 2 or season.rows * SEASONS_TO_LEARN > seen:
        if T > MOST_SHORT_ROWS:
            return (), ()
        return (1,), ("a short series: the row before each is an input, too (--lags 0: none)",)
    lags = tuple(sorted({1, season.rows - 1, season.rows}))
    before = ", ".join(map(str, lags))
    note = f"{season.reason}: the rows {before} before each are inputs, too (--lags 0: none)"
    return lags, (note,)

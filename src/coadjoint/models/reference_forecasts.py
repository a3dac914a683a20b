"""Forecasts without a network: naive, seasonal naive, drift, and autoregression.

naive           the last value
seasonal naive  the value one season before
drift           the last value, moved on by the mean change from row to row
AR              a linear function of the p values before, by ridge regression, fed by itself

Each is a function of the series alone, [T], NaN where a value is missing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..tasks.files.dates import months_of
from ..tasks.files.sheet import Sheet
from ..tasks.linear import LinearModel, ridge_path

MINUTE = 60e6  # microseconds
# Seasons by the step of dates in minutes: hours in a day, days in a week, ...
SEASONS = {1: 60, 5: 288, 10: 144, 15: 96, 20: 72, 30: 48, 60: 24, 1440: 7, 10080: 52}
SEASONS_IN_MONTHS = {1: 12, 3: 4}
FEWEST_SEASONS = 2  # that a series must have
CLEAR = 0.3  # least autocorrelation at the season
MOST_LAGS = 30  # of an autoregression without a season
MOST_SEASON = 400


class Season(NamedTuple):
    """The rows of a season, and how they are known; 1 if there is none."""

    rows: int
    reason: str


def guess_season(sheet: Sheet, series: list[np.ndarray]) -> Season:
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


def fill(values: np.ndarray) -> np.ndarray:
    """Return a series with missing values replaced by the one before, or the first known one."""
    known = np.isfinite(values)
    if known.all():
        return values
    latest = np.maximum.accumulate(np.where(known, np.arange(len(values)), -1))
    first = int(np.argmax(known))
    filled: np.ndarray = values[np.where(latest < 0, first, latest)]
    return filled


def naive(values: np.ndarray, steps: int) -> np.ndarray:
    """Return the last value, [steps]."""
    return np.full(steps, values[-1])


def seasonal_naive(values: np.ndarray, steps: int, season: int) -> np.ndarray:
    """Return the values one season before, [steps]."""
    last = values[-min(season, len(values)) :]
    return np.resize(last, steps)


def drift(values: np.ndarray, steps: int) -> np.ndarray:
    """Return the line through the first and the last value, [steps]."""
    slope = (values[-1] - values[0]) / max(1, len(values) - 1)
    line: np.ndarray = values[-1] + slope * np.arange(1, steps + 1)
    return line


class Autoregression(NamedTuple):
    """x_{t+1} as a linear function of x_t, ..., x_{t-p+1}."""

    model: LinearModel
    lags: int

    def forecast(self, values: np.ndarray, steps: int) -> np.ndarray:
        """Return the next steps of a series [T], T >= p, each fed by the one before."""
        path = list(values[-self.lags :])
        for _ in range(steps):
            row = np.array(path[: -self.lags - 1 : -1])[None]
            path.append(float(self.model.predict(row)[0, 0]))
        return np.array(path[self.lags :])


def fit_autoregression(values: np.ndarray, season: int) -> Autoregression | None:
    """Fit an autoregression to a series [T]; None if it is too short.

    It reads one season and a step, at least 10 lags, at most a third of the series. Its strength
    is the best on the last fifth of the rows; it is then fitted to all of them.
    """
    T = len(values)
    lags = min(max(season + 1, 10), T // 3, max(season + 1, MOST_LAGS))
    if lags < 1 or T - lags < 5:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(values, lags + 1)
    X = windows[:, -2::-1]
    Y = windows[:, -1:]
    n = len(X) - max(1, len(X) // 5)
    errors = []
    for model in ridge_path(X[:n], Y[:n]):
        errors.append(float(np.square(model.predict(X[n:]) - Y[n:]).mean()))
    best = int(np.argmin(errors))
    return Autoregression(list(ridge_path(X, Y))[best], lags)

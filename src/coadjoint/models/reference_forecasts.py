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

from ..tasks.linear import LinearModel, ridge_path

MOST_LAGS = 30  # of an autoregression without a season


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

"""Rolling-origin evaluation: forecasts from rows of the past, against what came after.

From each of K origins, the last at steps rows before the end, the network and the forecasts without
a network (see `reference_forecasts`) predict the same steps. No forecast reads a row after its
origin, and intervals and the autoregression read none after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import DataError, one_line, real, whole_number
from ..networks.interface import Net
from ..tasks.files.sheet import Sheet
from ..tasks.prediction import Prediction
from ..tasks.season import Season, guess_season
from ..tasks.task import rng
from .continuing import FutureRows, check_network, continue_paths
from .forecasting import (
    MOST_STEPS,
    HeldOut,
    Source,
    Start,
    has_quantiles,
    interval_of,
    past_errors,
    past_values,
    quantile_interval,
    scale_of_predicted,
    trace_all,
)
from .reference_forecasts import drift, fill, fit_autoregression, naive, seasonal_naive

MOST_ORIGINS = 10_000
NETWORK = "network"


@dataclass(frozen=True, eq=False)
class Rolling:
    """Errors of forecasts from past rows, in the units of the data.

    names     the k columns that are predicted
    methods   "network", "naive", "seasonal naive", "drift" and "AR"
    errors    {method: [m, steps, k]}, true value less forecast, NaN where a value is missing
    coverage  [steps, k], the share of true values in the intervals; NaN without intervals
    level     the share that was promised
    origins   how many rows of each series were forecast from; series: how many series
    season    the rows of a season, and how they are known
    notes     on what was chosen
    """

    names: list[str]
    methods: list[str]
    errors: dict[str, np.ndarray]
    coverage: np.ndarray
    level: float
    origins: int
    series: int
    season: Season
    notes: tuple[str, ...]

    def mae(self, method: str) -> np.ndarray:
        """Return the mean absolute error by horizon step and column, [steps, k]."""
        mean: np.ndarray = np.nanmean(np.abs(self.errors[method]), 0)
        return mean

    def rmse(self, method: str) -> np.ndarray:
        """Return the root of the mean squared error by horizon step and column, [steps, k]."""
        root: np.ndarray = np.sqrt(np.nanmean(np.square(self.errors[method]), 0))
        return root

    def advice(self) -> str | None:
        """Return a line on the method with the smallest MAE, with what to try; None if it is ours.

        Of several columns their MAE count in shares of that of the seasonal naive.
        """
        usual = self.overall("seasonal naive")[0]
        usual = np.where(usual > 0, usual, 1.0)
        shares = {}
        for method in self.methods:
            shares[method] = float(np.nanmean(self.overall(method)[0] / usual))
        best = min(shares, key=lambda method: np.nan_to_num(shares[method], nan=np.inf))
        if best == NETWORK:
            return None
        ratio = shares[NETWORK] / shares[best] if shares[best] else np.inf
        return (
            f"{best} is better than the network, whose MAE is {ratio:.3g} times as large. Use it, "
            "or train with another --seed, with --lags (1 and one season back), or with --horizon "
            "for all steps at once."
        )

    def overall(self, method: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the MAE and the RMSE over all steps, [k] both."""
        errors = self.errors[method]
        return (
            np.nanmean(np.abs(errors), (0, 1)),
            np.sqrt(np.nanmean(np.square(errors), (0, 1))),
        )


def roll(
    net: Net,
    prediction: Prediction,
    steps: int,
    origins: int,
    level: float = 0.9,
    seed: int = 0,
    season: int | None = None,
    held_out: HeldOut | None = None,
) -> Rolling:
    """Forecast `steps` steps from each of the last `origins` possible rows of each series.

    Args:
        net: The network.
        prediction: The series.
        steps: The steps of each forecast.
        origins: How many rows of each series are forecast from.
        level: The share of values that the intervals are to hold.
        seed: Of the intervals.
        season: The rows of a season; None guesses it by dates, or by autocorrelation.
        held_out: As in `forecasting.forecast_series`.
    """
    d = prediction.description
    check_network(net, d)
    steps = whole_number("steps", steps, most=MOST_STEPS)
    origins = whole_number("rolling", origins, most=MOST_ORIGINS)
    real("level", level, 0, 1, above=True, below=True)
    rows = FutureRows(d)
    rows.refuse_unpredicted(steps)
    sheet = prediction.cut.sheet
    reach = rows.reach(steps)
    ends = [origin_rows(sheet, i, reach, origins) for i in range(len(sheet.lengths))]
    series = [past_values(sheet, i, rows.ahead) for i in range(len(ends))]
    if season is None:
        chosen = guess_season(sheet, [values[:, 0] for values in series])
    else:
        chosen = Season(whole_number("season", season), f"season {season}, as asked for")
    traces = trace_all(net, prediction, ends)
    firsts = [end[0] for end in ends]
    past, note = past_errors(prediction, traces, rows.ahead, held_out or {}, firsts)
    by_quantiles = has_quantiles(rows.ahead, steps, level)
    if by_quantiles:
        note = "intervals by the quantiles that the network learned"
    mean, std = scale_of_predicted(d, rows.ahead)
    errors: dict[str, list[np.ndarray]] = {}
    inside = []
    for i, (trace, end, values) in enumerate(zip(traces, ends, series, strict=True)):
        at = [row - 1 for row in end]
        truth = np.stack([values[row : row + steps] for row in end])
        lead = lead_at(prediction, i, end, reach, rows)
        piece = prediction.cut.pieces[i]
        u = prediction.u[piece.start : piece.stop]
        past_rows = np.concatenate([rows.past_of(u, row) for row in end])
        start = Start(trace.a[at], trace.state, lead, past_rows)
        points = continue_paths(net, start.a, start.state, steps, rows, lead, past_rows)
        if by_quantiles:
            low, high = quantile_interval(start.a, rows.ahead, steps, level)
        else:
            generator = rng(seed, "forecast", i)
            sources = [Source(past.of(i), generator)] * len(end)
            low, high = interval_of(net, start, steps, rows, sources, level)
        is_inside = (truth >= low * std + mean) & (truth <= high * std + mean)
        is_unknown = np.isnan(truth) | np.isnan(low)
        inside.append(np.where(is_unknown, np.nan, is_inside))
        errors.setdefault(NETWORK, []).append(truth - (points * std + mean))
        for name, forecasts in references(values, end, steps, chosen.rows).items():
            errors.setdefault(name, []).append(truth - forecasts)
    of_all = np.concatenate(inside)
    count = np.isfinite(of_all).sum(0)
    coverage = np.nansum(of_all, 0) / np.where(count, count, np.nan)
    together = {name: np.concatenate(parts) for name, parts in errors.items()}
    unseen = held_out or {}
    seen = 0
    for name, T, first in zip(sheet.ids, sheet.lengths.tolist(), firsts, strict=True):
        seen += unseen.get(name, T) > first
    notes = [chosen.reason, note]
    if seen:
        notes.append(
            f"{seen} of {len(ends)} series: the network may have been trained on rows after the "
            "first origin"
        )
    return Rolling(
        names=list(rows.ahead.predicted),
        methods=list(together),
        errors=together,
        coverage=coverage,
        level=level,
        origins=origins,
        series=len(ends),
        season=chosen,
        notes=tuple(notes),
    )


def origin_rows(sheet: Sheet, series: int, steps: int, origins: int) -> list[int]:
    """Return the numbers of rows before each forecast of a series; too short ones are refused."""
    T = int(sheet.lengths[series])
    first = T - steps - origins + 1
    if first < 2:
        raise DataError(
            f"series '{one_line(sheet.ids[series])}' has {T} rows; {origins} origins with {steps} "
            f"steps each need at least {steps + origins + 1}. Lower --rolling or --steps."
        )
    return list(range(first, first + origins))


def lead_at(
    prediction: Prediction, series: int, ends: Sequence[int], reach: int, rows: FutureRows
) -> np.ndarray:
    """Return the known inputs of the next `reach` rows after each origin, [K, reach, known]."""
    start = prediction.cut.pieces[series].start
    known = prediction.u[:, rows.known]  # of a row those of the next one
    return np.stack([known[start + end - 1 : start + end - 1 + reach] for end in ends])


def references(
    values: np.ndarray, ends: Sequence[int], steps: int, season: int
) -> dict[str, np.ndarray]:
    """Return the forecasts without a network from each origin, {method: [K, steps, k]}.

    values: [T, k]. An autoregression is fitted to the rows before the first origin.
    """
    found: dict[str, list[np.ndarray]] = {}
    for column in values.T:
        fitted = fit_autoregression(fill(column[: ends[0]]), season)
        by_method: dict[str, list[np.ndarray]] = {}
        for end in ends:
            past = fill(column[:end])
            forecasts = {
                "naive": naive(past, steps),
                "seasonal naive": seasonal_naive(past, steps, season),
                "drift": drift(past, steps),
                "AR": np.full(steps, np.nan) if fitted is None else fitted.forecast(past, steps),
            }
            for name, path in forecasts.items():
                by_method.setdefault(name, []).append(path)
        for name, paths in by_method.items():
            found.setdefault(name, []).append(np.stack(paths))
    return {name: np.stack(columns, -1) for name, columns in found.items()}

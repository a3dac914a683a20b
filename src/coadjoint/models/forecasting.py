"""Forecasting: the next steps of each series, from the state at its last row.

A network of kind "next" predicts one step; fed with it, the next, and so on. Intervals are
quantiles of many such paths, to which errors of the past are added at random (a bootstrap).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..errors import real, whole_number
from ..networks.interface import Net
from ..tasks.ahead import Ahead
from ..tasks.description import Description
from ..tasks.files.sheet import Sheet
from ..tasks.prediction import Prediction
from ..tasks.task import rng
from .continuing import FutureRows, Trace, check_network, continue_paths, trace_series
from .forecast import Forecast
from .future_times import future_times

MOST_STEPS = 100_000
PATHS = 500  # of a series, for its intervals
SERIES_AT_ONCE = 40
FEWEST_ERRORS = 10  # to draw from
FEWEST_OWN_ERRORS = 30  # of a series that uses no other's
WARM_UP = 20  # rows at the start of a series whose errors do not count, at most a fifth of it
HeldOut = dict[str, int]  # the first held-out row of series, from 0


class Start(NamedTuple):
    """Where B forecasts begin.

    a      [B, outputs], the pre-outputs at the last row
    state  [B, n], the states of the network there
    lead   [B, F, known inputs], of the next F rows, which are known in advance
    past   [B, P, k], the predicted columns in the last P rows, scaled; P is the longest lag
    """

    a: np.ndarray
    state: torch.Tensor
    lead: np.ndarray
    past: np.ndarray

    def repeated(self, times: int) -> Start:
        """Return each start so many times."""
        state = torch.repeat_interleave(self.state, times, 0)
        a, lead, past = (np.repeat(part, times, 0) for part in (self.a, self.lead, self.past))
        return Start(a, state, lead, past)


def join_starts(starts: Sequence[Start]) -> Start:
    """Return several starts as one."""
    return Start(
        np.concatenate([start.a for start in starts]),
        torch.cat([start.state for start in starts]),
        np.concatenate([start.lead for start in starts]),
        np.concatenate([start.past for start in starts]),
    )


class Source(NamedTuple):
    """Errors [m, H, k] to draw from, and the generator that draws."""

    errors: np.ndarray
    generator: np.random.Generator

    def draw(self) -> np.ndarray:
        """Return the errors of PATHS paths, [PATHS, H, k]."""
        drawn: np.ndarray = self.errors[self.generator.integers(len(self.errors), size=PATHS)]
        return drawn


class Errors(NamedTuple):
    """Errors of the past in scaled units, by series.

    by_series  n arrays [m_i, H, k]
    pooled     [m, H, k], those of all series
    """

    by_series: list[np.ndarray]
    pooled: np.ndarray

    def of(self, series: int) -> np.ndarray:
        """Return the errors to draw from for a series, without their mean."""
        own = self.by_series[series]
        errors = own if len(own) >= FEWEST_OWN_ERRORS else self.pooled
        return errors - errors.mean(0) if len(errors) else errors


def forecast_series(
    net: Net,
    prediction: Prediction,
    steps: int,
    level: float = 0.9,
    seed: int = 0,
    held_out: HeldOut | None = None,
) -> Forecast:
    """Continue each series of `prediction` by `steps` steps.

    Args:
        net: The network.
        prediction: The series, by `Model.prepare`.
        steps: How many steps.
        level: The share of values that the intervals are to hold, in (0, 1).
        seed: Of the errors that are drawn.
        held_out: The first row of series that the network was not trained on, if that is known:
            errors of these rows alone make the intervals.
    """
    d = prediction.description
    check_network(net, d)
    steps = whole_number("steps", steps, most=MOST_STEPS)
    real("level", level, 0, 1, above=True, below=True)
    rows = FutureRows(d)
    rows.refuse_unpredicted(steps)
    sheet = prediction.cut.sheet
    leads = []
    for i, name in enumerate(sheet.ids):
        future = prediction.future[i] if prediction.future else np.zeros((0, 0))
        leads.append(rows.lead_of(future, steps, name))
    traces = trace_all(net, prediction, [[int(T)] for T in sheet.lengths])
    errors, note = past_errors(prediction, traces, rows.ahead, held_out or {})
    by_quantiles = has_quantiles(rows.ahead, steps, level)
    if by_quantiles:
        note = "intervals by the quantiles that the network learned"
    mean, std = scale_of_predicted(d, rows.ahead)
    starts = []
    for trace, lead, piece in zip(traces, leads, prediction.cut.pieces, strict=True):
        u = prediction.u[piece.start : piece.stop]
        starts.append(Start(trace.a[-1:], trace.state, lead, rows.past_of(u, len(u))))
    values = []
    lower = []
    upper = []
    for first in range(0, len(starts), SERIES_AT_ONCE):
        numbers = range(first, min(first + SERIES_AT_ONCE, len(starts)))
        start = join_starts([starts[i] for i in numbers])
        paths = continue_paths(net, start.a, start.state, steps, rows, start.lead, start.past)
        values.append(paths)
        if by_quantiles:
            low, high = quantile_interval(start.a, rows.ahead, steps, level)
        else:
            sources = [Source(errors.of(i), rng(seed, "forecast", i)) for i in numbers]
            low, high = interval_of(net, start, steps, rows, sources, level)
        lower.append(low)
        upper.append(high)
    times = [future_times(sheet, i, steps) for i in range(len(traces))]
    return Forecast(
        source=prediction.source,
        names=list(rows.ahead.predicted),
        ids=list(sheet.ids),
        id_column=sheet.id_column,
        times=None if sheet.stamps is None else [stamps or [] for stamps in times],
        time_column=sheet.columns.get("time", "") or "time",
        values=np.concatenate(values) * std + mean,
        lower=np.concatenate(lower) * std + mean,
        upper=np.concatenate(upper) * std + mean,
        level=level,
        history=[past_values(sheet, i, rows.ahead) for i in range(len(traces))],
        past_times=past_stamps(sheet),
        notes=(*prediction.notes, note),
    )


def has_quantiles(ahead: Ahead, steps: int, level: float) -> bool:
    """Tell whether the network learned the ends of the intervals for all these steps."""
    ends = np.array([(1 - level) / 2, (1 + level) / 2])
    learned = np.array(ahead.quantiles)
    if not len(learned) or steps > ahead.horizon:
        return False
    return bool(np.isclose(learned[:, None], ends).any(0).all())


def quantile_interval(
    a: np.ndarray, ahead: Ahead, steps: int, level: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the learned ends of the intervals, [B, steps, k] both, of outputs a [B, outputs]."""
    quantiles = ahead.arrange(a)[:, :steps]
    learned = np.array(ahead.quantiles)
    low = int(np.argmin(np.abs(learned - (1 - level) / 2)))
    high = int(np.argmin(np.abs(learned - (1 + level) / 2)))
    return quantiles[..., low], quantiles[..., high]


def trace_all(net: Net, prediction: Prediction, ends: Sequence[Sequence[int]]) -> list[Trace]:
    """Run a network along each series; ends: the rows after which its states are kept."""
    traces = []
    for piece, rows in zip(prediction.cut.pieces, ends, strict=True):
        traces.append(trace_series(net, prediction.u[piece.start : piece.stop], rows))
    return traces


def scale_of_predicted(d: Description, ahead: Ahead) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each predicted column, [k] both."""
    columns = [d.features.index(name) for name in ahead.predicted]
    return np.array(d.mean)[columns], np.array(d.std)[columns]


def past_values(sheet: Sheet, series: int, ahead: Ahead) -> np.ndarray:
    """Return what is predicted, in the rows of a series, [T, k], in its own units."""
    columns = [sheet.features.index(name) for name in ahead.predicted]
    start = int(sheet.starts[series])
    values: np.ndarray = sheet.u[start : start + int(sheet.lengths[series]), columns]
    return values


def past_stamps(sheet: Sheet) -> list[list[str]] | None:
    """Return the times of each series as they are written; None without times."""
    if sheet.stamps is None:
        return None
    pairs = zip(sheet.starts.tolist(), sheet.lengths.tolist(), strict=True)
    return [list(sheet.stamps[start : start + T]) for start, T in pairs]


def past_errors(
    prediction: Prediction,
    traces: Sequence[Trace],
    ahead: Ahead,
    held_out: HeldOut,
    before: Sequence[int] | None = None,
) -> tuple[Errors, str]:
    """Return the errors of the predictions along the series, and a note on where they come from.

    Only rows that the network was not trained on count, if there are enough of them.

    Args:
        prediction: The series.
        traces: The outputs along them.
        ahead: What is predicted.
        held_out: The first row of series that the network was not trained on.
        before: Of each series the first row that must not be looked at; None for all rows.
    """
    sheet = prediction.cut.sheet
    mean, std = scale_of_predicted(prediction.description, ahead)
    every = []
    unseen = []
    for i, trace in enumerate(traces):
        values = (past_values(sheet, i, ahead) - mean) / std
        if before is not None:
            values = values[: before[i]]
        errors, rows = errors_along(values, trace.a, ahead)
        warm_up = min(WARM_UP, len(values) // 5)
        first = held_out.get(sheet.ids[i], len(values))
        every.append(errors[rows >= warm_up])
        unseen.append(errors[rows >= max(first - 1, warm_up)])
    of_unseen = np.concatenate(unseen)
    if len(of_unseen) >= FEWEST_OWN_ERRORS:
        count = f"{len(of_unseen):,} errors"
        note = f"intervals estimated from {count} in rows that were held out of training"
        return Errors(unseen, of_unseen), note
    pooled = np.concatenate(every)
    note = (
        f"intervals estimated from {len(pooled):,} errors in all rows of {sheet.path}: too narrow "
        "if the network was trained on them"
    )
    if len(pooled) < FEWEST_ERRORS:
        note = f"no intervals: {len(pooled)} rows with an error, and {FEWEST_ERRORS} are needed"
    return Errors(every, pooled), note


def errors_along(values: np.ndarray, a: np.ndarray, ahead: Ahead) -> tuple[np.ndarray, np.ndarray]:
    """Return true values less predictions, [m, H, k], and the rows they were predicted at, [m].

    Rows whose H next values are not all known are left out. values: [T, k] in scaled units.
    """
    H = ahead.horizon
    count = len(values) - H
    if count < 1:
        return np.zeros((0, H, values.shape[1])), np.zeros(0, int)
    points = ahead.arrange(a[:count])[..., ahead.middle]
    windows = np.lib.stride_tricks.sliding_window_view(values[1:], H, axis=0)
    errors = windows.swapaxes(1, 2) - points
    known = np.isfinite(errors).all((1, 2))
    return errors[known], np.flatnonzero(known)


def interval_of(
    net: Net,
    start: Start,
    steps: int,
    rows: FutureRows,
    sources: Sequence[Source],
    level: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the intervals, [K, steps, k] both, in scaled units; NaN without errors.

    They are quantiles of PATHS paths from each of K starts, with errors drawn at random.

    Args:
        net: The network.
        start: Where the paths begin.
        steps: How many steps.
        rows: Makes the inputs of the future.
        sources: Of each start the errors to draw from.
        level: The share of paths between the ends.
    """
    if min(len(source.errors) for source in sources) < FEWEST_ERRORS:
        empty = np.full((len(start.a), steps, len(rows.places)), np.nan)
        return empty, empty

    def shock(_block: int) -> np.ndarray:
        return np.concatenate([source.draw() for source in sources])

    many = start.repeated(PATHS)
    paths = continue_paths(net, many.a, many.state, steps, rows, many.lead, many.past, shock)
    paths = paths.reshape(len(start.a), PATHS, steps, -1)
    low, high = np.quantile(paths, ((1 - level) / 2, (1 + level) / 2), axis=1)
    return low, high

"""The time since the row before, in sets whose times stay on disk."""

from __future__ import annotations

import numpy as np

from ..errors import DataError
from .cutting import Part
from .description import Gap
from .prepared import StoredSheet
from .row_blocks import ChosenRows, joined_stretches

STEPS_LOOKED_AT = 1 << 20  # whose median is the usual time step


def measure_stored_gap(part: Part, standardise: bool) -> Gap:
    """Return what `measure_gap` does, with the same bits up to STEPS_LOOKED_AT rows.

    Beyond them the usual time step is the median of the first ones.
    """
    sheet = part.cut.sheet
    assert isinstance(sheet, StoredSheet)
    if sheet.times is None:
        raise DataError(
            f"{sheet.path}: --gaps needs a time column, and the set was prepared without one. "
            "Prepare it again with --time, or leave --gaps out."
        )
    stretches = stretches_with_steps(part)
    if not len(stretches):
        raise DataError(
            f"{sheet.path}: --gaps needs sequences of two rows or more. Leave --gaps out."
        )
    times = sheet.times

    def read(i: int, begin: int, end: int) -> np.ndarray:
        first = int(stretches[i, 0])
        time = times.raw(first + begin - 1, first + end)
        steps: np.ndarray = time[1:] - time[:-1]
        return steps.astype(np.float64)

    since = ChosenRows(stretches[:, 1] - stretches[:, 0], read)
    count = len(since)
    usual = float(np.median(since.rows(0, min(count, STEPS_LOOKED_AT))))

    def logs(block: np.ndarray) -> np.ndarray:
        return np.asarray(np.log1p(block / usual))

    mean = float(since.sum_of(logs)[0]) / count

    def squares(block: np.ndarray) -> np.ndarray:
        off = logs(block) - mean
        return off * off

    std = float(np.sqrt(since.sum_of(squares)[0] / count))
    return described_gap(usual, mean, std, sheet.has_dates, standardise)


def described_gap(usual: float, mean: float, std: float, dates: bool, standardise: bool) -> Gap:
    """Return the scale of log(1 + d / usual), whose mean and deviation in training are given."""
    gap = {"usual": usual, "mean": 0.0, "std": 1.0, "dates": float(dates)}
    if standardise:
        is_even = std < 1e-9  # rounding aside
        gap |= {"mean": mean, "std": 1.0 if is_even else std}
    return gap


def stretches_with_steps(part: Part) -> np.ndarray:
    """Return the rows of a part that have a row before them in their sequence, as stretches [m, 2].

    A stretch is (first row, row after the last), and lies in one sequence.
    """
    starts = part.cut.sheet.starts
    found = []
    for begin, end in joined_stretches(part).tolist():
        inside = starts[np.searchsorted(starts, begin) : np.searchsorted(starts, end)]
        bounds = np.unique(np.concatenate([[begin], inside, [end]]))
        first = bounds[:-1] + np.isin(bounds[:-1], inside)
        found.append(np.stack([first, bounds[1:]], 1))
    rows = np.concatenate([np.zeros((0, 2), np.int64), *found])
    kept: np.ndarray = rows[rows[:, 1] > rows[:, 0]]
    return kept

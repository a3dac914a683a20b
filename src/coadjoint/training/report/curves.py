"""Curves: columns of steps and values, compact in memory, and thinned before they are drawn."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from .text import Row, finite_or_nan

MAX_FIGURE_POINTS = 24_000  # points drawn in one figure
MAX_SERIES_POINTS = 1500  # points drawn of one curve
MAX_CURVES = 200  # of one run: a damaged file must not fill the memory
TRAINING_KEYS = (
    "loss",
    "gradient",
    "penalty",
    "rho",
    "rate",
    "distance",
    "share",
    "damping",
    "cg",
)


class Curve(NamedTuple):
    """A named curve over training steps."""

    name: str
    steps: np.ndarray
    values: np.ndarray


ColumnPair = tuple["array[float]", "array[float]"]  # steps, values


class CurveStore(defaultdict[tuple[str, ...], ColumnPair]):
    """Columns of steps and values by key, compact enough for long runs."""

    def __init__(self) -> None:
        """An empty store; a key that is asked for by [] begins with empty columns."""
        super().__init__(lambda: (array("d"), array("d")))

    def put(self, row: Row, keys: Iterable[str], *prefix: str) -> None:
        """Append the values of a row of metrics.jsonl to the curves (*prefix, key).

        A row without a step, and curves beyond MAX_CURVES, are passed over.
        """
        step = finite_or_nan(row.get("step"))
        if math.isnan(step):
            return
        for key in keys:
            name = (*prefix, key)
            if key in row and (name in self or len(self) < MAX_CURVES):
                steps, values = self[name]
                steps.append(step)
                values.append(finite_or_nan(row[key]))

    def curve(self, *key: str, name: str = "") -> Curve:
        """The curve of a key in the order of steps; empty if there is none.

        A resumed run may write a step twice: the later value counts.
        """
        columns = self.get(key, ((), ()))
        # unique returns the first of equal steps, so the latest must come first
        steps, values = (np.array(column)[::-1] for column in columns)
        _, latest = np.unique(steps, return_index=True)
        return Curve(name or key[-1], steps[latest], values[latest])


def thinned_indices(y: np.ndarray, most: int) -> np.ndarray:
    """Indices of about `most` points that keep the shape of a curve; y: its values.

    Both ends are kept and, of each stretch, up to three points: the least, the greatest and the
    first gap, which is a value that is not finite. So there are most / 3 stretches.
    """
    n = len(y)
    if n <= most:
        return np.arange(n)
    finite = np.isfinite(y)
    keep = {0, n - 1}
    bounds = np.linspace(0, n, max(1, most // 3) + 1).astype(int)
    for start, end in itertools.pairwise(bounds):
        drawn = np.flatnonzero(finite[start:end]) + start
        gaps = np.flatnonzero(~finite[start:end]) + start
        if len(drawn):
            keep |= {drawn[y[drawn].argmin()], drawn[y[drawn].argmax()]}
        keep |= set(gaps[:1])
    return np.array(sorted(keep))


def json_numbers(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """Numbers for JSON: in `digits` digits, whole ones exact, None if not finite."""
    return [_json_number(float(value), digits) for value in values]


def json_grid(cells: np.ndarray) -> list[list[float | None]]:
    """The rows of a heatmap for JSON; 4 digits are finer than its colours."""
    return [json_numbers(row, 4) for row in cells]


def _json_number(value: float, digits: int) -> float | None:
    """A number for JSON: in `digits` digits, None if not finite."""
    if not math.isfinite(value):
        return None
    # a whole number is written without a point; up to 1e15, float64 holds it exactly
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    rounded = float(f"{value:.{digits}g}")
    # Rounded up, the largest numbers leave the range of float64.
    return rounded if math.isfinite(rounded) else value

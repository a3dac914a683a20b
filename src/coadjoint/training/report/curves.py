"""Curves: columns of steps and values, compact in memory, and thinned before they are drawn."""

from __future__ import annotations

import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from .text import Row, finite_or_nan

Curve = tuple[str, np.ndarray, np.ndarray]  # name, steps, values

MAX_FIGURE_POINTS, MAX_SERIES_POINTS = 24_000, 1500  # points drawn
TRAINING_KEYS = ("loss", "gradient", "penalty", "rho", "rate", "distance", "share", "damping", "cg")


class CurveStore(defaultdict[tuple[str, ...], tuple[array, array]]):
    """Columns of steps and values, compact enough for long runs."""

    def __init__(self) -> None:
        super().__init__(lambda: (array("d"), array("d")))

    def put(self, row: Row, keys: Iterable[str], *name: str) -> None:
        step = finite_or_nan(row.get("step"))
        for key in keys:
            if key in row and step == step and ((*name, key) in self or len(self) < 200):
                for column, x in zip(
                    self[(*name, key)], (step, finite_or_nan(row[key])), strict=True
                ):
                    column.append(x)

    def curve(self, *key: str, name: str = "") -> Curve:
        """In the order of steps; of a step that was written twice, by a resumed run, the later value counts."""
        steps, values = (np.array(column)[::-1] for column in self.get(key, ((), ())))
        _, last = np.unique(steps, return_index=True)
        return name or key[-1], steps[last], values[last]


def thinned_indices(y: np.ndarray, most: int) -> np.ndarray:
    """Indices of about `most` points: both ends and, of each stretch, the least, the greatest and a gap if there is one."""
    n, finite = len(y), np.isfinite(y)
    if n <= most:
        return np.arange(n)
    keep = {0, n - 1}
    for a, b in itertools.pairwise(np.linspace(0, n, max(1, most // 3) + 1).astype(int)):
        here, gaps = np.flatnonzero(finite[a:b]) + a, np.flatnonzero(~finite[a:b]) + a
        keep |= {here[y[here].argmin()], here[y[here].argmax()]} if len(here) else set()
        keep |= set(gaps[:1])
    return np.array(sorted(keep))


def json_numbers(values: Iterable[float], digits: int = 5) -> list[float | None]:
    """For JSON: rounded, whole numbers without a point, null for what is not finite."""
    short = lambda v: int(v) if v == int(v) and abs(v) < 1e15 else float(f"{v:.{digits}g}")
    return [short(v) if math.isfinite(v) else None for v in map(float, values)]

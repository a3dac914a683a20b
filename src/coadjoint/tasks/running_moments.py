"""WrittenRows that are written one chunk after the other, and their moments."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class RunningMoments:
    """Sums of each column over rows that come, missing values aside."""

    def __init__(self, columns: int) -> None:
        self.count = np.zeros(columns)
        self.mean = np.zeros(columns)
        self.squares = np.zeros(columns)  # sum of (x - mean)^2
        self.least = np.full(columns, np.nan)
        self.largest = np.full(columns, np.nan)
        self.rows = 0

    def add(self, rows: np.ndarray) -> None:
        """Take in rows [n, C]."""
        self.rows += len(rows)
        known = ~np.isnan(rows)
        count = known.sum(0)
        values = np.where(known, rows, 0)
        mean = values.sum(0) / np.maximum(count, 1)
        squares = np.where(known, (rows - mean) ** 2, 0).sum(0)
        total = np.maximum(self.count + count, 1)
        off = mean - self.mean
        self.squares += squares + off * off * self.count * count / total
        self.mean += off * count / total
        self.count += count
        self.least = np.fmin(self.least, np.fmin.reduce(rows))
        self.largest = np.fmax(self.largest, np.fmax.reduce(rows))

    def described(self) -> dict[str, list[float]]:
        """Return the moments in plain types; a column without a value has zeros."""
        std = np.sqrt(self.squares / np.maximum(self.count, 1))
        return {
            "mean": np.nan_to_num(self.mean).tolist(),
            "std": np.nan_to_num(std).tolist(),
            "least": np.nan_to_num(self.least).tolist(),
            "largest": np.nan_to_num(self.largest).tolist(),
            "missing": (self.rows - self.count).tolist(),
        }


class WrittenRows(NamedTuple):
    """WrittenRows to be written.

    u [n, C]: with the common numbers of words; y [n, k]: targets as they are stored; values [n, k]:
    targets as numbers, NaN where they are none; time [n].
    """

    u: np.ndarray
    y: np.ndarray | None
    values: np.ndarray | None
    time: np.ndarray | None

    def part(self, chosen: slice | np.ndarray) -> WrittenRows:
        """Return some of the rows."""
        others = [None if array is None else array[chosen] for array in self[1:]]
        return WrittenRows(self.u[chosen], *others)

    @classmethod
    def joined(cls, parts: list[WrittenRows]) -> WrittenRows:
        """Return rows one after the other."""
        u, *columns = zip(*parts, strict=True)
        others = [None if column[0] is None else np.concatenate(column) for column in columns]
        return cls(np.concatenate(u), *others)

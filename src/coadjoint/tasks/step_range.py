"""StepRange: whether columns increase by equal steps, as a time or an index does."""

from __future__ import annotations

import numpy as np

FEWEST_TIMES = 5  # rows, before equal steps are taken for a time or an index


class StepRange:
    """The least and the largest step from row to row of each of C columns, in rows that come.

    A step leads from a row to the next of its sequence. A column with a missing value has none.
    """

    def __init__(self, columns: int) -> None:
        self.count = 0
        self.last: np.ndarray | None = None  # the row before
        self.first_step = np.full(columns, np.nan)
        self.least = np.full(columns, np.inf)
        self.largest = np.full(columns, -np.inf)
        self.size = np.zeros(columns)  # the largest absolute value
        self.has_gap = np.zeros(columns, bool)

    def add(self, rows: np.ndarray, starts: np.ndarray) -> None:
        """Take in rows [n, C]; starts: which of them begin a sequence."""
        self.has_gap |= np.isnan(rows).any(0)
        self.size = np.fmax(self.size, np.fmax.reduce(np.abs(rows)))
        is_inside = np.ones(len(rows), bool)
        is_inside[starts] = False
        if self.last is None:
            is_inside[0] = False
            self.last = rows[0]
        steps = np.diff(rows, axis=0, prepend=self.last[None])[is_inside]
        self.last = rows[-1].copy()
        if not len(steps):
            return
        if not self.count:
            self.first_step = steps[0]
        self.count += len(steps)
        self.least = np.fmin(self.least, np.fmin.reduce(steps))
        self.largest = np.fmax(self.largest, np.fmax.reduce(steps))

    def equal(self) -> dict[int, float]:
        """Return the columns that increase by equal steps, by number, with the step."""
        if self.count < FEWEST_TIMES - 1:
            return {}
        # A difference of two large numbers is only as exact as they are.
        rounding = 8 * np.finfo(np.float64).eps * self.size
        off = np.fmax(np.abs(self.least - self.first_step), np.abs(self.largest - self.first_step))
        is_equal = (off <= 1e-6 * self.first_step + rounding) & (self.first_step > rounding)
        is_equal &= ~self.has_gap
        return {int(j): float(self.first_step[j]) for j in np.flatnonzero(is_equal)}

"""Many rows taken some at a time, with sums that have the bits of NumPy's sums of all at once.

Rows [N, C] are an array in memory, or lie on disk (`stored_rows`): both are read by slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .blocks import NUMBERS_PER_BLOCK, block_slices
from .cutting import Part


class ChosenRows:
    """Some rows one after the other, as if they were one array.

    bounds  [m + 1]: stretch i has the rows bounds[i], ..., bounds[i + 1] - 1 of it
    read    returns rows begin, ..., end - 1 of stretch i
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, read: Callable[[int, int, int], np.ndarray]
    ) -> None:
        self.bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.read = read
        self.width = self.rows(0, 1).shape[1]

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def rows(self, begin: int, end: int) -> np.ndarray:
        """Return rows begin, ..., end - 1 as doubles."""
        first = int(np.searchsorted(self.bounds, begin, side="right")) - 1
        parts = []
        while begin < end:
            start = int(self.bounds[first])
            stop = min(end, int(self.bounds[first + 1]))
            parts.append(self.read(first, begin - start, stop - start))
            begin = stop
            first += 1
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.ascontiguousarray(joined, dtype=np.float64)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield all rows in blocks."""
        for block in block_slices(len(self), self.width):
            yield self.rows(block.start, block.stop)

    def sum_of(self, make: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the sum over rows of make(rows) [C], with the bits of numpy.sum over axis 0.

        NumPy adds the rows of several columns one by one, and halves a single column again and
        again.
        """
        if self.width == 1:
            return self._halved(make, 0, len(self))
        total: np.ndarray | None = None
        for block in self.blocks():
            made = make(block)
            if total is not None:
                made = np.concatenate([total[None], made])
            total = made.sum(0)
        assert total is not None
        return total

    def _halved(self, make: Callable[[np.ndarray], np.ndarray], begin: int, end: int) -> np.ndarray:
        """Return the sum of rows begin, ..., end - 1 of a single column, as NumPy halves it."""
        count = end - begin
        if count <= NUMBERS_PER_BLOCK:
            total: np.ndarray = make(self.rows(begin, end)).sum(0)
            return total
        half = count // 2
        half -= half % 8
        total = self._halved(make, begin, begin + half)
        total = total + self._halved(make, begin + half, end)
        return total


def chosen_inputs(part: Part) -> ChosenRows:
    """Return the rows of a sheet that are in a part, each once, in their order."""
    u = part.cut.sheet.u
    stretches = joined_stretches(part)

    def read(i: int, begin: int, end: int) -> np.ndarray:
        start = int(stretches[i, 0])
        rows: np.ndarray = u[start + begin : start + end]
        return rows

    return ChosenRows(stretches[:, 1] - stretches[:, 0], read)


def joined_stretches(part: Part) -> np.ndarray:
    """Return the rows of a part as stretches [m, 2] of (first row, row after the last)."""
    pairs = np.array([(start, stop) for _, start, stop in part.pieces], np.int64).reshape(-1, 2)
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    if not len(pairs):
        return pairs
    ends = np.maximum.accumulate(pairs[:, 1])
    is_first = np.concatenate([[True], pairs[1:, 0] > ends[:-1]])
    last = np.append(np.flatnonzero(is_first)[1:] - 1, len(pairs) - 1)
    return np.stack([pairs[is_first, 0], ends[last]], 1)


def chosen_targets(part: Part, at: str) -> ChosenRows:
    """Return the targets of the pieces of a part, one after the other."""
    if at == "last":
        lengths = np.ones(len(part.chosen), np.int64)
    else:
        lengths = np.array([stop - start for _, start, stop in part.pieces], np.int64)

    def read(i: int, begin: int, end: int) -> np.ndarray:
        return np.atleast_2d(part.target(i, at))[begin:end]

    return ChosenRows(lengths, read)


class Moments:
    """What scales are made of: of each column the least, the largest value, mean and deviation.

    Missing values (NaN) are left aside; columns without any other value are NaN.
    """

    def __init__(self, rows: ChosenRows, standardise: bool) -> None:
        low = np.full(rows.width, np.nan)
        high = np.full(rows.width, np.nan)
        count = np.zeros(rows.width, np.int64)
        for block in rows.blocks():
            low = np.fmin(low, np.fmin.reduce(block))
            high = np.fmax(high, np.fmax.reduce(block))
            count += (~np.isnan(block)).sum(0)
        self.count = count  # of values that are not missing
        self.low = low
        self.high = high
        self.mean = np.zeros(rows.width)
        self.std = np.ones(rows.width)
        if standardise:
            self._measure(rows)

    @property
    def is_constant(self) -> np.ndarray:
        """Whether all values of a column are equal, [C]."""
        equal: np.ndarray = self.low == self.high
        return equal

    def _measure(self, rows: ChosenRows) -> None:
        """Measure mean and deviation, in two passes as numpy.nanstd does."""
        # Values are divided by the largest, whose square may overflow.
        size = np.nan_to_num(np.fmax(np.abs(self.low), np.abs(self.high)), nan=1.0)
        size = np.where(size == 0, 1.0, size)

        def known(block: np.ndarray) -> np.ndarray:
            scaled = block / size
            scaled[np.isnan(scaled)] = 0
            return scaled

        with np.errstate(invalid="ignore"):
            mean = rows.sum_of(known) / self.count

        def squares(block: np.ndarray) -> np.ndarray:
            off = block / size - mean
            off[np.isnan(off)] = 0
            return off * off

        with np.errstate(invalid="ignore"):
            std = np.sqrt(rows.sum_of(squares) / self.count) * size
        self.mean = mean * size
        self.std = np.where(self.is_constant | (std == 0), 1.0, std)

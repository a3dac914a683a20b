"""Slices of many rows, of which a small part is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

NUMBERS_PER_BLOCK = 1 << 17


def block_slices(count: int, width: int) -> Iterator[slice]:
    """Yield slices of 0..count - 1 with some hundred thousand numbers each; width: of a row."""
    size = max(1, NUMBERS_PER_BLOCK // max(1, width))
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))


def count_gaps(u: np.ndarray) -> np.ndarray:
    """Return how many values of each column of rows [N, C] are missing (NaN), [C]."""
    count = np.zeros(u.shape[1], np.int64)
    for block in block_slices(len(u), u.shape[1]):
        count += np.isnan(u[block]).sum(0)
    return count

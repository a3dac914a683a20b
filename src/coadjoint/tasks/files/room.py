"""Room for many numbers, which is given back to the system as soon as it is not needed.

A large block of memory of its own is a map without a file: pages that nothing was written to take
no memory, and any part of it can be given back. So rows are collected in blocks, joined into one
array, and later overwritten by what is made of them, with little more than one copy in memory.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import DTypeLike

SMALLEST = 1 << 17  # bytes of an array that has a map of its own
ROWS_PER_BLOCK = 1 << 16


def make_room(rows: int, columns: int, dtype: DTypeLike = np.float64) -> np.ndarray:
    """Return an array [rows, columns], by default of doubles, whose values are not set."""
    size = np.dtype(dtype).itemsize * rows * columns
    if size < SMALLEST:
        return np.empty((rows, columns), dtype)
    return np.frombuffer(mmap.mmap(-1, size), dtype).reshape(rows, columns)


def map_under(array: np.ndarray) -> mmap.mmap | None:
    """Return the map that an array of `make_room` lies in, if it fills it; else None."""
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.obj if isinstance(base, memoryview) else base.base
    is_whole = isinstance(base, mmap.mmap) and len(base) == array.nbytes
    if not is_whole or not array.flags.c_contiguous:
        return None
    assert isinstance(base, mmap.mmap)
    return base


def give_back(room: mmap.mmap, used: int) -> None:
    """Give the memory after the first `used` bytes back; it then reads as zeros."""
    begin = -(-used // mmap.PAGESIZE) * mmap.PAGESIZE
    if begin < len(room) and hasattr(mmap, "MADV_DONTNEED"):
        room.madvise(mmap.MADV_DONTNEED, begin, len(room) - begin)


class RowBlocks:
    """Collects rows [n, columns] whose total number is not known before."""

    def __init__(self, columns: int, dtype: DTypeLike = np.float64) -> None:
        self.columns = columns
        self.dtype = dtype
        self.count = 0
        self.blocks: list[np.ndarray] = []

    def append(self, rows: np.ndarray) -> None:
        """Add some rows."""
        taken = 0
        while taken < len(rows):
            place = self.count % ROWS_PER_BLOCK
            if place == 0:
                self.blocks.append(make_room(ROWS_PER_BLOCK, self.columns, self.dtype))
            part = rows[taken : taken + ROWS_PER_BLOCK - place]
            self.blocks[-1][place : place + len(part)] = part
            taken += len(part)
            self.count += len(part)

    def join(self) -> np.ndarray:
        """Return all rows as one array; the blocks are given up one by one."""
        joined = make_room(self.count, self.columns, self.dtype)
        for begin in range(0, self.count, ROWS_PER_BLOCK):
            block = self.blocks[begin // ROWS_PER_BLOCK]
            end = min(begin + ROWS_PER_BLOCK, self.count)
            joined[begin:end] = block[: end - begin]
            self.blocks[begin // ROWS_PER_BLOCK] = np.empty(0)
        self.blocks = []
        return joined


class Numbers:
    """Collects numbers [n] whose total number is not known before."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.rows = RowBlocks(1, dtype)

    def append(self, numbers: np.ndarray) -> None:
        """Add some numbers."""
        self.rows.append(numbers[:, None])

    def join(self) -> np.ndarray:
        """Return all numbers as one array."""
        return self.rows.join().reshape(-1)

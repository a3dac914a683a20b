"""Sums and products over rows, in fixed chunks of time steps.

A BLAS adds up in an order that depends on how many rows it is given. Here it is always given the same ones, chunk by
chunk from the last to the first, so that a sequence swept in segments has the bits of one swept at once. Chunks are
added up in float64: float32 does not keep its digits over ten thousand rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .rows import ROWS_PER_CHUNK, Rows, split_range

FEW_ROWS = (
    256  # rows added up at once where the result is so small that a BLAS adds them one by one
)


def chunks_from_last(
    rows: Rows | None, *arrays: Tensor, few: bool = False
) -> Iterator[Sequence[Tensor]]:
    """The rows of step arrays that meet a BLAS at once, the last first."""
    gpu, count, size = arrays[0].is_cuda, len(arrays[0]), FEW_ROWS if few else 2 * ROWS_PER_CHUNK
    chunks = rows.chunks if rows else [range(count)]
    if gpu or (len(chunks) == 1 and count <= size):
        yield arrays  # a GPU's products are not reproducible to the bit across sizes, and every launch costs as much as a chunk
        return
    for chunk in reversed(chunks):
        for piece in reversed(split_range(chunk, size)):
            yield [y[piece.start : piece.stop] for y in arrays]


class Sum:
    """A sum over rows that may arrive in segments, the last first."""

    def __init__(self) -> None:
        self.value: Tensor | None = None
        self.dtype: torch.dtype | None = None
        self.ours = False  # may be overwritten

    def add(self, part: Tensor) -> None:
        self.dtype = part.dtype
        if self.value is None:
            self.value = part
        elif self.value.dtype == torch.float64 and self.ours and not torch.is_grad_enabled():
            self.value += part
        else:
            self.value, self.ours = self.value.double() + part, True

    def add_product(self, rows: Rows | None, y: Tensor, r: Tensor) -> None:
        """sum over rows of y_i r_i'; with the narrower first it is faster, up to ten times where that is very narrow."""
        narrow = r.shape[1] < y.shape[1]
        for y_, r_ in chunks_from_last(rows, y, r, few=y.shape[1] * r.shape[1] <= 64):
            self.add(torch.mm(r_.t(), y_).t() if narrow else torch.mm(y_.t(), r_))

    def add_rows(self, rows: Rows | None, y: Tensor) -> None:
        """sum over rows of y_i"""
        for (part,) in chunks_from_last(rows, y):
            self.add(part.sum(0))

    def total(self) -> Tensor:
        assert self.value is not None
        return self.value.to(
            self.dtype
        ).contiguous()  # parameters_to_vector, for one, asks a gradient for view()


def sum_products(rows: Rows | None, y: Tensor, r: Tensor) -> Tensor:
    """sum over rows of y_i r_i'"""
    found = Sum()
    found.add_product(rows, y, r)
    return found.total()


def sum_rows(rows: Rows | None, y: Tensor) -> Tensor:
    """sum over rows of y_i"""
    found = Sum()
    found.add_rows(rows, y)
    return found.total()

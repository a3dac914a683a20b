"""Sums and products over rows, in fixed chunks of time steps.

A BLAS adds in an order that depends on how many rows it is given. Here it always gets the same
rows, chunk by chunk from the last to the first, so that a sequence swept in segments has the bits
of one swept at once. Chunks are added in float64: float32 loses digits over ten thousand rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .rows import ROWS_PER_CHUNK, Rows, split_range

# Rows added at once where the result is so small that a BLAS adds them one by one.
FEW_ROWS = 256


def chunks_from_last(
    rows: Rows | None, *arrays: Tensor, few: bool = False
) -> Iterator[Sequence[Tensor]]:
    """Parts of the arrays, the same rows of each, for one BLAS call; the last rows come first.

    rows: where the rows of step arrays lie; None for other arrays, which are one chunk.
    few: parts of FEW_ROWS rows at most, to lose fewer digits where a BLAS adds row after row.
    """
    count = len(arrays[0])
    # A chunk has about ROWS_PER_CHUNK rows; only those of a large batch are longer, and are split.
    size = FEW_ROWS if few else 2 * ROWS_PER_CHUNK
    chunks = rows.chunks if rows else [range(count)]
    # Equal bits are promised on a CPU alone: a GPU is given all rows at once, in one launch.
    if arrays[0].is_cuda or (len(chunks) == 1 and count <= size):
        yield arrays
        return
    for chunk in reversed(chunks):
        for part in reversed(split_range(chunk, size)):
            yield [y[part.start : part.stop] for y in arrays]


class Sum:
    """A sum over rows that may arrive in segments, the last segment first."""

    def __init__(self) -> None:
        self.value: Tensor | None = None  # in float64 from the second term on
        self.dtype: torch.dtype | None = None  # of the terms
        self.may_overwrite = False  # is `value` an array made here, which nobody else holds?

    def add(self, part: Tensor) -> None:
        """Add a term: the first as it is, the others in float64."""
        self.dtype = part.dtype
        if self.value is None:
            self.value = part
            return
        in_place = self.value.dtype == torch.float64 and self.may_overwrite
        if in_place and not torch.is_grad_enabled():  # autograd may hold the old value
            self.value += part
        else:
            self.value = self.value.double() + part
            self.may_overwrite = True

    def add_product(self, rows: Rows | None, y: Tensor, r: Tensor) -> None:
        """Add the sum over rows of y_i r_i', [n, m], for y [N, n] and r [N, m]."""
        # Products are faster with the narrower array first, up to ten times if it is very narrow.
        r_first = r.shape[1] < y.shape[1]
        # For so small a result a BLAS adds one row after the other, which loses digits: it gets
        # few rows at a time, and their sums are added in float64.
        few = y.shape[1] * r.shape[1] <= 64
        for y_part, r_part in chunks_from_last(rows, y, r, few=few):
            if r_first:
                self.add(torch.mm(r_part.t(), y_part).t())
            else:
                self.add(torch.mm(y_part.t(), r_part))

    def add_rows(self, rows: Rows | None, y: Tensor) -> None:
        """Add the sum over rows of y_i, [n], for y [N, n]."""
        for (part,) in chunks_from_last(rows, y):
            self.add(part.sum(0))

    def total(self) -> Tensor:
        """The sum, in the type of its terms."""
        assert self.value is not None
        # Contiguous: parameters_to_vector, for one, calls view() on gradients.
        return self.value.to(self.dtype).contiguous()


def sum_products(rows: Rows | None, y: Tensor, r: Tensor) -> Tensor:
    """The sum over rows of y_i r_i', [n, m], for y [N, n] and r [N, m]; rows None: one chunk."""
    products = Sum()
    products.add_product(rows, y, r)
    return products.total()


def sum_rows(rows: Rows | None, y: Tensor) -> Tensor:
    """The sum over rows of y_i, [n], for y [N, n]; rows None: one chunk."""
    terms = Sum()
    terms.add_rows(rows, y)
    return terms.total()

"""Sums and products over rows, in fixed chunks of time steps.

The order in which numbers are added depends on how many rows there are. Here it is always that of
the same rows, chunk by chunk from the last to the first, so that a sequence swept in segments has
the bits of one swept at once. Chunks are added in float64: float32 loses digits over ten thousand
rows. Compiled code adds them where there is some; torch and its BLAS elsewhere, and where the sum
itself is to be differentiated.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from .rows import ROWS_PER_CHUNK, Bounds, Rows, row_bounds, split_range

# Rows added at once where the result is so small that a BLAS adds them one by one.
FEW_ROWS = 256
# Multiplications from which compiled code is faster. For fewer, a call of torch takes less time.
COMPILED_FROM = 500_000
# The multiplications that the sum of a row's entries counts as: beside products it takes no time.
SUM_OF_ROWS = 5


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


class CompiledProducts(Protocol):
    """The module with products over rows in compiled code: sweeps/engines/c/row_products.py."""

    def can_run(self, y: Tensor, others: Sequence[Tensor | None]) -> bool:
        """Whether it can read these arrays."""

    def add_products(self, bounds: Bounds, y: Tensor, r: Tensor | None, sums: Tensor) -> None:
        """Add the sums over rows of r_i y_i' to `sums`; r None: a column of ones."""

    def join_products(
        self, bounds: Bounds, y: Tensor, arrays: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The sums over rows of y_i r_i' for each r, and of y_i for None."""

    def affine_rows(self, y: Tensor, M: Tensor, b: Tensor | None) -> Tensor:
        """y_i M' + b for each row."""


@functools.cache
def compiled_module() -> CompiledProducts:
    """The compiled code. Engines import this module, so it is found by name."""
    module = importlib.import_module(f"{__package__}.engines.c.row_products")
    return cast(CompiledProducts, module)


def compiled_products(
    rows: Rows | None, y: Tensor, width: int, others: Sequence[Tensor | None]
) -> CompiledProducts | None:
    """The compiled code, if it can read these arrays and is the faster; else None.

    width: by how many numbers each entry of y [N, .] is multiplied; 0 for a sum of rows. Rows are
    counted over the full sequence, so that its segments all go the same way.
    """
    if not is_large(rows, y, width):
        return None
    compiled = compiled_module()
    return compiled if compiled.can_run(y, others) else None


def is_large(rows: Rows | None, y: Tensor, width: int) -> bool:
    """Is compiled code the faster for products of y [N, .] with `width` numbers in each row?

    width 0: for the sum of rows.
    """
    count = rows.rows_in_full if rows else len(y)
    return count * y.shape[1] * (width or SUM_OF_ROWS) >= COMPILED_FROM


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
        first, second = (r, y) if r_first else (y, r)
        if self._add_compiled(rows, first, second, r_first):
            return
        # For so small a result a BLAS adds one row after the other, which loses digits: it gets
        # few rows at a time, and their sums are added in float64.
        few = y.shape[1] * r.shape[1] <= 64
        for first_part, second_part in chunks_from_last(rows, first, second, few=few):
            product = torch.mm(first_part.t(), second_part)
            self.add(product.t() if r_first else product)

    def add_rows(self, rows: Rows | None, y: Tensor) -> None:
        """Add the sum over rows of y_i, [n], for y [N, n]."""
        if self._add_compiled(rows, None, y, False):
            return
        for (part,) in chunks_from_last(rows, y):
            self.add(part.sum(0))

    def _add_compiled(
        self, rows: Rows | None, first: Tensor | None, second: Tensor, flipped: bool
    ) -> bool:
        """Add the sum of first_i second_i' in compiled code, if that can run; first None: ones.

        flipped: the value is the transpose.
        """
        width = 0 if first is None else first.shape[1]
        compiled = compiled_products(rows, second, width, (first,))
        if compiled is None:
            return False
        m = second.shape[1]
        width = max(width, 1)  # ones are one column
        old = self.value
        if old is None:
            sums = second.new_zeros((width, m), dtype=torch.float64)
        else:
            old = (old.t() if flipped else old).reshape(-1, m)
            is_ours = self.may_overwrite and old.dtype == torch.float64 and old.is_contiguous()
            sums = old if is_ours else old.to(torch.float64, copy=True).contiguous()
        compiled.add_products(bounds_from_last(rows, second), second, first, sums)
        self.dtype = second.dtype
        self.may_overwrite = True
        if first is None:
            self.value = sums[0]
        else:
            self.value = sums.t() if flipped else sums
        return True

    def total(self) -> Tensor:
        """The sum, in the type of its terms."""
        assert self.value is not None
        # Contiguous: parameters_to_vector, for one, calls view() on gradients.
        return self.value.to(self.dtype).contiguous()


def bounds_from_last(rows: Rows | None, y: Tensor) -> Bounds:
    """The first row of each chunk of y and the row after its last; the last chunk comes first."""
    return rows.bounds_from_last if rows else row_bounds([range(len(y))])


def sum_products(rows: Rows | None, y: Tensor, r: Tensor) -> Tensor:
    """The sum over rows of y_i r_i', [n, m], for y [N, n] and r [N, m]; rows None: one chunk."""
    narrower, wider = (r, y) if r.shape[1] <= y.shape[1] else (y, r)
    compiled = compiled_products(rows, wider, narrower.shape[1], (narrower,))
    if compiled is not None:
        (total,) = compiled.join_products(bounds_from_last(rows, y), wider, (narrower,))
        return total if narrower is r else total.t().contiguous()
    products = Sum()
    products.add_product(rows, y, r)
    return products.total()


def sum_rows(rows: Rows | None, y: Tensor) -> Tensor:
    """The sum over rows of y_i, [n], for y [N, n]; rows None: one chunk."""
    terms = Sum()
    terms.add_rows(rows, y)
    return terms.total()


def sum_joined(rows: Rows | None, y: Tensor, arrays: Sequence[Tensor | None]) -> list[Tensor]:
    """sum_products(rows, y, r) for each array r, and sum_rows(rows, y) for None, with their bits.

    Compiled code reads y once for all of them.
    """
    joined = [i for i, r in enumerate(arrays) if is_large(rows, y, 0 if r is None else r.shape[1])]
    chosen = [arrays[i] for i in joined]
    if not joined or not compiled_module().can_run(y, chosen):
        joined = []
    totals: list[Tensor | None] = [None] * len(arrays)
    if joined:
        sums = compiled_module().join_products(bounds_from_last(rows, y), y, chosen)
        for i, total in zip(joined, sums, strict=True):
            totals[i] = total
    for i, r in enumerate(arrays):
        if totals[i] is None:
            totals[i] = sum_rows(rows, y) if r is None else sum_products(rows, y, r)
    return cast(list[Tensor], totals)

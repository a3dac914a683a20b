"""Products over the rows of many time steps, in compiled code where there is some.

torch differentiates a step called with the rows of many steps, and so computes y M' with many rows
y, and sums over them: the gradients by weights. A BLAS takes longer for these than row_products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ..affine import compiled_affine
from ..chunks import compiled_products, sum_products, sum_rows
from ..torch_internals import OperationMode

Operator = Callable[..., object]
ATEN = torch.ops.aten
# Multiplications of all rows by a matrix [n, n] from which it pays to look at every operation.
WORTH_FROM = 10_000_000


def row_products(x: Tensor) -> AbstractContextManager[object]:
    """RowProducts for steps with the states x [N, n], or nothing where it would take longer."""
    rows, n = x.shape
    return RowProducts(rows) if rows * n * n >= WORTH_FROM else nullcontext()


class RowProducts(OperationMode):
    """A context in which the products over rows of all operations below autograd are compiled."""

    def __init__(self, rows: int) -> None:
        """rows: how many there are."""
        super().__init__()
        self.rows = rows

    def __torch_dispatch__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Compute an operation."""
        return computed(func, args, kwargs or {}, self.rows)


def computed(
    operator: Operator, arguments: Sequence[object], keywords: Mapping[str, object], rows: int
) -> object:
    """operator(*arguments, **keywords): compiled if it is a product over so many rows."""
    compute = COMPILED.get(operator)
    if compute is not None and not keywords:
        with torch.no_grad():  # autograd lies above this operation
            result = compute(rows, *arguments)
        if result is not None:
            return result
    return operator(*arguments, **keywords)


def product(rows: int, y: Tensor, z: Tensor) -> Tensor | None:
    """Y z, the rows being those of y or what is summed over; None where a BLAS is as fast."""
    if len(y) == rows:
        return sum_and_product(rows, None, y, z)
    if len(z) == rows and compiled_products(None, z, len(y), (y,)) is not None:
        return sum_products(None, y.t(), z)
    return None


def sum_and_product(rows: int, b: Tensor | None, y: Tensor, z: Tensor) -> Tensor | None:
    """B + y z, the rows being those of y; None where a BLAS is as fast."""
    if len(y) != rows or (b is not None and b.shape != z.shape[1:]):
        return None
    compiled = compiled_affine(None, y, z.t(), b)
    return None if compiled is None else compiled.affine_rows(y, z.t(), b)


def sum_over(rows: int, y: Tensor, axes: Sequence[int], keep: bool = False) -> Tensor | None:
    """The sum of y over its rows; None where torch is as fast."""
    if y.dim() != 2 or len(y) != rows or list(axes) != [0]:
        return None
    if compiled_products(None, y, 1, ()) is None:
        return None
    total = sum_rows(None, y)
    return total[None] if keep else total


COMPILED: dict[Operator, Callable[..., Tensor | None]] = {
    ATEN.mm.default: product,
    ATEN.addmm.default: sum_and_product,
    ATEN.sum.dim_IntList: sum_over,
}

"""y_i M' + b for every step row, by chunks of time steps, so that a sequence swept in segments has the same bits."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .chunks import chunks_from_last, sum_products, sum_rows
from .memory import empty
from .pointwise import needed_inputs, nestable_jvp, vmap_error, with_quick_apply, without_autocast
from .rows import Rows
from .torch_internals import autocast_is_on


def plus(*terms: Tensor | None) -> Tensor | None:
    """The sum of the terms that are there; None stands for zero."""
    found = [t for t in terms if t is not None]
    return functools.reduce(torch.add, found) if found else None


@with_quick_apply
class Affine(Function):
    """y_i M' + b for step rows, by chunks."""

    @staticmethod
    def forward(rows: Rows, y: Tensor, M: Tensor, b: Tensor | None) -> Tensor:
        out = empty((len(y), len(M)), y)
        Mt = (
            M.contiguous() if 8 * len(M) <= M.shape[1] else M
        ).t()  # a BLAS is slow at few columns that lie side by side
        for part, into in chunks_from_last(rows, y, out):
            part = align_to_64_bytes(part)
            torch.mm(part, Mt, out=into) if b is None else torch.addmm(b, part, Mt, out=into)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.rows, y, M, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, M)
        ctx.save_for_forward(y, M)

    @staticmethod
    def backward(ctx: Any, g: Tensor | None) -> Any:
        if autocast_is_on():
            return without_autocast(Affine.backward, ctx, g)
        (y, M), rows, need = ctx.saved_tensors, ctx.rows, needed_inputs(ctx)
        if g is None:
            return (None,) * 4
        gy = affine(rows, g, M.t(), None) if need[1] else None
        return (
            None,
            gy,
            sum_products(rows, g, y) if need[2] else None,
            sum_rows(rows, g) if need[3] else None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, _rows: Any, dy: Tensor | None, dM: Tensor | None, db: Tensor | None) -> Any:
        y, M = ctx.saved_tensors
        out = plus(
            None if dy is None else affine(ctx.rows, dy, M, None),
            None if dM is None else y @ dM.t(),
            db,
        )
        return None if out is None else out.expand(len(y), len(M))

    vmap = staticmethod(lambda *_: raise_error(vmap_error()))


def affine(rows: Rows | None, y: Tensor, M: Tensor, b: Tensor | None) -> Tensor:
    """y_i M' + b; rows: those of a step array, None for any others."""
    return torch.nn.functional.linear(y, M, b) if rows is None else Affine.apply(rows, y, M, b)


def align_to_64_bytes(y: Tensor) -> Tensor:
    """A BLAS may add up in another order where an array does not begin at a multiple of 64 bytes."""
    return y if y.data_ptr() % 64 == 0 else y.clone(memory_format=torch.contiguous_format)


def raise_error(error: Exception) -> None:
    raise error

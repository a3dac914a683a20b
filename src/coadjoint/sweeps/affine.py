"""y_i M' + b for every step row, chunk by chunk.

The chunks are the same whether a sequence is swept at once or in segments, and so are the bits.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .chunks import CompiledProducts, chunks_from_last, compiled_products, sum_products, sum_rows
from .functions import (
    Context,
    Gradients,
    SweepFunction,
    needed_inputs,
    nestable_jvp,
    with_quick_apply,
    without_autocast,
)
from .memory import empty
from .rows import Rows
from .torch_internals import autocast_is_on


def plus(*terms: Tensor | None) -> Tensor | None:
    """The sum of the terms; None counts as zero, and a sum of nothing is None."""
    present = [term for term in terms if term is not None]
    if not present:
        return None
    return functools.reduce(torch.add, present)


def has_few_columns(M: Tensor) -> bool:
    """Has M' few columns beside its rows?"""
    return 8 * len(M) <= M.shape[1]


def compiled_affine(
    rows: Rows | None, y: Tensor, M: Tensor, b: Tensor | None
) -> CompiledProducts | None:
    """The compiled code for y_i M' + b; None where a BLAS is as fast.

    Few columns would leave most of a vector of compiled code empty.
    """
    return None if has_few_columns(M) else compiled_products(rows, y, len(M), (M, b))


class AffineContext(Context):
    """The context of Affine."""

    rows: Rows


@with_quick_apply
class Affine(SweepFunction):
    """y_i M' + b for step rows, by chunks: apply(rows, y [N, n], M [m, n], b [m] or None)."""

    @staticmethod
    def forward(rows: Rows, y: Tensor, M: Tensor, b: Tensor | None) -> Tensor:
        """The rows y_i M' + b, [N, m]: compiled, or else one product for each chunk of rows."""
        compiled = compiled_affine(rows, y, M, b)
        if compiled is not None:
            return compiled.affine_rows(y, M, b)
        out = empty((len(y), len(M)), y)
        # M may be a transposed view, so that the m columns of M' lie side by side in memory. A BLAS
        # is slow at that if m is small beside n: there, each column is laid out by itself.
        Mt = M.contiguous().t() if has_few_columns(M) else M.t()
        for chunk, into in chunks_from_last(rows, y, out):
            # The order in which a BLAS adds depends on the alignment, too; the bits must not.
            part = align_to_64_bytes(chunk)
            if b is None:
                torch.mm(part, Mt, out=into)
            else:
                torch.addmm(b, part, Mt, out=into)
        return out

    @staticmethod
    def setup_context(
        ctx: AffineContext, inputs: tuple[Rows, Tensor, Tensor, Tensor | None], output: Tensor
    ) -> None:
        """Keep y and M, which the derivatives read."""
        ctx.rows, y, M, _ = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, M)
        ctx.save_for_forward(y, M)

    @staticmethod
    def backward(ctx: AffineContext, g: Tensor | None) -> Gradients:
        """From the gradient g [N, m] by the result, those by y, M and b: g M, g' y, sum of g_i."""
        if autocast_is_on():
            return without_autocast(Affine.backward, ctx, g)
        y, M = ctx.saved_tensors
        rows = ctx.rows
        _, need_y, need_M, need_b = needed_inputs(ctx)
        if g is None:
            return (None,) * 4
        gy = affine(rows, g, M.t(), None) if need_y else None
        gM = sum_products(rows, g, y) if need_M else None
        gb = sum_rows(rows, g) if need_b else None
        return None, gy, gM, gb

    @staticmethod
    @nestable_jvp
    def jvp(
        ctx: AffineContext, _rows: None, dy: Tensor | None, dM: Tensor | None, db: Tensor | None
    ) -> Tensor | None:
        """The direction dy M' + y dM' + db."""
        y, M = ctx.saved_tensors
        through_y = None if dy is None else affine(ctx.rows, dy, M, None)
        through_M = None if dM is None else y @ dM.t()
        out = plus(through_y, through_M, db)
        return None if out is None else out.expand(len(y), len(M))  # db alone is [m]


def affine(rows: Rows | None, y: Tensor, M: Tensor, b: Tensor | None) -> Tensor:
    """y_i M' + b for each row y_i of y [N, n].

    rows: where the rows of a step array lie, so that it is computed by chunks; None if y is none.
    """
    if rows is None:
        return torch.nn.functional.linear(y, M, b)
    out: Tensor = Affine.apply(rows, y, M, b)
    return out


def align_to_64_bytes(y: Tensor) -> Tensor:
    """`y`, copied if its memory does not begin at a multiple of 64 bytes.

    A BLAS may add in another order there, so that a chunk would have other bits in a segment.
    """
    if y.data_ptr() % 64 == 0:
        return y
    return y.clone(memory_format=torch.contiguous_format)

"""A sweep as one operator that torch.compile does not look into, with its first derivative.

The compiled program calls the same engines. It has one derivative: a second one is refused, by
torch where the backward has been compiled too, and here where it has not.

An operator's results must not share memory with its arguments or with each other: a compiled
program returns gradients as they are, and a user may change one of them in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ...cells.cell import Cell
from ...errors import Unsupported
from .. import differentiable
from ..plan import Saved, SweepPlan
from ..rows import uniform_rows
from . import load, resolve

CELLS_BY_NAME: dict[str, Cell] = {}  # operators take strings: compiled programs name their cell


def make_plan(cell: str, engine: str, x0: Tensor, base: Tensor) -> SweepPlan:
    """The plan of a sweep over samples of equal length, for base [T B, .] and x0 [B, .].

    cell, engine: names, since operators take no other objects.
    """
    formula = CELLS_BY_NAME[cell]
    loops = load(resolve(engine, formula, base.device.type, base.dtype))
    assert loops is not None  # engine 'autograd' is not called through here
    rows = uniform_rows(len(base) // len(x0), len(x0))
    # Unchecked: inf and NaN go through, as in every module of torch.
    return SweepPlan(formula, rows, loops, checked=False)


def or_empty(y: Tensor | None, like: Tensor) -> Tensor:
    """Return y, or an empty tensor for None, like `like`: an operator must return tensors."""
    return like.new_empty(0) if y is None else y


def gradient_or_zeros(g: Tensor | None, of: Tensor | None, like: Tensor) -> Tensor:
    """The gradient g by the input `of`: zeros for None, and empty where there is no such input."""
    if of is None:
        return like.new_empty(0)
    return torch.zeros_like(of) if g is None else g


@torch.library.custom_op("coadjoint::own", mutates_args=())
def with_own_gradient(y: Tensor) -> Tensor:
    """Copy y, so that its gradient shares memory with no other.

    autograd gives all terms of a sum one tensor as their gradient, and joined arrays get parts of
    one. It copies that tensor where two parameters would get the same, but a program compiled by
    inductor returns the same memory for both.
    """
    return y.clone(memory_format=torch.contiguous_format)


@with_own_gradient.register_fake
def _(y: Tensor) -> Tensor:
    """The shape of the result, for torch.compile, which runs no operator while it traces."""
    return y.new_empty(y.shape)


def _own_gradient(ctx: FunctionCtx, g: Tensor) -> Tensor:
    """The backward of a copy: the gradient g in memory of its own."""
    copied: Tensor = with_own_gradient(g)
    return copied


with_own_gradient.register_autograd(_own_gradient)


@torch.library.custom_op("coadjoint::sweep", mutates_args=())
def sweep(
    base: Tensor,
    side: Tensor | None,
    W: Tensor,
    x0: Tensor,
    p: Tensor | None,
    cell: str,
    engine: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward sweep of samples of equal length: x [B + N, .], a [N, .] and q [N, .].

    side: the array v of the cell, or None. q: the values of the cell's saved nodes; empty if the
    engine saves none.
    """
    plan = make_plan(cell, engine, x0, base)
    x, a, q = plan.engine.forward(plan, base, side, W, x0, p)
    return x, a, or_empty(q, x)


@sweep.register_fake
def _(
    base: Tensor,
    side: Tensor | None,
    W: Tensor,
    x0: Tensor,
    p: Tensor | None,
    cell: str,
    engine: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes of x, a and q, for torch.compile, which runs no operator while it traces."""
    formula = CELLS_BY_NAME[cell]
    d = x0.shape[1] // len(formula.slots)
    x = base.new_empty(len(base) + len(x0), x0.shape[1])
    q = base.new_empty(0)  # engine 'reference' saves no nodes
    if (
        formula.saved_nodes
        and resolve(engine, formula, base.device.type, base.dtype) != "reference"
    ):
        q = base.new_empty(len(base), len(formula.saved_nodes) * d)
    return x, base.new_empty(base.shape), q


@torch.library.custom_op("coadjoint::sweep_back", mutates_args=())
def sweep_back(
    gx: Tensor,
    base: Tensor,
    side: Tensor | None,
    W: Tensor,
    x0: Tensor,
    p: Tensor | None,
    x: Tensor,
    a: Tensor,
    q: Tensor,
    cell: str,
    engine: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients by base, side, W, x0 and p, given gx, the gradient by x.

    x, a, q: what the forward sweep returned. A gradient is empty where its input is None.
    """
    saved = Saved(a, side, x, p, q if q.numel() else None)
    plan = make_plan(cell, engine, x0, base)
    needed = (True, side is not None, True, True, p is not None)
    gradients = differentiable.forward_gradient(plan, saved, W, gx, None, None, needed)
    inputs = (base, side, W, x0, p)
    gbase, gside, gW, gx0, gp = map(gradient_or_zeros, gradients, inputs, [gx] * len(inputs))
    return gbase, gside, gW, gx0.clone(), gp  # gx0 may be a part of gx


@sweep_back.register_fake
def _(
    gx: Tensor,
    base: Tensor,
    side: Tensor | None,
    W: Tensor,
    x0: Tensor,
    p: Tensor | None,
    x: Tensor,
    a: Tensor,
    q: Tensor,
    cell: str,
    engine: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The shapes of the gradients, for torch.compile, which runs no operator while it traces."""

    def like(y: Tensor | None) -> Tensor:
        """A gradient of the shape of y; empty for None."""
        return gx.new_empty(0) if y is None else gx.new_empty(y.shape)

    return like(base), like(side), like(W), like(x0), like(p)


class OperatorContext(FunctionCtx):
    """What the backward of a sweep finds: its tensors, its cell and its engine."""

    cell: str
    engine: str
    saved_tensors: tuple[Tensor, ...]


def _save(ctx: OperatorContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep the inputs of `sweep` and its output (x, a, q) for the backward."""
    *tensors, ctx.cell, ctx.engine = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(
    ctx: OperatorContext, gx: Tensor, ga: Tensor, gq: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs of `sweep`, None for its two names (cell, engine).

    Only gx counts: a and q are returned for this backward, and no loss depends on them.
    """
    base, side, W, x0, p, x, a, q = ctx.saved_tensors
    gradients = sweep_back(gx, base, side, W, x0, p, x, a, q, ctx.cell, ctx.engine)
    gbase, gside, gW, gx0, gp = gradients
    gside_or_none = None if side is None else gside
    gp_or_none = None if p is None else gp
    return gbase, gside_or_none, gW, gx0, gp_or_none, None, None


def _refuse_second_derivative(ctx: FunctionCtx, *gradients: Tensor) -> None:
    """The backward of `sweep_back`: an error, since a compiled sweep has no second derivative."""
    raise Unsupported(
        "a compiled recurrence can be differentiated only once, but this is a second "
        "derivative. Take it from the model without torch.compile: no part that is "
        "differentiated twice can be compiled."
    )


sweep.register_autograd(_backward, setup_context=_save)
sweep_back.register_autograd(_refuse_second_derivative)

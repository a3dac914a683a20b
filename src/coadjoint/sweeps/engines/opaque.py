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
    """The plan of a sweep over samples of equal length."""
    formula = CELLS_BY_NAME[cell]
    loops = load(resolve(engine, formula, base.device.type))
    assert loops is not None  # engine 'autograd' is not called through here
    rows = uniform_rows(len(base) // len(x0), len(x0))
    return SweepPlan(formula, rows, loops, checked=False)


def or_empty(y: Tensor | None, like: Tensor) -> Tensor:
    """Return y, or an empty tensor for None: an operator must return tensors."""
    return like.new_empty(0) if y is None else y


def gradient_or_zeros(g: Tensor | None, of: Tensor | None, like: Tensor) -> Tensor:
    """The gradient g of an input: zeros if nothing depends on it, empty if the input is None."""
    if of is None:
        return like.new_empty(0)
    return torch.zeros_like(of) if g is None else g


@torch.library.custom_op("coadjoint::own", mutates_args=())
def with_own_gradient(y: Tensor) -> Tensor:
    """Copy y, so that its gradient shares memory with no other.

    The gradients of a sum's terms are one tensor, and those of joined parts lie in one. autograd
    copies it where two parameters would get the same, but a program compiled by inductor returns
    that memory once for each of them.
    """
    return y.clone(memory_format=torch.contiguous_format)


@with_own_gradient.register_fake
def _(y: Tensor) -> Tensor:
    return y.new_empty(y.shape)


def _own_gradient(ctx: FunctionCtx, g: Tensor) -> Tensor:
    own: Tensor = with_own_gradient(g)
    return own


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
    """The forward sweep (x [B + N, n], a, q) of samples of equal length; q is empty for None."""
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
    formula = CELLS_BY_NAME[cell]
    d = x0.shape[1] // len(formula.slots)
    x = base.new_empty(len(base) + len(x0), x0.shape[1])
    q = base.new_empty(0)
    if formula.saved_nodes and resolve(engine, formula, base.device.type) != "reference":
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
    """The gradient by base, side, W, x0 and p, for the gradient gx by x."""
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
    def like(y: Tensor | None) -> Tensor:
        return gx.new_empty(0) if y is None else gx.new_empty(y.shape)

    return like(base), like(side), like(W), like(x0), like(p)


class OperatorContext(FunctionCtx):
    """What the backward of a sweep finds: its tensors, its cell and its engine."""

    cell: str
    engine: str
    saved_tensors: tuple[Tensor, ...]


def _save(ctx: OperatorContext, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.cell, ctx.engine = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(
    ctx: OperatorContext, gx: Tensor, ga: Tensor, gq: Tensor
) -> tuple[Tensor | None, ...]:
    base, side, W, x0, p, x, a, q = ctx.saved_tensors
    gradients = sweep_back(gx, base, side, W, x0, p, x, a, q, ctx.cell, ctx.engine)
    gbase, gside, gW, gx0, gp = gradients
    gside_or_none = None if side is None else gside
    gp_or_none = None if p is None else gp
    return gbase, gside_or_none, gW, gx0, gp_or_none, None, None


def _refuse_second_derivative(ctx: FunctionCtx, *gradients: Tensor) -> None:
    raise Unsupported(
        "a compiled recurrence can be differentiated only once, but this is a second "
        "derivative. Take it from the model without torch.compile: no part that is "
        "differentiated twice can be compiled."
    )


sweep.register_autograd(_backward, setup_context=_save)
sweep_back.register_autograd(_refuse_second_derivative)

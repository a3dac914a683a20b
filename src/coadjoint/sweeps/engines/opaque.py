"""A sweep as one operator that torch.compile does not look into, with its first derivative.

The compiled program calls the same engines. It takes one derivative: a second one is refused, by torch where the backward
has been compiled too, and here where it has not.

What an operator returns must share no memory with what it was given nor with what else it returns: a compiled program
hands gradients out as they are, and somebody will change one of them in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cells.cell import Cell
from ...errors import Unsupported
from .. import differentiable
from ..plan import Saved, SweepPlan
from ..rows import uniform_rows
from . import load, resolve

CELLS_BY_NAME: dict[str, Cell] = {}  # by the name under which compiled programs call them


def make_plan(cell: str, engine: str, x0: Tensor, base: Tensor) -> SweepPlan:
    found = load(resolve(engine, CELLS_BY_NAME[cell], base.device.type))
    assert found is not None  # engine 'autograd' is not called through here
    return SweepPlan(
        CELLS_BY_NAME[cell], uniform_rows(len(base) // len(x0), len(x0)), found, checked=False
    )


def or_empty(y: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if y is None else y


def gradient_or_zeros(g: Tensor | None, of: Tensor | None, like: Tensor) -> Tensor:
    """g as a gradient of `of`: zeros where nothing depends on it, and empty where there is no such input."""
    if of is None:
        return like.new_empty(0)
    return torch.zeros_like(of) if g is None else g


@torch.library.custom_op("coadjoint::own", mutates_args=())
def with_own_gradient(y: Tensor) -> Tensor:
    """y, whose gradient has memory of its own.

    The gradients of a sum's terms are one tensor, and those of joined parts lie in one. autograd copies it where two
    parameters would get the same, but a program compiled by inductor returns that memory once for each of them."""
    return y.clone(memory_format=torch.contiguous_format)


@with_own_gradient.register_fake
def _(y: Tensor) -> Tensor:
    return y.new_empty(y.shape)


with_own_gradient.register_autograd(lambda ctx, g: with_own_gradient(g))


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
    """-> (x [B + N, n], a, q), for samples of equal length."""
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
    keeps = formula.saved_nodes and resolve(engine, formula, base.device.type) != "reference"
    q = base.new_empty(len(base), len(formula.saved_nodes) * d) if keeps else base.new_empty(0)
    return x, base.new_empty(base.shape), q


@torch.library.custom_op("coadjoint::sweep_back", mutates_args=())
def sweep_back(
    gx: Tensor, base: Tensor, side: Tensor | None, W: Tensor, x0: Tensor, p: Tensor | None,
    x: Tensor, a: Tensor, q: Tensor, cell: str, engine: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """-> the gradient by base, side, W, x0 and p."""
    saved = Saved(a, side, x, p, q if q.numel() else None)
    plan = make_plan(cell, engine, x0, base)
    found = differentiable.forward_gradient(
        plan, saved, W, gx, None, None, (True, side is not None, True, True, p is not None)
    )
    gbase, gside, gW, gx0, gp = map(gradient_or_zeros, found, (base, side, W, x0, p), [gx] * 5)
    return gbase, gside, gW, gx0.clone(), gp


@sweep_back.register_fake
def _(
    gx: Tensor, base: Tensor, side: Tensor | None, W: Tensor, x0: Tensor, p: Tensor | None,
    x: Tensor, a: Tensor, q: Tensor, cell: str, engine: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = lambda y: gx.new_empty(0) if y is None else gx.new_empty(y.shape)
    return like(base), like(side), like(W), like(x0), like(p)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.cell, ctx.engine = inputs
    ctx.save_for_backward(*tensors, *output)


def _back(ctx: Any, gx: Tensor, ga: Tensor, gq: Tensor) -> tuple[Any, ...]:
    base, side, W, x0, p, x, a, q = ctx.saved_tensors
    found = sweep_back(gx, base, side, W, x0, p, x, a, q, ctx.cell, ctx.engine)
    gbase, gside, gW, gx0, gp = found
    return gbase, None if side is None else gside, gW, gx0, None if p is None else gp, None, None


def _no_more(ctx: Any, *_: Any) -> None:
    raise Unsupported(
        "a compiled recurrence has one derivative, and this is a second one. Take it from the model without torch.compile: "
        "no part that is differentiated twice can be compiled."
    )


sweep.register_autograd(_back, setup_context=_keep)
sweep_back.register_autograd(_no_more)

"""What differentiable.py needs of a cell, for all steps at once: f and r, their slopes, and the bend.

The bend is the gradient of sum_t <lam_t, f_x m_t + f_a nu_t> + <W' del_t, r' m_t> by where the slopes are taken: the
second derivative of a step, contracted with a costate and a tangent.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cells.cell import Cell
from .affine import affine, plus
from .plan import Saved, SweepPlan
from .pointwise import Pointwise
from .rows import Rows


@functools.cache
def step_map(cell: Cell) -> Pointwise:
    """x_t = f(a, v, x, p)"""
    inputs = (("a", cell.a), ("v", cell.v), ("x", cell.x), ("p", cell.p))
    return Pointwise(inputs, (("x", cell.next),), (cell.next, cell.saved_nodes), frozenset({"p"}))


@functools.cache
def read_map(cell: Cell) -> Pointwise:
    """r(x)"""
    return Pointwise((("x", cell.x),), (("r", cell.read),), (), frozenset())


def pick_read_slot(cell: Cell, x: Tensor) -> Tensor:
    d = x.shape[-1] // len(cell.slots)
    slot = cell.read_slot or 0
    return x if len(cell.slots) == 1 else x[:, slot * d : (slot + 1) * d]


def read_values(cell: Cell, x: Tensor, rows: Rows | None = None) -> Tensor:
    return (
        pick_read_slot(cell, x)
        if cell.read_slot is not None
        else _not_none(read_map(cell)((), x, rows=rows)["r"])
    )


def read_push(cell: Cell, x: Tensor, m: Tensor, rows: Rows | None = None) -> Tensor:
    """r'(x) m"""
    if cell.read_slot is not None:
        return pick_read_slot(cell, m)
    found = read_map(cell).pushed(("x",))((), x, m, rows=rows)["r"]
    return (
        x.new_zeros(len(x), x.shape[1] // len(cell.slots) * len(cell.read))
        if found is None
        else found
    )


def read_pull(cell: Cell, x: Tensor, rbar: Tensor) -> Tensor:
    """r'(x)' rbar"""
    if cell.read_slot is None:
        found = read_map(cell).pulled(("r",), ("x",))((), x, rbar)["x"]
        return torch.zeros_like(x) if found is None else found
    d, after = rbar.shape[1], len(cell.slots) - 1 - cell.read_slot
    return pad(rbar, (cell.read_slot * d, after * d))


def _not_none(y: Tensor | None) -> Tensor:
    assert y is not None
    return y


def present_directions(**dots: Tensor | None) -> list[tuple[str, Tensor]]:
    return [(name, dot) for name, dot in dots.items() if dot is not None]


def bend(
    plan: SweepPlan, saved: Saved, W: Tensor | None, lam: Tensor, delta: Tensor, m: Tensor, nu: Tensor, wrt: tuple[str, ...],
    rowwise: bool = False,
) -> dict[str, Tensor | None]:  # fmt: skip
    """The gradient of sum_t <lam_t, f_x m_t + f_a nu_t> + <W' delta_t, r' m_t> by the tape: a, v, x (a state array), p.
    rowwise: that by p is not summed over rows."""
    cell, rows = plan.cell, plan.rows
    xprev, y = rows.prev(saved.x), (saved.x[rows.B :], saved.q)
    op = step_map(cell).pushed(("a", "x")).pulled(("x",), wrt)
    op = op.rowwise if rowwise else op
    grads = op(y, saved.a, saved.v, xprev, saved.p, nu, m, lam[rows.B :], rows=rows)
    if "x" in wrt:
        of_x = grads["x"]
        if W is not None and cell.read_slot is None:
            turn = read_map(cell).pushed(("x",)).pulled(("r",), ("x",))
            of_x = plus(of_x, turn((), xprev, m, affine(rows, delta, W.t(), None), rows=rows)["x"])
        grads["x"] = None if of_x is None else rows.prev_transposed(of_x)
    return grads

"""What differentiable.py needs of a cell, for all steps at once: f and r, their slopes, the bend.

The bend is the gradient of sum_t <lam_t, f_x m_t + f_a nu_t> + <W' del_t, r' m_t> by the point at
which the slopes are taken: the second derivative of a step, contracted with costate and tangent.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cells.cell import Cell
from .affine import plus
from .plan import Saved, SweepPlan
from .pointwise import Pointwise
from .rows import Rows
from .weights import chunked_products


@functools.cache
def step_map(cell: Cell) -> Pointwise:
    """The step x_t = f(a_t, v_t, x_{t-1}, p), for all step rows at once.

    Its values x_t and those of cell.saved_nodes need not be computed again where the forward loop
    has kept them. p is the same for all rows.
    """
    inputs = (("a", cell.a), ("v", cell.v), ("x", cell.x), ("p", cell.p))
    return Pointwise(inputs, (("x", cell.next),), (cell.next, cell.saved_nodes), frozenset({"p"}))


@functools.cache
def read_map(cell: Cell) -> Pointwise:
    """r(x), what W reads of a state: a = base + W r(x)."""
    return Pointwise((("x", cell.x),), (("r", cell.read),), (), frozenset())


def pick_read_slot(cell: Cell, x: Tensor) -> Tensor:
    """The slot of x [rows, slots d] that W reads, [rows, d], of a cell for which r(x) is a slot."""
    if len(cell.slots) == 1:
        return x
    d = x.shape[-1] // len(cell.slots)
    slot = cell.read_slot or 0  # never None here; the type checker cannot know
    return x[:, slot * d : (slot + 1) * d]


def read_values(cell: Cell, x: Tensor, rows: Rows | None = None) -> Tensor:
    """r(x), what W reads of the state: x [rows, slots d] -> [rows, reads d], row by row.

    rows: how the rows of a step array lie in time, so that it is computed in chunks of steps, by
    compiled code where it is large; None for the rows of one step, which are few.
    """
    if cell.read_slot is not None:
        return pick_read_slot(cell, x)
    r = read_map(cell)((), x, rows=rows)["r"]  # (): no value of the map is known beforehand
    assert r is not None
    return r


def read_push(cell: Cell, x: Tensor, m: Tensor, rows: Rows | None = None) -> Tensor:
    """r'(x) m, row by row: the change of what W reads, r(x), along a change m of the state.

    rows: as in `read_values`.
    """
    if cell.read_slot is not None:
        return pick_read_slot(cell, m)
    pushed = read_map(cell).pushed(("x",))((), x, m, rows=rows)["r"]
    if pushed is None:  # identically zero
        d = x.shape[1] // len(cell.slots)
        return x.new_zeros(len(x), d * len(cell.read))
    return pushed


def read_pull(cell: Cell, x: Tensor, rbar: Tensor) -> Tensor:
    """r'(x)' rbar, row by row: the gradient by the state from that by r(x), which W reads."""
    if cell.read_slot is None:
        pulled = read_map(cell).pulled(("r",), ("x",))((), x, rbar)["x"]
        return torch.zeros_like(x) if pulled is None else pulled
    # r(x) is a slot: its gradient goes there, and the other slots get zeros.
    d = rbar.shape[1]
    slots_after = len(cell.slots) - 1 - cell.read_slot
    return pad(rbar, (cell.read_slot * d, slots_after * d))


def present_directions(**directions: Tensor | None) -> dict[str, Tensor]:
    """The directions that are not None, by name and in order."""
    return {name: dot for name, dot in directions.items() if dot is not None}


def at_saved(
    op: Pointwise, rows: Rows, saved: Saved, xprev: Tensor, *more: Tensor, chunked: bool = False
) -> dict[str, Tensor | None]:
    """`op`, a derivative of step_map, at the saved arrays; more: its cotangents or directions.

    xprev: x_{t-1} of each step row. chunked: hand on where the rows lie, so that sums over them are
    taken in chunks of time steps and compiled code may run.
    """
    at_hand = (saved.x[rows.B :], saved.q)  # values of the step that need not be computed again
    chunk_rows = rows if chunked else None
    return op(at_hand, saved.a, saved.v, xprev, saved.p, *more, rows=chunk_rows)


def to_state_rows(rows: Rows, g: Tensor | None) -> Tensor | None:
    """A step array [N, n] as a state array [B + N, n], zero at the initial states."""
    if g is None:
        return None
    return pad(g, (0, 0, rows.B, 0))


def bend(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    lam: Tensor,
    delta: Tensor,
    m: Tensor,
    nu: Tensor,
    wrt: tuple[str, ...],
    rowwise: bool = False,
) -> dict[str, Tensor | None]:
    """The gradient of sum_t <lam_t, f_x m_t + f_a nu_t> + <W' delta_t, r' m_t> by saved arrays.

    wrt: by which of a, v, x, p. The gradient by x is a state array; that by p is summed over rows,
    unless rowwise. m_t = link_t mu_{t-1} and nu_t are tangents of x_{t-1} and a_t; r(x) is what W
    reads of a state.
    """
    cell = plan.cell
    rows = plan.rows
    xprev = rows.prev(saved.x)
    at_hand = (saved.x[rows.B :], saved.q)  # values of the step that need not be computed again
    # f_x m + f_a nu is the step pushed along (nu, m); the gradient pulls lam back through that.
    op = step_map(cell).pushed(("a", "x")).pulled(("x",), wrt)
    if rowwise:
        op = op.rowwise
    grads = op(at_hand, saved.a, saved.v, xprev, saved.p, nu, m, lam[rows.B :], rows=rows)
    if "x" in wrt:
        by_xprev = grads["x"]
        if W is not None and cell.read_slot is None:  # a slot has no second derivative
            read_bend = read_map(cell).pushed(("x",)).pulled(("r",), ("x",))
            rbar = chunked_products(rows, delta, W)
            by_xprev = plus(by_xprev, read_bend((), xprev, m, rbar, rows=rows)["x"])
        grads["x"] = None if by_xprev is None else rows.prev_transposed(by_xprev)
    return grads

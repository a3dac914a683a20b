"""The formulas of one step of the adjoint and the tangent loop, and what of them can be had before the loop.

adjoint   del_t = sa_t + f_a' lam_t      lam_{t-1} = s_{t-1} + f_x' lam_t + r' W' del_t
tangent   nu_t  = ga_t + W r' m_t        mu_t      = g_t + f_x m_t + f_a nu_t
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ...cells.cell import Cell
from ...cells.formula import ZERO, Node, is_const, loop_invariants, pull, push, symbol


def symbols(kind: str, count: int) -> tuple[Node, ...]:
    return tuple(symbol(f"{kind}.{i}") for i in range(count))


@functools.cache
def _is_made_of(n: Node, leaves: tuple[Node, ...]) -> bool:
    return (
        n in leaves or is_const(n) or (bool(n.args) and all(_is_made_of(a, leaves) for a in n.args))
    )


@functools.cache
def hoisted_terms(
    cell: Cell, outputs: tuple[Node, ...], moving: tuple[Node, ...], at_hand: frozenset[Node]
) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """What a loop over `moving` needs and can be had before it: (made of the parameters alone, slopes)."""
    once = [
        n
        for n in loop_invariants(outputs, (*moving, *cell.a, *cell.v, *cell.x, *at_hand), at_hand)
        if _is_made_of(n, cell.p)
    ]
    return tuple(once), tuple(
        n for n in loop_invariants(outputs, moving, at_hand) if n not in at_hand and n not in once
    )


@dataclass(frozen=True)
class AdjointStep:
    """The expressions of a step of the adjoint loop."""

    lam: tuple[Node, ...]  # lam_t
    sa: tuple[Node, ...]
    rbar: tuple[Node, ...]  # W' delta_t
    kept: tuple[Node, ...]  # what lam_{t-1} holds already
    into_a: tuple[Node, ...]  # f_a' lam_t
    into_x: tuple[Node, ...]  # f_x' lam_t
    back: tuple[Node, ...]  # r' rbar

    @property
    def through(self) -> bool:
        """Does anything go back through W?"""
        return any(n is not ZERO for n in self.back)


@functools.cache
def adjoint_step(cell: Cell) -> AdjointStep:
    slots = len(cell.slots)
    lam, rbar = symbols("lam", slots), symbols("rbar", len(cell.read))
    into_a, into_x = pull(cell.next, lam, cell.a), pull(cell.next, lam, cell.x)
    back = pull(cell.read, rbar, cell.x)
    sa, kept = symbols("sa", len(cell.gates)), symbols("e", slots)
    return AdjointStep(lam, sa, rbar, kept, tuple(into_a), tuple(into_x), tuple(back))


@dataclass(frozen=True)
class TangentStep:
    """The expressions of a step of the tangent loop."""

    mu: tuple[Node, ...]  # m_t
    nu: tuple[Node, ...]
    g: tuple[Node, ...]
    out: tuple[Node, ...]  # f_x m_t + f_a nu_t
    ahead: tuple[Node, ...]  # r' m_t

    @property
    def through(self) -> bool:
        """Does anything go on through W?"""
        return any(n is not ZERO for n in self.ahead)


@functools.cache
def tangent_step(cell: Cell) -> TangentStep:
    mu, nu, g = (
        symbols("mu", len(cell.slots)),
        symbols("nu", len(cell.gates)),
        symbols("g", len(cell.slots)),
    )
    along = dict(zip(cell.x, mu, strict=True))
    out = push(cell.next, along | dict(zip(cell.a, nu, strict=True)))
    return TangentStep(mu, nu, g, tuple(out), tuple(push(cell.read, along)))

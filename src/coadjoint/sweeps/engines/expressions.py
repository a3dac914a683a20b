"""What engines share: the formulas of one step of the adjoint and the tangent loop.

adjoint   delta_t = sa_t + f_a' lam_t    lam_{t-1} = s_{t-1} + f_x' lam_t + r' W' delta_t
tangent   nu_t    = ga_t + W r' m_t      mu_t      = g_t + f_x m_t + f_a nu_t
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...cells.cell import Cell
from ...cells.formula import ZERO, Node, is_const, loop_invariants, pull, push, symbol
from ..pointwise import Pointwise
from ..rows import Rows


@functools.cache
def symbols(kind: str, count: int) -> tuple[Node, ...]:
    """The `count` nodes kind.0, kind.1, ...: symbols that stand for inputs of a formula."""
    return tuple(symbol(f"{kind}.{i}") for i in range(count))


@functools.cache
def _is_made_of(node: Node, leaves: tuple[Node, ...]) -> bool:
    """Whether a node depends on these leaves and constants alone."""
    if node in leaves or is_const(node):
        return True
    return bool(node.args) and all(_is_made_of(a, leaves) for a in node.args)


@functools.cache
def hoisted_terms(
    cell: Cell, outputs: tuple[Node, ...], moving: tuple[Node, ...], saved: frozenset[Node]
) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """The terms of `outputs` that can be computed before a loop: (parameter terms, slopes).

    moving   what changes from step to step inside the loop (lam, mu, ...)
    saved    nodes whose values the forward sweep has saved

    Parameter terms depend on the cell's parameters alone; slopes also on a, v, x and saved values.
    """
    varying = (*moving, *cell.a, *cell.v, *cell.x, *saved)
    constant = loop_invariants(outputs, varying, saved)
    parameter_terms = tuple(n for n in constant if _is_made_of(n, cell.p))
    known = {*saved, *parameter_terms}
    slopes = tuple(n for n in loop_invariants(outputs, moving, saved) if n not in known)
    return parameter_terms, slopes


@dataclass(frozen=True)
class AdjointStep:
    """The expressions of a step of the adjoint loop, with a node for each slot, gate or read."""

    lam: tuple[Node, ...]  # lam_t
    sa: tuple[Node, ...]
    rbar: tuple[Node, ...]  # W' delta_t
    so_far: tuple[Node, ...]  # lam_{t-1} before what comes through W is added
    into_a: tuple[Node, ...]  # f_a' lam_t
    into_x: tuple[Node, ...]  # f_x' lam_t
    through_read: tuple[Node, ...]  # r' rbar

    @property
    def uses_W(self) -> bool:
        """Whether lam_{t-1} depends on W' delta_t: not if what W reads, r(x), is constant."""
        return any(n is not ZERO for n in self.through_read)


@functools.cache
def adjoint_step(cell: Cell) -> AdjointStep:
    """The adjoint step of a cell: f_a' lam, f_x' lam and r' rbar as expressions.

    rbar = W' delta is an input of the last one.
    """
    # Sums list their terms in the order in which nodes were made: another order here would
    # change the generated code.
    lam = symbols("lam", len(cell.slots))
    rbar = symbols("rbar", len(cell.read))
    into_a = tuple(pull(cell.next, lam, cell.a))
    into_x = tuple(pull(cell.next, lam, cell.x))
    through_read = tuple(pull(cell.read, rbar, cell.x))
    sa = symbols("sa", len(cell.gates))
    so_far = symbols("e", len(cell.slots))  # lam_{t-1} before r' rbar is added
    return AdjointStep(lam, sa, rbar, so_far, into_a, into_x, through_read)


@dataclass(frozen=True)
class TangentStep:
    """The expressions of a step of the tangent loop, with a node for each slot, gate or read."""

    mu: tuple[Node, ...]  # m_t
    nu: tuple[Node, ...]
    g: tuple[Node, ...]
    out: tuple[Node, ...]  # f_x m_t + f_a nu_t
    through_read: tuple[Node, ...]  # r' m_t

    @property
    def uses_W(self) -> bool:
        """Whether nu_t depends on W: not if what W reads, r(x), is constant."""
        return any(n is not ZERO for n in self.through_read)


@functools.cache
def tangent_step(cell: Cell) -> TangentStep:
    """The tangent step of a cell: f_x mu + f_a nu and r' mu as expressions; g is added to mu_t."""
    mu = symbols("mu", len(cell.slots))
    nu = symbols("nu", len(cell.gates))
    g = symbols("g", len(cell.slots))
    along_x = dict(zip(cell.x, mu, strict=True))
    along_a = dict(zip(cell.a, nu, strict=True))
    out = tuple(push(cell.next, along_x | along_a))
    through_read = tuple(push(cell.read, along_x))
    return TangentStep(mu, nu, g, out, through_read)


def nonzero_outputs(
    op: Pointwise,
    rows: Rows | None,
    saved: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
) -> dict[str, Tensor]:
    """Run a pointwise operation: its outputs by name, without those that are identically zero.

    rows: where the steps of ragged samples lie; None for the rows of one step.
    saved, inputs: the values of op.known and op.inputs, None where one is missing.
    """
    names = [name for name, _ in op.outputs if name in op.nonzero_outputs]
    if not names:
        return {}
    return dict(zip(names, op.run(rows, saved, inputs), strict=True))


def optional_steps(rows: Rows, y: Tensor | None) -> Sequence[Tensor | None]:
    """A step array [N, .] as T views, one for each step; T times None if there is no array."""
    if y is None:
        return [None] * rows.T
    return rows.steps(y)


def output_or_zeros(outputs: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """One of the nonzero_outputs of an operation, or zeros of the shape of `like`."""
    if name in outputs:
        return outputs[name]
    return torch.zeros_like(like)


def input_groups(op: Pointwise) -> list[tuple[str | None, tuple[Node, ...]]]:
    """(name, nodes) of each array that a pointwise operation may be given, in their order.

    First the saved values, which have no name (None), then the inputs.
    """
    saved: list[tuple[str | None, tuple[Node, ...]]] = [(None, nodes) for nodes in op.known]
    return saved + list(op.inputs)

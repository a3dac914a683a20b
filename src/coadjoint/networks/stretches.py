"""Stretches: consecutive maps of a chain, run and differentiated together.

A chain x_{i+1} = f_i(x_i) is a row of stretches. Each has its states on both sides of its maps and
three products with them:

    costates   lam_i = Df_i(x_i)' lam_{i+1} of all its maps, in mantissas and exponents
    pull       Df_i(x_i)' w_i of each map by itself
    push       v_{i+1} = Df_i(x_i) v_i of all its maps

MapStretch    one map, differentiated by torch through the graph of the run
DenseStretch  dense layers of one width, swept as an Elman network whose W changes at every step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..cells.activations import ACTIVATIONS
from ..cells.classic import elman
from ..sweeps import engines
from ..sweeps.plan import SweepPlan
from ..sweeps.rows import NO_EXPONENT, Rows, exponent, scale, uniform_rows
from ..sweeps.run import FormulaRun
from ..sweeps.torch_internals import has_hooks
from .maps import Dense, Tied


class ScaledBlock(NamedTuple):
    """Costates mantissa 2^exponent of m consecutive states with n entries each."""

    mantissa: Tensor  # [m, B, n]
    exponent: Tensor  # [m, B], integers


class Stretch(Protocol):
    """Consecutive maps of a chain, over a batch."""

    @property
    def states(self) -> Sequence[Tensor]:
        """The states after each map, [B, ...]."""

    def costates(self, lam: Tensor, create_graph: bool) -> ScaledBlock:
        """The costates of the states before each map, from lam [B, ...] of the last one after.

        create_graph: the result can be differentiated again.
        """

    def pull(self, w: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
        """Df_i(x_i)' w_i for each map i, with w_i shaped like the state after it."""

    def push(self, v: Tensor) -> list[Tensor]:
        """The change of the states after each map, for a change v of the state before the first."""


def normalise(lam: Tensor) -> tuple[Tensor, Tensor]:
    """Return lam [B, ...] as mantissa 2^k, k [B] constants under differentiation.

    A sample whose entries are all zero has the exponent 0.
    """
    flat = lam.flatten(1)
    k = exponent(flat.detach())
    k = torch.where(k == NO_EXPONENT, 0, k)
    return scale(flat, -k[:, None]).view(lam.shape), k


def gradient(y: Tensor, x: Tensor, w: Tensor, create_graph: bool) -> Tensor:
    """(dy/dx)' w through the graph of y, which is kept; zero if y does not depend on x."""
    if y is x:
        return w
    (g,) = torch.autograd.grad(
        y, x, w, create_graph=create_graph, retain_graph=True, allow_unused=True
    )
    return torch.zeros_like(x) if g is None else g


@dataclass(frozen=True, eq=False)
class MapStretch:
    """One map, differentiated by torch through the graph of the run.

    The graph is that of the run itself: what a map has drawn, such as a dropout mask, is the same
    in the state, its costate and its tangent.
    """

    before: Tensor
    after: Tensor

    @property
    def states(self) -> Sequence[Tensor]:
        """The state after the map."""
        return (self.after,)

    def costates(self, lam: Tensor, create_graph: bool) -> ScaledBlock:
        """The costate before the map: its mantissa is of order one."""
        pulled = gradient(self.after, self.before, lam, create_graph)
        mantissa, k = normalise(pulled)
        return ScaledBlock(mantissa.flatten(1)[None], k[None])

    def pull(self, w: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
        """Df(x)' w of the map."""
        return [gradient(self.after, self.before, w[0], create_graph)]

    def push(self, v: Tensor) -> list[Tensor]:
        """Df(x) v, as the derivative of Df(x)' w by w, which is linear in w."""
        if self.after is self.before:
            return [v]
        w = torch.zeros_like(self.after).requires_grad_()
        pulled = gradient(self.after, self.before, w, create_graph=True)
        if not pulled.requires_grad:  # the state after does not depend on the one before
            return [torch.zeros_like(self.after)]
        return [gradient(pulled, w, v.reshape(self.before.shape), create_graph=True)]


@dataclass(frozen=True, eq=False)
class DenseStretch:
    """L dense layers x_{i+1} = psi(W_i x_i + b_i) of one width n: the three loops over depth."""

    run: FormulaRun  # its states lie in rows [(L + 1) B, n]

    @property
    def rows(self) -> Rows:
        """Where the states lie; "steps" are layers here."""
        return self.run.plan.rows

    @property
    def states(self) -> Sequence[Tensor]:
        """The states after each layer, [B, n].

        The last one is a tensor by itself: its gradient need not be padded to the rows of all.
        """
        return (*self.rows.states(self.run.x)[1:-1], self.run.last)

    def costates(self, lam: Tensor, create_graph: bool) -> ScaledBlock:
        """The costates before each layer, by one scaled adjoint sweep."""
        rows = self.rows
        with torch.set_grad_enabled(create_graph):
            found = self.run.costate(None, lam, None)
            before = rows.T * rows.B  # the rows of all states but the last
            mantissa = found.mantissa[:before].view(rows.T, rows.B, -1)
            return ScaledBlock(mantissa, found.exponent[:before].view(rows.T, rows.B))

    def pull(self, w: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
        """Df_i(x_i)' w_i of each layer, all at once."""
        with torch.set_grad_enabled(create_graph):
            # The first B rows belong to the state before the first layer, and are not read.
            pulled = self.run.pull(torch.cat([w[0], *w]))
            return list(self.rows.steps(pulled))

    def push(self, v: Tensor) -> list[Tensor]:
        """The tangents of the states after each layer, by one tangent sweep."""
        mu = self.run.push(None, None, None, v)  # directions of base, side, W and the first state
        return list(self.rows.states(mu)[1:])


def end_of_stretch(maps: Sequence[nn.Module], begin: int, x: Tensor) -> int:
    """The end of the longest row of dense layers from `begin` on that one sweep can run.

    They have the width of x and one activation in common. `begin` itself if there is none.
    """
    end = begin
    while end < len(maps) and sweeps_can_run(maps[end], x):
        if maps[end].activation != maps[begin].activation:
            break
        end += 1
    return end


def sweeps_can_run(module: nn.Module, x: Tensor) -> bool:
    """Whether a map is a dense layer from the width of x to the same width, for a sweep."""
    if x.dim() != 2 or not isinstance(module, Dense | Tied) or has_hooks(module):
        return False
    forward = getattr(module.forward, "__func__", None)  # the function behind the bound method
    if forward is not Dense.forward:  # a subclass computes something else
        return False
    is_formula = module.activation in ACTIVATIONS  # the functions that a cell's formula may use
    return is_formula and module.inputs == module.outputs == x.shape[1]


def run_dense(layers: Sequence[nn.Module], x: Tensor) -> DenseStretch:
    """Run dense layers of one width as an Elman network over depth, with a W for each step."""
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    for layer in layers:
        assert isinstance(layer, Dense | Tied)
        W, b, activation = layer.effective()
        weights.append(W)
        biases.append(W.new_zeros(len(W)) if b is None else b)
    L = len(layers)
    B, n = x.shape
    cell = elman(activation)
    engine = engines.load(engines.resolve("auto", cell, x.device.type))
    assert engine is not None
    plan = SweepPlan(cell, uniform_rows(L, B), engine, checked=False)
    base = torch.stack(biases)[:, None].expand(L, B, n).reshape(L * B, n)
    return DenseStretch(FormulaRun.run(plan, base, None, torch.stack(weights), x, None))

"""Costates per sqrt(n): lam_i / sqrt(n_i) in place of lam_i, n_i the entries of state i.

The norm of lam_i / sqrt(n_i) is the root mean square of the entries of lam_i. It can be compared
between layers of different widths, where a wider layer has a longer costate of entries as large.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ..sweeps.costates import Axis, BaseCostates
from ..sweeps.run import SweepRun
from .layered import LayeredCostates
from .state_parts import Names, part_of


class RootMeanSquares(BaseCostates):
    """The costates lam_i / sqrt(n_i) of a network, seen through those of its own, lam_i.

    A change of coordinates: w_i stands for w_i sqrt(n_i), so the Jacobians of single steps are
    J_i' sqrt(n_i / n_{i-1}). States are x_i / sqrt(n_i) as well.
    """

    per = "sqrt n"

    def __init__(self, own: BaseCostates) -> None:
        self.own = own
        self.loss = own.loss
        self.trajectory = own.trajectory

    def __repr__(self) -> str:
        return f"<{self.own!r} per sqrt n>"

    @property
    def axis(self) -> Axis:  # type: ignore[override]
        """The words for the axis of the states."""
        return self.own.axis

    @property
    def first(self) -> int:  # type: ignore[override]
        """Where penalties begin."""
        return self.own.first

    @property
    def sweep(self) -> SweepRun | None:  # type: ignore[override]
        """The recurrence's run, if the network is one."""
        return self.own.sweep

    @functools.cached_property
    def roots(self) -> Tensor:
        """sqrt(n_i), i = 0..L, [L + 1]."""
        counts = torch.tensor(self.own.entry_counts, device=self.loss.device)
        return counts.double().sqrt().to(self.loss.dtype)

    @property
    def exponent(self) -> Tensor:
        """The powers of two, [L + 1, B], integers."""
        return self.own.exponent

    def mantissa_at(self, i: int) -> Tensor:
        """The mantissa of lam_i / sqrt(n_i), [B, ...]."""
        return self.own.mantissa_at(i) / self.roots[i]

    def detach(self) -> RootMeanSquares:
        """The same costates without their graph."""
        return RootMeanSquares(self.own.detach())

    def part(self, names: Names) -> RootMeanSquares:
        """Those of a part of the state, by the number of its entries."""
        return RootMeanSquares(part_of(self.own, names))

    def of(self, other: BaseCostates) -> BaseCostates:
        """Other costates of the same run in these coordinates."""
        return RootMeanSquares(other)

    @property
    def mantissa(self) -> Tensor:
        """The mantissas of a recurrence, [T + 1, B, n]."""
        mantissa: Tensor = self.own.mantissa  # type: ignore[attr-defined]
        return mantissa / self.roots[:, None, None]

    @property
    def lam(self) -> Tensor:
        """The costates of a recurrence at true scale, [T + 1, B, n]."""
        lam: Tensor = self.own.lam  # type: ignore[attr-defined]
        return lam / self.roots[:, None, None]

    def pull_mantissas(self) -> Tensor:
        """J_i' mantissa_i / sqrt(n_{i-1}), i = 1..L, mantissa_i that of lam_i: [L, B, n]."""
        return self.own.pull_mantissas() / self.roots[:-1, None, None]

    def pull_directions(self, w: Tensor) -> Tensor:
        """J_i' w_i sqrt(n_i / n_{i-1}), i = 1..L, of directions w [L, B, n]: [L, B, n]."""
        growth = self.roots[1:] / self.roots[:-1]
        return self.own.pull_directions(w) * growth[:, None, None]

    @property
    def entry_counts(self) -> Sequence[int]:
        """The number of entries of each state x_0, ..., x_L."""
        return self.own.entry_counts

    @property
    def uniform(self) -> bool:
        """Do all samples have the same number of costates?"""
        return self.own.uniform

    @property
    def mask(self) -> Tensor:
        """[L + 1, B]: does the costate exist?"""
        return self.own.mask

    @property
    def last(self) -> Tensor:
        """[B]: the number of each sample's last costate."""
        return self.own.last

    def last_mantissa(self) -> Tensor:
        """[B, n]: the mantissa of each sample's last costate."""
        return self.own.last_mantissa() / self.roots[self.last][:, None]

    @property
    def visible_states(self) -> Tensor:
        """The part of the states that others read, divided by the root of its entries' number."""
        states = self.own.visible_states
        counts = torch.tensor(self.own.entry_counts, device=states.device)
        counts = counts.clamp(max=states.shape[-1])  # of a cell with several slots, the first alone
        return states / counts.to(states.dtype).sqrt()[:, None, None]

    @functools.cached_property
    def size(self) -> Tensor:
        """The norms of the mantissas, [L + 1, B]."""
        return self.own.size / self.roots[:, None]

    @functools.cached_property
    def size_1(self) -> Tensor:
        """The 1-norms of the mantissas, [L + 1, B]."""
        return self.own.size_1 / self.roots[:, None]

    def squared_norms(self) -> Tensor:
        """||lam_i||^2 / n_i at true scale, [L + 1, B]; smooth at a zero costate."""
        return self.own.squared_norms() / self.roots.square()[:, None]


class LayeredRootMeanSquares:
    """The costates of several layers, each per sqrt(n)."""

    per = "sqrt n"

    def __init__(self, own: LayeredCostates) -> None:
        self.own = own

    @property
    def layers(self) -> Sequence[BaseCostates]:
        """The costates of each layer."""
        return [RootMeanSquares(layer) for layer in self.own.layers]

    def select(self, **where: object) -> LayeredRootMeanSquares:
        """Those of the layers with these properties."""
        return LayeredRootMeanSquares(self.own.select(**where))

    def joined(self) -> RootMeanSquares:
        """The states of all layers as one."""
        return RootMeanSquares(self.own.joined())

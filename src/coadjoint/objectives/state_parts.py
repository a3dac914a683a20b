"""Costates of a part of the state: dL/dh alone of an LSTM, whose state is (h, c).

The state of a cell has slots with names (`cell.slots`). The costates of some of them are the
entries of lam_t that belong to them; how lam_t itself comes about does not change.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import InputError, KindError, Unsupported, brief
from ..sweeps.costates import BaseCostates, Costates
from .layered import LayeredCostates

Names = tuple[str, ...]


@runtime_checkable
class Divisible(Protocol):
    """Costates that take a part of themselves in their own way."""

    def part(self, names: Names) -> BaseCostates:
        """The costates of the slots with these names."""


def slot_names(given: object) -> Names:
    """One name of a slot, or several, as a tuple in alphabetical order; others are refused."""
    listed = list(given) if isinstance(given, list | tuple) else [given]
    names = [name for name in listed if isinstance(name, str)]
    if not names or len(names) < len(listed):
        raise KindError(f"part must be the name of a slot, or a list of them; got {brief(given)}.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(f"part names '{twice[0]}' twice: name each slot once.")
    return tuple(sorted(names))


def part_of(lam: BaseCostates, names: Names) -> BaseCostates:
    """The costates of the slots with these names; refused where the state has no such slots."""
    if isinstance(lam, Divisible):
        return lam.part(names)
    if isinstance(lam, Costates):
        return StatePart.taken_from(lam, names)
    raise Unsupported(
        f"part '{', '.join(names)}': only the state of a recurrent cell has parts. Leave out part."
    )


def part_of_each(
    lam: BaseCostates | Sequence[BaseCostates] | LayeredCostates, names: Names
) -> BaseCostates | Sequence[BaseCostates] | LayeredParts:
    """The same of the costates of one layer, a list of them, or those of a stack."""
    if isinstance(lam, BaseCostates):
        return part_of(lam, names)
    if isinstance(lam, list | tuple):
        return [part_of(layer, names) for layer in lam]
    return LayeredParts(lam, names)  # type: ignore[arg-type]  # what is no list has layers


@dataclass(frozen=True, eq=False)
class StatePart(Costates):
    """The costates of some slots of the state, t = 0..T; `rows` holds their entries alone.

    whole    the costates of the entire state
    names    of the slots
    columns  their entries in the state
    """

    whole: Costates
    names: Names
    columns: Sequence[slice]

    @staticmethod
    def taken_from(whole: Costates, names: Names) -> StatePart:
        """The costates of the slots with these names."""
        columns = whole.trajectory.slot_columns(names)
        rows = take(whole.rows, columns)
        return StatePart(whole.trajectory, rows, whole.powers, whole.loss, whole, names, columns)

    def __repr__(self) -> str:
        return f"<part {', '.join(self.names)} of {self.whole!r}>"

    def detach(self) -> StatePart:
        """The same costates without their graph."""
        return StatePart.taken_from(self.whole.detach(), self.names)

    def of(self, other: BaseCostates) -> BaseCostates:
        """The same part of other costates of the run."""
        return part_of(other, self.names)

    @property
    def visible_states(self) -> Tensor:
        """The slots of the states that are meant, [T + 1, B, m]."""
        return take(self.trajectory.x, self.columns)

    @functools.cached_property
    def entries(self) -> Tensor:
        """The numbers of these entries in the state, [m]."""
        numbers = torch.arange(self.whole.rows.shape[1], device=self.rows.device)
        return take(numbers, self.columns)

    def pull_mantissas(self) -> Tensor:
        """The part of J_t' mantissa_t, t = 1..T, mantissa_t of the entire state: [T, B, m]."""
        return take(self.whole.pull_mantissas(), self.columns)

    def pull_directions(self, w: Tensor) -> Tensor:
        """The part of J_t' w_t, t = 1..T, of directions w [T, B, m] of this part: [T, B, m]."""
        n = self.whole.rows.shape[1]
        directions = w.new_zeros(*w.shape[:-1], n).index_copy(-1, self.entries, w)
        return take(self.whole.pull_directions(directions), self.columns)


def take(x: Tensor, columns: Sequence[slice]) -> Tensor:
    """These entries of x [..., n]."""
    if len(columns) == 1:
        return x[..., columns[0]]
    return torch.cat([x[..., each] for each in columns], -1)


class LayeredParts:
    """The costates of a part of the state in each of several layers."""

    def __init__(self, own: LayeredCostates, names: Names) -> None:
        self.own = own
        self.names = names

    @property
    def layers(self) -> Sequence[BaseCostates]:
        """The costates of each layer."""
        return [part_of(layer, self.names) for layer in self.own.layers]

    def select(self, **where: object) -> LayeredParts:
        """Those of the layers with these properties."""
        return LayeredParts(self.own.select(**where), self.names)

    def joined(self) -> BaseCostates:
        """The states of all layers as one."""
        return part_of(self.own.joined(), self.names)

"""Costates of several layers, as penalties see them: what co.Stack and co.record return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from ..sweeps.costates import BaseCostates

# The properties of a run by which the costates of several layers are told apart.
PARTS = ("module", "call", "layer", "direction")


@runtime_checkable
class PlacedRun(Protocol):
    """The run of one of several layers."""

    @property
    def module(self) -> str:
        """The name of the recorded module; empty for a stack."""

    @property
    def call(self) -> int:
        """The number of the module's call, from 0."""

    @property
    def layer(self) -> int:
        """The number of the layer, from 0."""

    @property
    def direction(self) -> str:
        """The direction of reading, "forward" or "reverse"."""


class LayeredCostates(Protocol):
    """The costates of several layers, as co.Stack and co.record return them."""

    @property
    def layers(self) -> Sequence[BaseCostates]:
        """The costates of each layer."""

    def select(self, **where: object) -> LayeredCostates:
        """Those of the layers with these properties."""

    def joined(self) -> BaseCostates:
        """The states of all layers as one."""

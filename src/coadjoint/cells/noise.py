"""Cells under recurrent dropout and zoneout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .cell import Cell, Fields, cell
from .nodes import Node
from .transport import cached_by_options


@cached_by_options
def noisy(base: Cell, dropout: bool, zoneout: bool) -> Cell:
    """The cell `base` under noise that comes as data, in the entries of v named below.

    dropout  W reads r = m h instead of h; one mask m for all steps of a sample is the dropout of
             Gal & Ghahramani (2016)
    zoneout  a slot s keeps its value where k_s is 1: s' = k_s s + (1 - k_s) s_new.
             Krueger et al. (2017)
    """
    slots = list(base.slots)
    given: list[str] = []
    reads = base.reads
    if zoneout:
        given += [f"k_{slot}" for slot in base.slots]
    if dropout:
        # r is a slot: the mask of step t acts on what W reads at step t + 1.
        slots.append("r")
        given.append("m")
        reads = "r"

    @cell(
        slots=" ".join(slots),
        gates=" ".join(base.gates),
        parameters=base.parameters,
        reads=reads,
        given=" ".join(given),
        inputs=" ".join(base.inputs),
        shows=" ".join(base.shows),
        structure=base.structure,
        weights=base.weights,
    )
    def noisy(z: Fields, v: Fields, x: Fields, p: Fields) -> tuple[Node, ...]:
        # The new slots of `base`, called with its own entries: it knows nothing of the noise.
        new: list[Node] = base._call(
            entries(z, base.gates),
            entries(v, (*base.gates, *base.inputs)),
            entries(x, base.slots),
            entries(p, base.parameters),
        )
        if zoneout:
            for i, slot in enumerate(base.slots):
                keep = getattr(v, f"k_{slot}")
                new[i] = keep * getattr(x, slot) + (1 - keep) * new[i]
        if dropout:
            new.append(v.m * new[0])  # the slot r = m h
        return tuple(new)

    # True times a text is the text; False times it is empty
    return replace(noisy, name=f"{base.name}{' dropout' * dropout}{' zoneout' * zoneout}")


def entries(fields: Fields, names: Iterable[str]) -> dict[str, Node]:
    """The entries of `fields` that have these names, as a dict."""
    return {name: getattr(fields, name) for name in names}

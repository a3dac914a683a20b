"""What a cell is in a network: its parameters, the engines that run it, the starts it can have."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from .. import cells
from ..errors import CoadjointError
from ..sweeps.engines import ENGINES, declined
from .factory import RESERVOIR, cell_options, construct, visible
from .initialisers import INITIALISERS, initialise


@dataclass(frozen=True)
class About(cells.About):
    """A cell in words and sizes."""

    parameters: dict[str, tuple[int, ...]]  # their shapes
    engines: dict[str, str | None]  # why one declines, or None
    starts: list[str]  # the initialisers that can begin it


def about(name: str, hidden: int = 8, inputs: int = 1) -> About:
    """All there is to know of a cell, or of "reservoir", taken from a network of it.

    >>> about("lstm", hidden=7, inputs=3).parameters["W"]
    (28, 7)
    """
    net = construct(name, inputs=inputs, outputs=1, hidden=hidden)
    starts = []
    for init in INITIALISERS:
        with contextlib.suppress(CoadjointError):
            initialise(net, init)
            starts.append(init)
    found = cells.about(RESERVOIR.cell if name == "reservoir" else name)
    equations, paper = found.equations, found.paper
    if name == "reservoir":
        equations, paper = f"{equations}\n{RESERVOIR.text}", RESERVOIR.paper
    if net.cell is None:
        why = "take their code from a formula, and this is a step function"
        engines: dict[str, str | None] = {
            engine: None if engine == "autograd" else why for engine in ENGINES
        }
    else:
        engines = {engine: declined(engine, net.cell) for engine in ENGINES}
    parameters = {key: tuple(p.shape) for key, p in visible(net).items() if key not in ("V", "b_o")}
    return About(equations, paper, cell_options(name), found.state, parameters, engines, starts)

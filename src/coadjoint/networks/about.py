"""What a cell is in a network: its parameters, the engines that run it, the starts it can have."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass

from .. import cells
from ..errors import CoadjointError
from ..sweeps.engines import ENGINES, cell_refusal
from .factory import RESERVOIR, cell_options, construct, parameters_by_name
from .initialisers import INITIALISERS, initialise


@dataclass(frozen=True)
class CellFacts(cells.CellDescription):
    """A cell in words and sizes."""

    parameters: dict[str, tuple[int, ...]]  # their shapes
    engines: dict[str, str | None]  # why one declines, or None
    initialisers: list[str]  # the initialisers that can begin it

    @property
    def starts(self) -> list[str]:
        """The old name of `initialisers`, until 1.0."""
        warnings.warn(
            "`starts` is now called `initialisers`; the old name goes in 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.initialisers


def about(name: str, hidden: int = 8, inputs: int = 1) -> CellFacts:
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
        engines = {engine: cell_refusal(engine, net.cell) for engine in ENGINES}
    parameters = {
        key: tuple(p.shape) for key, p in parameters_by_name(net).items() if key not in ("V", "b_o")
    }
    return CellFacts(equations, paper, cell_options(name), found.state, parameters, engines, starts)

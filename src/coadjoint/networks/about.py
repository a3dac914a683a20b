"""CellFacts: a cell's parameters, the engines that run it, and the initialisers it can have."""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass

from .. import cells
from ..cells.cell import Cell
from ..errors import CoadjointError
from ..sweeps.engines import ENGINES, cell_refusal
from .cell_choice import RESERVOIR, cell_options
from .factory import construct, parameters_by_name
from .initialisers import INITIALISERS, initialise


@dataclass(frozen=True)
class CellFacts(cells.CellDescription):
    """A cell as a part of a network."""

    parameters: dict[str, tuple[int, ...]]  # their shapes
    engines: dict[str, str | None]  # the reason why an engine cannot run it, or None
    initialisers: list[str]
    parts: tuple[str, ...] = ()  # the names of the slots of the state

    @property
    def starts(self) -> list[str]:
        """The old name of `initialisers`, until 1.0."""
        warnings.warn(
            "`starts` is now called `initialisers`; the old name will be removed in 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.initialisers


def about(name: str, hidden: int = 8, inputs: int = 1) -> CellFacts:
    """Describe a cell, or "reservoir", as a part of a network.

    hidden, inputs  the sizes of the network whose parameters' shapes are listed

    Example:
        >>> from coadjoint import networks
        >>> networks.about("lstm", hidden=7, inputs=3).parameters["W"]
        (28, 7)
    """
    net = construct(name, inputs=inputs, outputs=1, hidden=hidden)
    # The cell's initialisers are those that draw such a network without an error.
    initialisers: list[str] = []
    for init in INITIALISERS:
        with contextlib.suppress(CoadjointError):
            initialise(net, init)
            initialisers.append(init)
    description = cells.about(RESERVOIR.cell if name == "reservoir" else name)
    equations = description.equations
    paper = description.paper
    if name == "reservoir":
        equations = f"{equations}\n{RESERVOIR.text}"
        paper = RESERVOIR.paper
    shapes: dict[str, tuple[int, ...]] = {}
    for key, parameter in parameters_by_name(net).items():
        if key not in ("V", "b_o"):  # the readout's, not the cell's
            shapes[key] = tuple(parameter.shape)
    options = cell_options(name)
    engines = _engines_of(net.cell)
    state = description.state
    parts = getattr(net, "slot_names", ())
    return CellFacts(equations, paper, options, state, shapes, engines, initialisers, parts)


def _engines_of(cell: Cell | None) -> dict[str, str | None]:
    """For each engine, why it cannot run the cell (the end of a sentence), or None if it can.

    cell: None stands for a step function, which has no formula.
    """
    if cell is not None:
        return {engine: cell_refusal(engine, cell) for engine in ENGINES}
    reason = "generate their code from a formula, but this is a step function"
    engines: dict[str, str | None] = dict.fromkeys(ENGINES, reason)
    engines["autograd"] = None
    return engines

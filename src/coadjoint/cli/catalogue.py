"""Config: every choice of a run as one typed value; TOML, YAML or JSON in, flags on top, objects out.

The sections below are the whole vocabulary: the command line takes its flags from them, a file its keys. No two sections
share a key, so a flag needs no prefix. Names (of cells, penalties, tasks, ...) are looked up in the library's tables.
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any

from ..errors import CoadjointError
from .build_network import RESERVOIR, Shape, construct, known_options, visible
from .schema import NetworkSection


@dataclass(frozen=True)
class About:
    """What there is to know of a cell."""

    equations: str
    paper: str
    options: dict[str, Any]  # with what they are if they are not given
    parameters: dict[str, tuple[int, ...]]  # their shapes
    engines: dict[str, str | None]  # why one declines, or None
    state: str  # entries of the state for each unit
    starts: list[str]  # the initialisers that can begin it


def about(name: str, hidden: int = 8, inputs: int = 1) -> About:
    """A cell in words and sizes, taken from a network of it."""
    from ..cells.steps import STEPS
    from ..networks.initialisers import INITIALISERS, initialise
    from ..sweeps.engines import ENGINES, declined

    shape = Shape(inputs=inputs, outputs=1, readout="last", output="identity")
    net = construct(NetworkSection(cell=name, hidden=hidden), shape, 32)
    cell, parameters, starts = net.cell, visible(net), []
    for init in INITIALISERS:
        with contextlib.suppress(CoadjointError):
            initialise(net, init)
            starts.append(init)
    if cell is None:
        equations, _, paper = inspect.cleandoc(STEPS[name].__doc__ or "").rpartition("\n\n")
        state = net.step.state
    else:
        equations, paper, state = cell.equations, cell.paper, str(len(cell.slots))
    if name == "reservoir":
        equations, paper = f"{equations}\n{RESERVOIR.text}", RESERVOIR.paper
    none = "take their code from a formula, and this is a step function"
    return About(
        equations, paper, {key: value for key, value in known_options(name).items() if key in NetworkSection.model_fields},
        {key: tuple(p.shape) for key, p in parameters.items() if key not in ("V", "b_o")},
        {e: (None if e == "autograd" else none) if cell is None else declined(e, cell) for e in ENGINES}, state, starts,
    )  # fmt: skip

"""What there is to know of a cell by its name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from ..errors import choose
from . import library, steps


@dataclass(frozen=True)
class CellDescription:
    """A cell in words."""

    equations: str
    paper: str
    options: dict[str, Any]  # with what they are if they are not given
    state: str  # entries of the state for each unit


def about(name: str) -> CellDescription:
    """The equations, the paper, the options and the state of a cell or step.

    >>> about("leaky").options
    {'activation': 'tanh'}
    """
    choose("cell", name, (*library.CELLS, *steps.STEPS))
    if name in steps.STEPS:
        step = steps.STEPS[name]
        equations, _, paper = inspect.cleandoc(step.__doc__ or "").rpartition("\n\n")
        return CellDescription(equations, paper, steps.options(name), step.state)
    cell = library.named(name)
    return CellDescription(cell.equations, cell.paper, library.options(name), str(len(cell.slots)))

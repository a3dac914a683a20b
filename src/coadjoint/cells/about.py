"""The facts about a cell by its name: equations, paper, options, state."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from ..errors import choose
from . import library, steps


@dataclass(frozen=True)
class CellDescription:
    """A cell in words.

    equations  as in its docstring
    paper      where it was published; empty if unknown
    options    their defaults by name
    state      the number of entries of the state for each unit, in words
    """

    equations: str
    paper: str
    options: dict[str, object]
    state: str


def about(name: str) -> CellDescription:
    """Describe the cell or step of that name.

    Example:
        >>> from coadjoint.cells import about
        >>> about("leaky").options
        {'activation': 'tanh'}
    """
    choose("cell", name, (*library.CELLS, *steps.STEPS))
    if name in steps.STEPS:
        step = steps.STEPS[name]
        # the last paragraph of a step's docstring is its paper
        equations, _, paper = inspect.cleandoc(step.__doc__ or "").rpartition("\n\n")
        return CellDescription(equations, paper, steps.options(name), step.state)
    cell = library.named(name)
    return CellDescription(cell.equations, cell.paper, library.options(name), str(len(cell.slots)))

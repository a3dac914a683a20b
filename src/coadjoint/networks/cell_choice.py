"""Which cells the options of a network name, with how many units in each layer.

Every message writes an option as $option: the caller spells it as a keyword or as a flag.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..cells import library, steps, structures
from ..errors import OptionError, choose


@dataclass(frozen=True)
class Preset:
    """A cell's name that means another cell with fixed parameters."""

    cell: str
    initialiser: Mapping[str, str | float]  # init and its options
    frozen: tuple[str, ...]
    text: str
    paper: str


RESERVOIR = Preset(
    cell="leaky",
    initialiser={"init": "sparse", "radius": 0.9},
    frozen=("W", "R", "b", "p.leak"),
    text=(
        "W, R, b and leak are fixed; W is sparse, with spectral radius 0.9 by default. Only the\n"
        "readout is trained: by the gradient, or in closed form with optimiser ridge."
    ),
    paper="Jaeger, GMD report 148 (2001)",
)
CELL_NAMES = (*library.CELLS, *steps.STEPS, "reservoir")
# Options that are spelled as the name of another cell: scrn-learned, antisymmetric-gated.
SPELLED_IN_NAME = ("learned", "gated")


def cell_names(cell: str | Sequence[str]) -> list[str]:
    """One name or several as a list."""
    return [cell] if isinstance(cell, str) else list(cell)


def is_reservoir(cell: str | Sequence[str]) -> bool:
    """Whether a network is a reservoir, whose recurrence is not trained."""
    return cell_names(cell) == ["reservoir"]


def cell_options(cell: str) -> dict[str, object]:
    """The options of a cell, with their defaults."""
    choose("cell", cell, CELL_NAMES)
    if cell in steps.STEPS:
        return steps.options(cell)
    options = library.options(RESERVOIR.cell if cell == "reservoir" else cell)
    return {key: value for key, value in options.items() if key not in SPELLED_IN_NAME}


def layer_units(
    cell: str | Sequence[str], hidden: int | Sequence[int], layers: int | None, is_sequence: bool
) -> tuple[int | list[int], int | None]:
    """(the units of a layer, or a list of those of each; the number of layers or None).

    A list for one cell's name means as many layers; one that does not fit is refused.
    """
    if not isinstance(hidden, list | tuple):
        return hidden, layers  # type: ignore[return-value]
    units = list(hidden)
    if len(units) == 1:
        return units[0], layers
    listed = ",".join(map(str, units))
    if is_sequence:
        raise OptionError(
            f"$hidden {listed}: when the output is a sequence, an encoder and its decoder have one "
            "number of units."
        )
    names = cell_names(cell)
    if "layers" in cell_options(names[0]):  # gated-feedback has its layers inside
        raise OptionError(f"$hidden {listed}: the layers inside {names[0]} have the same units.")
    count = layers if isinstance(cell, str) else len(names)
    if count is not None and count != len(units):
        plural = "" if count == 1 else "s"
        raise OptionError(
            f"$hidden {listed} has {len(units)} numbers, but the network has {count} layer{plural}"
            ": give one number, or one for each layer."
        )
    return units, len(units) if isinstance(cell, str) else layers


def layer_cells(
    cell: str | Sequence[str], layers: int | None, between: Mapping[str, bool | None]
) -> list[str]:
    """The cell of each layer, by its name in the library; combinations without sense are refused.

    layers   as in `construct`; None: not given
    between  what acts between layers, residual and dense; None: not given
    """
    names = cell_names(cell)
    for name in names:
        choose("cell", name, CELL_NAMES)
    if not names:
        raise OptionError("$cell is empty: `coadjoint cells` lists the names.")
    if not isinstance(cell, str) and layers is not None:
        raise OptionError(
            f"$cell {','.join(names)} makes one layer for each name: leave out $layers, or name "
            "one cell."
        )
    if "reservoir" in names and len(names) > 1:
        raise OptionError(
            "a reservoir cannot be mixed with other cells; $layers 2 makes two reservoir layers."
        )
    cells = [RESERVOIR.cell if name == "reservoir" else name for name in names]
    if "layers" not in cell_options(names[0]):  # gated-feedback has its layers inside
        cells *= layers or 1
    acting = [option for option, is_on in between.items() if is_on]
    if acting and len(cells) == 1 and "layers" in cell_options(names[0]):
        raise OptionError(
            f"${acting[0]} acts between layers, but those of {names[0]} are inside the cell: leave "
            f"out ${acting[0]}."
        )
    if acting and len(cells) == 1:
        raise OptionError(
            f"${acting[0]} acts between layers, but there is only one: give $layers or a list of "
            "cells."
        )
    return cells


def options_of_cells(names: list[str], given: Mapping[str, object]) -> dict[str, object]:
    """The options of the named cells among those given; an option that no cell has is refused.

    given  values by option, None if not given; `layers` is left out if it is not a cell's option,
           for then it is the number of layers of the network
    """
    known = {key for name in names for key in cell_options(name)}
    chosen: dict[str, object] = {}
    for key, value in given.items():
        is_of_stack = key == "layers" and "layers" not in known
        if value is None or is_of_stack:
            continue
        if key not in known:
            options = ", ".join(sorted(known)) or "none"
            cells = f"cells {', '.join(names)}; their"
            if len(names) == 1:
                cells = f"cell '{names[0]}'; its"
            # $: the caller's spelling goes there, a keyword of Python or a flag (OptionError).
            raise OptionError(f"${key} does nothing with {cells} options: {options}.")
        chosen[key] = value
    return chosen


def check_structure(cells: Sequence[str], structure: str | None) -> None:
    """Refuse a structure of W, such as "orthogonal", for cells whose equations give W one."""
    if structure in (None, structures.FREE):
        return
    for cell in cells:
        if cell in library.CELLS and library.named(cell).structure is not None:
            raise OptionError(
                f"$structure does nothing with cell '{cell}': its equations define W."
            )

"""`coadjoint tasks` and `coadjoint cells`: the names to choose from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Optional

import typer

from . import flags as setting_flags
from .program import app, print_escaped, print_table


@app.command()
def tasks() -> None:
    """List the built-in tasks and their options."""
    from ..tasks import TASKS, options

    rows = []
    for name, entry in TASKS.items():
        texts = [format_option(key, default) for key, default in options(name).items()]
        rows.append([name, entry.about, ", ".join(texts)])
    print_table(["task", "what to predict", "options"], rows)


def format_option(key: str, default: object) -> str:
    """An option with its default: length=100; LENGTH if it has none (...) and must be given.

    An option whose default is None, which means "not set", is its name alone.
    """
    if default is ...:
        return key.upper()
    return key if default is None else f"{key}={default}"


@app.command("cells")
def list_cells(
    name: Optional[str] = typer.Argument(None, help="describe this cell in full"),
    hidden: int = typer.Option(
        64, "--hidden", min=1, max=10_000, help="number of units, for the parameter shapes"
    ),
    inputs: int = typer.Option(
        1, "--inputs", min=1, max=10_000, help="number of inputs, for the parameter shapes"
    ),
) -> None:
    """List the cells with their equations, options, parameters, engines, state size and paper."""
    if name is not None:
        print_cell(name, hidden, inputs)
        return
    from .. import networks
    from ..networks.cell_choice import CELL_NAMES

    rows = []
    for cell in CELL_NAMES:
        about = networks.about(cell)
        options = [format_option(key, default) for key, default in about.options.items()]
        # The parameters of layer 0, 1, ... are listed once.
        parameters = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", key) for key in about.parameters)
        rows.append(
            [
                cell,
                " ".join(about.equations.split()),
                ", ".join(options),
                " ".join(parameters),
                summarise_engines(about.engines),
                about.state,
                about.paper,
            ]
        )
    print_table(["cell", "equations", "options", "parameters", "engines", "state", "paper"], rows)


def summarise_engines(engines: Mapping[str, str | None]) -> str:
    """The engines that run a cell, in few words: "all", "all but scan" or "autograd".

    engines: {engine: why it does not run the cell, or None if it does}.
    """
    refusing = [engine for engine, why in engines.items() if why]
    if not refusing:
        return "all"
    if len(refusing) < len(engines) / 2:
        return f"all but {', '.join(refusing)}"
    return ", ".join(engine for engine, why in engines.items() if not why)


def print_cell(name: str, hidden: int, inputs: int) -> None:
    """Print everything about a cell, part by part.

    hidden, inputs: the numbers of units and of inputs, for the shapes of the parameters.
    """
    from .. import networks

    about = networks.about(name, hidden, inputs)
    options = {setting_flags.flag("network", key): value for key, value in about.options.items()}
    shapes = {key: list(shape) for key, shape in about.parameters.items()}
    parts = {
        "": about.equations.splitlines(),
        "paper": [about.paper or "none"],
        "state entries per unit": [about.state],
        "parts of the state (--penalty-part)": [", ".join(about.parts)],
        "options and their defaults": align_values(options) or ["none"],
        f"parameters, with --hidden {hidden} --inputs {inputs}": align_values(shapes),
        "engines": engine_lines(about.engines),
        "initialisers (--init)": [", ".join(about.initialisers)],
    }
    print_escaped(name)
    for title, lines in parts.items():
        print(f"\n{title}" if title else "")
        for line in lines:
            print_escaped(f"    {line}".rstrip())


def engine_lines(engines: Mapping[str, str | None]) -> list[str]:
    """The engines that run a cell on one line, then a line for each reason why others do not.

    engines: {engine: why it does not run the cell, or None if it does}.
    """
    by_reason: dict[str | None, list[str]] = {None: []}  # None: the engines that run it
    for engine, why in engines.items():
        by_reason.setdefault(why, []).append(engine)
    lines = [", ".join(by_reason.pop(None))]
    for why, names in by_reason.items():
        reason = str(why).partition(". Use")[0]  # without its advice, "Use engine ..."
        lines.append(f"not {', '.join(names)}, which {reason}")
    return lines


def align_values(table: Mapping[str, object]) -> list[str]:
    """A line per entry, with the values aligned.

    None is the default of sizes alone, which are then the number of units.
    """
    width = max(map(len, table), default=0)
    words = {"None": "same as --hidden", "True": "yes", "False": "no"}
    return [f"{key.ljust(width)}  {words.get(str(value), value)}" for key, value in table.items()]

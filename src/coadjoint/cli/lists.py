"""`coadjoint tasks` and `coadjoint cells`: what there is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Optional

import typer

from ..errors import escape_controls
from . import flags as setting_flags
from .program import app, print_table


@app.command()
def tasks() -> None:
    """List the built-in tasks with their options."""
    from ..tasks import TASKS, options

    tell = lambda key, default: (
        key.upper() if default is ... else f"{key}={default}" if default is not None else key
    )
    rows = [
        [name, entry.about, ", ".join(tell(k, v) for k, v in options(name).items())]
        for name, entry in TASKS.items()
    ]
    print_table(["task", "what it asks", "options"], rows)


@app.command("cells")
def list_cells(
    name: Optional[str] = typer.Argument(None, help="one of them: everything about it"),
    hidden: int = typer.Option(
        64, "--hidden", min=1, max=10_000, help="units, for the shapes of its parameters"
    ),
    inputs: int = typer.Option(1, "--inputs", min=1, max=10_000, help="inputs, likewise"),
) -> None:
    """List the cells with their equations, options, parameters, engines, state entries of a unit and papers."""
    if name is not None:
        return print_cell(name, hidden, inputs)
    from .. import networks
    from ..networks.factory import CELL_NAMES

    rows = []
    for cell in CELL_NAMES:
        about = networks.about(cell)
        given = [f"{n}={v}" if v is not None else n for n, v in about.options.items()]
        declining = [engine for engine, why in about.engines.items() if why]
        engines = ", ".join(e for e in about.engines if e not in declining)
        if len(declining) < len(about.engines) / 2:
            engines = f"all but {', '.join(declining)}" if declining else "all"
        parameters = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", n) for n in about.parameters)
        equations = " ".join(about.equations.split())
        rows.append(
            [
                cell,
                equations,
                ", ".join(given),
                " ".join(parameters),
                engines,
                about.state,
                about.paper,
            ]
        )
    print_table(["cell", "equations", "options", "parameters", "engines", "state", "paper"], rows)
    return None


def print_cell(name: str, hidden: int, inputs: int) -> None:
    """Everything about a cell, part by part."""
    from .. import networks

    about = networks.about(name, hidden, inputs)
    options = {setting_flags.flag("network", key): value for key, value in about.options.items()}
    reasons = dict.fromkeys(why for why in about.engines.values() if why)
    having = lambda why: ", ".join(
        engine for engine, found in about.engines.items() if found == why
    )
    parts = {
        "": about.equations.splitlines(),
        "paper": [about.paper or "none"],
        "entries of the state for each unit": [about.state],
        "options, and what they are if they are not given": align_values(options) or ["none"],
        f"parameters, --hidden {hidden} --inputs {inputs}": align_values(
            {n: list(shape) for n, shape in about.parameters.items()}
        ),
        "engines": [
            having(None),
            *(f"not {having(why)}, which {why.partition('. Use')[0]}" for why in reasons),
        ],
        "starts, --init": [", ".join(about.initialisers)],
    }
    print(escape_controls(name))
    for title, lines in parts.items():
        print(f"\n{title}" if title else "")
        for line in lines:
            print(escape_controls(f"    {line}".rstrip()))


def align_values(table: Mapping[str, Any]) -> list[str]:
    """A line for each entry, its values below each other."""
    wide = max(map(len, table), default=0)
    words = {"None": "as many as --hidden", "True": "yes", "False": "no"}
    return [f"{key.ljust(wide)}  {words.get(str(value), value)}" for key, value in table.items()]

"""`coadjoint bench`: speed against peers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Optional

import typer

from ..errors import ConfigError, escape_controls
from .program import app, fail, print_table
from .progress import ProgressReporter


@app.command()
def bench(
    device: Optional[str] = typer.Option(None, "--device", help="cpu (default) or cuda"),
    cells: Optional[str] = typer.Option(
        None, "--cells", help="elman,lstm,gru,nn.RNN,nn.LSTM,nn.GRU,hessian-free"
    ),
    sizes: Optional[str] = typer.Option(
        None, "--sizes", help="steps x samples x units: 100x20x50,200x64x128"
    ),
    peers: Optional[str] = typer.Option(None, "--peers", help="torch,autograd,jax; or none"),
    repeat: Optional[int] = typer.Option(None, "--repeat", help="rounds; the median counts"),
    threads: Optional[int] = typer.Option(
        None, "--threads", help="threads of a CPU, each on its core (1)"
    ),
    quick: bool = typer.Option(False, "--quick", help="the smallest size, three rounds"),
    explain: bool = typer.Option(
        False, "--explain", help="say which engines run here and why; measure nothing"
    ),
    json: Optional[str] = typer.Option(
        None,
        "--json",
        metavar="PATH",
        help="write all figures to a file; - for stdout, without the table",
    ),
    write: Optional[Path] = typer.Option(
        None, "--write", help="put the table into this page, in the device's section"
    ),
    quiet: bool = typer.Option(
        False, "--quiet", "-q", help="the results alone, no lines on the way"
    ),
) -> None:
    """Time plain, penalised and double gradients against torch.nn, autograd and JAX, and against what this machine can do.

    \b
    coadjoint bench
    coadjoint bench --device cuda --json bench.json
    coadjoint bench --cells lstm --sizes 300x32x100 --peers torch
    coadjoint bench --explain
    """
    from ..errors import StorageError
    from ..training import files
    from .bench import measure, problems, tables

    if threads is not None and device == "cuda":
        raise ConfigError("--threads belongs to --device cpu.")
    asked: dict[str, Any] = {"device": device or "cpu", "repeat": repeat, "threads": threads}
    asked |= {
        key: measure.parse_names(text)
        for key, text in (("cells", cells), ("peers", peers))
        if text is not None
    }
    asked["sizes"] = measure.parse_sizes(sizes) if sizes is not None else None
    if quick:
        asked["sizes"] = asked["sizes"] or problems.SIZES.get(asked["device"], ())[:1]
        asked["repeat"] = asked["repeat"] or 3
    given = {key: value for key, value in asked.items() if value is not None}
    if explain:
        names = given.get("cells", tuple(problems.MODULES))
        for line in tables.explain_engines(
            [device] if device else list(problems.SIZES), names, given.get("sizes", ())
        ):
            print(escape_controls(line))
        return
    options = measure.BenchOptions(**given)
    for path in (Path(json or "-"), write or Path("-")):
        if not path.parent.is_dir():
            raise StorageError(
                f"{path} cannot be written: there is no such folder. Make it, or choose another place."
            )
    with ProgressReporter(quiet, "bench", sys.stderr) as tick:
        result = tables.run_bench(options, tick)
    if json == "-":
        print(result.json(), end="")
    elif result.rows or result.steps:
        print(escape_controls(f"{result.machine_line()}\n"))
        if result.rows:
            print_table(*result.table())
            print()
        for note in result.notes():
            print(escape_controls(note))
    if json is not None and json != "-":
        files.replace(json, result.json())
    if result.interrupted:
        fail("interrupted.", 130)
    if write is not None:
        tables.write_section(write, result)

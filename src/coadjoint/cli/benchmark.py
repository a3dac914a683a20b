"""`coadjoint bench`: speed compared with other libraries."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from ..errors import ConfigError
from .program import INTERRUPTED, app, fail, print_escaped, print_table, with_examples
from .progress import ProgressReporter

if TYPE_CHECKING:
    from .bench.tables import BenchResult


@app.command()
@with_examples(
    "coadjoint bench",
    "coadjoint bench --device cuda --json bench.json",
    "coadjoint bench --cells lstm --sizes 300x32x100 --peers torch",
    "coadjoint bench --cells mlp",
    "coadjoint bench --rows own-loop,training-step --cells lstm",
    "coadjoint bench --explain",
)
def bench(
    device: Optional[str] = typer.Option(None, "--device", help="cpu (default) or cuda"),
    cells: Optional[str] = typer.Option(
        None,
        "--cells",
        help="elman, lstm, gru, nn.RNN, nn.LSTM, nn.GRU, mlp, hessian-free (default: all)",
    ),
    rows: Optional[str] = typer.Option(
        None,
        "--rows",
        help="gradient, own-loop, gradient-penalty, one-step, training-step (default: all)",
    ),
    sizes: Optional[str] = typer.Option(
        None,
        "--sizes",
        help="steps (mlp: layers; one-step: always 1) x samples x units: 100x20x50,200x64x128",
    ),
    peers: Optional[str] = typer.Option(
        None, "--peers", help="torch,autograd,jax,flashrnn (default: all that are here), or none"
    ),
    repeat: Optional[int] = typer.Option(
        None, "--repeat", help="number of rounds; the median is reported"
    ),
    threads: Optional[int] = typer.Option(
        None, "--threads", help="CPU threads, each pinned to a core (default 1)"
    ),
    quick: bool = typer.Option(False, "--quick", help="the smallest size only, three rounds"),
    explain: bool = typer.Option(
        False, "--explain", help="print which engines run here and why, without measuring"
    ),
    json: Optional[str] = typer.Option(
        None,
        "--json",
        metavar="PATH",
        help="write all figures to this file; - prints them instead of the table",
    ),
    write: Optional[Path] = typer.Option(
        None, "--write", help="replace this device's section in a Markdown file"
    ),
    section: Optional[str] = typer.Option(
        None,
        "--section",
        metavar="NAME",
        help="replace the section of this name instead (another machine, part of the rows)",
    ),
    quiet: bool = typer.Option(False, "--quiet", "-q", help="print the results only, no progress"),
) -> None:
    """Time gradients against other libraries, and against the limits of this machine.

    Plain, penalised and double gradients are timed, all from the same weights. For mlp, a network
    of 30 tanh layers, "costs" is the penalised gradient in plain ones, and "vs autograd loop" says
    how much longer torch takes for the same by differentiating twice.

    Other rows have a limit, the largest ratio of our time to a peer's that is wanted, and say
    whether it is met: own-loop (costates, a penalty, backward()) and training-step of elman, lstm
    and gru, gradient-penalty and one-step of nn.RNN, nn.LSTM and nn.GRU.
    """
    from ..training import files
    from .bench import options, problems, tables

    if threads is not None and device == "cuda":
        raise ConfigError("--threads applies to --device cpu only.")
    chosen_sizes: tuple[problems.Size, ...] = ()
    if sizes is not None:
        chosen_sizes = options.parse_sizes(sizes)
    if quick:
        chosen_sizes = chosen_sizes or problems.SIZES.get(device or "cpu", ())[:1]
        repeat = repeat or 3
    if explain:
        devices = [device] if device else list(problems.SIZES)
        names = tuple(problems.MODULES) if cells is None else options.parse_names(cells)
        for line in tables.explain_engines(devices, names, chosen_sizes):
            print_escaped(line)
        return
    # Only the flags that were given are passed on: BenchOptions has defaults for the rest.
    given: dict[str, object] = {"device": device or "cpu", "sizes": chosen_sizes}
    if cells is not None:
        given["cells"] = options.parse_names(cells)
    if peers is not None:
        given["peers"] = options.parse_names(peers)
    if repeat is not None:
        given["repeat"] = repeat
    if threads is not None:
        given["threads"] = threads
    if rows is not None:
        given["rows"] = options.parse_names(rows)
    if section is not None:
        given["section"] = section
    chosen = options.BenchOptions(**given)  # type: ignore[arg-type]
    refuse_if_no_folder(json, write)
    with ProgressReporter(quiet, "bench", sys.stderr) as report:
        result = tables.run_bench(chosen, report)
    if json == "-":
        print(result.json(), end="")
    else:
        print_result(result)
    if json is not None and json != "-":
        files.replace(json, result.json())
    # The figures so far are kept, but an incomplete table never replaces a section of a page.
    if result.interrupted:
        fail("interrupted.", INTERRUPTED)
    if write is not None:
        tables.write_section(write, result)


def refuse_if_no_folder(json: str | None, write: Path | None) -> None:
    """Refuse the files of --json and --write if they have no folder, before anything is measured.

    None: the flag was not given; "-" for --json: print to the terminal.
    """
    from ..errors import StorageError

    # The folder of "-" is the current one, so what is not a file is never refused.
    for path in (Path(json or "-"), write or Path("-")):
        if not path.parent.is_dir():
            raise StorageError(
                f"{path} cannot be written: its folder does not exist. Create it, or choose "
                "another place."
            )


def print_result(result: BenchResult) -> None:
    """Print the machine, the table and its notes; nothing if nothing was measured."""
    if not result.rows and not result.steps and not result.goals:
        return
    print_escaped(f"{result.machine_line()}\n")
    for heads, lines in result.tables():
        print_table(heads, lines)
        print()
    for note in result.notes():
        print_escaped(note)

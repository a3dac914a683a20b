"""`coadjoint compare`: several settings and seeds side by side."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Optional

import typer

from ..errors import ConfigError, escape_controls
from . import flags as setting_flags
from .flags import config_from_command, with_setting_flags
from .program import OUT, QUIET, app, command_line, next_free_folder, print_table
from .progress import ProgressReporter


@app.command()
@with_setting_flags
def compare(
    what: Optional[list[str]] = typer.Argument(
        None,
        help="tasks, each with settings of its own: 'addition length=100'; or the folders of runs that are there already",
    ),
    method: list[str] = typer.Option(
        [],
        "--method",
        "-m",
        help="a row: 'NAME key=value key=a|b ...'; alternatives make more rows, cell=all one for each cell",
    ),
    seeds: int = typer.Option(3, "--seeds", help="runs of each row: seed, seed + 1, ..."),
    jobs: Optional[int] = typer.Option(
        None, "--jobs", "-j", help="processes at a time; one for each CPU core by default"
    ),
    config: Optional[Path] = typer.Option(
        None, "--config", "-c", help="common settings from a file"
    ),
    out: Optional[Path] = OUT,
    quiet: bool = QUIET,
    flags: Any = None,
) -> None:
    """Train the same tasks under several settings and seeds, in parallel; a table for each task, one page.

    \b
    coadjoint compare xor --length 20 -m plain -m 'clipped clip=1 lr=1e-3|1e-2'
    coadjoint compare xor -m plain -m 'penalised penalty=log-ratio weight=1|2'
    coadjoint compare 'addition length=50' 'digits steps=2000' -m 'plain cell=all'
    coadjoint compare runs/xor-1 runs/xor-2
    """
    from ..errors import StorageError
    from ..training.report import pages
    from . import compared_runs

    what = what or []
    folders = [text for text in what if Path(text).is_dir()]
    if folders and len(folders) < len(what):
        other = next(text for text in what if text not in folders)
        raise StorageError(
            f"{folders[0]} is a folder and {other!r} is none: compare takes tasks, or the folders of runs, not both."
        )
    if folders:
        if method or config or any(flags.values()):
            raise ConfigError(
                "runs that are there already are compared as they are: leave out --method, --config and settings."
            )
        folder = out or next_free_folder("compare")
        found = compared_runs.compare_existing([Path(p) for p in what], folder, command_line())
        page = pages.write(folder)
        if not quiet:
            print_comparison(found)
            print(escape_controls(f"report: {page}"))
        return
    count_jobs(jobs)
    if not method:
        raise ConfigError(
            "what to compare? Give rows with --method 'NAME key=value ...', or the folders of runs."
        )
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1; got {seeds}.")
    base = setting_flags.to_plain_dict(config_from_command(None, config, flags))
    first = base.get("training", {}).get("seed", 0)
    tasks = (
        {"on": [task for text in what for task in compared_runs.parse_tasks(text)]} if what else {}
    )
    folder = out or next_free_folder(
        "-".join(["compare", *(text.split()[0] for text in what[:3])] if what else ["compare-data"])
    )
    rows = [row for text in method for row in compared_runs.parse_variants(text)]
    compared_runs.lay_out(base, rows, range(first, first + seeds), folder, command_line(), **tasks)
    run_comparison(folder, jobs, quiet)


def run_comparison(folder: Path, jobs: int | None, quiet: bool) -> None:
    """Run a comparison to its end, print its tables, write the page."""
    from ..training.report import pages
    from . import compared_runs

    with ProgressReporter(quiet) as tick:
        found = compared_runs.run_all(folder, count_jobs(jobs), tick)
    page = pages.write(folder)
    if not quiet:
        print_comparison(found)
        print(escape_controls(f"runs:   {folder / 'runs'}\nreport: {page}"))


def count_jobs(jobs: int | None) -> int:
    """Processes at a time: as many as asked for, or one for each core."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be at least 1; got {jobs}.")
    return jobs or (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


def print_comparison(found: dict[str, Any]) -> None:
    """The tables of a comparison, one for each task."""
    from ..training.report.comparison import TERMINAL, Comparison

    told = Comparison.of(found).tables(TERMINAL)
    for task, (heads, rows) in told.items():
        if len(told) > 1:
            print(escape_controls(f"\n{task}\n"))
        print_table(heads, rows)

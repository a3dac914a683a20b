"""`coadjoint demo`: plain and penalised backpropagation on one task, with a report at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer

from .compare import count_jobs, run_comparison
from .flags import SectionValues
from .program import OUT, QUIET, app, command_line, next_free_folder

DEMO: SectionValues = {
    "task": {"name": "temporal-order", "length": 50},
    "network": {"hidden": 64, "init": "spectral", "radius": 0.5},
    "optimiser": {"lr": 2e-3},
    # The penalised run succeeds after some 3,700 steps; other rounding may make that later.
    "training": {"steps": 6000, "every": 100},
}
DEMO_ROWS = ("plain", "clipped clip=1", "penalised clip=1 penalty=log-ratio weight=2")


@app.command()
def demo(
    out: Optional[Path] = OUT,
    jobs: Optional[int] = typer.Option(
        None, "--jobs", "-j", help="number of parallel processes (default: one per CPU core)"
    ),
    quiet: bool = QUIET,
) -> None:
    """Compare three methods on a task whose gradients vanish at first.

    Takes half a minute, works offline and writes a report.
    """
    from . import compared_runs

    count_jobs(jobs)  # refuses a wrong number before anything is written
    folder = out or next_free_folder("demo")
    if not quiet:
        print(
            "Temporal order, 50 steps: 64 tanh units, spectral radius 0.5, at most 6,000 steps "
            "of Adam"
        )
    rows = [row for text in DEMO_ROWS for row in compared_runs.parse_variants(text)]
    compared_runs.lay_out(DEMO, rows, [0], folder, command_line())
    run_comparison(folder, jobs, quiet, in_order=True)

"""`coadjoint compare`: several settings and seeds side by side."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Optional

import typer

from ..errors import ConfigError
from . import flags as setting_flags
from .flags import KeyValues, SectionValues, config_from_command, with_setting_flags
from .interruption import told_when_interrupted
from .program import (
    CONFIG,
    ON,
    OUT,
    QUIET,
    TLS_CA_FILE,
    TLS_CERT,
    TLS_KEY,
    app,
    command_line,
    next_free_folder,
    print_escaped,
    print_table,
    with_examples,
)
from .progress import ProgressReporter

if TYPE_CHECKING:
    from .pool import RunPool


@app.command()
@with_setting_flags
@with_examples(
    "coadjoint compare xor --length 20 -m plain -m 'clipped clip=1 lr=1e-3|1e-2'",
    "coadjoint compare xor -m plain -m 'penalised penalty=log-ratio weight=1|2'",
    "coadjoint compare 'addition length=50' 'digits steps=2000' -m 'plain cell=all'",
    "coadjoint compare runs/xor-1 runs/xor-2",
    "coadjoint compare xor -m plain --seeds 100 --on tcp://head:8786",
)
def compare(
    what: Optional[list[str]] = typer.Argument(
        None,
        metavar="TASK",
        help="tasks, each with its settings: 'addition length=100'; or the folders of existing "
        "runs",
    ),
    method: list[str] = typer.Option(
        [],
        "--method",
        "-m",
        help="a row: 'NAME key=value key=a|b ...'. Alternatives a|b make one row each; cell=all "
        "makes one row per cell",
    ),
    seeds: int = typer.Option(
        3, "--seeds", help="runs per row, with seeds --seed, --seed + 1, ..."
    ),
    jobs: Optional[int] = typer.Option(
        None, "--jobs", "-j", help="number of parallel processes (default: one per CPU core)"
    ),
    on: Optional[str] = ON,
    tls_ca_file: Optional[Path] = TLS_CA_FILE,
    tls_cert: Optional[Path] = TLS_CERT,
    tls_key: Optional[Path] = TLS_KEY,
    go_on: bool = typer.Option(
        False, "--continue", help="go on with the comparison in --out if it has begun"
    ),
    config: Optional[Path] = CONFIG,
    out: Optional[Path] = OUT,
    quiet: bool = QUIET,
    *,
    flags: SectionValues,
) -> None:
    """Train tasks with several settings and seeds in parallel, and compare the results.

    Prints one table per task and writes a report.
    """
    from . import compared_runs

    what = what or []
    for text in what:
        if not Path(text).is_dir():
            setting_flags.refuse_path(text.split(" ")[0])
    if are_folders(what):
        if method or config or on or go_on or any(flags.values()):
            raise ConfigError(
                "existing runs are compared as they are: leave out --method, --config and other "
                "settings."
            )
        compare_folders(what, out, quiet)
        return
    count_jobs(jobs)  # refuses a wrong number before anything is written
    if not method:
        raise ConfigError(
            "nothing to compare: give rows with --method 'NAME key=value ...', or the folders of "
            "existing runs."
        )
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1; got {seeds}.")
    base = setting_flags.given_by_user(config_from_command(None, config, flags))
    first_seed = base.get("training", {}).get("seed", 0)
    tasks = [task for text in what for task in compared_runs.parse_tasks(text)]
    rows = [row for text in method for row in compared_runs.parse_variants(text)]
    if go_on and out is None:
        raise ConfigError("--continue needs --out, the folder of the comparison.")
    folder = out or next_free_folder(comparison_name(what))
    place = Where(on, tls_ca_file, tls_cert, tls_key)
    with told_when_interrupted(folder), place.pool(folder, jobs) as pool:
        lines = compared_runs.lay_out(
            base,
            rows,
            range(first_seed, first_seed + seeds),
            folder,
            command_line(),
            tasks or [compared_runs.BASE_TASK],
            go_on,
        )
        if not quiet:
            for line in lines:
                print_escaped(line)
        run_in(pool, folder, quiet)


def are_folders(what: list[str]) -> bool:
    """Whether the arguments name folders; a mix of folders and tasks is refused."""
    from ..errors import StorageError

    folders = [text for text in what if Path(text).is_dir()]
    others = [text for text in what if text not in folders]
    if folders and others:
        raise StorageError(
            f"{folders[0]} is a folder, but {others[0]!r} is not: give tasks or the folders of "
            "runs, not both."
        )
    return bool(folders)


def comparison_name(what: list[str]) -> str:
    """The name of a comparison's folder, after its first three tasks: compare-xor-addition."""
    if not what:
        return "compare-data"
    return "-".join(["compare", *(text.split()[0] for text in what[:3])])


def compare_folders(what: list[str], out: Path | None, quiet: bool) -> None:
    """Compare runs that exist already; what: their folders, out: where the comparison goes."""
    from ..training.report import pages
    from . import existing_runs

    folder = out or next_free_folder("compare")
    found = existing_runs.compare_existing([Path(text) for text in what], folder, command_line())
    page = pages.write(folder)
    if not quiet:
        print_comparison(found)
        print_escaped(f"report: {page}")


class Where(NamedTuple):
    """The flags that say where runs are trained."""

    address: str | None = None  # --on; None: on this machine
    ca_file: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @contextlib.contextmanager
    def pool(self, folder: Path, jobs: int | None) -> Iterator[RunPool]:
        """Where the runs of the comparison in a folder are trained; closed at the end.

        jobs: the most runs at a time.
        """
        from .cluster import TlsFiles, open_pool
        from .pool import LocalPool

        tls = TlsFiles(self.ca_file, self.cert, self.key)
        if self.address is None and tls.words:
            raise ConfigError(f"{tls.words[0]} belongs to --on tls://HOST:PORT.")
        pool: RunPool
        if self.address is None:
            pool = LocalPool(count_jobs(jobs))
        else:
            pool = open_pool(self.address, tls, jobs, folder)
        try:
            yield pool
        finally:
            pool.close()


HERE = Where()


def run_comparison(
    folder: Path,
    jobs: int | None,
    quiet: bool,
    in_order: bool = False,
    where: Where = HERE,
) -> None:
    """Run a comparison to its end, print its tables, write the report.

    in_order: start and report the runs in the order of the table. where: on which machines.
    """
    with where.pool(folder, jobs) as pool:
        run_in(pool, folder, quiet, in_order)


def run_in(pool: RunPool, folder: Path, quiet: bool, in_order: bool = False) -> None:
    """Run a comparison to its end in a pool, print its tables, write the report."""
    from ..training.report import pages
    from . import compared_runs

    reporter = ProgressReporter(quiet)
    with reporter as report:
        found = compared_runs.run_all(folder, pool, report, in_order, reporter.show)
    page = pages.write(folder)
    if not quiet:
        print_comparison(found)
        print_escaped(f"runs:   {folder / 'runs'}\nreport: {page}")


def count_jobs(jobs: int | None) -> int:
    """The number of parallel processes: as given, or one per CPU core."""
    if jobs is not None and jobs < 1:
        raise ConfigError(f"--jobs must be at least 1; got {jobs}.")
    if jobs is not None:
        return jobs
    if hasattr(os, "sched_getaffinity"):  # on Linux: the cores that this process may use
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def print_comparison(found: KeyValues) -> None:
    """Print the tables of a comparison, one per task; found: the content of compare.json."""
    from ..training.report.comparison import TERMINAL, Comparison

    tasks = Comparison.of(found).tasks
    for task in tasks:
        if len(tasks) > 1:
            print_escaped(f"\n{task.name}\n")
        print_table(*task.table(TERMINAL))
        note = task.ranking_note(TERMINAL.label)
        if note:
            print_escaped(note)

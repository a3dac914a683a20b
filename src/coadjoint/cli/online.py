"""`coadjoint online`: learn from a stream, row by row."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from . import build_online
from .build import replace_values
from .flags import SectionValues, config_from_command, read_run_config, with_setting_flags
from .program import (
    CONFIG,
    OUT,
    QUIET,
    app,
    command_line,
    final_status,
    format_figures,
    next_free_folder,
    print_escaped,
    with_examples,
)

if TYPE_CHECKING:
    from ..training.run_folder import RunFolder


@app.command()
@functools.partial(
    with_setting_flags,
    only={**build_online.ONLINE_KEYS, "gradient": ("k1", "k2")},
    texts=build_online.ONLINE_HELP,
)
@with_examples(
    "coadjoint online sensors.csv --target load --hidden 30",
    "coadjoint online sensors.csv --kind next --learner truncated --k1 10 --k2 50",
    "zcat log.csv.gz | coadjoint online - --kind next --cell gru",
)
def online(
    data: str = typer.Argument(
        ...,
        metavar="DATA",
        help="a .csv, .tsv, .txt (also .gz), .npy or .parquet file; - for standard input",
    ),
    learner: Optional[str] = typer.Option(
        None,
        "--learner",
        help="rtrl: update at every step (default); truncated: update every --k1 steps",
    ),
    classes: Optional[str] = typer.Option(
        None,
        "--classes",
        help="labels for --kind classify: a,b,c (default: found by a first pass over the file)",
    ),
    window: int = typer.Option(1000, "--window", min=1, help="steps in the moving averages"),
    config: Optional[Path] = CONFIG,
    out: Optional[Path] = OUT,
    quiet: bool = QUIET,
    *,
    flags: SectionValues,
) -> None:
    """Learn from a stream: each row is predicted first and learned from afterwards.

    Memory does not grow with the length of the stream.
    """
    from ..errors import choose
    from ..training import files, json_rows, settings
    from ..training.run_folder import RunFolder

    if learner is not None:
        method = choose("learner", learner, ("rtrl", "truncated"))
        flags.setdefault("gradient", {})["method"] = method
    flags.setdefault("data", {})["train"] = data
    labels: list[str] | None = None
    if classes is not None:
        labels = [label.strip() for label in classes.split(",")]
    job = build_online.build_stream_job(config_from_command(None, config, flags), labels, window)
    place = out or next_free_folder(job.stream.name)

    def write_settings(folder: Path) -> None:
        not_in_config = {"classes": labels, "window": window}
        files.replace(folder / "online.json", json_rows.dumps(not_in_config, indent=1))
        settings.dump(job.settings, folder / "config.yaml")

    folder = RunFolder(place, write_settings)
    with folder.hold(new=True):
        if not quiet:
            for note in job.stream.notes:
                print_escaped(note)
            count = sum(p.numel() for p in job.network.parameters())
            print_escaped(job.network.extra_repr())
            print_escaped(f"{count:,} parameters; run folder {place}")
        run_stream(job, folder, quiet)


def run_stream(
    job: build_online.OnlineJob,
    run: RunFolder,
    quiet: bool,
    resume: bool = False,
    fallback: bool = False,
) -> None:
    """Learn from a stream to its end, print the outcome, write the report.

    resume: continue from the last checkpoint; fallback: from the one before if it is damaged.
    A run that fails or is interrupted has a report as well.
    """
    from ..errors import DataError, NumericalError
    from ..training import online, signals
    from ..training.report import pages

    folder = Path(run)
    try:
        result = online.learn(
            job.network,
            job.stream,
            **job.arguments,
            folder=run,
            display=not quiet,
            command=command_line(),
            resume=resume,
            fallback=fallback,
        )
    except (NumericalError, DataError, signals.Interrupted):
        pages.write(folder)
        raise
    page = pages.write(folder)
    if quiet:
        return
    averaged = min(result.step, job.arguments["window"])
    print_escaped(f"all steps: {format_figures(result.so_far)}")
    print_escaped(f"last {averaged} steps: {format_figures(result.recent)}")
    how = "the stream ended" if result.status == "ended" else "finished"
    print(f"{how} at step {result.step}, {result.updates} updates, {result.seconds:.0f} s")
    print_escaped(f"run:    {folder}\nreport: {page}")


def resume_stream(run: Path, steps: int | None, fallback: bool, quiet: bool) -> None:
    """Resume a run of `coadjoint online`; steps: a new number of steps in total, or None.

    fallback: use the previous checkpoint if the last one is damaged.
    """
    from ..training import schemas, settings, storage
    from ..training.run_folder import RunFolder

    not_in_config = schemas.read(run / "online.json", schemas.OnlineSettings)
    config = read_run_config(run)
    if steps is not None:
        config = replace_values(config, training={"steps": steps})
    ended = final_status(run, steps or 0)
    if ended is not None:
        if not quiet:
            more = f"If the stream has more rows: coadjoint resume {run} --steps N"
            print_escaped(f"{run} has already ended ({ended}). {more}")
        return
    outline = storage.read_outline(run)
    classes = not_in_config["classes"]
    job = build_online.build_stream_job(config, classes, not_in_config["window"], outline)

    def write_settings(folder: Path) -> None:
        settings.dump(job.settings, folder / "config.yaml")

    # config.yaml changes only if there are other steps to train.
    folder = RunFolder(run) if steps is None else RunFolder(run, write_settings)
    run_stream(job, folder, quiet, resume=True, fallback=fallback)

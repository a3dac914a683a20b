"""`coadjoint online`: learn from a stream, one update for each row."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import typer

from ..errors import escape_controls
from . import build_online
from .flags import config_from_command, read_run_config, with_setting_flags
from .program import OUT, QUIET, app, command_line, final_status, next_free_folder

if TYPE_CHECKING:
    from ..training.run_folder import RunFolder


@app.command()
@functools.partial(
    with_setting_flags,
    only={**build_online.ONLINE_KEYS, "gradient": ("k1", "k2")},
    texts=build_online.ONLINE_HELP,
)
def online(
    data: str = typer.Argument(
        ..., help="a .csv, .tsv, .txt (also .gz), .npy or .parquet file; - for what is piped in"
    ),
    learner: Optional[str] = typer.Option(
        None,
        "--learner",
        help="rtrl: an update at every step (default); truncated: one every --k1 steps",
    ),
    classes: Optional[str] = typer.Option(
        None,
        "--classes",
        help="the labels of --kind classify, a,b,c; without it a first pass over the file finds them",
    ),
    window: int = typer.Option(
        1000, "--window", min=1, help="steps that the moving averages go over"
    ),
    config: Optional[Path] = typer.Option(
        None, "--config", "-c", help="a .toml, .yaml or .json file; flags come on top"
    ),
    out: Optional[Path] = OUT,
    quiet: bool = QUIET,
    flags: Any = None,
) -> None:
    """Learn from a stream, row by row: each is predicted first and then learned from, in memory that does not grow.

    \b
    coadjoint online sensors.csv --target load --hidden 30
    coadjoint online sensors.csv --kind next --learner truncated --k1 10 --k2 50
    zcat log.csv.gz | coadjoint online - --kind next --cell gru
    """
    from ..errors import choose
    from ..training import files, json_rows, settings
    from ..training.run_folder import RunFolder

    if learner is not None:
        flags.setdefault("gradient", {})["method"] = choose(
            "learner", learner, ("rtrl", "truncated")
        )
    flags.setdefault("data", {})["train"] = data
    labels = None if classes is None else [label.strip() for label in classes.split(",")]
    job = build_online.build_stream_job(config_from_command(None, config, flags), labels, window)
    place = out or next_free_folder(job.stream.name)

    def write_settings(folder: Path) -> None:
        own = {"classes": labels, "window": window}
        files.replace(folder / "online.json", json_rows.dumps(own, indent=1))
        settings.dump(job.settings, folder / "config.yaml")

    folder = RunFolder(place, write_settings)
    with folder.hold(new=True):
        if not quiet:
            for note in job.stream.notes:
                print(escape_controls(note))
            count = sum(p.numel() for p in job.network.parameters())
            print(
                escape_controls(
                    f"{job.network.extra_repr()}\n{count:,} parameters; run folder {place}"
                )
            )
        run_stream(job, folder, quiet)


def run_stream(job: build_online.OnlineJob, run: RunFolder, quiet: bool, **more: Any) -> None:
    """Learn a stream to its end, say how it went, write the page."""
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
            **more,
        )
    except (NumericalError, DataError, signals.Interrupted):
        pages.write(folder)
        raise
    page = pages.write(folder)
    if quiet:
        return
    last = min(result.step, job.arguments["window"])
    for split, values in (("all steps", result.so_far), (f"last {last} steps", result.recent)):
        print(escape_controls(f"{split}: " + "  ".join(f"{k} {v:.6g}" for k, v in values.items())))
    how = "the stream ended" if result.status == "ended" else "finished"
    print(
        escape_controls(
            f"{how} at step {result.step}, {result.updates} updates, {result.seconds:.0f} s"
        )
    )
    print(escape_controls(f"run:    {folder}\nreport: {page}"))


def resume_stream(run: Path, steps: int | None, fallback: bool, quiet: bool) -> None:
    """Go on with a run of `coadjoint online`."""
    from ..training import schemas, settings, storage
    from ..training.run_folder import RunFolder

    own = schemas.read(run / "online.json", schemas.OnlineSettings)
    config = read_run_config(run)
    if steps is not None:
        training = config.training.model_copy(update={"steps": steps})
        config = config.model_copy(update={"training": training})
    if (ended := final_status(run, steps or 0)) is not None:
        if not quiet:
            more = f"To go on, if its stream does: coadjoint resume {run} --steps N"
            print(escape_controls(f"{run} has ended already ({ended}). {more}"))
        return
    job = build_online.build_stream_job(
        config, own["classes"], own["window"], storage.read_outline(run)
    )
    longer = lambda folder: settings.dump(job.settings, folder / "config.yaml")
    run_stream(
        job,
        RunFolder(run, None if steps is None else longer),
        quiet,
        resume=True,
        fallback=fallback,
    )

"""`coadjoint train`, `resume` and `replay`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import typer

from ..errors import ConfigError, MissingError, escape_controls
from . import build
from . import flags as setting_flags
from .compare import run_comparison
from .flags import config_from_command, with_setting_flags
from .online import resume_stream
from .program import OUT, QUIET, RUN, app, command_line, final_status, next_free_folder

if TYPE_CHECKING:
    from ..training.run_folder import RunFolder


def run_training(job: build.Job, run: RunFolder, quiet: bool, **more: Any) -> None:
    """Train, say how it went, write the page."""
    from ..errors import NumericalError
    from ..training import loop, signals
    from ..training.report import pages

    folder = Path(run)
    loggers = [tensorboard_logger(folder)] if job.config.training.tensorboard else []
    try:
        result = loop.train(
            job.network, job.task, **job.arguments, folder=run, display=not quiet, loggers=loggers, command=command_line(), **more
        )  # fmt: skip
    except (NumericalError, signals.Interrupted):
        pages.write(folder)
        raise
    page = pages.write(folder)
    if quiet:
        return
    if result.skipped:
        print(f"{result.skipped} of {result.step} steps were not finite and left out")
    for split, values in result.metrics.items():
        print(escape_controls(f"{split}: " + "  ".join(f"{k} {v:.6g}" for k, v in values.items())))
    goal = f" ({job.task.goal})" if job.task.goal else ""
    won = (
        f"; success{goal} at step {result.success_step}"
        if result.success
        else f"; no success{goal}"
        if goal
        else ""
    )
    outcome = {
        "success": f"success{goal} at step {result.success_step}, {result.success_seconds or 0:.0f} s",
        "early-stopped": f"stopped early at step {result.step}; the best step is {result.best_step}",
        "finished": f"finished at step {result.step}, {result.seconds:.0f} s{won}",
    }[result.status]
    print(escape_controls(f"{outcome}\nrun:    {folder}\nreport: {page}"))


def tensorboard_logger(folder: Path) -> Callable[[dict[str, Any]], None]:
    from ..training import files

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingError(
            "--tensorboard needs its package: pip install 'coadjoint[tensorboard]'."
        ) from None
    writer: Any = None

    def log(row: dict[str, Any]) -> None:
        nonlocal writer
        if writer is None:
            files.is_real_folder(folder / "tensorboard")
            writer = SummaryWriter(str(folder / "tensorboard"), purge_step=row["step"])
        kind = row.get("split", row["kind"])
        for key, value in row.items():
            if isinstance(value, float):
                writer.add_scalar(f"{kind}/{key}", value, row["step"])
        for key, value in row.get("gradients", {}).items():
            writer.add_scalar(f"gradient/{key}", value, row["step"])
        writer.flush()

    return log


@app.command()
@with_setting_flags
def train(
    task: Optional[str] = typer.Argument(
        None, help="a built-in task (`coadjoint tasks`); or --train FILE"
    ),
    config: Optional[Path] = typer.Option(
        None, "--config", "-c", help="a .toml, .yaml or .json file; flags come on top"
    ),
    out: Optional[Path] = OUT,
    quiet: bool = QUIET,
    flags: Any = None,
) -> None:
    """Train a network on a task or on your own data, in a run folder that survives crashes and ends in a page.

    \b
    coadjoint train temporal-order --length 50 --penalty log-ratio --clip 1
    coadjoint train addition --cell lstm --length 50,60 --ragged --schedule cosine
    coadjoint train --train data.csv --id series --target label --patience 10
    """
    from ..training.run_folder import RunFolder

    job = build.build(config_from_command(task, config, flags))
    place = out or next_free_folder(job.config.task.name or Path(str(job.config.data.train)).stem)
    folder = RunFolder(place, settings_writer(job))
    with folder.hold(new=True):
        if not quiet:
            print_introduction(job, place)
        run_training(job, folder, quiet)


def settings_writer(job: build.Job) -> Callable[[Path], None]:
    """Writes the settings of a run into its folder."""
    from ..training import settings

    return lambda folder: settings.dump(
        setting_flags.to_plain_dict(job.config), folder / "config.yaml"
    )


def print_introduction(job: build.Job, folder: Path) -> None:
    """Say what is going to be trained."""
    for note in job.notes:
        print(escape_controls(note))
    parameters = list(job.network.parameters())
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    of_them = "" if trained == count else f", {trained:,} of them trained"
    print(
        escape_controls(
            f"{job.network.extra_repr()}\n{count:,} parameters{of_them}; run folder {folder}"
        )
    )
    if hasattr(job.task, "baseline"):
        figures = "  ".join(f"{name} {value:.4g}" for name, value in job.task.baseline().items())
        print(escape_controls(f"remembering nothing gives: {figures}"))


@app.command()
def resume(
    run: Path = RUN,
    steps: Optional[int] = typer.Option(None, "--steps", help="go on up to this step instead"),
    fallback: bool = typer.Option(
        False, "--fallback", help="use the previous checkpoint if the last one is damaged"
    ),
    jobs: Optional[int] = typer.Option(None, "--jobs", "-j", help="processes (of a comparison)"),
    quiet: bool = QUIET,
) -> None:
    """Go on with a run, or with a comparison, where it stopped: bit for bit as if it had not."""
    from ..training import storage
    from ..training.report import pages
    from ..training.run_folder import RunFolder

    if os.path.lexists(run / "compare.json"):
        if steps is not None or fallback:
            raise ConfigError("--steps and --fallback belong to a run, not to a comparison.")
        return run_comparison(run, jobs, quiet)
    if jobs is not None:
        raise ConfigError("--jobs belongs to a comparison, not to a run.")
    if os.path.lexists(run / "online.json"):
        return resume_stream(run, steps, fallback, quiet)
    config = setting_flags.read_run_config(run)
    if steps is not None:
        config = setting_flags.resolve(
            None,
            {
                **setting_flags.to_plain_dict(config),
                "training": {**setting_flags.to_plain_dict(config)["training"], "steps": steps},
            },
        )
    job = build.build(config, storage.read_outline(run))
    ended = final_status(run, job.arguments["steps"])
    if ended is not None:
        if not (run / "report.html").exists():
            pages.write(run)
        longer = (
            f" To train longer: coadjoint resume {run} --steps N" if ended == "finished" else ""
        )
        if not quiet:
            print(escape_controls(f"{run} has ended already ({ended}).{longer}"))
        return None
    folder = RunFolder(run, None if steps is None else settings_writer(job))
    run_training(job, folder, quiet, resume=True, fallback=fallback)
    return None


@app.command()
def replay(run: Path = RUN) -> None:
    """Compute again the step at which a run met a number that is not finite, and say where it arose."""
    from ..errors import NumericalError, StorageError
    from ..training import loop, storage

    found = storage.list_checkpoints(run, "replay")
    if not found:
        raise StorageError(f"{run} holds no replay: no step of it was refused.")
    job = build.build(setting_flags.read_run_config(run), storage.read_outline(run, "replay"))
    saved = storage.load(found[-1])
    arguments = {**job.arguments, "nonfinite": "stop"}
    try:
        loss = loop.recompute_step(job.network, job.task, saved, arguments).loss
    except NumericalError as error:
        print(escape_controls(f"step {saved.step + 1}: {error}"))
        raise typer.Exit(NumericalError.exit_code) from None
    print(
        f"step {saved.step + 1}: loss {loss:.6g}, finite here. The run refused it: {escape_controls(saved.state['reason'])}"
    )

"""`coadjoint train`, `resume` and `replay`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import typer

from ..errors import ConfigError, MissingError, escape_controls
from ..training.metric_names import goal_label, split_metric
from . import build
from . import flags as setting_flags
from .baselines import print_baselines
from .compare import run_comparison
from .flags import SectionValues, config_from_command, with_setting_flags
from .online import resume_stream
from .past import stand_where_it_began
from .program import (
    CONFIG,
    OUT,
    QUIET,
    RUN,
    app,
    command_line,
    final_status,
    format_figures,
    next_free_folder,
    print_escaped,
    with_examples,
)

if TYPE_CHECKING:
    from ..tasks.task import Task
    from ..training.progress import Result
    from ..training.run_folder import RunFolder

STANDARDISED_LOSS = (
    "loss: of targets scaled to mean 0 and variance 1; mse, mae and rmse: in the units of your data"
)
WIDEST_SUMMARY = 100  # characters
Logger = Callable[[dict[str, Any]], None]  # takes a row of metrics.jsonl


def run_training(
    job: build.Job, run: RunFolder, quiet: bool, resume: bool = False, fallback: bool = False
) -> None:
    """Train, print the outcome, write the report.

    resume: continue from the last checkpoint; fallback: from the one before if it is damaged.
    A run that fails or is interrupted has a report as well.
    """
    from ..errors import NumericalError
    from ..training import loop, signals
    from ..training.report import pages

    folder = Path(run)
    loggers = []
    if job.config.training.tensorboard:
        loggers.append(tensorboard_logger(folder))
    try:
        result = loop.train(
            job.network,
            job.task,
            **job.arguments,
            folder=run,
            display=not quiet,
            loggers=loggers,
            command=command_line(),
            resume=resume,
            fallback=fallback,
        )
    except (NumericalError, signals.Interrupted):
        pages.write(folder)
        raise
    page = pages.write(folder)
    if not quiet:
        print_outcome(result, job.task)
        print_baselines(result, job)
        print_escaped(f"run:    {folder}\nreport: {page}")


def print_outcome(result: Result, task: Task) -> None:
    """Print the metrics of a run, which step they are of, and how the run ended."""
    if result.skipped:
        print(f"{result.skipped} of {result.step} steps were not finite and were skipped")
    if result.best_step is None:
        print(f"at the last step ({result.step:,}):")
    else:
        # the split that chose: see Watch
        split = "valid" if "valid" in task.splits else "test"
        metric = split_metric(split, result.selected_by or task.metric)
        print_escaped(f"at the best step ({result.best_step:,}), by {metric}:")
    for split, metrics in result.metrics.items():
        print_escaped(f"{split}: {format_figures(metrics)}")
    if is_standardised(task):
        print(STANDARDISED_LOSS)
    goal = f": {goal_label(str(task.goal))}" if task.goal else ""
    success = f"success at step {result.success_step}"
    if result.status == "success":
        print_escaped(f"{success}, {result.success_seconds or 0:.0f} s{goal}")
    elif result.status == "early-stopped":
        print(f"stopped early at step {result.step}; the best step was {result.best_step}")
    else:
        ending = f"finished at step {result.step}, {result.seconds:.0f} s"
        if result.success:
            ending += f"; {success}{goal}"
        elif goal:
            ending += f"; goal not reached{goal}"
        print_escaped(ending)


def is_standardised(task: Task) -> bool:
    """Whether the loss is that of targets which were scaled: only real ones of own data are."""
    from ..tasks.data import Data

    if not isinstance(task, Data):
        return False
    return any(deviation != 1 for deviation in task.description.target_std)


def tensorboard_logger(folder: Path) -> Logger:
    """A logger that writes rows of metrics for TensorBoard, into a folder inside the run folder."""
    from ..training import files

    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise MissingError(
            "--tensorboard needs the tensorboard package: pip install 'coadjoint[tensorboard]'."
        ) from None
    writer: SummaryWriter | None = None

    def log(row: dict[str, Any]) -> None:
        """Write the numbers of a row of metrics.jsonl as KIND/KEY."""
        nonlocal writer
        if writer is None:  # only now is the first step known, after which old logs are dropped
            files.is_real_folder(folder / "tensorboard")  # refuses a link
            writer = SummaryWriter(str(folder / "tensorboard"), purge_step=row["step"])
        kind = row.get("split", row["kind"])  # held-out rows are grouped by their split
        for key, value in row.items():
            if isinstance(value, float):
                writer.add_scalar(f"{kind}/{key}", value, row["step"])
        for key, value in row.get("gradients", {}).items():
            writer.add_scalar(f"gradient/{key}", value, row["step"])
        writer.flush()

    return log


@app.command()
@with_setting_flags
@with_examples(
    "coadjoint train temporal-order --length 50 --penalty log-ratio --clip 1",
    "coadjoint train addition --cell lstm --length 50,60 --ragged --schedule cosine",
    "coadjoint train --train data.csv --id series --target label --patience 10",
    "coadjoint train digits-image --chain 'conv 8 3, tanh, pool 2, 64' --steps 2000",
)
def train(
    task: Optional[str] = typer.Argument(
        None,
        metavar="TASK",
        help="a built-in task (`coadjoint tasks` lists them); or use --train FILE",
    ),
    config: Optional[Path] = CONFIG,
    out: Optional[Path] = OUT,
    quiet: bool = QUIET,
    *,
    flags: SectionValues,
) -> None:
    """Train a network on a built-in task or on your own data.

    The run folder holds metrics, checkpoints, the model and a report.
    A run that was stopped, or crashed, can be resumed.
    """
    from ..tasks.files.packed import table_stem
    from ..training.run_folder import RunFolder

    if task is not None and Path(task).is_file():
        raise ConfigError(f"{task} is a file, not a built-in task: pass it with --train {task}")
    job = build.build(config_from_command(task, config, flags))
    place = out or next_free_folder(job.config.task.name or table_stem(str(job.config.data.train)))
    folder = RunFolder(place, settings_writer(job))
    with folder.hold(new=True):
        if not quiet:
            print_introduction(job, place)
        run_training(job, folder, quiet)


def settings_writer(job: build.Job) -> Callable[[Path], None]:
    """A function that writes the settings of a run into the folder it is given: config.yaml."""
    from ..training import settings

    values = setting_flags.to_plain_dict(job.config)
    return lambda folder: settings.dump(values, folder / "config.yaml")


def print_introduction(job: build.Job, folder: Path) -> None:
    """Print what is about to be trained: notes, network, parameters and the task's baseline.

    Of the user's own data it is a summary of what was read, which holds the notes on the data.
    """
    summary = summarise_data(job.task)
    if summary:
        print_escaped(summary)
    said = getattr(job.task, "notes", ()) if summary else ()
    for note in job.notes:
        if note not in said:
            print_escaped(note)
    from ..training.display import DECAY, DECAY_OF_LAYERS

    parameters = list(job.network.parameters())
    count = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    of_them = "" if trained == count else f", {trained:,} of them trained"
    print_escaped(job.network.extra_repr())
    print_escaped(f"{count:,} parameters{of_them}; run folder {folder}")
    has_time = job.task.shape is None
    if hasattr(job.task, "baseline"):
        reason = "no memory" if has_time else "input ignored"
        print_escaped(f"baseline ({reason}): {format_figures(job.task.baseline(), 4)}")
    print(DECAY if has_time else DECAY_OF_LAYERS)


def summarise_data(task: Task) -> str:
    """What was read from the user's own files, as wide as the terminal; "" for other tasks."""
    from ..tasks.data import Data

    if not isinstance(task, Data):
        return ""
    columns = shutil.get_terminal_size().columns
    return task.summary(min(columns, WIDEST_SUMMARY))


@app.command()
def resume(
    run: Path = typer.Argument(..., metavar="RUN", help="the folder of a run or a comparison"),
    steps: Optional[int] = typer.Option(
        None, "--steps", help="new number of training steps in total"
    ),
    fallback: bool = typer.Option(
        False, "--fallback", help="use the previous checkpoint if the last one is damaged"
    ),
    jobs: Optional[int] = typer.Option(
        None, "--jobs", "-j", help="comparison, search: number of parallel processes"
    ),
    trials: Optional[int] = typer.Option(
        None, "--trials", help="search: new number of trials in total"
    ),
    minutes: Optional[float] = typer.Option(
        None, "--minutes", help="search: time for what is left"
    ),
    quiet: bool = QUIET,
) -> None:
    """Resume a run, a comparison or a search.

    The result of a run matches an uninterrupted one bit for bit.
    """
    from ..training import storage
    from ..training.report import pages
    from ..training.run_folder import RunFolder

    if os.path.lexists(run / "tune.json"):
        if steps is not None or fallback:
            raise ConfigError("--steps and --fallback apply to a run, not to a search.")
        from .tune import resume_study

        resume_study(run, trials, minutes, jobs, quiet)
        return
    if trials is not None or minutes is not None:
        raise ConfigError("--trials and --minutes apply to a search by `coadjoint tune`.")
    if os.path.lexists(run / "compare.json"):
        if steps is not None or fallback:
            raise ConfigError("--steps and --fallback apply to a run, not to a comparison.")
        if not quiet:
            print_escaped(f"Resuming {run}, a comparison.")
        run_comparison(run, jobs, quiet)
        return
    if jobs is not None:
        raise ConfigError("--jobs applies to a comparison, not to a run.")
    if os.path.lexists(run / "online.json"):
        resume_stream(run, steps, fallback, quiet)
        return
    config = setting_flags.read_run_config(run)
    run = stand_where_it_began(run, config, quiet)
    if steps is not None:  # resolved again, which checks the new number
        values = setting_flags.to_plain_dict(config)
        values["training"]["steps"] = steps
        config = setting_flags.resolve(None, values)
    job = build.build(config, storage.read_outline(run), has_begun=True)
    ended = final_status(run, job.arguments["steps"])
    if ended is not None:
        if not (run / "report.html").exists():
            pages.write(run)
        longer = ""
        if ended == "finished":
            longer = f" To train longer: coadjoint resume {run} --steps N"
        if not quiet:
            print_escaped(f"{run} has already ended ({ended}).{longer}")
        return
    # config.yaml changes only if there are other steps to train.
    folder = RunFolder(run) if steps is None else RunFolder(run, settings_writer(job))
    run_training(job, folder, quiet, resume=True, fallback=fallback)


@app.command()
def replay(run: Path = RUN) -> None:
    """Repeat the step that produced a non-finite number, and report where it first occurred."""
    from ..errors import NumericalError, StorageError
    from ..training import loop, storage

    replays = storage.list_checkpoints(run, "replay")  # oldest first
    if not replays:
        raise StorageError(f"{run} has nothing to replay: no step was rejected.")
    config = setting_flags.read_run_config(run)
    job = build.build(config, storage.read_outline(run, "replay"), has_begun=True)
    saved = storage.load(replays[-1])
    arguments = {**job.arguments, "nonfinite": "stop"}  # raise the error, whatever the run did
    try:
        loss = loop.recompute_step(job.network, job.task, saved, arguments).loss
    except NumericalError as error:
        print_escaped(f"step {saved.step + 1}: {error}")
        raise typer.Exit(NumericalError.exit_code) from None
    reason = escape_controls(saved.state["reason"])
    print(
        f"step {saved.step + 1}: loss {loss:.6g}, which is finite on this machine. The run "
        f"rejected it: {reason}"
    )

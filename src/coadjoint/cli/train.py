"""`coadjoint train`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from ..errors import ConfigError
from ..training.metric_names import goal_label, split_metric
from . import build
from . import flags as setting_flags
from .baselines import print_baselines
from .flags import SectionValues, config_from_command, with_setting_flags
from .program import (
    CONFIG,
    OUT,
    QUIET,
    app,
    command_line,
    format_figures,
    next_free_folder,
    print_escaped,
    warn,
    with_examples,
)

if TYPE_CHECKING:
    from ..tasks.task import Task
    from ..training.loggers import Logger
    from ..training.progress import Result
    from ..training.run_folder import RunFolder
    from .schema import Config

STANDARDISED_LOSS = (
    "loss: of targets scaled to mean 0 and variance 1; mse, mae and rmse: in the units of your data"
)
WIDEST_SUMMARY = 100  # characters


def run_training(
    job: build.Job, run: RunFolder, quiet: bool, resume: bool = False, fallback: bool = False
) -> None:
    """Train, print the outcome, write the report.

    resume: continue from the last checkpoint; fallback: from the one before if it is damaged.
    A run that fails or is interrupted has a report as well.
    """
    from ..errors import NumericalError
    from ..training import loop, signals
    from ..training.loggers import closed_at_the_end
    from ..training.report import pages

    folder = Path(run)
    loggers = loggers_of(job.config, folder)
    with closed_at_the_end(loggers):
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


def loggers_of(config: Config, folder: Path) -> list[Logger]:
    """The loggers that --logger and --tensorboard ask for."""
    from ..training.loggers import logger_names, make_loggers

    names = logger_names(config.training.logger, config.training.tensorboard)
    if not names:
        return []
    return make_loggers(names, folder, setting_flags.to_plain_dict(config), warn)


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

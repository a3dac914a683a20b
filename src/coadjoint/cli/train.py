"""`coadjoint train`."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Optional

import typer

from ..errors import ConfigError
from ..training import launched
from ..training.metric_names import goal_label, split_metric
from . import build
from . import flags as setting_flags
from .baselines import print_baselines
from .flags import SectionValues, config_from_command, with_setting_flags
from .interruption import told_when_interrupted
from .past import stand_where_it_began
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
    warn,
    with_examples,
)
from .together import Processes, joined_processes

if TYPE_CHECKING:
    from ..tasks.task import Task
    from ..training.advice import Search
    from ..training.loggers import Logger
    from ..training.progress import Result
    from ..training.run_folder import RunFolder
    from .schema import Config

STANDARDISED_LOSS = (
    "loss: of targets scaled to mean 0 and variance 1; mse, mae and rmse: in the units of your data"
)
WIDEST_SUMMARY = 100  # characters
OF_THE_MACHINE = ("threads", "device", "shards")  # settings that --continue takes from the run


def follow_training(job: build.Job, resume: bool) -> None:
    """Train as one of the processes that follow rank 0."""
    from ..training import loop

    loop.train(job.network, job.task, **job.arguments, resume=resume, distributed=True)


def run_training(
    job: build.Job,
    run: RunFolder,
    quiet: bool,
    resume: bool = False,
    fallback: bool = False,
    distributed: bool = False,
    search: Search | None = None,
) -> None:
    """Train, print the outcome, write the report.

    resume: continue from the last checkpoint; fallback: from the one before if it is damaged.
    distributed: as rank 0 of several processes. search: the one that found the settings.
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
                distributed=distributed,
            )
        except (NumericalError, signals.Interrupted):
            pages.write(folder)
            raise
        page = pages.write(folder)
    if not quiet:
        print_outcome(result, job.task)
        print_baselines(result, job, search)
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
    "torchrun --nproc-per-node 4 -m coadjoint train addition --cell lstm --out run --continue",
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
    go_on: bool = typer.Option(
        False, "--continue", help="resume the run in --out if there is one, with the same settings"
    ),
    *,
    flags: SectionValues,
) -> None:
    """Train a network on a built-in task or on your own data.

    The run folder holds metrics, checkpoints, the model and a report.
    A run that was stopped, or crashed, can be resumed.
    """
    if go_on and out is None:
        raise ConfigError("--continue needs --out: it resumes the run in that folder.")
    with told_when_interrupted(out), joined_processes() as processes:
        asked = config_from_command(task, config, flags)
        has_begun = go_on and out is not None and os.path.lexists(out / "config.yaml")
        if out is not None and processes.word(has_begun):
            with processes.together():
                if processes.leads:
                    refuse_other_settings(out, asked)
            resume_run(out, processes, quiet)
            return
        begin_run(asked, out, processes, quiet)


def begin_run(asked: Config, out: Path | None, processes: Processes, quiet: bool) -> None:
    """Train from the first step, in a new folder."""
    from ..tasks.files.packed import table_stem
    from ..training.run_folder import RunFolder

    with processes.together():
        shards = processes.shards_of(asked)
        if shards is not None:
            asked = build.replace_values(asked, training={"shards": shards})
        job = build.build(asked)
    name = job.config.task.name or table_stem(str(job.config.data.train))
    place = processes.word(out or next_free_folder(name))
    with told_when_interrupted(place), contextlib.ExitStack() as stack:
        folder = RunFolder(place, settings_writer(job))
        with processes.together():
            if processes.leads:
                stack.enter_context(folder.hold(new=True))
        if not processes.leads:
            follow_training(job, resume=False)
            return
        if not quiet:
            print_introduction(job, place)
        run_training(job, folder, quiet, distributed=processes.size > 1)


def refuse_other_settings(run: Path, asked: Config) -> None:
    """Refuse to continue a run whose settings are not those of the command line.

    What follows from the machine may differ.
    """
    now = setting_flags.to_plain_dict(build.build(asked).config)
    then = setting_flags.to_plain_dict(setting_flags.read_run_config(run))
    given = setting_flags.given_by_user(asked).get("training", {})
    for name in sorted({*now, *then}):
        keys_now = now.get(name, {})
        keys_then = then.get(name, {})
        for key in sorted({*keys_now, *keys_then}):
            is_free = key in OF_THE_MACHINE and key not in given
            if not is_free and keys_now.get(key) != keys_then.get(key):
                raise ConfigError(
                    f"{run} holds a run with other settings: "
                    f"{setting_flags.flag(name, key)} was {keys_then.get(key)!r} and is now "
                    f"{keys_now.get(key)!r}. Leave out --continue and choose another --out, or "
                    f"resume it as it is: coadjoint resume {shlex.quote(str(run))}"
                )


def resume_run(
    run: Path,
    processes: Processes,
    quiet: bool,
    steps: int | None = None,
    fallback: bool = False,
    is_forced: bool = False,
) -> None:
    """Resume a training run. steps: a new number of them; fallback: from an older checkpoint.

    is_forced: even if it has ended, as a run that was pruned has.
    """
    from ..training import storage
    from ..training.run_folder import RunFolder

    quiet = quiet or not processes.leads
    with processes.together():
        config, run = settings_of_run(run, processes, steps, quiet)
        past = storage.read_outline(run) if processes.leads else None
        job = build.build(config, past, has_begun=True)
        ended = None
        if processes.leads and not is_forced:
            ended = final_status(run, job.arguments["steps"])
    if processes.word(ended) is not None:
        if processes.leads:
            say_it_has_ended(run, str(ended), quiet)
        return
    if not processes.leads:
        follow_training(job, resume=True)
        return
    # config.yaml changes only if there are other steps to train.
    folder = RunFolder(run) if steps is None else RunFolder(run, settings_writer(job))
    run_training(job, folder, quiet, True, fallback, processes.size > 1)


def settings_of_run(
    run: Path, processes: Processes, steps: int | None, quiet: bool
) -> tuple[Config, Path]:
    """The config of a run, and its folder as seen from where its data lies.

    Rank 0 reads it. steps: a new number of them, None for those it has.
    """
    found: tuple[Config, Path, str] | None = None
    with processes.together():
        if processes.leads:
            config = setting_flags.read_run_config(run)
            run = stand_where_it_began(run, config, quiet)
            if steps is not None:  # resolved again, which checks the new number
                values = setting_flags.to_plain_dict(config)
                values["training"]["steps"] = steps
                config = setting_flags.resolve(None, values)
            processes.refuse_if_too_many(config)
            found = (config, run, os.getcwd())
    found = processes.word(found)
    assert found is not None
    config, run, place = found
    if not processes.leads and os.path.isdir(place):
        os.chdir(place)
    return config, run


def say_it_has_ended(run: Path, status: str, quiet: bool) -> None:
    """Say how a run ended that has no step left; write its report if it has none."""
    from ..training import schemas
    from ..training.report import pages

    if not (run / "report.html").exists():
        pages.write(run)
    longer = ""
    if status == "finished":
        done = schemas.read(run / "result.json", schemas.ResultSchema)["step"]
        longer = f" To train longer: coadjoint resume {run} --steps N, with N above {done:,}"
    if not quiet:
        print_escaped(f"{run} has already ended ({status}).{longer}")


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
    sharing = ""
    shards = job.config.training.shards or 1
    if shards > 1:
        plural = "" if launched.size() == 1 else "es"
        sharing = f"; {launched.size()} process{plural}, {shards} shards"
    print_escaped(f"{count:,} parameters{of_them}; run folder {folder}{sharing}")
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

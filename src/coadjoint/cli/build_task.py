"""The task of a config: a built-in one, or the user's own data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError
from . import chains
from .baselines import asked_metrics
from .flags import KeyValues, flag, given_values
from .schema import Config
from .splits import explain_lack_of_validation, split_to_read

if TYPE_CHECKING:
    from ..tasks.data import Data
    from ..tasks.task import Task
    from ..training.curriculum import Easiest


def hide_test_set(task: Task) -> None:
    """Take the test set away from a finite task, so that nothing can look at it."""
    from ..tasks.judging import JudgedCollection
    from ..tasks.task import Collection

    if not isinstance(task, Collection):
        raise ConfigError(
            "--no-test-set applies to finite data: this task draws new test sequences each time."
        )
    task.sets = {name: kept for name, kept in task.sets.items() if name != "test"}
    task.splits = tuple(split for split in task.splits if split != "test")
    if isinstance(task, JudgedCollection):
        task.baselines = []  # they are for the run that sees the test set


def steps_per_epoch(task: Task, batch: int) -> int | None:
    """Training steps in one pass over a finite task; None if the task is generated without end.

    batch: sequences per training step.
    """
    from ..tasks.task import Collection

    if not isinstance(task, Collection):
        return None
    return task.steps_per_epoch(batch)


def task_of(config: Config, has_begun: bool = False) -> Task:
    """The built-in task of a config, or the user's own data as a task.

    has_begun: the config is that of a run folder.
    """
    task = chains.restoring_task(config, named_task(config, has_begun))
    chains.refuse_if_mismatched(config, task)
    if config.training.reduce is not None:
        if task.readout == "last":
            raise ConfigError(
                f"--reduce is over time steps that each have a target, but task '{task.name}' has "
                "one target for each sequence: leave it out."
            )
        task.reduce_by(config.training.reduce)
    return task


def named_task(config: Config, has_begun: bool) -> Task:
    """The task that a config names, or the user's own data as a task: see `task_of`."""
    name = config.task.name
    options = given_values(config.task)
    # The task is made without these: its name, and what `curriculum_of` reads for any task.
    for key in ("name", "easiest", "easiest_by"):
        options.pop(key, None)
    data = given_values(config.data)
    if name is None:
        options.pop("chunk", None)  # cuts what was read: see `cut_as_given`
        return data_task(config, options, data, has_begun)
    if "train" in data:
        raise ConfigError(f"task '{name}' and data '{data['train']}' are both given: choose one.")
    if data:
        raise ConfigError(
            f"{flag('data', next(iter(data)))} applies to your own data (--train FILE), not to "
            f"task '{name}'."
        )
    if config.network.noise is not None and chains.has_noise(config):
        options["noise"] = config.network.noise
    return built_in_task(name, options)


def data_task(config: Config, options: KeyValues, data: KeyValues, has_begun: bool) -> Task:
    """The user's own data as a task; data: the keys of [data], with the file under "train".

    options: the keys of [task], which apply to built-in tasks only and are refused.
    """
    from ..tasks.data import Data
    from ..training import own_defaults

    if "train" not in data:
        raise ConfigError(
            "nothing to train on: name a task (`coadjoint tasks` lists them), or pass your own "
            "data with --train FILE."
        )
    if options:
        raise ConfigError(
            f"{flag('task', next(iter(options)))} applies to built-in tasks, not to your own data."
        )
    dtype = "float64" if config.training.precision == 64 else "float32"
    data |= chains.data_options(config)
    data["metrics"] = asked_metrics(config)
    data["split"] = split_to_read(config.data, has_begun)
    if not has_begun and own_defaults.reads_lags(data, config.network.cell):
        data["lags"] = "auto"
    return Data.read(data.pop("train"), seed=config.training.seed, dtype=dtype, **data)


def built_in_task(name: str, options: KeyValues) -> Task:
    """A built-in task with its options."""
    from .. import tasks

    known = tasks.options(name)
    for key in options:
        if key not in known:
            its_options = (
                f"; its options: {', '.join(known)}." if known else ", which has no options."
            )
            raise ConfigError(f"{flag('task', key)} has no effect on task '{name}'{its_options}")
    return tasks.make(name, **options)


def check_size_settings(config: Config, task: Task) -> None:
    """Refuse settings that do not apply to a task of this size, finite or endless."""
    training = config.training
    problems = []
    if task.size is None:  # generated without end
        if training.epochs is not None:
            problems.append(
                "--epochs needs a finite training set, but this task is generated without end: "
                "use --steps."
            )
    else:
        no_effect = "has no effect on a finite set: all held-out sequences are used."
        if training.steps is not None and training.epochs is not None:
            problems.append("--steps and --epochs both limit the run: give one of them.")
        if training.tests is not None:
            problems.append(f"--tests {no_effect}")
        if training.confirm is not None:
            problems.append(f"--confirm {no_effect}")
        for name in ("patience", "select"):
            if getattr(training, name) is not None and "valid" not in task.splits:
                problems.append(explain_lack_of_validation(config, f"--{name}"))
    if problems:
        raise ConfigError("\n".join(problems))
    task.selector(training.select)  # refuses a metric that the task does not have


def curriculum_of(config: Config) -> Easiest | None:
    """Which of the drawn sequences to train on, the easiest at first; None for all."""
    from ..training.curriculum import Easiest

    task = config.task
    if task.easiest is None:
        if task.easiest_by is not None:
            raise ConfigError("--easiest-by has no effect without --easiest.")
        return None
    return Easiest(*task.easiest, task.easiest_by or "loss")


def refuse_if_answers_are_read(config: Config, task: Task) -> None:
    """Refuse a network that reads in both directions, if it is to predict the next step.

    Its reverse direction reads the answer, so that all figures, also held-out ones, would be wrong.
    """
    answer = next_answer(task)
    if config.network.bidirectional and answer is not None:
        raise ConfigError(
            f"--bidirectional reads the next {answer} too, which is the answer. Leave it out."
        )


def next_answer(task: Task) -> str | None:
    """What a task asks for at every step if that is a part of the next one; None otherwise."""
    from ..tasks.data import Data
    from ..tasks.music import Music

    if isinstance(task, Music):
        return "notes"
    if not isinstance(task, Data):
        return None
    asked = task.description
    if asked.symbols:
        return asked.symbols
    return "row" if asked.kind == "next" and asked.at == "every" else None


def cut_as_given(config: Config, task: Data) -> None:
    """Cut the training sequences of your own data into chunks, if --chunk asks for it."""
    chunk = config.task.chunk
    if chunk is None:
        return
    if task.shape is not None or task.readout != "every":
        raise ConfigError(
            "--chunk cuts training sequences that have a target at every step: leave it out, or "
            "cut with --window."
        )
    task.cut_training(chunk)

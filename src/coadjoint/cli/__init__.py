"""The command line, kept thin: a command reads settings, builds objects and calls the library.

This package may import every other. What needs torch is imported inside the commands, so that
`--help` answers at once.

program              the program itself; errors as one line each
schema               the sections of settings, whose fields are the flags and keys (the network's is
                     in training/network_section)
task_section         its section on built-in tasks
flags                settings from flags and files, and lines about invalid ones
outputs              files that a command reads and writes, and --force
interruption         Ctrl-C before the first step
key_types            the types of settings, in words
build, build_online  from settings to objects, by the `make` of each package
build_task           the task of settings: a built-in one, or the user's own data
chains               which settings mean a network without time, its defaults and its task
memory               notes on the memory of a gradient
past                 which settings of a resumed run may change
baselines            metrics by name, and the figures of a run beside those of baselines
splits               what is split off from the training file, also in older run folders
progress, run_table  progress lines and bars; what runs where
prepare              prepare
train                train
together             train and resume under torchrun
resume               resume, replay
predict              predict, report
evaluate             evaluate
explain              explain
sample               sample
export               export
lists                tasks, cells
online, compare, tune, diagnose, demo, forecast    the commands of these names
benchmark            bench
compared_runs        a comparison: laid out, run and collected
words                the settings of its rows as words
existing_runs        a comparison of runs that exist already
common_settings      what its runs have in common
pool                 where its runs are trained: here, many at a time, or elsewhere
cluster              on the workers of a Dask scheduler
cluster_worker       what such a worker does
leashed              a run that ends with what started it
outcomes, workers    what came of its runs; their processes
preloaded            imports that these processes share
study                a search for settings: its trials, each in a process of its own
study_trials         a trial: its run, and what is read from it
study_queue          which worker runs which trial
study_record         the files of its folder, and its record
study_storage        where that record lies: a file, or a server
study_show           its trials on the terminal
search_space         which settings vary, and between which values
bench/               speed compared with other libraries
"""

from __future__ import annotations

from typer.models import CommandInfo

from ..errors import MissingError
from . import benchmark
from .program import app, main

# Settings are pydantic models; commands without settings run without it.
try:
    from . import (
        compare,
        demo,
        diagnose,
        evaluate,
        explain,
        export,
        forecast,
        lists,
        online,
        predict,
        prepare,
        resume,
        sample,
        train,
        tune,
    )
except ModuleNotFoundError as error:
    if error.name != "pydantic":
        raise

    def _refuse() -> None:
        """Stands for every command that has settings, where pydantic is not installed."""
        raise MissingError(
            "this command needs pydantic, which is not installed: pip install pydantic."
        )

    _WITH_SETTINGS = (
        "train resume online replay compare tune predict evaluate explain forecast sample "
        "export report prepare diagnose tasks cells demo"
    )
    _ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}
    for _name in _WITH_SETTINGS.split():
        app.command(_name, context_settings=_ANY_ARGUMENTS)(_refuse)

# The order of the commands in `coadjoint --help`: what a new user needs comes first.
_ORDER = (
    "demo", "prepare", "train", "resume", "predict", "evaluate", "explain", "forecast", "sample",
    "export", "report", "compare", "tune", "online",
    "diagnose", "replay", "tasks", "cells", "bench",
)  # fmt: skip


def _rank(command: CommandInfo) -> int:
    """The place of a command in _ORDER; a command without a name has that of its function."""
    return _ORDER.index(command.name or str(getattr(command.callback, "__name__", "")))


app.registered_commands.sort(key=_rank)

__all__ = ["app", "main"]

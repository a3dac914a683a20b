"""The command line: a thin door. Each command reads settings, builds objects, and calls the library.

This package imports everything above it, and defers what needs torch, so that `--help` answers at once.

program             the program itself; errors in one line
schema              every flag and key is a field of a section here (the network's: training/network_section)
flags               these fields as flags, files and error lines; nothing to add for a new one
build, build_online from settings to objects, by the `make` of each noun
past                settings of a run that goes on
progress            lines and bars
train               train, resume, replay
predict             predict, report
lists               tasks, cells
online, compare, diagnose, demo, benchmark (bench)    the commands of these names
compared_runs, workers, preloaded    runs of a comparison: begun, run and collected, each in a process
bench/              speed against peers
"""

from __future__ import annotations

from ..errors import MissingError
from . import benchmark
from .program import app, main

try:
    from . import compare, demo, diagnose, lists, online, predict, train
except ModuleNotFoundError as error:
    if error.name != "pydantic":
        raise

    def _missing() -> None:
        raise MissingError(
            "this command needs pydantic, which is not installed: pip install pydantic."
        )

    # Settings are pydantic models: commands that need none still run.
    _WITH_SETTINGS = "train resume online replay compare predict report diagnose tasks cells demo"
    for _name in _WITH_SETTINGS.split():
        _any = {"ignore_unknown_options": True, "allow_extra_args": True}
        app.command(_name, context_settings=_any)(_missing)

__all__ = ["app", "main"]

"""Training: the loop, and what a run leaves behind.

This package imports `diagnostics` and what is above it. Its names are loaded when they are first used, so that the command
line can read settings without waiting for torch.

loop, trainer     train: step, look, save; trainer is the run in progress, and says what result.json holds
online, learning  learn: one update for each step of a stream; learning is the run in progress
plan              the settings of both, checked once
step              batches, gradients and clipping of one step
watch             held-out metrics along the way, the best weights, patience, success
validation        held-out metrics, examples, and what goes on inside
progress          what a run remembers, and the Result that `train` returns
stream_means      means over a stream
curriculum        the easiest sequences first
run_folder        one folder for both: one writer, rows, checkpoints, resuming, stopping, result.json written
storage, lock     checkpoints and their manifests; who writes
json_rows         rows of JSON, appended and read back
schemas           what each file of a run folder must hold
optional_pydantic what schemas are made of; stand-ins where it is not installed
restore           what a resumed run must agree on; weights put into a network
signals           which signals ask a run to stop; run_folder.interrupted saves it
predict           load_model, predict: networks of runs that exist, predictions for new sequences
network_section   the network's settings, flags and model-file keys
model_schema      what a model file says of itself
files             files that appear whole or not at all
settings/         YAML, TOML and JSON, strictly read
environment       where and with what a run was made
display           progress on a terminal
report/           a run folder as one page
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import curriculum
    from .loop import Interrupted, Result, train
    from .validation import evaluate

__all__ = ["Interrupted", "Result", "curriculum", "evaluate", "train"]

_HOME = {"Interrupted": "loop", "Result": "loop", "evaluate": "validation", "train": "loop"}


def __getattr__(name: str) -> Any:
    if name == "curriculum":
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value

"""Training: the loop over steps, and the run folders it writes.

>>> import coadjoint as co
>>> task = co.tasks.TemporalOrder(10)
>>> net = co.Network("gru", inputs=6, hidden=4, outputs=4, output="softmax")
>>> co.training.train(net, task, steps=2, tests=10, confirm=10).status
'finished'

This package imports `diagnostics` and the packages above it. Its names are loaded when they are
first used, so that the command line can read settings without waiting for torch.

loop, trainer      train: step, validate, save; trainer is the run in progress, and its result
online, learning   learn: one update for each step of a stream; learning is the run in progress
plan               the settings of both, checked once
own_defaults       defaults for your own data, where nobody gave a setting
linear_start       starts for forecasts: nothing changes, or the linear forecast
matching           whether a network fits its task
step               batches, gradients and clipping of one step
ahead              batches of generated tasks, drawn several at a time or while a GPU is at work
watch              validation along a run: the best weights, patience, success
validation         held-out metrics, examples, and probes of the gradient
looks              how held-out data is looked at: at once, or in segments
generation         sequences of symbols that a network writes by itself
held_out           what the best weights predict for held-out data, for the page
layer_names        the layers of a chain in words
advice             what may help where a network can hardly learn, or gained little
pictures           held-out images and reconstructions, for the page
progress           the memory of a run, and the Result that `train` returns
stream_means       means over a stream
curriculum         the easiest sequences first
run_folder         the folder of either run: one writer, rows, checkpoints, resuming, result.json
storage, lock      checkpoints and their manifests; one writer at a time
json_types         types of values in JSON files
json_rows          files of JSON lines, appended to and read back
schemas            what each file of a run folder must hold
held_out_schema    what the predictions of a run must be
study_schema       what the files of a search for settings must hold
picture_schema     what the pictures of a run must be
schema_checks      how these files are read and checked
tensor_header      the headers of files of tensors
optional_pydantic  pydantic, or stand-ins if it is not installed
restore            checks before a run is restored, and loading of weights
signals            stopping a run by signals
distributed        a run on many processes: rank 0 decides, the others follow
launched           whether torchrun has started this process
meeting            how the processes of a run find each other
predict            load_model, predict: models of finished runs, predictions for new sequences
prediction_files   predictions as CSV, Parquet, Arrow or JSON
network_section    the network's settings, flags and keys in model files
model_schema       the description in a model file
files              files that appear complete or not at all
settings/          YAML, TOML and JSON, strictly read
environment        versions, hardware and command of a run
display            progress on a terminal
pace               how fast a run is, and the time that is left
loggers            rows of a run for TensorBoard, MLflow and Weights & Biases
metric_names       metrics as people read them
report/            a run folder as one page
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import curriculum
    from .loop import Interrupted, Result, train
    from .validation import evaluate

__all__ = ["Interrupted", "Result", "curriculum", "evaluate", "train"]

_HOME = {"Interrupted": "loop", "Result": "loop", "evaluate": "validation", "train": "loop"}


def __getattr__(name: str) -> object:
    """Import a public name of this package when it is first used: torch takes long to load."""
    if name == "curriculum":  # a module, not a name in one
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value  # so that Python finds it without this function from now on
    return value

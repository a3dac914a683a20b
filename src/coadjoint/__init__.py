"""coadjoint: recurrent networks, their costates, and penalised backpropagation.

The names in the order data flows: tasks, cells, networks, losses and penalties, gradient methods, optimisers, training.
Names are loaded when they are first used, so that `import coadjoint` and the command line's help need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.6.1"

if TYPE_CHECKING:
    from . import (
        cells,
        curriculum,
        curvature,
        diagnostics,
        directions,
        initialisers,
        losses,
        nn,
        online,
        optimisers,
        parametrisations,
        penalties,
        report,
        ridge,
        segments,
        steps,
        tasks,
    )
    from .batch import Batch
    from .cells import Cell, cell
    from .costates import Costates, norm
    from .errors import (
        CoadjointError,
        ConfigError,
        DataError,
        InputError,
        KindError,
        MissingError,
        NumericalError,
        StorageError,
        Unsupported,
    )
    from .formula import (
        abs,
        atan,
        cos,
        erf,
        exp,
        expm1,
        held,
        log,
        log1p,
        relu,
        sigmoid,
        sign,
        sin,
        softplus,
        sqrt,
        step,
        tanh,
    )
    from .gradients import BPTT, RTRL, Evaluation, Penalised, Stream, Truncated
    from .network import Network, Trajectory
    from .penalties import Penalty
    from .recording import Recorded, Tape, record
    from .reservoir import Reservoir
    from .seq2seq import EncoderDecoder
    from .stack import Stack
    from .training import Interrupted, Result, evaluate, train

_MODULES = (
    "cells",
    "directions",
    "curriculum",
    "curvature",
    "diagnostics",
    "initialisers",
    "losses",
    "nn",
    "online",
    "optimisers",
    "parametrisations",
    "penalties",
    "report",
    "ridge",
    "segments",
    "steps",
    "tasks",
)
_HOMES = {
    "batch": ("Batch",),
    "cells": ("Cell", "cell"),
    "errors": (
        "CoadjointError", "ConfigError", "DataError", "InputError", "KindError", "MissingError", "NumericalError",
        "StorageError", "Unsupported",
    ),
    "formula": (
        "abs", "atan", "cos", "erf", "exp", "expm1", "held", "log", "log1p", "relu", "sigmoid", "sign", "sin", "softplus",
        "sqrt", "step", "tanh",
    ),
    "gradients": ("BPTT", "RTRL", "Evaluation", "Penalised", "Stream", "Truncated"),
    "costates": ("Costates", "norm"),
    "network": ("Network", "Trajectory"),
    "penalties": ("Penalty",),
    "recording": ("Recorded", "Tape", "record"),
    "reservoir": ("Reservoir",),
    "seq2seq": ("EncoderDecoder",),
    "stack": ("Stack",),
    "training": ("Interrupted", "Result", "evaluate", "train"),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BPTT", "RTRL", "Batch", "Cell", "CoadjointError", "ConfigError", "Costates", "DataError", "EncoderDecoder", "Evaluation", "InputError",
    "Interrupted", "KindError", "MissingError", "Network", "NumericalError", "Penalised", "Penalty", "Recorded", "Reservoir", "Result", "Stack", "StorageError",
    "Stream", "Tape", "Trajectory", "Truncated", "Unsupported", "abs", "atan", "cell", "cells", "cos", "curriculum", "curvature", "diagnostics", "directions", "erf", "evaluate", "exp", "expm1", "held",
    "initialisers", "log", "log1p", "losses", "nn", "norm", "online", "optimisers", "parametrisations", "penalties", "record", "relu", "report", "ridge", "segments", "sigmoid",
    "sign", "sin", "softplus", "sqrt", "step", "steps", "tanh", "tasks", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'coadjoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""coadjoint: recurrent and deep networks, their costates, and penalised backpropagation.

The packages in the order of the theory; each imports only from those before it:

    errors       error classes, and the checks that raise them
    cells        x_t = f(z_t, v_t, x_{t-1}, p)
    sweeps       forward, adjoint, tangent: the three loops over time, and their engines
    objectives   mean over samples of L + rho G(costates)
    networks     a recurrence and a readout -> a run -> its costates
    nn           torch.nn's RNN, LSTM and GRU, twice differentiable
    gradients    (net, batch, loss) -> Evaluation
    optimisers   a direction proposes, a rule judges, a stepper moves
    tasks        Task -> Batch; users' own data
    diagnostics  questions about an Evaluation, answered by arrays and charts
    classics     the perceptron and the Hopfield network, as first described
    training     the training loop, and the run folder it leaves behind
    models       a trained network and its data: predictions and figures
    estimators   networks with the interface of scikit-learn, which they need
    cli          the command line

A cell is a formula, written with torch's functions:

    >>> import torch
    >>> import coadjoint as co
    >>> @co.cell()
    ... def mine(z, v, x, p):
    ...     return torch.tanh(z + v)
    >>> net = co.Network(mine, inputs=2, hidden=8, outputs=3)
    >>> run = net(torch.zeros(5, 4, 2))  # 5 time steps, 4 samples, 2 inputs
    >>> run.costates("squared", torch.ones(4, 3)).norms().shape
    torch.Size([6, 4])

co.tanh, co.sigmoid, ... do the same as torch.tanh, torch.sigmoid, ... and also take numbers;
co.step and co.held have no counterpart in torch.

Names are loaded when they are first used, so that `import coadjoint` and the help of the command
line do not wait for torch.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

__version__ = "0.13.0"

if TYPE_CHECKING:
    from . import (
        cells,
        classics,
        diagnostics,
        gradients,
        models,
        networks,
        nn,
        objectives,
        optimisers,
        sweeps,
        tasks,
        training,
    )
    from . import estimators as estimators
    from .cells.cell import Cell, cell
    from .cells.primitives import (
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
    from .gradients.bptt import BP, BPTT
    from .gradients.evaluation import Evaluation
    from .gradients.penalised import Penalised
    from .gradients.rtrl import RTRL, Stream
    from .gradients.shared import Shared
    from .gradients.truncated import Truncated
    from .models.model import Model, load
    from .networks import initialisers, maps
    from .networks.chain import Chain
    from .networks.chain_run import ChainRun
    from .networks.decoder_run import DecoderRun
    from .networks.layers import Recorded
    from .networks.network import Network
    from .networks.reservoir import Reservoir
    from .networks.seq2seq import EncoderDecoder
    from .networks.stack import Stack, StackRun
    from .networks.trajectory import Trajectory
    from .nn.recording import Tape, record
    from .objectives import losses, penalties
    from .objectives.batch import Batch
    from .objectives.penalties import Penalty
    from .optimisers import curvature
    from .sweeps.costates import Costates, norm
    from .training import online, report
    from .training.loop import Interrupted, Result, train
    from .training.validation import evaluate

# Public names, by the module that defines them.
_NAMES = {
    "cells.cell": "Cell cell",
    "cells.primitives": (
        "abs atan cos erf exp expm1 held log log1p relu sigmoid sign sin softplus sqrt step tanh"
    ),
    "errors": (
        "CoadjointError ConfigError DataError InputError KindError MissingError "
        "NumericalError StorageError Unsupported"
    ),
    "gradients.bptt": "BP BPTT",
    "gradients.evaluation": "Evaluation",
    "gradients.penalised": "Penalised",
    "gradients.rtrl": "RTRL Stream",
    "gradients.shared": "Shared",
    "gradients.truncated": "Truncated",
    "models.model": "Model load",
    "networks.chain": "Chain",
    "networks.chain_run": "ChainRun",
    "networks.decoder_run": "DecoderRun",
    "networks.layers": "Recorded",
    "networks.network": "Network",
    "networks.reservoir": "Reservoir",
    "networks.seq2seq": "EncoderDecoder",
    "networks.stack": "Stack StackRun",
    "networks.trajectory": "Trajectory",
    "nn.recording": "Tape record",
    "objectives.batch": "Batch",
    "objectives.penalties": "Penalty",
    "sweeps.costates": "Costates norm",
    "training.loop": "Interrupted Result train",
    "training.validation": "evaluate",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

# Public modules, by name.
_MODULES = {
    "cells": "cells",
    "classics": "classics",
    "curvature": "optimisers.curvature",
    "diagnostics": "diagnostics",
    "estimators": "estimators",  # not in __all__: it needs scikit-learn
    "gradients": "gradients",
    "initialisers": "networks.initialisers",
    "losses": "objectives.losses",
    "maps": "networks.maps",
    "models": "models",
    "networks": "networks",
    "nn": "nn",
    "objectives": "objectives",
    "online": "training.online",
    "optimisers": "optimisers",
    "penalties": "objectives.penalties",
    "report": "training.report",
    "sweeps": "sweeps",
    "tasks": "tasks",
    "training": "training",
}

# Modules of 0.6 and where their contents are now. `import coadjoint.losses` works until 1.0, with a
# DeprecationWarning.
_MOVED = {
    "batch": "objectives.batch",
    "bench": "cli.bench.problems cli.bench.measure cli.bench.clock cli.bench.tables",
    "charts": "diagnostics.charts",
    "compare": "cli.compared_runs cli.workers",
    "config": (
        "cli.schema cli.flags cli.build cli.build_online training.network_section "
        "training.predict networks.about"
    ),
    "costates": "sweeps.costates",
    "curriculum": "training.curriculum",
    "curvature": "optimisers.curvature optimisers.conjugate_gradients",
    "decoding": "networks.decoding",
    "directions": "optimisers.directions optimisers.step_rules",
    "display": "training.display",
    "files": "training.files",
    "formula": "cells.formula cells.program",
    "graphs": "sweeps.engines.cuda.capture sweeps.engines.cuda.captured_function "
    "gradients.captured nn.captured",
    "hessian_free": "optimisers.hessian_free",
    "influence": "gradients.influence",
    "initialisers": "networks.initialisers",
    "layout": "sweeps.layout cells.parameters",
    "losses": "objectives.losses",
    "network": "networks.network networks.trajectory",
    "online": "training.learning training.online training.stream_means",
    "parametrisations": "cells.structures",
    "penalties": "objectives.penalties objectives.schedules objectives.weights",
    "readout": "networks.readout networks.judge",
    "recording": "networks.layers nn.recording",
    "recurrence": "networks.recurrence networks.effective_weights",
    "report": (
        "training.report.text training.report.curves training.report.read "
        "training.report.comparison training.report.figures training.report.pages "
        "training.report.summary"
    ),
    "reservoir": "networks.reservoir",
    "ridge": "networks.ridge",
    "runs": (
        "training.storage training.json_rows training.run_folder gradients.restoring "
        "training.environment"
    ),
    "schemas": "training.schemas training.model_schema",
    "segments": "gradients.segments gradients.segment_parts gradients.memory",
    "seq2seq": "networks.seq2seq",
    "settings": "training.settings",
    "stack": "networks.stack",
    "steps": "cells.steps",
    "streams": "tasks.files.stream tasks.files.rows",
    "sweeps.autograd": "sweeps.run",
    "sweeps.compiler": "sweeps.engines.c.compiler",
    "sweeps.cpu": "sweeps.engines.c.engine",
    "sweeps.cuda": (
        "sweeps.engines.cuda.geometry sweeps.engines.cuda.source "
        "sweeps.engines.cuda.engine sweeps.engines.cuda.driver"
    ),
    "sweeps.derivatives": (
        "sweeps.plan sweeps.slopes sweeps.affine sweeps.differentiable sweeps.overflow"
    ),
    "sweeps.eager": (
        "sweeps.engines.eager.views sweeps.engines.eager.in_place sweeps.engines.expressions"
    ),
    "sweeps.opaque": "sweeps.engines.opaque",
    "sweeps.reference": "sweeps.engines.reference",
    "sweeps.scan": "sweeps.engines.scan",
    "sweeps.stepwise": "sweeps.engines.eager.fused",
    "tasks.readers": "tasks.files",
    "tasks.readers.arrays": "tasks.files.arrays",
    "tasks.readers.parquet": "tasks.files.parquet",
    "tasks.readers.parsing": "tasks.files.parsing",
    "tasks.readers.recording": "tasks.files.sheet",
    "tasks.readers.source": "tasks.files.source",
    "tasks.readers.table": "tasks.files.table tasks.files.text",
    "tasks.readers.ts": "tasks.files.ts",
    "transport": "cells.transport",
    "wrappers": "sweeps.wrappers",
}

__all__ = [
    "BP",
    "BPTT",
    "RTRL",
    "Batch",
    "Cell",
    "Chain",
    "ChainRun",
    "CoadjointError",
    "ConfigError",
    "Costates",
    "DataError",
    "DecoderRun",
    "EncoderDecoder",
    "Evaluation",
    "InputError",
    "Interrupted",
    "KindError",
    "MissingError",
    "Model",
    "Network",
    "NumericalError",
    "Penalised",
    "Penalty",
    "Recorded",
    "Reservoir",
    "Result",
    "Shared",
    "Stack",
    "StackRun",
    "StorageError",
    "Stream",
    "Tape",
    "Trajectory",
    "Truncated",
    "Unsupported",
    "abs",
    "atan",
    "cell",
    "cells",
    "classics",
    "cos",
    "curvature",
    "diagnostics",
    "erf",
    "evaluate",
    "exp",
    "expm1",
    "gradients",
    "held",
    "initialisers",
    "load",
    "log",
    "log1p",
    "losses",
    "maps",
    "models",
    "networks",
    "nn",
    "norm",
    "objectives",
    "online",
    "optimisers",
    "penalties",
    "record",
    "relu",
    "report",
    "sigmoid",
    "sign",
    "sin",
    "softplus",
    "sqrt",
    "step",
    "sweeps",
    "tanh",
    "tasks",
    "train",
    "training",
]


def __getattr__(name: str) -> Any:
    """Load a public module, a module of 0.6 or a public name when it is first used."""
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    if name in _MOVED:
        return importlib.import_module(f".{name}", __name__)  # by _OldPaths, which warns
    if name not in _HOME:
        raise AttributeError(f"module 'coadjoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    """The names that dir() and completion show: those loaded so far, and all public ones."""
    return sorted({*globals(), *__all__})


class _OldPath(types.ModuleType):
    """A module that has moved: its names are looked up where they are now."""

    def __getattr__(self, name: str) -> Any:
        """The attribute `name` of the modules that this one was split into."""
        if name.startswith("__"):  # the import machinery asks for __path__ and the like
            raise AttributeError(name)
        old = self.__name__.removeprefix("coadjoint.")
        homes = _MOVED[old].split()
        # Importing coadjoint.losses makes this object co.losses, so it must have all that
        # coadjoint.objectives.losses has.
        if old in _MODULES:
            homes = [_MODULES[old], *homes]
        for home in homes:
            module = importlib.import_module(f".{home}", __package__)
            if hasattr(module, name):
                return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _OldPaths(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules under the paths they had in 0.6."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """How to import `fullname` if it is an old path, with a warning; None if it is not.

        `path` and `target` belong to Python's protocol of finders and are not used.
        """
        package, _, name = fullname.partition(".")
        if package != __name__ or name not in _MOVED:
            return None
        now = " and ".join(f"coadjoint.{home}" for home in _MOVED[name].split())
        warnings.warn(
            f"{fullname} has moved to {now}; the old path will be removed in 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An object that stands in for the old module."""
        return _OldPath(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: names are looked up when they are used."""


sys.meta_path.append(_OldPaths())

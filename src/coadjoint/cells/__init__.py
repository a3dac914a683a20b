"""Cells: one step of a recurrence, x_t = f(z_t, v_t, x_{t-1}, p) with z_t = W r(x_{t-1}) and v_t = R u_t + b.

A cell is a formula over scalars; its slopes and bends (second derivatives) are derived from it, and every engine takes
its code from it. This package imports `errors` alone.

formula      expressions: nodes, primitives, and how they are differentiated (pull, push)
program      expressions as torch operations without allocation, and as source text
cell         Cell and @cell: a formula with its slots, gates and parameters
activations  tanh, sigmoid, relu, ... by name
library      the cells that come with the package, and CELLS, their names
steps        recurrences that are no formula: any step function, differentiated by torch
about        what there is to know of a cell by its name
parameters   types of parameters, and what is refused
transport    cells and networks on their way to another process
structures   structured recurrent weights: orthogonal, antisymmetric, low rank, ...
"""

from __future__ import annotations

from ..errors import renamed_attributes
from . import steps, structures
from .about import CellDescription, about
from .activations import ACTIVATIONS, Activation, activation_function, identity
from .cell import Cell, Fields, Uniform, Weights, cell
from .library import (
    CELLS,
    FADES_AT_ONCE,
    FIXED_ACTIVATION,
    NEVER_FADES,
    antisymmetric,
    at_most,
    cached_by_options,
    cornn,
    elman,
    exponential,
    gaussian,
    gru,
    input_gain,
    inverse,
    leaky,
    lipschitz,
    lru,
    lstm,
    lstm_1997,
    mingru,
    minlstm,
    named,
    noisy,
    options,
    peephole,
    rate,
    ring,
    scrn,
    unicornn,
)

__all__ = [
    "ACTIVATIONS",
    "CELLS",
    "FADES_AT_ONCE",
    "FIXED_ACTIVATION",
    "NEVER_FADES",
    "Activation",
    "Cell",
    "CellDescription",
    "Fields",
    "Uniform",
    "Weights",
    "about",
    "activation_function",
    "antisymmetric",
    "at_most",
    "cached_by_options",
    "cell",
    "cornn",
    "elman",
    "exponential",
    "gaussian",
    "gru",
    "identity",
    "input_gain",
    "inverse",
    "leaky",
    "lipschitz",
    "lru",
    "lstm",
    "lstm_1997",
    "mingru",
    "minlstm",
    "named",
    "noisy",
    "options",
    "peephole",
    "rate",
    "ring",
    "scrn",
    "steps",
    "structures",
    "unicornn",
]

__getattr__ = renamed_attributes(
    __name__,
    {
        "About": "CellDescription",
        "FIXED": "FIXED_ACTIVATION",
        "enters": "input_gain",
        "once": "cached_by_options",
    },
)

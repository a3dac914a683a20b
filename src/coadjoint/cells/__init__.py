"""Cells: one step of a recurrence, x_t = f(z_t, v_t, x_{t-1}, p).

Here z_t = W r(x_{t-1}) and v_t = R u_t + b.

A cell is a formula over scalars, written with torch.tanh, torch.sigmoid, ... (or co.tanh, ...) and
+ - * / **. Its first and second derivatives follow from the formula, and every engine takes its
code from it. This package imports `errors` alone.

nodes         the expressions that a formula records
primitives    tanh, sigmoid, ..., held: the functions that a formula may use
formula       how expressions are differentiated (pull, push) and evaluated
program       expressions as torch operations without allocation, and as source text
cell          Cell and @cell: a formula with its slots, gates and parameters
activations   tanh, sigmoid, relu, ... by name
classic       elman, leaky, rate, lstm, gru, peephole, scrn
conservative  cells built so that gradients neither vanish nor explode
linear        cells that are linear in the state
noise         cells under dropout and zoneout
library       the cells by name: CELLS, options, named
steps         recurrences that are not formulas: step modules, differentiated by torch
step_type     Step: what these have in common
unicornn_layers  UnICORNN of several layers as one step
about         the facts about a cell by its name
parameters    how parameters are allocated, and their initial values
transport     how cells and networks reach another process
structures    structured recurrent weights: orthogonal, antisymmetric, low rank, ...

Example:
    >>> import coadjoint as co
    >>> co.cells.named("gru").equations.split(";")[0]
    "h' = (1 - u) n + u h, n = tanh(v_n + r (z_n + b_n))"
"""

from __future__ import annotations

from ..errors import renamed_attributes
from . import steps, structures
from .about import CellDescription, about
from .activations import ACTIVATIONS, Activation, activation_function, identity
from .cell import Cell, Fields, Uniform, Weights, cell
from .classic import elman, gaussian, gru, leaky, lstm, lstm_1997, peephole, rate, scrn
from .conservative import antisymmetric, cornn, exponential, inverse, lipschitz, unicornn
from .library import CELLS, FIXED_ACTIVATION, named, options
from .linear import (
    FADES_AT_ONCE,
    NEVER_FADES,
    at_most,
    input_gain,
    lru,
    mingru,
    minlstm,
    ring,
)
from .noise import noisy
from .transport import cached_by_options

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

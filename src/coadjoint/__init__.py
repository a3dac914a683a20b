"""coadjoint: recurrent networks, their costates, and penalised backpropagation.

The names in the order data flows: cells, networks, losses and penalties, gradient methods.
"""

from . import cells, initialisers, losses, parametrisations, penalties
from .batch import Batch
from .cells import Cell, cell
from .errors import CoadjointError, InputError, KindError, NumericalError, Unsupported
from .formula import abs, atan, cos, erf, exp, log, relu, sigmoid, sign, sin, softplus, sqrt, step, tanh
from .gradients import BPTT, RTRL, Evaluation, Penalised, Stream, Truncated
from .network import Costates, Network, Trajectory, norm
from .penalties import Penalty

__version__ = "0.1.0"

__all__ = [
    "BPTT", "RTRL", "Batch", "Cell", "CoadjointError", "Costates", "Evaluation", "InputError", "KindError", "Network",
    "NumericalError", "Penalised", "Penalty", "Stream", "Trajectory", "Truncated", "Unsupported",
    "abs", "atan", "cell", "cells", "cos", "erf", "exp", "initialisers", "log", "losses", "norm", "parametrisations",
    "penalties", "relu", "sigmoid", "sign", "sin", "softplus", "sqrt", "step", "tanh",
]  # fmt: skip

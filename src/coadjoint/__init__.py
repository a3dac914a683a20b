"""coadjoint: recurrent networks, their costates, and penalised backpropagation."""

from .cells import cell
from .formula import abs, atan, cos, erf, exp, log, relu, sigmoid, sign, sin, softplus, sqrt, step, tanh
from .network import Costates, Network, Trajectory

__version__ = "0.1.0"

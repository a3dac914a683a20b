"""Networks: a recurrence and a readout make a run; a run gives its costates.

    x_t = f(W r(x_{t-1}), R u_t + b, x_{t-1}, p),   a = V h + b_o,   y_hat = phi(a),   lam_t = dL/dx_t

This package imports `objectives` and what is above it. It knows nothing of gradient methods.

interface      Net and NetRun: what gradient methods, diagnostics and training take
recurrence     W, R, b, x_0 and the cell's parameters
readout        V, b_o: from states to outputs; last, every, tilted, attention
judge          from outputs to the loss of each sample
network        Network: one recurrence and its readout; Trajectory, its run
layers         costates through several layers
stack          Stack: layers of any cells, both directions
seq2seq, decoding   EncoderDecoder: sequence to sequence, with an attention of its own
reservoir, ridge    echo state networks; readouts in closed form
initialisers   starts by name
factory        make: networks by plain options
about          what a cell is in a network
"""

from __future__ import annotations

import warnings

from . import initialisers, ridge
from .about import CellFacts, about
from .factory import make
from .interface import Net, NetRun
from .layers import Recorded
from .network import Network, Trajectory
from .reservoir import Reservoir
from .seq2seq import EncoderDecoder
from .stack import Stack

__all__ = [
    "CellFacts",
    "EncoderDecoder",
    "Net",
    "NetRun",
    "Network",
    "Recorded",
    "Reservoir",
    "Stack",
    "Trajectory",
    "about",
    "initialisers",
    "make",
    "ridge",
]


def __getattr__(name: str) -> object:
    """`About`, the old name of CellFacts, until 1.0."""
    if name != "About":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(
        "networks.About is now called networks.CellFacts; the old name goes in 1.0.",
        DeprecationWarning,
        stacklevel=2,
    )
    return CellFacts

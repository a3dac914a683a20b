"""torch.nn's RNN, LSTM and GRU, twice differentiable.

The modules have torch's arguments, outputs and state_dict; their layers are sweeps, so that they can be differentiated any number
of times, and recorded for their costates. This package imports `networks` and what is above it.

modules     RNN, LSTM, GRU, and `replace`, which puts them into a model
layers      what the three have in common
cells       RNNCell, LSTMCell, GRUCell
frame       one layer in one direction, as a sweep
layer_norm  the step with layer normalisation
recording   record: the costates of every module inside a model
replay      modules as CUDA graphs
"""

from __future__ import annotations

from .cells import GRUCell, LSTMCell, RNNCell
from .layers import Layers
from .modules import GRU, LSTM, RNN, replace
from .recording import Tape, record

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "GRUCell",
    "LSTMCell",
    "Layers",
    "RNNCell",
    "Tape",
    "record",
    "replace",
]

"""torch.nn's RNN, LSTM and GRU, twice differentiable.

The modules have torch's arguments, outputs and state_dict; their layers are sweeps, so that they
can be differentiated any number of times, and recorded for their costates:

>>> import torch
>>> import coadjoint as co
>>> model = torch.nn.Sequential(torch.nn.GRU(3, 4))
>>> co.nn.replace(model)
Sequential(
  (0): GRU(3, 4)
)

This package imports `networks` and the packages that `networks` imports.

modules     RNN, LSTM, GRU, and `replace`, which puts them into a model
rnn_module  what the three have in common: arguments, weights, calls
layers      their layers and directions, each one sweep
cells       RNNCell, LSTMCell, GRUCell
one_step    calls of one step on a CPU, by torch's own functions
frame       one layer in one direction: its formula, weights and rows
layer_norm  the step with layer normalisation
recording   record: the costates of every module inside a model
captured    modules as CUDA graphs

recorded_outputs  record(at=): the outputs of any submodules of any model
output_costates   their costates, from piece to piece of the model
marks             nodes in torch's graph between the pieces
submodules        patterns over the names of submodules
"""

from __future__ import annotations

from ..errors import renamed_attributes
from .cells import GRUCell, LSTMCell, RNNCell
from .modules import GRU, LSTM, RNN, replace
from .output_costates import OutputCostates
from .recorded_outputs import OutputTape
from .recording import Tape, record
from .rnn_module import RNNModule

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "GRUCell",
    "LSTMCell",
    "OutputCostates",
    "OutputTape",
    "RNNCell",
    "RNNModule",
    "Tape",
    "record",
    "replace",
]

__getattr__ = renamed_attributes(__name__, {"Layers": "RNNModule"})

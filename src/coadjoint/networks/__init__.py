"""Networks: a recurrence and a readout make a run; a run has costates.

    x_t = f(W r(x_{t-1}), R u_t + b, x_{t-1}, p),  a = V h + b_o,  y_hat = phi(a),  lam_t = dL/dx_t

This package imports `objectives` and the packages before it. It knows nothing of gradient methods.

interface          Net and NetRun: what gradient methods, diagnostics and training take
recurrence         one recurrent layer: W, R, b, x_0 and the cell's parameters
effective_weights  the weights as a cell's formula takes them
readout            from states to pre-outputs: V, b_o; the chain from u to a with its formulas
judge              from pre-outputs to the loss of each sample
network            Network: one recurrence and a readout
trajectory         Trajectory: its run
captured_runs      runs, costates and penalties of users' own loops as CUDA graphs
chain              Chain: maps that follow one another, over depth
chain_run          ChainRun: its run, and its costates
chain_calls        calling the maps: what is refused or repaired
chain_loss         the loss of its samples, with the slope by a where that has a formula
stretches          consecutive maps, run and differentiated together
dense_stretch      dense layers of one width as one sweep over depth
chain_parts        the products of dense layers, for gradients without torch's graph
written_layers     what one walk over the maps of a chain finds, for these gradients
layerwise          the gradient of a chain by layer
layers             costates through several layers: Recorded
scaled_sources     gradients between layers, in units of powers of two
layer_stack        Layers: recurrences on top of each other
shortcuts          how a layer's output contains that of the layer below: residual, dense
stack              Stack: such layers and a readout
seq2seq            EncoderDecoder: sequence to sequence, with attention
decoder_run        DecoderRun: its run
decoding           greedy decoding and beam search
sampling           tokens drawn at random: temperature, top_k, top_p
reservoir          Reservoir: echo state networks
reservoir_weights  their fixed weights
expansions         their expansions and kernels
ridge              readouts in closed form
maps               maps of chains, with the products of their derivatives
initialisers       weights drawn by name
start_scales       scales of R, W and V apart, forget bias, the start of Keras
persistence        a start for forecasts
factory            make: networks by plain options
cell_choice        the cells and units that these options name
chain_factory      chains by plain options
chain_text         the layers of a chain as text: "64x30"
about              the facts about a cell in a network
text               what repr and print show of a network

Example:
    >>> from coadjoint import networks
    >>> networks.make("gru", inputs=2, outputs=1, hidden=8).extra_repr()
    "gru, inputs=2, hidden=8, outputs=1, readout='last', output='identity', ..."
"""

from __future__ import annotations

from ..errors import renamed_attributes
from . import initialisers, ridge
from .about import CellFacts, about
from .chain import Chain
from .chain_run import ChainCostates, ChainRun
from .decoder_run import DecoderRun
from .factory import make
from .interface import Net, NetRun
from .layers import Recorded
from .network import Network
from .reservoir import Reservoir
from .seq2seq import EncoderDecoder
from .stack import Stack, StackRun
from .trajectory import Trajectory

__all__ = [
    "CellFacts",
    "Chain",
    "ChainCostates",
    "ChainRun",
    "DecoderRun",
    "EncoderDecoder",
    "Net",
    "NetRun",
    "Network",
    "Recorded",
    "Reservoir",
    "Stack",
    "StackRun",
    "Trajectory",
    "about",
    "initialisers",
    "make",
    "ridge",
]

__getattr__ = renamed_attributes(__name__, {"About": "CellFacts"})

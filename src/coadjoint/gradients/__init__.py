"""Gradient methods: (net, batch, loss) -> Evaluation, with the gradient by parameter name.

    BPTT         dL/dtheta by a forward and an adjoint sweep
    Truncated    the same through windows of k2 steps, one for every k1 steps
    RTRL         forward in time, with the influence dx_t/dtheta carried along
    Penalised    d(L + rho G)/dtheta by a forward, adjoint, tangent and second adjoint sweep
    Shared       one of these by many processes, each with a share of the batch

Example: two methods, one gradient.

    >>> import torch, coadjoint as co
    >>> net = co.Network("gru", inputs=1, hidden=2, outputs=1)
    >>> batch = co.Batch(torch.ones(5, 3, 1), torch.zeros(3, 1))
    >>> bptt = co.BPTT()(net, batch, "squared").gradient
    >>> rtrl = co.RTRL()(net, batch, "squared").gradient
    >>> all(torch.allclose(bptt[name], rtrl[name], atol=1e-6) for name in bptt)
    True

This package imports `networks` and the packages before it. A method takes any network that makes
runs (networks.interface.Net).

method           what all methods have in common
evaluation       Evaluation: losses, penalties, gradient, run and costates
temporal         the gradient split into the contributions of time steps
bptt, penalised, truncated, rtrl    the methods
shared           one gradient by many processes
trial            whether samples can be shared: parts of one's own are tried on a few of them
processes        who they are, and what they tell each other
penalty_weight   errors about the weight of a penalty
by_hand          the gradient of dense chains, by sweeps over depth without torch's graph
layer_by_hand    the gradient of one recurrent layer, by sweeps over time without it
factory          make: methods by name and plain options
influence        dx_t/dtheta, for RTRL
streams          checks of one arriving time step
segments         the gradient segment by segment, in O(sqrt T) memory
segment_sweeps   the sweeps of one segment
segment_parts    what one segment needs and leaves behind
segment_norms    what a penalty sees of costates in segments
segment_looks    outputs, and norms of costates and components, in segments
segment_sums     the sums over time that make up the gradient
memory           the peak memory of a gradient, predicted
captured         gradients as CUDA graphs
restoring        whether saved tensors fit the object they are restored to
"""

from __future__ import annotations

from ..errors import renamed_attributes
from . import memory
from .bptt import BPTT
from .evaluation import Evaluation, Gradient
from .factory import make
from .method import Method, differentiate, trained_parameters
from .penalised import Penalised
from .rtrl import RTRL, Stream
from .shared import Shared
from .temporal import Temporal
from .truncated import Truncated, Windows

__all__ = [
    "BPTT",
    "RTRL",
    "Evaluation",
    "Gradient",
    "Method",
    "Penalised",
    "Shared",
    "Stream",
    "Temporal",
    "Truncated",
    "Windows",
    "differentiate",
    "make",
    "memory",
    "trained_parameters",
]

__getattr__ = renamed_attributes(__name__, {"trained": "trained_parameters"})

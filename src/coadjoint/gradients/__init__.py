"""Gradient methods: (net, batch, loss) -> Evaluation, with the gradient by parameter name.

    BPTT         dL/dtheta by forward and adjoint
    Truncated    the same, every k1 steps for k2 steps back
    RTRL         forward in time, with the influence dx_t/dtheta carried along
    Penalised    d(L + rho G)/dtheta by forward, adjoint, tangent, adjoint

This package imports `networks` and what is above it; a method takes any network that makes runs.

method       what methods have in common
evaluation   Evaluation: losses, penalties, gradient, run and costates
temporal     the gradient taken apart by time steps
bptt, penalised, truncated, rtrl    the methods
factory      make: methods by plain options
influence, streams   what RTRL and streams carry
segments     the gradient segment by segment, in O(sqrt T) memory
segment_parts    what one segment needs and leaves behind
memory       the peak of a gradient, predicted
captured     gradients as CUDA graphs
restoring    whether what was saved fits the method it is restored to
"""

from __future__ import annotations

import warnings

from . import memory
from .bptt import BPTT
from .evaluation import Evaluation, Gradient
from .factory import make
from .method import Method, differentiate, trained_parameters
from .penalised import Penalised
from .rtrl import RTRL, Stream
from .temporal import Temporal
from .truncated import Truncated, Windows

__all__ = [
    "BPTT",
    "RTRL",
    "Evaluation",
    "Gradient",
    "Method",
    "Penalised",
    "Stream",
    "Temporal",
    "Truncated",
    "Windows",
    "differentiate",
    "make",
    "memory",
    "trained_parameters",
]


def __getattr__(name: str) -> object:
    if name == "trained":
        warnings.warn(
            "gradients.trained is called gradients.trained_parameters now.",
            DeprecationWarning,
            stacklevel=2,
        )
        return trained_parameters
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

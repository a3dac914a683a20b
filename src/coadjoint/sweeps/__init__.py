"""Sweeps: the three loops over the time steps of a recurrence, closed under differentiation.

    forward  ->  x_t   = f(z_t, v_t, x_{t-1}, p)
    adjoint  <-  lam_t = s_t + J_{t+1}' lam_{t+1}         s any source
    tangent  ->  mu_t  = g_t + J_t mu_{t-1}               g any source

    d(forward) = adjoint;  d(adjoint) = tangent + bend;  d(tangent) = adjoint + bend

This package imports `cells` and `errors`. It computes no losses. Networks choose an engine by
themselves:

>>> from coadjoint import sweeps
>>> sorted(sweeps.ENGINES)
['autograd', 'cpu', 'cuda', 'eager', 'reference', 'scan']

layout             users' sequences as flat rows, and which are refused
rows               where time steps lie in flat arrays; exact powers of two
plan               which cell, over which rows, by which engine; what an engine is
weights            W, one matrix for all steps or one for each
slopes, pointwise, affine   the computations that are parallel over time
differentiable, adjoint_tangent   the loops as operations that differentiate any number of times
dense              tangents and weight gradients of dense layers
functions          what the autograd Functions share
run, step_run      a sweep that has been made, and can be pulled back and pushed forward
step_costates      costates of a step function, one time step after the other
step_functions/    the derivatives of a step function at many time steps at once
costates, norms    lam_t, a mantissa and a power of two for each sample and step; their norms
checks, overflow   checks of values, now or later; the errors when they fail
chunks, memory     sums in a fixed order; arrays that are used again
pointers           how arrays reach compiled code: dense, of the expected size and type
wrappers           DistributedDataParallel and FSDP around a network
torch_internals    every private name of torch that the package uses
engines/           the loops themselves, one file or folder for each engine
"""

from __future__ import annotations

from ..errors import renamed_attributes
from .engines import ENGINES, PREFERRED, Choice, cell_refusal, device_refusal, load, resolve
from .plan import Engine, Saved, SweepPlan
from .rows import Link, Rows, scale
from .run import CostateRows, FormulaRun
from .step_run import StepFunctionRun

__all__ = [
    "ENGINES",
    "PREFERRED",
    "Choice",
    "CostateRows",
    "Engine",
    "FormulaRun",
    "Link",
    "Rows",
    "Saved",
    "StepFunctionRun",
    "SweepPlan",
    "cell_refusal",
    "device_refusal",
    "load",
    "resolve",
    "scale",
]

__getattr__ = renamed_attributes(
    __name__,
    {
        "Costate": "CostateRows",
        "Plan": "SweepPlan",
        "Stepped": "StepFunctionRun",
        "Swept": "FormulaRun",
        "Tape": "Saved",
    },
)

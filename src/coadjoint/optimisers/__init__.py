"""Optimisers: a direction proposes, a step rule judges, a stepper moves the weights.

This package imports `gradients` and what is above it.

recipes              OPTIMISERS, the list by name (adam, sgd, ..., lbfgs, hessian-free, ridge)
factory              make: optimisers by plain options
schedules            the step size as a function of the step
directions           the gradient, or what takes its place
step_rules           how much of a step is taken: constant, Galvan, Armijo, Wolfe
steppers             what moves the weights
states               what a checkpoint keeps of a stepper
joined               a torch optimiser's step on all parameters as one array
curvature            Gauss-Newton, structural damping and Hessian products
chain_jacobian       how the states of a chain change with its weights
weight_jacobian      how states and outputs change with the weights, forwards and backwards
conjugate_gradients  linear systems with a matrix that is given by its products
hessian_free         Newton steps without the Hessian

Example:
    >>> from coadjoint import optimisers
    >>> optimisers.make("adam", lr=1e-3, schedule="cosine").name
    'adam'
"""

from __future__ import annotations

from ..errors import renamed_attributes
from .directions import DIRECTIONS, distance, temporal
from .factory import make
from .recipes import (
    OPTIMISERS,
    SELF_DIRECTED,
    WITHOUT_STEP_SIZE,
    Optimiser,
    adagrad,
    adam,
    adamw,
    hessian_free,
    lbfgs,
    momentum,
    nesterov,
    optimiser,
    recipe_of,
    ridge,
    rmsprop,
    sgd,
)
from .schedules import (
    SCHEDULES,
    Schedule,
    constant,
    cosine,
    exponential,
    inverse_time,
    linear,
    plateau,
    pretraining,
)
from .states import flatten_state
from .step_rules import Armijo, Galvan, Wolfe
from .steppers import (
    HessianFreeStepper,
    LBFGSStepper,
    Point,
    RidgeStepper,
    Stepper,
    TorchStepper,
    count_trained,
    is_whole_number,
)

__all__ = [
    "DIRECTIONS",
    "OPTIMISERS",
    "SCHEDULES",
    "SELF_DIRECTED",
    "WITHOUT_STEP_SIZE",
    "Armijo",
    "Galvan",
    "HessianFreeStepper",
    "LBFGSStepper",
    "Optimiser",
    "Point",
    "RidgeStepper",
    "Schedule",
    "Stepper",
    "TorchStepper",
    "Wolfe",
    "adagrad",
    "adam",
    "adamw",
    "constant",
    "cosine",
    "count_trained",
    "distance",
    "exponential",
    "flatten_state",
    "hessian_free",
    "inverse_time",
    "is_whole_number",
    "lbfgs",
    "linear",
    "make",
    "momentum",
    "nesterov",
    "optimiser",
    "plateau",
    "pretraining",
    "recipe_of",
    "ridge",
    "rmsprop",
    "sgd",
    "temporal",
]

# Old names, which go in 1.0.
__getattr__ = renamed_attributes(
    __name__,
    {
        "Curved": "HessianFreeStepper",
        "Judged": "TorchStepper",
        "OWN_PACE": "SELF_DIRECTED",
        "PACELESS": "WITHOUT_STEP_SIZE",
        "Quasi": "LBFGSStepper",
        "Regressed": "RidgeStepper",
        "flat": "flatten_state",
        "numbers_of": "count_trained",
        "whole_number": "is_whole_number",
    },
)

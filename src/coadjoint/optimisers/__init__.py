"""Optimisers: a direction proposes, a step rule judges, a stepper moves the weights.

This package imports `gradients` and what is above it.

recipes        OPTIMISERS, the list by name (adam, sgd, ..., lbfgs, hessian-free, ridge), and their step sizes
factory        make: optimisers by plain options
schedules      the step size as a function of the step
directions     the gradient, or what takes its place
step_rules     how much of a step is taken: constant, Galvan, Armijo, Wolfe
steppers       what moves the weights
curvature      Gauss-Newton, structural damping and Hessian products
conjugate_gradients, hessian_free    Newton steps without the Hessian
"""

from __future__ import annotations

import warnings

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
)
from .step_rules import Armijo, Galvan, Wolfe
from .steppers import (
    HessianFreeStepper,
    LBFGSStepper,
    Point,
    RidgeStepper,
    Stepper,
    TorchStepper,
    count_trained,
    flatten_state,
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
    "recipe_of",
    "ridge",
    "rmsprop",
    "sgd",
    "temporal",
]


# Names of before and what they are called now; they go in 1.0.
_RENAMED = {
    "Curved": "HessianFreeStepper",
    "Judged": "TorchStepper",
    "OWN_PACE": "SELF_DIRECTED",
    "PACELESS": "WITHOUT_STEP_SIZE",
    "Quasi": "LBFGSStepper",
    "Regressed": "RidgeStepper",
    "flat": "flatten_state",
    "numbers_of": "count_trained",
    "whole_number": "is_whole_number",
}


def __getattr__(name: str) -> object:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(
        f"co.optimisers.{name} is now co.optimisers.{new}; the old name goes in 1.0.",
        DeprecationWarning,
        stacklevel=2,
    )
    return globals()[new]

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

from .directions import DIRECTIONS, distance, temporal
from .factory import make
from .recipes import (
    OPTIMISERS,
    OWN_PACE,
    PACELESS,
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
    Curved,
    Judged,
    Point,
    Quasi,
    Regressed,
    Stepper,
    flat,
    numbers_of,
    whole_number,
)

__all__ = [
    "DIRECTIONS",
    "OPTIMISERS",
    "OWN_PACE",
    "PACELESS",
    "SCHEDULES",
    "Armijo",
    "Curved",
    "Galvan",
    "Judged",
    "Optimiser",
    "Point",
    "Quasi",
    "Regressed",
    "Schedule",
    "Stepper",
    "Wolfe",
    "adagrad",
    "adam",
    "adamw",
    "constant",
    "cosine",
    "distance",
    "exponential",
    "flat",
    "hessian_free",
    "inverse_time",
    "lbfgs",
    "linear",
    "make",
    "momentum",
    "nesterov",
    "numbers_of",
    "optimiser",
    "plateau",
    "recipe_of",
    "ridge",
    "rmsprop",
    "sgd",
    "temporal",
    "whole_number",
]

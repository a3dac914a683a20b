"""Directions and step rules: one proposes where to go from an Evaluation, the other says how far.

    d = direction(e, rng)        theta <- theta - rate(d, value) d

A direction is a function of (Evaluation, numpy generator) -> Gradient; what it draws comes from the generator, so a run that
goes on from a checkpoint draws the same. A step rule is a function of (step size, direction, slope, value) -> rate, where
value(rate) is the objective at that rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils import parametrize

from .errors import InputError, Unsupported
from .gradients import Evaluation, Gradient

Value = Callable[[float], float]


def dot(a: Gradient, b: Gradient) -> float:
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def norm(g: Gradient) -> float:
    return math.sqrt(dot(g, g))


def steepest(e: Evaluation, rng: np.random.Generator) -> Gradient:
    """The gradient."""
    return e.gradient


def temporal(e: Evaluation, rng: np.random.Generator) -> Gradient:
    """The temporal components of (W, R, b), each brought to norm one, mixed by weights drawn uniformly from the simplex and
    brought to the norm of the gradient by (W, R, b); all other parameters take the plain gradient.  Galvan (2016), chapter 3

    A step whose component is zero is left out."""
    net: Any = e.network
    if parametrize.is_parametrized(net, "W") or (net.cell is not None and net.cell.weights is not None):
        raise Unsupported("the temporal direction takes W as it is, and that of this network is made of others.")
    parts = e.temporal_components()
    size = parts.norms()["joint"]
    there = (size > 0).numpy(force=True)
    beta = np.zeros(len(there))
    beta[there] = rng.dirichlet(np.ones(int(there.sum()))) if there.any() else 0
    w = torch.from_numpy(beta).to(size) / torch.where(size > 0, size, 1)
    mixed = {name: g for name, g in parts.weighted(w.to(parts.into_v.dtype)).items() if name in e.gradient}
    joint = {name: e.gradient[name] for name in mixed}
    long = norm(mixed)
    factor = norm(joint) / long if long > 0 else 0.0
    return {**e.gradient, **{name: g * factor for name, g in mixed.items()}}


DIRECTIONS: dict[str, Callable[[Evaluation, np.random.Generator], Gradient]] = {
    "steepest": steepest,
    "temporal": temporal,
}


def distance(d: Gradient, g: Gradient) -> float:
    """||d/|d| - g/|g||| = sqrt(2 - 2 cos of the angle between them): with the norm restored, what Galvan's condition for
    convergence bounds by kappa < 1."""
    a, b = norm(d), norm(g)
    return math.sqrt(max(0.0, 2 - 2 * dot(d, g) / (a * b))) if a > 0 and b > 0 else math.nan


@dataclass(frozen=True)
class Constant:
    """mu"""

    def __call__(self, mu: float, d: Gradient, slope: float, value: Value) -> float:
        return mu


@dataclass(frozen=True)
class Galvan:
    """mu if ||d|| <= c, else mu / ||d||.  Galvan (2016), eq. 3.6; not mu c / ||d||, which clipping would be"""

    c: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.c < math.inf:
            raise InputError(f"c must be a positive number; got {self.c!r}.")

    def __call__(self, mu: float, d: Gradient, slope: float, value: Value) -> float:
        size = norm(d)
        return mu if size <= self.c else mu / size


@dataclass(frozen=True)
class Armijo:
    """The first of mu, mu shrink, mu shrink^2, ... with value(rate) <= value(0) + c rate slope; 0 if none of `most` has it."""

    c: float = 1e-4
    shrink: float = 0.5
    most: int = 40

    def __call__(self, mu: float, d: Gradient, slope: float, value: Value) -> float:
        if slope >= 0:
            return 0.0
        here, rate = value(0.0), mu
        for _ in range(self.most):
            if value(rate) <= here + self.c * rate * slope:
                return rate
            rate *= self.shrink
        return 0.0


STEP_RULES: dict[str, Callable[..., Any]] = {"constant": Constant, "galvan": Galvan, "armijo": Armijo}

"""Directions: where to go from an Evaluation.

    d = direction(e, rng)        a function of (Evaluation, numpy generator) -> Gradient

What a direction draws comes from the generator, so a run that goes on from a checkpoint draws the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.utils import parametrize

from ..errors import Unsupported
from ..gradients.evaluation import Evaluation, Gradient
from ..gradients.temporal import Temporal


def dot(a: Gradient, b: Gradient) -> float:
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def norm(g: Gradient) -> float:
    return math.hypot(
        *(float(torch.linalg.vector_norm(y, dtype=torch.float64)) for y in g.values())
    )


def steepest(e: Evaluation, rng: np.random.Generator) -> Gradient:
    """The gradient."""
    return e.gradient


def temporal(e: Evaluation, rng: np.random.Generator) -> Gradient:
    """The temporal components of (W, R, b), each brought to norm one, mixed by weights drawn uniformly from the simplex and
    brought to the norm of the gradient by (W, R, b); all other parameters take the plain gradient.  Galvan (2016), chapter 3

    A step whose component is zero is left out. Components may be of any size: they are mixed in units of their own."""
    layer = e.network.one_layer
    if e.rho or not e.share:
        raise Unsupported(
            "the temporal direction takes the loss apart, and not a penalty: use BPTT."
        )
    own = layer is not None and layer.cell is not None and layer.cell.weights is not None
    if own or parametrize.is_parametrized(e.network, "W"):
        raise Unsupported(
            "the temporal direction takes W as it is, and that of this network is made of others."
        )
    parts, _ = Temporal.with_exponents(e)
    size = parts.norms()["joint"]
    there = (size > 0).numpy(force=True)
    beta = np.zeros(len(there))
    beta[there] = rng.dirichlet(np.ones(int(there.sum()))) if there.any() else 0
    w = torch.from_numpy(beta).to(size) / torch.where(size > 0, size, 1)
    mixed = {name: g for name, g in parts.weighted(w).items() if name in e.gradient}
    joint = {name: e.gradient[name] for name in mixed}
    long = norm(mixed)
    factor = norm(joint) / long if long > 0 else 0.0
    return {**e.gradient, **{name: (g * factor).to(e.gradient[name]) for name, g in mixed.items()}}


DIRECTIONS: dict[str, Callable[[Evaluation, np.random.Generator], Gradient]] = {
    "steepest": steepest,
    "temporal": temporal,
}


def distance(d: Gradient, g: Gradient) -> float:
    """||d/|d| - g/|g||| = sqrt(2 - 2 cos of the angle between them): with the norm restored, what Galvan's condition for
    convergence bounds by kappa < 1."""
    a, b = norm(d), norm(g)
    return math.sqrt(max(0.0, 2 - 2 * dot(d, g) / (a * b))) if a > 0 and b > 0 else math.nan

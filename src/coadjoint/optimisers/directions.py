"""Directions: where to go from an Evaluation.

    d = direction(e, rng)        a function of (Evaluation, numpy generator) -> Gradient

Random numbers come from the generator, so a resumed run draws the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parametrize

from ..errors import Unsupported
from ..gradients.evaluation import Evaluation, Gradient, read_numbers
from ..gradients.temporal import Temporal
from ..networks.layerwise import Layerwise, ScaledTerms
from ..sweeps.checks import answers_late
from ..sweeps.torch_internals import norms_of


def dot(a: Gradient, b: Gradient) -> float:
    """<a, b> over the parameters of a, in float64."""
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def norm(g: Gradient) -> float:
    """||g|| over all parameters, in float64."""
    return math.hypot(*read_numbers(norms_of_parts(g)))


def norms_of_parts(g: Gradient) -> list[Tensor]:
    """||y|| for each parameter's part y of g, as scalars in float64."""
    parts = list(g.values())
    if parts and all(map(answers_late, parts)):  # a launch for each would take longer
        return norms_of(parts)
    return [torch.linalg.vector_norm(y, dtype=torch.float64) for y in parts]


def steepest(e: Evaluation, rng: np.random.Generator) -> Gradient:
    """The gradient itself; rng is not needed."""
    return e.gradient


def temporal(e: Evaluation, rng: np.random.Generator) -> Gradient:
    """A random mixture of the gradient's components by time step. Galvan (2016), chapter 3.

    The components by (W, R, b) of all time steps are brought to norm one, mixed with weights drawn
    uniformly from the simplex, and the mixture is brought to the norm of the gradient by (W, R, b).
    Other parameters take the plain gradient. Steps whose component is zero are left out; others
    count alike, however small their components are. For a co.Chain the components are those by
    layer, of all parameters.
    """
    if e.rho or not e.share:  # the gradient has a part of a penalty, or is that of one alone
        raise Unsupported(
            "the temporal direction decomposes the gradient of the loss, not of a penalty: use "
            "BPTT."
        )
    # Each component comes without its power of 2, which does not matter at norm one.
    components = components_by_layer(e) or components_by_time(e)
    norms = components.norms()["joint"]
    nonzero = (norms > 0).numpy(force=True)
    beta = np.zeros(len(nonzero))
    if nonzero.any():
        beta[nonzero] = rng.dirichlet(np.ones(int(nonzero.sum())))  # uniform on the simplex
    weights = torch.from_numpy(beta).to(norms) / torch.where(norms > 0, norms, 1)
    mixture = components.weighted(weights)
    mixture = {name: g for name, g in mixture.items() if name in e.gradient}
    joint = {name: e.gradient[name] for name in mixture}
    length = norm(mixture)
    factor = norm(joint) / length if length > 0 else 0.0
    direction = dict(e.gradient)
    for name, g in mixture.items():
        direction[name] = (g * factor).to(e.gradient[name])
    return direction


def components_by_layer(e: Evaluation) -> ScaledTerms | None:
    """The components of a chain's gradient without their powers of 2; None for other networks."""
    if e.network.as_chain is None:
        return None
    components: object = e.components()
    assert isinstance(components, Layerwise)
    return components.without_exponents()[0]


def components_by_time(e: Evaluation) -> Temporal:
    """The components of a recurrent network's gradient without their powers of 2."""
    layer = e.network.one_layer
    makes_weights = layer is not None and layer.cell is not None and layer.cell.weights is not None
    if makes_weights or parametrize.is_parametrized(e.network, "W"):
        raise Unsupported(
            "the temporal direction needs W as a parameter, and this network computes W from "
            "others."
        )
    return Temporal.with_exponents(e)[0]


DIRECTIONS: dict[str, Callable[[Evaluation, np.random.Generator], Gradient]] = {
    "steepest": steepest,
    "temporal": temporal,
    "layerwise": temporal,  # the name that says what it does for a chain
}


def distance(d: Gradient, g: Gradient) -> float:
    """||d/|d| - g/|g||| = sqrt(2 - 2 cos of the angle between them); NaN if one of them is zero.

    Galvan's condition for convergence bounds it by kappa < 1, where d has the norm of g.
    """
    d_norm = norm(d)
    g_norm = norm(g)
    if not (d_norm > 0 and g_norm > 0):
        return math.nan
    return math.sqrt(max(0.0, 2 - 2 * dot(d, g) / (d_norm * g_norm)))

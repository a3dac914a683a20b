"""Conservative cells, built so that gradients neither vanish nor explode.

They discretise differential equations, or keep W orthogonal or invertible. The docstring of a
formula holds its equations and, in the last paragraph, its paper.
"""
# ruff: noqa: D205, D403, D415  -- docstrings that are equations

from __future__ import annotations

import functools

from torch import Tensor

from ..errors import InputError
from . import structures
from .activations import Activation, activation_function
from .cell import Cell, Fields, cell
from .nodes import Node
from .parameters import Uniform
from .primitives import relu, sigmoid, sign
from .transport import cached_by_options


@cached_by_options
def antisymmetric(
    eps: float = 0.01, gamma: float = 0.01, gated: bool = False, activation: Activation = "tanh"
) -> Cell:
    """The antisymmetric network.

    eps         the step size
    gamma       the diffusion: the diagonal of W is -gamma
    gated       with an input gate that shares W
    activation  sigma
    """
    sigma = activation_function(activation)
    structure = functools.partial(structures.Skew, gamma=gamma)
    if gated:

        @cell(slots="h", gates="h", inputs="g", structure=structure, name="antisymmetric-gated")
        def gated_antisymmetric(z: Fields, v: Fields, x: Fields, p: Fields) -> Node:
            """h' = h + eps sigmoid(W h + R_g u + b_g) sigma(W h + R u + b), W = M - M' - gamma I
            for both

            Chang et al., ICLR (2019)
            """
            # z.h is W h; v.g is R_g u + b_g and v.h is R u + b.
            return x.h + eps * sigmoid(z.h + v.g) * sigma(z.h + v.h)

        return gated_antisymmetric

    @cell(slots="h", structure=structure)
    def antisymmetric(z: Node, v: Node, x: Fields, p: Fields) -> Node:
        """h' = h + eps sigma(W h + R u + b), W = M - M' - gamma I

        Chang et al., ICLR (2019)
        """
        return x.h + eps * sigma(z + v)

    return antisymmetric


@cell(slots="h", parameters={"c": Uniform(-0.01, 0.01)}, structure=structures.Orthogonal)
def exponential(z: Node, v: Node, x: Fields, p: Fields) -> Node:
    """h' = modrelu(W h + R u + b), modrelu(a) = sign(a) relu(|a| + c), one c for each unit;
    W = exp(A), A = M - M', begins at the Cayley initialisation and stays orthogonal; the paper has
    no b

    Lezcano-Casado & Martinez-Rubio, ICML (2019)
    """
    a = z + v
    s = sign(a)
    return s * relu(s * a + p.c)  # s a = |a|


@cached_by_options
def lipschitz(
    eps: float = 0.03, beta: float = 0.75, gamma: float = 0.001, activation: Activation = "tanh"
) -> Cell:
    """The Lipschitz network.

    eps          the step size
    beta, gamma  how antisymmetric A and W are, and their diffusion (see structures.Skew)
    activation   sigma
    """
    sigma = activation_function(activation)
    structure = functools.partial(structures.Skew, beta, gamma)

    @cell(slots="h", gates="a h", structure=structure)
    def lipschitz(z: Fields, v: Fields, x: Fields, p: Fields) -> Node:
        """h' = h + eps (A h + sigma(W h + R u + b)); A = (1 - beta)(M + M') + beta (M - M')
        - gamma I, and W likewise with another M; both are stored in W, A first

        Erichson et al., ICLR (2021)
        """
        # z.a is A h and has no external input; z.h + v.h is W h + R u + b.
        return x.h + eps * (z.a + sigma(z.h + v.h))

    return lipschitz


@cached_by_options
def cornn(
    dt: float = 0.042, gamma: float = 2.7, eps: float = 4.7, activation: Activation = "tanh"
) -> Cell:
    """Coupled oscillators: y the positions, z the velocities.

    dt          the step size
    gamma, eps  frequency and damping
    activation  sigma
    """
    sigma = activation_function(activation)

    @cell(slots="y z", reads="y z")
    def cornn(z: Node, v: Node, x: Fields, p: Fields) -> tuple[Node, Node]:
        """z' = z + dt (sigma(W y + W_z z + R u + b) - gamma y - eps z), y' = y + dt z'

        Rusch & Mishra, ICLR (2021)
        """
        # The argument z is W y + W_z z of the equation, v is R u + b.
        velocity = x.z + dt * (sigma(z + v) - gamma * x.y - eps * x.z)
        return x.y + dt * velocity, velocity

    return cornn


@cached_by_options
def unicornn(eps: float = 0.03, alpha: float = 0.9, activation: Activation = "tanh") -> Cell:
    """Undamped oscillators without W: y the positions, z the velocities.

    eps         the largest step size
    alpha       the strength of the spring
    activation  sigma
    """
    sigma = activation_function(activation)

    @cell(slots="y z", parameters={"w": Uniform(0.0, 1.0), "c": Uniform(-0.1, 0.1)}, reads=None)
    def unicornn(z: Node, v: Node, x: Fields, p: Fields) -> tuple[Node, Node]:
        """z' = z - e (sigma(w y + R u + b) + alpha y), y' = y + e z', e = eps sigmoid(c); w and c
        for each unit, no W

        Rusch & Mishra, ICML (2021)
        """
        e = eps * sigmoid(p.c)
        # Without W the argument z is 0; v is R u + b.
        velocity = x.z - e * (sigma(p.w * x.y + (z + v)) + alpha * x.y)
        return x.y + e * velocity, velocity

    return unicornn


@cached_by_options
def inverse(k: int = 1, activation: Activation = "tanh") -> Cell:
    """An Elman network that alternates between W^-1 and W.

    k           how many steps take W^-1, and then as many W
    activation  sigma
    """
    sigma = activation_function(activation)
    if not isinstance(k, int) or k < 1:
        raise InputError(f"k must be a number of steps, at least 1; got {k!r}.")

    def takes_W(t: Tensor, d: int, training: bool) -> Tensor:
        """The m of the formula, [steps, d]: 1 where step t = 1, 2, ... takes W, 0 for W^-1."""
        return ((t - 1) // k % 2)[:, None].expand(-1, d)

    structure = structures.WithInverse

    @cell(slots="h", gates="w i", inputs="h", given="m", structure=structure, data=takes_W)
    def inverse(z: Fields, v: Fields, x: Fields, p: Fields) -> Node:
        """h' = sigma(W^-1 h + R u + b) for k steps, then sigma(W h + R u + b) for k steps, and so
        on
        """
        # z.w is W h and z.i is W^-1 h (structures.WithInverse); v.h is R u + b.
        return sigma(v.m * z.w + (1 - v.m) * z.i + v.h)

    return inverse

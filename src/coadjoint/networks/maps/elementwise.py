"""Elementwise functions Psi, (2.9), with the derivatives psi' and psi''; Activation is the map.

| name     | psi(z)             | psi'(z)            | psi''(z)                     |
|----------|--------------------|--------------------|------------------------------|
| tanh     | q = tanh z         | 1 - q^2            | -2 q (1 - q^2)               |
| sigmoid  | q = 1 / (1 + e^-z) | q (1 - q)          | q (1 - q) (1 - 2 q)          |
| relu     | max(0, z)          | 1 if z > 0, else 0 | 0                            |
| identity | z                  | 1                  | 0                            |
| softplus | log(1 + e^z)       | s = sigmoid z      | s (1 - s)                    |
| gelu     | z Phi(z)           | Phi(z) + z phi(z)  | (2 - z^2) phi(z)             |
| silu     | z s, s = sigmoid z | s + z s (1 - s)    | s (1 - s) (2 + z (1 - 2 s))  |
| elu      | z, e^z - 1 if z < 0| 1, e^z if z < 0    | 0, e^z if z < 0              |

phi and Phi are the density and the distribution function of the normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ...cells.primitives import SOFTPLUS_LINEAR
from ...errors import choose
from .checks import check_cotangent, check_numbers, check_tangent
from .map import FixedMap


@dataclass(frozen=True)
class Elementwise:
    """psi and its first two derivatives; these take z and psi(z)."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]
    curvature: Callable[[Tensor, Tensor], Tensor]


def identity_value(z: Tensor) -> Tensor:
    """The value z itself."""
    return z


def one(z: Tensor, q: Tensor) -> Tensor:
    """The slope of the identity; q is not used."""
    return torch.ones_like(z)


def zero(z: Tensor, q: Tensor) -> Tensor:
    """The curvature of functions made of straight lines; q is not used."""
    return torch.zeros_like(z)


def tanh_slope(z: Tensor, q: Tensor) -> Tensor:
    """The slope 1 - q^2; the quotient in Table 4.1 overflows for large |z|."""
    return 1 - q * q


def tanh_curvature(z: Tensor, q: Tensor) -> Tensor:
    """The curvature -2 q (1 - q^2)."""
    return -2 * q * (1 - q * q)


def sigmoid_slope(z: Tensor, q: Tensor) -> Tensor:
    """The slope q (1 - q)."""
    return q * (1 - q)


def sigmoid_curvature(z: Tensor, q: Tensor) -> Tensor:
    """The curvature q (1 - q) (1 - 2 q)."""
    return q * (1 - q) * (1 - 2 * q)


def relu_slope(z: Tensor, q: Tensor) -> Tensor:
    """The slope 1 where z > 0, else 0; at 0 it is 0, as in torch."""
    return (z > 0).to(z.dtype)


def softplus_value(z: Tensor) -> Tensor:
    """The value log(1 + e^z)."""
    return functional.softplus(z, 1.0, SOFTPLUS_LINEAR)


def softplus_slope(z: Tensor, q: Tensor) -> Tensor:
    """The slope sigmoid(z)."""
    return torch.sigmoid(z)


def softplus_curvature(z: Tensor, q: Tensor) -> Tensor:
    """The curvature s (1 - s), s = sigmoid(z)."""
    s = torch.sigmoid(z)
    return s * (1 - s)


def normal_density(z: Tensor) -> Tensor:
    """The density phi(z) = e^(-z^2 / 2) / sqrt(2 pi)."""
    return torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def gelu_slope(z: Tensor, q: Tensor) -> Tensor:
    """The slope Phi(z) + z phi(z)."""
    return 0.5 * torch.erfc(-z / math.sqrt(2)) + z * normal_density(z)


def gelu_curvature(z: Tensor, q: Tensor) -> Tensor:
    """The curvature (2 - z^2) phi(z)."""
    return (2 - z * z) * normal_density(z)


def silu_slope(z: Tensor, q: Tensor) -> Tensor:
    """The slope s + z s (1 - s), s = sigmoid(z)."""
    s = torch.sigmoid(z)
    return s + z * s * (1 - s)


def silu_curvature(z: Tensor, q: Tensor) -> Tensor:
    """The curvature s (1 - s) (2 + z (1 - 2 s)), s = sigmoid(z)."""
    s = torch.sigmoid(z)
    return s * (1 - s) * (2 + z * (1 - 2 * s))


def elu_slope(z: Tensor, q: Tensor) -> Tensor:
    """The slope 1 where z >= 0, else e^z."""
    return torch.exp(z.clamp(max=0))


def elu_curvature(z: Tensor, q: Tensor) -> Tensor:
    """The curvature 0 where z >= 0, else e^z."""
    return torch.where(z < 0, torch.exp(z.clamp(max=0)), 0.0)


ELEMENTWISE: dict[str, Elementwise] = {
    "tanh": Elementwise(torch.tanh, tanh_slope, tanh_curvature),
    "sigmoid": Elementwise(torch.sigmoid, sigmoid_slope, sigmoid_curvature),
    "relu": Elementwise(torch.relu, relu_slope, zero),
    "identity": Elementwise(identity_value, one, zero),
    "softplus": Elementwise(softplus_value, softplus_slope, softplus_curvature),
    "gelu": Elementwise(functional.gelu, gelu_slope, gelu_curvature),
    "silu": Elementwise(functional.silu, silu_slope, silu_curvature),
    "elu": Elementwise(functional.elu, elu_slope, elu_curvature),
}


def elementwise(name: str) -> Elementwise:
    """The elementwise function of that name; another name is refused."""
    return ELEMENTWISE[choose("activation", name, ELEMENTWISE)]


class Activation(FixedMap):
    """Psi on a state of any shape: psi of every entry, (2.9).

    name  tanh, sigmoid, relu, identity, softplus, gelu, silu or elu

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> psi = co.maps.Activation("sigmoid")
        >>> x, v = torch.zeros(1, 2), torch.ones(1, 2)
        >>> psi(x).tolist(), psi.push(x, v).tolist()
        ([[0.5, 0.5]], [[0.25, 0.25]])
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        elementwise(name)  # refuses an unknown name
        self.name = name

    @property
    def psi(self) -> Elementwise:
        """The function and its derivatives."""
        return ELEMENTWISE[self.name]

    def extra_repr(self) -> str:
        """The name of the function."""
        return self.name

    def forward(self, x: Tensor) -> Tensor:
        """Psi(x), (2.9)."""
        return self.psi.value(check_numbers("x", x))

    def push(self, x: Tensor, v: Tensor) -> Tensor:
        """DPsi(x).v = Psi'(x) v, entry by entry (Proposition 2.4.1)."""
        q = self(x)
        check_tangent(x, v)
        return self.psi.slope(x, q) * v

    def pull(self, x: Tensor, w: Tensor) -> Tensor:
        """D*Psi(x).w = Psi'(x) w: DPsi(x) is self-adjoint (Proposition 2.4.1)."""
        q = self(x)
        check_cotangent(q, w)
        return self.psi.slope(x, q) * w

    def bend(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """(v _| D^2 Psi(x))*.w = Psi''(x) v w, (2.14)."""
        q = self(x)
        check_tangent(x, v)
        check_cotangent(q, w)
        return self.psi.curvature(x, q) * v * w

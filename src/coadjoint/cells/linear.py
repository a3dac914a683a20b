"""Cells that are linear in the state: minimal GRU and LSTM, and the linear recurrent unit.

They have no W, and engine "scan" runs them in parallel over time. The docstring of a formula holds
its equations and, in the last paragraph, its paper.
"""
# ruff: noqa: D205, D403, D415  -- docstrings that are equations

from __future__ import annotations

import math

import torch
from torch import Tensor

from .cell import Fields, cell
from .nodes import Node
from .parameters import Uniform
from .primitives import cos, exp, expm1, sigmoid, sin, softplus, sqrt, step


@cell(slots="h", gates="g h", reads=None)
def mingru(z: Fields, v: Fields, x: Fields, p: Fields) -> Node:
    """h' = (1 - g) h + g (R u + b), g = sigmoid(R_g u + b_g): linear in h

    Feng et al., arXiv:2410.01201 (2024)
    """
    a = z.g + v.g
    keep = sigmoid(-a)  # 1 - g as a difference would round to zero much earlier
    return keep * x.h + sigmoid(a) * (z.h + v.h)


@cell(slots="h", gates="f i h", reads=None)
def minlstm(z: Fields, v: Fields, x: Fields, p: Fields) -> Node:
    """h' = f/(f + i) h + i/(f + i) (R u + b), f and i each sigmoid of another R u + b: linear in h

    Feng et al., arXiv:2410.01201 (2024)
    """
    # f/(f + i) = sigmoid(log(f/i)); log(f/i) is exact even where f and i round to zero
    log_odds = softplus(-(z.i + v.i)) - softplus(-(z.f + v.f))
    return sigmoid(log_odds) * x.h + sigmoid(-log_odds) * (z.h + v.h)


def ring(area: Tensor) -> Tensor:
    """The lru's nu of units with |L|^2 = exp(-2 exp(nu)) = `area`, entry by entry.

    The area is kept 1e-6 away from 0 and 1, where nu is infinite: |L| lies in 0.001..0.9999995.
    """
    return torch.log(-torch.log(area.clamp(1e-6, 1 - 1e-6)) / 2)


FADES_AT_ONCE = 7.0  # nu above which |L| = exp(-exp(nu)) is zero
NEVER_FADES = -37.0  # nu below which 1 - |L|^2 is 2 exp(nu) to the last digit of a double


def at_most(high: float, a: Node) -> Node:
    """The lesser of `high` and a.

    A formula has no branches, so a switch chooses; high - relu(high - a) would lose digits of a.
    """
    over = step(a - high)  # 1 where a > high, else 0
    return (1 - over) * a + over * high


def input_gain(nu: Node) -> Node:
    """sqrt(1 - |L|^2) = sqrt(1 - exp(-2 exp(nu))), exact with its slopes where |L| is nearly 1.

    A root is infinitely steep at 0, so its slopes would overflow. Below NEVER_FADES the gain is
    proportional to exp(nu / 2): the root stops there, and that factor takes over.
    """
    under = step(NEVER_FADES - nu)  # 1 where nu < NEVER_FADES, else 0
    within = (1 - under) * nu + under * NEVER_FADES  # the greater of nu and NEVER_FADES
    beneath = under * (nu - NEVER_FADES)  # the rest of nu, at most 0
    return sqrt(-expm1(-2 * exp(within))) * exp(beneath / 2)


@cell(
    slots="re im",
    gates="re im",
    parameters={"nu": Uniform(0.0, 1.0, ring), "theta": Uniform(0.0, 2 * math.pi)},
    reads=None,
    shows="re im",
)
def lru(z: Fields, v: Fields, x: Fields, p: Fields) -> tuple[Node, Node]:
    """x' = L x + sqrt(1 - |L|^2) (R u + b), complex, L = exp(-exp(nu) + i theta) for each unit:
    linear in x; L begins uniform on the unit disc; the readout takes Re(C x), its V being
    (Re C, -Im C), and D u with skip=True

    Orvieto et al., ICML (2023)
    """
    # |L| is 0 from FADES_AT_ONCE on. Further up exp(nu) overflows, and the slope of |L| would be
    # infinity times 0.
    nu = at_most(FADES_AT_ONCE, p.nu)
    size = exp(-exp(nu))
    gain = input_gain(nu)
    re = size * cos(p.theta)
    im = size * sin(p.theta)
    new_re = re * x.re - im * x.im + gain * (z.re + v.re)
    new_im = im * x.re + re * x.im + gain * (z.im + v.im)
    return new_re, new_im

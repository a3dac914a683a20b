"""Expansions phi(x) of a reservoir's states, and kernels k(x, s)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def linear(x: Tensor) -> Tensor:
    """The state as it is."""
    return x


def append_squares(x: Tensor) -> Tensor:
    """The state and the squares of its entries: [..., d] -> [..., 2 d]."""
    return torch.cat([x, x * x], -1)


def rbf(x: Tensor, s: Tensor, gamma: float, degree: int) -> Tensor:
    """exp(-gamma |x - s|^2) for each row of s: [..., d] -> [..., len(s)].

    degree: not used; all kernels take the same arguments.
    """
    squared_distance = x.square().sum(-1, keepdim=True) + s.square().sum(-1) - 2 * (x @ s.T)
    return torch.exp(-gamma * squared_distance)


def polynomial(x: Tensor, s: Tensor, gamma: float, degree: int) -> Tensor:
    """(1 + gamma x.s)^degree for each row of s: [..., d] -> [..., len(s)]."""
    power: Tensor = (1 + gamma * (x @ s.T)) ** degree
    return power


EXPANSIONS: dict[str, Callable[[Tensor], Tensor]] = {"linear": linear, "squares": append_squares}
KERNELS: dict[str, Callable[[Tensor, Tensor, float, int], Tensor]] = {
    "rbf": rbf,
    "polynomial": polynomial,
}

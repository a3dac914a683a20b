"""Stretches: consecutive maps of a chain, run and differentiated together.

A chain x_{i+1} = f_i(x_i) is a row of stretches. Each has its states on both sides of its maps and
three products with them:

    costates   lam_i = Df_i(x_i)' lam_{i+1} of all its maps, in mantissas and exponents
    pull       Df_i(x_i)' w_i of each map by itself
    push       v_{i+1} = Df_i(x_i) v_i of all its maps

MapStretch     one map, differentiated by torch through the graph of the run
LinearStretch  one map W x + b, whose products are products with W
DenseStretch   dense layers of one width, swept over depth (dense_stretch.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..sweeps.norms import is_within_range
from ..sweeps.rows import NO_EXPONENT, exponent, scale
from ..sweeps.torch_internals import change_count, has_hooks
from .maps import Dense

ORDER_ONE = (2.0**-10, 2.0**10)  # entries that count as of order one, in half precision too


class ScaledBlock(NamedTuple):
    """Costates mantissa 2^exponent of m consecutive states with n entries each."""

    mantissa: Tensor  # [m, B, n]
    exponent: Tensor  # [m, B], integers
    size: Tensor | None = None  # [m, B], the norms of the mantissas, if they are at hand

    def without_last(self) -> ScaledBlock:
        """The block without its last state."""
        size = None if self.size is None else self.size[:-1]
        return ScaledBlock(self.mantissa[:-1], self.exponent[:-1], size)


class Stretch(Protocol):
    """Consecutive maps of a chain, over a batch."""

    @property
    def last(self) -> Tensor:
        """The state after the last map, [B, ...]."""

    @property
    def states(self) -> Sequence[Tensor]:
        """The states after each map, [B, ...]."""

    def __len__(self) -> int:
        """The number of maps."""

    def costates(self, lam: Tensor, create_graph: bool) -> ScaledBlock:
        """The costates of the states before each map, from lam [B, ...] of the last one after.

        A stretch whose states all have one width adds that of the last one, which is lam itself.
        create_graph: the result can be differentiated again.
        """

    def pull(self, w: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
        """Df_i(x_i)' w_i for each map i, with w_i shaped like the state after it."""

    def push(self, v: Tensor) -> list[Tensor]:
        """The change of the states after each map, for a change v of the state before the first."""


def normalise(lam: Tensor) -> tuple[Tensor, Tensor]:
    """Return lam [B, ...] as mantissa 2^k, k [B] constants under differentiation.

    A sample whose entries are all zero has the exponent 0, and so have all samples if the largest
    entry of each is of order one: on a CPU, most costates of most chains.
    """
    flat = lam.flatten(1)
    values = flat.detach()
    if not lam.is_cuda and is_within_range(values.abs().amax(1), *ORDER_ONE):
        return lam, torch.zeros(len(lam), dtype=torch.int32)
    k = exponent(values)
    k = torch.where(k == NO_EXPONENT, 0, k)
    return scale(flat, -k[:, None]).view(lam.shape), k


def gradient(y: Tensor, x: Tensor, w: Tensor, create_graph: bool) -> Tensor:
    """(dy/dx)' w through the graph of y, which is kept; zero if y does not depend on x."""
    if y is x:
        return w
    (g,) = torch.autograd.grad(
        y, x, w, create_graph=create_graph, retain_graph=True, allow_unused=True
    )
    return torch.zeros_like(x) if g is None else g


@dataclass(frozen=True, eq=False)
class MapStretch:
    """One map, differentiated by torch through the graph of the run.

    The graph is that of the run itself: what a map has drawn, such as a dropout mask, is the same
    in the state, its costate and its tangent.
    """

    before: Tensor
    last: Tensor

    @property
    def states(self) -> Sequence[Tensor]:
        """The state after the map."""
        return (self.last,)

    def __len__(self) -> int:
        return 1

    def costates(self, lam: Tensor, create_graph: bool) -> ScaledBlock:
        """The costate before the map: its mantissa is of order one."""
        mantissa, k = normalise(self.pull_back(lam, create_graph))
        return ScaledBlock(mantissa.flatten(1)[None], k[None])

    def pull(self, w: Sequence[Tensor], create_graph: bool) -> list[Tensor]:
        """Df(x)' w of the map."""
        return [self.pull_back(w[0], create_graph)]

    def pull_back(self, w: Tensor, create_graph: bool) -> Tensor:
        """Df(x)' w, [B, ...]."""
        return gradient(self.last, self.before, w, create_graph)

    def push(self, v: Tensor) -> list[Tensor]:
        """Df(x) v, as the derivative of Df(x)' w by w, which is linear in w."""
        if self.last is self.before:
            return [v]
        w = torch.zeros_like(self.last).requires_grad_()
        pulled = gradient(self.last, self.before, w, create_graph=True)
        if not pulled.requires_grad:  # the state after does not depend on the one before
            return [torch.zeros_like(self.last)]
        return [gradient(pulled, w, v.reshape(self.before.shape), create_graph=True)]


@dataclass(frozen=True, eq=False)
class LinearStretch(MapStretch):
    """One map W x + b on states [B, n]: W' w is written down, which is less work for torch."""

    W: Tensor
    changes: int  # of W in place, before this run

    @staticmethod
    def run(module: nn.Module, x: Tensor) -> LinearStretch | None:
        """Run a map over x [B, n]; None if it is of another kind, or must say why it cannot."""
        W, b = linear_weights(module)
        if W is None or x.dim() != 2 or x.shape[1] != W.shape[1] or x.dtype != W.dtype:
            return None
        y = linear(x, W, b)
        # torch.autocast computes in another type.
        return LinearStretch(x, y, W, change_count(W)) if y.dtype == W.dtype else None

    def pull_back(self, w: Tensor, create_graph: bool) -> Tensor:
        """W' w of each sample, [B, n]."""
        if change_count(self.W) != self.changes:  # torch says so, and what to do
            return super().pull_back(w, create_graph)
        with torch.set_grad_enabled(create_graph):
            return w @ self.W


def linear_weights(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """W, and b or None, of a map that computes W x + b and nothing else; (None, None) otherwise."""
    if has_hooks(module) or "forward" in vars(module):
        return None, None
    if type(module) is nn.Linear:
        return module.weight, module.bias
    if type(module) is Dense and module.activation == "identity":
        return module.W, module.b
    return None, None

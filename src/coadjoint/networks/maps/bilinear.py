"""Psi(B(W, x) + b), B bilinear: what dense, tied and convolutional maps have in common.

Only B and its two adjoints differ. With z = B(W, x) + b:

    Df(x).v                   Psi'(z) B(W, v)
    D*f(x).w                  (W _| B)* d                               d = Psi'(z) w
    nabla*_W f(x).w           (B |_ x)* d
    nabla*_b f(x).w           d, summed over all axes but that of b
    (v _| D^2 f(x))*.w        (W _| B)* c                               c = Psi''(z) B(W, v) w
    (v _| D nabla_W f(x))*.w  (B |_ x)* c + (B |_ v)* d
    (v _| D nabla_b f(x))*.w  c, summed over all axes but that of b

The products are entry by entry; (W _| B) x = B(W, x) = (B |_ x) W.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...cells.parameters import Device, check_dtype_and_device, parameter
from .by_torch import Gradients
from .checks import check_cotangent, check_tangent
from .elementwise import ELEMENTWISE, Elementwise, elementwise
from .map import Map


class BilinearMap(Map):
    """A map x -> Psi(B(W, x) + b) with its products by hand.

    activation  the name of psi
    W, b        the parameters; b lies along axis 1 and may be None

    A subclass defines `multiply`, `adjoint_by_state` and `adjoint_by_weight`.
    """

    W: nn.Parameter
    b: nn.Parameter | None

    def __init__(self, activation: str) -> None:
        super().__init__()
        elementwise(activation)  # refuses an unknown name
        self.activation = activation

    @property
    def psi(self) -> Elementwise:
        """The elementwise function and its derivatives."""
        return ELEMENTWISE[self.activation]

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """B(W, x); an x of the wrong shape is refused."""

    @abstractmethod
    def adjoint_by_state(self, x: Tensor, y: Tensor) -> Tensor:
        """(W _| B)* y, of the shape of x."""

    @abstractmethod
    def adjoint_by_weight(self, x: Tensor, y: Tensor) -> Tensor:
        """(B |_ x)* y, of the shape of W, summed over samples."""

    def pre_activation(self, x: Tensor) -> Tensor:
        """The argument z = B(W, x) + b of Psi."""
        z = self.multiply(x)
        if self.b is None:
            return z
        axes_after_b = [1] * (z.dim() - 2)
        return z + self.b.view(-1, *axes_after_b)

    def slope(self, z: Tensor) -> Tensor:
        """Psi'(z)."""
        return self.psi.slope(z, self.psi.value(z))

    def curvature(self, z: Tensor) -> Tensor:
        """Psi''(z)."""
        return self.psi.curvature(z, self.psi.value(z))

    def forward(self, x: Tensor) -> Tensor:
        """Psi(B(W, x) + b)."""
        return self.psi.value(self.pre_activation(x))

    def push(self, x: Tensor, v: Tensor) -> Tensor:
        """Df(x).v = Psi'(z) B(W, v)."""
        z = self.pre_activation(x)
        check_tangent(x, v)
        return self.slope(z) * self.multiply(v)

    def pull(self, x: Tensor, w: Tensor) -> Tensor:
        """D*f(x).w = (W _| B)* (Psi'(z) w)."""
        z = self.pre_activation(x)
        check_cotangent(z, w)
        return self.adjoint_by_state(x, self.slope(z) * w)

    def pull_parameters(self, x: Tensor, w: Tensor) -> Gradients:
        """nabla*_W f(x).w = (B |_ x)* d and nabla*_b f(x).w = d, d = Psi'(z) w, over samples."""
        if parametrize.is_parametrized(self):
            return super().pull_parameters(x, w)  # the parameters have other names
        z = self.pre_activation(x)
        check_cotangent(z, w)
        d = self.slope(z) * w
        found = self._bias_gradient(d)
        if self.W.requires_grad:
            found["W"] = self.adjoint_by_weight(x, d)
        return found

    def bend(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """(v _| D^2 f(x))*.w = (W _| B)* (Psi''(z) B(W, v) w)."""
        z = self.pre_activation(x)
        check_tangent(x, v)
        check_cotangent(z, w)
        return self.adjoint_by_state(x, self.curvature(z) * self.multiply(v) * w)

    def bend_parameters(self, x: Tensor, v: Tensor, w: Tensor) -> Gradients:
        """(v _| D nabla f(x))*.w: (B |_ x)* c + (B |_ v)* d for W and c for b, over samples.

        c = Psi''(z) B(W, v) w and d = Psi'(z) w.
        """
        if parametrize.is_parametrized(self):
            return super().bend_parameters(x, v, w)
        z = self.pre_activation(x)
        check_tangent(x, v)
        check_cotangent(z, w)
        c = self.curvature(z) * self.multiply(v) * w
        d = self.slope(z) * w
        found = self._bias_gradient(c)
        if self.W.requires_grad:
            found["W"] = self.adjoint_by_weight(x, c) + self.adjoint_by_weight(v, d)
        return found

    def _bias_gradient(self, y: Tensor) -> Gradients:
        """{"b": y summed over all axes but that of b}; {} if b is None or fixed."""
        if self.b is None or not self.b.requires_grad:
            return {}
        return {"b": y.transpose(0, 1).flatten(1).sum(1)}


def make_parameter(*shape: int, dtype: torch.dtype | None, device: Device | None) -> nn.Parameter:
    """A parameter of this shape, not drawn yet; a type that is too coarse is refused."""
    check_dtype_and_device(dtype, device)
    return parameter(*shape, dtype=dtype, device=device)


def draw_weight(W: Tensor, numbers_read: int) -> None:
    """Draw W from +-1 / sqrt(numbers_read), to the last bit as torch does in Linear and Conv2d.

    numbers_read: how many entries of x one entry of B(W, x) reads.
    """
    gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))  # 1 / sqrt(3)
    bound = math.sqrt(3) * (gain / math.sqrt(numbers_read))
    with torch.no_grad():
        W.uniform_(-bound, bound)


def draw_bias(b: Tensor | None, numbers_read: int) -> None:
    """Draw b, if there is one, from +-1 / sqrt(numbers_read), as torch does."""
    if b is None:
        return
    bound = 1 / math.sqrt(numbers_read)
    with torch.no_grad():
        b.uniform_(-bound, bound)

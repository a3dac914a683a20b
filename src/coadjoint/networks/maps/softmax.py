"""Softmax and LogSoftmax over axis 1, with their products by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import InputError
from .checks import check_cotangent, check_numbers, check_tangent
from .map import FixedMap


class Softmax(FixedMap):
    """sigma(x) = Exp(x) / <1, Exp(x)>, (2.15), over axis 1 of [B, n, ...].

    With s = sigma(x), sums over axis 1, other products entry by entry, and the symmetric
    D(v) = s v - <s, v> s:

        push, pull  D(v), D(w): Dsigma(x) is self-adjoint                 (Lemma 2.4.3)
        bend        D(v w - <s, w> v - <s, v> w)

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> co.maps.Softmax()(torch.zeros(1, 4)).tolist()
        [[0.25, 0.25, 0.25, 0.25]]
    """

    def forward(self, x: Tensor) -> Tensor:
        """sigma(x), (2.15)."""
        return torch.softmax(check_classes(x), 1)

    def push(self, x: Tensor, v: Tensor) -> Tensor:
        """Dsigma(x).v = s v - <s, v> s (Lemma 2.4.3)."""
        s = self(x)
        check_tangent(x, v)
        return softmax_slope(s, v)

    def pull(self, x: Tensor, w: Tensor) -> Tensor:
        """D*sigma(x).w = s w - <s, w> s (Lemma 2.4.3)."""
        s = self(x)
        check_cotangent(s, w)
        return softmax_slope(s, w)

    def bend(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """(v _| D^2 sigma(x))*.w = D(v w - <s, w> v - <s, v> w), D as in `push`."""
        s = self(x)
        check_tangent(x, v)
        check_cotangent(s, w)
        return softmax_slope(s, v * w - inner(s, w) * v - inner(s, v) * w)


class LogSoftmax(FixedMap):
    """Log sigma(x), the logarithm of the softmax over axis 1 of [B, n, ...].

    With s = sigma(x), sums over axis 1, and other products entry by entry:

        push  v - <s, v> 1
        pull  w - <1, w> s                                                (Lemma 2.4.4)
        bend  -<1, w> (s v - <s, v> s)

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> co.maps.LogSoftmax().pull(torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])).tolist()
        [[0.5, -0.5]]
    """

    def forward(self, x: Tensor) -> Tensor:
        """Log sigma(x)."""
        return torch.log_softmax(check_classes(x), 1)

    def push(self, x: Tensor, v: Tensor) -> Tensor:
        """D(Log sigma)(x).v = v - <s, v> 1: the adjoint of `pull`."""
        s = torch.softmax(check_classes(x), 1)
        check_tangent(x, v)
        return v - inner(s, v)

    def pull(self, x: Tensor, w: Tensor) -> Tensor:
        """D*(Log sigma)(x).w = w - <1, w> s (Lemma 2.4.4)."""
        s = torch.softmax(check_classes(x), 1)
        check_cotangent(s, w)
        return w - w.sum(1, keepdim=True) * s

    def bend(self, x: Tensor, v: Tensor, w: Tensor) -> Tensor:
        """(v _| D^2 (Log sigma)(x))*.w = -<1, w> (s v - <s, v> s)."""
        s = torch.softmax(check_classes(x), 1)
        check_tangent(x, v)
        check_cotangent(s, w)
        return -w.sum(1, keepdim=True) * softmax_slope(s, v)


def check_classes(x: Tensor) -> Tensor:
    """x, if it has an axis 1 to take the softmax over."""
    check_numbers("x", x)
    if x.dim() < 2:
        raise InputError(f"the softmax is over axis 1 of x [B, n, ...]; got {list(x.shape)}.")
    return x


def inner(s: Tensor, v: Tensor) -> Tensor:
    """<s, v> over axis 1, which stays as an axis of length 1."""
    return (s * v).sum(1, keepdim=True)


def softmax_slope(s: Tensor, v: Tensor) -> Tensor:
    """Dsigma.v = s v - <s, v> s where sigma is s (Lemma 2.4.3)."""
    return s * v - inner(s, v) * s

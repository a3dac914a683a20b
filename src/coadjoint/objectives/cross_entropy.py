"""Cross-entropy -log softmax(a)_y of class numbers y, with slopes that keep their digits.

The greatest p = softmax(a) is 1 less the sum of the others. Its logarithm and its slopes are
computed from those others: a difference from 1 would lose digits.

torch records a dozen operations for it. Where C can compute it, the graph has one for the value and
one for the slope.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sweeps.engines.c import per_sample
from ..sweeps.functions import Context, Gradients, Inputs, SweepFunction, with_quick_apply


def log_softmax(a: Tensor) -> Tensor:
    """The logarithm of softmax(a) over the last axis."""
    greatest = a.argmax(-1, keepdim=True)
    # a - max a; at the greatest entry it is 0, and so is its slope
    below = (a - a.gather(-1, greatest)).scatter(-1, greatest, 0.0)
    others = torch.exp(below).scatter(-1, greatest, 0.0).sum(-1, keepdim=True)
    return below - torch.log1p(others)


def class_loss(a: Tensor, y: Tensor) -> Tensor:
    """-log softmax(a)_y of each entry, for class numbers y that lie in the range."""
    point = class_point(a.detach(), y)
    if point is None:
        return F.nll_loss(log_softmax(a), y.long(), reduction="none")
    if not (a.requires_grad and torch.is_grad_enabled()):
        return point.value
    value: Tensor = ClassLoss.apply(a, point)
    return value


def class_slope(a: Tensor, y: Tensor) -> Tensor:
    """The slope p - e_y by a."""
    point = class_point(a.detach(), y)
    if point is not None:
        slope: Tensor = ClassSlope.apply(a, point)
        return slope
    # p, less 1 at the class y
    p = torch.softmax(a, -1)
    return balance(a, p.scatter_add(-1, y.long()[..., None], p.new_full((*y.shape, 1), -1.0)))


def class_point(a: Tensor, y: Tensor) -> per_sample.SoftmaxPoint | None:
    """Value, slope and bend at once, in C; None where that is not possible. y is in the range."""
    if torch.compiler.is_compiling() or a.dim() != 2:
        return None
    with torch.no_grad():
        return per_sample.cross_entropy(a, y)


def balance(a: Tensor, slope: Tensor) -> Tensor:
    """The slope with the entry of the greatest a as minus the sum of the others."""
    greatest = a.argmax(-1, keepdim=True)
    others = slope.scatter(-1, greatest, 0.0)
    return others.scatter(-1, greatest, -others.sum(-1, keepdim=True))


def softmax_bend(a: Tensor, change: Tensor) -> Tensor:
    """The change p (v - <p, v>) of the slope along a change v of a, p = softmax(a).

    It is the same for v less a number: v is 0 where p is greatest, so that no digits are lost.
    """
    p = torch.softmax(a, -1)
    v = change - change.gather(-1, a.argmax(-1, keepdim=True))
    return p * (v - (p * v).sum(-1, keepdim=True))


class ClassContext(Context):
    """The context of the functions below."""

    point: per_sample.SoftmaxPoint


def keep_point(ctx: ClassContext, inputs: Inputs, output: Tensor) -> None:
    """Keep a and the point."""
    ctx.save_for_backward(inputs[0])
    ctx.point = inputs[1]


@with_quick_apply
class ClassLoss(SweepFunction):
    """apply(a, point) -> class_loss, which was computed before."""

    setup_context = staticmethod(keep_point)

    @staticmethod
    def forward(a: Tensor, point: per_sample.SoftmaxPoint) -> Tensor:
        """The value as it is."""
        return point.value.view_as(point.value)

    @staticmethod
    def backward(ctx: ClassContext, g: Tensor) -> Gradients:
        """The gradient g_i (p - e_y) of each entry; a function of a if it is differentiated."""
        (a,) = ctx.saved_tensors
        slope = ctx.point.slope
        if torch.is_grad_enabled():
            slope = ClassSlope.apply(a, ctx.point)
        return g[:, None] * slope, None


@with_quick_apply
class ClassSlope(SweepFunction):
    """apply(a, point) -> the slope of class_loss by a, which was computed beside its value."""

    setup_context = staticmethod(keep_point)

    @staticmethod
    def forward(a: Tensor, point: per_sample.SoftmaxPoint) -> Tensor:
        """The slope as it is."""
        return point.slope.view_as(point.slope)

    @staticmethod
    def backward(ctx: ClassContext, v: Tensor) -> Gradients:
        """The bend along v; a formula of torch's where it is to be differentiated again."""
        (a,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return softmax_bend(a, v), None
        return ctx.point.bend(v), None

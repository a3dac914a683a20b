"""The loss of a chain's samples together with its slope dL/da, where the loss has a formula for it.

A built-in loss has its slope written down (co.losses.Loss.slope). The costates of the outputs are
that slope: no gradient of the loss need be taken, and none of the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..objectives.losses import LOSSES, Loss, LossPoint, Output
from ..sweeps.functions import (
    Context,
    Gradients,
    Inputs,
    SweepFunction,
    is_transformed,
    with_quick_apply,
)
from .judge import Judge


@with_quick_apply
class WithSlope(SweepFunction):
    """apply(value [B], a [B, n], slope [B, n]) -> value, whose gradient by a is the slope.

    The slope is a function of a in torch's graph, so that this can be differentiated twice.
    """

    @staticmethod
    def forward(value: Tensor, a: Tensor, slope: Tensor) -> Tensor:
        """The value as it is."""
        return value.clone()

    @staticmethod
    def setup_context(ctx: Context, inputs: Inputs, output: Tensor) -> None:
        """Keep the slope."""
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> Gradients:
        """The gradient g_j slope_j by each sample's a."""
        (slope,) = ctx.saved_tensors
        return None, g[:, None] * slope, None


class Formula(NamedTuple):
    """A loss that has its slope by a written down, and its targets."""

    loss: Loss
    y: Tensor

    def slope(self, a: Tensor) -> Tensor:
        """The slope of each sample's loss by its a, [B, n]."""
        assert self.loss.slope is not None
        return self.loss.slope(a, self.y)

    def point(self, a: Tensor, output: Output) -> LossPoint | None:
        """Losses, slopes and bends of all samples at once; None where there is no short cut."""
        if self.loss.point is None or output not in (self.loss.folds or ("identity",)):
            return None
        return self.loss.point(a, self.y)


def slope_formula(judge: Judge) -> Formula | None:
    """The loss as one whose slope is written down.

    None where it is not, where entries are weighted, and where torch must differentiate the loss by
    its targets.
    """
    loss = LOSSES.get(judge.loss) if isinstance(judge.loss, str) else judge.loss
    y = judge.y
    if not isinstance(loss, Loss) or loss.slope is None or not loss.takes_a(judge.network.output):
        return None
    if y is None or y.requires_grad or judge.weight is not None:
        return None
    return Formula(loss, y)


def losses_and_slopes(judge: Judge, a: Tensor) -> tuple[Tensor, Tensor | None]:
    """The loss of each sample, [B], and its slope by that sample's a [B, n], as functions of a.

    The slope is None where it has no formula, and in forward mode.
    """
    formula = slope_formula(judge)
    if formula is None or not a.requires_grad or not torch.is_grad_enabled() or is_transformed():
        return judge.sample_losses(a), None
    with torch.no_grad():
        value = judge.sample_losses(a)
    slope = formula.slope(a)
    with_slope: Tensor = WithSlope.apply(value, a, slope)
    return with_slope, slope

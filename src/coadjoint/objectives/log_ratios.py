"""The penalty log-ratio as a function of norms, together with its slope.

    G = mean over i = first..L-1 of r_i^2,    r_i = log ||lam_i|| - log ||lam_{i+1}||

for costates of which none is zero. ||lam_i|| = size_i 2^(k_i), with exponents k_i that are
constants. Where C can compute it, torch's graph has one operation for the value and one for the
slope.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..sweeps.costates import BaseCostates
from ..sweeps.engines.c import per_sample
from ..sweeps.functions import Context, Gradients, Inputs, SweepFunction, with_quick_apply


def log_ratio_with_slope(lam: BaseCostates) -> tuple[Tensor, Tensor]:
    """The penalty [B], and its slope 2 (r_i - r_{i-1}) / (count size_i) by the sizes, [L + 1, B].

    There is no r before the first and none after the last.
    """
    in_c = per_sample.log_ratios(lam.size, lam.exponent, lam.first)
    return _by_torch(lam.size, lam.exponent, lam.first) if in_c is None else in_c


def log_ratio_of_sizes(size: Tensor, k: Tensor, first: int) -> Tensor | None:
    """The penalty [B] as a function of the sizes [L + 1, B]; None where C cannot compute it."""
    if torch.compiler.is_compiling():
        return None
    with torch.no_grad():
        in_c = per_sample.log_ratios(size.detach(), k, first)
    if in_c is None:
        return None
    value, slope = in_c
    if size.requires_grad and torch.is_grad_enabled():
        value = LogRatio.apply(size, SizesPoint(value, slope, k, first))
    return value


def _by_torch(size: Tensor, k: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """What `log_ratio_with_slope` returns, by torch's own operations."""
    size_64 = size.double()
    log = torch.log(size_64)
    r = torch.add(log[:-1] - log[1:], k[:-1] - k[1:], alpha=math.log(2))[first:]
    count = max(len(r), 1)
    padded = pad(r, (0, 0, first + 1, 1))
    slope = (padded[1:] - padded[:-1]) * (2 / count) / size_64
    return (r.square().sum(0) / count).to(size.dtype), slope.to(size.dtype)


class SizesPoint(NamedTuple):
    """The penalty at sizes [L + 1, B]."""

    value: Tensor  # [B]
    slope: Tensor  # [L + 1, B]
    k: Tensor  # the exponents, [L + 1, B]
    first: int


class SizesContext(Context):
    """The context of the functions below."""

    point: SizesPoint


def keep_point(ctx: SizesContext, inputs: Inputs, output: Tensor) -> None:
    """Keep the sizes and the point."""
    ctx.save_for_backward(inputs[0])
    ctx.point = inputs[1]


@with_quick_apply
class LogRatio(SweepFunction):
    """apply(size, point) -> the penalty, which was computed before."""

    setup_context = staticmethod(keep_point)

    @staticmethod
    def forward(size: Tensor, point: SizesPoint) -> Tensor:
        """The value as it is."""
        return point.value.view_as(point.value)

    @staticmethod
    def backward(ctx: SizesContext, g: Tensor) -> Gradients:
        """The gradient g_j slope_ij; a function of the sizes if it is differentiated."""
        (size,) = ctx.saved_tensors
        slope = ctx.point.slope
        if torch.is_grad_enabled():
            slope = LogRatioSlope.apply(size, ctx.point)
        return g * slope, None


@with_quick_apply
class LogRatioSlope(SweepFunction):
    """apply(size, point) -> the slope by sizes, which was computed beside the value."""

    setup_context = staticmethod(keep_point)

    @staticmethod
    def forward(size: Tensor, point: SizesPoint) -> Tensor:
        """The slope as it is."""
        return point.slope.view_as(point.slope)

    @staticmethod
    def backward(ctx: SizesContext, v: Tensor) -> Gradients:
        """The change of the slope along v, by torch."""
        (size,) = ctx.saved_tensors
        again = torch.is_grad_enabled()  # is it to be differentiated once more?
        with torch.enable_grad():
            here = size if again else size.detach().requires_grad_()
            _, slope = _by_torch(here, ctx.point.k, ctx.point.first)
            (bend,) = torch.autograd.grad(slope, here, v, create_graph=again)
        return bend, None

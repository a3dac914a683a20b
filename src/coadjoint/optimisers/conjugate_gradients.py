"""Conjugate gradients for A x = b, with Martens' stopping rule; A is given by its products."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import KindError, brief, real, whole_number
from ..sweeps.layout import check_dense


@dataclass(frozen=True)
class CGSolution:
    """Some of the iterates, the last one included, and the value of the quadratic model at each."""

    iterates: list[Tensor]
    models: list[float]  # x'Ax / 2 - b'x
    iterations: int
    products: int  # with A


def conjugate_gradients(
    A: Callable[[Tensor], Tensor],
    b: Tensor,
    start: Tensor | None = None,
    scale: Tensor | None = None,
    most: int = 250,
    progress: float = 5e-4,
    keep: float = 1.3,
) -> CGSolution:
    """Minimise x'Ax / 2 - b'x for a positive definite A, preconditioned by the diagonal `scale`.

    A is a function that returns its product with a vector. `start` is the first x, zero if None;
    without a `scale` nothing is preconditioned.

    It ends after `most` iterations, or when each of the last k iterations has on average lowered
    the model by less than `progress` of itself, k = max(10, a tenth of all), or when nothing is
    left of the residual. The iterates 1, ceil(keep), ceil(keep^2), ... and the last are kept.
    Martens, Deep learning via Hessian-free optimization, ICML (2010).

    >>> A = torch.diag(torch.tensor([1.0, 4.0]))
    >>> conjugate_gradients(A.mv, torch.tensor([1.0, 1.0])).iterates[-1]
    tensor([1.0000, 0.2500])
    """
    if not callable(A):
        raise KindError(f"A must be a function of a vector; got {brief(A)}.")
    whole_number("most", most)
    real("progress", progress, 0)
    real("keep", keep, 1)
    dtype = check_dense("b", b).dtype
    b = b.double()
    diagonal = None if scale is None else scale.double()

    def multiply(y: Tensor) -> Tensor:
        return A(y.to(dtype)).double()  # A may compute in float32; vectors and sums are float64

    def precondition(y: Tensor) -> Tensor:
        return y if diagonal is None else y / diagonal

    if start is None:
        x = torch.zeros_like(b)
        r = b.clone()
    else:
        x = start.double()
        r = b - multiply(x)
    z = precondition(r)
    direction = z.clone()
    residual = float(r @ z)
    # Values of the model, by iteration: with r = b - A x it is -(r + b)'x / 2.
    values = [-0.5 * float((r + b) @ x)]
    iterates: list[Tensor] = []
    models: list[float] = []
    next_kept = 1.0
    i = 0
    while i < most and residual > 0:
        A_direction = multiply(direction)
        curvature = float(direction @ A_direction)
        if not curvature > 0:
            break  # flat along the direction, or rounding: nothing is gained
        i += 1
        x = x.add(direction, alpha=residual / curvature)
        r = r.sub(A_direction, alpha=residual / curvature)
        values.append(-0.5 * float((r + b) @ x))
        z = precondition(r)
        previous_residual = residual
        residual = float(r @ z)
        # A residual r below eps |b| is rounding; `residual` is its square, in the scale's norm.
        smallest = torch.finfo(dtype).eps ** 2 * float(b @ precondition(b))
        is_last = i == most or has_stalled(values, progress) or not residual > smallest
        if i >= next_kept or is_last:
            iterates.append(x.to(dtype))
            models.append(values[-1])
            while next_kept <= i:
                next_kept = math.ceil(next_kept * keep)
        if is_last:
            break
        direction = z.add(direction, alpha=residual / previous_residual)
    if not iterates:  # the start is the solution already
        iterates.append(x.to(dtype))
        models.append(values[-1])
    products = i if start is None else i + 1
    return CGSolution(iterates, models, i, products)


def has_stalled(values: list[float], progress: float) -> bool:
    """Whether the last k iterations have lowered the model by less than k progress of itself.

    values: the model after 0, 1, 2, ... iterations. k = max(10, a tenth of all) is Martens' choice.
    A model that is not negative yet is no better than x = 0, so the iterations go on.
    """
    i = len(values) - 1
    k = max(10, i // 10)
    if progress <= 0 or i <= k or values[-1] >= 0:
        return False
    return (values[-1] - values[-1 - k]) / values[-1] < k * progress

"""Conjugate gradients for A x = b with A positive definite, given by its products, with Martens' stopping rule."""

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
    """What conjugate gradients found: some of the iterates, the last of them the best model's, and what the model says of each."""

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
    """Minimise x'Ax / 2 - b'x for a positive A, preconditioned by the diagonal `scale`.

    It ends after `most` products, or when the model has fallen by less than `progress` of itself for each of the last k
    iterations, k = max(10, a tenth of all), or when nothing is left of the residual. Kept are the iterates ceil(keep^j).
    Martens, Deep learning via Hessian-free optimization, ICML (2010)."""
    if not callable(A):
        raise KindError(f"A must be a function of a vector; got {brief(A)}.")
    whole_number("most", most)
    real("progress", progress, 0)
    real("keep", keep, 1)
    dtype, b = check_dense("b", b).dtype, b.double()
    times = lambda y: A(y.to(dtype)).double()  # A may be float32; sums and vectors are not
    scale = None if scale is None else scale.double()
    x = torch.zeros_like(b) if start is None else start.double()
    r = b - times(x) if start is not None else b.clone()
    apply = (lambda y: y) if scale is None else (lambda y: y / scale)
    z = apply(r)
    d, size = z.clone(), float(r @ z)
    past = [-0.5 * float((r + b) @ x)]
    iterates, models, due = [], [], 1.0
    i = 0
    while i < most and size > 0:
        Ad = times(d)
        bent = float(d @ Ad)
        if not bent > 0:
            break  # flat along d, or rounding: nothing is gained
        i += 1
        x = x.add(d, alpha=size / bent)
        r = r.sub(Ad, alpha=size / bent)
        past.append(-0.5 * float((r + b) @ x))
        k = max(10, i // 10)
        little = i > k and past[-1] < 0 and (past[-1] - past[-1 - k]) / past[-1] < k * progress
        done = i == most or (progress > 0 and little)
        z = apply(r)
        before, size = size, float(r @ z)
        done = done or not size > torch.finfo(dtype).eps ** 2 * float(b @ apply(b))
        if i >= due or done:
            iterates.append(x.to(dtype))
            models.append(past[-1])
            while due <= i:
                due = math.ceil(due * keep)
        if done:
            break
        d = z.add(d, alpha=size / before)
    if not iterates:
        iterates, models = [x.to(dtype)], [past[-1]]
    return CGSolution(iterates, models, i, i + (start is not None))

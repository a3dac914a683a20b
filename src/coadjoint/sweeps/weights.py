"""W of a sweep: one matrix for all steps, or W by step, a matrix for each.

    a_t = base_t + W r(x_{t-1})       W [g d, r d]
    a_t = base_t + W_t r(x_{t-1})     W [T, g d, r d], for samples of equal length

By step, the loops over time are those of a dense network over its layers: x_t = psi(W_t x_{t-1} +
base_t). Every engine that takes W takes either, so engines.resolve chooses as usual. On a GPU it is
one product for each step: the kernels of engine `cuda` keep a single W on the chip.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InputError
from .affine import affine
from .chunks import sum_products
from .functions import is_transformed
from .memory import empty
from .rows import Rows


def is_by_step(W: Tensor) -> bool:
    """Is there a matrix for each step?"""
    return W.dim() == 3


def check_weights(rows: Rows, W: Tensor) -> None:
    """Refuse W by step that has not T matrices, or beside samples of different lengths."""
    if not is_by_step(W):
        return
    if not rows.uniform:
        raise InputError("W by step needs samples of equal length; pass sequences of one length.")
    if len(W) != rows.T:
        raise InputError(
            f"W by step has {len(W)} matrices; expected one for each of {rows.T} steps."
        )


def matrices(rows: Rows, W: Tensor) -> Sequence[Tensor]:
    """The matrix of each step, as T views."""
    return W.unbind(0) if is_by_step(W) else [W] * rows.T


def step_products(rows: Rows, y: Tensor, W: Tensor) -> Tensor:
    """y_t W_t for all steps at once, [N, m], for step rows y [N, n] and W [n, m] or [T, n, m]."""
    if is_by_step(W):
        return torch.bmm(y.unflatten(0, (rows.T, rows.B)), W).flatten(0, 1)
    return y @ W


def chunked_products(rows: Rows, y: Tensor, W: Tensor) -> Tensor:
    """The same in chunks: its bits do not depend on whether a sequence is swept in segments."""
    return step_products(rows, y, W) if is_by_step(W) else affine(rows, y, W.t(), None)


def weight_gradient(rows: Rows, W: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """The gradient by W of sum_t <y_t, W_t r_t>, like W: y_t' r_t, for one W summed over t.

    y [N, n], r [N, m]: step arrays, for W [n, m] or [T, n, m].
    """
    if not is_by_step(W):
        return sum_products(rows, y, r)
    by_step = (y.unflatten(0, (rows.T, rows.B)).mT, r.unflatten(0, (rows.T, rows.B)))
    if torch.is_grad_enabled() or is_transformed():  # torch cannot differentiate out=
        return torch.bmm(*by_step)
    return torch.bmm(*by_step, out=empty(W.shape, W))

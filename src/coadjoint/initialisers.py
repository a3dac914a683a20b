"""Initialisers: where the weights of a network begin."""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import InputError


def spectral_(W: Tensor, radius: float, generator: torch.Generator | None = None) -> Tensor:
    """Gaussian entries, scaled so that the largest |eigenvalue| of the square matrix W is `radius`.

    Below 1, the costates of a tanh network vanish; above, they may explode."""
    if W.dim() != 2 or W.shape[0] != W.shape[1]:
        raise InputError(
            f"a spectral radius belongs to a square matrix; got {list(W.shape)}. For a gated cell scale the block of one gate."
        )
    if not radius > 0:
        raise InputError(f"radius must be positive; got {radius}.")
    with torch.no_grad():
        W.normal_(generator=generator)
        W.mul_(radius / torch.linalg.eigvals(W.double()).abs().max().to(W.dtype))
    return W


def gaussian_(W: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Independent entries N(0, std^2)."""
    with torch.no_grad():
        return W.normal_(0.0, std, generator=generator)

"""Batch: what a gradient method sees of the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .errors import InputError


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets of B samples.

    u        [T, B, inputs], a list of [T_i, inputs], or a PackedSequence
    y        [B, ...] for readout "last", [T, B, ...] for readout "every"; None for a loss of y_hat alone
    lengths  [B], if samples end before T
    mask     [T, B] (or [B]) weights of the loss's entries; 0 leaves one out
    weight   [B] weights of the samples: the objective is the mean over samples of weight_j (L_j + rho G_j)
    x0       [B, n] or [n], where the states begin
    reduce   "sum" or "mean" of a sample's loss over its steps
    """

    u: Any
    y: Any = None
    lengths: Any = None
    mask: Tensor | None = None
    weight: Tensor | None = None
    x0: Tensor | None = None
    reduce: str = "sum"

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Batch:
        """The same batch with real numbers of this type, on this device. Class numbers stay integers."""
        real = lambda v: v.to(device, dtype if v.is_floating_point() else None) if isinstance(v, Tensor) else v
        values: dict[str, Any] = {name: real(getattr(self, name)) for name in ("u", "y", "mask", "weight", "x0")}
        return replace(self, **values)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over samples of weighted values, [B] -> scalar."""
        return values.mean() if self.weight is None else (self.weights(values[None]) * values).mean()

    def weights(self, like: Tensor) -> Tensor:
        """The weight of each sample, for an array [., B, ...] of them."""
        B = like.shape[1]
        if self.weight is None:
            return like.new_ones(B)
        weight = torch.as_tensor(self.weight, dtype=like.dtype, device=like.device)
        if weight.shape != (B,) or not torch.isfinite(weight).all():
            raise InputError(
                f"weight has shape {list(weight.shape)}; expected one finite weight for each of {B} samples."
            )
        return weight

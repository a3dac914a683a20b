"""Parametrisations of W, outside the sweeps: register with torch.nn.utils.parametrize, usable with any cell.

torch.nn.utils.parametrize.register_parametrization(net, "W", co.parametrisations.Signed(signs))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .errors import InputError


class Signed(nn.Module):
    """Dale's law: column j of W has the sign signs[j] (+1 excitatory, -1 inhibitory): W = |M| diag(signs)."""

    signs: Tensor

    def __init__(self, signs: Tensor) -> None:
        super().__init__()
        if signs.dim() != 1 or not torch.isin(signs, torch.tensor([-1, 1], dtype=signs.dtype)).all():
            raise InputError("signs must be a vector of +1 and -1, one for each column of W.")
        self.register_buffer("signs", signs)

    def forward(self, M: Tensor) -> Tensor:
        return M.abs() * self.signs.to(M.dtype)

    def right_inverse(self, W: Tensor) -> Tensor:
        return W.abs()

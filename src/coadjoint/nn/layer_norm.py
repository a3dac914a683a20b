"""Layer normalisation inside the step: not elementwise over units, so a step function for engine `autograd`.

    z = gain_hh LN(W h) + gain_ih LN(R u) + b, and of an LSTM h' = o tanh(gain_c LN(c') + shift_c)

Ba, Kiros & Hinton (2016)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from .frame import reset_bias


def normalise(mode: str, y: Tensor, gain: Any) -> Tensor:
    """gain LN(y); a GRU's candidate apart from its gates."""
    d = y.shape[1] // 3
    parts = y.split([2 * d, d], 1) if mode == "GRU" else (y,)
    return torch.cat([layer_norm(part, part.shape[1:]) for part in parts], 1) * gain


def normalised_step(mode: str, w: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """The step function with layer normalisation of W h and, in an LSTM, of c. w: the weights of one layer by name."""
    W, gain = w["weight_hh"], w["gain_hh"]
    d = W.shape[1]
    p: Any = reset_bias(mode, W, w["bias_hh"])

    def taken(base: Tensor, x: Tensor) -> Tensor:
        z = normalise(mode, x[:, :d] @ W.t(), gain)
        if mode == "GRU":
            r, k = torch.sigmoid(z[:, : 2 * d] + base[:, : 2 * d]).chunk(2, 1)
            return (1 - k) * torch.tanh(base[:, 2 * d :] + r * (z[:, 2 * d :] + p)) + k * x
        if mode == "LSTM":
            i, f, g, o = (z + base).chunk(4, 1)
            c = torch.sigmoid(f) * x[:, d:] + torch.sigmoid(i) * torch.tanh(g)
            seen = layer_norm(c, (d,)) * w["gain_c"] + w["shift_c"]
            return torch.cat([torch.sigmoid(o) * torch.tanh(seen), c], 1)
        return torch.relu(z + base) if mode == "RNN_RELU" else torch.tanh(z + base)

    return taken

"""Layer normalisation inside the step: not elementwise over units, so a step function.

    z = gain_hh LN(W h) + gain_ih LN(R u) + b, and of an LSTM h' = o tanh(gain_c LN(c') + shift_c)

It runs on engine `autograd`. Ba, Kiros & Hinton (2016)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from .frame import DirectionWeights, reset_bias


def normalise(mode: str, y: Tensor, gain: Tensor | None) -> Tensor:
    """Return gain LN(y) for y [B, gates d], with LN over all entries of a sample.

    Of a GRU, the two gates and the candidate are normalised separately, since the reset gate
    multiplies the latter.
    """
    assert gain is not None
    d = y.shape[1] // 3  # for a GRU
    parts = y.split([2 * d, d], 1) if mode == "GRU" else (y,)
    normalised = torch.cat([layer_norm(part, part.shape[1:]) for part in parts], 1)
    return normalised * gain


def normalised_step(mode: str, weights: DirectionWeights) -> Callable[[Tensor, Tensor], Tensor]:
    """The function step(base, x) -> x_t with layer normalisation of W h and, in an LSTM, of c.

    base: gain_ih LN(R u_t) + b, [B, gates d]; x: the state x_{t-1}, [B, n].
    """
    if mode == "GRU":
        return _gru_step(weights)
    if mode == "LSTM":
        return _lstm_step(weights)
    W = weights.weight_hh
    activation = torch.relu if mode == "RNN_RELU" else torch.tanh

    def step(base: Tensor, x: Tensor) -> Tensor:
        return activation(normalise(mode, x @ W.t(), weights.gain_hh) + base)

    return step


def _gru_step(weights: DirectionWeights) -> Callable[[Tensor, Tensor], Tensor]:
    """The step of a GRU: gates r and k, and h' = (1 - k) candidate + k h."""
    W = weights.weight_hh
    d = W.shape[1]
    b_hn = reset_bias("GRU", W, weights.bias_hh)
    assert b_hn is not None

    def step(base: Tensor, x: Tensor) -> Tensor:
        z = normalise("GRU", x @ W.t(), weights.gain_hh)
        r, k = torch.sigmoid(z[:, : 2 * d] + base[:, : 2 * d]).chunk(2, 1)
        candidate = torch.tanh(base[:, 2 * d :] + r * (z[:, 2 * d :] + b_hn))
        return (1 - k) * candidate + k * x

    return step


def _lstm_step(weights: DirectionWeights) -> Callable[[Tensor, Tensor], Tensor]:
    """The step of an LSTM with state x = (h, c): h' = o tanh(gain_c LN(c') + shift_c)."""
    W = weights.weight_hh
    d = W.shape[1]
    gain_c = weights.gain_c
    shift_c = weights.shift_c
    assert gain_c is not None
    assert shift_c is not None

    def step(base: Tensor, x: Tensor) -> Tensor:
        z = normalise("LSTM", x[:, :d] @ W.t(), weights.gain_hh)
        i, f, g, o = (z + base).chunk(4, 1)
        c = torch.sigmoid(f) * x[:, d:] + torch.sigmoid(i) * torch.tanh(g)
        visible_c = layer_norm(c, (d,)) * gain_c + shift_c
        return torch.cat([torch.sigmoid(o) * torch.tanh(visible_c), c], 1)

    return step

"""Checks of one arriving time step, and its outputs: for the streams of RTRL and Truncated."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..networks.network import Network
from ..sweeps.layout import check_like, tensor_of

if TYPE_CHECKING:
    from .rtrl import Stream
    from .truncated import Windows


def check_input(stream: Stream | Windows, u: Tensor) -> Tensor:
    """Return u_t as [B, inputs]; one stream may leave out the first dimension.

    Another shape, type or device is refused, and so are NaN and inf.
    """
    check_like("u_t", u, stream.net.V)
    if u.dim() == 1 and stream.batch == 1:
        u = u[None]
    if tuple(u.shape) != (stream.batch, stream.net.inputs):
        raise InputError(
            f"u_t has shape {list(u.shape)}; expected [{stream.batch}, {stream.net.inputs}]."
        )
    # The sum is one number to wait for. It may overflow although every entry is finite.
    if not math.isfinite(u.sum().item()) and not torch.isfinite(u).all():
        raise InputError(f"u_t holds NaN or inf at step {stream.t + 1} of the stream.")
    return u


def target_of(y: object, batch: int) -> Tensor | None:
    """Return y_t as [B, ...], for B = `batch`; one stream may leave out the first dimension.

    A target of one stream is taken to have that dimension if its first dimension is 1.
    """
    if y is None:
        return None
    target = tensor_of("y_t", y)
    if batch == 1 and (target.dim() == 0 or len(target) != 1):
        return target[None]
    return target


def pre_outputs(net: Network, x: Tensor, u: Tensor) -> Tensor:
    """Return a = V h + D u + b_o of one step, [B, outputs].

    h is the visible part of the state, passed through the readout's tanh layers if it has any. D
    exists if the inputs reach the outputs directly.
    """
    h = net.visible_state(x)
    for layer in net.deep:
        h = torch.tanh(layer(h))
    a = nn.functional.linear(h, net.V, net.b_o)
    if hasattr(net, "D"):
        a = a + nn.functional.linear(u, net.D)
    return a

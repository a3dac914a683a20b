"""What RTRL and Truncated share on a stream: checks of one arriving step, and its loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..networks.network import Network
from ..sweeps.layout import check_like, tensor_of

if TYPE_CHECKING:
    from .rtrl import Stream
    from .truncated import Windows


def checked(stream: Stream | Windows, u: Tensor) -> Tensor:
    """u_t as [B, inputs], finite."""
    check_like("u_t", u, stream.net.V)
    u = u[None] if u.dim() == 1 and stream.batch == 1 else u
    if tuple(u.shape) != (stream.batch, stream.net.inputs):
        raise InputError(
            f"u_t has shape {list(u.shape)}; expected [{stream.batch}, {stream.net.inputs}]."
        )
    if not math.isfinite(u.sum().item()) and not torch.isfinite(u).all():
        raise InputError(f"u_t holds NaN or inf at step {stream.t + 1} of the stream.")
    return u


def target_of(y: Any, batch: int) -> Tensor | None:
    """y_t as [B, ...]; of one stream, also without the first dimension."""
    y = None if y is None else tensor_of("y_t", y)
    return y[None] if y is not None and batch == 1 and (y.dim() == 0 or len(y) != 1) else y


def answered(net: Network, x: Tensor, u: Tensor) -> Tensor:
    """a = V h + D u + b_o of one step, h through the layers of a deep readout."""
    h = net.visible_state(x)
    for layer in net.deep:
        h = torch.tanh(layer(h))
    a = nn.functional.linear(h, net.V, net.b_o)
    return a + nn.functional.linear(u, net.D) if hasattr(net, "D") else a

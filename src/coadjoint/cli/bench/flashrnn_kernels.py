"""FlashRNN, if it is installed: fused kernels for a GPU, which multiply in bfloat16.

FlashRNN (Poeppel, Beck and Hochreiter, 2024) has one head here. Its gates are ours, but for the
gru, which has the recurrent part of the new state, g, as a gate of its own, before r, z and n.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ...errors import MissingError
from .clock import first_line

FLASHRNN = "flashrnn"
Kernel = Callable[..., tuple[Tensor, Tensor]]


def load_flashrnn(device: str) -> Kernel:
    """The function `flashrnn.flashrnn`; refused if there is none here or the device is no GPU."""
    if device != "cuda":
        raise MissingError("flashrnn runs on a GPU only: --device cuda.")
    try:
        module = importlib.import_module("flashrnn")
    except ImportError as error:
        raise MissingError(
            f"flashrnn cannot be imported ({first_line(error)}): pip install flashrnn."
        ) from None
    kernel: Kernel = module.flashrnn
    return kernel


def explain_flashrnn(device: str) -> str:
    """In a line, whether FlashRNN takes part."""
    try:
        load_flashrnn(device)
    except MissingError as error:
        return f"peer '{FLASHRNN}' takes no part: {error}"
    return f"peer '{FLASHRNN}' takes part: its fused kernels, in bfloat16"


def last_output(
    kernel: Kernel,
    cell: str,
    u: Tensor,
    w: Mapping[str, Tensor],
    backend: str = "cuda_fused",
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The output of the last step, [B, d], in the type of u, by FlashRNN's kernel.

    u: [T, B, inputs]; w: our weights W, R, b and, of a gru, p.b_n. backend: FlashRNN's own choice
    for a gru is "cuda", two kernels a step.
    """
    T, B, _ = u.shape
    d = w["W"].shape[1]
    W = w["W"].view(-1, 1, d, d)  # [gates, heads, d, d]
    b = w["b"].view(-1, 1, d)
    inputs = (u @ w["R"].T).view(T, B, -1, 1, d).transpose(0, 1)  # [B, T, gates, heads, d]
    if cell == "gru":  # ours are r, u, n
        W = torch.cat([W[2:], W[:2]])
        b = torch.cat([w["p.b_n"].view(1, 1, d), b])
    try:
        states, _ = kernel(
            inputs.to(dtype),
            W.to(dtype),
            b.to(dtype),
            function=cell,
            backend=backend,
            dtype=str(dtype).removeprefix("torch."),
        )
    except Exception as error:  # of a compiler, say: whatever it is, the peer has no figure here
        raise RuntimeError(first_line(error) or type(error).__name__) from error
    return states[0, :, -1, 0].to(u.dtype)  # of [states, B, T, heads, d]

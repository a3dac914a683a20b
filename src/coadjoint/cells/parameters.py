"""How parameters are made: their types, and what is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import InputError, KindError, MissingError, Unsupported, brief

DTYPES = (torch.float32, torch.float64)
HALF_PRECISION = "parameters are float32 or float64; got {}. Half precision loses what second derivatives live on."


def check_dtype_and_device(dtype: Any, device: Any) -> None:
    """A type that second derivatives can live on, and a device that torch knows."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise KindError(f"dtype must be torch.float32 or torch.float64; got {brief(dtype)}.")
    if dtype is not None and dtype not in DTYPES:
        raise Unsupported(HALF_PRECISION.format(dtype))
    if device is None:
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise InputError(
            f"device must be one that torch knows, 'cpu' or 'cuda'; got {brief(device)}."
        ) from None


def parameter(*shape: int, dtype: torch.dtype | None = None, device: Any = None) -> nn.Parameter:
    """A parameter that is not drawn yet."""
    try:
        return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
    except (RuntimeError, MemoryError, TypeError, OverflowError) as error:
        if dtype not in (None, *DTYPES):
            raise Unsupported(HALF_PRECISION.format(dtype)) from None
        of = "x".join(map(str, shape))
        raise MissingError(
            f"there is no room for a parameter of {of} numbers: choose smaller sizes."
        ) from error

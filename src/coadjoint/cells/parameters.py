"""Parameters of networks: how they are allocated, and their initial values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor, nn

from ..errors import InputError, KindError, MissingError, Unsupported, brief

DTYPES = (torch.float32, torch.float64)
HALF_PRECISION = (
    "parameters are float32 or float64; got {}. "
    "Half precision is too coarse for second derivatives."
)
Device = torch.device | str | int


class ParameterOptions(TypedDict):
    """How the parameters of a step are allocated; None takes torch's default."""

    dtype: torch.dtype | None
    device: Device | None


def check_dtype_and_device(dtype: object, device: object) -> None:
    """Refuse a dtype too coarse for second derivatives, and a device that torch does not know."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise KindError(f"dtype must be torch.float32 or torch.float64; got {brief(dtype)}.")
    if dtype is not None and dtype not in DTYPES:
        raise Unsupported(HALF_PRECISION.format(dtype))
    if device is None:
        return
    try:
        torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError):
        raise InputError(
            f"device must be a torch device such as 'cpu' or 'cuda'; got {brief(device)}."
        ) from None


def parameter(
    *shape: int, dtype: torch.dtype | None = None, device: Device | None = None
) -> nn.Parameter:
    """A parameter of this shape; its values are not drawn yet."""
    try:
        return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device))
    except (RuntimeError, MemoryError, TypeError, OverflowError) as error:
        if dtype not in (None, *DTYPES):  # then the dtype is to blame, not the memory
            raise Unsupported(HALF_PRECISION.format(dtype)) from None
        size = "x".join(map(str, shape))
        raise MissingError(
            f"not enough memory for a parameter of {size} numbers: choose smaller sizes."
        ) from error


@dataclass(frozen=True)
class Uniform:
    """Initial values of a per-unit parameter: a function of numbers drawn from low..high.

    low, high  the bounds of the uniform distribution
    of         the function of the numbers drawn, [d] -> [d]; None leaves them as they are

    Example:
        >>> from coadjoint.cells import Uniform
        >>> Uniform(2.0, 2.0)(3)
        tensor([2., 2., 2.], dtype=torch.float64)
    """

    low: float
    high: float
    of: Callable[[Tensor], Tensor] | None = None

    def __call__(self, d: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw the values of d units, float64: of(low..high), or low..high if `of` is None."""
        device = None if generator is None else generator.device  # torch wants the same for both
        fraction = torch.rand(d, generator=generator, dtype=torch.float64, device=device)
        drawn = self.low + (self.high - self.low) * fraction
        return drawn if self.of is None else self.of(drawn)

    def __str__(self) -> str:
        """The distribution in words: "0..1", or "ring of 0..1" with a function."""
        bounds = f"{self.low:g}..{self.high:g}"
        return bounds if self.of is None else f"{self.of.__name__} of {bounds}"


Initial = float | Uniform

"""The weight rho of a penalty in errors: too large for its type, or the cause of an overflow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from ..errors import NumericalError

# From this weight on, an error of overflow names the weight: it may well be the cause.
LARGE = 1e6


@contextlib.contextmanager
def blaming_weight(rho: float | Tensor) -> Iterator[None]:
    """Add a large weight of the penalty to an error of overflow: it may well be the cause."""
    try:
        yield
    except NumericalError as error:
        if not isinstance(rho, float) or rho < LARGE:
            raise
        raise NumericalError(f"{error} The penalty's weight is rho = {rho:g}: lower it.") from None


def refuse_if_out_of_range(rho: float, dtype: torch.dtype) -> None:
    """Refuse a weight that the type of a network's numbers cannot hold."""
    largest = torch.finfo(dtype).max
    if rho > largest:
        raise NumericalError(
            f"the penalty's weight rho = {rho:g} is outside the range of "
            f"{str(dtype).removeprefix('torch.')}, at most {largest:.2g}: lower the weight."
        )

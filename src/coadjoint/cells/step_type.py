"""Step: what the cells of steps.py have in common."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from ..errors import MAX_COUNT, InputError, brief
from .parameters import ParameterOptions, check_dtype_and_device, parameter


def new_parameter(*shape: int, **make: Unpack[ParameterOptions]) -> nn.Parameter:
    """A parameter that is not drawn yet; its dtype and device (`make`) are checked first."""
    check_dtype_and_device(make["dtype"], make["device"])
    return parameter(*shape, **make)


class Step(nn.Module):
    """A module (u [B, inputs], x) -> x.

    x is [B, hidden], or a tuple of `slots` parts of that shape; the readout reads the first, or all
    of them if `shows_all`.
    """

    slots = 1
    state = "1"  # entries of the state for each unit
    shows_all = False

    def __init__(self, inputs: int, hidden: int, **sizes: int) -> None:
        # `sizes` are further sizes of the step, by name, which are checked as well.
        super().__init__()
        for name, value in {"inputs": inputs, "hidden": hidden, **sizes}.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} must be a positive integer; got {brief(value)}.")
            if value > MAX_COUNT:
                raise InputError(f"{name} must be at most {MAX_COUNT:,}; got {brief(value)}.")
        self.inputs = inputs
        self.hidden = hidden

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly in +-1/sqrt(hidden)."""
        bound = self.hidden**-0.5
        with torch.no_grad():
            for p in self.parameters():
                p.uniform_(-bound, bound)

    def state_parts(self, x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The `slots` parts of a state; InputError if it has another number of parts."""
        parts = (x,) if isinstance(x, Tensor) else x
        if len(parts) != self.slots:
            raise InputError(
                f"the state has {len(parts)} parts; expected {self.slots}: pass slots=step.slots "
                "to co.Network."
            )
        return parts

    def blocks(self) -> list[Tensor]:
        """The matrices between one state and the next, which an initialiser of W fills.

        Matrices of several gates or layers are cut into one for each, square where it can be.
        """
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The sizes, for torch's repr."""
        return f"inputs={self.inputs}, hidden={self.hidden}"

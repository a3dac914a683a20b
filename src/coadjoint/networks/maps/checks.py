"""What the products of maps refuse: arguments of the wrong kind or shape."""

from __future__ import annotations

from torch import Tensor

from ...errors import InputError, KindError
from ...sweeps.layout import check_dense
from ...sweeps.torch_internals import autocast_is_on


def check_numbers(name: str, y: object) -> Tensor:
    """`y`, if it is a dense tensor of floating-point numbers; otherwise an error."""
    numbers = check_dense(name, y)
    if not numbers.is_floating_point():
        raise KindError(
            f"{name} must hold floating-point numbers; got {numbers.dtype}: convert it with "
            ".float() or .double()."
        )
    return numbers


def check_type_of(name: str, y: Tensor, whose: str, like: Tensor) -> None:
    """Refuse a `y` of another type or device than `like`; whose: what `like` is."""
    if y.device != like.device:
        raise InputError(
            f"{name} is on {y.device}, {whose} on {like.device}: move one of them with .to()."
        )
    # inside autocast torch converts states and weights itself
    if y.dtype != like.dtype and not autocast_is_on():
        raise KindError(
            f"{name} is {y.dtype}, {whose} {like.dtype}: convert one of them with .to()."
        )


def check_shape_of(name: str, y: object, whose: str, like: Tensor) -> None:
    """Refuse a `y` that has not the shape, type and device of `like`; whose: its name."""
    numbers = check_numbers(name, y)
    if numbers.shape != like.shape:
        raise InputError(
            f"{name} must have the shape of {whose}, {list(like.shape)}; got {list(numbers.shape)}."
        )
    check_type_of(name, numbers, whose, like)


def check_tangent(x: Tensor, v: object) -> None:
    """Refuse a direction v that does not lie in the space of x."""
    check_shape_of("v", v, "x", x)


def check_cotangent(value: Tensor, w: object) -> None:
    """Refuse a w that does not lie in the space of f(x); value: f(x), or a tensor like it."""
    check_shape_of("w", w, "f(x)", value)

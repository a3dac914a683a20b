"""The activation functions of cells by name; a cell also takes any function a formula may use."""

from __future__ import annotations

from typing import Protocol

from ..errors import choose
from .nodes import Value
from .primitives import relu, sigmoid, softplus, tanh


def identity(a: Value) -> Value:
    """The activation of a linear cell."""
    return a


class ActivationFunction(Protocol):
    """A function of one value, over the functions that a formula may use."""

    def __call__(self, a: Value, /) -> Value: ...  # noqa: D102


ACTIVATIONS: dict[str, ActivationFunction] = {
    "tanh": tanh,
    "sigmoid": sigmoid,
    "relu": relu,
    "identity": identity,
    "softplus": softplus,
}
Activation = str | ActivationFunction


def activation_function(activation: Activation) -> ActivationFunction:
    """The function of that name, or the function itself."""
    if callable(activation):
        return activation
    return ACTIVATIONS[choose("activation", activation, ACTIVATIONS)]


def activation_name(activation: object) -> str:
    """The name of an activation, or that of a function; "a function" of one without a name."""
    if isinstance(activation, str):
        return activation
    for name, function in ACTIVATIONS.items():
        if function is activation:
            return name
    return str(getattr(activation, "__name__", "a function"))

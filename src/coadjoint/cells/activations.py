"""The activation functions of cells by name. A cell takes any other function over the primitives of `formula` as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import choose
from .formula import relu, sigmoid, softplus, tanh


def identity(a: Any) -> Any:
    return a


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": tanh,
    "sigmoid": sigmoid,
    "relu": relu,
    "identity": identity,
    "softplus": softplus,
}
Activation = str | Callable[[Any], Any]


def activation_function(activation: Activation) -> Callable[[Any], Any]:
    """The function of that name, or the function itself."""
    if callable(activation):
        return activation
    return ACTIVATIONS[choose("activation", activation, ACTIVATIONS)]

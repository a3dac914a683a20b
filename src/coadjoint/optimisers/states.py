"""States of steppers: the tensors and numbers that a checkpoint keeps, by name."""

from __future__ import annotations

from typing import Any

import torch

from ..sweeps.torch_internals import optimisers_without_compiler

# What a stepper's next step depends on beside the weights: tensors and numbers by name.
State = dict[str, Any]


def flatten_state(values: object, name: str = "") -> State:
    """Nested dicts and lists as one dict with dotted names, without what is None.

    >>> flatten_state({0: {"d": [1.0, 2.0]}})
    {'0.d.0': 1.0, '0.d.1': 2.0}
    """
    if values is None:
        return {}
    if isinstance(values, dict):
        items = list(values.items())
    elif isinstance(values, list):
        items = list(enumerate(values))
    else:
        return {name: values}
    flat: State = {}
    for key, value in items:
        flat |= flatten_state(value, f"{name}.{key}".lstrip("."))
    return flat


def state_of(optimiser: torch.optim.Optimizer) -> dict[int, State]:
    """The state of a torch optimiser, by the numbers of its parameters."""
    with optimisers_without_compiler():
        state: dict[int, State] = optimiser.state_dict()["state"]
    return state


def put_state(optimiser: torch.optim.Optimizer, state: dict[int, State]) -> None:
    """Put a state like that of `state_of` into a torch optimiser."""
    with optimisers_without_compiler():
        optimiser.load_state_dict({**optimiser.state_dict(), "state": state})
    # torch has given every number the type of its parameter. One that had another type before, such
    # as nadam's product of momenta, must keep it: the next steps would be rounded in another way.
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    for i, slot in state.items():
        kept = optimiser.state[parameters[i]]
        for key, value in slot.items():
            if isinstance(value, torch.Tensor) and kept[key].dtype is not value.dtype:
                kept[key] = value.clone().to(kept[key].device)

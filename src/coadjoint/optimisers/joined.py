"""JoinedStep: a torch optimiser that takes its step on all parameters as one array.

torch's optimisers call about ten operations for each parameter. Where these hold a few thousand
numbers, the calls take nearly all of the time. What an optimiser does to an entry depends on that
entry alone, so that a step on one array of all entries has the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..sweeps.torch_internals import (
    bare_step,
    copy_all,
    is_watched,
    optimisers_without_compiler,
    unflatten,
)
from .states import State

# whose operations are entry by entry
JOINABLE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
# what they keep once for each parameter, not for each of its entries
COUNTS = ("step", "mu_product")
MOST_NUMBERS = 2**15  # of all parameters: with more, the calls matter less than the copies


class JoinedStep:
    """The state of a torch optimiser, joined, and the optimiser of the same kind that steps it.

    The optimiser's own state is empty until `separate` writes it back.
    """

    def __init__(
        self, optimiser: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]
    ) -> None:
        """parameters: those of the optimiser, as `can_join` has found them."""
        first = parameters[0]
        total = sum(p.numel() for p in parameters)
        self.optimiser = optimiser
        self.parameters: list[Tensor] = [*parameters]
        self.type = first.dtype
        self.weights = first.new_empty(total)  # a detached copy, filled before each step
        self.gradient = torch.empty_like(self.weights)
        self.weights.grad = self.gradient
        self.weight_parts = list(unflatten(self.weights, self.parameters))
        self.gradient_parts = list(unflatten(self.gradient, self.parameters))
        settings = {key: v for key, v in optimiser.param_groups[0].items() if key != "params"}
        with optimisers_without_compiler():
            kind: Callable[..., torch.optim.Optimizer] = type(optimiser)
            self.inner = kind([self.weights])
        self.step_inner = partial(bare_step(self.inner), self.inner)
        self.inner.param_groups[0].update(settings)
        self.inner.state.clear()
        slots = [optimiser.state[p] for p in self.parameters if optimiser.state.get(p)]
        if slots:
            self.inner.state[self.weights] = join(slots)
        optimiser.state.clear()

    def fits(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these are still the parameters, in the same type, each with a gradient."""
        if len(parameters) != len(self.parameters) or is_watched(self.optimiser):
            return False
        for p, known in zip(parameters, self.parameters, strict=True):
            if p is not known or p.dtype is not self.type or p.grad is None or not p.is_cpu:
                return False
        return True

    def step(self, rate: float) -> None:
        """Move the parameters by their gradients, with step size `rate`."""
        self.inner.param_groups[0]["lr"] = rate
        with torch.no_grad():
            gradients = [p.grad for p in self.parameters if p.grad is not None]  # all: see `fits`
            copy_all(gradients, self.gradient_parts)
            copy_all(self.parameters, self.weight_parts)
            self.step_inner()
            copy_all(self.weight_parts, self.parameters)

    def separate(self) -> None:
        """Write the state back to the optimiser: each parameter has its own again."""
        joined: State = self.inner.state[self.weights]
        if not joined:
            return
        slots: list[State] = [{} for _ in self.parameters]
        for key, value in joined.items():
            if not isinstance(value, Tensor):
                parts = [value] * len(slots)
            elif key in COUNTS:
                parts = [value.clone() for _ in slots]
            else:
                parts = [part.clone() for part in unflatten(value, self.parameters)]
            for slot, part in zip(slots, parts, strict=True):
                slot[key] = part
        self.optimiser.state.update(zip(self.parameters, slots, strict=True))


def join(slots: Sequence[State]) -> State:
    """What an optimiser keeps of all parameters, as of one: `can_join` has seen that it can."""
    joined: State = {}
    for key, value in slots[0].items():
        if not isinstance(value, Tensor):
            joined[key] = value
        elif key in COUNTS:
            joined[key] = value.clone()
        else:
            joined[key] = torch.cat([slot[key].reshape(-1) for slot in slots])
    return joined


def can_join(optimiser: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a step on one array is the optimiser's, and faster.

    parameters: those that are to be moved. They must be the optimiser's, on the CPU, each with a
    gradient, and have taken the same number of steps.
    """
    if type(optimiser) not in JOINABLE or len(optimiser.param_groups) != 1:
        return False
    group = optimiser.param_groups[0]
    keeps_nothing = type(optimiser) is torch.optim.SGD and not group["momentum"]
    if keeps_nothing or is_watched(optimiser) or len(parameters) < 2:
        return False
    if len(group["params"]) != len(parameters):
        return False
    total = 0
    for p, own in zip(parameters, group["params"], strict=True):
        if p is not own or p.grad is None or not p.is_cpu or p.dtype is not parameters[0].dtype:
            return False
        total += p.numel()
    return total <= MOST_NUMBERS and have_same_counts([optimiser.state.get(p) for p in parameters])


def have_same_counts(slots: Sequence[State | None]) -> bool:
    """Whether the optimiser keeps the same of each parameter, in counts to the last bit."""
    first = slots[0] or {}
    for slot in slots:
        if set(slot or {}) != set(first):
            return False
        for key, value in (slot or {}).items():
            if isinstance(value, Tensor) != isinstance(first[key], Tensor):
                return False
            is_count = key in COUNTS or not isinstance(value, Tensor)
            if is_count and not is_same(value, first[key]):
                return False
    return True


def is_same(a: Tensor | float | None, b: Tensor | float | None) -> bool:
    """Whether two counts, numbers or tensors of one number, are equal; None equals None."""
    if a is None or b is None:
        return a is b
    return float(a) == float(b)

"""Optimisers: torch's, by name, and the schedule of their step size.

    co.train(net, task, optimiser=co.optimisers.adam(3e-4, schedule=co.optimisers.cosine()))

An Optimiser is a recipe; `make(parameters)` gives the torch optimiser. A Schedule is a factor on the step size: a function
of the step alone (constant, exponential, linear, cosine), or of what held-out losses have done (plateau).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import InputError, choose

Make = Callable[..., torch.optim.Optimizer]
_SGD = ("momentum", "dampening", "weight_decay")
_ADAM = ("betas", "eps", "weight_decay")

OPTIMISERS: dict[str, tuple[Make, dict[str, Any], tuple[str, ...]]] = {  # name: (class, its defaults here, options)
    "sgd": (torch.optim.SGD, {}, ("weight_decay",)),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, _SGD),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, ("momentum", "weight_decay")),
    "adagrad": (torch.optim.Adagrad, {}, ("lr_decay", "weight_decay", "initial_accumulator_value", "eps")),
    "adadelta": (torch.optim.Adadelta, {}, ("rho", "eps", "weight_decay")),
    "rmsprop": (torch.optim.RMSprop, {}, ("alpha", "eps", "weight_decay", "momentum", "centered")),
    "adam": (torch.optim.Adam, {}, (*_ADAM, "amsgrad")),
    "adamw": (torch.optim.AdamW, {}, (*_ADAM, "amsgrad")),
    "adamax": (torch.optim.Adamax, {}, _ADAM),
    "nadam": (torch.optim.NAdam, {}, (*_ADAM, "momentum_decay")),
    "radam": (torch.optim.RAdam, {}, _ADAM),
}


@dataclass(frozen=True)
class Schedule:
    """factor(progress, step): the step size as a share of lr; progress = step / steps in 0..1, step counts from 0.

    A schedule with a `patience` waits: after so many evaluations without a better held-out loss it multiplies by `decay`.
    """

    name: str
    factor: Callable[[float, int], float]
    decay: float = 1.0
    patience: int | None = None
    warmup: int = 0

    def __call__(self, step: int, steps: int) -> float:
        ramp = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return ramp * self.factor(min(step / max(steps, 1), 1.0), step)


def _share(name: str, value: float, low: float = 0.0) -> float:
    if not low <= value <= 1:
        raise InputError(f"{name} must lie in {low:g}..1; got {value}.")
    return value


def constant(warmup: int = 0) -> Schedule:
    """lr"""
    return Schedule("constant", lambda progress, step: 1.0, warmup=warmup)


def exponential(decay: float = 0.999, warmup: int = 0) -> Schedule:
    """lr decay^step"""
    _share("decay", decay)
    return Schedule("exponential", lambda progress, step: decay**step, warmup=warmup)


def linear(end: float = 0.0, warmup: int = 0) -> Schedule:
    """from lr to end * lr over all steps"""
    _share("end", end)
    return Schedule("linear", lambda progress, step: 1 + (end - 1) * progress, warmup=warmup)


def cosine(end: float = 0.0, warmup: int = 0) -> Schedule:
    """from lr to end * lr over all steps, along half a cosine"""
    _share("end", end)
    return Schedule("cosine", lambda p, step: end + (1 - end) * (1 + math.cos(math.pi * p)) / 2, warmup=warmup)


def plateau(decay: float = 0.5, patience: int = 5, warmup: int = 0) -> Schedule:
    """lr times `decay` whenever `patience` evaluations have brought no better held-out loss"""
    _share("decay", decay)
    if patience < 1:
        raise InputError(f"patience must be at least 1; got {patience}.")
    return Schedule("plateau", lambda progress, step: 1.0, decay, patience, warmup)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "exponential": exponential,
    "linear": linear,
    "cosine": cosine,
    "plateau": plateau,
}


@dataclass(frozen=True)
class Optimiser:
    """A torch optimiser by name, its step size lr, its options and the schedule of lr."""

    name: str
    lr: float
    options: dict[str, Any] = field(default_factory=dict)
    schedule: Schedule = field(default_factory=constant)

    def __post_init__(self) -> None:
        known = OPTIMISERS[choose("optimiser", self.name, OPTIMISERS)][2]
        if not (isinstance(self.lr, int | float) and 0 < self.lr < math.inf):
            raise InputError(f"lr must be a positive finite number; got {self.lr!r}.")
        for option in self.options:
            choose(f"option of optimiser '{self.name}'", option, known)

    def make(self, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        of, defaults, _ = OPTIMISERS[self.name]
        try:
            return of(parameters, lr=self.lr, **{**defaults, **self.options})
        except (ValueError, TypeError) as error:
            raise InputError(f"optimiser '{self.name}': {error}.") from None


def optimiser(name: str, lr: float = 1e-3, schedule: Schedule | None = None, **options: Any) -> Optimiser:
    """An optimiser by its name in OPTIMISERS; options are torch's."""
    return Optimiser(name, lr, options, schedule or constant())


sgd = functools.partial(optimiser, "sgd")
momentum = functools.partial(optimiser, "momentum")
nesterov = functools.partial(optimiser, "nesterov")
adagrad = functools.partial(optimiser, "adagrad")
rmsprop = functools.partial(optimiser, "rmsprop")
adam = functools.partial(optimiser, "adam")
adamw = functools.partial(optimiser, "adamw")

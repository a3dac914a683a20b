"""Optimisers: torch's and our own by name, the schedule of their step size, and what takes a step with them.

    co.train(net, task, optimiser=co.optimisers.adam(3e-4, schedule=co.optimisers.cosine()))
    co.train(net, task, optimiser=co.optimisers.sgd(1e-2, direction="temporal", rule=co.optimisers.Galvan(1.0)))
    co.train(net, task, optimiser=co.optimisers.hessian_free(structural=0.1), batch=1000)

An Optimiser is a recipe. A Schedule is a factor on the step size: a function of the step alone (constant, exponential,
inverse-time, linear, cosine), or of what held-out losses have done (plateau). A Stepper moves the weights from a Point, of
which it may ask the objective's value, gradient and curvature around it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..cells.transport import Portable, remembered
from ..errors import InputError, brief, real, whole


@dataclass(frozen=True)
class Schedule(Portable):
    """factor(progress, step): the step size as a share of lr; progress = step / steps in 0..1, step counts from 0.

    A schedule with a `patience` waits: after so many evaluations without a better held-out loss it multiplies by `decay`.
    """

    name: str
    factor: Callable[[float, int], float]
    decay: float = 1.0
    patience: int | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.warmup, int) or self.warmup < 0:
            raise InputError(f"warmup is a number of steps, at least 0; got {brief(self.warmup)}.")

    @property
    def _function(self) -> Callable[..., Any]:
        return self.factor

    def __call__(self, step: int, steps: int) -> float:
        ramp = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return ramp * self.factor(min(step / max(steps, 1), 1.0), step)


def _share(name: str, value: float, low: float = 0.0) -> float:
    if not isinstance(value, int | float) or not low <= value <= 1:
        raise InputError(f"{name} must lie in {low:g}..1; got {brief(value)}.")
    return value


@remembered
def constant(warmup: int = 0) -> Schedule:
    """lr"""
    return Schedule("constant", lambda progress, step: 1.0, warmup=warmup)


@remembered
def exponential(decay: float = 0.999, warmup: int = 0) -> Schedule:
    """lr decay^step"""
    _share("decay", decay)
    return Schedule("exponential", lambda progress, step: decay**step, warmup=warmup)


@remembered
def inverse_time(decay: float = 1e-3, warmup: int = 0) -> Schedule:
    """lr / (1 + decay step)"""
    real("decay", decay, 0)
    return Schedule("inverse-time", lambda progress, step: 1 / (1 + decay * step), warmup=warmup)


@remembered
def linear(end: float = 0.0, warmup: int = 0) -> Schedule:
    """from lr to end * lr over all steps"""
    _share("end", end)
    return Schedule("linear", lambda progress, step: 1 + (end - 1) * progress, warmup=warmup)


@remembered
def cosine(end: float = 0.0, warmup: int = 0) -> Schedule:
    """from lr to end * lr over all steps, along half a cosine"""
    _share("end", end)
    return Schedule("cosine", lambda p, step: end + (1 - end) * (1 + math.cos(math.pi * p)) / 2, warmup=warmup)


@remembered
def plateau(decay: float = 0.5, patience: int = 5, warmup: int = 0) -> Schedule:
    """lr times `decay` whenever `patience` evaluations have brought no better held-out loss"""
    _share("decay", decay)
    whole("patience", patience)
    return Schedule("plateau", lambda progress, step: 1.0, decay, patience, warmup)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "exponential": exponential,
    "inverse-time": inverse_time,
    "linear": linear,
    "cosine": cosine,
    "plateau": plateau,
}

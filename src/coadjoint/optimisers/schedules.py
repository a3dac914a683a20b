"""Schedules of the step size: a factor on lr.

It is a function of the step alone (constant, exponential, inverse-time, linear, cosine), or of what held-out losses
have done (plateau).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..cells.transport import Portable, remembers_origin
from ..errors import real, whole_number
from ..objectives import schedules


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
        whole_number("warmup", self.warmup, 0)

    @property
    def _function(self) -> Callable[..., Any]:
        return self.factor

    def __call__(self, step: int, steps: int) -> float:
        ramp = min(1.0, (step + 1) / self.warmup) if self.warmup else 1.0
        return ramp * self.factor(min(step / max(steps, 1), 1.0), step)


@remembers_origin
def constant(warmup: int = 0) -> Schedule:
    """lr"""
    return Schedule("constant", lambda progress, step: 1.0, warmup=warmup)


@remembers_origin
def exponential(decay: float = 0.999, warmup: int = 0) -> Schedule:
    """lr decay^step"""
    real("decay", decay, 0, 1)
    factor = schedules.exponential(1.0, decay)
    return Schedule("exponential", lambda progress, step: factor(step), warmup=warmup)


@remembers_origin
def inverse_time(decay: float = 1e-3, warmup: int = 0) -> Schedule:
    """lr / (1 + decay step)"""
    real("decay", decay, 0)
    factor = schedules.inverse_time(1.0, decay)
    return Schedule("inverse-time", lambda progress, step: factor(step), warmup=warmup)


@remembers_origin
def linear(end: float = 0.0, warmup: int = 0) -> Schedule:
    """from lr to end * lr over all steps"""
    real("end", end, 0, 1)
    factor = schedules.linear(1.0, end, 1)
    return Schedule("linear", lambda progress, step: factor(progress), warmup=warmup)


@remembers_origin
def cosine(end: float = 0.0, warmup: int = 0) -> Schedule:
    """from lr to end * lr over all steps, along half a cosine"""
    real("end", end, 0, 1)
    return Schedule(
        "cosine", lambda p, step: end + (1 - end) * (1 + math.cos(math.pi * p)) / 2, warmup=warmup
    )


@remembers_origin
def plateau(decay: float = 0.5, patience: int = 5, warmup: int = 0) -> Schedule:
    """lr times `decay` whenever `patience` evaluations have brought no better held-out loss"""
    real("decay", decay, 0, 1)
    whole_number("patience", patience)
    return Schedule("plateau", lambda progress, step: 1.0, decay, patience, warmup)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "exponential": exponential,
    "inverse-time": inverse_time,
    "linear": linear,
    "cosine": cosine,
    "plateau": plateau,
}

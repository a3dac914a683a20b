"""Schedules of the step size: a factor on lr.

Most are a function of the step alone; plateau also depends on the held-out losses so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..cells.transport import Portable, remembers_origin
from ..errors import real, whole_number
from ..objectives import schedules


@dataclass(frozen=True)
class Schedule(Portable):
    """factor(progress, step): the step size as a share of lr.

    progress = step / steps in 0..1; step counts from 0. With `warmup` steps, the share rises
    linearly to that of the factor. A schedule with a `patience` is multiplied by `decay` after
    that many validations without a better held-out loss.
    """

    name: str
    factor: Callable[[float, int], float]
    decay: float = 1.0
    patience: int | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        whole_number("warmup", self.warmup, 0)

    @property
    def _function(self) -> Callable[[float, int], float]:
        """The function that the schedule was made of, by which a Portable is stored."""
        return self.factor

    def __call__(self, step: int, steps: int) -> float:
        """The share of lr at a step of a run of `steps` steps."""
        progress = min(step / max(steps, 1), 1.0)
        ramp = 1.0
        if self.warmup:
            ramp = min(1.0, (step + 1) / self.warmup)
        return ramp * self.factor(progress, step)


@remembers_origin
def constant(warmup: int = 0) -> Schedule:
    """The share is 1.

    >>> constant(warmup=4)(0, 100)
    0.25
    """
    return Schedule("constant", lambda progress, step: 1.0, warmup=warmup)


@remembers_origin
def exponential(decay: float = 0.999, warmup: int = 0) -> Schedule:
    """The share is decay^step.

    >>> exponential(decay=0.5)(2, 100)
    0.25
    """
    real("decay", decay, 0, 1)
    factor = schedules.exponential(1.0, decay)
    return Schedule("exponential", lambda progress, step: factor(step), warmup=warmup)


@remembers_origin
def inverse_time(decay: float = 1e-3, warmup: int = 0) -> Schedule:
    """The share is 1 / (1 + decay step).

    >>> inverse_time(decay=1.0)(3, 100)
    0.25
    """
    real("decay", decay, 0)
    factor = schedules.inverse_time(1.0, decay)
    return Schedule("inverse-time", lambda progress, step: factor(step), warmup=warmup)


@remembers_origin
def linear(end: float = 0.0, warmup: int = 0) -> Schedule:
    """The share falls from 1 to `end` along a line, over all steps.

    >>> linear(end=0.5)(50, 100)
    0.75
    """
    real("end", end, 0, 1)
    factor = schedules.linear(1.0, end, 1)  # over 1: it is a function of the progress 0..1
    return Schedule("linear", lambda progress, step: factor(progress), warmup=warmup)


@remembers_origin
def cosine(end: float = 0.0, warmup: int = 0) -> Schedule:
    """The share falls from 1 to `end` along half a cosine, over all steps.

    >>> round(cosine()(50, 100), 12)
    0.5
    """
    real("end", end, 0, 1)
    return Schedule(
        "cosine", lambda p, step: end + (1 - end) * (1 + math.cos(math.pi * p)) / 2, warmup=warmup
    )


@remembers_origin
def plateau(decay: float = 0.5, patience: int = 5, warmup: int = 0) -> Schedule:
    """The share is multiplied by `decay` after `patience` validations without a better loss.

    The schedule itself is constant: training, which knows the losses, multiplies by `decay`.

    >>> plateau(decay=0.1).patience
    5
    """
    real("decay", decay, 0, 1)
    whole_number("patience", patience)
    return Schedule("plateau", lambda progress, step: 1.0, decay, patience, warmup)


@remembers_origin
def pretraining(share: float, steps: int, then: Schedule | None = None) -> Schedule:
    """The share is `share` for the first `steps` steps, then that of `then` (1 if not given).

    It goes with the `pretrain` of co.Penalised, whose first steps minimise the penalty alone and
    may want another step size. `then` counts all steps, those of pretraining too; its warmup is
    that of the whole.

    >>> schedule = pretraining(3.0, 300)
    >>> schedule(299, 2000), schedule(300, 2000)
    (3.0, 1.0)
    """
    real("share", share, 0, above=True)
    whole_number("steps", steps)
    after = constant() if then is None else then

    def factor(progress: float, step: int) -> float:
        return share if step < steps else after.factor(progress, step)

    return Schedule(after.name, factor, after.decay, after.patience, after.warmup)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": constant,
    "exponential": exponential,
    "inverse-time": inverse_time,
    "linear": linear,
    "cosine": cosine,
    "plateau": plateau,
}

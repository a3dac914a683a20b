"""Schedules: a number as a function of the step.

The number is the weight rho of a penalty, or a factor on an optimiser's step size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..errors import real, whole_number

Schedule = Callable[[float], float]


def inverse_time(start: float, rate: float = 1.0) -> Schedule:
    """The function step -> start / (1 + rate step).

    A fixed weight rho hurts on natural data; Pascanu et al. (2013) used 1/t.

    Example:
        >>> from coadjoint import penalties
        >>> penalties.inverse_time(2.0)(3)
        0.5
    """
    real("start", start, 0)
    real("rate", rate, 0)
    return functools.partial(_inverse_time, start, rate)


def exponential(start: float, decay: float) -> Schedule:
    """The function step -> start decay^step.

    Example:
        >>> from coadjoint import penalties
        >>> penalties.exponential(2.0, 0.5)(2)
        0.5
    """
    real("start", start, 0)
    real("decay", decay, 0)
    return functools.partial(_exponential, start, decay)


def linear(start: float, end: float, steps: int) -> Schedule:
    """The function of the step that goes from start to end over `steps` steps, then stays.

    Example:
        >>> from coadjoint import penalties
        >>> penalties.linear(0.0, 1.0, 4)(1)
        0.25
    """
    real("start", start, 0)
    real("end", end, 0)
    whole_number("steps", steps)
    return functools.partial(_linear, start, end, steps)


def pretrain(start: float, steps: int) -> Schedule:
    """The function of the step that is start for the first `steps` steps, then 0.

    As the weight of a penalty it prepares the weights and then leaves the loss alone:
    `co.Penalised("isometry", co.penalties.pretrain(1.0, 300), pretrain=300)`.

    Example:
        >>> from coadjoint import penalties
        >>> weight = penalties.pretrain(1.0, 300)
        >>> weight(299), weight(300)
        (1.0, 0.0)
    """
    real("start", start, 0)
    whole_number("steps", steps)
    return functools.partial(_pretrain, start, steps)


# Functions of a module can be pickled, unlike functions inside a function.
def _inverse_time(start: float, rate: float, step: float) -> float:
    """The value of `inverse_time(start, rate)` at a step."""
    return start / (1 + rate * step)


def _exponential(start: float, decay: float, step: float) -> float:
    """The value of `exponential(start, decay)` at a step."""
    factor: float = decay**step
    return start * factor


def _pretrain(start: float, steps: int, step: float) -> float:
    """The value of `pretrain(start, steps)` at a step."""
    return float(start) if step < steps else 0.0


def _linear(start: float, end: float, steps: int, step: float) -> float:
    """The value of `linear(start, end, steps)` at a step."""
    return start + (end - start) * min(step / steps, 1.0)

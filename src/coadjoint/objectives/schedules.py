"""Schedules: a number as a function of the step; the weight rho of a penalty, or a factor on an optimiser's step size."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ..errors import real, whole_number

Schedule = Callable[[float], float]


def inverse_time(start: float, rate: float = 1.0) -> Schedule:
    """start / (1 + rate step); a fixed weight rho hurts on natural data, Pascanu et al. (2013) used 1/t"""
    real("start", start, 0)
    real("rate", rate, 0)
    return functools.partial(_inverse_time, start, rate)


def exponential(start: float, decay: float) -> Schedule:
    """start decay^step"""
    real("start", start, 0)
    real("decay", decay, 0)
    return functools.partial(_exponential, start, decay)


def linear(start: float, end: float, steps: int) -> Schedule:
    """from start to end over `steps` steps, then end"""
    real("start", start, 0)
    real("end", end, 0)
    whole_number("steps", steps)
    return functools.partial(_linear, start, end, steps)


# functions of a module, unlike those inside a function, can be pickled
def _inverse_time(start: float, rate: float, step: float) -> float:
    return start / (1 + rate * step)


def _exponential(start: float, decay: float, step: float) -> float:
    return start * decay**step


def _linear(start: float, end: float, steps: int, step: float) -> float:
    return start + (end - start) * min(step / steps, 1.0)

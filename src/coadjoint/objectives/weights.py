"""Penalties: G(costates), one value for each sample.

Every penalty states its formula, whether it sums or averages, and its range of t. Norms are Euclidean over all slots of
the state, T is the sample's own length, and lam_0, the costate of the initial state, is left out unless said otherwise.
Logarithmic ones leave out costates that are exactly zero (count them with `costates.zeros()`).

Derivatives where something is exactly zero: squares of norms have their true ones, first and second. A norm that is not
squared has a kink there (`variance`, `end-points`, `share-variance`, `norm-stabiliser` beside a state that is not zero),
and so has |lam_i| (`variance-l1`): its first and second derivatives are taken as 0. What is left out has none.

Any callable that takes Costates and returns [B] values is a penalty; those here can also be added and multiplied by
numbers: `0.1 * log_ratio + variance`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InputError, real, whole

Schedule = Callable[[int], float]


def inverse_time(start: float, rate: float = 1.0) -> Schedule:
    """rho(step) = start / (1 + rate step); a fixed weight hurts on natural data, Pascanu et al. (2013) used 1/t"""
    real("start", start, 0)
    real("rate", rate, 0)
    return functools.partial(_inverse_time, start, rate)


def exponential(start: float, decay: float) -> Schedule:
    """rho(step) = start decay^step"""
    real("start", start, 0)
    real("decay", decay, 0)
    return functools.partial(_exponential, start, decay)


def linear(start: float, end: float, steps: int) -> Schedule:
    """rho(step) from start to end over `steps` steps, then end"""
    real("start", start, 0)
    real("end", end, 0)
    whole("steps", steps)
    return functools.partial(_linear, start, end, steps)


def _inverse_time(start: float, rate: float, step: int) -> float:
    return start / (1 + rate * step)


def _exponential(start: float, decay: float, step: int) -> float:
    return start * decay**step


def _linear(start: float, end: float, steps: int, step: int) -> float:
    return start + (end - start) * min(step / steps, 1.0)


@dataclass(frozen=True)
class Steered:
    """A penalty's weight that is turned until costates decay as little as is asked for:

    rho <- rho exp(gain clip(log(decay / target), -1, 1)),  within [low, high], after each step

    start   the weight of the first step
    target  the log-decay per step that is wanted: 0.01 lets a costate fall to 1/e, or grow to e, over 100 steps
    decay   what is measured: the mean over samples of `log_decay`; the weight stays where there is none
    """

    start: float
    target: float
    gain: float = 0.01
    low: float = 1e-4
    high: float = 1e4

    def __post_init__(self) -> None:
        for name in ("start", "target", "gain", "low", "high"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
                raise InputError(f"{name} of a steered weight must be a positive number; got {value!r}.")
        if not self.low <= self.start <= self.high:
            raise InputError(
                f"a steered weight starts within low = {self.low:g} and high = {self.high:g}; got start = {self.start:g}."
            )

    def next(self, rho: float, decay: float) -> float:
        """The weight after a step at which this decay was measured."""
        if not math.isfinite(decay):
            return rho
        off = math.log(decay / self.target) if decay > 0 else -1.0
        return min(max(rho * math.exp(self.gain * min(max(off, -1.0), 1.0)), self.low), self.high)

"""A penalty's weight rho that is steered by the decay of costates, instead of by a schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import InputError, real


@dataclass(frozen=True)
class Steered:
    """A penalty's weight that is adjusted until costates decay at the target rate.

    rho <- rho exp(gain clip(log(decay / target), -1, 1)),  within [low, high], after each step

    start   the weight of the first step
    target  the log-decay per step to aim for: 0.01 lets a costate fall to 1/e, or grow to e, over
            100 steps
    gain    how much the weight changes in one step, at most

    `decay` is measured at each step: the mean over samples of `log_decay`. Where it is not defined
    the weight stays as it is.

    Example:
        >>> from coadjoint import penalties
        >>> weight = penalties.Steered(start=1.0, target=0.01)
        >>> weight.next(1.0, decay=0.01)
        1.0
    """

    start: float
    target: float
    gain: float = 0.01
    low: float = 1e-4
    high: float = 1e4

    def __post_init__(self) -> None:
        for name in ("start", "target", "gain", "low", "high"):
            real(f"{name} of a steered weight", getattr(self, name), 0, above=True)
        if not self.low <= self.start <= self.high:
            raise InputError(
                f"a steered weight starts within low = {self.low:g} and high = {self.high:g}; "
                f"got start = {self.start:g}."
            )

    def next(self, rho: float, decay: float) -> float:
        """The weight after a step with weight rho, at which this decay was measured.

        rho exp(gain clip(log(decay / target), -1, 1)), within [low, high]
        """
        if not math.isfinite(decay):  # too few costates to measure it
            return rho
        # The logarithm of 0 would be clipped to -1.
        log_excess = math.log(decay / self.target) if decay > 0 else -1.0
        clipped = min(max(log_excess, -1.0), 1.0)
        return min(max(rho * math.exp(self.gain * clipped), self.low), self.high)

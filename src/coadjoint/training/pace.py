"""Pace: how fast a run is, how much of it is done, and how long the rest will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

ENDLESS = 2**31 - 1  # steps of a run that only a budget ends
SHORTEST = 1e-9  # seconds: a coarse clock may say that nothing took any time


class Budget(NamedTuple):
    """An amount that a run may use; a run ends once all its budgets are spent.

    used: returns how much it has used so far, also before it was resumed. is_time: whether the
    amount is in seconds, so that what is left of it is known without looking at the steps.
    """

    limit: float
    used: Callable[[], float]
    is_time: bool = False

    @property
    def left(self) -> float:
        """What is left of it."""
        return max(0.0, self.limit - self.used())

    @property
    def share(self) -> float:
        """The share of it that was used."""
        return min(1.0, self.used() / self.limit)


LimitAndUsed = tuple[float | None, Callable[[], float]]  # None: no limit


def budgets_given(gradients: LimitAndUsed, seconds: LimitAndUsed) -> list[Budget]:
    """The budgets of gradients and of seconds that have a limit."""
    budgets = []
    for (limit, used), is_time in ((gradients, False), (seconds, True)):
        if limit is not None:
            budgets.append(Budget(limit, used, is_time))
    return budgets


class Pace:
    """Takes the time of steps and of validations apart, from the end of the first step on.

    What was before that, such as the steps of a run that was resumed and the compilation of
    kernels, says nothing about the steps to come. So little is known after few steps, but it is
    not wrong: a validation soon after the beginning does not count as a part of the steps.
    """

    def __init__(self, steps: int | None, every: int | None, budgets: Sequence[Budget]) -> None:
        """steps: of the run, None without a limit. every: the steps between two validations."""
        self.steps = None if steps == ENDLESS else steps
        self.every = every
        self.budgets = budgets
        self.first_step: int | None = None
        self.last_step = 0
        self.last_time = 0.0  # of the last step or validation
        self.stepping = 0.0  # seconds
        self.validating = 0.0
        self.validations = 0
        self.used_before: list[float] = []  # of the budgets, at the end of the first step

    def step(self, step: int) -> None:
        """Note that a step has ended."""
        seconds = self._lap()
        if self.first_step is None:
            self.first_step = step
            self.used_before = [budget.used() for budget in self.budgets]
        else:
            self.stepping += seconds
        self.last_step = step

    def validation(self) -> None:
        """Note that a validation has ended."""
        seconds = self._lap()
        if self.first_step is not None:
            self.validating += seconds
            self.validations += 1

    def _lap(self) -> float:
        """Seconds since the last call."""
        before = self.last_time
        self.last_time = time.monotonic()
        return self.last_time - before

    @property
    def rate(self) -> float | None:
        """Steps in a second of stepping; None as long as it is not known."""
        if self.first_step is None or self.last_step <= self.first_step:
            return None
        return (self.last_step - self.first_step) / max(self.stepping, SHORTEST)

    def seconds_left(self, step: int) -> float | None:
        """How long the rest of the run takes; None if that is not known, or nothing is left.

        A run ends after its last step, or once all its budgets are spent.
        """
        ends = []
        if self.steps is not None:
            ends.append(self._time_of(self.steps - step))
        if self.budgets:
            ends.append(self._budget_left())
        known = [seconds for seconds in ends if seconds is not None]
        least = min(known, default=0.0)
        return least if least > 0 else None

    def _time_of(self, steps: float) -> float | None:
        """How long steps and the validations between them take; None if it is not known."""
        rate = self.rate
        if rate is None:
            return None
        seconds = steps / rate
        if self.every and self.validations:
            seconds += steps / self.every * self.validating / self.validations
        return seconds

    def _budget_left(self) -> float | None:
        """How long it takes until all budgets are spent; None if that is not known."""
        longest = 0.0
        for k, budget in enumerate(self.budgets):
            seconds: float | None = budget.left
            if not budget.is_time:
                seconds = self._time_of(self._steps_of(k))
            if seconds is None:
                return None
            longest = max(longest, seconds)
        return longest

    def _steps_of(self, k: int) -> float:
        """How many steps are left of the budget k, by what each has used; 0 if it is not known."""
        if self.first_step is None or self.last_step <= self.first_step:
            return 0.0
        used = self.budgets[k].used() - self.used_before[k]
        if used <= 0:
            return 0.0
        return self.budgets[k].left * (self.last_step - self.first_step) / used

    def part(self, step: int, parts: int) -> int | None:
        """In which of so many equal parts of the run a step is; None if its end is not known."""
        found = []
        if self.steps is not None:
            found.append(step * parts // self.steps)
        if self.budgets:
            found.append(int(min(budget.share for budget in self.budgets) * parts))
        return max(found, default=None)

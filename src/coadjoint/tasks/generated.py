"""Generated: sequences without end, drawn anew for each batch.

A task is one formula, `draw(rng, L) -> u, y`, for sequences of lengths L [n]; `Generated` does the
rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, choose, whole_number
from ..objectives.batch import Batch
from .task import Goal, Scores, Task, count_right, rng


def one_hot(s: np.ndarray, k: int) -> np.ndarray:
    """Return symbols s in 0..k-1 [T, n] as unit vectors [T, n, k]."""
    u = np.zeros(s.size * k, np.float32)
    place = np.arange(0, u.size, k)
    place += s.ravel()
    u[place] = 1
    return u.reshape(*s.shape, k)


def is_predicted(a: Tensor, y: Tensor) -> Tensor:
    """Tell where class y [...] has the largest entry of a [..., k]; where a holds NaN, nowhere."""
    return (a.argmax(-1) == y) & ~a.isnan().any(-1)


def as_pair(what: str, value: object, names: str) -> tuple[object, object]:
    """Return both entries of a pair; refuse anything else. what, names: for the message."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise InputError(f"{what} must be a pair ({names}); got {value!r}.")
    return value[0], value[1]


@dataclass(eq=False, kw_only=True)
class Generated(Task):
    """Sequences without end, drawn from (seed, step) in training and (seed, draw) in held-out sets.

    length      L, or (low, high): one length for each batch, uniform, both ends included
    ragged      whether each sequence of a batch draws its own length
    curriculum  (start, steps): in training, the upper length grows linearly from `start` at step 0
                to its full value at step `steps`
    """

    length: int | tuple[int, int] = field(default=100, kw_only=False)
    ragged: bool = False
    curriculum: tuple[int, int] | None = None

    shortest = 10  # the least length
    extra = 0  # steps of a sequence beyond its length
    goal = Goal("right", 1.0)
    metric = "right"
    lower = False

    def __post_init__(self) -> None:
        what = f"the length of task '{self.name}'"
        if isinstance(self.length, tuple | list):
            bounds = as_pair(what, self.length, "low, high")
            low = whole_number(what, bounds[0], self.shortest)
            high = whole_number(what, bounds[1], self.shortest)
            self.length = (low, high)
        else:
            low, high = self.stretch(whole_number(what, self.length, self.shortest))
        self.span = (low, high)
        if low > high:
            raise InputError(
                f"{what} must be a range (low, high) with low <= high; got {self.length!r}."
            )
        if self.ragged and low == high:
            raise InputError(
                f"ragged sequences need a range of lengths, length=(low, high); all are {high}."
            )
        if self.curriculum is not None:
            first, count = as_pair("curriculum", self.curriculum, "start, steps")
            start_text = f"the curriculum's start for task '{self.name}'"
            start = whole_number(start_text, first, self.shortest)
            if start > high:
                raise InputError(
                    f"the curriculum starts at length {start}; "
                    f"expected at most {high}, the longest."
                )
            self.curriculum = (start, whole_number("the curriculum's number of steps", count, 1))

    def stretch(self, L: int) -> tuple[int, int]:
        """Return the least and largest length that a single number `length=L` stands for."""
        return L, L

    def draw(self, rng: np.random.Generator, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw n sequences of lengths L [n]: u [T, n, inputs] and y [n] or [T, n].

        T = max L + extra. Steps after the end of a sequence are ignored.
        """
        raise NotImplementedError

    def baseline(self) -> dict[str, float]:
        """Return the metrics of the best answer without memory."""
        raise NotImplementedError

    def reach(self, step: int) -> tuple[int, int]:
        """Return the shortest and longest length in training batch `step`."""
        low, high = self.span
        if self.curriculum:
            start, steps = self.curriculum
            high = start + (high - start) * min(step, steps) // steps
        return min(low, high), high

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Draw training batch number `step`, of `size` sequences."""
        whole_number("step", step, 0, 2**62)
        return self._draw(rng(seed, "train", step), size, *self.reach(step))

    def held_out(
        self, split: str, seed: int, draw: int | str = 0, n: int = 1000
    ) -> Iterator[Batch]:
        """Draw `n` new sequences in batches."""
        choose("split", split, self.splits)
        whole_number("n", n, 1)
        # Where each batch has one length, small batches show many lengths. k: the batch's number.
        one_length_each = not self.ragged and self.span[0] != self.span[1]
        size = 100 if one_length_each else 1000
        for k, done in enumerate(range(0, n, size)):
            yield self._draw(rng(seed, split, draw, k), min(size, n - done), *self.span)

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Count the sequences whose class is predicted."""
        return {"right": count_right(is_predicted(a, batch.y))}

    def _draw(self, rng: np.random.Generator, n: int, low: int, high: int) -> Batch:
        """Draw a batch of n sequences with lengths in low..high, zero after their ends."""
        n = whole_number("the number of sequences of a batch", n, 1)
        L = rng.integers(low, high + 1, n if self.ragged else 1)
        u, y = self.draw(rng, np.broadcast_to(L, n))
        lengths = None
        if self.ragged:
            ends = L + self.extra
            beyond = np.arange(len(u))[:, None] >= ends
            u[beyond] = 0
            if self.readout == "every":
                y[beyond] = 0
            lengths = torch.from_numpy(ends)
        return Batch(torch.from_numpy(u), torch.from_numpy(y), lengths, reduce=self.reduce)

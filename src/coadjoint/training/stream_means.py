"""Means over a stream: over all its steps and over the latest, in memory that does not grow."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import KindError, StorageError, brief
from ..gradients import restoring
from .json_types import JsonObject


def check_scores(scores: object) -> dict[str, float]:
    """What a score function returned, if it is a dict of numbers; anything else is refused."""
    if isinstance(scores, dict) and all(isinstance(v, int | float) for v in scores.values()):
        return scores
    raise KindError(
        f"score must return numbers by name, {{'error': 0.1}}; it returned {brief(scores)}."
    )


class RunningMeans:
    """Means over all steps, over those since the last report, and over the last `window` steps.

    Kept as sums and a ring of the last rows, so that memory does not grow.
    """

    def __init__(self, window: int) -> None:
        """Begin without figures: `add` sets their names and number at the first step."""
        self.window = window
        self.names: list[str] = []
        self.t = 0  # steps so far
        self.total = np.zeros(0)  # the sum of each figure over these steps
        self.ring = np.zeros((window, 0))  # the figures of step t in row t % window
        # `t` and `total` at the time of the last report
        self.marked_step = 0
        self.marked_total = np.zeros(0)

    def add(self, figures: dict[str, float]) -> None:
        """Add the figures of one step, such as the loss; their names must stay the same."""
        if not self.names:
            self.names = list(figures)
            self.total = np.zeros(len(figures))
            self.marked_total = np.zeros(len(figures))
            self.ring = np.zeros((self.window, len(figures)))
        if list(figures) != self.names:
            raise StorageError(
                f"this run records {', '.join(self.names)}; this step has {', '.join(figures)}. "
                "Use the same loss and score throughout."
            )
        row = np.fromiter(figures.values(), float, len(figures))
        self.ring[self.t % self.window] = row
        self.total = self.total + row
        self.t += 1

    def by_name(self, values: np.ndarray) -> dict[str, float]:
        """One value for each figure, as {name: value}."""
        return dict(zip(self.names, values.tolist(), strict=True))

    @property
    def so_far(self) -> dict[str, float]:
        """Means over all steps."""
        return self.by_name(self.total / max(self.t, 1))

    @property
    def recent(self) -> dict[str, float]:
        """Means over the last `window` steps."""
        if self.t == 0:
            return {}
        return self.by_name(self.ring[: min(self.t, self.window)].mean(0))

    def since_last_call(self) -> dict[str, float]:
        """Means over the steps since the last call of this method."""
        steps = max(self.t - self.marked_step, 1)  # 1, not 0: the means of no steps are then 0
        means = (self.total - self.marked_total) / steps
        self.marked_total = self.total
        self.marked_step = self.t
        return self.by_name(means)

    def state(self) -> tuple[dict[str, Tensor], JsonObject]:
        """Everything later means depend on: tensors, and the rest for JSON.

        "marked" and "looked" belong to the last call of `since_last_call`.
        """
        arrays = {"total": self.total, "marked": self.marked_total, "ring": self.ring}
        rest = {"names": self.names, "t": self.t, "looked": self.marked_step, "window": self.window}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}, rest

    def complaint(self, tensors: dict[str, Tensor], rest: JsonObject) -> str | None:
        """What is wrong with a state (tensors, rest) read from a file; None if nothing is.

        The window of the file counts here: `restore` refuses one that is not this run's.
        """
        count = len(rest["names"])
        shapes = {"total": (count,), "marked": (count,), "ring": (rest["window"], count)}
        expected = {}
        for name, shape in shapes.items():
            # on the meta device, because a file may claim any size
            expected[name] = torch.empty(shape, dtype=torch.float64, device="meta")
        return restoring.misfit(expected, tensors)

    def restore(self, tensors: dict[str, Tensor], rest: JsonObject) -> None:
        """Continue from a state as `state` returned it."""
        self.total = tensors["total"].numpy()
        self.marked_total = tensors["marked"].numpy()
        self.ring = tensors["ring"].numpy()
        self.names = rest["names"]
        self.t = rest["t"]
        self.marked_step = rest["looked"]
        if len(self.ring) != self.window:
            raise StorageError(
                f"this run has window={len(self.ring)}; got window={self.window}. "
                "Start a new run to change it."
            )

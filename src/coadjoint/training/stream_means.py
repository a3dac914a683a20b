"""Figures of a stream: means over all steps and over the latest, in memory that does not grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import KindError, StorageError, brief
from ..gradients import restoring


def check_scores(found: Any) -> dict[str, float]:
    """What a score function returned."""
    if not isinstance(found, dict) or not all(
        isinstance(value, int | float) for value in found.values()
    ):
        raise KindError(
            f"score must return figures by name, {{'error': 0.1}}; it returned {brief(found)}."
        )
    return found


class RunningMeans:
    """Means over all steps, over those since the last look, and over the last `window`: sums and a ring, nothing that grows."""

    def __init__(self, window: int) -> None:
        self.window, self.names, self.t, self.marked_step = window, list[str](), 0, 0
        self.total = self.marked_total = np.zeros(0)
        self.ring = np.zeros((window, 0))

    def add(self, figures: dict[str, float]) -> None:
        if not self.names:
            self.names = list(figures)
            self.total, self.marked_total = np.zeros(len(figures)), np.zeros(len(figures))
            self.ring = np.zeros((self.window, len(figures)))
        if list(figures) != self.names:
            raise StorageError(
                f"this run has the figures {', '.join(self.names)}; now there are {', '.join(figures)}."
            )
        row = np.fromiter(figures.values(), float, len(figures))
        self.ring[self.t % self.window] = row
        self.total = self.total + row
        self.t += 1

    def by_name(self, values: np.ndarray) -> dict[str, float]:
        return dict(zip(self.names, values.tolist(), strict=True))

    @property
    def so_far(self) -> dict[str, float]:
        return self.by_name(self.total / max(self.t, 1))

    @property
    def recent(self) -> dict[str, float]:
        return self.by_name(self.ring[: min(self.t, self.window)].mean(0)) if self.t else {}

    def since_last_call(self) -> dict[str, float]:
        """The means since the last time this was asked."""
        found = (self.total - self.marked_total) / max(self.t - self.marked_step, 1)
        self.marked_total, self.marked_step = self.total, self.t
        return self.by_name(found)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays = {"total": self.total, "marked": self.marked_total, "ring": self.ring}
        rest = {"names": self.names, "t": self.t, "looked": self.marked_step, "window": self.window}
        return {name: torch.from_numpy(y) for name, y in arrays.items()}, rest

    def complaint(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> str | None:
        """What is wrong with arrays that were read from a file; None if they can be restored."""
        many, window = len(rest["names"]), rest["window"]
        shapes = {"total": (many,), "marked": (many,), "ring": (window, many)}
        expected = {
            name: torch.empty(s, dtype=torch.float64, device="meta") for name, s in shapes.items()
        }
        return restoring.misfit(expected, tensors)

    def restore(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        self.total, self.marked_total, self.ring = (
            tensors[name].numpy() for name in ("total", "marked", "ring")
        )
        self.names, self.t, self.marked_step = rest["names"], rest["t"], rest["looked"]
        if len(self.ring) != self.window:
            raise StorageError(
                f"this run has window={len(self.ring)}; got {self.window}. Start a new run for another."
            )

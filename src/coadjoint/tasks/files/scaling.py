"""Standardising a stream by the rows so far: z_t = (x_t - mean_{t-1}) / std_{t-1}."""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np


class ScaleState(TypedDict):
    """A RunningScale as a checkpoint holds it."""

    t: int
    mean: list[float]
    M: list[float]


class RunningScale:
    """Mean and variance of the rows so far, [C].

    mean_t = mean_{t-1} + (x_t - mean_{t-1}) / t
    M_t    = M_{t-1} + (x_t - mean_{t-1}) (x_t - mean_t)
    var_t  = M_t / t
    """

    def __init__(self, columns: int, on: bool) -> None:
        """on: whether to standardise; otherwise rows are left as they are."""
        self.t = 0
        self.mean = np.zeros(columns)
        self.M = np.zeros(columns)
        self.on = on

    @property
    def std(self) -> np.ndarray:
        """The standard deviation so far; 1 if rows are left as they are, 0 before the first."""
        if not self.on:
            return np.ones(len(self.M))
        if not self.t:
            return np.zeros(len(self.M))
        return np.asarray(np.sqrt(self.M / self.t))

    @property
    def centre(self) -> np.ndarray:
        """The mean so far; 0 if rows are left as they are."""
        return self.mean * self.on

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Standardise the row x [C] that follows the t rows so far.

        An entry that has not varied yet is 0. The others are clipped at sqrt(t): among t + 1
        numbers, none is further from their mean than sqrt(t) standard deviations.
        """
        if not self.on:
            return x
        std = self.std
        most = math.sqrt(self.t)
        z = np.divide(x - self.mean, std, out=np.zeros_like(x), where=std > 0)
        return np.asarray(np.clip(z, -most, most))

    def add(self, x: np.ndarray) -> None:
        """Take a row into the mean and the variance."""
        self.t += 1
        deviation = x - self.mean  # from the mean before x
        self.mean = self.mean + deviation / self.t
        self.M = self.M + deviation * (x - self.mean)

    def state(self) -> ScaleState:
        """The scale for a checkpoint."""
        return {"t": self.t, "mean": self.mean.tolist(), "M": self.M.tolist()}

    def restore(self, state: ScaleState) -> None:
        """Continue from a checkpoint's state."""
        self.t = state["t"]
        self.mean = np.array(state["mean"])
        self.M = np.array(state["M"])

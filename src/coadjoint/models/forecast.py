"""Forecast: the next steps of series, with intervals, and their table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..tasks.files.kept import Column


@dataclass(frozen=True, eq=False)
class Forecast:
    """The next steps of n series, k columns each, in their own units.

    names       the k columns that are predicted
    ids         the n names of the series; id_column: what they are called, "" without ids
    times       of the steps, n lists of texts; None without times; time_column: their name
    values      [n, steps, k], the forecast
    lower       [n, steps, k], the ends of the intervals; NaN where there are none
    upper
    level       the share of values that the intervals are to hold, in (0, 1)
    history     n arrays [T_i, k] of the series before, NaN where missing
    past_times  of these rows, as `times`
    notes       how the data were read, and what the intervals come from
    """

    source: Path
    names: list[str]
    ids: list[str]
    id_column: str
    times: list[list[str]] | None
    time_column: str
    values: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    level: float
    history: list[np.ndarray]
    past_times: list[list[str]] | None
    notes: tuple[str, ...]

    @property
    def steps(self) -> int:
        """The number of steps."""
        return int(self.values.shape[1])

    def table(self) -> list[Column]:
        """Return the columns id and time, if there are any, step, prediction, lower and upper.

        step counts from 1 after the last row of a series. Of several columns each has its own:
        "prediction a", "lower a", "upper a".
        """
        columns = []
        n, steps, _ = self.values.shape
        if self.id_column:
            columns.append(
                Column(self.id_column, [name for name in self.ids for _ in range(steps)])
            )
        columns.append(Column("step", np.tile(np.arange(1, steps + 1), n)))
        if self.times is not None:
            columns.append(Column(self.time_column, [t for times in self.times for t in times]))
        for k, name in enumerate(self.names):
            end = f" {name}" if len(self.names) > 1 else ""
            parts = {"prediction": self.values, "lower": self.lower, "upper": self.upper}
            for word, values in parts.items():
                columns.append(Column(word + end, values[:, :, k].reshape(-1)))
        return columns

    def with_note(self, note: str) -> Forecast:
        """Return the forecast with one more note."""
        return replace(self, notes=(*self.notes, note))

    @property
    def summary(self) -> str:
        """How much was forecast, in words: "12 steps of 1 series"."""
        plural = "s" * (self.steps != 1)
        return f"{self.steps} step{plural} of {len(self.ids)} series"

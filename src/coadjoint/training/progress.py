"""The memory of a training run, and the result it returns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ..networks.interface import Net
from .json_rows import StoredRows
from .json_types import Row


@dataclass
class Progress:
    """What the next steps depend on besides weights and optimiser. state.json has these names."""

    best: float | None = None  # the metric at `best_step`
    best_loss: float = math.inf
    best_step: int | None = None
    waited: int = 0  # validations since the best one
    factor: float = 1.0  # of the step size, lowered at plateaus
    plateau: float | None = None  # the best loss so far, for the plateau schedule
    plateau_waited: int = 0  # validations since then
    skipped: int = 0
    seconds: float = 0.0
    work: float = 0.0  # in gradients of one sequence, two sweeps each
    norms: float = 0.0  # the running mean of gradient norms
    success_step: int | None = None
    success_seconds: float | None = None
    success_work: float | None = None


@dataclass(frozen=True)
class Result:
    """The result of `co.train`. `metrics` are those of the final weights, by split.

    >>> import coadjoint as co
    >>> task = co.tasks.TemporalOrder(10)
    >>> net = co.Network("elman", inputs=6, hidden=4, outputs=4, output="softmax")
    >>> result = co.train(net, task, steps=2, batch=4, tests=20, confirm=20)
    >>> result.status, result.step, result.success, sorted(result.metrics)
    ('finished', 2, False, ['test'])
    >>> [row["step"] for row in result.rows if row["kind"] == "train"]
    [1, 2]
    """

    network: Net
    status: str  # "success", "finished" or "early-stopped"
    step: int
    seconds: float
    success: bool
    success_step: int | None
    success_seconds: float | None
    success_work: float | None
    best_step: int | None
    skipped: int  # steps that were left out because something was not finite
    work: float  # in gradients of one sequence
    metrics: dict[str, dict[str, float]]
    row_source: Sequence[Row] | StoredRows = field(repr=False)
    folder: Path | None = None
    selected_by: str | None = None  # the metric that chose `best_step`

    @cached_property
    def rows(self) -> list[Row]:
        """The rows of metrics.jsonl, read when first used; in memory if there is no folder."""
        return list(self.row_source)


def summarise_distances(rows: Iterable[Row]) -> dict[str, float] | None:
    """Mean and maximum of the finite distances in `rows`, and the share below 1; None without any.

    A distance is ||d/|d| - g/|g|||, of a step's direction d and gradient g. Below 1, Galvan's
    condition for convergence can hold.
    """
    count = 0
    below = 0
    most = -math.inf
    total = 0.0
    for row in rows:
        distance = row.get("distance")
        if isinstance(distance, float) and math.isfinite(distance):
            count += 1
            below += distance < 1
            most = max(most, distance)
            total += distance
    if count == 0:
        return None
    return {"mean": total / count, "most": most, "below_one": below / count}

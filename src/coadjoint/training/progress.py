"""What a training run remembers of its past, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ..networks.interface import Net
from .display import Row
from .json_rows import StoredRows


@dataclass
class Progress:
    """What the next steps depend on, beside weights and optimiser."""

    best: float | None = None
    best_loss: float = math.inf
    best_step: int | None = None
    waited: int = 0  # evaluations since the best
    factor: float = 1.0  # of the step size, after plateaus
    plateau: float | None = None  # the loss that a plateau's patience counts from
    plateau_waited: int = 0
    skipped: int = 0
    seconds: float = 0.0
    work: float = 0.0  # gradients of a sequence, two sweeps each
    norms: float = 0.0  # running mean of the norms of gradients
    success_step: int | None = None
    success_seconds: float | None = None
    success_work: float | None = None


@dataclass(frozen=True)
class Result:
    """What came of a run. `metrics` are those of the final weights, by split."""

    network: Net
    status: str  # "success", "finished" or "early-stopped"
    step: int
    seconds: float
    success: bool
    success_step: int | None
    success_seconds: float | None
    success_work: float | None
    best_step: int | None
    skipped: int  # steps that were not finite and left out
    work: float  # gradients of a sequence that were computed, or as much as that
    metrics: dict[str, dict[str, float]]
    row_source: Sequence[Row] | StoredRows = field(repr=False)  # where `rows` come from
    folder: Path | None = None

    @cached_property
    def rows(self) -> list[Row]:
        """What the run has logged, row by row: the lines of metrics.jsonl, read from there when they are
        first asked for. A run without a folder has kept them in memory."""
        return list(self.row_source)


def summarise_distances(rows: Iterable[Row]) -> dict[str, float] | None:
    """Of a direction that is not the gradient: how far from it, on the unit sphere, over all steps where that is finite.
    Below 1 Galvan's condition for convergence can hold."""
    count, below, most = 0, 0, -math.inf

    def known() -> Iterator[float]:
        nonlocal count, below, most
        for row in rows:
            far = row.get("distance")
            if isinstance(far, float) and math.isfinite(far):
                count += 1
                below += far < 1
                most = max(most, far)
                yield far

    total = sum(known())
    return {"mean": total / count, "most": most, "below_one": below / count} if count else None

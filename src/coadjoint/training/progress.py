"""Progress: what a training run remembers of its past."""

from __future__ import annotations

import math
from dataclasses import dataclass


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

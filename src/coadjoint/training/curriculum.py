"""Curriculum: learn from the easiest sequences first, and from all of them in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError, choose, whole_number
from ..networks.interface import Net
from ..networks.judge import evaluation_mode
from ..objectives.batch import Batch
from ..tasks.task import Task

DIFFICULTY_MEASURES = ("loss", "length")


@dataclass(frozen=True)
class Easiest:
    """Self-paced learning: draw round(batch / p) sequences, and learn from the `batch` easiest.

        p(step) = start + (1 - start) min(1, step / steps)

    is the share that is kept. `by` measures difficulty: "loss", the loss under the current weights,
    without dropout and noise (one more forward sweep over the drawn sequences); "length", the
    number of steps; or a function of a Batch that returns [B] difficulties. Of equally difficult
    sequences those drawn first are kept.

    The choice is a function of weights, step and seed. Kumar, Packer & Koller, NIPS (2010), choose
    by the loss with a threshold instead of a share.

    >>> Easiest(start=0.5, steps=1000).share(500)
    0.75
    """

    start: float
    steps: int
    by: str | Callable[[Batch], Tensor] = "loss"

    def __post_init__(self) -> None:
        """Refuse a share outside (0, 1], a bad number of steps, or an unknown measure `by`."""
        if not isinstance(self.start, int | float) or not 0 < self.start <= 1:
            raise InputError(
                f"start must be a share of sequences, above 0 and at most 1; got {self.start!r}."
            )
        whole_number("steps", self.steps)
        if not callable(self.by):
            choose("measure of difficulty", self.by, DIFFICULTY_MEASURES)

    def share(self, step: int) -> float:
        """The share p(step) of drawn sequences that is kept."""
        return self.start + (1 - self.start) * min(1.0, step / self.steps)

    def choose(
        self, net: Net, task: Task, step: int, batch: int, seed: int, draw: int | None = None
    ) -> Batch:
        """Draw round(batch / p(step)) sequences; the easiest `batch` of them, in the order drawn.

        draw: the number of the batch to draw, by default the step. It is another one if a step
        has several batches.
        """
        whole_number("step", step, 0, 2**62)  # a long run may take more steps than 32 bits count
        whole_number("batch", batch)
        drawn = task.batch(step if draw is None else draw, round(batch / self.share(step)), seed)
        if len(drawn.sizes) <= batch:  # p(step) is 1, or nearly: all are kept
            return drawn
        easiest = self.difficulty(net, task, drawn).argsort(stable=True)[:batch]
        return drawn.select(easiest.sort().values, task.readout)

    @torch.no_grad()
    def difficulty(self, net: Net, task: Task, batch: Batch) -> Tensor:
        """The difficulty of each sample, [B], as `by` measures it; more is harder."""
        if self.by == "length":
            return batch.sizes
        if callable(self.by):
            difficulties = torch.as_tensor(self.by(batch))
            if difficulties.shape != batch.sizes.shape:
                raise InputError(
                    "a measure of difficulty must return one number for each of "
                    f"{len(batch.sizes)} samples; got shape {list(difficulties.shape)}."
                )
            return difficulties
        moved = net.move_batch(batch)
        with evaluation_mode(net):
            return net.run(moved).loss(task.loss, moved.y, mask=moved.mask, reduce=moved.reduce)

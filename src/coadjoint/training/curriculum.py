"""Curriculum: which of the sequences that are drawn a step learns from, the easiest first and all of them in the end."""

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
    """Self-paced learning: of round(batch / p) sequences that are drawn, the `batch` easiest ones are learnt from.

    p(step) = start + (1 - start) min(1, step / steps), the share that is kept: from `start` to all of them after `steps`.
    by: "loss", the loss of a sequence under the present weights, without dropout and noise (one more forward sweep over what
    is drawn); "length", its steps; or any function of a Batch to [B] difficulties. Of equally easy ones those drawn first.

    What is chosen is a function of the weights, the step and the seed. Kumar, Packer & Koller, NIPS (2010), choose by the
    loss, with a threshold in place of a share.
    """

    start: float
    steps: int
    by: str | Callable[[Batch], Tensor] = "loss"

    def __post_init__(self) -> None:
        if not isinstance(self.start, int | float) or not 0 < self.start <= 1:
            raise InputError(
                f"start is the share of sequences that is kept at first, above 0 and at most 1; got {self.start!r}."
            )
        whole_number("steps", self.steps)
        if not callable(self.by):
            choose("measure of difficulty", self.by, DIFFICULTY_MEASURES)

    def share(self, step: int) -> float:
        """p(step)"""
        return self.start + (1 - self.start) * min(1.0, step / self.steps)

    def choose(
        self, net: Net, task: Task, step: int, batch: int, seed: int, draw: int | None = None
    ) -> Batch:
        """The batch of a step, in the order it was drawn in. draw: the number of the drawn batch, the step's if not given."""
        whole_number("step", step, 0, 2**62)
        whole_number("batch", batch)
        drawn = task.batch(step if draw is None else draw, round(batch / self.share(step)), seed)
        if len(drawn.sizes) <= batch:
            return drawn
        easiest = self.difficulty(net, task, drawn).argsort(stable=True)[:batch]
        return drawn.select(easiest.sort().values, task.readout)

    @torch.no_grad()
    def difficulty(self, net: Net, task: Task, b: Batch) -> Tensor:
        """[B]"""
        if self.by == "length":
            return b.sizes
        if callable(self.by):
            found = torch.as_tensor(self.by(b))
            if found.shape != b.sizes.shape:
                raise InputError(
                    f"a measure of difficulty gives one number for each of {len(b.sizes)} samples; got shape {list(found.shape)}."
                )
            return found
        at = net.move_batch(b)
        with evaluation_mode(net):
            return net.run(at).loss(task.loss, at.y, mask=at.mask, reduce=at.reduce)

"""BPTT: backpropagation through time, a forward and an adjoint sweep."""

from __future__ import annotations

from typing import Any

import torch

from ..networks.interface import Net, run_function
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from .captured import is_on_gpu
from .evaluation import Evaluation, GradientTuple, later, without_run
from .method import Method, check_arguments, differentiate, one_layer, trained_parameters
from .segments import SegmentedGradient, Segments, parse_segments


class BPTT(Method):
    """Backpropagation through time: forward, adjoint.

    segments  sweep the sequence in so many segments, "auto" for about sqrt(T): the same gradient in O(sqrt T) memory, for
              3 sweeps instead of 2 (co.segments). `trajectory` and `costates` of its Evaluation then are not kept: asking
              for them sweeps again and takes the full memory.
    """

    def __init__(self, segments: Segments = None) -> None:
        self.segments = parse_segments(segments)

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        check_arguments(net, batch)
        if self.segments is not None:
            trained_parameters(net)
            swept = SegmentedGradient(
                one_layer(net, "sweeps in segments"), batch, loss, self.segments
            )
            return without_run(net, batch, loss, swept.loss_gradient())
        if is_on_gpu(batch):
            again = self.captured(self.compute, net, batch, loss, 0.0)
            if again is not None:
                return without_run(net, batch, loss, again)
        found, run = self.compute(net, batch, loss)
        asked = later(net, batch, loss, lambda: run)
        return Evaluation(net, batch, found.losses, found.penalties, 0.0, found.gradient, **asked)

    def sweeps(self, net: Net, T: int) -> float:
        return 2 if self.segments is None else 3

    def compute(
        self, net: Net, batch: Batch, loss: LossLike, _: Any = None
    ) -> tuple[GradientTuple, Any]:
        """The gradient, and the run."""
        with torch.enable_grad():
            run = run_function(net)(batch)
            losses = run.loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
            # One layer's costates come from its own sweep, all others are pulled through the graph.
            keep = getattr(net, "one_layer", None) is None
            gradient = differentiate(batch.mean(losses), trained_parameters(net), keep)
            return GradientTuple(losses.detach(), torch.zeros_like(losses), gradient), run

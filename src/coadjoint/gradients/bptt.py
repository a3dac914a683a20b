"""Gradient methods: net, batch, loss -> Evaluation. BPTT, Truncated, RTRL, Penalised.

All differentiate the mean over samples of per-sample values, so a gradient does not depend on how a batch is cut up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..networks.network import Network, Trajectory
from ..networks.readout import Net
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from .evaluation import Evaluation, Gradient, later
from .method import Method, check_given, differentiate, in_segments, one_layer, replayed, trained
from .segments import Segmented, Segments, wanted


class BPTT(Method):
    """Backpropagation through time: forward, adjoint.

    segments  sweep the sequence in so many segments, "auto" for about sqrt(T): the same gradient in O(sqrt T) memory, for
              3 sweeps instead of 2 (co.segments). `trajectory` and `costates` of its Evaluation then are not kept: asking
              for them sweeps again and takes the full memory.
    """

    def __init__(self, segments: Segments = None) -> None:
        self.segments = wanted(segments)

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        check_given(net, batch)
        if self.segments is not None:
            trained(net)
            swept = Segmented(one_layer(net, "sweeps in segments"), batch, loss, self.segments)
            return in_segments(net, batch, loss, swept.plain())
        found = self.recordings(self.compute, net, batch, loss, 0.0)
        if found is not None:
            return replayed(net, batch, loss, found)
        losses, none, gradient, run = self.compute(net, batch, loss)
        return Evaluation(net, batch, losses.detach(), none, 0.0, gradient, **later(net, batch, loss, lambda: run))

    def sweeps(self, net: Net, T: int) -> float:
        return 2 if self.segments is None else 3

    def compute(
        self, net: Net, batch: Batch, loss: LossLike, _: Any = None
    ) -> tuple[Tensor, Tensor, Gradient, Trajectory]:
        with torch.enable_grad():
            run = net(batch.u, batch.lengths, batch.x0)
            losses = run.loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
            keep = not isinstance(
                net, Network
            )  # the costates of several layers are pulled through what lies between them
            return losses, torch.zeros_like(losses), differentiate(batch.mean(losses), trained(net), keep), run

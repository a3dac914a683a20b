"""BPTT: backpropagation through time, a forward and an adjoint sweep."""

from __future__ import annotations

import torch

from ..networks.interface import Net, NetRun, run_function
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from .by_hand import HandGradient
from .captured import is_on_gpu
from .evaluation import Evaluation, GradientTuple, evaluation_without_run, make_evaluation
from .layer_by_hand import LayerGradient
from .method import (
    Method,
    check_arguments,
    differentiate,
    name_by_id,
    require_one_layer,
    trained_parameters,
)
from .segments import SegmentedGradient, Segments, parse_segments


class BPTT(Method):
    """Backpropagation through time: dL/dtheta by a forward and an adjoint sweep.

    Args:
        segments: The number of segments to sweep one after the other, or "auto" for about
            sqrt(T). The gradient is the same, in O(sqrt T) memory and with 3 sweeps instead of
            2. The run is then not stored: reading `trajectory` or `costates` of the Evaluation
            sweeps again and takes the full memory.

    Example: x_t = w x_{t-1} + u_t with u = (1, 0, 0), so x_3 = w^2, L = x_3^2 = w^4, dL/dw = 4 w^3.

        >>> import torch, coadjoint as co
        >>> net = co.Network(inputs=1, hidden=1, outputs=1, activation="identity")
        >>> for name, p in net.named_parameters():
        ...     _ = torch.nn.init.constant_(p, {"W": 0.5, "R": 1, "V": 1}.get(name, 0))
        >>> u = torch.tensor([1.0, 0.0, 0.0]).reshape(3, 1, 1)
        >>> batch = co.Batch(u, torch.zeros(1, 1))
        >>> co.BPTT()(net, batch, "squared").gradient["W"].item()
        0.5
        >>> co.BPTT(segments="auto")(net, batch, "squared").gradient["W"].item()
        0.5
    """

    def __init__(self, segments: Segments = None) -> None:
        self.segments = parse_segments(segments)

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        """Compute the gradient of the mean loss of the batch."""
        batch = check_arguments(net, batch)
        if self.segments is not None:
            trained_parameters(net)  # refuses a network without any
            layer = require_one_layer(net, "sweeps in segments")
            segmented = SegmentedGradient(layer, batch, loss, self.segments)
            return evaluation_without_run(net, batch, loss, segmented.loss_gradient())
        if is_on_gpu(batch):
            # As a CUDA graph, with a penalty's weight of 0; None if it cannot be one.
            replayed = self.captured(self.compute, net, batch, loss, 0.0)
            if replayed is not None:
                return evaluation_without_run(net, batch, loss, replayed)
        result, run = self.compute(net, batch, loss)
        return make_evaluation(net, batch, loss, result, lambda: run)

    def sweeps(self, net: Net, T: int) -> float:
        """Return the cost of a gradient in sweeps over the sequence: forward and adjoint, 2.

        With segments it is 3: each segment is run forward again before its adjoint.
        """
        return 2 if self.segments is None else 3

    def compute(
        self, net: Net, batch: Batch, loss: LossLike, _rho: object = None
    ) -> tuple[GradientTuple, NetRun]:
        """Return the gradient of the mean loss, and the run of the network.

        `_rho` is not used: captured gradients pass the penalty's weight to every method.
        """
        by_hand = HandGradient.of(net, batch, loss)
        if by_hand is not None:
            gradient = name_by_id(by_hand.layers.trained, by_hand.loss_gradient())
            zeros = torch.zeros_like(by_hand.losses)
            return GradientTuple(by_hand.losses, zeros, gradient), by_hand.run
        layer = LayerGradient.of(net, batch, loss)
        if layer is not None:
            gradient = layer.loss_gradient()
            losses = layer.losses.detach()
            return GradientTuple(losses, torch.zeros_like(losses), gradient), layer.run
        parameters = trained_parameters(net)
        with torch.enable_grad():
            run = run_function(net)(batch)
            losses = run.loss(loss, batch.y, mask=batch.mask, reduce=batch.reduce)
            # The costates of a single layer come from a separate sweep. Those of other networks
            # are pulled through the graph, which must then survive this gradient.
            keep_graph = getattr(net, "one_layer", None) is None
            objective = batch.mean(losses)
            gradient = differentiate(objective, parameters, keep_graph)
            return GradientTuple(losses.detach(), torch.zeros_like(losses), gradient), run


# Backpropagation over depth is the same method: the name for chains, which have no time.
BP = BPTT

"""Gradients that repeat, as CUDA graphs.

A gradient method that is called again and again with batches of one shape is captured once and
then replayed as one CUDA graph: the same operations on the same weights, with the new batch copied
in. Batches with lengths, masks or sample weights, and losses or penalties that read values on the
CPU, cannot be captured. They run operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch
from torch import Tensor

from ..networks.interface import Net, NetRun
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps.checks import Check, all_hold, defer_checks, left_checks, raise_failures
from ..sweeps.engines.cuda.capture import GraphCache, LastStream, capture_graph, prepare_stream
from ..sweeps.engines.cuda.captured_function import weight_key
from ..sweeps.engines.cuda.repeatable import function_key, may_record
from ..sweeps.torch_internals import copy_all, with_parameters
from .evaluation import GradientTuple

Compute = Callable[[Net, Batch, LossLike, Tensor], tuple[GradientTuple, NetRun]]


def is_on_gpu(batch: Batch) -> bool:
    """Tell whether the inputs are on a GPU: a cheap first test of whether to capture a gradient."""
    return isinstance(batch.u, Tensor) and batch.u.is_cuda


def clone_tensor(y: Tensor | None) -> Tensor | None:
    """Return a copy of a tensor without its graph; None for None."""
    return None if y is None else y.detach().clone()


def densely(result: GradientTuple) -> GradientTuple:
    """Return a result whose tensors are contiguous, so that they can be copied together."""
    return GradientTuple(
        result.losses.contiguous(),
        result.penalties.contiguous(),
        {name: g.contiguous() for name, g in result.gradient.items()},
        None if result.decays is None else result.decays.contiguous(),
    )


@torch.no_grad()
def copy_result(result: GradientTuple) -> GradientTuple:
    """Return copies of the tensors of a result, made in one call."""
    losses = torch.empty_like(result.losses)
    penalties = torch.empty_like(result.penalties)
    gradient = {name: torch.empty_like(g) for name, g in result.gradient.items()}
    sources = [result.losses, result.penalties, *result.gradient.values()]
    targets = [losses, penalties, *gradient.values()]
    decays = None
    if result.decays is not None:
        decays = torch.empty_like(result.decays)
        sources.append(result.decays)
        targets.append(decays)
    copy_all(sources, targets)
    return GradientTuple(losses, penalties, gradient, decays)


class CapturedGradient:
    """One gradient as a CUDA graph, with its own copies of the batch and of rho.

    A replay reads and writes the same memory each time. New batches are copied into `batch`, and
    the gradient appears in `result`.
    """

    def __init__(
        self, compute: Compute, net: Net, batch: Batch, loss: LossLike, rho: float
    ) -> None:
        u = clone_tensor(batch.u)
        self.batch = replace(batch, u=u, y=clone_tensor(batch.y), x0=clone_tensor(batch.x0))
        self.rho = torch.full((), rho, dtype=batch.u.dtype, device=batch.u.device)
        # Before it is recorded, the computation is rehearsed.
        stream = prepare_stream(batch.u.device, lambda: self.compute(compute, net, loss))
        self.last_stream = LastStream(batch.u.device)  # of the last replay
        self.graph = torch.cuda.CUDAGraph()
        with capture_graph(self.graph, stream):
            result, self.checks = self.compute(compute, net, loss)
            self.result = densely(result)
            # One number to read after a replay; the checks themselves only if it is false.
            self.fine = all_hold(self.checks)

    def compute(
        self, compute: Compute, net: Net, loss: LossLike
    ) -> tuple[GradientTuple, list[Check]]:
        """Return the gradient, and the checks of its values to be made after each replay."""
        # Autograd ties a leaf to the stream it is first used on. The parameters are therefore
        # replaced by fresh leaves that share their memory.
        leaves = {}
        for name, p in net.named_parameters():
            leaves[name] = p.detach().requires_grad_(p.requires_grad)
        with defer_checks() as checks, with_parameters(net, leaves):
            result, _ = compute(net, self.batch, loss, self.rho)
            return result, checks

    def replay(self, batch: Batch, rho: float) -> GradientTuple:
        """Copy in the batch and rho, replay the graph and return copies of its results."""
        self.last_stream.wait()
        for name in ("u", "y", "x0"):
            graph_input = getattr(self.batch, name)
            if isinstance(graph_input, Tensor):
                graph_input.copy_(getattr(batch, name))
        self.rho.fill_(rho)
        self.graph.replay()
        # The next replay overwrites the graph's own tensors.
        result = copy_result(self.result)
        left = left_checks()
        # Decays are read at once, and must not be those of a gradient that fails.
        if left is not None and result.decays is None:
            left.append(Check(self.fine, self.find_failure))
        elif not self.fine.item():
            self.find_failure()
        return result

    def find_failure(self) -> None:
        """Raise the error of the first check of the last replay that fails, if any does."""
        raise_failures(self.checks)


class CapturedGradients:
    """The captured gradients of one method, each under a key of all that it depends on."""

    def __init__(self) -> None:
        self.cache: GraphCache[CapturedGradient] = GraphCache("this gradient")

    def __call__(
        self,
        compute: Compute,
        net: Net,
        batch: Batch,
        loss: LossLike,
        rho: float,
        kind: Hashable = None,
    ) -> GradientTuple | None:
        """Replay the gradient, capturing it first if it is not yet captured.

        None means that the caller must compute it: it cannot be captured, or this is one of the
        first calls of its kind, which are not worth a capture.

        Args:
            compute: The computation to capture.
            net: The network.
            batch: The batch.
            loss: The loss.
            rho: The weight of the penalty; 0 without one.
            kind: Anything else that `compute` depends on, as a part of the key.
        """
        key = self.key(net, batch, loss)
        if key is None:
            return None
        captured = self.cache.find(
            (kind, *key), lambda: CapturedGradient(compute, net, batch, loss, rho)
        )
        return None if captured is None else captured.replay(batch, rho)

    def key(self, net: Net, batch: Batch, loss: LossLike) -> tuple[Hashable, ...] | None:
        """Return everything a captured gradient depends on; None if it cannot be captured."""
        if not can_be_captured(batch) or not isinstance(net, Net):
            return None
        network_key = net.graph_key()
        loss_key = function_key(loss)
        if network_key is None or loss_key is None or not may_record():
            return None
        # A graph reads the weights where they lie, so their values may change but not their places.
        tensors = (*net.named_parameters(), *net.named_buffers())
        weights = tuple((name, weight_key(y)) for name, y in tensors)
        return (
            id(net),
            network_key,
            weights,
            loss_key,
            shape_key(batch.u),
            shape_key(batch.y),
            shape_key(batch.x0),
            batch.reduce,
        )


def can_be_captured(batch: Batch) -> bool:
    """Tell whether u and y are tensors on a GPU, without lengths, mask or sample weights.

    The values of these three are read on the CPU, which a graph cannot do.
    """
    if batch.lengths is not None or batch.mask is not None or batch.weight is not None:
        return False
    if not is_on_gpu(batch):
        return False
    return batch.y is None or (isinstance(batch.y, Tensor) and batch.y.is_cuda)


def shape_key(y: Tensor | None) -> Hashable:
    """Return the shape, type and device of a tensor; None for None."""
    return None if y is None else (tuple(y.shape), y.dtype, y.device)

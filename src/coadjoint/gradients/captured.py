"""Gradients that repeat, as CUDA graphs.

A gradient method that is called again and again with batches of one shape is recorded once and then replayed as a whole: the
same operations on the same weights, with the new batch copied in. What cannot be recorded (ragged batches, losses or
penalties that look at values) runs operation by operation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..networks.interface import Net
from ..networks.network import Trajectory
from ..objectives.batch import Batch
from ..sweeps.checks import Check, defer_checks, raise_failures
from ..sweeps.engines.cuda.capture import GraphCache, capture_graph, prepare_stream
from ..sweeps.torch_internals import with_parameters
from .evaluation import GradientTuple

Compute = Callable[[Net, Batch, Any, Any], tuple[GradientTuple, Trajectory]]


def is_on_gpu(batch: Batch) -> bool:
    """Is this a batch whose gradient may be recorded? Asked first: most are not."""
    return isinstance(batch.u, Tensor) and batch.u.is_cuda


class CapturedGradient:
    """One gradient, recorded with its own copies of the batch."""

    def __init__(self, compute: Compute, net: Net, batch: Batch, loss: Any, rho: float) -> None:
        own = lambda y: y.detach().clone() if isinstance(y, Tensor) else y
        self.batch = replace(batch, u=own(batch.u), y=own(batch.y), x0=own(batch.x0))
        self.rho = torch.full((), rho, dtype=batch.u.dtype, device=batch.u.device)
        stream = prepare_stream(batch.u.device, lambda: self.compute(compute, net, loss))
        self.graph = torch.cuda.CUDAGraph()
        with capture_graph(self.graph, stream):
            self.found, self.checks = self.compute(compute, net, loss)
            self.fine = torch.stack([d.holds for d in self.checks]).all()

    def compute(self, compute: Compute, net: Net, loss: Any) -> tuple[GradientTuple, list[Check]]:
        """Parameters are replaced by leaves that share their memory: autograd ties a leaf to the stream it is first used on."""
        leaves = {
            name: p.detach().requires_grad_(p.requires_grad) for name, p in net.named_parameters()
        }
        with defer_checks() as checks, with_parameters(net, leaves):
            found, run = compute(net, self.batch, loss, self.rho)
            swept = run.run.formula
            assert swept is not None
            return found, [*checks, *swept.plan.checks]

    def __call__(self, batch: Batch, rho: float) -> GradientTuple:
        for name in ("u", "y", "x0"):
            held = getattr(self.batch, name)
            if isinstance(held, Tensor):
                held.copy_(getattr(batch, name))
        self.rho.fill_(rho)
        self.graph.replay()
        found = self.found
        result = GradientTuple(
            found.losses.clone(),
            found.penalties.clone(),
            {name: g.clone() for name, g in found.gradient.items()},
            None if found.decays is None else found.decays.clone(),
        )
        if not self.fine.item():
            raise_failures(self.checks)
        return result


class CapturedGradients:
    """The recordings of a method."""

    def __init__(self) -> None:
        self.cache: GraphCache[CapturedGradient] = GraphCache("this gradient")

    def __call__(
        self, compute: Compute, net: Net, batch: Batch, loss: Any, rho: float, kind: Any = None
    ) -> GradientTuple | None:
        """The gradient by a recording; None if this call runs operation by operation. kind: what else `compute` depends on."""
        key = self.key(net, batch, loss)
        if key is None:
            return None
        recording = self.cache.find(
            (kind, *key), lambda: CapturedGradient(compute, net, batch, loss, rho)
        )
        return None if recording is None else recording(batch, rho)

    def key(self, net: Net, batch: Batch, loss: Any) -> Any:
        """What a recording depends on; None where there can be none."""
        plain = batch.lengths is None and batch.mask is None and batch.weight is None
        own = net.graph_key() if isinstance(net, Net) else None
        if (
            not plain
            or own is None
            or not is_on_gpu(batch)
            or not isinstance(batch.y, Tensor | None)
        ):
            return None
        if torch.cuda.is_current_stream_capturing() or (
            batch.y is not None and not batch.y.is_cuda
        ):
            return None
        like = lambda y: None if y is None else (tuple(y.shape), y.dtype, y.device)
        weights = tuple(
            (n, p.data_ptr(), p.requires_grad)
            for n, p in (*net.named_parameters(), *net.named_buffers())
        )
        try:
            hash(loss)
        except TypeError:
            return None
        return (
            id(net),
            own,
            weights,
            loss,
            like(batch.u),
            like(batch.y),
            like(batch.x0),
            batch.reduce,
        )

"""Gradients that repeat, as CUDA graphs.

On a GPU a gradient is a hundred small operations, and telling the device about each of them takes longer than doing
it. A gradient method that is called again and again with batches of one shape is recorded once and then replayed as a
whole: the same operations on the same weights, with the new batch copied in.

What cannot be recorded (ragged batches, losses or penalties that look at values) runs operation by operation as before.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module

from .batch import Batch
from .errors import Deferred, Doubt
from .network import Network, Trajectory
from .sweeps import Swept

CALLS = 2  # operation by operation, before a gradient is recorded
KEPT = 4  # recordings of a method

Found = tuple[Tensor, Tensor, dict[str, Tensor]]  # losses, penalties, gradient
Compute = Callable[[Network, Batch, Any, Any], tuple[Tensor, Tensor, dict[str, Tensor], Trajectory]]


@contextlib.contextmanager
def deferred() -> Iterator[list[Doubt]]:
    """Inside, doubts are collected instead of asked."""
    Deferred.on, Deferred.doubts = True, []
    try:
        yield Deferred.doubts
    finally:
        Deferred.on, Deferred.doubts = False, []


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, an operation that waits for the device raises."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Recording:
    """One gradient, recorded with its own copies of the batch."""

    def __init__(self, compute: Compute, net: Network, batch: Batch, loss: Any, rho: float) -> None:
        own = lambda y: y.detach().clone() if isinstance(y, Tensor) else y
        self.batch = replace(batch, u=own(batch.u), y=own(batch.y), x0=own(batch.x0))
        self.rho = torch.full((), rho, dtype=batch.u.dtype, device=batch.u.device)
        stream = torch.cuda.Stream(batch.u.device)
        stream.wait_stream(torch.cuda.current_stream(batch.u.device))
        with (
            torch.cuda.stream(stream),
            watched(),
        ):  # a rehearsal: what fails while recording leaves the device in disorder
            self.compute(compute, net, loss)
        torch.cuda.current_stream(batch.u.device).wait_stream(stream)
        torch.cuda.synchronize(batch.u.device)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.found, self.doubts = self.compute(compute, net, loss)
            self.fine = torch.stack([d.holds for d in self.doubts]).all()

    def compute(self, compute: Compute, net: Network, loss: Any) -> tuple[Found, list[Doubt]]:
        """Parameters are replaced by leaves that share their memory: autograd ties a leaf to the stream it is first used on."""
        leaves = {name: p.detach().requires_grad_(p.requires_grad) for name, p in net.named_parameters()}
        with deferred() as doubts, _reparametrize_module(net, leaves):
            losses, penalties, gradient, run = compute(net, self.batch, loss, self.rho)
            assert isinstance(run.run, Swept)
            return (losses.detach(), penalties.detach(), gradient), [*doubts, *run.run.plan.doubts]

    def __call__(self, batch: Batch, rho: float) -> Found:
        for name in ("u", "y", "x0"):
            held = getattr(self.batch, name)
            if isinstance(held, Tensor):
                held.copy_(getattr(batch, name))
        self.rho.fill_(rho)
        self.graph.replay()
        losses, penalties, gradient = self.found
        result = losses.clone(), penalties.clone(), {name: g.clone() for name, g in gradient.items()}
        if not self.fine.item():
            for d in self.doubts:
                if not d.holds.item() and (error := d.wrong()) is not None:
                    raise error
        return result


class Recordings:
    """The recordings of a method, the newest last."""

    def __init__(self) -> None:
        self.calls: OrderedDict[Any, int | Recording | None] = OrderedDict()  # None: cannot be recorded
        self.refusal = ""  # why, the last time

    def __call__(self, compute: Compute, net: Network, batch: Batch, loss: Any, rho: float) -> Found | None:
        """The gradient by a recording; None if this call runs operation by operation."""
        key = self.key(net, batch, loss)
        if key is None:
            return None
        known = self.calls.pop(key, 0)
        if isinstance(known, int):
            known += 1
            if known > CALLS:
                known = self.record(compute, net, batch, loss, rho)
        self.calls[key] = known
        while len(self.calls) > KEPT:
            self.calls.popitem(last=False)
        return known(batch, rho) if isinstance(known, Recording) else None

    def record(self, compute: Compute, net: Network, batch: Batch, loss: Any, rho: float) -> Recording | None:
        try:
            return Recording(compute, net, batch, loss, rho)
        except RuntimeError as error:  # something looked at a value: it cannot be known while recording
            self.refusal = str(error)
            return None

    def key(self, net: Network, batch: Batch, loss: Any) -> Any:
        """What a recording depends on; None where there can be none."""
        plain = isinstance(batch.u, Tensor) and batch.lengths is None and batch.mask is None and batch.weight is None
        if not plain or not batch.u.is_cuda or net.engine != "cuda" or not isinstance(batch.y, Tensor | None):
            return None
        if torch.cuda.is_current_stream_capturing() or (batch.y is not None and not batch.y.is_cuda):
            return None
        like = lambda y: None if y is None else (tuple(y.shape), y.dtype, y.device)
        weights = tuple((n, p.data_ptr(), p.requires_grad) for n, p in (*net.named_parameters(), *net.named_buffers()))
        try:
            hash(loss)
        except TypeError:
            return None
        return (
            id(net), net.cell, weights, loss, net.readout, net.output, net.training,
            like(batch.u), like(batch.y), like(batch.x0), batch.reduce,
        )  # fmt: skip

"""Gradients that repeat, as CUDA graphs.

On a GPU a gradient is a hundred small operations, and telling the device about each of them takes longer than doing
it. A gradient method that is called again and again with batches of one shape is recorded once and then replayed as a
whole: the same operations on the same weights, with the new batch copied in. So is a module of co.nn, and its backward.

What cannot be recorded (ragged batches, losses or penalties that look at values) runs operation by operation as before.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode

from .batch import Batch
from .errors import CoadjointError
from .network import Trajectory
from .readout import Net
from .sweeps import Swept
from .sweeps.checks import Doubt, ask, deferred
from .sweeps.derivatives import watched as forward_mode

CALLS = 2  # operation by operation, before a gradient is recorded
KEPT = 4  # recordings of a method
ATTEMPTS = 2  # at a recording: a failure may have come from elsewhere in the process

Found = tuple[Tensor, Tensor, dict[str, Tensor]]  # losses, penalties, gradient
Compute = Callable[[Net, Batch, Any, Any], tuple[Tensor, Tensor, dict[str, Tensor], Trajectory]]
Built = TypeVar("Built")

# CUDA takes one recording at a time; a second thread that wants one waits.
_one_at_a_time = threading.Lock()


class Unrecordable(RuntimeError):
    """The operations depend on values, or leave the device: no recording can repeat them."""


class RefuseWaiting(TorchDispatchMode):
    """Inside, and in this thread alone (and autograd's on its behalf), an operation that waits for the device is refused.

    torch.cuda.set_sync_debug_mode would refuse it in every other thread of the process too."""

    WAITS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.reads_values(func, args):
            raise Unrecordable(f"{func} needs values while the gradient is computed")
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and self.changes_device(args, result):
            raise Unrecordable(f"{func} moves data between the CPU and the GPU")
        return result

    @staticmethod
    def on_device(y: Any) -> bool:
        return isinstance(y, Tensor) and y.is_cuda

    def reads_values(self, func: Any, args: Sequence[Any]) -> bool:
        if not any(map(self.on_device, args)):
            return False
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_put_):
            # An index of truth values has as many entries as there are true ones.
            return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return any(tag in func.tags for tag in self.WAITS)

    def changes_device(self, args: Sequence[Any], result: Tensor) -> bool:
        given = [y.is_cuda for y in args if isinstance(y, Tensor) and y.dim()]
        return bool(given) and result.dim() > 0 and any(cuda != result.is_cuda for cuda in given)


def prepare(device: torch.device, rehearse: Callable[[], object]) -> torch.cuda.Stream:
    """A stream to record on, after two rehearsals: the first may load kernels, which waits for the device; what fails only
    while recording would leave the device in disorder."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        rehearse()
        with RefuseWaiting():
            rehearse()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    return stream


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None) -> Iterator[None]:
    """Record what is launched on `stream` inside.

    No garbage is collected meanwhile: it may hold graphs of the past, and CUDA refuses to destroy one during a recording.
    Other threads may go on using the device (capture_error_mode)."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()


class GraphCache(Generic[Built]):
    """The last KEPT recordings, by key: made at the third call with one key, replayed from then on."""

    def __init__(self, what: str) -> None:
        self.what = what  # is recorded, for the warning
        self.entries: OrderedDict[Any, int | Built | None] = OrderedDict()  # calls so far; None: cannot be recorded
        self.refusal = ""  # why, the last time
        self.warned = False

    def find(self, key: Any, build: Callable[[], Built]) -> Built | None:
        """The recording for this key; None if this call runs operation by operation."""
        known = self.entries.pop(key, 0)
        if isinstance(known, int):
            calls = known + 1
            # What is dropped here is destroyed before a recording begins, not while it goes on.
            while len(self.entries) >= KEPT:
                self.entries.popitem(last=False)
            known = calls if calls <= CALLS else self.record(build)
        self.entries[key] = known
        return None if known is None or isinstance(known, int) else known

    def record(self, build: Callable[[], Built]) -> Built | None:
        for _ in range(ATTEMPTS):
            try:
                with _one_at_a_time:
                    return build()
            except CoadjointError:
                raise
            except Unrecordable as error:
                self.refusal = str(error)
                break
            except RuntimeError as error:
                self.refusal = str(error)
        if not self.warned:
            self.warned = True
            first_line = self.refusal.partition("\n")[0].rstrip(".")
            warnings.warn(
                f"{self.what} cannot be replayed as a CUDA graph ({first_line}). It runs operation by operation: "
                "the same numbers, but slower.",
                stacklevel=2,
            )
        return None


class Recording:
    """One gradient, recorded with its own copies of the batch."""

    def __init__(self, compute: Compute, net: Net, batch: Batch, loss: Any, rho: float) -> None:
        own = lambda y: y.detach().clone() if isinstance(y, Tensor) else y
        self.batch = replace(batch, u=own(batch.u), y=own(batch.y), x0=own(batch.x0))
        self.rho = torch.full((), rho, dtype=batch.u.dtype, device=batch.u.device)
        stream = prepare(batch.u.device, lambda: self.compute(compute, net, loss))
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph, stream):
            self.found, self.doubts = self.compute(compute, net, loss)
            self.fine = torch.stack([d.holds for d in self.doubts]).all()

    def compute(self, compute: Compute, net: Net, loss: Any) -> tuple[Found, list[Doubt]]:
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
            ask(self.doubts)
        return result


class Recordings:
    """The recordings of a method."""

    def __init__(self) -> None:
        self.cache: GraphCache[Recording] = GraphCache("this gradient")

    def __call__(
        self, compute: Compute, net: Net, batch: Batch, loss: Any, rho: float, kind: Any = None
    ) -> Found | None:
        """The gradient by a recording; None if this call runs operation by operation. kind: what else `compute` depends on."""
        key = self.key(net, batch, loss)
        if key is None:
            return None
        recording = self.cache.find((kind, *key), lambda: Recording(compute, net, batch, loss, rho))
        return None if recording is None else recording(batch, rho)

    def key(self, net: Net, batch: Batch, loss: Any) -> Any:
        """What a recording depends on; None where there can be none."""
        plain = isinstance(batch.u, Tensor) and batch.lengths is None and batch.mask is None and batch.weight is None
        if (
            not plain
            or not batch.u.is_cuda
            or net.cell is None
            or (net.dropout and net.training)
            or net.engine not in ("cuda", "scan")
            or not isinstance(batch.y, Tensor | None)
        ):
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
            id(net), net.cell, str(net.engine), weights, loss, net.readout, net.output, net.training,
            like(batch.u), like(batch.y), like(batch.x0), batch.reduce,
        )  # fmt: skip


Map = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]  # (data, weights) -> outputs


class Replay:
    """A function of data and weights, and its gradient, each recorded: with copies of the data, and the weights where they
    lie. What the forward leaves to the backward is overwritten by the next forward, so `turn` counts them."""

    def __init__(self, f: Map, data: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self.f, self.turn, self.back = f, 0, None
        leaf = lambda y, held: held.requires_grad_(y.requires_grad)
        self.data = [leaf(y, y.detach().clone()) for y in data]
        leaves = [leaf(y, y.detach()) for y in weights]
        inputs = [*self.data, *leaves]
        self.wanted = [y.requires_grad for y in inputs]
        again = torch.is_grad_enabled() and any(self.wanted)
        gradient = lambda outputs, bars: torch.autograd.grad(
            outputs, [y for y in inputs if y.requires_grad], bars, retain_graph=True, allow_unused=True
        )

        def rehearse() -> None:
            outputs = f(self.data, leaves)
            if again:
                gradient(outputs, [torch.zeros_like(y) for y in outputs])

        stream = prepare(data[0].device, rehearse)
        pool = torch.cuda.graph_pool_handle()
        self.forward = torch.cuda.CUDAGraph()
        with capturing(self.forward, stream, pool):
            outputs = f(self.data, leaves)
        self.outputs = [y.detach() for y in outputs]
        if again:
            self.held = outputs  # and with them what the backward reads, so that it may be replayed more than once
            self.bars = [torch.zeros_like(y) for y in outputs]
            self.blank = [True] * len(outputs)
            self.back = torch.cuda.CUDAGraph()
            with capturing(self.back, stream, pool):
                found = gradient(outputs, self.bars)
                self.found = [g for g in found if g is not None]
                self.flat = torch.cat([g.reshape(-1) for g in self.found])  # one copy hands them all out
            self.given = [g is not None for g in found]

    def run(self, data: Sequence[Tensor]) -> tuple[Tensor, ...]:
        for held, y in zip(self.data, data, strict=True):
            held.detach().copy_(y)
        self.turn += 1
        self.forward.replay()
        return tuple(y.clone() for y in self.outputs)

    def pull(self, bars: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient by the inputs that want one."""
        assert self.back is not None
        for i, (held, bar) in enumerate(zip(self.bars, bars, strict=True)):
            if bar is not None:
                held.copy_(bar)
            elif not self.blank[i]:
                held.zero_()
            self.blank[i] = bar is None
        self.back.replay()
        found = iter(torch._utils._unflatten_dense_tensors(self.flat.clone(), self.found))
        return [next(found) if given else None for given in self.given]


class Replayed(Function):
    """apply(replays, replay, number of data tensors, *data, *weights)"""

    @staticmethod
    def forward(ctx: Any, owner: Replays, replay: Replay, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = replay.run(tensors[:count])
        ctx.owner, ctx.replay, ctx.count, ctx.turn = owner, replay, count, replay.turn
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        tensors, replay = ctx.saved_tensors, ctx.replay
        if (
            torch.is_grad_enabled() or ctx.turn != replay.turn
        ):  # to be differentiated again, or overwritten: compute afresh
            ctx.owner.twice |= torch.is_grad_enabled()
            again = torch.is_grad_enabled()
            with torch.enable_grad():
                pairs = zip(replay.f(tensors[: ctx.count], tensors[ctx.count :]), bars, strict=True)
                outputs, given = zip(*((y, bar) for y, bar in pairs if bar is not None), strict=True)
                wanted = [y for y, on in zip(tensors, replay.wanted, strict=True) if on]
                found = iter(torch.autograd.grad(outputs, wanted, given, create_graph=again, allow_unused=True))
        else:
            found = iter(replay.pull(bars))
        return None, None, None, *(next(found) if on else None for on in replay.wanted)


class Replays:
    """The recordings of a module."""

    def __init__(self) -> None:
        self.cache: GraphCache[Replay] = GraphCache("this module")
        self.twice = False  # somebody takes second derivatives, which a recording does not have

    def __deepcopy__(self, memo: Any) -> Replays:
        return Replays()  # a copy has weights of its own

    def __reduce__(self) -> Any:
        return Replays, ()

    def __call__(self, key: Any, f: Map, data: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """f(data, weights), by a recording if this was asked for often enough; key: whatever else f depends on."""
        plain = all(isinstance(w, Parameter) for w in weights) and not self.twice and not forward_mode()
        if not plain or torch.cuda.is_current_stream_capturing():
            return f(data, weights)
        like = lambda y: (tuple(y.shape), y.stride(), y.dtype, y.device, y.requires_grad)
        rounding = torch.get_float32_matmul_precision()
        key = (
            key,
            torch.is_grad_enabled(),
            rounding,
            *map(like, data),
            *((w.data_ptr(), w.requires_grad) for w in weights),
        )
        replay = self.cache.find(key, lambda: Replay(f, data, weights))
        if replay is None:
            return f(data, weights)
        return Replayed.apply(self, replay, len(data), *data, *weights)

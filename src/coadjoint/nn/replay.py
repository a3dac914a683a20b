"""A module of co.nn, and its backward, as CUDA graphs.

On a GPU a call is a hundred small operations, and telling the device about each of them takes longer than doing it. A
module that is called again and again with inputs of one shape is recorded once and then replayed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from ..sweeps.functions import is_transformed as forward_mode
from ..sweeps.engines.cuda.capture import GraphCache, capture_graph, prepare_stream
from ..sweeps.torch_internals import unflatten

Map = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]  # (data, weights) -> outputs


class CapturedModule:
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
            outputs,
            [y for y in inputs if y.requires_grad],
            bars,
            retain_graph=True,
            allow_unused=True,
        )

        def rehearse() -> None:
            outputs = f(self.data, leaves)
            if again:
                gradient(outputs, [torch.zeros_like(y) for y in outputs])

        stream = prepare_stream(data[0].device, rehearse)
        pool = torch.cuda.graph_pool_handle()
        self.forward = torch.cuda.CUDAGraph()
        with capture_graph(self.forward, stream, pool):
            outputs = f(self.data, leaves)
        self.outputs = [y.detach() for y in outputs]
        if again:
            self.held = outputs  # and with them what the backward reads, so that it may be replayed more than once
            self.bars = [torch.zeros_like(y) for y in outputs]
            self.blank = [True] * len(outputs)
            self.back = torch.cuda.CUDAGraph()
            with capture_graph(self.back, stream, pool):
                found = gradient(outputs, self.bars)
                self.found = [g for g in found if g is not None]
                self.flat = torch.cat(
                    [g.reshape(-1) for g in self.found]
                )  # one copy hands them all out
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
        found = iter(unflatten(self.flat.clone(), self.found))
        return [next(found) if given else None for given in self.given]


class ReplayFunction(Function):
    """apply(replays, replay, number of data tensors, *data, *weights)"""

    @staticmethod
    def forward(
        ctx: Any, owner: CapturedModules, replay: CapturedModule, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
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
                outputs, given = zip(
                    *((y, bar) for y, bar in pairs if bar is not None), strict=True
                )
                wanted = [y for y, on in zip(tensors, replay.wanted, strict=True) if on]
                found = iter(
                    torch.autograd.grad(
                        outputs, wanted, given, create_graph=again, allow_unused=True
                    )
                )
        else:
            found = iter(replay.pull(bars))
        return None, None, None, *(next(found) if on else None for on in replay.wanted)


class CapturedModules:
    """The recordings of a module."""

    def __init__(self) -> None:
        self.cache: GraphCache[CapturedModule] = GraphCache("this module")
        self.twice = False  # somebody takes second derivatives, which a recording does not have

    def __deepcopy__(self, memo: Any) -> CapturedModules:
        return CapturedModules()  # a copy has weights of its own

    def __reduce__(self) -> Any:
        return CapturedModules, ()

    def __call__(
        self, key: Any, f: Map, data: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """f(data, weights), by a recording if this was asked for often enough; key: whatever else f depends on."""
        plain = (
            all(isinstance(w, Parameter) for w in weights) and not self.twice and not forward_mode()
        )
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
        replay = self.cache.find(key, lambda: CapturedModule(f, data, weights))
        if replay is None:
            return f(data, weights)
        return ReplayFunction.apply(self, replay, len(data), *data, *weights)

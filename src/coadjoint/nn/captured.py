"""A module of co.nn, and its backward, as CUDA graphs.

On a GPU a call is a hundred small operations, and launching each of them takes longer than running
it. A module that is called again and again with inputs of one shape is captured once and replayed
from then on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from ..sweeps.engines.cuda.capture import GraphCache, capture_graph, prepare_stream
from ..sweeps.functions import Gradients, is_transformed
from ..sweeps.torch_internals import unflatten

Map = Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]  # (data, weights) -> outputs


class CapturedModule:
    """A function of data and weights, and its gradient, each captured as a CUDA graph.

    The graphs read copies of the data, and the weights where they lie. What the forward leaves for
    the backward is overwritten by the next forward. `turn` counts the forwards, so that a backward
    can tell whether what it needs is still there.
    """

    def __init__(self, f: Map, data: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Capture outputs = f(data, weights) and, if one may be needed, its gradient."""
        self.f = f
        self.turn = 0
        self.back: torch.cuda.CUDAGraph | None = None  # of the gradient
        self.data = [make_leaf(y.detach().clone(), y) for y in data]
        leaves = [make_leaf(y.detach(), y) for y in weights]
        inputs = [*self.data, *leaves]
        self.needs_gradient = [y.requires_grad for y in inputs]
        trained = list(itertools.compress(inputs, self.needs_gradient))
        differentiates = torch.is_grad_enabled() and len(trained) > 0

        def gradient(
            outputs: Sequence[Tensor], bars: Sequence[Tensor]
        ) -> tuple[Tensor | None, ...]:
            """The loss's gradient by the inputs that need one, from bars, that by the outputs."""
            # retain_graph: a replay of the backward reads again what the forward left, so that
            # memory must not be freed and used for something else.
            return torch.autograd.grad(outputs, trained, bars, retain_graph=True, allow_unused=True)

        def rehearse() -> None:
            """Run everything once before the capture, which allows no first-time set-up."""
            outputs = f(self.data, leaves)
            if differentiates:
                gradient(outputs, list(map(torch.zeros_like, outputs)))

        stream = prepare_stream(data[0].device, rehearse)
        pool = torch.cuda.graph_pool_handle()  # the backward reads memory of the forward
        self.forward = torch.cuda.CUDAGraph()
        with capture_graph(self.forward, stream, pool):
            outputs = f(self.data, leaves)
        self.outputs = [y.detach() for y in outputs]
        if not differentiates:
            return
        # The outputs hold what the backward reads, so that it may be replayed more than once.
        self.graph_outputs = outputs
        self.bars = list(map(torch.zeros_like, outputs))  # filled in before each replay
        self.is_bar_zero = [True] * len(outputs)
        self.back = torch.cuda.CUDAGraph()
        with capture_graph(self.back, stream, pool):
            grads = gradient(outputs, self.bars)
            self.grads = [g for g in grads if g is not None]
            self.flat_grads = torch.cat([g.reshape(-1) for g in self.grads])  # one copy for all
        self.has_grad = [g is not None for g in grads]

    def run(self, data: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs for other data of the same shapes, by a replay of the forward."""
        for copy, y in zip(self.data, data, strict=True):
            copy.detach().copy_(y)
        self.turn += 1
        self.forward.replay()
        return tuple(y.clone() for y in self.outputs)

    def pull(self, bars: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradient by the data and weights that need one, by a replay of the backward.

        bars: the loss's gradient by each output; None where it is zero.
        """
        assert self.back is not None
        for i, (copy, bar) in enumerate(zip(self.bars, bars, strict=True)):
            if bar is not None:
                copy.copy_(bar)
            elif not self.is_bar_zero[i]:  # it still holds the bar of an earlier call
                copy.zero_()
            self.is_bar_zero[i] = bar is None
        self.back.replay()
        return fill_in(unflatten(self.flat_grads.clone(), self.grads), self.has_grad)


def data_key(y: Tensor) -> Hashable:
    """What must not change of an input for a graph to be replayed; its values are copied in."""
    return (tuple(y.shape), y.stride(), y.dtype, y.device, y.requires_grad)


def weight_key(w: Tensor) -> Hashable:
    """What must not change of a weight for a graph to be replayed; it is read where it lies."""
    return (w.data_ptr(), w.requires_grad)


def make_leaf(y: Tensor, like: Tensor) -> Tensor:
    """`y`, set to require a gradient if `like` does."""
    return y.requires_grad_(like.requires_grad)


class ReplayContext(Protocol):
    """What the forward of ReplayFunction leaves for its backward, in torch's `ctx`."""

    owner: CapturedModules
    module: CapturedModule
    count: int  # of data tensors; the weights follow them
    turn: int  # of the module, after this forward
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep tensors for `backward`."""

    def set_materialize_grads(self, value: bool) -> None:
        """Choose whether a missing gradient arrives as zeros (True) or as None."""


class ReplayFunction(Function):
    """apply(owner, captured module, number of data tensors, *data, *weights)."""

    @staticmethod
    def forward(
        ctx: ReplayContext,
        owner: CapturedModules,
        module: CapturedModule,
        count: int,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Replay the forward, and save the tensors in case the backward must be computed."""
        outputs = module.run(tensors[:count])
        ctx.owner = owner
        ctx.module = module
        ctx.count = count
        ctx.turn = module.turn
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return outputs

    @staticmethod
    def backward(ctx: ReplayContext, *bars: Tensor | None) -> Gradients:
        """The gradient by all tensors; bars: the loss's gradient by the outputs.

        It is replayed, unless it will be differentiated itself (create_graph=True), or a later
        forward has overwritten what it reads: then it is computed operation by operation.
        """
        module = ctx.module
        differentiates = torch.is_grad_enabled()
        if differentiates or ctx.turn != module.turn:
            ctx.owner.is_twice_differentiated |= differentiates
            grads: Gradients = compute_gradient(ctx, bars, differentiates)
        else:
            grads = module.pull(bars)
        # None for owner, module and count, which are no tensors.
        return None, None, None, *fill_in(grads, module.needs_gradient)


def compute_gradient(
    ctx: ReplayContext, bars: Sequence[Tensor | None], create_graph: bool
) -> tuple[Tensor | None, ...]:
    """The gradient by the saved tensors that need one, operation by operation.

    bars: the loss's gradient by each output; None where the loss does not depend on it.
    """
    tensors = ctx.saved_tensors
    module = ctx.module
    needed = list(itertools.compress(tensors, module.needs_gradient))
    used: list[Tensor] = []
    used_bars: list[Tensor] = []
    with torch.enable_grad():
        outputs = module.f(tensors[: ctx.count], tensors[ctx.count :])
        for y, bar in zip(outputs, bars, strict=True):
            if bar is not None:
                used.append(y)
                used_bars.append(bar)
        return torch.autograd.grad(
            used, needed, used_bars, create_graph=create_graph, allow_unused=True
        )


def fill_in(values: Sequence[Tensor | None], places: Sequence[bool]) -> list[Tensor | None]:
    """The values, one after the other, where `places` is true; None elsewhere."""
    remaining = iter(values)
    filled: list[Tensor | None] = []
    for has_value in places:
        filled.append(next(remaining) if has_value else None)
    return filled


class CapturedModules:
    """The captured calls of a module, by the shapes of their inputs."""

    def __init__(self) -> None:
        self.cache: GraphCache[CapturedModule] = GraphCache("this module")
        # A captured backward has no derivative: once somebody needs one, nothing is captured.
        self.is_twice_differentiated = False

    def __deepcopy__(self, memo: object) -> CapturedModules:
        return CapturedModules()  # without graphs: a copied module has its weights elsewhere

    def __reduce__(self) -> tuple[type[CapturedModules], tuple[()]]:
        # Pickled without graphs, which belong to this process.
        return CapturedModules, ()

    def __call__(
        self, key: Hashable, f: Map, data: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """f(data, weights), by a CUDA graph from the third call with tensors of these shapes on.

        key: what else f depends on.
        """
        captures = not self.is_twice_differentiated and not is_transformed()
        # A graph reads weights where they lie, and a computed one lies elsewhere at each call.
        stay_in_place = all(isinstance(w, Parameter) for w in weights)
        if not captures or not stay_in_place or torch.cuda.is_current_stream_capturing():
            return f(data, weights)
        full_key = (
            key,
            torch.is_grad_enabled(),
            torch.get_float32_matmul_precision(),
            *map(data_key, data),
            *map(weight_key, weights),
        )
        module = self.cache.find(full_key, lambda: CapturedModule(f, data, weights))
        if module is None:
            return f(data, weights)
        outputs: Sequence[Tensor] = ReplayFunction.apply(self, module, len(data), *data, *weights)
        return outputs

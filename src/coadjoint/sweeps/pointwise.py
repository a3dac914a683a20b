"""Pointwise: functions of packed arrays, elementwise over units and parallel over time, closed under differentiation.

A group is an array [N, m d] that packs m named entries of d units; a uniform group has no rows, [m d], and its
gradient is summed over them. `pulled` and `pushed` are again Pointwise, so a derivative of any order is one.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual

from ..cells.formula import ZERO, Node, evaluate_nodes, loop_invariants, pull, push, symbol
from ..cells.program import Program
from ..errors import Unsupported
from .chunks import sum_rows
from .memory import empty
from .rows import Rows, split_range
from .torch_internals import (
    autocast_is_on,
    forward_mode_is_on,
    forward_mode_within_jvp,
    transforms_are_on,
    unwrap_dead_wrappers,
    will_run,
)

Groups = tuple[tuple[str, tuple[Node, ...]], ...]
COMPILED_FROM = 1 << 14  # elements of an input from which a loop is worth compiling
BLOCK_ELEMENTS = (
    1 << 15
)  # elements of one entry that are computed at a time, so that a program's intermediates stay in cache


@dataclass(
    frozen=True, eq=False
)  # one object for each derivative: they are made by cached functions
class Pointwise:
    inputs: Groups
    outputs: Groups
    known: tuple[
        tuple[Node, ...], ...
    ]  # expressions whose values may be at hand, packed: the states x_t, and what an engine kept
    uniform: frozenset[str]  # inputs without rows
    summed: frozenset[str] = frozenset()  # outputs that are summed over rows

    @functools.cache  # noqa: B019  (as many as there are cells and derivatives of them)
    def pulled(self, seeds: tuple[str, ...], wrt: tuple[str, ...]) -> Pointwise:
        """(inputs, cotangents of the outputs `seeds`) -> gradients of the inputs `wrt`."""
        extra: list[tuple[str, tuple[Node, ...]]] = []
        flat: list[Node] = []
        bars: list[Node] = []
        uniform = set(self.uniform)
        for name, nodes in self.outputs:
            if name in seeds:
                fresh = self._fresh("~" + name, extra)
                bar = tuple(symbol(f"{fresh}.{i}") for i in range(len(nodes)))
                extra.append((fresh, bar))
                uniform |= {fresh} if name in self.summed else set()
                flat += nodes
                bars += bar
        targets = [(n, nodes) for n, nodes in self.inputs if n in wrt]
        grads = iter(pull(flat, bars, [n for _, nodes in targets for n in nodes]))
        outputs = tuple((name, tuple(next(grads) for _ in nodes)) for name, nodes in targets)
        return Pointwise(
            (*self.inputs, *extra), outputs, self.known, frozenset(uniform), self.uniform & set(wrt)
        )

    @functools.cache  # noqa: B019
    def pushed(self, along: tuple[str, ...]) -> Pointwise:
        """(inputs, directions of the inputs `along`) -> directions of the outputs."""
        extra: list[tuple[str, tuple[Node, ...]]] = []
        directions: dict[Node, Node] = {}
        uniform = set(self.uniform)
        for name, nodes in self.inputs:
            if name in along:
                fresh = self._fresh("." + name, extra)
                dots = tuple(symbol(f"{fresh}.{i}") for i in range(len(nodes)))
                extra.append((fresh, dots))
                uniform |= {fresh} if name in self.uniform else set()
                directions |= dict(zip(nodes, dots, strict=True))
        rest = iter(push([n for _, nodes in self.outputs for n in nodes], directions))
        outputs = tuple((name, tuple(next(rest) for _ in nodes)) for name, nodes in self.outputs)
        return Pointwise(
            (*self.inputs, *extra), outputs, self.known, frozenset(uniform), self.summed
        )

    @functools.cached_property
    def nonzero_outputs(self) -> list[str]:
        """The outputs that are not identically zero."""
        return [name for name, nodes in self.outputs if any(n is not ZERO for n in nodes)]

    def _fresh(self, name: str, extra: list[tuple[str, tuple[Node, ...]]]) -> str:
        taken = {n for n, _ in (*self.inputs, *extra)}
        while name in taken:
            name = name[0] + name
        return name

    @functools.cached_property
    def rowwise(self) -> Pointwise:
        """The same with the rows of summed outputs left as they are."""
        return replace(self, summed=frozenset())

    def __call__(
        self, at_hand: Sequence[Tensor | None], *tensors: Tensor | None, rows: Rows | None = None
    ) -> dict[str, Tensor | None]:
        """The output groups; None for one that is identically zero. at_hand: the values of `known`, where there are any.
        rows: what the rows are, so that sums over them are taken in chunks of time steps."""
        values = _Apply.apply(self, rows, *at_hand, *tensors) if self.nonzero_outputs else ()
        found = dict(zip(self.nonzero_outputs, values, strict=True))
        return {name: found.get(name) for name, _ in self.outputs}

    def run(
        self, rows: Rows | None, at_hand: Sequence[Tensor | None], tensors: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The output groups that are not identically zero."""
        whole = rows.rows_in_full if rows else 0
        first = next(
            t
            for (name, _), t in zip(self.inputs, tensors, strict=True)
            if t is not None and name not in self.uniform
        )
        run = compiled_runner(first.device.type, whole * first.shape[1])
        outputs = (run or Pointwise.run_by_torch)(self, rows, at_hand, tensors)
        live = [name for name, _ in self.outputs if name in self.nonzero_outputs]
        return [
            sum_rows(rows, out) if name in self.summed else out
            for name, out in zip(live, outputs, strict=True)
        ]

    def expected_sizes(
        self, given: Sequence[tuple[str | None, tuple[Node, ...]]], count: int, d: int
    ) -> tuple[list[str], list[int]]:
        """The names, and how many values a loop over `count` rows takes them to have, of the groups that are given and then of
        the outputs that are not identically zero."""
        live = [(name, nodes) for name, nodes in self.outputs if name in self.nonzero_outputs]
        names = [name or "a value at hand" for name, _ in (*given, *live)]
        sizes = [(1 if name in self.uniform else count) * len(nodes) * d for name, nodes in given]
        return names, sizes + [count * len(nodes) * d for _, nodes in live]

    def run_by_torch(
        self, rows: Rows | None, at_hand: Sequence[Tensor | None], tensors: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Row by row, computed in blocks of rows that lie within one chunk."""
        arrays = [
            (nodes, t, name in self.uniform)
            for (name, nodes), t in zip(self.inputs, tensors, strict=True)
            if t is not None
        ]
        nodes0, like, _ = next((n, t, u) for n, t, u in arrays if not u)
        d, count = like.shape[1] // len(nodes0), like.shape[0]
        blocks = [
            len(b)
            for c in (rows.chunks if rows else [range(count)])
            for b in split_range(c, max(1, BLOCK_ELEMENTS // d))
        ]
        columns: dict[Node, Sequence[Tensor]] = {}
        fixed: dict[Node, Tensor] = {}
        for nodes, t, uniform in arrays:
            for n, part in zip(nodes, t.split(d, -1), strict=True):
                if uniform:
                    fixed[n] = part
                else:
                    columns[n] = part.split(blocks)
        for nodes, y in zip(self.known, at_hand, strict=True):
            if y is not None:
                columns |= {
                    n: part.split(blocks)
                    for n, part in zip(nodes, y.split(d, -1), strict=True)
                    if n.args
                }
        outputs = [(name, nodes) for name, nodes in self.outputs if name in self.nonzero_outputs]
        flat = [n for _, nodes in outputs for n in nodes]
        once = loop_invariants(flat, columns, frozenset(columns))
        fixed |= dict(
            zip(
                once,
                (
                    like.new_tensor(v) if isinstance(v, float) else v
                    for v in evaluate_nodes(once, fixed)
                ),
                strict=True,
            )
        )
        columns |= {n: [v] * len(blocks) for n, v in fixed.items()}
        packed = [empty((count, d * len(nodes)), like) for _, nodes in outputs]
        targets = [part.split(blocks) for out in packed for part in out.split(d, -1)]

        def scratch() -> list[Tensor]:
            full = like.new_empty(max(blocks), d)
            return [full[:n] for n in blocks]

        run = program(tuple(flat), frozenset(columns)).bind(columns, targets, scratch)
        for i in range(len(blocks)):
            run(i)
        return packed


# By device: where the engine lives that runs a Pointwise instead of torch's own operations. The engines are made of this
# module, so they are found by name when they are first needed.
RUNNERS = {"cpu": "c.engine", "cuda": "cuda.engine"}


def compiled_runner(device: str, elements: int) -> Callable[..., list[Tensor]] | None:
    """What runs a Pointwise on this device instead of torch's own operations, where `elements` make it worth it. They are
    counted over the whole sequence, so that its segments are run alike."""
    if device not in RUNNERS or (device == "cpu" and elements < COMPILED_FROM):
        return None
    engine = importlib.import_module(f"{__package__}.engines.{RUNNERS[device]}")
    return engine.pointwise if engine.refusal(device) is None else None


@functools.cache
def program(outputs: tuple[Node, ...], given: frozenset[Node]) -> Program:
    return Program(outputs, given)


class _Primal:
    """A jvp's context with the saved tensors' own directions taken off."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.saved_tensors = tuple(
            None if t is None else unpack_dual(t, level=0).primal for t in ctx.saved_tensors
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def nestable_jvp(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """torch runs a jvp with forward mode switched off, so that a jvp of a jvp would silently lose its outer direction.
    Switched on again, it must not see the inner one: hence primal values. torch.autocast has no say inside."""

    @functools.wraps(jvp)
    def wrapped(ctx: Any, *dots: Any) -> Any:
        with forward_mode_within_jvp():
            if autocast_is_on():
                return without_autocast(jvp, _Primal(ctx), *dots)
            return jvp(_Primal(ctx), *dots)

    return wrapped


def without_autocast(compute: Callable[..., Any], *args: Any) -> Any:
    """compute(*args), in which torch.autocast would round products to half precision."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return compute(*args)


def with_quick_apply(function: type[Function]) -> type[Function]:
    """torch binds the arguments of `forward` by its signature at every call, which takes longer than a small operation.
    Ours are given in their places, all of them, so only torch.func's transforms need the long way; and where nothing is
    differentiated there is nothing to keep.

    torch.autocast has no say in `forward`. A `backward` that makes products of its own begins by asking whether it is on: a
    wrapper around it would be one more call on the way to every loop."""
    usual, direct = function.apply, super(Function, function).apply  # type: ignore[misc]

    def apply(*args: Any) -> Any:
        if autocast_is_on():
            return without_autocast(apply, *args)
        if transforms_are_on():
            return usual(*args)
        args = unwrap_dead_wrappers(args)
        return (
            direct(*args)
            if torch.is_grad_enabled() or forward_mode_is_on()
            else function.forward(*args)
        )

    function.apply = apply  # type: ignore[method-assign]
    return function


def needed_inputs(ctx: Any) -> tuple[bool, ...]:
    """The inputs whose gradient somebody waits for: of ctx.needs_input_grad, which knows what can be differentiated, those
    that lead to what this backward pass was asked for."""
    edges = iter([node for node, _ in ctx.next_functions if node is not None])
    return tuple(need and _is_needed(next(edges)) for need in ctx.needs_input_grad)


def _is_needed(node: Any) -> bool:
    try:
        return will_run(node)
    except RuntimeError:  # a leaf that torch.autograd.grad was asked for
        return True


@with_quick_apply
class _Apply(Function):
    """apply(op, rows, *values at hand, *inputs); the values at hand are constants: derivatives go through the expressions."""

    @staticmethod
    def forward(op: Pointwise, rows: Rows | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(op.run(rows, tensors[: len(op.known)], tensors[len(op.known) :]))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op, ctx.rows, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        op, hand = ctx.op, len(ctx.op.known)
        seeds = [
            (name, bar)
            for name, bar in zip(op.nonzero_outputs, bars, strict=True)
            if bar is not None
        ]
        wrt = tuple(
            n
            for (n, _), need in zip(op.inputs, needed_inputs(ctx)[2 + hand :], strict=True)
            if need
        )
        if not seeds or not wrt:
            return (None,) * (2 + len(ctx.saved_tensors))
        saved, rows = ctx.saved_tensors, ctx.rows
        back = op.pulled(tuple(n for n, _ in seeds), wrt)
        grads = back(saved[:hand], *saved[hand:], *(bar for _, bar in seeds), rows=rows)
        return (None,) * (2 + hand) + tuple(grads.get(name) for name, _ in op.inputs)

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, _op: Any, _rows: Any, *dots: Tensor | None) -> Any:
        op, saved, hand = ctx.op, ctx.saved_tensors, len(ctx.op.known)
        along = [
            (name, dot)
            for (name, _), dot in zip(op.inputs, dots[hand:], strict=True)
            if dot is not None
        ]
        ahead = op.pushed(tuple(n for n, _ in along))
        out = ahead(saved[:hand], *saved[hand:], *(dot for _, dot in along), rows=ctx.rows)
        return tuple(out[name] for name in op.nonzero_outputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise vmap_error()


def vmap_error() -> Unsupported:
    return Unsupported(
        "torch.vmap over a recurrence is not supported: the sweeps own the batch axis. "
        "Put the mapped axis into the batch, dimension 1 of u."
    )

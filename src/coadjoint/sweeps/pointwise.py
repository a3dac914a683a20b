"""Pointwise: functions of packed arrays, elementwise over units and parallel over time, closed under differentiation.

A group is an array [N, m d] that packs m named entries of d units; a uniform group has no rows, [m d], and its
gradient is summed over them. `pulled` and `pushed` are again Pointwise, so a derivative of any order is one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual

from ..errors import Unsupported
from ..formula import ZERO, Node, Program, apart, evaluate, pull, push, symbol

Groups = tuple[tuple[str, tuple[Node, ...]], ...]
CHUNK = 1 << 15  # elements of one entry that are computed at a time, so that a program's intermediates stay in cache


@dataclass(frozen=True)
class Pointwise:
    inputs: Groups
    outputs: Groups
    known: tuple[Node, ...]  # expressions whose values are at hand: the states x_t
    uniform: frozenset[str]  # inputs without rows
    summed: frozenset[str] = frozenset()  # outputs that are summed over rows

    @functools.cache  # noqa: B019  (as many as there are cells and derivatives of them)
    def pulled(self, seeds: tuple[str, ...], wrt: tuple[str, ...]) -> Pointwise:
        """(inputs, cotangents of the outputs `seeds`) -> gradients of the inputs `wrt`."""
        extra: list[tuple[str, tuple[Node, ...]]] = []
        uniform, flat, bars = set(self.uniform), [], []
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
        return Pointwise((*self.inputs, *extra), outputs, self.known, frozenset(uniform), self.uniform & set(wrt))

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
        return Pointwise((*self.inputs, *extra), outputs, self.known, frozenset(uniform), self.summed)

    def _fresh(self, name: str, extra: list[tuple[str, tuple[Node, ...]]]) -> str:
        taken = {n for n, _ in (*self.inputs, *extra)}
        while name in taken:
            name = name[0] + name
        return name

    def __call__(self, y: Tensor | None, *tensors: Tensor | None) -> dict[str, Tensor | None]:
        """The output groups; None for one that is identically zero. y: the values of `known`, packed."""
        live = [name for name, nodes in self.outputs if any(n is not ZERO for n in nodes)]
        values = _Apply.apply(self, y, *tensors) if live else ()
        found = dict(zip(live, values, strict=True))
        return {name: found.get(name) for name, _ in self.outputs}

    def run(self, y: Tensor | None, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The output groups that are not identically zero, computed in blocks of rows."""
        arrays = [(nodes, t, name in self.uniform) for (name, nodes), t in zip(self.inputs, tensors, strict=True) if t is not None]
        nodes0, like, _ = next((n, t, u) for n, t, u in arrays if not u)
        d, rows = like.shape[1] // len(nodes0), like.shape[0]
        block = max(1, CHUNK // d)
        columns: dict[Node, list[Tensor]] = {}
        fixed: dict[Node, Tensor] = {}
        for nodes, t, uniform in arrays:
            for n, part in zip(nodes, t.split(d, -1), strict=True):
                if uniform:
                    fixed[n] = part
                else:
                    columns[n] = list(part.split(block))
        if y is not None:
            columns |= {n: list(part.split(block)) for n, part in zip(self.known, y.split(d, -1), strict=True) if n.args}
        outputs = [(name, nodes) for name, nodes in self.outputs if any(n is not ZERO for n in nodes)]
        flat = [n for _, nodes in outputs for n in nodes]
        count = -(-rows // block)
        once = apart(flat, columns, frozenset(columns))
        fixed |= dict(zip(once, (like.new_tensor(v) if isinstance(v, float) else v for v in evaluate(once, fixed)), strict=True))
        columns |= {n: [v] * count for n, v in fixed.items()}
        packed = [like.new_empty(rows, d * len(nodes)) for _, nodes in outputs]
        targets = [part.split(block) for out in packed for part in out.split(d, -1)]

        def scratch() -> list[Tensor]:
            full = like.new_empty(min(block, rows), d)
            return [full[: len(c)] for c in targets[0]]

        run = program(tuple(flat), frozenset(columns)).bind(columns, targets, scratch)
        for i in range(count):
            run(i)
        return [out.sum(0) if name in self.summed else out for (name, _), out in zip(outputs, packed, strict=True)]


@functools.cache
def program(outputs: tuple[Node, ...], given: frozenset[Node]) -> Program:
    return Program(outputs, given)


class _Primal:
    """A jvp's context with the saved tensors' own directions taken off."""

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.saved_tensors = tuple(None if t is None else unpack_dual(t, level=0).primal for t in ctx.saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def nested(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """torch runs a jvp with forward mode switched off, so that a jvp of a jvp would silently lose its outer direction.
    Switched on again, it must not see the inner one: hence primal values."""

    @functools.wraps(jvp)
    def wrapped(ctx: Any, *dots: Any) -> Any:
        with _set_fwd_grad_enabled(True):
            return jvp(_Primal(ctx), *dots)

    return wrapped


class _Apply(Function):
    @staticmethod
    def forward(op: Pointwise, y: Tensor | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(op.run(y, tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.op, y, *tensors = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(y, *tensors)
        ctx.save_for_forward(y, *tensors)

    @staticmethod
    def backward(ctx: Any, *bars: Tensor | None) -> Any:
        op, (y, *tensors) = ctx.op, ctx.saved_tensors
        live = [name for name, nodes in op.outputs if any(n is not ZERO for n in nodes)]
        seeds = [(name, bar) for name, bar in zip(live, bars, strict=True) if bar is not None]
        wrt = tuple(n for (n, _), need in zip(op.inputs, ctx.needs_input_grad[2:], strict=True) if need)
        if not seeds or not wrt:
            return (None,) * (2 + len(tensors))
        grads = op.pulled(tuple(n for n, _ in seeds), wrt)(y, *tensors, *(bar for _, bar in seeds))
        return None, None, *(grads.get(name) for name, _ in op.inputs)

    @staticmethod
    @nested
    def jvp(ctx: Any, _op: Any, _y: Any, *dots: Tensor | None) -> Any:
        op, (y, *tensors) = ctx.op, ctx.saved_tensors
        along = [(name, dot) for (name, _), dot in zip(op.inputs, dots, strict=True) if dot is not None]
        out = op.pushed(tuple(n for n, _ in along))(y, *tensors, *(dot for _, dot in along))
        live = [name for name, nodes in op.outputs if any(n is not ZERO for n in nodes)]
        return tuple(out[name] for name in live)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise no_vmap()


def no_vmap() -> Unsupported:
    return Unsupported(
        "torch.vmap over a recurrence is not supported: the sweeps own the batch axis. "
        "Put the mapped axis into the batch (dimension 1 of u), or use engine='autograd'."
    )

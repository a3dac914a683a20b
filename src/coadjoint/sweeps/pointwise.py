"""Pointwise: functions of packed arrays, elementwise over units and parallel over time.

A group is an array [N, m d] that packs m named entries of d units. A uniform group has no rows,
[m d], and its gradient is summed over them. `pulled` and `pushed`, the derivatives in reverse and
forward mode, are Pointwise again, and so is a derivative of any order.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from ..cells.formula import ZERO, Node, evaluate_nodes, loop_invariants, pull, push, symbol
from ..cells.program import Program
from .chunks import sum_rows
from .functions import (
    Context,
    Gradients,
    Inputs,
    SweepFunction,
    needed_inputs,
    nestable_jvp,
    with_quick_apply,
)
from .memory import empty
from .rows import Rows, split_range

Group = tuple[str, tuple[Node, ...]]  # its name, and the expressions of its entries
Groups = tuple[Group, ...]
COMPILED_FROM = 1 << 14  # elements of an input from which a loop is compiled
# Elements of one entry that are computed at a time: a program's intermediates then stay in cache.
BLOCK_ELEMENTS = 1 << 15


# Compared by identity: `pulled` and `pushed` are cached, so that each derivative is one object.
@dataclass(frozen=True, eq=False)
class Pointwise:
    """outputs = f(inputs), row by row and unit by unit, as expressions."""

    inputs: Groups
    outputs: Groups
    # Expressions whose values may be at hand, packed: the states x_t, and what an engine kept.
    known: tuple[tuple[Node, ...], ...]
    uniform: frozenset[str]  # inputs without rows
    summed: frozenset[str] = frozenset()  # outputs that are summed over rows

    @functools.cache  # noqa: B019  (bounded: one entry for each cell and derivative)
    def pulled(self, seeds: tuple[str, ...], wrt: tuple[str, ...]) -> Pointwise:
        """The derivative in reverse mode, as expressions again.

        (inputs, cotangents of the outputs `seeds`) -> gradients of the inputs `wrt`.
        """
        cotangents: list[Group] = []  # the new inputs
        seed_nodes: list[Node] = []  # the entries of all seeds, and
        seed_bars: list[Node] = []  # the cotangent of each
        uniform = set(self.uniform)
        for name, nodes in self.outputs:
            if name not in seeds:
                continue
            fresh = self._fresh_name("~" + name, cotangents)
            bar = tuple(symbol(f"{fresh}.{i}") for i in range(len(nodes)))
            cotangents.append((fresh, bar))
            if name in self.summed:  # a sum over rows has none, nor has its cotangent
                uniform.add(fresh)
            seed_nodes += nodes
            seed_bars += bar
        targets = [group for group in self.inputs if group[0] in wrt]
        grads = pull(seed_nodes, seed_bars, flat_nodes(targets))
        return Pointwise(
            inputs=(*self.inputs, *cotangents),
            outputs=regroup(targets, grads),
            known=self.known,
            uniform=frozenset(uniform),
            summed=self.uniform & set(wrt),  # every row reads a uniform input
        )

    @functools.cache  # noqa: B019
    def pushed(self, along: tuple[str, ...]) -> Pointwise:
        """The derivative in forward mode, as expressions again.

        (inputs, directions of the inputs `along`) -> directions of the outputs.
        """
        tangents: list[Group] = []  # the new inputs
        directions: dict[Node, Node] = {}
        uniform = set(self.uniform)
        for name, nodes in self.inputs:
            if name not in along:
                continue
            fresh = self._fresh_name("." + name, tangents)
            dots = tuple(symbol(f"{fresh}.{i}") for i in range(len(nodes)))
            tangents.append((fresh, dots))
            if name in self.uniform:
                uniform.add(fresh)
            directions |= dict(zip(nodes, dots, strict=True))
        pushed_nodes = push(flat_nodes(self.outputs), directions)
        return Pointwise(
            inputs=(*self.inputs, *tangents),
            outputs=regroup(self.outputs, pushed_nodes),
            known=self.known,
            uniform=frozenset(uniform),
            summed=self.summed,
        )

    @functools.cached_property
    def nonzero_outputs(self) -> list[str]:
        """The names of the outputs that are not identically zero."""
        return [name for name, nodes in self.outputs if any(n is not ZERO for n in nodes)]

    @functools.cached_property
    def nonzero_groups(self) -> list[Group]:
        """The outputs that are not identically zero, with their expressions."""
        return [group for group in self.outputs if group[0] in self.nonzero_outputs]

    def _fresh_name(self, name: str, more: Sequence[Group]) -> str:
        """`name`, its first character repeated until no input and no group of `more` has it."""
        used_names = {group[0] for group in (*self.inputs, *more)}
        while name in used_names:
            name = name[0] + name
        return name

    @functools.cached_property
    def rowwise(self) -> Pointwise:
        """The same function, with no output summed over rows."""
        return replace(self, summed=frozenset())

    def __call__(
        self, at_hand: Sequence[Tensor | None], *tensors: Tensor | None, rows: Rows | None = None
    ) -> dict[str, Tensor | None]:
        """The output groups by name; None for one that is identically zero.

        at_hand: the values of `known`, None where there are none. tensors: the inputs, in order;
        None for a group without entries. rows: where the rows of the arrays lie, so that sums over
        them are taken in chunks of time steps.
        """
        outputs: dict[str, Tensor | None] = {name: None for name, _ in self.outputs}
        if self.nonzero_outputs:
            values = _Apply.apply(self, rows, *at_hand, *tensors)
            outputs.update(zip(self.nonzero_outputs, values, strict=True))
        return outputs

    def run(
        self, rows: Rows | None, at_hand: Sequence[Tensor | None], tensors: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The output groups that are not identically zero, by compiled code where that pays.

        Arguments as in __call__.
        """
        _, like = self._first_with_rows(tensors)
        # Of the full sequence, so that its segments all run the same way; without rows, too few.
        elements = rows.rows_in_full * like.shape[1] if rows else 0
        runner = compiled_runner(like.device.type, elements) or Pointwise.run_by_torch
        outputs = runner(self, rows, at_hand, tensors)
        for i, (name, _) in enumerate(self.nonzero_groups):
            if name in self.summed:
                outputs[i] = sum_rows(rows, outputs[i])
        return outputs

    def _first_with_rows(self, tensors: Sequence[Tensor | None]) -> tuple[int, Tensor]:
        """The first input that is there and has rows: how many entries it packs, and its array."""
        for (name, nodes), y in zip(self.inputs, tensors, strict=True):
            if y is not None and name not in self.uniform:
                return len(nodes), y
        raise AssertionError("a pointwise function of nothing that has rows")

    def expected_sizes(
        self, given: Sequence[tuple[str | None, tuple[Node, ...]]], count: int, d: int
    ) -> tuple[list[str], list[int]]:
        """The names of arrays and how many values a loop over `count` rows reads or writes in each.

        The arrays are the given groups (None: a value at hand), then the outputs that are not
        identically zero. d: the units of one entry.
        """
        names: list[str] = []
        sizes: list[int] = []
        for name, nodes in given:
            row_count = 1 if name in self.uniform else count
            names.append(name or "a value at hand")
            sizes.append(row_count * len(nodes) * d)
        for name, nodes in self.nonzero_groups:
            names.append(name)
            sizes.append(count * len(nodes) * d)
        return names, sizes

    def run_by_torch(
        self, rows: Rows | None, at_hand: Sequence[Tensor | None], tensors: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The nonzero outputs row by row, in blocks of rows that lie within one chunk.

        Arguments as in __call__; nothing is summed over rows.
        """
        entries, like = self._first_with_rows(tensors)
        count = len(like)
        d = like.shape[1] // entries
        blocks = block_sizes(rows, count, d)
        columns: dict[Node, Sequence[Tensor]] = {}  # of each node, one array for each block
        fixed: dict[Node, Tensor] = {}  # of a node without rows
        for (name, nodes), y in zip(self.inputs, tensors, strict=True):
            if y is None:
                continue
            for node, part in zip(nodes, y.split(d, -1), strict=True):
                if name in self.uniform:
                    fixed[node] = part
                else:
                    columns[node] = part.split(blocks)
        for nodes, y in zip(self.known, at_hand, strict=True):
            if y is None:
                continue
            for node, part in zip(nodes, y.split(d, -1), strict=True):
                if node.args:  # a symbol is an input already
                    columns[node] = part.split(blocks)
        flat = flat_nodes(self.nonzero_groups)
        # Expressions of uniform inputs alone are computed once, not again for each block.
        invariants = loop_invariants(flat, columns, frozenset(columns))
        for node, value in zip(invariants, evaluate_nodes(invariants, fixed), strict=True):
            fixed[node] = like.new_tensor(value) if isinstance(value, float) else value
        for node, value in fixed.items():
            columns[node] = [value] * len(blocks)
        packed = [empty((count, d * len(nodes)), like) for _, nodes in self.nonzero_groups]
        targets = [part.split(blocks) for out in packed for part in out.split(d, -1)]

        def scratch() -> list[Tensor]:
            """Memory for an intermediate, as an array for each block; all share the same one."""
            full = like.new_empty(max(blocks), d)
            return [full[:size] for size in blocks]

        compute = program(tuple(flat), frozenset(columns)).bind(columns, targets, scratch)
        for i in range(len(blocks)):
            compute(i)
        return packed


def flat_nodes(groups: Sequence[Group]) -> list[Node]:
    """The expressions of all groups, one after the other."""
    return [node for _, nodes in groups for node in nodes]


def regroup(groups: Sequence[Group], flat: Sequence[Node]) -> Groups:
    """The groups with other expressions, given one after the other: `flat_nodes` undone."""
    rest = iter(flat)
    return tuple((name, tuple(next(rest) for _ in nodes)) for name, nodes in groups)


def block_sizes(rows: Rows | None, count: int, d: int) -> list[int]:
    """The sizes of the blocks of rows that are computed at a time, each within one chunk of steps.

    rows None: all `count` rows are one chunk. d: the units of one entry.
    """
    size = max(1, BLOCK_ELEMENTS // d)
    chunks = rows.chunks if rows else [range(count)]
    return [len(block) for chunk in chunks for block in split_range(chunk, size)]


class Runner(Protocol):
    """A function that computes the nonzero outputs of a Pointwise, row by row."""

    def __call__(
        self,
        op: Pointwise,
        rows: Rows | None,
        at_hand: Sequence[Tensor | None],
        tensors: Sequence[Tensor | None],
        /,
    ) -> list[Tensor]:
        """The outputs in the order of `op.nonzero_groups`."""


# By device: the engine that runs a Pointwise faster than torch's own operations. Engines import
# this module, so they are found by name when they are first needed.
RUNNERS = {"cpu": "c.engine", "cuda": "cuda.engine"}


def compiled_runner(device: str, elements: int) -> Runner | None:
    """What runs a Pointwise on this device instead of torch's operations, if `elements` are enough.

    They are counted over the full sequence, so that its segments all run the same way. On a GPU any
    number is enough: one kernel instead of a launch for each operation.
    """
    if device not in RUNNERS or (device == "cpu" and elements < COMPILED_FROM):
        return None
    engine = importlib.import_module(f"{__package__}.engines.{RUNNERS[device]}")
    if engine.refusal(device) is not None:
        return None
    runner: Runner = engine.pointwise
    return runner


@functools.cache
def program(outputs: tuple[Node, ...], given: frozenset[Node]) -> Program:
    """The program that computes `outputs` where the values of `given` are known."""
    return Program(outputs, given)


class PointwiseContext(Context):
    """The context of _Apply."""

    op: Pointwise
    rows: Rows | None
    shapes: list[tuple[int, ...]]  # of the nonzero outputs


@with_quick_apply
class _Apply(SweepFunction):
    """apply(op, rows, *values at hand, *inputs).

    The values at hand are constants: derivatives go through the expressions.
    """

    @staticmethod
    def forward(op: Pointwise, rows: Rows | None, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """The outputs that are not identically zero."""
        split = len(op.known)  # the values at hand come before the inputs
        return tuple(op.run(rows, tensors[:split], tensors[split:]))

    @staticmethod
    def setup_context(ctx: PointwiseContext, inputs: Inputs, output: tuple[Tensor, ...]) -> None:
        """Keep all arguments."""
        ctx.op, ctx.rows, *tensors = inputs
        ctx.shapes = [y.shape for y in output]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: PointwiseContext, *bars: Tensor | None) -> Gradients:
        """The gradients by the inputs, from the cotangents `bars` of the nonzero outputs."""
        op = ctx.op
        saved = ctx.saved_tensors
        split = len(op.known)  # the values at hand come before the inputs
        constants = 2 + split  # op, rows and the values at hand
        seeds = present(op.nonzero_outputs, bars)
        need = needed_inputs(ctx)[constants:]
        wrt = tuple(group[0] for group, needed in zip(op.inputs, need, strict=True) if needed)
        if not seeds or not wrt:
            return (None,) * (2 + len(saved))
        gradient = op.pulled(tuple(seeds), wrt)
        grads = gradient(saved[:split], *saved[split:], *seeds.values(), rows=ctx.rows)
        return (*[None] * constants, *[grads.get(name) for name, _ in op.inputs])

    @staticmethod
    @nestable_jvp
    def jvp(
        ctx: PointwiseContext, _op: None, _rows: None, *dots: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The directions of the nonzero outputs, from those of the inputs in `dots`."""
        op = ctx.op
        saved = ctx.saved_tensors
        split = len(op.known)  # the values at hand come before the inputs
        along = present([name for name, _ in op.inputs], dots[split:])
        tangent = op.pushed(tuple(along))
        out = tangent(saved[:split], *saved[split:], *along.values(), rows=ctx.rows)
        changes: list[Tensor] = []
        for name, shape in zip(op.nonzero_outputs, ctx.shapes, strict=True):
            change = out[name]
            if change is None:  # zero along these directions; torch wants a tensor all the same
                change = next(iter(along.values())).new_zeros(shape)
            changes.append(change)
        return tuple(changes)


def present(names: Sequence[str], tensors: Sequence[Tensor | None]) -> dict[str, Tensor]:
    """The tensors that are not None, by name and in order."""
    pairs = zip(names, tensors, strict=True)
    return {name: y for name, y in pairs if y is not None}

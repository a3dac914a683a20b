"""Arrays as views of their time steps, for loops that write into arrays made before them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ....cells.cell import Cell
from ....cells.formula import Node, evaluate_nodes
from ...plan import Saved, SweepPlan
from ...rows import Rows

Views = Sequence[Tensor]  # one for each step, or for each block of steps


class StepViews:
    """Arrays as views of their time steps, made once: a view costs as much as a small operation."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.made: dict[Any, Views] = {}

    def _once(self, make: Callable[[Tensor], Views], y: Tensor) -> Views:
        key = (make.__name__, y.data_ptr(), y.shape)
        if key not in self.made:
            self.made[key] = make(y)
        return self.made[key]

    def steps(self, y: Tensor) -> Views:
        return self._once(self.rows.steps, y)

    def states(self, x: Tensor) -> Views:
        return self._once(self.rows.states, x)

    def before(self, x: Tensor) -> Views:
        return self.shortened(self.states(x))

    def after(self, x: Tensor) -> Views:
        return self.states(x)[1:]

    def shortened(self, states: Views) -> Views:
        """x_{t-1} for the samples that take step t."""
        return (
            states[:-1]
            if self.rows.uniform
            else [y[:n] for y, n in zip(states, self.rows.sizes, strict=False)]
        )

    def same(self, y: Tensor) -> Views:
        """One array [B, .] that every step may overwrite."""
        return [y] * self.rows.T if self.rows.uniform else [y[:n] for n in self.rows.sizes]

    def alternating(self, two: Tensor) -> Views:
        """Two arrays [B, .] in turn, as states: x_0 is in the first."""
        pair = two.split(self.rows.B)
        sizes = [self.rows.B, *self.rows.sizes]
        return [pair[t % 2] if self.rows.uniform else pair[t % 2][:n] for t, n in enumerate(sizes)]


class NodeViews(dict[Node, Any]):
    """For each node its views, made when they are first asked for: most programs read few of the arrays at hand."""

    def pack(
        self, nodes: Sequence[Node], array: Tensor | None, split: Callable[[Tensor], Views]
    ) -> NodeViews:
        """An array [., m d] that holds m nodes side by side."""
        if array is not None and nodes:
            for node, part in zip(
                nodes, [array] if len(nodes) == 1 else array.chunk(len(nodes), -1), strict=True
            ):
                self[node] = functools.partial(split, part)
        return self

    def __getitem__(self, node: Node) -> Views:
        views = super().__getitem__(node)
        if callable(views):
            self[node] = views = views()
        return views

    def joined(self, more: NodeViews) -> NodeViews:
        return NodeViews(dict(self) | dict(more))


def target_views(array: Tensor, count: int, split: Callable[[Tensor], Views]) -> list[Views]:
    """The `count` entries packed in an array, as views to write to."""
    return [split(part) for part in ([array] if count == 1 else array.chunk(count, -1))]


def parameter_views(cell: Cell, p: Tensor | None, once: Sequence[Node], length: int) -> NodeViews:
    """The parameters and what is made of them alone, [d] each, the same at every step."""
    if p is None:
        return NodeViews()
    values = dict(zip(cell.p, p.chunk(len(cell.p)), strict=True))
    values |= dict(zip(once, evaluate_nodes(once, values), strict=True))
    return NodeViews({n: [value] * length for n, value in values.items()})


def step_views_of_chunks(rows: Rows, chunks: Sequence[tuple[int, int]], views: Views) -> Views:
    """The views of a chunk's buffer, as views of its steps."""
    if rows.uniform:
        steps = views[0].split(rows.B)
        return [s for lo, hi in chunks for s in steps[: hi - lo]]
    sizes = [rows.sizes[lo:hi] for lo, hi in chunks]
    return [s for view, n in zip(views, sizes, strict=True) for s in view.split(n)]


def saved_views(
    plan: SweepPlan,
    saved: Saved,
    split: Callable[[Tensor], Views],
    before: Callable[[Tensor], Views],
) -> NodeViews:
    """What the slopes are made of: a, v, x_{t-1}, and the values at hand."""
    cell, rows = plan.cell, plan.rows
    known = (
        NodeViews().pack(cell.next, saved.x[rows.B :], split).pack(cell.saved_nodes, saved.q, split)
    )
    found = NodeViews({n: views for n, views in known.items() if n.args})
    if cell.needs_a or saved.q is None:
        found.pack(cell.a, saved.a, split)
    return found.pack(cell.v, saved.v, split).pack(cell.x, saved.x, before)

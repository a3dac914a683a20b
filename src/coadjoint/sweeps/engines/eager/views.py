"""Arrays as views of their time steps, for loops that write into arrays made before them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from ....cells.cell import Cell
from ....cells.formula import Node, evaluate_nodes
from ...plan import Saved, SweepPlan
from ...rows import Rows

Views = Sequence[Tensor]  # one for each step, or for each block of steps
Split = Callable[[Tensor], Views]


class StepViews:
    """Arrays as views of their time steps, made once: a view costs as much as a small operation."""

    def __init__(self, rows: Rows) -> None:
        """Begin without views; _made keeps them by (kind of views, address, shape) of an array."""
        self.rows = rows
        self._made: dict[tuple[str, int, tuple[int, ...]], Views] = {}

    def _once(self, split: Split, y: Tensor) -> Views:
        """split(y), from memory if these views of this array were made before."""
        key = (split.__name__, y.data_ptr(), y.shape)
        if key not in self._made:
            self._made[key] = split(y)
        return self._made[key]

    def steps(self, y: Tensor) -> Views:
        """A step array [N, .] as T views [n_t, .], n_t the samples that take step t."""
        return self._once(self.rows.steps, y)

    def states(self, x: Tensor) -> Views:
        """A state array [B + N, .] as T + 1 views: x_0 of all B samples, then x_1 .. x_T."""
        return self._once(self.rows.states, x)

    def before(self, x: Tensor) -> Views:
        """The states x_{t-1} of the samples that take step t, as T views."""
        return self.shortened(self.states(x))

    def after(self, x: Tensor) -> Views:
        """The states x_1 .. x_T of a state array, as T views."""
        return self.states(x)[1:]

    def shortened(self, states: Views) -> Views:
        """The views of x_0 .. x_{T-1}, each cut to the samples that take the next step."""
        if self.rows.uniform:
            return states[:-1]
        return [y[:n] for y, n in zip(states, self.rows.sizes, strict=False)]

    def same(self, y: Tensor) -> Views:
        """One array [B, .] for every step, which each step may overwrite."""
        if self.rows.uniform:
            return [y] * self.rows.T
        return [y[:n] for n in self.rows.sizes]

    def alternating(self, two: Tensor) -> Views:
        """Two arrays [B, .], one below the other, as T + 1 views of states that take turns.

        x_0, x_2, ... have the first, x_1, x_3, ... the second: for states read one step later only.
        """
        pair = two.split(self.rows.B)
        sizes = [self.rows.B, *self.rows.sizes]
        if self.rows.uniform:
            return [pair[t % 2] for t in range(len(sizes))]
        return [pair[t % 2][:n] for t, n in enumerate(sizes)]


class NodeViews(Mapping[Node, Views]):
    """The views of each node, made when they are first read: most programs read few nodes."""

    def __init__(self, views: Mapping[Node, Views] | None = None) -> None:
        self._views: dict[Node, Views | functools.partial[Views]] = dict(views or {})

    def __getitem__(self, node: Node) -> Views:
        """The views of a node; a partial is called the first time, and its result kept."""
        views = self._views[node]
        if isinstance(views, functools.partial):
            views = views()
            self._views[node] = views
        return views

    def __contains__(self, node: object) -> bool:
        return node in self._views

    def __iter__(self) -> Iterator[Node]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def set(self, node: Node, views: Views | functools.partial[Views]) -> None:
        """Set the views of a node, or a partial that makes them when they are first read."""
        self._views[node] = views

    def pack(self, nodes: Sequence[Node], array: Tensor | None, split: Split) -> NodeViews:
        """Add the m nodes that an array [., m d] holds side by side; return self.

        split: makes views of the time steps of an array. Without an array nothing is added.
        """
        if array is not None and nodes:
            for node, part in zip(nodes, _columns(array, len(nodes)), strict=True):
                self.set(node, functools.partial(split, part))
        return self

    def joined(self, more: NodeViews) -> NodeViews:
        """These views and `more`; where a node is in both, that of `more` counts."""
        both = NodeViews()
        both._views = self._views | more._views
        return both

    def only(self, nodes: Sequence[Node]) -> NodeViews:
        """The views of some of the nodes."""
        some = NodeViews()
        some._views = {n: self._views[n] for n in nodes}
        return some


def _columns(array: Tensor, count: int) -> Sequence[Tensor]:
    """An array [., count d] as `count` arrays [., d]."""
    return [array] if count == 1 else array.chunk(count, -1)


def target_views(array: Tensor, count: int, split: Split) -> list[Views]:
    """The `count` entries [., d] that an array holds side by side, each as views of its steps."""
    return [split(part) for part in _columns(array, count)]


def parameter_views(cell: Cell, p: Tensor | None, terms: Sequence[Node], length: int) -> NodeViews:
    """The parameters, and terms made of them alone: [d] each, the same at all `length` steps."""
    if p is None:
        return NodeViews()
    values = dict(zip(cell.p, p.chunk(len(cell.p)), strict=True))
    values |= dict(zip(terms, evaluate_nodes(terms, values), strict=True))
    return NodeViews({node: [value] * length for node, value in values.items()})


def step_views_of_blocks(rows: Rows, blocks: Sequence[tuple[int, int]], buffers: Views) -> Views:
    """One view for each step, from one buffer for each block of steps.

    Block (lo, hi) has the steps lo .. hi - 1, one below the other in its buffer.
    """
    views: list[Tensor] = []
    if rows.uniform:  # the steps of all blocks lie alike in the one buffer that they share
        steps = buffers[0].split(rows.B)
        for lo, hi in blocks:
            views += steps[: hi - lo]
        return views
    for (lo, hi), buffer in zip(blocks, buffers, strict=True):
        views += buffer.split(rows.sizes[lo:hi])
    return views


def saved_views(plan: SweepPlan, saved: Saved, split: Split, before: Split) -> NodeViews:
    """What a forward sweep saved, as the slopes read it: values of nodes, a, v and x_{t-1}.

    split: makes views of a step array, for steps or blocks of them. before: those of the states
    x_{t-1}, from a state array.
    """
    cell = plan.cell
    after_x0 = saved.x[plan.rows.B :]  # x_1 .. x_T, a step array
    computed = NodeViews().pack(cell.next, after_x0, split).pack(cell.saved_nodes, saved.q, split)
    # A node without arguments is an input or a constant, not computed: a cell may return one as its
    # next state. It has a value wherever it is needed.
    views = computed.only([node for node in computed if node.args])
    # Without q (the engine saved no nodes) those nodes are computed again from a.
    if cell.needs_a or saved.q is None:
        views.pack(cell.a, saved.a, split)
    return views.pack(cell.v, saved.v, split).pack(cell.x, saved.x, before)

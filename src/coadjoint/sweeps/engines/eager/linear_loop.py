"""What the adjoint and the tangent loop of in_place share, and the steps of the adjoint."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ....cells.formula import ZERO, Node, add
from ...plan import Saved, SweepPlan
from ...pointwise import BLOCK_ELEMENTS, program
from ...weights import matrices
from ..expressions import adjoint_step, hoisted_terms
from .views import (
    NodeViews,
    StepViews,
    Views,
    parameter_views,
    saved_views,
    step_views_of_blocks,
    target_views,
)


def _no_slopes(block: int) -> None:
    """Compute nothing: the loop has no slopes that can be computed before it."""


class LinearLoop:
    """What the adjoint and the tangent loop share.

    Both are linear in what moves from step to step (lam or mu), with slopes that depend on the
    values that the forward sweep saved. The slopes of a block of steps are computed at once, by
    compute_slopes(i) for the steps lo .. hi - 1 of blocks[i] = (lo, hi). Blocks share their
    buffers, so the steps of one must run before the slopes of the next are computed.

    outputs   the expressions of a step
    moving    their inputs that change from step to step inside the loop (lam, or mu and nu)
    """

    def __init__(
        self, plan: SweepPlan, saved: Saved, outputs: tuple[Node, ...], moving: tuple[Node, ...]
    ) -> None:
        """Gather what is known before the loop, and cut the steps into blocks for the slopes."""
        cell = plan.cell
        rows = plan.rows
        self.rows = rows
        self.views = StepViews(rows)
        self.like = saved.x
        self.d = saved.x.shape[1] // len(cell.slots)
        # A next state without arguments is a copy of an input, not a computed value.
        saved_nodes = frozenset(n for n in (*cell.next, *cell.saved_nodes) if n.args)
        parameter_terms, slopes = hoisted_terms(cell, outputs, moving, saved_nodes)
        parameters = parameter_views(cell, saved.p, parameter_terms, rows.T)
        values = saved_views(plan, saved, self.views.steps, self.views.before)
        self.known = parameters.joined(values)  # the views of all that is known, by node
        # Steps of a block: its intermediate values [steps B, d] should stay in cache.
        size = max(1, BLOCK_ELEMENTS // (rows.B * self.d))
        self.blocks = [(lo, min(lo + size, rows.T)) for lo in range(0, rows.T, size)]
        self.compute_slopes: Callable[[int], None] = _no_slopes
        if slopes:
            self._bind_slopes(plan, saved, slopes, parameters)

    def _bind_slopes(
        self, plan: SweepPlan, saved: Saved, slopes: tuple[Node, ...], parameters: NodeViews
    ) -> None:
        """Set compute_slopes, and let self.known read each slope from the buffers it fills."""
        rows = self.rows
        starts = [rows.starts[lo] for lo, _ in self.blocks] + [rows.N]
        sizes = [end - start for start, end in itertools.pairwise(starts)]  # rows of each block

        def split(y: Tensor) -> Views:
            """A step array as one view for each block."""
            return torch.split(y, sizes)

        def split_before(x: Tensor) -> Views:
            """The states x_{t-1} of a state array as one view for each block."""
            return torch.split(rows.prev(x), sizes)

        def buffer() -> Views:
            """One array that all blocks share, as long as the longest, cut to each of them."""
            largest = self.like.new_empty(max(sizes), self.d)
            return [largest[:n] for n in sizes]

        inputs = saved_views(plan, saved, split, split_before)
        for node, views in parameters.items():
            inputs.set(node, [views[0]] * len(sizes))  # the same in all blocks
        buffers = [buffer() for _ in slopes]
        self.compute_slopes = program(slopes, frozenset(inputs)).bind(inputs, buffers, buffer)
        for node, views in zip(slopes, buffers, strict=True):
            make_views = functools.partial(step_views_of_blocks, rows, self.blocks, views)
            self.known.set(node, make_views)

    def bind(
        self, outputs: Sequence[Node], more: NodeViews, into: Sequence[Views]
    ) -> Callable[[int], None]:
        """A function of t that computes the outputs of step t and writes them to `into`.

        more: the views of what is not in self.known, by node.
        """
        given = self.known.joined(more)
        return program(tuple(outputs), frozenset(given)).bind(given, into, self.scratch)

    def scratch(self) -> Views:
        """A buffer [B, d] that every step may overwrite."""
        return self.views.same(self.like.new_empty(self.rows.B, self.d))


class AdjointLoop(LinearLoop):
    """The steps of the adjoint loop, without sources and factors (t counts from 0).

        step(t)   delta_{t+1} = sa_{t+1} + f_a' lam_{t+1}
                  lam_t      <- f_x' lam_{t+1} + r' W' delta_{t+1}

    lam       lam_0 .. lam_T as views; keep: each has its own rows, otherwise two arrays take turns
    pulled    where step(t) writes: the rows of lam_t of the samples that have a state x_{t+1}
    delta     where the delta are written, [N, .]
    sa        the sources of a, [N, .] or None
    """

    def __init__(
        self,
        plan: SweepPlan,
        saved: Saved,
        W: Tensor | None,
        lam: Tensor,
        keep: bool,
        delta: Tensor,
        sa: Tensor | None,
    ) -> None:
        """Set self.step: a function of t that reads lam_{t+1} and writes delta_{t+1} and lam_t."""
        cell = plan.cell
        e = adjoint_step(cell)  # the expressions of a step
        # Where what W reads is constant, nothing comes back through it.
        if not e.uses_W:
            W = None
        outputs = (*e.into_a, *e.into_x)
        if W is not None:
            outputs = (*outputs, *e.through_read)
        super().__init__(plan, saved, outputs, (*e.lam, *e.rbar))
        views = self.views
        slots = len(cell.slots)
        states = views.states if keep else views.alternating
        self.lam = states(lam)
        self.pulled = views.shortened(self.lam)
        # earlier: lam_t, which step(t) writes; given: lam_{t+1}, which it reads; for each slot.
        # One slot is all of lam, and its views are at hand; several are columns of it.
        if slots == 1:
            earlier = [self.pulled]
            given = NodeViews({e.lam[0]: self.lam[1:]})
        else:
            earlier = target_views(lam, slots, lambda part: views.shortened(states(part)))
            given = NodeViews().pack(e.lam, lam, lambda part: states(part)[1:])
        into_a = e.into_a  # f_a' lam_{t+1}, to which sa is added
        if sa is not None:
            given.pack(e.sa, sa, views.steps)
            into_a = tuple(map(add, e.into_a, e.sa))
        written = self._slots_written_before_product(plan, W)
        targets = target_views(delta, len(cell.gates), views.steps)
        targets += [earlier[i] for i in written]
        # The elementwise part of a step, into delta and those slots; the product with W follows.
        pull = self.bind([*into_a, *(e.into_x[i] for i in written)], given, targets)
        deltas = views.steps(delta)
        self.step = pull
        if W is not None and cell.read_slot is not None:  # r(x) is a slot of x
            adds = cell.read_slot in written
            W_steps = matrices(plan.rows, W)
            self.step = _with_product(pull, deltas, W_steps, earlier[cell.read_slot], adds)
        elif W is not None:
            self.step = self._with_read(plan, pull, deltas, W, earlier, written)

    @staticmethod
    def _slots_written_before_product(plan: SweepPlan, W: Tensor | None) -> list[int]:
        """The numbers of the slots of lam_t that f_x' lam_{t+1} is written to, even if it is zero.

        A slot where it is zero is left out if what comes through W overwrites the slot: W writes
        to the slot that it reads, or to all of them where r is a formula (read_slot is None).
        """
        cell = plan.cell
        e = adjoint_step(cell)
        written = []
        for i in range(len(cell.slots)):
            overwritten = W is not None and cell.read_slot in (i, None)
            if e.into_x[i] is not ZERO or not overwritten:
                written.append(i)
        return written

    def _with_read(
        self,
        plan: SweepPlan,
        pull: Callable[[int], None],
        deltas: Views,
        W: Tensor,
        earlier: Sequence[Views],
        written: Sequence[int],
    ) -> Callable[[int], None]:
        """The step: pull, then add r' W' delta to lam_t, where r is a formula, not one slot of x.

        earlier: the views of lam_t, for each slot. written: the slots where pull has written
        f_x' lam_{t+1}; the others are overwritten.
        """
        e = adjoint_step(plan.cell)
        buffer = self.like.new_empty(self.rows.B, W.shape[-1])
        W_steps = matrices(self.rows, W)
        products = self.views.same(buffer)  # W' delta_{t+1}
        given = NodeViews(dict(zip(e.so_far, earlier, strict=True)))
        given.pack(e.rbar, buffer, self.views.same)
        sums = list(e.through_read)
        for i in written:
            sums[i] = add(e.so_far[i], e.through_read[i])
        pull_read = self.bind(sums, given, earlier)

        def step(t: int) -> None:
            """lam_t <- f_x' lam_{t+1} + r' W' delta, in all slots."""
            pull(t)
            torch.mm(deltas[t], W_steps[t], out=products[t])
            pull_read(t)

        return step


def _with_product(
    pull: Callable[[int], None], deltas: Views, W: Views, target: Views, adds: bool
) -> Callable[[int], None]:
    """The step: pull, then W' delta into `target`, the slot of lam_t that W reads.

    W: the matrix of each step.
    adds: pull has written f_x' lam_{t+1} there, and the product is added to it.
    """

    def add_product(t: int) -> None:
        """lam_t <- f_x' lam_{t+1} + W' delta, in the slot that W reads."""
        pull(t)
        target[t].addmm_(deltas[t], W[t])

    def write_product(t: int) -> None:
        """lam_t <- W' delta, in the slot that W reads."""
        pull(t)
        torch.mm(deltas[t], W[t], out=target[t])

    return add_product if adds else write_product

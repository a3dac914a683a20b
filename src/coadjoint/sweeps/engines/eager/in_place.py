"""Engine `eager` on a CPU: preallocated arrays, `out=` everywhere, no autograd inside the loops.

The slopes of a block of steps are computed at once (linear_loop), so a step of the adjoint or
tangent loop is one product with W and the few operations that involve the direction itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ....cells.cell import Cell
from ....cells.formula import add
from ...memory import empty
from ...plan import Saved, SweepPlan
from ...pointwise import program
from ...rows import Link, Rows
from ...weights import matrices
from ..denormals import flush_denormals
from ..expressions import hoisted_terms, tangent_step
from .linear_loop import AdjointLoop, LinearLoop
from .scaled_adjoint import ScaledAdjoint
from .views import NodeViews, StepViews, Views, parameter_views, target_views


def refusal(device: str) -> str | None:
    """None: it runs on any device, though it is made for a CPU."""
    return None


@torch.no_grad()
def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward loop of Engine, each step into arrays made before it.

    Where no derivative reads a, it lives in one buffer, and the array returned has no values.
    """
    cell = plan.cell
    rows = plan.rows
    views = StepViews(rows)
    slots = len(cell.slots)
    d = x0.shape[1] // slots
    x = empty((rows.B + rows.N, x0.shape[1]), base)
    x[: rows.B] = x0
    outputs = target_views(x, slots, views.after)
    q = None
    if cell.saved_nodes:
        q = empty((rows.N, d * len(cell.saved_nodes)), base)
        outputs += target_views(q, len(cell.saved_nodes), views.steps)
    a = base.clone() if W is None else empty(base.shape, base)
    arguments = a  # where a_t is written and read
    split_arguments = views.steps  # as views of its steps
    if W is not None and not cell.needs_a:
        # No derivative reads a: it lives in one buffer, and the array returned stays unset.
        arguments = base.new_empty(rows.B, base.shape[1])
        split_arguments = views.same

    def scratch() -> Views:
        """A buffer [B, d] for an intermediate value, which every step may overwrite."""
        return views.same(x.new_empty(rows.B, d))

    # Terms made of parameters alone are computed once, not at every step.
    parameter_terms, _ = hoisted_terms(cell, (*cell.next, *cell.read), (), frozenset())
    given = parameter_views(cell, p, parameter_terms, rows.T)  # the inputs of a step, by node
    given.pack(cell.a, arguments, split_arguments)
    given.pack(cell.x, x, views.before).pack(cell.v, v, views.steps)
    step = program((*cell.next, *cell.saved_nodes), frozenset(given)).bind(given, outputs, scratch)
    with flush_denormals():
        if W is None:
            for t in range(rows.T):
                step(t)
            return x, a, q
        read: Callable[[int], None] | None = None  # computes r(x_{t-1}), unless it is a slot of x
        if cell.read_slot is not None:
            r = given[cell.read[0]]  # the views of that slot
        else:
            buffer = x.new_empty(rows.B, W.shape[-1])
            r = views.same(buffer)
            targets = target_views(buffer, len(cell.read), views.same)
            read = program(cell.read, frozenset(given)).bind(given, targets, scratch)
        Wt = matrices(rows, W.mT.contiguous())
        bases = views.steps(base)
        sums = split_arguments(arguments)  # a_t
        for t in range(rows.T):
            if read is not None:
                read(t)
            torch.addmm(bases[t], r[t], Wt[t], out=sums[t])
            step(t)
    return x, a, q


@torch.no_grad()
def adjoint(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    s: Tensor | None,
    s_last: Tensor | None,
    sa: Tensor | None,
    link: Link | None,
    scaled: bool,
    keep: bool,
    k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The adjoint loop of Engine, with the slopes of a block of steps computed at once.

    keep: where lam is read at the first step alone, it has two states' rows, which take turns.
    """
    rows = plan.rows
    delta = empty(saved.a.shape, saved.x)
    # One array of sources, unless s_last has exponents of its own.
    if s is not None and s_last is not None and not scaled:
        s = s + rows.last_transposed(s_last)
        s_last = None
    if keep:
        lam = empty(saved.x.shape, saved.x)
    else:
        lam = saved.x.new_empty(2 * rows.B, saved.x.shape[1])
    with flush_denormals():
        loop = AdjointLoop(plan, saved, W, lam, keep, delta, sa)
        factors = active_factors(rows, link)
        if scaled:
            return lam, delta, ScaledAdjoint(loop, s, s_last, k_last, factors).run()
        sources = None if s is None else rows.states(s)
        # loop.step(t) takes lam_{t+1} to lam_t and writes it here, for the samples that have both.
        pulled = loop.pulled
        start_samples(loop, sources, s_last, rows.T)
        for i, (lo, hi) in reversed(list(enumerate(loop.blocks))):
            loop.compute_slopes(i)
            for t in reversed(range(lo, hi)):
                loop.step(t)
                if t in factors:
                    pulled[t].mul_(factors[t])
                if sources is not None:
                    pulled[t].add_(sources[t][: rows.sizes[t]])
                if not rows.uniform:  # some samples may end at x_t
                    start_samples(loop, sources, s_last, t)
    return lam, delta, None


def active_factors(rows: Rows, link: Link | None) -> dict[int, Tensor]:
    """The factors [n_t, 1] of `link` at the steps where they are not all one, by step from 0."""
    if link is None:
        return {}
    factors = {}
    for t, active in enumerate(link.active):
        if active:
            factors[t] = link.factor[rows.starts[t] : rows.starts[t + 1]]
    return factors


def start_samples(loop: AdjointLoop, sources: Views | None, s_last: Tensor | None, t: int) -> None:
    """Set lam_t of the samples whose last state is x_t to their source; zero without one.

    They are those after the first `going_on`, which take another step. sources: those of all
    states, with s_last added to them, as views; None if there is s_last alone, or nothing.
    """
    rows = loop.rows
    lam = loop.lam[t]
    count = rows.sizes[t - 1] if t else rows.B  # samples that have a state x_t
    going_on = rows.sizes[t] if t < rows.T else 0
    if count == going_on:
        return
    source = s_last if sources is None else sources[t]
    if source is None:
        lam[going_on:].zero_()
    else:
        lam[going_on:] = source[going_on:count]


@torch.no_grad()
def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None,
) -> tuple[Tensor, Tensor]:
    """The tangent loop of Engine, with the slopes of a block of steps computed at once."""
    cell = plan.cell
    rows = plan.rows
    slots = len(cell.slots)
    e = tangent_step(cell)  # the expressions of a step
    # Where what W reads is constant, no direction goes through it.
    if not e.uses_W:
        W = None
    mu = empty(saved.x.shape, saved.x)
    nu = empty(saved.a.shape, saved.x)
    with flush_denormals():
        outputs = e.out if W is None else (*e.out, *e.through_read)
        loop = LinearLoop(plan, saved, outputs, (*e.mu, *e.nu))
        views = loop.views
        before = views.before(mu)
        given = NodeViews().pack(e.mu, mu, views.before).pack(e.nu, nu, views.steps)
        m = before  # m_t of each step
        factors = active_factors(rows, link)
        if factors:
            # Where the factor is not one, m_t = factor_t mu_{t-1} is written to a buffer.
            buffer = mu.new_empty(rows.B, mu.shape[1])
            m = replace_steps(before, views.same(buffer), factors)
            for node, part in zip(e.mu, target_views(buffer, slots, views.same), strict=True):
                given.set(node, replace_steps(given[node], part, factors))
        out = e.out  # f_x m_t + f_a nu_t, to which g_t is added
        if g is not None:
            given.pack(e.g, g, views.after)
            out = tuple(map(add, e.out, e.g))
        mu[: rows.B] = 0 if g is None else g[: rows.B]
        step = loop.bind(out, given, target_views(mu, slots, views.after))
        Wt: Views | None = None
        r: Views = ()
        read: Callable[[int], None] | None = None
        if W is not None:
            Wt = matrices(rows, W.mT.contiguous())
            r, read = bind_read_change(loop, cell, given, W.shape[-1])
        elif ga is not None:  # without W, nu_t = ga_t at all steps
            nu.copy_(ga)
        else:
            nu.zero_()
        nus = views.steps(nu)
        step_sources = None if ga is None else views.steps(ga)
        for i, (lo, hi) in enumerate(loop.blocks):
            loop.compute_slopes(i)
            for t in range(lo, hi):
                if t in factors:
                    torch.mul(before[t], factors[t], out=m[t])
                if read is not None:
                    read(t)
                if Wt is not None and step_sources is None:
                    torch.mm(r[t], Wt[t], out=nus[t])
                elif Wt is not None and step_sources is not None:
                    torch.addmm(step_sources[t], r[t], Wt[t], out=nus[t])
                step(t)
    return mu, nu


def bind_read_change(
    loop: LinearLoop, cell: Cell, given: NodeViews, width: int
) -> tuple[Views, Callable[[int], None] | None]:
    """The views of r' m_t [n_t, width], and the function of t that computes them.

    Where r is a slot of the state, they are that slot of m_t, and the function is None.
    given: the views of mu and nu, by node. width: columns of W.
    """
    e = tangent_step(cell)
    if cell.read_slot is not None:
        return given[e.mu[cell.read_slot]], None
    buffer = loop.like.new_empty(loop.rows.B, width)
    targets = target_views(buffer, len(cell.read), loop.views.same)
    return loop.views.same(buffer), loop.bind(e.through_read, given, targets)


def replace_steps(views: Views, other: Views, steps: Mapping[int, Tensor]) -> Views:
    """The views of all steps, with those of `other` at the steps that are keys of `steps`."""
    return [other[t] if t in steps else view for t, view in enumerate(views)]

"""Engine `eager` on a CPU: preallocated arrays, `out=` everywhere, no autograd inside the loops.

The slopes of a block of steps are computed at once, so that a step of the adjoint or tangent loop is one product with
W and the few operations that involve the direction itself. Denormal numbers, which vanishing costates are made of and
which cost a CPU a hundred times more than zeros, are flushed inside and the caller's setting is restored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ....cells.formula import ZERO, Node, add
from ...memory import empty
from ...plan import Saved, SweepPlan
from ...pointwise import BLOCK_ELEMENTS, program
from ...rows import NO_EXPONENT, Link, Rows, exponent, pow2, scale
from ..expressions import adjoint_step, hoisted_terms, tangent_step
from .views import (
    NodeViews,
    StepViews,
    Views,
    parameter_views,
    saved_views,
    step_views_of_chunks,
    target_views,
)

BLOCK = 8  # steps that share one exponent, to begin with


@contextlib.contextmanager
def flush_denormals() -> Iterator[None]:
    """Denormals are zero inside. torch cannot be asked for the setting, so a denormal is put to the test."""
    before = (torch.tensor(1e-310, dtype=torch.float64) * 1.0).item() == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@torch.no_grad()
def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    cell, rows, cut = plan.cell, plan.rows, StepViews(plan.rows)
    slots, d = len(cell.slots), x0.shape[1] // len(cell.slots)
    x = empty((rows.B + rows.N, x0.shape[1]), base)
    x[: rows.B] = x0
    q = empty((rows.N, d * len(cell.saved_nodes)), base) if cell.saved_nodes else None
    a = base.clone() if W is None else empty(base.shape, base)
    here, views = a, cut.steps
    if (
        W is not None and not cell.needs_a
    ):  # no derivative reads a: it lives in one buffer, its place in the tape untouched
        here, views = base.new_empty(rows.B, base.shape[1]), cut.same
    once, _ = hoisted_terms(cell, (*cell.next, *cell.read), (), frozenset())
    given = parameter_views(cell, p, once, rows.T).pack(cell.a, here, views)
    given.pack(cell.x, x, cut.before).pack(cell.v, v, cut.steps)
    scratch = lambda: cut.same(x.new_empty(rows.B, d))
    outputs = target_views(x, slots, cut.after) + (
        [] if q is None else target_views(q, len(cell.saved_nodes), cut.steps)
    )
    step = program((*cell.next, *cell.saved_nodes), frozenset(given)).bind(given, outputs, scratch)
    with flush_denormals():
        if W is None:
            for t in range(rows.T):
                step(t)
            return x, a, q
        read = None
        if cell.read_slot is not None:
            r = given[cell.read[0]]
        else:
            whole = x.new_empty(rows.B, W.shape[1])
            r = cut.same(whole)
            read = program(cell.read, frozenset(given)).bind(
                given, target_views(whole, len(cell.read), cut.same), scratch
            )
        Wt, bases, arguments = W.t().contiguous(), cut.steps(base), views(here)
        for t in range(rows.T):
            if read is not None:
                read(t)
            torch.addmm(bases[t], r[t], Wt, out=arguments[t])
            step(t)
    return x, a, q


class LinearLoop:
    """One linear loop: its expressions, and its slopes computed a block of steps at a time."""

    def __init__(
        self, plan: SweepPlan, saved: Saved, outputs: tuple[Node, ...], moving: tuple[Node, ...]
    ) -> None:
        cell, rows = plan.cell, plan.rows
        self.rows, self.cut, self.like = rows, StepViews(rows), saved.x
        self.d = saved.x.shape[1] // len(cell.slots)
        at_hand = frozenset(n for n in (*cell.next, *cell.saved_nodes) if n.args)
        once, slopes = hoisted_terms(cell, outputs, moving, at_hand)
        fixed = parameter_views(cell, saved.p, once, rows.T)
        self.columns = fixed.joined(saved_views(plan, saved, self.cut.steps, self.cut.before))
        size = max(1, BLOCK_ELEMENTS // (rows.B * self.d))
        self.chunks = [(lo, min(lo + size, rows.T)) for lo in range(0, rows.T, size)]
        self.refresh: Callable[[int], None] = lambda i: None
        if slopes:
            starts = [rows.starts[lo] for lo, _ in self.chunks] + [rows.N]
            sizes = [b - a for a, b in itertools.pairwise(starts)]
            split = functools.partial(torch.split, split_size_or_sections=sizes)
            inputs = saved_views(plan, saved, split, lambda x: split(rows.prev(x)))
            inputs |= {n: [views[0]] * len(sizes) for n, views in fixed.items()}
            scratch = lambda: [
                b[:n] for b in [self.like.new_empty(max(sizes), self.d)] for n in sizes
            ]
            buffers = [scratch() for _ in slopes]
            self.refresh = program(slopes, frozenset(inputs)).bind(
                NodeViews(inputs), buffers, scratch
            )
            for node, views in zip(slopes, buffers, strict=True):
                self.columns[node] = functools.partial(
                    step_views_of_chunks, rows, self.chunks, views
                )

    def bind(
        self, outputs: Sequence[Node], more: NodeViews, into: Sequence[Views]
    ) -> Callable[[int], None]:
        given = self.columns.joined(more)
        return program(tuple(outputs), frozenset(given)).bind(given, into, self.scratch)

    def scratch(self) -> Views:
        return self.cut.same(self.like.new_empty(self.rows.B, self.d))


class AdjointLoop(LinearLoop):
    """step(t): lam_t <- f_x' lam_{t+1} + r' W' del_{t+1},  del_{t+1} = sa_{t+1} + f_a' lam_{t+1}   (t from 0)

    states: how lam is seen as lam_0 .. lam_T."""

    def __init__(
        self,
        plan: SweepPlan,
        saved: Saved,
        W: Tensor | None,
        lam: Tensor,
        states: str,
        delta: Tensor,
        sa: Tensor | None,
    ) -> None:
        cell, rows, e = plan.cell, plan.rows, adjoint_step(plan.cell)
        W = W if e.through else None
        super().__init__(
            plan,
            saved,
            (*e.into_a, *e.into_x, *(e.back if W is not None else ())),
            (*e.lam, *e.rbar),
        )
        cut, slots, gates = self.cut, len(cell.slots), len(cell.gates)
        lams = getattr(cut, states)
        self.lams = lams(lam)
        self.into = cut.shortened(self.lams)
        earlier = (
            [self.into]
            if slots == 1
            else target_views(lam, slots, lambda y: cut.shortened(lams(y)))
        )
        deltas = cut.steps(delta)
        given = (
            NodeViews({e.lam[0]: self.lams[1:]})
            if slots == 1
            else NodeViews().pack(e.lam, lam, lambda y: lams(y)[1:])
        )
        into_a = e.into_a
        if sa is not None:
            given.pack(e.sa, sa, cut.steps)
            into_a = tuple(map(add, e.into_a, e.sa))
        slot = cell.read_slot
        overwritten = lambda i: W is not None and e.into_x[i] is ZERO and slot in (i, None)
        written = [i for i in range(slots) if not overwritten(i)]
        outputs = [*into_a, *(e.into_x[i] for i in written)]
        first = self.bind(
            outputs, given, [*target_views(delta, gates, cut.steps), *(earlier[i] for i in written)]
        )
        self.step = first
        if W is not None and slot is not None:
            target, adds = earlier[slot], slot in written

            def step(t: int) -> None:
                first(t)
                if adds:
                    target[t].addmm_(deltas[t], W)
                else:
                    torch.mm(deltas[t], W, out=target[t])

            self.step = step
        elif W is not None:
            whole = saved.x.new_empty(rows.B, W.shape[1])
            r, held = (
                cut.same(whole),
                NodeViews(zip(e.kept, earlier, strict=True)).pack(e.rbar, whole, cut.same),
            )
            total = [add(e.kept[i], e.back[i]) if i in written else e.back[i] for i in range(slots)]
            second = self.bind(total, held, earlier)

            def through(t: int) -> None:
                first(t)
                torch.mm(deltas[t], W, out=r[t])
                second(t)

            self.step = through


@torch.no_grad()
def adjoint(
    plan: SweepPlan, saved: Saved, W: Tensor | None, s: Tensor | None, s_last: Tensor | None, sa: Tensor | None,
    link: Link | None, scaled: bool, keep: bool, k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    rows, delta = plan.rows, empty(saved.a.shape, saved.x)
    if s is not None and s_last is not None and not scaled:
        s, s_last = s + rows.last_transposed(s_last), None
    lam = empty(saved.x.shape, saved.x) if keep else saved.x.new_empty(2 * rows.B, saved.x.shape[1])
    with flush_denormals():
        loop = AdjointLoop(plan, saved, W, lam, "states" if keep else "alternating", delta, sa)
        factors = active_factors(rows, link) if link is not None else {}
        if scaled:
            return lam, delta, _scaled(loop, s, s_last, k_last, factors)
        sources, into = None if s is None else rows.states(s), loop.into
        start_samples(loop, sources, s_last, rows.T)
        for i, (lo, hi) in reversed(list(enumerate(loop.chunks))):
            loop.refresh(i)
            for t in reversed(range(lo, hi)):
                loop.step(t)
                if t in factors:
                    into[t].mul_(factors[t])
                if sources is not None:
                    into[t].add_(sources[t][: rows.sizes[t]])
                if not rows.uniform:
                    start_samples(loop, sources, s_last, t)
    return lam, delta, None


def active_factors(rows: Rows, link: Link) -> dict[int, Tensor]:
    """The factors of the steps where they are not all one."""
    return {
        t: link.factor[rows.starts[t] : rows.starts[t + 1]]
        for t, on in enumerate(link.active)
        if on
    }


def start_samples(loop: AdjointLoop, sources: Views | None, s_last: Tensor | None, t: int) -> None:
    """The samples whose last state is x_t begin with their source."""
    rows, lam = loop.rows, loop.lams[t]
    n, going = rows.sizes[t - 1] if t else rows.B, rows.sizes[t] if t < rows.T else 0
    if n > going:
        source = sources[t] if sources is not None else s_last
        if source is None:
            lam[going:].zero_()
        else:
            lam[going:] = source[going:n]


def _scaled(
    loop: AdjointLoop,
    s: Tensor | None,
    s_last: Tensor | None,
    k_last: Tensor | None,
    factors: dict[int, Tensor],
) -> Tensor:
    """Runs the loop on mantissas and returns the exponents of the state rows.

    A block of steps shares one exponent for each sample, taken from the costate it begins with and from the sources
    that enter in it. Blocks grow while mantissas stay near one; where one leaves the safe range the block is done
    again, shorter, down to an exponent for every step."""
    rows, lams = loop.rows, loop.lams
    T, B, dtype = rows.T, rows.B, lams[0].dtype
    low, high, easy = (
        (2.0**-400, 2.0**400, 2.0**-150)
        if dtype == torch.float64
        else (2.0**-60, 2.0**60, 2.0**-20)
    )
    sources = None if s is None else rows.states(s)
    quiet = s is None and rows.uniform  # no source enters after the first
    k_last = torch.zeros(B, dtype=torch.int32) if k_last is None else k_last
    ks = source_exponents(rows, s, s_last, k_last)
    k = k_last.expand(T + 1, B).clone()
    k[T] = torch.where(ks[T] == NO_EXPONENT, k_last, ks[T])

    def step(t: int) -> None:
        loop.step(t)
        if t in factors:
            loop.into[t].mul_(factors[t])

    def join(t: int, k_t: Tensor) -> None:
        """The samples whose last state is x_t begin with their sources."""
        lam, going = lams[t], rows.sizes[t] if t < T else 0
        here = slice(going, len(lam))
        if going < len(lam):
            lam[here] = 0 if s_last is None else scale(s_last[here], (k_last - k_t)[here, None])
            if sources is not None:
                lam[here] += scale(sources[t][here], -k_t[here, None])

    join(T, k[T])
    top = lams[T].abs().amax(1)

    def one(t: int) -> Tensor:
        """lam_t from lam_{t+1} -> its own exponent."""
        step(t)
        m, source = rows.sizes[t], sources[t] if sources is not None else None
        e = exponent(loop.into[t])
        new = ks[t].clone()
        new[:m] = torch.maximum(
            torch.where(e == NO_EXPONENT, NO_EXPONENT, k[t + 1, :m] + e), new[:m]
        )
        new = torch.where(new == NO_EXPONENT, k[t + 1], new)
        loop.into[t].mul_(pow2((k[t + 1] - new)[:m, None], dtype))
        down = pow2(-new[:, None], dtype)
        if source is not None:
            loop.into[t].addcmul_(source[:m], down[:m])
        join(t, new)
        return new

    def run(lo: int, hi: int, top: Tensor) -> Tensor:
        """lam_{hi-1} .. lam_lo from lam_hi, whose largest entries are `top` -> the exponents they share."""
        mantissa, e = torch.frexp(top)
        n = len(top)
        if quiet:  # 2^-e brings lam_hi near one; frexp(0) = (0, 0)
            new = k[hi] + e
            factor = (mantissa / top).nan_to_num_(1.0)[:, None]
        else:
            mine = torch.full((B,), NO_EXPONENT, dtype=torch.int32)
            mine[:n] = torch.where(top > 0, k[hi, :n] + e, NO_EXPONENT)
            new = torch.maximum(mine, ks[lo:hi].amax(0))
            new = torch.where(new == NO_EXPONENT, k[hi], new)
            factor = pow2((k[hi] - new)[:n, None], dtype)
        for t in reversed(range(lo, hi)):
            step(t)
            m = rows.sizes[t]
            if t == hi - 1:
                loop.into[t].mul_(factor[:m])
            if quiet:
                continue
            down = pow2(-new[:, None], dtype)
            if sources is not None:
                loop.into[t].addcmul_(sources[t][:m], down[:m])
            join(t, new)
        return new

    def tops(lo: int, hi: int) -> Tensor:
        """The largest entry of each costate of a block, those of lam_lo first."""
        if rows.uniform:
            return (
                lams[lo]
                .as_strided(((hi - lo) * B, lams[lo].shape[1]), lams[lo].stride())
                .abs()
                .amax(1)
            )
        return torch.cat([lams[t].abs().amax(1) for t in range(lo, hi)])

    size = BLOCK
    for i, (lo, hi) in reversed(list(enumerate(loop.chunks))):
        loop.refresh(i)
        while hi > lo:
            begin = max(lo, hi - size)
            new = one(begin) if hi - begin == 1 else run(begin, hi, top)
            found = tops(begin, hi)
            least, most = (y.item() for y in found.aminmax())
            if hi - begin > 1 and not (low < least and most < high):
                size = (hi - begin) // 2
                continue
            if least > easy and (hi - begin == size or begin == lo):
                size = min(2 * size, 64)
            k[begin:hi] = new
            hi, top = begin, found[: len(lams[begin])]
    return rows.flatten_states(k)


def source_exponents(rows: Rows, s: Tensor | None, s_last: Tensor | None, k_last: Tensor) -> Tensor:
    """e with max |s_t| < 2^e for each state that exists and has a source, [T + 1, B]; NONE elsewhere."""
    ks = torch.full((rows.T + 1, rows.B), NO_EXPONENT, dtype=torch.int32)
    if s is not None:
        e = exponent(s)
        ks[0], ks[rows.time, rows.sample] = e[: rows.B], e[rows.B :]
    if s_last is not None:
        e = exponent(s_last)
        at = rows.T if rows.uniform else (rows.lengths, torch.arange(rows.B))
        ks[at] = torch.maximum(ks[at], torch.where(e == NO_EXPONENT, NO_EXPONENT, e + k_last))
    return ks


@torch.no_grad()
def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None,
) -> tuple[Tensor, Tensor]:
    cell, rows, e = plan.cell, plan.rows, tangent_step(plan.cell)
    slots, out, W = len(cell.slots), e.out, W if e.through else None
    mu, nu = empty(saved.x.shape, saved.x), empty(saved.a.shape, saved.x)
    with flush_denormals():
        loop = LinearLoop(
            plan, saved, (*e.out, *(e.ahead if W is not None else ())), (*e.mu, *e.nu)
        )
        cut = loop.cut
        before, nus = cut.before(mu), cut.steps(nu)
        given = NodeViews().pack(e.mu, mu, cut.before).pack(e.nu, nu, cut.steps)
        m: Views = before
        factors: Mapping[int, Tensor] = {}
        if link is not None:  # where the factor is not one, m_t has a buffer of its own
            held, factors = mu.new_empty(rows.B, mu.shape[1]), active_factors(rows, link)
            either = lambda own, shared: [
                h if on else y for h, y, on in zip(own, shared, link.active, strict=True)
            ]
            m = either(cut.same(held), before)
            for n, part in zip(e.mu, target_views(held, slots, cut.same), strict=True):
                given[n] = either(part, given[n])
        if g is not None:
            given.pack(e.g, g, cut.after)
            out = tuple(map(add, e.out, e.g))
        mu[: rows.B] = 0 if g is None else g[: rows.B]
        step = loop.bind(out, given, target_views(mu, slots, cut.after))
        Wt, read = None if W is None else W.t().contiguous(), None
        r: Views = ()
        if W is None:
            nu.copy_(ga) if ga is not None else nu.zero_()
        elif cell.read_slot is not None:
            r = given[e.mu[cell.read_slot]]
        else:
            whole = mu.new_empty(rows.B, W.shape[1])
            r = cut.same(whole)
            read = loop.bind(e.ahead, given, target_views(whole, len(cell.read), cut.same))
        gas = None if ga is None else cut.steps(ga)
        for i, (lo, hi) in enumerate(loop.chunks):
            loop.refresh(i)
            for t in range(lo, hi):
                if link is not None and link.active[t]:
                    torch.mul(before[t], factors[t], out=m[t])
                if read is not None:
                    read(t)
                if Wt is not None and gas is None:
                    torch.mm(r[t], Wt, out=nus[t])
                elif Wt is not None and gas is not None:
                    torch.addmm(gas[t], r[t], Wt, out=nus[t])
                step(t)
    return mu, nu

"""The fast engine on a CPU: preallocated arrays, `out=` everywhere, no autograd inside the loops.

The slopes of a block of steps are computed at once, so that a step of the adjoint or tangent loop is one product with
W and the few operations that involve the direction itself. Denormal numbers, which vanishing costates are made of and
which cost a CPU a hundred times more than zeros, are flushed inside and the caller's setting is restored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..cells import Cell
from ..formula import ZERO, Node, add, apart, evaluate, is_const, pull, push, symbol
from .derivatives import Plan, Tape
from .pointwise import CHUNK, program
from .rows import NONE, Link, Rows, exponent, pow2

Views = Sequence[Tensor]  # one for each step, or for each block of steps
BLOCK = 8  # steps that share one exponent, to begin with


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Denormals are zero inside. torch cannot be asked for the setting, so a denormal is put to the test."""
    before = (torch.tensor(1e-310, dtype=torch.float64) * 1.0).item() == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


class Columns(dict[Node, Any]):
    """For each node its views, made when they are first asked for: most programs read few of the arrays at hand."""

    def pack(self, nodes: Sequence[Node], array: Tensor | None, split: Callable[[Tensor], Views]) -> Columns:
        """An array [., m d] that holds m nodes side by side."""
        if array is not None and nodes:
            for node, part in zip(nodes, [array] if len(nodes) == 1 else array.chunk(len(nodes), -1), strict=True):
                self[node] = functools.partial(split, part)
        return self

    def __getitem__(self, node: Node) -> Views:
        views = super().__getitem__(node)
        if callable(views):
            self[node] = views = views()
        return views

    def joined(self, more: Columns) -> Columns:
        return Columns(dict(self) | dict(more))


def named(kind: str, count: int) -> tuple[Node, ...]:
    return tuple(symbol(f"{kind}.{i}") for i in range(count))


def targets(array: Tensor, count: int, split: Callable[[Tensor], Views]) -> list[Views]:
    """The `count` entries packed in an array, as views to write to."""
    return [split(part) for part in ([array] if count == 1 else array.chunk(count, -1))]


@functools.cache
def _only(n: Node, leaves: tuple[Node, ...]) -> bool:
    return n in leaves or is_const(n) or (bool(n.args) and all(_only(a, leaves) for a in n.args))


def per_unit(cell: Cell, p: Tensor | None, outputs: Sequence[Node], given: Iterable[Node], length: int) -> Columns:
    """The parameters and what is made of them alone, [d] each, the same at every step."""
    if p is None:
        return Columns()
    values = dict(zip(cell.p, p.chunk(len(cell.p)), strict=True))
    moving = {*cell.a, *cell.v, *cell.x, *given}
    once = [n for n in apart(outputs, moving, frozenset(given)) if n not in moving and _only(n, cell.p)]
    values |= dict(zip(once, evaluate(once, values), strict=True))
    return Columns({n: [value] * length for n, value in values.items()})


def buffer(rows: Rows, like: Tensor, width: int) -> Views:
    """One array [B, width] that every step may overwrite."""
    b = like.new_empty(rows.B, width)
    return [b] * rows.T if rows.uniform else [b[:n] for n in rows.sizes]


@torch.no_grad()
def forward(
    plan: Plan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    cell, rows = plan.cell, plan.rows
    slots, d = len(cell.slots), x0.shape[1] // len(cell.slots)
    x = base.new_empty(rows.B + rows.N, x0.shape[1])
    x[: rows.B] = x0
    q = base.new_empty(rows.N, d * len(cell.kept)) if cell.kept else None
    bases = rows.steps(base)
    arguments: Views
    if W is None:
        a, arguments = base.clone(), bases
    elif cell.needs_a:
        a = torch.empty_like(base)
        arguments = rows.steps(a)
    else:  # no derivative reads a: it lives in one buffer, and its place in the tape is never touched
        a, arguments = torch.empty_like(base), buffer(rows, base, base.shape[1])
    outputs = (*cell.next, *cell.read)
    given = per_unit(cell, p, outputs, (), rows.T).pack(cell.x, x, rows.before).pack(cell.v, v, rows.steps)
    if len(cell.gates) == 1:
        given[cell.a[0]] = arguments
    elif W is None or cell.needs_a:
        given.pack(cell.a, base if W is None else a, rows.steps)
    else:
        for i, n in enumerate(cell.a):
            part = arguments[0][:, i * d : (i + 1) * d]
            given[n] = [part] * rows.T if rows.uniform else [part[:m] for m in rows.sizes]
    scratch = functools.partial(buffer, rows, x, d)
    after = targets(x, slots, lambda y: rows.states(y)[1:]) + (
        targets(q, len(cell.kept), rows.steps) if q is not None else []
    )
    step = program((*cell.next, *cell.kept), frozenset(given)).bind(given, after, scratch)
    with flushed():
        if W is None:
            for t in range(rows.T):
                step(t)
            return x, a, q
        Wt = W.t().contiguous()
        if cell.read_slot is not None:
            r = given[cell.read[0]]
            for t in range(rows.T):
                torch.addmm(bases[t], r[t], Wt, out=arguments[t])
                step(t)
            return x, a, q
        whole = base.new_empty(rows.B, d * len(cell.read))
        cut = lambda y: [y] * rows.T if rows.uniform else [y[:n] for n in rows.sizes]
        r = cut(whole)
        read = program(cell.read, frozenset(given)).bind(given, targets(whole, len(cell.read), cut), scratch)
        for t in range(rows.T):
            read(t)
            torch.addmm(bases[t], r[t], Wt, out=arguments[t])
            step(t)
    return x, a, q


class Loop:
    """One linear loop: its expressions, and its slopes computed a block of steps at a time."""

    def __init__(self, plan: Plan, tape: Tape, outputs: tuple[Node, ...], moving: tuple[Node, ...]) -> None:
        cell, rows = plan.cell, plan.rows
        self.rows, self.like, self.d = rows, tape.x, tape.x.shape[1] // len(cell.slots)
        at_hand = [n for n in (*cell.next, *(cell.kept if tape.q is not None else ())) if n.args]
        fixed = per_unit(cell, tape.p, outputs, (*moving, *at_hand), rows.T)
        self.columns = fixed.joined(leaves(plan, tape, rows.steps, rows.before))
        slopes = tuple(n for n in apart(outputs, moving, frozenset(at_hand)) if n not in self.columns)
        size = max(1, CHUNK // (rows.B * self.d))
        self.chunks = [(lo, min(lo + size, rows.T)) for lo in range(0, rows.T, size)]
        self.refresh: Callable[[int], None] = lambda i: None
        if slopes:
            starts = [rows.starts[lo] for lo, _ in self.chunks] + [rows.N]
            sizes = [b - a for a, b in itertools.pairwise(starts)]
            split = functools.partial(torch.split, split_size_or_sections=sizes)
            inputs = leaves(plan, tape, split, lambda x: split(rows.prev(x)))
            inputs |= {n: [views[0]] * len(sizes) for n, views in fixed.items()}
            scratch = lambda: [b[:n] for b in [self.like.new_empty(max(sizes), self.d)] for n in sizes]
            buffers = [scratch() for _ in slopes]
            self.refresh = program(slopes, frozenset(inputs)).bind(Columns(inputs), buffers, scratch)
            for node, views in zip(slopes, buffers, strict=True):
                self.columns[node] = functools.partial(self._by_step, views)

    def _by_step(self, views: Views) -> Views:
        """The views of a chunk's buffer, as views of its steps."""
        if self.rows.uniform:
            steps = views[0].split(self.rows.B)
            return [s for lo, hi in self.chunks for s in steps[: hi - lo]]
        return [
            s for (lo, hi), view in zip(self.chunks, views, strict=True) for s in view.split(self.rows.sizes[lo:hi])
        ]

    def bind(self, outputs: Sequence[Node], more: Columns, into: Sequence[Views]) -> Callable[[int], None]:
        given = self.columns.joined(more)
        return program(tuple(outputs), frozenset(given)).bind(given, into, lambda: buffer(self.rows, self.like, self.d))


def leaves(plan: Plan, tape: Tape, split: Callable[[Tensor], Views], before: Callable[[Tensor], Views]) -> Columns:
    """What the slopes are made of: a, v, x_{t-1}, and the values at hand."""
    cell, rows = plan.cell, plan.rows
    known = Columns().pack(cell.next, tape.x[rows.B :], split).pack(cell.kept, tape.q, split)
    found = Columns({n: views for n, views in known.items() if n.args})
    if cell.needs_a or tape.q is None:
        found.pack(cell.a, tape.a, split)
    return found.pack(cell.v, tape.v, split).pack(cell.x, tape.x, before)


class AdjointLoop(Loop):
    """step(t): lam_t <- f_x' lam_{t+1} + r' W' del_{t+1},  del_{t+1} = sa_{t+1} + f_a' lam_{t+1}   (t from 0)

    lams: views of lam_0 .. lam_T; delta: step array."""

    def __init__(
        self,
        plan: Plan,
        tape: Tape,
        W: Tensor | None,
        lams: Callable[[Tensor], Views],
        lam: Tensor,
        delta: Tensor,
        sa: Tensor | None,
    ) -> None:
        cell, rows = plan.cell, plan.rows
        slots, gates = len(cell.slots), len(cell.gates)
        bar, rbar, extra, kept = (
            named("lam", slots),
            named("rbar", len(cell.read)),
            named("sa", gates),
            named("e", slots),
        )
        into_a, into_x = tuple(pull(cell.next, bar, cell.a)), tuple(pull(cell.next, bar, cell.x))
        back = tuple(pull(cell.read, rbar, cell.x)) if W is not None else ()
        super().__init__(plan, tape, (*into_a, *into_x, *back), (*bar, *rbar))
        before = lambda y: shortened(rows, lams(y))
        self.into = before(lam)
        earlier = [self.into] if slots == 1 else targets(lam, slots, before)
        deltas = rows.steps(delta)
        given = Columns().pack(bar, lam, lambda y: lams(y)[1:]).pack(extra if sa is not None else (), sa, rows.steps)
        if sa is not None:
            into_a = tuple(add(e, s) for e, s in zip(into_a, extra, strict=True))
        slot = cell.read_slot
        written = [i for i, e in enumerate(into_x) if not (e is ZERO and W is not None and (i == slot or slot is None))]
        each = [deltas] if gates == 1 else targets(delta, gates, rows.steps)
        first = self.bind([*into_a, *(into_x[i] for i in written)], given, [*each, *(earlier[i] for i in written)])
        self.step = first
        if W is None:
            return
        if slot is not None:
            target, adds = earlier[slot], slot in written

            def step(t: int) -> None:
                first(t)
                if adds:
                    target[t].addmm_(deltas[t], W)
                else:
                    torch.mm(deltas[t], W, out=target[t])

            self.step = step
            return
        whole = tape.x.new_empty(rows.B, W.shape[1])
        cut = lambda y: [y] * rows.T if rows.uniform else [y[:n] for n in rows.sizes]
        r = cut(whole)
        total = [add(e, b) if i in written else b for i, (e, b) in enumerate(zip(kept, back, strict=True))]
        second = self.bind(total, Columns(zip(kept, earlier, strict=True)).pack(rbar, whole, cut), earlier)

        def nonlinear(t: int) -> None:
            first(t)
            torch.mm(deltas[t], W, out=r[t])
            second(t)

        self.step = nonlinear


def shortened(rows: Rows, states: Views) -> Views:
    """x_{t-1} for the samples that take step t."""
    return states[:-1] if rows.uniform else [y[:n] for y, n in zip(states, rows.sizes, strict=False)]


@torch.no_grad()
def adjoint(
    plan: Plan,
    tape: Tape,
    W: Tensor | None,
    s: Tensor | None,
    s_last: Tensor | None,
    sa: Tensor | None,
    link: Link | None,
    scaled: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows = plan.rows
    delta = tape.x.new_empty(tape.a.shape)
    if s is not None and s_last is not None:
        s, s_last = s + rows.last_back(s_last), None
    views: Callable[[Tensor], Views] = rows.states
    if keep:
        lam = torch.empty_like(tape.x)
    else:  # two buffers in turn: lam_0 is in the first
        lam = tape.x.new_empty(2 * rows.B, tape.x.shape[1])
        views = functools.partial(alternating, rows)
    with flushed():
        loop = AdjointLoop(plan, tape, W, views, lam, delta, sa)
        lams = views(lam)
        if scaled:
            return lam, delta, _scaled(loop, lams, s, s_last)
        sources, into = None if s is None else rows.states(s), loop.into
        factors = rows.steps(link.factor) if link is not None else ()
        start(rows, lams, sources, s_last, rows.T)
        for i, (lo, hi) in reversed(list(enumerate(loop.chunks))):
            loop.refresh(i)
            for t in reversed(range(lo, hi)):
                loop.step(t)
                if link is not None and link.active[t]:
                    into[t].mul_(factors[t])
                if sources is not None:
                    into[t].add_(sources[t][: rows.sizes[t]])
                if not rows.uniform:
                    start(rows, lams, sources, s_last, t)
    return lam, delta, None


def alternating(rows: Rows, two: Tensor) -> Views:
    pair = two.split(rows.B)
    return [pair[t % 2] if rows.uniform else pair[t % 2][:n] for t, n in enumerate([rows.B, *rows.sizes])]


def start(rows: Rows, lams: Views, sources: Views | None, s_last: Tensor | None, t: int) -> None:
    """The samples whose last state is x_t begin with their source."""
    n, going = rows.sizes[t - 1] if t else rows.B, rows.sizes[t] if t < rows.T else 0
    if n > going:
        source = sources[t] if sources is not None else s_last
        if source is None:
            lams[t][going:].zero_()
        else:
            lams[t][going:] = source[going:n]


def _scaled(loop: AdjointLoop, lams: Views, s: Tensor | None, s_last: Tensor | None) -> Tensor:
    """Runs the loop on mantissas and returns the exponents of the state rows.

    A block of steps shares one exponent for each sample, taken from the costate it begins with and from the sources
    that enter in it. Blocks grow while mantissas stay near one; where one leaves the safe range the block is done
    again, shorter, down to an exponent for every step."""
    rows = loop.rows
    T, B, dtype = rows.T, rows.B, lams[0].dtype
    low, high, easy = (2.0**-400, 2.0**400, 2.0**-150) if dtype == torch.float64 else (2.0**-60, 2.0**60, 2.0**-20)
    sources = None if s is None else rows.states(s)
    ks = None if s is None and rows.uniform else source_exponents(rows, s, s_last)
    k = torch.zeros(T + 1, B, dtype=torch.int32)
    first = exponent(lams[T]) if ks is None and s_last is None else exponent(s_last) if ks is None else ks[T]  # type: ignore[arg-type]
    k[T] = torch.where(first == NONE, 0, first)
    start(rows, lams, sources, s_last, T)
    lams[T].mul_(pow2(-k[T, : len(lams[T]), None], dtype))
    top = lams[T].abs().amax(1)

    def run(lo: int, hi: int, top: Tensor) -> Tensor:
        """lam_{hi-1} .. lam_lo from lam_hi, whose largest entries are `top` -> the exponents they share."""
        mantissa, e = torch.frexp(top)
        n = len(top)
        if ks is None:  # no source enters: 2^-e brings lam_hi near one; frexp(0) = (0, 0)
            new = k[hi] + e
            factor = (mantissa / top).nan_to_num_(1.0)[:, None]
            down = None
        else:
            mine = torch.full((B,), NONE, dtype=torch.int32)
            mine[:n] = torch.where(top > 0, k[hi, :n] + e, NONE)
            new = torch.maximum(mine, ks[lo:hi].amax(0))
            new = torch.where(new == NONE, k[hi], new)
            factor = pow2((k[hi] - new)[:n, None], dtype)
            down = pow2(-new[:, None], dtype)
        for t in reversed(range(lo, hi)):
            loop.step(t)
            m = rows.sizes[t]
            if t == hi - 1:
                loop.into[t].mul_(factor[:m])
            if sources is not None and down is not None:
                loop.into[t].addcmul_(sources[t][:m], down[:m])
            if down is not None and len(lams[t]) > m:
                start(rows, lams, sources, s_last, t)
                lams[t][m:].mul_(down[m : len(lams[t])])
        return new

    def tops(lo: int, hi: int) -> list[Tensor]:
        """The largest entry of each costate of a block, a view for each t."""
        if rows.uniform:
            block = lams[lo].as_strided(((hi - lo) * B, lams[lo].shape[1]), lams[lo].stride())
            return list(block.abs().amax(1).split(B))
        return [lams[t].abs().amax(1) for t in range(lo, hi)]

    size = BLOCK
    for i, (lo, hi) in reversed(list(enumerate(loop.chunks))):
        loop.refresh(i)
        while hi > lo:
            begin = max(lo, hi - size)
            new = run(begin, hi, top)
            found = tops(begin, hi)
            least, most = (found[0] if len(found) == 1 else torch.cat(found)).aminmax()
            if hi - begin > 1 and not (least.item() > low and most.item() < high):
                size = (hi - begin) // 2
                continue
            if least.item() > easy and hi - begin == size:
                size = min(2 * size, 64)
            k[begin:hi] = new
            hi, top = begin, found[0]
    return rows.of_states(k)


def source_exponents(rows: Rows, s: Tensor | None, s_last: Tensor | None) -> Tensor:
    """e with max |s_t| < 2^e for each state that exists and has a source, [T + 1, B]; NONE elsewhere."""
    ks = torch.full((rows.T + 1, rows.B), NONE, dtype=torch.int32)
    if s is not None:
        e = exponent(s)
        ks[0], ks[rows.time, rows.sample] = e[: rows.B], e[rows.B :]
    elif s_last is not None:
        ks[rows.lengths, torch.arange(rows.B)] = exponent(s_last)
    return ks


@torch.no_grad()
def tangent(
    plan: Plan, tape: Tape, W: Tensor | None, g: Tensor | None, ga: Tensor | None, link: Link | None
) -> tuple[Tensor, Tensor]:
    cell, rows = plan.cell, plan.rows
    slots = len(cell.slots)
    mu, nu = torch.empty_like(tape.x), tape.x.new_empty(tape.a.shape)
    dot, into, source = named("mu", slots), named("nu", len(cell.gates)), named("g", slots)
    along = dict(zip(cell.x, dot, strict=True))
    out = tuple(push(cell.next, along | dict(zip(cell.a, into, strict=True))))
    ahead = tuple(push(cell.read, along)) if W is not None else ()
    with flushed():
        loop = Loop(plan, tape, (*out, *ahead), (*dot, *into))
        d, before, nus = loop.d, rows.before(mu), rows.steps(nu)
        given = Columns().pack(dot, mu, rows.before).pack(into, nu, rows.steps)
        m: Views = before
        factors: Views = ()
        if link is not None:
            held = mu.new_empty(rows.B, mu.shape[1])
            factors = rows.steps(link.factor)
            cut = lambda y: [y[:n] for n in rows.sizes]
            m = [h if active else y for h, y, active in zip(cut(held), before, link.active, strict=True)]
            for n, part, views in zip(dot, held.chunk(slots, -1), targets(mu, slots, rows.before), strict=True):
                given[n] = [h if active else y for h, y, active in zip(cut(part), views, link.active, strict=True)]
        if g is not None:
            given.pack(source, g, lambda y: rows.states(y)[1:])
            out = tuple(add(o, q) for o, q in zip(out, source, strict=True))
        mu[: rows.B] = 0 if g is None else g[: rows.B]
        step = loop.bind(out, given, targets(mu, slots, lambda y: rows.states(y)[1:]))
        gas = None if ga is None else rows.steps(ga)
        read: Callable[[int], None] | None = None
        r: Views = ()
        Wt = None
        if W is None:
            nu.copy_(ga) if ga is not None else nu.zero_()
        else:
            Wt = W.t().contiguous()
            if cell.read_slot is not None:
                r = given[dot[cell.read_slot]]
            else:
                whole = mu.new_empty(rows.B, d * len(cell.read))
                short = lambda y: [y[:n] for n in rows.sizes]
                r = short(whole)
                read = loop.bind(ahead, given, targets(whole, len(cell.read), short))
        for i, (lo, hi) in enumerate(loop.chunks):
            loop.refresh(i)
            for t in range(lo, hi):
                if link is not None and link.active[t]:
                    torch.mul(before[t], factors[t], out=m[t])
                if read is not None:
                    read(t)
                if Wt is not None:
                    if gas is None:
                        torch.mm(r[t], Wt, out=nus[t])
                    else:
                        torch.addmm(gas[t], r[t], Wt, out=nus[t])
                step(t)
    return mu, nu

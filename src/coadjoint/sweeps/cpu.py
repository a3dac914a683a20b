"""The fast engine on a CPU: preallocated arrays, `out=` everywhere, no autograd inside the loops.

The slopes of a block of steps are computed at once, so that a step of the adjoint or tangent loop is one product with
W and the few operations that involve the direction itself. Denormal numbers, which vanishing costates are made of and
which cost a CPU a hundred times more than zeros, are flushed inside and the caller's setting is restored.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..cells import Cell
from ..formula import ZERO, Node, add, apart, evaluate, is_const, pull, push, symbol
from .derivatives import Plan, Tape
from .pointwise import CHUNK, program
from .rows import NONE, Link, Rows, exponent, pow2

Columns = dict[Node, Sequence[Tensor]]
BLOCK = 8  # steps that share one exponent, unless costates change too fast for that


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Denormals are zero inside. torch cannot be asked for the setting, so a denormal is put to the test."""
    before = (torch.tensor(1e-310, dtype=torch.float64) * 1.0).item() == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def columns(nodes: Sequence[Node], parts: Sequence[Tensor], d: int) -> Columns:
    """Step views [n_t, m d] -> for each node its views [n_t, d]."""
    if len(nodes) == 1:
        return {nodes[0]: parts}
    return {n: [y[:, i * d : (i + 1) * d] for y in parts] for i, n in enumerate(nodes)}


def named(kind: str, count: int) -> tuple[Node, ...]:
    return tuple(symbol(f"{kind}.{i}") for i in range(count))


def per_unit(cell: Cell, p: Tensor | None, outputs: Sequence[Node], given: frozenset[Node]) -> dict[Node, Tensor]:
    """The parameters and what is made of them alone, [d] each."""
    if p is None:
        return {}
    values = dict(zip(cell.p, p.chunk(len(cell.p)), strict=True))
    once = [n for n in apart(outputs, {*cell.a, *cell.v, *cell.x, *given}, given) if n not in given and _only(n, cell.p)]
    return values | dict(zip(once, evaluate(once, values), strict=True))


@functools.cache
def _only(n: Node, leaves: tuple[Node, ...]) -> bool:
    return n in leaves or is_const(n) or (bool(n.args) and all(_only(a, leaves) for a in n.args))


class Loop:
    """One linear loop: its expressions, and its slopes computed a block of steps at a time."""

    def __init__(self, plan: Plan, tape: Tape, outputs: tuple[Node, ...], moving: tuple[Node, ...]) -> None:
        cell, rows = plan.cell, plan.rows
        self.rows, self.d = rows, tape.x.shape[1] // len(cell.slots)
        self.like = tape.x
        d, y = self.d, tape.x[rows.B :]
        known = {n: i for i, n in enumerate(cell.next) if n.args}
        slopes = apart(outputs, moving, frozenset(known))
        fixed = per_unit(cell, tape.p, outputs, frozenset({*moving, *known}))
        self.columns: Columns = {n: [value] * rows.T for n, value in fixed.items()}
        leaves = {**columns(cell.a, rows.steps(tape.a), d), **columns(cell.x, rows.before(tape.x), d)}
        if tape.v is not None:
            leaves |= columns(cell.v, rows.steps(tape.v), d)
        leaves |= {n: c for n, c in columns(cell.next, rows.states(tape.x)[1:], d).items() if n in known}
        self.columns |= leaves
        todo = tuple(n for n in slopes if n not in self.columns)
        size = max(1, CHUNK // (rows.B * d))
        self.chunks = [(lo, min(lo + size, rows.T)) for lo in range(0, rows.T, size)]
        self.refresh = lambda i: None
        if todo:
            self._compute(plan, tape, todo, fixed, y, known)

    def _compute(self, plan: Plan, tape: Tape, todo: tuple[Node, ...], fixed: dict[Node, Tensor], y: Tensor, known: dict[Node, int]) -> None:
        """Slopes of chunk i into buffers that the steps of the chunk read."""
        cell, rows, d = plan.cell, self.rows, self.d
        starts = [rows.starts[lo] for lo, _ in self.chunks] + [rows.N]
        sizes = [b - a for a, b in zip(starts, starts[1:], strict=False)]
        split = lambda nodes, array: columns(nodes, array.split(sizes), d)  # noqa: E731
        inputs: Columns = {**split(cell.a, tape.a), **split(cell.x, rows.prev(tape.x))}
        inputs |= split(cell.v, tape.v) if tape.v is not None else {}
        inputs |= {n: c for n, c in split(cell.next, y).items() if n in known}
        inputs |= {n: [value] * len(sizes) for n, value in fixed.items()}
        buffers = [self.like.new_empty(max(sizes), d) for _ in todo]
        targets = [[b[:n] for n in sizes] for b in buffers]

        def scratch() -> list[Tensor]:
            b = self.like.new_empty(max(sizes), d)
            return [b[:n] for n in sizes]

        self.refresh = program(todo, frozenset(inputs)).bind(inputs, targets, scratch)
        for node, buffer in zip(todo, buffers, strict=True):
            views: list[Tensor] = []
            for (lo, hi), start in zip(self.chunks, starts, strict=False):
                views += buffer[: rows.starts[hi] - start].split(rows.sizes[lo:hi])
            self.columns[node] = views

    def bind(self, outputs: Sequence[Node], more: Columns, targets: Sequence[Sequence[Tensor]]):
        given = self.columns | more
        return program(tuple(outputs), frozenset(given)).bind(given, targets, self.scratch)

    def scratch(self) -> list[Tensor]:
        return self.buffer(self.d)

    def buffer(self, width: int) -> list[Tensor]:
        """One array that every step may overwrite."""
        b = self.like.new_empty(self.rows.B, width)
        return [b] * self.rows.T if self.rows.uniform else [b[:n] for n in self.rows.sizes]


@torch.no_grad()
def forward(plan: Plan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None) -> tuple[Tensor, Tensor]:
    cell, rows = plan.cell, plan.rows
    n, d = x0.shape[1], x0.shape[1] // len(cell.slots)
    x, a = base.new_empty(rows.B + rows.N, n), base.new_empty(base.shape)
    x[: rows.B] = x0
    before, bases, arguments = rows.before(x), rows.steps(base), rows.steps(a)
    given = {**columns(cell.x, before, d), **columns(cell.a, arguments, d)}
    if v is not None:
        given |= columns(cell.v, rows.steps(v), d)
    outputs = (*cell.next, *cell.read)
    given |= {m: [value] * rows.T for m, value in per_unit(cell, p, outputs, frozenset()).items()}
    buffer = functools.partial(_buffer, rows, x)
    step = program(cell.next, frozenset(given)).bind(given, list(columns(named("x", len(cell.slots)), rows.states(x)[1:], d).values()), lambda: buffer(d))
    with flushed():
        if W is None:
            a.copy_(base)
            for t in range(rows.T):
                step(t)
            return x, a
        Wt = W.t().contiguous()
        if cell.read_slot is not None:
            r, read = given[cell.read[0]], None
        else:
            r = buffer(d * len(cell.read))
            read = program(cell.read, frozenset(given)).bind(given, list(columns(named("r", len(cell.read)), r, d).values()), lambda: buffer(d))
        for t in range(rows.T):
            if read is not None:
                read(t)
            torch.addmm(bases[t], r[t], Wt, out=arguments[t])
            step(t)
    return x, a


def _buffer(rows: Rows, like: Tensor, width: int) -> list[Tensor]:
    b = like.new_empty(rows.B, width)
    return [b] * rows.T if rows.uniform else [b[:n] for n in rows.sizes]


class AdjointLoop(Loop):
    """step(t): lam_{t} <- f_x' lam_{t+1} + r' W' del_{t+1},  del_{t+1} = sa_{t+1} + f_a' lam_{t+1}   (t from 0)"""

    def __init__(self, plan: Plan, tape: Tape, W: Tensor | None, lam: Tensor, delta: Tensor, sa: Tensor | None) -> None:
        cell, rows = plan.cell, plan.rows
        bar, rbar, extra, kept = named("lam", len(cell.slots)), named("rbar", len(cell.read)), named("sa", len(cell.gates)), named("e", len(cell.slots))
        into_a = tuple(pull(cell.next, bar, cell.a))
        into_x = tuple(pull(cell.next, bar, cell.x))
        back = tuple(pull(cell.read, rbar, cell.x)) if W is not None else ()
        super().__init__(plan, tape, (*into_a, *into_x, *back), (*bar, *rbar))
        d = self.d
        self.into = rows.before(lam)
        slots = list(columns(kept, self.into, d).values())
        deltas = rows.steps(delta)
        first = columns(bar, rows.states(lam)[1:], d)
        if sa is not None:
            first |= columns(extra, rows.steps(sa), d)
            into_a = tuple(add(e, s) for e, s in zip(into_a, extra, strict=True))
        slot = cell.read_slot
        needed = [i for i, e in enumerate(into_x) if not (e is ZERO and W is not None and (i == slot or slot is None))]
        gates = list(columns(named("delta", len(cell.gates)), deltas, d).values())
        before = self.bind([*into_a, *(into_x[i] for i in needed)], first, [*gates, *(slots[i] for i in needed)])
        self.step = before
        if W is None:
            return
        if slot is not None:
            target = slots[slot]
            beta = 0 if into_x[slot] is ZERO else 1

            def step(t: int) -> None:
                before(t)
                torch.addmm(target[t], deltas[t], W, beta=beta, out=target[t])

            def bare(t: int) -> None:
                before(t)
                torch.mm(deltas[t], W, out=target[t])

            self.step = step if beta else bare
            return
        r = self.buffer(W.shape[1])
        total = [add(e, b) if i in needed else b for i, (e, b) in enumerate(zip(kept, back, strict=True))]
        after = self.bind(total, columns(rbar, r, d) | dict(zip(kept, slots, strict=True)), slots)

        def nonlinear(t: int) -> None:
            before(t)
            torch.mm(deltas[t], W, out=r[t])
            after(t)

        self.step = nonlinear


@torch.no_grad()
def adjoint(
    plan: Plan, tape: Tape, W: Tensor | None, s: Tensor | None, s_last: Tensor | None, sa: Tensor | None, link: Link | None, scaled: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    rows = plan.rows
    lam, delta = torch.empty_like(tape.x), torch.empty_like(tape.a)
    if s is not None and s_last is not None:
        s, s_last = s + rows.last_back(s_last), None
    with flushed():
        loop = AdjointLoop(plan, tape, W, lam, delta, sa)
        if scaled:
            k = _scaled(loop, lam, s, s_last)
            return lam, delta, k
        lams, sources, into = rows.states(lam), None if s is None else rows.states(s), loop.into
        factors = rows.steps(link.factor) if link is not None else ()
        start(rows, lams, sources, s_last, rows.T)
        for i, (lo, hi) in reversed(list(enumerate(loop.chunks))):
            loop.refresh(i)
            for t in reversed(range(lo, hi)):
                loop.step(t)
                if link is not None and link.active[t]:
                    into[t].mul_(factors[t])
                if sources is not None:
                    into[t].add_(sources[t][: len(into[t])])
                if not rows.uniform:
                    start(rows, lams, sources, s_last, t)
    return lam, delta, None


def start(rows: Rows, lams: Sequence[Tensor], sources: Sequence[Tensor] | None, s_last: Tensor | None, t: int) -> None:
    """The samples whose last state is x_t begin with their source."""
    n, ended = len(lams[t]), rows.sizes[t] if t < rows.T else 0
    if n > ended:
        source = sources[t] if sources is not None else s_last
        if source is None:
            lams[t][ended:].zero_()
        else:
            lams[t][ended:] = source[ended:n]


def _scaled(loop: AdjointLoop, lam: Tensor, s: Tensor | None, s_last: Tensor | None) -> Tensor:
    """Runs the loop on mantissas and returns the exponents of the state rows.

    A block of steps shares one exponent for each sample, taken from the costate it begins with and from the sources
    that enter in it; where costates change so fast that a mantissa leaves the safe range, the block is done again
    with an exponent for every step."""
    rows = loop.rows
    T, B = rows.T, rows.B
    low, high = (2.0**-400, 2.0**400) if lam.dtype == torch.float64 else (2.0**-60, 2.0**60)
    lams = rows.states(lam)
    sources = None if s is None else rows.states(s)
    k = torch.zeros(T + 1, B, dtype=torch.int32)
    ks = source_exponents(rows, s, s_last)
    k[T] = torch.where(ks[T] == NONE, 0, ks[T])
    start(rows, lams, sources, s_last, T)
    lams[T].mul_(pow2(-k[T, : len(lams[T]), None], lam.dtype))

    def run(lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """lam_{hi-1} .. lam_lo from lam_hi -> the exponents, and which samples have a costate."""
        n = len(lams[hi])
        mine = torch.full((B,), NONE, dtype=torch.int32)
        e = exponent(lams[hi])
        mine[:n] = torch.where(e == NONE, NONE, k[hi, :n] + e)
        new = torch.maximum(mine, ks[lo:hi].amax(0))
        alive = new != NONE
        new = torch.where(alive, new, k[hi])
        factor = pow2((k[hi] - new)[:n, None], lam.dtype)
        down = pow2(-new[:, None], lam.dtype)
        for t in reversed(range(lo, hi)):
            loop.step(t)
            m = len(loop.into[t])
            if t == hi - 1:
                loop.into[t].mul_(factor[:m])
            if sources is not None:
                loop.into[t].addcmul_(sources[t][:m], down[:m])
            if len(lams[t]) > m:
                start(rows, lams, sources, s_last, t)
                lams[t][m:].mul_(down[m : len(lams[t])])
        return new, alive

    def safe(lo: int, hi: int, alive: Tensor) -> bool:
        if hi - lo == 1:
            return True
        for t in [range(lo, hi)] if rows.uniform else [[t] for t in range(lo, hi)]:
            block = lam[t[0] * B : (t[-1] + 1) * B] if rows.uniform else lams[t[0]]
            top = torch.linalg.vector_norm(block, float("inf"), 1).view(len(t), -1)
            bad = ((top < low) & alive[: top.shape[1]]) | ~(top < high)
            if bad.any():
                return False
        return True

    size = BLOCK
    for i, (lo, hi) in reversed(list(enumerate(loop.chunks))):
        loop.refresh(i)
        while hi > lo:
            begin = max(lo, hi - size)
            new, alive = run(begin, hi)
            if not safe(begin, hi, alive):
                size = 1
                continue
            k[begin:hi] = new
            hi = begin
    return rows.of_states(k)


def source_exponents(rows: Rows, s: Tensor | None, s_last: Tensor | None) -> Tensor:
    """e with max |s_t| < 2^e for each state that exists and has a source, [T + 1, B]; NONE elsewhere."""
    ks = torch.full((rows.T + 1, rows.B), NONE, dtype=torch.int32)
    source = s if s is not None else s_last
    if source is None:
        return ks
    e = exponent(source)
    if s is None:
        ks[rows.lengths, torch.arange(rows.B)] = e
    else:
        ks[0], ks[rows.time, rows.sample] = e[: rows.B], e[rows.B :]
    return ks


@torch.no_grad()
def tangent(plan: Plan, tape: Tape, W: Tensor | None, g: Tensor | None, ga: Tensor | None, link: Link | None) -> tuple[Tensor, Tensor]:
    cell, rows = plan.cell, plan.rows
    mu, nu = torch.empty_like(tape.x), torch.empty_like(tape.a)
    dot, into, source = named("mu", len(cell.slots)), named("nu", len(cell.gates)), named("g", len(cell.slots))
    along = dict(zip(cell.x, dot, strict=True))
    out = tuple(push(cell.next, along | dict(zip(cell.a, into, strict=True))))
    ahead = tuple(push(cell.read, along)) if W is not None else ()
    with flushed():
        loop = Loop(plan, tape, (*out, *ahead), (*dot, *into))
        d, before, nus = loop.d, rows.before(mu), rows.steps(nu)
        m: Sequence[Tensor] = before
        factors: Sequence[Tensor] = ()
        if link is not None:
            held, factors = loop.buffer(mu.shape[1]), rows.steps(link.factor)
            m = [h if active else y for h, y, active in zip(held, before, link.active, strict=True)]
        given = columns(dot, m, d) | columns(into, nus, d)
        if g is not None:
            given |= columns(source, rows.states(g)[1:], d)
            out = tuple(add(o, q) for o, q in zip(out, source, strict=True))
        mu[: rows.B] = 0 if g is None else g[: rows.B]
        step = loop.bind(out, given, list(columns(dot, rows.states(mu)[1:], d).values()))
        gas = None if ga is None else rows.steps(ga)
        if W is None:
            nu.copy_(ga) if ga is not None else nu.zero_()
        Wt = W.t().contiguous() if W is not None else None
        r, read = (given[dot[cell.read_slot]], None) if cell.read_slot is not None else (loop.buffer(d * len(cell.read)), None)
        if W is not None and cell.read_slot is None:
            read = loop.bind(ahead, given, list(columns(named("r", len(cell.read)), r, d).values()))
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

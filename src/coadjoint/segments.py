"""A gradient in O(sqrt T) memory: a sequence is swept segment by segment, and what a segment needs is computed again.

Only what crosses the boundaries of segments is kept: states, costates, tangents of B samples each. The gradient of

    L               forward ->, adjoint <-                                                       3 sweeps instead of 2
    L + rho G       forward ->, costates <-, tangents ->, second adjoint <-                     10 sweeps instead of 4

G may be any function of numbers of single steps: norms, log-norms and log-ratios of costates. They are few, [T + 1, B],
so that dG/d||lam_t|| is known for all steps before the tangents are. Sums over time are taken over the same chunks as
without segments (sweeps.chunks): the bits are the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import sweeps
from .batch import Batch
from .costates import Costates, check_power, norm
from .errors import InputError, KindError, NumericalError, Unsupported, brief, check_kind, whole
from .layout import Layout, lay_out, not_finite
from .losses import LossLike
from .network import Network
from .readout import Judge
from .sweeps import Link, Plan, Rows, Tape, scale
from .sweeps.chunks import Sum
from .sweeps.derivatives import affine, bend, blamed, check, linked, next_of, plus, read, read_push, settle, unscaled

Segments = int | str | bool | None
Gradient = dict[str, Tensor]


def wanted(segments: Segments) -> Segments:
    """A request, checked: a positive number, "auto" (or True) for about sqrt(T), None (or False) for none."""
    if segments is None or segments is False:
        return None
    if segments is True or segments == "auto":
        return "auto"
    if isinstance(segments, int) and segments >= 1:
        return segments
    raise InputError(f"segments must be a positive whole number, 'auto' or None; got {segments!r}.")


def length(rows: Rows, segments: Segments) -> int:
    """The steps of a segment: T / segments, or about sqrt(T), rounded up to whole chunks."""
    steps = math.sqrt(rows.T) if segments == "auto" else rows.T / int(segments or 1)
    return rows.chunk * math.ceil(steps / rows.chunk)


class Scalars(Costates):
    """Costates of which only numbers of single steps are known: norms, log-norms, log-ratios, exponents."""

    name: str
    size_1: Tensor

    def __init__(self, trajectory: Any, name: str, at: AllSteps, loss: Tensor) -> None:
        known = {"trajectory": trajectory, "name": name, "loss": loss, **at._asdict()}
        self.__dict__.update(known)

    @property
    def rows(self) -> Tensor:
        raise unkept(self.name, "the entries of the costates (lam, mantissa)")

    powers = rows

    @property
    def mask(self) -> Tensor:
        return self.trajectory.mask.to(self.size.device)

    def norms(self, p: int = 2) -> Tensor:
        check_power(p)
        return scale(self.size if p == 2 else self.size_1, self.exponent)

    def squared_norms(self) -> Tensor:
        """By the norms alone: nobody takes a second derivative of these."""
        return self.norms().square()

    def __repr__(self) -> str:
        return f"<Scalars of costates, t = 0..{len(self.size) - 1}>"


class Unkept:
    """A trajectory whose states are not kept."""

    def __init__(self, net: Network, layout: Layout, u: Tensor, name: str) -> None:
        self.network, self.layout, self.inputs, self._name = net, layout, u, name
        self.lengths, self.mask = layout.lengths, layout.mask

    def __getattr__(self, attribute: str) -> Any:
        raise unkept(self._name, f"trajectory.{attribute}")


def unkept(name: str, what: str) -> Unsupported:
    return Unsupported(
        f"penalty '{name}' reads {what}, and with segments only numbers of single steps are known of all steps at once: "
        "norms(), squared_norms(), log_norms(), log_ratios(), exponent. States and costates would take the memory that segments save. "
        "Use a penalty of these (log-ratio, variance, ...), or leave out segments."
    )


class Piece(NamedTuple):
    """One segment, forwards."""

    plan: Plan
    tape: Tape
    u: Tensor  # step rows

    @property
    def rows(self) -> Rows:
        return self.plan.rows


class Source(NamedTuple):
    """What the loss says to the states of one segment, at every step."""

    judge: Judge
    pre: Tensor  # a = V h + b_o, a leaf
    value: Tensor  # of each row that counts
    of_pre: Tensor  # dL/da
    s: Tensor  # [B + N, n]


class Back(NamedTuple):
    """A segment's costates."""

    lam: Tensor  # mantissas
    delta: Tensor
    k: Tensor


@dataclass(frozen=True, eq=False)
class Found:
    gradient: Gradient
    losses: Tensor
    penalties: Tensor


class Segmented:
    """A network and a batch, swept in segments."""

    def __init__(self, net: Network, batch: Batch, loss: LossLike, segments: Segments) -> None:
        engine = sweeps.load(net.engine)
        if net.cell is None or engine is None:
            raise Unsupported(
                "segments need the cell's formula, to sweep a part of a sequence: use a cell and engine 'auto', not a step function or engine 'autograd'."
            )
        self.net, self.batch, self.cell, self.engine = net, batch, net.cell, engine
        self.layout, self.u = lay_out(batch.u, batch.lengths, net.inputs, net.V)
        rows = self.layout.rows
        if self.u.is_cuda and (error := not_finite(self.layout, self.u)) is not None:
            raise error
        with torch.enable_grad():  # the parameters' own graph: masks, gates apart
            self.start = self.layout.sort(net.start(batch.x0, rows.B))
            self.W = net.recurrent()
            self.base, self.side = net.into(net.R, net.b)
            self.p = net.packed()
        self.judge = Judge.of(net, self.layout, loss, batch.y, batch.mask, batch.reduce, net.V)
        self.steps = length(rows, segments)
        self.sizes = rows.sizes[:: self.steps]  # the samples of each segment
        self.begins = self.store()  # the state that each segment begins with
        self.sums: dict[str, Sum] = {}

    def store(self) -> list[Tensor]:
        """One array [B, n] for each segment, made at once: small ones that stay, made between large ones that go, would
        leave holes in memory that no large one fits."""
        n = self.net.slots * self.net.hidden
        all_ = self.u.new_zeros(len(self.sizes), self.layout.rows.B, n)
        return [y[:size] for y, size in zip(all_, self.sizes, strict=True)]

    def part(self, i: int) -> Rows:
        """The rows of segment i."""
        lo = i * self.steps
        return self.layout.rows.part(lo, min(lo + self.steps, self.layout.rows.T))

    # one segment

    def going(self, i: int) -> int:
        """How many samples go on after segment i."""
        return self.sizes[i + 1] if i + 1 < len(self.sizes) else 0

    def sweep(self, i: int) -> Piece:
        rows, values = self.part(i), detached
        first = self.layout.rows.starts[rows.begin]
        u = self.u[first : first + rows.N].detach()
        plan = Plan(self.cell, rows, self.engine)
        base, v = (None if w is None else affine(rows, u, *map(values, w)) for w in (self.base, self.side))
        assert base is not None
        p = values(self.p)
        x, a, q = self.engine.forward(plan, base, v, values(self.W), self.begins[i], p)
        verify(plan, rows.last(x), "the state", lambda: x)
        return Piece(plan, Tape(a, v, x, p, q), u)

    def at_end(self, i: int, y: Tensor) -> Tensor:
        """The last rows of a segment's state array, for the samples that go on."""
        return y[self.ends(i)]

    def ends(self, i: int) -> slice:
        rows = self.part(i)
        last = rows.B + rows.starts[-2]
        return slice(last, last + self.going(i))

    def read_out(self, run: Piece, share: Tensor, twice: bool) -> Source:
        """The source of a loss at every step; share [B]: of each sample's loss, in the rows' order."""
        rows, net = run.rows, self.net
        judge, h = self.judge.part(rows), net.shown(run.tape.x[rows.B :])
        with torch.enable_grad():
            pre = affine(rows, h, net.V.detach(), detached(net.b_o)).requires_grad_()
            value = judge.values(pre)
            if not value.requires_grad:
                raise InputError("the loss does not depend on the states of this trajectory: it has no costates.")
            (of_pre,) = torch.autograd.grad(value, pre, share[judge.sample(pre.device)], create_graph=twice)
        return Source(judge, pre, value, of_pre, self.onto_states(rows, of_pre.detach()))

    def onto_states(self, rows: Rows, of_pre: Tensor) -> Tensor:
        """V' dL/da as a state array."""
        s = affine(rows, of_pre, self.net.V.detach().t(), None)
        return pad(s, (0, (self.net.slots - 1) * self.net.hidden, rows.B, 0))

    def last_source(self, i: int, ended: Tensor | None, going: Tensor | None) -> Tensor | None:
        """[B, n]: samples that end in segment i have a source of their own (readout "last"), the others what later segments say."""
        if ended is None and going is None:
            return None
        rows, n = self.part(i), self.going(i)
        out = self.begins[i].new_zeros(self.begins[i].shape)
        if ended is not None:
            out[n:] = ended[n : rows.B]
        if going is not None:
            out[:n] = going
        return out

    def costates(self, i: int, run: Piece, s: Tensor | None, source: Tensor | None, later: Any) -> Back:
        """lam of segment i from (mantissa, exponent) of J' lam at the beginning of the next one."""
        mantissa, power = later
        rows, n = run.rows, self.going(i)
        k_last = torch.zeros(rows.B, dtype=torch.int32, device=run.tape.x.device)
        if power is not None:
            k_last[:n] = power
        s_last = self.last_source(i, source, mantissa)
        adjoint = self.engine.adjoint
        lam, delta, k = adjoint(run.plan, run.tape, detached(self.W), s, s_last, None, None, True, True, k_last)
        verify(run.plan, lam[: rows.B], "the costate", lambda: lam)
        assert k is not None
        return Back(lam, delta, k)

    # the passes

    @torch.no_grad()
    def forward(self) -> tuple[Tensor, Tensor | None]:
        """-> (each sample's last state [B, n] in the rows' order, its summed loss for readout "every")."""
        rows, net, total = self.layout.rows, self.net, None
        self.begins[0].copy_(self.start)
        last = self.u.new_empty(rows.B, net.slots * net.hidden)

        def segment(i: int, total: Tensor | None) -> Tensor | None:
            run = self.sweep(i)
            x, here = run.tape.x, run.rows
            last[: here.B] = here.last(x)
            if self.going(i):
                self.begins[i + 1].copy_(self.at_end(i, x))
            if not self.judge.every:
                return None
            pre = affine(here, net.shown(x[here.B :]), net.V, net.b_o)
            judge = self.judge.part(here)
            return judge.summed(judge.values(pre), self.u.new_zeros(rows.B) if total is None else total)

        for i in range(len(self.sizes)):
            total = segment(i, total)
        return last, total

    def plain(self) -> Found:
        """The gradient of the loss alone."""
        last, total = self.forward()
        ends = Ends(self, last, total)
        leaf = ends.losses.detach().requires_grad_()
        with torch.enable_grad():
            (of_loss,) = torch.autograd.grad(self.batch.mean(leaf), leaf)
        self.adjoint(ends, of_loss)
        return Found(self.gradient(ends), ends.losses.detach(), torch.zeros_like(leaf))

    @torch.no_grad()
    def adjoint(self, ends: Ends, of_loss: Tensor) -> None:
        """forward again and adjoint, from the last segment to the first."""
        share, ended = ends.share(of_loss), ends.pull(of_loss, None)

        def segment(i: int, going: Tensor | None) -> Tensor:
            run, s = self.sweep(i), None
            if self.judge.every:
                source = self.read_out(run, share, False)
                self.add_readout(run, source.of_pre)
                s = source.s
                del source
            return self.pull_back(run, s, self.last_source(i, ended, going), None, None)

        for i in reversed(range(len(self.sizes))):
            ends.of_start = segment(i, ends.of_start)

    def pull_back(
        self, run: Piece, s: Tensor | None, s_last: Tensor | None, sa: Tensor | None, more_v: Tensor | None
    ) -> Tensor:
        """The adjoint of one segment, and what it adds to the sums -> lam at its beginning."""
        plan, tape, rows, cell = run.plan, run.tape, run.rows, self.cell
        wrt = tuple(n for n, on in (("v", self.needs("side")), ("p", self.needs("p"))) if on)
        sweep = functools.partial(self.engine.adjoint, plan, tape, detached(self.W), s, s_last, sa, None, False)
        lam, delta, _ = sweep(bool(wrt))
        verify(plan, lam[: rows.B], "the gradient by the state", lambda: sweep(True)[0])
        begin = lam[: rows.B].clone()
        if self.needs("W"):
            self.sum("W").product(rows, delta, read(cell, rows.prev(tape.x), rows))
        self.add_into("base", run, delta)
        if wrt:
            op = next_of(cell).pulled(("x",), wrt).rowwise
            back = op((tape.x[rows.B :], tape.q), tape.a, tape.v, rows.prev(tape.x), tape.p, lam[rows.B :], rows=rows)
            of_p = back.get("p")
            if of_p is not None:
                self.sum("p").rows(rows, of_p)
            of_v = plus(back.get("v"), more_v)
            if of_v is not None:
                self.add_into("side", run, of_v)
        return begin

    def penalised(
        self, G: Callable[[Costates], Tensor], name: str, rho: float, checked: Any, part: float = 1.0
    ) -> Found:
        """The gradient of part L + rho G, part 0 or 1, G a function of norms of costates."""
        last, total = self.forward()
        ends = Ends(self, last, total)
        share = ends.share(torch.ones_like(ends.losses))
        at, crossing = self.pass_costates(ends, share)
        leaves = [y.requires_grad_() for y in (at.size, at.size_1, ends.losses.detach())]
        with torch.enable_grad():
            lam = Scalars(Unkept(self.net, self.layout, self.u, name), name, at, leaves[2])
            value = checked(G(lam), lam, name)
            own = leaves[2] if part else torch.zeros_like(leaves[2])
            objective = self.batch.mean(own if rho == 0 else own + rho * value)
            of_size, of_size_1, of_loss = torch.autograd.grad(objective, leaves, allow_unused=True)
        found = value.detach()
        slopes = Slopes(self.layout, of_size, of_size_1)
        del at, lam, value, objective, leaves, of_size, of_size_1
        if of_loss is None:
            of_loss = torch.zeros_like(ends.losses)
        if slopes.zero:
            self.adjoint(ends, of_loss)
        else:
            mus, mu_last = self.pass_tangents(ends, share, crossing, slopes)
            self.second_adjoint(ends, share, of_loss, crossing, slopes, mus, mu_last)
        return Found(self.gradient(ends), ends.losses.detach(), found)

    @torch.no_grad()
    def pass_costates(self, ends: Ends, share: Tensor) -> tuple[AllSteps, Crossing]:
        """The norms of all costates, and what crosses the boundaries."""
        whole = self.layout.rows
        size, size_1 = (self.u.new_empty(whole.B + whole.N) for _ in range(2))
        power = torch.empty(whole.B + whole.N, dtype=torch.int32, device=self.u.device)
        powers = torch.zeros(len(self.sizes), whole.B, dtype=torch.int32, device=self.u.device)
        crossing: list[Any] = [(y, k[: len(y)]) for y, k in zip(self.store(), powers, strict=True)] + [(None, None)]

        def segment(i: int) -> None:
            run, here = self.sweep(i), self.part(i)
            s = self.read_out(run, share, False).s if self.judge.every else None
            lam, _, k = self.costates(i, run, s, ends.s_last, crossing[i + 1])
            first = whole.starts[here.begin]
            owned = 0 if i == 0 else here.B  # the state a segment begins with is the end of the one before
            to = slice(first + (whole.B if i else 0), first + whole.B + here.N)
            size[to], size_1[to], power[to] = norm(lam[owned:]), lam[owned:].abs().sum(-1), k[owned:]
            for kept, y in zip(crossing[i], (lam, k), strict=True):
                kept.copy_(y[: here.B])

        for i in reversed(range(len(self.sizes))):
            segment(i)
        dense = self.layout.padded_states
        return AllSteps(dense(size), dense(size_1), dense(power)), crossing

    def sources_of_tangent(self, i: int, back: Back, slopes: Slopes, carried: Tensor | None) -> Tensor:
        """dObjective/dmantissa as a state array; a segment begins with the tangent of the one before."""
        rows = self.part(i)
        g = slopes.pull(back.lam, rows, self.layout.rows)
        if carried is not None:
            g[: rows.B] = carried
        return g

    def tangent(self, run: Piece, back: Back, g: Tensor) -> tuple[Tensor, Tensor, Link]:
        link = Link.between(run.rows, back.k, g.dtype)
        mu, nu = self.engine.tangent(run.plan, run.tape, detached(self.W), g, None, link)
        try:
            verify(run.plan, run.rows.last(mu), "the tangent", lambda: mu)
        except NumericalError as error:
            raise blamed(run.rows, g, error) from None
        return mu, nu, link

    @torch.no_grad()
    def pass_tangents(self, ends: Ends, share: Tensor, crossing: Crossing, slopes: Slopes) -> tuple[list[Any], Tensor]:
        """-> (the tangent each segment begins with, that of each sample's last state at its true scale)."""
        mus: list[Any] = [None, *self.store()[1:]]
        mu_last = torch.zeros_like(ends.last)

        def segment(i: int) -> None:
            n, here, run = self.going(i), self.part(i), self.sweep(i)
            s = self.read_out(run, share, False).s if self.judge.every else None
            back = self.costates(i, run, s, ends.s_last, crossing[i + 1])
            mu, _, _ = self.tangent(run, back, self.sources_of_tangent(i, back, slopes, mus[i]))
            if not self.judge.every and n < here.B:
                k = here.last(back.k[:, None])[n:, 0]
                mu_last[n : here.B] = unscaled(run.plan, here.last(mu)[n:], k, None)
                settle(run.plan)
            if n:
                between = crossing[i + 1][1] - self.at_end(i, back.k)
                mus[i + 1].copy_(scale(self.at_end(i, mu), between[:, None]))

        for i in range(len(self.sizes) - (1 if self.judge.every else 0)):
            segment(i)
        return mus, mu_last

    @torch.no_grad()
    def second_adjoint(
        self,
        ends: Ends,
        share: Tensor,
        of_loss: Tensor,
        crossing: Crossing,
        slopes: Slopes,
        mus: list[Any],
        mu_last: Tensor,
    ) -> None:
        """Everything of a segment again, then its second adjoint, from the last segment to the first."""
        cell, W = self.cell, detached(self.W)
        ended = ends.pull(of_loss, mu_last)
        own = ends.share(of_loss)
        wrt = ("a", *(("v",) if self.needs("side") else ()), "x", *(("p",) if self.needs("p") else ()))

        def segment(i: int, going: Tensor | None, bent: Tensor | None) -> tuple[Tensor, Tensor | None]:
            """bent: the bend at the state where the later segment begins"""
            run, rows = self.sweep(i), self.part(i)
            source = self.read_out(run, share, True) if self.judge.every else None
            back = self.costates(i, run, None if source is None else source.s, ends.s_last, crossing[i + 1])
            mu, nu, link = self.tangent(run, back, self.sources_of_tangent(i, back, slopes, mus[i]))
            m = linked(rows, mu, link)
            if self.needs("W"):
                self.sum("W of lam").product(rows, back.delta, read_push(cell, rows.prev(run.tape.x), m, rows))
            bends = bend(run.plan, run.tape, W, back.lam, back.delta, m, nu, wrt, rowwise=True)
            of_p = bends.get("p")
            if of_p is not None:
                self.sum("p of lam").rows(rows, of_p)
            s = bends["x"]
            if source is not None:
                s = plus(s, self.turn(run, source, mu, back.k, own))
            del source, back, mu, nu, m, link
            if s is not None and bent is not None:
                s[self.ends(i)] += bent
            bent = None
            if s is not None and i:
                bent = s[: rows.B].clone()
                s[: rows.B] = 0
            return self.pull_back(run, s, self.last_source(i, ended, going), bends["a"], bends.get("v")), bent

        bent = None
        for i in reversed(range(len(self.sizes))):
            ends.of_start, bent = segment(i, ends.of_start, bent)

    def turn(self, run: Piece, source: Source, mu: Tensor, k: Tensor, own: Tensor) -> Tensor:
        """The loss's own source and its Hessian times the tangent, as a state array (readout "every")."""
        rows, net = run.rows, self.net
        counts = torch.ones(rows.N, dtype=torch.bool) if source.judge.weight is None else source.judge.weight != 0
        declared = pad(counts, (rows.B, 0)).to(mu.device)
        true = net.shown(unscaled(run.plan, mu, k, declared)[rows.B :])
        seeds = [(source.value, own[source.judge.sample(mu.device)])]
        if source.of_pre.requires_grad:
            seeds.append((source.of_pre, affine(rows, true, net.V.detach(), None)))
        with torch.enable_grad():
            (of_pre,) = torch.autograd.grad([y for y, _ in seeds], source.pre, [g for _, g in seeds])
        self.add_readout(run, of_pre)
        if self.needs("V"):
            self.sum("V of lam").product(rows, true, source.of_pre.detach())
        return self.onto_states(rows, of_pre)

    # sums over time

    def needs(self, name: str) -> bool:
        """Is there such a weight, and is it trained?"""
        given = getattr(self.net if name in ("V", "b_o") else self, name)
        return any(y is not None and y.requires_grad for y in (given if isinstance(given, tuple) else (given,)))

    def sum(self, name: str) -> Sum:
        return self.sums.setdefault(name, Sum())

    def add_into(self, name: str, run: Piece, delta: Tensor) -> None:
        """What delta adds to the weights and the bias that made base or side."""
        M, b = getattr(self, name)
        if M.requires_grad:
            self.sum(f"{name} R").product(run.rows, delta, run.u)
        if b is not None and b.requires_grad:
            self.sum(f"{name} b").rows(run.rows, delta)

    def add_readout(self, run: Piece, of_pre: Tensor) -> None:
        rows = run.rows
        if self.needs("V"):
            self.sum("V").product(rows, of_pre, self.net.shown(run.tape.x[rows.B :]))
        if self.needs("b_o"):
            self.sum("b_o").rows(rows, of_pre)

    def gradient(self, ends: Ends) -> Gradient:
        """The sums, through the parameters' own graph."""
        total = lambda name: self.sums[name].total() if name in self.sums else None
        transposed = total("V of lam")
        side = self.side or (None, None)
        found: list[tuple[Tensor | None, Tensor | None]] = [
            (self.W, plus(total("W"), total("W of lam"))),
            (self.p, plus(total("p"), total("p of lam"))),
            (self.base[0], total("base R")), (self.base[1], total("base b")),
            (side[0], total("side R")), (side[1], total("side b")),
            (self.start, ends.of_start),
            (self.net.V, plus(ends.of_V, total("V"), None if transposed is None else transposed.t())),
            (self.net.b_o, plus(ends.of_b_o, total("b_o"))),
        ]  # fmt: skip
        pairs = [(y, g) for y, g in found if y is not None and g is not None and y.requires_grad]
        parameters = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            grads = torch.autograd.grad(
                [y for y, _ in pairs], list(parameters.values()), [g for _, g in pairs], allow_unused=True
            )
        zipped = zip(parameters.items(), grads, strict=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zipped}


def verify(plan: Plan, end: Tensor, what: str, states: Callable[[], Tensor]) -> None:
    """A segment is asked for its doubts before it is gone."""
    check(plan, end, what, states)
    settle(plan)


def detached(y: Any) -> Any:
    return None if y is None else y.detach()


class AllSteps(NamedTuple):
    """What is known of the costates of all steps."""

    size: Tensor  # [T + 1, B] norms of mantissas
    size_1: Tensor  # 1-norms
    exponent: Tensor


Crossing = list[Any]  # (mantissa, exponent) of J' lam at the beginning of each segment; (None, None) past the last


class Slopes:
    """dObjective / d(norms of mantissas), [T + 1, B] each."""

    def __init__(self, layout: Layout, of_size: Tensor | None, of_size_1: Tensor | None) -> None:
        rows = lambda y: None if y is None else torch.cat([layout.sort(y[0]), layout.flat(y[1:])])
        self.of_size, self.of_size_1 = rows(of_size), rows(of_size_1)
        self.zero = of_size is None and of_size_1 is None

    def pull(self, lam: Tensor, rows: Rows, whole: Rows) -> Tensor:
        """-> dObjective / dmantissa of a segment; for the states it begins with only where they are x_0."""
        first = whole.starts[rows.begin]
        cut = lambda y: pad(y[whole.B + first : whole.B + first + rows.N], (rows.B, 0)) if first else y[: len(lam)]
        with torch.enable_grad():
            leaf = lam.detach().requires_grad_()
            found = [(norm, self.of_size), (lambda y: y.abs().sum(-1), self.of_size_1)]
            pairs = [(size(leaf), cut(g)) for size, g in found if g is not None]
            (out,) = torch.autograd.grad([y for y, _ in pairs], leaf, [g for _, g in pairs])
        return out


class Ends:
    """The readout at each sample's last state, for all samples at once; for readout "every" only the losses."""

    def __init__(self, of: Segmented, last: Tensor, total: Tensor | None) -> None:
        self.of, self.judge, net = of, of.judge, of.net
        self.last = last.requires_grad_(total is None)
        self.of_start: Tensor | None = None
        self.of_V: Tensor | None = None
        self.of_b_o: Tensor | None = None
        self.s: Tensor | None = None
        if total is not None:
            self.losses = of.layout.unsort(self.judge.mean(total))
            return
        with torch.enable_grad():
            self.V, self.b_o = (
                net.V.detach().requires_grad_(),
                None if net.b_o is None else net.b_o.detach().requires_grad_(),
            )
            self.losses = self.judge.losses(net.read_out(of.layout, self.last, self.last, self.V, self.b_o))
            if not self.losses.requires_grad:
                raise InputError("the loss does not depend on the states of this trajectory: it has no costates.")

    @functools.cached_property
    def source(self) -> Tensor | None:
        """dL/dx at the last state, with its graph; None for readout "every"."""
        if self.judge.every:
            return None
        with torch.enable_grad():
            return torch.autograd.grad(self.losses.sum(), self.last, create_graph=True)[0]

    @property
    def s_last(self) -> Tensor | None:
        return detached(self.source)

    def share(self, of_loss: Tensor) -> Tensor:
        """d/d(a sample's summed loss), in the rows' order."""
        return self.judge.mean(self.judge.layout.sort(of_loss)) if self.judge.every else of_loss

    def pull(self, of_loss: Tensor, of_source: Tensor | None) -> Tensor | None:
        """The gradient by the last states; that by V and b_o is kept."""
        if self.judge.every:
            return None
        seeds = [(self.losses, of_loss)]
        if of_source is not None and self.source is not None and self.source.requires_grad:
            seeds.append((self.source, of_source))
        leaves = [y for y in (self.last, self.V, self.b_o) if y is not None]
        with torch.enable_grad():
            grads = torch.autograd.grad([y for y, _ in seeds], leaves, [g for _, g in seeds], allow_unused=True)
        self.of_V, self.of_b_o = grads[1], grads[2] if self.b_o is not None else None
        return grads[0]


class Live(TorchDispatchMode):
    """The most bytes of tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for y in tree_leaves(out):
            if isinstance(y, Tensor):
                self.see(y.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.alive:
            self.alive.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


def steady() -> None:
    """Arrays of 1 MB or more get pages of their own and give them back when they go, for this process from here on.

    glibc would learn from the first ones to put them on its heap, where they leave holes: half as much memory again for a
    penalty over 100,000 steps. Elsewhere this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if hasattr(os, "confstr") else None
    if mallopt is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


OWN = 3.5e6  # bytes that BLAS and Python take for themselves, about


def predict(net: Network, T: int, B: int, method: Any) -> int:
    """The most bytes that a gradient takes beside the network and its batch, for B samples of T steps.

    Arrays of engine 'cpu' are counted by what is alive at the same time; method is BPTT or Penalised, with segments or
    without. What a penalty of whole costates adds of its own is not counted; samples of different lengths need less for
    the sweeps, and a copy of the batch.
    """
    check_kind("the network", net, Network, "a co.Network")
    whole("T", T)
    whole("B", B)
    if not hasattr(method, "segments"):
        raise KindError(f"method must be like co.BPTT() or co.Penalised(...); got {brief(method)}.")
    if net.cell is None:
        raise Unsupported("memory is counted from a cell's formula, and this network runs a step function.")
    item, rows, segments = net.V.element_size(), T * B, getattr(method, "segments", None)
    steps = T if segments is None else min(T, length(Rows([B] * T), segments))
    parts, rest = math.ceil(T / steps), T % steps
    swept = (steps + rest) * B * item  # of one entry in a row; arrays of the last, shorter segment are kept apart
    store = parts * B * net.slots * net.hidden * item if parts > 1 else 0
    weights = sum(p.numel() for p in net.parameters())
    width = widths(net)
    found: list[float] = []
    if getattr(method, "penalty", None) is None:
        kept = net.slots * net.hidden if segments is None and net.readout == "every" else 0  # V' dL/da beside its sum
        found.append(store + swept * (width["plain"] + kept) + weights * (8 + 2 * item))
    else:
        second = swept * width["second"] + weights * (16 + 3 * item)
        if segments is None:
            with contextlib.suppress(Unsupported):
                second += int(rows * of_penalty(net, method.penalty))
            found.append(second)
        else:
            scalars = rows * of_penalty(net, method.penalty)
            found += [2 * store + swept * width["costates"] + scalars, 3 * store + second + 2 * rows * item]
    return int(max(found) + 44 * T + OWN)  # 44: a step's entries in Python's lists


def widths(net: Network) -> dict[str, int]:
    """Entries in a row that are alive at once: in the adjoint, in the costates, before the second adjoint."""
    cell, d, every = net.cell, net.hidden, net.readout == "every"
    assert cell is not None
    n, g, side, own = (d * len(y) for y in (cell.slots, cell.gates, cell.beside, cell.parameters))
    formula = d * len(cell.read) if cell.read_slot is None else 0
    a = g if cell.needs_a or net.W is None else 0  # otherwise its pages are never touched
    tape = n + a + d * len(cell.kept) + side
    back = n + own + side if own or side else 0  # lam is kept for p and v
    source = n + d + 6 * net.outputs if every else 0
    bends = next_of(cell).pushed(("a", "x")).pulled(("x",), ("a", "v", "x", "p")).live
    bent = sum(w for name, w in (("a", g), ("v", side), ("x", 2 * n), ("p", own)) if name in bends)
    if formula and "x" not in bends:
        bent += 2 * n
    turned = 2 * n + d + 12 * net.outputs if every else 0
    return {
        "plain": tape + g + formula + back + source,
        "costates": tape + n + g + source,
        "second": tape + 3 * n + 2 * g + n + bent + formula + turned,  # lam, mu, g; delta, nu; m
    }


def of_penalty(net: Network, G: Any) -> float:
    """Bytes of a penalty's own graph for one costate, with the norms it is made of: found on a short sequence of ones."""
    T, B, dtype = 1024, 4, net.V.dtype
    layout = Layout.of(None, T, B)
    with Live() as live, torch.enable_grad():
        one = lambda: torch.ones(T + 1, B, dtype=dtype).requires_grad_()
        at = AllSteps(one(), one(), torch.zeros(T + 1, B, dtype=torch.int32))
        loss = torch.ones(B, dtype=dtype).requires_grad_()
        lam = Scalars(Unkept(net, layout, loss, G.name), G.name, at, loss)
        torch.autograd.grad(G(lam).sum() + loss.sum(), [at.size, at.size_1, loss], allow_unused=True)
    return live.most / ((T + 1) * B)

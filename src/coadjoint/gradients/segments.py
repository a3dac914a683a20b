"""A gradient in O(sqrt T) memory: a sequence is swept segment by segment, and what a segment needs is computed again.

Only what crosses the boundaries of segments is kept: states, costates, tangents of B samples each. The gradient of

    L               forward ->, adjoint <-                                                       3 sweeps instead of 2
    L + rho G       forward ->, costates <-, tangents ->, second adjoint <-                     10 sweeps instead of 4

G may be any function of numbers of single steps: norms, log-norms and log-ratios of costates. They are few, [T + 1, B],
so that dG/d||lam_t|| is known for all steps before the tangents are. Sums over time are taken over the same chunks as
without segments (sweeps.chunks): the bits are the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError, NumericalError, Unsupported
from ..networks.judge import Judge
from ..networks.network import Network
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps import engines
from ..sweeps.affine import affine, plus
from ..sweeps.chunks import Sum
from ..sweeps.costates import Costates, norm
from ..sweeps.differentiable import apply_link
from ..sweeps.layout import lay_out, nonfinite_error
from ..sweeps.overflow import at_true_scale, blame_penalty
from ..sweeps.plan import Saved, SweepPlan, settle_checks
from ..sweeps.rows import Link, Rows, scale
from ..sweeps.slopes import bend, read_push, read_values, step_map
from .evaluation import Gradient, GradientTuple
from .segment_parts import (
    AllSteps,
    CostateNorms,
    Crossing,
    LastStates,
    LossSource,
    NormSlopes,
    SegmentCostates,
    SegmentRun,
    TrajectoryWithoutStates,
    detached,
    verify,
)

Segments = int | str | bool | None


def parse_segments(segments: Segments) -> Segments:
    """A request, checked: a positive number, "auto" (or True) for about sqrt(T), None (or False) for none."""
    if segments is None or segments is False:
        return None
    if segments is True or segments == "auto":
        return "auto"
    if isinstance(segments, int) and segments >= 1:
        return segments
    raise InputError(f"segments must be a positive whole number, 'auto' or None; got {segments!r}.")


def segment_steps(rows: Rows, segments: Segments) -> int:
    """The steps of a segment: T / segments, or about sqrt(T), rounded up to whole chunks."""
    steps = math.sqrt(rows.T) if segments == "auto" else rows.T / int(segments or 1)
    return rows.chunk_steps * math.ceil(steps / rows.chunk_steps)


class SegmentedGradient:
    """A network and a batch, swept in segments."""

    def __init__(self, net: Network, batch: Batch, loss: LossLike, segments: Segments) -> None:
        engine = engines.load(net.engine)
        if net.cell is None or engine is None:
            raise Unsupported(
                "segments need the cell's formula, to sweep a part of a sequence: use a cell and engine 'auto', not a step function or engine 'autograd'."
            )
        self.net, self.batch, self.cell, self.engine = net, batch, net.cell, engine
        self.layout, self.u = lay_out(batch.u, batch.lengths, net.inputs, net.V)
        rows = self.layout.rows
        if self.u.is_cuda and (error := nonfinite_error(self.layout, self.u)) is not None:
            raise error
        with torch.enable_grad():  # the parameters' own graph: masks, gates apart
            self.start = self.layout.sort(net.initial_state(batch.x0, rows.B))
            taken = net.weights_for_segments()
            self.W, self.p = taken.W, taken.p
            self.base, self.side = taken.input_weights
        self.judge = Judge.of(net, self.layout, loss, batch.y, batch.mask, batch.reduce, net.V)
        self.steps = segment_steps(rows, segments)
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

    def sweep(self, i: int) -> SegmentRun:
        rows, values = self.part(i), detached
        first = self.layout.rows.starts[rows.begin]
        u = self.u[first : first + rows.N].detach()
        plan = SweepPlan(self.cell, rows, self.engine)
        base, v = (
            None if w is None else affine(rows, u, *map(values, w)) for w in (self.base, self.side)
        )
        assert base is not None
        p = values(self.p)
        x, a, q = self.engine.forward(plan, base, v, values(self.W), self.begins[i], p)
        verify(plan, rows.last(x), "the state", lambda: x)
        return SegmentRun(plan, Saved(a, v, x, p, q), u)

    def at_end(self, i: int, y: Tensor) -> Tensor:
        """The last rows of a segment's state array, for the samples that go on."""
        return y[self.ends(i)]

    def ends(self, i: int) -> slice:
        rows = self.part(i)
        last = rows.B + rows.starts[-2]
        return slice(last, last + self.going(i))

    def read_out(self, run: SegmentRun, share: Tensor, twice: bool) -> LossSource:
        """The source of a loss at every step; share [B]: of each sample's loss, in the rows' order."""
        rows, net = run.rows, self.net
        judge, h = self.judge.restrict_to(rows), net.visible_state(run.saved.x[rows.B :])
        with torch.enable_grad():
            pre = affine(rows, h, net.V.detach(), detached(net.b_o)).requires_grad_()
            value = judge.row_losses(pre)
            if not value.requires_grad:
                raise InputError(
                    "the loss does not depend on the states of this trajectory: it has no costates."
                )
            (of_pre,) = torch.autograd.grad(
                value, pre, share[judge.samples_of_rows(pre.device)], create_graph=twice
            )
        return LossSource(judge, pre, value, of_pre, self.onto_states(rows, of_pre.detach()))

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

    def costates(
        self, i: int, run: SegmentRun, s: Tensor | None, source: Tensor | None, later: Any
    ) -> SegmentCostates:
        """lam of segment i from (mantissa, exponent) of J' lam at the beginning of the next one."""
        mantissa, power = later
        rows, n = run.rows, self.going(i)
        k_last = torch.zeros(rows.B, dtype=torch.int32, device=run.saved.x.device)
        if power is not None:
            k_last[:n] = power
        s_last = self.last_source(i, source, mantissa)
        adjoint = self.engine.adjoint
        lam, delta, k = adjoint(
            run.plan, run.saved, detached(self.W), s, s_last, None, None, True, True, k_last
        )
        verify(run.plan, lam[: rows.B], "the costate", lambda: lam)
        assert k is not None
        return SegmentCostates(lam, delta, k)

    # the passes

    @torch.no_grad()
    def forward(self) -> tuple[Tensor, Tensor | None]:
        """-> (each sample's last state [B, n] in the rows' order, its summed loss for readout "every")."""
        rows, net, total = self.layout.rows, self.net, None
        self.begins[0].copy_(self.start)
        last = self.u.new_empty(rows.B, net.slots * net.hidden)

        def segment(i: int, total: Tensor | None) -> Tensor | None:
            run = self.sweep(i)
            x, here = run.saved.x, run.rows
            last[: here.B] = here.last(x)
            if self.going(i):
                self.begins[i + 1].copy_(self.at_end(i, x))
            if not self.judge.every:
                return None
            pre = affine(here, net.visible_state(x[here.B :]), net.V, net.b_o)
            judge = self.judge.restrict_to(here)
            return judge.sum_by_sample(
                judge.row_losses(pre), self.u.new_zeros(rows.B) if total is None else total
            )

        for i in range(len(self.sizes)):
            total = segment(i, total)
        return last, total

    def loss_gradient(self) -> GradientTuple:
        """The gradient of the loss alone."""
        last, total = self.forward()
        ends = LastStates(self, last, total)
        leaf = ends.losses.detach().requires_grad_()
        with torch.enable_grad():
            (of_loss,) = torch.autograd.grad(self.batch.mean(leaf), leaf)
        self.adjoint(ends, of_loss)
        return GradientTuple(ends.losses.detach(), torch.zeros_like(leaf), self.gradient(ends))

    @torch.no_grad()
    def adjoint(self, ends: LastStates, of_loss: Tensor) -> None:
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
        self,
        run: SegmentRun,
        s: Tensor | None,
        s_last: Tensor | None,
        sa: Tensor | None,
        more_v: Tensor | None,
    ) -> Tensor:
        """The adjoint of one segment, and what it adds to the sums -> lam at its beginning."""
        plan, saved, rows, cell = run.plan, run.saved, run.rows, self.cell
        wrt = tuple(n for n, on in (("v", self.needs("side")), ("p", self.needs("p"))) if on)
        sweep = functools.partial(
            self.engine.adjoint, plan, saved, detached(self.W), s, s_last, sa, None, False
        )
        lam, delta, _ = sweep(bool(wrt))
        verify(plan, lam[: rows.B], "the gradient by the state", lambda: sweep(True)[0])
        begin = lam[: rows.B].clone()
        if self.needs("W"):
            self.sum("W").add_product(rows, delta, read_values(cell, rows.prev(saved.x), rows))
        self.add_into("base", run, delta)
        if wrt:
            op = step_map(cell).pulled(("x",), wrt).rowwise
            back = op(
                (saved.x[rows.B :], saved.q),
                saved.a,
                saved.v,
                rows.prev(saved.x),
                saved.p,
                lam[rows.B :],
                rows=rows,
            )
            of_p = back.get("p")
            if of_p is not None:
                self.sum("p").add_rows(rows, of_p)
            of_v = plus(back.get("v"), more_v)
            if of_v is not None:
                self.add_into("side", run, of_v)
        return begin

    def penalised_gradient(
        self,
        G: Callable[[Costates], Tensor],
        name: str,
        rho: float,
        checked: Any,
        part: float = 1.0,
    ) -> GradientTuple:
        """The gradient of part L + rho G, part 0 or 1, G a function of norms of costates."""
        last, total = self.forward()
        ends = LastStates(self, last, total)
        share = ends.share(torch.ones_like(ends.losses))
        at, crossing = self.pass_costates(ends, share)
        leaves = [y.requires_grad_() for y in (at.size, at.size_1, ends.losses.detach())]
        with torch.enable_grad():
            lam = CostateNorms(
                TrajectoryWithoutStates(self.net, self.layout, self.u, name), name, at, leaves[2]
            )
            value = checked(G(lam), lam, name)
            own = leaves[2] if part else torch.zeros_like(leaves[2])
            objective = self.batch.mean(own if rho == 0 else own + rho * value)
            of_size, of_size_1, of_loss = torch.autograd.grad(objective, leaves, allow_unused=True)
        found = value.detach()
        slopes = NormSlopes(self.layout, of_size, of_size_1)
        del at, lam, value, objective, leaves, of_size, of_size_1
        if of_loss is None:
            of_loss = torch.zeros_like(ends.losses)
        if slopes.zero:
            self.adjoint(ends, of_loss)
        else:
            mus, mu_last = self.pass_tangents(ends, share, crossing, slopes)
            self.second_adjoint(ends, share, of_loss, crossing, slopes, mus, mu_last)
        return GradientTuple(ends.losses.detach(), found, self.gradient(ends))

    @torch.no_grad()
    def pass_costates(self, ends: LastStates, share: Tensor) -> tuple[AllSteps, Crossing]:
        """The norms of all costates, and what crosses the boundaries."""
        whole = self.layout.rows
        size, size_1 = (self.u.new_empty(whole.B + whole.N) for _ in range(2))
        power = torch.empty(whole.B + whole.N, dtype=torch.int32, device=self.u.device)
        powers = torch.zeros(len(self.sizes), whole.B, dtype=torch.int32, device=self.u.device)
        crossing: list[Any] = [
            (y, k[: len(y)]) for y, k in zip(self.store(), powers, strict=True)
        ] + [(None, None)]

        def segment(i: int) -> None:
            run, here = self.sweep(i), self.part(i)
            s = self.read_out(run, share, False).s if self.judge.every else None
            lam, _, k = self.costates(i, run, s, ends.s_last, crossing[i + 1])
            first = whole.starts[here.begin]
            owned = (
                0 if i == 0 else here.B
            )  # the state a segment begins with is the end of the one before
            to = slice(first + (whole.B if i else 0), first + whole.B + here.N)
            size[to], size_1[to], power[to] = (
                norm(lam[owned:]),
                lam[owned:].abs().sum(-1),
                k[owned:],
            )
            for kept, y in zip(crossing[i], (lam, k), strict=True):
                kept.copy_(y[: here.B])

        for i in reversed(range(len(self.sizes))):
            segment(i)
        dense = self.layout.padded_states
        return AllSteps(dense(size), dense(size_1), dense(power)), crossing

    def sources_of_tangent(
        self, i: int, back: SegmentCostates, slopes: NormSlopes, carried: Tensor | None
    ) -> Tensor:
        """dObjective/dmantissa as a state array; a segment begins with the tangent of the one before."""
        rows = self.part(i)
        g = slopes.pull(back.lam, rows, self.layout.rows)
        if carried is not None:
            g[: rows.B] = carried
        return g

    def tangent(
        self, run: SegmentRun, back: SegmentCostates, g: Tensor
    ) -> tuple[Tensor, Tensor, Link]:
        link = Link.between(run.rows, back.k, g.dtype)
        mu, nu = self.engine.tangent(run.plan, run.saved, detached(self.W), g, None, link)
        try:
            verify(run.plan, run.rows.last(mu), "the tangent", lambda: mu)
        except NumericalError as error:
            raise blame_penalty(run.rows, g, error) from None
        return mu, nu, link

    @torch.no_grad()
    def pass_tangents(
        self, ends: LastStates, share: Tensor, crossing: Crossing, slopes: NormSlopes
    ) -> tuple[list[Any], Tensor]:
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
                mu_last[n : here.B] = at_true_scale(run.plan, here.last(mu)[n:], k, None)
                settle_checks(run.plan)
            if n:
                between = crossing[i + 1][1] - self.at_end(i, back.k)
                mus[i + 1].copy_(scale(self.at_end(i, mu), between[:, None]))

        for i in range(len(self.sizes) - (1 if self.judge.every else 0)):
            segment(i)
        return mus, mu_last

    @torch.no_grad()
    def second_adjoint(
        self,
        ends: LastStates,
        share: Tensor,
        of_loss: Tensor,
        crossing: Crossing,
        slopes: NormSlopes,
        mus: list[Any],
        mu_last: Tensor,
    ) -> None:
        """Everything of a segment again, then its second adjoint, from the last segment to the first."""
        cell, W = self.cell, detached(self.W)
        ended = ends.pull(of_loss, mu_last)
        own = ends.share(of_loss)
        wrt = (
            "a",
            *(("v",) if self.needs("side") else ()),
            "x",
            *(("p",) if self.needs("p") else ()),
        )

        def segment(
            i: int, going: Tensor | None, bent: Tensor | None
        ) -> tuple[Tensor, Tensor | None]:
            """bent: the bend at the state where the later segment begins"""
            run, rows = self.sweep(i), self.part(i)
            source = self.read_out(run, share, True) if self.judge.every else None
            back = self.costates(
                i, run, None if source is None else source.s, ends.s_last, crossing[i + 1]
            )
            mu, nu, link = self.tangent(run, back, self.sources_of_tangent(i, back, slopes, mus[i]))
            m = apply_link(rows, mu, link)
            if self.needs("W"):
                self.sum("W of lam").add_product(
                    rows, back.delta, read_push(cell, rows.prev(run.saved.x), m, rows)
                )
            bends = bend(run.plan, run.saved, W, back.lam, back.delta, m, nu, wrt, rowwise=True)
            of_p = bends.get("p")
            if of_p is not None:
                self.sum("p of lam").add_rows(rows, of_p)
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
            return self.pull_back(
                run, s, self.last_source(i, ended, going), bends["a"], bends.get("v")
            ), bent

        bent = None
        for i in reversed(range(len(self.sizes))):
            ends.of_start, bent = segment(i, ends.of_start, bent)

    def turn(
        self, run: SegmentRun, source: LossSource, mu: Tensor, k: Tensor, own: Tensor
    ) -> Tensor:
        """The loss's own source and its Hessian times the tangent, as a state array (readout "every")."""
        rows, net = run.rows, self.net
        counts = (
            torch.ones(rows.N, dtype=torch.bool)
            if source.judge.weight is None
            else source.judge.weight != 0
        )
        declared = pad(counts, (rows.B, 0)).to(mu.device)
        true = net.visible_state(at_true_scale(run.plan, mu, k, declared)[rows.B :])
        seeds = [(source.value, own[source.judge.samples_of_rows(mu.device)])]
        if source.of_pre.requires_grad:
            seeds.append((source.of_pre, affine(rows, true, net.V.detach(), None)))
        with torch.enable_grad():
            (of_pre,) = torch.autograd.grad(
                [y for y, _ in seeds], source.pre, [g for _, g in seeds]
            )
        self.add_readout(run, of_pre)
        if self.needs("V"):
            self.sum("V of lam").add_product(rows, true, source.of_pre.detach())
        return self.onto_states(rows, of_pre)

    # sums over time

    def needs(self, name: str) -> bool:
        """Is there such a weight, and is it trained?"""
        given = getattr(self.net if name in ("V", "b_o") else self, name)
        return any(
            y is not None and y.requires_grad
            for y in (given if isinstance(given, tuple) else (given,))
        )

    def sum(self, name: str) -> Sum:
        return self.sums.setdefault(name, Sum())

    def add_into(self, name: str, run: SegmentRun, delta: Tensor) -> None:
        """What delta adds to the weights and the bias that made base or side."""
        M, b = getattr(self, name)
        if M.requires_grad:
            self.sum(f"{name} R").add_product(run.rows, delta, run.u)
        if b is not None and b.requires_grad:
            self.sum(f"{name} b").add_rows(run.rows, delta)

    def add_readout(self, run: SegmentRun, of_pre: Tensor) -> None:
        rows = run.rows
        if self.needs("V"):
            self.sum("V").add_product(rows, of_pre, self.net.visible_state(run.saved.x[rows.B :]))
        if self.needs("b_o"):
            self.sum("b_o").add_rows(rows, of_pre)

    def gradient(self, ends: LastStates) -> Gradient:
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
                [y for y, _ in pairs],
                list(parameters.values()),
                [g for _, g in pairs],
                allow_unused=True,
            )
        zipped = zip(parameters.items(), grads, strict=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zipped}

"""The sweeps of one segment: forward, costates, tangent, adjoint, and the readout between them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import NumericalError, Unsupported
from ..networks.judge import Judge
from ..networks.network import Network
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps import engines
from ..sweeps.affine import affine, plus
from ..sweeps.layout import lay_out, nonfinite_error
from ..sweeps.overflow import at_true_scale, blame_penalty
from ..sweeps.plan import Saved, SweepPlan
from ..sweeps.rows import Link, Rows
from ..sweeps.slopes import read_values, step_map
from .segment_parts import (
    Boundary,
    LossSource,
    SegmentCostates,
    SegmentRun,
    Segments,
    check_segment,
    detach_or_none,
    refuse_constant_loss,
    segment_steps,
)
from .segment_sums import GradientSums, SweptWeights


class SegmentSweeps:
    """A network and a batch that is swept in segments.

    A sample is in a segment if it has a step there. Samples are sorted by length, the longest
    first, so those that continue after segment i are its first `going(i)`.
    """

    def __init__(self, net: Network, batch: Batch, loss: LossLike, segments: Segments) -> None:
        engine = engines.load(net.engine)
        if net.cell is None or engine is None:
            raise Unsupported(
                "segments need the cell's formula to sweep a part of a sequence: use a cell and "
                "engine 'auto', not a step function or engine 'autograd'."
            )
        self.net = net
        self.batch = batch
        self.cell = net.cell
        self.engine = engine
        self.layout, self.u = lay_out(batch.u, batch.lengths, net.inputs, net.V)
        rows = self.layout.rows
        # On the CPU, lay_out has checked the inputs.
        if self.u.is_cuda and (error := nonfinite_error(self.layout, self.u)) is not None:
            raise error
        with torch.enable_grad():  # the graph from the parameters: masks, structures, gates
            start = self.layout.sort(net.initial_state(batch.x0, rows.B))
            parts = net.weights_for_segments()
            self.weights = SweptWeights(start, parts.W, parts.p, *parts.input_weights)
        self.W = detach_or_none(self.weights.W)
        # The loss of the whole sequence.
        self.judge = Judge.of(net, self.layout, loss, batch.y, batch.mask, batch.reduce, net.V)
        self.steps = segment_steps(rows, segments)
        self.sizes = rows.sizes[:: self.steps]  # the samples of each segment
        self.begins = self.new_states()  # the state that each segment begins with
        self.sums = GradientSums(net, self.weights)

    def new_states(self) -> list[Tensor]:
        """Return zeros [b, n] for the b samples of each segment, all in one allocation.

        Small arrays that stay, allocated between large ones that go, would leave holes in memory
        that no large array fits into.
        """
        n = self.net.slots * self.net.hidden
        states = self.u.new_zeros(len(self.sizes), self.layout.rows.B, n)
        return [y[:size] for y, size in zip(states, self.sizes, strict=True)]

    def part(self, i: int) -> Rows:
        """Return the rows of segment i."""
        begin = i * self.steps
        return self.layout.rows.part(begin, min(begin + self.steps, self.layout.rows.T))

    def going(self, i: int) -> int:
        """Return how many samples continue after segment i."""
        return self.sizes[i + 1] if i + 1 < len(self.sizes) else 0

    def end_rows(self, i: int) -> slice:
        """Return where the last states of the samples that continue are in segment i's states."""
        rows = self.part(i)
        last_step = rows.B + rows.starts[-2]  # the first row of the last step
        return slice(last_step, last_step + self.going(i))

    def sweep(self, i: int) -> SegmentRun:
        """Run segment i forward from the state it begins with."""
        rows = self.part(i)
        first = self.layout.rows.starts[rows.begin]  # step row of the sequence
        u = self.u[first : first + rows.N].detach()
        plan = SweepPlan(self.cell, rows, self.engine)
        R, b = self.weights.base
        base = affine(rows, u, R.detach(), detach_or_none(b))
        v = None
        if self.weights.side is not None:
            R, b = self.weights.side
            v = affine(rows, u, R.detach(), detach_or_none(b))
        p = detach_or_none(self.weights.p)
        x, a, q = self.engine.forward(plan, base, v, self.W, self.begins[i], p)
        check_segment(plan, rows.last(x), "the state", lambda: x)
        return SegmentRun(plan, Saved(a, v, x, p, q), u)

    def read_out(self, run: SegmentRun, share: Tensor, twice: bool) -> LossSource:
        """Return the losses of one segment and their derivative by states, with readout "every".

        Args:
            run: The run of the segment.
            share: The derivative of the objective by each sample's sum of step losses, [B] in the
                rows' order. It weights the derivative.
            twice: Keep the graph, to differentiate the derivative.
        """
        rows = run.rows
        net = self.net
        judge = self.judge.restrict_to(rows)
        h = net.visible_state(run.saved.x[rows.B :])
        with torch.enable_grad():
            pre = affine(rows, h, net.V.detach(), detach_or_none(net.b_o)).requires_grad_()
            value = judge.row_losses(pre)
            refuse_constant_loss(value)
            seed = share[judge.samples_of_rows(pre.device)]
            (of_pre,) = torch.autograd.grad(value, pre, seed, create_graph=twice)
        return LossSource(judge, pre, value, of_pre, self.onto_states(rows, of_pre.detach()))

    def onto_states(self, rows: Rows, of_pre: Tensor) -> Tensor:
        """Return V' dL/da as a state array, zero in the slots that the readout does not read."""
        s = affine(rows, of_pre, self.net.V.detach().t(), None)
        # Zeros for the slots after the first, and for the state that the segment begins with.
        return pad(s, (0, (self.net.slots - 1) * self.net.hidden, rows.B, 0))

    def last_source(self, i: int, ended: Tensor | None, going: Tensor | None) -> Tensor | None:
        """Return the adjoint's source at each sample's last step in segment i, [b, n].

        None if it is zero.

        Args:
            i: The segment.
            ended: The derivative by the last state of all samples (readout "last"), [B, n], of
                which those that end here are used.
            going: The adjoint that the next segment passes to samples that continue.
        """
        if ended is None and going is None:
            return None
        count = self.going(i)  # samples that continue; they come first
        source = self.begins[i].new_zeros(self.begins[i].shape)
        if ended is not None:
            source[count:] = ended[count : self.sizes[i]]
        if going is not None:
            source[:count] = going
        return source

    def costates(
        self,
        i: int,
        run: SegmentRun,
        s: Tensor | None,
        ended: Tensor | None,
        later: Boundary | None,
    ) -> SegmentCostates:
        """Return the costates of segment i.

        Args:
            i: The segment.
            run: Its run.
            s: Its source at every step, a state array (readout "every").
            ended: The source at the last state of all samples, [B, n] (readout "last").
            later: J' lam where the next segment begins; None for the last segment.
        """
        rows = run.rows
        k_last = torch.zeros(rows.B, dtype=torch.int32, device=run.saved.x.device)
        going = None
        if later is not None:
            k_last[: self.going(i)] = later.exponent
            going = later.mantissa
        s_last = self.last_source(i, ended, going)
        # As mantissas and exponents (scaled), which are kept for all steps.
        lam, delta, k = self.engine.adjoint(
            run.plan, run.saved, self.W, s, s_last, None, None, True, True, k_last
        )
        check_segment(run.plan, lam[: rows.B], "the costate", lambda: lam)
        assert k is not None
        return SegmentCostates(lam, delta, k)

    def tangent(
        self, run: SegmentRun, costates: SegmentCostates, g: Tensor
    ) -> tuple[Tensor, Tensor, Link]:
        """Return the tangent mu (at x) and nu (at a), and the factors between their steps.

        Its source is g, the objective's derivative by the mantissas of the costates, state rows.
        Since these have exponents k_t, mu_{t-1} enters step t with a factor 2^(k_t - k_{t-1}).
        """
        link = Link.between(run.rows, costates.k, g.dtype)
        mu, nu = self.engine.tangent(run.plan, run.saved, self.W, g, None, link)
        try:
            check_segment(run.plan, run.rows.last(mu), "the tangent", lambda: mu)
        except NumericalError as error:
            raise blame_penalty(run.rows, g, error) from None
        return mu, nu, link

    def pull_back(
        self,
        run: SegmentRun,
        s: Tensor | None,
        s_last: Tensor | None,
        sa: Tensor | None,
        more_v: Tensor | None,
    ) -> Tensor:
        """Sweep the adjoint of one segment and add it to the sums; return lam at its beginning.

        Args:
            run: The run of the segment.
            s: The source at every step, a state array.
            s_last: The source at each sample's last step here, [b, n].
            sa: The source at a_t, step rows.
            more_v: A part of the derivative by v that does not come from this adjoint, step rows.
        """
        saved = run.saved
        rows = run.rows
        wrt = []
        if self.sums.needs("side"):
            wrt.append("v")
        if self.sums.needs("p"):
            wrt.append("p")
        # lam of every step is read for v and p alone. The engine is told whether to keep it.
        adjoint = functools.partial(
            self.engine.adjoint, run.plan, saved, self.W, s, s_last, sa, None, False
        )
        lam, delta, _ = adjoint(bool(wrt))
        check_segment(
            run.plan,
            lam[: rows.B],
            ("the gradient with respect to the state"),
            lambda: adjoint(True)[0],  # all steps, to find the one that failed
        )
        at_begin = lam[: rows.B].clone()
        if self.sums.needs("W"):
            r = read_values(self.cell, rows.prev(saved.x), rows)
            self.sums.sum("W").add_product(rows, delta, r)
        self.sums.add_input_weights("base", run, delta)
        if wrt:
            pull = step_map(self.cell).pulled(("x",), tuple(wrt)).rowwise
            known_values = (saved.x[rows.B :], saved.q)  # of the step, not to be computed again
            x_before = rows.prev(saved.x)
            of_step = pull(
                known_values, saved.a, saved.v, x_before, saved.p, lam[rows.B :], rows=rows
            )
            of_p = of_step.get("p")
            if of_p is not None:
                self.sums.sum("p").add_rows(rows, of_p)
            of_v = plus(of_step.get("v"), more_v)
            if of_v is not None:
                self.sums.add_input_weights("side", run, of_v)
        return at_begin

    def _tangent_at_losses(
        self, run: SegmentRun, source: LossSource, mu: Tensor, k: Tensor
    ) -> Tensor:
        """Return the tangent of the visible states at its true scale, step rows.

        It is zero where the loss does not read the state: there it may be outside the range.
        """
        rows = run.rows
        weight = source.judge.weight
        counts = torch.ones(rows.N, dtype=torch.bool) if weight is None else weight != 0
        is_read = pad(counts, (rows.B, 0)).to(mu.device)
        return self.net.visible_state(at_true_scale(run.plan, mu, k, is_read)[rows.B :])

    def pull_readout(
        self,
        run: SegmentRun,
        source: LossSource,
        tangent: tuple[Tensor, Tensor] | None,
        loss_share: Tensor,
    ) -> Tensor:
        """Return the objective's derivative by the states through the readout, a state array.

        It has two parts: the loss in the objective, and the costates, whose source depends on the
        states by the Hessian of the loss. Those by V and b_o are added to the sums.

        Args:
            run: The run of the segment.
            source: The source of its costates, with its graph.
            tangent: (mu, k): the tangent mu, scaled by 2^k, the exponents of the costates, state
                rows. None leaves the second part out.
            loss_share: The derivative of the objective by each sample's sum of step losses, [B].
        """
        rows = run.rows
        net = self.net
        # The objective's derivatives by the losses of the steps, and by the source of the costates:
        # V' of_pre has the derivative mu, so that of_pre has V mu.
        values = [source.value]
        seeds = [loss_share[source.judge.samples_of_rows(source.pre.device)]]
        true_mu = None
        if tangent is not None:
            true_mu = self._tangent_at_losses(run, source, *tangent)
            if source.of_pre.requires_grad:
                values.append(source.of_pre)
                seeds.append(affine(rows, true_mu, net.V.detach(), None))
        with torch.enable_grad():
            (of_pre,) = torch.autograd.grad(values, source.pre, seeds)
        self.sums.add_readout(run, of_pre)
        if true_mu is not None and self.sums.needs("V"):  # <mu, V' of_pre>, by V
            self.sums.sum("V of lam").add_product(rows, true_mu, source.of_pre.detach())
        return self.onto_states(rows, of_pre)

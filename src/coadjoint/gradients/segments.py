"""A gradient in O(sqrt T) memory: a sequence is swept segment by segment.

Only what crosses the boundaries of segments is kept: states, costates and tangents of B samples
each. Whatever else a segment needs is computed again. The gradient of

    L            takes  forward ->, adjoint <-                                     3 sweeps, not 2
    L + rho G    takes  forward ->, costates <-, tangents ->, second adjoint <-   10 sweeps, not 4

G may be any function of norms, log-norms and log-ratios of costates (see segment_norms). Sums over
time are taken over the same chunks as without segments (sweeps.chunks), so the bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..objectives.penalty_type import Penalty
from ..sweeps.affine import affine, plus
from ..sweeps.costates import Costates, norm
from ..sweeps.differentiable import apply_link
from ..sweeps.overflow import at_true_scale
from ..sweeps.plan import settle_checks
from ..sweeps.rows import scale
from ..sweeps.slopes import bend, read_push
from .evaluation import GradientTuple
from .segment_norms import (
    ALL_ENTRIES,
    AllSteps,
    CostateNorms,
    NormSlopes,
    SeenEntries,
    TrajectoryWithoutStates,
)
from .segment_parts import (
    Boundary,
    LastStates,
    SegmentCostates,
    SegmentRun,
    Segments,
    boundary_after,
    parse_segments,
    segment_steps,
)
from .segment_sweeps import SegmentSweeps

__all__ = ["SegmentedGradient", "Segments", "parse_segments", "segment_steps"]


class PenaltyPasses(NamedTuple):
    """What the passes for tangents and the second adjoint take from the passes before them."""

    last_states: LastStates
    share: Tensor  # the derivative of each sample's loss by its sum of step losses, [B]
    boundaries: list[Boundary]  # J' lam where each segment begins
    slopes: NormSlopes  # the derivatives of the objective by the norms of costates
    held: bool  # the sources of the costates are constants


class SegmentedGradient(SegmentSweeps):
    """The gradient of a network for one batch, in segments.

    Each pass is a loop over segments. What it does with one segment is a method, so that the arrays
    of a segment are freed before the next one begins.
    """

    seen = ALL_ENTRIES  # what a penalty sees of the costates

    def loss_gradient(self) -> GradientTuple:
        """Compute the gradient of the mean loss."""
        last_states = self.forward()
        # The derivative of the mean by each sample's loss, [B].
        leaf = last_states.losses.detach().requires_grad_()
        with torch.enable_grad():
            (of_loss,) = torch.autograd.grad(self.batch.mean(leaf), leaf)
        self.adjoint(last_states, of_loss)
        gradient = self.sums.gradient(last_states)
        return GradientTuple(last_states.losses.detach(), torch.zeros_like(leaf), gradient)

    def penalised_gradient(
        self,
        G: Penalty,
        rho: float,
        check: Callable[[object, Costates, str], Tensor],
        share: float = 1.0,
        held: bool = False,
    ) -> GradientTuple:
        """Compute the gradient of the mean of share L + rho G.

        Args:
            G: A function of norms of costates, of the entire state or of one part of it.
            rho: The weight of G.
            check: Called with the value of G, the costates and the name; returns the value.
            share: 1, or 0 to leave out the loss.
            held: The sources of the costates are constants to the derivative of G.
        """
        self.seen = SeenEntries.of(self.net, G.part)
        last_states = self.forward()
        # Costates are those of each sample's own loss, so every loss has the derivative 1.
        of_sums = last_states.share(torch.ones_like(last_states.losses))
        norms, boundaries = self.pass_costates(last_states, of_sums)
        losses = last_states.losses.detach().requires_grad_()
        leaves = [norms.size.requires_grad_(), norms.size_1.requires_grad_(), losses]
        with torch.enable_grad():
            trajectory = TrajectoryWithoutStates(self.net, self.layout, self.u, G.name)
            lam = CostateNorms(trajectory, G.name, norms, losses, self.seen)
            value = check(G(lam), lam, G.name)
            objective = losses if share else torch.zeros_like(losses)
            if rho != 0:
                objective = objective + rho * value
            of_size, of_size_1, of_loss = torch.autograd.grad(
                self.batch.mean(objective), leaves, allow_unused=True
            )
        penalties = value.detach()
        slopes = NormSlopes(self.layout, of_size, of_size_1, self.seen)
        # Free the penalty's graph and its inputs, as large as the sequence, before the next pass.
        del norms, lam, value, objective, leaves, losses, of_size, of_size_1
        if of_loss is None:
            of_loss = torch.zeros_like(last_states.losses)
        if slopes.zero:  # the objective does not depend on costates
            self.adjoint(last_states, of_loss)
        else:
            passes = PenaltyPasses(last_states, of_sums, boundaries, slopes, held)
            tangents, last_tangent = self.pass_tangents(passes)
            self.second_adjoint(passes, of_loss, tangents, last_tangent)
        gradient = self.sums.gradient(last_states)
        return GradientTuple(last_states.losses.detach(), penalties, gradient)

    # forward

    @torch.no_grad()
    def forward(self) -> LastStates:
        """Run all segments forward, keeping the state that each begins with.

        Return the last state and the loss of each sample.
        """
        self.begins[0].copy_(self.weights.start)
        x_last = self.u.new_empty(self.layout.rows.B, self.net.slots * self.net.hidden)
        total = self.u.new_zeros(self.layout.rows.B) if self.judge.every else None
        for i in range(len(self.sizes)):
            total = self._forward_segment(i, x_last, total)
        return LastStates(self.net, self.layout, self.judge, x_last, total)

    def _forward_segment(self, i: int, x_last: Tensor, total: Tensor | None) -> Tensor | None:
        """Run segment i, and write its last states to `x_last` [B, n].

        Return `total` [B], the sums of step losses, with those of this segment; None with readout
        "last", where steps have no losses.
        """
        run = self.sweep(i)
        x = run.saved.x
        rows = run.rows
        # Samples that continue are written again by the next segment.
        x_last[: rows.B] = rows.last(x)
        if self.going(i):
            self.begins[i + 1].copy_(x[self.end_rows(i)])
        if total is None:
            return None
        pre = affine(rows, self.net.visible_state(x[rows.B :]), self.net.V, self.net.b_o)
        judge = self.judge.restrict_to(rows)
        return judge.sum_by_sample(judge.row_losses(pre), total)

    # the adjoint of the loss

    @torch.no_grad()
    def adjoint(self, last_states: LastStates, of_loss: Tensor) -> None:
        """Sweep the adjoint from the last segment to the first, each after its forward sweep.

        The gradient is added to `sums`. `of_loss` [B] is the objective's derivative by the losses.
        """
        share = last_states.share(of_loss)  # the derivative by each sample's sum of step losses
        ended = last_states.pull(of_loss, None)  # by its last state (readout "last")
        for i in reversed(range(len(self.sizes))):
            # of_start is the adjoint at the state where segment i + 1, then segment i begins: at
            # last the one at x_0.
            last_states.of_start = self._adjoint_segment(i, share, ended, last_states.of_start)

    def _adjoint_segment(
        self, i: int, share: Tensor, ended: Tensor | None, going: Tensor | None
    ) -> Tensor:
        """Return the adjoint at the state that segment i begins with.

        Args:
            i: The segment.
            share: The derivative by each sample's sum of step losses, [B].
            ended: The derivative by the last state of each sample, [B, n] (readout "last").
            going: The adjoint at the state that segment i + 1 begins with.
        """
        run = self.sweep(i)
        s = None
        if self.judge.every:
            source = self.read_out(run, share, False)
            self.sums.add_readout(run, source.of_pre)
            s = source.s
            del source  # the adjoint needs its memory
        return self.pull_back(run, s, self.last_source(i, ended, going), None, None)

    # the costates

    @torch.no_grad()
    def pass_costates(
        self, last_states: LastStates, share: Tensor
    ) -> tuple[AllSteps, list[Boundary]]:
        """Return the norms of all costates, and J' lam where each segment begins.

        `share` [B] is the derivative of each sample's loss by its sum of step losses.
        """
        rows = self.layout.rows
        size = self.u.new_empty(rows.B + rows.N)
        size_1 = self.u.new_empty(rows.B + rows.N)
        exponent = torch.empty(rows.B + rows.N, dtype=torch.int32, device=self.u.device)
        norms = AllSteps(size, size_1, exponent)  # state rows, filled in segment by segment
        exponents = torch.zeros(len(self.sizes), rows.B, dtype=torch.int32, device=self.u.device)
        boundaries = []
        for mantissa, k in zip(self.new_states(), exponents, strict=True):
            boundaries.append(Boundary(mantissa, k[: len(mantissa)]))
        for i in reversed(range(len(self.sizes))):
            self._costates_segment(i, last_states, share, norms, boundaries)
        padded = self.layout.padded_states
        return AllSteps(padded(size), padded(size_1), padded(exponent)), boundaries

    def _loss_source(self, run: SegmentRun, share: Tensor) -> Tensor | None:
        """Return the adjoint's source at every step, share_j dL_t/dx_t; None with readout "last".

        `share` [B] is the derivative of each sample's loss by its sum of step losses.
        """
        return self.read_out(run, share, False).s if self.judge.every else None

    def _costates_segment(
        self,
        i: int,
        last_states: LastStates,
        share: Tensor,
        norms: AllSteps,
        boundaries: list[Boundary],
    ) -> None:
        """Compute the costates of segment i; write their norms, and J' lam where it begins.

        The norms go to `norms`, J' lam to boundaries[i]; boundaries[i + 1] is read. `share` is
        that of `pass_costates`.
        """
        run = self.sweep(i)
        s = self._loss_source(run, share)
        lam, _, k = self.costates(i, run, s, last_states.s_last, boundary_after(boundaries, i))
        rows = self.part(i)
        end = self.layout.rows.B + self.layout.rows.starts[rows.begin] + rows.N
        boundaries[i].mantissa.copy_(lam[: rows.B])
        boundaries[i].exponent.copy_(k[: rows.B])
        if i > 0:
            # The state a segment begins with is the end of the one before, which writes its norm.
            lam = lam[rows.B :]
            k = k[rows.B :]
        here = slice(end - len(lam), end)  # the state rows of the sequence
        lam = self.seen.take(lam)
        norms.size[here] = norm(lam)
        norms.size_1[here] = lam.abs().sum(-1)
        norms.exponent[here] = k

    # the tangents

    @torch.no_grad()
    def pass_tangents(self, passes: PenaltyPasses) -> tuple[list[Tensor | None], Tensor]:
        """Return the tangent that each segment begins with, and that of each last state.

        The first segment begins without one. Those of the last states are at their true scale; they
        are needed for the source of the costates there, and zero if that is held.
        """
        tangents: list[Tensor | None] = [None, *self.new_states()[1:]]
        last_tangent = torch.zeros_like(passes.last_states.x)
        # With readout "every", the tangent at the end of the last segment is not needed.
        is_needed = not self.judge.every and not passes.held
        count = len(self.sizes) if is_needed else len(self.sizes) - 1
        for i in range(count):
            self._tangents_segment(i, passes, tangents, last_tangent)
        return tangents, last_tangent

    def _tangents_segment(
        self,
        i: int,
        passes: PenaltyPasses,
        tangents: list[Tensor | None],
        last_tangent: Tensor,
    ) -> None:
        """Sweep the tangents of segment i, which begin with tangents[i].

        Write tangents[i + 1] for samples that continue, and `last_tangent` for those that end here
        (readout "last").
        """
        going = self.going(i)  # samples that continue; they come first
        rows = self.part(i)
        run = self.sweep(i)
        s = self._loss_source(run, passes.share)
        later = boundary_after(passes.boundaries, i)
        costates = self.costates(i, run, s, passes.last_states.s_last, later)
        g = self.tangent_source(i, costates, passes.slopes, tangents[i])
        mu, _, _ = self.tangent(run, costates, g)
        if not self.judge.every and not passes.held and going < rows.B:
            k = rows.last(costates.k[:, None])[going:, 0]
            last_mu = rows.last(mu)[going:]
            last_tangent[going : rows.B] = at_true_scale(run.plan, last_mu, k, None)
            settle_checks(run.plan)
        following = tangents[i + 1] if going else None
        if following is not None and later is not None:
            # mu is scaled by 2^k of this segment's costates, and goes on with that of the next.
            end_rows = self.end_rows(i)
            shift = later.exponent - costates.k[end_rows]
            following.copy_(scale(mu[end_rows], shift[:, None]))

    def tangent_source(
        self, i: int, costates: SegmentCostates, slopes: NormSlopes, carried: Tensor | None
    ) -> Tensor:
        """Return the source of the tangents of segment i, a state array.

        It is dObjective/dmantissa. At the state that the segment begins with it is `carried`, the
        tangent where the segment before ended; None for the first segment.
        """
        rows = self.part(i)
        g = slopes.pull(costates.lam, rows, self.layout.rows)
        if carried is not None:
            g[: rows.B] = carried
        return g

    # the second adjoint

    @torch.no_grad()
    def second_adjoint(
        self,
        passes: PenaltyPasses,
        of_loss: Tensor,
        tangents: list[Tensor | None],
        last_tangent: Tensor,
    ) -> None:
        """Sweep the second adjoint, from the last segment to the first, and add to the sums.

        Each segment first repeats its forward sweep, costates and tangents.

        Args:
            passes: The results of the passes before.
            of_loss: The objective's derivative by the losses themselves, [B].
            tangents: The tangent that each segment begins with.
            last_tangent: The tangent at each sample's last state, [B, n].
        """
        last_states = passes.last_states
        ended = last_states.pull(of_loss, None if passes.held else last_tangent)
        loss_share = last_states.share(of_loss)
        bent: Tensor | None = None  # the source where the segment after begins
        for i in reversed(range(len(self.sizes))):
            last_states.of_start, bent = self._second_adjoint_segment(
                i, passes, loss_share, tangents[i], ended, bent
            )

    def _second_adjoint_segment(
        self,
        i: int,
        passes: PenaltyPasses,
        loss_share: Tensor,
        carried: Tensor | None,
        ended: Tensor | None,
        bent: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the adjoint at the state that segment i begins with, and the source there.

        The state where two segments meet belongs to both. Its source has a part from each, and
        enters the sweep of the earlier segment, at its end. So segment i takes in `bent`, the part
        of segment i + 1, and returns its own part for segment i - 1.

        Args:
            i: The segment.
            passes: The results of the passes before.
            loss_share: The objective's derivative by each sample's sum of step losses, [B].
            carried: The tangent that the segment begins with.
            ended: The objective's derivative by each sample's last state, [B, n].
            bent: The source where segment i + 1 begins; None for the last segment.
        """
        run = self.sweep(i)
        bends = self._bends(i, run, passes, loss_share, carried)
        s = bends["x"]  # the sources of this segment, a state array
        bent_before: Tensor | None = None
        if s is not None and bent is not None:
            s[self.end_rows(i)] += bent
        if s is not None and i > 0:  # handed to segment i - 1, and not counted here as well
            bent_before = s[: run.rows.B].clone()
            s[: run.rows.B] = 0
        # of_start: the adjoint where segment i + 1 begins, as that segment has returned it
        s_last = self.last_source(i, ended, passes.last_states.of_start)
        of_begin = self.pull_back(run, s, s_last, bends["a"], bends.get("v"))
        return of_begin, bent_before

    def _bends(
        self,
        i: int,
        run: SegmentRun,
        passes: PenaltyPasses,
        loss_share: Tensor,
        carried: Tensor | None,
    ) -> dict[str, Tensor | None]:
        """Return the sources of the second adjoint at a, v and x (a state array).

        They are the derivatives of <tangent, costates> by what the forward sweep saved. Those by
        W, p and V are added to the sums. The arguments are those of `_second_adjoint_segment`.
        """
        rows = run.rows
        source = self.read_out(run, passes.share, True) if self.judge.every else None
        s = None if source is None else source.s
        later = boundary_after(passes.boundaries, i)
        costates = self.costates(i, run, s, passes.last_states.s_last, later)
        g = self.tangent_source(i, costates, passes.slopes, carried)
        mu, nu, link = self.tangent(run, costates, g)
        del g
        m = apply_link(rows, mu, link)  # mu_{t-1} in the scale of lam_t, step rows
        if self.sums.needs("W"):
            # lam_{t-1} holds r' W' delta_t, whose derivative by W is delta_t (r' m_t)'.
            r_push = read_push(self.cell, rows.prev(run.saved.x), m, rows)
            self.sums.sum("W of lam").add_product(rows, costates.delta, r_push)
            del r_push
        wrt = ["a", "x"]
        if self.sums.needs("side"):  # in the order a, v, x, p
            wrt.insert(1, "v")
        if self.sums.needs("p"):
            wrt.append("p")
        bends = bend(
            run.plan,
            run.saved,
            self.W,
            costates.lam,
            costates.delta,
            m,
            nu,
            tuple(wrt),
            rowwise=True,
        )
        of_p = bends.get("p")
        if of_p is not None:
            self.sums.sum("p of lam").add_rows(rows, of_p)
        if source is not None:
            tangent = None if passes.held else (mu, costates.k)
            of_readout = self.pull_readout(run, source, tangent, loss_share)
            bends["x"] = plus(bends["x"], of_readout)
        return bends

"""The sweeps of a step function as differentiable operations, closed under differentiation.

    states   -> x_t                                  the run, already made
    adjoint  <- lam_{t-1} = s_{t-1} + link_t J_t' lam_t
    tangent  -> mu_t      = g_t + J_t link_t mu_{t-1}

As for formulas (sweeps.differentiable): d states = adjoint, d adjoint = tangent + bend, and
d tangent = adjoint + bend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..engines.denormals import flush_denormals
from ..engines.eager.in_place import active_factors
from ..engines.eager.scaled_adjoint import ScaledAdjoint
from ..engines.eager.views import Views
from ..functions import (
    Context,
    Gradients,
    Inputs,
    SweepFunction,
    with_quick_apply,
    without_autocast,
)
from ..rows import SAFE_EXPONENT, Link, Rows, scale
from ..torch_internals import autocast_is_on
from .linearised import Linearised, gradients_by


class StepContext(Context):
    """The context of the three sweeps."""

    at: Linearised
    drives: int  # how many of the inputs drive the steps
    has: tuple[bool, bool]  # which of the sources were given


class PullLoop:
    """The steps of an adjoint sweep, as ScaledAdjoint calls them: t counts from 0.

    lam      views lam_0 .. lam_T
    pulled   where step(t) writes J_{t+1}' lam_{t+1}: the rows of lam_t that take another step
    """

    def __init__(self, at: Linearised, lam: Tensor) -> None:
        self.at = at
        self.rows = at.rows
        self.lam: Views = at.rows.states(lam)
        self.pulled: Views = at.rows.before(lam)
        self.blocks = at.blocks
        self.code = at.pull
        self.begin = 0  # the first step of the block whose slopes are known
        self.slopes: list[tuple[Tensor, ...]] = []

    def compute_slopes(self, i: int) -> None:
        """Compute the slopes of the steps of block i."""
        self.begin = self.blocks[i][0]
        self.slopes = self.at.pull_slopes(i)

    def pull(self, t: int) -> Tensor:
        """J_{t+1}' lam_{t+1}."""
        return self.code.step(self.lam[t + 1], self.slopes[t - self.begin], self.rows.sizes[t])

    def step(self, t: int) -> None:
        """lam_t <- J_{t+1}' lam_{t+1}."""
        self.pulled[t].copy_(self.pull(t))


@torch.no_grad()
def scaled_adjoint(
    at: Linearised, s: Tensor | None, s_last: Tensor | None, link: Link | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """The adjoint sweep in mantissas lam [B + N, n] and exponents k [B + N]."""
    lam = torch.empty_like(like, memory_format=torch.contiguous_format)
    with flush_denormals():
        loop = PullLoop(at, lam)
        k = ScaledAdjoint(loop, s, s_last, None, active_factors(at.rows, link)).run()
    return lam, k


@torch.no_grad()
def plain_adjoint(at: Linearised, s: Tensor, link: Link | None) -> Tensor:
    """The adjoint sweep at true scale: lam [B + N, n] for sources s of all states."""
    lam = s.clone(memory_format=torch.contiguous_format)
    factors = active_factors(at.rows, link)
    with flush_denormals():
        loop = PullLoop(at, lam)
        for i, (lo, hi) in reversed(list(enumerate(at.blocks))):
            loop.compute_slopes(i)
            for t in reversed(range(lo, hi)):
                pulled = loop.pull(t)
                if t in factors:
                    pulled = pulled * factors[t]
                loop.pulled[t].add_(pulled)
    return lam


@torch.no_grad()
def tangent(at: Linearised, g: Tensor, link: Link | None) -> Tensor:
    """The tangent sweep: mu [B + N, n] for sources g of all states."""
    rows = at.rows
    mu = g.clone(memory_format=torch.contiguous_format)
    factors = active_factors(rows, link)
    states = rows.states(mu)
    before = rows.before(mu)
    code = at.push
    with flush_denormals():
        for i, (lo, hi) in enumerate(at.blocks):
            slopes = at.push_slopes(i)
            for t in range(lo, hi):
                m = before[t] * factors[t] if t in factors else before[t]
                states[t + 1].add_(code.step(m, slopes[t - lo], rows.sizes[t]))
    return mu


def linked(rows: Rows, mu: Tensor, link: Link | None) -> Tensor:
    """m_t = link_t mu_{t-1} of all steps at once: from state rows to step rows."""
    return rows.prev(mu) if link is None else rows.prev(mu) * link.factor


def drive_gradients(
    at: Linearised, lam: Tensor, x: Tensor, drive: Sequence[Tensor]
) -> Callable[[], tuple[Tensor | None, ...]]:
    """A function that computes the derivatives of lam_t x_t by what drives step t, step arrays.

    lam [B + N, n]. They can be differentiated if gradients are on now.
    """
    graph = torch.is_grad_enabled()

    def compute() -> tuple[Tensor | None, ...]:
        """One step array for each driving input, zero where the step does not depend on it."""
        with torch.set_grad_enabled(graph):
            if graph:
                out, copies = at.again(x, drive, at.tensors)
                wrt = copies[1 : len(drive) + 1]
                grads = gradients_by(wrt, out, lam[at.rows.B :], [True] * len(wrt), True)
            else:
                needed = [True] * len(drive) + [False] * len(at.copies)
                grads = at.gradient(lam[at.rows.B :], needed)[: len(drive)]
        zeros = map(torch.zeros_like, drive)
        return tuple(zero if g is None else g for zero, g in zip(zeros, grads, strict=True))

    return compute


def bends(
    at: Linearised,
    drives: int,
    lam: Tensor,
    m: Tensor,
    inputs: Sequence[Tensor],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The derivatives of sum lam_t J_t m_t by the inputs x, drive and tensors of a sweep.

    lam, m: step rows. They can be differentiated again, if gradients are on.
    """
    if not torch.is_grad_enabled():
        gx, *others = at.bend(lam, m, needed)
    else:
        x, *rest = inputs
        out, copies = at.again(x, rest[:drives], rest[drives:])
        (pulled,) = gradients_by(copies[:1], out, lam, [True], True)
        if pulled is None:  # the states move nothing
            return [None] * len(inputs)
        gx, *others = gradients_by(copies, pulled, m, needed, True)
    return [None if gx is None else at.rows.prev_transposed(gx), *others]


@with_quick_apply
class StepStates(SweepFunction):
    """apply(at, drives, (x,), x0, *drive, *tensors) -> x [B + N, n], the states of a run."""

    @staticmethod
    def forward(
        at: Linearised, drives: int, states: tuple[Tensor], x0: Tensor, *inputs: Tensor
    ) -> Tensor:
        """The states of the run."""
        return states[0]

    @staticmethod
    def setup_context(ctx: StepContext, inputs: tuple[object, ...], output: Tensor) -> None:
        """Keep the states and what they depend on."""
        ctx.at, ctx.drives, _, _, *rest = inputs  # type: ignore[assignment]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output, *rest)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: StepContext, gx: Tensor | None) -> Gradients:
        """The adjoint sweep with the gradients by the states as sources."""
        if autocast_is_on():
            return without_autocast(StepStates.backward, ctx, gx)
        x, *inputs = ctx.saved_tensors
        at = ctx.at
        if gx is None:
            return (None,) * (4 + len(inputs))
        B = at.rows.B
        if not torch.is_grad_enabled():
            at.prepare(twice=False)
            lam = plain_adjoint(at, gx, None)
            return None, None, None, lam[:B], *at.gradient(lam[B:], ctx.needs_input_grad[4:])
        at.prepare(twice=True)
        lam, _ = StepAdjoint.apply(at, ctx.drives, False, None, None, gx, None, x, *inputs)
        out, copies = at.again(x, inputs[: ctx.drives], inputs[ctx.drives :])
        needed = ctx.needs_input_grad[4:]
        grads = gradients_by(copies[1:], out, lam[B:], needed, True)
        return None, None, None, lam[:B], *grads


@with_quick_apply
class StepAdjoint(SweepFunction):
    """apply(at, drives, scaled, factor, declared, s, s_last, x, *drive, *tensors) -> (lam, k).

    scaled: lam are mantissas, lam_t 2^k_t; otherwise k is None. factor: of a Link.
    declared: see SweepRun.costate.
    """

    @staticmethod
    def forward(
        at: Linearised,
        drives: int,
        scaled: bool,
        factor: Tensor | None,
        declared: Tensor | None,
        s: Tensor | None,
        s_last: Tensor | None,
        x: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """The adjoint sweep with sources s of all states and s_last of the last ones."""
        link = None if factor is None else Link(at.rows, factor)
        if scaled:
            return scaled_adjoint(at, s, s_last, link, x)
        assert s is not None  # the sources of a plain sweep are all in one array
        return plain_adjoint(at, s, link), None

    @staticmethod
    def setup_context(
        ctx: StepContext, inputs: Inputs, output: tuple[Tensor, Tensor | None]
    ) -> None:
        """Keep what the derivatives read; k are integers, without a derivative."""
        ctx.at, ctx.drives, _, factor, declared, s, s_last, *rest = inputs
        lam, k = output
        ctx.has = (s is not None, s_last is not None)
        ctx.set_materialize_grads(False)
        if k is not None:
            ctx.mark_non_differentiable(k)
        ctx.save_for_backward(factor, declared, lam, k, *rest)

    @staticmethod
    def backward(ctx: StepContext, glam: Tensor | None, _k: None) -> Gradients:
        """The tangent sweep with the gradient by lam as source, and the bend."""
        if autocast_is_on():
            return without_autocast(StepAdjoint.backward, ctx, glam, None)
        factor, declared, lam, k, *inputs = ctx.saved_tensors
        at = ctx.at
        rows = at.rows
        if glam is None:
            return (None,) * (7 + len(inputs))
        link = None if factor is None else Link(rows, factor)
        if k is not None:  # the link has 2^(k_t - k_{t-1}) too
            between = Link.between(rows, k, lam.dtype)
            link = between if link is None else Link(rows, between.factor * link.factor)
        mu = StepTangent.apply(at, ctx.drives, None if link is None else link.factor, glam, *inputs)
        needed = ctx.needs_input_grad[7:]
        bent = bends(at, ctx.drives, lam[rows.B :], linked(rows, mu, link), inputs, needed)
        has_s, has_last = ctx.has
        gs = at_true_scale(mu, k, declared) if has_s else None
        glast = None
        if has_last:  # declared: None, since the loss reads every last state
            k_last = None if k is None else rows.last(k)
            glast = at_true_scale(rows.last(mu), k_last, None)
        return None, None, None, None, None, gs, glast, *bent


def at_true_scale(mu: Tensor, k: Tensor | None, declared: Tensor | None) -> Tensor:
    """mu_t 2^-k_t, the derivative by the source s_t.

    declared [rows of mu]: where the loss reads the state. Elsewhere it is 0 if 2^-k_t is large.
    """
    if k is None:
        return mu
    true_mu = scale(mu, -k[:, None])
    if declared is None:
        return true_mu
    in_reach = declared | (k > -SAFE_EXPONENT[mu.dtype])
    return torch.where(in_reach[:, None], true_mu, 0)


@with_quick_apply
class StepTangent(SweepFunction):
    """apply(at, drives, factor, g, x, *drive, *tensors) -> mu; factor: of a Link."""

    @staticmethod
    def forward(
        at: Linearised, drives: int, factor: Tensor | None, g: Tensor, x: Tensor, *inputs: Tensor
    ) -> Tensor:
        """The tangent sweep with sources g [B + N, n]."""
        return tangent(at, g, None if factor is None else Link(at.rows, factor))

    @staticmethod
    def setup_context(ctx: StepContext, inputs: tuple[object, ...], output: Tensor) -> None:
        """Keep what the derivatives read."""
        ctx.at, ctx.drives, factor, _, *rest = inputs  # type: ignore[assignment]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(factor, output, *rest)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: StepContext, gmu: Tensor | None) -> Gradients:
        """The adjoint sweep with the gradient by mu as source, and the bend."""
        if autocast_is_on():
            return without_autocast(StepTangent.backward, ctx, gmu)
        factor, mu, *inputs = ctx.saved_tensors
        at = ctx.at
        rows = at.rows
        if gmu is None:
            return (None,) * (4 + len(inputs))
        link = None if factor is None else Link(rows, factor)
        lam, _ = StepAdjoint.apply(at, ctx.drives, False, factor, None, gmu, None, *inputs)
        needed = ctx.needs_input_grad[4:]
        bent = bends(at, ctx.drives, lam[rows.B :], linked(rows, mu, link), inputs, needed)
        return None, None, None, lam, *bent

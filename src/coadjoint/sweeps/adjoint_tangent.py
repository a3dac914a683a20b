"""The two linear loops, adjoint and tangent, each differentiable by the other and the bend.

The formulas and names are those of differentiable.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..errors import NumericalError
from .affine import plus
from .functions import (
    Context,
    Gradients,
    Inputs,
    SweepFunction,
    is_transformed,
    needed_inputs,
    nestable_jvp,
    with_quick_apply,
    without_autocast,
)
from .memory import empty
from .overflow import at_true_scale, blame_penalty, check_range, constant
from .plan import Saved, SweepPlan
from .rows import Link, Rows, scale
from .slopes import (
    at_saved,
    bend,
    present_directions,
    read_map,
    read_pull,
    read_push,
    step_map,
    to_state_rows,
)
from .torch_internals import autocast_is_on
from .weights import step_products, weight_gradient

Entry = TypeVar("Entry")


class SweepContext(Context):
    """The context of the three loops."""

    plan: SweepPlan
    has: tuple[bool, ...]  # which of the sources were given


class AdjointInputs(NamedTuple, Generic[Entry]):
    """One entry for each argument of Adjoint.apply: is it needed, or its gradient."""

    plan: Entry
    scaled: Entry
    factor: Entry
    declared: Entry
    s: Entry
    s_last: Entry
    sa: Entry
    W: Entry
    a: Entry
    v: Entry
    x: Entry
    p: Entry
    q: Entry


class AdjointState(NamedTuple):
    """What Adjoint keeps for its derivatives."""

    link: Link | None  # also of the exponents, if the sweep was scaled
    declared: Tensor | None
    W: Tensor | None
    saved: Saved
    lam: Tensor
    delta: Tensor
    k: Tensor | None

    @staticmethod
    def read(ctx: SweepContext) -> AdjointState:
        """What `setup_context` has kept; of a scaled sweep, the link has 2^(k_t - k_{t-1}) too."""
        factor, declared, W, a, v, x, p, q, lam, delta, k = ctx.saved_tensors
        rows = ctx.plan.rows
        link = make_link(rows, factor)
        if k is not None:
            between = Link.between(rows, k, lam.dtype)
            link = between if link is None else Link(rows, between.factor * link.factor)
        return AdjointState(link, declared, W, Saved(a, v, x, p, q), lam, delta, k)


@with_quick_apply
class Adjoint(SweepFunction):
    """apply(plan, scaled, factor, declared, s, s_last, sa, W, a, v, x, p, q) -> (lam, delta, k).

    scaled: the sweep chooses exponents k and returns mantissas, lam_t = mantissa_t 2^{k_t}.
    factor: of a Link. declared: see FormulaRun.costate.
    """

    @staticmethod
    def forward(
        plan: SweepPlan,
        scaled: bool,
        factor: Tensor | None,
        declared: Tensor | None,
        s: Tensor | None,
        s_last: Tensor | None,
        sa: Tensor | None,
        W: Tensor | None,
        a: Tensor,
        v: Tensor | None,
        x: Tensor,
        p: Tensor | None,
        q: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The adjoint loop with sources s of all states, s_last of the last ones, sa of delta."""
        link = make_link(plan.rows, factor)
        saved = Saved(a, v, x, p, q)
        keep = True  # lam at every step, which the derivatives read
        lam, delta, k = plan.engine.adjoint(plan, saved, W, s, s_last, sa, link, scaled, keep)
        what = "the costate" if scaled else "the gradient with respect to the state"
        # The loop ends at the initial states: what was not finite before is not finite there.
        check_range(plan, lam[: plan.rows.B], what, constant(lam))
        return lam, delta, k

    @staticmethod
    def setup_context(
        ctx: SweepContext, inputs: Inputs, output: tuple[Tensor, Tensor, Tensor | None]
    ) -> None:
        """Keep what AdjointState reads; k are integers, without a derivative."""
        ctx.plan, _, factor, declared, s, s_last, sa, W, a, v, x, p, q = inputs
        lam, delta, k = output
        ctx.has = (s is not None, s_last is not None, sa is not None)
        ctx.set_materialize_grads(False)
        if k is not None:
            ctx.mark_non_differentiable(k)
        ctx.save_for_backward(factor, declared, W, a, v, x, p, q, lam, delta, k)
        ctx.save_for_forward(factor, declared, W, a, v, x, p, q, lam, delta, k)

    @staticmethod
    def backward(
        ctx: SweepContext, glam: Tensor | None, gdelta: Tensor | None, _k: None
    ) -> Gradients:
        """The tangent loop with the gradients by lam and delta as sources, and the bend.

        The bend is the gradient by the saved arrays, from the second derivatives of a step.
        """
        if autocast_is_on():
            return without_autocast(Adjoint.backward, ctx, glam, gdelta, None)
        if glam is None and gdelta is None:
            return (None,) * 13
        need = AdjointInputs(*needed_inputs(ctx))
        return adjoint_gradient(ctx.plan, AdjointState.read(ctx), glam, gdelta, need, ctx.has)

    @staticmethod
    @nestable_jvp
    def jvp(
        ctx: SweepContext,
        _plan: None,
        _scaled: None,
        _factor: None,
        _declared: None,
        ds: Tensor | None,
        dlast: Tensor | None,
        dsa: Tensor | None,
        dW: Tensor | None,
        da: Tensor | None,
        dv: Tensor | None,
        dx: Tensor | None,
        dp: Tensor | None,
        _dq: None,
    ) -> tuple[Tensor, Tensor, None]:
        """The adjoint loop again: a change of weights or saved arrays changes its sources.

        del_t = sa_t + f_a' lam_t gives the source    dsa + (d f_a)' lam,
        lam_{t-1} = s_{t-1} + link_t (f_x' lam_t + r' W' del_t) gives
                                  ds + link ((d f_x)' lam + r' dW' del + (d r') W' del).
        r(x) is what W reads of a state.
        """
        link, _, W, saved, lam, delta, k = AdjointState.read(ctx)
        plan = ctx.plan
        cell = plan.cell
        rows = plan.rows
        xprev = rows.prev(saved.x)
        dxprev = None if dx is None else rows.prev(dx)
        along = present_directions(a=da, v=dv, x=dxprev, p=dp)
        into_a = None
        into_x = None
        if along:
            # lam is pulled back through the step, and the result pushed along the changes.
            op = step_map(cell).pulled(("x",), ("a", "x")).pushed(tuple(along))
            changes = at_saved(op, rows, saved, xprev, lam[rows.B :], *along.values())
            into_a = changes["a"]
            into_x = changes["x"]
        if W is not None and dW is not None:
            into_x = plus(into_x, read_pull(cell, xprev, step_products(rows, delta, dW)))
        # A read that picks a slot is linear: d r' is zero.
        if W is not None and dxprev is not None and cell.read_slot is None:
            op = read_map(cell).pulled(("r",), ("x",)).pushed(("x",))
            into_x = plus(into_x, op((), xprev, step_products(rows, delta, W), dxprev)["x"])
        if into_x is not None:
            into_x = rows.prev_transposed(into_x if link is None else into_x * link.factor)
        if k is not None:  # lam are mantissas, in units of 2^k, and so are the changes of them
            if ds is not None:
                ds = scale(ds, -k[:, None])
            if dlast is not None:
                dlast = scale(dlast, -rows.last(k[:, None]))
        dlam, ddelta = adjoint(plan, saved, W, plus(ds, into_x), dlast, plus(dsa, into_a), link)
        return dlam, ddelta, None


def adjoint_gradient(
    plan: SweepPlan,
    state: AdjointState,
    glam: Tensor | None,
    gdelta: Tensor | None,
    need: AdjointInputs[bool],
    has: Sequence[bool],
) -> AdjointInputs[Tensor | None]:
    """The gradient of an adjoint sweep by its arguments, from those by lam and delta.

    need: by which of them. has: was there a source s, s_last, sa?
    """
    link, declared, W, saved, lam, delta, k = state
    rows = plan.rows
    factor = None if link is None else link.factor
    try:
        mu, nu = Tangent.apply(plan, factor, glam, gdelta, W, *saved)
    except NumericalError as error:
        raise blame_penalty(rows, glam, error) from None
    m = apply_link(rows, mu, link)
    wrt = saved.differentiable_names((need.a, need.v, need.x, need.p))
    bends = bend(plan, saved, W, lam, delta, m, nu, wrt) if wrt else {}
    gW = None
    if W is not None and need.W:  # the sum over t of delta_t (r' m_t)'
        gW = weight_gradient(rows, W, delta, read_push(plan.cell, rows.prev(saved.x), m, rows))
    has_s, has_last, has_sa = has
    gs = at_true_scale(plan, mu, k, declared) if has_s and need.s else None
    glast = None
    if has_last and need.s_last:  # declared: None, since the loss reads every last state
        k_last = None if k is None else rows.last(k)
        glast = at_true_scale(plan, rows.last(mu), k_last, None)
    return AdjointInputs(
        plan=None,
        scaled=None,
        factor=None,
        declared=None,
        s=gs,
        s_last=glast,
        sa=nu if has_sa and need.sa else None,
        W=gW,
        a=bends.get("a"),
        v=bends.get("v"),
        x=bends.get("x"),
        p=bends.get("p"),
        q=None,
    )


class TangentInputs(NamedTuple, Generic[Entry]):
    """One entry for each argument of Tangent.apply: is it needed, or its gradient."""

    plan: Entry
    factor: Entry
    g: Entry
    ga: Entry
    W: Entry
    a: Entry
    v: Entry
    x: Entry
    p: Entry
    q: Entry


class TangentState(NamedTuple):
    """What Tangent keeps for its derivatives."""

    link: Link | None
    W: Tensor | None
    saved: Saved
    mu: Tensor
    nu: Tensor

    @staticmethod
    def read(ctx: SweepContext) -> TangentState:
        """What `setup_context` has kept."""
        factor, W, a, v, x, p, q, mu, nu = ctx.saved_tensors
        return TangentState(make_link(ctx.plan.rows, factor), W, Saved(a, v, x, p, q), mu, nu)


@with_quick_apply
class Tangent(SweepFunction):
    """apply(plan, factor, g, ga, W, a, v, x, p, q) -> (mu, nu); factor: of a Link."""

    @staticmethod
    def forward(
        plan: SweepPlan,
        factor: Tensor | None,
        g: Tensor | None,
        ga: Tensor | None,
        W: Tensor | None,
        a: Tensor,
        v: Tensor | None,
        x: Tensor,
        p: Tensor | None,
        q: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The tangent loop with sources g [B + N, n] of mu and ga of nu."""
        link = make_link(plan.rows, factor)
        mu, nu = plan.engine.tangent(plan, Saved(a, v, x, p, q), W, g, ga, link)
        check_range(plan, plan.rows.last(mu), "the tangent", constant(mu))
        return mu, nu

    @staticmethod
    def setup_context(ctx: SweepContext, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
        """Keep what TangentState reads."""
        ctx.plan, factor, g, ga, W, a, v, x, p, q = inputs
        ctx.has = (g is not None, ga is not None)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(factor, W, a, v, x, p, q, *output)
        ctx.save_for_forward(factor, W, a, v, x, p, q, *output)

    @staticmethod
    def backward(ctx: SweepContext, gmu: Tensor | None, gnu: Tensor | None) -> Gradients:
        """The adjoint loop with the gradients by mu and nu as sources, and the bend.

        The bend is the gradient by the saved arrays, from the second derivatives of a step.
        """
        if autocast_is_on():
            return without_autocast(Tangent.backward, ctx, gmu, gnu)
        link, W, saved, mu, nu = TangentState.read(ctx)
        plan = ctx.plan
        rows = plan.rows
        need = TangentInputs(*needed_inputs(ctx))
        if gmu is None and gnu is None:
            return (None,) * 10
        factor = None if link is None else link.factor
        lam, delta, _ = Adjoint.apply(plan, False, factor, None, gmu, None, gnu, W, *saved)
        m = apply_link(rows, mu, link)
        wrt = saved.differentiable_names((need.a, need.v, need.x, need.p))
        bends = bend(plan, saved, W, lam, delta, m, nu, wrt) if wrt else {}
        gW = None
        if W is not None and need.W:  # the sum over t of delta_t (r' m_t)'
            gW = weight_gradient(rows, W, delta, read_push(plan.cell, rows.prev(saved.x), m, rows))
        has_g, has_ga = ctx.has
        return TangentInputs(
            plan=None,
            factor=None,
            g=lam if has_g else None,
            ga=delta if has_ga else None,
            W=gW,
            a=bends.get("a"),
            v=bends.get("v"),
            x=bends.get("x"),
            p=bends.get("p"),
            q=None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(
        ctx: SweepContext,
        _plan: None,
        _factor: None,
        dg: Tensor | None,
        dga: Tensor | None,
        dW: Tensor | None,
        da: Tensor | None,
        dv: Tensor | None,
        dx: Tensor | None,
        dp: Tensor | None,
        _dq: None,
    ) -> tuple[Tensor, Tensor]:
        """The tangent loop again: a change of weights or saved arrays changes its sources.

        mu_t = g_t + f_x m_t + f_a nu_t gives the source    dg + (d f_x) m + (d f_a) nu,
        nu_t = ga_t + W r' m_t gives                        dga + dW r' m + W (d r') m.
        m_t = link_t mu_{t-1}; r(x) is what W reads of a state.
        """
        link, W, saved, mu, nu = TangentState.read(ctx)
        plan = ctx.plan
        cell = plan.cell
        rows = plan.rows
        xprev = rows.prev(saved.x)
        m = apply_link(rows, mu, link)
        dxprev = None if dx is None else rows.prev(dx)
        along = present_directions(a=da, v=dv, x=dxprev, p=dp)
        if along:
            # The step is pushed along (nu, m), and the result along the changes.
            op = step_map(cell).pushed(("a", "x")).pushed(tuple(along))
            change = at_saved(op, rows, saved, xprev, nu, m, *along.values())["x"]
            dg = plus(dg, to_state_rows(rows, change))
        if dW is not None:
            dga = plus(dga, step_products(rows, read_push(cell, xprev, m), dW.mT))
        # A read that picks a slot is linear: d r' is zero.
        if W is not None and dxprev is not None and cell.read_slot is None:
            op = read_map(cell).pushed(("x",)).pushed(("x",))
            change_of_read = op((), xprev, m, dxprev)["r"]
            if change_of_read is not None:
                dga = plus(dga, step_products(rows, change_of_read, W.mT))
        return tangent(plan, saved, W, dg, dga, link)


def adjoint(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    s: Tensor | None,
    s_last: Tensor | None,
    sa: Tensor | None,
    link: Link | None = None,
) -> tuple[Tensor, Tensor]:
    """The adjoint loop, unscaled: (lam [B + N, n], delta [N, g d]), g gates of d units.

    Sources: s of all states, s_last of each sample's last, sa of delta; None for zero.
    """
    factor = None if link is None else link.factor
    lam, delta, _ = Adjoint.apply(plan, False, factor, None, s, s_last, sa, W, *saved)
    return lam, delta


def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None = None,
) -> tuple[Tensor, Tensor]:
    """The tangent loop with sources g of mu and ga of nu: (mu [B + N, n], nu like ga [N, .])."""
    factor = None if link is None else link.factor
    mu, nu = Tangent.apply(plan, factor, g, ga, W, *saved)
    return mu, nu


def make_link(rows: Rows, factor: Tensor | None) -> Link | None:
    """The link with this factor; None for a factor of 1 everywhere, given as None."""
    return None if factor is None else Link(rows, factor)


def apply_link(rows: Rows, mu: Tensor, link: Link | None) -> Tensor:
    """m_t = link_t mu_{t-1} of all steps at once: from state rows to step rows."""
    if link is None:
        return rows.prev(mu)
    if torch.is_grad_enabled() or is_transformed():  # torch cannot differentiate out=
        return rows.prev(mu) * link.factor
    return torch.mul(rows.prev(mu), link.factor, out=empty((rows.N, mu.shape[1]), mu))

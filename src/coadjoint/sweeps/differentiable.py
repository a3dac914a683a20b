"""The three loops as differentiable operations, closed under differentiation.

With a_t = base_t + W r(x_{t-1}) and x_t = f(a_t, v_t, x_{t-1}, p), the loops are

    forward  ->  a_t, x_t
    tangent  ->  nu_t  = ga_t + W r' m_t           mu_t    = g_t + f_x m_t + f_a nu_t        m_t = link_t mu_{t-1}
    adjoint  <-  del_t = sa_t + f_a' lam_t         lam_t-1 = s_t-1 + link_t (f_x' lam_t + r' W' del_t)

tangent and adjoint are transposes: <lam, g> + <del, ga> = <s, mu> + <sa, nu>. Each is linear in its sources; by
everything else its derivative is the bend, a pointwise term, so

    d forward = adjoint (reverse) or tangent (forward),   d adjoint = tangent + bend,   d tangent = adjoint + bend

and no derivative of any order needs a fourth loop. docs/derivation.md has the algebra.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from ..errors import NumericalError
from .affine import plus, raise_error
from .chunks import sum_products
from .memory import empty
from .overflow import at_true_scale, blame_penalty, check_range
from .plan import Saved, SweepPlan, settle_checks
from .pointwise import needed_inputs, nestable_jvp, vmap_error, with_quick_apply, without_autocast
from .rows import Link, Rows, scale
from .slopes import bend, present_directions, read_map, read_pull, read_push, read_values, step_map
from .torch_internals import autocast_is_on, forward_mode_is_on, innermost_transform


@with_quick_apply
class Forward(Function):
    @staticmethod
    def forward(
        plan: SweepPlan,
        base: Tensor,
        v: Tensor | None,
        W: Tensor | None,
        x0: Tensor,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        x, a, q = plan.engine.forward(plan, base, v, W, x0, p)
        last = plan.rows.last(x).clone()
        check_range(plan, last, "the state", lambda: x)
        return x, a, last, q

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.plan, _, v, W, _, p = inputs
        x, a, _, q = output
        ctx.set_materialize_grads(False)
        if q is not None:
            ctx.mark_non_differentiable(q)
        ctx.save_for_backward(v, W, p, x, a, q)
        ctx.save_for_forward(v, W, p, x, a, q)

    @staticmethod
    def backward(
        ctx: Any, gx: Tensor | None, ga: Tensor | None, glast: Tensor | None, _q: Any
    ) -> Any:
        if autocast_is_on():
            return without_autocast(Forward.backward, ctx, gx, ga, glast, None)
        v, W, p, x, a, q = ctx.saved_tensors
        plan, need = ctx.plan, needed_inputs(ctx)
        if gx is None and ga is None and glast is None:
            return (None,) * 6
        return None, *forward_gradient(plan, Saved(a, v, x, p, q), W, gx, glast, ga, need[1:])

    @staticmethod
    @nestable_jvp
    def jvp(
        ctx: Any,
        _plan: Any,
        dbase: Tensor | None,
        dv: Tensor | None,
        dW: Tensor | None,
        dx0: Tensor | None,
        dp: Tensor | None,
    ) -> Any:
        v, W, p, x, a, q = ctx.saved_tensors
        plan, rows = ctx.plan, ctx.plan.rows
        mu, nu = push(plan, Saved(a, v, x, p, q), W, dbase, dv, dW, dx0, dp)
        return mu, nu, rows.last(mu), None

    vmap = staticmethod(lambda *_: raise_error(vmap_error()))


def push(
    plan: SweepPlan, saved: Saved, W: Tensor | None, dbase: Tensor | None, dv: Tensor | None = None, dW: Tensor | None = None,
    dx0: Tensor | None = None, dp: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The tangents (mu, nu) of a forward sweep along a change of what went into it."""
    rows, (a, v, x, p, q) = plan.rows, saved
    xprev, along = rows.prev(x), present_directions(v=dv, p=dp)
    g = None
    if along:
        op = step_map(plan.cell).pushed(tuple(n for n, _ in along))
        g = op((x[rows.B :], q), a, v, xprev, p, *(t for _, t in along))["x"]
        g = None if g is None else pad(g, (0, 0, rows.B, 0))
    g = plus(g, None if dx0 is None else pad(dx0, (0, 0, 0, rows.N)))
    ga = plus(dbase, None if dW is None else read_values(plan.cell, xprev) @ dW.T)
    return tangent(plan, saved, W, g, ga)


def forward_gradient(
    plan: SweepPlan, saved: Saved, W: Tensor | None, gx: Tensor | None, glast: Tensor | None, ga: Tensor | None,
    need: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradient of a forward sweep by (base, v, W, x0, p), of those that need one."""
    rows, (a, v, x, p, q) = plan.rows, saved
    wrt = tuple(n for n, t, i in (("v", v, 1), ("p", p, 4)) if t is not None and need[i])
    if torch.is_grad_enabled() or wrt or is_transformed():
        lam, delta, _ = Adjoint.apply(plan, False, None, None, gx, glast, ga, W, *saved)
    else:  # nobody will differentiate this sweep: lam need not be kept
        sweep = functools.partial(plan.engine.adjoint, plan, saved, W, gx, glast, ga, None, False)
        lam, delta, _ = sweep(False)
        check_range(plan, lam[: rows.B], "the gradient by the state", lambda: sweep(True)[0])
    side: dict[str, Tensor | None] = {}
    if wrt:
        op = step_map(plan.cell).pulled(("x",), wrt)
        side = op((x[rows.B :], q), a, v, rows.prev(x), p, lam[rows.B :], rows=rows)
    gW = (
        sum_products(rows, delta, read_values(plan.cell, rows.prev(x), rows))
        if W is not None and need[2]
        else None
    )
    settle_checks(plan)
    return delta, side.get("v"), gW, lam[: rows.B] if need[3] else None, side.get("p")


@with_quick_apply
class Adjoint(Function):
    """scaled: the sweep chooses exponents k and returns mantissas, lam_t = mantissa_t 2^{k_t}."""

    @staticmethod
    def forward(
        plan: SweepPlan, scaled: bool, factor: Tensor | None, declared: Tensor | None,
        s: Tensor | None, s_last: Tensor | None, sa: Tensor | None,
        W: Tensor | None, a: Tensor, v: Tensor | None, x: Tensor, p: Tensor | None, q: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        link = None if factor is None else Link(plan.rows, factor)
        lam, delta, k = plan.engine.adjoint(
            plan, Saved(a, v, x, p, q), W, s, s_last, sa, link, scaled, True
        )
        check_range(
            plan,
            lam[: plan.rows.B],
            "the costate" if scaled else "the gradient by the state",
            lambda: lam,
        )
        return lam, delta, k

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.plan, ctx.scaled, factor, declared, s, s_last, sa, W, a, v, x, p, q = inputs
        lam, delta, k = output
        ctx.has = (s is not None, s_last is not None, sa is not None)
        ctx.set_materialize_grads(False)
        if k is not None:
            ctx.mark_non_differentiable(k)
        ctx.save_for_backward(factor, declared, W, a, v, x, p, q, lam, delta, k)
        ctx.save_for_forward(factor, declared, W, a, v, x, p, q, lam, delta, k)

    @staticmethod
    def read_context(
        ctx: Any,
    ) -> tuple[Link | None, Tensor | None, Tensor | None, Saved, Tensor, Tensor, Tensor | None]:
        factor, declared, W, a, v, x, p, q, lam, delta, k = ctx.saved_tensors
        link = Link(ctx.plan.rows, factor) if factor is not None else None
        if k is not None:
            between = Link.between(ctx.plan.rows, k, lam.dtype)
            link = between if link is None else Link(ctx.plan.rows, between.factor * link.factor)
        return link, declared, W, Saved(a, v, x, p, q), lam, delta, k

    @staticmethod
    def backward(ctx: Any, glam: Tensor | None, gdelta: Tensor | None, _k: Any) -> Any:
        if autocast_is_on():
            return without_autocast(Adjoint.backward, ctx, glam, gdelta, None)
        link, declared, W, saved, lam, delta, k = Adjoint.read_context(ctx)
        plan, rows, need = ctx.plan, ctx.plan.rows, needed_inputs(ctx)
        if glam is None and gdelta is None:
            return (None,) * 13
        try:
            mu, nu = Tangent.apply(
                plan, None if link is None else link.factor, glam, gdelta, W, *saved
            )
        except NumericalError as error:
            raise blame_penalty(rows, glam, error) from None
        m = apply_link(rows, mu, link)
        wrt = saved.differentiable_names(need[8:])
        bends = bend(plan, saved, W, lam, delta, m, nu, wrt) if wrt else {}
        gW = (
            sum_products(rows, delta, read_push(plan.cell, rows.prev(saved.x), m, rows))
            if W is not None and need[7]
            else None
        )
        has_s, has_last, has_a = ctx.has
        gs = at_true_scale(plan, mu, k, declared) if has_s and need[4] else None
        glast = None
        if has_last and need[5]:
            glast = at_true_scale(plan, rows.last(mu), None if k is None else rows.last(k), None)
        return (
            None,
            None,
            None,
            None,
            gs,
            glast,
            nu if has_a and need[6] else None,
            gW,
            bends.get("a"),
            bends.get("v"),
            bends.get("x"),
            bends.get("p"),
            None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(
        ctx: Any, _plan: Any, _scaled: Any, _factor: Any, _declared: Any, *dots: Tensor | None
    ) -> Any:
        link, _, W, saved, lam, delta, k = Adjoint.read_context(ctx)
        ds, dlast, dsa, dW, da, dv, dx, dp, _ = dots
        plan, cell, rows = ctx.plan, ctx.plan.cell, ctx.plan.rows
        xprev = rows.prev(saved.x)
        along = present_directions(a=da, v=dv, x=None if dx is None else rows.prev(dx), p=dp)
        into_a, into_x = None, None
        if along:
            op = step_map(cell).pulled(("x",), ("a", "x")).pushed(tuple(n for n, _ in along))
            turned = op(
                (saved.x[rows.B :], saved.q),
                saved.a,
                saved.v,
                xprev,
                saved.p,
                lam[rows.B :],
                *(t for _, t in along),
            )
            into_a, into_x = turned["a"], turned["x"]
        if W is not None and dW is not None:
            into_x = plus(into_x, read_pull(cell, xprev, delta @ dW))
        if W is not None and dx is not None and cell.read_slot is None:
            op = read_map(cell).pulled(("r",), ("x",)).pushed(("x",))
            into_x = plus(into_x, op((), xprev, delta @ W, rows.prev(dx))["x"])
        if into_x is not None:
            into_x = rows.prev_transposed(into_x if link is None else into_x * link.factor)
        if k is not None:
            ds = None if ds is None else scale(ds, -k[:, None])
            dlast = None if dlast is None else scale(dlast, -rows.last(k[:, None]))
        dlam, ddelta = adjoint(plan, saved, W, plus(ds, into_x), dlast, plus(dsa, into_a), link)
        return dlam, ddelta, None

    vmap = staticmethod(lambda *_: raise_error(vmap_error()))


@with_quick_apply
class Tangent(Function):
    @staticmethod
    def forward(
        plan: SweepPlan, factor: Tensor | None, g: Tensor | None, ga: Tensor | None,
        W: Tensor | None, a: Tensor, v: Tensor | None, x: Tensor, p: Tensor | None, q: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        link = None if factor is None else Link(plan.rows, factor)
        mu, nu = plan.engine.tangent(plan, Saved(a, v, x, p, q), W, g, ga, link)
        check_range(plan, plan.rows.last(mu), "the tangent", lambda: mu)
        return mu, nu

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.plan, factor, g, ga, W, a, v, x, p, q = inputs
        ctx.has = (g is not None, ga is not None)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(factor, W, a, v, x, p, q, *output)
        ctx.save_for_forward(factor, W, a, v, x, p, q, *output)

    @staticmethod
    def read_context(ctx: Any) -> tuple[Link | None, Tensor | None, Saved, Tensor, Tensor]:
        factor, W, a, v, x, p, q, mu, nu = ctx.saved_tensors
        return (
            None if factor is None else Link(ctx.plan.rows, factor),
            W,
            Saved(a, v, x, p, q),
            mu,
            nu,
        )

    @staticmethod
    def backward(ctx: Any, gmu: Tensor | None, gnu: Tensor | None) -> Any:
        if autocast_is_on():
            return without_autocast(Tangent.backward, ctx, gmu, gnu)
        link, W, saved, mu, nu = Tangent.read_context(ctx)
        plan, rows, need = ctx.plan, ctx.plan.rows, needed_inputs(ctx)
        if gmu is None and gnu is None:
            return (None,) * 10
        factor = None if link is None else link.factor
        lam, delta, _ = Adjoint.apply(plan, False, factor, None, gmu, None, gnu, W, *saved)
        m = apply_link(rows, mu, link)
        wrt = saved.differentiable_names(need[5:])
        bends = bend(plan, saved, W, lam, delta, m, nu, wrt) if wrt else {}
        gW = (
            sum_products(rows, delta, read_push(plan.cell, rows.prev(saved.x), m, rows))
            if W is not None and need[4]
            else None
        )
        return (
            None,
            None,
            lam if ctx.has[0] else None,
            delta if ctx.has[1] else None,
            gW,
            bends.get("a"),
            bends.get("v"),
            bends.get("x"),
            bends.get("p"),
            None,
        )

    @staticmethod
    @nestable_jvp
    def jvp(ctx: Any, _plan: Any, _factor: Any, *dots: Tensor | None) -> Any:
        link, W, saved, mu, nu = Tangent.read_context(ctx)
        dg, dga, dW, da, dv, dx, dp, _ = dots
        plan, cell, rows = ctx.plan, ctx.plan.cell, ctx.plan.rows
        xprev, m = rows.prev(saved.x), apply_link(rows, mu, link)
        along = present_directions(a=da, v=dv, x=None if dx is None else rows.prev(dx), p=dp)
        if along:
            op = step_map(cell).pushed(("a", "x")).pushed(tuple(n for n, _ in along))
            turned = op(
                (saved.x[rows.B :], saved.q),
                saved.a,
                saved.v,
                xprev,
                saved.p,
                nu,
                m,
                *(t for _, t in along),
            )["x"]
            dg = plus(dg, None if turned is None else pad(turned, (0, 0, rows.B, 0)))
        if dW is not None:
            dga = plus(dga, read_push(cell, xprev, m) @ dW.T)
        if W is not None and dx is not None and cell.read_slot is None:
            op = read_map(cell).pushed(("x",)).pushed(("x",))
            turned = op((), xprev, m, rows.prev(dx))["r"]
            dga = plus(dga, None if turned is None else turned @ W.T)
        return tangent(plan, saved, W, dg, dga, link)

    vmap = staticmethod(lambda *_: raise_error(vmap_error()))


def adjoint(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    s: Tensor | None,
    s_last: Tensor | None,
    sa: Tensor | None,
    link: Link | None = None,
) -> tuple[Tensor, Tensor]:
    """-> (lam [B + N, n], delta [N, g d])"""
    lam, delta, _ = Adjoint.apply(
        plan, False, None if link is None else link.factor, None, s, s_last, sa, W, *saved
    )
    return lam, delta


def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None = None,
) -> tuple[Tensor, Tensor]:
    """-> (mu [B + N, n], nu [N, g d])"""
    return Tangent.apply(plan, None if link is None else link.factor, g, ga, W, *saved)


def apply_link(rows: Rows, mu: Tensor, link: Link | None) -> Tensor:
    """m_t = link_t mu_{t-1}"""
    if link is None:
        return rows.prev(mu)
    if torch.is_grad_enabled() or is_transformed():
        return rows.prev(mu) * link.factor
    return torch.mul(rows.prev(mu), link.factor, out=empty((rows.N, mu.shape[1]), mu))


def is_transformed() -> bool:
    """Is forward-mode differentiation or a transform of torch.func under way?"""
    return forward_mode_is_on() or innermost_transform() is not None

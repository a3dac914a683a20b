"""The three loops as differentiable operations, closed under differentiation.

The forward loop is here; the other two are in adjoint_tangent.py and can be imported from here.

With a_t = base_t + W r(x_{t-1}), x_t = f(a_t, v_t, x_{t-1}, p) and m_t = link_t mu_{t-1}, they are

    forward  ->  a_t,  x_t
    tangent  ->  nu_t  = ga_t + W r' m_t       mu_t    = g_t + f_x m_t + f_a nu_t
    adjoint  <-  del_t = sa_t + f_a' lam_t     lam_t-1 = s_t-1 + link_t (f_x' lam_t + r' W' del_t)

tangent and adjoint are transposes: <lam, g> + <del, ga> = <s, mu> + <sa, nu>. Each is linear in its
sources; by everything else its derivative is the bend, a pointwise term, so

    d forward = adjoint (reverse) or tangent (forward)
    d adjoint = tangent + bend
    d tangent = adjoint + bend

and no derivative of any order needs a fourth loop. docs/derivation.md has the algebra.

Names: g before a letter is a gradient by that input or output (gx, ga), d a direction (dx, da);
a gradient or direction that is None is zero. Shapes are those of plan.Saved and of sweeps.rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .adjoint_tangent import (
    Adjoint,
    SweepContext,
    Tangent,
    adjoint,
    apply_link,
    tangent,
)
from .affine import plus
from .functions import (
    Gradients,
    Inputs,
    SweepFunction,
    is_transformed,
    needed_inputs,
    nestable_jvp,
    with_quick_apply,
    without_autocast,
)
from .overflow import check_range, constant
from .plan import Saved, SweepPlan, settle_checks
from .slopes import at_saved, present_directions, read_values, step_map, to_state_rows
from .torch_internals import autocast_is_on
from .weights import step_products, weight_gradient

__all__ = [
    "Adjoint",
    "Forward",
    "Tangent",
    "adjoint",
    "apply_link",
    "forward_gradient",
    "push",
    "tangent",
]


@with_quick_apply
class Forward(SweepFunction):
    """apply(plan, base, v, W, x0, p) -> (x, a, the last state of each sample, q)."""

    @staticmethod
    def forward(
        plan: SweepPlan,
        base: Tensor,
        v: Tensor | None,
        W: Tensor | None,
        x0: Tensor,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The forward loop: a_t = base_t + W r(x_{t-1}), x_t = f(a_t, v_t, x_{t-1}, p).

        q: values inside f that the slopes read again, if the engine keeps them.
        """
        x, a, q = plan.engine.forward(plan, base, v, W, x0, p)
        last = plan.rows.last(x).clone()  # an output must not be a view of another
        check_range(plan, last, "the state", constant(x))
        return x, a, last, q

    @staticmethod
    def setup_context(
        ctx: SweepContext, inputs: Inputs, output: tuple[Tensor, Tensor, Tensor, Tensor | None]
    ) -> None:
        """Keep the weights and what the sweep saves."""
        ctx.plan, _, v, W, _, p = inputs
        x, a, _, q = output
        ctx.set_materialize_grads(False)
        if q is not None:
            ctx.mark_non_differentiable(q)
        ctx.save_for_backward(v, W, p, x, a, q)
        ctx.save_for_forward(v, W, p, x, a, q)

    @staticmethod
    def backward(
        ctx: SweepContext, gx: Tensor | None, ga: Tensor | None, glast: Tensor | None, _q: None
    ) -> Gradients:
        """The adjoint loop, with the gradients by x, a and the last states as sources."""
        if autocast_is_on():
            return without_autocast(Forward.backward, ctx, gx, ga, glast, None)
        v, W, p, x, a, q = ctx.saved_tensors
        need = needed_inputs(ctx)[1:]
        if gx is None and ga is None and glast is None:
            return (None,) * 6
        saved = Saved(a, v, x, p, q)
        return None, *forward_gradient(ctx.plan, saved, W, gx, glast, ga, need)

    @staticmethod
    @nestable_jvp
    def jvp(
        ctx: SweepContext,
        _plan: None,
        dbase: Tensor | None,
        dv: Tensor | None,
        dW: Tensor | None,
        dx0: Tensor | None,
        dp: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """The tangent loop: directions of x, a and the last states from those of the inputs."""
        v, W, p, x, a, q = ctx.saved_tensors
        plan = ctx.plan
        mu, nu = push(plan, Saved(a, v, x, p, q), W, dbase, dv, dW, dx0, dp)
        return mu, nu, plan.rows.last(mu), None


def push(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    dbase: Tensor | None,
    dv: Tensor | None = None,
    dW: Tensor | None = None,
    dx0: Tensor | None = None,
    dp: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The tangents mu of x and nu of a along a change of the inputs of a forward sweep.

    The changes give the sources of the tangent loop: g_t = f_v dv_t + f_p dp, dx0 at the initial
    states, and ga_t = dbase_t + dW r(x_{t-1}). A change of None is zero.
    """
    rows = plan.rows
    xprev = rows.prev(saved.x)
    along = present_directions(v=dv, p=dp)
    g = None
    if along:
        op = step_map(plan.cell).pushed(tuple(along))
        g = to_state_rows(rows, at_saved(op, rows, saved, xprev, *along.values())["x"])
    if dx0 is not None:
        g = plus(g, pad(dx0, (0, 0, 0, rows.N)))
    ga = dbase
    if dW is not None:
        ga = plus(dbase, step_products(rows, read_values(plan.cell, xprev), dW.mT))
    return tangent(plan, saved, W, g, ga)


def forward_gradient(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    gx: Tensor | None,
    glast: Tensor | None,
    ga: Tensor | None,
    need: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradient of a forward sweep by (base, v, W, x0, p); need: by which of them.

    gx, glast, ga: the gradients by its results, the states, the last states and a.
    """
    _, need_v, need_W, need_x0, need_p = need
    rows = plan.rows
    wrt: tuple[str, ...] = ()
    if saved.v is not None and need_v:
        wrt += ("v",)
    if saved.p is not None and need_p:
        wrt += ("p",)
    if torch.is_grad_enabled() or wrt or is_transformed():
        lam, delta, _ = Adjoint.apply(plan, False, None, None, gx, glast, ga, W, *saved)
    else:
        # Nobody will differentiate this sweep or read lam between its ends, so that the engine need
        # not keep it (keep=False). If a value leaves the range, a second sweep that keeps it finds
        # the step. The plan keeps this check: it must not refer to the plan.
        adjoint = plan.engine.adjoint
        same_sweep = SweepPlan(plan.cell, rows, plan.engine)
        arguments = (saved.detach(), W, gx, glast, ga, None, False)
        lam, delta, _ = adjoint(plan, *arguments, False)
        check_range(
            plan,
            lam[: rows.B],
            "the gradient with respect to the state",
            lambda: adjoint(same_sweep, *arguments, True)[0],
        )
    by_step: dict[str, Tensor | None] = {}
    if wrt:
        op = step_map(plan.cell).pulled(("x",), wrt)
        by_step = at_saved(op, rows, saved, rows.prev(saved.x), lam[rows.B :], chunked=True)
    gW = None
    if W is not None and need_W:
        gW = weight_gradient(rows, W, delta, read_values(plan.cell, rows.prev(saved.x), rows))
    settle_checks(plan)
    gx0 = lam[: rows.B] if need_x0 else None
    return delta, by_step.get("v"), gW, gx0, by_step.get("p")

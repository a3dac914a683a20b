"""Dense layers: the tangents for penalties of their costates, and the gradients by the weights.

Layers x_{t+1} = psi(a_t), a_t = W_t x_t + b_t, have costates lam_t = mantissa_t 2^(k_t). The slopes
of a penalty by the mantissas, g_t = s_t + rate_t mantissa_t, are the sources of

    mu_0 = first + g_0     m_t = 2^(k_{t+1} - k_t) mu_t     mu_{t+1} = psi'(a_t) W_t m_t + g_{t+1}

and the penalty's slope by a_t, as far as it depends on a_t through the slopes psi', is the bend
psi''(a_t) (W_t m_t) mantissa_{t+1}. An engine may have functions of its own for this.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from .adjoint_tangent import tangent
from .affine import plus
from .plan import Saved, SweepPlan
from .rows import Link, pow2
from .slopes import bend


def dense_tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor,
    lam: Tensor,
    k: Tensor,
    first: Tensor | None,
    s: Tensor | None,
    rates: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """(m [B + N, n], with m_T = 2^-k_T mu_T at the end, and the bend [N, n]; None for zeros).

    lam [B + N, n], k [B + N]: mantissas and exponents of the costates. first [B, n], s [B + N, n]
    and rates [B + N]: None for zeros.
    """
    own = getattr(plan.engine, "dense_tangent", None)
    if own is not None:
        result: tuple[Tensor, Tensor | None] = own(plan, saved, W, lam, k, first, s, rates)
        return result
    rows = plan.rows
    g = plus(s, None if rates is None else rates[:, None] * lam)
    if first is not None:
        g = plus(g, pad(first, (0, 0, 0, rows.N)))
    link = Link.between(rows, k, lam.dtype)
    m, nu = tangent(plan, saved, W, g, None, link)
    rows.prev(m).mul_(link.factor)
    # One factor is enough: the costates of the last state are of order one.
    rows.last(m).mul_(pow2(-rows.last(k), m.dtype)[:, None])
    no_delta = lam.new_empty(0)  # the bend by a does not read it
    return m, bend(plan, saved, W, lam, no_delta, rows.prev(m), nu, ("a",))["a"]


def layer_gradients(
    plan: SweepPlan, delta: Tensor, x: Tensor, lam_delta: Tensor | None, m: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients by W_t, delta_t' x_t + lam_delta_t' m_t [T, n, n], and b_t, delta_t [T, n].

    All four are step rows [N, n], and are summed over samples. lam_delta and m: delta of the
    costates, and their tangents; None without a penalty.
    """
    own = getattr(plan.engine, "layer_gradients", None)
    if own is not None:
        result: tuple[Tensor, Tensor] = own(plan, delta, x, lam_delta, m)
        return result
    by_layer = (plan.rows.T, plan.rows.B, -1)
    by_W = delta.view(by_layer).mT @ x.view(by_layer)
    if lam_delta is not None and m is not None:
        by_W.baddbmm_(lam_delta.view(by_layer).mT, m.view(by_layer))
    return by_W, delta.view(by_layer).sum(1)

"""Engine `eager`: torch's own operations, on any device.

in_place        on a CPU: slopes of many steps at once, then a step is a product with W and a few
                operations into arrays made before the loop. On a GPU each operation would be a
                launch, and the costates' exponents depend on values.
linear_loop     its adjoint and tangent loop: slopes in blocks of steps, and the adjoint's steps
scaled_adjoint  its adjoint loop with exponents
views           its arrays as views of their time steps
fused           on other devices: a step is a product with W and one fused operation (by NVRTC on
                an NVIDIA GPU). It reads no value, so a gradient can be recorded as a CUDA graph.
                On a CPU it takes 6 to 7 times as long.

Both rescale costates by powers of two inside their adjoint, with the functions of sweeps/rows.
"""

from __future__ import annotations

from torch import Tensor

from ...plan import Engine, Saved, SweepPlan
from ...rows import Link
from . import fused, in_place
from .fused import may_overlap

__all__ = ["adjoint", "forward", "may_overlap", "refusal", "tangent"]


def refusal(device: str) -> str | None:
    """None: it runs on any device."""
    return None


def loops_for(like: Tensor) -> Engine:
    """The loops for the device of this tensor: in_place on a CPU, fused elsewhere."""
    return in_place if like.device.type == "cpu" else fused


def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward loop: a_t = base_t + W r(x_{t-1}), x_t = f(a_t, v_t, x_{t-1}, p).

    Returns x [B + N, .] with x_0 first, a [N, .], and q [N, .]: the values of cell.saved_nodes,
    which derivatives read again; None if the cell has none.
    """
    return loops_for(base).forward(plan, base, v, W, x0, p)


def adjoint(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    s: Tensor | None,
    s_last: Tensor | None,
    sa: Tensor | None,
    link: Link | None,
    scaled: bool,
    keep: bool,
    k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The adjoint loop, from T back to 0: (lam, delta, k).

    delta_t   = sa_t + f_a' lam_t
    lam_{t-1} = s_{t-1} + link_t (f_x' lam_t + r' W' delta_t)

    s, sa: sources of the states and of a; s_last 2^k_last: source of each sample's last state.
    scaled: lam holds mantissas, and the costate is lam_t 2^k_t; otherwise k is None.
    keep: lam is read at every step; otherwise at the first alone.
    """
    return loops_for(saved.x).adjoint(plan, saved, W, s, s_last, sa, link, scaled, keep, k_last)


def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None,
) -> tuple[Tensor, Tensor]:
    """The tangent loop, from 0 to T: (mu, nu), with m_t = link_t mu_{t-1}.

    nu_t = ga_t + W r' m_t
    mu_t = g_t + f_x m_t + f_a nu_t

    g, ga: the directions that enter at each state and at each a_t; None for zeros.
    """
    return loops_for(saved.x).tangent(plan, saved, W, g, ga, link)

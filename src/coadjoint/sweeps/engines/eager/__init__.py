"""Engine `eager`: torch's own operations, on any device.

in_place        on a CPU: slopes of many steps at once, then a step is a product with W and a few
                operations into arrays made before the loop. On a GPU each operation would be a
                launch, and the costates' exponents depend on values.
linear_loop     its adjoint and tangent loop: slopes in blocks of steps, and the adjoint's steps
scaled_adjoint  its adjoint loop with exponents
views           its arrays as views of their time steps
fused           on other devices: a step is a product with W and one fused operation (by NVRTC on
                an NVIDIA GPU). It reads no value, so a gradient can be recorded as a CUDA graph.
                On a CPU it takes 3 to 6 times as long.

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
    """The forward loop of Engine, by in_place or fused."""
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
    """The adjoint loop of Engine, by in_place or fused."""
    return loops_for(saved.x).adjoint(plan, saved, W, s, s_last, sa, link, scaled, keep, k_last)


def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None,
) -> tuple[Tensor, Tensor]:
    """The tangent loop of Engine, by in_place or fused."""
    return loops_for(saved.x).tangent(plan, saved, W, g, ga, link)

"""What a sweep is: a cell over rows by an engine (Plan), what it leaves behind (Tape), and what an engine must do.

With a_t = base_t + W r(x_{t-1}) and x_t = f(a_t, v_t, x_{t-1}, p), an engine runs three loops over flat arrays:

    forward  ->  a_t, x_t
    tangent  ->  nu_t  = ga_t + W r' m_t           mu_t    = g_t + f_x m_t + f_a nu_t        m_t = link_t mu_{t-1}
    adjoint  <-  del_t = sa_t + f_a' lam_t         lam_t-1 = s_t-1 + link_t (f_x' lam_t + r' W' del_t)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..cells.cell import Cell
from ..errors import Unsupported
from .checks import Check, is_deferring_checks, raise_failures
from .rows import Link, Rows


class Saved(NamedTuple):
    """What a forward sweep leaves behind: where slopes and bends are taken."""

    a: Tensor  # [N, g d]; without values where the engine found that no derivative reads it
    v: Tensor | None  # [N, side d]
    x: Tensor  # [B + N, s d]
    p: Tensor | None  # [parameters d]
    q: Tensor | None  # [N, kept d]: the values of cell.saved_nodes, if the engine keeps them

    def differentiable_names(self, need: Sequence[bool]) -> tuple[str, ...]:
        """Which of a, v, x, p are there and need a gradient."""
        return tuple(
            n for n, y, wanted in zip("avxp", self, need, strict=False) if y is not None and wanted
        )


class Engine(Protocol):
    """Three loops over flat arrays; no derivatives, no losses."""

    def refusal(
        self, device: str
    ) -> str | None: ...  # why it cannot run here, as the end of a sentence

    def forward(
        self,
        plan: SweepPlan,
        base: Tensor,
        v: Tensor | None,
        W: Tensor | None,
        x0: Tensor,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def adjoint(
        self,
        plan: SweepPlan,
        saved: Saved,
        W: Tensor | None,
        s: Tensor | None,
        s_last: Tensor | None,
        sa: Tensor | None,
        link: Link | None,
        scaled: bool,
        keep: bool,
        k_last: Tensor
        | None = None,  # [B]: s_last is given as s_last 2^k_last, beside s or alone (scaled sweeps)
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...

    def tangent(
        self,
        plan: SweepPlan,
        saved: Saved,
        W: Tensor | None,
        g: Tensor | None,
        ga: Tensor | None,
        link: Link | None,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class SweepPlan:
    """Which cell, over which rows, by which engine.

    checked: what leaves the range of its type is an error that names the step; otherwise inf and NaN go through, as in
    torch, where a GradScaler and the like wait for them.
    defers_checks: the plan is made while its gradient is recorded. It is noted here because the backward runs in a thread of
    autograd's, which does not know what its caller is doing."""

    cell: Cell
    rows: Rows
    engine: Engine
    checks: list[Check] = field(default_factory=list)
    checked: bool = True
    defers_checks: bool = field(default_factory=is_deferring_checks)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Unsupported(
            "a run of a network, and the costates on it, belong to the process that made them and cannot be copied or "
            "pickled: take their tensors, trajectory.x.detach() or costates.lam.detach()."
        )


def require_finite(plan: SweepPlan, y: Tensor, make_error: Callable[[], Exception | None]) -> None:
    """y must be finite: at once on a CPU, and on a GPU when `settle` is called."""
    if not plan.checked:
        return
    if y.is_cuda:
        plan.checks.append(Check(y.detach().sum().isfinite(), make_error))
    elif not math.isfinite(y.sum().item()) and (error := make_error()) is not None:
        raise error


def settle_checks(plan: SweepPlan) -> None:
    """Raise what is make_error, if anything is."""
    if plan.defers_checks:
        return  # graphs.py asks after each replay
    checks = plan.checks[:]
    plan.checks.clear()
    if checks and not torch.stack([d.holds for d in checks]).all().item():
        raise_failures(checks)

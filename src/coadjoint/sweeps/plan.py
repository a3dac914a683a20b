"""What a sweep is: a plan (a cell, rows, an engine), what it saves, and what an engine must do.

With a_t = base_t + W r(x_{t-1}) and x_t = f(a_t, v_t, x_{t-1}, p), an engine runs three loops over
flat arrays; m_t = link_t mu_{t-1}:

    forward  ->  a_t,  x_t
    tangent  ->  nu_t  = ga_t + W r' m_t       mu_t    = g_t + f_x m_t + f_a nu_t
    adjoint  <-  del_t = sa_t + f_a' lam_t     lam_t-1 = s_t-1 + link_t (f_x' lam_t + r' W' del_t)

W is one matrix for all steps, or by step, a matrix for each (sweeps.weights).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, Protocol, SupportsIndex

from torch import Tensor

from ..cells.cell import Cell
from ..errors import Unsupported
from .checks import (
    Check,
    MakeError,
    answers_late,
    is_deferring_checks,
    new_checks,
    raise_error,
    settle,
)
from .rows import Link, Rows


class Saved(NamedTuple):
    """The arrays that a forward sweep saves: the point at which slopes and bends are taken.

    d units; g gates and s slots of the cell. Rows are those of sweeps.rows.
    """

    a: Tensor  # [N, g d]; without values where the engine found that no derivative reads it
    v: Tensor | None  # [N, side d]
    x: Tensor  # [B + N, s d]
    p: Tensor | None  # [parameters d]
    q: Tensor | None  # [N, saved d]: the values of cell.saved_nodes, if the engine saves them

    def detach(self) -> Saved:
        """The same arrays as constants."""
        detached = [None if y is None else y.detach() for y in self]
        return Saved(*detached)  # type: ignore[arg-type]

    def differentiable_names(self, need: Sequence[bool]) -> tuple[str, ...]:
        """Which of a, v, x, p are there and need a gradient; need: does each of the four?"""
        candidates = zip("avxp", self, need, strict=False)  # q, the fifth, is a constant
        return tuple(name for name, y, needed in candidates if y is not None and needed)


class Engine(Protocol):
    """Three loops over flat arrays; no derivatives, no losses.

    This is the one description of the loops: those of each engine say only what is special there.
    The formulas are at the top of this file, the rows of the arrays in sweeps.rows. With d units,
    g gates and s slots, a state has n = s d columns.
    """

    def refusal(self, device: str) -> str | None:
        """Why the engine cannot run on this device, as the end of a sentence; None if it can."""

    def forward(
        self,
        plan: SweepPlan,
        base: Tensor,
        v: Tensor | None,
        W: Tensor | None,
        x0: Tensor,
        p: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The loop from the first step to the last -> (x [B + N, n], a [N, g d], q [N, saved d]).

        base [N, g d], v [N, side d], W [g d, reads d], x0 [B, n], p [parameters d]; None for
        what the cell does not have. x begins with x0. q: the values of cell.saved_nodes, which
        derivatives read again; None if there are none, or the engine does not save them.
        """

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
        k_last: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The loop from the last step to the first -> (lam [B + N, n], delta [N, g d], k [B + N]).

        s [B + N, n], s_last [B, n], sa [N, g d]: the sources of all states, of each sample's last
        one, and of delta; None for zeros. link: the factors of the steps; None for ones.
        scaled: choose exponents k and return mantissas, lam_t = mantissa_t 2^k_t; otherwise k is
        None. keep: lam will be read at every step; otherwise at the first alone, and an engine may
        return 2 B rows, lam_0 in the first B. k_last [B]: the source of the last states is
        s_last 2^k_last, beside s or alone (scaled sweeps); None for zeros.
        """

    def tangent(
        self,
        plan: SweepPlan,
        saved: Saved,
        W: Tensor | None,
        g: Tensor | None,
        ga: Tensor | None,
        link: Link | None,
    ) -> tuple[Tensor, Tensor]:
        """The loop from the first step to the last -> (mu [B + N, n], nu [N, g d]).

        mu, nu: the tangents of x and a. g [B + N, n], ga [N, g d]: the directions that enter at
        each state and at each a_t; None for zeros. link: as in adjoint.
        """


@dataclass(frozen=True, eq=False)
class SweepPlan:
    """Which cell, over which rows, by which engine.

    checked: a value that leaves the range of its type is an error that names the step; otherwise
    inf and NaN go through, as in torch, where a GradScaler and others wait for them.
    defers_checks: the plan was made while its gradient is captured as a CUDA graph. It is noted
    here because the backward runs in a thread of autograd, which does not know of the capture. Its
    checks are then added to those of the capture.
    """

    cell: Cell
    rows: Rows
    engine: Engine
    checks: list[Check] = field(default_factory=new_checks)
    checked: bool = True
    defers_checks: bool = field(default_factory=is_deferring_checks)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copy and pickle, which call this."""
        raise Unsupported(
            "a run of a network and its costates belong to the process that made them and cannot "
            "be copied or pickled: copy their tensors, trajectory.x.detach() or "
            "costates.lam.detach()."
        )


def require_finite(plan: SweepPlan, y: Tensor, make_error: MakeError) -> None:
    """Check that y is finite: at once on a CPU, in `settle_checks` on a GPU.

    make_error(): looks at every value; the error, or None for a false alarm.
    """
    if not plan.checked:
        return
    # A sum is finite only if all of its terms are, and quick. It may overflow where they are.
    if answers_late(y):
        plan.checks.append(Check(y.detach().sum().isfinite(), make_error))
    elif not math.isfinite(y.sum().item()):
        raise_error(make_error())


def settle_checks(plan: SweepPlan) -> None:
    """Make the checks collected so far; the first that fails raises its error."""
    if not plan.defers_checks:  # else they are made after each replay of the CUDA graph
        settle(plan.checks)

"""Runs: the result of a forward sweep, and the costates and tangents that follow from it.

SweepRun     what any run offers: states, costates, tangents
FormulaRun   a formula's run, by the three loops of an engine
RunView      a part of a run, or several side by side: read, but not swept again

The run of a step function is in step_run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import Unsupported
from . import affine, differentiable, slopes
from .layout import Layout
from .plan import Saved, SweepPlan, settle_checks
from .rows import Link
from .weights import check_weights, step_products


class CostateRows(NamedTuple):
    """lam_t = mantissa_t 2^exponent_t as rows, and the gradient by what drives the steps."""

    mantissa: Tensor  # [B + N, n]
    exponent: Tensor  # [B + N]
    # drive(): a step array for each driving input, in the units of its steps' exponents
    drive: Callable[[], tuple[Tensor | None, ...]]


class SweepRun(Protocol):
    """A run over rows: states, costates, tangents. State rows are [B + N, .], step rows [N, .]."""

    @property
    def x(self) -> Tensor:
        """The states, as state rows."""

    @property
    def last(self) -> Tensor:
        """Each sample's last state, [B, n], in the rows' order."""

    @property
    def formula(self) -> FormulaRun | None:
        """This run, if it is that of a formula, whose slopes are known; None otherwise."""

    def costate(
        self,
        s: Tensor | None,
        s_last: Tensor | None,
        declared: Tensor | None,
        unit: Tensor | None = None,
    ) -> CostateRows:
        """The costates lam_t = s_t + J_{t+1}' lam_{t+1}, in mantissas and exponents.

        s [B + N, n], s_last [B, n]: sources at all states and at the last ones.
        declared [B + N]: the state rows where the loss reads the state. At the others the source is
        zero, and where costates are far below one its derivative is taken for zero too.
        unit [B + N]: sources are s 2^unit, and s_last 2^(unit of the last state).
        """

    def pull(self, lam: Tensor) -> Tensor:
        """J_t' lam_t for all steps at once, J_t = dx_t/dx_{t-1}: from state rows to step rows."""

    def push(self, *directions: Tensor | None) -> Tensor:
        """The tangent, as state rows, for directions of what drives the steps."""

    def jacobians(self, layout: Layout, samples: int) -> Tensor:
        """J_t of the first samples, [T, samples, n, n], on the CPU; zero past a sample's end."""

    def with_checks(self) -> SweepRun:
        """The same run; costates that leave the range of their type are an error."""

    def settle(self) -> None:
        """Raise the error of a check that has failed since the run was made."""


@dataclass(frozen=True, eq=False)
class FormulaRun:
    """A run of a formula: its states, and its costates and tangents by the three loops."""

    plan: SweepPlan
    saved: Saved
    W: Tensor | None
    last: Tensor  # [B, n]

    @staticmethod
    def run(
        plan: SweepPlan,
        base: Tensor,
        side: Tensor | None,
        W: Tensor | None,
        x0: Tensor,
        p: Tensor | None,
    ) -> FormulaRun:
        """Run the forward sweep x_t = f(a_t, v_t, x_{t-1}, p), a_t = base_t + W r(x_{t-1}).

        side is the formula's v. W is [g d, r d], or by step [T, g d, r d] for samples of equal
        length: W_t at step t. What costates and tangents need is kept; q, values inside f that the
        slopes read again, is None if the engine does not keep them.
        """
        if W is not None:
            check_weights(plan.rows, W)
        x, a, last, q = differentiable.Forward.apply(plan, base, side, W, x0, p)
        # The backward pass makes the sweep's checks; without gradients there is none.
        if not torch.is_grad_enabled():
            settle_checks(plan)
        return FormulaRun(plan, Saved(a, side, x, p, q), W, last)

    @property
    def x(self) -> Tensor:
        """The states, as state rows."""
        return self.saved.x

    @property
    def formula(self) -> FormulaRun | None:
        """This run."""
        return self

    def with_checks(self) -> FormulaRun:
        """The same run; costates that leave the range of their type are an error."""
        return replace(self, plan=replace(self.plan, checked=True))

    def settle(self) -> None:
        """Raise the error of a check that has failed since the run was made."""
        settle_checks(self.plan)

    def costate(
        self,
        s: Tensor | None,
        s_last: Tensor | None,
        declared: Tensor | None,
        unit: Tensor | None = None,
    ) -> CostateRows:
        """The adjoint loop in mantissas and exponents; arguments as in SweepRun.costate."""
        factor = None
        if unit is not None:  # lam_t 2^-unit_t follows the same loop, with 2^(unit_t - unit_{t-1})
            factor = Link.between(self.plan.rows, unit, self.saved.x.dtype).factor
        mantissa, delta, k = differentiable.Adjoint.apply(
            self.plan, True, factor, declared, s, s_last, None, self.W, *self.saved
        )
        if unit is not None:  # back from these units
            k = k + unit
        return CostateRows(mantissa, k, lambda: (delta, *self._by_side(mantissa)))

    def _by_side(self, lam: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient by v, a step array: (f_v' lam,) for lam [B + N, n]; () if there is no v."""
        rows = self.plan.rows
        saved = self.saved
        if saved.v is None:
            return ()
        op = slopes.step_map(self.plan.cell).pulled(("x",), ("v",))
        at_hand = (saved.x[rows.B :], saved.q)
        xprev = rows.prev(saved.x)
        grads = op(at_hand, saved.a, saved.v, xprev, saved.p, lam[rows.B :], rows=rows)
        return (grads["v"],)

    def pull(self, lam: Tensor, frozen: bool = False) -> Tensor:
        """J_t' lam_t for all steps at once, from state rows to step rows.

        frozen: the result can be differentiated by W and lam alone; states are constants.
        """
        cell = self.plan.cell
        rows = self.plan.rows
        saved = self.saved
        if frozen:
            saved = saved.detach()
        xprev = rows.prev(saved.x)
        op = slopes.step_map(cell).pulled(("x",), ("a", "x"))
        at_hand = (saved.x[rows.B :], saved.q)
        grads = op(at_hand, saved.a, saved.v, xprev, saved.p, lam[rows.B :])
        through_W = None
        if self.W is not None and grads["a"] is not None:
            rbar = step_products(rows, grads["a"], self.W)
            through_W = slopes.read_pull(cell, xprev, rbar)
        total = affine.plus(grads["x"], through_W)
        return torch.zeros_like(xprev) if total is None else total

    def push(self, *directions: Tensor | None) -> Tensor:
        """The tangent mu [B + N, n] for directions of base, side, W, x0, p."""
        mu, _ = differentiable.push(self.plan, self.saved, self.W, *directions)
        return mu

    def jacobians(self, layout: Layout, samples: int) -> Tensor:
        """J_t of the first samples, [T, samples, n, n]: one row of all J_t for each pull-back."""
        n = self.x.shape[1]
        out = torch.zeros(layout.rows.T, samples, n, n, dtype=self.x.dtype)
        unit = torch.zeros_like(self.x)  # the unit vector e_i in every row: J' e_i is row i of J
        for i in range(n):
            unit.zero_()[:, i] = 1
            out[:, :, i] = layout.padded(self.pull(unit))[:, :samples].cpu()
        return out


class RunView:
    """A view of a run: a part of its states, or the states of several runs side by side."""

    formula: FormulaRun | None = None

    def costate(
        self,
        s: Tensor | None,
        s_last: Tensor | None,
        declared: Tensor | None,
        unit: Tensor | None = None,
    ) -> CostateRows:
        """Refused: a view of a run can be read, but not swept again."""
        raise self._refusal()

    def push(self, *directions: Tensor | None) -> Tensor:
        """Refused: a view of a run can be read, but not swept again."""
        raise self._refusal()

    def jacobians(self, layout: Layout, samples: int) -> Tensor:
        """Refused: a view of a run can be read, but not swept again."""
        raise self._refusal()

    def with_checks(self) -> SweepRun:
        """Refused: a view of a run can be read, but not swept again."""
        raise self._refusal()

    def settle(self) -> None:
        """Do nothing: a view makes no checks."""

    def _refusal(self) -> Unsupported:
        """The error for what a view cannot do."""
        return Unsupported(
            "this run shows only a part of its state: use the run of a single layer instead."
        )

"""Runs: the result of a forward sweep, and the costates and tangents that follow from it.

SweepRun          what any run offers: states, costates, tangents
FormulaRun        a formula's run, by the three loops of an engine
StepFunctionRun   any step function's run, differentiated by torch one step at a time: slower,
                  never different
RunView           a part of a run, or several side by side: read, but not swept again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import NumericalError, Unsupported
from . import affine, differentiable, slopes
from .layout import Layout
from .plan import Saved, SweepPlan, settle_checks
from .rows import NO_EXPONENT, SAFE_EXPONENT, Link, Rows, exponent, next_exponent, scale
from .torch_internals import forward_mode
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


StepFunction = Callable[..., Tensor]  # step(*drive_t, x_{t-1}) -> x_t, all [n_t, .]


@dataclass(frozen=True, eq=False)
class StepFunctionRun:
    """A run of a step function: its states, and its costates and tangents step by step."""

    step: StepFunction
    rows: Rows
    drive: tuple[Tensor, ...]  # step arrays: what each step reads beside the state
    x: Tensor  # [B + N, n]

    @staticmethod
    def run(
        step: StepFunction,
        rows: Rows,
        drive: tuple[Tensor, ...],
        x0: Tensor,
        checked: bool = True,
    ) -> StepFunctionRun:
        """x_t = step(*drive_t, x_{t-1}); checked: refuse a state that is not finite."""
        states = [x0.contiguous()]
        drives = [rows.steps(y) for y in drive]
        for t, n in enumerate(rows.sizes):
            states.append(step(*[y[t] for y in drives], states[-1][:n]))
        if checked:
            for t, x in enumerate(states):
                if not torch.isfinite(x).all():
                    raise range_error("the state", x.dtype, t, rows)
        return StepFunctionRun(step, rows, drive, torch.cat(states))

    @property
    def last(self) -> Tensor:
        """Each sample's last state, [B, n], in the rows' order."""
        return self.rows.last(self.x)

    @property
    def formula(self) -> FormulaRun | None:
        """None: a step function has no formula."""
        return None

    def with_checks(self) -> StepFunctionRun:
        """This run, which checks every costate anyway."""
        return self

    def settle(self) -> None:
        """Do nothing: checks are made at once."""

    def _drive_by_step(self) -> list[list[Tensor]]:
        """For each step, its arguments beside the state: views [n_t, .] of the drive."""
        if not self.drive:
            return [[] for _ in self.rows.sizes]
        return [list(step) for step in zip(*map(self.rows.steps, self.drive), strict=True)]

    def costate(
        self,
        s: Tensor | None,
        s_last: Tensor | None,
        declared: Tensor | None,
        unit: Tensor | None = None,
    ) -> CostateRows:
        """Costates step by step; arguments as in SweepRun.costate.

        Each mantissa is of order one: the power of two that it lacks goes into its exponent k.
        """
        rows = self.rows
        if s is None:
            s = torch.zeros_like(self.x)
        if s_last is not None:
            s = s + rows.last_transposed(s_last)
        sources = _Sources(rows, s, declared)
        factors = None
        if unit is not None:  # lam_t 2^-unit_t follows the same loop, with 2^(unit_t - unit_{t-1})
            factors = rows.steps(Link.between(rows, unit, s.dtype).factor)
        drives = self._drive_by_step()
        before = rows.before(self.x)
        states = rows.states(self.x)
        # From the last step to the first; turned round at the end.
        k = sources.first_exponent()
        exponents = [k]
        lam = [sources.in_unit(rows.T, k)]
        by_drive: list[tuple[Tensor, ...]] = []
        for t in reversed(range(rows.T)):
            again, pull = torch.func.vjp(self.step, *drives[t], before[t])  # type: ignore[misc]
            refuse_if_different(again, states[t + 1], t + 1)
            *grads, pulled = pull(lam[-1])  # in units of 2^k
            by_drive.append(tuple(grads))
            if factors is not None:
                pulled = pulled * factors[t]
            k_new = next_exponent(k, pulled.detach(), sources.at[t].detach())
            pulled = scale(pulled, (k - k_new[: len(again)])[:, None])
            k = k_new
            begun = len(sources.at[t]) - len(again)  # samples whose last state is x_t
            lam.append(pad(pulled, (0, 0, 0, begun)) + sources.in_unit(t, k))
            exponents.append(k)
            if not torch.isfinite(lam[-1]).all():
                raise range_error("the costate", s.dtype, t, rows)
        exponent_rows = torch.cat(exponents[::-1])
        if unit is not None:
            exponent_rows = exponent_rows + unit

        def drive_gradient() -> tuple[Tensor | None, ...]:
            """The gradients by the drive, each as one step array."""
            return tuple(map(torch.cat, zip(*by_drive[::-1], strict=True)))

        return CostateRows(torch.cat(lam[::-1]), exponent_rows, drive_gradient)

    def pull(self, lam: Tensor) -> Tensor:
        """J_t' lam_t for all steps, from state rows to step rows."""
        drives = self._drive_by_step()
        lam_by_step = self.rows.states(lam)[1:]
        out = []
        for t, before in enumerate(self.rows.before(self.x)):
            _, pull = torch.func.vjp(self._step_of_state(drives[t]), before)  # type: ignore[misc]
            (by_state,) = pull(lam_by_step[t])
            out.append(by_state)
        return torch.cat(out)

    def _step_of_state(self, drive: list[Tensor]) -> Callable[[Tensor], Tensor]:
        """The step as a function of the state alone."""
        return lambda x: self.step(*drive, x)

    def push(self, *directions: Tensor | None) -> Tensor:
        """The tangent mu [B + N, n] for directions of the drive; x0 is held constant.

        None stands for an input that this step function does not read.
        """
        rows = self.rows
        drives = self._drive_by_step()
        dots = [rows.steps(d) for d in directions if d is not None]
        mu = [torch.zeros_like(self.x[: rows.B])]
        for t, before in enumerate(rows.before(self.x)):
            primals = (*drives[t], before)
            tangents = (*[d[t] for d in dots], mu[-1][: len(before)])
            with forward_mode():
                pushed = torch.func.jvp(self.step, primals, tangents)[1]
            mu.append(pushed)
        return torch.cat(mu)

    def jacobians(self, layout: Layout, samples: int) -> Tensor:
        """J_t of the user's first samples, [T, samples, n, n]; zero past a sample's end."""
        rows = self.rows
        n = self.x.shape[1]
        drives = self._drive_by_step()
        units = torch.eye(n).to(self.x)  # J' e_i is row i of J
        position = np.arange(samples)  # of these samples among the rows of a step
        if layout.inverse_order is not None:
            position = layout.inverse_order[:samples]
        out = torch.zeros(rows.T, samples, n, n, dtype=self.x.dtype)
        for t, x in enumerate(rows.before(self.x)):
            present = np.flatnonzero(position < len(x))  # the samples that take this step
            step_rows = torch.from_numpy(position[present]).to(x.device)
            step = self._step_of_state([y[step_rows] for y in drives[t]])
            _, pull = torch.func.vjp(step, x[step_rows])  # type: ignore[misc]
            J = torch.func.vmap(pull)(units[:, None].expand(-1, len(step_rows), -1))[0]
            out[t, torch.from_numpy(present)] = J.transpose(0, 1).cpu()
        return out


class _Sources:
    """The sources of an adjoint sweep, by time step."""

    def __init__(self, rows: Rows, s: Tensor, declared: Tensor | None) -> None:
        """Split s [B + N, n] by steps, and declared [B + N]: where the loss reads the state.

        declared None: everywhere.
        """
        self.at = rows.states(s)  # s_0, ..., s_T
        self.read_at = None if declared is None else rows.states(declared)
        self.safe = SAFE_EXPONENT[s.dtype]

    def first_exponent(self) -> Tensor:
        """The exponent of lam_T, which is the last source alone."""
        last = self.at[-1].detach()
        nothing = last[:0]  # no rows: no costate comes from a later step
        return next_exponent(exponent(nothing), nothing, last)

    def in_unit(self, t: int, k: Tensor) -> Tensor:
        """s_t 2^-k: the source of x_t in the units 2^k of its costate, k [n_t].

        Where the loss does not read the state, the source is 0; if 2^-k is very large there, it is
        replaced by 0, so that a derivative through it is 0 and not out of range.
        """
        shift = -k
        if self.read_at is not None:
            in_reach = self.read_at[t] | (k > -self.safe)
            shift = torch.where(in_reach, shift, NO_EXPONENT)  # 2^NO_EXPONENT is 0
        return scale(self.at[t], shift[:, None])


def refuse_if_different(again: Tensor, state: Tensor, t: int) -> None:
    """Refuse a step t that led to `state` and, when it was repeated, to another, `again`."""
    # Rounding may differ from call to call; a state that is drawn anew differs far more. Three
    # quarters of the digits must agree.
    tolerance = torch.finfo(state.dtype).eps ** 0.75
    if torch.allclose(again.detach(), state.detach(), tolerance, tolerance, equal_nan=True):
        return
    raise Unsupported(
        f"the step function returned a different state when step {t} was repeated: it is random "
        "or has hidden state. Pass random values (a dropout mask, noise) as part of the input "
        "u, so that a step is a function of u and x."
    )


def range_error(what: str, dtype: torch.dtype, t: int, rows: Rows) -> NumericalError:
    """The error for a quantity, such as "the state", that left the range of its type at step t."""
    return NumericalError(
        f"{what} is outside the range of {str(dtype)[6:]} at t = {t} of {rows.T}."
    )


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

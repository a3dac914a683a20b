"""Runs: what a sweep leaves behind, and what can be asked of it afterwards.

Swept      a formula's run, by the three loops of an engine
Stepped    any step function's run, differentiated by torch one step at a time: slower, never different
SeenRun    a part of a run, or several runs side by side: read, but not swept again
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


class SweepRun(Protocol):
    """A run over rows: states, costates and tangents. State rows are [B + N, .], step rows [N, .]."""

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
        """The costates that the sources s (of all states) and s_last (of the last ones) make."""

    def pull(self, lam: Tensor) -> Tensor:
        """J_t' lam_t for all steps at once, J_t = dx_t/dx_{t-1}: from state rows to step rows."""

    def push(self, *directions: Tensor | None) -> Tensor:
        """The tangent, as state rows, for directions of what drives the steps."""

    def jacobians(self, layout: Layout, samples: int) -> Tensor:
        """J_t of the first samples, [T, samples, n, n], on the CPU; zero past a sample's end."""

    def with_checks(self) -> SweepRun:
        """The same run; costates that leave the range of their type are an error."""

    def settle(self) -> None:
        """Raise what was found wrong since the run was made."""


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
        x, a, last, q = differentiable.Forward.apply(plan, base, side, W, x0, p)
        if not torch.is_grad_enabled():
            settle_checks(plan)
        return FormulaRun(plan, Saved(a, side, x, p, q), W, last)

    @property
    def x(self) -> Tensor:
        return self.saved.x

    @property
    def formula(self) -> FormulaRun | None:
        return self

    def with_checks(self) -> FormulaRun:
        return replace(self, plan=replace(self.plan, checked=True))

    def settle(self) -> None:
        settle_checks(self.plan)

    def costate(
        self,
        s: Tensor | None,
        s_last: Tensor | None,
        declared: Tensor | None,
        unit: Tensor | None = None,
    ) -> CostateRows:
        """The scale-free adjoint: lam_t = s_t + J_{t+1}' lam_{t+1} in mantissas and exponents.

        declared [B + N]: the state rows where the loss reads the state; at the others the source is zero, and where
        costates are far below one its derivative is taken for zero too.
        unit [B + N]: sources are given as s 2^unit, and s_last as s_last 2^(unit of the last state)."""
        factor = None
        if unit is not None:  # a sweep in these units is one with links between them
            factor = Link.between(self.plan.rows, unit, self.saved.x.dtype).factor
        mantissa, delta, k = differentiable.Adjoint.apply(
            self.plan, True, factor, declared, s, s_last, None, self.W, *self.saved
        )
        if unit is not None:
            k = k + unit
        return CostateRows(mantissa, k, lambda: (delta, *self._side(mantissa)))

    def _side(self, lam: Tensor) -> tuple[Tensor | None, ...]:
        """f_v' lam, if there is a v"""
        rows, saved = self.plan.rows, self.saved
        if saved.v is None:
            return ()
        op = slopes.step_map(self.plan.cell).pulled(("x",), ("v",))
        known = (saved.x[rows.B :], saved.q)
        return (
            op(known, saved.a, saved.v, rows.prev(saved.x), saved.p, lam[rows.B :], rows=rows)["v"],
        )

    def pull(self, lam: Tensor, frozen: bool = False) -> Tensor:
        """J_t' lam_t for all steps at once, from state rows to step rows; frozen: everything but W held constant."""
        cell, rows, saved = self.plan.cell, self.plan.rows, self.saved
        if frozen:
            saved = Saved(*(None if y is None else y.detach() for y in saved))  # type: ignore[arg-type]
        xprev = rows.prev(saved.x)
        op = slopes.step_map(cell).pulled(("x",), ("a", "x"))
        back = op((saved.x[rows.B :], saved.q), saved.a, saved.v, xprev, saved.p, lam[rows.B :])
        through = None
        if self.W is not None and back["a"] is not None:
            through = slopes.read_pull(cell, xprev, back["a"] @ self.W)
        total = affine.plus(back["x"], through)
        return torch.zeros_like(xprev) if total is None else total

    def push(self, *directions: Tensor | None) -> Tensor:
        """The tangent mu [B + N, n] for directions of what went into the sweep: base, side, W, x0, p."""
        return differentiable.push(self.plan, self.saved, self.W, *directions)[0]

    def jacobians(self, layout: Layout, samples: int) -> Tensor:
        """Rows of all steps at once, by n pull-backs."""
        n = self.x.shape[1]
        out = torch.zeros(layout.rows.T, samples, n, n, dtype=self.x.dtype)
        bar = torch.zeros_like(self.x)
        for i in range(n):
            bar.zero_()[:, i] = 1
            out[:, :, i] = layout.padded(self.pull(bar))[:, :samples].cpu()
        return out


StepFunction = Callable[..., Tensor]  # step(*drive_t, x_{t-1}) -> x_t, all [n_t, .]


class CostateRows(NamedTuple):
    """lam_t = mantissa_t 2^exponent_t, and the gradient by what drives the steps."""

    mantissa: Tensor  # [B + N, n]
    exponent: Tensor  # [B + N]
    drive: Callable[
        [], tuple[Tensor | None, ...]
    ]  # step arrays, in the units of their steps' exponents


@dataclass(frozen=True, eq=False)
class StepFunctionRun:
    """A run of a step function: its states, and its costates and tangents step by step."""

    step: StepFunction
    rows: Rows
    drive: tuple[Tensor, ...]  # step arrays
    x: Tensor  # [B + N, n]

    @staticmethod
    def run(
        step: StepFunction, rows: Rows, drive: tuple[Tensor, ...], x0: Tensor, checked: bool = True
    ) -> StepFunctionRun:
        states, drives = [x0.contiguous()], [rows.steps(y) for y in drive]
        for t, n in enumerate(rows.sizes):
            states.append(step(*(y[t] for y in drives), states[-1][:n]))
        for t, x in enumerate(states if checked else ()):
            if not torch.isfinite(x).all():
                raise NumericalError(
                    f"the state is outside the range of {str(x.dtype)[6:]} at t = {t} of {rows.T}."
                )
        return StepFunctionRun(step, rows, drive, torch.cat(states))

    @property
    def last(self) -> Tensor:
        return self.rows.last(self.x)

    @property
    def formula(self) -> FormulaRun | None:
        return None

    def with_checks(self) -> StepFunctionRun:
        return self  # it looks at every costate anyway

    def settle(self) -> None: ...

    def costate(
        self,
        s: Tensor | None,
        s_last: Tensor | None,
        declared: Tensor | None,
        unit: Tensor | None = None,
    ) -> CostateRows:
        """Arguments as in Swept.costate."""
        rows, drives = self.rows, [self.rows.steps(y) for y in self.drive]
        s = torch.zeros_like(self.x) if s is None else s
        s = s if s_last is None else s + rows.last_transposed(s_last)
        links = None if unit is None else rows.steps(Link.between(rows, unit, s.dtype).factor)
        into: list[tuple[Tensor, ...]] = []
        sources, before, states = rows.states(s), rows.before(self.x), rows.states(self.x)
        k = [next_exponent(exponent(s[:0].detach()), s[:0].detach(), sources[-1].detach())]
        read = None if declared is None else rows.states(declared)

        def scaled(t: int) -> Tensor:
            """The source in the unit of lam_t; one that is not there is not differentiated at 2^-k."""
            shift = (
                -k[0]
                if read is None
                else torch.where(read[t] | (k[0] > -SAFE_EXPONENT[s.dtype]), -k[0], NO_EXPONENT)
            )
            return scale(sources[t], shift[:, None])

        lam = [scaled(rows.T)]
        tolerance = torch.finfo(s.dtype).eps ** 0.75
        for t in reversed(range(rows.T)):
            drive = [y[t] for y in drives]
            again, pull = torch.func.vjp(self.step, *drive, before[t])  # type: ignore[misc]
            if not torch.allclose(
                again.detach(), states[t + 1].detach(), tolerance, tolerance, equal_nan=True
            ):
                raise Unsupported(
                    f"the step function gave another state when step {t + 1} was repeated: it is random or keeps a memory. "
                    "Pass what is drawn (a dropout mask, noise) as part of the input u, so that a step is a function of u and x."
                )
            *by_drive, out = pull(lam[0])
            into.insert(0, tuple(by_drive))
            out = out if links is None else out * links[t]
            k.insert(0, next_exponent(k[0], out.detach(), sources[t].detach()))
            out = scale(out, (k[1] - k[0][: len(again)])[:, None])
            lam.insert(0, pad(out, (0, 0, 0, len(sources[t]) - len(again))) + scaled(t))
            if not torch.isfinite(lam[0]).all():
                raise NumericalError(
                    f"the costate is outside the range of {str(s.dtype)[6:]} at t = {t} of {rows.T}."
                )
        exponents = torch.cat(k)
        drive_of = lambda: tuple(torch.cat(part) for part in zip(*into, strict=True))
        return CostateRows(
            torch.cat(lam), exponents if unit is None else exponents + unit, drive_of
        )

    def pull(self, lam: Tensor) -> Tensor:
        """J_t' lam_t for all steps, from state rows to step rows."""
        rows, drives = self.rows, [self.rows.steps(y) for y in self.drive]
        out = []
        for t, (before, bar) in enumerate(
            zip(rows.before(self.x), rows.states(lam)[1:], strict=True)
        ):
            drive = [y[t] for y in drives]
            out.append(
                torch.func.vjp(lambda x, drive=drive: self.step(*drive, x), before)[1](bar)[0]
            )
        return torch.cat(out)

    def push(self, *directions: Tensor | None) -> Tensor:
        """The tangent mu [B + N, n] for directions of the drive."""
        rows, drives = self.rows, [self.rows.steps(y) for y in self.drive]
        dots = [rows.steps(d) for d in directions if d is not None]
        mu = [torch.zeros_like(self.x[: rows.B])]
        for t, before in enumerate(rows.before(self.x)):
            primal = (*(y[t] for y in drives), before)
            mu.append(
                torch.func.jvp(self.step, primal, (*(d[t] for d in dots), mu[-1][: len(before)]))[1]
            )
        return torch.cat(mu)

    def jacobians(self, layout: Layout, samples: int) -> Tensor:
        """Step by step, at the places of these samples that are still there."""
        rows, n = self.rows, self.x.shape[1]
        drives = [rows.steps(y) for y in self.drive]
        units = torch.eye(n).to(self.x)
        place = (
            np.arange(samples) if layout.inverse_order is None else layout.inverse_order[:samples]
        )
        out = torch.zeros(rows.T, samples, n, n, dtype=self.x.dtype)
        for t, x in enumerate(rows.before(self.x)):
            there = np.flatnonzero(place < len(x))
            at = torch.from_numpy(place[there]).to(x.device)
            step = lambda x, t=t, at=at: self.step(*(y[t][at] for y in drives), x)
            pull = torch.func.vjp(step, x[at])[1]
            J = torch.func.vmap(pull)(units[:, None].expand(-1, len(at), -1))[0]
            out[t, torch.from_numpy(there)] = J.transpose(0, 1).cpu()
        return out


class RunView:
    """What others see of a run: a part of its states, or the states of several runs side by side."""

    formula: FormulaRun | None = None

    def costate(
        self,
        s: Tensor | None,
        s_last: Tensor | None,
        declared: Tensor | None,
        unit: Tensor | None = None,
    ) -> CostateRows:
        raise self._unswept()

    def push(self, *directions: Tensor | None) -> Tensor:
        raise self._unswept()

    def jacobians(self, layout: Layout, samples: int) -> Tensor:
        raise self._unswept()

    def with_checks(self) -> SweepRun:
        raise self._unswept()

    def settle(self) -> None: ...

    def _unswept(self) -> Unsupported:
        return Unsupported(
            "only a part of this run's state is seen here: ask the run of one layer by itself."
        )

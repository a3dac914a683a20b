"""StepFunctionRun: the run of any step function, differentiated by torch.

Where a step acts on samples one by one, its derivatives at all time steps come from one call
(step_functions); otherwise, and inside torch's transforms, from one call for each step: slower,
never different.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..cells.steps import STEPS
from ..errors import NumericalError, Unsupported
from .layout import Layout
from .overflow import time_of_row
from .rows import NO_EXPONENT, SAFE_EXPONENT, Link, Rows, exponent, next_exponent, scale
from .run import CostateRows, FormulaRun
from .step_functions.functions import StepAdjoint, StepStates, drive_gradients
from .step_functions.linearised import (
    Linearised,
    StepFunction,
    is_repeated,
    is_usual,
)
from .torch_internals import forward_mode, has_global_hooks, has_own_hooks

PURE = frozenset({*STEPS.values(), nn.RNNCell, nn.GRUCell, nn.LSTMCell})
# Runs with fewer steps, or more entries in the states of one step, are differentiated sooner by
# the graph of their steps.
LONG = 50
SMALL = 2048


@dataclass(frozen=True, eq=False)
class StepFunctionRun:
    """A run of a step function: its states, and its costates and tangents step by step."""

    step: StepFunction
    rows: Rows
    drive: tuple[Tensor, ...]  # step arrays: what each step reads beside the state
    x: Tensor  # [B + N, n]
    at: Linearised | None = None  # its derivatives, if x depends on them

    @staticmethod
    def run(
        step: StepFunction,
        rows: Rows,
        drive: tuple[Tensor, ...],
        x0: Tensor,
        checked: bool = True,
        pure: bool = False,
    ) -> StepFunctionRun:
        """x_t = step(*drive_t, x_{t-1}); checked: refuse a state that is not finite.

        pure: the step is known to do nothing but compute the state, so that it may be called again
        and without a graph of its own.
        """
        worth_it = pure and rows.T >= LONG and rows.B > 1 and x0.numel() <= SMALL
        if worth_it and torch.is_grad_enabled() and is_usual(rows, (*drive, x0)):
            swept = Linearised.with_states(step, rows, drive, x0)
            if swept is not None:
                at, x = swept
                if checked:
                    refuse_nonfinite(rows, x)
                x = StepStates.apply(at, len(drive), (x,), x0, *drive, *at.tensors)
                return StepFunctionRun(step, rows, drive, x, at)
        return StepFunctionRun(step, rows, drive, run_steps(step, rows, drive, x0, checked))

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
        """The adjoint sweep in mantissas and exponents; arguments as in SweepRun.costate."""
        at = self._linearised(twice=torch.is_grad_enabled())
        if at is None:
            return self._costate_by_steps(s, s_last, declared, unit)
        rows = self.rows
        factor = None
        if unit is not None:  # lam_t 2^-unit_t follows the same loop, with 2^(unit_t - unit_{t-1})
            factor = Link.between(rows, unit, self.x.dtype).factor
        inputs = (self.x, *self.drive, *at.tensors)
        mantissa, k = StepAdjoint.apply(
            at, len(self.drive), True, factor, declared, s, s_last, *inputs
        )
        bad_rows = (~torch.isfinite(mantissa.detach()).all(1)).nonzero()
        if len(bad_rows):  # the step that failed first has the latest state
            t = time_of_row(rows, int(bad_rows[-1, 0]))
            raise range_error("the costate", self.x.dtype, t, rows)
        if unit is not None:  # back from these units
            k = k + unit
        return CostateRows(mantissa, k, drive_gradients(at, mantissa, self.x, self.drive))

    def _linearised(self, twice: bool) -> Linearised | None:
        """The step linearised along this run; None where it must be done one step at a time."""
        if not is_usual(self.rows, (*self.drive, self.x)):
            return None
        if self.at is not None and self.at.prepare(twice):
            return self.at
        at = Linearised.of(self.step, self.rows, self.drive, self.x)
        if at is None or not at.prepare(twice):
            return None
        return at

    def _costate_by_steps(
        self,
        s: Tensor | None,
        s_last: Tensor | None,
        declared: Tensor | None,
        unit: Tensor | None,
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


def is_pure(step: object) -> bool:
    """Is it a cell of this package or of torch, as it is: without hooks, parametrisations, ...?

    Any other step may keep what it computes, with its graph, or count its calls.
    """
    if type(step) not in PURE:
        return False
    assert isinstance(step, nn.Module)
    return not has_global_hooks() and not any(map(has_own_hooks, step.modules()))


def run_steps(
    step: StepFunction, rows: Rows, drive: tuple[Tensor, ...], x0: Tensor, checked: bool
) -> Tensor:
    """The states [B + N, n] from x_0 on; checked: refuse one that is not finite."""
    states = [x0.contiguous()]
    drives = [rows.steps(y) for y in drive]
    for t, n in enumerate(rows.sizes):
        states.append(step(*[y[t] for y in drives], states[-1][:n]))
    x = torch.cat(states)
    if checked:
        refuse_nonfinite(rows, x)
    return x


def refuse_nonfinite(rows: Rows, x: Tensor) -> None:
    """Refuse states that are not finite, and name the first time step."""
    bad_rows = (~torch.isfinite(x.detach()).all(1)).nonzero()
    if len(bad_rows):
        raise range_error("the state", x.dtype, time_of_row(rows, int(bad_rows[0, 0])), rows)


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
    if is_repeated(again, state):
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

"""StepFunctionRun: the run of any step function, differentiated by torch.

Where a step acts on samples one by one, its derivatives at all time steps come from one call
(step_functions); otherwise, and inside torch's transforms, from one call for each step: slower,
never different.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..cells.steps import STEPS
from ..errors import NumericalError
from .layout import Layout
from .overflow import time_of_row
from .rows import Link, Rows
from .run import CostateRows, FormulaRun
from .step_costates import CostateSweep, RunGraph, StepSources, refuse_if_different, repeat_step
from .step_functions.functions import StepAdjoint, StepStates, drive_gradients
from .step_functions.linearised import (
    Linearised,
    StepFunction,
    is_usual,
)
from .torch_internals import (
    forward_mode,
    has_global_hooks,
    has_own_hooks,
    nothing_intervenes,
)

PURE = frozenset({*STEPS.values(), nn.RNNCell, nn.GRUCell, nn.LSTMCell})
# Runs with fewer steps, or more entries in the states of one step, are differentiated sooner by
# the graph of their steps; so are costates of the latter.
LONG = 50
SMALL = 2048


@dataclass(frozen=True, eq=False)
class StepFunctionRun:
    """A run of a step function: its states, and its costates and tangents step by step."""

    step: StepFunction
    rows: Rows
    drive: tuple[Tensor, ...]  # step arrays: what each step reads beside the state
    x: Tensor  # [B + N, n]
    last: Tensor  # each sample's last state, [B, n], in the rows' order
    at: Linearised | None = None  # its derivatives, if x depends on them
    graph: RunGraph | None = None  # of all steps, if torch has recorded them

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
                return StepFunctionRun(step, rows, drive, x, rows.last(x), at)
        states = run_steps(step, rows, drive, x0)
        x = torch.cat(states)
        if checked:
            refuse_nonfinite(rows, x)
        # On a GPU this was not measured.
        by_graph = x.requires_grad and x0.numel() > SMALL and not x.is_cuda
        graph = RunGraph(states) if by_graph else None
        return StepFunctionRun(step, rows, drive, x, last_states(rows, states), graph=graph)

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
        by_graph = self._costate_by_graph(s, s_last, declared, unit)
        if by_graph is not None:
            return by_graph
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
        refuse_nonfinite_costates(rows, mantissa)
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
        graph: RunGraph | None = None,
    ) -> CostateRows:
        """Costates step by step; arguments as in SweepRun.costate.

        graph: that of the run, from which the derivatives of its steps are taken.
        """
        rows = self.rows
        factors = None
        if unit is not None:  # lam_t 2^-unit_t follows the same loop, with 2^(unit_t - unit_{t-1})
            factors = rows.steps(Link.between(rows, unit, self.x.dtype).factor)
        drives = self._drive_by_step()
        before = rows.before(self.x)
        states = rows.states(self.x)

        def pull_again(t: int, lam: Tensor) -> Tensor:
            """J_{t+1}' lam_{t+1} by another call of the step."""
            again, pull = repeat_step(self.step, drives, before, t)
            refuse_if_different(again, states[t + 1], t + 1)
            return pad(pull(lam)[-1], (0, 0, 0, len(states[t]) - len(again)))

        def pull(t: int, lam: Tensor) -> Tensor:
            """J_{t+1}' lam_{t+1}, from the graph where it holds the step."""
            if graph is None or not graph.holds(t):
                return pull_again(t, lam)
            return graph.pull(t, lam)

        sources = StepSources(rows, s, s_last, declared)
        mantissa, k = CostateSweep(rows, pull, sources, factors).run(graph)
        refuse_nonfinite_costates(rows, mantissa)

        def drive_gradient() -> tuple[Tensor | None, ...]:
            """The gradients by the drive, each as one step array."""
            by_step = []
            for t, lam in enumerate(rows.states(mantissa)[1:]):
                _, pull = repeat_step(self.step, drives, before, t)
                by_step.append(pull(lam)[:-1])
            return tuple(map(torch.cat, zip(*by_step, strict=True)))

        return CostateRows(mantissa, k if unit is None else k + unit, drive_gradient)

    def _costate_by_graph(
        self,
        s: Tensor | None,
        s_last: Tensor | None,
        declared: Tensor | None,
        unit: Tensor | None,
    ) -> CostateRows | None:
        """Costates from the graph of the run; None if there is none, or it has been freed."""
        if self.graph is None or not torch.is_grad_enabled() or not nothing_intervenes():
            return None
        drives = self._drive_by_step()
        states = self.graph.states
        with torch.no_grad():
            for t in (0, self.rows.T - 1):  # a step that is random shows it at once
                again = self.step(*drives[t], states[t][: self.rows.sizes[t]])
                refuse_if_different(again, states[t + 1], t + 1)
        try:
            return self._costate_by_steps(s, s_last, declared, unit, self.graph)
        except RuntimeError:  # a backward pass has freed the graph
            return None

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
    step: StepFunction, rows: Rows, drive: tuple[Tensor, ...], x0: Tensor
) -> list[Tensor]:
    """The states x_0 [B, n] and x_{t+1} [n_t, n]."""
    states = [x0.contiguous()]
    drives = [rows.steps(y) for y in drive]
    for t, n in enumerate(rows.sizes):
        states.append(step(*[y[t] for y in drives], states[-1][:n]))
    return states


def last_states(rows: Rows, states: Sequence[Tensor]) -> Tensor:
    """Each sample's last state, [B, n], from the states of each step.

    Neither made of all states joined nor part of them: a loss that reads the last ones has no
    derivative by the others, and one that reads all of them none by these.
    """
    if rows.uniform:
        return states[-1].view_as(states[-1])
    sizes = [*rows.sizes, 0]  # the samples that take another step after x_t
    ended = [y[n:] for y, n in zip(states, sizes, strict=True)]  # those that do not
    return torch.cat(ended[::-1])


def nonfinite_rows(y: Tensor) -> Tensor:
    """The numbers of the rows of y that hold NaN or inf."""
    y = y.detach()
    if torch.isfinite(y.sum()):  # one quick pass, which may only doubt too much
        return y.new_empty(0, 1, dtype=torch.long)
    return (~torch.isfinite(y).all(1)).nonzero()


def refuse_nonfinite(rows: Rows, x: Tensor) -> None:
    """Refuse states that are not finite, and name the first time step."""
    bad_rows = nonfinite_rows(x)
    if len(bad_rows):
        raise range_error("the state", x.dtype, time_of_row(rows, int(bad_rows[0, 0])), rows)


def refuse_nonfinite_costates(rows: Rows, mantissa: Tensor) -> None:
    """Refuse costates that are not finite, and name the time step."""
    bad_rows = nonfinite_rows(mantissa)
    if len(bad_rows):  # the step that failed first has the latest state
        t = time_of_row(rows, int(bad_rows[-1, 0]))
        raise range_error("the costate", mantissa.dtype, t, rows)


def range_error(what: str, dtype: torch.dtype, t: int, rows: Rows) -> NumericalError:
    """The error for a quantity, such as "the state", that left the range of its type at step t."""
    return NumericalError(
        f"{what} is outside the range of {str(dtype)[6:]} at t = {t} of {rows.T}."
    )

"""Errors of a sweep that leaves the range of its type: which quantity, which step, what to do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import NumericalError
from .engines.c import per_sample
from .plan import SweepPlan, require_finite
from .rows import SAFE_EXPONENT, Rows, scale


def at_true_scale(plan: SweepPlan, mu: Tensor, k: Tensor | None, declared: Tensor | None) -> Tensor:
    """mu_t 2^-k_t: the penalty's derivative by the source s_t, the loss's gradient at step t.

    declared [rows of mu]: where the loss reads the state. Elsewhere the derivative is 0 if 2^-k_t
    is out of range, since there is no source that it could change. k None: mu as it is.
    mu has one row for each state, or for each sample's last state.
    """
    if k is None:
        return mu
    rows = plan.rows
    in_c = per_sample.scale_rows(mu, -k)
    true_mu = scale(mu, -k[:, None]) if in_c is None else in_c
    if declared is not None:
        # Beyond SAFE_EXPONENT 2^-k_t may leave the range in the products that follow.
        in_reach = declared | (k > -SAFE_EXPONENT[mu.dtype])
        true_mu = torch.where(in_reach[:, None], true_mu, 0)
    values = true_mu.detach()  # a check that is kept must not keep the history of what it checks

    def make_error() -> NumericalError | None:
        bad_rows = (~torch.isfinite(values).all(1)).nonzero()
        if not len(bad_rows):
            return None
        bad_row = int(bad_rows[0, 0])
        if len(values) == rows.B + rows.N:
            t = time_of_row(rows, bad_row)
        else:  # one row for each sample, at its last step
            t = rows.begin + int(rows.lengths[bad_row])
        return NumericalError(
            f"the second adjoint is outside the range of {str(values.dtype)[6:]} at t = {t}: the "
            "penalty's derivative with respect to the loss's gradient at that step is of the "
            f"order of 2^{-int(k[bad_row])}. Use float64, a shorter sequence or a smaller gain; if "
            "the loss does not read that step, mark it with mask=."
        )

    require_finite(plan, values, make_error)
    return true_mu


def check_range(plan: SweepPlan, end: Tensor, what: str, states: Callable[[], Tensor]) -> None:
    """Check a sweep by the values where it ends: what left the range before is not finite there.

    end: those values, [B, n]. what: the quantity, for the message. states(): its values at all
    steps, to find the one where it left the range. The plan keeps this check, so that `states` must
    not refer to the plan, nor to tensors with a history: these would keep each other alive.
    """
    rows = plan.rows
    end = end.detach()

    def make_error() -> NumericalError | None:
        if torch.isfinite(end).all():
            return None
        bad_rows = (~torch.isfinite(states()).all(1)).nonzero()[:, 0].tolist()
        times = [time_of_row(rows, row) for row in bad_rows]
        # The step that failed first: in the order of time, or against it.
        runs_forwards = what in ("the state", "the tangent")
        t = min(times) if runs_forwards else max(times)
        return NumericalError(
            f"{what} is outside the range of {str(end.dtype)[6:]} at t = {t} of {rows.end}. "
            "Use float64, a shorter sequence, or weights of a smaller gain (spectral radius)."
        )

    require_finite(plan, end, make_error)


def constant(y: Tensor) -> Callable[[], Tensor]:
    """A function that returns the values of y, for check_range: without the history of y."""
    values = y.detach()

    def return_values() -> Tensor:
        return values

    return return_values


def blame_penalty(rows: Rows, glam: Tensor | None, error: NumericalError) -> NumericalError:
    """The error to raise for a tangent sweep that failed with `error`.

    Its source glam [B + N, n] is the penalty's derivative by the costates: where that is not finite
    itself, the penalty is to blame and not the sweep.
    """
    if glam is None:
        return error
    bad_rows = (~torch.isfinite(glam).all(1)).nonzero()[:, 0].tolist()
    if not bad_rows:
        return error
    return NumericalError(
        "the penalty's derivative with respect to the costate is not finite at t = "
        f"{time_of_row(rows, bad_rows[0])}: look for a logarithm, a root or a quotient of "
        "something that is zero there."
    )


def time_of_row(rows: Rows, row: int) -> int:
    """The time step t of a row of a state array, in the sequence of which `rows` may be a part.

    The first B rows are the states before the first step, at t = rows.begin.
    """
    if row < rows.B:
        return rows.begin
    return rows.begin + int(rows.time[row - rows.B])

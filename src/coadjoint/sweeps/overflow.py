"""What is said of a sweep that leaves the range of its type: which quantity, at which step, and what to do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import NumericalError
from .plan import SweepPlan, require_finite
from .rows import SAFE_EXPONENT, Rows, scale


def at_true_scale(plan: SweepPlan, mu: Tensor, k: Tensor | None, declared: Tensor | None) -> Tensor:
    """mu at its true scale, where a loss is declared: the change of the source that the penalty asks for."""
    if k is None:
        return mu
    rows, true = plan.rows, scale(mu, -k[:, None])
    if declared is not None:
        true = torch.where((declared | (k > -SAFE_EXPONENT[mu.dtype]))[:, None], true, 0)

    def make_error() -> NumericalError | None:
        rows_bad = (~torch.isfinite(true).all(1)).nonzero()
        if not len(rows_bad):
            return None
        bad = int(rows_bad[0, 0])
        t = (
            time_of_row(rows, bad)
            if len(mu) == rows.B + rows.N
            else rows.begin + int(rows.lengths[bad])
        )
        return NumericalError(
            f"the second adjoint is outside the range of {str(mu.dtype)[6:]} at t = {t}: the penalty's derivative by the loss's "
            f"gradient there is 2^{-int(k[bad])} times a number of order one. Use float64, a shorter sequence or a smaller gain; "
            "if the loss gives that step no weight, say so with mask=."
        )

    require_finite(plan, true, make_error)
    return true


def check_range(plan: SweepPlan, end: Tensor, what: str, states: Callable[[], Tensor]) -> None:
    """Whatever leaves the range of its type on the way is not finite at the end of the sweep."""

    def make_error() -> NumericalError | None:
        if torch.isfinite(end).all():
            return None
        bad = (~torch.isfinite(states()).all(1)).nonzero()[:, 0].tolist()
        times = [time_of_row(plan.rows, row) for row in bad]
        t = min(times) if what in ("the state", "the tangent") else max(times)
        return NumericalError(
            f"{what} is outside the range of {str(end.dtype)[6:]} at t = {t} of {plan.rows.end}. "
            "Use float64, a shorter sequence, or weights of a smaller gain (spectral radius)."
        )

    require_finite(plan, end, make_error)


def blame_penalty(rows: Rows, glam: Tensor | None, error: NumericalError) -> NumericalError:
    """The error of a tangent sweep, or that of the penalty it came from."""
    bad = [] if glam is None else (~torch.isfinite(glam).all(1)).nonzero()[:, 0].tolist()
    if not bad:
        return error
    return NumericalError(
        f"the penalty's derivative by the costate is not finite at t = {time_of_row(rows, bad[0])}: "
        "look for a logarithm, a root or a quotient of something that is zero there."
    )


def time_of_row(rows: Rows, row: int) -> int:
    return rows.begin + (0 if row < rows.B else int(rows.time[row - rows.B]))

"""Jacobians: singular values and Lyapunov exponents of their products.

They are computed by QR steps and sums of logarithms, so nothing under- or overflows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import whole_number
from ..gradients.evaluation import Evaluation
from ..networks.chain import Chain
from ..networks.chain_run import DEPTH
from ..sweeps.costates import TIME, Axis
from .charts import Array, Chart, Figure
from .depth import (
    chain_of,
    chain_run_of,
    first_states,
    jacobian_products,
    last_layer,
    refuse_end,
    stretch_logs,
)
from .finding import (
    DECADE,
    check_evaluation,
    check_samples,
    growth_factor,
    nan_mean,
    require_one_layer,
    trajectory_of,
)


def jacobians(e: Evaluation, samples: int = 8) -> Array:
    """J_t = dx_t / dx_{t-1} of the first samples, [T, samples, n, n], in the network's dtype.

    All are in memory at once; they are zero past a sample's end. For a formula, n pull-backs give
    the rows of all steps at once; a step function is differentiated step by step.
    """
    check_evaluation(e)
    check_samples(samples)
    require_one_layer(e, "a Jacobian")
    trajectory = trajectory_of(e)
    layout = trajectory.layout
    with torch.no_grad():
        J: Array = trajectory.run.jacobians(layout, min(samples, layout.rows.B)).numpy(force=True)
    return J


@dataclass(frozen=True)
class Products:
    """Singular values of dx_T / dx_{T-s} = J_T ... J_{T-s+1}, T each sample's own length.

    steps    [P]: the numbers of steps s
    logs     [P, n]: logarithms of the singular values, largest first, means over samples; NaN where
             one is lost in the rounding of the largest
    samples  how many samples the means are of
    slope    the logarithm of the largest one over a whole sequence, per step, mean over samples
    axis     what the states are numbered by

    For a chain steps are layers, the products are dx_L / dx_{L-s}, and logs has a column for each
    entry of x_L; NaN where x_{L-s} has fewer entries.
    """

    steps: Array
    logs: Array
    samples: int
    slope: float
    axis: Axis = TIME

    def chart(self) -> Chart:
        """Up to six of the singular values over s."""
        n = self.logs.shape[1]
        drawn = np.unique(np.linspace(0, n - 1, min(6, n)).round().astype(int))
        return Chart(
            title="Singular values of Jacobian products",
            about=(
                f"how much a change of the state s {self.axis.step}s before the end has grown at "
                "the end; a wider fan means more uneven growth"
            ),
            x=f"{self.axis.step}s s before the end",
            y=f"singular value over s {self.axis.step}s",
            curves=tuple((f"no. {i + 1}", self.steps, self.logs[:, i] / DECADE) for i in drawn),
            decades=True,
        )

    def figures(self) -> list[Figure]:
        """The growth of the largest singular value per step."""
        return [
            Figure(
                "largest singular value of Jacobian products",
                growth_factor(self.slope),
                f"× per {self.axis.step}",
                "the most that a change of the state can grow",
            )
        ]


def singular_values(
    e: Evaluation, samples: int = 8, points: int = 65, end: int | None = None
) -> Products:
    """Singular values of dx_T / dx_{T-s} = J_T ... J_{T-s+1} of the first samples.

    points  the largest number of values of s, the number of steps
    end     for a chain, the layer at which the products end, in place of the last: dx_end / dx_i.
            A narrow last layer has few singular values; those of the one before show more.
    """
    check_evaluation(e)
    check_samples(samples)
    whole_number("points", points)
    chain = chain_of(e, "singular values over layers")
    if chain is not None:
        states = first_states(chain_run_of(e), samples)
        return products_over_layers(chain, states, points, last_layer(chain, end))
    refuse_end(end)
    J = jacobians(e, samples)
    lengths = trajectory_of(e).lengths[:samples].numpy()
    T, S, n, _ = J.shape
    steps = np.unique(np.linspace(0, T, min(points, T + 1)).round().astype(int))
    logs = np.full((len(steps), S, n), np.nan)
    logs[0] = 0  # the empty product is the identity
    P = np.broadcast_to(np.eye(n), (S, n, n)).copy()
    log_size = np.zeros(S)
    slope = np.zeros(S)
    for s in range(1, T + 1):
        on = np.flatnonzero(lengths >= s)  # the samples that have s steps
        P[on] = P[on] @ J[lengths[on] - s, on]
        # Divide by the largest entry and keep its logarithm: the product itself would overflow.
        largest_entry = np.abs(P[on]).max((1, 2))
        with np.errstate(divide="ignore"):
            log_size[on] += np.log(largest_entry)
        P[on] /= np.where(largest_entry > 0, largest_entry, 1)[:, None, None]
        if s in steps:
            logs[np.searchsorted(steps, s), on] = log_singular_values(P[on]) + log_size[on, None]
        complete = np.flatnonzero(lengths == s)  # the samples that end here
        if len(complete):
            largest = log_singular_values(P[complete])[:, 0]
            slope[complete] = (largest + log_size[complete]) / s
    return Products(steps, nan_mean(logs), S, float(slope.mean()))


def products_over_layers(chain: Chain, x: list[Tensor], points: int, end: int) -> Products:
    """Singular values of dx_end / dx_{end - s} of a chain with these states."""
    S = len(x[0])
    n = x[end][0].numel()
    steps = np.unique(np.linspace(0, end, min(points, end + 1)).round().astype(int))
    logs = np.full((len(steps), S, n), np.nan)
    logs[0] = 0  # the empty product is the identity
    slope = np.zeros(S)
    for s, (P, log_size) in enumerate(jacobian_products(chain, x, end), start=1):
        if s in steps or s == end:
            values = log_singular_values(P) + log_size[:, None]
            slope = values[:, 0] / s
            logs[np.searchsorted(steps, s), :, : values.shape[1]] = values
    return Products(steps, nan_mean(logs), S, float(slope.mean()), DEPTH)


def log_singular_values(P: Array) -> Array:
    """Logarithms of the singular values of each matrix, largest first, [matrices, n].

    NaN where one is below the rounding of the largest; -inf where it is exactly zero.
    """
    values = np.linalg.svd(P, compute_uv=False)
    rounding = np.finfo(float).eps * P.shape[-1] * values[:, :1]
    is_lost = (values > 0) & (values < rounding)
    with np.errstate(divide="ignore"):
        logs: Array = np.log(np.where(is_lost, np.nan, values))
    return logs


@dataclass(frozen=True)
class Lyapunov:
    """Lyapunov exponents, per step and largest first.

    exponents  [n]: means over samples
    each       [samples, n]
    axis       what the states are numbered by
    """

    exponents: Array
    each: Array
    axis: Axis = TIME

    def chart(self) -> Chart:
        """The exponents by their number."""
        numbers = np.arange(1, len(self.exponents) + 1)
        meaning = "above 0: chaos; below 0: the past is forgotten"
        if self.axis != TIME:
            meaning = f"above 0 they grow {self.axis.through}, below 0 they fade"
        return Chart(
            title="Lyapunov exponents",
            about=f"the growth of small changes of the state, direction by direction; {meaning}",
            x="direction",
            y=f"exponent per {self.axis.step}",
            curves=(("exponent", numbers, self.exponents),),
            rules=((0.0, "0"),),
        )

    def figures(self) -> list[Figure]:
        """The largest exponent."""
        largest = float(self.exponents[0])
        says = "above 0 small changes grow"
        unit = f"nats per {self.axis.step}"
        return [Figure("largest Lyapunov exponent", largest, unit, says)]


def lyapunov(e: Evaluation, samples: int = 8, end: int | None = None) -> Lyapunov:
    """Lyapunov exponents: (1/T) sum over t of log |diag R_t|, largest first.

    Q_t R_t = J_t Q_{t-1} is a QR decomposition, and Q_0 = I. The sum is over all steps of each of
    the first samples: these are exponents of a finite sequence, and nothing is left out at its
    beginning. -inf marks a direction that some step maps to zero, as a
    relu that is off does.

    For a chain, steps are layers, up to layer `end` (the last if it is not given). There are as
    many exponents as the narrowest state on the way has entries, since it maps all further
    directions to zero; if the input has more entries, Q_0 is that many random orthonormal
    directions of it.
    """
    check_evaluation(e)
    check_samples(samples)
    chain = chain_of(e, "Lyapunov exponents over layers")
    if chain is not None:
        last = last_layer(chain, end)
        logs = stretch_logs(chain, first_states(chain_run_of(e), samples), last)
        each = -np.sort(-logs / last, 1)
        return Lyapunov(nan_mean(each, 0), each, DEPTH)
    refuse_end(end)
    J = jacobians(e, samples)
    lengths = trajectory_of(e).lengths[:samples].numpy()
    T, S, n, _ = J.shape
    Q = np.broadcast_to(np.eye(n), (S, n, n)).copy()
    total = np.zeros((S, n))
    for t in range(T):
        on = np.flatnonzero(lengths > t)  # the samples that have not ended
        Q[on], R = np.linalg.qr(J[t, on].astype(float) @ Q[on])
        stretch = np.abs(np.diagonal(R, axis1=1, axis2=2))
        # A direction that J_t maps to zero has a diagonal entry of rounding errors alone.
        rounding = n * np.finfo(float).eps * np.linalg.norm(R, axis=(1, 2))[:, None]
        with np.errstate(divide="ignore"):
            total[on] += np.log(np.where(stretch < rounding, 0, stretch))
    each = -np.sort(-total / lengths[:, None], 1)
    return Lyapunov(nan_mean(each, 0), each)

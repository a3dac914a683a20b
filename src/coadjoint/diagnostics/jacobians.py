"""Jacobians: singular values and Lyapunov exponents of their products.

They are made of QR steps and sums of logarithms, so nothing under- or overflows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..errors import whole_number
from ..gradients.evaluation import Evaluation
from .charts import Array, Chart, Figure
from .finding import (
    DECADE,
    check_evaluation,
    check_samples,
    growth_factor,
    nan_mean,
    require_one_layer,
)


# Jacobians
def jacobians(e: Evaluation, samples: int = 8) -> Array:
    """J_t = dx_t / dx_{t-1} of the first samples, in the network's type: [T, samples, n, n], all in memory; zero past a sample's
    end. Rows of all steps at once by n pull-backs; of a step function, step by step."""
    check_evaluation(e)
    check_samples(samples)
    require_one_layer(e, "a Jacobian")
    run, layout = e.trajectory.run, e.trajectory.layout
    with torch.no_grad():
        return run.jacobians(layout, min(samples, layout.rows.B)).numpy(force=True)


@dataclass(frozen=True)
class Products:
    """logs [P, n]: logarithms of the singular values of dx_T / dx_{T-s} = J_T ... J_{T-s+1}, largest first, s = steps[p] steps
    before each sample's own end; means over samples. NaN: lost in the rounding of the largest. slope: log of the largest one
    over a whole sequence, per step, the mean over samples."""

    steps: Array
    logs: Array
    samples: int
    slope: float

    def chart(self) -> Chart:
        pick = np.unique(
            np.linspace(0, self.logs.shape[1] - 1, min(6, self.logs.shape[1])).round().astype(int)
        )
        curves = tuple((f"no. {i + 1}", self.steps, self.logs[:, i] / DECADE) for i in pick)
        about = "how much a change of the state s steps before the end is stretched on its way there; fan: how unevenly"
        return Chart("Singular values of Jacobian products", about, "steps s before the end", "singular value over s steps", curves, True)  # fmt: skip

    def figures(self) -> list[Figure]:
        return [Figure("largest singular value of Jacobian products", growth_factor(self.slope), "× per step", "the most that a change of the state grows")]  # fmt: skip


def singular_values(e: Evaluation, samples: int = 8, points: int = 65) -> Products:
    """Of the first samples, at up to `points` numbers of steps. Products are kept at size one, their size apart."""
    check_evaluation(e)
    check_samples(samples)
    whole_number("points", points)
    J, lengths = jacobians(e, samples), e.trajectory.lengths[:samples].numpy()
    T, S, n, _ = J.shape
    at = np.unique(np.linspace(0, T, min(points, T + 1)).round().astype(int))
    logs = np.full((len(at), S, n), np.nan)
    logs[0] = 0
    P, size, slope = np.broadcast_to(np.eye(n), (S, n, n)).copy(), np.zeros(S), np.zeros(S)
    for s in range(1, T + 1):
        on, ends = np.flatnonzero(lengths >= s), np.flatnonzero(lengths == s)
        P[on] = P[on] @ J[lengths[on] - s, on]
        top = np.abs(P[on]).max((1, 2))
        with np.errstate(divide="ignore"):
            size[on] += np.log(top)
        P[on] /= np.where(top > 0, top, 1)[:, None, None]
        if s in at:
            logs[np.searchsorted(at, s), on] = log_singular_values(P[on]) + size[on, None]
        slope[ends] = (log_singular_values(P[ends])[:, 0] + size[ends]) / s if len(ends) else 0
    return Products(at, nan_mean(logs), S, float(slope.mean()))


def log_singular_values(P: Array) -> Array:
    """Logarithms of singular values; NaN below the rounding of the largest."""
    s = np.linalg.svd(P, compute_uv=False)
    with np.errstate(divide="ignore"):
        return np.log(
            np.where((s > 0) & (s < np.finfo(float).eps * P.shape[-1] * s[:, :1]), np.nan, s)
        )


@dataclass(frozen=True)
class Lyapunov:
    """exponents [n]: largest first, per step, means over samples; each [samples, n]."""

    exponents: Array
    each: Array

    def chart(self) -> Chart:
        about = "the growth of small changes of the state, direction by direction; above 0: chaos, below: the past is forgotten"
        curves = (("exponent", np.arange(1, len(self.exponents) + 1), self.exponents),)
        return Chart("Lyapunov exponents", about, "direction", "exponent per step", curves, rules=((0.0, "0"),))  # fmt: skip

    def figures(self) -> list[Figure]:
        return [Figure("largest Lyapunov exponent", float(self.exponents[0]), "nats per step", "above 0 small changes grow")]  # fmt: skip


def lyapunov(e: Evaluation, samples: int = 8) -> Lyapunov:
    """(1/T) sum over t of log |diag R_t|, Q_t R_t = J_t Q_{t-1}, Q_0 = I, over each sample's own steps, sorted; of the first
    samples. Exponents of a finite sequence: nothing is left out at its beginning. -inf: a direction that some step has lost, as a
    relu that is off does."""
    check_evaluation(e)
    check_samples(samples)
    J, lengths = jacobians(e, samples), e.trajectory.lengths[:samples].numpy()
    T, S, n, _ = J.shape
    Q, total = np.broadcast_to(np.eye(n), (S, n, n)).copy(), np.zeros((S, n))
    for t in range(T):
        on = np.flatnonzero(lengths > t)
        Q[on], R = np.linalg.qr(J[t, on].astype(float) @ Q[on])
        stretch = np.abs(np.diagonal(R, axis1=1, axis2=2))
        lost = stretch < n * np.finfo(float).eps * np.linalg.norm(R, axis=(1, 2))[:, None]
        with np.errstate(divide="ignore"):
            total[on] += np.log(np.where(lost, 0, stretch))
    each = -np.sort(-total / lengths[:, None], 1)
    return Lyapunov(nan_mean(each, 0), each)

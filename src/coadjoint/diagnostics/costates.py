"""Costates: how they and the temporal components decay, and along which inputs and paths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import Unsupported
from ..gradients.evaluation import Evaluation
from ..gradients.temporal import Temporal
from ..networks.network import Network, Trajectory
from ..objectives.losses import output_function
from ..sweeps import affine
from ..sweeps.costates import TIME, Axis, BaseCostates
from ..sweeps.rows import scale
from .charts import Array, Chart, Figure
from .finding import (
    DECADE,
    LN2,
    check_evaluation,
    fitted_slope,
    growth_factor,
    log_norms,
    nan_mean,
    require_elman,
    require_formula,
    require_one_layer,
    to_numpy,
)


# the gradient, step by step
@dataclass(frozen=True)
class Components:
    """log ||grad_k||, k = 1..T, of the mean loss by each parameter, and by all of them jointly ("joint")."""

    k: Array
    logs: dict[str, Array]

    def slope(self, name: str = "joint") -> float:
        """What a step towards the past adds to log ||grad_k||: of the line that fits best."""
        return -fitted_slope(self.k, self.logs[name])

    def chart(self) -> Chart:
        curves = tuple((name, self.k, y / DECADE) for name, y in self.logs.items())
        about = "what each step k of the sequences adds to the gradient; a straight line that falls to the left: it vanishes exponentially towards the past"
        return Chart("Temporal components of the gradient", about, "time step k", "norm of the component at k", curves, True)  # fmt: skip

    def figures(self) -> list[Figure]:
        y = self.logs["joint"]
        span = (
            (y[0] - y[-1]) / DECADE if np.isfinite(y[-1]) else math.nan
        )  # -inf where the first step adds nothing at all
        return [
            Figure("temporal components, first to last", span, "decades", "below 0: the past adds less to the gradient than the end"),
            Figure("temporal components, towards the past", growth_factor(self.slope()), "× per step", "1: every step counts alike"),
        ]  # fmt: skip


def temporal(e: Evaluation) -> Components:
    """The norms of `e.temporal_components()`, at any scale: those of the components in units of their own, and the logarithms
    of the units added."""
    check_evaluation(e)
    require_formula(e, "temporal components")
    near, tops = Temporal.with_exponents(e)
    with np.errstate(divide="ignore"):
        logs = {
            name: np.log(to_numpy(n)) + np.array(tops) * LN2 for name, n in near.norms().items()
        }
    return Components(
        np.arange(1, len(tops) + 1), dict(sorted(logs.items(), key=lambda item: item[0] != "joint"))
    )


# costates
@dataclass(frozen=True)
class Decay:
    """log_norms [T+1]: means over samples of log ||lam_t||; slope: what each step towards the past adds, of the line that fits
    a sample's own log-norms best, mean over samples. `layers`: the same log-norms of each layer, where there are several."""

    t: Array
    log_norms: Array
    slope: float
    layers: dict[str, Array]
    axis: Axis = TIME

    def chart(self) -> Chart:
        every = {"all layers" if self.layers else "costates": self.log_norms, **self.layers}
        curves = tuple((name, self.t, y / DECADE) for name, y in every.items())
        about = (
            f"how much of the error signal reaches each {self.axis.place}; level: it arrives whole"
        )
        label = f"norm of the costate at {self.axis.symbol}"
        return Chart(f"Costates {self.axis.through}", about, self.axis.label, label, curves, True)

    def figures(self) -> list[Figure]:
        return [Figure(f"costates, {self.axis.backwards}", growth_factor(self.slope), f"× per {self.axis.step}", "below 1 they vanish, above 1 they explode")]  # fmt: skip


def decay(e: Evaluation) -> Decay:
    """Of several layers, those that read forwards are looked at as one (of an encoder, where there is a decoder). A costate that
    is exactly zero is left out."""
    check_evaluation(e)
    found = e.costates
    whole = found.forwards()
    layers: dict[str, Array] = {}
    for lam in found.layers:
        if lam is not whole and len(lam.exponent) == len(whole.exponent):
            at = lam.trajectory
            name = f"{at.module} layer {at.layer}".strip() + (
                ", reverse" if at.direction == "reverse" else ""
            )
            layers[name] = nan_mean(log_norms_of(lam))
    logs = log_norms_of(whole)
    t = np.arange(len(logs))
    slope = nan_mean(np.array([-fitted_slope(t, one) for one in logs.T]), 0)
    return Decay(t, nan_mean(logs), float(slope), layers, whole.axis)


def log_norms_of(lam: BaseCostates) -> Array:
    """log ||lam_t||, [T + 1, B]; NaN where there is none or it is zero"""
    logs = to_numpy(lam.log_norms())
    return np.where(np.isfinite(logs), logs, np.nan)


@dataclass(frozen=True)
class Paths:
    """Paths through the unfolded network that lead from a unit s steps before a sample's own end to a unit at its end.

    log_share [T+1, B]   log of the share of them that is enabled: crosses only units that are on, at steps T-s+1..T
    log_weight [T+1, B]  the same with each path counted by |product of its weights|
    active [T, B]        share of units that are on, at step t; NaN past a sample's end, and beyond its beginning
    """

    steps: Array
    log_share: Array
    log_weight: Array
    active: Array

    def chart(self) -> Chart:
        curves = (
            ("share of paths", self.steps, nan_mean(nan_unless_finite(self.log_share)) / DECADE),
            ("by their weights", self.steps, nan_mean(nan_unless_finite(self.log_weight)) / DECADE),
        )
        about = "paths from a unit s steps before the end to one at the end that meet no unit that is off: only they carry the gradient"
        return Chart(
            "Enabled paths", about, "steps s before the end", "share of enabled paths", curves, True
        )

    def figures(self) -> list[Figure]:
        ends = [
            self.log_share[int(np.flatnonzero(~np.isnan(one))[-1]), j]
            for j, one in enumerate(self.log_share.T)
        ]
        dead = 100 * float(np.isneginf(ends).mean())
        return [
            Figure("units that are on", 100 * float(np.nanmean(self.active)), "% of units and steps", "relu passes or blocks"),
            Figure("samples without an enabled path", dead, "%", "their gradient does not reach the beginning"),
        ]  # fmt: skip


def nan_unless_finite(values: Array) -> Array:
    return np.where(np.isfinite(values), values, np.nan)


def paths(e: Evaluation) -> Paths:
    """For cell "elman" with relu, whose slopes are 1 (on) or 0 (off): dx_T / dx_{T-s} is the sum over enabled paths of the
    products of their weights. A path is j_{T-s}, ..., j_T with W[j_t, j_{t-1}] != 0 at each step, and enabled if the units
    j_{T-s+1}, ..., j_T are on when it crosses them. NaN where there is no path at all."""
    check_evaluation(e)
    net = require_elman(e, "the view of paths")
    assert net.cell is not None
    if net.cell.next[0].op != "relu":
        raise Unsupported(
            "the view of paths: relu enables a path or blocks it, others weigh it. Use activation='relu'."
        )
    recurrent, run = net.effective_weights().W, e.trajectory
    assert recurrent is not None
    W, on, lengths, T = (
        np.abs(to_numpy(recurrent)),
        to_numpy(run.x[1:]) > 0,
        run.lengths.numpy(),
        run.layout.rows.T,
    )
    counted = [log_path_shares(A, on, lengths) for A in ((W > 0).astype(float), W)]
    active = np.where(np.arange(T)[:, None] < lengths, on.mean(2), np.nan)
    return Paths(np.arange(T + 1), counted[0], counted[1], active)


def log_path_shares(A: Array, on: Array, lengths: Array) -> Array:
    """log of (1' D_T A ... D_{T-s+1} A 1) / (1' A^s 1), D_t the units that are on: [T + 1, B]"""
    T, B, d = on.shape
    out = np.full((T + 1, B), np.nan)
    out[0] = 0
    enabled, every, size, whole = np.ones((B, d)), np.ones(d), np.zeros(B), 0.0

    with np.errstate(divide="ignore", invalid="ignore"):
        for s in range(1, T + 1):
            at = np.flatnonzero(lengths >= s)
            every, enabled[at] = every @ A, (enabled[at] * on[lengths[at] - s, at]) @ A
            top, tops = every.max(), enabled[at].max(1)
            whole, size[at] = whole + np.log(top), size[at] + np.log(tops)
            every, enabled[at] = (
                every / (top or 1),
                enabled[at] / np.where(tops > 0, tops, 1)[:, None],
            )
            out[s, at] = size[at] + np.log(enabled[at].sum(1)) - whole - np.log(every.sum())
    return out


# outputs
@dataclass(frozen=True)
class Sensitivity:
    """log_norms [T, B]: log of the Frobenius norm of dy_hat / du_t, y_hat that of each sample's last step; NaN past its end."""

    t: Array
    log_norms: Array

    def chart(self) -> Chart:
        curves = (
            ("mean over samples", self.t, nan_mean(nan_unless_finite(self.log_norms)) / DECADE),
        )
        about = "how much the answer changes with what was read at step t"
        return Chart("Sensitivity of the output to each input", about, "time step t", "norm of dŷ / du at t", curves, True)  # fmt: skip

    def figures(self) -> list[Figure]:
        curve = nan_mean(nan_unless_finite(self.log_norms))
        return [
            Figure("sensitivity, first input to last", float(curve[0] - curve[-1]) / DECADE, "decades", "below 0: the answer hears the end more than the beginning"),
            Figure("sensitivity, towards the past", growth_factor(-fitted_slope(self.t, curve)), "× per step", "1: every input counts alike"),
        ]  # fmt: skip


def sensitivity(e: Evaluation) -> Sensitivity:
    """One adjoint sweep for each output, its costates at any scale."""
    check_evaluation(e)
    net, run = require_one_layer(e, "the sensitivity of the output"), e.trajectory
    net.refuse_if_random("the sensitivity of the output")
    layout = run.layout
    total = np.full(layout.rows.N, -np.inf)
    for k in range(net.outputs):
        total = np.logaddexp(total, 2 * log_sensitivities(net, run, k))
    return Sensitivity(
        np.arange(1, layout.rows.T + 1),
        to_numpy(layout.padded(torch.from_numpy(total / 2), math.nan)),
    )


def log_sensitivities(net: Network, run: Trajectory, k: int) -> Array:
    """log ||dy_hat_k / du_t||, step rows."""
    rows, last_step = run.layout.rows, run.layout.rows.index.last - run.layout.rows.B
    leaf = lambda y: y.detach().requires_grad_()
    x, last, u = leaf(run.run.x), leaf(run.run.last), leaf(run.u_rows)
    with torch.enable_grad():
        y = output_function(net.output)(replace(run, u_rows=u).read_states(x, last))
        y = y[torch.from_numpy(last_step).to(y.device)] if net.readout == "every" else y
        s, s_last, direct = torch.autograd.grad(y[:, k].sum(), [x, last, u], allow_unused=True)
    with torch.no_grad():
        found = run.run.costate(s, s_last, None)
        exponent, drive = found.exponent[rows.B :], found.drive()
        du = drive[0] if run.input_weights is None else input_costates(drive, run.input_weights)
        assert du is not None
        if direct is not None:
            du = du + torch.where(direct != 0, scale(direct, -exponent[:, None]), 0)
        return log_norms(du, exponent)


def input_costates(drive: tuple[Tensor | None, ...], entering: Any) -> Tensor | None:
    """From base and side to the inputs that made them; data that came with the steps stands behind in side."""
    total: Tensor | None = None
    for part, weights in zip(drive, entering, strict=False):
        if part is not None and weights is not None:
            R = weights[0].detach()
            total = affine.plus(total, part[:, : len(R)] @ R)
    return total

"""Costates: how they and the components of the gradient decay, and along which paths."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import Unsupported
from ..gradients.evaluation import Evaluation
from ..gradients.temporal import Temporal
from ..networks.chain_run import DEPTH
from ..objectives.penalty_type import placed_run
from ..sweeps.costates import TIME, Axis, BaseCostates
from .charts import Array, Chart, Figure
from .depth import chain_of, chain_run_of
from .finding import (
    DECADE,
    LN2,
    check_evaluation,
    fitted_slope,
    growth_factor,
    nan_mean,
    nan_unless_finite,
    require_elman,
    require_formula,
    to_numpy,
    trajectory_of,
)


# The gradient, step by step
@dataclass(frozen=True)
class Components:
    """Norms of the components of the gradient of the mean loss, by time step or by layer.

    k     [T]: the time steps, or the layers that have parameters
    logs  log ||grad_k|| [T] by each parameter, and by all of them jointly ("joint")
    axis  what the components are numbered by
    """

    k: Array
    logs: dict[str, Array]
    axis: Axis = TIME

    @property
    def name(self) -> str:
        """What the components are called."""
        return "temporal components" if self.axis == TIME else f"components by {self.axis.number}"

    def slope(self, name: str = "joint") -> float:
        """The change of log ||grad_k|| per step towards the past, by least squares."""
        return -fitted_slope(self.k, self.logs[name])

    def chart(self) -> Chart:
        """The norms over time, by parameter."""
        return Chart(
            title=f"{self.name.capitalize()} of the gradient",
            about=(
                f"contribution of each {self.axis.number} k to the gradient; a straight line "
                f"falling to the left means that it vanishes exponentially {self.axis.backwards}"
            ),
            x=f"{self.axis.number} k",
            y="norm of the component at k",
            curves=tuple((name, self.k, y / DECADE) for name, y in self.logs.items()),
            decades=True,
        )

    def figures(self) -> list[Figure]:
        """The ratio of the first component to the last, and the change per step."""
        logs = self.logs["joint"]
        span = math.nan
        if np.isfinite(logs[-1]):
            span = (logs[0] - logs[-1]) / DECADE  # -inf where the first step adds nothing at all
        return [
            Figure(
                f"{self.name}, first to last",
                span,
                "decades",
                f"below 0: early {self.axis.step}s contribute less than late ones",
            ),
            Figure(
                f"{self.name}, {self.axis.backwards}",
                growth_factor(self.slope()),
                f"× per {self.axis.step}",
                f"1: every {self.axis.step} contributes equally",
            ),
        ]


def temporal(e: Evaluation) -> Components:
    """The norms of `e.components()`, at any scale: by time step or, for a chain, by layer.

    The components are computed in units of their own size, and the logarithms of the units added.
    Layers without parameters are left out.
    """
    check_evaluation(e)
    if chain_of(e, "components by layer") is not None:
        return by_layer(e)
    require_formula(e, "temporal components")
    components, exponents = Temporal.with_exponents(e)
    logs: dict[str, Array] = {}
    norms = components.norms()
    for name in sorted(norms, key=lambda name: name != "joint"):  # "joint" comes first
        with np.errstate(divide="ignore"):
            logs[name] = np.log(to_numpy(norms[name])) + np.array(exponents) * LN2
    return Components(np.arange(1, len(exponents) + 1), logs)


def by_layer(e: Evaluation) -> Components:
    """The components of a chain's gradient, jointly for the parameters of each layer."""
    terms, exponents = chain_run_of(e).components(e).without_exponents()
    has_parameters = np.array([bool(term) for term in terms.terms])
    k = np.flatnonzero(has_parameters)
    with np.errstate(divide="ignore"):
        logs = np.log(to_numpy(terms.norms()["joint"])) + np.array(exponents) * LN2
    return Components(k + 1, {"joint": logs[k]}, DEPTH)


# Costates
@dataclass(frozen=True)
class Decay:
    """How costates decay towards the past.

    t          [T+1]: the time steps (or layers)
    log_norms  [T+1]: means over samples of log ||lam_t||
    slope      what each step towards the past adds to a sample's log-norms, by the line that fits
               best; mean over samples
    layers     the same log-norms for each layer, where there are several
    axis       what the costates are numbered by
    """

    t: Array
    log_norms: Array
    slope: float
    layers: dict[str, Array]
    axis: Axis = TIME

    def chart(self) -> Chart:
        """The log-norms over time, of all layers together and of each."""
        name = "all layers" if self.layers else "costates"
        every = {name: self.log_norms, **self.layers}
        return Chart(
            title=f"Costates {self.axis.through}",
            about=(
                f"how much of the error signal reaches each {self.axis.place}; a level line "
                "means all of it"
            ),
            x=self.axis.label,
            y=f"norm of the costate at {self.axis.symbol}",
            curves=tuple((name, self.t, y / DECADE) for name, y in every.items()),
            decades=True,
        )

    def figures(self) -> list[Figure]:
        """The change per step."""
        return [
            Figure(
                f"costates, {self.axis.backwards}",
                growth_factor(self.slope),
                f"× per {self.axis.step}",
                "below 1 they vanish, above 1 they explode",
            )
        ]


def decay(e: Evaluation) -> Decay:
    """The decay of costates; a costate that is exactly zero is left out.

    For several layers, those that read forwards are treated as a single state (those of the
    encoder, where there is a decoder).

    Example:
        >>> import math
        >>> import torch
        >>> import coadjoint as co
        >>> net = co.Network("elman", activation="identity", inputs=1, hidden=1, outputs=1)
        >>> _ = torch.nn.init.constant_(net.W, 0.5)  # lam_t = 0.5 lam_{t+1}
        >>> batch = co.Batch(torch.ones(6, 1, 1), torch.ones(1, 1))
        >>> found = co.diagnostics.decay(co.BPTT()(net, batch, "squared"))
        >>> round(math.exp(found.slope), 4)
        0.5
    """
    check_evaluation(e)
    costates = e.costates
    joined = costates.forwards()
    layers: dict[str, Array] = {}
    for lam in costates.layers:
        # A single layer is drawn already; one of other steps (a decoder) has no place in the chart.
        if lam is joined or len(lam.exponent) != len(joined.exponent):
            continue
        run = placed_run(lam)
        name = f"{run.module} layer {run.layer}".strip()
        if run.direction == "reverse":
            name += ", reverse"
        layers[name] = nan_mean(log_norms_of(lam))
    logs = log_norms_of(joined)
    t = np.arange(len(logs))
    slopes = np.array([-fitted_slope(t, sample_logs) for sample_logs in logs.T])
    return Decay(t, nan_mean(logs), float(nan_mean(slopes, 0)), layers, joined.axis)


def log_norms_of(lam: BaseCostates) -> Array:
    """The logarithms of ||lam_t||, [T + 1, B]; NaN where lam_t is missing or zero."""
    return nan_unless_finite(to_numpy(lam.log_norms()))


# Paths
@dataclass(frozen=True)
class Paths:
    """Paths through the unfolded network, from a unit s steps before a sample's end to its end.

    steps       [T+1]: the numbers of steps s
    log_share   [T+1, B]: log of the share of them that is enabled: a path is
                enabled if the units it crosses at steps T-s+1..T are on
    log_weight  [T+1, B]: the same with each path counted by |product of its weights|
    active      [T, B]: share of units that are on, at step t; NaN past a sample's end

    They are NaN beyond a sample's beginning.
    """

    steps: Array
    log_share: Array
    log_weight: Array
    active: Array

    def chart(self) -> Chart:
        """Both shares over s, means over samples."""
        share = nan_mean(nan_unless_finite(self.log_share)) / DECADE
        weight = nan_mean(nan_unless_finite(self.log_weight)) / DECADE
        return Chart(
            title="Enabled paths",
            about=(
                "paths from units s steps before the end to units at the end that avoid units "
                "that are off; only these carry the gradient"
            ),
            x="steps s before the end",
            y="share of enabled paths",
            curves=(
                ("share of paths", self.steps, share),
                ("by their weights", self.steps, weight),
            ),
            decades=True,
        )

    def figures(self) -> list[Figure]:
        """The share of units that are on, and of samples whose gradient is blocked."""
        at_beginning = []  # of each sample: log of the share of enabled paths through all its steps
        for shares in self.log_share.T:
            longest = int(np.flatnonzero(~np.isnan(shares))[-1])
            at_beginning.append(shares[longest])
        blocked = 100 * float(np.isneginf(at_beginning).mean())
        on = 100 * float(np.nanmean(self.active))
        return [
            Figure("units that are on", on, "% of units and steps", "relu passes or blocks"),
            Figure(
                "samples without an enabled path",
                blocked,
                "%",
                "their gradient does not reach the beginning",
            ),
        ]


def paths(e: Evaluation) -> Paths:
    """The paths that carry the gradient, for cell "elman" with relu.

    The slopes of relu are 1 (on) or 0 (off), so dx_T / dx_{T-s} is the sum over enabled paths of
    the products of their weights. A path is j_{T-s}, ..., j_T with W[j_t, j_{t-1}] != 0 at each
    step; it is enabled if the units j_{T-s+1}, ..., j_T are on when it crosses them. NaN where
    there is no path at all.
    """
    check_evaluation(e)
    net = require_elman(e, "the view of paths")
    assert net.cell is not None
    if net.cell.next[0].op != "relu":
        raise Unsupported(
            "the view of paths: relu enables a path or blocks it; other activations weigh it. "
            "Use activation='relu'."
        )
    recurrent = net.effective_weights().W
    assert recurrent is not None
    run = trajectory_of(e)
    T = run.layout.rows.T
    W = np.abs(to_numpy(recurrent))
    on = to_numpy(run.x[1:]) > 0
    lengths = run.lengths.numpy()
    log_share = log_path_shares((W > 0).astype(float), on, lengths)
    log_weight = log_path_shares(W, on, lengths)
    active = np.where(np.arange(T)[:, None] < lengths, on.mean(2), np.nan)
    return Paths(np.arange(T + 1), log_share, log_weight, active)


def log_path_shares(A: Array, on: Array, lengths: Array) -> Array:
    """The log of the share of paths that is enabled, over the last s steps of each sample.

    It is log (1' D_T A ... D_{T-s+1} A 1) / (1' A^s 1) in row s of the result [T + 1, B], NaN where
    a sample has fewer than s steps. T in the formula is the sample's own length, and D_t is the
    diagonal matrix of the units that are on at step t.

    A        [d, d]: |W|, or its pattern of 0 and 1 to count paths
    on       [T, B, d]: whether a unit is on at step t = 1..T
    lengths  [B]: the number of steps of each sample
    """
    T, B, d = on.shape
    out = np.full((T + 1, B), np.nan)
    out[0] = 0
    # The row vectors 1' A^s, and 1' D_T A ... for each sample. Both are divided by their largest
    # entries at every step, or they would overflow; the logs of these entries are added up.
    every = np.ones(d)
    log_every = 0.0
    enabled = np.ones((B, d))
    log_enabled = np.zeros(B)
    with np.errstate(divide="ignore", invalid="ignore"):
        for s in range(1, T + 1):
            long = np.flatnonzero(lengths >= s)  # the samples that have s steps
            every = every @ A
            # Times D_{T-s+1}, then A; the units of step t are on[t - 1].
            enabled[long] = (enabled[long] * on[lengths[long] - s, long]) @ A
            largest_every = every.max()
            largest_enabled = enabled[long].max(1)
            log_every = log_every + np.log(largest_every)
            log_enabled[long] = log_enabled[long] + np.log(largest_enabled)
            # A vector of zeros, without paths, stays one: it is divided by 1.
            every = every / (largest_every or 1)
            divisor = np.where(largest_enabled > 0, largest_enabled, 1)
            enabled[long] = enabled[long] / divisor[:, None]
            of_enabled = log_enabled[long] + np.log(enabled[long].sum(1))
            out[s, long] = of_enabled - log_every - np.log(every.sum())
    return out

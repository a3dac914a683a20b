"""Outputs: how they depend on inputs and states, and by how many directions.

Both diagnostics need the rows dy_hat_k / du of the input-output Jacobian: one adjoint sweep for
each output k, in mantissas and exponents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..gradients.evaluation import Evaluation
from ..networks.chain_run import DEPTH, ChainCostates, ChainRun
from ..networks.interface import Net
from ..networks.network import Network
from ..networks.trajectory import Trajectory
from ..objectives.losses import output_function
from ..sweeps import affine
from ..sweeps.costates import TIME, Axis
from ..sweeps.rows import scale
from .charts import Array, Chart, Curve, Figure
from .depth import chain_of, chain_run_of
from .finding import (
    DECADE,
    check_evaluation,
    fitted_slope,
    growth_factor,
    log_norms,
    nan_mean,
    nan_unless_finite,
    require_one_layer,
    to_numpy,
    trajectory_of,
)


class Words(NamedTuple):
    """What an output depends on, in words for charts."""

    cause: str
    letter: str
    at: str


SENSITIVITY_OF_INPUTS = Words("input", "u", "step t")
SENSITIVITY_OF_STATES = Words("state", "x", "layer i")


@dataclass(frozen=True)
class Sensitivity:
    """How much each sample's last y_hat depends on the input at step t, or on layer i of a chain.

    t          [T]: the time steps; for a chain the layers 0..L, 0 for the input
    log_norms  [T, B]: log of the Frobenius norm of dy_hat / du_t; NaN past a sample's end. For a
               chain of dy_hat / dx_i
    axis       what they are numbered by
    """

    t: Array
    log_norms: Array
    axis: Axis = TIME

    def _mean_curve(self) -> Array:
        """The means over samples, [T], without samples that do not depend on u_t at all."""
        return nan_mean(nan_unless_finite(self.log_norms))

    def chart(self) -> Chart:
        """log10 of the norms over time, means over samples."""
        log10_norms = self._mean_curve() / DECADE
        curve: Curve = ("mean over samples", self.t, log10_norms)
        words = SENSITIVITY_OF_INPUTS if self.axis == TIME else SENSITIVITY_OF_STATES
        return Chart(
            title=f"Sensitivity of the output to each {words.cause}",
            about=f"how much the answer changes with the {words.cause} at {words.at}",
            x=f"{self.axis.number} {self.axis.symbol}",
            y=f"norm of dŷ / d{words.letter} at {self.axis.symbol}",
            curves=(curve,),
            decades=True,
        )

    def figures(self) -> list[Figure]:
        """The ratio of the first input's norm to the last's, and the change per step."""
        curve = self._mean_curve()
        words = SENSITIVITY_OF_INPUTS if self.axis == TIME else SENSITIVITY_OF_STATES
        return [
            Figure(
                f"sensitivity, first {words.cause} to last",
                float(curve[0] - curve[-1]) / DECADE,
                "decades",
                "below 0: the answer depends more on the end than on the beginning",
            ),
            Figure(
                f"sensitivity, {self.axis.backwards}",
                growth_factor(-fitted_slope(self.t, curve)),
                f"× per {self.axis.step}",
                f"1: every {words.cause} contributes equally",
            ),
        ]


def sensitivity(e: Evaluation) -> Sensitivity:
    """The sensitivity of the output to each input, by one adjoint sweep for each output.

    ||dy_hat / du_t||^2 is the sum over outputs k of ||dy_hat_k / du_t||^2, added up in logarithms.
    For a chain it is that to each state x_i, i = 0..L.
    """
    check_evaluation(e)
    if chain_of(e, "the sensitivity of the output") is not None:
        return sensitivity_by_layer(e)
    net = require_one_layer(e, "the sensitivity of the output")
    net.refuse_if_random("the sensitivity of the output")
    run = trajectory_of(e)
    layout = run.layout
    log_squares = np.full(layout.rows.N, -np.inf)
    for k in range(net.outputs):
        log_squares = np.logaddexp(log_squares, 2 * log_sensitivities(net, run, k))
    log_frobenius = layout.padded(torch.from_numpy(log_squares / 2), math.nan)
    return Sensitivity(np.arange(1, layout.rows.T + 1), to_numpy(log_frobenius))


def sensitivity_by_layer(e: Evaluation) -> Sensitivity:
    """The sensitivity of a chain's output to each of its states."""
    run = chain_run_of(e)
    log_squares = np.full((len(run.x), len(run.a)), -np.inf)
    for lam in output_costates(run):
        log_squares = np.logaddexp(log_squares, 2 * to_numpy(lam.log_norms()))
    return Sensitivity(np.arange(len(run.x)), log_squares / 2, DEPTH)


def output_costates(run: ChainRun) -> Iterator[ChainCostates]:
    """The costates of a chain for each of its outputs in place of a loss: dy_hat_k / dx_i."""
    with torch.enable_grad():  # a graph of its own: that of the run may have been used up
        again = run.network.repeat(run)
        outputs = again.y_hat.flatten(1).unbind(1)
    for y_hat in outputs:
        with torch.no_grad():
            yield again.costates(y_hat)


def log_sensitivities(net: Network, run: Trajectory, k: int) -> Array:
    """The logarithms of ||dy_hat_k / du_t||, y_hat of each sample's last step, as rows [N]."""
    return log_norms(*output_gradients(net, run, k))


def output_gradients(net: Network, run: Trajectory, k: int) -> tuple[Tensor, Tensor]:
    """dy_hat_k / du_t, y_hat of each sample's last step: mantissas [N, inputs], exponents [N].

    The gradients by the states start an adjoint sweep, whose costates give those by the inputs.
    """
    rows = run.layout.rows
    x = run.run.x.detach().requires_grad_()
    last = run.run.last.detach().requires_grad_()
    u = run.u_rows.detach().requires_grad_()
    with torch.enable_grad():
        y_hat = output_function(net.output)(replace(run, u_rows=u).read_states(x, last))
        if net.readout == "every":
            last_step = torch.from_numpy(rows.index.last - rows.B)
            y_hat = y_hat[last_step.to(y_hat.device)]
        s, s_last, direct = torch.autograd.grad(y_hat[:, k].sum(), [x, last, u], allow_unused=True)
    with torch.no_grad():
        costates = run.run.costate(s, s_last, None)
        exponent = costates.exponent[rows.B :]
        drive = costates.drive()
        du = drive[0] if run.input_weights is None else input_costates(drive, run.input_weights)
        assert du is not None
        if direct is not None:  # the readout sees u itself, with skip=True
            du = du + torch.where(direct != 0, scale(direct, -exponent[:, None]), 0)
        return du, exponent


def input_costates(
    drive: Sequence[Tensor | None],
    input_weights: Sequence[tuple[Tensor, Tensor | None] | None],
) -> Tensor | None:
    """The costates of the inputs u, [N, inputs], from those of base and side: base = R u + b.

    drive          the costates of base and of side, None for zero; only of base without a side
    input_weights  (R, b) of each of them, None for a side that is missing; columns of side beyond
                   the rows of its R are data, which no input makes
    """
    total: Tensor | None = None
    for part, weights in zip(drive, input_weights, strict=False):
        if part is not None and weights is not None:
            R = weights[0].detach()
            total = affine.plus(total, part[:, : len(R)] @ R)
    return total


@dataclass(frozen=True)
class StableRank:
    """The stable rank ||J||_F^2 / ||J||_2^2 of each sample's input-output Jacobian J = dy_hat / du.

    each     [B]: of each sample; NaN where J is zero
    largest  the most it could be: the number of outputs (one less with softmax, whose outputs sum
             to 1), or of inputs if that is less
    """

    each: Array
    largest: int

    @property
    def mean(self) -> float:
        """The mean over samples whose J is not zero."""
        return float(nan_mean(self.each, 0))

    def chart(self) -> Chart:
        """The sorted stable ranks of single samples."""
        known = np.sort(self.each[~np.isnan(self.each)])
        percent = 100 * (np.arange(len(known)) + 1) / max(len(known), 1)
        return Chart(
            title="Stable rank of the input-output Jacobian",
            about=(
                "in how many directions of the input the answer changes, sorted by samples; 1: all "
                "outputs depend on one direction alone"
            ),
            x="% of samples",
            y="stable rank",
            curves=(("stable rank of a sample", percent, known),),
            rules=((float(self.largest), "the most it could be"),),
        )

    def figures(self) -> list[Figure]:
        """The mean over samples."""
        unit = f"of {self.largest}"
        says = "directions of the input that the answer depends on"
        return [Figure("stable rank of the input-output Jacobian", self.mean, unit, says)]


def stable_rank(e: Evaluation) -> StableRank:
    """The stable rank ||J||_F^2 / ||J||_2^2 of J = dy_hat / du, sample by sample.

    J has a row for each output and a column for each entry of the input; of a sequence, for all of
    its steps, and y_hat is that of its last step. The stable rank lies between 1 and the rank of J
    and, unlike the rank, does not jump where a singular value comes near 0. It is computed from the
    Gram matrix of the rows, in units of the sample's largest entry: nothing under- or overflows.

    Example:
        y_hat = x has J = I, whose singular values are equal:

        >>> import torch
        >>> import coadjoint as co
        >>> chain = co.Chain(torch.nn.Linear(3, 3, bias=False))
        >>> _ = torch.nn.init.eye_(chain.maps[0].weight)
        >>> e = co.BP()(chain, co.Batch(torch.ones(2, 3), torch.zeros(2, 3)), "squared")
        >>> co.diagnostics.stable_rank(e).each.tolist()
        [3.0, 3.0]
    """
    check_evaluation(e)
    what = "the stable rank of the input-output Jacobian"
    if chain_of(e, what) is not None:
        run = chain_run_of(e)
        layers = [(lam.mantissa_at(0)[None], lam.exponent[:1]) for lam in output_costates(run)]
        largest = largest_rank(run.network, len(layers), run.x[0][0].numel())
        return StableRank(stable_ranks(layers), largest)
    net = require_one_layer(e, what)
    net.refuse_if_random(what)
    trajectory = trajectory_of(e)
    layout = trajectory.layout
    rows: list[tuple[Tensor, Tensor]] = []
    for k in range(net.outputs):
        du, exponent = output_gradients(net, trajectory, k)
        rows.append((layout.padded(du), layout.padded(exponent)))
    largest = largest_rank(net, net.outputs, layout.rows.T * net.inputs)
    return StableRank(stable_ranks(rows), largest)


def largest_rank(net: Net, outputs: int, inputs: int) -> int:
    """The largest rank that dy_hat / du can have; outputs of a softmax sum to 1."""
    independent = max(outputs - 1, 1) if net.output == "softmax" else outputs
    return min(independent, inputs)


def stable_ranks(rows: Iterable[tuple[Tensor, Tensor]]) -> Array:
    """||J||_F^2 / ||J||_2^2 of each sample's J, [B]; NaN where it is zero.

    rows: the rows of J as mantissas [T, B, ...] and exponents [T, B], one pair for each output
    """
    pairs = [(to_numpy(m.flatten(2)), k.numpy(force=True)) for m, k in rows]
    mantissas = np.stack([m for m, _ in pairs])  # [outputs, T, B, n]
    exponents = np.stack([k for _, k in pairs])  # [outputs, T, B]
    is_zero = ~mantissas.any(-1)
    # In units of 2^largest, the largest exponent of an entry that is not zero.
    lowest = np.iinfo(exponents.dtype).min // 2
    largest = np.where(is_zero, lowest, exponents).max((0, 1))
    powers = np.where(is_zero, 0, exponents - largest)
    J = np.ldexp(mantissas, np.maximum(powers, -2000)[..., None].astype(np.int64))
    K, T, B, n = J.shape
    J = J.transpose(2, 0, 1, 3).reshape(B, K, T * n)
    gram = J @ J.transpose(0, 2, 1)
    trace = np.trace(gram, axis1=1, axis2=2)
    top = np.linalg.eigvalsh(gram)[:, -1]
    ranks: Array = np.where(trace > 0, trace / np.where(trace > 0, top, 1), np.nan)
    return ranks

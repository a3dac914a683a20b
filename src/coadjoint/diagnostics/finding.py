"""Findings: what diagnostics return, and the arithmetic that they share.

Arrays are numpy, in float64; logarithms are natural (charts show decades).
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from torch import Tensor

from ..errors import Unsupported, check_kind, whole_number
from ..gradients.evaluation import Evaluation
from ..networks.network import Network
from ..networks.trajectory import Trajectory
from ..sweeps.run import FormulaRun
from .charts import Array, Chart, Figure

LN2 = math.log(2)
DECADE = math.log(10)

NEEDS_ONE_LAYER = "defined for one recurrent layer, but this network has several parts"


class Finding(Protocol):
    """What a diagnostic returns: a frozen dataclass of arrays."""

    def chart(self) -> Chart:
        """The arrays as curves or a map, with labels."""

    def figures(self) -> list[Figure]:
        """The main numbers, with their units and meanings."""


def check_evaluation(e: object) -> None:
    """Refuse anything but an Evaluation."""
    expected = "an Evaluation, such as co.diagnostics.evaluate(net, task)"
    check_kind("the argument of a diagnostic", e, Evaluation, expected)


def check_samples(samples: object) -> None:
    """Refuse anything but a whole number of samples, at least 1."""
    whole_number("samples", samples)


def require_one_layer(e: Evaluation, what: str) -> Network:
    """The evaluation's network, if it is one recurrent layer; `what` begins the refusal."""
    net = e.network.one_layer
    if net is not None:
        return net
    if e.network.as_chain is not None:
        raise Unsupported(f"{what}: defined for one recurrent layer, and a chain has none.")
    raise Unsupported(
        f"{what}: {NEEDS_ONE_LAYER}. Use co.Network; in a run, --layers 1 and --no-bidirectional."
    )


def trajectory_of(e: Evaluation) -> Trajectory:
    """The run of an evaluation whose network is one recurrent layer."""
    run = e.trajectory
    assert isinstance(run, Trajectory)
    return run


def require_formula(e: Evaluation, what: str) -> tuple[Network, FormulaRun]:
    """The evaluation's network and its run, if the cell is a formula; `what` begins the refusal."""
    net = require_one_layer(e, what)
    run = trajectory_of(e).run.formula
    if run is None:
        raise Unsupported(
            f"{what}: computed from the cell's formula. Use engine 'cpu' or 'reference', not a "
            "step function or engine 'autograd'."
        )
    return net, run


def require_elman(e: Evaluation, what: str) -> Network:
    """The evaluation's network, if its cell is "elman"; `what` begins the refusal."""
    net = require_one_layer(e, what)
    if net.cell is None or net.cell.name != "elman":
        raise Unsupported(
            f"{what}: J = diag(sigma') W holds for cell 'elman', but this one is '{net.name}'."
        )
    return net


def to_numpy(y: Tensor) -> Array:
    """A tensor as a float64 array, without its graph."""
    return y.detach().double().numpy(force=True)


def nan_mean(values: Array, axis: int = 1) -> Array:
    """The mean of the values that are not NaN; NaN where all are (numpy's would warn there)."""
    exist = ~np.isnan(values)
    count = np.where(exist.any(axis), exist.sum(axis), np.nan)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(exist, values, 0.0).sum(axis) / count
    return mean


def nan_unless_finite(values: Array) -> Array:
    """The values, with NaN in place of infinities."""
    return np.where(np.isfinite(values), values, np.nan)


def log_norms(mantissa: Tensor, exponent: Tensor) -> Array:
    """The logarithm of ||m 2^k|| over the last axis: mantissas m, and an exponent k for each m."""
    with np.errstate(divide="ignore"):
        logs: Array = np.log(np.linalg.norm(to_numpy(mantissa), axis=-1))
    return logs + exponent.numpy(force=True) * LN2


def growth_factor(slope: float) -> float:
    """exp(slope), without an overflow: slope is the change of a logarithm per step."""
    return float(np.exp(min(slope, 700.0)))  # exp(709.8) is the largest double


def fitted_slope(x: Array, y: Array) -> float:
    """The slope of the least-squares line through the finite y; NaN for fewer than two."""
    is_finite = np.isfinite(y)
    if is_finite.sum() < 2:
        return math.nan
    x = x[is_finite] - x[is_finite].mean()
    y = y[is_finite]
    return float(x @ y / (x @ x))


def format_number(value: float) -> str:
    """Four digits for a table; "-" for NaN."""
    return "-" if math.isnan(value) else f"{value:.4g}"

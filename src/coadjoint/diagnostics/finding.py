"""What every answer of a diagnostic has: arrays, a summary, a chart. Arrays are numpy, in float64; logarithms are natural
(charts show decades).
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from ..errors import Unsupported, check_kind, whole_number
from ..gradients.evaluation import Evaluation
from ..networks.network import Network
from ..sweeps.run import FormulaRun
from .charts import Array, Chart, Figure

LN2, DECADE = math.log(2), math.log(10)


class Finding(Protocol):
    """What a diagnostic returns: a frozen dataclass of arrays."""

    def chart(self) -> Chart: ...
    def figures(self) -> list[Figure]: ...


def check_evaluation(e: Any) -> None:
    check_kind(
        "what is diagnosed",
        e,
        Evaluation,
        "an Evaluation, of co.diagnostics.evaluate(net, task) for instance",
    )


def check_samples(samples: Any) -> None:
    whole_number("samples", samples)


def require_one_layer(e: Evaluation, what: str) -> Network:
    net = e.network.one_layer
    if net is None:
        raise Unsupported(
            f"{what}: of one recurrent layer, and this network has several parts. Use co.Network."
        )
    return net


def require_formula(e: Evaluation, what: str) -> tuple[Network, FormulaRun]:
    net = require_one_layer(e, what)
    run = e.trajectory.run.formula
    if run is None:
        raise Unsupported(
            f"{what}: taken from the cell's formula. Use engine 'cpu' or 'reference', not a step function or engine 'autograd'."
        )
    return net, run


def require_elman(e: Evaluation, what: str) -> Network:
    net = require_one_layer(e, what)
    if net.cell is None or net.cell.name != "elman":
        raise Unsupported(
            f"{what}: J = diag(sigma') W is the Jacobian of cell 'elman', and this one is '{net.name}'."
        )
    return net


def to_numpy(y: Tensor) -> Array:
    return y.detach().double().numpy(force=True)


def nan_mean(values: Array, axis: int = 1) -> Array:
    """Over what is there: NaN left out, NaN where nothing is."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(there, values, 0.0).sum(axis) / np.where(
            there.any(axis), there.sum(axis), np.nan
        )


def log_norms(mantissa: Tensor, exponent: Tensor) -> Array:
    """log ||m 2^k|| over the last axis."""
    with np.errstate(divide="ignore"):
        return (
            np.log(np.linalg.norm(to_numpy(mantissa), axis=-1)) + exponent.numpy(force=True) * LN2
        )


def growth_factor(slope: float) -> float:
    """exp, without a complaint where it leaves the range."""
    return float(np.exp(min(slope, 700.0)))


def fitted_slope(x: Array, y: Array) -> float:
    """The slope of the line that fits best, over the finite values; NaN for fewer than two."""
    on = np.isfinite(y)
    if on.sum() < 2:
        return math.nan
    x, y = x[on] - x[on].mean(), y[on]
    return float(x @ y / (x @ x))


def format_number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"

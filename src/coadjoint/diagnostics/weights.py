"""Weights: spectra of W, and bounds on the growth of costates that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import Unsupported
from ..gradients.evaluation import Evaluation
from ..networks.recurrence import Recurrence
from ..sweeps.costates import BaseCostates
from .charts import Array, Chart, Curve, Figure
from .costates import log_norms_of
from .finding import (
    DECADE,
    check_evaluation,
    check_samples,
    growth_factor,
    nan_mean,
    require_elman,
    to_numpy,
    trajectory_of,
)
from .jacobians import singular_values
from .units import unit_slopes


@dataclass(frozen=True)
class Spectrum:
    """The spectrum of each square block of W, one for each gate.

    names        of the blocks
    eigenvalues  their absolute values, largest first
    singular     the singular values, largest first
    """

    names: tuple[str, ...]
    eigenvalues: tuple[Array, ...]
    singular: tuple[Array, ...]

    @property
    def radius(self) -> Array:
        """The spectral radius of each block."""
        return np.array([values[0] for values in self.eigenvalues])

    @property
    def largest(self) -> Array:
        """The largest singular value of each block."""
        return np.array([values[0] for values in self.singular])

    def _curves(self, label: str, blocks: Iterable[Array]) -> list[Curve]:
        """A curve of the sorted values of each block, over their number 1, 2, ..."""
        curves: list[Curve] = []
        for name, values in zip(self.names, blocks, strict=True):
            title = f"{label} of {name}" if len(self.names) > 1 else label
            curves.append((title, np.arange(1, len(values) + 1), values))
        return curves

    def chart(self) -> Chart:
        """The absolute eigenvalues and the singular values by their number."""
        eigenvalues = self._curves("|eigenvalues|", self.eigenvalues)
        singular = self._curves("singular values", self.singular)
        return Chart(
            title="Spectrum of W",
            about="of W as the formula uses it; the two curves coincide if W is normal",
            x="number",
            y="size",
            curves=(*eigenvalues, *singular),
            rules=((1.0, "1"),),
        )

    def figures(self) -> list[Figure]:
        """The spectral radius and the largest singular value of each block."""
        figures = []
        for name, radius, largest in zip(self.names, self.radius, self.largest, strict=True):
            figures += [
                Figure(f"spectral radius of {name}", float(radius), "", "the largest |eigenvalue|"),
                Figure(
                    f"largest singular value of {name}",
                    float(largest),
                    "",
                    "the most that W can stretch a vector",
                ),
            ]
        return figures


def spectrum(e: Evaluation) -> Spectrum:
    """The spectrum of W as the formula takes it, with its mask and structure, at its current value.

    For a stack, of each layer.
    """
    check_evaluation(e)
    layers = list(e.network.recurrences)
    if not layers:
        raise Unsupported("the spectrum of W: defined for a co.Network or a co.Stack.")
    names: list[str] = []
    blocks: list[Array] = []
    for place, layer in layers:
        for name, block in blocks_of(layer):
            names.append(f"{name}{place}")
            blocks.append(block)
    if not blocks:
        raise Unsupported(
            "the spectrum of W: this network has no W, or a step function hides it. "
            "Use a cell with a W."
        )
    eigenvalues = [-np.sort(-np.abs(np.linalg.eigvals(W))) for W in blocks]
    singular = [np.linalg.svd(W, compute_uv=False) for W in blocks]
    return Spectrum(tuple(names), tuple(eigenvalues), tuple(singular))


def blocks_of(layer: Recurrence) -> Iterator[tuple[str, Array]]:
    """The square blocks of a layer's W and their names: "W", or "W_f" and "W_f, read 1".

    A gate has several blocks if it reads several vectors of the state ("read 0", "read 1", ...). A
    cell without W has no blocks.
    """
    if layer.cell is None:
        return
    with torch.no_grad():
        W = layer.effective_weights().W
    if W is None:
        return
    d = layer.hidden
    gates: Iterable[object] = layer.cell.gates
    if len(layer.cell.gates) * d != len(W):
        gates = range(len(W) // d)  # not one block for each gate: blocks are numbered
    for gate, part in zip(gates, W.split(d), strict=True):
        name = f"W_{gate}" if len(W) > d else "W"
        reads = part.split(d, 1)
        for i, block in enumerate(reads):
            suffix = f", read {i}" if len(reads) > 1 else ""
            yield f"{name}{suffix}", to_numpy(block)


@dataclass(frozen=True)
class Bounds:
    """Bounds of log ||dx_T / dx_{T-s}||_2 per step, for cell "elman" with r units.

    by_entries           log(r sigma' max |W_ij|)
    by_singular_value    log(sigma' s_1(W))
    sigma                sigma', the largest slope on the way
    steps                [P]: the numbers of steps s of `jacobians`
    jacobians, costates  the measured values: log of the largest singular value over s steps [P],
                         and, where the loss reads the last step alone,
                         log ||lam_{T-s}|| - log ||lam_T|| [T+1]; means over samples
    rates                the same two over whole sequences, per step, means over samples
    """

    by_entries: float
    by_singular_value: float
    sigma: float
    steps: Array
    jacobians: Array
    costates: Array
    rates: tuple[float, float]

    def chart(self) -> Chart:
        """Both bounds and both measured curves over s."""
        s = np.arange(len(self.costates))
        with np.errstate(invalid="ignore"):
            by_singular_value = s * self.by_singular_value / DECADE
            by_entries = s * self.by_entries / DECADE
        products = self.jacobians / DECADE
        fall = self.costates / DECADE
        # The looser bound is drawn only as far as the others reach, and half as far again, or it
        # would set the scale.
        reach = 1.5 * np.nanmax(np.abs([products[-1], fall[-1], by_singular_value[-1]]))
        near = np.abs(by_entries) <= reach
        curves: list[Curve] = [
            ("Jacobian products", self.steps, products),
            ("costates", s, fall),
            ("bound by the singular value", s, by_singular_value),
            ("bound by the entries of W", s[near], by_entries[near]),
        ]
        return Chart(
            title="Bounds on the decay",
            about=(
                "the growth that W and the slopes allow, and the growth measured; a falling "
                "bound means that the past must vanish"
            ),
            x="steps s before the end",
            y="growth over s steps",
            curves=tuple(curve for curve in curves if np.isfinite(curve[2]).any()),
            decades=True,
            alone=True,
        )

    def figures(self) -> list[Figure]:
        """The bounds and the measured rates, as factors per step."""
        rows = [
            (
                "bound by the entries of W",
                self.by_entries,
                "r sigma' max|W|: growth is at most this",
            ),
            (
                "bound by the singular value",
                self.by_singular_value,
                "sigma' s_1(W): below 1 the past must vanish",
            ),
            ("measured, Jacobian products", self.rates[0], "never above the bounds"),
        ]
        if np.isfinite(self.rates[1]):
            rows.append(("measured, costates", self.rates[1], "never above the bounds"))
        return [Figure(name, growth_factor(log), "× per step", says) for name, log, says in rows]


def bounds(e: Evaluation, samples: int = 8) -> Bounds:
    """Bounds on the decay of costates, and how it is; Jacobians of the first samples are measured.

    sigma' is the largest slope of a unit, s_1 the largest singular value, r the number of units.
    J_t = diag(sigma') W, so
    ||J_T ... J_{T-s+1}||_2 <= (sigma' s_1(W))^s <= (r sigma' max |W_ij|)^s.
    """
    check_evaluation(e)
    check_samples(samples)
    net = require_elman(e, "bounds on the decay")
    recurrent = net.effective_weights().W
    assert recurrent is not None
    W = to_numpy(recurrent)
    sigma = float(np.nanmax(unit_slopes(e)))
    with np.errstate(divide="ignore"):
        by_entries = np.log(net.hidden * sigma * np.abs(W).max())
        by_singular_value = np.log(sigma * np.linalg.norm(W, 2))
    products = singular_values(e, samples)
    run = trajectory_of(e)
    lengths = run.lengths.numpy()
    # [s, sample]: log ||lam_{T-s}|| - log ||lam_T||
    fall = np.full((run.layout.rows.T + 1, len(lengths)), np.nan)
    if not net.reads_all_steps:  # else the loss adds to lam at every step
        assert isinstance(e.costates, BaseCostates)
        logs = log_norms_of(e.costates)
        for j, length in enumerate(lengths):
            fall[: length + 1, j] = logs[length::-1, j] - logs[length, j]
    over_sequences = fall[lengths, np.arange(len(lengths))] / lengths
    return Bounds(
        by_entries=float(by_entries),
        by_singular_value=float(by_singular_value),
        sigma=sigma,
        steps=products.steps,
        jacobians=products.logs[:, 0],
        costates=nan_mean(fall),
        rates=(products.slope, float(np.mean(over_sequences))),
    )

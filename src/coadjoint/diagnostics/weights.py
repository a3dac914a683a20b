"""Weights: spectra of W, and bounds on the growth of costates that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..errors import Unsupported
from ..gradients.evaluation import Evaluation
from ..networks.network import Network
from ..sweeps import slopes
from .charts import Array, Chart, Figure
from .costates import log_norms_of
from .finding import (
    DECADE,
    check_evaluation,
    check_samples,
    growth_factor,
    nan_mean,
    require_elman,
    require_formula,
    to_numpy,
)
from .jacobians import singular_values


# W
@dataclass(frozen=True)
class Spectrum:
    """Of each square block of W, one for each gate: the absolute eigenvalues and the singular values, largest first."""

    names: tuple[str, ...]
    eigenvalues: tuple[Array, ...]
    singular: tuple[Array, ...]

    @property
    def radius(self) -> Array:
        """The spectral radius of each block."""
        return np.array([v[0] for v in self.eigenvalues])

    @property
    def largest(self) -> Array:
        """The largest singular value of each block."""
        return np.array([v[0] for v in self.singular])

    def chart(self) -> Chart:
        tell = lambda what, name: f"{what} of {name}" if len(self.names) > 1 else what
        both = (("|eigenvalues|", self.eigenvalues), ("singular values", self.singular))
        curves = tuple(
            (tell(what, name), np.arange(1, len(v) + 1), v)
            for what, of in both
            for name, v in zip(self.names, of, strict=True)
        )
        about = "of W as the formula takes it; the two curves agree where W is normal"
        return Chart("Spectrum of W", about, "number", "size", curves, rules=((1.0, "1"),))

    def figures(self) -> list[Figure]:
        rows = []
        for name, r, s in zip(self.names, self.radius, self.largest, strict=True):
            rows.append(
                Figure(f"spectral radius of {name}", float(r), "", "the largest |eigenvalue|")
            )
            rows.append(
                Figure(
                    f"largest singular value of {name}",
                    float(s),
                    "",
                    "the most that W stretches a vector",
                )
            )
        return rows


def spectrum(e: Evaluation) -> Spectrum:
    """Of W as the formula takes it (with its mask, its structure), as the weights are now; of each layer of a stack."""
    check_evaluation(e)
    names, blocks = [], []
    layers = list(e.network.recurrences)
    if not layers:
        raise Unsupported("the spectrum of W: that of a co.Network or a co.Stack.")
    for place, layer in layers:
        if layer.cell is None:
            continue
        with torch.no_grad():
            W = layer.effective_weights().W
        if W is None:
            continue
        gates = (
            layer.cell.gates
            if len(layer.cell.gates) * layer.hidden == len(W)
            else range(len(W) // layer.hidden)
        )
        for gate, part in zip(gates, W.split(layer.hidden), strict=True):
            for i, block in enumerate(part.split(layer.hidden, 1)):
                many = len(part.T) > layer.hidden
                gated = f"_{gate}" if len(W) > layer.hidden else ""
                names.append(f"W{gated}{f', read {i}' if many else ''}{place}")
                blocks.append(to_numpy(block))
    if not blocks:
        raise Unsupported(
            "the spectrum of W: this network has none, or a step function hides it. Use a cell with a W."
        )
    eigenvalues = tuple(-np.sort(-np.abs(np.linalg.eigvals(W))) for W in blocks)
    return Spectrum(
        tuple(names), eigenvalues, tuple(np.linalg.svd(W, compute_uv=False) for W in blocks)
    )


@dataclass(frozen=True)
class Bounds:
    """Of log ||dx_T / dx_{T-s}||_2 per step, for cell "elman". r units; sigma' the largest slope on the way.

    by_entries           log(r sigma' max |W_ij|)
    by_singular_value    log(sigma' s_1(W))
    jacobians, costates  what was measured: log of the largest singular value over s steps [P], and, where the loss reads the
                         last step alone, log ||lam_{T-s}|| - log ||lam_T|| [T+1]; means over samples
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
        s = np.arange(len(self.costates))
        with np.errstate(invalid="ignore"):
            bounds = [s * one / DECADE for one in (self.by_singular_value, self.by_entries)]
        measured, fall = self.jacobians / DECADE, self.costates / DECADE
        far = 1.5 * np.nanmax(
            np.abs([measured[-1], fall[-1], bounds[0][-1]])
        )  # where the other bound is not followed
        near = np.abs(bounds[1]) <= far
        curves = (
            ("Jacobian products", self.steps, measured),
            ("costates", s, fall),
            ("bound by the singular value", s, bounds[0]),
            ("bound by the entries of W", s[near], bounds[1][near]),
        )
        about = "what W and the slopes allow, and what happened: a bound that falls says that the past must vanish"
        drawn = tuple(c for c in curves if np.isfinite(c[2]).any())
        return Chart(
            "Bounds on the decay",
            about,
            "steps s before the end",
            "growth over s steps",
            drawn,
            True,
            alone=True,
        )

    def figures(self) -> list[Figure]:
        rows = [
            Figure("bound by the entries of W", growth_factor(self.by_entries), "× per step", "r sigma' max|W|: growth is at most this"),
            Figure("bound by the singular value", growth_factor(self.by_singular_value), "× per step", "sigma' s_1(W): below 1 the past must vanish"),
            Figure("measured, Jacobian products", growth_factor(self.rates[0]), "× per step", "never above the bounds"),
        ]  # fmt: skip
        if np.isfinite(self.rates[1]):
            rows.append(
                Figure(
                    "measured, costates",
                    growth_factor(self.rates[1]),
                    "× per step",
                    "never above the bounds",
                )
            )
        return rows


def bounds(e: Evaluation, samples: int = 8) -> Bounds:
    """J_t = diag(sigma') W, so ||J_T ... J_{T-s+1}||_2 <= (sigma' s_1(W))^s <= (r sigma' max |W_ij|)^s; Jacobians of the first
    samples."""
    check_evaluation(e)
    check_samples(samples)
    net = require_elman(e, "bounds on the decay")
    recurrent, sigma = net.effective_weights().W, float(np.nanmax(unit_slopes(e)))
    assert recurrent is not None
    W = to_numpy(recurrent)
    with np.errstate(divide="ignore"):
        by_entries = np.log(net.hidden * sigma * np.abs(W).max())
        by_singular_value = np.log(sigma * np.linalg.norm(W, 2))
    products = singular_values(e, samples)
    T, lengths = e.trajectory.layout.rows.T, e.trajectory.lengths.numpy()
    fall = np.full((T + 1, len(lengths)), np.nan)
    if not net.reads_all_steps:
        logs = log_norms_of(e.costates)
        for j, n in enumerate(lengths):
            fall[: n + 1, j] = logs[n::-1, j] - logs[n, j]
    whole = float(np.mean(fall[lengths, np.arange(len(lengths))] / lengths))
    return Bounds(
        float(by_entries),
        float(by_singular_value),
        sigma,
        products.steps,
        products.logs[:, 0],
        nan_mean(fall),
        (products.slope, whole),
    )


# units
def unit_slopes(e: Evaluation) -> Array:
    """|dx / da| of each unit at each step, [T, B, units], NaN past a sample's end: the largest over slots and gates (v's own
    entries included)."""
    net, run = require_formula(e, "the slopes of units")
    cell, rows, saved, d = run.plan.cell, run.plan.rows, run.saved, net.hidden
    heard = len(cell.side_entries) - len(cell.given)
    op = slopes.step_map(cell).pulled(("x",), ("a", "v") if heard else ("a",))
    out = torch.zeros(rows.N, d, dtype=run.x.dtype, device=run.x.device)
    with torch.no_grad():
        for slot in range(len(cell.slots)):
            bar = torch.zeros_like(run.x[rows.B :])
            bar[:, slot * d : (slot + 1) * d] = 1
            back = op(
                (saved.x[rows.B :], saved.q), saved.a, saved.v, rows.prev(saved.x), saved.p, bar
            )
            for part in (back["a"], back.get("v")):
                if part is not None:
                    part = (
                        part if part is back["a"] else part[:, : heard * d]
                    )  # what is given is no argument
                    out = torch.maximum(out, part.unflatten(1, (-1, d)).abs().amax(1))
    return to_numpy(e.trajectory.layout.padded(out, math.nan))


def slopes_at_rest(net: Network) -> Array:
    """The same slope [units] of a state 0, at pre-activations 0 or 1, whichever is steeper."""
    cell, d = net.cell, net.hidden
    assert cell is not None
    p = {name: value.detach() for name, value in net.p.items()}
    x, steepest = net.x0.new_zeros(1, net.n), np.zeros(d)
    for a in (0.0, 1.0):
        arguments = [x.new_full((1, len(cell.gates) * d), a)]
        if cell.side_entries:
            arguments.append(x.new_full((1, len(cell.side_entries) * d), a))
        step = lambda base, side=None: cell.step(base, side, None, x, p)
        pull = torch.func.vjp(step, *arguments)[1]
        for slot in range(len(cell.slots)):
            bar = torch.zeros_like(x)
            bar[:, slot * d : (slot + 1) * d] = 1
            base, *side = pull(bar)
            parts = [base, *(y[:, : (len(cell.side_entries) - len(cell.given)) * d] for y in side)]
            steepest = np.maximum(
                steepest, np.abs(to_numpy(torch.cat(parts, 1))).reshape(-1, d).max(0)
            )
    return steepest

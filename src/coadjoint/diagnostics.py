"""Diagnostics: what the gradient does inside a sequence. Each takes an Evaluation and returns arrays.

    e = co.BPTT()(net, batch, loss)
    found = co.diagnostics.decay(e)          # costates: their log-norms, and what a step towards the past adds to them
    co.diagnostics.plot(found)               # a matplotlib figure
    co.diagnostics.examine(e)                # all of them that this network has

Arrays are numpy, in float64; logarithms are natural (charts show decades). Everything that shrinks or grows with T is made
of mantissas and exponents, of sums of logarithms or of QR steps: nothing under- or overflows. docs/diagnostics.md has the
formulas and how to read them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from . import files, runs
from .charts import Array, Chart, Figure, draw
from .costates import Costates
from .errors import (
    MOST,
    InputError,
    KindError,
    MissingError,
    NumericalError,
    Unsupported,
    brief,
    check_kind,
    check_path,
    check_seed,
    choose,
    whole,
)
from .gradients import BPTT, Evaluation, Gradient, Temporal, trained
from .losses import output_function
from .network import Network, Trajectory
from .readout import Net, check_net
from .recurrence import Recurrence
from .sweeps import Stepped, Swept, derivatives, scale
from .tasks import Task

LN2, DECADE = math.log(2), math.log(10)


class Found(Protocol):
    """What a diagnostic returns: a frozen dataclass of arrays."""

    def chart(self) -> Chart: ...
    def figures(self) -> list[Figure]: ...


def check_evaluation(e: Any) -> None:
    check_kind("what is diagnosed", e, Evaluation, "an Evaluation, of co.diagnostics.evaluate(net, task) for instance")


def check_samples(samples: Any) -> None:
    whole("samples", samples)


def one_layer(e: Evaluation, what: str) -> Network:
    if not isinstance(e.network, Network):
        raise Unsupported(f"{what}: of one recurrent layer, and this network has several parts. Use co.Network.")
    return e.network


def swept(e: Evaluation, what: str) -> tuple[Network, Swept]:
    net, run = one_layer(e, what), e.trajectory.run
    if not isinstance(run, Swept):
        raise Unsupported(
            f"{what}: taken from the cell's formula. Use engine 'cpu' or 'reference', not a step function or engine 'autograd'."
        )
    return net, run


def elman(e: Evaluation, what: str) -> Network:
    net = one_layer(e, what)
    if net.cell is None or net.cell.name != "elman":
        raise Unsupported(f"{what}: J = diag(sigma') W is the Jacobian of cell 'elman', and this one is '{net.name}'.")
    return net


def numbers(y: Tensor) -> Array:
    return y.detach().double().numpy(force=True)


def mean(values: Array, axis: int = 1) -> Array:
    """Over what is there: NaN left out, NaN where nothing is."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.where(there, values, 0.0).sum(axis) / np.where(there.any(axis), there.sum(axis), np.nan)


def log_norms(mantissa: Tensor, exponent: Tensor) -> Array:
    """log ||m 2^k|| over the last axis."""
    with np.errstate(divide="ignore"):
        return np.log(np.linalg.norm(numbers(mantissa), axis=-1)) + exponent.numpy(force=True) * LN2


def factor(slope: float) -> float:
    """exp, without a complaint where it leaves the range."""
    return float(np.exp(min(slope, 700.0)))


# the gradient, step by step


@dataclass(frozen=True)
class Components:
    """log ||grad_k||, k = 1..T, of the mean loss by each parameter, and by all of them jointly ("joint")."""

    k: Array
    logs: dict[str, Array]

    def slope(self, name: str = "joint") -> float:
        """What a step towards the past adds to log ||grad_k||: of the line that fits best."""
        return -line(self.k, self.logs[name])

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
            Figure("temporal components, towards the past", factor(self.slope()), "× per step", "1: every step counts alike"),
        ]  # fmt: skip


def temporal(e: Evaluation) -> Components:
    """The norms of `e.temporal_components()`, at any scale: those of the components in units of their own, and the logarithms
    of the units added."""
    check_evaluation(e)
    swept(e, "temporal components")
    near, tops = Temporal.near(e)
    with np.errstate(divide="ignore"):
        logs = {name: np.log(numbers(n)) + np.array(tops) * LN2 for name, n in near.norms().items()}
    return Components(np.arange(1, len(tops) + 1), dict(sorted(logs.items(), key=lambda item: item[0] != "joint")))


def line(x: Array, y: Array) -> float:
    """The slope of the line that fits best, over the finite values; NaN for fewer than two."""
    on = np.isfinite(y)
    if on.sum() < 2:
        return math.nan
    x, y = x[on] - x[on].mean(), y[on]
    return float(x @ y / (x @ x))


# costates


@dataclass(frozen=True)
class Decay:
    """log_norms [T+1]: means over samples of log ||lam_t||; slope: what each step towards the past adds, of the line that fits
    a sample's own log-norms best, mean over samples. `layers`: the same log-norms of each layer, where there are several."""

    t: Array
    log_norms: Array
    slope: float
    layers: dict[str, Array]

    def chart(self) -> Chart:
        every = {"all layers" if self.layers else "costates": self.log_norms, **self.layers}
        curves = tuple((name, self.t, y / DECADE) for name, y in every.items())
        about = "how much of the error signal reaches each moment; level: it arrives whole"
        return Chart("Costates through time", about, "time t", "norm of the costate at t", curves, True)

    def figures(self) -> list[Figure]:
        return [Figure("costates, towards the past", factor(self.slope), "× per step", "below 1 they vanish, above 1 they explode")]  # fmt: skip


def decay(e: Evaluation) -> Decay:
    """Of several layers, those that read forwards are looked at as one (of an encoder, where there is a decoder). A costate that
    is exactly zero is left out."""
    check_evaluation(e)
    found: Any = e.costates
    layers: dict[str, Array] = {}
    if not isinstance(found, Costates):
        first = found[0].trajectory
        for lam in found:
            at = lam.trajectory
            name = f"{at.module} layer {at.layer}".strip() + (", reverse" if at.direction == "reverse" else "")
            if len(lam.trajectory.mask) == len(first.mask):
                layers[name] = mean(logs_of(lam))
        found = found.select(module=first.module, call=first.call, direction="forward").whole()
    logs = logs_of(found)
    t = np.arange(len(logs))
    slope = mean(np.array([-line(t, one) for one in logs.T]), 0)
    return Decay(t, mean(logs), float(slope), layers)


def logs_of(lam: Costates) -> Array:
    """log ||lam_t||, [T + 1, B]; NaN where there is none or it is zero"""
    logs = numbers(lam.log_norms())
    return np.where(np.isfinite(logs), logs, np.nan)


# Jacobians


def jacobians(e: Evaluation, samples: int = 8) -> Array:
    """J_t = dx_t / dx_{t-1} of the first samples, in the network's type: [T, samples, n, n], all in memory; zero past a sample's
    end. Rows of all steps at once by n pull-backs; of a step function, step by step."""
    check_evaluation(e)
    check_samples(samples)
    net, run, layout = one_layer(e, "a Jacobian"), e.trajectory.run, e.trajectory.layout
    rows, n = layout.rows, net.n
    S = min(samples, rows.B)
    out = np.zeros((rows.T, S, n, n), str(run.x.dtype).removeprefix("torch."))
    with torch.no_grad():
        if isinstance(run, Stepped):
            place = np.arange(S) if layout.inverse is None else layout.inverse[:S]
            for t, J in enumerate(stepwise(run, place)):
                out[t, np.flatnonzero(place < rows.sizes[t])] = J
            return out
        bar = torch.zeros_like(run.x)
        for i in range(n):
            bar.zero_()[:, i] = 1
            out[:, :, i] = layout.padded(run.pull(bar))[:, :S].numpy(force=True)
    return out


def stepwise(run: Stepped, place: Array) -> Iterator[Array]:
    """The Jacobians of each step at these places of its rows, where a sample is still there."""
    drives, E = [run.rows.steps(y) for y in run.drive], torch.eye(run.x.shape[1]).to(run.x)
    for t, x in enumerate(run.rows.before(run.x)):
        at = torch.from_numpy(place[place < len(x)]).to(x.device)
        step = lambda x, t=t, at=at: run.step(*(y[t][at] for y in drives), x)
        pull = torch.func.vjp(step, x[at])[1]
        J = torch.func.vmap(pull)(E[:, None].expand(-1, len(at), -1))[0]
        yield J.transpose(0, 1).numpy(force=True)


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
        pick = np.unique(np.linspace(0, self.logs.shape[1] - 1, min(6, self.logs.shape[1])).round().astype(int))
        curves = tuple((f"no. {i + 1}", self.steps, self.logs[:, i] / DECADE) for i in pick)
        about = "how much a change of the state s steps before the end is stretched on its way there; fan: how unevenly"
        return Chart("Singular values of Jacobian products", about, "steps s before the end", "singular value over s steps", curves, True)  # fmt: skip

    def figures(self) -> list[Figure]:
        return [Figure("largest singular value of Jacobian products", factor(self.slope), "× per step", "the most that a change of the state grows")]  # fmt: skip


def singular_values(e: Evaluation, samples: int = 8, points: int = 65) -> Products:
    """Of the first samples, at up to `points` numbers of steps. Products are kept at size one, their size apart."""
    check_evaluation(e)
    check_samples(samples)
    whole("points", points)
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
            logs[np.searchsorted(at, s), on] = resolved(P[on]) + size[on, None]
        slope[ends] = (resolved(P[ends])[:, 0] + size[ends]) / s if len(ends) else 0
    return Products(at, mean(logs), S, float(slope.mean()))


def resolved(P: Array) -> Array:
    """Logarithms of singular values; NaN below the rounding of the largest."""
    s = np.linalg.svd(P, compute_uv=False)
    with np.errstate(divide="ignore"):
        return np.log(np.where((s > 0) & (s < np.finfo(float).eps * P.shape[-1] * s[:, :1]), np.nan, s))


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
    return Lyapunov(mean(each, 0), each)


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
            rows.append(Figure(f"spectral radius of {name}", float(r), "", "the largest |eigenvalue|"))
            rows.append(Figure(f"largest singular value of {name}", float(s), "", "the most that W stretches a vector"))
        return rows


def spectrum(e: Evaluation) -> Spectrum:
    """Of W as the formula takes it (with its mask, its structure), as the weights are now; of each layer of a stack."""
    check_evaluation(e)
    names, blocks = [], []
    layers = [("", e.network)] if isinstance(e.network, Network) else list(recurrences(e))
    for place, layer in layers:
        with torch.no_grad():
            W = layer.recurrent() if layer.cell is not None else None
        if W is None:
            continue
        assert layer.cell is not None
        gates = layer.cell.gates if len(layer.cell.gates) * layer.hidden == len(W) else range(len(W) // layer.hidden)
        for gate, part in zip(gates, W.split(layer.hidden), strict=True):
            for i, block in enumerate(part.split(layer.hidden, 1)):
                many = len(part.T) > layer.hidden
                gated = f"_{gate}" if len(W) > layer.hidden else ""
                names.append(f"W{gated}{f', read {i}' if many else ''}{place}")
                blocks.append(numbers(block))
    if not blocks:
        raise Unsupported("the spectrum of W: this network has none, or a step function hides it. Use a cell with a W.")
    eigenvalues = tuple(-np.sort(-np.abs(np.linalg.eigvals(W))) for W in blocks)
    return Spectrum(tuple(names), eigenvalues, tuple(np.linalg.svd(W, compute_uv=False) for W in blocks))


def recurrences(e: Evaluation) -> Iterator[tuple[str, Recurrence]]:
    """The layers of a stack, with their places in words."""
    grid = getattr(getattr(e.network, "layers", None), "grid", None)
    if grid is None:
        raise Unsupported("the spectrum of W: that of a co.Network or a co.Stack.")
    for l, level in enumerate(grid):
        for layer, way in zip(level, ("", ", reverse"), strict=False):
            yield f", layer {l}{way}", layer


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
        far = 1.5 * np.nanmax(np.abs([measured[-1], fall[-1], bounds[0][-1]]))  # where the other bound is not followed
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
            "Bounds on the decay", about, "steps s before the end", "growth over s steps", drawn, True, alone=True
        )

    def figures(self) -> list[Figure]:
        rows = [
            Figure("bound by the entries of W", factor(self.by_entries), "× per step", "r sigma' max|W|: growth is at most this"),
            Figure("bound by the singular value", factor(self.by_singular_value), "× per step", "sigma' s_1(W): below 1 the past must vanish"),
            Figure("measured, Jacobian products", factor(self.rates[0]), "× per step", "never above the bounds"),
        ]  # fmt: skip
        if np.isfinite(self.rates[1]):
            rows.append(Figure("measured, costates", factor(self.rates[1]), "× per step", "never above the bounds"))
        return rows


def bounds(e: Evaluation, samples: int = 8) -> Bounds:
    """J_t = diag(sigma') W, so ||J_T ... J_{T-s+1}||_2 <= (sigma' s_1(W))^s <= (r sigma' max |W_ij|)^s; Jacobians of the first
    samples."""
    check_evaluation(e)
    check_samples(samples)
    net = elman(e, "bounds on the decay")
    recurrent, sigma = net.recurrent(), float(np.nanmax(slopes_of(e)))
    assert recurrent is not None
    W = numbers(recurrent)
    with np.errstate(divide="ignore"):
        by_entries = np.log(net.hidden * sigma * np.abs(W).max())
        by_singular_value = np.log(sigma * np.linalg.norm(W, 2))
    products = singular_values(e, samples)
    T, lengths = e.trajectory.layout.rows.T, e.trajectory.lengths.numpy()
    fall = np.full((T + 1, len(lengths)), np.nan)
    if not net.by_steps:
        logs = logs_of(e.costates)
        for j, n in enumerate(lengths):
            fall[: n + 1, j] = logs[n::-1, j] - logs[n, j]
    whole = float(np.mean(fall[lengths, np.arange(len(lengths))] / lengths))
    return Bounds(
        float(by_entries),
        float(by_singular_value),
        sigma,
        products.steps,
        products.logs[:, 0],
        mean(fall),
        (products.slope, whole),
    )


# units


def slopes_of(e: Evaluation) -> Array:
    """|dx / da| of each unit at each step, [T, B, units], NaN past a sample's end: the largest over slots and gates (v's own
    entries included)."""
    net, run = swept(e, "the slopes of units")
    cell, rows, tape, d = run.plan.cell, run.plan.rows, run.tape, net.hidden
    heard = len(cell.beside) - len(cell.given)
    op = derivatives.next_of(cell).pulled(("x",), ("a", "v") if heard else ("a",))
    out = torch.zeros(rows.N, d, dtype=run.x.dtype, device=run.x.device)
    with torch.no_grad():
        for slot in range(len(cell.slots)):
            bar = torch.zeros_like(run.x[rows.B :])
            bar[:, slot * d : (slot + 1) * d] = 1
            back = op((tape.x[rows.B :], tape.q), tape.a, tape.v, rows.prev(tape.x), tape.p, bar)
            for part in (back["a"], back.get("v")):
                if part is not None:
                    part = part if part is back["a"] else part[:, : heard * d]  # what is given is no argument
                    out = torch.maximum(out, part.unflatten(1, (-1, d)).abs().amax(1))
    return numbers(e.trajectory.layout.padded(out, math.nan))


def at_rest(net: Network) -> Array:
    """The same slope [units] of a state 0, at pre-activations 0 or 1, whichever is steeper."""
    cell, d = net.cell, net.hidden
    assert cell is not None
    p = {name: value.detach() for name, value in net.p.items()}
    x, steepest = net.x0.new_zeros(1, net.n), np.zeros(d)
    for a in (0.0, 1.0):
        arguments = [x.new_full((1, len(cell.gates) * d), a)]
        if cell.beside:
            arguments.append(x.new_full((1, len(cell.beside) * d), a))
        step = lambda base, side=None: cell.step(base, side, None, x, p)
        pull = torch.func.vjp(step, *arguments)[1]
        for slot in range(len(cell.slots)):
            bar = torch.zeros_like(x)
            bar[:, slot * d : (slot + 1) * d] = 1
            base, *side = pull(bar)
            parts = [base, *(y[:, : (len(cell.beside) - len(cell.given)) * d] for y in side)]
            steepest = np.maximum(steepest, np.abs(numbers(torch.cat(parts, 1))).reshape(-1, d).max(0))
    return steepest


@dataclass(frozen=True)
class Saturation:
    """share [T]: of the units of all samples at step t that are flat; units [d]: share of steps at which each unit is."""

    t: Array
    share: Array
    units: Array
    flat: float

    def chart(self) -> Chart:
        about = f"share of units whose slope is below {self.flat:g} of that at rest: they pass nothing on to the past"
        return Chart("Saturation", about, "time t", "share of units", (("saturated", self.t, self.share),), share=True)

    def figures(self) -> list[Figure]:
        return [
            Figure("saturated", 100 * float(self.units.mean()), "% of units and steps", "slope near 0: nothing passes"),
            Figure("units saturated at more than 95% of steps", float((self.units > 0.95).sum()), f"of {len(self.units)}", "they have stopped learning"),
        ]  # fmt: skip


def saturation(e: Evaluation, flat: float = 0.05) -> Saturation:
    """A unit is saturated at a step where no pre-activation moves it: where |dx/da|, the largest over its slots and gates, is
    below `flat` times what it is at rest (state 0, pre-activation 0 or 1, the steeper). For tanh: |h| > 0.975 with 0.05; for
    relu: the unit is off."""
    check_evaluation(e)
    if not isinstance(flat, int | float) or not 0 < flat < 1:
        raise InputError(f"flat is a share of the slope at rest, between 0 and 1; got {brief(flat)}.")
    slopes = slopes_of(e)
    there = ~np.isnan(slopes)
    net = one_layer(e, "saturation")
    flats = np.where(there, np.nan_to_num(slopes) < flat * at_rest(net), np.nan)
    return Saturation(np.arange(1, len(slopes) + 1), mean(flats.reshape(len(flats), -1)), mean(flats.reshape(-1, net.hidden), 0), flat)  # fmt: skip


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
            ("share of paths", self.steps, mean(finite(self.log_share)) / DECADE),
            ("by their weights", self.steps, mean(finite(self.log_weight)) / DECADE),
        )
        about = "paths from a unit s steps before the end to one at the end that meet no unit that is off: only they carry the gradient"
        return Chart("Enabled paths", about, "steps s before the end", "share of enabled paths", curves, True)

    def figures(self) -> list[Figure]:
        ends = [self.log_share[int(np.flatnonzero(~np.isnan(one))[-1]), j] for j, one in enumerate(self.log_share.T)]
        dead = 100 * float(np.isneginf(ends).mean())
        return [
            Figure("units that are on", 100 * float(np.nanmean(self.active)), "% of units and steps", "relu passes or blocks"),
            Figure("samples without an enabled path", dead, "%", "their gradient does not reach the beginning"),
        ]  # fmt: skip


def finite(values: Array) -> Array:
    return np.where(np.isfinite(values), values, np.nan)


def paths(e: Evaluation) -> Paths:
    """For cell "elman" with relu, whose slopes are 1 (on) or 0 (off): dx_T / dx_{T-s} is the sum over enabled paths of the
    products of their weights. A path is j_{T-s}, ..., j_T with W[j_t, j_{t-1}] != 0 at each step, and enabled if the units
    j_{T-s+1}, ..., j_T are on when it crosses them. NaN where there is no path at all."""
    check_evaluation(e)
    net = elman(e, "the view of paths")
    assert net.cell is not None
    if net.cell.next[0].op != "relu":
        raise Unsupported(
            "the view of paths: relu enables a path or blocks it, others weigh it. Use activation='relu'."
        )
    recurrent, run = net.recurrent(), e.trajectory
    assert recurrent is not None
    W, on, lengths, T = np.abs(numbers(recurrent)), numbers(run.x[1:]) > 0, run.lengths.numpy(), run.layout.rows.T
    counted = [logs_of_paths(A, on, lengths) for A in ((W > 0).astype(float), W)]
    active = np.where(np.arange(T)[:, None] < lengths, on.mean(2), np.nan)
    return Paths(np.arange(T + 1), counted[0], counted[1], active)


def logs_of_paths(A: Array, on: Array, lengths: Array) -> Array:
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
            every, enabled[at] = every / (top or 1), enabled[at] / np.where(tops > 0, tops, 1)[:, None]
            out[s, at] = size[at] + np.log(enabled[at].sum(1)) - whole - np.log(every.sum())
    return out


# outputs


@dataclass(frozen=True)
class Sensitivity:
    """log_norms [T, B]: log of the Frobenius norm of dy_hat / du_t, y_hat that of each sample's last step; NaN past its end."""

    t: Array
    log_norms: Array

    def chart(self) -> Chart:
        curves = (("mean over samples", self.t, mean(finite(self.log_norms)) / DECADE),)
        about = "how much the answer changes with what was read at step t"
        return Chart("Sensitivity of the output to each input", about, "time step t", "norm of dŷ / du at t", curves, True)  # fmt: skip

    def figures(self) -> list[Figure]:
        curve = mean(finite(self.log_norms))
        return [
            Figure("sensitivity, first input to last", float(curve[0] - curve[-1]) / DECADE, "decades", "below 0: the answer hears the end more than the beginning"),
            Figure("sensitivity, towards the past", factor(-line(self.t, curve)), "× per step", "1: every input counts alike"),
        ]  # fmt: skip


def sensitivity(e: Evaluation) -> Sensitivity:
    """One adjoint sweep for each output, its costates at any scale."""
    check_evaluation(e)
    net, run = one_layer(e, "the sensitivity of the output"), e.trajectory
    net.still("the sensitivity of the output")
    layout = run.layout
    total = np.full(layout.rows.N, -np.inf)
    for k in range(net.outputs):
        total = np.logaddexp(total, 2 * by_input(net, run, k))
    return Sensitivity(np.arange(1, layout.rows.T + 1), numbers(layout.padded(torch.from_numpy(total / 2), math.nan)))


def by_input(net: Network, run: Trajectory, k: int) -> Array:
    """log ||dy_hat_k / du_t||, step rows."""
    rows, last_step = run.layout.rows, run.layout.rows.index.last - run.layout.rows.B
    leaf = lambda y: y.detach().requires_grad_()
    x, last, u = leaf(run.run.x), leaf(run.run.last), leaf(run.inputs)
    with torch.enable_grad():
        y = output_function(net.output)(replace(run, inputs=u).read_out(x, last))
        y = y[torch.from_numpy(last_step).to(y.device)] if net.readout == "every" else y
        s, s_last, direct = torch.autograd.grad(y[:, k].sum(), [x, last, u], allow_unused=True)
    with torch.no_grad():
        found = run.run.costate(s, s_last, None)
        exponent, drive = found.exponent[rows.B :], found.drive()
        du = drive[0] if run.entering is None else entered(drive, run.entering)
        assert du is not None
        if direct is not None:
            du = du + torch.where(direct != 0, scale(direct, -exponent[:, None]), 0)
        return log_norms(du, exponent)


def entered(drive: tuple[Tensor | None, ...], entering: Any) -> Tensor | None:
    """From base and side to the inputs that made them; data that came with the steps stands behind in side."""
    total: Tensor | None = None
    for part, weights in zip(drive, entering, strict=False):
        if part is not None and weights is not None:
            R = weights[0].detach()
            total = derivatives.plus(total, part[:, : len(R)] @ R)
    return total


# the loss around a point


@dataclass(frozen=True)
class Noise:
    """spread: the trace of the covariance of single samples' gradients; signal: ||their mean||^2, without bias; scale: spread /
    signal, the batch at which noise and signal are equal; norms [B]: of single samples' gradients."""

    scale: float
    spread: float
    signal: float
    norms: Array

    def chart(self) -> Chart:
        share = 100 * (np.arange(len(self.norms)) + 1) / len(self.norms)
        about = "of single sequences, sorted; their mean is the gradient"
        curves = (("norm of a sample's gradient", share, np.sort(self.norms)),)
        rules = ((math.sqrt(max(self.signal, 0.0)), "norm of the mean"),)
        return Chart("Gradients of single samples", about, "% of samples", "norm of the gradient", curves, rules=rules)  # fmt: skip

    def figures(self) -> list[Figure]:
        says = "a batch of so many has as much noise as signal"
        return [Figure("gradient-noise scale", self.scale, "samples", says)]


def noise(e: Evaluation) -> Noise:
    """tr(covariance) / ||mean||^2 of the gradients of single samples' losses (weights of the batch included); inf where the mean
    cannot be told from zero.  McCandlish et al. (2018)"""
    check_evaluation(e)
    each = per_sample(e)
    g = np.concatenate([numbers(v.flatten(1)) for v in each.values()], 1)
    B = len(g)
    if B < 2:
        raise Unsupported("the gradient-noise scale: it needs at least two samples, and there is one.")
    middle = g.mean(0)
    spread = float(((g - middle) ** 2).sum() / (B - 1))
    signal = float(middle @ middle) - spread / B
    return Noise(spread / signal if signal > 0 else math.inf, spread, signal, np.linalg.norm(g, axis=1))


def asked(e: Evaluation) -> Any:
    if e.criterion is None:
        raise InputError("this evaluation does not know its loss: make it with a gradient method, co.BPTT()(net, batch, loss).")  # fmt: skip
    return e.criterion


def per_sample(e: Evaluation) -> Gradient:
    """The gradient of each sample's loss alone, [B, ...]."""
    return BPTT().per_sample(e.network, e.batch, asked(e))


def loss_at(e: Evaluation, theta: Mapping[str, Tensor]) -> float:
    """The mean loss of the batch with these weights; the network's own are not touched. NaN where numbers leave their range."""
    b, criterion = e.batch, asked(e)
    e.network.still("the loss at other weights")
    try:
        with torch.no_grad():
            run: Any = torch.func.functional_call(e.network, dict(theta), (b.u, b.lengths, b.x0))
            return float(b.mean(run.loss(criterion, b.y, mask=b.mask, reduce=b.reduce)))
    except NumericalError:
        return math.nan


@dataclass(frozen=True)
class Along:
    """loss [P] at theta - steps[p] g, g the evaluation's gradient; before: at theta; norm: ||g||."""

    steps: Array
    loss: Array
    before: float
    norm: float

    def chart(self) -> Chart:
        about = "the loss after one step of plain descent, by its step size"
        far = self.loss > self.before + 3 * abs(self.before)  # steps that are far too long
        curves = (("after the step", np.log10(self.steps[~far]), self.loss[~far]),)
        return Chart("Loss along the gradient", about, "log₁₀ of the step size", "loss", curves, rules=((self.before, "before the step"),))  # fmt: skip

    def figures(self) -> list[Figure]:
        better = np.flatnonzero(np.nan_to_num(self.loss, nan=np.inf) < self.before)
        best = self.steps[np.nanargmin(self.loss)] if len(better) else math.nan
        lowest = float(np.nanmin(self.loss)) if len(better) else math.nan
        return [
            Figure("norm of the gradient", self.norm, "", "of all parameters together"),
            Figure("best step size along the gradient", float(best), "", f"one step of plain descent: loss {self.before:.4g} to {lowest:.4g}" if len(better) else "no step size tried lowers the loss"),
        ]  # fmt: skip


def along(e: Evaluation, steps: Any = None) -> Along:
    """L(theta - s g) for step sizes s, by default 41 from 1e-4 to 10."""
    check_evaluation(e)
    try:
        chosen = np.logspace(-4, 1, 41) if steps is None else np.asarray(steps, float)
    except (TypeError, ValueError):
        raise InputError(f"step sizes are positive numbers; got {brief(steps)}.") from None
    if chosen.ndim != 1 or not len(chosen) or not (np.isfinite(chosen).all() and (chosen > 0).all()):
        raise InputError(f"step sizes are positive numbers; got {steps!r}.")
    theta = {name: p.detach() for name, p in trained(e.network).items()}
    moved = lambda s: {name: p - s * e.gradient[name] for name, p in theta.items()}
    loss = np.array([loss_at(e, moved(float(s))) for s in chosen])
    return Along(chosen, loss, loss_at(e, theta), e.norm)


@dataclass(frozen=True)
class Landscape:
    """loss [P, P] at theta + alpha[i] d + beta[j] d', of two random directions as long as the weights, row by row."""

    alpha: Array
    beta: Array
    loss: Array

    def chart(self) -> Chart:
        about = "over two random directions, each row of them as long as that row of the weights; the middle is where the network is"
        axes, cells, label = (("", self.alpha, self.beta),), self.loss, "loss"
        known = cells[np.isfinite(cells)]
        if len(known) and known.min() > 0 and known.max() > 1000 * known.min():
            cells, label = np.log10(cells), "log₁₀ of the loss"
        return Chart("Loss around the weights", about, "along the first direction", "along the second", axes, cells=cells, label=label, alone=True)  # fmt: skip

    def figures(self) -> list[Figure]:
        middle = self.loss[len(self.alpha) // 2, len(self.beta) // 2]
        lowest = 100 * float((self.loss < middle).mean())
        return [Figure("landscape, lower than here", lowest, "% of the grid", "0 at a minimum of these directions")]


def landscape(e: Evaluation, seed: int = 0, points: int = 21, reach: float = 1.0) -> Landscape:
    """A grid of points x points (odd, so that the middle is here), from -reach to reach: at 1, each row of a matrix has moved by
    its own norm (filter normalisation, Li et al. 2018; vectors are one row)."""
    check_evaluation(e)
    odd = isinstance(points, int) and 3 <= points <= MOST and points % 2 == 1
    if not odd or not isinstance(reach, int | float) or not 0 < reach < math.inf:
        words = f"an odd number of points, at least 3, and a positive reach; got {brief(points)}, {brief(reach)}"
        raise InputError(f"a landscape takes {words}.")
    generator = torch.Generator().manual_seed(check_seed(seed))
    theta = {name: p.detach() for name, p in trained(e.network).items()}
    d, d2 = ({name: normalised(p, generator) for name, p in theta.items()} for _ in range(2))
    at = np.linspace(-reach, reach, points)
    moved = lambda a, b: {name: p + a * d[name] + b * d2[name] for name, p in theta.items()}
    loss = np.array([[loss_at(e, moved(float(a), float(b))) for b in at] for a in at])
    return Landscape(at, at, loss)


def normalised(p: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian, each row scaled to the norm of p's own."""
    d = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
    rows = lambda y: y.flatten(1).norm(dim=1).reshape(-1, *[1] * (y.dim() - 1)) if y.dim() > 1 else y.norm()
    return d * (rows(p) / rows(d))


# all of them

DIAGNOSTICS: dict[str, Callable[[Evaluation], Found]] = {
    "temporal": temporal,
    "decay": decay,
    "singular-values": singular_values,
    "lyapunov": lyapunov,
    "spectrum": spectrum,
    "bounds": bounds,
    "saturation": saturation,
    "paths": paths,
    "sensitivity": sensitivity,
    "noise": noise,
    "along": along,
    "landscape": landscape,
}


@dataclass(frozen=True)
class Examination:
    """What was found, by name, and why others were declined."""

    found: dict[str, Found]
    declined: dict[str, str]

    def charts(self) -> dict[str, Chart]:
        return {name: one.chart() for name, one in self.found.items()}

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The main figures, for people: heads and rows."""
        every = [f for one in self.found.values() for f in one.figures()]
        return ["figure", "value", "unit", "what it says"], [[f.name, short(f.value), f.unit, f.says] for f in every]

    def arrays(self) -> dict[str, Array]:
        """Everything, by NAME.FIELD: dictionaries and tuples taken apart."""
        return {f"{name}.{key}": y for name, one in self.found.items() for key, y in arrays(one).items()}


@dataclass(frozen=True)
class Compared:
    """Examinations of several networks, side by side."""

    each: dict[str, Examination]

    @property
    def declined(self) -> dict[str, str]:
        told = {name: why for one in self.each.values() for name, why in one.declined.items()}
        alone = {k for one in self.each.values() for k, chart in one.charts().items() if chart.alone}
        return told | {
            kind: f"{kind}: its picture is of one network; the arrays of all are kept." for kind in sorted(alone)
        }

    def charts(self) -> dict[str, Chart]:
        """The first curve of each network's chart, in one; and the horizontal lines that they share."""
        out: dict[str, Chart] = {}
        every = {name: one.charts() for name, one in self.each.items()}
        for kind in DIAGNOSTICS:
            charts = {name: found[kind] for name, found in every.items() if kind in found}
            first = next(iter(charts.values()), None)
            if first is None or first.alone:
                continue
            title = f"{first.title}: {first.curves[0][0]}" if len(first.curves) > 1 else first.title
            rules = first.rules if len({c.rules for c in charts.values()}) == 1 else ()
            curves = tuple((name, *c.curves[0][1:]) for name, c in charts.items())
            out[kind] = replace(first, title=title, rules=rules, curves=curves)
        return out

    def table(self) -> tuple[list[str], list[list[str]]]:
        values: dict[tuple[str, str], dict[str, str]] = {}
        for name, one in self.each.items():
            for f in (f for found in one.found.values() for f in found.figures()):
                values.setdefault((f.name, f.unit), {})[name] = short(f.value)
        rows = [[what, *(found.get(name, "") for name in self.each), unit] for (what, unit), found in values.items()]
        return ["figure", *self.each, "unit"], rows

    def arrays(self) -> dict[str, Array]:
        return {f"{name}.{key}": y for name, one in self.each.items() for key, y in one.arrays().items()}


def short(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def examine(e: Evaluation, names: Iterable[str] | None = None) -> Examination:
    """All diagnostics, or those of `names`."""
    check_evaluation(e)
    found: dict[str, Found] = {}
    declined: dict[str, str] = {}
    if names is not None and (isinstance(names, str) or not isinstance(names, Iterable)):
        raise KindError(f"names must be a list of diagnostics; got {brief(names)}.")
    for name in DIAGNOSTICS if names is None else [choose("diagnostic", n, DIAGNOSTICS) for n in names]:
        try:
            found[name] = DIAGNOSTICS[name](e)
        except Unsupported as error:
            declined[name] = str(error)
    return Examination(found, declined)


def evaluate(net: Net, task: Task, samples: int = 100, seed: int = 0) -> Evaluation:
    """The plain gradient on held-out sequences, for an examination; of a finite set, sequences of medium length. Without dropout
    and noise: the network is left in eval mode."""
    check_net(net)
    check_kind("task", task, Task, "one of co.tasks")
    whole("samples", samples)
    split = task.splits[-1] if task.splits else "train"
    batches = list(task.held_out(split, seed, "diagnose", samples))
    most = max(len(b.sizes) for b in batches)
    full = [b for b in batches if len(b.sizes) == most]
    net.eval()
    return BPTT().evaluate(net, full[len(full) // 2].to(net.V.dtype, net.V.device), task.loss)


def arrays(found: Found) -> dict[str, Array]:
    """The fields as arrays by name: dictionaries and tuples taken apart, FIELD.KEY."""
    out: dict[str, Array] = {}
    for f in fields(found):  # type: ignore[arg-type]
        value = getattr(found, f.name)
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else None
        out |= {f.name: np.asarray(value)} if parts is None else {f"{f.name}.{k}": np.asarray(v) for k, v in parts}
    return out


def save(folder: str | Path, found: Examination | Compared, about: Mapping[str, Any] | None = None) -> None:
    """diagnostics.json (the figures, and what charts draw: `co.report.write(folder)` makes a page of it), diagnostics.npz (all
    arrays, without pickle) and, where matplotlib is installed, a PNG of each chart."""
    check_path("folder", folder)
    check_kind("what is saved", found, (Examination, Compared), "what co.diagnostics.examine has found")
    folder, charts = Path(folder), found.charts()
    with files.storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.sweep(folder)
    heads, rows = found.table()
    told = {
        "format": 1,
        "about": dict(about or {}),
        "table": {"heads": heads, "rows": rows},
        "declined": found.declined,
        "charts": [{"id": name, **asdict(chart)} for name, chart in charts.items()],
    }
    files.replace(folder / "diagnostics.json", runs.dumps(told, indent=1))
    with files.replacing(folder / "diagnostics.npz") as file:
        np.savez_compressed(file, **found.arrays())  # type: ignore[arg-type]
    with files.storing(folder):
        for name in DIAGNOSTICS:  # of an earlier look
            (folder / f"{name}.png").unlink(missing_ok=True)
    with contextlib.suppress(MissingError):
        for name, chart in charts.items():
            with files.replacing(folder / f"{name}.png") as file:
                plot(chart).savefig(file, format="png", dpi=120)


def plot(found: Found | Chart) -> Any:
    """A matplotlib figure of what a diagnostic has found, or of a chart."""
    if not isinstance(found, Chart) and not hasattr(found, "chart"):
        raise KindError(f"plot draws what a diagnostic has found, or a chart; got {brief(found)}.")
    return draw(found if isinstance(found, Chart) else found.chart())


__all__ = ["DIAGNOSTICS", "Chart", "Compared", "Examination", "Figure", "arrays", "evaluate", "examine", "jacobians", "plot", "save", *(f.__name__ for f in DIAGNOSTICS.values())]  # fmt: skip

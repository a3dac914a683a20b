"""The loss around the weights: gradient noise, the loss along the gradient and on a plane."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError, NumericalError, Unsupported, brief, check_seed, real, whole_number
from ..gradients.bptt import BPTT
from ..gradients.evaluation import Evaluation, Gradient
from ..gradients.method import trained_parameters
from ..networks.interface import run_function
from ..objectives.batch import Batch
from .charts import Array, Chart, Figure
from .finding import check_evaluation, to_numpy


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
    g = np.concatenate([to_numpy(v.flatten(1)) for v in each.values()], 1)
    B = len(g)
    if B < 2:
        raise Unsupported(
            "the gradient-noise scale: it needs at least two samples, and there is one."
        )
    middle = g.mean(0)
    spread = float(((g - middle) ** 2).sum() / (B - 1))
    signal = float(middle @ middle) - spread / B
    return Noise(
        spread / signal if signal > 0 else math.inf, spread, signal, np.linalg.norm(g, axis=1)
    )


def known_criterion(e: Evaluation) -> Any:
    if e.criterion is None:
        raise InputError("this evaluation does not know its loss: make it with a gradient method, co.BPTT()(net, batch, loss).")  # fmt: skip
    return e.criterion


def per_sample(e: Evaluation) -> Gradient:
    """The gradient of each sample's loss alone, [B, ...]."""
    return BPTT().per_sample(e.network, e.batch, known_criterion(e))


class BatchModule(nn.Module):
    """A network as a function of a batch, for torch.func.functional_call."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch) -> Any:
        return run_function(self.net)(batch)


def loss_at(e: Evaluation, theta: Mapping[str, Tensor]) -> float:
    """The mean loss of the batch with these weights; the network's own are not touched. NaN where numbers leave their range."""
    b, criterion = e.batch, known_criterion(e)
    e.network.refuse_if_random("the loss at other weights")
    try:
        with torch.no_grad():
            weights = {f"net.{name}": value for name, value in theta.items()}
            run: Any = torch.func.functional_call(BatchModule(e.network), weights, (b,))
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
    if (
        chosen.ndim != 1
        or not len(chosen)
        or not (np.isfinite(chosen).all() and (chosen > 0).all())
    ):
        raise InputError(f"step sizes are positive numbers; got {steps!r}.")
    theta = {name: p.detach() for name, p in trained_parameters(e.network).items()}
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
        return [
            Figure(
                "landscape, lower than here",
                lowest,
                "% of the grid",
                "0 at a minimum of these directions",
            )
        ]


def landscape(e: Evaluation, seed: int = 0, points: int = 21, reach: float = 1.0) -> Landscape:
    """A grid of points x points (odd, so that the middle is here), from -reach to reach: at 1, each row of a matrix has moved by
    its own norm (filter normalisation, Li et al. 2018; vectors are one row)."""
    check_evaluation(e)
    real("reach", reach, 0, above=True)
    if whole_number("points", points, 3) % 2 == 0:
        raise InputError(
            f"points must be odd, so that the middle of the landscape is here; got {points}."
        )
    generator = torch.Generator().manual_seed(check_seed(seed))
    theta = {name: p.detach() for name, p in trained_parameters(e.network).items()}
    d, d2 = (
        {name: normalised_direction(p, generator) for name, p in theta.items()} for _ in range(2)
    )
    at = np.linspace(-reach, reach, points)
    moved = lambda a, b: {name: p + a * d[name] + b * d2[name] for name, p in theta.items()}
    loss = np.array([[loss_at(e, moved(float(a), float(b))) for b in at] for a in at])
    return Landscape(at, at, loss)


def normalised_direction(p: Tensor, generator: torch.Generator) -> Tensor:
    """Gaussian, each row scaled to the norm of p's own."""
    d = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
    rows = lambda y: (
        y.flatten(1).norm(dim=1).reshape(-1, *[1] * (y.dim() - 1)) if y.dim() > 1 else y.norm()
    )
    return d * (rows(p) / rows(d))

"""The loss around the weights: gradient noise, the loss along the gradient and on a plane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import (
    InputError,
    NumericalError,
    Unsupported,
    brief,
    check_seed,
    real,
    whole_number,
)
from ..gradients.bptt import BPTT
from ..gradients.evaluation import Evaluation, Gradient
from ..gradients.method import trained_parameters
from ..networks.interface import Net, NetRun, run_function
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from .charts import Array, Chart, Figure
from .finding import check_evaluation, to_numpy


@dataclass(frozen=True)
class Noise:
    """The noise of the gradient from sample to sample.

    scale   spread / signal: the batch size at which noise and signal are equal
    spread  the trace of the covariance of single samples' gradients
    signal  ||their mean||^2, without bias
    norms   [B]: of single samples' gradients
    layers  for a chain, the scale of each layer's own parameters by the layer's number; layers
            without parameters are left out
    """

    scale: float
    spread: float
    signal: float
    norms: Array
    layers: dict[str, float] = field(default_factory=dict)

    def chart(self) -> Chart:
        """The sorted norms of single samples' gradients."""
        percent = 100 * (np.arange(len(self.norms)) + 1) / len(self.norms)
        norm_of_mean = math.sqrt(max(self.signal, 0.0))
        return Chart(
            title="Gradients of single samples",
            about="of single samples, sorted; their mean is the gradient",
            x="% of samples",
            y="norm of the gradient",
            curves=(("norm of a sample's gradient", percent, np.sort(self.norms)),),
            rules=((norm_of_mean, "norm of the mean"),),
        )

    def figures(self) -> list[Figure]:
        """The gradient-noise scale."""
        says = "a batch of this size has as much noise as signal"
        figures = [Figure("gradient-noise scale", self.scale, "samples", says)]
        if self.layers:
            noisiest = max(self.layers, key=lambda layer: self.layers[layer])
            says = f"layer {noisiest}; its gradient needs the largest batch"
            most = self.layers[noisiest]
            figures.append(Figure("gradient-noise scale, noisiest layer", most, "samples", says))
        return figures


def noise(e: Evaluation) -> Noise:
    """tr(covariance) / ||mean||^2 of the gradients of single samples' losses.

    A sample's loss includes its weight in the batch. The scale is inf where the mean cannot be told
    from zero. For a chain also by the parameters of each layer. McCandlish et al. (2018)
    """
    check_evaluation(e)
    by_parameter = per_sample(e)
    columns = {name: to_numpy(gradient.flatten(1)) for name, gradient in by_parameter.items()}
    g = np.concatenate(list(columns.values()), 1)  # [B, all parameters]
    if len(g) < 2:
        raise Unsupported("the gradient-noise scale needs at least two samples; got one.")
    spread, signal = spread_and_signal(g)
    layers: dict[str, float] = {}
    for i, names in names_by_layer(e.network).items():
        own = [columns[name] for name in names if name in columns]
        if own:
            layers[str(i)] = noise_scale(*spread_and_signal(np.concatenate(own, 1)))
    scale = noise_scale(spread, signal)
    return Noise(scale, spread, signal, np.linalg.norm(g, axis=1), layers)


def spread_and_signal(g: Array) -> tuple[float, float]:
    """The trace of the covariance and ||mean||^2, without bias, of the rows of g [B, n]."""
    B = len(g)
    mean = g.mean(0)
    spread = float(((g - mean) ** 2).sum() / (B - 1))
    # The mean of B samples is off by spread / B in square, on average: this removes the bias.
    return spread, float(mean @ mean) - spread / B


def noise_scale(spread: float, signal: float) -> float:
    """Spread / signal; inf where there is no signal."""
    return spread / signal if signal > 0 else math.inf


def names_by_layer(net: Net) -> dict[int, list[str]]:
    """The names of the parameters of each layer 1..L of a chain; empty for other networks."""
    chain = getattr(net, "as_chain", None)
    if chain is None:
        return {}
    return {i: list(names.values()) for i, names in enumerate(chain.parameter_names(), start=1)}


def known_criterion(e: Evaluation) -> LossLike:
    """The loss that the evaluation was made with; refused where it was not kept."""
    if e.criterion is None:
        raise InputError(
            "this evaluation does not know its loss: make it with a gradient method, "
            "co.BPTT()(net, batch, loss)."
        )
    return e.criterion


def per_sample(e: Evaluation) -> Gradient:
    """The gradient of each sample's loss alone, [B, ...] by parameter."""
    return BPTT().per_sample(e.network, e.batch, known_criterion(e))


class BatchModule(nn.Module):
    """A network as a function of a batch, for torch.func.functional_call."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch) -> NetRun:
        """The network's run over the batch."""
        return run_function(self.net)(batch)


def loss_at(e: Evaluation, theta: Mapping[str, Tensor]) -> float:
    """The mean loss of the batch with the weights theta; the network's own are not touched.

    NaN where numbers overflow.
    """
    batch = e.batch
    criterion = known_criterion(e)
    e.network.refuse_if_random("the loss at other weights")
    weights = {f"net.{name}": value for name, value in theta.items()}
    try:
        with torch.no_grad():
            run: NetRun = torch.func.functional_call(BatchModule(e.network), weights, (batch,))
            losses = run.loss(criterion, batch.y, mask=batch.mask, reduce=batch.reduce)
            return float(batch.mean(losses))
    except NumericalError:
        return math.nan


@dataclass(frozen=True)
class Along:
    """The loss along the gradient g.

    steps   [P]: step sizes
    loss    [P]: at theta - steps[p] g
    before  at theta
    norm    ||g||
    """

    steps: Array
    loss: Array
    before: float
    norm: float

    def chart(self) -> Chart:
        """The loss over the step size, without steps that are far too long."""
        # Losses above four times that before would set the scale of the chart. NaN stays.
        near = ~(self.loss > self.before + 3 * abs(self.before))
        return Chart(
            title="Loss along the gradient",
            about="the loss after one step of plain descent, by its step size",
            x="log₁₀ of the step size",
            y="loss",
            curves=(("after the step", np.log10(self.steps[near]), self.loss[near]),),
            rules=((self.before, "before the step"),),
        )

    def figures(self) -> list[Figure]:
        """The norm of the gradient, and the step size that lowers the loss most."""
        best = math.nan
        says = "no step size tried lowers the loss"
        if (np.nan_to_num(self.loss, nan=np.inf) < self.before).any():
            best = float(self.steps[np.nanargmin(self.loss)])
            lowest = float(np.nanmin(self.loss))
            says = f"one step of plain descent: loss {self.before:.4g} to {lowest:.4g}"
        return [
            Figure("norm of the gradient", self.norm, "", "of all parameters together"),
            Figure("best step size along the gradient", best, "", says),
        ]


def along(e: Evaluation, steps: Sequence[float] | Array | None = None) -> Along:
    """L(theta - s g) for step sizes s, by default 41 from 1e-4 to 10."""
    check_evaluation(e)
    try:
        sizes = np.logspace(-4, 1, 41) if steps is None else np.asarray(steps, float)
    except (TypeError, ValueError):
        raise InputError(f"step sizes are positive numbers; got {brief(steps)}.") from None
    are_positive = np.isfinite(sizes).all() and (sizes > 0).all()
    if sizes.ndim != 1 or not len(sizes) or not are_positive:
        raise InputError(f"step sizes are positive numbers; got {steps!r}.")
    theta = {name: p.detach() for name, p in trained_parameters(e.network).items()}
    loss = []
    for s in map(float, sizes):
        moved = {name: p - s * e.gradient[name] for name, p in theta.items()}
        loss.append(loss_at(e, moved))
    return Along(sizes, np.array(loss), loss_at(e, theta), e.norm)


@dataclass(frozen=True)
class Landscape:
    """The loss on a plane through the weights theta.

    alpha, beta  [P]: the coordinates
    loss         [P, P]: at theta + alpha[i] d + beta[j] d', of two random directions whose rows are
                 as long as those of the weights
    """

    alpha: Array
    beta: Array
    loss: Array

    def chart(self) -> Chart:
        """A map of the loss, of its logarithm where it spans more than three decades."""
        cells = self.loss
        label = "loss"
        known = cells[np.isfinite(cells)]
        if len(known) and known.min() > 0 and known.max() > 1000 * known.min():
            cells = np.log10(cells)
            label = "log₁₀ of the loss"
        return Chart(
            title="Loss around the weights",
            about=(
                "along two random directions, each row scaled to the norm of that row of the "
                "weights; the network is at the centre"
            ),
            x="along the first direction",
            y="along the second",
            curves=(("", self.alpha, self.beta),),
            cells=cells,
            label=label,
            alone=True,
        )

    def figures(self) -> list[Figure]:
        """The share of the grid where the loss is lower than at the network's weights."""
        middle = self.loss[len(self.alpha) // 2, len(self.beta) // 2]
        lower = 100 * float((self.loss < middle).mean())
        says = "0 at a minimum along these directions"
        return [Figure("landscape, lower than here", lower, "% of the grid", says)]


def landscape(
    e: Evaluation,
    seed: int = 0,
    points: int = 21,
    reach: float = 1.0,
    layer: int | None = None,
) -> Landscape:
    """The loss on a grid of points x points, from -reach to reach, around the weights.

    points  an odd number, so that the middle is where the network is
    reach   at 1, each row of a matrix has moved by its own norm (filter normalisation,
            Li et al. 2018; vectors are one row)
    layer   of a chain, 1..L: only its parameters move; None for those of all layers
    """
    check_evaluation(e)
    real("reach", reach, 0, above=True)
    if whole_number("points", points, 3) % 2 == 0:
        raise InputError(
            f"points must be odd, so that the network is at the centre of the grid; got {points}."
        )
    generator = torch.Generator().manual_seed(check_seed(seed))
    theta = {name: p.detach() for name, p in trained_parameters(e.network).items()}
    moving = {name: theta[name] for name in moving_names(e.network, list(theta), layer)}
    first = {name: normalised_direction(p, generator) for name, p in moving.items()}
    second = {name: normalised_direction(p, generator) for name, p in moving.items()}
    grid = np.linspace(-reach, reach, points)
    loss = np.empty((points, points))
    for i, a in enumerate(map(float, grid)):
        for j, b in enumerate(map(float, grid)):
            moved = {n: p + a * first[n] + b * second[n] for n, p in moving.items()}
            loss[i, j] = loss_at(e, theta | moved)
    return Landscape(grid, grid, loss)


def moving_names(net: Net, names: list[str], layer: object) -> list[str]:
    """The names of the parameters that move: those of one layer of a chain, or all."""
    if layer is None:
        return names
    layers = names_by_layer(net)
    if not layers:
        raise InputError(f"layer is one of a co.Chain; got {brief(layer)} for another network.")
    is_whole = isinstance(layer, int) and not isinstance(layer, bool)
    if not is_whole or layer not in layers:
        raise InputError(f"layer must lie in 1..{len(layers)}; got {brief(layer)}.")
    assert isinstance(layer, int)
    chosen = [name for name in names if name in layers[layer]]
    if not chosen:
        raise InputError(f"layer {layer} has no parameters that are trained: choose another.")
    return chosen


def normalised_direction(p: Tensor, generator: torch.Generator) -> Tensor:
    """A Gaussian direction, each row scaled to the norm of that row of p."""
    d = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)
    return d * (row_norms(p) / row_norms(d))


def row_norms(y: Tensor) -> Tensor:
    """The norm of each row y[i], [n, 1, ...]; a vector is one row, so its norm is a scalar."""
    if y.dim() <= 1:
        norm: Tensor = y.norm()
        return norm
    norms: Tensor = y.flatten(1).norm(dim=1)
    return norms.reshape(-1, *[1] * (y.dim() - 1))

"""Attribution: which entries of the input an output comes from.

    gradient x input       (u - u') * dq/du                                 at u
    integrated gradients   (u - u') * integral over s in 0..1 of dq/du      at u' + s (u - u')

for an output q of the network, such as the log-odds of a class, and a baseline u' of its inputs.
dq/du_t comes from the costates of q, lam_t = dq/dx_t, carried from the states to the inputs by the
library's own backward sweep. The integral is a sum over Gauss-Legendre nodes; integrated
gradients are complete: their sum is q(u) - q(u') but for the error of that sum, the gap.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, NumericalError, Unsupported, choose
from ..networks.interface import Net, NetRun
from ..objectives.batch import Batch

METHODS = ("integrated-gradients", "gradient-x-input")
QUANTITIES = ("log-odds", "probability", "logit")  # of a class
NODES = 16  # of one Gauss-Legendre rule, exact for polynomials of degree 31
MOST_NODES = 1024
ENTRIES_AT_ONCE = 1 << 21  # of the inputs that run at the same time


class Goal(NamedTuple):
    """The output q that is explained, one number for each sample.

    quantity  one of QUANTITIES, or "value": scale a_k + offset, a number in the target's units
    output    its number k [B]; for classes it may differ from sample to sample
    step      [B], the step whose output it is, for networks with one at every step; None otherwise
    """

    quantity: str
    output: Tensor
    step: Tensor | None = None
    scale: float = 1.0
    offset: float = 0.0

    def repeat(self, times: int) -> Goal:
        """The goal of a batch that holds the samples `times` times, one copy after the other."""
        step = None if self.step is None else self.step.repeat(times)
        return self._replace(output=self.output.repeat(times), step=step)

    def select(self, index: Tensor) -> Goal:
        """The goal of some of the samples."""
        step = None if self.step is None else self.step[index]
        return self._replace(output=self.output[index], step=step)

    def of(self, a: Tensor) -> Tensor:
        """q [B] of the pre-outputs a, [B, outputs] or [T, B, outputs]."""
        a = at_steps(a, self.step)
        chosen = a.gather(1, self.output[:, None])[:, 0]
        if self.quantity == "logit":
            return chosen
        if self.quantity == "value":
            return chosen * self.scale + self.offset
        log_total = a.logsumexp(1)
        if self.quantity == "probability":
            return (chosen - log_total).exp()
        others = a.scatter(1, self.output[:, None], -torch.inf)
        return chosen - others.logsumexp(1)


def at_steps(a: Tensor, step: Tensor | None) -> Tensor:
    """The pre-outputs [B, outputs] at one step of each sample; a: [T, B, outputs] if there are."""
    if step is None:
        return a.flatten(1)
    return a[step, torch.arange(a.shape[1], device=a.device)]


@dataclass(frozen=True, eq=False)
class Attribution:
    """What the outputs q of B samples come from.

    entries   [T, B, inputs] or [B, ...], as the inputs: how much of q each of them accounts for
    value     [B] q at the input;  baseline [B] q at the baseline
    nodes     [B] the number of points on the way between them at which gradients were taken
    costates  [T + 1, B], or by layer [L + 1, B]: log10 of ||dq/dx_t|| at the input, NaN where a
              sample has no such step and -inf where the costate is zero
    """

    entries: Tensor
    value: Tensor
    baseline: Tensor
    nodes: Tensor
    costates: Tensor
    sample_axis: int

    @property
    def total(self) -> Tensor:
        """The sum of each sample's attributions, [B]."""
        return sum_entries(self.entries, self.sample_axis)

    @property
    def gap(self) -> Tensor:
        """The sum of the attributions less q(u) - q(u'), [B]: zero where they are complete."""
        return self.total - (self.value - self.baseline)

    @property
    def relative_gap(self) -> Tensor:
        """|gap| by the sum of the attributions' sizes, [B]; 0 if there is nothing to explain."""
        return relative_gap(self.gap, self.entries, self.value - self.baseline, self.sample_axis)


def sum_entries(values: Tensor, sample_axis: int) -> Tensor:
    """The sum of the entries of each sample, [B]."""
    return values.movedim(sample_axis, 0).flatten(1).sum(1)


def relative_gap(gap: Tensor, entries: Tensor, change: Tensor, sample_axis: int) -> Tensor:
    """|gap| by the larger of the sum of |entries| and |change|, the change of q: [B]."""
    size = torch.maximum(sum_entries(entries.abs(), sample_axis), change.abs())
    return torch.where(gap == 0, 0, gap.abs() / torch.where(size == 0, 1, size))


class Differentiator:
    """Values and gradients of outputs of one network, in float64 and without dropout."""

    def __init__(self, net: Net) -> None:
        """net: is copied. Networks that write sequences of their own length are refused."""
        if net.readout == "sequence":
            raise Unsupported(
                "an encoder and decoder writes a sequence of its own length, whose parts have no "
                "attributions here. Explain a network with one output for each sequence or step."
            )
        self.net = copy.deepcopy(net).double().eval().requires_grad_(False)

    def read(self, batch: Batch) -> Batch:
        """The batch in float64, on the device of the network."""
        return self.net.move_batch(batch)

    def pre_outputs(self, batch: Batch) -> Tensor:
        """The pre-outputs a of a batch."""
        with torch.no_grad():
            return self.net.run(batch).a

    def value(self, batch: Batch, goal: Goal) -> Tensor:
        """q [B]."""
        return goal.of(self.pre_outputs(batch))

    def run(self, batch: Batch, goal: Goal) -> tuple[Tensor, NetRun, Tensor]:
        """q [B], the run it comes from, and dq/du, shaped like u."""
        u = batch.u.detach().requires_grad_()
        with torch.enable_grad():
            run = self.net.run(replace(batch, u=u))
            value = goal.of(run.a)
            (gradient,) = torch.autograd.grad(value.sum(), u, retain_graph=True)
        if not torch.isfinite(gradient).all():
            raise NumericalError("the gradient of the output by the inputs is not finite.")
        return value, run, gradient


def log_costates(run: NetRun, value: Tensor) -> Tensor:
    """log10 ||dq/dx_t|| [T + 1, B] of a run, of its layers that read forwards; NaN past its end."""
    lam = run.costates(value).forwards().detach()
    logs = lam.log_norms() / np.log(10)
    return torch.where(lam.mask, logs, torch.nan)


def attribute(
    differentiator: Differentiator,
    batch: Batch,
    baseline: Tensor,
    goal: Goal,
    method: str = "integrated-gradients",
    tolerance: float = 1e-4,
) -> Attribution:
    """Attribute the outputs of a batch to its inputs.

    Integrated gradients take 16 points, and twice as many for those samples whose relative gap is
    above the tolerance, up to 1024.

    Args:
        differentiator: Of the network.
        batch: The samples, padded; no packed sequences.
        baseline: The inputs u' at which attributions begin, shaped like the batch's.
        goal: The outputs to explain.
        method: One of METHODS.
        tolerance: The largest relative gap that needs no more points.
    """
    choose("method", method, METHODS)
    axis = differentiator.net.sample_axis
    batch = differentiator.read(batch)
    u = batch.u
    if baseline.shape != u.shape:
        raise InputError(
            f"the baseline has shape {list(baseline.shape)}; expected that of the inputs, "
            f"{list(u.shape)}."
        )
    baseline = baseline.to(u)
    value, run, gradient = differentiator.run(batch, goal)
    costates = log_costates(run, value)
    value = value.detach()
    start = differentiator.value(replace(batch, u=baseline), goal)
    count = torch.ones(len(value), dtype=torch.long)
    if method == "gradient-x-input":
        entries = (u - baseline) * gradient
        return Attribution(entries, value, start, count, costates, axis)
    entries = torch.zeros_like(u)
    open_samples = torch.arange(len(value), device=u.device)
    nodes = NODES
    while len(open_samples) and nodes <= MOST_NODES:
        part = select_samples(batch, open_samples, axis)
        begin = baseline.index_select(axis, open_samples)
        mean = mean_gradient(differentiator, part, begin, goal.select(open_samples), nodes)
        found = (part.u - begin) * mean
        entries.index_copy_(axis, open_samples, found)
        count[open_samples.cpu()] = nodes
        change = (value - start)[open_samples]
        gap = sum_entries(found, axis) - change
        open_samples = open_samples[relative_gap(gap, found, change, axis) > tolerance]
        nodes *= 2
    return Attribution(entries, value, start, count, costates, axis)


def select_samples(batch: Batch, index: Tensor, axis: int) -> Batch:
    """Some samples of a batch, as long as it was."""
    lengths = batch.lengths
    if lengths is not None:
        lengths = torch.as_tensor(lengths)[index.cpu()]
    return replace(batch, u=batch.u.index_select(axis, index), lengths=lengths)


def mean_gradient(
    differentiator: Differentiator, batch: Batch, baseline: Tensor, goal: Goal, nodes: int
) -> Tensor:
    """The integral of dq/du over the straight way from the baseline to the batch's inputs.

    Several points of the way run at the same time, as samples of one batch.
    """
    axis = differentiator.net.sample_axis
    u = batch.u
    places, weights = gauss_legendre(nodes)
    at_once = max(1, ENTRIES_AT_ONCE // max(1, u.numel()))
    total = torch.zeros_like(u)
    for begin in range(0, nodes, at_once):
        chosen = slice(begin, begin + at_once)
        points = [baseline + place * (u - baseline) for place in places[chosen]]
        lengths = batch.lengths
        if lengths is not None:
            lengths = torch.as_tensor(lengths).repeat(len(points))
        many = replace(batch, u=torch.cat(points, axis), lengths=lengths)
        _, _, gradient = differentiator.run(many, goal.repeat(len(points)))
        for part, weight in zip(gradient.chunk(len(points), axis), weights[chosen], strict=True):
            total += weight * part
    return total


def gauss_legendre(nodes: int) -> tuple[Sequence[float], Sequence[float]]:
    """Places and weights of an integral over 0..1: the rule of NODES in equal panels."""
    panels = nodes // NODES
    places, weights = np.polynomial.legendre.leggauss(NODES)
    within = (places + 1) / 2
    all_places = (np.arange(panels)[:, None] + within) / panels
    all_weights = np.tile(weights / 2 / panels, panels)
    return all_places.reshape(-1).tolist(), all_weights.tolist()

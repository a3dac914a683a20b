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
import math
from collections.abc import Iterable, Iterator
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
NODES = 4  # of a Gauss-Legendre rule, exact for polynomials of degree 7
FIRST_PANELS = 4  # of each way
GAUSS = np.polynomial.legendre.leggauss(NODES)  # places and weights on -1..1
MOST_NODES = 4096  # points of one sample after which panels are no longer halved
LEAST_WIDTH = 2.0**-40  # of a panel
GAP_SHARE = 1 / 64  # of the tolerance, that one panel may take
ENTRIES_AT_ONCE = 1 << 23  # of inputs or states that are computed at the same time


class Quantity(NamedTuple):
    """The output q that is explained, one number for each sample.

    kind      one of QUANTITIES, or "value": scale a_k + offset, a number in the target's units
    output    its number k [B]; for classes it may differ from sample to sample
    step      [B], the step whose output it is, for networks with one at every step; None otherwise
    """

    kind: str
    output: Tensor
    step: Tensor | None = None
    scale: float = 1.0
    offset: float = 0.0

    def select(self, index: Tensor) -> Quantity:
        """The quantity of some of the samples."""
        step = None if self.step is None else self.step[index]
        return self._replace(output=self.output[index], step=step)

    def of(self, a: Tensor) -> Tensor:
        """The output q [B] of the pre-outputs a, [B, outputs] or [T, B, outputs]."""
        a = at_steps(a, self.step)
        chosen = a.gather(1, self.output[:, None])[:, 0]
        if self.kind == "logit":
            return chosen
        if self.kind == "value":
            return chosen * self.scale + self.offset
        log_total = a.logsumexp(1)
        if self.kind == "probability":
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
            return self.net.run(cut_to_longest(batch)).a

    def value(self, batch: Batch, quantity: Quantity) -> Tensor:
        """The output q, [B]."""
        return quantity.of(self.pre_outputs(batch))

    def run(self, batch: Batch, quantity: Quantity) -> tuple[Tensor, NetRun, Tensor]:
        """The output q [B], the run it comes from, and dq/du, shaped like u."""
        u = batch.u.detach().requires_grad_()
        with torch.enable_grad():
            run = self.net.run(cut_to_longest(replace(batch, u=u)))
            value = quantity.of(run.a)
            (gradient,) = torch.autograd.grad(value.sum(), u, retain_graph=True)
        if not torch.isfinite(gradient).all():
            raise NumericalError("the gradient of the output by the inputs is not finite.")
        return value, run, gradient


def cut_to_longest(batch: Batch) -> Batch:
    """The batch without steps past the end of its longest sequence; some may have been chosen."""
    if batch.lengths is None or batch.axis == 0:
        return batch
    return replace(batch, u=batch.u[: int(batch.sizes.max())])


def log_costates(run: NetRun, value: Tensor) -> Tensor:
    """log10 ||dq/dx_t|| [T + 1, B] of a run, of its layers that read forwards; NaN past its end."""
    # Values [B] are taken in place of a loss.
    lam = run.costates(value).forwards().detach()  # type: ignore[arg-type]
    logs = lam.log_norms() / np.log(10)
    return torch.where(lam.mask, logs, torch.nan)


def attribute(
    differentiator: Differentiator,
    batch: Batch,
    baseline: Tensor,
    quantity: Quantity,
    method: str = "integrated-gradients",
    tolerance: float = 1e-4,
) -> Attribution:
    """Attribute the outputs of a batch to its inputs.

    Integrated gradients take 16 points for each sample, and more where the gap is above the
    tolerance: see `integrate`.

    Args:
        differentiator: Of the network.
        batch: The samples, padded; no packed sequences.
        baseline: The inputs u' at which attributions begin, shaped like the batch's.
        quantity: The outputs to explain.
        method: One of METHODS.
        tolerance: The relative gap to reach.
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
    value, run, gradient = differentiator.run(batch, quantity)
    costates = log_costates(run, value)
    value = value.detach()
    start = differentiator.value(replace(batch, u=baseline), quantity)
    count = torch.ones(len(value), dtype=torch.long)
    if method == "gradient-x-input":
        entries = (u - baseline) * gradient
        return Attribution(entries, value, start, count, costates, axis)
    entries, count = integrate(differentiator, batch, baseline, quantity, (start, value), tolerance)
    return Attribution(entries, value, start, count, costates, axis)


def select_samples(batch: Batch, index: Tensor, axis: int) -> Batch:
    """Some samples of a batch, as long as it was."""
    lengths = batch.lengths
    if lengths is not None:
        lengths = torch.as_tensor(lengths)[index.cpu()]
    return replace(batch, u=batch.u.index_select(axis, index), lengths=lengths)


class Panels(NamedTuple):
    """Parts of the straight ways from baselines to inputs, K of them.

    sample       [K] the number of the sample whose way it is
    left, right  [K] where on the way, 0 <= left < right <= 1;  begin, end: q there
    """

    sample: Tensor
    left: Tensor
    right: Tensor
    begin: Tensor
    end: Tensor

    def select(self, index: Tensor | slice) -> Panels:
        """Some of the panels, by number or by [K] booleans."""
        return Panels(*(values[index] for values in self))

    def places(self) -> Tensor:
        """The nodes of all panels, [K, NODES]."""
        within = torch.as_tensor((GAUSS[0] + 1) / 2).to(self.left)
        return self.left[:, None] + (self.right - self.left)[:, None] * within


def entries_of_sample(net: Net, u: Tensor) -> int:
    """About how many numbers a run of the network holds for one sample of u, for each array.

    Those of the inputs, or of what matrices compute at each step or pixel, whichever are more.
    """
    sample_shape = list(u.shape)
    samples = sample_shape.pop(net.sample_axis)
    inputs = u.numel() // max(1, samples)
    # A step of a sequence [T, inputs], or a pixel of an image [channels, ...].
    places = sample_shape[0] if net.sample_axis == 1 else math.prod(sample_shape[1:])
    computed = sum(p.shape[0] for p in net.parameters() if p.dim() >= 2)
    return max(1, inputs, places * computed)


class Way:
    """The straight ways from the baselines of some samples to their inputs."""

    def __init__(
        self, differentiator: Differentiator, batch: Batch, baseline: Tensor, quantity: Quantity
    ) -> None:
        """batch: of the inputs, in float64; baseline: shaped like them; quantity: what q is."""
        self.differentiator = differentiator
        self.batch = batch
        self.axis = differentiator.net.sample_axis
        self.baseline = baseline
        self.change = batch.u - baseline
        self.quantity = quantity
        entries = entries_of_sample(differentiator.net, batch.u)
        self.panels_at_once = max(1, ENTRIES_AT_ONCE // entries // NODES)

    def points(self, sample: Tensor, place: Tensor) -> tuple[Batch, Quantity]:
        """The inputs at places [P] on the ways of samples [P], and the quantity there."""
        chosen = select_samples(self.batch, sample, self.axis)
        change = self.change.index_select(self.axis, sample)
        shape = [1] * change.dim()
        shape[self.axis] = -1
        u = self.baseline.index_select(self.axis, sample) + place.reshape(shape) * change
        return replace(chosen, u=u), self.quantity.select(sample)

    def value(self, sample: Tensor, place: Tensor) -> Tensor:
        """The output q [P] at places [P] on the ways of samples [P]."""
        many = self.panels_at_once * NODES
        parts = []
        for some, where in zip(sample.split(many), place.split(many), strict=True):
            parts.append(self.differentiator.value(*self.points(some, where)))
        return torch.cat(parts)

    def results(self, panels: Panels) -> Iterator[tuple[Panels, Tensor]]:
        """Yield some panels after the other, and their `integrals`."""
        for first in range(0, len(panels.sample), self.panels_at_once):
            some = panels.select(slice(first, first + self.panels_at_once))
            yield some, self.integrals(some)

    def integrals(self, panels: Panels) -> Tensor:
        """The integrals of dq/du over panels times the change of the inputs, [K, ...]."""
        sample = panels.sample.repeat_interleave(NODES)
        _, _, gradient = self.differentiator.run(*self.points(sample, panels.places().reshape(-1)))
        by_node = gradient.movedim(self.axis, 0).unflatten(0, (-1, NODES))
        weights = torch.as_tensor(GAUSS[1] / 2).to(gradient)
        means = torch.einsum("kn...,n->k...", by_node, weights)
        width = (panels.right - panels.left).reshape(-1, *(1,) * (means.dim() - 1))
        change = self.change.movedim(self.axis, 0)[panels.sample]
        integrals: Tensor = means * width * change
        return integrals


def integrate(
    differentiator: Differentiator,
    batch: Batch,
    baseline: Tensor,
    quantity: Quantity,
    ends: tuple[Tensor, Tensor],
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Integrated gradients, shaped like the inputs, and the points they took, [B].

    Each way begins as four panels with the Gauss-Legendre rule of NODES points. What a panel's
    attributions add up to is known, the change of q along it. So panels with a gap, such as those
    in which a relu turns on, are halved until each gap is small beside the tolerance.

    Args:
        differentiator: Of the network.
        batch: The samples, in float64.
        baseline: The inputs u', shaped like the batch's.
        quantity: The outputs to explain.
        ends: q [B] at the baselines and at the inputs.
        tolerance: The relative gap to reach.
    """
    way = Way(differentiator, batch, baseline, quantity)
    start, value = ends
    panels = first_panels(way, start, value)
    total = torch.zeros_like(batch.u).movedim(way.axis, 0)
    count = torch.zeros(len(value), dtype=torch.long, device=value.device)
    results: Iterable[tuple[Panels, Tensor]] = list(way.results(panels))
    size = size_of_attributions(results, total, value - start)
    while True:
        unfinished = []
        for some, found in results:
            gap = found.flatten(1).sum(1) - (some.end - some.begin)
            count.index_add_(0, some.sample, torch.full_like(some.sample, NODES))
            is_open = gap.abs() > tolerance * GAP_SHARE * size[some.sample]
            is_open &= count[some.sample] < MOST_NODES
            is_open &= some.right - some.left > LEAST_WIDTH
            total.index_add_(0, some.sample[~is_open], found[~is_open])
            if is_open.any():
                unfinished.append(halve(way, some.select(is_open)))
        if not unfinished:
            return total.movedim(0, way.axis), count.cpu()
        results = way.results(Panels(*map(torch.cat, zip(*unfinished, strict=True))))


def first_panels(way: Way, start: Tensor, value: Tensor) -> Panels:
    """Equal panels of all ways; start, value: q [B] at their ends."""
    B = len(value)
    every = torch.arange(B, device=value.device)
    places = torch.linspace(0, 1, FIRST_PANELS + 1, dtype=value.dtype, device=value.device)
    inner = way.value(every.repeat(FIRST_PANELS - 1), places[1:-1].repeat_interleave(B))
    known = torch.cat([start, inner, value])
    edges = places.repeat_interleave(B)
    return Panels(every.repeat(FIRST_PANELS), edges[:-B], edges[B:], known[:-B], known[B:])


def size_of_attributions(
    results: Iterable[tuple[Panels, Tensor]], like: Tensor, change: Tensor
) -> Tensor:
    """The size [B] beside which gaps are judged: the sum of |attributions|, as first estimated.

    It is at least |change|, the change of q from the baseline to the input.

    Args:
        results: The panels of the whole ways, and their attributions.
        like: A tensor of the attributions' shape, samples first.
        change: [B].
    """
    total = torch.zeros_like(like)
    for some, found in results:
        total.index_add_(0, some.sample, found)
    return torch.maximum(total.abs().flatten(1).sum(1), change.abs())


def halve(way: Way, panels: Panels) -> Panels:
    """The two halves of each panel."""
    middle = (panels.left + panels.right) / 2
    value = way.value(panels.sample, middle)
    first = panels._replace(right=middle, end=value)
    second = panels._replace(left=middle, begin=value)
    return Panels(*map(torch.cat, zip(first, second, strict=True)))

"""JudgedCollection: how the outputs for your own data are judged."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..objectives.batch import Batch
from ..objectives.losses import pinball
from .ahead import ahead_of
from .baselines import Baseline, find_baselines
from .description import ColumnNames, Description
from .metrics import ClassTally, NumberTally, Tally, choose_metrics, metrics_of
from .symbol_baselines import count_baselines
from .task import Collection, Samples, Scores, Sequences, count_right, pairs_of_text

SCORED = ("accuracy", "mse", "mae")  # the metrics that are means over entries, by `score`


class JudgedCollection(Collection):
    """A finite set with a description of its data, which says what outputs mean.

    metrics  the names of the metrics to report, of those in `metrics`
    noise    the standard deviation of noise on inputs that are to be reconstructed
    uncut    the training sequences before they were cut into chunks; None if they are whole
    """

    noise: float = 0.0
    uncut: Sequences | None = None

    def __init__(
        self,
        sets: Mapping[str, Sequences | Samples],
        description: Description,
        metrics: ColumnNames = None,
    ) -> None:
        self.description = description
        self.outputs = description.outputs
        if description.kind == "classify":
            self.output = "softmax"
            self.loss = "cross-entropy"
            self.metric = "accuracy"
            self.lower = False
            if description.symbols:
                self.metric = f"bits-per-{description.symbols}"
                self.lower = True
        else:
            self.output = "identity"
            self.loss = "squared"
            self.metric = "mse"
            self.lower = True
        levels = description.ahead.get("quantiles", ())
        if levels:
            self.loss = pinball(levels)
        self.metrics = choose_metrics(metrics, bool(description.labels), description.symbols)
        super().__init__(sets)

    @property
    def selectors(self) -> dict[str, bool]:
        """The metrics that may choose the best weights, and whether less of each is better."""
        known = metrics_of(bool(self.description.labels), self.description.symbols)
        return {"loss": True} | {name: known[name].lower for name in self.metrics}

    def tally(self, names: Sequence[str] | None = None) -> Tally:
        """Return what collects metrics; by default those that `score` does not return."""
        d = self.description
        if names is None:
            names = [name for name in self.metrics if name not in (*SCORED, self.metric)]
        if d.labels:
            return ClassTally(len(d.labels), names)
        return NumberTally(names, *d.target_scale())

    @property
    def whole_training(self) -> Sequences | Samples:
        """The training set as it was before chunks: what baselines are fitted to.

        A chunk hides the steps before it, from which a linear model would learn.
        """
        return self.sets["train"] if self.uncut is None else self.uncut

    @functools.cached_property
    def baselines(self) -> list[Baseline]:
        """What is reached without a network, on the held-out sets; computed when first used."""
        return count_baselines(self) if self.description.symbols else find_baselines(self)

    def counted_entries(self, a: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return pre-outputs and targets without padding and steps whose target is missing."""
        a, y = super().counted_entries(a, batch)
        if self.description.ahead.get("quantiles"):
            a = self._medians(a)
        if self.readout != "every":
            return a, y
        lengths = torch.as_tensor(batch.lengths, device=a.device)
        is_judged = torch.arange(len(a), device=a.device)[:, None] < lengths
        if batch.mask is not None:
            is_judged &= batch.mask.to(a.device) != 0
        return a[is_judged], y[is_judged]

    def _medians(self, a: Tensor) -> Tensor:
        """Return outputs in which each quantile is the median: it is what is judged."""
        ahead = ahead_of(self.description)
        by_column = a.reshape(*a.shape[:-1], -1, ahead.copies)
        middle = by_column[..., ahead.middle : ahead.middle + 1]
        return middle.expand_as(by_column).reshape(a.shape)

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Return the accuracy, or squared and absolute error in the target's own units.

        Of symbols it is also the sum of their -log2 of the probability.
        """
        a, y = self.counted_entries(a, batch)
        if self.description.symbols:
            log_p = torch.log_softmax(a.double(), -1).gather(-1, y[:, None])
            bits = (-float(log_p.sum()) / math.log(2), float(len(y)))
            return {self.metric: bits, "accuracy": count_right(a.argmax(-1) == y)}
        if self.description.kind == "classify":
            return {"accuracy": count_right(a.argmax(-1) == y)}
        std = torch.from_numpy(self.description.target_scale()[1]).to(a.device)
        error = (a.double() - y.double()) * std
        count = float(error.numel())
        return {
            "mse": (float(error.square().sum()), count),
            "mae": (float(error.abs().sum()), count),
        }

    def show(self, a: Tensor, y: Tensor) -> list[tuple[str, str]]:
        """Return (target, prediction) of each sequence as text: labels, or numbers in their units.

        a [B, outputs] and y [B, ...] are those of one step.
        """
        d = self.description
        if d.labels:
            return pairs_of_text(lambda number: d.labels[int(number)], y, a.argmax(-1))
        mean, std = (torch.from_numpy(scale).to(a.dtype) for scale in d.target_scale())
        return super().show(a * std + mean, y.reshape(a.shape) * std + mean)

    def as_images(self, values: Tensor) -> Tensor | None:
        """Return inputs, targets or outputs as images in the units of the file: see `Task`.

        An array [height, width] is an image of one channel. None for other samples, and for those
        with missing values.
        """
        d = self.description
        shape = d.sample_shape
        if shape is None or len(shape) not in (2, 3) or d.masked:
            return None
        scales = (torch.tensor(scale, dtype=torch.float64) for scale in (d.mean, d.std))
        mean, std = (scale.reshape(-1, *(1 for _ in shape[1:])) for scale in scales)
        images = values.double().reshape(-1, *shape) * std + mean
        return images if len(shape) == 3 else images[:, None]


def mask_missing_targets(batch: Batch) -> Batch:
    """Return the batch with weight 0 where the target of a step is missing: NaN, or class -1."""
    y = batch.y
    if y.is_floating_point():
        gap = y.isnan().any(-1)
        y = y.masked_fill(gap[..., None], 0)
    else:
        gap = y < 0
        y = y.masked_fill(gap, 0)
    return replace(batch, y=y, mask=(~gap).to(batch.u.dtype))

"""Weights of classes in the loss of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, one_line, real
from ..objectives.batch import Batch
from .files.sheet import quote_names
from .task import Samples, Sequences

MOST_SHOWN = 10  # classes in a line
ENTRIES_COUNTED = 1000  # sequences or samples at a time
ClassWeight = str | Mapping[str, float] | None  # "balanced", "a=2,b=1" or {"a": 2, "b": 1}


def class_weights(
    given: ClassWeight, labels: Sequence[str], train: Sequences | Samples
) -> np.ndarray | None:
    """Return the weight of each class, [K]; None if no weights are given.

    "balanced" is n / (K n_k), with n entries (samples, or time steps with a target) in training,
    n_k of them of class k, and K classes that occur there. Explicit weights are above 0, and 1 for
    classes that are not named.
    """
    if given is None:
        return None
    if not labels:
        raise ConfigError("--class-weight needs classes, but the target is a number: leave it out.")
    if given == "balanced":
        counts = count_classes(train, len(labels))
        occurs = counts > 0
        weights = np.ones(len(labels))
        weights[occurs] = counts.sum() / (occurs.sum() * counts[occurs])
        return weights
    named = parse_weights(given) if isinstance(given, str) else dict(given)
    unknown = [name for name in named if name not in labels]
    if unknown:
        raise ConfigError(
            f"--class-weight: there is no class '{one_line(unknown[0])}'; the classes are "
            f"{quote_names(labels)}."
        )
    for name, weight in named.items():
        real(f"the weight of class '{one_line(name)}'", weight, 0, above=True)
    return np.array([float(named.get(label, 1.0)) for label in labels])


def describe_weights(labels: Sequence[str], weights: np.ndarray) -> str:
    """Return a line about the weights: "class weights in training: a 0.6, b 3"."""
    pairs = zip(labels, weights, strict=True)
    shown = [f"{one_line(label)} {weight:.3g}" for label, weight in pairs]
    rest = f", ... ({len(shown)} classes)" if len(shown) > MOST_SHOWN else ""
    return f"class weights in training: {', '.join(shown[:MOST_SHOWN])}{rest}"


def parse_weights(text: str) -> dict[str, float]:
    """Return the weights in a text like "a=2,b=1"."""
    weights = {}
    for part in text.split(","):
        name, equals, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not equals or not math.isfinite(weight):
            raise ConfigError(
                f"--class-weight must be balanced, or weights like a=2,b=1; got '{one_line(text)}'."
            )
        weights[name.strip()] = weight
    return weights


def count_classes(train: Sequences | Samples, classes: int) -> np.ndarray:
    """Return how many entries each class has, [K]; a missing target, -1, does not count."""
    assert train.y is not None
    counts = np.zeros(classes, np.int64)
    for begin in range(0, len(train.y), ENTRIES_COUNTED):
        some = train.y[begin : begin + ENTRIES_COUNTED]
        numbers = np.concatenate([np.asarray(y).reshape(-1) for y in some])
        counts += np.bincount(numbers[numbers >= 0].astype(np.int64), minlength=classes)
    return counts


def weigh_classes(batch: Batch, weights: np.ndarray, every: bool) -> Batch:
    """Return the batch with its loss weighted: sum_t w_{y_t} l_t / T_j, or w_{y_j} l_j.

    T_j are the steps of sample j that have a target; 1 for a batch whose losses are sums. The
    weights are no shares: they are not divided by their sum. every: whether each step has a target.
    """
    of_class = torch.from_numpy(weights).to(batch.u.dtype)
    mask: Tensor = of_class[batch.y.clamp(min=0)]
    if every:
        steps = torch.arange(len(mask))[:, None]
        counted = (steps < torch.as_tensor(batch.lengths)).to(mask.dtype)
        if batch.mask is not None:
            counted = counted * batch.mask
        mask = mask * counted
        if batch.reduce == "mean":
            mask = mask / counted.sum(0).clamp(min=1)
    return replace(batch, mask=mask, reduce="sum")

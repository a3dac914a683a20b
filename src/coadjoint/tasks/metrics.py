"""Metrics of a split by name, from sums that grow batch by batch.

Those of classes, from the pre-outputs a of each entry and its class y:

accuracy           the share of entries whose largest output is that of their class
balanced-accuracy  the mean over classes of the share of their entries that is recognised; classes
                   without an entry in the split are left out
f1                 the mean over classes of 2 TP / (2 TP + FP + FN), "macro"; classes that are
                   neither in the split nor predicted are left out
auc                the area under the ROC curve of p_k = softmax(a)_k, class k against the rest, in
                   the mean over classes; those without an entry, or with all, are left out
log-loss           the mean over entries of -log softmax(a)_y

Those of the next symbol of a sequence, of which a text's are characters: accuracy, and of the
log-loss in nats

nats-per-symbol    the log-loss itself; of a text nats-per-character
bits-per-symbol    the log-loss / log 2; of a text bits-per-character
perplexity         exp(log-loss), of so many equally probable symbols it would be the same

Those of numbers, from predictions and targets in the units of the data. Each is the mean over
targets of that of a target, with errors e:

mse, mae           the means of e^2 and |e|
rmse               the root of the mean of e^2
mape               the mean of |e / y|, as a share: 0.05 is 5%; zero targets are left out
r2                 1 - sum e^2 / sum (y - mean of y)^2; for a constant target 1 if every e is 0,
                   else 0

A metric of nothing is NaN: r2 of one entry, auc of one class, mape of zeros alone. All of them are
scikit-learn's of the same name, which differs in two cases: mape divides by the smallest positive
number where a target is zero, and the AUC of a split without some class is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import choose


class Metric(NamedTuple):
    """A metric: whether less of it is better, and whether it is reported without being asked."""

    lower: bool
    is_default: bool


OF_CLASSES = {
    "accuracy": Metric(lower=False, is_default=True),
    "balanced-accuracy": Metric(lower=False, is_default=True),
    "f1": Metric(lower=False, is_default=True),
    "auc": Metric(lower=False, is_default=False),
    "log-loss": Metric(lower=True, is_default=False),
}
LOG_LOSSES = ("log-loss", "nats", "bits", "perplexity")  # how the names of those begin
OF_NUMBERS = {
    "mse": Metric(lower=True, is_default=True),
    "mae": Metric(lower=True, is_default=True),
    "rmse": Metric(lower=True, is_default=True),
    "mape": Metric(lower=True, is_default=False),
    "r2": Metric(lower=False, is_default=True),
}


class Tally(Protocol):
    """Collects what metrics of a whole split need."""

    def add(self, a: Tensor, y: Tensor) -> None:
        """Take the pre-outputs a [n, outputs] of n entries and their targets y."""

    def values(self) -> dict[str, float]:
        """Return the metrics of all entries so far, by name."""


def of_symbols(unit: str) -> dict[str, Metric]:
    """Return the metrics of the next symbol, by name; unit: what a symbol is called."""
    by_default = Metric(lower=True, is_default=True)
    of_log_loss = (f"bits-per-{unit}", f"nats-per-{unit}", "perplexity")
    others = {name: OF_CLASSES[name]._replace(is_default=name == "accuracy") for name in OF_CLASSES}
    return dict.fromkeys(of_log_loss, by_default) | others


def metrics_of(has_classes: bool, symbols: str = "") -> dict[str, Metric]:
    """Return the metrics of classes, or those of numbers, by name.

    symbols: what classes are called that are the next symbols of sequences; "" for others.
    """
    if symbols:
        return of_symbols(symbols)
    return OF_CLASSES if has_classes else OF_NUMBERS


def choose_metrics(
    asked: str | Sequence[str] | None, has_classes: bool, symbols: str = ""
) -> tuple[str, ...]:
    """Return the metrics to report: the default ones, then those that were asked for.

    Example:
        >>> from coadjoint.tasks.metrics import choose_metrics
        >>> choose_metrics("auc", has_classes=True)
        ('accuracy', 'balanced-accuracy', 'f1', 'auc')
    """
    known = metrics_of(has_classes, symbols)
    names = [name for name, metric in known.items() if metric.is_default]
    asked = [asked] if isinstance(asked, str) else asked or []
    what = "metric of classes" if has_classes else "metric of numbers"
    names += [choose(what, name, known) for name in asked]
    return tuple(dict.fromkeys(names))


class ClassTally:
    """Counts classes and predictions, and keeps what the AUC needs, if it is asked for."""

    def __init__(self, classes: int, names: Sequence[str]) -> None:
        self.names = names
        # of each class: its entries, how often it is predicted, and how often rightly
        self.entries = np.zeros(classes, np.int64)
        self.predicted = np.zeros(classes, np.int64)
        self.hits = np.zeros(classes, np.int64)
        self.log_loss = 0.0  # summed over entries
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []  # p and y of each batch, for the AUC

    def add(self, a: Tensor, y: Tensor) -> None:
        """Take a [n, classes] and the class numbers y [n]."""
        a = a.detach().double().cpu()
        y = y.detach().long().cpu()
        K = len(self.entries)
        guess = a.argmax(-1)
        self.entries += np.bincount(y.numpy(), minlength=K)
        self.predicted += np.bincount(guess.numpy(), minlength=K)
        self.hits += np.bincount(y[guess == y].numpy(), minlength=K)
        if any(name.startswith(LOG_LOSSES) for name in self.names):
            log_p = torch.log_softmax(a, -1)
            self.log_loss -= float(log_p.gather(-1, y[:, None]).sum())
        if "auc" in self.names:
            self.kept.append((torch.softmax(a, -1).numpy(), y.numpy()))

    def values(self) -> dict[str, float]:
        """Return the metrics of all entries so far, by name."""
        count = int(self.entries.sum())
        values = {
            "accuracy": ratio(float(self.hits.sum()), count),
            "balanced-accuracy": mean_share(self.hits, self.entries),
            "f1": mean_share(2 * self.hits, self.entries + self.predicted),
            "log-loss": ratio(self.log_loss, count),
        }
        for name in self.names:
            values |= log_loss_as(name, values["log-loss"])
        if self.kept:
            p = np.concatenate([p for p, _ in self.kept])
            y = np.concatenate([y for _, y in self.kept])
            values["auc"] = one_versus_rest_auc(p, y)
        return {name: values.get(name, math.nan) for name in self.names}


def log_loss_as(name: str, log_loss: float) -> dict[str, float]:
    """Return a metric that is the log-loss in other units, {name: value}; {} if it is none."""
    if name.startswith("nats-per-"):
        return {name: log_loss}
    if name.startswith("bits-per-"):
        return {name: log_loss / math.log(2)}
    if name == "perplexity":
        return {name: math.exp(min(log_loss, 700.0))}
    return {}


def ratio(total: float, count: float) -> float:
    """Return total / count; NaN of nothing."""
    return total / count if count else math.nan


def mean_share(parts: np.ndarray, wholes: np.ndarray) -> float:
    """Return the mean over classes of part / whole; those whose whole is 0 are left out.

    Example: of 8 entries all are recognised, and of 2 one is.
        >>> import numpy as np
        >>> from coadjoint.tasks.metrics import mean_share
        >>> mean_share(np.array([8, 1]), np.array([8, 2]))
        0.75
    """
    occurs = wholes > 0
    shares = parts[occurs] / wholes[occurs]
    return float(shares.mean()) if len(shares) else math.nan


def one_versus_rest_auc(p: np.ndarray, y: np.ndarray) -> float:
    """Return the mean over classes k of the AUC of p[:, k] for y == k.

    p [n, K] probabilities, y [n] class numbers. Classes that no entry has, or all have, are left
    out.
    """
    areas = []
    for k in range(p.shape[1]):
        positive = y == k
        if 0 < positive.sum() < len(y):
            areas.append(area_under_curve(p[:, k], positive))
    return float(np.mean(areas)) if areas else math.nan


def area_under_curve(score: np.ndarray, positive: np.ndarray) -> float:
    """Return the share of pairs in which a positive has a larger score than a negative.

    A pair of equal scores counts half. score [n], positive [n] booleans with some of each.
    """
    _, place, size = np.unique(score, return_inverse=True, return_counts=True)
    last = np.cumsum(size)  # the largest rank among equal scores
    rank = (last - (size - 1) / 2)[place]  # their mean rank
    hits = int(positive.sum())
    above = float(rank[positive].sum()) - hits * (hits + 1) / 2
    return above / (hits * (len(score) - hits))


class NumberTally:
    """Sums errors and targets, in the units of the data."""

    def __init__(self, names: Sequence[str], mean: np.ndarray, std: np.ndarray) -> None:
        """mean, std: of the targets in training, [outputs]; the network's units are theirs."""
        self.names = names
        self.mean = mean
        self.std = std
        self.count = 0
        self.squares = np.zeros(len(mean))  # sums of e^2
        self.sizes = np.zeros(len(mean))  # sums of |e|
        self.shares = np.zeros(len(mean))  # sums of |e / y|, over targets that are not zero
        self.shares_count = np.zeros(len(mean))
        self.centre = np.zeros(len(mean))  # the mean of y, and the sum of squares around it
        self.spread = np.zeros(len(mean))

    def add(self, a: Tensor, y: Tensor) -> None:
        """Take a and y, [n, outputs] both, in units of the standard deviation in training."""
        # Zero, scaled and scaled back, is no longer zero, but of the size of a rounding error.
        rounding = 8 * torch.finfo(y.dtype).eps * np.maximum(np.abs(self.mean), self.std)
        a_values = a.detach().double().cpu().numpy().reshape(-1, len(self.mean))
        y_values = y.detach().double().cpu().numpy().reshape(a_values.shape)
        error = (a_values - y_values) * self.std
        target = y_values * self.std + self.mean
        self.squares += np.square(error).sum(0)
        self.sizes += np.abs(error).sum(0)
        if "mape" in self.names:
            is_zero = np.abs(target) <= rounding
            self.shares += np.abs(error / np.where(is_zero, math.inf, target)).sum(0)
            self.shares_count += (~is_zero).sum(0)
        if len(target):
            self._add_targets(target)

    def _add_targets(self, target: np.ndarray) -> None:
        """Update mean and spread by those of a batch, [n, outputs], which loses no digits."""
        n = len(target)
        centre = target.mean(0)
        total = self.count + n
        shift = centre - self.centre
        self.spread += np.square(target - centre).sum(0) + shift**2 * (self.count * n / total)
        self.centre += shift * (n / total)
        self.count = total

    def values(self) -> dict[str, float]:
        """Return the metrics of all entries so far, by name."""
        if not self.count:
            return dict.fromkeys(self.names, math.nan)
        values = {
            "mse": float((self.squares / self.count).mean()),
            "mae": float((self.sizes / self.count).mean()),
            "rmse": float(np.sqrt(self.squares / self.count).mean()),
            "mape": self._mape(),
            "r2": self._r2(),
        }
        return {name: values[name] for name in self.names}

    def _mape(self) -> float:
        """Return the mean over targets that are not zero everywhere."""
        counted = self.shares_count > 0
        shares = self.shares[counted] / self.shares_count[counted]
        return float(shares.mean()) if len(shares) else math.nan

    def _r2(self) -> float:
        """Return the mean over targets of the share of the variance that is predicted."""
        if self.count < 2:
            return math.nan
        varies = self.spread > 0
        explained = 1 - self.squares / np.where(varies, self.spread, 1)
        constant = np.where(self.squares == 0, 1.0, 0.0)
        return float(np.where(varies, explained, constant).mean())

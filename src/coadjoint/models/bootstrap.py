"""Metrics of weighted entries, as the bootstrap needs them: a weight counts repeated entries.

With whole weights they are those of `tasks.metrics` on entries that are repeated as often.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np


def resampled_weights(
    units: int, resamples: int, draw: np.random.Generator
) -> Iterator[np.ndarray]:
    """Yield how often each unit is drawn, [units], when as many are drawn with replacement."""
    for _ in range(resamples):
        yield np.bincount(draw.integers(0, units, units), minlength=units).astype(np.float64)


def divide(parts: np.ndarray | float, wholes: np.ndarray | float) -> np.ndarray:
    """Return parts / wholes, NaN where the whole is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(wholes) == 0, np.nan, np.asarray(parts) / wholes)


def mean_of_known(values: np.ndarray) -> np.ndarray:
    """Return the mean over the entries that are not NaN; NaN of none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of an empty mean
        return np.asarray(np.nanmean(values))


@dataclass(frozen=True, eq=False)
class ClassSample:
    """Entries with classes.

    p         [N, K] probabilities;  surprise  [N] -log of that of the true class;  y [N] classes
    with_auc  whether the AUC is measured
    """

    p: np.ndarray
    surprise: np.ndarray
    y: np.ndarray
    with_auc: bool = True

    def without_auc(self) -> ClassSample:
        """Return the sample without the AUC, which is NaN."""
        return replace(self, with_auc=False)

    @cached_property
    def guess(self) -> np.ndarray:
        """The class of the largest probability, [N]."""
        return np.asarray(self.p.argmax(-1))

    @cached_property
    def ties(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """By class: the order of the entries by score, and where each different score begins."""
        found = []
        for score in self.p.T:
            order = np.argsort(score, kind="stable")
            different = np.diff(score[order], prepend=-np.inf) > 0
            found.append((order, np.flatnonzero(different)))
        return found

    def figures(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Return the metrics by name, and those of each class, [K], by "class NAME"."""
        K = self.p.shape[1]
        is_hit = self.guess == self.y
        entries = np.bincount(self.y, weights, K)
        predicted = np.bincount(self.guess, weights, K)
        hits = np.bincount(self.y[is_hit], weights[is_hit], K)
        total = weights.sum()
        recall = divide(hits, entries)
        f1 = divide(2 * hits, entries + predicted)
        auc = np.full(K, np.nan)
        if self.with_auc:
            auc = np.array([self.area(k, weights) for k in range(K)])
        return {
            "accuracy": divide(hits.sum(), total),
            "balanced-accuracy": mean_of_known(recall),
            "f1": mean_of_known(f1),
            "auc": mean_of_known(auc),
            "log-loss": divide(weights @ self.surprise, total),
            "class precision": divide(hits, predicted),
            "class recall": recall,
            "class f1": f1,
            "class auc": auc,
        }

    def area(self, k: int, weights: np.ndarray) -> float:
        """Return the AUC of class k against the rest; NaN if either has no weight."""
        order, starts = self.ties[k]
        positive = self.y[order] == k
        w = weights[order]
        inside = np.add.reduceat(w * positive, starts)
        outside = np.add.reduceat(w * ~positive, starts)
        pairs = inside.sum() * outside.sum()
        if pairs == 0:
            return float("nan")
        below = np.cumsum(outside) - outside  # of lower scores
        return float((inside * (below + outside / 2)).sum() / pairs)


@dataclass(frozen=True, eq=False)
class NumberSample:
    """Entries with numbers.

    predicted, y  [N, k] in the units of the data;  rounding  [k], of targets that are zero
    """

    predicted: np.ndarray
    y: np.ndarray
    rounding: np.ndarray

    @cached_property
    def sums(self) -> tuple[np.ndarray, ...]:
        """What is added up, [N, k] each: e^2, |e|, |e / y|, y is not 0, y - c and (y - c)^2.

        c is the mean of all targets, so that no digits are lost.
        """
        error = self.predicted - self.y
        known = np.abs(self.y) > self.rounding
        shares = np.abs(error / np.where(known, self.y, np.inf))
        centred = self.y - self.y.mean(0)
        squares = np.square(error)
        return squares, np.abs(error), shares, known.astype(float), centred, np.square(centred)

    def figures(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Return the metrics by name, and those of each target, [k], by "target NAME"."""
        total = weights.sum()
        squares, sizes, shares, known, shift, spread = (weights @ part for part in self.sums)
        around_mean = spread - shift**2 / total
        # A target that is constant in the resample leaves a rounding error.
        varies = around_mean > 1e-12 * np.maximum(spread, np.finfo(float).tiny)
        exact = np.where(squares == 0, 1.0, 0.0)
        r2 = np.where(varies, 1 - squares / np.where(varies, around_mean, 1), exact)
        if total < 2:
            r2 = np.full_like(r2, np.nan)
        figures = {
            "mse": squares / total,
            "mae": sizes / total,
            "rmse": np.sqrt(squares / total),
            "mape": divide(shares, known),
            "r2": r2,
        }
        means = {name: mean_of_known(values) for name, values in figures.items()}
        return means | {f"target {name}": values for name, values in figures.items()}

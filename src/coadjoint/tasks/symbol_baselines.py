"""Baselines for sequences of symbols: the next one by counts in the training set.

unigram   the share of each symbol, whatever came before
bigram    by the symbol before
trigram   by the two symbols before

Counts are smoothed by the shorter context: with n(c, k) the times that symbol k follows context c,

    p(k | c) = (n(c, k) + w p(k | c without its first symbol)) / (n(c) + w)

and the unigram by w / K for each of K symbols. The weight w is the one of WEIGHTS with the fewest
bits on the validation set; without one it is MIDDLE_WEIGHT.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from .baselines import Baseline, blocks
from .symbol_sets import SymbolPieces
from .task import Sequences

if TYPE_CHECKING:
    from .judging import JudgedCollection

WEIGHTS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
MIDDLE_WEIGHT = 3.0
MOST_COUNTS = 2 * 10**7  # contexts times symbols
NAMES = ("unigram", "bigram", "trigram")
ABOUT = (
    "the shares of symbols in training",
    "counts after the symbol before",
    "counts after the two symbols before",
)


class Counts:
    """How often each symbol follows each context of `order` symbols in training.

    known    [U] the contexts that occur, as numbers
    table    [U, K] counts
    """

    def __init__(self, contexts: np.ndarray, targets: np.ndarray, symbols: int) -> None:
        """contexts: [N] numbers of contexts, -1 where there is none; targets: [N], -1 for none."""
        is_counted = (contexts >= 0) & (targets >= 0)
        self.known, place = np.unique(contexts[is_counted], return_inverse=True)
        flat = place * symbols + targets[is_counted]
        size = len(self.known) * symbols
        self.table = np.bincount(flat, minlength=size).reshape(len(self.known), symbols)

    def probabilities(self, contexts: np.ndarray, shorter: np.ndarray, weight: float) -> np.ndarray:
        """Return p(k | c) of contexts c [n], [n, K]; shorter: that of the shorter contexts."""
        place = np.searchsorted(self.known, contexts)
        place = np.minimum(place, len(self.known) - 1)
        is_known = self.known[place] == contexts
        counts = np.where(is_known[:, None], self.table[place], 0)
        total = counts.sum(1, keepdims=True) + weight
        smoothed: np.ndarray = (counts + weight * shorter) / total
        return smoothed


def contexts_of(codes: np.ndarray, order: int, symbols: int) -> np.ndarray:
    """Return the context of `order` symbols at each step of a sequence, as a number, [T].

    It ends with the symbol of the step itself. -1 where symbols are unknown, or not enough came
    before. codes: [T] numbers, `symbols` for an unknown one.
    """
    numbers = np.zeros(len(codes), np.int64)
    is_whole = np.ones(len(codes), bool)
    for back in range(order):
        earlier = np.full(len(codes), symbols, np.int64)
        earlier[back:] = codes[: len(codes) - back]
        is_whole &= earlier < symbols
        numbers += earlier * (symbols + 1) ** back
    return np.where(is_whole, numbers, -1)


class SymbolSteps:
    """All steps of a set one after the other: contexts by order, and targets."""

    def __init__(self, data: Sequences, symbols: int, orders: int) -> None:
        assert isinstance(data.u, SymbolPieces)
        codes = []
        targets = []
        for i, (_, start, stop) in enumerate(data.u.pieces):
            codes.append(data.u.codes[start : stop - 1].astype(np.int64))
            targets.append(data.u.target(i))
        self.targets = np.concatenate(targets)
        self.contexts = []
        for order in range(orders):
            parts = [contexts_of(part, order, symbols) for part in codes]
            self.contexts.append(np.concatenate(parts))


class CountModel:
    """A model of contexts of up to order symbols.

    weight: of the shorter contexts.
    """

    def __init__(self, counts: list[Counts], symbols: int, weight: float) -> None:
        self.counts = counts
        self.symbols = symbols
        self.weight = weight

    def probabilities(self, steps: SymbolSteps, chosen: slice) -> np.ndarray:
        """Return p of the next symbol at some steps, [n, K]."""
        n = len(steps.targets[chosen])
        p = np.full((n, self.symbols), 1 / self.symbols)
        for counts, contexts in zip(self.counts, steps.contexts, strict=False):
            p = counts.probabilities(contexts[chosen], p, self.weight)
        return p

    def bits(self, steps: SymbolSteps) -> float:
        """Return the mean of -log2 p of the symbols that came."""
        total = 0.0
        for block in blocks(len(steps.targets), self.symbols):
            y = steps.targets[block]
            p = self.probabilities(steps, block)[np.arange(len(y)), y]
            total -= float(np.log2(p[y >= 0]).sum())
        return total / max(1, int((steps.targets >= 0).sum()))


def count_baselines(task: JudgedCollection) -> list[Baseline]:
    """Return the baselines of a task of symbols, the longest context first.

    A context whose counts would take too much memory is left out.
    """
    symbols = len(task.description.labels)
    train = task.whole_training
    assert isinstance(train, Sequences)
    orders = len(NAMES)
    of_train = SymbolSteps(train, symbols, orders)
    held_out = {}
    for split in task.splits:
        data = task.sets[split]
        assert isinstance(data, Sequences)
        held_out[split] = SymbolSteps(data, symbols, orders)
    counts: list[Counts] = []
    baselines: list[Baseline] = []
    for order in range(orders):
        contexts = of_train.contexts[order]
        if len(np.unique(contexts)) * symbols > MOST_COUNTS:
            break
        counts.append(Counts(contexts, of_train.targets, symbols))
        model = choose_weight(counts, symbols, held_out.get("valid"))
        metrics = {split: judge_counts(task, model, steps) for split, steps in held_out.items()}
        about = f"{ABOUT[order]} (smoothed by {model.weight:g})"
        baselines.insert(0, Baseline(NAMES[order], about, metrics))
    return baselines


def choose_weight(counts: list[Counts], symbols: int, valid: SymbolSteps | None) -> CountModel:
    """Return the model with the weight that is best on the validation set."""
    if valid is None:
        return CountModel(counts, symbols, MIDDLE_WEIGHT)
    best = (math.inf, CountModel(counts, symbols, MIDDLE_WEIGHT))
    for weight in WEIGHTS:
        model = CountModel(counts, symbols, weight)
        bits = model.bits(valid)
        if bits < best[0]:
            best = (bits, model)
    return best[1]


def judge_counts(task: JudgedCollection, model: CountModel, steps: SymbolSteps) -> dict[str, float]:
    """Return the metrics of a model on the steps of a set."""
    tally = task.tally(task.metrics)
    for block in blocks(len(steps.targets), model.symbols):
        y = steps.targets[block]
        is_target = y >= 0
        log_p = np.log(model.probabilities(steps, block)[is_target])
        tally.add(torch.from_numpy(log_p), torch.from_numpy(y[is_target]))
    return tally.values()

"""Synthetic tasks on symbols: answers that depend on steps long past, drawn anew for each batch.

Windows are counted in whole steps: a tenth of L is L // 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, choose, whole_number
from ..objectives.batch import Batch
from .generated import Generated, one_hot
from .generated import is_predicted as is_predicted
from .marked import VARIANT_RULES
from .marked import XOR as XOR
from .marked import Addition as Addition
from .marked import Multiplication as Multiplication
from .task import Scores, count_right

# Where the windows of two or three symbols begin, in tenths of L.
WINDOWS = {2: (1, 5), 3: (1, 3, 6)}


def draw_times(rng: np.random.Generator, L: np.ndarray, k: int) -> np.ndarray:
    """Draw k different times of 0..L-1 for each length of L [n], in ascending order, [k, n]."""
    key = rng.random((L.max(), len(L)))
    key[np.arange(len(key))[:, None] >= L] = 2  # after the end: behind all others
    return np.sort(np.argsort(key, axis=0)[:k], axis=0)


@dataclass(eq=False, kw_only=True)
class TemporalOrder(Generated):
    """Which symbols, A or B, appeared at two or three times: class v_0 + 2 v_1 (+ 4 v_2).

    variant  whose definition it is
        "pascanu"  v_i comes in a window of a tenth of L that begins at .1 L and .5 L (two symbols),
                   or at .1 L, .3 L and .6 L (three). The published code of Pascanu et al. (2013).
        "galvan"   the times are drawn from all of the sequence, each set of two or three as
                   likely. Galvan (2016), section 4.1.

    Six one-hot symbols: 0 and 1 are A and B, and all other steps hold one of the four distractors
    2..5. Cross-entropy at the last step. The goal is that every test sequence is correct; chance is
    1/4 or 1/8.
    """

    symbols: int = 2
    variant: str = "pascanu"

    inputs = 6
    output = "softmax"
    loss = "cross-entropy"

    def __post_init__(self) -> None:
        if not isinstance(self.symbols, int) or self.symbols not in WINDOWS:
            raise InputError(f"temporal order takes symbols=2 or 3; got {self.symbols!r}.")
        choose("variant", self.variant, VARIANT_RULES)
        self.name = "temporal-order" if self.symbols == 2 else "temporal-order-3"
        self.outputs = 2**self.symbols
        super().__post_init__()

    def draw(self, rng: np.random.Generator, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw distractors s and place the symbols v at the times p, in their order."""
        k = self.symbols
        n = len(L)
        s = rng.integers(2, 6, (L.max(), n))
        v = rng.integers(0, 2, (k, n))
        if self.variant == "galvan":
            p = draw_times(rng, L, k)
        else:
            p = np.outer(WINDOWS[k], L) // 10 + rng.integers(0, L // 10, (k, n))
        s[p, np.arange(n)] = v
        return one_hot(s, 6), 2 ** np.arange(k) @ v

    def baseline(self) -> dict[str, float]:
        """Return the metrics of a uniform guess."""
        return {"loss": math.log(self.outputs), "right": 1 / self.outputs}


@dataclass(eq=False, kw_only=True)
class Permutation(Generated):
    """The first symbol, recalled at the end: y = s_1.

    A hundred one-hot symbols: s_1 is 0 or 1, the rest are uniform over 2..99. Cross-entropy at the
    last step, over all hundred. The goal is that every test sequence is correct; chance is 1/2.
    """

    shortest = 2
    name = "permutation"
    inputs = 100
    outputs = 100
    output = "softmax"
    loss = "cross-entropy"

    def draw(self, rng: np.random.Generator, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw the symbols s; y is the first."""
        s = rng.integers(2, 100, (L.max(), len(L)))
        s[0] = rng.integers(0, 2, len(L))
        return one_hot(s, 100), s[0]

    def baseline(self) -> dict[str, float]:
        """Return the metrics of a uniform guess between 0 and 1."""
        return {"loss": math.log(2), "right": 0.5}


@dataclass(eq=False, kw_only=True)
class Memorisation(Generated):
    """A pattern to be repeated after a delay of `length` steps, without noise.

    With k = `values` and m = `positions`, there are length + 2 m steps of k + 2 one-hot symbols: m
    values, then blanks (k), with a cue (k + 1) at the first step of recall. The target is blank
    until the last m steps, which repeat the pattern; it has k + 1 classes. Mean cross-entropy over
    all steps. A sequence is correct if every step is; "symbols" is the share of recalled symbols
    that are correct. The goal is that every test sequence is correct. The 5-bit task has k = 2,
    m = 5, the "20-bit" task k = 5, m = 10. Without memory of the pattern, the best loss is
    m ln k / (length + 2 m).
    """

    values: int = 2
    positions: int = 5

    shortest = 1
    early = 0  # steps by which the cue comes before recall
    readout = "every"
    reduce = "mean"
    output = "softmax"
    loss = "cross-entropy"

    def __post_init__(self) -> None:
        k = whole_number("values", self.values, 2)
        m = whole_number("positions", self.positions, 1)
        self.inputs = k + 2
        self.outputs = k + 1
        self.extra = 2 * m
        self.name = self._task_name()
        super().__post_init__()

    def _task_name(self) -> str:
        """Return the name under which TASKS lists these values and positions, if it does."""
        names = {(2, 5): "memorisation-5", (5, 10): "memorisation-20"}
        return names.get((self.values, self.positions), "memorisation")

    def draw(self, rng: np.random.Generator, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw the pattern; place it at the beginning of s and at the end of y."""
        k = self.values
        m = self.positions
        sample = np.arange(len(L))
        blank = k
        cue = k + 1
        pattern = rng.integers(0, k, (m, len(L)))
        s = np.full((L.max() + 2 * m, len(L)), blank)
        y = s.copy()
        s[:m] = pattern
        s[L + m - self.early, sample] = cue
        y[L + m + np.arange(m)[:, None], sample] = pattern
        return one_hot(s, k + 2), y

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Count the correct sequences, and the correctly recalled symbols."""
        t = torch.arange(len(a), device=a.device)[:, None]
        end = len(a) if batch.lengths is None else torch.as_tensor(batch.lengths, device=a.device)
        correct = is_predicted(a, batch.y)
        recall = (t < end) & (t >= end - self.positions)
        judged = self.judged(t < end, recall)
        return {
            "right": count_right((correct | ~judged).all(0)),
            "symbols": count_right(correct[recall.expand_as(correct)]),
        }

    def judged(self, steps: Tensor, recall: Tensor) -> Tensor:
        """Return which of the existing `steps` must be correct, here all; `recall` are the last."""
        return steps

    def baseline(self) -> dict[str, float]:
        """Return the metrics of a uniform guess of the pattern, with all blanks correct."""
        k = self.values
        m = self.positions
        low, high = self.span
        steps = np.arange(low, high + 1) + 2 * m
        if self.reduce == "sum":
            steps = np.ones_like(steps)
        return {
            "loss": float((m * math.log(k) / steps).mean()),
            "right": float(k) ** -m,
            "symbols": 1 / k,
        }


@dataclass(eq=False, kw_only=True)
class Copy(Memorisation):
    """The copy memory task: ten of eight letters, repeated after a delay of T = `length` steps.

    It is `Memorisation` with 8 values and 10 positions, but the cue ("go") comes one step before
    recall: ten letters, T - 1 blanks, go, ten blanks. Mean cross-entropy over all T + 20 steps. A
    sequence is correct if its last ten steps are. The goal is that every test sequence is correct.
    Without memory of the letters, the best loss is 10 ln 8 / (T + 20).
    """

    values: int = 8
    positions: int = 10
    early = 1

    def _task_name(self) -> str:
        """Return the same name for all values and positions."""
        return "copy"

    def judged(self, steps: Tensor, recall: Tensor) -> Tensor:
        """Return the steps of recall."""
        return recall

"""Tasks whose answer is a sequence of its own: read letters, write them in another order.

Letters are 0..k-1; the answer ends with the token k, the end, and is padded with -1.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import whole_number
from ..objectives.batch import Batch
from .synthetic import Generated, one_hot
from .task import Goal, Scores, count_right


def spoken(a: Tensor) -> Tensor:
    """The tokens that pre-outputs a [U, B, k + 1] say, up to the first end, then -1; where a is NaN, -2."""
    p, end = a.argmax(-1), a.shape[-1] - 1
    p = torch.where(a.isnan().any(-1), -2, p)
    over = (p == end).cumsum(0) - (p == end).long() > 0
    return torch.where(over, -1, p)


@dataclass(eq=False, kw_only=True)
class Transduction(Generated):
    """L letters of `values`, uniform and independent, one-hot; the answer is the same letters in another order, and the end.
    Of a range of lengths each sequence of a batch has its own, unless ragged=False.

    Mean cross-entropy over the answer's tokens. Judged by what a network says by itself: "right" is the share of tokens that
    are right, of those that should have been said and those said beyond; "whole", of answers without a fault. The goal is
    99% of tokens right.
    """

    length: int | tuple[int, int] = field(default=(5, 10), kw_only=False)
    ragged: bool = True  # where the length is a range
    values: int = 10

    shortest = 1
    readout, reduce = "sequence", "mean"
    output, loss = "softmax", "cross-entropy"
    goal = Goal("right", 0.99)

    def __post_init__(self) -> None:
        k = whole_number("values", self.values, 2)
        self.inputs, self.outputs = k, k + 1
        self.ragged = (
            self.ragged and isinstance(self.length, tuple | list) and len(set(self.length)) > 1
        )
        super().__post_init__()

    def draw(self, rng: np.random.Generator, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k, t = self.values, np.arange(L.max() + 1)[:, None]
        s = rng.integers(0, k, (L.max(), len(L)))
        y = self.answer(np.where(t < L, np.append(s, s[:1], 0), k), L)
        return one_hot(s, k), np.where(t > L, -1, y)

    def answer(self, s: np.ndarray, L: np.ndarray) -> np.ndarray:
        """The answer from letters s [T + 1, n], of which those past L are the end."""
        raise NotImplementedError

    def score(self, a: Tensor, batch: Batch) -> Scores:
        said, y = spoken(a), batch.y
        U = max(len(said), len(y))
        said, y = (pad(v, (0, 0, 0, U - len(v)), value=-1) for v in (said, y))
        good = said == y
        return {
            "right": count_right(good[(y != -1) | (said != -1)]),
            "whole": count_right(good.all(0)),
        }

    def show(self, a: Tensor, y: Tensor) -> list[tuple[str, str]]:
        """Of a [B, U, outputs] and y [B, U]: whole sequences, without their ends."""
        tell = lambda v: " ".join(str(int(p)) for p in v if 0 <= p < self.values) or "nothing"
        return [(tell(t), tell(p)) for t, p in zip(y, spoken(a.transpose(0, 1)).T, strict=True)]

    def baseline(self) -> dict[str, float]:
        """Knowing how long the answer is and nothing of its letters; each metric at its best."""
        low, high = self.span
        found = [(L, *self.guess(L)) for L in range(low, high + 1)]
        mean = lambda values: sum(values) / len(found)
        return {
            "loss": mean([loss / (L + 1) for L, loss, _, _ in found]),
            "right": mean([letters + 1 for _, _, letters, _ in found])
            / mean([L + 1 for L, *_ in found]),
            "whole": mean([share for *_, share in found]),
        }

    def guess(self, L: int) -> tuple[float, float, float]:
        """Of L letters: the entropy of the answer, the expected number of letters right, the likeliest answer's share."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class Reversal(Transduction):
    """The letters from the last to the first. Knowing nothing of them leaves one in k right."""

    name = "reversal"

    def answer(self, s: np.ndarray, L: np.ndarray) -> np.ndarray:
        t = np.arange(len(s))[:, None]
        return np.where(t < L, np.take_along_axis(s, np.abs(L - 1 - t), 0), s)

    def guess(self, L: int) -> tuple[float, float, float]:
        return L * math.log(self.values), L / self.values, float(self.values) ** -L


@dataclass(eq=False, kw_only=True)
class Sorting(Transduction):
    """The letters from the lowest to the highest, each as often as it came."""

    name = "sorting"

    def answer(self, s: np.ndarray, L: np.ndarray) -> np.ndarray:
        return np.sort(s, 0)

    def guess(self, L: int) -> tuple[float, float, float]:
        """The answer is how often each letter came: multinomial. Letter t is at most v if at least t of L are."""
        k, log_of = self.values, lambda n: math.lgamma(n + 1)  # log n!
        at_least = lambda t, p: sum(
            math.comb(L, n) * p**n * (1 - p) ** (L - n) for n in range(t, L + 1)
        )
        often = [math.comb(L, n) * (1 / k) ** n * (1 - 1 / k) ** (L - n) for n in range(L + 1)]
        entropy = L * math.log(k) - log_of(L) + k * sum(p * log_of(n) for n, p in enumerate(often))
        letters = 0.0
        for t in range(1, L + 1):
            up_to = [0.0, *(at_least(t, (v + 1) / k) for v in range(k))]
            letters += max(b - a for a, b in itertools.pairwise(up_to))
        many, over = divmod(L, k)  # all letters equally often, or as nearly as can be
        log_share = (
            log_of(L) - over * log_of(many + 1) - (k - over) * log_of(many) - L * math.log(k)
        )
        return entropy, letters, math.exp(log_share)

"""Tasks whose answer is a sequence with its own length: read letters, write them in another order.

Letters are 0..k-1. The answer ends with the token k, "end", and is padded with -1.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import whole_number
from ..objectives.batch import Batch
from .generated import Generated, one_hot
from .task import Goal, Scores, count_right, pairs_of_text

PADDING = -1
INVALID = -2  # equal to no target


def decode_tokens(a: Tensor) -> Tensor:
    """Return the tokens [U, B] of pre-outputs a [U, B, k + 1], with -1 after the first end.

    Where a holds NaN, the token is -2.
    """
    end = a.shape[-1] - 1
    tokens = torch.where(a.isnan().any(-1), INVALID, a.argmax(-1))
    is_end = tokens == end
    ends_before = is_end.cumsum(0) - is_end.long()
    return torch.where(ends_before > 0, PADDING, tokens)


class Guess(NamedTuple):
    """The best guess at the answer to L letters by someone who knows L and no letter."""

    entropy: float  # of the answer
    letters: float  # expected number of letters right, each guessed at its best
    answer: float  # the probability of the likeliest answer


@dataclass(eq=False, kw_only=True)
class Transduction(Generated):
    """L letters, one-hot; the answer is the same letters in another order, and the end.

    There are `values` letters, uniform and independent. If the length is a range, each sequence of
    a batch has its own, unless ragged=False. Mean cross-entropy over the tokens of the answer.

    The tokens that the network chose itself are judged. "right" is the share of correct tokens,
    among those of the answer and any beyond it; "whole" is the share of answers without an error.
    The goal is 99% of tokens correct.
    """

    length: int | tuple[int, int] = field(default=(5, 10), kw_only=False)
    ragged: bool = True  # where the length is a range
    values: int = 10

    shortest = 1
    readout = "sequence"
    reduce = "mean"
    output = "softmax"
    loss = "cross-entropy"
    goal = Goal("right", 0.99)

    def __post_init__(self) -> None:
        k = whole_number("values", self.values, 2)
        self.inputs = k
        self.outputs = k + 1  # the letters and the end
        # With a single length there is nothing ragged.
        has_range = isinstance(self.length, tuple | list) and len(set(self.length)) > 1
        self.ragged = self.ragged and has_range
        super().__post_init__()

    def draw(self, rng: np.random.Generator, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw letters u [T, n, k]; y [T + 1, n] are the tokens of the answer."""
        k = self.values
        t = np.arange(L.max() + 1)[:, None]
        s = rng.integers(0, k, (L.max(), len(L)))
        one_longer = np.append(s, s[:1], 0)  # a row for the end; its letters are not used
        letters_and_end = np.where(t < L, one_longer, k)
        y = self.answer(letters_and_end, L)
        return one_hot(s, k), np.where(t > L, PADDING, y)

    def answer(self, s: np.ndarray, L: np.ndarray) -> np.ndarray:
        """Return the answer [T + 1, n] to letters s [T + 1, n], which hold the end from L on."""
        raise NotImplementedError

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Count the correct tokens and the correct answers."""
        tokens = decode_tokens(a)
        longest = max(len(tokens), len(batch.y))
        tokens = pad(tokens, (0, 0, 0, longest - len(tokens)), value=PADDING)
        y = pad(batch.y, (0, 0, 0, longest - len(batch.y)), value=PADDING)
        correct = tokens == y
        # Tokens beyond the answer count as errors, and so do those that are missing.
        judged = (y != PADDING) | (tokens != PADDING)
        return {"right": count_right(correct[judged]), "whole": count_right(correct.all(0))}

    def show(self, a: Tensor, y: Tensor) -> list[tuple[str, str]]:
        """Return the letters of targets y [B, U] and outputs a [B, U, outputs] as text."""
        return pairs_of_text(self._letters, y, decode_tokens(a.transpose(0, 1)).T)

    def _letters(self, tokens: Tensor) -> str:
        """Return the letters among tokens as text, without the end and padding."""
        letters = [str(int(token)) for token in tokens if 0 <= token < self.values]
        return " ".join(letters) or "nothing"

    def baseline(self) -> dict[str, float]:
        """Return the best metrics of someone who knows the length of the answer and no letter.

        Means over the lengths, which are equally likely; tokens are pooled, so "right" is the mean
        number of correct tokens over the mean number of tokens.
        """
        low, high = self.span
        lengths = range(low, high + 1)
        losses = []
        tokens = []
        tokens_right = []
        answers_right = []
        for L in lengths:
            entropy, letters, answer = self.guess(L)
            losses.append(entropy / (L + 1) if self.reduce == "mean" else entropy)
            tokens.append(L + 1)  # the letters and the end
            tokens_right.append(letters + 1)
            answers_right.append(answer)
        mean_tokens = sum(tokens) / len(lengths)
        return {
            "loss": sum(losses) / len(losses),
            "right": sum(tokens_right) / len(lengths) / mean_tokens,
            "whole": sum(answers_right) / len(lengths),
        }

    def guess(self, L: int) -> Guess:
        """Return how good the best guess at an answer of L letters is, if no letter is known."""
        raise NotImplementedError


@dataclass(eq=False, kw_only=True)
class Reversal(Transduction):
    """The letters from the last to the first. A guess is correct for one letter in k."""

    name = "reversal"

    def answer(self, s: np.ndarray, L: np.ndarray) -> np.ndarray:
        """Return s_L, ..., s_1 and the end."""
        t = np.arange(len(s))[:, None]
        reversed_s = np.take_along_axis(s, np.abs(L - 1 - t), 0)  # rows t >= L are not used
        return np.where(t < L, reversed_s, s)

    def guess(self, L: int) -> Guess:
        """Return how good a guess at L uniform, independent letters is.

        Entropy, expected number of letters right, probability that all are.
        """
        k = self.values
        return Guess(L * math.log(k), L / k, float(k) ** -L)


@dataclass(eq=False, kw_only=True)
class Sorting(Transduction):
    """The letters from the lowest to the highest, with repetitions."""

    name = "sorting"

    def answer(self, s: np.ndarray, L: np.ndarray) -> np.ndarray:
        """Return the sorted letters; the end, k, is larger than all of them."""
        return np.sort(s, 0)

    def guess(self, L: int) -> Guess:
        """Return how good the best guess at the sorted letters is, if only L is known.

        The answer is determined by how often each letter comes: the counts n_1..n_k are
        multinomial, of probability L! / (n_1! ... n_k!) k^-L.
        """
        k = self.values
        # The entropy is the mean of -log of that probability; all n_i have the same distribution.
        mean_log_factorial = 0.0  # of n_i
        for n in range(L + 1):
            mean_log_factorial += probability(L, n, 1 / k) * log_factorial(n)
        entropy = L * math.log(k) - log_factorial(L) + k * mean_log_factorial
        letters = 0.0  # the expected number of letters right
        for t in range(1, L + 1):
            # The t-th letter is at most v if at least t of the L letters are.
            at_most = [0.0]
            for v in range(k):
                at_most.append(probability_of_at_least(L, t, (v + 1) / k))
            # The differences are the probabilities of each letter; the likeliest is guessed.
            letters += max(b - a for a, b in itertools.pairwise(at_most))
        # In the likeliest answer all letters come equally often, or as nearly as possible.
        often, left = divmod(L, k)
        log_answer = log_factorial(L)
        log_answer -= left * log_factorial(often + 1)
        log_answer -= (k - left) * log_factorial(often)
        log_answer -= L * math.log(k)
        return Guess(entropy, letters, math.exp(log_answer))


def log_factorial(n: int) -> float:
    """Return log n!."""
    return math.lgamma(n + 1)


def probability(L: int, n: int, p: float) -> float:
    """Return the probability of n successes in L trials with probability p each."""
    return math.comb(L, n) * p**n * (1 - p) ** (L - n)


def probability_of_at_least(L: int, t: int, p: float) -> float:
    """Return the probability of t or more successes in L trials with probability p each."""
    return sum(probability(L, n, p) for n in range(t, L + 1))

"""Tasks on two marked entries of a long sequence: their mean, their product, whether they differ.

Windows are counted in whole steps: a tenth of L is L // 10.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..errors import choose
from ..objectives.batch import Batch
from .generated import Generated
from .task import Goal, Scores, count_right

RULES = {"loose": 0.2, "strict": 0.04}  # the largest error that is right
# Whose definition of a task it is, and the rule by which they judge an answer.
VARIANT_RULES = {"pascanu": "loose", "galvan": "strict"}


@dataclass(eq=False, kw_only=True)
class Addition(Generated):
    """The mean of two marked numbers: y = (x_p + x_q) / 2.

    variant  whose definition it is
        "pascanu"  u_t = (marker, x_t), x_t uniform in [0, 1); p in the first tenth, q in the next
                   four tenths. A single length L means L, ..., L + L // 10 - 1. Rule "loose".
                   The published code of Pascanu et al. (2013).
        "galvan"   u_t = (x_t, marker), x_t uniform in [-1, 1); p in the first tenth, q in
                   [.4 L, .5 L], both ends included. A single length T means T, ..., T + T // 10.
                   Rule "strict". Galvan (2016), section 4.1.
    rule     an answer is correct if |y_hat - y| < 0.2 ("loose") or < 0.04 ("strict"); that of the
             variant by default. Both are reported, and the goal is 99% correct by the chosen one.

    Each batch has one length. Squared error at the last step. The best constant is wrong on 36.0%
    (loose) or 84.6% (strict) with squared error 1/24; in Galvan's form, whose numbers are spread
    twice as widely, on 64.0% or 92.2% with squared error 1/6.
    """

    rule: str | None = None
    variant: str = "pascanu"

    name = "addition"
    inputs = 2
    outputs = 1

    def __post_init__(self) -> None:
        rule_of_variant = VARIANT_RULES[choose("variant", self.variant, VARIANT_RULES)]
        if self.rule is None:
            self.rule = rule_of_variant
        super().__post_init__()
        self.metric = f"right_{RULES[choose('rule', self.rule, RULES)]}"
        self.goal = Goal(self.metric, 0.99)

    @property
    def least(self) -> float:
        """The least number of a sequence, 0 or -1; all are below 1."""
        return -1.0 if self.variant == "galvan" else 0.0

    def stretch(self, L: int) -> tuple[int, int]:
        """Return L and L + L // 10 (Galvan) or L + L // 10 - 1, what a single L stands for."""
        longest = L + L // 10
        return L, longest if self.variant == "galvan" else longest - 1

    def draw(self, rng: np.random.Generator, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw numbers x and mark those at times p and q; y is the answer from these two."""
        sample = np.arange(len(L))
        u = np.zeros((L.max(), len(L), 2), np.float32)
        x = rng.random(u.shape[:2], np.float32)
        p = rng.integers(0, L // 10)
        if self.variant == "galvan":
            x = self.least + (1 - self.least) * x
            q = rng.integers(-(-4 * L // 10), L // 2 + 1)  # from .4 L rounded up
            number, marker = 0, 1
        else:
            q = L // 10 + rng.integers(0, 4 * L // 10)
            marker, number = 0, 1
        u[..., number] = x
        u[p, sample, marker] = 1
        u[q, sample, marker] = 1
        return u, self.answer(x[p, sample], x[q, sample])

    def answer(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the target from the two marked numbers."""
        mean: np.ndarray = (a + b) / 2
        return mean

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Count the answers that are correct by each rule."""
        error = (a[..., 0] - batch.y).abs()
        return {f"right_{d}": count_right(error < d) for d in RULES.values()}

    def baseline(self) -> dict[str, float]:
        """Return the metrics of the best constant: two triangles, (1 - 2 d / w)^2, are wrong.

        w is the width of the interval of the numbers.
        """
        w = 1 - self.least
        right = {f"right_{d}": 1 - (1 - 2 * d / w) ** 2 for d in RULES.values()}
        return {"loss": w**2 / 24, **right}


@dataclass(eq=False, kw_only=True)
class Multiplication(Addition):
    """The product of two marked numbers: y = x_p x_q.

    Inputs, variants, lengths, rules and goal are those of `Addition`, but the numbers lie in [0, 1)
    in both variants. The best constants are wrong on 23.3% (loose; 0.2) and 71.8% (strict; 0.04);
    the mean, 0.25, on 39.0% and 88.9%, with squared error 7/144.
    """

    name = "multiplication"
    least = 0.0

    def answer(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Return the product of the two marked numbers."""
        product: np.ndarray = a * b
        return product

    def baseline(self) -> dict[str, float]:
        """Return the metrics of the best constant for each: the loss, and each width d of a rule.

        The density of the product, -log y, falls, so the best window of width 2 d is [0, 2 d].
        """
        right = {f"right_{d}": 2 * d * (1 - math.log(2 * d)) for d in RULES.values()}
        return {"loss": 7 / 144, **right}


@dataclass(eq=False, kw_only=True)
class XOR(Generated):
    """Whether two marked bits differ: y = x_p xor x_q.

    u_t = (x_t, marker), x_t in {0, 1}; p in the first tenth, q from 4 L // 10 to L // 2, both
    included. A single length T means T, ..., 1.1 T, one for each batch. One sigmoid output at the
    last step, binary cross-entropy. An answer is correct if y_hat is on the side of y; the goal is
    that every test sequence is correct. Chance is 1/2, and one bit alone says nothing about y.
    """

    name = "xor"
    inputs = 2
    outputs = 1
    output = "sigmoid"
    loss = "binary-cross-entropy"

    def stretch(self, L: int) -> tuple[int, int]:
        """Return L and L + L // 10, the lengths that a single L stands for."""
        return L, L + L // 10

    def draw(self, rng: np.random.Generator, L: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw bits x and mark those at times p and q; y is 1 where these two differ.

        p lies in the first tenth of a sequence, q from 4 L // 10 to L // 2.
        """
        sample = np.arange(len(L))
        u = np.zeros((L.max(), len(L), 2), np.float32)
        x = rng.integers(0, 2, u.shape[:2], np.uint8)
        p = rng.integers(0, L // 10)
        q = rng.integers(4 * L // 10, L // 2 + 1)
        u[..., 0] = x
        u[p, sample, 1] = 1
        u[q, sample, 1] = 1
        return u, (x[p, sample] ^ x[q, sample]).astype(np.float32)

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Count the outputs on the correct side."""
        logit = a[..., 0]
        right = ((logit > 0) == (batch.y > 0)) & ~logit.isnan()
        return {"right": count_right(right)}

    def baseline(self) -> dict[str, float]:
        """Return the metrics of a uniform guess."""
        return {"loss": math.log(2), "right": 0.5}

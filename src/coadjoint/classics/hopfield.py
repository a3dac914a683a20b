"""The network of Hopfield (1982): a memory of patterns of signs, recalled by falling energy."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InputError, NumericalError, brief, check_seed, whole_number
from .estimator import Array, ClassicEstimator, read_rows


class Hopfield(ClassicEstimator):
    """n units X_i = -1 or +1 with the energy H(X) = -1/2 X'WX + b'X.

    The Hebbian rule stores patterns x_1..x_s: w_ij = (1/n) sum_t x_ti x_tj, and w_ii = 0. In recall
    one unit after another takes the sign of its field,

        H_i = sum_j w_ij X_j - b_i,   X_i <- +1 if H_i >= 0, else -1

    which is the value of lower energy, +1 if both are equal. So the energy never rises, and
    recall ends in a state that no update changes. Hopfield, PNAS (1982); Perez Jensen, Deep
    Learning (lecture notes, 2024), section 1.4.

    Args:
        bias: b, one number or [n].
        max_iter: Passes over the units in recall, at most; more are an error.
        seed: Of the order of units, which is drawn anew for each pass.

    After fit: weights_ [n, n], bias_ [n], patterns_ [s, n].

    >>> import coadjoint as co
    >>> memory = co.classics.Hopfield().fit([[1, 1, 1, -1, -1, -1], [1, -1, 1, -1, 1, -1]])
    >>> memory.predict([[-1, 1, 1, -1, -1, -1]]).tolist()
    [[1.0, 1.0, 1.0, -1.0, -1.0, -1.0]]
    >>> memory.energy([[-1, 1, 1, -1, -1, -1], [1, 1, 1, -1, -1, -1]]).round(4).tolist()
    [-0.3333, -2.3333]
    """

    def __init__(self, bias: float | ArrayLike = 0.0, max_iter: int = 1000, seed: int = 0) -> None:
        self.bias = bias
        self.max_iter = max_iter
        self.seed = seed

    def fit(self, X: ArrayLike, y: object = None) -> Self:
        """Store the rows of X [s, n], entries -1 or +1. y is not used."""
        patterns = read_signs(X)
        n = patterns.shape[1]
        bias = read_bias(self.bias, n)
        # Sums of products of signs are whole numbers: fields divide them by n once, so that a field
        # of zero is exactly zero.
        self._sums = patterns.T @ patterns
        np.fill_diagonal(self._sums, 0)
        self.n_features_in_ = n
        self.patterns_ = patterns
        self.weights_ = self._sums / n
        self.bias_ = np.broadcast_to(bias, n).copy()
        return self

    def field(self, X: ArrayLike) -> Array:
        """H_i = sum_j w_ij X_j - b_i for the rows of X [m, n]: [m, n]."""
        found: Array = self._states(X) @ self._sums / self.n_features_in_ - self.bias_
        return found

    def energy(self, X: ArrayLike) -> Array:
        """H(X) = -1/2 sum_ij w_ij X_i X_j + sum_i b_i X_i for the rows of X [m, n]: [m]."""
        states = self._states(X)
        pairs = (states @ self._sums * states).sum(1) / self.n_features_in_
        found: Array = states @ self.bias_ - pairs / 2
        return found

    def crosstalk(self) -> Array:
        """What other patterns add to the field of each unit in a stored pattern, [s, n].

        C_ti = (1/n) sum_{j != i} sum_{r != t} x_ri x_rj x_tj, so that x_t has the field
        (n - 1)/n x_ti + C_ti - b_i. The sum leaves out j = i, as w_ii = 0. For random signs C_ti is
        nearly normal with variance s/n, and the chance that a sign is not stable nearly
        1/2 (1 - erf(sqrt(n / 2s))).
        """
        self.check_fitted()
        n = self.n_features_in_
        found: Array = (self.patterns_ @ self._sums - (n - 1) * self.patterns_) / n
        return found

    def predict(self, X: ArrayLike) -> Array:
        """The state in which recall ends, from each row of X [m, n]: [m, n]."""
        return np.stack([self.path(state)[-1] for state in self._states(X)])

    def path(self, x: ArrayLike) -> Array:
        """The states of recall from x [n]: x itself, and one for each changed unit, [k, n]."""
        state = self._states(np.asarray(x)[None])[0].copy()
        n = self.n_features_in_
        passes = whole_number("max_iter", self.max_iter)
        order = np.random.default_rng(check_seed(self.seed))
        sums = self._sums @ state
        states = [state.copy()]
        for _ in range(passes):
            before = len(states)
            for i in order.permutation(n):
                sign = 1.0 if sums[i] / n - self.bias_[i] >= 0 else -1.0
                if sign == state[i]:
                    continue
                sums += 2 * sign * self._sums[i]
                state[i] = sign
                states.append(state.copy())
            if len(states) == before:
                return np.stack(states)
        raise NumericalError(f"recall did not end within {passes} passes: raise max_iter.")

    def _states(self, X: ArrayLike) -> Array:
        """X as signs [m, n], with the n of fit."""
        return read_signs(self.rows(X))


def read_bias(bias: ArrayLike, n: int) -> Array:
    """The bias as one number or [n]; anything but finite numbers is refused."""
    try:
        found = np.asarray(bias, dtype=np.float64)
    except (TypeError, ValueError):
        found = np.array(np.nan)
    if found.shape not in ((), (n,)) or not np.isfinite(found).all():
        raise InputError(
            f"bias must be a finite number or {n} of them, one for each unit; got {brief(bias)}."
        )
    return found


def read_signs(X: ArrayLike) -> Array:
    """Rows [m, n] whose entries are -1 or +1; anything else is refused."""
    found = read_rows(X)
    if not (np.abs(found) == 1).all():
        raise InputError("X must hold -1 and +1 alone: write X > 0 as np.where(X > 0, 1, -1).")
    return found

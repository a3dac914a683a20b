"""Linear models a = X A + c by several strengths of the penalty on A: ridge and logistic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from ..sweeps.torch_internals import optimisers_without_compiler, take_step

# The strongest first. Those of ridge regression are shares of the largest eigenvalue of X'X.
RIDGE_STRENGTHS = tuple(10.0**k for k in range(2, -8, -1))
LOGISTIC_STRENGTHS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)


class LinearModel(NamedTuple):
    """A linear model, a = X A + c."""

    A: np.ndarray  # [F, outputs]
    c: np.ndarray  # [outputs]
    strength: float

    def predict(self, X: np.ndarray) -> np.ndarray:
        """Return a [n, outputs] of the inputs X [n, F]."""
        a: np.ndarray = X @ self.A + self.c
        return a


def ridge_path(X: np.ndarray, Y: np.ndarray) -> Iterator[LinearModel]:
    """Yield the minimisers of |Y - X A - c|^2 + alpha |A|^2, the strongest alpha first.

    X [n, F], Y [n, outputs]. alpha is a strength times the largest eigenvalue of X'X, X without
    its mean. One eigenvalue decomposition, of size min(n, F), serves all strengths.
    """
    mean = X.mean(0)
    target_mean = Y.mean(0)
    centred = X - mean
    wanted = Y - target_mean
    is_tall = len(X) >= X.shape[1]
    gram = centred.T @ centred if is_tall else centred @ centred.T
    s, Q = np.linalg.eigh(gram)
    right = Q.T @ (centred.T @ wanted if is_tall else wanted)
    largest = max(float(s[-1]), np.finfo(float).tiny)
    for strength in RIDGE_STRENGTHS:
        alpha = strength * largest
        A = Q @ (right / (np.maximum(s, 0) + alpha)[:, None])
        if not is_tall:
            A = centred.T @ A
        yield LinearModel(A, target_mean - mean @ A, strength)


def logistic_path(
    X: np.ndarray, y: np.ndarray, classes: int, iterations: int = 100
) -> Iterator[LinearModel]:
    """Yield the minimisers of the mean of -log softmax(X A + c)_y + strength |A|^2 / 2.

    X [n, F], y [n] class numbers. Each starts from the one before, the strongest first, and takes
    at most so many iterations of L-BFGS.
    """
    inputs = torch.from_numpy(X)
    targets = torch.from_numpy(y)
    A = torch.zeros(X.shape[1], classes, dtype=torch.float64, requires_grad=True)
    c = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    for strength in LOGISTIC_STRENGTHS:
        with optimisers_without_compiler():
            search = torch.optim.LBFGS([A, c], max_iter=iterations, line_search_fn="strong_wolfe")

        def objective(strength: float = strength) -> torch.Tensor:
            """Return the objective, with its gradient in A and c."""
            A.grad = c.grad = None
            with torch.enable_grad():
                loss = torch.nn.functional.cross_entropy(inputs @ A + c, targets)
                total: torch.Tensor = loss + strength / 2 * A.square().sum()
                total.backward()
            return total

        take_step(search, objective)
        yield LinearModel(A.detach().numpy().copy(), c.detach().numpy().copy(), strength)

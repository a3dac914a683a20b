"""The perceptron of Rosenblatt (1958): a linear threshold unit that learns from its mistakes."""

from __future__ import annotations

import warnings
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, check_kind, whole_number
from .estimator import Array, ClassicEstimator, read_rows


class Perceptron(ClassicEstimator):
    """f(x) = sgn(w'x + b), with w and b from the perceptron algorithm of Rosenblatt (1958).

    Passes over the data, in its order, from w = 0 and b = 0; where f(x) is not y,

        w <- w + y x,   b <- b + y          y = +1 for classes_[1], -1 for classes_[0]

    until a pass makes no mistake. If a unit vector w* classifies all data with margin gamma > 0 and
    R is the norm of the longest x, there are at most R^2 / gamma^2 mistakes (Novikoff 1962). With
    an intercept this holds for the vectors (x, 1). If no hyperplane separates the classes, there is
    always another mistake: fit stops after `max_iter` passes and warns. It is Algorithm 1 of Perez
    Jensen, Deep Learning (lecture notes, 2024), and the bound theorem 1.3.

    Args:
        fit_intercept: Whether there is a b; otherwise b = 0.
        max_iter: Passes over the data, at most.

    After fit: classes_, the two labels; coef_ [1, n] and intercept_ [1], w and b; mistakes_, the
    number of updates; n_iter_, the passes; converged_, whether the last pass made no mistake.

    >>> import coadjoint as co
    >>> X, y = [[2, 1], [1, 3], [-1, -2], [-2, 0]], ["up", "up", "down", "down"]
    >>> unit = co.classics.Perceptron(fit_intercept=False).fit(X, y)
    >>> unit.mistakes_, unit.coef_.tolist(), unit.predict([[1, 1]]).tolist()
    (1, [[2.0, 1.0]], ['up'])
    >>> round(unit.margin(X, y), 4)
    1.7889
    """

    kind = "classifier"

    def __init__(self, fit_intercept: bool = True, max_iter: int = 1000) -> None:
        self.fit_intercept = fit_intercept
        self.max_iter = max_iter

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learn from X [s, n] and y [s], labels of any kind, of which there are two."""
        passes = whole_number("max_iter", self.max_iter)
        check_kind("fit_intercept", self.fit_intercept, bool, "True or False")
        x = read_rows(X)
        classes = np.unique(read_labels(y, len(x)))
        if len(classes) != 2:
            raise InputError(f"y must have two classes; got {len(classes)}.")
        self.classes_ = classes
        self.n_features_in_ = x.shape[1]
        signs = self._signs(y, len(x))
        w = np.zeros(x.shape[1])
        b = 0.0
        self.mistakes_ = 0
        self.converged_ = False
        self.n_iter_ = 0
        while self.n_iter_ < passes and not self.converged_:
            before = self.mistakes_
            for row, sign in zip(x, signs, strict=True):
                if sign * (w @ row + b) <= 0:  # on the hyperplane f is 0, which is not y either
                    w += sign * row
                    b += sign * self.fit_intercept
                    self.mistakes_ += 1
            self.n_iter_ += 1
            self.converged_ = self.mistakes_ == before
        self.coef_ = w[None]
        self.intercept_ = np.array([b])
        if not self.converged_:
            warnings.warn(
                f"the perceptron still made mistakes in pass {passes}: the classes may not be "
                "separable by a hyperplane; otherwise raise max_iter.",
                stacklevel=2,
            )
        return self

    def decision_function(self, X: ArrayLike) -> Array:
        """The values w'x + b of the rows of X [s, n]: [s], positive for classes_[1]."""
        found: Array = self.rows(X) @ self.coef_[0] + self.intercept_[0]
        return found

    def predict(self, X: ArrayLike) -> NDArray[np.generic]:
        """The label of each row of X [s, n]: [s]; that of classes_[0] on the hyperplane itself."""
        is_second = self.decision_function(X) > 0
        chosen: NDArray[np.generic] = self.classes_[is_second.astype(int)]
        return chosen

    def score(self, X: ArrayLike, y: ArrayLike) -> float:
        """The share of the rows of X whose label in y [s] is predicted."""
        predicted = self.predict(X)
        return float(np.mean(predicted == read_labels(y, len(predicted))))

    def margin(self, X: ArrayLike, y: ArrayLike) -> float:
        """The least signed distance to the hyperplane: the minimum of y (w'x + b) / ||w||.

        It is positive if and only if every row is classified as y says. X is [s, n] and y is [s];
        a w of zero is no hyperplane, and refused.
        """
        values = self.decision_function(X)
        length = np.linalg.norm(self.coef_)
        if length == 0:
            raise InputError("the weights are zero and define no hyperplane: there is no margin.")
        return float((self._signs(y, len(values)) * values).min() / length)

    def _signs(self, y: ArrayLike, count: int) -> Array:
        """+1 for classes_[1], -1 for classes_[0]."""
        labels = read_labels(y, count)
        if not np.isin(labels, self.classes_).all():
            raise InputError(f"y holds a label that was not in fit: {self.classes_.tolist()}.")
        signs: Array = np.where(labels == self.classes_[1], 1.0, -1.0)
        return signs


def read_labels(y: ArrayLike, count: int) -> NDArray[np.generic]:
    """Labels [s] as an array, one for each of `count` rows."""
    labels = np.asarray(y)
    if labels.shape != (count,):
        raise InputError(
            f"y must have a label for each row of X, [{count}]; got shape {list(labels.shape)}."
        )
    # A missing label is None or NaN, which differs from itself.
    missing = [i for i, label in enumerate(labels.tolist()) if label is None or label != label]
    if missing:
        raise InputError(f"y has no label for row {missing[0]} of X; leave out such rows.")
    return labels

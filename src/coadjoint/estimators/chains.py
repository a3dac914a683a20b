"""ChainClassifier and ChainRegressor: networks without time, for vectors and images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils import Tags  # type: ignore[import-untyped]
from sklearn.utils.validation import validate_data  # type: ignore[import-untyped]

from .estimator import Estimator
from .layout import Given, advising_on_gaps
from .targets import ClassWeights, read_labels, read_numbers, weights_by_number

SMALLEST_IMAGE = 4  # rows and columns that a convolution and a pool leave something of


@dataclass(kw_only=True, eq=False, repr=False)
class ChainEstimator(Estimator):
    """A chain of layers for samples without time.

    chain        layers from the input to the readout: "64x2" (default), or for images
                 "conv 8 3, tanh, pool 2, flatten, 64"
    activation   "tanh", "relu", ... of layers that name none
    dropout      share of entries dropped in training
    init, gain   initial weights
    """

    chain: str | None = None
    activation: str | None = None
    dropout: float | None = None
    init: str | None = None
    gain: float | None = None

    def __sklearn_tags__(self) -> Tags:
        """What scikit-learn may expect."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.allows_gaps
        return tags

    def _settings(self) -> dict[str, Any]:
        """Return the parameters; layers that are not given are those for the shape of a sample."""
        settings = super()._settings()
        if settings["chain"] is None:
            settings["chain"] = self._default_chain
        return settings

    def _samples(self, X: Given, reset: bool) -> np.ndarray:
        """Return X checked, [n, ...]; reset: whether its features are those to expect from now."""
        with advising_on_gaps():
            samples: np.ndarray = validate_data(
                self,
                X,
                reset=reset,
                allow_nd=True,
                dtype=np.float64,
                ensure_min_samples=2 if reset else 1,
                ensure_all_finite="allow-nan" if self.allows_gaps else True,
            )
        if reset:
            self._default_chain = default_chain(samples.shape[1:], self.activation)
        return samples


def default_chain(shape: tuple[int, ...], activation: str | None) -> str:
    """Return the layers for samples of this shape, as the command line chooses them."""
    is_image = len(shape) in (2, 3) and min(shape[-2:]) >= SMALLEST_IMAGE
    if is_image:
        return f"conv 8 3, {activation or 'tanh'}, pool 2, flatten, 64"
    return "64x2"


@dataclass(kw_only=True, eq=False, repr=False)
class ChainClassifier(ClassifierMixin, ChainEstimator):  # type: ignore[misc]
    """A network without time that gives each sample a label.

    X is [n, features], or images [n, height, width] or [n, channels, height, width]; y has n labels
    of any kind. Parameters are the settings of `Estimator` and `ChainEstimator`, and class_weight,
    as in `SequenceClassifier`, which also lists what there is after `fit`.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from coadjoint.estimators import ChainClassifier
        >>> X, y = load_iris(return_X_y=True)
        >>> net = ChainClassifier(chain="16", epochs=20).fit(X, y)
        >>> net.predict(X[:2]).tolist(), net.score(X, y) > 0.9
        ([0, 0], True)
    """

    class_weight: ClassWeights = None

    def fit(self, X: Given, y: Given) -> ChainClassifier:
        """Train a new network on samples X with labels y, and return the estimator."""
        samples = self._samples(X, reset=True)
        self.classes_, numbers = read_labels(y, samples)
        weights = weights_by_number(self.class_weight, self.classes_)
        names = [str(label) for label in self.classes_]
        self._fit(samples, numbers, names, kind="classify", rows="samples", class_weight=weights)
        return self

    def predict_proba(self, X: Given) -> np.ndarray:
        """Return the probability of each class, [n, classes], in the order of classes_."""
        self._check_fitted()
        return np.asarray(self.model_.predict_proba(self._samples(X, reset=False)))

    def predict(self, X: Given) -> np.ndarray:
        """Return the most probable label of each sample, [n]."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])


@dataclass(kw_only=True, eq=False, repr=False)
class ChainRegressor(RegressorMixin, ChainEstimator):  # type: ignore[misc]
    """A network without time that gives each sample a number, or several.

    X is as in `ChainClassifier`; y is [n], or [n, k] for k targets, which are learned in units of
    their standard deviation.

    Example:
        >>> import numpy as np
        >>> from coadjoint.estimators import ChainRegressor
        >>> X = np.random.default_rng(0).normal(size=(200, 3))
        >>> y = X[:, 0] * X[:, 1]
        >>> net = ChainRegressor(epochs=30, dropout=0.0).fit(X, y)
        >>> net.predict(X[:2]).shape, net.score(X, y) > 0.9
        ((2,), True)
    """

    def __sklearn_tags__(self) -> Tags:
        """What scikit-learn may expect."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Given, y: Given) -> ChainRegressor:
        """Train a new network on samples X with targets y, and return the estimator."""
        samples = self._samples(X, reset=True)
        numbers = read_numbers(y, samples, self)
        self._fit(samples, numbers, kind="regress", rows="samples")
        return self

    def predict(self, X: Given) -> np.ndarray:
        """Return the number of each sample, [n], or [n, k]."""
        self._check_fitted()
        return np.asarray(self.model_.predict(self._samples(X, reset=False)))

"""SequenceClassifier and SequenceRegressor: one answer for each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin  # type: ignore[import-untyped]
from sklearn.utils import Tags  # type: ignore[import-untyped]

from .estimator import Estimator
from .layout import Given, Sequences, count_features, read_sequences, refuse_other_width
from .targets import ClassWeights, read_labels, read_numbers, weights_by_number


@dataclass(kw_only=True, eq=False, repr=False)
class RecurrentEstimator(Estimator):
    """A recurrent network for sequences.

    cell                    a cell by name, `coadjoint cells` lists them, or a list, one per layer
    hidden, layers          units in a layer, or a list, one per layer; how many layers
    bidirectional           read in both directions
    residual, dense         add the input of each layer to its output; read all layers below
    dropout                 share of entries dropped in training
    readout                 "mean", "attention", ...: one answer from all steps
    activation, skip, init  as on the command line
    channels_first          X is [n, features, T] or a list of [features, T_i], as in aeon
    """

    cell: str | list[str] | None = None
    hidden: int | list[int] | None = None
    layers: int | None = None
    bidirectional: bool | None = None
    residual: bool | None = None
    dense: bool | None = None
    dropout: float | None = None
    readout: str | None = None
    activation: str | None = None
    skip: bool | None = None
    init: str | None = None
    channels_first: bool = False

    def __sklearn_tags__(self) -> Tags:
        """What scikit-learn may expect."""
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.allow_nan = self.allows_gaps
        return tags

    def _sequences_to_fit(self, X: Given) -> Sequences:
        """Return X checked; the number of its features is kept."""
        sequences = read_sequences(X, self.channels_first, self.allows_gaps, self, fewest=2)
        self.n_features_in_ = count_features(sequences)
        return sequences

    def _sequences(self, X: Given) -> Sequences:
        """Return X checked, for a network that is trained."""
        self._check_fitted()
        sequences = read_sequences(X, self.channels_first, self.allows_gaps, self)
        refuse_other_width(sequences, self.n_features_in_, type(self).__name__)
        return sequences


@dataclass(kw_only=True, eq=False, repr=False)
class SequenceClassifier(ClassifierMixin, RecurrentEstimator):  # type: ignore[misc]
    """A recurrent network that gives each sequence a label.

    X is [n, T, features], [n, T] for one feature, or a list of [T_i, features]; y has n labels of
    any kind. Parameters are the settings of `Estimator` and `RecurrentEstimator`, and

    class_weight   "balanced", or {label: weight} with weights above 0, of the loss in training

    After `fit`:

    classes_            the labels, sorted
    n_features_in_      features of a time step
    model_, network_    a co.Model, which also reads files and frames; its network
    history_            the rows of metrics of training and validation
    best_step_          the step whose weights were kept; None for the last

    Example: 40 sequences of 12 steps and 2 features.
        >>> import numpy as np
        >>> from coadjoint.estimators import SequenceClassifier
        >>> X = np.random.default_rng(0).normal(size=(40, 12, 2))
        >>> y = np.where(X.sum((1, 2)) > 0, "up", "down")
        >>> net = SequenceClassifier(hidden=8, epochs=20, seed=1).fit(X, y)
        >>> net.classes_.tolist(), net.predict_proba(X).shape
        (['down', 'up'], (40, 2))
        >>> net.score(X, y) > 0.9
        True
    """

    class_weight: ClassWeights = None

    def fit(self, X: Given, y: Given) -> SequenceClassifier:
        """Train a new network on sequences X with labels y, and return the estimator."""
        sequences = self._sequences_to_fit(X)
        self.classes_, numbers = read_labels(y, sequences)
        weights = weights_by_number(self.class_weight, self.classes_)
        names = [str(label) for label in self.classes_]
        self._fit(sequences, numbers, names, kind="classify", at="last", class_weight=weights)
        return self

    def predict_proba(self, X: Given) -> np.ndarray:
        """Return the probability of each class, [n, classes], in the order of classes_."""
        sequences = self._sequences(X)
        return np.asarray(self.model_.predict_proba(sequences))

    def predict(self, X: Given) -> np.ndarray:
        """Return the most probable label of each sequence, [n]."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])


@dataclass(kw_only=True, eq=False, repr=False)
class SequenceRegressor(RegressorMixin, RecurrentEstimator):  # type: ignore[misc]
    """A recurrent network that gives each sequence a number, or several.

    X is [n, T, features], [n, T] for one feature, or a list of [T_i, features]; y is [n], or [n, k]
    for k targets. Targets are learned in units of their standard deviation. Parameters are the
    settings of `Estimator` and `RecurrentEstimator`; after `fit` there are n_features_in_, model_,
    network_, history_ and best_step_, as in `SequenceClassifier`.

    Example: sequences of different lengths.
        >>> import numpy as np
        >>> from coadjoint.estimators import SequenceRegressor
        >>> rng = np.random.default_rng(0)
        >>> X = [rng.normal(size=(T, 2)) for T in rng.integers(5, 15, 60)]
        >>> y = [x[:, 0].mean() for x in X]
        >>> net = SequenceRegressor(hidden=8, epochs=30).fit(X, y)
        >>> net.predict(X[:3]).shape, net.score(X, y) > 0.9
        ((3,), True)
    """

    def __sklearn_tags__(self) -> Tags:
        """What scikit-learn may expect."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(self, X: Given, y: Given) -> SequenceRegressor:
        """Train a new network on sequences X with targets y, and return the estimator."""
        sequences = self._sequences_to_fit(X)
        numbers = read_numbers(y, sequences, self)
        self._fit(sequences, numbers, kind="regress", at="last")
        return self

    def predict(self, X: Given) -> np.ndarray:
        """Return the number of each sequence, [n], or [n, k]."""
        sequences = self._sequences(X)
        return np.asarray(self.model_.predict(sequences))

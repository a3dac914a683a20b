"""Estimators: networks with the interface of scikit-learn.

    co.estimators.SequenceClassifier(cell="gru", hidden=32).fit(X, y).predict(X_new)

This package imports `models` and the packages before it. It needs scikit-learn 1.6 or later:
pip install 'coadjoint[sklearn]'.

sequences    SequenceClassifier, SequenceRegressor
chains       ChainClassifier, ChainRegressor: networks without time, for vectors and images
forecaster   Forecaster: the next steps of a series
estimator    what they share: settings as parameters, fitting, pickling
targets      labels of any kind as class numbers, and numbers
layout       sequences in the forms that they may be given in
sections     settings by section, with defaults for your own data
fitting      sections and data -> a trained network
"""

from __future__ import annotations

from ..errors import MissingError

try:
    from sklearn.utils.validation import validate_data  # type: ignore[import-untyped]  # noqa: F401
except ImportError:
    raise MissingError(
        "coadjoint.estimators needs scikit-learn 1.6 or later: pip install 'coadjoint[sklearn]'."
    ) from None

from .chains import ChainClassifier, ChainRegressor
from .forecaster import Forecaster
from .sequences import SequenceClassifier, SequenceRegressor

__all__ = [
    "ChainClassifier",
    "ChainRegressor",
    "Forecaster",
    "SequenceClassifier",
    "SequenceRegressor",
]

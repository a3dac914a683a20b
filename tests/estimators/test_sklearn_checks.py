"""scikit-learn's own checks of estimators.

They run with short training and small networks. A check that does not apply is named with its
reason, and fails if it passes.
"""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from coadjoint.estimators import (
    ChainClassifier,
    ChainRegressor,
    SequenceClassifier,
    SequenceRegressor,
)

pytestmark = pytest.mark.slow

# 64 bits, because the checks compare predictions to 1e-7; the last weights, because a validation
# set of few samples may choose the first ones.
QUICK = {"steps": 60, "every": 60, "batch": 32, "lr": 0.03, "valid_share": 0.0, "precision": 64}
CHAIN = {"chain": "8", "dropout": 0.0, **QUICK}
SEQUENCES = {"cell": "elman", "hidden": 4, "readout": "mean", **QUICK}
ESTIMATORS = [
    ChainClassifier(**CHAIN),
    ChainRegressor(**CHAIN),
    SequenceClassifier(**SEQUENCES),
    SequenceRegressor(**SEQUENCES),
]
OF_SEQUENCES: dict[str, str] = {}


def expected_failures(estimator):
    return OF_SEQUENCES if isinstance(estimator, SequenceClassifier | SequenceRegressor) else {}


@parametrize_with_checks(ESTIMATORS, expected_failed_checks=expected_failures)
def test_scikit_learn_accepts_the_estimators(estimator, check):
    check(estimator)

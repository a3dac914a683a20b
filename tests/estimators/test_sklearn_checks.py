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
QUICK = {"steps": 15, "every": 15, "batch": 64, "lr": 0.1, "valid_share": 0.0, "precision": 64}
CHAIN = {"chain": "8", "dropout": 0.0, **QUICK}
SEQUENCES = {"cell": "elman", "hidden": 4, **QUICK}
# Both tables hold a chain and a recurrent network, a classifier and a regressor.
ESTIMATORS = [
    ChainClassifier(**CHAIN),
    SequenceRegressor(**SEQUENCES | {"hidden": 16, "steps": 60, "lr": 0.03}),
]
OTHER_ESTIMATORS = [ChainRegressor(**CHAIN), SequenceClassifier(**SEQUENCES)]
# X [n, T] holds sequences of one feature, whose length may change from fit to predict.
COLUMNS_ARE_STEPS = "the columns are time steps: n_features_in_ counts the features of a step"
OF_SEQUENCES = {
    "check_n_features_in": COLUMNS_ARE_STEPS,
    "check_n_features_in_after_fitting": COLUMNS_ARE_STEPS,
    "check_classifiers_train": "all of it holds but that predict refuses sequences of other length",
}


def expected_failures(estimator):
    """The checks that fail, with the reason for each."""
    if isinstance(estimator, SequenceClassifier):
        return OF_SEQUENCES
    if isinstance(estimator, SequenceRegressor):
        return {name: OF_SEQUENCES[name] for name in OF_SEQUENCES if "classifiers" not in name}
    return {}


@parametrize_with_checks(ESTIMATORS, expected_failed_checks=expected_failures)
def test_scikit_learn_accepts_the_estimators(estimator, check):
    check(estimator)


@pytest.mark.thorough
@parametrize_with_checks(OTHER_ESTIMATORS, expected_failed_checks=expected_failures)
def test_scikit_learn_accepts_the_other_estimators(estimator, check):
    check(estimator)

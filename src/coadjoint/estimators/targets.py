"""Targets: labels of any kind as class numbers, and numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import (  # type: ignore[import-untyped]
    check_array,
    check_consistent_length,
    column_or_1d,
)

from ..errors import InputError, brief
from .layout import Given

ClassWeights = str | Mapping[Any, float] | None


def read_labels(y: Given, X: Given) -> tuple[np.ndarray, np.ndarray]:
    """Return the classes in y, sorted, and the class number of each entry, [n].

    Args:
        y: [n], labels of any one kind.
        X: As many sequences or samples.
    """
    if y is None:
        raise InputError("fit requires y to be passed, but the target y is None: give the labels.")
    labels = column_or_1d(y, warn=True)
    check_classification_targets(labels)
    check_consistent_length(X, labels)
    classes, numbers = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise InputError(
            f"y has one class only, {brief(classes.tolist()[0])}; expected at least two classes."
        )
    return classes, numbers


def read_numbers(y: Given, X: Given, estimator: Given) -> np.ndarray:
    """Return targets as floats, [n] or [n, k].

    Args:
        y: [n], or [n, k] for k targets.
        X: As many sequences or samples.
        estimator: For messages.
    """
    if y is None:
        raise InputError("fit requires y to be passed, but the target y is None: give the numbers.")
    numbers: np.ndarray = check_array(
        y, ensure_2d=False, dtype=np.float64, input_name="y", estimator=estimator
    )
    check_consistent_length(X, numbers)
    if numbers.ndim > 2:
        raise InputError(f"y has shape {list(numbers.shape)}; expected [n] or [n, k].")
    if numbers.ndim == 2 and numbers.shape[1] == 1:
        numbers = column_or_1d(y, warn=True).astype(np.float64)
    return numbers


def weights_by_number(given: ClassWeights, classes: np.ndarray) -> ClassWeights:
    """Return class weights by the text of class numbers, as `Data` takes them.

    Args:
        given: None, "balanced", or {label: weight}.
        classes: The labels, in order.
    """
    if given is None or given == "balanced":
        return given
    if not isinstance(given, Mapping):
        raise InputError(
            f"class_weight must be None, 'balanced' or {{label: weight}}; got {brief(given)}."
        )
    number_of = {label: str(k) for k, label in enumerate(classes.tolist())}
    unknown = [label for label in given if label not in number_of]
    if unknown:
        raise InputError(f"class_weight: there is no class {brief(unknown[0])} in y.")
    return {number_of[label]: float(weight) for label, weight in given.items()}

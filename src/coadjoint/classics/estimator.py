"""What the classics share: parameters by name, as scikit-learn asks for them, and rows of numbers.

scikit-learn is not imported: its pipelines, searches and `clone` ask an estimator for get_params,
set_params and __sklearn_tags__ alone.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import ClassVar, Self, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import InputError, brief, choose

Array: TypeAlias = NDArray[np.float64]


class ClassicEstimator:
    """Parameters are the arguments of __init__, kept under their names until fit reads them."""

    kind: ClassVar[str | None] = None  # "classifier", if scikit-learn should split by class
    n_features_in_: int  # columns of the X of fit

    @classmethod
    def _names(cls) -> list[str]:
        return list(inspect.signature(cls).parameters)

    def get_params(self, deep: bool = True) -> dict[str, object]:
        """The parameters by name. `deep` is scikit-learn's, and has no effect here."""
        return {name: getattr(self, name) for name in self._names()}

    def set_params(self, **parameters: object) -> Self:
        """Set parameters by name; an unknown name is refused."""
        for name, value in parameters.items():
            setattr(self, choose("parameter", name, self._names()), value)
        return self

    def __repr__(self) -> str:
        """The class and its parameters."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items())
        return f"{type(self).__name__}({given})"

    def __sklearn_tags__(self) -> SimpleNamespace:
        """What scikit-learn 1.6 and later asks before it splits or checks data."""
        required = self.kind is not None
        return SimpleNamespace(
            estimator_type=self.kind,
            target_tags=SimpleNamespace(
                required=required, one_d_labels=True, multi_output=False, single_output=True
            ),
            input_tags=SimpleNamespace(
                pairwise=False, sparse=False, allow_nan=False, two_d_array=True
            ),
            classifier_tags=SimpleNamespace(multi_class=False, multi_label=False),
            transformer_tags=None,
            regressor_tags=None,
            array_api_support=False,
            no_validation=False,
            non_deterministic=False,
            requires_fit=True,
        )

    def check_fitted(self) -> None:
        """Refuse an estimator that has not been fitted."""
        if not hasattr(self, "n_features_in_"):
            name = type(self).__name__
            raise InputError(f"this {name} is not fitted yet: call fit before it is used.")

    def rows(self, X: ArrayLike) -> Array:
        """X as finite numbers [s, n], with the n of fit; anything else is refused."""
        self.check_fitted()
        found = read_rows(X)
        if found.shape[1] != self.n_features_in_:
            raise InputError(
                f"X has {found.shape[1]} columns; expected {self.n_features_in_}, as in fit."
            )
        return found


def read_rows(X: ArrayLike) -> Array:
    """X as finite float64 numbers [s, n], s and n at least 1; anything else is refused."""
    try:
        found = np.asarray(X, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"X must be rows of numbers, [s, n]; got {brief(X)}.") from None
    if found.ndim != 2 or not found.size:
        raise InputError(
            f"X must be rows of numbers, [s, n]; got shape {list(found.shape)}. For one sample, "
            "give [x]."
        )
    if not np.isfinite(found).all():
        raise InputError("X must be finite; it holds NaN or infinity.")
    return found

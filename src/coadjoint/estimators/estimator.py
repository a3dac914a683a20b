"""What all estimators share: settings as parameters, fitting, and pickling by a model file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sklearn.base import BaseEstimator  # type: ignore[import-untyped]
from sklearn.exceptions import NotFittedError  # type: ignore[import-untyped]

from ..errors import DataError, InputError, choose, real
from ..networks.interface import Net
from ..tasks.data import Data
from ..tasks.description import JsonDict, PathLike
from ..training import files
from . import fitting
from .layout import Given, random_seed
from .sections import group

VALID_SHARE = 0.1  # by default, of the data
FEWEST = 10  # sequences or samples of which some are split off by default


@dataclass(kw_only=True, eq=False, repr=False)
class Estimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """A network that is trained by `fit`. None is the default for your own data.

    Settings have the names of the command line's flags; `options` takes those that are no
    parameters: options={"weight_schedule": "linear"}. Data that are split off choose the best
    weights and end the run (patience).

    optimiser, lr, weight_decay, schedule   adam, adamw, sgd, ...; its step size
    batch, epochs, steps    sequences or samples in a step; how long to train: epochs or steps
    every, patience, select  steps between validations; how many without improvement end the run;
                            the metric that decides
    clip                    the largest norm of a gradient
    penalty, weight, method  a penalty on the costates and its weight; the gradient method
    seconds                 a budget of time
    missing                 "refuse" (default), "mask", "ffill" or "drop": NaN in X
    standardise             scale inputs to mean 0 and variance 1 (default)
    valid_share             share of the data that is split off; by default 0.1, or 0 of fewer than
                            10 samples
    seed, random_state      the same setting under two names; 0 by default
    device, precision, threads   "cpu", "cuda" or "auto"; 32 or 64 bits; threads of the CPU
    verbose                 print what was chosen, and the progress
    """

    optimiser: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    schedule: str | None = None
    batch: int | None = None
    epochs: int | None = None
    steps: int | None = None
    every: int | None = None
    patience: int | None = None
    select: str | None = None
    clip: float | None = None
    penalty: str | None = None
    weight: float | None = None
    method: str | None = None
    seconds: float | None = None
    missing: str | None = None
    standardise: bool | None = None
    valid_share: float | None = None
    seed: int | None = None
    random_state: Any = None
    device: str = "cpu"
    precision: int = 32
    threads: int | None = None
    verbose: bool | int = 0
    options: Mapping[str, Any] | None = None

    @property
    def network_(self) -> Net:
        """The trained network, in evaluation mode."""
        return self.model_.network

    @property
    def allows_gaps(self) -> bool:
        """Whether X may hold NaN."""
        return self.missing not in (None, "refuse")

    def _fit(self, X: Given, y: Given, classes: list[str] | None = None, **reading: Any) -> None:
        """Train a network on X and y.

        Args:
            X: Sequences or samples, checked.
            y: Targets; of classes, their numbers.
            classes: The labels of these numbers, for the model.
            **reading: Options of `Data.of`: kind, at, rows, class_weight.
        """
        if self.precision not in (32, 64):
            raise InputError(f"precision must be 32 or 64; got {self.precision!r}.")
        if self.missing is not None:
            choose(
                "way to handle missing values", self.missing, ("refuse", "drop", "ffill", "mask")
            )
        given = group(self._settings())
        seed = random_seed(self.seed, self.random_state)
        task = self._read(X, y, seed, {**given.pop("data"), **reading})
        given["data"] = {}
        trained = fitting.train(
            task, given, seed, self.precision, self.device, self.threads, bool(self.verbose)
        )
        self.description_ = with_labels(trained.description, classes)
        self.model_ = fitting.make_model(trained.network, self.description_)
        self.history_ = fitting.history_of(trained.result)
        self.best_step_ = trained.result.best_step

    def _settings(self) -> dict[str, Any]:
        """Return the parameters, by name."""
        settings: dict[str, Any] = self.get_params(deep=False)
        return settings

    def _read(self, X: Given, y: Given, seed: int, reading: dict[str, Any]) -> Data:
        """Return the data as a task, with a validation set if there is enough for one."""
        share = VALID_SHARE if self.valid_share is None else self.valid_share
        real("valid_share", share, 0)
        if share >= 1:
            raise InputError(f"valid_share must be below 1, such as 0.1; got {share!r}.")
        if self.valid_share is None and not self._has_enough(X):
            share = 0.0
        reading["dtype"] = "float64" if self.precision == 64 else "float32"
        split = (1.0 - share, share, 0.0)
        try:
            return Data.of(X, y, split=split, seed=seed, **reading)
        except DataError:
            if self.valid_share is not None or share == 0:
                raise
        # what is too little to split is used as a whole, unless that was refused for another reason
        return Data.of(X, y, split=(1.0, 0.0, 0.0), seed=seed, **reading)

    def _has_enough(self, X: Given) -> bool:
        """Whether some of X are split off by default."""
        return len(X) >= FEWEST

    def _check_fitted(self) -> None:
        """Refuse an estimator that has not been fitted."""
        if not hasattr(self, "model_"):
            raise NotFittedError(
                f"This {type(self).__name__} instance is not fitted yet: call fit before this."
            )

    def save(self, path: PathLike) -> None:
        """Write the model to a file, PATH.safetensors, for `co.load` and `coadjoint predict`."""
        self._check_fitted()
        if not os.fspath(path).endswith(".safetensors"):
            raise InputError(f"the name of a model file ends with .safetensors; got {path!r}.")
        files.replace(path, fitting.to_bytes(self.network_, self.description_))

    def __getstate__(self) -> JsonDict:
        """The parameters and what was fitted; the model as the bytes of its file."""
        state: JsonDict = dict(super().__getstate__())
        if "model_" in state:
            state["model_"] = fitting.to_bytes(self.network_, self.description_)
        return state

    def __setstate__(self, state: JsonDict) -> None:
        """Restore what `__getstate__` gave; the network is on the CPU."""
        state = dict(state)
        content = state.pop("model_", None)
        super().__setstate__(state)
        if content is not None:
            self.model_ = fitting.from_bytes(content, self.description_)


def with_labels(description: JsonDict, classes: list[str] | None) -> JsonDict:
    """Return the description with the labels of the user in place of their numbers.

    Labels that are the same as text keep their numbers.
    """
    if classes is None or len(set(classes)) < len(classes) or "" in classes:
        return description
    data = dict(description["data"])
    data["labels"] = [classes[int(number)] for number in data["labels"]]
    return {**description, "data": data}

"""Forecaster: the next steps of a series."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sklearn.metrics import r2_score  # type: ignore[import-untyped]

from ..errors import InputError, choose, whole_number
from ..models.forecast import Forecast
from ..training.own_defaults import reads_lags
from .layout import Given, Sequences, count_features, read_sequences, refuse_other_width
from .sections import group
from .sequences import RecurrentEstimator

FEWEST_STEPS = 20  # of a series whose end is split off by default


@dataclass(kw_only=True, eq=False, repr=False)
class Forecaster(RecurrentEstimator):
    """A recurrent network that continues series.

    A series is [T] or [T, features]; several are [n, T, features] or a list. The validation set is
    the end of a single series, or some of several.

    horizon    the steps that `predict` returns by default
    strategy   "recursive" (default): learn to predict the next step, and for more steps read the
               own predictions; "direct": learn to predict `horizon` steps at once
    known      numbers of features, from 0, that are known in advance, such as [1]: they are inputs,
               the others are predicted, and `predict` takes their `future`

    Other parameters are the settings of `Estimator` and `RecurrentEstimator`. After `fit` there are
    n_features_in_, model_, network_, history_ and best_step_, as in `SequenceClassifier`.

    Example: a wave of 120 steps.
        >>> import numpy as np
        >>> from coadjoint.estimators import Forecaster
        >>> series = np.sin(np.arange(120) / 3)
        >>> net = Forecaster(12, hidden=16, epochs=100).fit(series)
        >>> forecast = net.predict()
        >>> forecast.shape, bool(np.abs(forecast - np.sin(np.arange(120, 132) / 3)).max() < 0.3)
        ((12,), True)
    """

    horizon: int = field(default=1, kw_only=False)
    strategy: str | None = None
    known: Sequence[int] | None = None

    def fit(self, series: Given, y: Given = None) -> Forecaster:
        """Train a new network to predict each next step, and return the estimator.

        Args:
            series: [T], [T, features], [n, T, features] or a list of [T_i, features].
            y: Not used; here for scikit-learn.
        """
        horizon = whole_number("horizon", self.horizon)
        strategy = "recursive" if self.strategy is None else self.strategy
        choose("strategy", strategy, ("recursive", "direct"))
        sequences, form = self._read_series(series)
        self.n_features_in_ = count_features(sequences)
        ahead: dict[str, Any] = {}
        if strategy == "direct":
            ahead = {"horizon": horizon, "strategy": strategy}
        known = known_numbers(self.known, self.n_features_in_)
        self.predicted_ = [j for j in range(self.n_features_in_) if j not in known]
        if known:
            names = [f"feature {j}" for j in range(self.n_features_in_)]
            ahead |= {"features": names, "known": [names[j] for j in known]}
        asked = {"kind": "next", **ahead, **group(self._settings())["data"]}
        asked.pop("standardise", None)
        if reads_lags(asked, self.cell):
            ahead["lags"] = "auto"
        self._fit(sequences, None, kind="next", at="every", **ahead)
        self.series_ = sequences
        self.form_ = form
        return self

    def predict(
        self, steps: int | None = None, series: Given = None, future: Given = None
    ) -> np.ndarray:
        """Return the next steps: [steps], [steps, features], or of several [n, steps, features].

        Args:
            steps: How many; horizon by default.
            series: The past; by default that of `fit`.
            future: The features that are `known`, in the rows after the end: [F, known], or of
                several series [n, F, known]. F is at least steps; with strategy "direct" it must
                reach to the end of the last `horizon` steps.
        """
        forecast, form = self._forecast(steps, series, 0.9, future)
        return arrange(forecast.values, form)

    def predict_interval(
        self,
        steps: int | None = None,
        series: Given = None,
        level: float = 0.9,
        future: Given = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the lower and upper ends of intervals for the next steps, as `predict`.

        They come from errors in the past; see `co.Model.forecast`, which also tells from which.

        Args:
            steps: How many; horizon by default.
            series: The past; by default that of `fit`.
            level: The share of values that the intervals are to hold, in (0, 1).
            future: As in `predict`.
        """
        forecast, form = self._forecast(steps, series, level, future)
        return arrange(forecast.lower, form), arrange(forecast.upper, form)

    def _forecast(
        self, steps: int | None, series: Given, level: float, future: Given
    ) -> tuple[Forecast, str]:
        """Return the forecast of the model, and the form of the series."""
        self._check_fitted()
        count = whole_number("steps", self.horizon if steps is None else steps)
        sequences, form = self.series_, self.form_
        if series is not None:
            sequences, form = self._read_series(series)
            refuse_other_width(sequences, self.n_features_in_, type(self).__name__)
        known = known_numbers(self.known, self.n_features_in_)
        if known or future is not None:
            sequences = with_future(sequences, known, future, count)
        return self.model_.forecast(list(sequences), count, level), form

    def score(self, series: Given, y: Given = None) -> float:
        """Return R² of the predictions of each next step; y is not used.

        A short series has rows one season before as inputs: in its first season, which lacks them,
        the predictions are poor, and count.
        """
        self._check_fitted()
        sequences, _ = self._read_series(series)
        refuse_other_width(sequences, self.n_features_in_, type(self).__name__)
        predicted = []
        true = []
        for one in sequences:
            answers = np.asarray(self.model_.predict([one])[0])
            # of several steps at once the first is the next one
            predicted.append(answers.reshape(len(one), -1)[:-1, : len(self.predicted_)])
            true.append(one[1:, self.predicted_])
        return float(r2_score(np.concatenate(true), np.concatenate(predicted)))

    def _read_series(self, series: Given) -> tuple[Sequences, str]:
        """Return series as [n, T, C] or a list of [T_i, C], and the form they were given in."""
        form = "several"
        axes = np.ndim(series) if not isinstance(series, list) else axes_of(series)
        if axes == 1:
            form = "numbers"
            series = np.asarray(series)[None]
        elif axes == 2 and not isinstance(series, list):
            form = "rows"
            series = np.asarray(series)
            series = (series.T if self.channels_first else series)[None]
            sequences = read_sequences(series, False, self.allows_gaps, self)
            return refuse_short(sequences), form
        sequences = read_sequences(series, self.channels_first, self.allows_gaps, self)
        return refuse_short(sequences), form

    def _has_enough(self, X: Given) -> bool:
        """Whether some of the series, or the end of a single one, are split off by default."""
        return len(X[0]) >= FEWEST_STEPS if len(X) == 1 else super()._has_enough(X)


def axes_of(series: list[Any]) -> int:
    """Return 1 for a list of numbers, else 2: a list of series."""
    return 1 if all(np.ndim(value) == 0 for value in series) else 2


def refuse_short(sequences: Sequences) -> Sequences:
    """Return series of at least two steps; shorter ones are refused."""
    for i, one in enumerate(sequences):
        if len(one) < 2:
            raise InputError(f"series {i} has {len(one)} step; expected two or more.")
    return sequences


def arrange(paths: np.ndarray, form: str) -> np.ndarray:
    """Return paths [n, steps, C] in the form of the series: "numbers", "rows" or "several"."""
    if form == "numbers":
        return paths[0, :, 0]
    return paths[0] if form == "rows" else paths


def known_numbers(known: Sequence[int] | None, features: int) -> list[int]:
    """Return the numbers of features that are known in advance; not all of them may be."""
    numbers = [] if known is None else list(known)
    is_valid = all(type(j) is int and 0 <= j < features for j in numbers)
    if not is_valid or len(set(numbers)) < len(numbers) or len(numbers) == features:
        raise InputError(
            f"known must be numbers of features from 0 to {features - 1}, not all of them; got "
            f"{known!r}."
        )
    return numbers


def with_future(sequences: Sequences, known: list[int], future: Given, steps: int) -> Sequences:
    """Return series with rows of the future at their end, NaN in what is predicted."""
    if future is None or not known:
        what = "future=" if known else "known=[...] in the estimator"
        raise InputError(f"features that are known, and their future, go together: give {what}.")
    given = np.asarray(future, dtype=np.float64)
    given = given if given.ndim == 3 else given[None]
    has_shape = given.ndim == 3 and given.shape[::2] == (len(sequences), len(known))
    if not has_shape or given.shape[1] < steps:
        raise InputError(
            f"future has shape {list(np.shape(future))}; expected [{steps} or more, {len(known)}], "
            f"of several series [{len(sequences)}, {steps} or more, {len(known)}]."
        )
    longer = []
    for one, rows in zip(sequences, given, strict=True):
        after = np.full((len(rows), one.shape[1]), np.nan)
        after[:, known] = rows
        longer.append(np.concatenate([one, after]))
    return longer

"""Forecaster: the next steps of a series."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from sklearn.metrics import r2_score  # type: ignore[import-untyped]

from ..errors import InputError, whole_number
from ..models.model import Model
from ..objectives.batch import Batch
from .layout import Sequences, count_features, read_sequences, refuse_other_width
from .sequences import RecurrentEstimator

FEWEST_STEPS = 20  # of a series whose end is split off by default


@dataclass(kw_only=True, eq=False, repr=False)
class Forecaster(RecurrentEstimator):
    """A recurrent network that continues series.

    It learns to predict the next step from those before it; for more steps it reads its own
    predictions. A series is [T] or [T, features]; several are [n, T, features] or a list. The
    validation set is the end of a single series, or some of several.

    horizon   the steps that `predict` returns by default

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

    def fit(self, series: Any, y: Any = None) -> Forecaster:
        """Train a new network to predict each next step, and return the estimator.

        Args:
            series: [T], [T, features], [n, T, features] or a list of [T_i, features].
            y: Not used; here for scikit-learn.
        """
        whole_number("horizon", self.horizon)
        sequences, form = self._read_series(series)
        self.n_features_in_ = count_features(sequences)
        self._fit(sequences, None, kind="next", at="every")
        self.series_ = sequences
        self.form_ = form
        return self

    def predict(self, steps: int | None = None, series: Any = None) -> np.ndarray:
        """Return the next steps: [steps], [steps, features], or [n, steps, ...] of several series.

        Args:
            steps: How many; horizon by default.
            series: The past; by default that of `fit`.
        """
        self._check_fitted()
        count = whole_number("steps", self.horizon if steps is None else steps)
        sequences, form = self.series_, self.form_
        if series is not None:
            sequences, form = self._read_series(series)
            refuse_other_width(sequences, self.n_features_in_, type(self).__name__)
        paths = np.stack([continue_series(self.model_, one, count) for one in sequences])
        return arrange(paths, form)

    def score(self, series: Any, y: Any = None) -> float:
        """Return R² of the predictions of each next step; y is not used."""
        self._check_fitted()
        sequences, _ = self._read_series(series)
        refuse_other_width(sequences, self.n_features_in_, type(self).__name__)
        predicted = []
        true = []
        for one in sequences:
            answers = np.asarray(self.model_.predict([one])[0])
            predicted.append(answers.reshape(len(one), -1)[:-1])
            true.append(one[1:])
        return float(r2_score(np.concatenate(true), np.concatenate(predicted)))

    def _read_series(self, series: Any) -> tuple[Sequences, str]:
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

    def _has_enough(self, X: Any) -> bool:
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


def continue_series(model: Model, past: np.ndarray, steps: int) -> np.ndarray:
    """Return the next steps of a series, [steps, C]: the network reads its own predictions.

    A network that carries no state reads the whole series again for each step.
    """
    d = model.description
    prediction = model.prepare([past])
    if len(prediction) != 1:
        raise InputError("the series holds missing values that cannot be continued.")
    _, batch = next(prediction.batches())
    batch = model.network.move_batch(batch)
    mean, std = np.array(d.mean), np.array(d.std)
    scaled = []
    with torch.no_grad():
        run = model.network.run(batch)
        for _ in range(steps):
            a = run.a[-1]  # [1, C], of scaled values: what comes next
            scaled.append(a[0].cpu().numpy())
            u = torch.cat([a, a.new_zeros(1, d.inputs - a.shape[1])], 1)[None]
            if model.network.carries_state:
                state = run.state  # type: ignore[attr-defined]  # networks that carry it show it
                run = model.network.run(Batch(u, x0=state))
            else:
                batch = Batch(torch.cat([batch.u, u]))
                run = model.network.run(batch)
    return np.asarray(np.stack(scaled).astype(np.float64) * std + mean)

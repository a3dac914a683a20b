"""Estimators: layouts, labels, settings, searches, pickles, and forecasts."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import subprocess
import sys

import joblib
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler

import coadjoint as co
from coadjoint.errors import ConfigError, InputError
from coadjoint.estimators import (
    ChainClassifier,
    ChainRegressor,
    Forecaster,
    SequenceClassifier,
    SequenceRegressor,
)
from paths import ROOT

ALL = [ChainClassifier, ChainRegressor, SequenceClassifier, SequenceRegressor, Forecaster]
SHORT = {"steps": 3, "every": 3, "batch": 8}
SMALL = {"cell": "elman", "hidden": 4, "lr": 0.1, **SHORT}


def sequences(n=24, T=6, C=2, seed=0):
    """Sequences [n, T, C] and two classes."""
    X = np.random.default_rng(seed).normal(size=(n, T, C))
    return X, np.where(X.sum((1, 2)) > 0, "up", "down")


def ragged(n=24, seed=0):
    """A list of [T_i, 2], and a number for each."""
    rng = np.random.default_rng(seed)
    X = [rng.normal(size=(T, 2)) for T in rng.integers(3, 8, n)]
    return X, np.array([x.mean() for x in X])


def test_layouts_of_the_same_sequences_give_the_same_network():
    X, y = sequences()
    expected = SequenceClassifier(**SMALL).fit(X, y).predict_proba(X)
    as_list = SequenceClassifier(**SMALL).fit(list(X), y)
    first = SequenceClassifier(channels_first=True, **SMALL).fit(X.swapaxes(1, 2), y)
    np.testing.assert_array_equal(as_list.predict_proba(list(X)), expected)
    np.testing.assert_array_equal(first.predict_proba(X.swapaxes(1, 2)), expected)
    assert as_list.n_features_in_ == first.n_features_in_ == 2


def test_one_feature_may_have_no_axis():
    X, y = sequences(C=1)
    with_axis = SequenceClassifier(**SMALL).fit(X, y)
    without = SequenceClassifier(**SMALL).fit(X[..., 0], y)
    np.testing.assert_array_equal(without.predict_proba(X[..., 0]), with_axis.predict_proba(X))


def test_lists_of_other_lengths_may_be_predicted_one_by_one():
    X, y = ragged()
    net = SequenceRegressor(**SMALL).fit(X, y)
    alone = np.concatenate([net.predict([x]) for x in X])
    np.testing.assert_allclose(net.predict(X), alone, rtol=1e-5, atol=1e-6)
    swapped = SequenceRegressor(channels_first=True, **SMALL).fit([x.T for x in X], y)
    np.testing.assert_array_equal(swapped.predict([x.T for x in X]), net.predict(X))


@pytest.mark.parametrize(
    "labels", [["b", "a"], [7, 3], [1.0, -2.0], [True, False], [10, 9]], ids=str
)
def test_labels_of_any_kind(labels):
    X, y = sequences()
    y = np.array(labels)[(y == "up").astype(int)]
    net = SequenceClassifier(valid_share=0.0, **SMALL | {"steps": 40}).fit(X, y)
    assert net.classes_.tolist() == sorted(labels)
    assert net.predict(X).dtype == y.dtype
    assert net.score(X, y) > 0.8


def test_the_model_has_the_labels_of_the_user(tmp_path):
    X, y = sequences()
    net = SequenceClassifier(**SMALL).fit(X, y)
    assert net.model_.labels == ["down", "up"]
    assert net.model_.predict(X).tolist() == net.predict(X).tolist()
    net.save(tmp_path / "model.safetensors")
    loaded = co.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.predict_proba(X), net.predict_proba(X))


def test_several_targets():
    X, y = ragged()
    net = SequenceRegressor(**SMALL).fit(X, np.stack([y, 2 * y + 1], 1))
    assert net.predict(X[:5]).shape == (5, 2)
    table = np.random.default_rng(0).normal(size=(20, 3))
    chain = ChainRegressor(chain="4", **SHORT).fit(table, table[:, :2] * 3)
    assert chain.predict(table).shape == (20, 2)


def test_images():
    images = np.random.default_rng(0).normal(size=(20, 6, 6))
    net = ChainClassifier(**SHORT).fit(images, images.mean((1, 2)) > 0)
    assert net.predict(images).shape == (20,)
    assert "conv" in net.network_.extra_repr()


@pytest.mark.parametrize("kind", ALL)
def test_clones_and_pickles(kind):
    X, y = sequences()
    inputs = X[:, 0] if kind in (ChainClassifier, ChainRegressor) else X
    network = {"chain": "4"} if kind in (ChainClassifier, ChainRegressor) else SMALL
    net = kind(**{**network, **SHORT})
    if kind in (SequenceRegressor, ChainRegressor):
        y = X.mean((1, 2))
    assert clone(net).get_params() == net.get_params()
    net.fit(inputs, y)
    stream = io.BytesIO()
    joblib.dump(net, stream)
    stream.seek(0)
    for copy in (pickle.loads(pickle.dumps(net)), joblib.load(stream)):
        arguments = (2, inputs) if kind is Forecaster else (inputs,)
        np.testing.assert_array_equal(copy.predict(*arguments), net.predict(*arguments))
        assert copy.history_ == net.history_
        assert copy.get_params() == net.get_params()


@pytest.mark.slow
def test_searches_and_cross_validation_take_ragged_lists():
    X, y = ragged()
    search = GridSearchCV(SequenceRegressor(**SMALL), {"hidden": np.array([2, 4])}, cv=2)
    search.fit(X, y)
    assert search.best_params_["hidden"] in (2, 4)
    assert search.predict(X).shape == (24,)
    assert cross_val_score(SequenceClassifier(**SMALL), X, y > 0, cv=2).shape == (2,)


def test_pipelines():
    X, y = sequences()
    halved = make_pipeline(FunctionTransformer(lambda X: X[:, ::2]), SequenceClassifier(**SMALL))
    assert halved.fit(X, y).predict(X).shape == (24,)
    scaled = make_pipeline(StandardScaler(), ChainClassifier(chain="4", **SHORT))
    assert scaled.fit(X[:, 0], y).predict_proba(X[:, 0]).shape == (24, 2)


def test_settings_reach_training():
    X, y = sequences(40)
    net = SequenceClassifier(
        cell="lstm",
        hidden=3,
        layers=2,
        penalty="log-ratio",
        weight=0.5,
        optimiser="sgd",
        lr=0.2,
        epochs=2,
        batch=9,
        clip=2.0,
        patience=4,
        valid_share=0.25,
        random_state=3,
        options={"weight_schedule": "linear"},
    ).fit(X, y)
    settings = net.model_.settings
    assert net.network_.extra_repr().startswith("[lstm, lstm]")
    assert settings["gradient"]["penalty"] == "log-ratio"
    assert settings["gradient"]["weight_schedule"] == "linear"
    assert settings["optimiser"]["name"] == "sgd"
    assert settings["training"]["steps"] == 2 * int(np.ceil(30 / 9))
    assert {row["kind"] for row in net.history_} >= {"train"}


def test_defaults_are_those_of_own_data():
    X, y = sequences()
    net = SequenceClassifier(steps=2).fit(X, y)
    assert net.model_.settings["optimiser"]["lr"] == 1e-2
    assert net.description_["network"]["cell"] == "gru"
    assert net.description_["network"]["bidirectional"]


def test_the_seed_decides():
    X, y = sequences()
    one, same, other = (
        SequenceClassifier(**SMALL, **seed).fit(X, y).predict_proba(X)
        for seed in ({"seed": 5}, {"random_state": 5}, {"seed": 6})
    )
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_missing_values_are_masked_if_asked_for():
    X, y = sequences()
    X[3, 2, 1] = np.nan
    with pytest.raises(ValueError, match=r"contains NaN\. Fill the gaps, or pass missing='mask'"):
        SequenceClassifier(**SMALL).fit(X, y)
    net = SequenceClassifier(missing="mask", **SMALL).fit(X, y)
    assert net.predict(X).shape == (24,)


def test_class_weights():
    X, y = sequences()
    heavy = SequenceClassifier(
        class_weight={"down": 1000.0}, valid_share=0.0, **SMALL | {"steps": 30}
    )
    assert (heavy.fit(X, y).predict(X) == "down").mean() > 0.9
    with pytest.raises(InputError, match="there is no class 'left'"):
        SequenceClassifier(class_weight={"left": 2.0}, **SMALL).fit(X, y)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed": 1, "random_state": 1}, "give one of them"),
        ({"hidden": -2}, "hidden: .* got -2"),
        ({"cell": "gruu"}, "did you mean 'gru'"),
        ({"options": {"hiden": 3}}, "did you mean 'hidden'"),
        ({"options": {"hidden": 3}}, "hidden is given twice"),
        ({"options": 3}, "options must be a dictionary"),
        ({"epochs": 3}, "steps and epochs"),
        ({"valid_share": 1.5}, "valid_share"),
        ({"valid_share": 0.0, "patience": 3}, "patience needs a validation set"),
        ({"precision": 16}, "precision"),
        ({"device": "tpu"}, "device"),
        ({"missing": "guess"}, "missing"),
        ({"batch": 0}, "batch"),
        ({"optimiser": "lbfgs", "clip": 1.0}, "clip does nothing"),
        ({"class_weight": 3}, "class_weight"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    X, y = sequences()
    with pytest.raises(ValueError, match=message):
        SequenceClassifier(**SMALL | wrong).fit(X, y)


def test_wrong_data_are_refused():
    X, y = sequences()
    net = SequenceClassifier(**SMALL)
    with pytest.raises(InputError, match="at least two classes"):
        net.fit(X, ["a"] * len(X))
    with pytest.raises(ValueError, match="inconsistent"):
        net.fit(X, y[:-1])
    with pytest.raises(InputError, match=r"expected \[n, T, features\]"):
        net.fit(X[..., None], y)
    with pytest.raises(InputError, match=r"X\[1\] has 3 features and X\[0\] has 2"):
        net.fit([np.zeros((4, 2)), np.zeros((5, 3))], ["a", "b"])
    net.fit(X, y)
    with pytest.raises(InputError, match="expecting 2 features"):
        net.predict(X[..., :1])


@pytest.mark.slow
def test_a_forecast_continues_the_series():
    t = np.arange(150)
    series = np.sin(t / 3)
    net = Forecaster(10, hidden=16, epochs=100).fit(series)
    forecast = net.predict()
    assert np.abs(forecast - np.sin(np.arange(150, 160) / 3)).max() < 0.3
    np.testing.assert_array_equal(net.predict(4), forecast[:4])
    np.testing.assert_allclose(net.predict(10, series), forecast)
    # Its first season lacks the rows one season before, so the rows after it are judged.
    season = net.model_.description.ahead["lags"][-1]
    next_steps = net.model_.predict([series[:, None]])[0].reshape(-1)
    assert r2_score(series[season + 1 :], next_steps[season:-1]) > 0.999
    assert net.score(series) == pytest.approx(r2_score(series[1:], next_steps[:-1]))


def test_a_forecast_by_states_is_that_of_the_whole_series():
    """The second step equals the first one after a series that the first step was appended to."""
    series = np.random.default_rng(0).normal(size=(40, 2)).cumsum(0)
    net = Forecaster(2, precision=64, **SMALL).fit(series)
    forecast = net.predict()
    longer = np.concatenate([series, forecast[:1]])
    np.testing.assert_allclose(net.predict(1, longer)[0], forecast[1], rtol=1e-9)
    assert forecast.shape == (2, 2)
    assert net.predict(3, [series, series[5:]]).shape == (2, 3, 2)


@pytest.mark.parametrize("strategy", ["recursive", "direct"])
def test_forecasts_have_intervals(strategy):
    series = np.random.default_rng(0).normal(size=60).cumsum()
    net = Forecaster(3, strategy=strategy, **SMALL).fit(series)
    lower, upper = net.predict_interval(5)
    assert lower.shape == upper.shape == net.predict(5).shape == (5,)
    assert (lower < upper).all()
    assert np.isfinite(net.score(series))


def test_a_forecaster_reads_what_is_known_in_advance():
    """y_t = x_t + 0.1 x_{t-1}, and x is known: the future of x decides."""
    x = np.random.default_rng(0).choice([-1.0, 1.0], size=112)
    y = x + 0.1 * np.roll(x, 1)
    series = np.stack([y, x], 1)
    for settings in ({}, {"strategy": "direct"}):
        net = Forecaster(4, known=[1], **SMALL | {"steps": 80, "lr": 0.03}, **settings)
        net.fit(series[:100])
        ahead = net.predict(8, future=x[100:108, None])
        assert ahead.shape == (8, 1)
        np.testing.assert_array_equal(ahead[:, 0] > 0, y[100:108] > 0)
        low, high = net.predict_interval(8, future=x[100:108, None])
        assert (low <= high).all()
        assert net.score(series) > 0.8
        with pytest.raises(InputError, match="give future="):
            net.predict(8)
        with pytest.raises(InputError, match="8 or more, 1"):
            net.predict(8, future=x[100:107, None])
    with pytest.raises(InputError, match="not all of them"):
        Forecaster(known=[0, 1]).fit(series)


@pytest.mark.slow
def test_the_page_works_as_printed():
    """The code of docs/estimators.md prints what stands below it; figures may differ a little."""
    page = (ROOT / "docs" / "estimators.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(python)?\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    shown = ""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for language, text in blocks:
            if language:
                exec(text, names)
            else:
                shown += text
    words = [re.sub(r"-?[0-9.]+", "#", text).split() for text in (printed.getvalue(), shown)]
    assert words[0] == words[1]
    figures = [re.findall(r"-?[0-9]+\.[0-9]*", text) for text in (printed.getvalue(), shown)]
    np.testing.assert_allclose(*(np.array(row, float) for row in figures), atol=0.2)


@pytest.mark.slow
def test_one_line_says_that_scikit_learn_is_missing():
    code = "import sys; sys.modules['sklearn'] = None; import coadjoint.estimators"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.strip().splitlines()[-1] == (
        "coadjoint.errors.MissingError: coadjoint.estimators needs scikit-learn 1.6 or later: "
        "pip install 'coadjoint[sklearn]'."
    )


def test_settings_that_clash_are_config_errors():
    X, y = sequences()
    with pytest.raises(ConfigError):
        SequenceClassifier(**SMALL, options={"end": 0.1}, schedule="constant").fit(X, y)

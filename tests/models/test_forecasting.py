"""Forecasts: paths fed by themselves, times, intervals, and errors against the past."""

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.errors import CoadjointError, DataError
from coadjoint.models.future_times import future_times
from coadjoint.models.reference_forecasts import (
    drift,
    fit_autoregression,
    naive,
    seasonal_naive,
)
from coadjoint.tasks.data import Data
from coadjoint.tasks.files import read
from coadjoint.tasks.files.sheet import Options
from coadjoint.tasks.season import season_of_values
from coadjoint.training.linear_start import begin_linear_
from coadjoint.training.own_defaults import reads_lags


def linear_network(weights, outputs=1, inputs=1):
    """A network a_t = weights u_t + what the state adds: none, so that paths are known by hand."""
    net = co.Network(
        "elman", inputs=inputs, hidden=1, outputs=outputs, readout="every", skip=True
    ).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
        net.D.copy_(torch.as_tensor(weights, dtype=torch.float64))
    return net


def model_of(series, weights, **options):
    """A model of series [n, T] or [n, T, C] with a network of these weights, in float64."""
    data = Data.of(
        series, kind="next", dtype="float64", standardise=False, split=(1, 0, 0), **options
    )
    d = data.description
    return co.Model(linear_network(weights, d.outputs, d.inputs), data)


def noise(n, T, rho, seed, scale=1.0):
    """n paths [T] of an autoregression with this coefficient."""
    rng = np.random.default_rng(seed)
    x = np.zeros((n, T))
    x[:, 0] = rng.normal(size=n) * scale / np.sqrt(1 - rho**2)
    for t in range(1, T):
        x[:, t] = rho * x[:, t - 1] + scale * rng.normal(size=n)
    return x


def test_a_model_of_another_kind_makes_no_forecast():
    inputs = noise(8, 12, 0.5, 0)[..., None]
    task = Data.of(inputs, inputs.sum((1, 2)), kind="regress", at="last")
    model = co.Model(co.Network("gru", inputs=1, hidden=2, outputs=1), task)
    words = "forecasts need a model trained with --kind next; this one is of kind 'regress'"
    with pytest.raises(CoadjointError, match=words):
        model.forecast(inputs)


def test_a_forecast_is_fed_by_itself():
    series = noise(3, 60, 0.5, 0)
    found = model_of(series, [[0.5]]).forecast(series, 4)
    powers = 0.5 ** np.arange(1, 5)
    np.testing.assert_allclose(found.values[:, :, 0], series[:, -1:] * powers, rtol=1e-10)
    assert [column.name for column in found.table()] == ["step", "prediction", "lower", "upper"]
    assert (found.lower < found.upper).all()
    again = model_of(series, [[0.5]]).forecast(series, 4)
    np.testing.assert_array_equal(found.lower, again.lower)
    other = model_of(series, [[0.5]]).forecast(series, 4, seed=1)
    assert (found.lower != other.lower).any()


def test_a_recurrent_network_goes_on_as_if_it_read_the_forecast():
    torch.manual_seed(0)
    series = noise(2, 40, 0.6, 1)
    data = Data.of(series, kind="next", dtype="float64", split=(1, 0, 0))
    net = co.Stack(["gru", "lstm"], inputs=1, hidden=5, outputs=1, readout="every").double()
    model = co.Model(net, data)
    found = model.forecast(series, 5)
    longer = np.concatenate([series, found.values[:, :4, 0]], 1)
    whole = np.asarray(model.predict(longer)).reshape(2, -1)
    np.testing.assert_allclose(whole[:, -5:], found.values[:, :, 0], rtol=1e-8)


@pytest.mark.parametrize("level", [0.5, pytest.param(0.9, marks=pytest.mark.slow)])
def test_intervals_cover_what_they_promise(level):
    """Of an AR(1) with its true coefficient; the bounds are those of a binomial, 4 deviations."""
    n, T, steps = 200, 160, 6
    series = noise(n, T + steps, 0.7, 2)
    past, truth = series[:, :T], series[:, T:]
    found = model_of(past, [[0.7]]).forecast(past, steps, level)
    inside = (truth >= found.lower[..., 0]) & (truth <= found.upper[..., 0])
    for h in range(steps):  # the series are independent of each other
        assert abs(inside[:, h].mean() - level) < 4 * np.sqrt(level * (1 - level) / n) + 0.01


def skewed_noise(n, T, seed):
    """n paths [T] of x_{t+1} = 0.6 x_t + e, with e + 1 exponential: the tails are not alike."""
    rng = np.random.default_rng(seed)
    x = np.zeros((n, T + 30))
    for t in range(1, T + 30):
        x[:, t] = 0.6 * x[:, t - 1] + rng.exponential(size=n) - 1
    return x[:, 30:]


def test_learned_quantiles_cover_what_they_promise():
    """A trained network against the true quantiles of the next step, and by coverage two ahead.

    Bounds by the mean and deviation of errors, or intervals of both tails alike, would fail: the
    lower end lies 0.95 below the mean, the upper 2.00 above it.
    """
    levels = (0.05, 0.5, 0.95)
    data = Data.of(
        skewed_noise(200, 40, 0), kind="next", horizon=2, quantiles=levels, split=(1, 0, 0)
    )
    torch.manual_seed(0)
    net = co.Network("elman", inputs=1, hidden=2, outputs=6, readout="every", skip=True)
    optimiser = co.optimisers.adam(0.03, schedule=co.optimisers.cosine())
    co.train(net, data, optimiser=optimiser, steps=300, batch=200, every=300, seed=0)
    n = 3000
    series = skewed_noise(n, 12, 1)
    past, truth = series[:, :10], series[:, 10:]
    found = co.Model(net.eval(), data).forecast(past, 2, level=0.9)
    assert "quantiles that the network learned" in found.notes[-1]
    ends = np.stack([found.lower, found.values, found.upper], -1)[:, :, 0]  # [n, 2, 3]
    true = 0.6 * past[:, -1:] - 1 - np.log(1 - np.array(levels))
    np.testing.assert_allclose(ends[:, 0].mean(0), true.mean(0), atol=0.1)
    np.testing.assert_allclose(ends[:, 0].std(0), true.std(0), rtol=0.2)
    for h in range(2):
        for j, level in enumerate(levels):
            below = (truth[:, h] <= ends[:, h, j]).mean()
            # Four deviations of a count, and what the weights, learned from 200 series, may miss.
            assert abs(below - level) < 4 * np.sqrt(level * (1 - level) / n) + 0.01


def test_several_steps_at_once_are_fed_in_blocks():
    series = noise(1, 80, 0.5, 3)
    weights = [[0.5], [0.25], [0.125]]
    model = model_of(series, weights, horizon=3)
    assert model.description.ahead["horizon"] == 3
    found = model.forecast(series, 8)
    np.testing.assert_allclose(found.values[0, :, 0], series[0, -1] * 0.5 ** np.arange(1, 9))
    assert model.forecast(series).steps == 3  # the horizon by default


def test_targets_ahead_are_the_rows_after_each():
    series = np.arange(24.0).reshape(1, 12, 2)
    data = Data.of(
        series, kind="next", horizon=3, quantiles=(0.1, 0.5), dtype="float64",
        standardise=False, split=(1, 0, 0), features=["a", "b"], target="b",
    )  # fmt: skip
    (u,), (y,) = data.sets["train"].u, data.sets["train"].y
    assert (data.outputs, u.shape, y.shape) == (6, (9, 2), (9, 6))
    for t in range(9):
        np.testing.assert_array_equal(y[t], np.repeat(series[0, t + 1 : t + 4, 1], 2))
    names = ["b +1 q0.1", "b +1 q0.5", "b +2 q0.1", "b +2 q0.5", "b +3 q0.1", "b +3 q0.5"]
    assert co.Model(linear_network(np.zeros((6, 2)), 6, 2), data).table(series).keys() >= {
        f"prediction {name}" for name in names
    }


def test_quantiles_that_cross_are_sorted_and_make_the_intervals():
    series = noise(1, 60, 0.5, 4)
    options = {"quantiles": (0.05, 0.5, 0.95)}
    model = model_of(series, [[0.9], [0.5], [0.1]], **options)
    last = series[0, -1]
    expected = np.sort(last * np.array([0.1, 0.5, 0.9]))
    found = model.forecast(series, 1)
    ends = [found.lower[0, 0, 0], found.values[0, 0, 0], found.upper[0, 0, 0]]
    np.testing.assert_allclose(ends, expected)
    np.testing.assert_allclose(model.predict(series)[0][-1], expected)
    assert "quantiles" in found.notes[-1]
    assert "errors" in model.forecast(series, 2).notes[-1]  # beyond what was learned


def test_known_columns_are_read_one_step_ahead(tmp_path):
    """y_{t+1} = 0.5 y_t + 2 x_{t+1}; the future of x is in the file, that of y is empty."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=60)
    y = np.zeros(60)
    for t in range(1, 60):
        y[t] = 0.5 * y[t - 1] + 2 * x[t]
    rows = [f"{t},{y[t]:.17g},{x[t]:.17g}" for t in range(50)]
    future = [f"{t},,{x[t]:.17g}" for t in range(50, 60)]
    train = tmp_path / "train.csv"
    train.write_text("\n".join(["time,y,x", *rows]) + "\n")
    new = tmp_path / "new.csv"
    new.write_text("\n".join(["time,y,x", *rows, *future]) + "\n")
    data = Data.read(
        train, kind="next", known="x", dtype="float64", standardise=False, split=(1, 0, 0)
    )
    np.testing.assert_allclose(data.sets["train"].u[0][:, 1], x[1:50])
    model = co.Model(linear_network([[0.5, 2.0]], 1, 2), data)
    found = model.forecast(new, 10)
    np.testing.assert_allclose(found.values[0, :, 0], y[50:], rtol=1e-8)
    assert found.times == [[str(t) for t in range(50, 60)]]
    with pytest.raises(DataError, match="11 steps need as many"):
        model.forecast(new, 11)
    rolled = model.roll(new, 3, 5)
    np.testing.assert_allclose(rolled.errors["network"], 0, atol=1e-8)


def driven_rows(T, past):
    """y_{t+1} = 0.5 y_t + 2 x_{t+1}: y [T], and rows of a table in which y ends after `past`."""
    x = np.random.default_rng(5).normal(size=T)
    y = np.zeros(T)
    for t in range(1, T):
        y[t] = 0.5 * y[t - 1] + 2 * x[t]
    rows = [f"{t},{y[t] if t < past else np.nan:.17g},{x[t]:.17g}" for t in range(T)]
    return y, x, [row.replace("nan", "") for row in rows]


DRIVEN = {"kind": "next", "known": "x", "dtype": "float64", "standardise": False}
# y_{t+1}, y_{t+2} and y_{t+3} by y_t, x_{t+1}, x_{t+2} and x_{t+3}
THREE_AHEAD = [[0.5, 2, 0, 0], [0.25, 1, 2, 0], [0.125, 0.5, 1, 2]]


def test_known_columns_are_read_as_far_ahead_as_the_horizon(tmp_path):
    y, x, rows = driven_rows(62, 50)
    train = tmp_path / "train.csv"
    train.write_text("\n".join(["time,y,x", *rows[:50]]) + "\n")
    new = tmp_path / "new.csv"
    new.write_text("\n".join(["time,y,x", *rows]) + "\n")
    data = Data.read(train, horizon=3, split=(1, 0, 0), **DRIVEN)
    u = data.sets["train"].u[0]
    np.testing.assert_allclose(u, np.stack([y[:47], x[1:48], x[2:49], x[3:50]], 1))
    assert data.description.input_names == ["y", "x", "x +2", "x +3"]
    model = co.Model(linear_network(THREE_AHEAD, 3, 4), data)
    # Steps that were learned, some of them, and blocks that are fed back.
    for steps in (3, 2, 10):
        found = model.forecast(new, steps)
        np.testing.assert_allclose(found.values[0, :, 0], y[50 : 50 + steps], rtol=1e-8)
        assert np.abs(found.upper - found.lower).max() < 1e-8  # there is no noise
        np.testing.assert_allclose(model.roll(new, steps, 5).errors["network"], 0, atol=1e-8)
    with pytest.raises(DataError, match="13 steps need 15, as 3 are read at once"):
        model.forecast(new, 13)
    # The last rows of a file know what it holds of the future.
    np.testing.assert_allclose(model.predict(new)[-1], y[50:53], rtol=1e-8)
    again = co.tasks.Data.for_prediction(data.describe(), new)
    np.testing.assert_allclose(again.u[-1], [y[49], *x[50:53]])


SEASONAL = {"lags": (2, 3)}


def test_lags_are_inputs_and_are_fed_by_the_forecast():
    """A network that repeats the value three rows back is the seasonal naive forecast."""
    series = noise(2, 40, 0.5, 9)
    model = model_of(series, [[0.0, 1.0, 0.0]], lags=(3, 2))
    assert model.description.input_names == ["u0", "u0 -2", "u0 -3"]
    u = Data.of(series, kind="next", standardise=False, split=(1, 0, 0), **SEASONAL).sets["train"].u
    np.testing.assert_allclose(u[1][:, 1], series[1][np.maximum(np.arange(39) - 2, 0)], rtol=1e-6)
    np.testing.assert_allclose(u[1][:, 2], series[1][np.maximum(np.arange(39) - 3, 0)], rtol=1e-6)
    found = model.forecast(series, 8)
    for path, past in zip(found.values[:, :, 0], series, strict=True):
        np.testing.assert_allclose(path, seasonal_naive(past, 8, 3))
    rolled = model.roll(series, 8, 5, season=3)
    np.testing.assert_allclose(rolled.errors["network"], rolled.errors["seasonal naive"])
    worse = model_of(series, [[0.0, 9.0, 0.0]], lags=(2, 3)).roll(series, 2, 5, season=3)
    assert "is better than the network" in worse.advice()
    assert model_of(series, [[0.5, 0, 0]], lags=(2, 3)).roll(series, 1, 30).advice() is None


def test_lags_of_a_series_are_by_its_season():
    t = np.arange(96)
    wave = np.sin(2 * np.pi * t / 12) + 0.02 * t
    options = {"kind": "next", "lags": "auto", "split": (1, 0, 0)}
    data = Data.of(wave, **options)
    assert data.description.ahead["lags"] == [1, 11, 12]
    assert any("the rows 1, 11, 12 before" in note for note in data.notes)
    without = Data.of(np.random.default_rng(0).normal(size=96), **options)
    assert without.description.ahead["lags"] == [1]
    t = np.arange(1200)
    assert Data.of(np.sin(2 * np.pi * t / 12), **options).description.ahead["lags"] == [1, 11, 12]
    long = np.random.default_rng(0).normal(size=1200)
    for other in (wave[:30], long, np.stack([wave, wave])):
        assert "lags" not in Data.of(other, **options).description.ahead
    assert Data.of(wave, **options | {"lags": 0}).description.ahead == {}
    with pytest.raises(CoadjointError, match="--kind next"):
        Data.of(wave[None], [1.0], kind="regress", lags=1)
    assert reads_lags({"kind": "next"}, None)
    assert reads_lags({"kind": "next", "horizon": 12, "strategy": "recursive"}, "lstm")
    for asked in ({"horizon": 12}, {"window": 10}, {"quantiles": [0.5]}, {"lags": [1]}):
        assert not reads_lags({"kind": "next", **asked}, None)
    assert not reads_lags({"kind": "next"}, "elman")


def test_a_short_series_begins_with_the_linear_forecast():
    series = noise(1, 200, 0.8, 10)[0]
    data = Data.of(series, kind="next", lags=(1, 2), dtype="float64")
    net = co.Network("gru", inputs=3, hidden=4, outputs=1, readout="every", skip=True).double()
    assert begin_linear_(net, data)
    u, y = data.sets["train"].u[0], data.sets["train"].y[0]
    X = np.column_stack([u, np.ones(len(u))])[2:]
    best, *_ = np.linalg.lstsq(X, y[2:], rcond=None)
    a = net(torch.from_numpy(u)[:, None]).y_hat[2:, 0].detach().numpy()
    np.testing.assert_allclose(a, X @ best, atol=0.2)  # up to the penalty
    assert np.square(a - y[2:]).mean() < 1.02 * np.square(X @ best - y[2:]).mean()
    assert not begin_linear_(net, Data.of(series, kind="next"))
    quantiles = Data.of(series, kind="next", lags=(1, 2), quantiles=(0.5, 0.9))
    assert not begin_linear_(net, quantiles)


def test_training_windows_may_overlap_and_held_out_rows_stay_out():
    series = np.arange(100.0)[None]
    options = {"kind": "next", "window": 10, "split": (0.8, 0.1, 0.1), "standardise": False}
    plain = Data.of(series, **options)
    sliding = Data.of(series, stride=4, **options)
    assert [u[0, 0] for u in plain.sets["train"].u] == [*range(0, 80, 10)]
    starts = [u[0, 0] for u in sliding.sets["train"].u]
    assert starts == [*range(0, 70, 4), 70]
    assert max(y.max() for y in sliding.sets["train"].y) == 79
    for split in ("valid", "test"):
        np.testing.assert_array_equal(sliding.sets[split].u[0], plain.sets[split].u[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"horizon": 3, "kind": "regress"}, "--kind next"),
        ({"quantiles": (0.9, 0.5)}, "ascending"),
        ({"quantiles": (0.1, 0.9)}, "0.5"),
        ({"strategy": "direct"}, "--horizon"),
        ({"features": ["a", "b"], "target": "c"}, "3 features are named: a, b, c"),
        ({"features": ["a", "b"], "target": "b", "known": "b"}, "either predicted or known"),
        ({"stride": 3}, "--window"),
        ({"stride": 11, "window": 10}, "1 to the window's 10"),
        ({"horizon": 10, "window": 10}, "at least 11"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    with pytest.raises(CoadjointError, match=words):
        Data.of(np.random.default_rng(0).normal(size=(8, 30, 2)), **{"kind": "next"} | options)


def test_what_cannot_be_forecast_is_refused():
    series = noise(8, 30, 0.5, 6)
    with pytest.raises(CoadjointError, match="level must be"):
        model_of(series, [[0.5]]).forecast(series, 3, 1.0)
    with pytest.raises(CoadjointError, match="steps"):
        model_of(series, [[0.5]]).forecast(series, 0)
    two = np.stack([series, series], -1)
    model = model_of(two, [[0.5, 0.0]], features=["a", "b"], target="a")
    assert model.forecast(two, 1).names == ["a"]
    with pytest.raises(DataError, match="'b' are not predicted"):
        model.forecast(two, 2)
    data = Data.of(series, kind="next", dtype="float64", split=(1, 0, 0))
    net = co.Stack(["gru"], inputs=1, hidden=3, outputs=1, readout="every", bidirectional=True)
    with pytest.raises(CoadjointError, match="backwards"):
        co.Model(net.double(), data).forecast(series, 2)
    task = Data.of(series, series.sum(1) > 0, kind="classify", dtype="float64")
    other = co.Network("elman", inputs=1, hidden=2, outputs=2, output="softmax").double()
    with pytest.raises(CoadjointError, match="--kind next"):
        co.Model(other, task).forecast(series, 2)


@pytest.mark.parametrize(
    ("stamps", "expected"),
    [
        (["2024-01-29", "2024-01-30", "2024-01-31"], ["2024-02-01", "2024-02-02"]),
        (["2023-11-30", "2023-12-31", "2024-01-31"], ["2024-02-29", "2024-03-31"]),
        (["2023-10", "2023-11", "2023-12"], ["2024-01", "2024-02"]),
        (["2023Q2", "2023Q3", "2023Q4"], ["2024Q1", "2024Q2"]),
        (["Oct 2023", "Nov 2023", "Dec 2023"], ["Jan 2024", "Feb 2024"]),
        (["2024-01-01 22:30", "2024-01-01 23:00", "2024-01-01 23:30"],
         ["2024-01-02 00:00", "2024-01-02 00:30"]),
        (["30.12.2023", "31.12.2023", "01.01.2024"], ["02.01.2024", "03.01.2024"]),
        (["3", "5", "7"], ["9", "11"]),
        (["0.5", "1.0", "1.5"], ["2.0", "2.5"]),
    ],
)  # fmt: skip
def test_times_go_on_by_their_own_step(tmp_path, stamps, expected):
    path = tmp_path / "d.csv"
    path.write_text("time,a\n" + "".join(f"{stamp},{i}\n" for i, stamp in enumerate(stamps)))
    sheet = read(path, Options(kind="next"))
    assert future_times(sheet, 0, 2) == expected


def test_forecasts_without_a_network():
    values = np.array([1.0, 2.0, 5.0, 3.0, 4.0, 7.0])
    assert naive(values, 2).tolist() == [7, 7]
    assert seasonal_naive(values, 4, 3).tolist() == [3, 4, 7, 3]
    np.testing.assert_allclose(drift(values, 2), [7 + 6 / 5, 7 + 12 / 5])
    t = np.arange(200)
    wave = np.sin(2 * np.pi * t / 7) + 0.01 * t
    assert season_of_values(wave) == 7
    assert season_of_values(np.random.default_rng(0).normal(size=200)) == 1
    fitted = fit_autoregression(np.sin(2 * np.pi * t / 7), 7)
    ahead = fitted.forecast(np.sin(2 * np.pi * t / 7), 5)
    np.testing.assert_allclose(ahead, np.sin(2 * np.pi * np.arange(200, 205) / 7), atol=1e-3)


def test_errors_against_the_past_are_those_of_single_forecasts():
    series = noise(2, 50, 0.5, 7)
    model = model_of(series, [[0.5]])
    found = model.roll(series, 3, 4, season=5)
    assert found.errors["network"].shape == (8, 3, 1)
    for i in range(2):
        for j, end in enumerate(range(44, 48)):
            truth = series[i, end : end + 3]
            single = model.forecast(series[i : i + 1, :end], 3).values[0, :, 0]
            np.testing.assert_allclose(found.errors["network"][4 * i + j, :, 0], truth - single)
            error = truth - series[i, end - 5 : end - 2]
            np.testing.assert_allclose(found.errors["seasonal naive"][4 * i + j, :, 0], error)
    with pytest.raises(DataError, match="Lower --rolling"):
        model.roll(series, 3, 48)


def test_the_median_is_what_is_judged():
    series = noise(6, 30, 0.5, 8)
    data = Data.of(series, kind="next", quantiles=(0.1, 0.5, 0.9), dtype="float64")
    batch = next(iter(data.held_out("valid", 0)))
    a = torch.randn(*batch.y.shape, dtype=torch.float64)
    std = data.description.target_std[0]
    total, count = data.score(a, batch)["mse"]
    expected = ((a[..., 1] - batch.y[..., 1]) * std).square().mean()
    assert total / count == pytest.approx(float(expected))

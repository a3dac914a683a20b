"""Metrics, class weights and baselines of own data, from the command line."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import coadjoint as co
from coadjoint.tasks.baselines import Baseline, Chooser
from coadjoint.tasks.data import Data
from coadjoint.tasks.linear import LinearModel, logistic_path, ridge_path
from coadjoint.training import advice


def write(path, head, rows):
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    return path


def waves(path, n=150, T=8):
    """Sequences whose class is the sign of the sum of their first two steps."""
    g = np.random.default_rng(0)
    rows = []
    for i in range(n):
        x = g.standard_normal(T - i % 3)
        label = "up" if x[0] + x[1] > 0.5 else "down"
        rows += [[f"w{i}", t, f"{v:.4f}", label] for t, v in enumerate(x)]
    return write(path, ["id", "time", "x", "target"], rows)


# linear models


def test_ridge_regression_solves_its_normal_equations():
    g = np.random.default_rng(1)
    for n, F in ((30, 4), (6, 9)):  # the second in its dual form
        X, Y = g.standard_normal((n, F)), g.standard_normal((n, 2))
        centred = X - X.mean(0)
        gram = centred.T @ centred
        for model in ridge_path(X, Y):
            alpha = model.strength * np.linalg.eigvalsh(gram)[-1]
            A = np.linalg.solve(gram + alpha * np.eye(F), centred.T @ Y)
            np.testing.assert_allclose(model.A, A, rtol=1e-5, atol=1e-7)
            assert model.predict(X).mean(0) == pytest.approx(Y.mean(0))


def test_logistic_regression_ends_where_its_gradient_vanishes():
    g = np.random.default_rng(2)
    X = g.standard_normal((40, 3))
    y = (X[:, 0] + g.standard_normal(40) > 0).astype(int) + (X[:, 1] > 1)
    for model in logistic_path(X, y, 3):
        p = np.exp(model.predict(X))
        p /= p.sum(1, keepdims=True)
        slope = X.T @ (p - np.eye(3)[y]) / 40 + model.strength * model.A
        assert np.abs(slope).max() < 2e-4


# baselines


def test_baselines_of_a_forecast(tmp_path):
    g = np.random.default_rng(3)
    x = np.zeros(300)
    for t in range(2, 300):
        x[t] = 1.6 * x[t - 1] - 0.8 * x[t - 2] + 0.1 * g.standard_normal()
    path = write(tmp_path / "ar.csv", ["x"], [[f"{v:.6f}"] for v in 50 + 9 * x])
    task = Data.read(path, kind="next", window=30)
    linear, last, mean = task.baselines
    assert [each.name for each in task.baselines] == ["linear", "last value", "mean"]
    assert linear.about == "ridge regression on the present step and 20 before it"
    for split in ("valid", "test"):
        assert 0.5 * 0.9**2 < linear.metrics[split]["mse"] < 3 * 0.9**2  # the noise, 0.1 * 9
        assert linear.metrics[split]["mse"] < last.metrics[split]["mse"]
        assert last.metrics[split]["mse"] < mean.metrics[split]["mse"]
    steps = [np.array(u)[:, 0] for u in task.sets["test"].u]
    nexts = [np.array(y)[:, 0] for y in task.sets["test"].y]
    errors = (np.concatenate(steps) - np.concatenate(nexts)) * task.description.target_std[0]
    assert last.metrics["test"]["mse"] == pytest.approx(np.mean(errors**2))


@pytest.mark.parametrize("options", [{"lags": "auto"}, {}, {"horizon": 14}], ids=str)
def test_the_seasonal_naive_is_a_baseline_of_a_single_series(tmp_path, options):
    g = np.random.default_rng(3)
    values = 50 + 9 * np.sin(np.arange(240) * 2 * np.pi / 12) + g.standard_normal(240)
    path = write(tmp_path / "season.csv", ["x"], [[f"{v:.6f}"] for v in values])
    task = Data.read(path, kind="next", split=(0.5, 0.25, 0.25), **options)
    naive = next(each for each in task.baselines if each.name == "seasonal naive")
    assert naive.about.startswith("the step 12 steps before it")
    # The difference of two values has twice the variance of the noise.
    if options == {"lags": "auto"}:
        errors = values[181:] - values[169:-12]
        assert naive.metrics["test"]["mse"] == pytest.approx(np.mean(errors**2), rel=1e-4)
    else:
        last = next(each for each in task.baselines if each.name == "last value")
        assert naive.metrics["test"]["mse"] < last.metrics["test"]["mse"]


def test_baselines_of_steps_skip_those_without_a_target(tmp_path):
    g = np.random.default_rng(4)
    rows = []
    for i in range(20):
        x = g.standard_normal(9)
        for t in range(9):
            label = "hot" if t and x[t - 1] > 0 else "cold"
            rows.append([i, f"{x[t]:.4f}", "" if (t + i) % 7 == 3 else label])
    path = write(tmp_path / "steps.csv", ["id", "x", "target"], rows)
    task = Data.read(path, kind="classify", at="every", missing="mask", metrics="log-loss")
    linear, majority = task.baselines
    assert linear.metrics["test"]["accuracy"] > 0.9 > majority.metrics["test"]["accuracy"]
    shares = np.bincount(np.concatenate([y[y >= 0] for y in task.sets["train"].y])) / 1.0
    shares /= shares.sum()
    test = np.concatenate([y[y >= 0] for y in task.sets["test"].y])
    assert majority.metrics["test"]["accuracy"] == np.mean(test == shares.argmax())
    assert majority.metrics["test"]["log-loss"] == pytest.approx(-np.log(shares[test]).mean())


def test_long_sequences_are_summarised_and_large_samples_projected(tmp_path):
    g = np.random.default_rng(5)
    level = g.standard_normal(1100)
    u = level[:, None, None] + 0.1 * g.standard_normal((1100, 11, 100))
    np.savez(tmp_path / "long.npz", u=u, y=level)
    task = Data.read(tmp_path / "long.npz", kind="regress", split=(0.95, 0, 0.05))
    linear = task.baselines[0]
    assert "the mean, deviation, least" in linear.about
    assert linear.metrics["test"]["r2"] > 0.99
    np.savez(tmp_path / "wide.npz", x=u.reshape(1100, -1), y=level)
    task = Data.read(tmp_path / "wide.npz", kind="regress", rows="samples", split=(0.95, 0, 0.05))
    linear = task.baselines[0]
    assert linear.about == "ridge regression on 1000 random projections of the sample"
    assert linear.metrics["test"]["r2"] > 0.9


def test_an_autoencoder_is_compared_with_a_linear_model_only_if_there_is_noise(tmp_path):
    g = np.random.default_rng(6)
    np.savez(tmp_path / "x.npz", x=g.standard_normal((40, 2)) @ g.standard_normal((2, 5)))
    options = {"rows": "samples", "kind": "reconstruct"}
    task = Data.read(tmp_path / "x.npz", **options)
    assert [each.name for each in task.baselines] == ["mean"]
    task = Data.read(tmp_path / "x.npz", noise=0.5, **options)
    linear, mean = task.baselines
    assert linear.metrics["test"]["mse"] < mean.metrics["test"]["mse"]


def test_equal_linear_models_are_decided_by_the_loss(tmp_path):
    """All are right about the two entries that validate; the strongest penalty is not the best."""
    task = Data.read(waves(tmp_path / "waves.csv", n=20))
    chooser = Chooser(task)
    X = np.array([[1.0], [-1.0]])
    y = np.array([0, 1])
    for strength, slope in ((1.0, 0.1), (0.1, 3.0), (0.01, 2.0)):
        model = LinearModel(np.array([[slope, -slope]]), np.zeros(2), strength)
        chooser.offer("logistic regression", model, X, y)
    assert chooser.best[2].strength == 0.1


def test_data_without_held_out_sets_have_no_baselines(tmp_path):
    task = Data.read(waves(tmp_path / "waves.csv"), split=(1, 0, 0))
    assert task.baselines == []


# the command


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    from coadjoint.cli.program import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*words):
        monkeypatch.setattr("sys.argv", ["coadjoint", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return call


SMALL = ["--steps", "4", "--every", "2", "--hidden", "4", "--probes", "4"]


def test_a_run_is_printed_beside_its_baselines(run):
    path = str(waves("waves.csv"))
    given = ["--metrics", "auc,log-loss", "--select", "auc", "--class-weight", "balanced"]
    given += ["--lr", "1e-9"]
    code, out, err = run("train", "--train", path, *SMALL, *given, "--out", "a")
    assert (code, err) == (0, "")
    assert "class weights in training: down " in out
    assert "by valid auc" in out
    lines = out.splitlines()
    heads = next(k for k, line in enumerate(lines) if "valid auc  test auc" in line)
    assert [line.split()[0] for line in lines[heads + 2 : heads + 5]] == [
        "network", "linear", "majority",
    ]  # fmt: skip
    assert lines[heads + 5].startswith("linear: ")
    assert lines[heads + 6] == (
        "The network does not beat the linear model on valid. What may help: more --epochs, "
        "another --lr, --penalty log-ratio or a search for settings (coadjoint tune)."
    )
    result = json.loads(Path("a/result.json").read_text())
    assert result["metric"] == "accuracy"
    assert result["selected_by"] == "auc"
    for split in ("train", "valid", "test"):
        names = ["loss", "accuracy", "balanced-accuracy", "f1", "auc", "log-loss"]
        assert list(result["metrics"][split]) == names
    linear, majority = result["baselines"]
    assert set(linear["metrics"]) == {"valid", "test"}
    assert majority["metrics"]["test"]["balanced-accuracy"] == 0.5
    page = Path("a/report.html").read_text()
    assert "Baselines" in page
    assert "valid auc" in page

    code, out, _ = run("resume", "a", "--steps", "6")
    assert code == 0
    assert "network" in out


def test_a_metric_of_the_other_kind_is_refused_before_anything_is_written(run):
    path = str(waves("waves.csv"))
    for given in (["--metrics", "r2"], ["--select", "mse"]):
        code, _, err = run("train", "--train", path, *given, "--out", "a")
        assert code == 2
        assert f"unknown metric of classes '{given[1]}'" in err
        assert not Path("a").exists()
    code, _, err = run("train", "xor", "--metrics", "f1", "--out", "a")
    assert "--metrics applies to your own data" in err
    write("y.csv", ["x", "target"], [[i, i * 0.5] for i in range(20)])
    given = ["--kind", "regress", "--chain", "4", "--class-weight", "balanced", "--out", "a"]
    code, _, err = run("train", "--train", "y.csv", *given)
    assert code == 2
    assert "--class-weight needs classes" in err


def test_a_selecting_metric_that_is_not_defined_is_said(run):
    rows = [[i, t, math.sin(i + t), "ab"[i % 2]] for i in range(12) for t in range(3)]
    write("train.csv", ["id", "time", "x", "target"], rows)
    write("valid.csv", ["id", "time", "x", "target"], [[9, t, 0.5 * t, "a"] for t in range(3)])
    files = ["--train", "train.csv", "--valid", "valid.csv"]
    code, out, _ = run("train", *files, *SMALL, "--select", "auc", "--out", "a")
    assert code == 0
    assert "step 2: auc is not defined on valid: it chooses none." in out


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (
            ["temporal-order", "--length", "60", "--init", "gaussian", "--std", "0.1"]
            + ["--hidden", "4", "--tests", "20", "--confirm", "20"],
            "from end to start; early time steps will hardly be learned from. What may help: "
            "--cell gru, --init orthogonal, --readout attention or --penalty log-ratio.",
        ),
        (
            ["digits-flat", "--chain", "8x9", "--gain", "0.1"],
            "from output to input; its first layers will hardly learn. What may help: --init "
            "orthogonal or --penalty isometry.",
        ),
    ],
)
def test_costates_that_decay_before_training_are_said(run, given, line):
    code, out, _ = run("train", *given, "--steps", "1", "--probes", "4", "--out", "a")
    assert code == 0
    assert f"{line}\n" in out
    assert "The gradient of the initial weights shrinks to 1e-" in out
    assert "shrinks" not in run("resume", "a", "--steps", "2")[1]


def test_what_is_said_of_a_network_beside_baselines():
    """Advice where validation shows that it is no better; a word where only the test set does."""
    task = SimpleNamespace(splits=("valid", "test"), selector=lambda metric: (metric, False))
    net = co.Stack(["gru"], inputs=1, hidden=2, outputs=2, bidirectional=True, readout="mean")
    linear = Baseline("linear", "", {"valid": {"accuracy": 0.8}, "test": {"accuracy": 0.7}})
    majority = Baseline("majority", "", {"valid": {"accuracy": 0.5}, "test": {"accuracy": 0.5}})

    def said(valid, test):
        metrics = {"valid": {"accuracy": valid}, "test": {"accuracy": test}}
        both = [linear, majority]
        return advice.advise_on_baseline(net, task, both, metrics, "accuracy", co.BPTT())

    assert said(0.9, 0.75) is None
    assert said(0.9, 0.7) is None
    advised = said(0.8, 0.9)
    assert "does not beat the linear model on valid" in advised
    assert "--cell" not in advised  # it has gates, in both directions
    for valid in (0.9, 1.0):
        line = said(valid, 0.69)
        assert line.startswith("On test the network is worse than the linear model, though not on")
        assert "What may help" not in line
    assert "--rolling" not in advised
    mixed = co.Stack(["gru", "elman"], inputs=1, hidden=2, outputs=2)
    assert [advice.is_gated(each) for each in (net, mixed)] == [True, False]


def test_what_is_said_after_a_search_is_not_what_was_searched():
    task = SimpleNamespace(splits=("valid",), selector=lambda metric: (metric, False))
    net = co.Network("elman", inputs=1, hidden=2, outputs=2)
    linear = Baseline("linear", "", {"valid": {"accuracy": 0.8}})
    search = advice.Search(frozenset({"lr", "cell", "hidden"}), "coadjoint resume t --trials 8")
    line = advice.advise_on_baseline(
        net, task, [linear], {"valid": {"accuracy": 0.5}}, "accuracy", co.BPTT(), search
    )
    assert line == (
        "The network does not beat the linear model on valid. What may help: more --epochs, "
        "--penalty log-ratio or a longer search (coadjoint resume t --trials 8)."
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "--lags (1 and one season back)"), ({"lags": (1, 3, 4)}, "other --lags")],
    ids=str,
)
def test_what_is_said_of_a_forecast_beside_baselines(tmp_path, options, words):
    rows = [[f"{value}"] for value in np.arange(160) % 4 + np.arange(160) / 7]
    path = write(tmp_path / "s.csv", ["x"], rows)
    task = Data.read(path, kind="next", split=(0.5, 0.25, 0.25), **options)
    net = co.Network("gru", inputs=task.inputs, hidden=2, outputs=1, readout="every")
    naive = Baseline("seasonal naive", "", {"valid": {"mse": 1.0}})
    worse = {"valid": {"mse": 2.0}}
    line = advice.advise_on_baseline(net, task, [naive], worse, "mse", co.BPTT())
    assert line.startswith("The network does not beat the seasonal naive forecast on valid.")
    assert words in line
    assert "--horizon" in line
    assert "--rolling" in line
    assert "--penalty" not in line

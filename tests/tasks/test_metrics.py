"""Metrics by name agree with scikit-learn's, whatever the batches; class weights, with autograd."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.errors import CoadjointError
from coadjoint.tasks.data import Data
from coadjoint.tasks.metrics import OF_CLASSES, OF_NUMBERS, ClassTally, NumberTally, choose_metrics

theirs = pytest.importorskip("sklearn.metrics")
F64 = torch.float64
ALL_CLASSES = tuple(OF_CLASSES)
ALL_NUMBERS = tuple(OF_NUMBERS)


def tallied(tally, a, y, batches=3):
    for k in range(batches):
        tally.add(torch.from_numpy(a[k::batches]), torch.from_numpy(y[k::batches]))
    return tally.values()


def softmax(a):
    p = np.exp(a - a.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("K", [2, 4])
@pytest.mark.parametrize("round_to", [0, 9])  # rounded outputs are often equal
def test_metrics_of_classes_are_those_of_scikit_learn(K, round_to):
    g = np.random.default_rng(K)
    a = g.standard_normal((60, K)).round(round_to)
    y = g.integers(0, K, 60) * (g.random(60) < 0.7)  # class 0 is the largest
    p = softmax(a)
    found = tallied(ClassTally(K, ALL_CLASSES), a, y)
    guess = a.argmax(-1)
    assert found["accuracy"] == pytest.approx(theirs.accuracy_score(y, guess))
    assert found["balanced-accuracy"] == pytest.approx(theirs.balanced_accuracy_score(y, guess))
    assert found["f1"] == pytest.approx(theirs.f1_score(y, guess, average="macro"))
    assert found["log-loss"] == pytest.approx(theirs.log_loss(y, p, labels=range(K)))
    scores = p[:, 1] if K == 2 else p
    assert found["auc"] == pytest.approx(theirs.roc_auc_score(y, scores, multi_class="ovr"))


def test_a_class_that_is_absent_is_left_out():
    a = np.eye(4)[[0, 0, 1, 3, 1, 1]]  # class 2 is neither there nor predicted, class 3 predicted
    y = np.array([0, 0, 0, 1, 1, 1])
    found = tallied(ClassTally(4, ALL_CLASSES), a, y)
    guess = a.argmax(-1)
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        assert found["balanced-accuracy"] == theirs.balanced_accuracy_score(y, guess)
    assert found["f1"] == pytest.approx(theirs.f1_score(y, guess, average="macro"))
    both = [theirs.roc_auc_score(y == k, softmax(a)[:, k]) for k in (0, 1)]
    assert found["auc"] == pytest.approx(np.mean(both))
    alone = tallied(ClassTally(2, ALL_CLASSES), np.eye(2), np.zeros(2, int))
    assert math.isnan(alone["auc"])
    assert alone["balanced-accuracy"] == 0.5
    assert all(math.isnan(v) for v in ClassTally(2, ALL_CLASSES).values().values())


@pytest.mark.parametrize("k", [1, 3])
def test_metrics_of_numbers_are_those_of_scikit_learn(k):
    g = np.random.default_rng(k)
    mean, std = np.linspace(-3, 900, k), np.linspace(0.5, 40, k)
    a, y = g.standard_normal((2, 50, k))
    found = tallied(NumberTally(ALL_NUMBERS, mean, std), a, y, batches=7)
    guess, true = a * std + mean, y * std + mean
    assert found["mse"] == pytest.approx(theirs.mean_squared_error(true, guess))
    assert found["mae"] == pytest.approx(theirs.mean_absolute_error(true, guess))
    assert found["rmse"] == pytest.approx(theirs.root_mean_squared_error(true, guess))
    assert found["mape"] == pytest.approx(theirs.mean_absolute_percentage_error(true, guess))
    assert found["r2"] == pytest.approx(theirs.r2_score(true, guess))


def test_zero_and_constant_targets():
    true = np.array([[0.0, 5.0], [2.0, 5.0], [-4.0, 5.0]])
    guess = np.array([[7.0, 5.0], [1.0, 5.0], [-4.0, 5.0]])
    mean, std = np.array([1.7, 4.0]), np.array([0.3, 2.0])
    a, y = (((v - mean) / std).astype(np.float32) for v in (guess, true))
    found = tallied(NumberTally(ALL_NUMBERS, mean, std), a, y, batches=1)
    assert found["mape"] == pytest.approx((0.25 + 0) / 2, rel=1e-5)  # without the zero
    assert found["r2"] == pytest.approx(theirs.r2_score(true, guess), rel=1e-5)
    nothing = NumberTally(ALL_NUMBERS, mean, std)
    assert all(math.isnan(v) for v in nothing.values().values())
    nothing.add(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]]))
    assert math.isnan(nothing.values()["r2"])


def test_metrics_are_refused_by_name():
    assert choose_metrics(None, has_classes=False) == ("mse", "mae", "rmse", "r2")
    with pytest.raises(CoadjointError, match="unknown metric of classes 'r2'"):
        choose_metrics(["r2"], has_classes=True)


# on data


def write_steps(path, labels=("a", "b", "c"), n=12, seed=0):
    """Sequences of different lengths with a class at every step, some of them missing."""
    g = np.random.default_rng(seed)
    lines = ["id,x,target"]
    for i in range(n):
        for t in range(3 + i % 4):
            word = "" if (i + t) % 9 == 5 else labels[int(g.choice(3, p=[0.7, 0.2, 0.1]))]
            lines.append(f"s{i},{g.standard_normal():.4f},{word}")
    Path(path).write_text("\n".join(lines) + "\n")
    return path


def test_metrics_of_masked_steps_of_ragged_sequences(tmp_path):
    task = Data.read(
        write_steps(tmp_path / "steps.csv"),
        kind="classify",
        at="every",
        missing="mask",
        metrics=["auc", "log-loss"],
    )
    net = co.Network("elman", inputs=1, hidden=4, outputs=3, readout="every", output="softmax")
    found = co.evaluate(net, task, "train", n=3)
    a, y = [], []
    for u, target in zip(task.sets["train"].u, task.sets["train"].y, strict=True):
        outputs = net.run(co.Batch(torch.from_numpy(u)[:, None])).a[:, 0].detach().double().numpy()
        a.append(outputs[target >= 0])
        y.append(target[target >= 0])
    a, y = np.concatenate(a), np.concatenate(y)
    guess = a.argmax(-1)
    assert found["accuracy"] == pytest.approx(theirs.accuracy_score(y, guess))
    assert found["balanced-accuracy"] == pytest.approx(theirs.balanced_accuracy_score(y, guess))
    assert found["f1"] == pytest.approx(theirs.f1_score(y, guess, average="macro"))
    assert found["log-loss"] == pytest.approx(theirs.log_loss(y, softmax(a), labels=range(3)))
    auc = theirs.roc_auc_score(y, softmax(a), multi_class="ovr")
    assert found["auc"] == pytest.approx(auc, abs=1e-4)  # outputs in float32, other batches


@pytest.mark.parametrize("class_weight", ["balanced", "b=3,c=0.5"])
def test_the_gradient_with_class_weights_is_that_of_the_weighted_loss(tmp_path, class_weight):
    options = {"kind": "classify", "at": "every", "missing": "mask", "dtype": "float64"}
    path = write_steps(tmp_path / "steps.csv")
    task = Data.read(path, class_weight=class_weight, **options)
    counts = np.zeros(3)
    for y in task.sets["train"].y:
        counts += np.bincount(y[y >= 0], minlength=3)
    expected = [1, 3, 0.5]
    if class_weight == "balanced":
        expected = counts.sum() / (3 * counts)
    assert task.class_weights == pytest.approx(expected)
    assert task.notes[-1].startswith("class weights in training: a ")

    net = co.Network(
        "elman", inputs=1, hidden=4, outputs=3, readout="every", output="softmax", dtype=F64
    )
    batch = task.batch(0, 5, seed=1)
    plain = Data.read(path, **options).batch(0, 5, seed=1)
    assert torch.equal(batch.y, plain.y)
    a = net.run(plain).a
    weights = torch.as_tensor(expected, dtype=torch.float64)
    loss = torch.zeros((), dtype=torch.float64)
    for j, T in enumerate(plain.lengths):
        is_there = plain.mask[:T, j] > 0
        y = plain.y[:T, j][is_there]
        entries = torch.nn.functional.cross_entropy(a[:T, j][is_there], y, reduction="none")
        loss = loss + (weights[y] * entries).mean() / len(plain.lengths)
    names = dict(net.named_parameters())
    gradient = dict(zip(names, torch.autograd.grad(loss, net.parameters()), strict=True))
    found = co.BPTT().evaluate(net, batch, task.loss)
    assert float(found.loss) == pytest.approx(loss.item(), rel=1e-12)
    for name, g in gradient.items():
        torch.testing.assert_close(found.gradient[name], g, rtol=1e-10, atol=1e-12)
    held_out = next(task.held_out("train", 0))  # whose losses have no weights
    assert held_out.reduce == "mean"
    assert set(held_out.mask.unique().tolist()) <= {0.0, 1.0}


def test_class_weights_of_samples_weigh_the_loss_and_not_the_penalty(tmp_path):
    g = np.random.default_rng(3)
    x = g.standard_normal((30, 3))
    y = np.array(["no", "yes"])[(x[:, 0] > 0.8).astype(int)]
    lines = [f"{a},{b},{c},{w}" for (a, b, c), w in zip(x, y, strict=True)]
    path = tmp_path / "samples.csv"
    path.write_text("\n".join(["p,q,r,target", *lines]) + "\n")
    options = {"rows": "samples", "kind": "classify", "dtype": "float64", "seed": 2}
    plain = Data.read(path, **options)
    task = Data.read(path, class_weight={"yes": 4}, **options)
    layers = [torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)]
    net = co.Chain(torch.nn.Sequential(*layers).double(), output="softmax")
    method = co.Penalised("log-ratio", 0.3)
    bare = method.evaluate(net, plain.batch(0, 9, 0), plain.loss)
    weighted = method.evaluate(net, task.batch(0, 9, 0), task.loss)
    factor = 1 + 3 * plain.batch(0, 9, 0).y
    torch.testing.assert_close(weighted.losses, bare.losses * factor)
    torch.testing.assert_close(weighted.penalty, bare.penalty)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("balance", "must be balanced, or weights like a=2,b=1; got 'balance'"),
        ("a=two", "must be balanced, or weights"),
        ("a=2,z=1", "there is no class 'z'; the classes are 'a', 'b', 'c'"),
        ("a=0", "the weight of class 'a' must be"),
    ],
)
def test_class_weights_that_make_no_sense_are_refused(tmp_path, given, line):
    path = write_steps(tmp_path / "steps.csv")
    with pytest.raises(CoadjointError, match=line):
        Data.read(path, kind="classify", at="every", missing="mask", class_weight=given)


def test_metrics_of_several_targets_are_in_their_units(tmp_path):
    g = np.random.default_rng(8)
    x = g.standard_normal((60, 2))
    y = x @ np.array([[30.0, -0.2], [5.0, 0.1]]) + [100.0, 2.0] + g.standard_normal((60, 2))
    rows = np.concatenate([x, y], 1)
    path = tmp_path / "two.csv"
    np.savetxt(path, rows, delimiter=",", header="p,q,far,near", comments="", fmt="%.6f")
    task = Data.read(path, kind="regress", rows="samples", target=["far", "near"], metrics="mape")
    net = co.Chain(torch.nn.Linear(2, 2))
    found = co.evaluate(net, task, "test")
    mean, std = task.description.target_scale()
    a = net(torch.from_numpy(task.sets["test"].x)).a.detach().double().numpy() * std + mean
    true = task.sets["test"].y * std + mean
    assert found["mse"] == pytest.approx(theirs.mean_squared_error(true, a), rel=1e-5)
    assert found["rmse"] == pytest.approx(theirs.root_mean_squared_error(true, a), rel=1e-5)
    assert found["r2"] == pytest.approx(theirs.r2_score(true, a), rel=1e-5)
    assert found["mape"] == pytest.approx(theirs.mean_absolute_percentage_error(true, a), rel=1e-4)
    linear, mean_of_training = task.baselines
    assert linear.metrics["test"]["r2"] > 0.3 > 0.1 > mean_of_training.metrics["test"]["r2"]

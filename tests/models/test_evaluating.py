"""Model.evaluate: metrics of labelled data, with intervals by the bootstrap."""

import json

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.models import evaluation_page
from coadjoint.models.bootstrap import ClassSample, NumberSample, resampled_weights
from coadjoint.models.evaluating import log_softmax_at
from coadjoint.tasks.metrics import OF_CLASSES, OF_NUMBERS, ClassTally, NumberTally
from coadjoint.tasks.prediction import softmax

RNG = np.random.default_rng(5)


def tally_of_classes(a, y):
    tally = ClassTally(a.shape[1], list(OF_CLASSES))
    tally.add(torch.tensor(a), torch.tensor(y))
    return tally.values()


def tally_of_numbers(predicted, y):
    k = y.shape[1]
    tally = NumberTally(list(OF_NUMBERS), np.zeros(k), np.ones(k))
    tally.add(torch.tensor(predicted), torch.tensor(y))
    return tally.values()


@pytest.mark.parametrize("absent", [False, True])
def test_weighted_metrics_of_classes_are_those_of_repeated_entries(absent):
    y = RNG.integers(0, 3, 60)
    if absent:
        y = np.where(y == 2, 1, y)
    a = RNG.normal(size=(60, 3)).round(1)  # with ties
    a[np.arange(60), y] += 0.5
    weights = RNG.integers(0, 4, 60)
    again = np.repeat(np.arange(60), weights)
    sample = ClassSample(softmax(a), log_softmax_at(a, y), y)
    figures = sample.figures(weights.astype(float))
    for name, value in tally_of_classes(a[again], y[again]).items():
        np.testing.assert_allclose(figures[name], value, rtol=1e-10, err_msg=name)


def test_weighted_metrics_of_numbers_are_those_of_repeated_entries():
    y = RNG.normal(size=(50, 2)) + 100
    y[:5, 0] = 0
    predicted = y + RNG.normal(size=(50, 2))
    weights = RNG.integers(0, 4, 50)
    again = np.repeat(np.arange(50), weights)
    figures = NumberSample(predicted, y, np.zeros(2)).figures(weights.astype(float))
    for name, value in tally_of_numbers(predicted[again], y[again]).items():
        np.testing.assert_allclose(figures[name], value, rtol=1e-10, err_msg=name)


def test_as_many_units_are_drawn_as_there_are():
    for weights in resampled_weights(7, 20, np.random.default_rng(0)):
        assert weights.sum() == 7


def classifier():
    inputs = RNG.normal(size=(60, 8, 1))
    labels = np.array(["low", "mid", "high"])[np.digitize(inputs.mean((1, 2)), [-0.2, 0.2])]
    task = co.tasks.Data.of(inputs, labels)
    torch.manual_seed(0)
    net = co.Network("gru", inputs=1, hidden=4, outputs=3, output="softmax")
    return co.Model(net, task), inputs, labels


def test_figures_of_classes():
    model, inputs, labels = classifier()
    found = model.evaluate(inputs, labels, resamples=50)
    predicted = model.predict(inputs)
    accuracy = found.metrics["accuracy"]
    assert accuracy.value == pytest.approx((predicted == labels).mean())
    assert accuracy.low <= accuracy.value <= accuracy.high
    assert accuracy.low < accuracy.high
    assert list(found.metrics) == list(OF_CLASSES)
    for label in ("low", "mid", "high"):
        is_label = labels == label
        assert found.support[label] == is_label.sum()
        recall = found.by_class[label]["recall"].value
        assert recall == pytest.approx((predicted[is_label] == label).mean())
    k = found.labels.index("mid")
    assert found.confusion[k].sum() == found.support["mid"]
    counts = [found.support[label] for label in found.labels]
    assert found.baselines["majority"]["accuracy"] == pytest.approx(max(counts) / 60)
    assert found.drawn == "60 sequences"


SHARES = {"data": {"split": [0.8, 0.1, 0.1]}}
TOO_GOOD = "these figures are too good."
NOT_KNOWN = "The model was trained on these data, apart from what was held out of them"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (SHARES, "48 of 60 sequences were used for training"),
        ({"data": {"split": [0.9, 0.1]}}, "54 of 60 sequences were used for training"),
        ({"data": {"split": [1.0, 0.0, 0.0]}}, "All of these data were used for training"),
        ({"data": {"valid": "v", "test": "t"}}, "All of these data were used for training"),
        ({}, NOT_KNOWN),
        ({"data": {"split": "all"}}, NOT_KNOWN),
    ],
)
def test_the_data_of_training_are_told(settings, words):
    model, inputs, labels = classifier()
    model.settings = settings
    found = model.evaluate(inputs, labels, resamples=5)
    assert found.notes[0] == f"{words}: {TOO_GOOD}"
    assert found.to_dict()["notes"][0] == found.notes[0]
    other = model.evaluate(inputs[1:], labels[1:], resamples=5)
    assert not [note for note in other.notes if TOO_GOOD in note]


def test_the_rows_of_one_series_that_were_trained_on_are_told():
    series = RNG.normal(size=100)
    task = co.tasks.Data.of(series, kind="next")
    net = co.Network("gru", inputs=1, hidden=4, outputs=1, readout="every")
    found = co.Model(net, task, SHARES).evaluate(series, resamples=5)
    assert found.notes[0] == f"The first 80% of the rows were used for training: {TOO_GOOD}"
    few = co.tasks.Data.of(RNG.normal(size=(3, 30)), kind="next")
    found = co.Model(net, few, SHARES).evaluate(few.sets["train"].u, resamples=5)
    assert not [note for note in found.notes if TOO_GOOD in note]


def test_intervals_are_those_of_their_seed_and_wider_at_a_higher_level():
    model, inputs, labels = classifier()
    found = model.evaluate(inputs, labels, resamples=40)
    again = model.evaluate(inputs, labels, resamples=40)
    assert found.metrics == again.metrics
    narrow = model.evaluate(inputs, labels, resamples=40, level=0.5).metrics["accuracy"]
    wide = found.metrics["accuracy"]
    assert wide.high - wide.low > narrow.high - narrow.low
    without = model.evaluate(inputs, labels, resamples=0).metrics["accuracy"]
    assert without.value == wide.value
    assert np.isnan(without.low)


def test_the_interval_of_an_accuracy_is_that_of_its_binomial():
    hits = np.arange(200) < 150
    y = np.zeros(200, int)
    p = np.where(hits[:, None], [0.9, 0.1], [0.1, 0.9])
    sample = ClassSample(p, np.zeros(200), y, with_auc=False)
    draws = resampled_weights(200, 2000, np.random.default_rng(1))
    drawn = [float(sample.figures(weights)["accuracy"]) for weights in draws]
    assert np.std(drawn) == pytest.approx(np.sqrt(0.75 * 0.25 / 200), rel=0.05)


def test_figures_of_numbers_are_in_their_units():
    inputs = RNG.normal(size=(40, 6, 2))
    targets = inputs.sum(1) * 10 + 50
    options = {"kind": "regress", "at": "last", "target": ["p", "q"]}
    task = co.tasks.Data.of(inputs, targets, **options)
    torch.manual_seed(0)
    model = co.Model(co.Network("gru", inputs=2, hidden=4, outputs=2), task)
    found = model.evaluate(inputs, targets, resamples=20)
    error = model.predict(inputs) - targets
    assert found.metrics["mae"].value == pytest.approx(np.abs(error).mean())
    assert found.by_target["q"]["mae"].value == pytest.approx(np.abs(error[:, 1]).mean())
    assert list(found.by_target) == ["p", "q"]
    assert found.baselines["mean"]["mae"] == pytest.approx(
        np.abs(targets - task.description.target_mean).mean()
    )
    json.dumps(found.to_dict(), allow_nan=False)


def test_a_series_is_judged_by_its_next_row_and_drawn_in_blocks():
    series = np.sin(np.arange(200) / 3)
    task = co.tasks.Data.of(series, kind="next", window=20)
    torch.manual_seed(0)
    net = co.Network("gru", inputs=1, hidden=4, outputs=1, readout="every")
    model = co.Model(net, task)
    found = model.evaluate(series, resamples=20)
    error = model.predict(series)[:-1] - series[1:]
    assert found.metrics["mse"].value == pytest.approx(np.square(error).mean())
    naive = np.square(np.diff(series)).mean()
    assert found.baselines["last value"]["mse"] == pytest.approx(naive)
    assert found.drawn == "14 blocks of 15 rows"
    assert found.metrics["mse"].low < found.metrics["mse"].high


def test_several_steps_are_judged_each(tmp_path):
    series = [np.sin(np.arange(T) / 3) for T in (30, 25, 3)]
    task = co.tasks.Data.of(series[:2], kind="next", horizon=3, split=(1, 0, 0))
    torch.manual_seed(0)
    net = co.Network("gru", inputs=1, hidden=4, outputs=3, readout="every")
    model = co.Model(net, task)
    found = model.evaluate(series, resamples=5)
    assert found.entries == 27 + 22
    assert not [note for note in found.notes if "left out" in note]
    assert list(found.by_target) == ["u0 +1", "u0 +2", "u0 +3"]
    errors = []
    for one, answers in zip(series[:2], model.predict(series), strict=False):
        errors.append(answers[:-3, 1] - one[2:-1])
    mae = np.abs(np.concatenate(errors)).mean()
    assert found.by_target["u0 +2"]["mae"].value == pytest.approx(mae)
    steps = [one[h : len(one) - 3 + h] - one[:-3] for one in series[:2] for h in (1, 2, 3)]
    naive = np.square(np.concatenate(steps)).mean()
    assert found.baselines["last value"]["mse"] == pytest.approx(naive)
    path = evaluation_page.write_page(found, tmp_path / "page.html", "run", "data")
    assert "u0 +3" in path.read_text()


def test_every_step_counts_and_missing_targets_do_not():
    inputs = [RNG.normal(size=(T, 1)) for T in (5, 7, 6, 8, 5, 9)]
    targets = [np.cumsum(values) for values in inputs]
    task = co.tasks.Data.of(inputs, targets, kind="regress", at="every", split=(1, 0, 0))
    net = co.Network("gru", inputs=1, hidden=3, outputs=1, readout="every")
    model = co.Model(net, task)
    targets[1][3] = np.nan
    found = model.evaluate(inputs, targets, resamples=5)
    assert found.entries == 39
    assert "1 entry has no target: left out" in found.notes


def test_dropped_sequences_keep_the_targets_of_the_others():
    model, inputs, labels = classifier()
    inputs = inputs.copy()
    inputs[3] = np.nan
    found = model.evaluate(inputs, labels, resamples=0, missing="drop")
    rest = np.arange(60) != 3
    expected = (model.predict(inputs[rest]) == labels[rest]).mean()
    assert found.metrics["accuracy"].value == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model, u, y: model.evaluate(u), "holds inputs only"),
        (lambda model, u, y: model.evaluate(u, y[:-1]), "59 entries"),
        (
            lambda model, u, y: model.evaluate(u, ["new", *y[1:]]),
            "label 'new' does not occur in the training",
        ),
        (lambda model, u, y: model.evaluate(u, y, level=1.5), "between 0 and 1"),
        (lambda model, u, y: model.evaluate(u, y, resamples=-1), "at least 0"),
        (lambda model, u, y: model.evaluate({"u0": [1.0]}), "no column 'y0'"),
    ],
)
def test_what_cannot_be_judged_is_refused(call, message):
    model, inputs, labels = classifier()
    with pytest.raises(co.CoadjointError, match=message):
        call(model, inputs, labels)


def test_samples_without_time_are_judged():
    inputs = RNG.normal(size=(30, 3))
    task = co.tasks.Data.of(inputs, inputs[:, 0] > 0, rows="samples")
    model = co.Model(co.networks.make(chain="4", inputs=3, outputs=2, output="softmax"), task)
    found = model.evaluate(inputs, inputs[:, 0] > 0, resamples=5)
    assert found.unit == "sample"
    assert found.entries == 30

"""Model.step: one row at a time gives what predict gives for the rows so far."""

import itertools

import numpy as np
import pytest
import torch

import coadjoint as co

RNG = np.random.default_rng(3)
INPUTS = RNG.normal(size=(12, 9, 2)) * 5 + 3


def make_model(at="last", kind="classify", **options):
    targets = INPUTS[..., 0].cumsum(1)
    if at == "last":
        targets = targets[:, -1]
    if kind == "classify":
        targets = np.where(targets > np.median(targets), "up", "down")
    task = co.tasks.Data.of(INPUTS, targets, kind=kind, at=at)
    torch.manual_seed(0)
    outputs = 2 if kind == "classify" else 1
    output = "softmax" if kind == "classify" else "identity"
    readout = options.pop("readout", None) or at
    net = co.networks.make(
        inputs=2, outputs=outputs, output=output, readout=readout, **{"hidden": 5} | options
    )
    return co.Model(net, task)


def steps_of(model, rows):
    state = None
    for row in rows:
        answer, state = model.step(row, state)
        yield answer


@pytest.mark.parametrize(
    "options",
    [
        {"cell": "elman"},
        {"cell": "lstm", "skip": True},
        {"cell": "gru", "layers": 2, "residual": True},
        {"cell": ["gru", "elman"], "hidden": [5, 3], "residual": True},
        {"cell": "gru", "layers": 3, "dense": True, "readout": "mean"},
        {"cell": "gru", "x0": "learned", "deep": 4},
        {"cell": "gru", "readout": "mean"},
        {"cell": "lstm", "layers": 2, "readout": "mean", "deep": 3, "skip": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
@pytest.mark.parametrize("kind", ["classify", "regress"])
def test_each_step_is_the_prediction_of_the_rows_so_far(options, kind):
    model = make_model(kind=kind, **options)
    sequence = INPUTS[4]
    for t, answer in enumerate(steps_of(model, sequence), 1):
        expected = model.predict(sequence[None, :t])[0]
        if kind == "classify":
            assert answer.value == expected
            share = model.predict_proba(sequence[None, :t])[0]
            np.testing.assert_allclose(answer.probabilities, share, atol=1e-6)
        else:
            np.testing.assert_allclose(answer.value, expected, rtol=1e-5, atol=1e-5)
            assert answer.probabilities is None


def test_steps_with_an_answer_at_every_row_are_those_of_one_prediction():
    model = make_model(at="every", kind="regress", cell="gru")
    values = [answer.value for answer in steps_of(model, INPUTS[2])]
    np.testing.assert_allclose(values, model.predict(INPUTS[2:3])[0], rtol=1e-5, atol=1e-5)


def test_rows_may_be_dictionaries_tensors_or_lists():
    model = make_model(cell="elman")
    row = INPUTS[0, 0]
    forms = [row, row.tolist(), torch.tensor(row), {"u1": row[1], "u0": row[0], "other": "x"}]
    values = [model.step(form)[0].probabilities for form in forms]
    for value in values[1:]:
        np.testing.assert_allclose(value, values[0], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bidirectional": True}, "both directions"),
        ({"readout": "tilted"}, "'tilted' reads all rows at once"),
        ({"readout": "attention"}, "'attention' reads all rows at once"),
    ],
)
def test_networks_that_need_the_whole_sequence_are_refused(options, message):
    model = make_model(cell="gru", **options)
    with pytest.raises(co.Unsupported, match=message):
        model.step(INPUTS[0, 0])


def test_samples_without_time_are_refused():
    task = co.tasks.Data.of(INPUTS[:, 0], INPUTS[:, 1, 0], kind="regress", rows="samples")
    model = co.Model(co.networks.make(chain="4", inputs=2, outputs=1), task)
    with pytest.raises(co.Unsupported, match="without time"):
        model.step(INPUTS[0, 0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1.0], "must hold 2 values, of 'u0', 'u1'"),
        ({"u0": 1.0}, "lacks 'u1'"),
        ([1.0, "x"], "expected a number"),
        ([1.0, np.inf], "expected a finite number"),
        ([1.0, None], "'u1' is missing"),
    ],
)
def test_rows_that_do_not_fit_are_refused(row, message):
    model = make_model(cell="elman")
    with pytest.raises(co.CoadjointError, match=message):
        model.step(row)


def frame_of_gaps():
    """A frame with words, gaps in time and missing values."""
    lengths = [7, 6, 8, 7, 5, 9]
    columns = {"id": [], "day": [], "x": [], "word": [], "target": []}
    for i, length in enumerate(lengths):
        days = np.cumsum(RNG.integers(1, 5, length))
        columns["id"] += [f"s{i}"] * length
        columns["day"] += [np.datetime64("2024-01-01") + int(day) for day in days]
        columns["x"] += [None if t == 3 else float(RNG.normal()) for t in range(length)]
        columns["word"] += list(itertools.islice(itertools.cycle(["rain", "sun", "fog"]), length))
        columns["target"] += [float(RNG.normal())] * length
    return columns


@pytest.mark.parametrize("missing", ["mask", "ffill", "drop"])
def test_words_gaps_and_missing_values_are_those_of_predict(missing):
    columns = frame_of_gaps()
    options = {"kind": "regress", "categorical": "word", "time": "day", "gaps": True}
    task = co.tasks.Data.of(columns, missing=missing, **options, split=(1, 0, 0))
    torch.manual_seed(1)
    model = co.Model(co.Network("gru", inputs=task.inputs, hidden=4, outputs=1), task)
    first = columns["id"].index("s1")
    rows = [{name: values[i] for name, values in columns.items()} for i in range(7)]
    state = None
    for t, row in enumerate(rows, 1):
        answer, state = model.step(row, state)
        so_far = {name: values[:t] for name, values in columns.items()}
        if missing == "drop" and row["x"] is None:
            assert answer.value is None
            continue
        expected = model.predict(so_far)[-1]
        np.testing.assert_allclose(answer.value, expected, rtol=1e-4, atol=1e-5)
    assert first == 7
    with pytest.raises(co.DataError, match="not later"):
        model.step(rows[0], state)


def make_forecaster(**options):
    rows = np.random.default_rng(5).normal(size=(3, 20, 2)).cumsum(1) + 50
    task = co.tasks.Data.of(rows, kind="next", split=(1, 0, 0), **options)
    torch.manual_seed(0)
    sizes = {"inputs": task.inputs, "outputs": task.outputs, "hidden": 4}
    return co.Model(co.networks.make(cell="gru", readout="every", skip=True, **sizes), task), rows


@pytest.mark.parametrize(
    "options", [{"lags": 1}, {"lags": (2, 5)}, {"lags": 7, "target": "u1", "horizon": 2}], ids=str
)
def test_earlier_rows_are_those_of_predict(options):
    model, rows = make_forecaster(**options)
    values = [answer.value for answer in steps_of(model, rows[1])]
    np.testing.assert_allclose(values, model.predict(rows[1:2])[0], rtol=1e-5)


def test_of_earlier_rows_no_more_are_kept_than_the_lags_need():
    model, rows = make_forecaster(lags=(2, 5))
    state = None
    for row in rows[0]:
        _, state = model.step(row, state)
    assert state.past.shape == (5, 2)


def test_columns_known_in_advance_are_refused_by_name():
    model, rows = make_forecaster(known="u1", target="u0")
    with pytest.raises(co.Unsupported, match="'u1', known in advance"):
        model.step(rows[0, 0])

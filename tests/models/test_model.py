"""Model: predictions in the form of the data; load: the model of a run folder."""

import shutil

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.training import storage
from paths import DATA

RNG = np.random.default_rng(11)
INPUTS = RNG.normal(size=(20, 6, 2)) * 2 + 5
FOLDERS = DATA / "folders-0.6.1"


def silent(message):
    """Models before 0.6.1 carry no sum."""


def make_model(inputs=INPUTS, targets=None, hidden=4, **options):
    task = co.tasks.Data.of(inputs, targets, **options)
    torch.manual_seed(0)
    output = "softmax" if task.description.labels else "identity"
    sizes = {"inputs": task.inputs, "outputs": task.outputs, "hidden": hidden}
    return co.Model(co.Network("gru", **sizes, readout=task.readout, output=output), task)


def numbers():
    return make_model(targets=INPUTS.sum(1), kind="regress", at="last")


def test_one_answer_for_each_sequence_whatever_the_form():
    model = numbers()
    answers = model.predict(INPUTS)
    assert answers.shape == (20, 2)
    for form in (list(INPUTS), torch.tensor(INPUTS), INPUTS.tolist()):
        np.testing.assert_allclose(model.predict(form), answers, rtol=1e-6)
    rows = {"u0": INPUTS[..., 0].reshape(-1), "u1": INPUTS[..., 1].reshape(-1)}
    frame = rows | {"id": np.repeat(np.arange(20), 6)}
    np.testing.assert_allclose(model.predict(frame, id="id"), answers, rtol=1e-6)


def test_answers_are_in_the_units_of_the_data():
    model = numbers()
    d = model.description
    u = (INPUTS - d.mean) / d.std
    batch = co.Batch(torch.tensor(u, dtype=torch.float32).transpose(0, 1))
    with torch.no_grad():
        a = model.network.run(batch).a.double().numpy()
    expected = a * d.target_std + d.target_mean
    np.testing.assert_allclose(model.predict(INPUTS), expected, rtol=1e-6)


def test_answers_at_every_step():
    targets = INPUTS.cumsum(1)[..., 0]
    model = make_model(targets=targets, kind="regress", at="every")
    answers = model.predict(INPUTS)
    assert answers.shape == (20, 6)
    ragged = model.predict([INPUTS[0], INPUTS[1, :3], INPUTS[2, :1]])
    assert [part.shape for part in ragged] == [(6,), (3,), (1,)]
    np.testing.assert_allclose(ragged[1], answers[1, :3], rtol=1e-5)
    padded = model.predict(INPUTS, lengths=[6] * 19 + [2])
    assert isinstance(padded, list)
    assert padded[-1].shape == (2,)
    one = model.predict(INPUTS[3])
    np.testing.assert_allclose(one, answers[3], rtol=1e-5)
    rows = {"u0": INPUTS[:2, :, 0].reshape(-1), "u1": INPUTS[:2, :, 1].reshape(-1)}
    of_rows = model.predict(rows | {"id": np.repeat([0, 1], 6)}, id="id")
    np.testing.assert_allclose(of_rows, answers[:2].reshape(-1), rtol=1e-5)


def test_long_sequences_carry_their_state():
    long = RNG.normal(size=(1, 20_000, 1))
    model = make_model(long[:, :200], kind="next", window=20)
    answers = model.predict(long)
    assert answers.shape == (1, 20_000)
    tail = model.predict(long[:, 19_000:])
    np.testing.assert_allclose(answers[0, -10:], tail[0, -10:], atol=1e-5)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (np.where(INPUTS[:, 0, 0] > 5, "up", "down"), ["down", "up"]),
        ((INPUTS[:, 0, 0] > 5).astype(int) * 7 + 3, [3, 10]),
    ],
)
def test_labels_and_probabilities(labels, expected):
    model = make_model(targets=labels, kind="classify")
    assert model.labels == expected
    shares = model.predict_proba(INPUTS)
    np.testing.assert_allclose(shares.sum(1), 1)
    answers = model.predict(INPUTS)
    assert answers.tolist() == [expected[k] for k in shares.argmax(1)]
    assert set(answers.tolist()) <= set(expected)


def test_missing_rows_have_no_answer():
    model = make_model(targets=np.where(INPUTS[:, 0, 0] > 5, "up", "down"))
    inputs = INPUTS.copy()
    inputs[4] = np.nan
    answers = model.predict(inputs, missing="drop")
    assert answers[4] is None
    whole = np.arange(20) != 4
    assert answers[whole].tolist() == model.predict(INPUTS[whole]).tolist()
    assert np.isnan(model.predict_proba(inputs, missing="drop")[4]).all()


def test_windows_with_one_target_each_have_an_answer_each():
    series = RNG.normal(size=(3, 40, 1))
    rows = {"u0": series.reshape(-1), "id": np.repeat(np.arange(3), 40)}
    rows["target"] = rows["u0"].cumsum()
    model = make_model(rows, kind="regress", at="last", window=10)
    assert model.predict(rows).shape == (12,)
    answers = model.predict(series)
    assert answers.shape == (3, 4)
    assert model.predict(series, whole=True).shape == (3,)


def test_samples_and_their_reconstruction():
    x = RNG.normal(size=(12, 1, 3, 3))
    task = co.tasks.Data.of(x, rows="samples", kind="reconstruct")
    model = co.Model(co.networks.make(autoencoder=[4], inputs=9, outputs=9), task)
    assert model.predict(x).shape == (12, 1, 3, 3)


def test_the_table_has_rows_ids_and_probabilities():
    model = make_model(targets=np.where(INPUTS[:, 0, 0] > 5, "up", "down"))
    table = model.table(INPUTS[:3], ids=["x", "y", "z"])
    assert list(table) == ["row", "id", "prediction", "probability down", "probability up"]
    assert table["id"] == ["x", "y", "z"]


def test_arrays_are_read_by_position_where_training_had_names():
    columns = {"a": INPUTS[..., 0].reshape(-1), "b": INPUTS[..., 1].reshape(-1)}
    columns["id"] = np.repeat(np.arange(20), 6)
    columns["target"] = np.repeat(INPUTS[:, 0, 0], 6)
    model = make_model(columns, kind="regress")
    np.testing.assert_allclose(model.predict(INPUTS), model.predict(columns), rtol=1e-6)
    assert model.features == ["a", "b"]
    note = "columns are taken in the order of training: 'a', 'b'"
    assert note in model.prepare(INPUTS).notes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.predict(INPUTS[..., :1]), "has 1 features, and 2 features are named"),
        (lambda model: model.predict_proba(INPUTS), "has no probabilities"),
        (lambda model: model.predict(INPUTS, colour="red"), "unknown reading options 'colour'"),
        (lambda model: model.predict(None), "data must be a path"),
        (lambda model: model.predict({"u0": [1.0]}), "'u1' is missing"),
        (lambda model: model.predict("nowhere.csv"), "does not exist"),
        (lambda model: model.predict(INPUTS * np.nan), "argument data"),
        (lambda model: co.Model(new_network(), model.description), "has outputs 1"),
    ],
)
def test_what_cannot_be_predicted_is_refused(call, message):
    with pytest.raises(co.CoadjointError, match=message):
        call(numbers())


def test_one_feature_is_not_features():
    model = make_model(INPUTS[..., :1], INPUTS.sum((1, 2)), kind="regress", at="last")
    assert ", 1 feature, Network(" in repr(model)
    assert ", 2 features, Network(" in repr(numbers())


def test_errors_about_data_name_arguments(tmp_path):
    """`with_flags` has what the command line prints."""
    lines = ["name,time,u0,label"]
    for i in range(60):
        lines.append(f"s{i // 6},{i % 6},{i % 7},{'up' if i % 12 < 6 else 'down'}")
    path = tmp_path / "train.csv"
    path.write_text("\n".join(lines) + "\n")
    task = co.tasks.Data.read(path, id="name", target="label", kind="classify")
    net = co.Network("gru", inputs=1, hidden=2, outputs=2, output="softmax")
    model = co.Model(net, task)
    new = tmp_path / "new.csv"
    cases = {
        "time,u0\n0,1\n": (
            "there is no column 'name', which the training file has: pass {} if it is called "
            "otherwise, {} if there is none. Columns",
            ('id="NAME"', 'id=""'),
            ("--id NAME", "--id ''"),
        ),
        "name,time,u0\na,0,\na,1,1\n": (
            "Fill them in, or pass {}.",
            ('missing="drop" or "ffill"',),
            ("--missing drop|ffill",),
        ),
        "name,time,u0\na,0,1\na,1,1\na,3,1\n": (
            "or pass {}.",
            ('irregular="allow"',),
            ("--irregular allow",),
        ),
        "name;time;u0\na;0;1\n": ("Pass {}.", ('sep=";"',), ("--sep ';'",)),
    }
    for content, (words, arguments, flags) in cases.items():
        new.write_text(content)
        with pytest.raises(co.DataError) as caught:
            model.predict(new)
        assert words.format(*arguments) in str(caught.value)
        assert words.format(*flags) in caught.value.with_flags


def test_an_old_run_folder_is_loaded_with_its_labels(tmp_path):
    model = co.load(FOLDERS / "data", warn=silent)
    answers = model.predict(FOLDERS / "train.csv")
    assert set(answers.tolist()) <= set(model.labels)
    assert not model.network.training
    assert model.settings
    shutil.copy(FOLDERS / "data" / "model.safetensors", tmp_path)
    again = co.load(tmp_path / "model.safetensors", warn=silent)
    assert again.predict(FOLDERS / "train.csv").tolist() == answers.tolist()


def test_a_run_of_a_built_in_task_has_no_columns(tmp_path, coadjoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "train xor --length 10 --hidden 2 --steps 1 --probes 2 --quiet --out run"
    assert coadjoint(*words.split())[0] == 0
    with pytest.raises(co.DataError, match="trained on task 'xor', not on your own data"):
        co.load("run")
    code, _, err = coadjoint("sample", "run")
    assert code == 3
    assert "it knows no columns or symbols" in " ".join(err.split())


@pytest.fixture
def python_run(tmp_path):
    """The folder of a run of co.train, and its result."""
    task = co.tasks.Data.of(INPUTS, INPUTS[:, 0, 0], kind="regress")
    net = co.Network("gru", inputs=2, hidden=3, outputs=1)
    folder = tmp_path / "run"
    result = co.train(net, task, steps=6, every=2, checkpoint=2, folder=folder)
    return folder, result


def new_network(hidden=3):
    return co.Network("gru", inputs=2, hidden=hidden, outputs=1)


def test_a_run_from_python_is_loaded_into_its_network(python_run):
    folder, result = python_run
    model = co.load(folder, network=new_network())
    for name, weight in result.network.state_dict().items():
        assert torch.equal(weight, model.network.state_dict()[name])
    assert model.predict(INPUTS).shape == (20,)
    with pytest.raises(co.StorageError, match=r"co.load\(RUN, network=net\)"):
        co.load(folder)
    with pytest.raises(co.StorageError, match=r"model\.safetensors"):
        co.load(folder, network=new_network(hidden=5))


def test_a_run_that_has_not_finished_is_loaded_with_its_best_weights(python_run):
    folder, result = python_run
    (folder / "model.safetensors").unlink()
    said = []
    model = co.load(folder, network=new_network(), warn=said.append)
    for name, weight in result.network.state_dict().items():
        assert torch.equal(weight, model.network.state_dict()[name])
    assert f"its best weights so far, those of step {result.best_step:,}" in said[0]
    latest = storage.list_checkpoints(folder)[-1]
    (latest / "state.json").write_text("{}")  # damaged: the one before is taken
    co.load(folder, network=new_network(), warn=said.append)
    assert len(said) == 2
    for path in storage.list_checkpoints(folder):
        (path / "state.json").write_text("{}")
    with pytest.raises(co.StorageError, match="no other checkpoint that is intact"):
        co.load(folder, network=new_network(), warn=said.append)


def test_other_python_runs_do_not_describe_their_data(tmp_path):
    net = co.Network("gru", inputs=2, hidden=3, outputs=1, output="sigmoid")
    co.train(net, co.tasks.XOR(10), steps=1, tests=2, confirm=2, probes=2, folder=tmp_path / "run")
    with pytest.raises(co.DataError, match=r"co.Model\(net, task\)"):
        co.load(tmp_path / "run", network=net)

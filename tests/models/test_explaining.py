"""Explanations of data: columns, steps, baselines and what is refused."""

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.errors import DataError, InputError, KindError
from coadjoint.models.explaining import sum_columns, zero_inputs
from coadjoint.tasks.data import Data

FRAME = {
    "id": ["p"] * 4 + ["q"] * 3,
    "day": [1, 2, 3, 5, 1, 2, 4],
    "a": [1.0, 2.0, None, 4.0, 0.5, -1.0, 3.0],
    "city": ["Rome", "Oslo", "Rome", "Oslo", "Oslo", "Rome", "Rome"],
    "y": [1.0, 2.0, 1.5, 0.0, 2.5, 3.0, -1.0],
}
HOW = {"id": "id", "time": "day", "target": "y", "missing": "mask", "gaps": True}


def model_of(data, net):
    """A model of a network with random weights that are not small."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn_like(p) * 0.7)
    return co.Model(net, data)


def frame_model(at="every"):
    data = Data.of(FRAME, kind="regress", at=at, categorical="city", split=(1, 0, 0), **HOW)
    d = data.description
    net = co.Network("gru", inputs=d.inputs, hidden=4, outputs=1, readout=at)
    return model_of(data, net)


def sequences(n=6, T=8, features=3, seed=0):
    return np.random.default_rng(seed).normal(size=(n, T, features))


def class_model(outputs=3, **options):
    u = sequences(30)
    y = np.arange(30) % outputs
    data = Data.of(u, y, kind="classify", split=(1, 0, 0), **options)
    return model_of(data, co.Network("elman", inputs=3, hidden=5, outputs=outputs))


def test_inputs_of_one_column_are_added_up():
    model = frame_model()
    d = model.description
    assert d.input_names == ["a", "a (missing)", "city = Oslo", "city = Rome", "day (gap)"]
    values = np.arange(10.0).reshape(2, 5)
    assert sum_columns(values, d).tolist() == [[1, 5, 4], [11, 15, 9]]
    found = model.explain(FRAME)
    assert found.columns == ["a", "city", "day"]
    assert [x.shape for x in found.attributions] == [(4, 3), (3, 3)]
    for sample in found.samples:
        change = sample.value - sample.baseline
        assert sample.attributions.sum() == pytest.approx(change, abs=1e-4 * abs(change) + 1e-9)
    # numbers are explained in their units
    assert found.values == pytest.approx(model.predict(FRAME)[[3, 6]].astype(float), rel=1e-5)


def test_baselines():
    model = frame_model()
    prediction = model.prepare(FRAME)
    first = prediction.cut.pieces[0]
    u = prediction.u[first.start : first.stop].astype(float)

    def output(inputs):
        net = model.network
        a = net(torch.as_tensor(inputs, dtype=torch.float32)[:, None]).a[-1, 0, 0].item()
        return a * model.description.target_std[0] + model.description.target_mean[0]

    zero = zero_inputs(model.description)
    d = model.description
    assert zero[0] == -d.mean[0] / d.std[0]
    assert zero[1] == 0
    assert zero[2:4].tolist() == [-share for share in d.shares["city"]]
    assert zero[4] == -d.gap["mean"] / d.gap["std"]
    expected = {
        "mean": np.zeros_like(u),
        "zero": np.tile(zero, (len(u), 1)),
        "first": np.tile(u[0], (len(u), 1)),
    }
    for name, inputs in expected.items():
        sample = model.explain(FRAME, baseline=name).samples[0]
        assert sample.baseline == pytest.approx(output(inputs), rel=1e-5), name
        assert sample.value == pytest.approx(output(u), rel=1e-5), name
    given = model.explain(FRAME, baseline=zero)
    assert given.baseline == "given"
    assert given.samples[0].baseline == pytest.approx(output(expected["zero"]), rel=1e-5)


def test_classes():
    model = class_model()
    u = sequences(5, seed=1)
    found = model.explain(u)
    assert found.quantity == "log-odds"
    predicted = [sample.output for sample in found.samples]
    assert predicted == [str(label) for label in model.predict(u)]
    p = model.predict_proba(u).max(1)
    assert found.values == pytest.approx(np.log(p / (1 - p)), rel=1e-3)
    assert "of the predicted class of 5 sequences" in found.summary()
    of_two = model.explain(u, output="2", quantity="probability")
    assert of_two.values == pytest.approx(model.predict_proba(u)[:, 2], rel=1e-4)
    assert {sample.output for sample in of_two.samples} == {"2"}
    assert "the probability of class '2'" in of_two.summary()
    assert len(model.explain(u, limit=2)) == 2
    assert "the first 2 of 5 sequences are explained" in model.explain(u, limit=2).notes


def test_means_by_column_and_step():
    model = class_model()
    u = [sequences(1, T, seed=T)[0] for T in (3, 5)]
    found = model.explain(u)
    sizes = [np.abs(x) for x in found.attributions]
    assert found.by_column == pytest.approx((sizes[0].sum(0) + sizes[1].sum(0)) / 2)
    assert len(found.by_step) == 5
    assert found.by_step[0] == pytest.approx((sizes[0][-1].sum() + sizes[1][-1].sum()) / 2)
    assert found.by_step[4] == pytest.approx(sizes[1][0].sum())  # only one has five steps
    logs = [sample.costates for sample in found.samples]
    assert [len(x) for x in logs] == [4, 6]
    assert found.mean_costates[0] == pytest.approx((logs[0][-1] + logs[1][-1]) / 2)
    assert found.step_names[:3] == [
        "last step",
        "1 step before the last",
        "2 steps before the last",
    ]


def test_steps_of_an_output_at_every_step():
    model = frame_model()
    found = model.explain(FRAME, step=1)
    answers = model.predict(FRAME).astype(float)
    assert found.values == pytest.approx(answers[[1, 5]], rel=1e-5)
    assert (found.attributions[0][2:] == 0).all()
    assert "at step 1" in found.summary()
    assert model.explain(FRAME, step=-3).values == pytest.approx(answers[[1, 4]], rel=1e-5)
    with pytest.raises(InputError, match="'q' has 3 steps; step 3 is not one of them"):
        model.explain(FRAME, step=3)
    with pytest.raises(InputError, match="one output for each sequence"):
        class_model().explain(sequences(), step=1)


def test_tables_of_sequences():
    found = frame_model().explain(FRAME)
    columns = {column.name: list(column.values) for column in found.table()}
    names = ["row", "step", "id", "day", "output", "attribution a", "attribution city"]
    assert list(columns) == [*names, "attribution day", "costate"]
    assert columns["row"] == list(range(7))
    assert columns["step"] == [0, 1, 2, 3, 0, 1, 2]
    assert columns["id"] == FRAME["id"]
    assert columns["attribution a"] == np.concatenate(found.attributions)[:, 0].tolist()
    assert columns["costate"][3] == pytest.approx(10 ** found.samples[0].costates[4])


def test_windows_are_explained_each():
    u = sequences(1, 20, 2)[0]
    frame = {"who": ["p"] * 10 + ["q"] * 10, "a": u[:, 0], "b": u[:, 1], "y": np.arange(20.0)}
    how = {"kind": "regress", "at": "last", "window": 5, "id": "who", "target": "y"}
    data = Data.of(frame, split=(1, 0, 0), **how)
    model = model_of(data, co.Network("elman", inputs=2, hidden=3, outputs=1))
    found = model.explain(frame)
    assert [sample.first_step for sample in found.samples] == [0, 5, 0, 5]
    columns = {column.name: list(column.values) for column in found.table()}
    assert columns["step"] == [*range(10), *range(10)]
    assert columns["window"][:6] == ["p[0:5]"] * 5 + ["p[5:10]"]
    assert len(model.explain(frame, whole=True)) == 2


def test_samples_without_time():
    x = np.random.default_rng(0).normal(size=(12, 4))
    y = x @ [1.0, -2.0, 0.0, 3.0] + 5
    data = Data.of(x, y, kind="regress", rows="samples", split=(1, 0, 0))
    linear = torch.nn.Linear(4, 1)
    net = co.Chain(linear)
    d = data.description
    slopes = torch.tensor([1.0, -2.0, 0.0, 3.0]) * torch.tensor(d.std) / d.target_std[0]
    with torch.no_grad():
        linear.weight.copy_(slopes[None])
    found = co.Model(net, data).explain(x, method="gradient-x-input")
    expected = (x - d.mean) * [1.0, -2.0, 0.0, 3.0]
    assert np.array(found.attributions) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    names = [column.name for column in found.table()]
    assert names[:5] == ["row", "output", "value", "baseline", "gap"]
    assert len(names) == 9
    with pytest.raises(InputError, match="samples have no time"):
        co.Model(net, data).explain(x, baseline="first")


def test_images():
    x = np.random.default_rng(0).normal(size=(10, 2, 4, 5))
    data = Data.of(x, np.arange(10) % 2, kind="classify", rows="samples", split=(1, 0, 0))
    layers = (torch.nn.Conv2d(2, 2, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2))
    net = co.Chain(*layers, shape=(2, 4, 5))
    found = co.Model(net, data).explain(x[:3], baseline="zero")
    assert found.is_image
    assert [a.shape for a in found.attributions] == [(2, 4, 5)] * 3
    assert len(found.by_column) == 2
    assert len(found.mean_costates) == 4  # by layer, the input first
    assert len(found.table()) == 5 + 2 * 20


def test_what_is_refused():
    model = class_model()
    u = sequences()
    with pytest.raises(InputError, match="unknown method"):
        model.explain(u, method="shap")
    with pytest.raises(InputError, match="unknown baseline"):
        model.explain(u, baseline="median")
    with pytest.raises(InputError, match="baseline must be one of"):
        model.explain(u, baseline=[1.0, 2.0])
    with pytest.raises(InputError, match="unknown class '7'"):
        model.explain(u, output="7")
    with pytest.raises(KindError, match="output must be"):
        model.explain(u, output=1)
    with pytest.raises(InputError, match="unknown quantity"):
        model.explain(u, quantity="p")
    with pytest.raises(KindError, match="step must be a whole number"):
        model.explain(u, step=1.5)
    with pytest.raises(InputError, match="tolerance"):
        model.explain(u, tolerance=0)
    with pytest.raises(InputError, match="limit"):
        model.explain(u, limit=0)
    with pytest.raises(InputError, match="is for classes"):
        frame_model().explain(FRAME, quantity="logit")
    with pytest.raises(DataError):
        model.explain(u[..., :2])


def test_autoencoders_need_the_name_of_an_output():
    x = np.random.default_rng(0).normal(size=(10, 3))
    data = Data.of(x, kind="reconstruct", rows="samples", split=(1, 0, 0))
    model = co.Model(co.Chain(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3)), data)
    with pytest.raises(InputError, match="name the one to explain with --output"):
        model.explain(x)
    name = data.description.features[1]
    found = model.explain(x, output=name)
    assert found.values == pytest.approx(model.predict(x)[:, 1], rel=1e-4, abs=1e-5)

"""Networks as ONNX files: onnxruntime answers what the network answers."""

import json
import sys

import numpy as np
import pytest
import torch

import exports
from coadjoint.cells.formula import PRIMITIVES
from coadjoint.errors import MissingError, Unsupported
from coadjoint.models import Model
from coadjoint.models.export import export_network
from coadjoint.models.export.onnx import describe_columns, onnx_bytes
from coadjoint.networks.cell_choice import CELL_NAMES
from coadjoint.networks.factory import construct_network
from coadjoint.networks.network import Network
from coadjoint.tasks.data import Data

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
TOLERANCE = 1e-5


def open_network(net, data=None):
    content = onnx_bytes(net, data, describe_columns(net, data))
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])


def check(net):
    session = open_network(net)
    for samples, steps, lengths in exports.SIZES:
        x = exports.sequences(net, samples, steps)
        (found,) = session.run(None, {"x": x, "lengths": np.array(lengths)})
        expected = exports.answers(net, x, lengths)
        assert exports.distance(net, found, expected, lengths) < TOLERANCE


@pytest.mark.parametrize("cell", CELL_NAMES)
def test_every_cell_at_every_step(cell):
    check(exports.build(cell, readout="every", x0="learned"))


@pytest.mark.parametrize("cell", CELL_NAMES)
def test_every_cell_in_a_stack_of_both_directions(cell):
    check(exports.build(cell, **exports.STACK))


@pytest.mark.parametrize("name", exports.OPTIONS)
def test_options(name):
    check(exports.build(**exports.OPTIONS[name]))


@pytest.mark.parametrize("name", exports.CHAINS)
def test_chains(name):
    net, shape = exports.build_chain(name)
    session = open_network(net)
    for samples in (1, 4):
        x = torch.randn(samples, *shape)
        (found,) = session.run(None, {"x": x.numpy()})
        expected = net(x).y_hat.detach().numpy()
        assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()


def test_an_autoencoder():
    net = construct_network(autoencoder=[4, 2], inputs=7, outputs=7, activation="sigmoid").eval()
    x = torch.randn(5, 7)
    (found,) = open_network(net).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(found, net(x).y_hat.detach(), rtol=TOLERANCE, atol=1e-6)


@pytest.mark.parametrize(
    ("cell", "operator"),
    [("elman", "RNN"), ("lstm", "LSTM"), ("gru", "GRU"), ("leaky", "Scan"), ("gru-before", "Scan")],
)
def test_operators(cell, operator):
    net = exports.build(cell)
    graph = onnx.load_from_string(onnx_bytes(net, None, {})).graph
    kinds = {node.op_type for node in graph.node}
    assert kinds & {"RNN", "LSTM", "GRU", "Scan", "Loop"} == {operator}
    axes = [[d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.input]
    assert axes == [["batch", "length", 3], ["batch"]]


@pytest.mark.parametrize("cell", ["lstm", "scrn"])
def test_nothing_after_the_end_is_read(cell):
    net = exports.build(cell, **exports.STACK, readout="attention")
    session = open_network(net)
    x = exports.sequences(net, 3, 7)
    lengths = np.array([7, 4, 1])
    (expected,) = session.run(None, {"x": x, "lengths": lengths})
    for filler in (np.nan, np.inf, 1e30):
        x[1, 4:] = filler
        x[2, 1:] = filler
        (found,) = session.run(None, {"x": x, "lengths": lengths})
        np.testing.assert_array_equal(found, expected)


def run_rows(session, rows):
    x, lengths = exports.pad(rows)
    outputs = session.run(None, {"x": x, "lengths": lengths})
    return dict(zip([output.name for output in session.get_outputs()], outputs, strict=True))


def test_columns_in_their_own_units(tmp_path):
    data, rows = exports.read_words(tmp_path / "w.csv", kind="classify", target="label")
    d = data.description
    net = exports.build("lstm", inputs=d.inputs, outputs=2, output="softmax")
    model = Model(net, data)
    session = open_network(net, d)
    found = run_rows(session, rows)
    expected = model.predict_proba(str(tmp_path / "w.csv"))
    np.testing.assert_allclose(found["probabilities"], expected, rtol=TOLERANCE)
    assert found["label"].tolist() == model.predict(str(tmp_path / "w.csv")).tolist()
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["columns"]) == ["a", "b", "city", "time (gap)"]
    assert json.loads(about["missing"]) == ["b"]
    assert json.loads(about["words"]) == {"city": ['Li"ma', "Oslo", "Rome"]}
    assert json.loads(about["labels"]) == d.labels


def test_labels_at_every_step(tmp_path):
    data, rows = exports.read_words(tmp_path / "w.csv", kind="classify", target="label", at="every")
    d = data.description
    net = exports.build("leaky", inputs=d.inputs, output="softmax", readout="every")
    found = run_rows(open_network(net, d), rows)
    labels = Model(net, data).predict(str(tmp_path / "w.csv"))
    steps = np.concatenate(
        [label[: len(row)] for label, row in zip(found["label"], rows, strict=True)]
    )
    assert steps.tolist() == labels.tolist()
    assert set(found["label"][0, len(rows[0]) :]) == {""}
    assert found["probabilities"].shape == (len(rows), max(map(len, rows)), 2)


def test_numbers_in_the_units_of_the_target(tmp_path):
    data, rows = exports.read_words(tmp_path / "w.csv", kind="regress", target="load", at="every")
    d = data.description
    net = exports.build("gru", inputs=d.inputs, outputs=1, readout="every", dtype=torch.float64)
    found = run_rows(open_network(net, d), rows)["prediction"]
    steps = np.concatenate(
        [numbers[: len(row), 0] for numbers, row in zip(found, rows, strict=True)]
    )
    expected = Model(net, data).predict(str(tmp_path / "w.csv"))
    scale = d.target_std[0]
    np.testing.assert_allclose((steps - 1e4) / scale, (expected - 1e4) / scale, atol=TOLERANCE)


@pytest.mark.parametrize("options", exports.LAGS, ids=str)
def test_earlier_rows(options):
    model, rows = exports.build_forecaster(**options)
    session = open_network(model.network, model.description)
    found = run_rows(session, [*rows, rows[0, :3]])["prediction"]
    expected = model.predict(rows)
    np.testing.assert_allclose(found[:3], expected, rtol=TOLERANCE)
    np.testing.assert_allclose(found[3, :3], expected[0][:3], rtol=TOLERANCE)


def test_columns_known_in_advance_are_refused_by_name(tmp_path):
    model, _ = exports.build_forecaster(known="u1", target="u0")
    with pytest.raises(Unsupported, match="reads 'u1' ahead"):
        export_network(model.network, model.description, tmp_path / "net.onnx")


def test_samples_of_images(tmp_path):
    images = np.random.default_rng(0).normal(100, 30, (20, 2, 5, 4))
    np.savez(tmp_path / "x.npz", x=images, y=np.arange(20) % 3)
    data = Data.read(tmp_path / "x.npz", kind="classify", rows="samples", split=(1, 0, 0))
    chain = {"chain": "conv 4 3, relu", "shape": (2, 5, 4), "output": "softmax"}
    net = construct_network(outputs=3, **chain).eval()
    label, shares = open_network(net, data.description).run(None, {"x": images[:6]})
    model = Model(net, data)
    np.testing.assert_allclose(shares, model.predict_proba(images[:6]), rtol=TOLERANCE)
    assert label.tolist() == [str(k) for k in model.predict(images[:6])]


def test_an_autoencoder_returns_what_it_reads_in_its_units(tmp_path):
    x = np.random.default_rng(0).normal([5, 1000, -3], [1, 50, 0.1], (30, 3))
    lines = ["p,q,r", *(",".join(map(str, row)) for row in x)]
    (tmp_path / "x.csv").write_text("\n".join(lines) + "\n")
    data = Data.read(tmp_path / "x.csv", kind="reconstruct", rows="samples", split=(1, 0, 0))
    net = construct_network(autoencoder=2, inputs=3, outputs=3).eval()
    (found,) = open_network(net, data.description).run(None, {"x": x[:5]})
    np.testing.assert_allclose(found, Model(net, data).predict(x[:5]), rtol=TOLERANCE)


def test_export_checks_what_it_has_written(tmp_path):
    net = exports.build("peephole")
    exported = export_network(net, None, tmp_path / "net.onnx")
    assert exported.files == (tmp_path / "net.onnx",)
    assert [(check.samples, check.steps) for check in exported.checks] == [(3, 5), (2, 12)]
    assert exported.difference < TOLERANCE
    assert onnx.load(tmp_path / "net.onnx").producer_name == "coadjoint"


def test_without_onnxruntime_nothing_is_checked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    exported = export_network(exports.build("elman"), None, tmp_path / "net.onnx")
    assert (exported.checks, exported.difference) == ((), None)
    assert "was not run" in exported.notes[0]


def test_without_onnx_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingError, match=r"\[export\]"):
        export_network(exports.build("elman"), None, tmp_path / "net.onnx")


def test_what_is_refused(tmp_path):
    sequence = construct_network(cell="gru", inputs=3, outputs=4, readout="sequence", hidden=5)
    own = Network(torch.nn.GRUCell(3, 5), inputs=3, hidden=5, outputs=2)
    for net, words in ((sequence, "answers are sequences"), (own, "GRUCell is code of your own")):
        with pytest.raises(Unsupported, match=words):
            export_network(net.eval(), None, tmp_path / "net.onnx")
    assert not (tmp_path / "net.onnx").exists()


@pytest.mark.parametrize("name", [name for name in PRIMITIVES if "_" not in name])
def test_every_function_of_a_formula(name):
    check(exports.build_formula(name))

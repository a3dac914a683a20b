"""Networks as Python files that need torch alone: they answer what the network answers."""

import ast
import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch

import exports
from coadjoint.cells.formula import PRIMITIVES
from coadjoint.errors import InputError, Unsupported
from coadjoint.models import Model
from coadjoint.models.export import export_network
from coadjoint.models.export.torch_code import torch_code
from coadjoint.networks.cell_choice import CELL_NAMES
from coadjoint.networks.factory import construct_network
from coadjoint.tasks.data import Data
from coadjoint.training import storage

TOLERANCE = 1e-6


def open_network(folder, net, data=None):
    """The network of the files that are written, loaded from them."""
    code, tensors = torch_code(net, data, "1.0")
    (folder / "net.py").write_text(code)
    (folder / "net.safetensors").write_bytes(storage.pack(tensors))
    spec = importlib.util.spec_from_file_location("net", folder / "net.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load()


def check(folder, net):
    opened = open_network(folder, net)
    for samples, steps, lengths in exports.SIZES:
        x = exports.sequences(net, samples, steps)
        found = opened.predict(x, lengths).numpy()
        expected = exports.answers(net, x, lengths)
        assert exports.distance(net, found, expected, lengths) < TOLERANCE


@pytest.mark.parametrize("cell", CELL_NAMES)
def test_every_cell_at_every_step(cell, tmp_path):
    check(tmp_path, exports.build(cell, readout="every", x0="learned"))


@pytest.mark.parametrize("cell", CELL_NAMES)
def test_every_cell_in_a_stack_of_both_directions(cell, tmp_path):
    net = exports.build(cell, **exports.STACK, dtype=torch.float64)
    opened = open_network(tmp_path, net)
    x = exports.sequences(net, 3, 7)
    expected = exports.answers(net, x, [7, 4, 1])
    np.testing.assert_allclose(opened.predict(x, [7, 4, 1]), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", exports.OPTIONS)
def test_options(name, tmp_path):
    check(tmp_path, exports.build(**exports.OPTIONS[name]))


@pytest.mark.parametrize("name", exports.CHAINS)
def test_chains(name, tmp_path):
    net, shape = exports.build_chain(name)
    x = torch.randn(4, *shape)
    found = open_network(tmp_path, net).predict(x.numpy())
    expected = net(x).y_hat.detach()
    assert (found - expected).abs().max() < TOLERANCE * expected.abs().max()


@pytest.mark.parametrize(
    ("cell", "module"),
    [("elman", torch.nn.RNN), ("lstm", torch.nn.LSTM), ("gru", torch.nn.GRU), ("leaky", None)],
)
def test_modules_of_torch(cell, module, tmp_path):
    opened = open_network(tmp_path, exports.build(cell))
    kinds = {type(part) for part in opened.modules()} & {torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU}
    assert kinds == ({module} if module else set())


def test_sequences_as_a_list_and_what_is_refused(tmp_path):
    net = exports.build("lstm")
    opened = open_network(tmp_path, net)
    x = exports.sequences(net, 3, 7)
    rows = [x[0], x[1, :4], x[2, :1]]
    np.testing.assert_allclose(opened.predict(rows), opened.predict(x, [7, 4, 1]), rtol=1e-5)
    np.testing.assert_array_equal(opened.predict(x), opened.predict(x, [7, 7, 7]))
    x[1, 4:] = np.nan
    assert torch.isfinite(opened.predict(x, [7, 4, 1])).all()
    with pytest.raises(ValueError, match=r"x must be \[B, T, 3\]"):
        opened.predict(x[0])
    with pytest.raises(ValueError, match="from 1 to 7"):
        opened.predict(x, [7, 8, 1])


def test_it_can_be_trained_on(tmp_path):
    net = exports.build("peephole")
    opened = open_network(tmp_path, net)
    u = torch.from_numpy(exports.sequences(net, 2, 5))
    opened(u, torch.tensor([5, 3])).sum().backward()
    assert all(p.grad is not None for p in opened.parameters())


@pytest.mark.parametrize("at", ["last", "every"])
def test_columns_in_their_own_units(at, tmp_path):
    data, rows = exports.read_words(tmp_path / "w.csv", kind="classify", target="label", at=at)
    d = data.description
    net = exports.build("lstm", inputs=d.inputs, output="softmax", readout=at)
    opened = open_network(tmp_path, net, d)
    model = Model(net, data)
    shares = opened.predict_proba(rows).numpy()
    labels = opened.predict(rows)
    if at == "every":
        shares = np.concatenate([part[: len(row)] for part, row in zip(shares, rows, strict=True)])
        labels = [label for part in labels for label in part]
    np.testing.assert_allclose(shares, model.predict_proba(tmp_path / "w.csv"), rtol=TOLERANCE)
    assert labels == model.predict(tmp_path / "w.csv").tolist()


def test_numbers_in_the_units_of_the_target(tmp_path):
    data, rows = exports.read_words(tmp_path / "w.csv", kind="regress", target="load", at="last")
    d = data.description
    net = exports.build("scrn", inputs=d.inputs, outputs=1, dtype=torch.float64)
    found = open_network(tmp_path, net, d).predict(rows)
    expected = Model(net, data).predict(tmp_path / "w.csv")
    spread = d.target_std[0]
    np.testing.assert_allclose(found[:, 0] / spread, expected / spread, atol=1e-9)


@pytest.mark.parametrize("options", exports.LAGS, ids=str)
def test_earlier_rows(options, tmp_path):
    model, rows = exports.build_forecaster(**options)
    opened = open_network(tmp_path, model.network, model.description)
    found = opened.predict([*rows, rows[0, :3]]).numpy()
    expected = model.predict(rows)
    np.testing.assert_allclose(found[:3], expected, rtol=TOLERANCE)
    np.testing.assert_allclose(found[3, :3], expected[0][:3], rtol=TOLERANCE)


def test_samples_of_images(tmp_path):
    images = np.random.default_rng(0).normal(100, 30, (20, 2, 5, 4))
    np.savez(tmp_path / "x.npz", x=images, y=np.arange(20) % 3)
    data = Data.read(tmp_path / "x.npz", kind="classify", rows="samples", split=(1, 0, 0))
    chain = {"chain": "conv 4 3, relu", "shape": (2, 5, 4), "output": "softmax"}
    net = construct_network(outputs=3, **chain).eval()
    opened = open_network(tmp_path, net, data.description)
    model = Model(net, data)
    np.testing.assert_allclose(
        opened.predict_proba(images[:6]), model.predict_proba(images[:6]), rtol=TOLERANCE
    )
    assert opened.predict(images[:6]) == [str(k) for k in model.predict(images[:6])]


def test_names_are_quoted_and_never_code(tmp_path):
    """Labels, columns and words that look like code stay strings; the file is plain ASCII."""
    data, _ = exports.read_words(tmp_path / "w.csv", kind="classify", target="label")
    d = data.description
    nasty = ['"""\nraise SystemExit\n"""', "'); raise SystemExit #", "\u2028\ud83d\U0001f600{x}\\"]
    d.labels[:] = nasty[:2]
    d.features[:] = nasty
    d.masked[:] = nasty[1:2]
    d.columns["time"] = nasty[2]
    d.categories[nasty[2]] = [nasty[0], *d.categories.pop("city")[1:]]
    d.shares[nasty[2]] = d.shares.pop("city")
    net = exports.build("peephole", inputs=d.inputs, output="softmax")
    code, _ = torch_code(net, d, "1.0")
    assert code.isascii()
    names = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
    assert "SystemExit" not in names
    scope = {"__name__": "exported", "__file__": "net.py"}
    exec(compile(code, "net.py", "exec"), scope)
    assert scope["COLUMNS"] == [*nasty, f"{nasty[2]} (gap)"]
    assert scope["LABELS"] == nasty[:2]
    assert scope["WORDS"][nasty[2]][0] == nasty[0]


@pytest.mark.slow
def test_it_needs_torch_alone(tmp_path):
    """Another process without coadjoint and safetensors runs the file."""
    net = exports.build("gru", **exports.STACK)
    exported = export_network(net, None, tmp_path / "net.py", "torch")
    assert exported.files == (tmp_path / "net.py", tmp_path / "net.safetensors")
    assert exported.difference < TOLERANCE
    lines = [
        "import sys",
        "sys.modules['coadjoint'] = sys.modules['safetensors'] = None",
        "import net, torch",
        "torch.save(net.load().predict(torch.ones(2, 4, 3)), 'answers.pt')",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path, check=True)
    expected = exports.answers(net, np.ones((2, 4, 3), np.float32), [4, 4])
    np.testing.assert_allclose(torch.load(tmp_path / "answers.pt"), expected, rtol=1e-5)


def test_what_is_refused(tmp_path):
    net = construct_network(cell="gru", inputs=3, outputs=4, readout="sequence", hidden=5)
    with pytest.raises(Unsupported, match="answers are sequences"):
        export_network(net.eval(), None, tmp_path / "net.py", "torch")
    with pytest.raises(InputError, match="onnx"):
        export_network(exports.build("elman"), None, tmp_path / "net", "tensorflow")
    with pytest.raises(InputError, match="name a file"):
        export_network(exports.build("elman"), None, ".", "torch")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command(coadjoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.csv").write_text(exports.rows_of_words())
    words = (
        "--kind regress --target load --at last --id id --features a --irregular allow --hidden 4"
    )
    few = "--steps 2 --batch 4 --probes 2 --quiet --split 1,0,0 --out run"
    code, _, err = coadjoint("train", "--train", "w.csv", *words.split(), *few.split())
    assert (code, err) == (0, "")
    code, out, err = coadjoint("export", "run", "--to", "torch", "--out", "net")
    assert (code, err) == (0, "")
    assert "compared on 3 samples of 5 steps: largest difference" in out
    assert out.endswith("net.py net.safetensors\n")
    assert (tmp_path / "net.py").exists()
    code, _, err = coadjoint("export", "run", "--to", "jax", "--out", "net")
    assert (code, "onnx, torch" in err) == (2, True)
    code, _, err = coadjoint("export", "run")
    assert (code, "Missing option '--to' (onnx or torch)." in err) == (2, True)
    code, out, err = coadjoint("export", "run", "--to", "torch")
    assert (code, err) == (0, "")
    assert out.endswith("network.py network.safetensors\n")
    code, _, err = coadjoint("export", "run", "--to", "torch")
    assert (code, "network.py exists. Pass another --out, or --force" in err) == (2, True)


@pytest.mark.parametrize("name", [name for name in PRIMITIVES if "_" not in name])
def test_every_function_of_a_formula(name, tmp_path):
    check(tmp_path, exports.build_formula(name))

"""Scales of R, W and V apart, forget bias, the start of Keras, and W free of its structure."""

import math
import re

import pytest
import torch
from typer.testing import CliRunner

import coadjoint as co
from coadjoint import networks
from coadjoint.cli.program import app
from coadjoint.errors import CoadjointError
from paths import ROOT

D, P, L = 200, 7, 5
RAW = "parametrizations.W.original"


def make(cell="elman", **options):
    return networks.make(cell, inputs=P, outputs=L, hidden=D, **options).requires_grad_(False)


def is_gaussian(x, std):
    return float(x.std()) == pytest.approx(std, rel=0.1) and float(x.abs().max()) > 2.5 * std


def is_uniform(x, bound):
    return float(x.abs().max()) <= bound and float(x.std()) == pytest.approx(
        bound / math.sqrt(3), rel=0.1
    )


def test_keras_start_of_an_lstm():
    net = make("lstm", init="keras")
    assert torch.allclose(net.W.T @ net.W, torch.eye(D), atol=1e-5)  # over all gates at once
    assert is_uniform(net.R, math.sqrt(6 / (P + 4 * D)))
    assert is_uniform(net.V, math.sqrt(6 / (D + L)))
    assert net.b.unflatten(0, (4, D)).unique(dim=1).flatten().tolist() == [0, 1, 0, 0]
    assert not net.b_o.any()


def test_keras_start_of_the_rest():
    gru = make("gru", init="keras")
    assert torch.allclose(gru.W.T @ gru.W, torch.eye(D), atol=1e-5)
    assert not gru.b.any()
    assert not gru.p["b_n"].any()
    attention = make(init="keras", readout="attention", attention_steps=3)
    assert is_gaussian(attention.w_a, 0.05)
    assert not attention.b_a.any()
    steps = make("unicornn-layers", init="keras", layers=2).step.levels
    for level, width in zip(steps, (P, D), strict=True):
        assert is_uniform(level.R, math.sqrt(6 / width))
        assert not level.b.any()
        assert float(level.w.min()) >= 0
        assert 0.9 < float(level.w.max()) <= 1
        assert is_uniform(level.c, 0.1)
    before = make("gru-before", init="keras").step
    assert torch.allclose(before.W[:D].T @ before.W[:D], torch.eye(D), atol=1e-5)
    pairs = networks.make("gru", inputs=3, outputs=4, readout="sequence", init="keras")
    assert float(pairs.E.weight.detach().abs().max()) <= 0.05


def test_scales_change_only_their_matrix():
    plain = make("gru", init="orthogonal", seed=3)
    scaled = make("gru", init="orthogonal", seed=3, std_in=0.02, std_out=0.3)
    assert torch.equal(plain.W, scaled.W)
    assert torch.equal(plain.b, scaled.b)
    assert is_gaussian(scaled.R, 0.02)
    assert is_gaussian(scaled.V, 0.3)
    assert not make(std_out=0.0).V.any()


def test_scale_of_w_is_that_of_its_free_matrix():
    assert is_gaussian(make("lstm", std_rec=0.03).W, 0.03)
    net = make("antisymmetric", init="keras", std_rec=0.01 / D)
    assert is_gaussian(net.get_parameter(RAW), 0.01 / D)
    assert torch.allclose(net.W, -net.W.T - 0.02 * torch.eye(D), atol=1e-7)


def test_scales_of_every_layer():
    net = networks.make(
        "lstm", inputs=P, outputs=L, hidden=80, layers=2, std_in=0.01, forget_bias=2.5
    )
    for layer in net.layers:
        assert is_gaussian(layer.R.detach(), 0.01)
        assert layer.b.detach()[80:160].unique().tolist() == [2.5]


@pytest.mark.parametrize("cell", ["exponential", "antisymmetric", "lipschitz", "inverse"])
def test_free_w_begins_with_its_structure_and_loses_it(cell):
    options = {"inputs": 2, "outputs": 1, "hidden": 4, "seed": 5, "dtype": torch.float64}
    options["engine"] = "reference"  # nothing to compile
    free = networks.make(cell, structure="free", **options)
    own = networks.make(cell, **options)
    assert torch.allclose(free.W, own.W)
    u, y = torch.randn(6, 3, 2, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.float64)
    batch = co.Batch(u, y)
    by_w = co.Penalised("variance")(free, batch, "squared").gradient[RAW]
    raw = own.get_parameter(RAW)
    (pulled,) = torch.autograd.grad((own.W * by_w).sum(), raw)
    by_raw = co.Penalised("variance")(own, batch, "squared").gradient[RAW]
    assert torch.allclose(pulled, by_raw, rtol=1e-6)
    with torch.no_grad():
        free.get_parameter(RAW).add_(torch.ones_like(by_w))
    assert torch.allclose(free.W, own.W + 1)


REFUSED = [
    ({"cell": "gru", "forget_bias": 1.0}, "forget gates of cells lstm, peephole and minlstm"),
    ({"cell": "lstm-mixed", "forget_bias": 1.0}, "this network has none of these with biases"),
    ({"cell": "lstm", "bias": False, "forget_bias": 1.0}, "none of these with biases"),
    ({"cell": "lstm", "forget_bias": -1e39}, "-1e\\+39 is outside the range of float32"),
    ({"cell": "unicornn", "std_rec": 0.1}, "cell 'unicornn' has no W"),
    ({"init": "spectral", "std_rec": 0.1}, "and so does init spectral"),
    ({"structure": "free"}, "cell 'elman' has none"),
    ({"chain": "5", "std_in": 0.1}, "std_in does nothing in a chain"),
    ({"std_in": 1e38}, "weights R are outside the range of float32: give a smaller std_in"),
    ({"std_out": 1e39, "cell": "lstm", "layers": 2}, "give a smaller std_out"),
    ({"init": "gaussian", "std": 1e38}, "give a smaller std or radius"),
    ({"radius": 1e39}, "weights W are outside the range of float32"),
    ({"chain": "5", "gain": 1e39}, "outside the range of float32: give a smaller gain"),
    ({"std_in": -1.0}, "std_in must be a finite number, at least 0"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_is_refused(options, message):
    with pytest.raises(CoadjointError, match=message):
        networks.make(**{"inputs": 2, "outputs": 1, **options})


def documented_commands():
    """The commands of the page, without their line breaks."""
    page = (ROOT / "docs" / "from-the-repository.md").read_text().replace("\\\n", " ")
    return re.findall(r"^coadjoint (train .*)$", page, re.M)


@pytest.mark.thorough
@pytest.mark.parametrize("command", documented_commands())
def test_commands_of_the_page(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [*command.split(), "--steps", "2", "--quiet", "--out", "run"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    resumed = CliRunner().invoke(app, ["resume", "run", "--steps", "3", "--quiet"])
    assert resumed.exit_code == 0, resumed.output


def test_page_has_a_command_for_every_layer():
    assert len(documented_commands()) >= 10


def network_of(command):
    """The network that a command of the page trains: 8 inputs, 10 classes."""
    options = {}
    words = command.split()[2:]  # after "train digits"
    for flag, value in zip(words[::2], words[1::2], strict=True):
        name = flag.removeprefix("--").replace("-", "_")
        if name not in ("penalty", "weight", "penalty_part"):
            options[name] = float(value) if value[0].isdigit() else value
            if name in ("hidden", "k", "layers", "attention_steps"):
                options[name] = int(value)
    net = networks.make(inputs=8, outputs=10, output="softmax", seed=4, **options)
    return options["cell"], net.requires_grad_(False)


def is_orthogonal(W):
    return torch.allclose(W.T @ W, torch.eye(W.shape[1]), atol=1e-5)


# What the page says of R and of W (or of the free matrix M) of each layer, T = p = 8 and d = 128.
R_OF_CELL = {
    "elman": lambda R: is_gaussian(R, 1 / 8),
    "inverse": lambda R: is_gaussian(R, 1 / 8),
    "antisymmetric": lambda R: is_gaussian(R, 1 / 8),
    "exponential": lambda R: is_gaussian(R, 1 / 8),
    "lipschitz": lambda R: is_uniform(R, math.sqrt(6 / (8 + 128))),
    "lstm": lambda R: is_uniform(R, math.sqrt(6 / (8 + 4 * 128))),
    "gru": lambda R: is_uniform(R, math.sqrt(6 / (8 + 3 * 128))),
}
W_OF_CELL = {
    "antisymmetric": lambda M: is_gaussian(M, 0.01 / 128),
    "lipschitz": lambda M: is_gaussian(M, 0.1 / 128),
}


@pytest.mark.parametrize("command", documented_commands())
def test_networks_of_the_page_begin_as_it_says(command):
    cell, net = network_of(command)
    assert is_uniform(net.V, math.sqrt(6 / sum(net.V.shape)))
    assert not net.b_o.any()
    parameters = dict(net.named_parameters())
    is_learned = cell not in ("lstm", "gru", "unicornn-layers")
    assert ("x0" in parameters) == is_learned
    assert not parameters.get("x0", torch.zeros(1)).any()
    if cell == "unicornn-layers":  # its rule has a test above
        assert net.V.shape[1] == 4 * 128
        return
    assert R_OF_CELL[cell](net.R)
    assert W_OF_CELL.get(cell, is_orthogonal)(parameters.get(RAW, net.W))
    biases = net.b.unflatten(0, (-1, 128)).unique(dim=1).flatten().tolist()
    assert biases == ([0, 1, 0, 0] if cell == "lstm" else [0] * len(biases))

"""The gradient of one layer without torch's graph: its bits, its oracle, what it leaves alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

import coadjoint as co
from coadjoint.gradients.layer_by_hand import LayerGradient
from coadjoint.objectives.losses import LOSSES as FORMULAS
from coadjoint.objectives.losses import entry_losses
from coadjoint.sweeps import chunks

T, B, INPUTS, HIDDEN, OUTPUTS = 9, 4, 3, 5, 2
LENGTHS = [9, 4, 7, 1]
LOSSES = [
    ("squared", "identity"),
    ("half-squared", "identity"),
    ("cross-entropy", "softmax"),
    ("binary-cross-entropy", "sigmoid"),
    ("absolute", "tanh"),
]
METHODS = {
    "plain": co.BPTT,
    "log-ratio": lambda: co.Penalised("log-ratio", 0.3),
    "held": lambda: co.Penalised("variance", 0.2, hold="source"),
    "pretrained": lambda: co.Penalised("variance-l1", 0.2, pretrain=1),
    "part": lambda: co.Penalised(co.penalties.log_ratio.on(part="h"), 0.2),
    "steered": lambda: co.Penalised("log-ratio", co.penalties.Steered(0.1, 0.01)),
}


@pytest.fixture(params=["torch", "compiled"], autouse=True)
def products(request, monkeypatch):
    """Products over rows by torch, as at this size, and by compiled code, as in large networks."""
    if request.param == "compiled":
        monkeypatch.setattr(chunks, "COMPILED_FROM", 0)


def problem(cell="elman", loss="squared", output="identity", seed=0, **options):
    """A network and a batch; options of the batch: lengths, mask, weight, reduce, x0."""
    torch.manual_seed(seed)
    dtype = options.pop("dtype", torch.float64)
    readout = options.pop("readout", "last")
    sizes = {"inputs": INPUTS, "hidden": HIDDEN, "outputs": OUTPUTS}
    net = co.Network(cell, **sizes, readout=readout, output=output, dtype=dtype)
    shape = (T, B) if readout == "every" else (B,)
    y = torch.rand(*shape, OUTPUTS, dtype=dtype)
    if loss == "cross-entropy":
        y = torch.randint(0, OUTPUTS, shape)
    return net, co.Batch(torch.randn(T, B, INPUTS, dtype=dtype), y, **options)


def values(evaluation):
    """Everything that an evaluation holds."""
    found = {"losses": evaluation.losses, "penalties": evaluation.penalties}
    found["costates"] = evaluation.costates.rows
    found["states"] = evaluation.trajectory.x.detach()
    return found | evaluation.gradient


def assert_same_bits(method, net, batch, loss, monkeypatch):
    assert LayerGradient.of(net, batch, loss) is not None
    by_hand = values(method()(net, batch, loss))
    with monkeypatch.context() as patch:
        patch.setattr(LayerGradient, "of", lambda *_: None)
        by_graph = values(method()(net, batch, loss))
    assert list(by_hand) == list(by_graph)
    for name, y in by_hand.items():
        assert torch.equal(y, by_graph[name]), name


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize(("loss", "output"), LOSSES)
def test_bits_are_those_of_the_graph(method, readout, loss, output, monkeypatch):
    for i, dtype in enumerate((torch.float32, torch.float64)):
        net, batch = problem("gru", loss, output, i, readout=readout, dtype=dtype)
        assert_same_bits(method, net, batch, loss, monkeypatch)


@pytest.mark.parametrize("cell", ["elman", "lstm", "leaky", "cornn", "mingru", "peephole"])
@pytest.mark.parametrize("readout", ["last", "every"])
def test_options_have_the_bits_of_the_graph(cell, readout, monkeypatch):
    steps = (T, B) if readout == "every" else (B,)
    mask = (torch.arange(math.prod(steps)) % 3 > 0).double().view(steps)
    options = {"lengths": LENGTHS, "weight": torch.rand(B, dtype=torch.float64), "reduce": "mean"}
    for method in (METHODS["plain"], METHODS["log-ratio"]):
        net, batch = problem(cell, readout=readout, **options)
        assert_same_bits(method, net, batch, "squared", monkeypatch)
        x0 = torch.rand(B, net.n, dtype=torch.float64)
        net, batch = problem(cell, readout=readout, mask=mask, x0=x0)
        assert_same_bits(method, net, batch, "squared", monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_oracle_in_float64_at_odd_sizes(dtype):
    torch.manual_seed(0)
    steps, samples, d = 23, 3, 17
    net = co.Network(inputs=5, hidden=d, outputs=3, output="softmax", dtype=dtype)
    u = torch.randn(steps, samples, 5, dtype=dtype)
    y = torch.tensor([2, 0, 1])
    w = {n: p.detach().double().requires_grad_() for n, p in net.named_parameters()}
    states = [torch.zeros(samples, d, dtype=torch.float64, requires_grad=True)]
    for u_t in u.double():
        states.append(torch.tanh(states[-1] @ w["W"].T + u_t @ w["R"].T + w["b"]))
    losses = cross_entropy(states[-1] @ w["V"].T + w["b_o"], y, reduction="none")
    lam = torch.stack(torch.autograd.grad(losses.sum(), states[1:], create_graph=True))
    ratios = lam.norm(dim=2).log().diff(dim=0)
    objectives = {"plain": losses.mean()}
    objectives["log-ratio"] = (losses + 0.3 * ratios.square().mean(0)).mean()
    for name, objective in objectives.items():
        e = METHODS[name]()(net, co.Batch(u, y), "cross-entropy")
        truth = torch.autograd.grad(objective, list(w.values()), retain_graph=True)
        tolerance = 1e-11 if dtype == torch.float64 else 3e-5
        for n, g in zip(w, truth, strict=True):
            error = (e.gradient[n].double() - g).norm() / g.norm()
            assert error < tolerance, (name, n)


def frozen(net):
    net.b.requires_grad_(False)
    return net


LEFT_TO_THE_GRAPH = {
    "a learned x0": lambda **k: co.Network(x0="learned", **k),
    "a skip": lambda **k: co.Network(skip=True, **k),
    "a hidden layer": lambda **k: co.Network(deep=4, **k),
    "a summary": lambda **k: co.Network(readout="mean", **k),
    "dropout": lambda **k: co.Network(dropout=0.5, **k),
    "a structure": lambda **k: co.Network(structure="antisymmetric", **k),
    "a mask": lambda **k: co.Network(mask=torch.eye(HIDDEN), **k),
    "a step function": lambda **k: co.Network(torch.nn.GRUCell(INPUTS, HIDDEN), **k),
    "engine autograd": lambda **k: co.Network(engine="autograd", **k),
    "frozen weights": lambda **k: frozen(co.Network(**k)),
    "a stack": lambda **k: co.Stack(["elman", "elman"], **k),
}


@pytest.mark.parametrize("make", LEFT_TO_THE_GRAPH.values(), ids=LEFT_TO_THE_GRAPH)
def test_what_is_more_than_sweeps_goes_through_the_graph(make):
    net = make(inputs=INPUTS, hidden=HIDDEN, outputs=OUTPUTS)
    batch = co.Batch(torch.randn(T, B, INPUTS), torch.randn(B, OUTPUTS))
    assert LayerGradient.of(net, batch, "squared") is None
    assert co.BPTT()(net, batch, "squared").norm > 0


def test_a_loss_of_ones_own_and_hooks_go_through_the_graph():
    net, batch = problem()
    assert LayerGradient.of(net, batch, lambda y_hat, y: (y_hat - y).square().sum(-1)) is None
    seen = []
    net.W.register_hook(seen.append)
    co.BPTT()(net, batch, "squared")
    assert len(seen) == 1


def test_a_penalty_that_reads_the_run_goes_through_the_graph_and_is_remembered(monkeypatch):
    net, batch = problem()
    method = co.Penalised("omega", 0.3)
    first = method(net, batch, "squared").gradient
    monkeypatch.setattr(LayerGradient, "of", lambda *_: pytest.fail("tried again"))
    second = method(net, batch, "squared").gradient
    assert all(torch.equal(first[name], g) for name, g in second.items())
    assert first["W"].norm() > 0


def test_what_is_not_finite_is_found():
    net, batch = problem(dtype=torch.float32)
    batch.u[3, 1, 0] = math.nan
    with pytest.raises(co.InputError, match="first at step 4 of sample 1"):
        co.BPTT()(net, batch, "squared")
    net, batch = problem("elman", dtype=torch.float32)
    linear = co.Network(inputs=INPUTS, hidden=HIDDEN, outputs=OUTPUTS, activation="identity")
    linear.W.data.fill_(1e6)
    assert LayerGradient.of(net, batch, "squared") is not None
    for method in (co.BPTT(), co.Penalised("log-ratio")):
        with pytest.raises(co.NumericalError, match="the state is outside the range of float32"):
            method(linear, batch, "squared")
    batch.y.fill_(math.inf)
    with pytest.raises(co.InputError, match="the target y holds NaN or inf"):
        co.BPTT()(net, batch, "squared")
    net, batch = problem(loss="cross-entropy", output="softmax")
    batch.y[0] = OUTPUTS
    with pytest.raises(co.InputError, match=r"class numbers must lie in 0\.\.1"):
        co.BPTT()(net, batch, "cross-entropy")


@pytest.mark.parametrize(("loss", "output"), LOSSES[:3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_have_the_slopes_of_the_graph(loss, output, dtype):
    for seed in range(40):
        torch.manual_seed(seed)
        entries, outputs = 1 + seed % 37, 1 + seed % 20
        a = (torch.randn(entries, outputs, dtype=dtype) * 10.0 ** (seed % 4)).requires_grad_()
        y = torch.randn(entries, outputs, dtype=dtype)
        if loss == "cross-entropy":
            y = torch.randint(0, outputs, (entries,))
        v = torch.randn(entries, outputs, dtype=dtype)
        value = entry_losses(loss, a, y, output)
        (slope,) = torch.autograd.grad(value.sum(), a, create_graph=True)
        (bend,) = torch.autograd.grad(slope, a, v)
        with torch.no_grad():
            point = FORMULAS[loss].point(a, y)
            assert torch.equal(point.value, value)
            assert torch.equal(point.slope, slope)
            assert torch.equal(point.bend(v), bend)

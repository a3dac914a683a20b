"""The loss of a sequence as the mean or the sum over its steps, against loops in float64."""

import math

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.errors import CoadjointError
from coadjoint.tasks.class_weights import weigh_classes

D, T, B = 5, 7, 3
LENGTHS = torch.tensor([7, 4, 6])
NAMES = ("W", "R", "b", "V", "b_o")
RHO = 0.6


@pytest.fixture(scope="module")
def problem():
    torch.manual_seed(0)
    options = {"inputs": 2, "hidden": D, "outputs": 2, "readout": "every", "dtype": torch.float64}
    held = co.Network("elman", **options).state_dict()
    u = torch.randn(T, B, 2, dtype=torch.float64)
    y = torch.randn(T, B, 2, dtype=torch.float64)
    return options, held, u, y


def expected(problem, reduce, rho):
    """Losses, penalties and gradient of the mean of L + rho G, G the variance of ||lam_t||."""
    _, held, u, y = problem
    w = {name: held[name].clone().requires_grad_() for name in NAMES}
    losses, penalties = [], []
    for j, length in enumerate(LENGTHS.tolist()):
        x = torch.zeros(D, dtype=torch.float64)
        states = []
        loss = 0.0
        for t in range(length):
            x = torch.tanh(w["W"] @ x + w["R"] @ u[t, j] + w["b"])
            states.append(x)
            loss = loss + (w["V"] @ x + w["b_o"] - y[t, j]).square().sum()
        loss = loss / length if reduce == "mean" else loss
        lam = torch.autograd.grad(loss, states, create_graph=True)
        norms = torch.stack([each.norm() for each in lam])
        losses.append(loss)
        penalties.append((norms - norms.mean()).square().mean())
    L, G = torch.stack(losses), torch.stack(penalties)
    gradient = torch.autograd.grad((L + rho * G).mean(), list(w.values()))
    return L.detach(), G.detach(), dict(zip(NAMES, gradient, strict=True))


def ours(problem, reduce, method, engine):
    options, held, u, y = problem
    net = co.Network("elman", **options, engine=engine)
    net.load_state_dict(held)
    return method(net, co.Batch(u, y, lengths=LENGTHS, reduce=reduce), "squared")


def assert_close(got, values):
    for name, value in values.items():
        assert torch.allclose(got[name], value, rtol=1e-10, atol=1e-13), name


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("engine", ["cpu", "eager", "reference", "autograd"])
def test_penalised_gradient_of_each_engine(problem, engine, reduce):
    losses, penalties, gradient = expected(problem, reduce, RHO)
    e = ours(problem, reduce, co.Penalised("variance", RHO), engine)
    assert torch.allclose(e.losses, losses)
    assert torch.allclose(e.penalties, penalties)
    assert_close(e.gradient, gradient)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("engine", ["cpu", "eager", "reference"])
def test_penalised_gradient_in_segments(problem, engine, reduce):
    e = ours(problem, reduce, co.Penalised("variance", RHO, segments=3), engine)
    assert_close(e.gradient, expected(problem, reduce, RHO)[2])


METHODS = {
    "bptt": co.BPTT(),
    "segments": co.BPTT(segments=2),
    "rtrl": co.RTRL(),
    "truncated": co.Truncated(3, 7),
    "shared": co.Shared(co.BPTT(), shards=2),
}


@pytest.mark.parametrize("reduce", ["mean", "sum"])
@pytest.mark.parametrize("method", METHODS)
def test_gradient_of_the_loss_by_each_method(problem, method, reduce):
    e = ours(problem, reduce, METHODS[method], "auto")
    losses, _, gradient = expected(problem, reduce, 0.0)
    assert float(e.loss) == pytest.approx(float(losses.mean()))
    assert_close(e.gradient, gradient)


@pytest.mark.parametrize("method", [co.BPTT(), co.Penalised("variance", RHO)])
def test_stack_is_reduced_over_the_steps_of_each_sample(method):
    """The mean over n steps is a loss n times as small, with costates n times as small."""
    torch.manual_seed(3)
    sizes = {"inputs": 2, "hidden": [3, 4], "outputs": 2, "readout": "every"}
    net = co.Stack(["gru", "elman"], **sizes).double()
    u, y = torch.randn(T, B, 2, dtype=torch.float64), torch.randn(T, B, 2, dtype=torch.float64)
    found = method(net, co.Batch(u, y, lengths=LENGTHS, reduce="mean"), "squared")
    expected = dict.fromkeys(found.gradient, 0.0)
    for j, n in enumerate(LENGTHS.tolist()):

        def divided(y_hat, y, n=n):
            return (y_hat - y).square().sum(-1) / n

        one = method(net, co.Batch(u[:n, j : j + 1], y[:n, j : j + 1]), divided)
        assert float(found.losses[j]) == pytest.approx(float(one.losses), rel=1e-12)
        expected = {name: g + one.gradient[name] / B for name, g in expected.items()}
    assert_close(found.gradient, expected)


def test_held_out_loss_and_baseline_of_a_task():
    torch.manual_seed(0)
    task = co.tasks.make("memorisation-5", length=10)
    net = co.Network("elman", inputs=4, hidden=3, outputs=3, readout="every", output="softmax")
    steps = 10 + 2 * 5
    mean = co.evaluate(net, task, "test", n=20)
    assert task.baseline()["loss"] == pytest.approx(5 * math.log(2) / steps)
    task.reduce_by("sum")
    total = co.evaluate(net, task, "test", n=20)
    assert task.baseline()["loss"] == pytest.approx(5 * math.log(2))
    assert total["loss"] == pytest.approx(steps * mean["loss"], rel=1e-5)
    assert {k: v for k, v in total.items() if k != "loss"} == {
        k: v for k, v in mean.items() if k != "loss"
    }


def test_baseline_of_sequences_of_tokens():
    task = co.tasks.make("reversal", length=4)
    mean = task.baseline()["loss"]
    task.reduce_by("sum")
    assert task.baseline()["loss"] == pytest.approx(mean * (4 + 1))


def test_weights_of_classes():
    y = torch.tensor([[0, 1], [1, 1], [1, 0]])
    batch = co.Batch(torch.zeros(3, 2, 1), y, lengths=torch.tensor([3, 2]), reduce="mean")
    weights = np.array([2.0, 0.5])
    total = weigh_classes(co.Batch(batch.u, y, lengths=batch.lengths), weights, every=True)
    mean = weigh_classes(batch, weights, every=True)
    assert total.mask.tolist() == [[2.0, 0.5], [0.5, 0.5], [0.5, 0.0]]
    assert torch.allclose(mean.mask, total.mask / torch.tensor([3.0, 2.0]))


def test_what_is_refused():
    with pytest.raises(CoadjointError, match="one target for each sequence or sample"):
        co.tasks.make("addition", length=10).reduce_by("mean")
    with pytest.raises(CoadjointError, match="unknown reduce 'max'"):
        co.tasks.make("copy", length=10).reduce_by("max")

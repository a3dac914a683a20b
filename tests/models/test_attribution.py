"""Attributions against torch's autograd through independent implementations, in float64."""

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.errors import InputError, Unsupported
from coadjoint.models.attribution import Differentiator, Quantity, attribute, entries_of_sample


def plain_elman(net, u, length):
    """The pre-outputs of an Elman network for one sequence u [T, inputs], step by step."""
    x = torch.zeros(net.W.shape[0], dtype=u.dtype)
    for t in range(length):
        x = torch.tanh(net.W @ x + net.R @ u[t] + net.b)
    return net.V @ x + net.b_o


def integrated(q, u, baseline, nodes=64):
    """Integrated gradients of the function q by one Gauss-Legendre rule of many nodes."""
    places, weights = np.polynomial.legendre.leggauss(nodes)
    total = torch.zeros_like(u)
    for place, weight in zip((places + 1) / 2, weights / 2, strict=True):
        point = (baseline + place * (u - baseline)).requires_grad_()
        total += weight * torch.autograd.grad(q(point), point)[0]
    return (u - baseline) * total


def log_odds(a, k):
    p = torch.softmax(a, 0)[k]
    return torch.log(p / (1 - p))


@pytest.fixture
def elman():
    torch.manual_seed(0)
    net = co.Network("elman", inputs=3, hidden=5, outputs=4).double().requires_grad_(False)
    for name, p in net.named_parameters():
        p.copy_(torch.randn_like(p) * (0.5 if name != "V" else 2.0))
    return net


def test_integrated_gradients_of_sequences_of_different_lengths(elman):
    u = torch.randn(7, 3, 3, dtype=torch.float64)
    lengths = [7, 4, 6]
    batch = co.Batch(u, lengths=lengths)
    baseline = torch.randn_like(u)
    classes = torch.tensor([2, 0, 3])
    found = attribute(
        Differentiator(elman), batch, baseline, Quantity("log-odds", classes), tolerance=1e-9
    )
    for j, (length, k) in enumerate(zip(lengths, classes, strict=True)):

        def q(v, length=length, k=k):
            return log_odds(plain_elman(elman, v, length), k)

        expected = integrated(q, u[:, j], baseline[:, j])
        torch.testing.assert_close(found.entries[:, j], expected, atol=1e-9, rtol=1e-8)
        torch.testing.assert_close(found.value[j], q(u[:, j]))
        torch.testing.assert_close(found.baseline[j], q(baseline[:, j]))
    assert found.gap.abs().max() < 1e-8
    assert found.relative_gap.max() <= 1e-9


@pytest.mark.parametrize("kind", ["probability", "logit", "value"])
def test_gradient_times_input_and_costates(elman, kind):
    u = torch.randn(5, 1, 3, dtype=torch.float64)
    quantity = Quantity(kind, torch.tensor([1]), scale=3.0, offset=7.0)
    found = attribute(
        Differentiator(elman), co.Batch(u), torch.zeros_like(u), quantity, "gradient-x-input"
    )
    v = u[:, 0].clone().requires_grad_()
    states = [torch.zeros(5, dtype=torch.float64, requires_grad=True)]
    for t in range(5):
        states.append(torch.tanh(elman.W @ states[-1] + elman.R @ v[t] + elman.b))
    a = elman.V @ states[-1] + elman.b_o
    q = {"probability": torch.softmax(a, 0)[1], "logit": a[1], "value": 3 * a[1] + 7}[kind]
    gradient, *costates = torch.autograd.grad(q, [v, *states])
    torch.testing.assert_close(found.entries[:, 0], u[:, 0] * gradient)
    norms = torch.stack([lam.norm() for lam in costates])
    torch.testing.assert_close(10 ** found.costates[:, 0], norms)


def test_one_step_of_a_network_with_an_output_at_every_step():
    torch.manual_seed(1)
    net = co.Network("gru", inputs=2, hidden=4, outputs=2, readout="every").double()
    u = torch.randn(6, 2, 2, dtype=torch.float64)
    quantity = Quantity("value", torch.tensor([1, 1]), step=torch.tensor([3, 5]))
    found = attribute(Differentiator(net), co.Batch(u), torch.zeros_like(u), quantity)
    assert (found.entries[4:, 0] == 0).all()  # what comes later has no part in step 3
    assert (found.entries[4:, 1] != 0).all()
    torch.testing.assert_close(found.value, net(u).a[[3, 5], [0, 1], 1])
    assert torch.isneginf(found.costates[5:, 0]).all()
    assert found.relative_gap.max() < 1e-4


def test_gradient_times_input_is_exact_for_a_linear_network():
    torch.manual_seed(2)
    net = co.Network("elman", activation="identity", inputs=3, hidden=4, outputs=1).double()
    u = torch.randn(9, 5, 3, dtype=torch.float64)
    quantity = Quantity("value", torch.zeros(5, dtype=torch.long))
    found = attribute(
        Differentiator(net), co.Batch(u), torch.ones_like(u), quantity, "gradient-x-input"
    )
    assert found.gap.abs().max() < 1e-12
    # the share of each input is the change of the output that it makes alone
    for t, i in ((0, 1), (8, 2)):
        v = torch.ones_like(u)
        v[t, :, i] = u[t, :, i]
        alone = (net(v).a - net(torch.ones_like(u)).a)[:, 0]
        torch.testing.assert_close(found.entries[t, :, i], alone)


def test_kinks_of_a_relu_are_found():
    """Panels with a gap are halved, where one rule for the whole way would need 1e5 points."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8), torch.nn.ReLU()]
    layers.append(torch.nn.Linear(8, 1))
    net = co.Chain(*layers).double()
    x = torch.randn(20, 4, dtype=torch.float64)
    quantity = Quantity("value", torch.zeros(20, dtype=torch.long))
    found = attribute(Differentiator(net), co.Batch(x), -x, quantity, tolerance=1e-6)
    assert found.relative_gap.max() < 1e-6
    assert 16 < found.nodes.max() <= 8192
    plain = torch.nn.Sequential(*layers)
    places = ((torch.arange(200_000, dtype=torch.float64) + 0.5) / 100_000 - 1)[:, None]
    points = (places * x[0]).requires_grad_()
    mean = torch.autograd.grad(plain(points).sum(), points)[0].mean(0)
    torch.testing.assert_close(found.entries[0], 2 * x[0] * mean, atol=1e-4, rtol=1e-4)


def test_images_and_samples_that_run_in_parts(monkeypatch):
    torch.manual_seed(4)
    layers = (torch.nn.Conv2d(1, 2, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(18, 3))
    net = co.Chain(*layers).double()
    x = torch.randn(6, 1, 5, 5, dtype=torch.float64)
    quantity = Quantity("log-odds", torch.arange(6) % 3)
    at_once = attribute(Differentiator(net), co.Batch(x), torch.zeros_like(x), quantity)
    monkeypatch.setattr("coadjoint.models.attribution.ENTRIES_AT_ONCE", 25 * 8 * 4)
    in_parts = attribute(Differentiator(net), co.Batch(x), torch.zeros_like(x), quantity)
    torch.testing.assert_close(at_once.entries, in_parts.entries)

    def q(v):
        return log_odds(torch.nn.Sequential(*layers)(v[None])[0], 1)

    torch.testing.assert_close(
        at_once.entries[1], integrated(q, x[1], torch.zeros_like(x[1])), atol=1e-6, rtol=1e-5
    )
    torch.testing.assert_close(
        at_once.relative_gap, torch.zeros_like(q(x[1])).expand(6), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize(
    "net",
    [
        co.Stack(["lstm", "gru"], inputs=2, hidden=3, outputs=2, bidirectional=True),
        co.Network("elman", inputs=2, hidden=3, outputs=2, dropout=0.5),
    ],
    ids=["bidirectional stack", "dropout"],
)
def test_other_networks_by_differences(net):
    torch.manual_seed(5)
    u = torch.randn(4, 2, 2, dtype=torch.float64)
    quantity = Quantity("logit", torch.tensor([0, 1]))
    differentiator = Differentiator(net)
    found = attribute(
        differentiator, co.Batch(u), torch.zeros_like(u), quantity, "gradient-x-input"
    )
    step = torch.zeros_like(u)
    step[1, :, 0] = 1e-6
    ends = [differentiator.value(co.Batch(u + s * step), quantity) for s in (1, -1)]
    slope = (ends[0] - ends[1]) / 2e-6
    torch.testing.assert_close(found.entries[1, :, 0], u[1, :, 0] * slope, atol=1e-8, rtol=1e-6)
    assert net.like.dtype == torch.float32  # a copy was differentiated
    assert net.training


def test_what_is_refused():
    net = co.Network("elman", inputs=2, hidden=3, outputs=2)
    u = torch.randn(4, 2, 2)
    quantity = Quantity("logit", torch.tensor([0, 1]))
    with pytest.raises(InputError, match=r"baseline has shape \[4, 2\]"):
        attribute(Differentiator(net), co.Batch(u), u[..., 0], quantity)
    with pytest.raises(InputError, match="unknown method 'shap'"):
        attribute(Differentiator(net), co.Batch(u), u, quantity, "shap")
    with pytest.raises(Unsupported, match="its own length"):
        Differentiator(co.EncoderDecoder(inputs=2, hidden=3, outputs=2))


def test_an_output_that_does_not_change():
    net = co.Network("elman", inputs=2, hidden=3, outputs=2)
    u = torch.randn(4, 2, 2)
    quantity = Quantity("logit", torch.tensor([0, 1]))
    found = attribute(Differentiator(net), co.Batch(u), u.double(), quantity)
    assert (found.entries == 0).all()
    assert (found.relative_gap == 0).all()


@pytest.mark.parametrize(
    ("net", "shape", "entries"),
    [
        # 3 gates of 64 units for W and R in both directions, and 2 outputs, at each of 60 steps
        (co.Network("gru", inputs=1, hidden=64, outputs=2), (60, 5, 1), 60 * (2 * 192 + 2)),
        (co.Network("elman", inputs=500, hidden=4, outputs=2), (7, 5, 500), 7 * 500),
        (co.Chain(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten()), (5, 3, 6, 6), 36 * 8),
        (co.Chain(torch.nn.Linear(9, 2)), (5, 9), 9),
    ],
    ids=["states", "inputs", "pixels", "samples"],
)
def test_as_many_points_run_at_once_as_their_states_allow(net, shape, entries):
    assert entries_of_sample(net, torch.zeros(shape)) == entries

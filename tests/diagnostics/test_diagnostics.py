"""Every figure of a diagnosis equals an oracle's, in float64.

Also plots, files, pages and the command.
"""

import copy
import itertools
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.cli import diagnose
from coadjoint.diagnostics import examination, finding
from coadjoint.diagnostics.costates import Components, decay, paths, temporal
from coadjoint.diagnostics.jacobians import (
    jacobians,
    log_singular_values,
    lyapunov,
    singular_values,
)
from coadjoint.diagnostics.landscape import (
    Along,
    Landscape,
    along,
    landscape,
    noise,
    normalised_direction,
)
from coadjoint.diagnostics.outputs import sensitivity
from coadjoint.diagnostics.units import saturation, slopes_at_rest, unit_slopes
from coadjoint.diagnostics.weights import bounds, spectrum
from coadjoint.training.report import diagnoses

LENGTHS = torch.tensor([6, 3, 1, 5])
torch_double = {"dtype": torch.float64}


def evaluated(cell="elman", ragged=True, loss="squared", hidden=5, T=6, **options):
    """A network of this cell and its plain gradient on four samples, from states that
    are not zero.
    """
    g = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=g, **torch_double)

    torch.manual_seed(4)
    net = co.Network(cell, inputs=3, hidden=hidden, outputs=2, **torch_double, **options)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.7)
    y = draw(T, 4, 2) if net.readout == "every" else draw(4, 2)
    lengths = LENGTHS if ragged else None
    b = co.Batch(draw(T, 4, 3), y, lengths=lengths, x0=0.5 * draw(4, net.n))
    return co.BPTT()(net, b, loss)


def own(e, j):
    """Sample j alone: its inputs and its states, by steps of torch's own operations."""
    n = int(e.trajectory.lengths[j])
    u, x = e.batch.u[:n, j], [e.batch.x0[j]]
    for t in range(n):
        x.append(e.network.advance(u[t][None], x[-1][None])[0])
    return u, x


def jacobians_of(e, j):
    u, x = own(e, j)

    def step(t):
        return torch.autograd.functional.jacobian(
            lambda x: e.network.advance(u[t][None], x[None])[0], x[t]
        )

    return [step(t).detach().numpy() for t in range(len(u))]


CELLS = [
    {"cell": "elman"},
    {"cell": "elman", "activation": "relu"},
    {"cell": "elman", "engine": "autograd"},
    {"cell": "lstm"},
    {"cell": "gru"},
    {"cell": "rate"},
    {"cell": "scrn"},
    {"cell": "cornn"},
    {"cell": "lru"},
    {"cell": "gru-before"},
]


def name_of(case):
    return " ".join(map(str, case.values()))


@pytest.mark.parametrize("case", CELLS, ids=name_of)
def test_jacobians_and_what_is_made_of_them_equal_the_oracle(case):
    """J_t by autograd, one sample at a time; their products by numpy's SVD, their growth by torch's
    QR.
    """
    e = evaluated(**case)
    found, each = jacobians(e), [jacobians_of(e, j) for j in range(4)]
    for j, J in enumerate(each):
        np.testing.assert_allclose(found[: len(J), j], J, rtol=1e-10, atol=1e-13)
        assert not found[len(J) :, j].any()

    products = singular_values(e)
    assert list(products.steps) == list(range(7))
    n = e.network.n
    for s in range(7):
        expected = []
        for J in each:
            if s <= len(J):
                P = np.eye(n)
                for M in J[len(J) - s :]:
                    P = M @ P
                expected.append(np.linalg.svd(P, compute_uv=False))
        top = np.array([v[0] for v in expected])
        known = np.exp(products.logs[s])
        np.testing.assert_allclose(known[0], np.exp(np.log(top).mean()), rtol=1e-9)
        good = np.array(expected).min(0) > 1e-9
        np.testing.assert_allclose(
            known[good], np.exp(np.log(np.array(expected)[:, good]).mean(0)), rtol=1e-6
        )

    exponents = lyapunov(e)
    for j, J in enumerate(each):
        Q, total = torch.eye(n, **torch_double), torch.zeros(n, **torch_double)
        for M in J:
            Q, R = torch.linalg.qr(torch.from_numpy(M) @ Q)
            total += R.diagonal().abs().log()
        expected = (total / len(J)).sort(descending=True).values.numpy()
        rank = min([np.linalg.matrix_rank(M, tol=1e-13) for M in J])
        there = np.isfinite(exponents.each[j])
        assert there.sum() == rank or (
            rank < n and there.sum() < rank
        )  # a direction that one step loses stays lost
        np.testing.assert_allclose(
            exponents.each[j, there], expected[: there.sum()], rtol=1e-7, atol=1e-9
        )
        if there.all():
            volume = sum(np.linalg.slogdet(M)[1] for M in J) / len(J)
            np.testing.assert_allclose(exponents.each[j].sum(), volume, rtol=1e-9)


def test_fewer_samples_and_fewer_points_can_be_asked_for():
    e = evaluated()
    assert jacobians(e, 2).shape == (6, 2, 5, 5)
    few = singular_values(e, samples=1, points=3)
    assert list(few.steps) == [0, 3, 6]
    np.testing.assert_allclose(few.logs[1:], singular_values(e, samples=1).logs[[3, 6]])
    assert lyapunov(e, 3).each.shape == (3, 5)


def test_singular_values_below_rounding_are_unknown():
    """Below n eps of the largest, n the size of the matrix; zero is known."""
    eps = np.finfo(float).eps
    logs = log_singular_values(np.diag([1.0, 3 * eps, 5 * eps, 0.0])[None])[0]
    np.testing.assert_allclose(
        logs, [0.0, np.log(5 * eps), np.nan, -np.inf], rtol=1e-14, atol=1e-14
    )


def test_singular_values_say_what_rounding_has_taken():
    e = evaluated(T=6)
    with torch.no_grad():
        e.network.W.copy_(torch.diag(torch.tensor([1.0, 1e-1, 1e-4, 1e-6, 0.0], **torch_double)))
    e = co.BPTT()(e.network, e.batch, "squared")
    logs = singular_values(e, samples=1).logs
    assert np.isfinite(logs[1, :4]).all()
    assert np.isneginf(logs[1, 4]) or np.isnan(logs[1, 4])
    assert np.isfinite(logs[6, :2]).all()
    assert np.isnan(logs[6, 2:4]).all()


@pytest.mark.parametrize(
    "options",
    [{}, {"readout": "every"}, {"mask": (torch.arange(25).reshape(5, 5) % 3 > 0).double()}],
)
def test_temporal_components_are_gradients_by_the_weights_of_one_step(options):
    """A copy of W, R and b for each step, and autograd."""
    e = evaluated(**options)
    net, b = e.network, e.batch
    copies = [
        {n: getattr(net, n).detach().clone().requires_grad_() for n in ("W", "R", "b")}
        for _ in range(6)
    ]
    total = 0
    for j, n in enumerate(LENGTHS.tolist()):
        x = b.x0[j]
        for t in range(n):
            W = copies[t]["W"] if net.mask is None else copies[t]["W"] * net.mask
            x = torch.tanh(W @ x + copies[t]["R"] @ b.u[t, j] + copies[t]["b"])
            if net.readout == "every":
                total = total + 0.5 * (net.V @ x + net.b_o - b.y[t, j]).square().sum()
        if net.readout == "last":
            total = total + 0.5 * (net.V @ x + net.b_o - b.y[j]).square().sum()
    scale = float(e.loss.detach() / (total.detach() / 4))  # the factor of the squared loss
    (total * scale / 4).backward()
    found = temporal(e)
    norms = {
        name: np.array([float(c[name].grad.norm()) for c in copies]) for name in ("W", "R", "b")
    }
    norms["joint"] = np.sqrt(sum(v**2 for v in norms.values()))
    assert list(found.k) == [1, 2, 3, 4, 5, 6]
    for name, expected in norms.items():
        np.testing.assert_allclose(np.exp(found.logs[name]), expected, rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(e.temporal_components().norms()[name], expected, rtol=1e-9)


def rotation(T, factor, dtype=torch.float32, B=1, activation="identity"):
    """h' = factor Q h + R u, Q a rotation: ||lam_t|| = factor^(T - t) ||lam_T|| exactly."""
    torch.manual_seed(0)
    net = co.Network(
        "elman", inputs=2, hidden=8, outputs=2, activation=activation, bias=True, dtype=dtype
    )
    with torch.no_grad():
        net.W.copy_(factor * torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))[0])
    b = co.Batch(
        torch.randn(T, B, 2, dtype=dtype),
        torch.randn(B, 2, dtype=dtype),
        x0=torch.randn(B, 8, dtype=dtype),
    )
    return co.BPTT()(net, b, "squared")


@pytest.mark.parametrize(("factor", "T"), [(0.5, 1000), (0.9, 700), (1.02, 1000)])
def test_nothing_leaves_the_range_of_numbers(factor, T):
    """In float32, where 0.5^1000 is 0: all that decays is exact in its logarithm."""
    e = rotation(T, factor)
    log, far = math.log(factor), np.arange(T, -1, -1.0)
    costates = decay(e)
    np.testing.assert_allclose(
        costates.log_norms - costates.log_norms[-1], far * log, rtol=1e-5, atol=1e-3
    )
    assert costates.slope == pytest.approx(log, rel=1e-5)
    components = temporal(e)
    np.testing.assert_allclose(
        components.logs["b"] - components.logs["b"][-1], far[1:] * log, rtol=1e-5, atol=1e-3
    )
    assert components.slope("b") == pytest.approx(log, rel=1e-5)
    assert np.isfinite(components.logs["joint"]).all()
    products = singular_values(e)
    np.testing.assert_allclose(
        products.logs, products.steps[:, None] * np.full(8, log), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(lyapunov(e).exponents, log, rtol=1e-4)
    heard = sensitivity(e).log_norms[:, 0]
    assert np.isfinite(heard).all()
    assert -finding.fitted_slope(np.arange(T), heard) == pytest.approx(log, abs=2e-3)
    found = bounds(e)
    assert found.by_singular_value == pytest.approx(log, abs=1e-6)
    np.testing.assert_allclose(found.costates, far[::-1] * log, rtol=1e-5, atol=1e-3)
    if factor < 1:  # states of the others leave the range themselves
        assert np.isfinite(along(e, [1e-3]).loss).all()


def test_a_relu_network_may_be_dead_without_a_complaint():
    e = rotation(40, 0.5, activation="relu", B=3)
    with torch.no_grad():
        e.network.b.fill_(-50.0)
    e = co.BPTT()(e.network, e.batch, "squared")
    found = examination.examine(e, [n for n in examination.DIAGNOSTICS if n != "landscape"]).found
    assert np.isneginf(found["singular-values"].logs[-1]).all()
    assert np.isneginf(found["lyapunov"].exponents).all()
    assert np.isneginf(found["paths"].log_share[1:]).all()
    assert (found["saturation"].share == 1).all()
    assert math.isnan(found["decay"].slope)
    for one in found.values():
        examination.plot(one)
        one.figures()


def test_decay_of_each_sample_over_its_own_steps():
    e = evaluated()
    logs, slopes = e.costates.log_norms().numpy(), []
    for j, n in enumerate(LENGTHS.tolist()):
        slopes.append(-np.polyfit(np.arange(n + 1), logs[: n + 1, j], 1)[0])
    found = decay(e)
    assert found.slope == pytest.approx(np.mean(slopes), rel=1e-10)
    np.testing.assert_allclose(found.log_norms[4], logs[4, [0, 3]].mean())
    assert found.layers == {}


def test_decay_of_a_stack_is_that_of_its_layers_and_of_all_as_one():
    torch.manual_seed(0)
    net = co.Stack(["elman", "lstm"], inputs=3, hidden=4, outputs=2, **torch_double)
    e = co.BPTT()(
        net,
        co.Batch(
            torch.randn(6, 4, 3, **torch_double), torch.randn(4, 2, **torch_double), lengths=LENGTHS
        ),
        "squared",
    )
    found = decay(e)
    assert set(found.layers) == {"layer 0", "layer 1"}
    np.testing.assert_allclose(
        found.layers["layer 1"], np.nanmean(e.costates[1].log_norms().numpy(), 1)
    )
    both = np.log(np.sqrt(sum(np.exp(2 * lam.log_norms().numpy()) for lam in e.costates)))
    np.testing.assert_allclose(found.log_norms, np.nanmean(both, 1))
    assert {"W, layer 0", "W_f, layer 1"} < set(spectrum(e).names)
    declined = examination.examine(
        e, ["temporal", "lyapunov", "bounds", "saturation", "paths", "sensitivity"]
    )
    assert not declined.found
    assert all("Use co.Network" in why for why in declined.declined.values())


def test_the_spectrum_of_each_block_is_that_of_numpy():
    e = evaluated("lstm")
    found = spectrum(e)
    assert found.names == ("W_i", "W_f", "W_g", "W_o")
    for k, W in enumerate(e.network.W.detach().numpy().reshape(4, 5, 5)):
        assert found.radius[k] == pytest.approx(max(abs(np.linalg.eigvals(W))))
        assert found.largest[k] == pytest.approx(np.sqrt(max(np.linalg.eigvalsh(W.T @ W))))
    masked = evaluated(mask=(torch.arange(25).reshape(5, 5) % 2).double())
    W = (masked.network.W * masked.network.mask).detach().numpy()
    assert spectrum(masked).radius[0] == pytest.approx(max(abs(np.linalg.eigvals(W))))
    with pytest.raises(co.Unsupported, match="step function hides it"):
        spectrum(evaluated("gru-before"))
    with pytest.raises(co.Unsupported, match="this network has no W"):
        spectrum(evaluated("lru"))


@pytest.mark.parametrize("activation", ["tanh", "sigmoid", "relu", "softplus", "identity"])
def test_bounds_are_what_they_say_and_hold(activation):
    slope = {
        "tanh": lambda a: 1 - np.tanh(a) ** 2,
        "sigmoid": lambda a: np.exp(-a) / (1 + np.exp(-a)) ** 2,
        "relu": lambda a: (a > 0) * 1.0,
        "softplus": lambda a: 1 / (1 + np.exp(-a)),
        "identity": np.ones_like,
    }[activation]
    e = evaluated(activation=activation)
    net, sigma = e.network, 0.0
    W, R, b = (getattr(net, n).detach().numpy() for n in ("W", "R", "b"))
    for j in range(4):
        u, x = own(e, j)
        for t in range(len(u)):
            sigma = max(sigma, slope(W @ x[t].detach().numpy() + R @ u[t].numpy() + b).max())
    found = bounds(e)
    assert found.sigma == pytest.approx(sigma, rel=1e-12)
    assert np.exp(found.by_entries) == pytest.approx(5 * sigma * abs(W).max())
    assert np.exp(found.by_singular_value) == pytest.approx(sigma * np.linalg.norm(W, 2))
    assert found.by_singular_value <= found.by_entries
    s = np.arange(7)
    assert (found.jacobians <= s * found.by_singular_value + 1e-9).all()
    assert (found.costates <= s * found.by_singular_value + 1e-9).all()
    logs = e.costates.log_norms().numpy()
    np.testing.assert_allclose(found.costates[6], logs[0, 0] - logs[6, 0])
    np.testing.assert_allclose(
        found.costates[5], np.mean([logs[1, 0] - logs[6, 0], logs[0, 3] - logs[5, 3]])
    )


def test_bounds_belong_to_elman_and_costates_to_a_loss_of_the_last_step():
    for cell in ("gru", "leaky", "gru-before"):
        with pytest.raises(co.Unsupported, match="holds for cell 'elman', but this one is"):
            bounds(evaluated(cell))
    assert np.isnan(bounds(evaluated(readout="every")).costates).all()


def test_saturation_counts_plain_units_with_flat_slopes():
    e = evaluated(hidden=7)
    with torch.no_grad():
        e.network.R.mul_(3)
    e = co.BPTT()(e.network, e.batch, "squared")
    flat = (1 - e.trajectory.x[1:] ** 2 < 0.05).double().numpy()
    flat[~(np.arange(6)[:, None] < LENGTHS.numpy())] = np.nan
    found = saturation(e)
    np.testing.assert_allclose(found.share, np.nanmean(flat, (1, 2)))
    np.testing.assert_allclose(found.units, np.nanmean(flat, (0, 1)))
    assert 0.1 < found.units.mean() < 0.95
    off = evaluated(activation="relu")
    there = (np.arange(6)[:, None] < LENGTHS.numpy())[..., None]
    expected = np.where(there, off.trajectory.x[1:].detach().numpy() <= 0, np.nan)
    np.testing.assert_allclose(saturation(off).share, np.nanmean(expected, (1, 2)))


def lstm(a, c):
    i, f, g, o = a.chunk(4)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.cat([torch.sigmoid(o) * torch.tanh(c), c])


def test_saturation_of_a_gated_unit_is_that_no_gate_moves_it():
    """The derivative of (h, c) by each gate's argument, by autograd."""
    e = evaluated("lstm", ragged=False)
    net = e.network
    slopes = np.zeros((6, 4, 5))
    for j in range(4):
        u, x = own(e, j)
        for t in range(6):
            a, c = (net.W @ x[t][:5] + net.R @ u[t] + net.b).detach(), x[t][5:].detach()
            J = torch.autograd.functional.jacobian(lambda a, c=c: lstm(a, c), a).reshape(2, 5, 4, 5)
            slopes[t, j] = torch.einsum("sdgd->sgd", J).abs().amax((0, 1)).numpy()
    np.testing.assert_allclose(unit_slopes(e), slopes, rtol=1e-10)
    np.testing.assert_allclose(
        slopes_at_rest(net), 0.5, rtol=0.5
    )  # c by g at a = 0: sigmoid(0) = 1/2; by i, g at 1: more
    found = saturation(e, flat=0.9)
    np.testing.assert_allclose(found.share, (slopes < 0.9 * slopes_at_rest(net)).mean((1, 2)))
    with pytest.raises(
        co.InputError, match=r"flat, .*, must be a finite number, above 0 and below 1; got 2"
    ):
        saturation(e, flat=2)


def test_data_of_a_step_is_no_argument():
    """h' = sigma(...): the slope by m, which says whether W or its inverse is taken, is not among
    those of the unit.
    """
    e = evaluated("inverse", ragged=False)
    e = co.BPTT()(e.network, co.Batch(e.batch.u, e.batch.y, x0=9 * e.batch.x0), "squared")
    np.testing.assert_allclose(
        unit_slopes(e), 1 - e.trajectory.x[1:].detach() ** 2, rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize(
    "cell", ["antisymmetric", "cornn", "rate", "mingru", "unicornn", "inverse"]
)
def test_units_of_small_steps_are_not_saturated_at_rest(cell):
    e = evaluated(cell)
    with torch.no_grad():
        for p in e.network.parameters():
            p.mul_(0.1)
    e = co.BPTT()(e.network, co.Batch(e.batch.u, e.batch.y, x0=0 * e.batch.x0), "squared")
    assert saturation(e).units.mean() < 0.2


def test_paths_add_up_one_by_one():
    """Every path of a small network with absent connections, followed step by step."""
    mask = torch.tensor([[1.0, 1, 0], [0, 1, 1], [1, 0, 1]], **torch_double)
    e = evaluated(activation="relu", hidden=3, mask=mask, T=6)
    W = (e.network.W * mask).detach().numpy()
    found = paths(e)
    lost = 0
    for j, n in enumerate(LENGTHS.tolist()):
        on = e.trajectory.x[:, j].detach().numpy() > 0
        for s in range(7):
            if s > n:
                assert np.isnan(found.log_share[s, j])
                continue
            count, weight = np.zeros(2), np.zeros(2)  # enabled, all
            for path in itertools.product(range(3), repeat=s + 1):
                crossed = list(itertools.pairwise(path))
                cost = math.prod(abs(W[b, a]) for a, b in crossed)
                enabled = all(on[n - s + i + 1, b] for i, (_, b) in enumerate(crossed))
                count += np.array([enabled, 1]) * (cost > 0)
                weight += np.array([enabled, 1]) * cost
            lost += count[0] < count[1]
            np.testing.assert_allclose(
                np.exp(found.log_share[s, j]), count[0] / count[1], rtol=1e-10
            )
            np.testing.assert_allclose(
                np.exp(found.log_weight[s, j]), weight[0] / weight[1], rtol=1e-10
            )
        np.testing.assert_allclose(found.active[:n, j], on[1 : n + 1].mean(1))
    assert lost > 3
    steps = [(t, j) for j, n in enumerate(LENGTHS.tolist()) for t in range(1, n + 1)]
    on = [(e.trajectory.x[t, j] > 0).double().mean().item() for t, j in steps]
    assert found.figures()[0].value == pytest.approx(100 * np.mean(on))
    with pytest.raises(co.Unsupported, match="Use activation='relu'"):
        paths(evaluated())


READ = [
    {"cell": "elman"},
    {"cell": "elman", "readout": "every", "skip": True},
    {"cell": "elman", "readout": "attention", "output": "sigmoid"},
    {"cell": "elman", "engine": "autograd", "skip": True},
    {"cell": "lstm", "output": "softmax"},
    {"cell": "gru", "deep": 4},
    {"cell": "scrn"},
    {"cell": "rate", "noise": 0.3},
    {"cell": "inverse"},
    {"cell": "gru-before", "readout": "every"},
]


@pytest.mark.parametrize("case", READ, ids=name_of)
def test_sensitivity_is_what_differences_say(case):
    """Central differences of y_hat at each sample's last step by every entry of u."""
    e = evaluated(**case)
    net, b, h = e.network.eval(), e.batch, 1e-6
    e = co.BPTT()(net, b, "squared")

    def answer(u):
        with torch.no_grad():
            y = net(u, b.lengths, b.x0).y_hat
        return y[LENGTHS - 1, torch.arange(4)] if net.readout == "every" else y

    squares = torch.zeros(6, 4, **torch_double)
    for t in range(6):
        for i in range(3):
            du = torch.zeros_like(b.u)
            du[t, :, i] = h
            squares[t] += ((answer(b.u + du) - answer(b.u - du)) / (2 * h)).square().sum(-1)
    found = sensitivity(e).log_norms
    there = np.arange(6)[:, None] < LENGTHS.numpy()
    np.testing.assert_allclose(
        np.exp(found[there]), squares.sqrt().numpy()[there], rtol=1e-5, atol=1e-8
    )
    assert np.isnan(found[~there]).all()


def test_the_noise_scale_is_that_of_single_gradients():
    e = evaluated(loss="squared")
    net, rows = e.network, []
    for j, n in enumerate(LENGTHS.tolist()):
        run = net(e.batch.u[:n, j : j + 1], x0=e.batch.x0[j : j + 1])
        rows.append(
            torch.cat(
                [
                    g.flatten()
                    for g in torch.autograd.grad(
                        run.loss("squared", e.batch.y[j : j + 1]).sum(), list(net.parameters())
                    )
                ]
            )
        )
    g = torch.stack(rows).numpy()
    trace = np.trace(np.cov(g.T))
    signal = (g.mean(0) ** 2).sum() - trace / 4
    found = noise(e)
    assert found.spread == pytest.approx(trace)
    assert found.signal == pytest.approx(signal)
    assert found.scale == (pytest.approx(trace / signal) if signal > 0 else math.inf)
    np.testing.assert_allclose(found.norms, np.linalg.norm(g, axis=1))
    assert math.sqrt(found.signal + found.spread / 4) == pytest.approx(e.norm)
    one = co.BPTT()(net, co.Batch(e.batch.u[:, :1], e.batch.y[:1]), "squared")
    with pytest.raises(co.Unsupported, match="at least two samples"):
        noise(one)


def moved(e, shift):
    """The loss of a copy of the network whose parameters are changed in place."""
    net, b = copy.deepcopy(e.network), e.batch
    with torch.no_grad():
        for name, p in net.named_parameters():
            p += shift[name]
        return float(net(b.u, b.lengths, b.x0).loss("squared", b.y).mean())


@pytest.mark.parametrize(
    "options", [{}, {"structure": "orthogonal"}, {"cell": "lstm", "readout": "every"}], ids=str
)
def test_the_loss_is_probed_elsewhere_and_the_weights_stay(options):
    e = evaluated(**options)
    net = e.network
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    versions = [p._version for p in net.parameters()]
    found = along(e, [1e-7, 1e-2, 0.3])
    assert found.before == pytest.approx(float(e.loss), rel=1e-12)
    assert (found.loss[0] - found.before) / 1e-7 == pytest.approx(-(e.norm**2), rel=1e-4)
    for s, value in zip(found.steps, found.loss, strict=True):
        assert value == pytest.approx(
            moved(e, {n: -s * g for n, g in e.gradient.items()}), rel=1e-12
        )
    field = landscape(e, seed=5, points=3, reach=0.4)
    assert field.loss[1, 1] == pytest.approx(float(e.loss), rel=1e-12)
    generator = torch.Generator().manual_seed(5)
    d, d2 = (
        {n: normalised_direction(p.detach(), generator) for n, p in net.named_parameters()}
        for _ in range(2)
    )
    for i, j in itertools.product(range(3), range(3)):
        shift = {n: field.alpha[i] * d[n] + field.beta[j] * d2[n] for n in d}
        assert field.loss[i, j] == pytest.approx(moved(e, shift), rel=1e-10)
    for name, p in net.named_parameters():
        assert torch.equal(p, before[name])

        def size(y):
            return y.norm(dim=1) if y.dim() > 1 else y.norm()

        torch.testing.assert_close(size(d[name]), size(p.detach()))
    assert [p._version for p in net.parameters()] == versions
    assert torch.equal(e.trajectory.x, e.trajectory.x)  # still asked for without a complaint
    assert not np.array_equal(field.loss, landscape(e, seed=6, points=3, reach=0.4).loss)


def test_a_loss_out_of_range_is_no_error():
    e = evaluated(activation="identity", T=60, ragged=False)
    with torch.no_grad():
        loss = along(e, [1e-3, 1e300]).loss
    assert np.isfinite(loss[0])
    assert not np.isfinite(loss[1])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: along(e, [0.1, -1]), "step sizes are positive numbers; got"),
        (lambda e: landscape(e, points=4),
            "points must be odd, so that the network is at the centre of the grid; got 4"),
        (lambda e: examination.examine(e, ["lyapunow"]),
            "unknown diagnostic 'lyapunow'; did you mean 'lyapunov'?"),
        (lambda e: noise(co.Evaluation(e.network, e.batch, e.losses, e.penalties, 0.0, e.gradient,
            e.run, e.adjoint)), "does not know its loss"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_in_a_sentence(call, words):
    with pytest.raises(co.InputError, match=words):
        call(evaluated())


@pytest.mark.parametrize(
    "method",
    [co.Penalised("log-ratio", 0.1), co.Truncated(2, 3), co.RTRL(), co.BPTT(segments=2)],
    ids=lambda m: type(m).__name__,
)
def test_evaluations_of_every_method_can_be_examined(method):
    plain = evaluated()
    found = examination.examine(
        method(plain.network, plain.batch, "squared"),
        ["temporal", "decay", "noise", "along", "sensitivity"],
    )
    expected = examination.examine(plain, ["temporal", "decay", "noise", "sensitivity"])
    assert not found.declined
    for key, y in expected.arrays().items():
        np.testing.assert_allclose(found.arrays()[key], y, rtol=1e-8, err_msg=key)


@pytest.mark.parametrize("name", examination.DIAGNOSTICS)
@pytest.mark.slow
def test_every_plot_is_a_separate_figure(name, tmp_path):
    from matplotlib._pylab_helpers import Gcf
    from matplotlib.figure import Figure

    options = {"points": 5} if name == "landscape" else {}
    found = examination.DIAGNOSTICS[name](evaluated(activation="relu"), **options)
    figure = examination.plot(found)
    assert isinstance(figure, Figure)
    figure.savefig(tmp_path / "plot.png")
    chart, ax = found.chart(), figure.axes[0]
    assert ax.get_xlabel() == chart.x
    drawn = [line for line in ax.lines if len(line.get_xdata()) > 2]
    assert len(drawn) >= len(chart.curves) or chart.cells is not None
    assert Gcf.get_num_fig_managers() == 0
    assert all(np.isscalar(f.value) or f.value.ndim == 0 for f in found.figures())
    assert all(
        y.dtype.kind in "fiu" or y.dtype.kind == "U" for y in examination.arrays(found).values()
    )


def test_charts_stay_readable_where_values_are_not():
    """A loss over many decades, steps that are far too long, a bound that is far away."""
    wide = Landscape(
        np.arange(3.0), np.arange(3.0), np.array([[1.0, 1e6, 2], [3, 4, np.inf], [5, 6, 7]])
    ).chart()
    assert wide.label == "log₁₀ of the loss"
    assert wide.cells[0, 1] == 6
    along = Along(np.array([0.1, 1.0, 10.0, 100.0]), np.array([1.5, 7.9, 8.1, 1e9]), 2.0, 1.0)
    assert [list(y) for y in along.chart().curves[0][1:]] == [[-1.0, 0.0], [1.5, 7.9]]
    assert [f.value for f in along.figures()] == [1.0, 0.1]
    assert math.isnan(Along(np.array([1.0]), np.array([np.nan]), 2.0, 1.0).figures()[1].value)
    names = [name for name, *_ in bounds(evaluated(readout="every")).chart().curves]
    assert names == [
        "Jacobian products",
        "bound by the singular value",
        "bound by the entries of W",
    ]


def test_rates_of_ragged_batches_are_means_over_samples():
    """Each sample over its own steps: one long sample does not speak for the short ones."""
    torch.manual_seed(0)
    net = co.Network("elman", inputs=2, hidden=4, outputs=1, dtype=torch.float64)
    lengths = torch.tensor([3, 4, 12, 3])
    batch = co.Batch(
        torch.randn(12, 4, 2, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64), lengths
    )
    e = co.BPTT()(net, batch, "squared")
    J, logs = jacobians(e, 4), e.costates.log_norms()
    wide, fall = [], []
    for j, n in enumerate(lengths.tolist()):
        P = np.eye(4)
        for t in range(n):
            P = J[t, j] @ P
        wide.append(np.log(np.linalg.norm(P, 2)) / n)
        fall.append(float(logs[0, j] - logs[n, j]) / n)
    assert singular_values(e).slope == pytest.approx(np.mean(wide), rel=1e-10)
    assert bounds(e).rates == pytest.approx((np.mean(wide), np.mean(fall)), rel=1e-10)


def test_the_span_of_temporal_components_is_their_ratio_in_decades():
    falls = Components(np.arange(1.0, 4.0), {"joint": np.log([1e-3, 1e-1, 1e2])})
    assert falls.figures()[0].value == pytest.approx(-5)
    assert falls.figures()[1].value == pytest.approx(10**-2.5)
    silent = Components(np.arange(1.0, 3.0), {"joint": np.array([0.0, -math.inf])})
    assert math.isnan(silent.figures()[0].value)


def test_a_past_that_adds_nothing_is_named():
    net = co.Network("elman", inputs=1, hidden=3, outputs=1)
    with torch.no_grad():
        net.W.zero_()
    found = temporal(co.BPTT()(net, co.Batch(torch.randn(4, 2, 1), torch.randn(2, 1)), "squared"))
    assert found.figures()[0].value == -math.inf


def test_a_finite_set_is_examined_by_a_full_batch_or_by_one_sample(capsys):
    class Two(co.tasks.task.Task):
        name, inputs, outputs = "two", 1, 1

        def held_out(self, split, seed, draw=0, n=1000):
            for B in (5, 1):
                yield co.Batch(torch.randn(4, B, 1), torch.randn(B, 1))

    net = co.Network("elman", inputs=1, hidden=3, outputs=1)
    assert len(examination.evaluate(net, Two()).losses) == 5
    with pytest.raises(co.KindError, match="task must be one of co"):
        examination.evaluate(net, "xor")
    alone = examination.examine(
        co.BPTT()(net, co.Batch(torch.randn(4, 1, 1), torch.randn(1, 1)), "squared")
    )
    assert set(alone.declined) >= {"noise"}
    diagnose.print_findings(alone, net)
    assert "left out: noise: the gradient-noise scale needs at least two" in capsys.readouterr().out
    assert "decay" in alone.found


@pytest.mark.parametrize(
    ("cells", "both", "said"),
    [
        (["gru"], True, "--no-bidirectional to see them (bounds with --cell elman alone)."),
        (["elman"], True, "train with --no-bidirectional to see them."),
        (["elman"] * 2, False, "train with --layers 1 to see them."),
        (["elman"] * 2, True, "train with --no-bidirectional --layers 1 to see them."),
    ],
)
def test_a_network_of_several_parts_is_told_how_to_see_the_rest(cells, both, said, capsys):
    net = co.Stack(cells, inputs=1, hidden=3, outputs=1, bidirectional=both)
    batch = co.Batch(torch.randn(4, 5, 1), torch.randn(5, 1))
    found = examination.examine(co.BPTT()(net, batch, "squared"), ["temporal", "bounds"])
    diagnose.print_findings(found, net)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("left out: temporal, bounds. They need one recurrent layer; train with ")
    assert line.endswith(said)


@pytest.mark.slow
def test_import_needs_no_matplotlib():
    look = (
        "import sys; sys.modules['matplotlib'] = None\nimport coadjoint as co\n"
        "co.diagnostics.DIAGNOSTICS\ntry: co.diagnostics.plot(co.diagnostics.Chart('', '', '', "
        "'', ()))\nexcept co.MissingError as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True)
    assert done.stdout == "plots need matplotlib: pip install 'coadjoint[plot]'.\n", done.stderr


def test_an_examination_is_saved_as_files_and_a_page(tmp_path):
    found = examination.examine(evaluated(), ["temporal", "decay", "lyapunov", "along", "paths"])
    diagnoses.save(
        tmp_path / "one", found, {"task": {"name": "<b>temporal"}, "sequences": "4 sequences"}
    )
    told = json.loads((tmp_path / "one" / "diagnostics.json").read_text())
    assert [c["id"] for c in told["charts"]] == ["temporal", "decay", "lyapunov", "along"]
    assert set(told["declined"]) == {"paths"}
    with np.load(tmp_path / "one" / "diagnostics.npz", allow_pickle=False) as arrays:
        np.testing.assert_array_equal(arrays["temporal.logs.W"], found.found["temporal"].logs["W"])
    assert (tmp_path / "one" / "lyapunov.png").read_bytes()[:4] == b"\x89PNG"
    page = co.report.write(tmp_path / "one").read_text()
    diagnoses.save(tmp_path / "one", examination.examine(evaluated(), ["decay"]))
    assert [p.name for p in (tmp_path / "one").glob("*.png")] == ["decay.png"]
    assert "Lyapunov exponents" in page
    assert "&lt;b&gt;temporal" in page
    assert "<b>temporal" not in page


HOSTILE = [
    "[]",
    '{"charts": 7, "table": [], "about": "x", "declined": 3}',
    '{"charts": [{"curves": [[1, 2], ["a", [0, null, "NaN"], [1, 2, 3]], 5], "rules": [[1], ["x", '
    '2]], "x": {"a": 1}}], "table": {"heads": 5, "rows": 1}}',
    '{"charts": [{"cells": [[1, 2], [3]], "curves": [["", [0, 1], [0, 1]]]}, {"cells": []}], '
    '"table": {"heads": ["figure", "value", "unit"], "rows": [[1], ["a", "b", '
    '"</script><script>"], 8]}}',
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_a_strangers_diagnostics_are_text(text, tmp_path):
    (tmp_path / "diagnostics.json").write_text(text)
    if text == "[]":
        with pytest.raises(co.StorageError, match="holds no diagnostics"):
            co.report.write(tmp_path)
        return
    assert "</script><script>" not in co.report.write(tmp_path).read_text()


@pytest.fixture
def coadjoint(coadjoint, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COADJOINT_DEBUG", raising=False)
    return coadjoint


def test_the_command_examines_a_run(coadjoint, tmp_path):
    train = (
        "train xor --length 12 --hidden 4 --steps 4 --every 2 --tests 8 --confirm 8 --probes "
        "4 --batch 3 --out run -q"
    )
    assert coadjoint(*train.split())[0] == 0
    assert "Diagnostics" not in (tmp_path / "run" / "report.html").read_text()
    code, out, err = coadjoint(
        "diagnose", "run", "--samples", "9", "--only", "temporal,decay,bounds,paths"
    )
    assert (code, err) == (0, "")
    assert "weights after training; 9 held-out sequences" in out
    assert "bound by the singular value" in out
    assert "left out: paths: relu enables a path or blocks it" in out
    model = co.diagnostics.evaluate(
        diagnose.load_run_network(tmp_path / "run")[0], co.tasks.make("xor", length=12), 9
    )
    told = json.loads((tmp_path / "run" / "diagnostics" / "diagnostics.json").read_text())
    assert told["charts"][1]["curves"][0][2] == pytest.approx(
        decay(model).chart().curves[0][2].tolist()
    )
    assert coadjoint("report", "run")[0] == 0  # written again, with them
    assert "Temporal components of the gradient" in (tmp_path / "run" / "report.html").read_text()
    (tmp_path / "run" / "model.safetensors").unlink()
    assert (
        "weights at step 4;" in coadjoint("diagnose", "run", "--only", "decay", "--samples", "3")[1]
    )


def test_the_command_compares_spectral_radii(coadjoint, tmp_path):
    words = (
        "diagnose temporal-order --length 30 --hidden 12 --radius 0.5,0.9 --samples 20 --only "
        "temporal,spectrum,landscape --out found"
    )
    code, out, err = coadjoint(*words.split())
    assert (code, err) == (0, "")
    rows = dict(line.split("  ", 1) for line in out.splitlines() if "  " in line)
    assert rows["spectral radius of W"].split() == ["0.5", "0.9"]
    first, last = map(float, rows["temporal components, towards the past"].split()[:2])
    assert first < last < 1
    charts = json.loads((tmp_path / "found" / "diagnostics.json").read_text())["charts"]
    assert [c[0] for c in charts[0]["curves"]] == ["radius 0.5", "radius 0.9"]
    assert (tmp_path / "found" / "temporal.png").exists()
    assert not (tmp_path / "found" / "landscape.png").exists()
    assert "radius 0.9" in (tmp_path / "found" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("diagnose", "nothing to train on: name a task"),
        ("diagnose xor --only lyapunow", "unknown diagnostic 'lyapunow'; did you mean 'lyapunov'?"),
        ("diagnose xor --radius 0.5,abc", "--radius: must be a number greater than 0; got 'abc'"),
        ("diagnose xor --radius -1", "--radius: must be a number greater than 0; got -1"),
        ("diagnose nosuchtask", "unknown task 'nosuchtask'"),
        ("diagnose xor --samples 0", "Invalid value for '--samples'"),
        ("diagnose here --hidden 4", "a run is examined as it is"),
        ("diagnose here --radius 2", "a run is examined as it is"),
    ],
)
def test_mistakes_get_one_line_and_leave_nothing(coadjoint, tmp_path, words, complaint):
    (tmp_path / "here").mkdir()
    code, out, err = coadjoint(*words.split())
    assert (code, out) == (2, "")
    assert complaint in err
    assert len(err.splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


def test_a_folder_of_something_else_is_refused(coadjoint, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.txt").write_text("mine")
    code, _, err = coadjoint("diagnose", "xor", "--out", "here")
    assert code == co.StorageError.exit_code
    assert "exists and is not empty" in err
    code, _, err = coadjoint("diagnose", "here")
    assert code == co.StorageError.exit_code
    assert "has no config.yaml" in err

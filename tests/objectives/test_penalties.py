"""Every penalty equals its formula in plain loops and numpy.

Also edge cases, sums, schedules of the weight, and omega as it was published.
"""

import math

import numpy as np
import pytest
import torch

import build
import coadjoint as co
import oracles
from coadjoint.objectives.penalties import PENALTIES

F64 = torch.float64
T, B, I, D, O = 6, 4, 2, 3, 2
LENGTHS = {"whole": [6, 6, 6, 6], "ragged": [6, 1, 4, 2], "one step": [1, 1, 1, 1]}


def network(readout="last", cell="elman", **options):
    net = build.network(cell, inputs=I, hidden=D, outputs=O, readout=readout, **options)
    return net, torch.randn(T, B, I, dtype=F64)


def loss(y_hat):
    return (y_hat**2 + 0.3 * y_hat).sum(-1)


def plain(net, u):
    """One sample [T, inputs] through an Elman network by a loop: states, costates, direct terms,
    outputs (numpy).
    """
    x = [torch.zeros(D, dtype=F64, requires_grad=True)]
    for u_t in u:
        x.append(torch.tanh(net.W @ x[-1] + net.R @ u_t + net.b))
    out = [net.V @ h + net.b_o for h in x[1:]]
    value = loss(out[-1]) if net.readout == "last" else sum(loss(y) for y in out)
    lam = torch.autograd.grad(value, x, retain_graph=True)
    direct = []
    for y in out:
        counts = net.readout == "every" or y is out[-1]
        direct.append((net.V.T @ (2 * y + 0.3)).detach().numpy() if counts else np.zeros(D))
    of_output = [torch.autograd.grad(out[-1][k], x, retain_graph=True) for k in range(O)]

    def as_numpy(ys):
        return np.stack([y.detach().numpy() for y in ys])

    return (
        as_numpy(x),
        as_numpy(lam),
        np.stack([np.zeros(D), *direct]),
        [as_numpy(l) for l in of_output],
    )


def variance(n):
    return ((n - n.mean()) ** 2).mean()


def isometry(x, W, j):
    """mean over t of (log ||J_t' r_t|| - log ||r_t||)^2, J_t = diag(1 - x_t^2) W"""
    logs = []
    for t, x_t in enumerate(x[1:], 1):
        r = np.array(oracles.drawn_signs(D, t, j), dtype=float)
        logs.append(np.log(np.linalg.norm(W.T @ ((1 - x_t**2) * r)) / np.linalg.norm(r)))
    return np.mean(np.square(logs))


def tangent(net, x, j):
    """1/2 sum over outputs of (DF(u) v)^2, by the tangent of every step; v: random signs"""
    W, R, V = (p.detach().numpy() for p in (net.W, net.R, net.V))
    steps = len(x) - 1
    v = np.array(oracles.drawn_signs(steps * I, 1, j), dtype=float).reshape(steps, I)
    dx, changes = np.zeros(D), []
    for x_t, v_t in zip(x[1:], v, strict=True):
        dx = (1 - x_t**2) * (W @ dx + R @ v_t)
        changes.append(V @ dx)
    return 0.5 * np.square(changes if net.readout == "every" else changes[-1]).sum()


def by_hand(name, net, j, x, lam, direct, of_output):
    """The docstrings' formulas on the arrays of sample j, t = 0..T."""
    n = np.linalg.norm(lam, axis=1)
    l, steps = np.log(n), np.log(n[1:-1] / n[2:])
    m = np.linalg.norm(lam, 1, axis=1) if lam.shape[1] == 1 else np.abs(lam).sum(1)
    back = np.linalg.norm(lam[:-1] - direct[:-1], axis=1)  # J_t' lam_t
    h = np.linalg.norm(x, axis=1)
    return {
        "squared-norm": lambda: (n[1:] ** 2).mean(),
        "variance": lambda: variance(n[1:]),
        "variance-l1": lambda: variance(m[1:]),
        "log-ratio": lambda: (steps**2).mean() if len(steps) else 0.0,
        "ratio": lambda: ((n[1:-1] / n[2:] - 1) ** 2).mean() if len(steps) else 0.0,
        "log-variance": lambda: variance(l[1:]),
        "end-points": lambda: (n[1] - n[-1]) ** 2,
        "share-variance": lambda: ((n[1:] / n[1:].sum() - 1 / len(n[1:])) ** 2).sum(),
        "barrier": lambda: sum(math.log(abs(v) / 1e-5) ** 2 for v in lam[-1] if abs(v) < 1e-5),
        "omega": lambda: (((back / n[1:]) ** 2 - 1) ** 2).mean(),
        "omega-norms": lambda: ((back / n[1:] - 1) ** 2).sum(),
        "isometry": lambda: isometry(x, net.W.detach().numpy(), j),
        "tangent": lambda: tangent(net, x, j),
        "norm-stabiliser": lambda: ((h[1:] - h[:-1]) ** 2).mean(),
        "output-variance": lambda: np.mean(
            [variance(np.linalg.norm(o, axis=1)[1:]) for o in of_output]
        ),
    }[name]()


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("name", [n for n in PENALTIES if n != "omega-published"])
@pytest.mark.sampled(3)
def test_penalties_equal_their_formulas_in_numpy(name, readout, lengths, engine):
    net, u = network(readout, engine=engine)
    n = LENGTHS[lengths]
    lam = net(u[: max(n)], n).costates(loss)
    ours = PENALTIES[name](lam)
    truth = [by_hand(name, net, j, *plain(net, u[: n[j], j])) for j in range(B)]
    assert ours.dtype == F64
    assert tuple(ours.shape) == (B,)
    np.testing.assert_allclose(ours.detach(), truth, rtol=1e-11, atol=1e-15)


def shift(net, along, h):
    with torch.no_grad():
        for p, d in zip(net.parameters(), along, strict=True):
            p.add_(h * d)


@pytest.mark.parametrize("name", [n for n in PENALTIES if n != "omega-published"])
def test_gradient_is_the_slope_of_the_value(name):
    """Central differences of the value along random directions, ragged.

    (omega-published is no slope, by design.)
    """
    net, u = network("every", "leaky")
    scale = 1e-6 if name == "barrier" else 1.0  # below the barrier's switch

    def value():
        lam = net(u, LENGTHS["ragged"]).costates(lambda y: scale * loss(y))
        return PENALTIES[name](lam).mean()

    grads = torch.autograd.grad(value(), list(net.parameters()), allow_unused=True)
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        along = [torch.randn(p.shape, dtype=F64, generator=rng) for p in net.parameters()]
        slope = sum(
            float((g * d).sum()) for g, d in zip(grads, along, strict=True) if g is not None
        )
        ends = []
        for h in (1e-4, -1e-4, 5e-5, -5e-5):
            shift(net, along, h)
            ends.append(float(value().detach()))
            shift(net, along, -h)
        coarse, fine = (ends[0] - ends[1]) / 2e-4, (ends[2] - ends[3]) / 1e-4
        assert abs(slope - (4 * fine - coarse) / 3) < 1e-7 * max(abs(slope), 1e-3), name


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("cell", ["lstm", "gru", "rate"])
def test_other_cells_give_finite_values_and_gradients(name, cell):
    net, u = network("every", cell)
    lam = net(u, LENGTHS["ragged"]).costates(loss)
    G = PENALTIES[name](lam)
    grads = torch.autograd.grad(G.mean(), list(net.parameters()), allow_unused=True)
    assert torch.isfinite(G).all()
    assert all(g is None or torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("name", PENALTIES)
def test_sample_without_a_loss_adds_nothing(name):
    """Sample 1's entries are masked out: its costates are zero, and the others' values do not
    change.
    """
    net, u = network("every")
    mask = torch.ones(T, B, dtype=F64)
    mask[:, 1] = 0
    lam, full = (net(u).costates(loss, mask=m) for m in (mask, None))
    G, whole = PENALTIES[name](lam), PENALTIES[name](full)
    (g,) = torch.autograd.grad(G.sum(), net.W)
    assert torch.isfinite(g).all()
    assert lam.zeros().tolist() == [0, T + 1, 0, 0]
    if name not in ("norm-stabiliser", "output-variance", "omega-published", "isometry", "tangent"):
        assert G[1].item() == 0.0
    if name != "omega-published":
        assert torch.allclose(G[[0, 2, 3]], whole[[0, 2, 3]], rtol=1e-12)


def test_the_barrier_acts_below_its_switch():
    net, u = network()
    lam = net(u).costates(lambda y: 1e-7 * loss(y))
    last = lam.lam[-1].detach().numpy()
    for switch in (1e-5, 1e-3):
        truth = (np.where(np.abs(last) < switch, np.log(np.abs(last) / switch), 0) ** 2).sum(1)
        np.testing.assert_allclose(co.penalties.barrier(switch)(lam).detach(), truth, rtol=1e-12)
    with pytest.raises(
        co.InputError, match=r"the barrier's switch must be a finite number, above 0; got 0"
    ):
        co.penalties.barrier(0)


def test_penalties_of_the_output_and_of_a_tangent_equal_their_definition():
    net, u = network("last", output="sigmoid")
    lengths = LENGTHS["ragged"]
    lam = net(u, lengths).costates(loss)
    run = net(u, lengths)
    each = [co.penalties.log_ratio(run.costates(run.y_hat[:, k])) for k in range(O)]
    assert torch.allclose(co.penalties.of_output("log-ratio")(lam), sum(each) / O, rtol=1e-12)
    for readout in ("last", "every"):
        net, u = network(readout)
        v, beta, h = torch.randn_like(u), 0.2, 1e-6
        change = (net(u + h * v, lengths).y_hat - net(u - h * v, lengths).y_hat) / (2 * h) - beta
        if readout == "every":
            change = torch.where(net(u, lengths).mask[1:, :, None], change, 0)
        truth = change.square().sum(-1) if readout == "last" else change.square().sum((0, 2))
        truth = truth / 2
        G = co.penalties.tangent(v, beta)(net(u, lengths).costates(loss))
        np.testing.assert_allclose(G.detach(), truth.detach(), rtol=1e-6)
        (g,) = torch.autograd.grad(G.sum(), net.W)
        assert float(g.norm()) > 0


# Pascanu et al. as published


def published(net, u, lengths, W):
    """sum over samples, steps of (|(d (1 - h^2)) W|^2 / |d|^2 - 1)^2 / (steps with |d / B|^2 >=
    1e-20); h, d constant.
    """
    total, count = 0.0, 0
    for j, n in enumerate(lengths):
        x, lam, _, _ = plain(net, u[:n, j])
        for h, d in zip(x[1:], lam[1:], strict=True):
            if (np.linalg.norm(d) / len(lengths)) ** 2 >= 1e-20:
                back = (torch.tensor(d * (1 - h**2))[None] @ W)[0]
                total = total + (back.square().sum() / float(d @ d) - 1) ** 2
                count += 1
    return total / max(count, 1)


@pytest.mark.parametrize("lengths", ["whole", "ragged"])
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_omega_published_reaches_w_alone_and_by_the_immediate_derivative(engine, lengths):
    net, u = network("last", engine=engine)
    n = LENGTHS[lengths]
    lam = net(u, n).costates(loss)
    G = PENALTIES["omega-published"](lam)
    W = net.W.detach().clone().requires_grad_()
    truth = published(net, u, n, W)
    np.testing.assert_allclose(G.detach(), np.full(B, float(truth.detach())), rtol=1e-12)
    grads = dict(
        zip(
            (k for k, _ in net.named_parameters()),
            torch.autograd.grad(G.mean(), list(net.parameters()), allow_unused=True),
            strict=True,
        )
    )
    (by_W,) = torch.autograd.grad(truth, W)
    np.testing.assert_allclose(grads.pop("W"), by_W, rtol=1e-11, atol=1e-15)
    assert all(g is None or (g == 0).all() for g in grads.values())
    (exact,) = torch.autograd.grad(PENALTIES["omega"](net(u, n).costates(loss)).mean(), net.W)
    assert float((exact - by_W).norm() / by_W.norm()) > 0.01


def test_omega_published_leaves_out_costates_below_its_bound():
    net, u = network()
    for scale, zero in ((1e-7, False), (1e-11, True)):
        G = PENALTIES["omega-published"](net(u).costates(lambda y, k=scale: k * loss(y)))
        assert (G == 0).all().item() is zero


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(("factor", "counts"), [(0.99, False), (1.01, True)])
def test_omega_published_has_its_bound_on_costates_of_the_mean_loss(factor, counts, samples):
    """Left out below ||lam_t / B|| = 1e-10: published code takes costates of the mean over B
    samples.
    """
    net, u = network()
    size = float(net.V.sum(0).norm().detach())
    slope = factor * samples * 1e-10 / size  # of a linear loss, so that ||lam_1|| = factor B 1e-10
    lam = net(u[:1, :samples]).costates(lambda y: slope * y.sum(-1))
    assert lam.norms()[1].tolist() == pytest.approx([factor * samples * 1e-10] * samples, rel=1e-12)
    G = PENALTIES["omega-published"](lam)
    assert (G != 0).tolist() == [counts] * samples


def test_omega_published_needs_a_formula_with_w():
    net, u = network(engine="autograd")
    with pytest.raises(co.Unsupported, match=r"omega-published.*Use 'omega'"):
        PENALTIES["omega-published"](net(u).costates(loss))


# sums, weights, schedules


def test_penalties_can_be_added_and_weighed():
    net, u = network("every")
    lam = net(u).costates(loss)
    a, b = co.penalties.log_ratio, co.penalties.variance
    mix = 0.5 * a + b * 2 + (lambda lam: lam.norms()[-1])
    assert torch.allclose(mix(lam), 0.5 * a(lam) + 2 * b(lam) + lam.norms()[-1], rtol=1e-14)
    assert "log-ratio" in mix.name
    assert "variance" in repr(mix)
    assert torch.equal((a + "variance")(lam), a(lam) + b(lam))
    assert torch.equal(sum([a, b], start=0 * a)(lam), a(lam) + b(lam))
    e = co.Penalised(mix, 0.1)(net, co.Batch(u), loss)
    assert float(e.objective) == pytest.approx(
        float((lam.loss + 0.1 * mix(lam)).mean().detach()), rel=1e-12
    )


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (co.penalties.inverse_time(2.0), [2.0, 1.0, 2 / 3]),
        (co.penalties.inverse_time(1.0, 0.5), [1.0, 1 / 1.5, 0.5]),
        (co.penalties.exponential(4.0, 0.5), [4.0, 2.0, 1.0]),
        (co.penalties.linear(1.0, 0.0, 2), [1.0, 0.5, 0.0, 0.0]),
        (lambda step: float(step), [0.0, 1.0, 2.0]),
        (0.7, [0.7, 0.7]),
    ],
)
def test_schedules_count_the_calls(schedule, values):
    net, u = network()
    method = co.Penalised("variance", schedule)
    for rho in values:
        e = method(net, co.Batch(u), loss)
        assert e.rho == pytest.approx(rho)
        assert float(e.objective) == pytest.approx(float(e.loss + rho * e.penalty), rel=1e-14)


@pytest.mark.parametrize("weight", [math.nan, math.inf, "0.1", None])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(
        co.InputError,
        match=r"weight must be a finite number, at least 0, or a function of the step",
    ):
        co.Penalised("variance", weight)
    net, u = network()
    with pytest.raises(co.InputError, match=r"the schedule returned rho = nan at step 0"):
        co.Penalised("variance", lambda step: math.nan)(net, co.Batch(u), loss)


def test_every_penalty_states_its_formula():
    for name, G in PENALTIES.items():
        assert "t" in G.__doc__, name
        assert any(word in G.__doc__ for word in ("mean", "sum", "^2")), name


@pytest.mark.parametrize("name", ["isometry", "barrier", "tangent", "of_output"])
def test_a_maker_of_penalties_that_is_given_costates_says_how_to_call_it(name):
    net, u = network()
    lam = net(u).costates(loss)
    with pytest.raises(co.KindError) as error:
        getattr(co.penalties, name)(lam)
    assert str(error.value) == (
        f"co.penalties.{name} makes a penalty: call co.penalties.{name}()(lam); got Costates."
    )
    assert getattr(co.penalties, name)()(lam).shape == (B,)


def test_shares_that_hardly_differ_keep_their_digits():
    """lam_t = g^(T - t) with g near 1: a 1/T of float32 would be wrong by 5e-8 of the whole."""
    g, steps = 1.0001, 7
    net = build.network("elman", inputs=1, hidden=1, outputs=1, activation="identity", bias=False)
    with torch.no_grad():
        net.W.fill_(g)
    lam = net(torch.ones(steps, 1, 1, dtype=F64)).costates(lambda y_hat: y_hat.sum(-1))
    norms = np.array([g ** (steps - t) for t in range(1, steps + 1)])
    truth = ((norms / norms.sum() - 1 / steps) ** 2).sum()
    assert float(PENALTIES["share-variance"](lam).detach()) == pytest.approx(truth, rel=1e-10)

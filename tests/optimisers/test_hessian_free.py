"""Hessian-free steps lower the objective, and conjugate gradients solve what they are given."""

import itertools
import math
import sys

import pytest
import torch

import coadjoint as co
from coadjoint.optimisers.conjugate_gradients import conjugate_gradients
from coadjoint.optimisers.curvature import Curvature
from coadjoint.optimisers.hessian_free import HessianFree, best_iterate

pytestmark = pytest.mark.slow

F64 = torch.float64


def positive(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    M = torch.randn(n, n, generator=g, dtype=F64)
    return M @ M.T + 0.1 * torch.eye(n, dtype=F64), torch.randn(n, generator=g, dtype=F64)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_conjugate_gradients_solve(scaled, begun):
    A, b = positive(23)
    found = conjugate_gradients(
        lambda x: A @ x,
        b,
        torch.ones_like(b) if begun else None,
        A.diag() if scaled else None,
        most=200,
        progress=0.0,
    )
    assert torch.allclose(found.iterates[-1], torch.linalg.solve(A, b), rtol=1e-8, atol=1e-10)
    for x, model in zip(found.iterates, found.models, strict=True):
        assert model == pytest.approx(float(x @ A @ x / 2 - b @ x), rel=1e-9)
    for before, after in itertools.pairwise(found.models):  # it falls, but for rounding at the end
        assert after <= before + 1e-14 * abs(before)


def test_conjugate_gradients_stop_when_little_is_gained():
    A, b = positive(300)
    all_the_way = conjugate_gradients(lambda x: A @ x, b, most=250, progress=0.0)
    early = conjugate_gradients(lambda x: A @ x, b, most=250, progress=5e-3)
    assert 10 < early.iterations < all_the_way.iterations
    assert early.models[-1] < 0.8 * all_the_way.models[-1]
    assert conjugate_gradients(lambda x: A @ x, b, most=7).iterations == 7
    assert conjugate_gradients(lambda x: A @ x, torch.zeros_like(b)).iterations == 0


def test_conjugate_gradients_that_begin_at_the_solution_say_its_value():
    A, x = torch.diag(torch.tensor([1.0, 4.0], dtype=F64)), torch.tensor([3.0, 0.5], dtype=F64)
    found = conjugate_gradients(lambda y: A @ y, A @ x, start=x)
    assert (found.iterations, found.products) == (0, 1)
    assert torch.equal(found.iterates[0], x)
    assert found.models == [-0.5 * (9 + 1)]


def linear_problem():
    """A network that is linear in what is trained: its squared error is a quadratic, and its
    Gauss-Newton matrix the Hessian.
    """
    torch.manual_seed(0)
    net = co.Network("elman", inputs=2, hidden=6, outputs=2, dtype=F64)
    for name, p in net.named_parameters():
        p.requires_grad_(name in ("V", "b_o"))
    return net, co.Batch(torch.randn(9, 40, 2, dtype=F64), torch.randn(40, 2, dtype=F64))


def test_a_quadratic_is_minimised_in_one_step():
    net, batch = linear_problem()
    h = torch.cat([net(batch.u).state.detach(), torch.ones(40, 1, dtype=F64)], 1)
    best = torch.linalg.lstsq(h, batch.y).solution
    least = float((h @ best - batch.y).square().sum(1).mean())
    taken = HessianFree(damping=1e-12, structural=0.0, cg=500, progress=0.0, least=0.0).step(
        net, batch, "squared"
    )
    assert taken.rate == 1.0
    assert taken.after == pytest.approx(least, rel=1e-8)
    assert torch.allclose(
        torch.cat([net.V, net.b_o[:, None]], 1).detach().T, best, rtol=1e-4, atol=1e-6
    )
    assert taken.kept == pytest.approx(1.0, rel=1e-6)


def test_damping_follows_what_came_true():
    net, batch = linear_problem()
    hf = HessianFree(damping=1.0, structural=0.0)
    hf.step(net, batch, "squared")
    assert hf.state["damping"] < 1.0  # of a quadratic, more comes true than the damped model says
    torch.manual_seed(1)
    rough = co.Network("elman", inputs=1, hidden=8, outputs=1, dtype=F64)
    with torch.no_grad():
        rough.W.mul_(8)
    b = co.Batch(torch.randn(30, 10, 1, dtype=F64), torch.randn(10, 1, dtype=F64))
    hf = HessianFree(damping=1e-6, structural=0.0, cg=30)
    for _ in range(3):
        taken = hf.step(rough, b, "squared")
        assert taken.after <= taken.before
    assert hf.state["damping"] > 1e-6


@pytest.mark.parametrize(
    "method", [co.BPTT(), co.Penalised("log-ratio", 0.1)], ids=["plain", "penalised"]
)
@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
def test_the_objective_falls(cell, method):
    torch.manual_seed(0)
    net = co.Network(cell, inputs=2, hidden=5, outputs=1, dtype=F64)
    batch = co.Batch(torch.randn(8, 30, 2, dtype=F64), torch.randn(30, 1, dtype=F64))
    hf, values = HessianFree(cg=20), [method.value(net, batch, "squared")]
    for _ in range(6):
        taken = hf.step(net, batch, "squared", method=method)
        assert taken.after == pytest.approx(method.value(net, batch, "squared"), rel=1e-12)
        assert taken.before == pytest.approx(values[-1], rel=1e-12)
        values.append(taken.after)
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.95 * values[0]


def test_structural_damping_holds_the_states():
    """The same damping, with and without: the step moves the states less."""
    moved = []
    for structural in (0.0, 30.0):
        torch.manual_seed(0)
        net = co.Network("elman", inputs=2, hidden=8, outputs=1, dtype=F64)
        batch = co.Batch(torch.randn(20, 30, 2, dtype=F64), torch.randn(30, 1, dtype=F64))
        before = net(batch.u).x.detach()
        HessianFree(damping=0.01, structural=structural, cg=50).step(net, batch, "squared")
        moved.append(float((net(batch.u).x.detach() - before).norm()))
    assert moved[1] < 0.5 * moved[0]


def test_the_curvature_may_be_taken_on_another_batch():
    net, batch = linear_problem()
    part = co.Batch(batch.u[:, :10], batch.y[:10])
    c = Curvature(net, part, "squared")
    n = len(c.gradient())
    matrix = torch.stack([c.gauss_newton(e) for e in torch.eye(n, dtype=F64)]) + 0.1 * torch.eye(
        n, dtype=F64
    )
    g = c.packing.pack(co.BPTT()(net, batch, "squared").gradient)
    hf = HessianFree(damping=0.1, structural=0.0, cg=200, progress=0.0)
    taken = hf.step(net, batch, "squared", curvature=part)
    assert torch.allclose(
        hf.state["solution"], torch.linalg.solve(matrix, -g), rtol=1e-6, atol=1e-8
    )
    assert taken.after < taken.before


def test_a_step_hands_its_system_to_conjugate_gradients(monkeypatch):
    given = []

    def watched(A, b, start, scale, most, progress):
        given.append((start, scale))
        return conjugate_gradients(A, b, start, scale, most, progress)

    monkeypatch.setattr(sys.modules[HessianFree.__module__], "conjugate_gradients", watched)
    net, batch = linear_problem()
    hf = HessianFree(damping=0.3, structural=0.0, cg=4, decay=0.5, precondition=0.75)
    diagonal = Curvature(net, batch, "squared").diagonal(seed=0)
    hf.step(net, batch, "squared")
    last = hf.state["solution"].clone()
    hf.step(net, batch, "squared")
    assert given[0][0] is None
    assert torch.allclose(given[0][1], (diagonal + 0.3) ** 0.75)
    assert torch.equal(given[1][0], 0.5 * last)


def test_backtracking_takes_the_lowest_of_the_last_iterates():
    points = [torch.tensor([float(i)]) for i in range(6)]
    values = [9.0, 1.0, 5.0, 3.0, 2.0, 4.0]
    found, promised, lowest = best_iterate(
        points, [-float(i) for i in range(6)], lambda d: values[int(d)]
    )
    assert (float(found), promised, lowest) == (4.0, -4.0, 2.0)


@pytest.mark.parametrize(
    "change",
    [{"damping": 0.0}, {"structural": -1.0}, {"cg": 0}, {"decay": 2.0}, {"damping": math.nan}],
)
def test_what_hessian_free_cannot_do_is_refused(change):
    with pytest.raises(co.InputError, match=next(iter(change))):
        HessianFree(**change)


def test_curvature_belongs_to_the_weights_it_was_made_at():
    net, batch = linear_problem()
    c = Curvature(net, batch, "squared")
    v = c.gradient()
    with torch.no_grad():
        net.V.mul_(2)
    for product in (c.gauss_newton, c.hessian, lambda v: c.gradient()):
        with pytest.raises(co.InputError, match="has changed since"):
            product(v)
    with pytest.raises(co.InputError, match="a vector of the weights has shape"):
        Curvature(net, batch, "squared").gauss_newton(v[:3])
    noisy = co.Network("rate", inputs=2, hidden=3, outputs=2, noise=0.1, dtype=F64)
    with pytest.raises(co.Unsupported, match=r"net\.eval"):
        Curvature(noisy, batch, "squared")
    zero = torch.zeros(sum(p.numel() for p in noisy.parameters()), dtype=F64)
    assert not Curvature(noisy.eval(), batch, "squared").gauss_newton(zero).any()


def test_conjugate_gradients_converge_with_products_in_float32():
    """Vectors and sums are float64, so that the model of each iterate is the true one and its fall
    is seen to the end.
    """
    g = torch.Generator().manual_seed(1)
    Q = torch.linalg.qr(torch.randn(80, 80, generator=g, dtype=F64)).Q
    A = Q @ torch.diag(torch.logspace(-4, 0, 80, dtype=F64)) @ Q.T
    b, A32 = A @ torch.randn(80, generator=g, dtype=F64), A.float()
    found = conjugate_gradients(lambda x: A32 @ x, b.float(), most=400, progress=0.0)
    assert found.iterates[-1].dtype == torch.float32
    x = found.iterates[-1].double()
    least = -0.5 * float(b @ torch.linalg.solve(A, b))
    assert float(x @ A @ x / 2 - b @ x) == pytest.approx(least, rel=1e-6)
    assert found.models[-1] == pytest.approx(least, rel=1e-6)
    assert found.models == sorted(found.models, reverse=True)


def curved(readout, method):
    """A small problem with everything that a matrix may depend on, its damped matrix and the
    gradient of an objective.
    """
    torch.manual_seed(0)
    net = co.Network(
        "elman", inputs=2, hidden=3, outputs=2, readout=readout, output="softmax", dtype=F64
    )
    lead = (6, 4) if readout == "every" else (4,)
    mask = torch.rand(lead, dtype=F64).round() + 0.5
    lengths, weight = torch.tensor([6, 3, 5, 6]), torch.tensor([1.0, 0.5, 2.0, 1.0], dtype=F64)
    u, y = torch.randn(6, 4, 2, dtype=F64), torch.randint(0, 2, lead)
    batch = co.Batch(u, y, lengths, mask, weight, reduce="mean")
    c = Curvature(net, batch, "cross-entropy")
    eye = torch.eye(sum(p.numel() for p in net.parameters()), dtype=F64)
    matrix = torch.stack([c.product(e, 1.0, 0.1 * 0.5) for e in eye]) + 0.1 * eye
    return net, batch, matrix, c.packing.pack(method(net, batch, "cross-entropy").gradient)


@pytest.mark.parametrize(
    "method", [co.BPTT(), co.Penalised("log-ratio", 0.1)], ids=["plain", "penalised"]
)
@pytest.mark.parametrize("readout", ["last", "every"])
def test_a_step_solves_its_system(readout, method):
    """Samples of their own lengths and weights, masks, both readouts; of a penalised objective the
    gradient alone.
    """
    net, batch, matrix, g = curved(readout, method)
    hf = HessianFree(damping=0.1, structural=0.5, cg=500, progress=0.0)
    taken = hf.step(net, batch, "cross-entropy", method=method)
    assert torch.allclose(
        hf.state["solution"], torch.linalg.solve(matrix, -g), rtol=1e-6, atol=1e-9
    )
    assert taken.norm == pytest.approx(float(g.norm()), rel=1e-12)
    assert taken.after < taken.before


def test_a_refused_step_leaves_the_weights_and_forgets_its_solution():
    net, batch = linear_problem()
    c = Curvature(net, batch, "squared")
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    hf = HessianFree(structural=0.0)
    taken = hf.minimise(c, c.packing.unpack(c.gradient()), c.value, lambda: math.inf)
    assert (taken.rate, taken.after) == (0.0, taken.before)
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert "solution" not in hf.state
    assert hf.state["damping"] == 1.5


def test_a_solution_that_is_worse_than_nothing_is_forgotten():
    net, batch = linear_problem()
    hf = HessianFree(structural=0.0, cg=1)
    hf.step(net, batch, "squared")
    assert "solution" in hf.state
    hf.state["solution"] = 1e3 * torch.randn_like(hf.state["solution"])
    taken = hf.step(net, batch, "squared")
    assert taken.promised > 0
    assert taken.after <= taken.before
    assert "solution" not in hf.state
    hf.step(net, batch, "squared")
    assert "solution" in hf.state


def test_damping_stays_in_range_where_nothing_is_left_to_gain():
    """In float32 a model soon promises less than the objective can show: that is no reason to damp
    more.
    """
    net, batch = linear_problem()
    net, batch = net.float(), batch.to(torch.float32, "cpu")
    hf = HessianFree(damping=1e-4, structural=0.1, cg=60)
    taken = [hf.step(net, batch, "squared") for _ in range(40)]
    assert all(t.after <= t.before for t in taken)
    assert abs(taken[-1].promised) < 1e-6 * taken[-1].before
    assert hf.state["damping"] <= 1e-4


def test_networks_of_several_layers_are_refused_in_one_line():
    stack = co.Stack(["elman", "elman"], inputs=2, hidden=3, outputs=2, dtype=F64)
    pair = co.EncoderDecoder("elman", inputs=2, hidden=3, outputs=4, dtype=F64)
    for net in (stack, pair):
        with pytest.raises(co.Unsupported, match=f"got {type(net).__name__}") as refused:
            HessianFree().step(
                net,
                co.Batch(torch.randn(3, 2, 2, dtype=F64), torch.randn(2, 2, dtype=F64)),
                "squared",
            )
        assert "\n" not in str(refused.value)

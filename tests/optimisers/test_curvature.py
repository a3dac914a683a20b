"""Gauss-Newton, structural damping and Hessian products equal products with the full matrices.

The matrices come from torch's own differentiation.
"""

import dataclasses

import pytest
import torch

import coadjoint as co
from coadjoint.optimisers import curvature
from coadjoint.optimisers.curvature import Curvature

pytestmark = pytest.mark.slow

F64 = torch.float64
PAIRS = [
    ("squared", "identity"),
    ("half-squared", "identity"),
    ("cross-entropy", "softmax"),
    ("binary-cross-entropy", "sigmoid"),
    ("huber", "identity"),
]
CASES = [
    ("elman", "last", {}), ("elman", "every", {"deep": (4,)}),
    ("elman", "attention", {"x0": "learned"}),
    ("leaky", "every", {"skip": True}), ("rate", "tilted", {}),
    ("lstm", "last", {"x0": "learned"}), ("lstm", "every", {}),
    ("gru", "every", {"structure": "orthogonal"}), ("peephole", "last", {}),
    ("scrn-learned", "every", {"skip": True}),
    ("antisymmetric-gated", "every", {}), ("exponential", "every", {}), ("lipschitz", "last", {}),
    ("cornn", "every", {}),
    ("unicornn", "last", {}), ("inverse", "every", {}), ("mingru", "last", {}),
    ("minlstm", "every", {}), ("lru", "last", {}),
]  # fmt: skip


def problem(cell, readout, options, loss="squared", output="identity", outputs=2, weighted=True):
    torch.manual_seed(0)
    net = co.Network(
        cell,
        inputs=2,
        hidden=3,
        outputs=outputs,
        readout=readout,
        output=output,
        dtype=F64,
        **options,
    )
    with torch.no_grad():
        if isinstance(net.x0, torch.nn.Parameter):
            net.x0.normal_()
    T, B = 5, 3
    lead = (T, B) if readout == "every" else (B,)
    y = torch.rand(*lead, outputs, dtype=F64)
    y = torch.randint(0, 2, lead) if loss == "cross-entropy" else y
    mask = torch.rand(lead, dtype=F64).round() + 0.5 if readout == "every" else None
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=F64) if weighted else None
    return net, co.Batch(
        torch.randn(T, B, 2, dtype=F64), y, torch.tensor([5, 3, 4]), mask, weight, reduce="mean"
    )


def jacobian(net, batch, of, x0=None):
    """d of(trajectory) / d weights, one row for each entry."""
    names, values = zip(*net.named_parameters(), strict=True)

    def run(*theta):
        return of(
            torch.func.functional_call(
                net, dict(zip(names, theta, strict=True)), (batch.u, batch.lengths, x0)
            )
        )

    found = torch.autograd.functional.jacobian(run, values)
    return torch.cat(
        [
            J.flatten(found[0].dim() - values[0].dim()).reshape(-1, p.numel())
            for J, p in zip(found, values, strict=True)
        ],
        1,
    )


@pytest.mark.parametrize(("cell", "readout", "options"), CASES)
@pytest.mark.parametrize("engine", ["cpu", "reference"])
@pytest.mark.sampled(2)
def test_products_are_those_of_the_matrices(cell, readout, options, engine):
    weighted = engine == "cpu"  # the states' part has a way of its own without weights
    net, batch = problem(cell, readout, {**options, "engine": engine}, weighted=weighted)
    c = Curvature(net, batch, "squared")
    v = torch.randn(sum(p.numel() for p in net.parameters()), dtype=F64)
    J, Jx = (jacobian(net, batch, of) for of in (lambda r: r.a_rows, lambda r: r.run.x))
    H = torch.autograd.functional.hessian(
        lambda a: batch.mean(c.judge.sample_losses(a)), c.pre.detach()
    )
    G = J.T @ H.reshape(len(J), -1) @ J
    rows = c.run.layout.rows
    weight = batch.weights(torch.ones(1, 3, dtype=F64))[c.run.layout.sample] / rows.B
    each = (
        torch.cat([torch.zeros(rows.B, dtype=F64), weight])[:, None]
        .expand(c.run.run.x.shape)
        .reshape(-1, 1)
    )
    S = Jx.T @ (each * Jx)
    for ours, matrix in ((c.gauss_newton, G), (c.structural, S)):
        size = matrix.abs().max()
        assert float(size) > 1e-6
        assert float((ours(v) - matrix @ v).abs().max()) < 1e-10 * max(1.0, float(size))
    both = c.product(v, 0.5, 2.0)
    assert torch.allclose(both, 0.5 * (G @ v) + 2 * (S @ v), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("loss", "output"), PAIRS)
@pytest.mark.parametrize("readout", ["last", "every"])
def test_curvature_of_every_loss_is_that_of_the_matrices(loss, output, readout):
    net, batch = problem("elman", readout, {}, loss, output)
    c = Curvature(net, batch, loss)
    v = torch.randn(len(c.gradient()), dtype=F64)
    J = jacobian(net, batch, lambda r: r.a_rows)
    H = torch.autograd.functional.hessian(
        lambda a: batch.mean(c.judge.sample_losses(a)), c.pre.detach()
    ).reshape(len(J), -1)
    assert torch.allclose(c.gauss_newton(v), J.T @ H @ J @ v, rtol=1e-10, atol=1e-13)
    e = co.BPTT()(net, batch, loss)
    assert torch.allclose(c.gradient(), c.packing.pack(e.gradient), rtol=1e-12, atol=1e-14)
    assert c.value == pytest.approx(float(e.loss), rel=1e-12)


def test_many_outputs_give_the_same_products():
    """Beyond those whose Hessian is kept in blocks."""
    found = []
    for few in (curvature.FEW, 0):
        net, batch = problem("elman", "every", {}, "cross-entropy", "softmax", outputs=5)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(curvature, "FEW", few)
            c = Curvature(net, batch, "cross-entropy")
            v = torch.linspace(-1, 1, len(c.gradient()), dtype=F64)
            found.append(c.gauss_newton(v))
    assert torch.allclose(*found, rtol=1e-12, atol=1e-15)
    assert float(found[0].norm()) > 1e-3


def test_structural_damping_below_the_range_of_float32_is_none():
    """A factor that nothing can be divided by in float32."""
    net, batch = problem("elman", "last", {}, weighted=False)
    net, batch = net.float(), batch.to(torch.float32, "cpu")
    c = Curvature(net, batch, "squared")
    v = torch.randn(len(c.gradient()))
    assert torch.equal(c.product(v, 1.0, 1e-38), c.gauss_newton(v))
    assert torch.allclose(c.product(v, 0.0, 1e-24), 1e-24 * c.structural(v), rtol=1e-5, atol=0)


def test_a_trajectory_at_hand_is_used():
    net, batch = problem("lstm", "every", {"x0": "learned"})
    e = co.BPTT()(net, batch, "squared")
    v = torch.randn(sum(p.numel() for p in net.parameters()), dtype=F64)
    ours, again = (Curvature(net, batch, "squared", run) for run in (e.trajectory, None))
    assert torch.equal(ours.product(v, 1.0, 0.3), again.product(v, 1.0, 0.3))
    assert not ours.weights.multiplied.requires_grad


def test_an_x0_of_the_batch_replaces_a_learned_one():
    """x0 of the batch in place of a learned one: that has no part in it."""
    net, batch = problem("elman", "last", {"x0": "learned"})
    batch = dataclasses.replace(batch, x0=torch.randn(3, 3, dtype=F64))
    c = Curvature(net, batch, "squared")
    v = torch.randn(len(c.gradient()), dtype=F64)
    for name, along in c.packing.unpack(c.product(v, 1.0, 0.5)).items():
        assert bool(along.any()) == (name != "x0"), name
    J = jacobian(net, batch, lambda r: r.a_rows, x0=batch.x0)
    H = torch.autograd.functional.hessian(
        lambda a: batch.mean(c.judge.sample_losses(a)), c.pre.detach()
    ).reshape(len(J), -1)
    assert torch.allclose(c.gauss_newton(v), J.T @ H @ J @ v, rtol=1e-10, atol=1e-13)


def test_the_hessian_is_the_derivative_of_the_gradient():
    net, batch = problem("gru", "every", {})
    c = Curvature(net, batch, "squared")
    v, w = (torch.randn(len(c.gradient()), dtype=F64) for _ in range(2))
    assert float(c.hessian(v) @ w) == pytest.approx(float(c.hessian(w) @ v), rel=1e-10)
    step, ours, moved = 1e-6, c.hessian(v), []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(net.parameters(), c.packing.unpack(v).values(), strict=True):
                p.add_(d, alpha=sign * step)
        moved.append(Curvature(net, batch, "squared").gradient())
        with torch.no_grad():
            for p, d in zip(net.parameters(), c.packing.unpack(v).values(), strict=True):
                p.add_(d, alpha=-sign * step)
    assert torch.allclose(ours, (moved[0] - moved[1]) / (2 * step), rtol=1e-6, atol=1e-8)


def test_the_diagonal_is_right_on_average():
    net, batch = problem("elman", "every", {}, "cross-entropy", "softmax")
    c = Curvature(net, batch, "cross-entropy")
    n = len(c.gradient())
    exact = torch.stack([c.gauss_newton(e)[i] for i, e in enumerate(torch.eye(n, dtype=F64))])
    found = torch.stack([c.diagonal(seed=s) for s in range(300)])
    error = found.std(0) / 300**0.5
    assert bool(((found.mean(0) - exact).abs() < 5 * error + 1e-12).all())
    assert float((found.mean(0) - exact).abs().max() / exact.max()) < 0.2


@pytest.mark.parametrize("frozen", ["W", "R", "b", "V"])
@pytest.mark.parametrize("cell", ["elman", "gru", "lstm"])
def test_frozen_weights_are_no_part_of_it(cell, frozen):
    net, batch = problem(cell, "last", {})
    net.get_parameter(frozen).requires_grad_(False)
    c = Curvature(net, batch, "squared")
    v = torch.randn(len(c.gradient()), dtype=F64)
    assert len(v) == sum(p.numel() for p in net.parameters() if p.requires_grad)
    J = jacobian(net, batch, lambda r: r.a_rows)
    kept = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in net.parameters()])
    J = J[:, kept]
    H = torch.autograd.functional.hessian(
        lambda a: batch.mean(c.judge.sample_losses(a)), c.pre.detach()
    ).reshape(len(J), -1)
    assert torch.allclose(c.gauss_newton(v), J.T @ H @ J @ v, rtol=1e-10, atol=1e-13)


def test_what_has_no_curvature_is_refused():
    net, batch = problem("elman", "last", {}, "squared", "sigmoid")
    with pytest.raises(co.Unsupported, match="convex in the pre-output"):
        Curvature(net, batch, "squared")
    with pytest.raises(co.Unsupported, match="convex"):
        Curvature(
            problem("elman", "last", {})[0], batch, lambda y_hat, y: (y_hat - y).square().sum(-1)
        )
    stepped, batch = problem("elman", "last", {"engine": "autograd"})
    c = Curvature(stepped, batch, "squared")
    with pytest.raises(co.Unsupported, match="formula"):
        c.gauss_newton(c.gradient())
    stack = co.Stack(["elman"], inputs=2, hidden=3, outputs=2, dtype=F64)
    with pytest.raises(
        co.Unsupported, match=r"that of a co\.Network or a co\.Chain; got Stack"
    ) as refused:
        Curvature(stack, batch, "squared")
    assert "\n" not in str(refused.value)
    dropping, batch = problem("elman", "last", {"dropout": 0.5})
    with pytest.raises(co.Unsupported, match=r"curvature: with dropout.*net\.eval"):
        Curvature(dropping, batch, "squared")
    assert Curvature(dropping.eval(), batch, "squared").gradient().any()

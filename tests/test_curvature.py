"""Gauss-Newton, structural damping and Hessian products against the matrices themselves, from torch's own differentiation."""

import pytest
import torch

import coadjoint as co
from coadjoint.curvature import Curvature

F64 = torch.float64
PAIRS = [
    ("squared", "identity"),
    ("cross-entropy", "softmax"),
    ("binary-cross-entropy", "sigmoid"),
    ("huber", "identity"),
]
CASES = [
    ("elman", "last", {}), ("elman", "every", {"deep": (4,)}), ("elman", "attention", {"x0": "learned"}),
    ("leaky", "every", {"skip": True}), ("rate", "tilted", {}), ("lstm", "last", {"x0": "learned"}), ("lstm", "every", {}),
    ("gru", "every", {"structure": "orthogonal"}), ("peephole", "last", {}), ("scrn-learned", "every", {"skip": True}),
    ("antisymmetric-gated", "every", {}), ("exponential", "every", {}), ("lipschitz", "last", {}), ("cornn", "every", {}),
    ("unicornn", "last", {}), ("inverse", "every", {}), ("mingru", "last", {}), ("minlstm", "every", {}), ("lru", "last", {}),
]  # fmt: skip


def problem(cell, readout, options, loss="squared", output="identity"):
    torch.manual_seed(0)
    net = co.Network(cell, inputs=2, hidden=3, outputs=2, readout=readout, output=output, dtype=F64, **options)
    with torch.no_grad():
        if isinstance(net.x0, torch.nn.Parameter):
            net.x0.normal_()
    T, B = 5, 3
    lead = (T, B) if readout == "every" else (B,)
    y = torch.rand(*lead, 2, dtype=F64)
    y = torch.randint(0, 2, lead) if loss == "cross-entropy" else y
    mask = torch.rand(lead, dtype=F64).round() + 0.5 if readout == "every" else None
    weight = torch.tensor([1.0, 2.0, 0.5], dtype=F64)
    return net, co.Batch(torch.randn(T, B, 2, dtype=F64), y, torch.tensor([5, 3, 4]), mask, weight, reduce="mean")


def jacobian(net, batch, of):
    """d of(trajectory) / d weights, one row for each entry."""
    names, values = zip(*net.named_parameters(), strict=True)
    run = lambda *theta: of(
        torch.func.functional_call(net, dict(zip(names, theta, strict=True)), (batch.u, batch.lengths))
    )
    found = torch.autograd.functional.jacobian(run, values)
    return torch.cat([J.flatten(found[0].dim() - values[0].dim()).reshape(-1, p.numel()) for J, p in zip(found, values, strict=True)], 1)  # fmt: skip


@pytest.mark.parametrize(("cell", "readout", "options"), CASES)
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_products_are_those_of_the_matrices(cell, readout, options, engine):
    net, batch = problem(cell, readout, {**options, "engine": engine})
    c = Curvature(net, batch, "squared")
    v = torch.randn(sum(p.numel() for p in net.parameters()), dtype=F64)
    J, Jx = (jacobian(net, batch, of) for of in (lambda r: r.pre, lambda r: r.run.x))
    H = torch.autograd.functional.hessian(lambda a: batch.mean(c.judge.losses(a)), c.pre.detach())
    G = J.T @ H.reshape(len(J), -1) @ J
    rows = c.run.layout.rows
    weight = batch.weight[c.run.layout.sample] / rows.B
    each = torch.cat([torch.zeros(rows.B, dtype=F64), weight])[:, None].expand(c.run.run.x.shape).reshape(-1, 1)
    S = Jx.T @ (each * Jx)
    for ours, matrix in ((c.gauss_newton, G), (c.structural, S)):
        size = matrix.abs().max()
        assert float(size) > 1e-6
        assert float((ours(v) - matrix @ v).abs().max()) < 1e-10 * max(1.0, float(size))
    both = c.product(v, 0.5, 2.0)
    assert torch.allclose(both, 0.5 * (G @ v) + 2 * (S @ v), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("loss", "output"), PAIRS)
@pytest.mark.parametrize("readout", ["last", "every"])
def test_losses(loss, output, readout):
    net, batch = problem("elman", readout, {}, loss, output)
    c = Curvature(net, batch, loss)
    v = torch.randn(len(c.gradient()), dtype=F64)
    J = jacobian(net, batch, lambda r: r.pre)
    H = torch.autograd.functional.hessian(lambda a: batch.mean(c.judge.losses(a)), c.pre.detach()).reshape(len(J), -1)
    assert torch.allclose(c.gauss_newton(v), J.T @ H @ J @ v, rtol=1e-10, atol=1e-13)
    e = co.BPTT()(net, batch, loss)
    assert torch.allclose(c.gradient(), c.packing.pack(e.gradient), rtol=1e-12, atol=1e-14)
    assert c.value == pytest.approx(float(e.loss), rel=1e-12)


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


def test_frozen_weights_are_no_part_of_it():
    net, batch = problem("elman", "last", {})
    net.R.requires_grad_(False)
    c = Curvature(net, batch, "squared")
    v = torch.randn(len(c.gradient()), dtype=F64)
    assert len(v) == sum(p.numel() for p in net.parameters() if p.requires_grad)
    J = jacobian(net, batch, lambda r: r.pre)
    kept = torch.cat([torch.full((p.numel(),), p.requires_grad) for p in net.parameters()])
    J = J[:, kept]
    H = torch.autograd.functional.hessian(lambda a: batch.mean(c.judge.losses(a)), c.pre.detach()).reshape(len(J), -1)
    assert torch.allclose(c.gauss_newton(v), J.T @ H @ J @ v, rtol=1e-10, atol=1e-13)


def test_what_is_refused():
    net, batch = problem("elman", "last", {}, "squared", "sigmoid")
    with pytest.raises(co.Unsupported, match="convex in the pre-output"):
        Curvature(net, batch, "squared")
    with pytest.raises(co.Unsupported, match="convex"):
        Curvature(problem("elman", "last", {})[0], batch, lambda y_hat, y: (y_hat - y).square().sum(-1))
    stepped, batch = problem("elman", "last", {"engine": "autograd"})
    c = Curvature(stepped, batch, "squared")
    with pytest.raises(co.Unsupported, match="formula"):
        c.gauss_newton(c.gradient())
    stack = co.Stack(["elman"], inputs=2, hidden=3, outputs=2, dtype=F64)
    with pytest.raises(co.Unsupported, match="that of a co"):
        Curvature(stack, batch, "squared")

"""Diagnostics of chains, layer by layer.

The oracle is a dense Jacobian of every map, by torch.func in float64 through formulas written out
here; products, singular values and QR steps are numpy's.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import coadjoint as co

F64 = torch.float64
KEPT = [
    "temporal",
    "decay",
    "singular-values",
    "lyapunov",
    "saturation",
    "sensitivity",
    "stable-rank",
    "noise",
    "along",
    "landscape",
]


def mlp(widths=(6, 6, 6), outputs=4, **more):
    options = {"output": "softmax", "dtype": F64, "seed": 0, **more}
    return co.Chain.mlp(5, list(widths), outputs, **options)


def cnn():
    return co.Chain.cnn((1, 6, 6), [2], 3, output="softmax", dtype=F64, seed=0)


def tied():
    return co.Chain.autoencoder(5, [4, 2], dtype=F64, seed=0, output="sigmoid")


def sequential():
    torch.manual_seed(0)
    maps = (nn.Linear(5, 6), nn.ReLU(inplace=True), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4))
    return co.Chain(nn.Sequential(*maps).to(F64), output="softmax")


KINDS = {"mlp": mlp, "cnn": cnn, "tied": tied, "sequential": sequential}


def evaluated(net, B=7, dtype=F64):
    draw = torch.Generator().manual_seed(1)
    shape = (1, 6, 6) if isinstance(net.maps[0], co.maps.Conv) else (5,)
    x = torch.randn(B, *shape, dtype=F64, generator=draw).to(dtype)
    y = torch.randint(3, (B,), generator=draw)
    loss = "cross-entropy"
    if net.output == "sigmoid":
        y = torch.rand(B, 5, dtype=F64, generator=draw).to(dtype)
        loss = "binary-cross-entropy"
    return co.BP()(net, co.Batch(x, y), loss)


PSI = {"tanh": torch.tanh, "identity": lambda z: z, "relu": lambda z: z.clamp(min=0)}
PHI = {"softmax": lambda a: a.softmax(-1), "sigmoid": torch.sigmoid, "identity": lambda a: a}


def formula(f):
    """A map of one sample, without the package and without torch's modules."""
    p = {name: q.detach().double() for name, q in f.named_parameters()}
    if isinstance(f, co.maps.Tied):
        return lambda x: PSI[f.activation](p["W"].T @ x + p["b"])
    if isinstance(f, co.maps.Dense):
        return lambda x: PSI[f.activation](p["W"] @ x + p["b"])
    if isinstance(f, co.maps.Conv):
        return lambda x: PSI[f.activation](functional.conv2d(x[None], p["W"], p["b"])[0])
    if isinstance(f, co.maps.MaxPool):
        return lambda x: functional.max_pool2d(x[None], 2)[0]
    if isinstance(f, co.maps.Flatten):
        return lambda x: x.flatten()
    if isinstance(f, nn.Linear):
        return lambda x: p["weight"] @ x + p["bias"]
    if isinstance(f, nn.LayerNorm):
        return lambda x: (
            p["weight"] * (x - x.mean()) / ((x - x.mean()).square().mean() + f.eps).sqrt()
            + p["bias"]
        )
    return {nn.ReLU: PSI["relu"], nn.Tanh: torch.tanh}[type(f)]


def dense_jacobians(e, samples=None):
    """For each sample the Jacobians of all maps and that of phi, as matrices."""
    found = []
    for x in e.batch.u[:samples].double():
        jacobians = []
        for f in e.network.maps:
            step = formula(f)
            J = torch.func.jacrev(step)(x)
            x_next = step(x)
            jacobians.append(J.reshape(x_next.numel(), x.numel()).numpy())
            x = x_next
        phi = torch.func.jacrev(PHI[e.network.output])(x).numpy()
        found.append((jacobians, phi))
    return found


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_examine_shows_what_applies(kind):
    e = evaluated(KINDS[kind]())
    found = co.diagnostics.examine(e)
    assert list(found.found) == KEPT
    assert set(found.declined) == {"spectrum", "bounds", "paths"}
    assert all("\n" not in why for why in found.declined.values())
    words = " ".join(f"{c.title} {c.about} {c.x} {c.y}" for c in found.charts().values())
    assert "time" not in words
    assert "past" not in words
    assert "per step" not in words
    assert not any(row[2].endswith(("per step", "steps")) for row in found.table()[1])
    arrays = found.arrays()
    assert "stable-rank.each" in arrays
    assert co.diagnostics.plot(found.found["stable-rank"]) is not None


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("end", [None, 2])
def test_singular_values_are_those_of_dense_products(kind, end):
    e = evaluated(KINDS[kind]())
    found = co.diagnostics.singular_values(e, samples=3, end=end)
    L = end or len(e.network.maps)
    jacobians = [J[:L] for J, _ in dense_jacobians(e, 3)]
    assert list(found.steps) == list(range(L + 1))
    assert found.axis.step == "layer"
    n = jacobians[0][-1].shape[0]
    assert found.logs.shape == (L + 1, n)
    assert (found.logs[0] == 0).all()
    for s in range(1, L + 1):
        logs = []
        for J in jacobians:
            P = np.eye(n)
            for i in range(1, s + 1):
                P = P @ J[L - i]
            logs.append(np.linalg.svd(P, compute_uv=False))
        values = np.array(logs)
        k = values.shape[1]
        keep = (values > 1e-9 * values.max()).all(0)
        expected = np.log(values[:, keep]).mean(0)
        np.testing.assert_allclose(found.logs[s, :k][keep], expected, rtol=1e-10, atol=1e-10)
        assert np.isnan(found.logs[s, k:]).all()
    assert found.slope == pytest.approx(float(np.log(values[:, 0]).mean()) / L, rel=1e-10)


def test_singular_values_of_a_deep_chain_do_not_underflow_and_keep_their_digits_in_float32():
    net = co.Chain.mlp(4, [4] * 300, 4, gain=0.3, seed=0, activation="identity", bias=False)
    e = evaluated_vectors(net, 4)
    found = co.diagnostics.singular_values(e, samples=2)
    expected = []
    size = 0.0
    P = np.eye(4)
    for f in reversed(net.maps):
        P = P @ f.W.detach().double().numpy()
        largest = np.abs(P).max()
        size += math.log(largest)
        P /= largest
    expected = np.log(np.linalg.svd(P, compute_uv=False)) + size
    np.testing.assert_allclose(found.logs[-1], expected, rtol=1e-9)
    assert found.logs[-1].max() < -300
    lyapunov = co.diagnostics.lyapunov(e, samples=2)
    assert float(lyapunov.exponents.sum()) == pytest.approx(expected.sum() / 301, rel=1e-9)


def evaluated_vectors(net, n):
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(5, n, generator=draw)
    return co.BP()(net, co.Batch(x, torch.randn(5, n, generator=draw)), "squared")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_lyapunov_exponents_are_those_of_dense_qr_steps(kind):
    e = evaluated(KINDS[kind]())
    found = co.diagnostics.lyapunov(e, samples=3)
    each = []
    for J, _ in dense_jacobians(e, 3):
        n = J[0].shape[1]
        k = min([n, *(len(A) for A in J)])
        Q = np.eye(n)
        if k < n:
            Q = np.linalg.qr(np.random.default_rng(0).standard_normal((n, k)))[0]
        P = Q
        for A in J:
            P = A @ P
        # Products of the diagonal entries of R_L ... R_1, from volumes: no QR step by step.
        rank = np.linalg.matrix_rank(P)
        volumes = [0.0]
        for m in range(1, rank + 1):
            volumes.append(0.5 * np.linalg.slogdet(P[:, :m].T @ P[:, :m])[1])
        exponents = np.full(k, -math.inf)  # of what relu or a normalisation maps to zero
        exponents[:rank] = np.sort(np.diff(volumes) / len(J))[::-1]
        each.append(exponents)
    np.testing.assert_allclose(found.each, np.array(each), rtol=1e-6, atol=1e-8)
    assert found.axis.step == "layer"


def test_a_dead_layer_has_exponents_of_minus_infinity():
    net = co.Chain(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).to(F64)
    with torch.no_grad():
        net.maps[0].bias.fill_(-1e6)
    e = evaluated_vectors(net.float(), 3)
    assert (co.diagnostics.lyapunov(e).exponents == -math.inf).all()
    found = co.diagnostics.saturation(e)
    assert list(found.t) == [2]
    assert list(found.share) == [1.0]
    assert np.isnan(co.diagnostics.stable_rank(e).mean)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_sensitivity_and_stable_rank_are_those_of_dense_jacobians(kind):
    e = evaluated(KINDS[kind]())
    sensitivity = co.diagnostics.sensitivity(e)
    rank = co.diagnostics.stable_rank(e)
    L = len(e.network.maps)
    assert list(sensitivity.t) == list(range(L + 1))
    for b, (J, phi) in enumerate(dense_jacobians(e)):
        P = phi
        logs = [math.log(np.linalg.norm(P))]
        for A in reversed(J):
            P = P @ A
            logs.append(math.log(np.linalg.norm(P)))
        np.testing.assert_allclose(sensitivity.log_norms[:, b], logs[::-1], rtol=1e-9, atol=1e-9)
        expected = np.linalg.norm(P) ** 2 / np.linalg.norm(P, 2) ** 2
        assert rank.each[b] == pytest.approx(expected, rel=1e-9)
    independent = len(phi) - 1 if e.network.output == "softmax" else len(phi)
    assert rank.largest == min(independent, e.batch.u[0].numel())
    assert rank.mean == pytest.approx(rank.each.mean())


def test_the_stable_rank_of_a_chain_that_underflows_is_known():
    net = co.Chain.mlp(4, [4] * 300, 4, gain=0.3, seed=0, activation="identity", bias=False)
    e = evaluated_vectors(net, 4)
    P = np.eye(4)
    for f in net.maps:
        P = f.W.detach().double().numpy() @ P
        P /= np.abs(P).max()
    expected = np.linalg.norm(P) ** 2 / np.linalg.norm(P, 2) ** 2
    np.testing.assert_allclose(co.diagnostics.stable_rank(e).each, expected, rtol=1e-4)


@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("cell", ["elman", "gru"])
def test_the_stable_rank_of_recurrent_networks(cell, readout):
    torch.manual_seed(0)
    net = co.Network(
        cell, inputs=2, hidden=4, outputs=3, readout=readout, output="softmax", dtype=F64
    )
    u = torch.randn(6, 3, 2, dtype=F64)
    lengths = torch.tensor([6, 4, 2])
    y = torch.zeros(6, 3, dtype=torch.long) if readout == "every" else torch.zeros(3).long()
    e = co.BPTT()(net, co.Batch(u, y, lengths=lengths), "cross-entropy")
    found = co.diagnostics.stable_rank(e)
    for b, T in enumerate(lengths.tolist()):
        J = torch.zeros(3, T * 2, dtype=F64)
        v = u[:T, b : b + 1].clone().requires_grad_()
        y_hat = net(v).y_hat
        last = y_hat[-1, 0] if readout == "every" else y_hat[0]
        for k in range(3):
            J[k] = torch.autograd.grad(last[k], v, retain_graph=True)[0].flatten()
        expected = float(J.norm() ** 2 / torch.linalg.matrix_norm(J, 2) ** 2)
        assert found.each[b] == pytest.approx(expected, rel=1e-9)
    assert found.largest == 2
    assert found.figures()[0].unit == "of 2"


def test_saturation_counts_flat_activations():
    net = co.Chain(
        co.maps.Dense(5, 6, "tanh", dtype=F64),
        nn.Linear(6, 6, dtype=F64),
        nn.ReLU(),
        co.maps.Activation("sigmoid"),
        co.maps.Dense(6, 4, "identity", dtype=F64),
        output="softmax",
    )
    with torch.no_grad():
        net.maps[0].W.mul_(4)
    e = evaluated(net)
    found = co.diagnostics.saturation(e)
    x = e.trajectory.x
    flat = [x[1].abs() > math.sqrt(0.95), x[2] <= 0, 4 * x[4] * (1 - x[4]) < 0.05]
    assert list(found.t) == [1, 3, 4]
    np.testing.assert_allclose(found.share, [float(f.double().mean()) for f in flat])
    units = torch.cat([f.double().mean(0) for f in flat], 0)
    np.testing.assert_allclose(found.units, units.numpy())
    assert found.chart().x == "layer i"
    with pytest.raises(co.Unsupported, match="none of the maps"):
        co.diagnostics.saturation(evaluated(co.Chain(nn.Linear(5, 4, dtype=F64), output="softmax")))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_components_and_noise_by_layer(kind):
    e = evaluated(KINDS[kind]())
    components = co.diagnostics.temporal(e)
    norms = e.components().norms()["joint"].numpy()
    numbers = [i for i, f in enumerate(e.network.maps, 1) if any(True for _ in f.parameters())]
    assert list(components.k) == numbers
    np.testing.assert_allclose(np.exp(components.logs["joint"]), norms[components.k - 1])
    noise = co.diagnostics.noise(e)
    each = co.diagnostics.per_sample(e)
    assert list(noise.layers) == [str(i) for i in numbers]
    for i, names in enumerate(e.network.parameter_names(), 1):
        if not names:
            continue
        g = torch.cat([each[name].flatten(1) for name in names.values()], 1)
        spread = float(g.var(0).sum())
        signal = float(g.mean(0).square().sum()) - spread / len(g)
        scale = spread / signal if signal > 0 else math.inf
        assert noise.layers[str(i)] == pytest.approx(scale, rel=1e-9)


def test_the_landscape_of_one_layer_moves_that_layer():
    e = evaluated(mlp())
    found = co.diagnostics.landscape(e, points=3, layer=2)
    assert found.loss[1, 1] == pytest.approx(float(e.loss), rel=1e-12)
    draw = torch.Generator().manual_seed(0)
    theta = {n: p.detach().clone() for n, p in e.network.named_parameters()}
    first = {}
    for name in ("maps.1.W", "maps.1.b"):
        first[name] = co.diagnostics.normalised_direction(theta[name], draw)
    moved = theta | {n: theta[n] + d for n, d in first.items()}
    assert found.loss[2, 1] == pytest.approx(co.diagnostics.loss_at(e, moved), rel=1e-12)
    with pytest.raises(co.InputError, match=r"layer must lie in 1\.\.4; got 5"):
        co.diagnostics.landscape(e, layer=5)
    with pytest.raises(co.InputError, match="layer 2 has no parameters"):
        co.diagnostics.landscape(evaluated(cnn()), layer=2)


def test_what_does_not_apply_is_refused_by_name():
    e = evaluated(mlp())
    with pytest.raises(co.InputError, match=r"end must be a layer of the chain, 1\.\.4; got 9"):
        co.diagnostics.singular_values(e, end=9)
    with pytest.raises(co.InputError, match=r"end must be a layer of the chain, 1\.\.4; got 0"):
        co.diagnostics.lyapunov(e, end=0)
    recurrent = co.Network("elman", inputs=1, hidden=2, outputs=1)
    other = co.BPTT()(recurrent, co.Batch(torch.ones(3, 4, 1), torch.ones(4, 1)), "squared")
    for of in (co.diagnostics.singular_values, co.diagnostics.lyapunov):
        with pytest.raises(co.InputError, match=r"end is a layer of a co\.Chain"):
            of(other, end=2)
    with pytest.raises(co.InputError, match=r"layer is one of a co\.Chain"):
        co.diagnostics.landscape(other, layer=1)
    with pytest.raises(co.Unsupported, match="a chain has none"):
        co.diagnostics.jacobians(e)
    dropping = co.Chain(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 4), output="softmax").to(F64)
    found = co.diagnostics.examine(evaluated(dropping))
    refused = {"temporal", "singular-values", "lyapunov", "saturation", "sensitivity"}
    assert set(found.declined) >= refused | {"stable-rank"}
    assert all("dropout=0.5" in found.declined[name] for name in refused)
    dropping.eval()
    assert set(co.diagnostics.examine(evaluated(dropping)).found) >= refused - {"saturation"}

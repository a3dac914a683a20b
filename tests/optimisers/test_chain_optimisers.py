"""Optimisers of chains: curvature, Hessian-free steps and Galvan's direction over layers.

The oracle is dense: Jacobians of the states by the weights, by torch.func in float64, through a
forward pass that is written out here.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import coadjoint as co
from coadjoint.optimisers.recipes import OPTIMISERS

F64 = torch.float64


def mlp(output="softmax", **more):
    return co.Chain.mlp(5, [6, 6, 6, 4], 3, output=output, dtype=F64, seed=0, **more)


def cnn(output="softmax"):
    return co.Chain.cnn((1, 6, 6), [2], 3, output=output, dtype=F64, seed=0)


def tied(output="identity"):
    return co.Chain.autoencoder(5, [4, 2], dtype=F64, seed=0, output=output)


def sequential(output="softmax"):
    torch.manual_seed(0)
    maps = (nn.Linear(5, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Identity(), nn.Linear(6, 3))
    return co.Chain(nn.Sequential(*maps).to(F64), output=output)


KINDS = {"mlp": mlp, "cnn": cnn, "tied": tied, "sequential": sequential}


def batch_for(net, B=7, seed=0, **more):
    draw = torch.Generator().manual_seed(seed)
    shape = (1, 6, 6) if isinstance(net.maps[0], co.maps.Conv) else (5,)
    x = torch.randn(B, *shape, dtype=F64, generator=draw)
    y = torch.randint(3, (B,), generator=draw)
    if net.output == "identity":
        y = torch.randn(B, net.outputs, dtype=F64, generator=draw)
    return co.Batch(x, y, **more)


def loss_for(net):
    return "squared" if net.output == "identity" else "cross-entropy"


class Dense:
    """Dense Jacobians and losses of a chain by torch.func: the weights are one vector."""

    def __init__(self, net, batch):
        self.net = net
        self.batch = batch
        self.parameters = dict(net.named_parameters())
        self.theta = torch.cat([p.detach().flatten() for p in self.parameters.values()])

    def weights(self, theta):
        sizes = [p.numel() for p in self.parameters.values()]
        parts = theta.split(sizes)
        named = zip(self.parameters.items(), parts, strict=True)
        return {name: part.view(p.shape) for (name, p), part in named}

    def states(self, theta):
        weights = self.weights(theta)
        x = self.batch.u
        states = []
        for f in self.net.maps:
            own = {}
            for name, p in f.named_parameters():
                key = next(k for k, q in self.parameters.items() if q is p)
                own[name] = weights[key]
            if isinstance(f, co.maps.Dense | co.maps.Tied):
                W = own["W"].T if isinstance(f, co.maps.Tied) else own["W"]
                z = x @ W.T + own["b"]
                x = torch.tanh(z) if f.activation == "tanh" else z
            elif isinstance(f, nn.LayerNorm):  # by hand: torch.func's second derivative is wrong
                centred = x - x.mean(-1, keepdim=True)
                size = (centred.square().mean(-1, keepdim=True) + f.eps).sqrt()
                x = centred / size * own["weight"] + own["bias"]
            elif isinstance(f, nn.ReLU):
                x = x.clamp(min=0)
            else:
                x = torch.func.functional_call(f, own, (x,))
            states.append(x.flatten(1))
        return torch.cat(states, 1), states[-1]

    def losses(self, a):
        y = self.batch.y
        if self.net.output == "identity":
            return (a - y).square().sum(-1)
        return torch.nn.functional.cross_entropy(a, y, reduction="none")

    def shares(self):
        B = len(self.batch.u)
        weight = self.batch.weight
        return torch.ones(B, dtype=F64) / B if weight is None else weight / B

    def mean(self, theta):
        return (self.shares() * self.losses(self.states(theta)[1])).sum()

    def gauss_newton(self):
        J = torch.func.jacrev(lambda theta: self.states(theta)[1])(self.theta)
        a = self.states(self.theta)[1]
        n = J.shape[-1]
        G = torch.zeros(n, n, dtype=F64)
        H = torch.func.hessian(lambda a: (self.shares() * self.losses(a)).sum())(a)
        for j in range(len(a)):
            G += J[j].T @ H[j, :, j] @ J[j]
        return G

    def structural(self):
        J = torch.func.jacrev(lambda theta: self.states(theta)[0])(self.theta)
        return torch.einsum("b,bki,bkj->ij", self.shares(), J, J)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_products_are_those_of_dense_matrices(kind, weighted):
    net = KINDS[kind]()
    weight = torch.linspace(0.5, 2.0, 7, dtype=F64) if weighted else None
    b = batch_for(net, weight=weight)
    truth = Dense(net, b)
    c = co.curvature.Curvature(net, b, loss_for(net))
    factor = c.value / float(truth.mean(truth.theta))  # "squared" may be halved
    G = factor * truth.gauss_newton()
    S = truth.structural()
    v = torch.randn(len(truth.theta), dtype=F64, generator=torch.Generator().manual_seed(1))

    def close(ours, expected):
        assert torch.allclose(ours, expected, rtol=1e-11, atol=1e-12 * float(expected.abs().max()))

    close(c.gradient(), factor * torch.func.grad(truth.mean)(truth.theta))
    close(c.gauss_newton(v), G @ v)
    close(c.structural(v), S @ v)
    close(c.product(v, 0.7, 0.3), 0.7 * G @ v + 0.3 * S @ v)
    close(c.product(v, 1.0, 1e-25), G @ v)
    close(c.hessian(v), factor * torch.func.hessian(truth.mean)(truth.theta) @ v)
    da, dx = c.push(v)
    J = torch.func.jacrev(lambda theta: truth.states(theta)[0])(truth.theta)
    close(dx, J @ v)
    close(da, dx[:, -da.shape[1] :])


def test_the_diagonal_is_unbiased():
    net = mlp()
    b = batch_for(net)
    c = co.curvature.Curvature(net, b, "cross-entropy")
    exact = Dense(net, b).gauss_newton().diagonal()
    ours = c.diagonal(probes=4000)
    assert float((ours - exact).norm() / exact.norm()) < 0.1


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_hessian_free_steps_lower_the_loss(kind):
    net = KINDS[kind]()
    b = batch_for(net, B=20)
    hf = co.optimisers.hessian_free(structural=0.1)
    reports = [hf.step(net, b, loss_for(net)) for _ in range(5)]
    assert all(report.after < report.before for report in reports)
    assert reports[-1].after < 0.7 * reports[0].before


def test_hessian_free_steps_of_a_penalised_objective_and_of_another_batch():
    net = mlp()
    b = batch_for(net, B=20)
    hf = co.optimisers.hessian_free()
    method = co.Penalised("log-ratio", 0.1)
    report = hf.step(net, b, "cross-entropy", batch_for(net, 8, seed=2), method)
    assert report.after < report.before
    assert hf.step(net, b, "cross-entropy", method=method).after < report.after


def test_curvature_refuses_what_has_none():
    net = mlp()
    b = batch_for(net)
    with pytest.raises(co.Unsupported, match="convex in the pre-output"):
        co.curvature.Curvature(net, b, "squared")
    dropping = co.Chain(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3), output="softmax").to(F64)
    with pytest.raises(co.Unsupported, match=r"curvature: with dropout=0\.5"):
        co.curvature.Curvature(dropping, b, "cross-entropy")
    co.curvature.Curvature(dropping.eval(), b, "cross-entropy").gradient()
    c = co.curvature.Curvature(net, b, "cross-entropy")
    with torch.no_grad():
        net.maps[0].W.add_(1)
    with pytest.raises(co.InputError, match="has changed since"):
        c.gradient()


def test_frozen_weights_are_left_out():
    net = mlp()
    net.maps[0].requires_grad_(False)
    b = batch_for(net)
    c = co.curvature.Curvature(net, b, "cross-entropy")
    assert not any(name.startswith("maps.0") for name in c.packing.names)
    g = c.gradient()
    assert torch.equal(c.push(g)[1][:, :6], torch.zeros(7, 6, dtype=F64))


# Galvan's direction


def layer_gradients(net, b):
    """grad_i of each map by autograd: the gradient with copies of the other maps' weights."""
    chain = Dense(net, b)
    parts = []
    for i, f in enumerate(net.maps):
        x = b.u
        own = {}
        for j, g in enumerate(net.maps):
            theta = {n: p.detach().clone() for n, p in g.named_parameters()}
            if j == i:
                own = {n: p.requires_grad_() for n, p in theta.items()}
            x = torch.func.functional_call(g, theta, (x,))
        mean = (chain.shares() * chain.losses(x.flatten(1))).sum()
        grads = torch.autograd.grad(mean, list(own.values())) if own else ()
        names = net.parameter_names()[i]
        parts.append({names[n]: g for n, g in zip(own, grads, strict=True)})
        assert f is net.maps[i]
    return parts


@pytest.mark.parametrize("name", ["temporal", "layerwise"])
@pytest.mark.parametrize("kind", ["mlp", "cnn", "tied"])
def test_the_direction_mixes_the_layers_at_norm_one(kind, name):
    net = KINDS[kind]()
    weight = torch.linspace(0.5, 2.0, 7, dtype=F64)
    b = batch_for(net, weight=weight)
    e = co.BP()(net, b, loss_for(net))
    d = co.optimisers.DIRECTIONS[name](e, np.random.default_rng(3))
    parts = [part for part in layer_gradients(net, b) if part]
    beta = np.random.default_rng(3).dirichlet(np.ones(len(parts)))
    mixture = {n: torch.zeros_like(g) for n, g in e.gradient.items()}
    for part, share in zip(parts, beta, strict=True):
        size = math.sqrt(sum(float(g.square().sum()) for g in part.values()))
        for n, g in part.items():
            mixture[n] += share * g / size
    length = math.sqrt(sum(float(g.square().sum()) for g in mixture.values()))
    for n, g in mixture.items():
        assert torch.allclose(d[n], g * e.norm / length, rtol=1e-10, atol=1e-14), n


def test_the_direction_reaches_layers_whose_costates_underflow():
    """200 layers that shrink by 0.3: the first ones' components are below float32's range."""
    torch.manual_seed(0)
    net = co.Chain.mlp(4, [4] * 200, 3, output="softmax", gain=0.3, seed=0)
    b = co.Batch(torch.randn(5, 4), torch.randint(3, (5,)))
    e = co.BP()(net, b, "cross-entropy")
    assert float(e.gradient["maps.0.W"].norm()) == 0
    d = co.optimisers.temporal(e, np.random.default_rng(0))
    assert float(d["maps.0.W"].norm()) > 0
    size = math.sqrt(sum(float(g.double().square().sum()) for g in d.values()))
    assert size == pytest.approx(e.norm, rel=1e-5)


def test_the_direction_refuses_penalties_and_dropout():
    net = mlp()
    b = batch_for(net)
    e = co.Penalised("log-ratio", 0.1)(net, b, "cross-entropy")
    with pytest.raises(co.Unsupported, match="not of a penalty"):
        co.optimisers.temporal(e, np.random.default_rng(0))
    dropping = co.Chain(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3), output="softmax").to(F64)
    e = co.BP()(dropping, b, "cross-entropy")
    with pytest.raises(co.Unsupported, match=r"components by layer: with dropout=0\.5"):
        co.optimisers.temporal(e, np.random.default_rng(0))


# training


def point_of(net, b, loss):
    """A Point whose objective is the mean loss of one batch."""
    e = co.BP()(net, b, loss)

    def evaluate():
        now = co.BP()(net, b, loss)
        return float(now.objective), now.gradient

    return co.optimisers.Point(
        net,
        float(e.objective),
        e.gradient,
        e.gradient,
        lambda: evaluate()[0],
        evaluate,
        loss,
        (b,),
        lambda: b,
    )


@pytest.mark.parametrize("name", sorted(OPTIMISERS.keys() - {"ridge"}))
def test_every_optimiser_lowers_the_loss_of_a_chain(name):
    net = mlp()
    b = batch_for(net, 20)
    stepper = co.optimisers.optimiser(name).stepper(net)
    before = float(co.BP()(net, b, "cross-entropy").loss)
    lr = 1.0 if name in ("lbfgs", "hessian-free") else 1e-2
    for _ in range(5):
        stepper.step(point_of(net, b, "cross-entropy"), lr)
    assert float(co.BP()(net, b, "cross-entropy").loss) < before


def test_ridge_refuses_a_chain():
    net = mlp("identity")
    with pytest.raises(co.Unsupported) as refused:
        co.optimisers.optimiser("ridge", ridge=1e-3).stepper(net)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("rule", [co.optimisers.Armijo(), co.optimisers.Wolfe()])
def test_line_searches_lower_the_loss_at_every_step(rule):
    net = mlp()
    b = batch_for(net, 20)
    stepper = co.optimisers.sgd(1.0, rule=rule).stepper(net)
    for _ in range(4):
        point = point_of(net, b, "cross-entropy")
        stepper.step(point, 1.0)
        assert point.value() < point.objective

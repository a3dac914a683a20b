"""The four penalties on ratios of costates: which equals which, and by which factor.

The truth is a loop in float64 with costates from autograd; the sums of published code are written
out as it has them, of costates of the mean loss of the batch, lam_t / B.
"""

import numpy as np
import pytest
import torch

import build
import coadjoint as co
from coadjoint.objectives.penalties import PENALTIES

F64 = torch.float64
T, B = 7, 3


def own_loss(y_hat):
    return (y_hat**2 + 0.3 * y_hat).sum(-1)


def problem(readout, steps=T, engine="auto"):
    sizes = {"inputs": 2, "hidden": 5, "outputs": 2}
    net = build.network("elman", 5, readout=readout, x0="learned", engine=engine, **sizes)
    with torch.no_grad():
        net.W.mul_(1.5)
        net.x0.normal_()
    return net, torch.randn(steps, B, 2, dtype=F64)


def loop(net, u):
    """States, costates of each sample's own loss, and ||J_t' lam_t|| [T, B], t = 1..T."""
    x = [net.x0.expand(B, -1) + 0.0]
    for u_t in u:
        x.append(torch.tanh(x[-1] @ net.W.T + u_t @ net.R.T + net.b))
    outputs = x[1:] if net.readout == "every" else x[-1:]
    loss = sum(own_loss(h @ net.V.T + net.b_o) for h in outputs)
    lam = torch.autograd.grad(loss.sum(), x, create_graph=True)
    pairs = zip(x, x[1:], lam[1:], strict=False)
    pulled = [torch.autograd.grad(b, a, v, create_graph=True)[0] for a, b, v in pairs]
    sizes = torch.stack([v.square().sum(1).sqrt() for v in lam])
    return loss, sizes, torch.stack([v.square().sum(1).sqrt() for v in pulled])


def value(net, u, name):
    return PENALTIES[name](net(u).costates(own_loss))


def same(ours, truth, tolerance=1e-11):
    assert torch.allclose(ours.detach(), truth.detach(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("steps", [1, 2, T])
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("engine", ["reference", "eager", "cpu", "autograd"])
def test_omega_as_printed_has_its_value_and_gradient(engine, readout, steps):
    """Galvan (2016), (2.17) and (2.18), with losses at the last step and at every one."""
    net, u = problem(readout, steps, engine)
    loss, lam, pulled = loop(net, u)
    omega = (pulled / lam[1:] - 1).square().sum(0)
    names = dict(net.named_parameters())
    truth = torch.autograd.grad((loss + 0.3 * omega).mean(), list(names.values()))
    e = co.Penalised("omega-norms", 0.3)(net, co.Batch(u), own_loss)
    same(e.penalties, omega)
    for name, g in zip(names, truth, strict=True):
        assert (e.gradient[name] - g).norm() <= 1e-11 * g.norm(), name


def test_with_one_loss_it_is_a_sum_of_the_terms_of_ratio_and_one_more():
    net, u = problem("last")
    _, lam, pulled = loop(net, u)
    same(pulled, lam[:-1])  # no loss but the last sends anything
    first = (lam[0] / lam[1] - 1).square()
    same(value(net, u, "omega-norms"), (T - 1) * value(net, u, "ratio") + first)


def test_with_losses_at_every_step_they_differ():
    net, u = problem("every")
    _, lam, pulled = loop(net, u)
    same(value(net, u, "omega-norms"), (pulled / lam[1:] - 1).square().sum(0))
    same(value(net, u, "ratio"), (lam[1:-1] / lam[2:] - 1).square().mean(0))
    first = (lam[0] / lam[1] - 1).square()
    other = (T - 1) * value(net, u, "ratio") + first
    assert (value(net, u, "omega-norms") - other).abs().min() > 0.01


@pytest.mark.parametrize("readout", ["last", "every"])
def test_a_term_of_omega_has_the_factor_of_a_sum_more(readout):
    """(r^2 - 1)^2 = (r + 1)^2 (r - 1)^2: about 4 where r is about 1."""
    net, u = problem(readout)
    _, lam, pulled = loop(net, u)
    r = pulled / lam[1:]
    same(value(net, u, "omega"), ((r + 1) * (r - 1)).square().sum(0) / T)


def test_near_an_isometry_omega_is_four_over_t_of_the_printed_one():
    net = build.network("elman", inputs=1, hidden=4, outputs=1, activation="identity")
    torch.manual_seed(1)
    with torch.no_grad():
        net.W.copy_(1.0001 * torch.linalg.qr(torch.randn(4, 4, dtype=F64))[0])
    lam = net(torch.randn(T, B, 1, dtype=F64)).costates(own_loss)
    same(PENALTIES["omega"](lam), 4 / T * PENALTIES["omega-norms"](lam), 2e-4)


def test_omega_published_has_the_value_of_omega_where_nothing_is_left_out():
    """And lengths are the same; it has one value for the batch."""
    net, u = problem("every")
    same(value(net, u, "omega-published"), value(net, u, "omega").mean().expand(B))


# Sums of the repository of Johnston and Patel, of the norms of lam_t / B, t = 1..T: [T, B] -> [B].
REPOSITORY = {
    "variance": lambda n: ((n - n.mean(0)) ** 2).sum(0),
    "variance-l1": lambda n: ((n - n.mean(0)) ** 2).sum(0),
    "ratio": lambda n: ((n[:-1] / n[1:] - 1) ** 2).sum(0),
    "end-points": lambda n: (n[0] - n[-1]) ** 2,
}
FACTORS = {"variance": T / B**2, "variance-l1": T / B**2, "ratio": T - 1, "end-points": 1 / B**2}


@pytest.mark.parametrize("name", REPOSITORY)
def test_the_repository_has_these_factors(name):
    net, u = problem("last")
    order = 1 if name == "variance-l1" else 2
    run = net(u)
    lam = run.costates(own_loss).lam.detach().numpy()[1:]
    theirs = REPOSITORY[name](np.linalg.norm(lam / B, ord=order, axis=2)).mean()
    ours = float(value(net, u, name).detach().mean())
    assert theirs == pytest.approx(FACTORS[name] * ours, rel=1e-11)

"""Costates of step functions through the graph of the run, against loops written by hand."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import coadjoint as co
from coadjoint.sweeps import step_run
from coadjoint.sweeps.step_costates import RunGraph

F64 = torch.float64
T, B, INPUTS, D = 23, 5, 3, 7
LENGTHS = torch.tensor([23, 4, 17, 17, 1])


class Step(nn.Module):
    """A softmax over all units, which no formula can express."""

    def __init__(self, gain=1.0):
        super().__init__()
        self.cell = nn.GRUCell(INPUTS, D)
        self.score = nn.Linear(D, D)
        self.gain = gain

    def forward(self, u, x):
        return self.gain * self.cell(u, x * torch.softmax(self.score(x), -1))


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """The graph is used for states of any size."""
    monkeypatch.setattr(step_run, "SMALL", 0)


@pytest.fixture
def calls(monkeypatch):
    """The numbers of the steps that were pulled through the graph."""
    found = []
    own = RunGraph.pull_block

    def spy(graph, lo, hi, *arguments):
        found.extend(range(lo, hi))
        return own(graph, lo, hi, *arguments)

    monkeypatch.setattr(RunGraph, "pull_block", spy)
    return found


def problem(readout="last", gain=1.0, lengths=None, steps=T, **options):
    torch.manual_seed(0)
    sizes = {"inputs": INPUTS, "hidden": D, "outputs": 2}
    net = co.Network(Step(gain).to(F64), **sizes, readout=readout, dtype=F64, **options)
    mask = None
    shape = (B, 2)
    if readout == "every":
        mask = (torch.rand(steps, B) > 0.4).to(F64)
        shape = (steps, B, 2)
    y = torch.randn(shape, dtype=F64)
    u = torch.randn(steps, B, INPUTS, dtype=F64)
    return net, co.Batch(u, y, lengths=lengths, mask=mask)


def by_hand(net, batch, rho):
    """The gradient of the mean of L + rho log-ratio, one sample after the other."""
    steps = len(batch.u)
    ends = [steps] * B if batch.lengths is None else batch.lengths.tolist()
    total = 0
    for j, end in enumerate(ends):
        states = [net.initial_state(None, B)[:1] if net.x0.requires_grad else net.x0[None]]
        states[0] = states[0] * torch.ones(1, D, dtype=F64, requires_grad=True)
        for t in range(end):
            states.append(net.call_step(batch.u[t, j : j + 1], states[-1]))
        errors = []
        for t in range(1, end + 1) if net.readout == "every" else [end]:
            y = batch.y[t - 1, j] if net.readout == "every" else batch.y[j]
            weight = 1 if batch.mask is None else batch.mask[t - 1, j]
            a = states[t][0] @ net.V.T + net.b_o
            errors.append(weight * mse_loss(a, y, reduction="sum"))
        loss = sum(errors)
        lam = torch.autograd.grad(loss, states, create_graph=True, allow_unused=True)
        norms = [y.norm() for y in lam[1:] if y is not None and y.any()]
        ratios = [a.log() - b.log() for a, b in itertools.pairwise(norms)]
        penalty = sum(r**2 for r in ratios) / len(ratios) if ratios else 0
        total = total + (loss + rho * penalty) / B
    parameters = dict(net.named_parameters())
    grads = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, grads, strict=True))


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["uniform", "ragged"])
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("x0", ["zero", "learned"])
@pytest.mark.parametrize("gain", [1.0, 3e-3])
def test_gradients_are_those_of_a_loop_by_hand(readout, lengths, x0, gain, calls):
    net, batch = problem(readout, gain, lengths, x0=x0)
    found = co.Penalised("log-ratio", 0.1)(net, batch, "squared").gradient
    assert set(calls) == set(range(0 if x0 == "learned" else 1, T))
    expected = by_hand(net, batch, 0.1)
    for name, g in found.items():
        size = max(expected[name].norm().item(), 1e-8)
        assert (g - expected[name]).norm() <= 1e-11 * size, name


def test_costates_far_below_the_range_of_numbers():
    """A step that multiplies by 2^-40: its costates pass the smallest float64, and blocks of steps
    are halved on the way.
    """

    class Shrink(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.full((D,), 2.0**-40, dtype=F64))

        def forward(self, u, x):
            return self.w * x + u.sum(-1, keepdim=True)

    steps = 60
    torch.manual_seed(0)
    net = co.Network(Shrink(), inputs=INPUTS, hidden=D, outputs=2, dtype=F64)
    batch = co.Batch(torch.randn(steps, B, INPUTS, dtype=F64), torch.randn(B, 2, dtype=F64))
    e = co.Penalised("log-ratio", 1.0)(net, batch, "squared")
    ratios = e.costates.log_ratios()
    torch.testing.assert_close(ratios, torch.full_like(ratios, -40 * math.log(2)))
    # G = (log w)^2 in each of D equal directions: its slope by all w together is 2 log(w) / w
    by_w = e.gradient["step.w"].sum().item()
    assert by_w == pytest.approx(2 * (-40 * math.log(2)) * 2.0**40, rel=1e-9)


def test_samples_without_a_loss_have_costates_of_zero(calls):
    net, batch = problem("every")
    batch.mask[:, 2] = 0
    lam = net(batch.u).costates("squared", batch.y, mask=batch.mask)
    assert not lam.lam[:, 2].any()
    assert lam.lam[1:, 1].any(-1)[: int(batch.mask[:, 1].nonzero().max()) + 1].all()
    assert calls


def test_a_graph_that_was_freed_is_done_without(calls):
    net, batch = problem()
    run = net(batch.u)
    expected = run.costates("squared", batch.y).lam.detach()
    run = net(batch.u)
    run.loss("squared", batch.y).mean().backward()
    calls.clear()
    torch.testing.assert_close(
        net(batch.u).costates("squared", batch.y).lam.detach(), expected, rtol=1e-12, atol=0
    )
    assert calls
    fresh = net(batch.u)
    a = fresh.run
    torch.autograd.grad(fresh.x.sum(), list(net.parameters()), allow_unused=True)
    found = a.costate(None, torch.ones(B, D, dtype=F64), None)
    again = net(batch.u).run.costate(None, torch.ones(B, D, dtype=F64), None)
    scaled = [y.mantissa * 2.0 ** y.exponent[:, None].double() for y in (found, again)]
    torch.testing.assert_close(*scaled, rtol=1e-12, atol=0)


def test_costates_without_a_graph_are_the_same():
    net, batch = problem("every", lengths=LENGTHS)
    with_graph = net(batch.u, LENGTHS).costates("squared", batch.y, mask=batch.mask).lam
    with torch.no_grad():
        without = net(batch.u, LENGTHS).costates("squared", batch.y, mask=batch.mask).lam
    torch.testing.assert_close(with_graph.detach(), without, rtol=1e-12, atol=1e-15)


def test_a_random_step_is_refused():
    class Noisy(Step):
        def forward(self, u, x):
            return super().forward(u, x) + torch.randn_like(x)

    net = co.Network(Noisy().to(F64), inputs=INPUTS, hidden=D, outputs=2, dtype=F64)
    _, batch = problem()
    with pytest.raises(co.Unsupported, match="random or has hidden state"):
        co.Penalised("log-ratio", 0.1)(net, batch, "squared")


def test_gradients_by_the_inputs():
    net, batch = problem()
    u = batch.u.clone().requires_grad_()
    lam = net(u).costates("squared", batch.y)
    (found,) = torch.autograd.grad(lam.squared_norms().sum(), u)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_run, "SMALL", 10**9)
        again = net(u).costates("squared", batch.y)
        (expected,) = torch.autograd.grad(again.squared_norms().sum(), u)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_states_that_are_not_finite_are_refused():
    net, batch = problem()
    with torch.no_grad():
        net.get_parameter("step.cell.weight_ih").fill_(math.inf)
    with pytest.raises(co.NumericalError, match="the state is outside the range of float64 at t ="):
        co.BPTT()(net, batch, "squared")

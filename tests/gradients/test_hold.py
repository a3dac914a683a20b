"""hold="source": the sources of costates are constants to the penalty, in every way to a gradient.

The oracle is torch's double backward in float64 of plain loops (tests/support/oracles.py) in which
the loss's direct slopes by the states are detached.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

import build
import cases
import coadjoint as co
import oracles
from coadjoint.errors import OptionError
from coadjoint.gradients.by_hand import HandGradient
from compare import close, same_bits

F64 = torch.float64
RHO = 0.7
WITHOUT_COSTATES = ("omega-published", "isometry", "norm-stabiliser", "output-variance", "tangent")
READING = tuple(name for name in cases.PENALTIES if name not in (*WITHOUT_COSTATES, "none"))


def held_case(i):
    """Random case number i, over all options at once, with a penalty that reads costates."""
    case = cases.drawn(i)
    if case.loss == "values":
        case = replace(case, loss="user", counted="some")
    engine = cases.ENGINES[i % len(cases.ENGINES)]
    penalty = READING[i % len(READING)]
    return replace(case, penalty=penalty, engine=engine, dtype=F64, higher=False, u_grad=False)


def held_truth(case, data, share=1.0):
    """Losses, penalties and the gradient of the weighted mean of share L + rho G."""
    truth = oracles.Truth(case, data)
    for sample in truth.samples:
        sample.hold_sources()
    G = truth.penalty(case.penalty)
    return truth.loss, G, truth.gradient(truth.mean(share * truth.loss + RHO * G))


def compare_with_loops(case, method, share=1.0):
    """The gradient of `method` is the oracle's, and the values are those without `hold`."""
    losses, penalties, expected = held_truth(case, cases.Data.of(case), share)
    data = cases.Data.of(case, case.dtype, oracle=False)
    net = cases.network(case, data)
    e = method(net, cases.batch(case, data), cases.LOSSES.get(case.loss, case.loss))
    close(e.losses, losses.detach(), case.bar, "losses", least=1e-9)
    close(e.penalties, penalties.detach(), case.bar, "penalties", least=1e-9)
    by_name = {name: expected[name] for name in e.gradient}
    size = max(float(g.norm()) for g in by_name.values())
    for name, g in by_name.items():
        assert float((e.gradient[name] - g).norm()) <= 20 * case.bar * max(size, 1e-3), name


SOME = [*range(24), *range(cases.LATER, cases.LATER + 16)]
MORE = [*range(24, 224), *range(cases.LATER + 16, cases.LATER + 216)]


@pytest.mark.parametrize("i", [*SOME, *(pytest.param(i, marks=pytest.mark.thorough) for i in MORE)])
def test_gradients_of_every_cell_loss_and_engine_equal_the_loops(i):
    """Cells, engines, losses, readouts, lengths, masks, weights, starts and penalties at random."""
    case = held_case(i)
    data = cases.Data.of(case, case.dtype, oracle=False)
    compare_with_loops(case, co.Penalised(cases.penalty(case, data), RHO, hold="source"))


PLAIN = {"B": 3, "T": 7, "H": 5, "ragged": True, "x0": "learned", "weighted": True}


@pytest.mark.parametrize(
    ("readout", "counted"), [("last", "all"), ("every", "all"), ("every", "some")]
)
@pytest.mark.parametrize(("G", "segments"), [("log-ratio", 3), ("variance-l1", 2)])
def test_segments_and_pretraining_equal_the_loops(readout, counted, G, segments):
    case = cases.Case(
        "lstm", "tanh", "cross-entropy", G, engine="cpu", readout=readout, counted=counted, **PLAIN
    )
    compare_with_loops(case, co.Penalised(G, RHO, segments, hold="source"))
    compare_with_loops(case, co.Penalised(G, RHO, segments, pretrain=1, hold="source"), share=0.0)
    compare_with_loops(case, co.Penalised(G, RHO, pretrain=1, hold="source"), share=0.0)


@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("cell", ["mingru", "minlstm", "lru"])
def test_linear_recurrences_equal_the_loops_on_the_scan(cell, readout):
    """Cells without W, whose sweeps run in parallel over time."""
    for G in ("log-ratio", "variance"):
        case = cases.Case(cell, "tanh", "squared", G, engine="scan", readout=readout, **PLAIN)
        compare_with_loops(case, co.Penalised(G, RHO, hold="source"))


@pytest.mark.parametrize("readout", ["last", "every"])
def test_the_readout_gets_the_gradient_of_the_loss_alone(readout):
    net = build.network("gru", readout=readout)
    batch = build.batch(net, [3, 7, 5, 1])
    plain = co.BPTT()(net, batch, "squared").gradient
    exact = co.Penalised("log-ratio", RHO)(net, batch, "squared").gradient
    held = co.Penalised("log-ratio", RHO, hold="source")(net, batch, "squared").gradient
    for name in ("V", "b_o"):
        same_bits(held[name], plain[name])
        assert not torch.allclose(exact[name], plain[name])
    assert not torch.allclose(held["W"], exact["W"])
    assert not torch.allclose(held["W"], plain["W"])


def test_costates_far_below_the_range_are_held_exactly():
    """In float32 against float64: the first costates are of order 1e-78."""
    case = cases.Case("elman", T=60, H=4, penalty="log-ratio", engine="cpu", dtype=torch.float32)
    data = cases.Data.of(case)
    with torch.no_grad():
        data.theta["W"].mul_(0.05)
    _, G, expected = held_truth(case, data)
    net = cases.network(case, data)
    batch = cases.batch(case, data).to(torch.float32, "cpu")
    e = co.Penalised("log-ratio", RHO, hold="source")(net, batch, "squared")
    assert float(e.costates.log_norms()[1].max()) < -150
    close(e.penalties.double(), G.detach(), 1e-5)
    for name, g in e.gradient.items():
        close(g.double(), expected[name], 1e-4, name, least=1e-3)


# other networks


def flat(y_hat, y):
    """A loss with the slope of cross-entropy by the pre-outputs, and no curvature.

    y_hat: pre-outputs, or their softmax; the slope sums to 0, so that its logarithm does as well.
    """
    is_softmax = bool((y_hat.detach().sum(-1) - 1).abs().max() < 1e-9)
    a = y_hat.log() if is_softmax else y_hat
    slope = torch.softmax(a, -1) - nn.functional.one_hot(y, a.shape[-1])
    return (slope.detach() * a).sum(-1)


def through_flat_loss(net, batch, readout, G="log-ratio"):
    """The held gradient by the exact one of a loss without curvature, the readout frozen.

    Then the source V' dL/da is a constant; the readout has the gradient of L alone.
    """
    plain = co.BPTT()(net, batch, "cross-entropy").gradient
    frozen = copy.deepcopy(net)
    for name, p in frozen.named_parameters():
        p.requires_grad_(name not in readout)
    of_both = co.Penalised(G, RHO)(frozen, batch, flat).gradient
    of_loss = co.BPTT()(frozen, batch, flat).gradient
    expected = dict(plain)
    for name in of_both:
        expected[name] = plain[name] + of_both[name] - of_loss[name]
    return expected


def stack_states(p, u, layers):
    """The states [T] of each of two elman layers, by a loop."""
    states = []
    below = list(u)
    for i in range(layers):
        W, R, b = (p[f"layers.levels.{i}.0.{name}"] for name in "WRb")
        x = u.new_zeros(u.shape[1], len(W))
        steps = []
        for y in below:
            x = torch.tanh(x @ W.T + y @ R.T + b)
            steps.append(x)
        states.append(steps)
        below = steps
    return states


@pytest.mark.parametrize("readout", ["last", "every"])
def test_stacks_equal_the_loop(readout):
    """The source is the loss's slope by the top layer's outputs; what it sends down is exact."""
    torch.manual_seed(0)
    net = co.Stack(
        ["elman"] * 2, inputs=2, hidden=[3, 4], outputs=3, readout=readout, output="softmax"
    ).double()
    T, B = 5, 3
    u = torch.randn(T, B, 2, dtype=F64)
    y = torch.randint(3, (T, B) if readout == "every" else (B,))
    p = {name: q.detach().clone().requires_grad_() for name, q in net.named_parameters()}
    states = stack_states(p, u, 2)
    read = states[1] if readout == "every" else states[1][-1:]
    targets = y if readout == "every" else y[None]

    def step_losses(h):
        a = [x @ p["V"].T + p["b_o"] for x in h]
        pairs = zip(a, targets, strict=True)
        return sum(nn.functional.cross_entropy(b, k, reduction="none") for b, k in pairs)

    leaves = [x.detach().requires_grad_() for x in read]
    sources = torch.autograd.grad(step_losses(leaves).sum(), leaves)
    through = sum((e.detach() * x).sum() for e, x in zip(sources, read, strict=True))
    G = 0
    for steps in states:
        lam = torch.autograd.grad(through, steps, create_graph=True, retain_graph=True)
        logs = torch.stack([g.norm(dim=1).log() for g in lam])
        G = G + logs.diff(dim=0).square().mean(0) / 2
    objective = (step_losses(read) + RHO * G).mean()
    expected = dict(zip(p, torch.autograd.grad(objective, list(p.values())), strict=True))
    batch = co.Batch(u, y)
    found = co.Penalised("log-ratio", RHO, hold="source")(net, batch, "cross-entropy").gradient
    for name, g in expected.items():
        close(found[name], g, 1e-11, name)
    net.output = "identity"
    others = through_flat_loss(net, batch, ("V", "b_o"))
    for name, g in others.items():
        close(found[name], g, 1e-11, name)


def test_bidirectional_residual_stacks_and_decoders_hold_what_the_readout_reads():
    torch.manual_seed(1)
    stack = co.Stack(
        ["gru", "lstm"], inputs=2, hidden=3, outputs=3, bidirectional=True, residual=True
    ).double()
    u = torch.randn(5, 3, 2, dtype=F64)
    batch = co.Batch(u, torch.randint(3, (3,)), [5, 2, 4])
    found = co.Penalised("variance", RHO, hold="source")(stack, batch, "cross-entropy").gradient
    for name, g in through_flat_loss(stack, batch, ("V", "b_o"), "variance").items():
        close(found[name], g, 1e-11, name)
    decoder = co.EncoderDecoder("gru", inputs=2, hidden=3, outputs=4).double()
    batch = co.Batch(u, torch.tensor([[0, 1, 2], [3, 2, 0], [-1, 3, 3]]))
    held = co.Penalised("log-ratio", RHO, hold="source")(decoder, batch, "cross-entropy").gradient
    exact = co.Penalised("log-ratio", RHO)(decoder, batch, "cross-entropy").gradient
    readout = ("decoder.V", "decoder.b_o", "C.weight")
    for name, g in through_flat_loss(decoder, batch, readout).items():
        close(held[name], g, 1e-10, name)
    assert not torch.allclose(held["encoder.levels.0.0.W"], exact["encoder.levels.0.0.W"])


@pytest.mark.parametrize("G", ["log-ratio", "variance", "omega"])
@pytest.mark.parametrize("by_hand", [True, False])
def test_chains_hold_the_slope_by_the_outputs(G, by_hand, monkeypatch):
    """By sweeps without torch's graph, and through it: both equal torch's double backward."""
    torch.manual_seed(2)
    maps = [*(co.maps.Dense(n, m) for n, m in itertools.pairwise([5, 4, 4, 4]))]
    chain = co.Chain(*maps, co.maps.Dense(4, 3, "identity"), output="softmax").double()
    x, y = torch.randn(3, 5, dtype=F64), torch.randint(3, (3,))
    weight = torch.tensor([0.5, 2.0, 1.0], dtype=F64)
    states = [x.clone().requires_grad_()]
    jacobians = []
    for f in chain.maps:
        z = states[-1] @ f.W.T + f.b
        states.append(torch.tanh(z) if f.activation == "tanh" else z)
        jacobians.append((states[-2], states[-1]))
    losses = nn.functional.cross_entropy(states[-1], y, reduction="none")
    (source,) = torch.autograd.grad(losses.sum(), states[-1], retain_graph=True)
    lam = [source]
    for before, after in reversed(jacobians):
        lam.insert(0, torch.autograd.grad(after, before, lam[0], create_graph=True)[0])
    norms = torch.stack([g.norm(dim=1) for g in lam])
    penalties = {
        "log-ratio": norms[1:].log().diff(dim=0).square().mean(0),
        "variance": norms[1:].var(0, unbiased=False),
        "omega": ((norms[:-1] / norms[1:]).square() - 1).square().mean(0),
    }[G]
    objective = (weight * (losses + RHO * penalties)).mean()
    parameters = dict(chain.named_parameters())
    expected = torch.autograd.grad(objective, list(parameters.values()))
    if not by_hand:
        monkeypatch.setattr(HandGradient, "of", staticmethod(lambda *_, **__: None))
    batch = co.Batch(x, y, weight=weight, axis=0)
    e = co.Penalised(G, RHO, hold="source")(chain, batch, "cross-entropy")
    close(e.penalties, penalties.detach(), 1e-12)
    for name, g in zip(parameters, expected, strict=True):
        close(e.gradient[name], g, 1e-11, name)
    loss = torch.nn.functional.cross_entropy  # of one's own: through the graph
    own = co.Penalised(G, RHO, hold="source")(
        chain, batch, lambda p, y: loss(p.log(), y, reduction="none")
    )
    for name, g in zip(parameters, expected, strict=True):
        close(own.gradient[name], g, 1e-10, name)


# methods around it, and what is refused


def test_shared_copied_and_per_sample_gradients_hold_too():
    net = build.network("elman", readout="every")
    batch = build.batch(net, [3, 7, 5, 1])
    method = co.Penalised("log-ratio", RHO, hold="source")
    expected = method.evaluate(net, batch, "squared").gradient
    shared = co.Shared(copy.deepcopy(method), shards=3)(net, batch, "squared").gradient
    mean = {name: g.mean(0) for name, g in method.per_sample(net, batch, "squared").items()}
    for name, g in expected.items():
        close(shared[name], g, 1e-12, name)
        close(mean[name], g, 1e-12, name)


def test_a_tangent_of_held_costates_leaves_the_sources_out():
    """Forward mode, and a transform of torch.func, agree with the gradient."""
    net = build.network("elman")
    batch = build.batch(net)
    names = [name for name, _ in net.named_parameters()]

    def penalty(*values):
        run = torch.func.functional_call(net, dict(zip(names, values, strict=True)), (batch.u,))
        lam = run.costates("squared", batch.y, hold="source")
        return co.penalties.log_ratio(lam).mean()

    values = [p.detach() for p in net.parameters()]
    found = torch.func.grad(penalty, tuple(range(len(values))))(*values)
    held = co.Penalised("log-ratio", 1.0, pretrain=1, hold="source")
    expected = held(net, batch, "squared").gradient
    for name, g in zip(names, found, strict=True):
        close(g, expected[name], 1e-12, name, least=1e-12)
    along = [torch.ones_like(p) for p in values]
    with torch.autograd.forward_ad.dual_level():
        duals = map(torch.autograd.forward_ad.make_dual, values, along)
        change = torch.autograd.forward_ad.unpack_dual(penalty(*duals)).tangent
    close(change, sum(g.sum() for g in expected.values()), 1e-12)


@pytest.mark.parametrize("name", WITHOUT_COSTATES)
def test_penalties_without_costates_of_the_loss_are_refused(name):
    with pytest.raises(co.InputError, match="hold='source' does nothing with penalty"):
        co.Penalised(name, hold="source")
    with pytest.raises(co.InputError, match="hold='source' does nothing"):
        co.Penalised(2 * co.penalties.penalty(name), hold="source")
    with pytest.raises(OptionError, match=f"hold does nothing with penalty {name}|of the output"):
        co.gradients.make(penalty=name, hold="source")
    co.Penalised(co.penalties.penalty(name) + "log-ratio", hold="source")


def test_other_things_to_hold_are_refused():
    with pytest.raises(co.InputError, match="unknown part of costates to hold 'sources'; did you"):
        co.Penalised("log-ratio", hold="sources")
    run = build.network()(torch.zeros(3, 2, 3, dtype=F64))
    with pytest.raises(co.InputError, match="part of costates to hold"):
        run.costates("squared", torch.zeros(2, 2), hold="state")


def test_costates_that_are_sources_alone_have_no_gradient():
    """One step, or all but the readout frozen: nothing moves the penalty, and it is not refused."""
    net = build.network("gru")
    held = co.Penalised("squared-norm", RHO, hold="source")
    for frozen, T in ((False, 1), (True, 4)):
        for name, p in net.named_parameters():
            p.requires_grad_(name in ("V", "b_o") or not frozen)
        batch = build.batch(net, T=T)
        plain = co.BPTT()(net, batch, "squared").gradient
        found = held(net, batch, "squared").gradient
        alone = co.Penalised("squared-norm", RHO, pretrain=1, hold="source")
        nothing = alone(net, batch, "squared").gradient
        for name, g in plain.items():
            close(found[name], g, 1e-15, name)
            assert not nothing[name].any()
    net.requires_grad_()
    detached = co.Penalised(lambda lam: lam.norms().detach().sum(0), hold="source")
    with pytest.raises(co.InputError, match="does not depend on the costates"):
        detached(net, build.batch(net), "squared")


def test_a_run_of_ones_own_that_cannot_hold_is_refused(monkeypatch):
    costates = co.Trajectory.costates

    def of_old(run, loss, y=None, *, mask=None, reduce="sum"):
        return costates(run, loss, y, mask=mask, reduce=reduce)

    monkeypatch.setattr(co.Trajectory, "costates", of_old)
    net = build.network()
    batch = build.batch(net)

    def own(lam):  # a penalty of this package asks no run for its costates
        return lam.norms().sum(0)

    co.Penalised(own)(net, batch, "squared")
    with pytest.raises(co.Unsupported, match="that of Trajectory does not"):
        co.Penalised(own, hold="source")(net, batch, "squared")

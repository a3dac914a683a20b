"""co.record gives the costates of every layer of a model, and penalties on them.

Costates and penalised gradients are compared with the slow loops of tests/support/stacks.py.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import coadjoint as co
import oracles
import stacks
from cases import MAKE
from coadjoint.errors import InputError, KindError, NumericalError, Unsupported
from coadjoint.objectives.penalties import PENALTIES
from coadjoint.sweeps.engines import eager, reference
from coadjoint.sweeps.engines.c import engine as c_engine
from coadjoint.sweeps.engines.eager import fused
from coadjoint.sweeps.rows import scale
from compare import close
from last_digits import as_exact_as_float32_allows, nudged
from problems import CELLS, Problem
from stacks import LOSSES, Truth, apart, called, loss_of

ENGINES = ("reference", "eager", "cpu", "autograd")
F32, F64 = torch.float32, torch.float64
LENGTHS = {  # (of the samples, packed?)
    "dense": ([4, 4, 4], False),
    "sorted": ([5, 3, 2], True),
    "unsorted": ([2, 4, 1, 3], True),
    "equal": ([3, 3, 3], True),
    "one": ([1], False),
}
OPTIONS = {
    "plain": {},
    "two": {"num_layers": 2},
    "both": {"num_layers": 2, "bidirectional": True},
    "three": {"num_layers": 3, "bidirectional": True, "dropout": 0.4, "bias": False},
    "first": {"num_layers": 2, "batch_first": True},
}
PROJECTED = {
    "projected": {"num_layers": 2, "proj_size": 2},
    "projected both": {"num_layers": 2, "proj_size": 2, "bidirectional": True, "dropout": 0.3},
}
KINDS = [*itertools.product(MAKE, OPTIONS), *(("lstm", name) for name in PROJECTED)]


def module_of(kind, option, engine="auto", dtype=F64, seed=0, **more):
    torch.manual_seed(seed)
    return MAKE[kind](2, 3, **(OPTIONS | PROJECTED)[option], engine=engine, dtype=dtype, **more)


class Recorded:
    """A module and the truth on the same weights and data: the leaves of both are the module's."""

    def __init__(self, module, lengths, loss, given=True, seed=5):
        sizes, packed = LENGTHS[lengths]
        self.module = module
        _, u, start = stacks.leaves(module, sizes, given)
        order = sorted(range(len(sizes)), key=lambda j: -sizes[j]) if packed else None
        self.truth = Truth(module, dict(module.named_parameters()), u, start, loss, order, seed)
        torch.manual_seed(seed)
        with co.record(module) as self.tape:
            self.outputs = called(module, u, start, packed)
        self.loss = loss_of(loss, *self.outputs)

    def same(self, lam):
        """Each layer's costates in the user's order of samples, at their own scale, their norms and
        ratios.
        """
        truth = self.truth
        assert [(c.trajectory.layer, c.trajectory.direction == "reverse") for c in lam] == truth.at
        assert apart(self.loss, truth.loss) < 1e-12
        for c, at in zip(lam, truth.at, strict=True):
            assert torch.equal(c.loss, self.loss)
            assert apart(c.lam, truth.lam(at)) < 1e-10
            log = truth.norms(at).log()
            some = log.isfinite()
            assert torch.equal(c.log_norms().isnan(), log.isnan())
            assert torch.equal(c.log_norms().isfinite(), some)
            assert (c.log_norms() - log)[some].abs().amax() < 1e-10 if some.any() else True
            ratio, both = log[:-1] - log[1:], some[:-1] & some[1:]
            assert torch.equal(~c.log_ratios().isnan(), both)
            assert (c.log_ratios() - ratio)[both].abs().sum() < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "option"), KINDS)
def test_costates_of_every_loss_length_and_engine_equal_the_truth(kind, option, thorough):
    """Every loss, every way of handing over samples and every engine, each pair of them
    somewhere.
    """
    turn, one_in = KINDS.index((kind, option)), 3 if thorough else 7
    for i, (loss, lengths) in enumerate(itertools.product(LOSSES, LENGTHS)):
        if (i + turn) % one_in:
            continue
        run = Recorded(
            module_of(kind, option, ENGINES[(i // one_in + turn) % 4], seed=i),
            lengths,
            loss,
            given=i % 2 > 0,
        )
        run.same(run.tape.costates(run.loss))


ON_COSTATES = [name for name in PENALTIES if name not in ("output-variance", "tangent")]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("kind", "option", "lengths", "loss"),
    [
        ("tanh", "both", "unsorted", "all"),
        ("relu", "two", "dense", "output"),
        ("lstm", "projected both", "unsorted", "all"),
        ("lstm", "first", "dense", "h_n"),
        ("gru", "three", "sorted", "output"),
    ],
)
@pytest.mark.sampled(3)
def test_penalties_and_their_gradients_equal_the_truth(kind, option, lengths, loss, engine):
    """Value, and the gradient of loss + penalty by weights, inputs and initial states."""
    run = Recorded(module_of(kind, option, engine), lengths, loss)
    truth, lam = run.truth, run.tape.costates(run.loss)
    for name in ON_COSTATES:
        if name == "omega-published" and engine == "autograd":
            with pytest.raises(Unsupported, match="hides its W"):
                run.tape.penalty(name, run.loss)
            continue
        G, expected = PENALTIES[name](lam), truth.penalty(name)
        assert apart(G, expected, 1e-6) < 1e-9, name
        assert torch.equal(G, sum(PENALTIES[name](c) for c in lam) / len(lam))
        ours, true = (
            (value + 0.3 * g).mean() for value, g in ((run.loss, G), (truth.loss, expected))
        )
        close(truth.gradient(ours), truth.gradient(true), 1e-9, name, least=1e-6)
    assert torch.equal(run.tape.penalty("log-ratio", run.loss), PENALTIES["log-ratio"](lam))
    assert (
        apart(
            run.tape.penalty(lambda c: c.norms().sum(0), run.loss),
            sum(c.norms().sum(0) for c in lam) / len(lam),
        )
        == 0
    )
    both = 0.1 * PENALTIES["variance"] + PENALTIES["log-ratio"]
    assert apart(both(lam), 0.1 * PENALTIES["variance"](lam) + PENALTIES["log-ratio"](lam)) < 1e-14


def test_the_barrier_acts_below_its_switch():
    """The default switch lies below these costates; one above them bites."""
    run = Recorded(module_of("lstm", "both"), "unsorted", "all")
    for s in run.truth.stacks:
        for each in s.directions.values():
            each.case.switch = 2.0
    G, expected = (
        co.penalties.barrier(2.0)(run.tape.costates(run.loss)),
        run.truth.penalty("barrier"),
    )
    assert apart(G, expected) < 1e-10
    assert (G > 0).all()
    close(
        run.truth.gradient(G.mean()),
        run.truth.gradient(expected.mean()),
        1e-9,
        "barrier",
        least=1e-6,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "extras",
    [{"recurrent_dropout": 0.4}, {"zoneout": 0.3}, {"recurrent_dropout": 0.3, "zoneout": 0.2}],
)
@pytest.mark.parametrize("kind", ["tanh", "lstm", "gru"])
@pytest.mark.sampled(2)
def test_costates_are_right_under_recurrent_dropout_and_zoneout(kind, extras):
    """Under recurrent dropout the state is [h, c] all the same: what W reads is a
    function of it.
    """
    turn = len(extras) + list(MAKE).index(kind)
    for engine, lengths in ((ENGINES[turn % 4], "dense"), (ENGINES[(turn + 2) % 4], "unsorted")):
        run = Recorded(module_of(kind, "both", engine, **extras), lengths, "all")
        lam = run.tape.costates(run.loss)
        run.same(lam)
        slots = 2 if kind == "lstm" else 1
        assert all(c.trajectory.x.shape == c.lam.shape == (*c.mask.shape, 3 * slots) for c in lam)
        assert all(c.trajectory.state.shape == (len(run.loss), 3 * slots) for c in lam)
        for name in ("log-ratio", "omega", "norm-stabiliser"):
            G, expected = PENALTIES[name](lam), run.truth.penalty(name)
            assert apart(G, expected) < 1e-9, name
            close(
                run.truth.gradient(G.mean()),
                run.truth.gradient(expected.mean()),
                1e-9,
                name,
                least=1e-6,
            )


@pytest.mark.parametrize("kind", ["tanh", "lstm", "gru"])
def test_costates_are_right_with_peepholes_and_layer_norm(kind):
    """Peepholes and layer normalisation."""
    for extras in [{"layer_norm": True}, *([{"peephole": True}] if kind == "lstm" else [])]:
        run = Recorded(module_of(kind, "both", **extras), "unsorted", "all")
        lam = run.tape.costates(run.loss)
        run.same(lam)
        G, expected = PENALTIES["log-ratio"](lam), run.truth.penalty("log-ratio")
        close(
            run.truth.gradient(G.mean()),
            run.truth.gradient(expected.mean()),
            1e-9,
            "log-ratio",
            least=1e-6,
        )


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
@pytest.mark.parametrize("readout", ["last", "every"])
def test_one_layer_and_a_readout_have_the_costates_of_a_network(cell, readout):
    """One layer and a readout is co.Network."""
    torch.manual_seed(0)
    net = co.Network(cell, inputs=2, hidden=3, outputs=2, readout=readout, dtype=F64)
    m = MAKE[{"elman": "tanh"}.get(cell, cell)](2, 3, dtype=F64)
    with torch.no_grad():
        m.weight_hh_l0.copy_(net.W)
        m.weight_ih_l0.copy_(net.R)
        m.bias_ih_l0.copy_(net.b)
        m.bias_hh_l0.zero_()
        if cell == "gru":
            net.p["b_n"].uniform_()
            m.bias_hh_l0[6:] = net.p["b_n"]
    u, y = torch.randn(6, 4, 2, dtype=F64), torch.randn(6, 4, 2, dtype=F64)
    y = y if readout == "every" else y[0]
    theirs = net(u).costates("squared", y)
    with co.record(m) as tape:
        out, last = m(u)
    h = out if readout == "every" else last[0][-1] if cell == "lstm" else last[-1]
    loss = (
        (nn.functional.linear(h, net.V, net.b_o) - y)
        .square()
        .sum((0, 2) if readout == "every" else 1)
    )
    [lam] = tape.costates(loss)
    assert apart(lam.lam, theirs.lam) < 1e-13
    assert apart(lam.trajectory.x, theirs.trajectory.x) < 1e-13
    for name in ON_COSTATES:
        G, expected = PENALTIES[name](lam), PENALTIES[name](theirs)
        assert apart(G, expected, 1e-6) < 1e-11, name
        if not expected.requires_grad:
            continue
        pairs = [(m.weight_hh_l0, net.W), (m.weight_ih_l0, net.R), (m.bias_ih_l0, net.b)]
        ours, true = (
            torch.autograd.grad(
                value.mean(), list(ps), retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for value, ps in zip((G, expected), zip(*pairs, strict=True), strict=True)
        )
        for a, b in zip(ours, true, strict=True):
            assert (a - b).abs().max() <= 1e-10 * b.abs().max().clamp_min(1e-6), name


SOURCES = [
    f"{given} link scaled"
    for given in ("s", "s_last", "s s_last", "s_last k_last", "s s_last k_last")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine", [eager, fused, c_engine], ids=lambda e: e.__name__.rpartition(".")[2]
)
@pytest.mark.parametrize("name", [n for n in CELLS if n != "diagonal"])
@pytest.mark.sampled(2)
def test_scaled_sweeps_take_links_of_any_size(name, engine):
    """lam_{t-1} = s_{t-1} + link_t J' lam_t in mantissas and exponents; links of 0, powers of two,
    and any others.
    """
    table = [([3, 3, 3, 3, 3], F64, 1e-11), ([4, 3, 3, 2, 1], F64, 1e-11)]
    if name in ("elman", "lstm", "gru"):  # those that do not grow
        table.append(([2] * 40, F32, 5e-4))
    for sizes, dtype, bar in table:
        problem = Problem(name, sizes, 5, dtype)
        if dtype == F32:
            problem.factor = torch.where(problem.factor == 0, 0.7, problem.factor)
            problem.base = problem.base * 0.3
        true = problem.exact()
        ours, tape = problem.tape(engine), true.tape(reference)
        for given in SOURCES:
            lam, delta, k = problem.adjoint(engine, ours, given)
            lam_, delta_, k_ = true.adjoint(reference, tape, given)
            shift = (k.long() - k_.long())[:, None]
            assert apart(scale(lam.double(), shift), lam_, 1e-30) < bar, given
            assert apart(scale(delta.double(), shift[problem.rows.B :]), delta_, 1e-30) < bar, given


def weak(kind, dtype, gain=0.2, draw=0, **options):
    """A module whose costates shrink quickly; draw: of a change of the weights' last digits."""
    torch.manual_seed(0)
    m = MAKE[kind](2, 3, **options)
    with torch.no_grad():
        for name, p in m.named_parameters():
            if "weight_hh" in name:
                p.mul_(gain)
            if kind in ("lstm", "gru") and "bias" in name:
                p[3:6] -= 1  # forget
        m.to(dtype)
        if draw:
            for p in m.parameters():
                p.copy_(nudged(p, draw))
    return m


READS = {
    "last": lambda y, h: (y[-1] ** 2).sum(-1),
    "h_n": lambda y, h: (h[-1] ** 2).sum(-1),
    "few": lambda y, h: (y[[100, 300]] ** 2).sum((0, 2)),
    "every": lambda y, h: (y**2).sum((0, 2)),
    "masked": lambda y, h: (y**2 * (torch.arange(len(y)) == len(y) - 1)[:, None, None]).sum((0, 2)),
    "lowest": lambda y, h: (
        (y[0, :, 3:] ** 2).sum(-1) + h[0].sum(-1)
    ),  # of two directions: large at opposite ends
}


def far(kind, reads, dtype, T=400, engine="auto", gain=0.2, name="log-ratio", **options):
    """(log-norms of all layers, gradient of loss + penalty)"""
    m = weak(kind, dtype, gain, engine=engine, **options)
    u = torch.randn(T, 2, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    with co.record(m) as tape:
        y, last = m(u)
    loss = READS[reads](y, last[0] if kind == "lstm" else last)
    lam = tape.costates(loss)
    value = (loss + 0.3 * PENALTIES[name](lam)).mean()
    return [c.log_norms().detach() for c in lam], [
        g.double() for g in torch.autograd.grad(value, list(m.parameters()))
    ]


@pytest.mark.parametrize("kind", ["tanh", "lstm", "gru"])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2}, {"num_layers": 2, "bidirectional": True}], ids=str
)
def test_costates_far_below_float32_are_those_of_float64(kind, options):
    """Costates far below the smallest float32 are those of float64, in all layers, and so is the
    penalty's gradient.
    """
    for reads in READS:
        if reads == "lowest" and not options.get("bidirectional"):
            continue
        found, g = far(kind, reads, F32, **options)
        expected, _ = far(kind, reads, F64, **options)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.isfinite(), b.isfinite()), reads
            assert (a - b).nan_to_num(posinf=0, neginf=0).abs().max() < 5e-4, reads
        if reads != "every":
            lowest = expected[0]
            assert lowest[lowest.isfinite()].min() < -160  # 1e-70
        wide = functools.partial(far, kind, reads, F64, **options)
        as_exact_as_float32_allows(g, lambda draw, wide=wide: wide(draw=draw)[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_keeps_costates_far_below_float32(engine):
    """The same on each engine, where a loss gives weight to one step alone."""
    options = {"T": 120, "gain": 0.1, "num_layers": 2, "bidirectional": True}
    found, g = far("tanh", "masked", F32, engine=engine, **options)
    expected, _ = far("tanh", "masked", F64, **options)
    assert expected[2].min() < -200
    for a, b in zip(found, expected, strict=True):
        assert (a - b).nan_to_num(posinf=0, neginf=0).abs().max() < 5e-4
    as_exact_as_float32_allows(g, lambda draw: far("tanh", "masked", F64, draw=draw, **options)[1])


def longdouble(m, u, top):
    """The costates of two tanh layers, t = 0..T of one sample, in numbers of 15 bits of exponent;
    top(h) is the source of the upper layer.
    """
    w = {n: p.detach().double().numpy().astype(np.longdouble) for n, p in m.named_parameters()}
    T, h = len(u), [[np.zeros(3, np.longdouble)], [np.zeros(3, np.longdouble)]]
    for t in range(T):
        below = u[t].double().numpy().astype(np.longdouble)
        for k in (0, 1):
            a = (
                w[f"weight_ih_l{k}"] @ below
                + w[f"bias_ih_l{k}"]
                + w[f"weight_hh_l{k}"] @ h[k][t]
                + w[f"bias_hh_l{k}"]
            )
            below = np.tanh(a)
            h[k].append(below)
    s, lams = top(h[1]), []
    for k in (1, 0):
        lam, into = [None] * (T + 1), [np.zeros(3, np.longdouble)] * (T + 1)
        carried = np.zeros(3, np.longdouble)
        for t in reversed(range(T + 1)):
            lam[t] = s[t] + carried
            if t:
                delta = (1 - h[k][t] ** 2) * lam[t]
                carried = w[f"weight_hh_l{k}"].T @ delta
                into[t] = w[f"weight_ih_l{k}"].T @ delta if k else None
        s = into
        lams.insert(0, lam)
    return [np.array([float(np.log(np.sqrt((v * v).sum()))) for v in lam]) for lam in lams]


@pytest.mark.slow
@pytest.mark.skipif(
    np.finfo(np.longdouble).maxexp < 16384, reason="numpy's longdouble has no wider exponent here"
)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.sampled(2)
def test_costates_below_the_range_of_float64_are_kept(slow, engine):
    """Below 1e-308, and where the lower layer forgets far more slowly than the upper one from which
    its sources come.
    """
    T = 450 if engine in ("reference", "autograd") or slow else 2000
    m = weak("tanh", F32, 0.1, num_layers=2, engine=engine)
    with torch.no_grad():
        if slow:
            m.weight_hh_l0.copy_(0.999 * torch.eye(3))
            for name in ("weight_ih_l0", "bias_ih_l0", "bias_hh_l0"):
                getattr(m, name).mul_(0.005)
    u = torch.randn(T, 1, 2)
    reads = (T, T // 3)

    def top(h):
        s = [np.zeros(3, np.longdouble) for _ in h]
        for t in reads:
            s[t] = 2 * h[t]
        return s

    expected = longdouble(m, u[:, 0], top)
    with co.record(m) as tape:
        y, _ = m(u)
    lam = tape.costates(sum((y[t - 1] ** 2).sum(-1) for t in reads))
    for c, true in zip(lam, expected, strict=True):
        assert np.abs(c.log_norms()[:, 0].detach().numpy() - true).max() < 1e-3
    assert expected[1].min() < -700  # 1e-304


@pytest.mark.parametrize("kind", ["tanh", "gru"])
def test_costates_beyond_the_range_of_float32_are_kept(kind):
    """At rest the step is linear: lam grows like powers of W, beyond the range of float32, in both
    layers.
    """
    torch.manual_seed(0)
    m = MAKE[kind](2, 3, 2, bias=False)
    with torch.no_grad():
        for k in (0, 1):
            getattr(m, f"weight_hh_l{k}").copy_(
                (4 if kind == "gru" else 2) * torch.eye(3).repeat(3 if kind == "gru" else 1, 1)
            )
    growth = 1.5 if kind == "gru" else 2.0  # n = r W h, u = r = 1/2: (1 + r W) / 2 = 3/2
    v = torch.tensor([1.0, -2.0, 0.5])
    with co.record(m) as tape:
        y, _ = m(torch.zeros(400, 2, 2))
    loss = (y[-1] * v).sum(-1)
    lam = tape.costates(loss)
    t = torch.arange(401, dtype=F64)[:, None]
    upper = v.norm().double().log() + (400 - t) * math.log(growth)
    assert (lam[1].log_norms() - upper).abs().max() < 1e-4
    half = 0.5 if kind == "gru" else 1.0
    R = (
        half * m.weight_ih_l1[-3:].detach().double()
    )  # the candidate's; the gates have no slope at rest
    lower = (
        (R.T @ v.double()).norm().log()
        + (400 - t) * math.log(growth)
        + torch.log(401 - t.clamp(min=1))
    )
    lower[0] = lower[1] + math.log(growth)
    assert (lam[0].log_norms() - lower).abs().max() < 1e-3
    assert lam[0].log_norms().max() > 100
    assert (lam[1].exponent[0] > 200).all()
    if kind == "tanh":  # odd: at rest no bend would grow with the states
        g = [torch.autograd.grad(PENALTIES["log-ratio"](lam).mean(), list(m.parameters()))]
        m.double()
        with co.record(m) as tape:
            y, _ = m(torch.zeros(400, 2, 2, dtype=F64))
        G = tape.penalty("log-ratio", (y[-1] * v.double()).sum(-1))
        g.append(torch.autograd.grad(G.mean(), list(m.parameters())))
        assert all(
            (a.double() - b).norm() <= 1e-4 * b.norm() + 1e-6 for a, b in zip(*g, strict=True)
        )
        assert max(b.norm() for b in g[1]) > 0.1


def test_a_nan_is_an_error_that_names_its_place():
    """What the module lets through is an error here."""
    m, u = co.nn.GRU(1, 2, 2), torch.ones(6, 2, 1)
    u[3, 1] = torch.nan
    for engine in ENGINES:
        m.engine = engine
        with co.record(m) as tape:
            y, _ = m(u)
        with pytest.raises(
            NumericalError, match="the costate is outside the range of float32 at t = "
        ):
            tape.costates(y[-1].sum(-1))


def plain(m, *a):
    return m(*a)[0]


@pytest.fixture
def gru():
    torch.manual_seed(0)
    return co.nn.GRU(2, 3, dtype=F64)


def test_calls_are_numbered_and_costates_flow_between_them():
    """Calls are numbered; what the second one makes of the first one's outputs and last states is a
    source of the first.
    """
    torch.manual_seed(0)
    m = co.nn.LSTM(3, 3, dtype=F64)
    u = torch.randn(4, 2, 3, dtype=F64)
    w = dict(m.named_parameters())
    with co.record(m) as tape:
        y, s = m(u)
        z, _ = m(torch.sin(y), s)
        loss = (z[-1] ** 2).sum(-1) + y[0].sum(-1)
    lam = tape.costates(loss)
    assert [c.trajectory.call for c in lam] == [0, 1]
    for j in range(2):
        one = stacks.Stack(m, w, u[:, j])
        two = stacks.Stack(m, w, torch.sin(one.output), [one.h_n, one.c_n])
        value = (two.output[-1] ** 2).sum() + one.output[0].sum()
        assert apart(loss[j], value) < 1e-13
        for c, stack in zip(lam, (one, two), strict=True):
            expected = torch.autograd.grad(value, stack.directions[0, 0].x, retain_graph=True)
            assert apart(c.lam[:, j], torch.stack(expected)) < 1e-12
    [first], [second] = lam.select(call=0), lam.select(call=1)
    assert (first, second) == tuple(lam)
    g = torch.autograd.grad(PENALTIES["log-ratio"](lam).mean(), list(m.parameters()))

    def value(W):
        """The penalty as a number, for differences."""
        changed = w | {"weight_hh_l0": W}
        total = 0
        for j in range(2):
            one = stacks.Stack(m, changed, u[:, j])
            two = stacks.Stack(m, changed, torch.sin(one.output), [one.h_n, one.c_n])
            v = (two.output[-1] ** 2).sum() + one.output[0].sum()
            for stack in (one, two):
                x = stack.directions[0, 0].x
                n = [oracles.norm(y) for y in torch.autograd.grad(v, x, create_graph=True)[1:]]
                total = total + sum(torch.log(a / b) ** 2 for a, b in itertools.pairwise(n)) / 3
        return total / 4

    [true] = torch.autograd.grad(value(m.weight_hh_l0), m.weight_hh_l0)
    assert (g[1] - true).abs().max() < 1e-10 * true.abs().max()


class Model(nn.Module):
    """Two modules of ours, one of them shared, and a readout."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"words": co.nn.GRU(2, 3, 2, bidirectional=True, dtype=F64)})
        self.decoder = co.nn.LSTM(6, 4, dtype=F64)
        self.same, self.head = self.decoder, nn.Linear(4, 1, dtype=F64)

    def forward(self, u):
        return self.head(self.decoder(self.encoder["words"](u)[0])[0][-1])[:, 0]


def test_costates_are_named_by_module_and_layer():
    torch.manual_seed(0)
    model, u = Model(), torch.randn(5, 3, 2, dtype=F64)
    with co.record(model) as tape:
        loss = model(u) ** 2
    lam = tape.costates(loss)
    at = [
        (c.trajectory.module, c.trajectory.call, c.trajectory.layer, c.trajectory.direction)
        for c in lam
    ]
    words = [("encoder.words", 0, k, d) for k in (0, 1) for d in ("forward", "reverse")]
    assert at == [*words, ("decoder", 0, 0, "forward")]
    assert repr(tape) == "<tape of 2 calls of 2 modules>"
    assert repr(lam.select(module="decoder")) == "<costates of decoder, call 0, layer 0, forward>"
    assert len(lam.select(module="encoder.words", layer=1)) == 2
    assert lam.select(direction="reverse", layer=0)[0] is lam[1]
    assert list(lam[1:3]) == [lam[1], lam[2]]
    assert isinstance(lam[1:3], co.Recorded)
    assert lam[-1] is lam[4]
    assert torch.equal(lam[1:3].loss, loss)
    with pytest.raises(
        InputError,
        match=r"no costates match \{'layer': 7\}; recorded: encoder.words, call 0",
    ):
        lam.select(layer=7)
    with pytest.raises(
        InputError, match="selected by module, call, layer or direction; got 'name'"
    ):
        lam.select(name="decoder")
    with pytest.raises(InputError, match="no costates to penalise"):
        PENALTIES["variance"](lam[:0])


def test_nested_tapes_have_their_own_calls(gru):
    """Each tape has the calls made while it was on, of the modules it was asked about."""
    other, u = co.nn.GRU(3, 3, dtype=F64), torch.randn(4, 2, 2, dtype=F64)
    with co.record(gru) as outer:
        y, _ = gru(u)
        with co.record(nn.ModuleList([gru, other])) as inner:
            z = plain(other, plain(gru, u) + y)
    gru(u)
    assert [(c.module, c.number) for c in outer.calls] == [("", 0), ("", 1)]
    assert [(c.module, c.number) for c in inner.calls] == [("0", 0), ("1", 0)]
    loss = (z**2).sum((0, 2))
    assert apart(inner.costates(loss)[0].lam, outer.costates(loss)[1].lam) == 0


def test_a_tape_that_is_entered_again_begins_anew(gru):
    """A tape that is entered again begins anew."""
    tape, u = co.record(gru), torch.randn(4, 2, 2, dtype=F64)
    for _ in range(3):
        with tape:
            loss = plain(gru, u).sum((0, 2))
        assert len(tape.calls) == 1
        (loss + tape.penalty("log-ratio", loss)).mean().backward()


def test_costates_can_be_asked_for_inside_or_after_the_block(gru):
    """The loss may be formed, and the costates asked for, inside or after the block; nothing else
    changes.
    """
    u, got = torch.randn(4, 2, 2, dtype=F64), []
    with co.record(gru) as tape:
        y = plain(gru, u)
        got.append(tape.costates((y**2).sum((0, 2)))[0].lam)
        loss = (y**2).sum((0, 2))
    got += [tape.costates(loss)[0].lam, tape.costates((y**2).sum((0, 2)))[0].lam]
    assert len(tape.calls) == 1
    assert all(torch.equal(a, got[0]) for a in got)
    assert torch.equal(y, plain(gru, u))
    with torch.no_grad():
        [lam] = tape.costates(loss)
    assert not lam.lam.requires_grad
    assert not lam.loss.requires_grad
    assert torch.equal(lam.lam, got[0])
    (loss + tape.penalty("variance", loss)).mean().backward()


REFUSED = {
    "scalar": (
        lambda m, u, y: y.sum(),
        InputError,
        r"the loss is a scalar; expected .* shape \[2\]: use reduction='none'",
    ),
    "shape": (lambda m, u, y: y[-1], InputError, r"the loss is of shape \[2, 3\]"),
    "batch": (
        lambda m, u, y: y[-1].sum(0),
        InputError,
        r"the loss is of shape \[3\]; .* shape \[2\]",
    ),
    "kind": (lambda m, u, y: [1.0], KindError, "got list"),
    "other": (
        lambda m, u, y: m.weight_hh_l0.sum().expand(2),
        InputError,
        "does not depend on the outputs",
    ),
    "constant": (
        lambda m, u, y: y.detach().sum((0, 2)),
        InputError,
        "does not depend on the recorded calls",
    ),
    "outside": (
        lambda m, u, y: plain(m, u).sum((0, 2)),
        InputError,
        "does not depend on the outputs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_cannot_be_used_are_refused(name, gru):
    make, error, text = REFUSED[name]
    u = torch.randn(4, 2, 2, dtype=F64)
    with co.record(gru) as tape:
        y = plain(gru, u)
    with pytest.raises(error, match=text):
        tape.costates(make(gru, u, y))


def test_penalties_that_cannot_be_used_are_refused(gru):
    """Those that ask for a network's outputs."""
    u = torch.randn(4, 2, 2, dtype=F64)
    with co.record(gru) as tape:
        loss = plain(gru, u).sum((0, 2))
    for G in ("output-variance", co.penalties.of_output("variance")):
        with pytest.raises(Unsupported, match=r"but a recorded layer has none. Use co.Network"):
            tape.penalty(G, loss)
    for G in ("tangent", co.penalties.tangent(u)):
        with pytest.raises(Unsupported, match=r"layer has none. Use co.penalties.output_change"):
            tape.penalty(G, loss)
    with pytest.raises(InputError, match="did you mean 'log-ratio'"):
        tape.penalty("log_ratio", loss)


def test_a_model_with_nothing_to_record_is_refused(gru):
    for model, text in (
        (nn.Linear(2, 2), r"no co.nn.RNN, LSTM or GRU inside Linear\. .*at='blocks.\*'\)\.$"),
        (
            nn.Sequential(nn.LSTM(2, 2), nn.GRU(2, 2)),
            r"torch.nn's GRU, LSTM: .* co.nn.replace\(model\)",
        ),
        (co.nn.GRUCell(2, 2), "no co.nn.RNN, LSTM or GRU inside GRUCell"),
    ):
        with pytest.raises(InputError, match=text):
            co.record(model)
    with pytest.raises(KindError, match=r"expects a torch.nn.Module; got function"):
        co.record(plain)
    with co.record(gru) as tape:
        pass
    with pytest.raises(InputError, match="nothing was recorded"):
        tape.costates(torch.ones(2, requires_grad=True))
    with co.record(gru) as tape:
        y, _ = gru(torch.randn(4, 0, 2, dtype=F64))
    with pytest.raises(InputError, match="nothing was recorded"):
        tape.costates(y.sum((0, 2)))


def test_compiled_modules_are_refused(gru):
    """A compiled recurrence has one derivative."""
    inside = nn.ModuleList([gru])
    inside.append(torch.compile(co.nn.GRU(2, 2), backend="eager"))
    called_compiled = co.nn.GRU(2, 2)
    called_compiled.compile(backend="eager")
    for model in (torch.compile(gru, backend="eager"), inside, nn.Sequential(called_compiled)):
        with pytest.raises(
            Unsupported,
            match=r"a compiled module cannot be recorded.*Record the module that was given",
        ):
            co.record(model)
    beside = nn.ModuleList([gru, torch.compile(nn.Linear(2, 2), backend="eager")])
    assert repr(co.record(beside)) == "<tape of 0 calls of 1 modules>"


def test_calls_under_no_grad_are_not_recorded(gru):
    """Calls under no_grad leave nothing; others beside them do."""
    u, head = torch.randn(4, 2, 2, dtype=F64), nn.Linear(3, 1, dtype=F64)
    with co.record(gru) as tape, torch.no_grad():
        y, h = gru(u)
    with pytest.raises(InputError, match=r"carry no gradient \(torch.no_grad"):
        tape.costates(head(y[-1])[:, 0])
    with co.record(gru) as tape:
        with torch.no_grad():
            _, h = gru(u)
        y, _ = gru(u, h)
    [lam] = tape.costates(head(y[-1])[:, 0])
    assert lam.trajectory.call == 1


@pytest.mark.parametrize("frozen", ["all", "weight_hh_l0", "weight_ih_l0"])
def test_frozen_weights_have_costates_too(frozen):
    """Costates are there whatever is trained, and a penalty reaches what is."""
    for kind in MAKE:
        run = Recorded(module_of(kind, "both"), "unsorted", "all")
        for name, p in run.module.named_parameters():
            p.requires_grad_(not (frozen == "all" or name.startswith(frozen)))
        u = [y.detach() for y in run.truth.u]
        with co.record(run.module) as tape:
            outputs = called(run.module, u, [y.detach() for y in run.truth.start])
        loss = loss_of("all", *outputs)
        lam = tape.costates(loss)
        for c, at in zip(lam, run.truth.at, strict=True):
            assert apart(c.lam, run.truth.lam(at)) < 1e-10
        (loss + PENALTIES["log-ratio"](lam)).mean().backward()
        value = (run.truth.loss + run.truth.penalty("log-ratio")).mean()
        trained = {n: p for n, p in run.module.named_parameters() if p.requires_grad}
        expected = oracles.gradient(value, trained) if trained else {}
        close({n: p.grad for n, p in trained.items()}, expected, 1e-9, "log-ratio", least=1e-6)
        assert all(p.grad is None for p in run.module.parameters() if not p.requires_grad)
        assert all(y.grad is None for y in u)


def test_one_sample_without_a_batch_axis_is_recorded(gru):
    """One sample without its axis, and a scalar loss."""
    u = torch.randn(5, 2, dtype=F64)
    with co.record(gru) as tape:
        loss = (plain(gru, u) ** 2).sum()
    [lam] = tape.costates(loss)
    with co.record(gru) as batched:
        [expected] = batched.costates((plain(gru, u[:, None]) ** 2).sum((0, 2)))
    assert torch.equal(lam.lam, expected.lam)
    assert tape.penalty("log-ratio", loss).shape == (1,)
    assert [len(tape.costates(loss[None])), lam.loss.shape] == [1, (1,)]


def test_a_call_with_other_samples_is_refused_where_it_matters(gru):
    """A call with another number of samples is refused where the loss depends on it, and only
    there.
    """
    u = torch.randn(4, 6, 2, dtype=F64)
    with co.record(gru) as tape:
        y = plain(gru, u)
        z = plain(gru, y[-1, :, :2].view(2, 3, 2))
        alone = plain(gru, u[:, :3]).sum((0, 2))
    assert tape.costates(alone)[0].trajectory.call == 2
    with pytest.raises(
        InputError,
        match=r"the loss has 3 values, but it depends on a call of the module with 6 samples",
    ):
        tape.costates(z.sum((0, 2)))


def test_costates_stay_in_float32_under_autocast():
    """Recurrences and their costates stay in float32; a loss in bfloat16 makes no penalty of
    bfloat16.
    """
    torch.manual_seed(0)
    for engine in ENGINES:
        m, head, u = co.nn.LSTM(2, 3, 2, engine=engine), nn.Linear(3, 1), torch.randn(4, 3, 2)
        with torch.autocast("cpu", torch.bfloat16):
            with co.record(m) as tape:
                y, _ = m(u)
                loss = head(y[-1])[:, 0]
                inside = tape.costates(loss)
            assert loss.dtype == torch.bfloat16
        after = tape.costates(loss)
        for a, b in zip(inside, after, strict=True):
            assert a.lam.dtype == torch.float32
            assert torch.equal(a.lam, b.lam)
        G = tape.penalty("log-ratio", loss)
        assert G.dtype == torch.float32
        (loss + G).mean().backward()
        assert m.weight_hh_l0.grad.dtype == torch.float32


def test_a_tape_sees_the_calls_of_its_own_thread(gru):
    """A tape sees the calls of its own thread."""
    u, met = torch.randn(4, 2, 2, dtype=F64), threading.Barrier(2)
    lengths = {}

    def work(n):
        with co.record(gru) as tape:
            met.wait()
            for _ in range(n):
                gru(u)
            met.wait()
            lengths[n] = len(tape.calls)

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 3)]
    with co.record(gru) as mine:
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert lengths == {1: 1, 3: 3}
    assert not mine.calls


def test_a_tape_is_off_again_after_an_error(gru):
    """A tape is off again after one."""
    tape = co.record(gru)

    def broken():
        with tape:
            gru(torch.randn(4, 2, 2, dtype=F64))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    gru(torch.randn(4, 2, 2, dtype=F64))
    assert len(tape.calls) == 1


def test_nothing_of_a_recording_outlives_it(gru):
    """Nothing of a recording outlives it: freed by counting references, without a collection of
    cycles.
    """
    u = torch.randn(4, 2, 2, dtype=F64)
    gc.collect()
    gc.disable()
    try:
        with co.record(gru) as tape:
            y, _ = gru(u)
        loss = (y**2).sum((0, 2))
        lam = tape.costates(loss)
        G = PENALTIES["log-ratio"](lam)
        (loss + G).mean().backward()
        held = [
            weakref.ref(x)
            for x in (y, tape.calls[0].layers[0].directions[0].run, lam[0], lam[0].rows, tape)
        ]
        del tape, y, loss, lam, G
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


def test_transforms_of_torch_func_are_refused(gru):
    """torch.func's transforms are refused with the way out, inside and outside of the block."""
    u, w = torch.randn(4, 2, 2, dtype=F64), dict(gru.named_parameters())

    def penalised(w):
        with co.record(gru) as tape:
            loss = torch.func.functional_call(gru, w, (u,))[0].sum((0, 2))
        return tape.penalty("variance", loss).mean()

    with pytest.raises(Unsupported, match=r"torch.func's transforms cannot see. Use backward\(\)"):
        torch.func.grad(penalised)(w)
    G = penalised(w)
    [other] = torch.autograd.grad(G, w["weight_hh_l0"])
    assert other.isfinite().all()


@pytest.mark.parametrize("again", [False, True])
def test_checkpointing_changes_no_costate(gru, again):
    """Recomputed activations: without reentry as without a checkpoint; with reentry there is
    nothing to differentiate.
    """
    u = torch.randn(4, 2, 2, dtype=F64, requires_grad=True)
    values = []
    for checkpointed in (False, True):
        with co.record(gru) as tape:
            y = (
                torch.utils.checkpoint.checkpoint(plain, gru, u, use_reentrant=again)
                if checkpointed
                else plain(gru, u)
            )
            loss = (y**2).sum((0, 2))
        if again and checkpointed:
            with pytest.raises(InputError, match="reentrant checkpointing"):
                tape.penalty("log-ratio", loss)
            return
        G = tape.penalty("log-ratio", loss)
        values.append([G, *torch.autograd.grad((loss + G).mean(), [u, *gru.parameters()])])
        assert len(tape.calls) == 1
    assert all(apart(a, b, 1e-9) < 1e-12 for a, b in zip(*values, strict=True))


@pytest.mark.parametrize("kind", ["tanh", "lstm", "gru"])
def test_penalised_training_reaches_the_weights_of_a_loop_by_hand(kind):
    """Three steps of gradient descent, plain and penalised, by hand and with the module: the same
    weights.
    """
    sizes = LENGTHS["unsorted"][0]
    for rho in (0.0, 0.1):
        m = module_of(kind, "both")
        w, u, _ = stacks.leaves(m, sizes)
        optimiser = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
        velocity = {n: torch.zeros_like(p) for n, p in w.items()}
        for _ in range(3):
            truth = Truth(m, w, [y.detach() for y in u], loss="output", order=[1, 3, 0, 2])
            value = truth.loss + (rho * truth.penalty("log-ratio") if rho else 0)
            for n, g in oracles.gradient(value.mean(), w).items():
                velocity[n] = 0.9 * velocity[n] + g
            w = {n: (p - 0.1 * velocity[n]).detach().requires_grad_() for n, p in w.items()}
            with co.record(m) as tape:
                loss = loss_of("output", *called(m, [y.detach() for y in u]))
            if rho:
                loss = loss + rho * tape.penalty("log-ratio", loss)
            optimiser.zero_grad()
            loss.mean().backward()
            optimiser.step()
        for name, p in m.named_parameters():
            assert (p - w[name]).abs().max() < 1e-9, name


def test_a_loss_of_packed_data_is_differentiated(gru):
    """A loss made of the packed data itself, row by row."""
    u = [torch.randn(n, 2, dtype=F64) for n in (2, 4, 3)]
    with co.record(gru) as tape:
        out, _ = gru(pack_sequence(u, enforce_sorted=False))
    assert isinstance(out, PackedSequence)
    padded, _ = pad_packed_sequence(out)
    sample = torch.cat([out.sorted_indices[:n] for n in out.batch_sizes.tolist()])
    loss = torch.zeros(3, dtype=F64).index_add(0, sample, (out.data**2).sum(1))
    assert torch.allclose(loss, (padded**2).sum((0, 2)))
    assert torch.equal(tape.costates(loss)[0].lam, tape.costates((padded**2).sum((0, 2)))[0].lam)
    assert tape.costates(loss)[0].trajectory.lengths.tolist() == [2, 4, 3]

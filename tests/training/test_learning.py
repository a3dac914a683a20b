"""What a training step learns from, and how it changes the weights.

Pre-training, a steered penalty weight, selected samples, dropout, and a readout solved in closed
form: each against its definition.
"""

import copy
import itertools
import json
import math

import pytest
import torch
from torch.nn.functional import dropout
from torch.nn.utils.rnn import pack_sequence

import build
import coadjoint as co
from coadjoint.gradients import penalised
from coadjoint.gradients.method import Method
from coadjoint.networks.initialisers import initialise
from coadjoint.networks.ridge import Ridge
from coadjoint.objectives.penalties import log_decay
from coadjoint.objectives.weights import Steered
from coadjoint.optimisers.curvature import Curvature
from coadjoint.training.curriculum import Easiest
from compare import close

pytestmark = pytest.mark.slow

F64 = torch.float64
T, B, I, H, O = 7, 5, 3, 4, 2


def ragged(seed=0):
    g = torch.Generator().manual_seed(seed)
    n = torch.randint(2, T + 1, (B,), generator=g)
    n[2] = T
    return n


def make(cell="elman", readout="last", seed=0, **more):
    net = build.network(
        cell, seed, inputs=I, hidden=H, outputs=O, readout=readout, x0="learned", **more
    )
    with torch.no_grad():
        net.x0.normal_(0, 0.5)
    y = torch.randn(T, B, O, dtype=F64) if readout == "every" else torch.randn(B, O, dtype=F64)
    mask = torch.rand(y.shape[:-1], dtype=F64).round() + 0.5 if readout == "every" else None
    return net, co.Batch(
        torch.randn(T, B, I, dtype=F64), y, ragged(seed), mask=mask, weight=torch.rand(B, dtype=F64)
    )


def elman(theta, u, x):
    return torch.tanh(theta["W"] @ x + theta["R"] @ u + theta["b"])


def lstm(theta, u, x):
    h, c = x.split(H)
    i, f, g, o = (theta["W"] @ h + theta["R"] @ u + theta["b"]).split(H)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.cat([torch.sigmoid(o) * torch.tanh(c), c])


STEPS = {"elman": elman, "lstm": lstm}


class Loop:
    """One sample after the other, step by step, by autograd alone: losses, log-ratio penalties,
    log-decays.
    """

    def __init__(self, cell, net, batch, heard=None, seen=None):
        theta, step = dict(net.named_parameters()), STEPS[cell]
        every, found = net.readout == "every", []
        for j in range(B):
            n, x = int(batch.lengths[j]), [theta["x0"] * 1]
            u = [batch.u[t, j] * (1 if heard is None else heard[t, j]) for t in range(n)]
            for v in u:
                x.append(step(theta, v, x[-1]))
            L = 0
            for t in range(n) if every else [n - 1]:
                h = x[t + 1][:H] * (1 if seen is None else seen[t, j] if every else seen[j])
                a = theta["V"] @ h + theta["b_o"] + (theta["D"] @ u[t] if "D" in theta else 0)
                weight = 1 if batch.mask is None else batch.mask[t, j]
                L = L + weight * ((a - (batch.y[t, j] if every else batch.y[j])) ** 2).sum()
            lam = torch.autograd.grad(L, x, create_graph=True)
            logs = torch.stack([v.square().sum().log() / 2 for v in lam[1:]])
            r = logs[:-1] - logs[1:]
            found.append((L, (r**2).mean(), r.mean().abs()))
        self.losses, self.penalties, self.decays = (
            torch.stack(list(v)) for v in zip(*found, strict=True)
        )
        self.theta, self.weight = theta, batch.weight

    def gradient(self, share, rho):
        value = (self.weight * (share * self.losses + rho * self.penalties)).mean()
        grads = torch.autograd.grad(
            value, list(self.theta.values()), allow_unused=True, retain_graph=True
        )
        zipped = zip(self.theta.items(), grads, strict=True)
        return value, {name: torch.zeros_like(p) if g is None else g for (name, p), g in zipped}


def check(e, value, gradient, bar=1e-10):
    close(e.objective, value, bar)
    assert set(e.gradient) == set(gradient)
    for name, g in gradient.items():
        close(e.gradient[name], g, bar, name)


# pre-training


@pytest.mark.parametrize("cell", STEPS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("segments", [None, 3])
def test_pretraining_minimises_the_penalty_alone(cell, readout, segments):
    net, batch = make(cell, readout)
    truth, method = Loop(cell, net, batch), co.Penalised("log-ratio", 0.7, segments, pretrain=2)
    for share in (0, 0, 1, 1):
        e = method(net, batch, "squared")
        check(e, *truth.gradient(share, 0.7))
        assert e.share == share
        method.step -= 1
        assert method.value(net, batch, "squared") == pytest.approx(float(e.objective), rel=1e-12)
        method.step += 1
        close(e.losses, truth.losses, 1e-10)
        close(e.penalties, truth.penalties, 1e-10)
        close(e.costates.loss, truth.losses, 1e-10)
    assert (
        float(
            co.Penalised("log-ratio", 0.7, pretrain=1)(net, batch, "squared")
            .gradient["b_o"]
            .abs()
            .max()
        )
        > 0
    )


def alive(net, task):
    batch = task.batch(10**6, 64, 0).to(net.V.dtype, "cpu")
    lam = co.BPTT()(net, batch, task.loss).costates
    return float(lam.log_ratios()[1:].mean())


def test_pretraining_brings_a_dead_network_to_life():
    """From a spectral radius of 0.3 costates fall by a factor of three in each step; after 60 steps
    on the penalty alone they keep their size.

    As many steps on the loss alone change nothing. In float64: the first steps are so large that
    the rounding of float32 shows in the last.
    """
    torch.manual_seed(0)
    task, found = co.tasks.make("temporal-order", length=50), {}
    for name, method in (
        ("penalty", co.Penalised("log-ratio", 1.0, pretrain=60)),
        ("loss", co.BPTT()),
    ):
        net = co.Network(
            "elman",
            inputs=task.inputs,
            hidden=16,
            outputs=task.outputs,
            output=task.output,
            dtype=torch.float64,
        )
        initialise(net, "spectral", radius=0.3, seed=0)
        adam, before = torch.optim.Adam(net.parameters(), lr=1e-2), alive(net, task)
        for step in range(60):
            batch = task.batch(step, 20, 0).to(torch.float64, "cpu")
            method(net, batch, task.loss).write_grad(net)
            adam.step()
        found[name] = abs(alive(net, task)) / abs(before)
        assert before < -1
    assert found["penalty"] < 0.05
    assert found["loss"] > 0.3


def test_what_pretraining_cannot_do_is_refused():
    net, batch = make()
    with pytest.raises(co.InputError, match="a number of training steps, at least 0; got -1"):
        co.Penalised("log-ratio", pretrain=-1)
    with pytest.raises(co.InputError, match="rho is 0 at step 0"):
        co.Penalised("log-ratio", 0.0, pretrain=1)(net, batch, "squared")


# a steered weight


@pytest.mark.parametrize(
    ("rho", "decay", "wanted"),
    [
        (1.0, 0.02, 2.0**0.5), (1.0, 0.005, 0.5**0.5), (1.0, 0.01, 1.0), (1.0, 5.0, math.e**0.5),
        (1.0, 0.0, math.e**-0.5),
        (1.0, math.nan, 1.0), (1.0, math.inf, 1.0), (7.0, 1.0, 8.0), (0.15, 1e-9, 0.1),
        (1.0, 0.01 * math.exp(-1.5), math.e**-0.5),  # both clips, within [low, high]
        (1.0, 1e-300, math.e**-0.5),
        (1.0, 0.01 * math.exp(1.5), math.e**0.5),
    ],
)  # fmt: skip
def test_a_steered_weight_follows_its_rule(rho, decay, wanted):
    assert Steered(1.0, 0.01, gain=0.5, low=0.1, high=8.0).next(rho, decay) == pytest.approx(
        wanted, rel=1e-14
    )


@pytest.mark.parametrize("cell", STEPS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("segments", [None, 3])
def test_a_weight_is_steered_by_the_measured_decay(cell, readout, segments):
    net, batch = make(cell, readout)
    truth, rule = Loop(cell, net, batch), Steered(0.4, 0.1, gain=0.2)
    close(log_decay(co.BPTT()(net, batch, "squared").costates), truth.decays, 1e-10)
    method, rho = co.Penalised("log-ratio", rule, segments), 0.4
    for _ in range(3):
        e = method(net, batch, "squared")
        assert e.rho == pytest.approx(rho, rel=1e-12)
        check(e, *truth.gradient(1, e.rho))
        rho = rule.next(rho, float(truth.decays.detach().mean()))
    assert rho != 0.4


def test_a_steered_weight_is_restored_from_its_state():
    """Bit for bit, through JSON; single samples do not turn it, and the parts of a batch turn it as
    the whole does.
    """
    net, batch = make()
    rule = Steered(1.0, 0.4, gain=0.3)

    def used(method):
        return method(net, batch, "squared").rho

    whole = co.Penalised("log-ratio", rule)
    wanted = [used(whole) for _ in range(6)]
    assert len(set(wanted)) == 6
    first = co.Penalised("log-ratio", rule)
    for step in range(3):
        first.evaluate(net, batch.select([0]), "squared")
        assert first.evaluate(
            net, batch.select(range(1, len(batch.sizes))), "squared"
        ).rho == pytest.approx(wanted[step])
        first.step += 1
    second = co.Penalised("log-ratio", rule)
    second.state.update(json.loads(json.dumps(first.state)))
    for step in (3, 4, 5):
        second.step = step
        assert second.evaluate(net, batch, "squared").rho == pytest.approx(wanted[step], rel=1e-12)
        assert second.evaluate(net, batch, "squared").rho == pytest.approx(wanted[step], rel=1e-12)
        second.per_sample(net, batch, "squared")
    second.step = 0
    assert second.evaluate(net, batch, "squared").rho == 1.0
    assert Method().state == {}
    assert co.Penalised("log-ratio", 1.0).state == {}


def test_a_steered_weight_brings_the_decay_to_its_target():
    task = co.tasks.make("temporal-order", length=30)
    net = co.Network(
        "elman", inputs=task.inputs, hidden=16, outputs=task.outputs, output=task.output
    )
    initialise(net, "spectral", radius=0.3, seed=0)
    adam, method = (
        torch.optim.Adam(net.parameters(), lr=3e-3),
        co.Penalised("log-ratio", Steered(0.01, 0.1, gain=0.05)),
    )
    decays, weights = [], []
    for step in range(300):
        e = method(net, task.batch(step, 20, 0), task.loss)
        e.write_grad(net)
        adam.step()
        decays.append(float(log_decay(e.costates).mean()))
        weights.append(e.rho)
    assert decays[0] > 1
    assert sum(decays[-100:]) / 100 < 0.1
    assert max(weights) > 2 * weights[0]
    assert weights[-1] < max(weights)
    grew = [b > a for a, b in itertools.pairwise(weights)]
    assert grew == [d > 0.1 for d in decays[:-1]]


def test_the_decay_of_several_layers_is_their_mean():
    torch.manual_seed(0)
    stack = co.Stack(["elman", "gru"], inputs=I, hidden=H, outputs=O, dtype=F64)
    batch = co.Batch(torch.randn(T, B, I, dtype=F64), torch.randn(B, O, dtype=F64))
    method = co.Penalised("log-ratio", Steered(1.0, 0.05))
    lam = method(stack, batch, "squared").costates
    close(
        log_decay(lam),
        torch.stack([lam[k].log_ratios()[1:].mean(0).abs() for k in range(2)]).mean(0),
        1e-10,
    )
    short = batch.select([0, 1])
    method(
        stack, co.Batch(short.u[:1], short.y), "squared"
    )  # one step has no ratio: the weight stays
    rho = method.state["rho"]
    assert rho != 1.0
    assert method(stack, batch, "squared").rho == rho


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((0.0, 0.1), "start of a steered weight must be a finite number, above 0; got 0.0"),
        ((1.0, -1), "target of a steered weight"),
        ((1.0, 0.1, math.nan), "gain of a steered weight"),
        ((1.0, 0.1, 0.1, 2.0), "starts within low = 2 and high = 10000; got start = 1"),
    ],
)
def test_bad_options_of_a_steered_weight_are_refused(given, words):
    with pytest.raises(co.InputError, match=words):
        Steered(*given)


def test_recorded_gradients_are_the_same(monkeypatch):
    """What a GPU records: the weight as a tensor, one recording for each part of the objective."""
    net, batch = make()
    kinds, whole = [], lambda: co.Penalised("log-ratio", Steered(0.5, 0.05), pretrain=2)
    ours, theirs = whole(), whole()

    def recordings(compute, net, batch, loss, rho, kind):
        kinds.append(kind)
        found, _ = compute(net, batch, loss, torch.tensor(rho, dtype=F64))
        return found

    ours.__dict__["captured"] = recordings
    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(penalised, "is_on_gpu", lambda batch: True)
            a = ours(net, batch, "squared")
        b = theirs(net, batch, "squared")
        check(a, b.objective, b.gradient, 1e-14)
        assert (a.rho, a.share, ours.state) == (b.rho, b.share, theirs.state)
        assert torch.equal(a.penalties, b.penalties)
    shares_and_holds = [kind[:2] for kind in kinds]
    assert shares_and_holds == [(0.0, None), (0.0, None), (1.0, None), (1.0, None)]
    assert len({kind[2] for kind in kinds}) == 1  # of one penalty


# samples of a batch


def packed(u, n):
    return pack_sequence([u[: n[j], j] for j in range(B)], enforce_sorted=False)


KINDS = {
    "padded": lambda u, n: (u, n),
    "list": lambda u, n: ([u[: n[j], j] for j in range(B)], None),
    "packed": lambda u, n: (packed(u, n), None),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize(
    "index", [[3], [4, 0], [2, 1, 3, 0], torch.tensor([True, False, False, True, True])]
)
def test_selected_samples_are_those_of_the_batch(kind, readout, index):
    net, batch = make("gru", readout)
    u, lengths = KINDS[kind](batch.u, batch.lengths)
    batch = co.Batch(
        u, batch.y, lengths, batch.mask, batch.weight, torch.randn(B, H, dtype=F64), "mean"
    )
    some = batch.select(index, readout)
    chosen = (
        torch.as_tensor(index).nonzero()[:, 0]
        if isinstance(index, torch.Tensor)
        else torch.tensor(index)
    )
    whole, part = co.BPTT()(net, batch, "squared"), co.BPTT()(net, some, "squared")
    assert torch.equal(some.sizes, ragged()[chosen])
    assert some.reduce == "mean"
    close(part.losses, whole.losses[chosen], 1e-13)
    close(part.loss, (batch.weight * whole.losses)[chosen].mean(), 1e-13)
    one = [co.BPTT()(net, batch.select([j], readout), "squared").gradient for j in chosen.tolist()]
    for name, g in part.gradient.items():
        close(g, sum(y[name] for y in one) / len(one), 1e-12, name)


def test_selected_sequences_keep_their_losses():
    torch.manual_seed(0)
    net = co.EncoderDecoder("gru", inputs=3, hidden=4, outputs=4, dtype=F64)
    y = torch.tensor([[0, 2, 1], [3, 1, 3], [-1, 3, -1]])
    batch = co.Batch(torch.randn(5, 3, 3, dtype=F64), y, torch.tensor([5, 3, 2]))
    some, losses = batch.select([2, 1], "sequence"), co.BPTT()(net, batch, "cross-entropy").losses
    assert some.u.shape == (3, 2, 3)
    close(co.BPTT()(net, some, "cross-entropy").losses, losses[[2, 1]], 1e-10)


@pytest.mark.parametrize("index", [[], [5], [-1], [0.5], torch.tensor([True, False]), 3])
def test_samples_that_are_not_there_are_refused(index):
    with pytest.raises(co.InputError, match=r"samples|numbered"):
        make()[1].select(index)


# a curriculum by difficulty


@pytest.mark.parametrize(
    ("name", "options"),
    [("temporal-order", {"length": 20}), ("copy", {"length": 6}), ("sorting", {})],
)
@pytest.mark.parametrize("by", ["loss", "length"])
def test_the_easiest_are_chosen(name, options, by):
    task = co.tasks.make(
        name,
        **options | {"ragged": True, "length": (10, 25)} if name == "temporal-order" else options,
    )
    make_ = co.EncoderDecoder if task.readout == "sequence" else co.Network
    more = (
        {}
        if task.readout == "sequence"
        else {"readout": task.readout, "output": task.output, "dropout": 0.5}
    )
    torch.manual_seed(0)
    net = make_("gru", inputs=task.inputs, hidden=6, outputs=task.outputs, **more)
    pace, n = Easiest(0.25, 8, by), 6
    for step, share in ((0, 0.25), (4, 0.625), (8, 1.0), (20, 1.0)):
        drawn = task.batch(step, round(n / share), 3)
        before = torch.get_rng_state()
        ours = pace.choose(net, task, step, n, 3)
        assert torch.equal(torch.get_rng_state(), before)
        assert net.training
        net.eval()
        with torch.no_grad():
            losses = net(drawn.u, drawn.lengths).loss(task.loss, drawn.y, reduce=drawn.reduce)
        net.train()
        size = losses if by == "loss" else drawn.sizes.float()
        order = sorted(range(len(size)), key=lambda j: (float(size[j]), j))
        theirs = drawn.select(sorted(order[:n]), task.readout)
        assert len(ours.sizes) == n
        assert torch.equal(ours.u, theirs.u)
        assert torch.equal(ours.y, theirs.y)
        again = pace.choose(copy.deepcopy(net), task, step, n, 3)
        assert torch.equal(again.u, ours.u)
    assert pace.choose(net, task, 20, n, 3).u.equal(task.batch(20, n, 3).u)
    assert not pace.choose(net, task, 4, n, 4).u.equal(pace.choose(net, task, 4, n, 3).u)


def test_a_difficulty_of_the_user_is_used():
    task = co.tasks.make("addition", length=12)
    net = co.Network("elman", inputs=2, hidden=4, outputs=1)
    batch = Easiest(0.2, 10, by=lambda b: -b.y.flatten()).choose(net, task, 0, 4, 0)
    drawn = task.batch(0, 20, 0)
    assert torch.equal(batch.y.flatten().sort().values, drawn.y.flatten().sort().values[-4:])
    other = Easiest(0.2, 10).choose(net, task, 0, 4, 0, draw=7)
    assert all(
        any(torch.equal(u, v) for v in task.batch(7, 20, 0).u.unbind(1)) for u in other.u.unbind(1)
    )


def test_where_all_are_kept_nothing_is_measured():
    task = co.tasks.make("addition", length=12)
    net = co.Network("elman", inputs=2, hidden=4, outputs=1)
    pace = Easiest(0.2, 10, by=lambda b: pytest.fail("measured"))
    assert torch.equal(pace.choose(net, task, 10, 4, 0).u, task.batch(10, 4, 0).u)


@pytest.mark.parametrize(
    ("given", "words"),
    [((0, 5), "above 0 and at most 1"), ((0.5, 0), "at least 1"), ((0.5, 5, "size"), "difficulty")],
)
def test_bad_options_of_a_curriculum_are_refused(given, words):
    with pytest.raises(co.CoadjointError, match=words):
        Easiest(*given)


# dropout


def masks(net, batch, p=0.4):
    """What the next run will draw, [T, B, inputs] and [T, B, hidden] or [B, hidden]."""
    layout = co.BPTT()(net.eval(), batch, "squared").trajectory.layout
    net.train()
    torch.manual_seed(9)

    def draw(n, m):
        return dropout(torch.ones(n, m, dtype=F64), p)

    every = net.readout == "every"
    heard, seen = draw(layout.rows.N, I), draw(layout.rows.N if every else B, H)
    torch.manual_seed(9)
    return layout.padded(heard), layout.padded(seen) if every else layout.unsort(seen)


@pytest.mark.parametrize("cell", STEPS)
@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
@pytest.mark.parametrize("skip", [False, True])
def test_dropout_is_one_mask_for_costates_and_both_derivatives(cell, readout, engine, skip):
    net, batch = make(cell, readout, engine=engine, skip=skip, dropout=0.4)
    truth = Loop(cell, net, batch, *masks(net, batch))
    e = co.Penalised("log-ratio", 0.6)(net, batch, "squared")
    check(e, *truth.gradient(1, 0.6), 1e-9)
    close(log_decay(e.costates), truth.decays, 1e-10)
    masks(net, batch)
    e = co.BPTT()(net, batch, "squared")
    check(e, *truth.gradient(1, 0.0), 1e-9)
    close(log_decay(e.costates), truth.decays, 1e-10)
    if engine != "autograd":
        found = e.temporal_components().weighted(torch.ones(T, dtype=F64))
        close(found, {name: e.gradient[name] for name in found}, 1e-12)
    assert float((e.trajectory.u == 0).double().mean()) > 0.2
    net.eval()
    plain = Loop(cell, net, batch)
    check(co.Penalised("log-ratio", 0.6)(net, batch, "squared"), *plain.gradient(1, 0.6), 1e-9)


@pytest.mark.parametrize("readout", ["last", "every", "tilted"])
@pytest.mark.parametrize("deep", [(), (3,)])
def test_a_change_of_the_inputs_goes_through_what_is_left(readout, deep):
    net, batch = make("lstm", readout, dropout=0.4, deep=deep, skip=True)
    du, step = torch.randn(T, B, I, dtype=F64), 1e-6

    def said(u):
        torch.manual_seed(5)
        return net(u, batch.lengths).y_hat

    torch.manual_seed(5)
    ours = net(batch.u, batch.lengths).push(du)
    close(ours, (said(batch.u + step * du) - said(batch.u - step * du)) / (2 * step), 1e-7)


def test_dropped_entries_are_the_share_that_is_asked_for():
    torch.manual_seed(0)
    net = co.Network("elman", inputs=200, hidden=200, outputs=1, readout="every", dropout=0.25)
    run = net(torch.ones(20, 10, 200))
    for mask in (run.u, run.extra["dropped"]):
        assert mask.unique().tolist() == [0.0, pytest.approx(4 / 3)]
        assert abs(float((mask == 0).float().mean()) - 0.25) < 0.01
    assert not torch.equal(run.u[0], run.u[1])
    assert net.eval()(torch.ones(2, 1, 200)).u.equal(torch.ones(2, 1, 200))
    plain = co.Network("elman", inputs=200, hidden=200, outputs=1, readout="every")
    before = torch.get_rng_state()
    plain(torch.ones(2, 1, 200))
    assert torch.equal(torch.get_rng_state(), before)


REFUSED = {
    "segments": lambda net, b: co.BPTT(segments=2)(net, b, "squared"),
    "penalised segments": lambda net, b: co.Penalised("log-ratio", segments=2)(net, b, "squared"),
    "truncated": lambda net, b: co.Truncated(2, 3)(net, b, "squared"),
    "rtrl": lambda net, b: co.RTRL()(net, b, "squared"),
    "stream": lambda net, b: co.RTRL().stream(net),
    "single samples": lambda net, b: co.BPTT().per_sample(net, b, "squared"),
    "curvature": lambda net, b: Curvature(net, b, "squared"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_methods_that_run_a_network_twice_refuse_dropout(what):
    net, batch = make(dropout=0.4)
    with pytest.raises(
        co.Unsupported, match=r"with dropout=0.4 every run in training mode is different"
    ):
        REFUSED[what](net, batch)
    REFUSED[what](net.eval(), batch)


@pytest.mark.parametrize("p", [1.0, -0.1, True, "x", math.nan])
def test_a_share_outside_0_to_1_is_refused(p):
    for make_ in (
        lambda: make(dropout=p),
        lambda: co.Stack(["elman"], inputs=1, hidden=1, outputs=1, dropout=p),
    ):
        with pytest.raises(co.InputError, match="from 0 to below 1"):
            make_()


def test_a_stack_of_one_layer_drops_what_a_network_drops():
    net, batch = make("lstm", dropout=0.4)
    stack = co.Stack(["lstm"], inputs=I, hidden=H, outputs=O, x0="learned", dropout=0.4, dtype=F64)
    own = {name.replace("layers.levels.0.0.", ""): p for name, p in stack.named_parameters()}
    for name, p in net.named_parameters():
        own[name].data.copy_(p.data)
    found = []
    for one in (net, stack):
        torch.manual_seed(3)
        found.append(co.Penalised("variance", 0.3)(one, batch, "squared"))
    close(found[1].objective, found[0].objective, 1e-10)
    close(found[1].gradient["layers.levels.0.0.W"], found[0].gradient["W"], 1e-10)


# a readout in closed form


def regression(net, batch, alpha, targets):
    """V and b_o by least squares on rows one below the other; the penalty as rows of its own."""
    net.eval()
    run, every = net(batch.u, batch.lengths, batch.x0), net.readout == "every"
    rows, ys, ws = [], [], []
    for j in range(B):
        n = int(batch.lengths[j])
        mask = (
            torch.ones(n, dtype=F64)
            if batch.mask is None
            else batch.mask[:n, j]
            if every
            else batch.mask[j : j + 1]
        )
        count = mask.sum() if batch.reduce == "mean" else 1
        for t in range(n) if every else [n - 1]:
            weight = (
                (batch.weight[j] if batch.weight is not None else 1)
                * (mask[t] if every else mask[0])
                / count
            )
            rows.append(run.x[t + 1, j, :H])
            ys.append(targets[t, j] if every else targets[j])
            ws.append(float(weight) ** 0.5)
    X, Y, w = (
        torch.stack(rows).detach(),
        torch.stack(ys).double(),
        torch.tensor(ws, dtype=F64)[:, None],
    )
    bias = [torch.ones(len(X), 1, dtype=F64)] if net.b_o is not None else []
    X = torch.cat([X, *bias], 1)
    extra = alpha**0.5 * torch.eye(H, X.shape[1], dtype=F64)
    left, right = (
        torch.cat([w * X, extra]),
        torch.cat([w * Y, torch.zeros(H, Y.shape[1], dtype=F64)]),
    )
    found = torch.linalg.lstsq(left, right, driver="gelsd").solution
    net.train()
    return found[:H].T, found[H] if bias else None


@pytest.mark.parametrize("readout", ["last", "every"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 1e-3, 2.0])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("cell", ["leaky", "lstm"])
def test_ridge_is_least_squares(readout, bias, alpha, reduce, cell):
    net, batch = make(cell, readout, bias=bias, dropout=0.3)
    mask = batch.mask if readout == "every" else 0.5 + torch.rand(B, dtype=F64)
    if readout == "every":
        mask[1] = 0
    batch = co.Batch(
        batch.u,
        batch.y,
        batch.lengths,
        mask,
        batch.weight,
        0.3 * torch.randn(B, net.n, dtype=F64),
        reduce,
    )
    V, b_o = regression(net, batch, alpha, batch.y)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    ours = Ridge(net, alpha).add(batch).solve()
    close(net.V, V, 1e-9)
    if bias:
        close(net.b_o, b_o, 1e-9)
    assert all(
        torch.equal(p, before[name])
        for name, p in net.named_parameters()
        if name not in ("V", "b_o")
    )
    assert net.training
    if alpha == 0 and not (readout == "last" and reduce == "mean"):
        g = co.BPTT()(net.eval(), batch, "squared").gradient
        assert all(float(g[name].abs().max()) < 1e-9 for name in ("V", "b_o") if name in g)
    parts = Ridge(net, alpha)
    for j in range(B):  # in parts, by another object after each
        parts, last = Ridge(net, alpha), parts
        parts.state.update(last.state)
        parts.add(batch.select([j], readout))
    assert set(parts.state) == {"factor"}
    parts.solve()
    close(net.V, V, 1e-9)
    assert ours.state["factor"].dtype == F64


@pytest.mark.parametrize("output", ["softmax", "identity", "sigmoid"])
@pytest.mark.parametrize("readout", ["last", "every"])
def test_ridge_is_least_squares_on_classes(output, readout):
    net, batch = make(readout=readout, output=output)
    lead = (T, B) if readout == "every" else (B,)
    y = torch.randint(0, 2, (*lead, O) if output == "sigmoid" else lead)
    batch = co.Batch(batch.u, y, batch.lengths)
    wanted = 2 * y - 1 if output == "sigmoid" else torch.nn.functional.one_hot(y, O)
    V, b_o = regression(net, batch, 0.1, wanted)
    Ridge(net, 0.1).add(batch).solve()
    close(net.V, V, 1e-9)
    close(net.b_o, b_o, 1e-9)


def test_ridge_works_for_one_output_floats_stacks_and_summaries():
    torch.manual_seed(0)
    u, y = torch.randn(T, 40, I), torch.randn(40)
    for net in (
        co.Network("elman", inputs=I, hidden=H, outputs=1),
        co.Stack(["elman", "gru"], inputs=I, hidden=H, outputs=1, bidirectional=True),
        co.Network("elman", inputs=I, hidden=H, outputs=1, readout="tilted"),
    ):
        Ridge(net, 0.0).add(co.Batch(u, y)).solve()
        g = co.BPTT()(net, co.Batch(u, y), "squared").gradient
        assert max(float(g["V"].abs().max()), float(g["b_o"].abs().max())) < 1e-5
        assert net.V.dtype == torch.float32


def test_ridge_is_that_of_a_reservoir():
    r = co.Reservoir(I, 20, O, washout=0, ridge=1e-4, dtype=F64)
    u, y = torch.randn(50, 3, I, dtype=F64), torch.randn(50, 3, O, dtype=F64)
    r.fit(u, y)
    V = r.network.V.clone()
    Ridge(r.network, 1e-4).add(co.Batch(u, y)).solve()
    assert torch.equal(r.network.V, V)


RIDGES = {
    "skip": (lambda: make(skip=True)[0], "has skip=True"),
    "deep": (lambda: make(deep=3)[0], "has deep="),
    "attention": (lambda: make(readout="attention")[0], "has readout='attention'"),
    "tanh": (lambda: make(output="tanh")[0], "has output='tanh'"),
    "sequence": (lambda: co.EncoderDecoder("gru", inputs=2, hidden=3, outputs=4),
        "has an output that is a sequence"),
    "parametrised": (
        lambda: torch.nn.utils.parametrizations.weight_norm(make()[0], "V"), "has a parametrised V",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", RIDGES)
def test_readouts_that_ridge_cannot_solve_are_refused(what):
    build, words = RIDGES[what]
    with pytest.raises(co.Unsupported, match=words):
        Ridge(build())


def test_other_settings_that_ridge_cannot_use_are_refused():
    net, batch = make()
    with pytest.raises(co.InputError, match="alpha must be a finite number, at least 0; got -1"):
        Ridge(net, -1)
    with pytest.raises(co.InputError, match="there is no data yet"):
        Ridge(net).solve()
    with pytest.raises(co.InputError, match="needs targets"):
        Ridge(net).add(co.Batch(batch.u, lengths=batch.lengths))
    with pytest.raises(co.InputError, match="got a negative one"):
        Ridge(net).add(co.Batch(batch.u, batch.y, batch.lengths, weight=-torch.ones(B, dtype=F64)))
    with pytest.raises(co.InputError, match="expected 2 entries"):
        Ridge(net).add(co.Batch(batch.u, torch.ones(B, 3, dtype=F64), batch.lengths))
    with pytest.raises(co.InputError, match=r"the targets y end in \[\]; expected 2 entries"):
        Ridge(net).targets(torch.ones(B, dtype=F64))
    with pytest.raises(co.InputError, match=r"classes must lie in 0\.\.1; got 0\.\.7"):
        Ridge(net).add(co.Batch(batch.u, torch.tensor([0, 1, 7, 0, 0]), batch.lengths))

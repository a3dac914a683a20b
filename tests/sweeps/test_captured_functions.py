"""Own loops replayed as CUDA graphs have the values and derivatives of those that are not.

A CPU stands in for the GPU (tests/support/graphs.py).
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref

import pytest
import torch

import coadjoint as co
import graphs
from coadjoint.sweeps import checks
from coadjoint.sweeps.engines.cuda import captured_stages
from coadjoint.sweeps.engines.cuda.captured_stages import Stage
from coadjoint.sweeps.rows import uniform_rows

F64 = torch.float64


@pytest.fixture
def gpu(monkeypatch):
    """The CPU is taken for a GPU."""
    graphs.install(monkeypatch)


def make_net(cell="elman", **options):
    torch.manual_seed(0)
    made = {"inputs": 3, "hidden": 5, "outputs": 4, "engine": "eager", "dtype": F64, **options}
    return co.Network(cell, **made)


def never_replayed(net):
    """A copy whose runs are computed operation by operation."""
    other = copy.deepcopy(net)
    recordings = other.recordings
    recordings.runs.records = recordings.costates.records = recordings.penalties.records = False
    return other


def draw(i, T=6, B=3, classes=4):
    generator = torch.Generator().manual_seed(i)
    u = torch.randn(T, B, 3, generator=generator, dtype=F64)
    return u, torch.randint(classes, (B,), generator=generator)


def penalised(net, u, y, G=co.penalties.log_ratio, loss="cross-entropy", **options):
    """The gradient of an own loop, by name, and the objective."""
    lam = net(u).costates(loss, y, **options)
    objective = (lam.loss + 0.3 * G(lam)).mean()
    grads = torch.autograd.grad(objective, list(net.parameters()), allow_unused=True)
    return [objective.detach(), *(torch.zeros(()) if g is None else g for g in grads)]


def assert_same(found, expected):
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-14)


def stages(recordings):
    """How many functions were captured, of runs, costates and penalties."""
    kinds = recordings.runs, recordings.costates, recordings.penalties
    return [sum(isinstance(e, Stage) for e in kind.cache.entries.values()) for kind in kinds]


@pytest.mark.parametrize("cell", ["elman", "lstm", "gru"])
def test_own_loop(cell, gpu):
    net = make_net(cell)
    plain = never_replayed(net)
    for i in range(8):
        u, y = draw(i)
        assert_same(penalised(net, u, y), penalised(plain, u, y))
    assert stages(net.recordings) == [1, 1, 1]


OPTIONS = {
    "every step": {"readout": "every"},
    "learned x0": {"x0": "learned"},
    "masked": {"mask": torch.ones(5, 5, dtype=F64).tril()},
    "orthogonal": {"structure": "orthogonal"},
    "skip": {"skip": True},
    "deep": {"deep": (7,)},
    "attention": {"readout": "attention"},
    "tilted": {"readout": "tilted"},
    "no bias": {"bias": False},
    "leaky": {"cell": "leaky"},
    "lru": {"cell": "lru"},
    "scrn": {"cell": "scrn"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_networks_of_every_kind(name, gpu):
    net = make_net(**OPTIONS[name])
    plain = never_replayed(net)
    for i in range(7):
        u, y = draw(i)
        if net.readout == "every":
            y = y.expand(len(u), -1)
        assert_same(penalised(net, u, y), penalised(plain, u, y))
    assert stages(net.recordings) == [1, 1, 1]


@pytest.mark.parametrize("name", sorted(co.penalties.PENALTIES))
def test_every_penalty(name, gpu):
    G = co.penalties.PENALTIES[name]
    net = make_net()
    plain = never_replayed(net)
    for i in range(6):
        u, y = draw(i)
        assert_same(penalised(net, u, y, G), penalised(plain, u, y, G))
    if name != "output-variance":  # which has costates of its own, of each output
        assert stages(net.recordings) == [1, 1, int(G.reads_mantissas_only)]


@pytest.mark.parametrize(
    "G",
    [
        0.5 * co.penalties.log_ratio + co.penalties.variance,
        co.penalties.log_ratio.on(part="c"),
        co.penalties.variance.per(),
        lambda lam: lam.norms()[1],
    ],
)
def test_penalties_of_several_parts(G, gpu):
    net = make_net("lstm")
    plain = never_replayed(net)
    for i in range(6):
        u, y = draw(i)
        assert_same(penalised(net, u, y, G), penalised(plain, u, y, G))
    assert stages(net.recordings) == [1, 1, int(isinstance(G, co.Penalty))]


@pytest.mark.parametrize("cell", ["elman", "gru"])
def test_second_and_third_derivatives(cell, gpu):
    """Derivatives of the penalised gradient, by weights and inputs."""

    def derivatives(net, u, y):
        u = u.requires_grad_()
        lam = net(u).costates("cross-entropy", y)
        objective = (lam.loss + 0.3 * co.penalties.log_ratio(lam)).mean()
        inputs = [u, net.W, net.V]
        first = torch.autograd.grad(objective, inputs, create_graph=True)
        size = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(size, inputs, create_graph=True)
        size = sum(g.square().sum() for g in second)
        return [*first, *second, *torch.autograd.grad(size, inputs)]

    net = make_net(cell)
    plain = never_replayed(net)
    for i in range(8):
        u, y = draw(i, T=4)
        expected = derivatives(plain, u, y)
        for g, z in zip(derivatives(net, u, y), expected, strict=True):
            torch.testing.assert_close(g, z, rtol=1e-10, atol=1e-12)


def test_a_loss_of_the_users(gpu):
    """It is computed operation by operation, with the weight that it reads at the time."""
    weight = [1.0]

    def loss(y_hat, y):
        return weight[0] * (y_hat - 1).square().sum(-1)

    net = make_net()
    plain = never_replayed(net)
    for i in range(6):
        u, y = draw(i)
        weight[0] += 1.0
        found = penalised(net, u, y, loss=loss)
        assert_same(found, penalised(plain, u, y, loss=loss))
        values = [
            torch.autograd.grad(loss(each.y_hat, y).mean(), net_.W)
            for net_ in (net, plain)
            for each in [net_(u)]
        ]
        assert_same(*values)
    assert stages(net.recordings) == [1, 0, 1]


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_losses_held_and_reduced(reduce, gpu):
    net = make_net(readout="every", output="sigmoid")
    plain = never_replayed(net)
    for i in range(6):
        u, _ = draw(i)
        y = torch.rand(6, 3, 4, dtype=F64)
        options = {"reduce": reduce, "hold": "source", "loss": "binary-cross-entropy"}
        assert_same(penalised(net, u, y, **options), penalised(plain, u, y, **options))
    assert stages(net.recordings) == [1, 1, 1]


def test_two_runs_before_a_backward(gpu):
    """Each of them has a recording of its own."""
    net = make_net()
    plain = never_replayed(net)

    def both(net, i):
        (u, y), (other, z) = draw(i), draw(i + 100)
        one = net(u).costates("cross-entropy", y)
        two = net(other).costates("cross-entropy", z)
        G = [co.penalties.log_ratio(lam) for lam in (one, two)]
        objective = (one.loss + 2 * two.loss + G[0] - 3 * G[1]).mean()
        return torch.autograd.grad(objective, list(net.parameters()))

    for i in range(7):
        assert_same(both(net, i), both(plain, i))
    assert stages(net.recordings) == [2, 2, 2]


def test_a_backward_after_another_run(gpu):
    """The second run has overwritten what the first one left: that is computed again."""
    net = make_net()
    plain = never_replayed(net)

    def late(net, i):
        (u, y), (other, z) = draw(i), draw(i + 100)
        lam = net(u).costates("cross-entropy", y)
        objective = (lam.loss + co.penalties.log_ratio(lam)).mean()
        early = torch.autograd.grad(objective, net.W, retain_graph=True)
        penalised(net, other, z)
        return [*early, *torch.autograd.grad(objective, list(net.parameters()))]

    for i in range(7):
        assert_same(late(net, i), late(plain, i))
    assert stages(net.recordings) == [1, 1, 1]


def test_a_graph_may_be_differentiated_twice(gpu):
    net = make_net()
    plain = never_replayed(net)
    for i in range(7):
        u, y = draw(i)
        lam = net(u).costates("cross-entropy", y)
        value = lam.loss.mean() + co.penalties.variance(lam).mean()
        first = torch.autograd.grad(value, net.W, retain_graph=True)
        assert_same(torch.autograd.grad(value, net.W), first)
        lam = plain(u).costates("cross-entropy", y)
        value = lam.loss.mean() + co.penalties.variance(lam).mean()
        assert_same(first, torch.autograd.grad(value, plain.W))


def test_other_shapes_moved_and_frozen_weights(gpu):
    net = make_net()
    plain = never_replayed(net)

    def check(what, count, **shape):
        for i in range(count):
            u, y = draw(i, **shape)
            assert_same(penalised(net, u, y), penalised(plain, u, y))

    def change(f):
        for each in (net, plain):
            with torch.no_grad():
                f(each)

    def both_penalised():
        grads = []
        for each in (net, plain):
            u, y = draw(7)
            lam = each(u).costates("cross-entropy", y)
            value = (lam.loss + co.penalties.log_ratio(lam)).mean()
            grads.append(torch.autograd.grad(value, [each.W, each.V]))
        assert_same(*grads)

    check("recorded", 5)
    check("longer", 5, T=9)
    check("the first again", 2)
    change(lambda n: n.W.mul_(0.5))
    check("changed in place", 2)
    change(lambda n: setattr(n.W, "data", n.W.data.clone() * 2))
    check("moved", 5)
    for each in (net, plain):
        each.R.requires_grad_(False)
        each.b.requires_grad_(False)
    for _ in range(5):
        both_penalised()
    assert stages(net.recordings)[0] >= 3


def test_a_mask_that_is_replaced(gpu):
    net = make_net(mask=torch.ones(5, 5, dtype=F64).tril())
    plain = never_replayed(net)
    for i in range(10):
        if i == 5:
            net.mask = plain.mask = net.mask.T.contiguous()
        u, y = draw(i)
        assert_same(penalised(net, u, y), penalised(plain, u, y))


def test_a_weight_changed_before_the_backward_is_an_error(gpu):
    net = make_net()
    for i in range(6):
        u, y = draw(i)
        penalised(net, u, y)
    lam = net(u).costates("cross-entropy", y)
    value = (lam.loss + co.penalties.log_ratio(lam)).mean()
    with torch.no_grad():
        net.W.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_the_gradient_by_inputs_and_x0(gpu):
    net = make_net("lstm")
    plain = never_replayed(net)
    for i in range(6):
        results = []
        for each in (net, plain):
            u, _ = draw(i)
            u.requires_grad_()
            x0 = torch.full((3, 10), 0.1, dtype=F64, requires_grad=True)
            lam = each(u, x0=x0).costates("squared", torch.ones(3, 4, dtype=F64))
            value = (lam.loss + co.penalties.log_ratio(lam)).mean()
            results.append(torch.autograd.grad(value, [u, x0, each.W]))
        assert_same(*results)


def test_checks_are_made(gpu):
    """Of NaN in the inputs, of classes out of range, of states and costates out of range."""
    net = make_net("elman", activation="relu", dtype=torch.float32)
    u, y = draw(0)
    u = u.float()
    for _ in range(6):
        penalised(net, u, y)
    bad = u.clone()
    bad[2, 1, 0] = torch.nan
    with pytest.raises(co.InputError, match="`u` holds NaN or inf, first at step 3 of sample 1"):
        penalised(net, bad, y)
    with pytest.raises(co.InputError, match=r"class numbers must lie in 0\.\.3; got 5"):
        penalised(net, u, y * 0 + 5)
    penalised(net, u, y)
    with torch.no_grad():
        net.W.fill_(1e20)
    with pytest.raises(co.NumericalError, match="the state is outside the range of float32 at t ="):
        penalised(net, u.abs(), y)
    with pytest.raises(co.NumericalError, match="the state is outside the range of float32 at t ="):
        net(u.abs()).y_hat.sum().backward()


def test_a_gradient_out_of_range_is_an_error(gpu):
    """dL/dx_0 overflows where states do not: those of a linear network at zero."""
    net = make_net(activation="identity", dtype=torch.float32)
    u = torch.zeros(6, 3, 3)
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.V.fill_(1.0)
        net.W.fill_(1.0)
    for _ in range(6):
        (net(u).y_hat.sum()).backward()
    with torch.no_grad():
        net.W.fill_(1e15)
    with pytest.raises(co.NumericalError, match="with respect to the state is outside the range"):
        (net(u).y_hat.sum()).backward()


def test_copies_and_pickles_have_no_graphs(gpu):
    net = make_net()
    for i in range(6):
        u, y = draw(i)
        expected = penalised(net, u, y)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert stages(other.recordings) == [0, 0, 0]
        assert_same(penalised(other, u, y), expected)


def test_what_cannot_be_captured_is_said_once(gpu, monkeypatch):
    def refuse(*_):
        raise RuntimeError("no graphs today\nand more lines")

    monkeypatch.setattr(graphs.captured_stages, "prepare_stream", refuse)
    net = make_net()
    plain = never_replayed(net)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(6):
            u, y = draw(i)
            assert_same(penalised(net, u, y), penalised(plain, u, y))
    start = [str(w.message).partition(" cannot")[0] for w in said]
    assert start == ["this run", "the computation of these costates", "this penalty"]
    assert all("(no graphs today)" in str(w.message) for w in said)


def test_a_gradient_that_cannot_be_captured_leaves_no_graph(gpu, monkeypatch):
    net = make_net()
    plain = never_replayed(net)
    made = graphs.captured_stages.prepare_stream

    def refuse(device, rehearse, stream=None):
        if stream is not None:
            raise RuntimeError("no gradients today")
        return made(device, rehearse)

    monkeypatch.setattr(graphs.captured_stages, "prepare_stream", refuse)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(6):
            u, y = draw(i)
            assert_same(penalised(net, u, y), penalised(plain, u, y))
    assert len(said) == 3
    assert all("(no gradients today)" in str(w.message) for w in said)
    assert stages(net.recordings) == [0, 0, 0]


def test_methods_and_runs_without_gradients_are_not_captured(gpu):
    net = make_net()
    batch = co.Batch(*draw(0))
    for _ in range(5):
        co.BPTT()(net, batch, "cross-entropy")
        co.Penalised("log-ratio", 0.1)(net, batch, "cross-entropy")
        co.Truncated(2, 2)(net, batch, "cross-entropy")
        with torch.no_grad():
            net(batch.u).costates("cross-entropy", batch.y)
        net(batch.u, lengths=[6, 5, 4]).costates("cross-entropy", batch.y)
    assert "recordings" not in vars(net)


def test_a_step_waits_for_the_device_once(gpu, monkeypatch):
    """Whatever is checked, the counts of failures are read: once, after the last replay."""
    net = make_net()
    u, y = draw(0)
    for _ in range(6):
        penalised(net, u, y)
    read = []
    usual = checks.FailureCounts.read
    count_read = lambda table: (read.append(table), usual(table))[1]  # noqa: E731
    monkeypatch.setattr(checks.FailureCounts, "read", count_read)

    class Reads(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if torch.Tag.data_dependent_output in func.tags:
                read.append(func)
            return func(*args, **(kwargs or {}))

    lam = net(u).costates("cross-entropy", y)
    objective = (lam.loss + co.penalties.log_ratio(lam)).mean()
    assert not read
    with Reads():
        objective.backward()
    assert len(read) == 1


def test_a_step_copies_once_for_each_type(gpu, monkeypatch):
    """Nothing is cloned by itself. Arrays of two types, torch would copy one by one."""
    net = make_net("gru")
    u, y = draw(0)
    for _ in range(6):
        penalised(net, u, y)
    copied = []

    def copy_all(sources, targets):
        assert len({z.dtype for z in (*sources, *targets)}) == 1
        copied.append(len(sources))
        torch._foreach_copy_(targets, sources)

    monkeypatch.setattr(captured_stages, "copy_all", copy_all)
    monkeypatch.setattr(graphs.Graph, "replay", lambda graph: None)
    with torch.autograd.profiler.profile() as profile:
        lam = net(u).costates("cross-entropy", y)
        (lam.loss + co.penalties.log_ratio(lam)).mean().backward()
    names = [event.name for event in profile.function_events]
    assert names.count("aten::_foreach_copy_") == len(copied)
    # The results of the run; the costates' arguments without y, and results without exponents; the
    # penalty's; then gradients, of the costates by arguments and weights, of the run by weights.
    assert copied == [8, 6, 2, 2, 2, 8, 5, 4]
    assert names.count("aten::clone") == 0


def test_what_a_run_returns_may_be_changed(gpu):
    """Its tensors share no memory with each other, nor with the recording."""
    net = make_net("gru")
    u, y = draw(0)
    for _ in range(4):
        penalised(net, u, y)
    expected = penalised(net, u, y)
    run = net(u)
    lam = run.costates("cross-entropy", y)
    tensors = [run.run.x, run.run.last, *run.run.saved, lam.rows, lam.powers, lam.loss]
    of_one = [z.untyped_storage().data_ptr() for z in tensors if z is not None]
    assert len(set(of_one)) == len({id(z) for z in tensors if z is not None}) == 9
    lam.loss.mean().backward()
    grads = [p.grad.untyped_storage().data_ptr() for p in net.parameters()]
    assert len(set(grads)) == len(grads)
    with torch.no_grad():
        for z in tensors:
            if z is not None:
                z.zero_()
    net.zero_grad()
    assert_same(penalised(net, u, y), expected)
    lam = net(u).costates("cross-entropy", y)
    lam.loss.mul_(2)
    grads = torch.autograd.grad(lam.loss.sum(), net.V)
    assert_same(grads, [2 * g for g in torch.autograd.grad(penalised_loss(net, u, y), net.V)])


@pytest.mark.parametrize("cell", ["elman", "gru"])
def test_a_replayed_run_can_be_pushed(cell, gpu):
    """Along a change of the inputs, by the weights of the run."""
    net = make_net(cell)
    plain = never_replayed(net)
    u, y = draw(0)
    for _ in range(5):
        penalised(net, u, y)
    found = []
    for each in (net, plain):
        change = each(u).push(u.flip(0))
        found.append([change, *torch.autograd.grad(change.square().sum(), [each.W, each.R])])
    assert_same(*found)


def penalised_loss(net, u, y):
    """The sum of the losses."""
    return net(u).costates("cross-entropy", y).loss.sum()


def test_a_failure_is_that_of_its_own_call(gpu):
    """Whoever reads the counts: a failure is raised in its own backward, and in no other."""
    net = make_net()
    other = copy.deepcopy(net)
    plain = never_replayed(net)
    u, y = draw(0)
    bad = u.clone()
    bad[2, 1, 0] = torch.nan
    for each in (net, other):
        for _ in range(5):
            penalised(each, u, y)
    for _ in range(2):
        late = net(bad).costates("cross-entropy", y)
        assert_same(penalised(other, u, y), penalised(plain, u, y))
        assert_same(penalised(net, u, y), penalised(plain, u, y))
        with pytest.raises(co.InputError, match="`u` holds NaN or inf, first at step 3"):
            late.loss.sum().backward()
    net(bad)  # nobody asks for the answer
    net(u).costates("cross-entropy", y)
    assert_same(penalised(net, u, y), penalised(plain, u, y))
    with pytest.raises(co.InputError, match="`u` holds NaN or inf, first at step 3"):
        penalised(net, bad, y)


def test_failures_are_counted_in_more_than_one_table(gpu, monkeypatch):
    monkeypatch.setattr(checks.FailureCounts, "PLACES", 1)
    monkeypatch.setattr(captured_stages, "_failures", {})
    net = make_net()
    u, y = draw(0)
    for _ in range(6):
        expected = penalised(net, u, y)
    with pytest.raises(co.InputError, match=r"class numbers must lie in 0\.\.3; got 5"):
        penalised(net, u, y * 0 + 5)
    with pytest.raises(co.InputError, match="`u` holds NaN or inf"):
        penalised(net, u * torch.nan, y)
    assert_same(penalised(net, u, y), expected)


def test_checks_that_are_not_made_keep_no_graph(gpu):
    """A run without a backward goes when the user drops it, without the garbage collector."""
    net = make_net("lstm")
    for i in range(6):
        penalised(net, *draw(i))
    u, y = draw(0)
    run = net(u)
    lam = run.costates("cross-entropy", y)
    kept = [weakref.ref(z) for z in (run, run.run.x, lam.rows, run.run.plan)]
    gc.disable()
    try:
        del run, lam
        assert not any(each() is not None for each in kept)
    finally:
        gc.enable()


def test_graphs_go_with_their_network(gpu):
    """Nothing that is recorded waits for the garbage collector."""
    net = make_net()
    for i in range(7):
        u, y = draw(i, T=4)
        lam = net(u).costates("cross-entropy", y)
        objective = (lam.loss + co.penalties.log_ratio(lam)).mean()
        by = torch.autograd.grad(objective, [net.W], create_graph=True)
        torch.autograd.grad(by[0].square().sum(), [net.W])
    kept = []
    for kind in (net.recordings.runs, net.recordings.costates, net.recordings.penalties):
        for entry in kind.cache.entries.values():
            kept += [weakref.ref(stage) for stage in every_stage(entry)]
    assert len(kept) >= 9
    gc.disable()
    try:
        del lam, objective, by, net, kind, entry
        assert not any(each() for each in kept)
    finally:
        gc.enable()


def test_weights_from_elsewhere_are_not_captured(gpu):
    """Of torch.func.functional_call, and two names of one tensor."""
    net = make_net()
    u, y = draw(0)
    expected = penalised(net, u, y)[0]
    own = dict(net.named_parameters())
    for _ in range(6):
        computed = {name: p * 1 for name, p in own.items()}
        run = torch.func.functional_call(net, computed, (u,))
        lam = run.costates("cross-entropy", y)
        objective = (lam.loss + 0.3 * co.penalties.log_ratio(lam)).mean()
        assert_same([objective.detach()], [expected])
        objective.backward()
    assert stages(net.recordings)[0] == 0
    net.b_o = net.b = torch.nn.Parameter(torch.zeros(5, dtype=F64))
    net.V = torch.nn.Parameter(torch.ones(5, 5, dtype=F64))
    plain = never_replayed(net)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(6):
            assert_same(penalised(net, u, y), penalised(plain, u, y))
    assert "two weights of the network are one tensor" in str(said[0].message)


class Critic(torch.nn.Module):
    """A layer of co.nn and a score."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer = getattr(co.nn, kind)(3, 5, engine="eager", dtype=F64, **options)
        self.head = torch.nn.Linear(5 * (1 + self.layer.bidirectional), 1, dtype=F64)

    def forward(self, u):
        return self.head(self.layer(u)[0][-1])


def gradient_penalty(critic, u):
    """As in WGAN-GP: (||d score / du|| - 1)^2, and its gradient by weights."""
    x = u.clone().requires_grad_()
    slope = torch.autograd.grad(critic(x).sum(), x, create_graph=True)[0]
    critic.zero_grad()
    (slope.norm(dim=(0, 2)) - 1).square().mean().backward()
    return [p.grad for name, p in critic.named_parameters() if name != "head.bias"]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_gradient_penalties_of_modules(kind, options, gpu):
    critic = Critic(kind, **options)
    plain = copy.deepcopy(critic)
    plain.layer.recordings.records = False
    for i in range(8):
        u, _ = draw(i)
        assert_same(gradient_penalty(critic, u), gradient_penalty(plain, u))
        # the plain gradient goes on being replayed
        results = []
        for each in (critic, plain):
            each.zero_grad()
            each(u).mean().backward()
            results.append([p.grad for p in each.parameters()])
        assert_same(*results)
    [one, *others] = [
        e for e in critic.layer.recordings.cache.entries.values() if isinstance(e, Stage)
    ]
    found = [stage for each in (one, *others) for stage in every_stage(each)]
    assert {len(stage.path) for stage in found} == {0, 1, 2}
    replays = [stage.graph.replays for stage in found if len(stage.path) == 2]
    assert min(replays) >= 2


def every_stage(stage):
    """A stage and those of its gradients."""
    yield stage
    for other in stage.gradients.values():
        if other is not None:
            yield from every_stage(other)


def test_rows_made_on_a_device_are_those_of_the_cpu():
    rows = uniform_rows(4, 3)
    y = torch.zeros(3, dtype=F64)

    made = [torch.arange(3).repeat(4), torch.arange(1, 5)[:, None].expand(4, 3).flatten()]
    assert torch.equal(rows.sample_on(y.device), made[0])
    assert torch.equal(rows.time_on(y.device), made[1])
    assert torch.equal(rows.lengths_like(y), torch.full((3,), 4.0, dtype=F64))
    meta = torch.device("meta")
    assert rows.sample_on(meta).shape == rows.time_on(meta).shape == (12,)
    assert rows.lengths_like(y.to(meta)).dtype == F64

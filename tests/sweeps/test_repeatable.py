"""What a recording would not notice: calls around it, functions and weights that change.

A CPU stands in for the GPU (tests/support/graphs.py). Each case is computed with and without
recordings, more often than it takes to make one.
"""

from __future__ import annotations

import copy
import functools
import math
import random
import time

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import coadjoint as co
import graphs
from coadjoint.gradients import bptt, captured
from coadjoint.objectives.losses import Loss
from coadjoint.sweeps.engines.cuda import capture, captured_function
from coadjoint.sweeps.engines.cuda.captured_function import CapturedFunctions
from coadjoint.sweeps.engines.cuda.captured_stages import Stage, Use
from coadjoint.sweeps.engines.cuda.repeatable import function_key

F64 = torch.float64
CALLS = 6  # recordings are made at the third, their gradients at the fourth


@pytest.fixture
def gpu(monkeypatch):
    """The CPU is taken for a GPU, by gradient methods, too."""
    graphs.install(monkeypatch)
    monkeypatch.setattr(captured, "prepare_stream", graphs.prepare_stream)
    monkeypatch.setattr(captured, "capture_graph", graphs.capture_graph)
    for module in (bptt, captured):
        monkeypatch.setattr(module, "is_on_gpu", lambda batch: True)
    monkeypatch.setattr(captured, "can_be_captured", lambda batch: batch.lengths is None)


def make_net(cell="elman", **options):
    torch.manual_seed(0)
    made = {"inputs": 3, "hidden": 5, "outputs": 4, "engine": "eager", "dtype": F64, **options}
    return co.Network(cell, **made)


def never_replayed(net):
    """A copy whose runs are computed operation by operation."""
    other = copy.deepcopy(net)
    kinds = other.recordings
    kinds.runs.records = kinds.costates.records = kinds.penalties.records = False
    return other


def draw(i, T=6, B=3, classes=4):
    generator = torch.Generator().manual_seed(i)
    u = torch.randn(T, B, 3, generator=generator, dtype=F64)
    return u, torch.randint(classes, (B,), generator=generator)


def penalised(net, u, y, G=co.penalties.log_ratio, loss="cross-entropy"):
    """The objective of an own loop and its gradient."""
    lam = net(u).costates(loss, y)
    objective = (lam.loss + 0.3 * G(lam)).mean()
    grads = torch.autograd.grad(objective, list(net.parameters()))
    return [objective.detach(), *grads]


def assert_same(found, expected):
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-12, atol=1e-12)


def stages(functions):
    """How many calls of these functions are recorded."""
    return sum(isinstance(entry, Stage) for entry in functions.cache.entries.values())


# calls around a call


def test_a_loss_that_calls_a_module_of_ours_is_no_deadlock(gpu):
    """The module is due for a recording of its own while the loss is rehearsed."""
    critic = co.nn.LSTM(4, 5, engine="eager", dtype=F64).requires_grad_(False)
    f = CapturedFunctions()

    def compute(data, weights):
        return [critic(data[0])[0]]

    for i in range(CALLS):
        y = torch.randn(2, 3, 4, dtype=F64, generator=torch.Generator().manual_seed(i))
        (found,) = f.replay("critic", compute, [y], []) or compute([y], [])
        assert_same([found], [copy.deepcopy(critic)(y)[0]])
    assert stages(f) == 1


def test_a_recording_elsewhere_is_not_waited_for(gpu):
    net = make_net()
    plain = never_replayed(net)
    with capture.recording_turn() as is_free:
        assert is_free
        for i in range(CALLS):
            assert_same(penalised(net, *draw(i)), penalised(plain, *draw(i)))
        assert stages(net.recordings.runs) == 0
    for i in range(3):
        penalised(net, *draw(i))
    assert stages(net.recordings.runs) == 1


def test_gradients_wait_for_a_later_turn(gpu):
    """A gradient that is due while something else is recorded is captured at a later call."""
    net = make_net()
    for i in range(3):
        penalised(net, *draw(i))
    (root,) = (e for e in net.recordings.runs.cache.entries.values() if isinstance(e, Stage))
    assert root.waiting
    with capture.recording_turn():
        assert_same(penalised(net, *draw(3)), penalised(never_replayed(net), *draw(3)))
    assert root.waiting
    penalised(net, *draw(4))
    assert not root.waiting
    assert all(root.gradients.values())


@pytest.mark.parametrize("kind", ["network", "module"])
def test_checkpoints(gpu, kind):
    if kind == "network":
        net = make_net()
        plain = never_replayed(net)
        outputs = [lambda u: net(u).y_hat, lambda u: plain(u).y_hat]
    else:
        net = co.nn.LSTM(3, 5, engine="eager", dtype=F64)
        plain = copy.deepcopy(net)
        plain.recordings.records = False
        outputs = [lambda u: net(u)[0], lambda u: plain(u)[0]]
    for i in range(CALLS):
        gradients = []
        for f in outputs:
            u = draw(i)[0].requires_grad_()
            out = checkpoint(f, u, use_reentrant=False)
            gradients += torch.autograd.grad(out.square().sum(), u)
        assert_same(gradients[:1], gradients[1:])


def test_cached_weights(gpu):
    net = make_net(structure="orthogonal")
    plain = never_replayed(net)
    for i in range(CALLS):
        found = []
        for each in (net, plain):
            with parametrize.cached():
                found.append(penalised(each, *draw(i)))
            with torch.no_grad():
                for p in each.parameters():
                    p.mul_(0.9)
        assert_same(*found)
    assert_same(penalised(net, *draw(9)), penalised(plain, *draw(9)))


def test_a_second_backward_is_refused_as_ever(gpu):
    module = co.nn.LSTM(3, 5, engine="eager", dtype=F64)
    for i in range(CALLS):
        u = draw(i)[0].requires_grad_()
        value = module(u)[0].square().sum()
        value.backward()
        with pytest.raises(RuntimeError, match="second time"):
            value.backward()
    assert stages(module.recordings) == 1


def test_a_recording_is_taken_under_a_lock(gpu, monkeypatch):
    """Whether it is in use, and that it is from now on, is one step for other threads."""
    functions = CapturedFunctions()
    seen = []
    in_use = captured_function.is_in_use

    def is_in_use(stage):
        seen.append(functions._lock.locked())
        return in_use(stage)

    monkeypatch.setattr(captured_function, "is_in_use", is_in_use)
    w = torch.ones(2, dtype=F64, requires_grad=True)
    for _ in range(CALLS):
        functions.replay("double", lambda data, weights: [2 * weights[0]], [torch.ones(2)], [w])
    assert seen
    assert all(seen)
    (root,) = (e for e in functions.cache.entries.values() if isinstance(e, Stage))
    assert not in_use(root)
    use = Use()
    key = next(key for _, key in functions.cache.entries)
    assert functions._take_recording(key, lambda: None, use) is root
    assert in_use(root)


def test_a_recording_that_was_given_up_is_not_found(gpu):
    cache = capture.GraphCache("this")
    made = [object(), object()]
    for _ in range(capture.CALLS_BEFORE_RECORDING):
        assert cache.find("one", lambda: made[0]) is None
    for _ in range(3):
        assert cache.find("one", lambda: made[0]) is made[0]
    for i in range(4):
        found = cache.find("two", lambda: made[1])
        assert found is (made[1] if i >= capture.CALLS_BEFORE_RECORDING else None)
    assert cache.find("one", None) is made[0]
    cache.give_up("one")
    assert cache.find("one", None) is None
    assert cache.find("two", None) is made[1]
    for i in range(capture.MOST_RECORDINGS + 1):  # those not used for long are dropped
        for _ in range(3):
            cache.find(i, lambda: made[0])
    assert "two" not in cache.entries


def test_a_stream_waits_for_the_last_one(monkeypatch):
    waits = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            waits.append((self.name, other.name))

    current = [1]
    monkeypatch.setattr(capture, "current_stream_address", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(current[0]))
    last = capture.LastStream(torch.device("cuda", 0))
    for address in (1, 1, 2, 2, 1):
        current[0] = address
        last.wait()
    assert waits == [(2, 1), (1, 2)]


# weights that are computed


class WeightDrop(torch.nn.Module):
    def forward(self, W):
        return torch.nn.functional.dropout(W, 0.5, self.training)


@pytest.mark.parametrize("kind", ["drop", "spectral", "own"])
def test_parametrisations_that_may_change_are_not_recorded(gpu, kind):
    net = make_net()
    if kind == "drop":
        parametrize.register_parametrization(net, "W", WeightDrop())
    elif kind == "spectral":
        parametrizations.spectral_norm(net, "W")
    else:
        parametrize.register_parametrization(net, "W", torch.nn.Identity())
    plain = never_replayed(net)
    for i in range(CALLS):
        found = []
        for each in (net, plain):
            torch.manual_seed(i)
            found.append(penalised(each, *draw(i)))
        assert_same(*found)
    assert stages(net.recordings.runs) == 0
    assert net.graph_key() is None


@pytest.mark.parametrize("kind", ["orthogonal", "weight-norm"])
def test_parametrisations_that_are_functions_are_recorded(gpu, kind):
    net = make_net(structure="orthogonal" if kind == "orthogonal" else None)
    if kind == "weight-norm":
        parametrizations.weight_norm(net, "W")
    plain = never_replayed(net)
    for i in range(CALLS):
        assert_same(penalised(net, *draw(i)), penalised(plain, *draw(i)))
    assert stages(net.recordings.runs) == 1


# functions of the user's

temperature = [1.0]
scale = 1.0


def warm(a):
    return torch.sigmoid(a / temperature[0])


def scaled_error(y_hat, y):
    return scale * (y_hat - y).square().sum(-1)


def targets(i):
    return draw(i)[0], torch.rand(3, 4, dtype=F64, generator=torch.Generator().manual_seed(i))


def test_an_output_function_that_changes(gpu):
    net = make_net(output=warm)
    plain = never_replayed(net)
    for i in range(2 * CALLS):
        temperature[0] = 1.0 + i // 4
        found = penalised(net, *targets(i), loss="squared")
        assert_same(found, penalised(plain, *targets(i), loss="squared"))
    assert stages(net.recordings.runs) >= 1


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: Loss("mine", f)], ids=["plain", "Loss"])
def test_a_loss_that_changes(gpu, wrap, monkeypatch):
    net = make_net()
    plain = never_replayed(net)
    loss = wrap(scaled_error)
    method = co.BPTT()
    for i in range(2 * CALLS):
        monkeypatch.setitem(globals(), "scale", 1.0 + i // 4)
        u, y = targets(i)
        assert_same(penalised(net, u, y, loss=loss), penalised(plain, u, y, loss=loss))
        found = method(net, co.Batch(u, y), loss)
        truth = co.BPTT()(net, co.Batch(u, y), loss)
        assert_same(list(found.gradient.values()), list(truth.gradient.values()))
    assert stages(net.recordings.costates) >= 1


def test_a_loss_with_an_object_is_not_recorded(gpu):
    class Settings:
        weight = 1.0

    settings = Settings()

    def loss(y_hat, y):
        return settings.weight * (y_hat - y).square().sum(-1)

    net = make_net()
    plain = never_replayed(net)
    for i in range(CALLS):
        settings.weight += 1
        assert_same(
            penalised(net, *targets(i), loss=loss), penalised(plain, *targets(i), loss=loss)
        )
    assert stages(net.recordings.costates) == 0
    assert stages(net.recordings.runs) == 1


def test_a_penalty_that_reads_the_loss(gpu):
    G = co.Penalty("relative", lambda lam: lam.norms()[1] / lam.loss, reads_mantissas_only=True)
    net = make_net()
    plain = never_replayed(net)
    for i in range(CALLS):
        assert_same(penalised(net, *draw(i), G), penalised(plain, *draw(i), G))
    assert stages(net.recordings.penalties) == 1


def test_a_penalty_that_changes_in_a_gradient_method(gpu):
    weights = [1.0]
    method = co.Penalised(lambda lam: weights[0] * lam.norms()[1], 0.3)
    net = make_net()
    for i in range(2 * CALLS):
        weights[0] = 1.0 + i // 4
        u, y = draw(i)
        found = method(net, co.Batch(u, y), "cross-entropy")
        fresh = co.Penalised(lambda lam: weights[0] * lam.norms()[1], 0.3)
        truth = fresh(net, co.Batch(u, y), "cross-entropy")
        assert_same(list(found.gradient.values()), list(truth.gradient.values()))


def random_part(y):
    return y * random.random()


def timed(y):
    return y * time.time()


def importing(y):
    import math as module

    return y * module.pi


def counting(y):
    global scale
    scale += 1
    return y


def recursive(y, n=2):
    return y if n == 0 else recursive(torch.tanh(y), n - 1)


def on_cpu(weight):
    return lambda y: y * weight


def of_a_variable_without_value():
    def f(y):
        return y * later

    if False:
        later = 1.0
    return f


KNOWN = {
    "name": "squared",
    "torch": torch.tanh,
    "functional": torch.nn.functional.softmax,
    "builtin": abs,
    "closure": on_cpu(0.5),
    "partial": functools.partial(torch.softmax, dim=-1),
    "global": scaled_error,
    "inner": lambda y: [z * math.pi for z in y],
    "recursive": recursive,
    "dictionary": on_cpu({"a": [1, 2.0], "b": {3}}),
    "dtype": on_cpu(torch.float64),
    "penalty": (2 * co.penalties.log_ratio).value,
}
UNKNOWN = {
    "method": "".join,
    "object": on_cpu(object()),
    "module": on_cpu(torch.nn.Linear(2, 2)),
    "class": on_cpu(WeightDrop),
    "random": random_part,
    "bound random": random.random,
    "time": timed,
    "import": importing,
    "writes a global": counting,
    "free variable without a value": of_a_variable_without_value(),
    "tensor on the CPU": on_cpu(torch.ones(())),
    "penalty of an object": (2 * co.Penalty("mine", on_cpu(object()))).value,
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_functions_depend_on_is_known(name):
    key = function_key(KNOWN[name])
    assert key is not None
    assert hash(key) == hash(function_key(KNOWN[name]))


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_functions_depend_on_is_not_known(name):
    assert function_key(UNKNOWN[name]) is None


def test_keys_follow_values(monkeypatch):
    values = [1, 1.0, True, "1", None, (1,), [1], {"a": 1}, {"a": 2}, frozenset([1])]
    keys = {function_key(on_cpu(value)) for value in values}
    assert len(keys) == len(values)
    assert function_key(on_cpu(2)) == function_key(on_cpu(2))
    before = function_key(scaled_error)
    monkeypatch.setitem(globals(), "scale", 7.0)
    assert function_key(scaled_error) != before


# settings


def transpose_weights(net):
    net.W.data = net.W.data.t()


def change_beta(net):
    net.beta = 5.0


@pytest.mark.parametrize("change", [transpose_weights, change_beta])
def test_a_method_notices_what_changes(gpu, change):
    net = make_net(readout="tilted")
    method = co.BPTT()
    for i in range(2 * CALLS):
        if i == CALLS:
            change(net)
        batch = co.Batch(*draw(i))
        found = method(net, batch, "cross-entropy")
        truth = co.BPTT()(net, batch, "cross-entropy")
        assert_same(list(found.gradient.values()), list(truth.gradient.values()))


def test_zoneout_that_changes(gpu):
    module = co.nn.LSTM(3, 5, engine="eager", dtype=F64, zoneout=0.5).eval()
    plain = copy.deepcopy(module)
    plain.recordings.records = False
    for i in range(2 * CALLS):
        if i == CALLS:
            module.zoneout = plain.zoneout = (0.1, 0.1)
        assert_same([module(draw(i)[0])[0]], [plain(draw(i)[0])[0]])


def test_dropout_in_training_is_not_recorded(gpu):
    net = make_net(dropout=0.5)
    module = co.nn.LSTM(3, 5, num_layers=2, dropout=0.5, engine="eager", dtype=F64)
    for i in range(CALLS):
        penalised(net, *draw(i))
        module(draw(i)[0])
    assert stages(net.recordings.runs) == stages(module.recordings) == 0
    for i in range(CALLS):
        penalised(net.eval(), *draw(i))
        module.eval()(draw(i)[0])
    assert stages(net.recordings.runs) == stages(module.recordings) == 1


def test_switches_survive_a_copy():
    net = make_net()
    net.recordings.runs.records = False
    other = copy.deepcopy(net)
    assert not other.recordings.runs.records
    assert other.recordings.costates.records
    module = co.nn.LSTM(3, 5)
    module.recordings.records = False
    assert not copy.deepcopy(module).recordings.records

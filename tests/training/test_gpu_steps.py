"""Steps on a GPU: one wait for a gradient, during which the next batch is drawn and sent.

A CPU stands in for the GPU (tests/support/graphs.py).
"""

import math

import pytest
import torch

import coadjoint as co
import graphs
from coadjoint.gradients import bptt, captured, evaluation, penalised
from coadjoint.gradients.captured import CapturedGradient
from coadjoint.gradients.evaluation import LateNumbers
from coadjoint.optimisers import directions, joined, recipes, steppers
from coadjoint.sweeps.checks import leave_replays, left_checks
from coadjoint.training import ahead, step
from coadjoint.training.plan import TrainingPlan
from coadjoint.training.trainer import Training

F64 = torch.float64
BAD = 6  # the batch that holds a NaN: gradients are replayed from the third on
METHODS = {
    "plain": co.BPTT,
    "penalised": lambda: co.Penalised("log-ratio", 0.1),
    "steered": lambda: co.Penalised("log-ratio", co.penalties.Steered(0.1, 0.2, gain=0.5)),
}


@pytest.fixture
def gpu(monkeypatch):
    """The CPU is taken for a GPU, by gradient methods and by training, too."""
    graphs.install(monkeypatch)
    monkeypatch.setattr(captured, "prepare_stream", graphs.prepare_stream)
    monkeypatch.setattr(captured, "capture_graph", graphs.capture_graph)
    monkeypatch.setattr(captured, "can_be_captured", lambda batch: batch.lengths is None)
    for module in (bptt, captured, penalised):
        monkeypatch.setattr(module, "is_on_gpu", lambda batch: True)
    for module in (evaluation, directions, recipes, steppers, step, ahead):
        monkeypatch.setattr(module, "answers_late", lambda y: True)
    monkeypatch.setattr(ahead, "stage", torch.clone)
    monkeypatch.setattr(joined, "MOST_NUMBERS", 0)  # parameters on a GPU are not joined


class Spoilt(co.tasks.TemporalOrder):
    """Batch number BAD has an input that is NaN."""

    def __post_init__(self):
        super().__post_init__()
        self.draws = []

    def draw(self, rng, L):
        u, y = super().draw(rng, L)
        if len(self.draws) == BAD:
            u[4, 1, 0] = math.nan
        self.draws.append(len(L))
        return u, y


def made(method="plain", task=None, **options):
    torch.manual_seed(0)
    net = co.Network(
        "elman", inputs=6, hidden=5, outputs=4, output="softmax", engine="eager", dtype=F64
    )
    plan = TrainingPlan(
        gradient=METHODS[method](),
        **{"batch": 3, "steps": 12, "every": 10**6, "checkpoint": 10**6, "clip": 0.1, **options},
    )
    return Training(net, task or co.tasks.TemporalOrder(12), plan)


def advance(training, steps=12):
    with training.folder.open(training):
        for _ in range(steps):
            training.advance()
    return training


def replayed(training):
    entries = training.plan.method.captured.cache.entries.values()
    return [entry for entry in entries if isinstance(entry, CapturedGradient)]


def numbers(row):
    return {key: value for key, value in row.items() if isinstance(value, float)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimiser", [co.optimisers.adam, co.optimisers.sgd])
def test_the_run_is_the_same(method, optimiser, request):
    expected = advance(made(method, optimiser=optimiser(0.01)))
    request.getfixturevalue("gpu")
    found = advance(made(method, optimiser=optimiser(0.01)))
    assert len(replayed(found)) == 1
    assert len(expected.rows) == 12
    for row, wanted in zip(found.rows, expected.rows, strict=True):
        assert row.keys() == wanted.keys()
        assert numbers(row) == pytest.approx(numbers(wanted), rel=1e-9)
    for p, q in zip(found.net.parameters(), expected.net.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
    assert list(found.stepper.state) == list(expected.stepper.state)
    for name, value in found.stepper.state.items():
        assert value.dtype is expected.stepper.state[name].dtype


def test_a_gradient_is_waited_for_once_while_the_next_batch_is_drawn(gpu, monkeypatch):
    seen = []

    class Noting(co.tasks.TemporalOrder):
        def draw(self, rng, L):
            seen.append("draw")
            return super().draw(rng, L)

    def noting(what, function):
        def call(*args):
            seen.append(what)
            return function(*args)

        return call

    training = advance(made(task=Noting(12)), 4)
    # What a stand-in replays reads no values.
    monkeypatch.setattr(torch.Tensor, "item", noting("wait", torch.Tensor.item))
    monkeypatch.setattr(LateNumbers, "wait", noting("wait", LateNumbers.wait))
    monkeypatch.setattr(graphs.Graph, "replay", noting("replay", graphs.Graph.replay))
    seen.clear()
    training.advance()
    # Four batches are drawn together; the second wait is for the new weights.
    assert seen == ["replay", "draw", "draw", "draw", "draw", "wait", "wait"]
    seen.clear()
    training.advance()
    assert seen == ["replay", "wait", "wait"]
    seen.clear()
    advance(training, training.plan.steps - training.step)
    assert seen.count("draw") == 12 - 9  # nothing is drawn beyond the last step


def test_a_failed_check_is_the_error_of_its_step(gpu):
    said = []
    for leaves in (True, False):
        training = made(task=Spoilt(12), nonfinite="skip")
        training.evaluator.leaves_checks = leaves
        with pytest.raises(co.InputError, match="holds NaN or inf") as caught:
            advance(training)
        assert (training.step, len(training.rows)) == (BAD + 1, BAD)
        assert len(replayed(training)) == 1
        weights = [p.detach().clone() for p in training.net.parameters()]
        said.append((str(caught.value), weights, training.rows))
    assert said[0][0] == said[1][0]
    assert said[0][2] == said[1][2]
    assert all(map(torch.equal, said[0][1], said[1][1]))


@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_overflows_is_skipped_as_without_leaving_checks(gpu, method):
    said = []
    for leaves in (True, False):
        training = made(method, nonfinite="skip")
        training.evaluator.leaves_checks = leaves and training.evaluator.leaves_checks
        advance(training, 5)
        kept = training.net.R.detach().clone()
        with torch.no_grad():
            training.net.R.fill_(float("inf"))
        state = dict(training.plan.method.state)
        advance(training, 1)
        assert "is outside the range" in training.rows[-1]["skipped"]
        assert training.progress.skipped == 1
        if method != "steered":
            assert state == training.plan.method.state
        with torch.no_grad():
            training.net.R.copy_(kept)
        advance(training, 3)
        said.append((training.rows, dict(training.plan.method.state)))
    assert said[0] == said[1]


def test_weights_that_overflow_are_put_back(gpu):
    training = made(optimiser=co.optimisers.sgd(1e300), clip=None)
    advance(training, 0)
    before = [p.detach().clone() for p in training.net.parameters()]
    training.plan.recipe.__dict__["lr"] = float("inf")
    with pytest.raises(
        co.NumericalError, match=r"step 1: .* not finite after the optimiser's step"
    ):
        advance(training, 1)
    assert all(map(torch.equal, training.net.parameters(), before))
    assert (training.step, training.rows) == (0, [])


def test_what_a_gradient_leaves_is_left_in_its_own_thread_and_context():
    assert left_checks() is None
    with leave_replays() as outer:
        with leave_replays() as inner:
            assert left_checks() is inner
        assert left_checks() is outer
    assert left_checks() is None


def test_several_gradients_of_a_step_and_other_methods_make_their_checks_at_once():
    assert made().evaluator.leaves_checks
    assert made("steered").evaluator.leaves_checks
    for options in ({"accumulate": 2}, {"weight_noise": 0.1}, {"shards": 2}):
        assert not made(**options).evaluator.leaves_checks
    temporal = co.optimisers.optimiser("sgd", direction="temporal")
    assert not made(optimiser=temporal).evaluator.leaves_checks
    truncated = TrainingPlan(
        gradient=co.Truncated(4, 4), batch=3, steps=2, every=1, checkpoint=1, tests=1
    )
    net = co.Network("elman", inputs=6, hidden=5, outputs=4, output="softmax")
    assert not Training(net, co.tasks.TemporalOrder(12), truncated).evaluator.leaves_checks


# batches that are sent ahead


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_that_are_sent_ahead_are_those_of_the_task(gpu, accumulate):
    task = co.tasks.TemporalOrder((12, 20))
    training = made(task=co.tasks.TemporalOrder((12, 20)), accumulate=accumulate)
    with training.folder.open(training):
        for number in range(12):
            training.advance()
            for k, batch in enumerate(training.evaluator.batches):
                expected = task.batch(accumulate * number + k, 3, 0)
                assert torch.equal(batch.u, expected.u.double())
                assert torch.equal(batch.y, expected.y)


def test_a_batch_that_is_ready_is_drawn_anew_if_task_or_network_have_changed(gpu):
    training = made()
    advance(training, 4)
    moved = training.evaluator.moved
    assert sorted(moved.ready) == [4]
    training.task.span = (15, 15)
    advance(training, 1)
    assert len(training.evaluator.batches[0].u) == 15
    assert sorted(moved.ready) == [5, 6, 7, 8]
    training.net.float()
    assert moved.take(5) is None


def test_an_error_while_a_batch_is_drawn_ahead_is_raised_at_its_turn(gpu):
    class Failing(co.tasks.TemporalOrder):
        def draw(self, rng, L):
            if self.fails:
                raise co.DataError("no more")
            return super().draw(rng, L)

        fails = False

    task = Failing(12)
    training = advance(made(task=task), 3)
    Failing.fails = True
    advance(training, 2)  # batches 3 and 4 are ready
    assert len(training.rows) == 5
    with pytest.raises(co.DataError, match="no more"):
        advance(training, 1)
    assert len(training.rows) == 5


def test_large_batches_are_sent_at_their_turn(gpu, monkeypatch):
    monkeypatch.setattr(ahead, "MOST_STAGED_BYTES", 8 * 12 * 3 * 6 - 1)
    training = advance(made(), 4)
    assert not training.evaluator.moved.ready
    monkeypatch.setattr(ahead, "MOST_STAGED_BYTES", 8 * 12 * 3 * 6)
    advance(training, 1)
    assert training.evaluator.moved.ready


def test_a_network_that_moves_its_batches_itself_is_given_them_as_they_are_drawn(gpu):
    class Own(co.Network):
        def move_batch(self, batch):
            given.append(batch.u.dtype)
            return super().move_batch(batch)

    given = []
    net = Own("elman", inputs=6, hidden=5, outputs=4, output="softmax", engine="eager", dtype=F64)
    advance(Training(net, co.tasks.TemporalOrder(12), made().plan), 4)
    assert given == [torch.float32] * 4


# the optimiser


def test_adam_is_one_kernel_on_a_gpu_and_its_state_goes_both_ways(monkeypatch):
    net = co.Network("elman", inputs=6, hidden=5, outputs=4)
    on_cpu = co.optimisers.adam(0.1).stepper(net)
    assert not on_cpu.optimiser.param_groups[0].get("fused")
    monkeypatch.setattr(recipes, "answers_late", lambda y: True)
    monkeypatch.setattr(steppers, "answers_late", lambda y: True)
    monkeypatch.setattr(joined, "MOST_NUMBERS", 0)
    on_gpu = co.optimisers.adam(0.1).stepper(net)
    assert on_gpu.optimiser.param_groups[0]["fused"]
    parameters = dict(net.named_parameters())
    transposed = {name: torch.ones_like(p.T).T for name, p in parameters.items() if p.dim() == 2}
    on_gpu.move(parameters, transposed, 0.1)
    on_gpu.move(parameters, {name: torch.ones_like(p) for name, p in parameters.items()}, 0.1)
    state = on_gpu.state
    assert on_cpu.complaint(net, state, True) is None
    on_cpu.restore(state)
    assert on_gpu.complaint(net, on_cpu.state, True) is None
    on_gpu.restore(on_cpu.state)
    for name, value in on_gpu.state.items():
        assert torch.equal(value, state[name])
    assert not co.optimisers.sgd(0.1).stepper(net).optimiser.param_groups[0].get("fused")
    monkeypatch.setattr(torch, "get_default_dtype", lambda: F64)  # torch would count steps in it
    assert not co.optimisers.adam(0.1).stepper(net).optimiser.param_groups[0].get("fused")

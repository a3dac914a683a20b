"""co.Shared in one process: shares, refusals, draws. On several: training/test_many_processes.py"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import coadjoint as co
import sharing
from coadjoint.gradients.shared import deal
from sharing import LOSS, SHARDS

CASES = sharing.gradient_cases()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shards", [1, 2, 6])
@pytest.mark.parametrize("name", [n for n in CASES if not n.startswith(("elman", "lstm", "gru"))])
def test_shards_add_up_to_the_whole(name, shards):
    assert sharing.largest_difference(CASES[name], shards, 3) < 1e-12


@pytest.mark.parametrize("sizes", [[3], [5, 9, 7, 2, 8], [4] * 12, [1, 30, 1, 1, 1, 1]])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_samples_are_dealt_out_once_and_evenly(sizes, shards):
    dealt = deal(sizes, shards)
    assert len(dealt) == shards
    assert sorted(j for index in dealt for j in index) == list(range(len(sizes)))
    counts = [len(index) for index in dealt]
    assert max(counts) - min(counts) <= 1
    steps = [sum(sizes[j] for j in index) for index in dealt]
    assert max(steps) - min(steps) <= max(sizes)
    assert dealt[0]  # so that the first shard always has a sample


def test_a_step_is_counted_by_a_call_alone():
    shared = co.Shared(co.Penalised("log-ratio", lambda step: 0.1 * step), 2)
    net, given = sharing.network(), sharing.batch()
    assert [shared(net, given, LOSS).rho for _ in range(3)] == [0.0, 0.1, 0.2]
    assert shared.step == 3
    shared.evaluate(net, given, LOSS)
    assert shared.step == 3
    assert not hasattr(co.Shared(co.BPTT()), "step")


def test_batches_of_one_step_steer_the_weight_together():
    """Two batches before a step is counted: their decays add up, as without shards."""
    steered = co.penalties.Steered(1.0, 0.01, gain=0.5)
    alone, shared = co.Penalised("log-ratio", steered), co.Penalised("log-ratio", steered)
    shared = co.Shared(shared, 3)
    net = sharing.network()
    for step in range(3):
        for seed in (1, 2):
            for method in (alone, shared):
                method.step = step
                method.evaluate(net, sharing.batch(seed=seed), LOSS)
        assert alone.state.keys() == shared.state.keys()
        for name, value in alone.state.items():
            assert shared.state[name] == pytest.approx(value, rel=1e-13)
            assert type(shared.state[name]) is type(value)


def test_dropout_draws_by_shard_and_goes_on_afterwards():
    net = co.Stack(["gru"] * 2, inputs=3, hidden=4, outputs=4, output="softmax", dropout=0.5)
    net, given = net.double(), sharing.batch()
    shared = co.Shared(co.BPTT(), SHARDS)
    torch.manual_seed(0)
    first, second = (shared(net, given, LOSS).losses for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(shared(net, given, LOSS).losses, first)
    assert not torch.equal(first, second)


def test_copies_keep_method_and_state_together():
    steered = co.penalties.Steered(1.0, 0.01)
    shared = co.Shared(co.Penalised("log-ratio", steered), 2)
    for other in (copy.deepcopy(shared), pickle.loads(pickle.dumps(shared))):
        other(sharing.network(), sharing.batch(), LOSS)
        assert other.state is other.method.state
        assert other.state["samples"] > 0
        assert shared.state["samples"] == 0


def test_single_samples_and_sweeps_are_those_of_the_method():
    net, given = sharing.network(), sharing.batch(3)
    shared = co.Shared(co.Penalised("log-ratio", 0.3, segments=2), 2)
    alone = co.Penalised("log-ratio", 0.3, segments=2)
    assert shared.sweeps(net, 12) == alone.sweeps(net, 12) == 10
    assert shared.segments == 2
    theirs = alone.per_sample(net, given, LOSS)
    for name, value in shared.per_sample(net, given, LOSS).items():
        assert torch.equal(value, theirs[name])


def test_the_run_is_that_of_the_whole_batch():
    e = co.Shared(co.BPTT(), 3)(sharing.network(), sharing.batch(), LOSS)
    assert e.costates.loss.shape == (7,)
    torch.testing.assert_close(e.costates.loss, e.losses)


class Counting(co.gradients.Method):
    """A method of one's own that remembers something."""

    def evaluate(self, net, batch, loss):
        self.state["calls"] = self.state.get("calls", 0) + 1
        return co.BPTT().evaluate(net, batch, loss)


class Weighing(co.gradients.Method):
    """A method of one's own with a weight that nobody else knows."""

    def evaluate(self, net, batch, loss):
        return co.Penalised("log-ratio", 0.3).evaluate(net, batch, loss)


def mean_loss(y_hat, y):
    losses = (y_hat - 1).square().sum(-1)
    return losses + losses.mean()


REFUSED = {
    "a mixing penalty": (co.Penalised(sharing.mixing_penalty), LOSS, "other samples of its batch"),
    "a mixing sum": (
        co.Penalised(co.Penalty("mixing", sharing.mixing_penalty) + "omega"),
        LOSS,
        "other samples",
    ),
    "a mixing loss": (co.BPTT(), mean_loss, "other samples of its batch"),
    "a state": (Counting(), LOSS, "Counting keeps a state of its own (calls)"),
    "a weight": (Weighing(), LOSS, "Weighing weighs a penalty by a rule of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused(name):
    method, loss, words = REFUSED[name]
    shared = co.Shared(method, 2)
    with pytest.raises(co.Unsupported) as caught:
        shared(sharing.network(), sharing.batch(), loss)
    assert words in str(caught.value)


@pytest.mark.parametrize("form", ["plain", "sum", "of the output", "on top"])
def test_the_published_omega_is_refused_by_name_in_every_form(form):
    G = co.penalties.penalty("omega-published")
    forms = {
        "plain": G,
        "sum": 0.5 * G + "variance",
        "of the output": co.penalties.of_output(G),
        "on top": G.on("top"),
    }
    with pytest.raises(co.Unsupported, match=r"omega-published.* is one value for the whole batch"):
        co.Shared(co.Penalised(forms[form]))


@pytest.mark.parametrize("shards", [0, -1, 1.5, True, "two"])
def test_shards_are_a_positive_whole_number(shards):
    with pytest.raises(co.InputError, match="shards must be a whole number, at least 1"):
        co.Shared(co.BPTT(), shards)


def test_only_a_method_is_shared_and_only_once():
    with pytest.raises(co.InputError, match="shared already"):
        co.Shared(co.Shared(co.BPTT()))
    with pytest.raises(co.KindError, match="method"):
        co.Shared("bptt")


def test_an_overflow_names_its_shard():
    assert sharing.overflow().startswith("NumericalError: ")
    assert sharing.overflow().endswith(f"(in shard 3 of {SHARDS}).")

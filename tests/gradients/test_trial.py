"""Parts of one's own under co.Shared: those that mix samples or remember are refused, others pass.

Without a process group the whole batch is in this process, cut into shards all the same.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import coadjoint as co
import sharing
from coadjoint.gradients import trial
from coadjoint.gradients.evaluation import GradientTuple, evaluation_without_run
from sharing import LOSS

SHARDS = 3
MIXES = "depends on the other samples of its batch"
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-12}


class OwnStep(nn.Module):
    """tanh(z), z = W x + U u, less a share of the mean of z over samples."""

    def __init__(self, mixed: float = 0.0) -> None:
        super().__init__()
        self.W, self.U = nn.Linear(4, 4), nn.Linear(3, 4)
        self.drop = nn.Dropout(0.3)
        self.mixed = mixed

    def forward(self, u: Tensor, x: Tensor) -> Tensor:
        z = self.W(x) + self.U(self.drop(u))
        return torch.tanh(z - self.mixed * z.mean(0, keepdim=True))


class Normed(OwnStep):
    """With batch normalisation, which mixes in training mode alone."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, u: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.W(x) + self.U(u)))


class Centre(nn.Module):
    """x less a share of its mean over samples."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        return x - self.share * x.mean(0, keepdim=True)


class Scaling(co.gradients.Method):
    """The gradient of BPTT times a factor."""

    def factor(self, gradient: dict[str, Tensor]) -> float:
        return 2.0

    def evaluate(self, net, batch, loss):
        e = co.BPTT().evaluate(net, batch, loss)
        scaled = {name: g * self.factor(e.gradient) for name, g in e.gradient.items()}
        values = GradientTuple(e.losses, e.penalties, scaled)
        return evaluation_without_run(net, batch, loss, values)


class Normalising(Scaling):
    def factor(self, gradient):
        return 1 / float(sum(g.square().sum() for g in gradient.values()).sqrt())


class Remembering(Scaling):
    def __init__(self):
        self.k = 0

    def factor(self, gradient):
        self.k += 1
        return self.k


class Momentum(Scaling):
    """Keeps the last gradient, deep inside of an attribute."""

    def __init__(self):
        self.memory = {"last": [0.0]}

    def factor(self, gradient):
        self.memory["last"][0] = next(iter(gradient.values())).clone()
        return 1.0


class Caching(Scaling):
    """Makes something once for each number of samples, and counts steps as Penalised does."""

    def __init__(self):
        self.made = {}
        self.step = 0

    def evaluate(self, net, batch, loss):
        self.made.setdefault(len(batch.sizes), torch.ones(3))
        return super().evaluate(net, batch, loss)


def beyond_two(lam):
    norms = lam.norms().sum(0)
    return norms * norms.mean() if len(norms) > 2 else norms


def by_gradient(lam):
    """The values of samples do not mix; their derivatives do."""
    norms = lam.norms().sum(0)
    return norms * (1 + norms.mean() - norms.mean().detach())


def over_deviation(lam):
    """Of one sample alone this is 0 / 0."""
    norms = lam.norms().sum(0)
    return (norms - norms.mean()) / norms.var(correction=0).sqrt()


def own_loss(y_hat, y):
    return (y_hat - 0.1).square().sum(-1) + y.to(y_hat.dtype)


def scaled_loss(factor, y_hat, y):
    return factor * own_loss(y_hat, y)


def noisy_loss(y_hat, y):
    return (y_hat + torch.randn_like(y_hat)).square().sum(-1)


def network(step=None, dtype=torch.float64, dropout=0.0):
    torch.manual_seed(1)
    step = OwnStep() if step is None else step
    net = co.Network(step, inputs=3, hidden=4, outputs=4, output="softmax", dropout=dropout)
    return net.to(dtype).eval()


def chain(*maps):
    torch.manual_seed(1)
    return co.Chain(nn.Linear(3, 5), *maps, nn.Linear(5, 4), output="softmax").double()


def attention():
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(4, 1, 8, dropout=0.0)  # batch_first=False
    return co.Chain(layer, nn.Flatten(), nn.Linear(12, 4), output="softmax").double()


def pictures(*shape):
    generator = torch.Generator().manual_seed(4)
    u = torch.randn(7, *shape, generator=generator).double()
    return co.Batch(u, torch.randint(0, 4, (7,), generator=generator))


def twins():
    """A batch whose two shortest samples, and the two longest ones, are identical."""
    given = sharing.batch(8)
    u, y = given.u.clone(), given.y.clone()
    lengths = torch.tensor([12, 12, 3, 3, 5, 7, 8, 9])
    for one, other in ((0, 1), (2, 3)):
        u[:, one], y[one] = u[:, other], y[other]
    return co.Batch(u, y, lengths=lengths)


def mixing(lam):
    norms = lam.norms().sum(0)
    return norms / norms.mean()


def penalised(G):
    return co.Penalised(G, 0.3)


recurrent = sharing.network
REFUSED = {
    "a mixing step": (co.BPTT, lambda: network(OwnStep(0.5)), sharing.batch, MIXES),
    "a mixing step, penalised": (
        lambda: penalised("log-ratio"),
        lambda: network(OwnStep(0.5)),
        sharing.batch,
        "make OwnStep a function of one sample",
    ),
    "batch normalisation": (
        co.BPTT,
        lambda: network(Normed()).train(),
        sharing.batch,
        "BatchNorm1d normalises by the batch",
    ),
    "a mixing map": (co.BPTT, lambda: chain(Centre(0.5)), lambda: pictures(3), "make Centre"),
    "attention over samples": (co.BPTT, attention, lambda: pictures(3, 4), MIXES),
    "a normalised gradient": (
        Normalising,
        recurrent,
        sharing.batch,
        "make the method Normalising a function of one sample",
    ),
    "an attribute": (Remembering, recurrent, sharing.batch, "a state of its own (k)"),
    "a memory": (Momentum, recurrent, sharing.batch, "a state of its own (memory)"),
    "identical samples": (lambda: penalised(mixing), recurrent, twins, MIXES),
    "beyond two samples": (lambda: penalised(beyond_two), recurrent, sharing.batch, MIXES),
    "by the gradient": (
        lambda: penalised(by_gradient),
        recurrent,
        sharing.batch,
        "the gradient is not the mean over samples",
    ),
    "not alone": (
        lambda: penalised(over_deviation),
        recurrent,
        sharing.batch,
        "make the penalty a function of one sample",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_or_remembers_is_refused(name):
    method, net, batch, words = REFUSED[name]
    with pytest.raises(co.Unsupported) as caught:
        co.Shared(method(), SHARDS)(net(), batch(), LOSS)
    assert words in str(caught.value)


def test_a_loss_that_always_draws_is_refused():
    with pytest.raises(co.Unsupported, match="the loss draws random numbers in evaluation mode"):
        co.Shared(co.BPTT(), SHARDS)(recurrent(), sharing.batch(), noisy_loss)


PASSED = {
    "a step": (co.BPTT, LOSS),
    "a step, penalised": (lambda: penalised("log-ratio"), LOSS),
    "a loss": (co.BPTT, own_loss),
    "a partial loss": (co.BPTT, functools.partial(scaled_loss, 0.5)),
    "a penalty": (lambda: penalised(sharing.own_penalty), LOSS),
    "a penalty with random directions": (
        lambda: penalised(co.Penalty("own", sharing.own_penalty) + "isometry"),
        LOSS,
    ),
    "a method": (Scaling, LOSS),
    "a method that keeps what it makes": (Caching, LOSS),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", PASSED)
def test_others_are_shared(name, weighted, dtype):
    method, loss = PASSED[name]
    net = network(dtype=dtype)
    given = net.move_batch(sharing.batch(weighted=weighted))
    shared = co.Shared(method(), SHARDS)
    ours = shared(net, given, loss).gradient
    assert shared.trial.tried == trial.SAMPLES
    assert shared.is_checked
    for parameter, truth in method()(net, given, loss).gradient.items():
        error = (ours[parameter] - truth).abs().max() / truth.abs().max().clamp_min(1e-3)
        assert error < TOLERANCE[dtype]


def test_a_map_of_ones_own_is_shared():
    net, given = chain(Centre(0.0)), pictures(3)
    shared = co.Shared(penalised("log-ratio"), SHARDS)
    ours = shared(net, given, LOSS).gradient
    for parameter, truth in penalised("log-ratio")(net, given, LOSS).gradient.items():
        torch.testing.assert_close(ours[parameter], truth, rtol=1e-10, atol=1e-12)
    assert shared.trial.own == ("Centre",)


def test_dropout_passes_and_modes_and_draws_stay():
    """The trial is in evaluation mode; a part that is kept in it stays there."""
    net = network(dropout=0.5).train()
    net.step.drop.eval()
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    shared = co.Shared(co.BPTT(), SHARDS)
    shared.trial.check(shared.method, net, sharing.batch(), own_loss, (0.0, 1.0))
    assert torch.equal(torch.rand(1), expected)
    assert net.training
    assert not net.step.drop.training
    assert shared.is_checked


def test_it_is_tried_once():
    """Once for a method, a network and a loss; a lambda may be written anew in each step."""
    seen = []

    class Telling(Scaling):
        def evaluate(self, net, batch, loss):
            seen.append(len(batch.sizes))
            return super().evaluate(net, batch, loss)

    shared = co.Shared(Telling(), SHARDS)
    net, given = network(), sharing.batch(7)
    counts = []
    for _ in range(3):
        seen.clear()
        shared(net, given, lambda y_hat, y: y_hat.square().sum(-1))
        counts.append(len(seen))
    assert counts == [4 + 3 + SHARDS, SHARDS, SHARDS]
    seen.clear()
    shared(net, given, own_loss)
    assert len(seen) > SHARDS
    assert copy.deepcopy(shared).trial.net is None


def test_too_few_samples_are_tried_again_when_there_are_more():
    shared = co.Shared(penalised(beyond_two), 1)
    net = recurrent()
    shared(net, sharing.batch(1), LOSS)
    assert shared.trial.tried == 0
    shared(net, sharing.batch(2), LOSS)
    assert shared.trial.tried == 2
    assert not shared.is_checked
    with pytest.raises(co.Unsupported, match=MIXES):
        shared(net, sharing.batch(3), LOSS)


def test_a_weight_that_begins_at_0_is_tried_again():
    """While rho is 0, the gradient does not show that the penalty mixes."""
    shared = co.Shared(co.Penalised(by_gradient, lambda step: float(step > 0)), SHARDS)
    shared(recurrent(), sharing.batch(), LOSS)
    with pytest.raises(co.Unsupported, match="the gradient is not the mean over samples"):
        shared(recurrent(), sharing.batch(), LOSS)


@pytest.mark.parametrize("cell", ["elman", "gru", "lstm-mixed", "unicornn-layers"])
def test_the_package_s_own_are_not_tried(cell, monkeypatch):
    monkeypatch.setattr(trial.Trial, "_try", None)
    method = penalised("log-ratio")
    given = sharing.batch()
    given = co.Batch(given.u, given.u[0, :, :1].expand(-1, 4), lengths=given.lengths)
    for loss in ("squared", co.losses.huber()):
        net = co.Network(cell, inputs=3, hidden=4, outputs=4).double()
        shared = co.Shared(method, SHARDS)
        shared(net, given, loss)
        assert shared.is_checked
        assert shared.trial.own == ()
    for net in (chain(nn.Tanh()), co.Chain.mlp(3, [5], 4, output="softmax").double()):
        co.Shared(method, SHARDS)(net, pictures(3), LOSS)


def count_up(value):
    value[1] += 1


def test_a_picture_shows_what_changes_inside_of_an_object():
    class Plain:
        def __init__(self):
            self.inner = [torch.zeros(2), {"a": 1}]

    changes = {
        "an object": (Plain(), lambda plain: plain.inner[0].add_(1)),
        "a list": ([1, {2}, None], lambda values: values[1].add(3)),
        "a generator of numbers": (random.Random(0), lambda chance: chance.random()),
        "numpy's": (np.random.default_rng(0), lambda chance: chance.random()),
        "an array": (np.zeros(3), count_up),
        "a queue": (collections.deque([1, 2]), count_up),
        "a counter": (itertools.count(), next),
        "a module": (nn.Linear(1, 1), lambda module: module.weight.data.add_(1)),
        "a method": (co.Penalised("log-ratio"), lambda method: method.state.update(a=1)),
        "a set": ({1, 2}, lambda values: values.add(3)),
        "half precision": (torch.zeros(3, dtype=torch.bfloat16), count_up),
        "one number": (torch.zeros(()), lambda values: values.add_(1)),
    }
    for name, (value, change) in changes.items():
        before = trial.picture(value)
        assert trial.picture(value) == before, name
        change(value)
        assert trial.picture(value) != before, name
    itself = []
    itself.append(itself)
    assert trial.picture(itself) == trial.picture(itself)


def test_samples_that_are_tried_differ():
    given = twins()
    index = trial.different_samples(given, "last")
    assert len(index) == trial.SAMPLES
    assert len({int(given.lengths[j]) for j in index}) == trial.SAMPLES
    assert {3, 12} <= {int(given.lengths[j]) for j in index}
    same = co.Batch(torch.ones(5, 3, 2), torch.zeros(3, 1))
    assert len(trial.different_samples(same, "last")) == 1
    listed = co.Batch([torch.ones(4, 2), torch.ones(3, 2), torch.ones(4, 2)], torch.zeros(3, 1))
    assert sorted(listed.sizes[trial.different_samples(listed, "last")].tolist()) == [3, 4]

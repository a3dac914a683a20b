"""The gradient of dense chains by hand is that of torch's double backward, whatever the options.

The oracle has only the weights in common with the package: it computes the states by torch's own
functions, in float64, and differentiates twice through everything at once. Penalties that it does
not know are compared with the same penalty through torch's graph.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import coadjoint as co
from coadjoint.gradients.by_hand import HandGradient
from coadjoint.networks.maps import Dense, Residual, Tied

F64 = torch.float64
PSI = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "identity": lambda z: z,
    "softplus": functional.softplus,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "elu": functional.elu,
}


def dense(widths, activation="tanh", bias=True):
    return [Dense(n, m, activation, bias) for n, m in itertools.pairwise(widths)]


def maps_of(name):
    """The maps of a case; the first reads 5 entries and the last gives 3."""
    if name == "stretch and readout":
        return [*dense([5] * 5), Dense(5, 3, "identity")]
    if name == "no biases":
        return [*dense([5] * 4, bias=False), nn.Linear(5, 3, bias=False)]
    if name == "widths":
        return [*dense([5, 7, 7, 7, 4, 3], "gelu")]
    if name == "two stretches":
        return [*dense([5] * 4, "sigmoid"), *dense([5] * 3, "softplus"), Dense(5, 3, "elu")]
    if name == "stretch at the end":
        return [nn.Linear(5, 3), *dense([3] * 5, "silu")]
    if name == "one map":
        return [nn.Linear(5, 3)]
    if name == "tied":
        first, second = dense([5, 5, 5])
        return [first, second, Tied(second), Tied(first, activation="relu"), nn.Linear(5, 3)]
    if name == "tied by a function":
        f = Dense(5, 4)
        A, B = torch.randn(4, 4, dtype=F64), torch.randn(5, 5, dtype=F64)
        f = f.to(F64)
        return [f, Tied(f, tau=lambda W: B @ W.T @ A, activation="tanh"), nn.Linear(5, 3)]
    if name == "shared":
        f, g = dense([5, 5, 5])
        h = Dense(3, 3)
        return [f, g, f, nn.Linear(5, 3), h, h]
    if name == "frozen":
        maps = [Dense(5, 6), *dense([6] * 5), Dense(6, 3, "identity")]
        for p in (maps[0].W, maps[2].W, maps[3].b, maps[4].W, maps[4].b, maps[-1].b):
            p.requires_grad_(False)
        return maps
    raise AssertionError(name)


CASES = [
    "stretch and readout",
    "no biases",
    "widths",
    "two stretches",
    "stretch at the end",
    "one map",
    "tied",
    "tied by a function",
    "shared",
    "frozen",
]


def problem(name, B=3, seed=0, output="softmax"):
    torch.manual_seed(seed)
    chain = co.Chain(*maps_of(name), output=output).to(F64)
    return chain, co.Batch(torch.randn(B, 5, dtype=F64), torch.randint(3, (B,)))


class Truth:
    """States, losses and costates by torch's own functions, with one graph through everything."""

    def __init__(self, chain, batch):
        self.parameters = {n: p for n, p in chain.named_parameters() if p.requires_grad}
        self.x = [batch.u.clone().requires_grad_()]
        for f in chain.maps:
            self.x.append(self.step(f, self.x[-1]))
        self.losses = functional.cross_entropy(self.x[-1], batch.y, reduction="none")
        self.lam = torch.autograd.grad(self.losses.sum(), self.x, create_graph=True)

    @staticmethod
    def step(f, x):
        if isinstance(f, nn.Linear):
            return functional.linear(x, f.weight, f.bias)
        K = f.tau(f.W) if isinstance(f, Tied) else f.W
        return PSI[f.activation](functional.linear(x, K, f.b))

    def penalty(self, name):
        norms = torch.stack([lam.norm(dim=1) for lam in self.lam])[1:]
        if name == "log-ratio":
            return norms.log().diff(dim=0).square().mean(0)
        if name == "variance":
            return (norms - norms.mean(0)).square().mean(0)
        assert name == "squared-norm"
        return norms.square().mean(0)

    def gradient(self, values):
        leaves = list(self.parameters.values())
        grads = torch.autograd.grad(values.mean(), leaves, allow_unused=True)
        pairs = zip(self.parameters.items(), grads, strict=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def assert_close(ours, truth, tolerance=1e-12):
    assert list(ours) == list(truth)
    size = max(float(g.abs().max()) for g in truth.values())
    for name, g in truth.items():
        assert ours[name].shape == g.shape
        assert float((ours[name] - g).abs().max()) <= tolerance * size, name


def through_graph(chain, batch, loss, G=None, rho=0.7):
    """The gradient of the mean of weight (L + rho G) through torch's graph of a run."""
    run = chain(batch.u)
    lam = run.costates(loss, batch.y, mask=batch.mask)
    values = lam.loss if G is None else lam.loss + rho * co.penalties.penalty(G)(lam)
    if batch.weight is not None:
        values = values * batch.weight
    parameters = {n: p for n, p in chain.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(values.mean(), list(parameters.values()), allow_unused=True)
    pairs = zip(parameters.items(), grads, strict=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


@pytest.fixture(autouse=True)
def count_by_hand(monkeypatch):
    """Counts the gradients that were made by hand."""
    made = []
    of = HandGradient.of

    def counting(*args, **options):
        found = of(*args, **options)
        made.append(found is not None)
        return found

    monkeypatch.setattr(HandGradient, "of", staticmethod(counting))
    return made


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.sampled(2)
def test_gradients_of_the_loss_are_torchs(name, B, count_by_hand):
    chain, batch = problem(name, B)
    truth = Truth(chain, batch)
    e = co.BP()(chain, batch, "cross-entropy")
    assert_close(e.gradient, truth.gradient(truth.losses))
    torch.testing.assert_close(e.losses, truth.losses.detach(), rtol=1e-13, atol=0)
    assert count_by_hand == [True]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("G", ["log-ratio", "variance", "squared-norm"])
def test_penalised_gradients_are_torchs_double_backward(name, G, count_by_hand):
    chain, batch = problem(name)
    truth = Truth(chain, batch)
    penalties = truth.penalty(G)
    if name == "one map":
        penalties = penalties.nan_to_num()  # there is no ratio: a mean over nothing
    e = co.Penalised(G, 0.7)(chain, batch, "cross-entropy")
    expected = truth.gradient(truth.losses + 0.7 * truth.penalty(G))
    if name == "one map" and G == "log-ratio":
        expected = truth.gradient(Truth(chain, batch).losses)
    assert_close(e.gradient, expected)
    torch.testing.assert_close(e.penalties, penalties.detach(), rtol=1e-11, atol=1e-300)
    lam = [e.costates.at(i) for i in range(len(chain) + 1)]
    for ours, theirs in zip(lam, truth.lam, strict=True):
        torch.testing.assert_close(ours, theirs.detach(), rtol=1e-11, atol=1e-300)
    assert count_by_hand == [True]


PENALTIES = {
    "variance-l1": "variance-l1",
    "ratio": "ratio",
    "share-variance": "share-variance",
    "barrier": co.penalties.barrier(10.0),
    "omega": "omega",
    "omega-norms": "omega-norms",
    "isometry": "isometry",
    "norm-stabiliser": "norm-stabiliser",
    "output-variance": "output-variance",
    "tangent": co.penalties.tangent(torch.linspace(-1, 1, 5, dtype=F64).expand(3, 5), beta=0.1),
    "sum": 0.3 * co.penalties.log_ratio + co.penalties.PENALTIES["omega"],
    "per sqrt n": co.penalties.log_ratio.per("sqrt n"),
}


@pytest.mark.parametrize("name", ["widths", "two stretches", "tied", "shared", "frozen"])
@pytest.mark.parametrize("G", PENALTIES)
def test_every_penalty_has_the_gradient_of_torchs_graph(name, G, count_by_hand):
    chain, batch = problem(name)
    expected = through_graph(chain, batch, "cross-entropy", PENALTIES[G])
    e = co.Penalised(PENALTIES[G], 0.7)(chain, batch, "cross-entropy")
    assert_close(e.gradient, expected)
    assert count_by_hand == [True]


@pytest.mark.parametrize(
    "loss", ["squared", "half-squared", "absolute", "huber", "binary-cross-entropy"]
)
@pytest.mark.parametrize("given", ["plain", "mask", "weight"])
def test_losses_masks_and_weights_count(loss, given, count_by_hand):
    output = "sigmoid" if loss == "binary-cross-entropy" else "tanh"
    chain, batch = problem("widths", output=output)
    weights = torch.tensor([0.5, 2.0, 1.0], dtype=F64)
    options = {} if given == "plain" else {given: weights}
    batch = co.Batch(batch.u, torch.rand(3, 3, dtype=F64), **options)
    expected = through_graph(chain, batch, loss)
    assert_close(co.BP()(chain, batch, loss).gradient, expected)
    expected = through_graph(chain, batch, loss, "log-ratio")
    assert_close(co.Penalised("log-ratio", 0.7)(chain, batch, loss).gradient, expected)
    assert count_by_hand == [True, True]


@pytest.mark.parametrize(
    ("loss", "output"), [("squared", "identity"), ("cross-entropy", "softmax")]
)
def test_slopes_of_real_targets_are_written_down(loss, output, count_by_hand):
    chain, batch = problem("widths", output=output)
    batch = co.Batch(batch.u, torch.rand(3, 3, dtype=F64))  # they need not sum to 1
    expected = through_graph(chain, batch, loss, "log-ratio")
    assert_close(co.Penalised("log-ratio", 0.7)(chain, batch, loss).gradient, expected)
    assert count_by_hand == [True]


def test_pretraining_minimises_the_penalty_alone():
    chain, batch = problem("widths")
    truth = Truth(chain, batch)
    e = co.Penalised("log-ratio", 0.7, pretrain=1)(chain, batch, "cross-entropy")
    assert_close(e.gradient, truth.gradient(0.7 * truth.penalty("log-ratio")))
    assert e.objective == 0.7 * e.penalty


def test_far_costates_have_the_gradients_of_double_precision():
    torch.manual_seed(0)
    chain = co.Chain.mlp(6, [6] * 80, 3, output="softmax", gain=0.1, dtype=F64)
    batch = co.Batch(torch.randn(3, 6, dtype=F64), torch.tensor([0, 1, 2]))
    truth = Truth(chain, batch)
    expected = truth.gradient(truth.losses + 0.7 * truth.penalty("log-ratio"))
    method = co.Penalised("log-ratio", 0.7)
    assert_close(method(chain, batch, "cross-entropy").gradient, expected, 1e-11)
    single = co.Batch(batch.u.float(), batch.y)
    ours = method(chain.float(), single, "cross-entropy").gradient
    assert_close({name: g.double() for name, g in ours.items()}, expected, 1e-4)


def test_samples_components_and_costates_follow_from_an_evaluation():
    chain, batch = problem("widths")
    method = co.Penalised("log-ratio", 0.7)
    e = method(chain, batch, "cross-entropy")
    each = co.Penalised("log-ratio", 0.7).per_sample(chain, batch, "cross-entropy")
    assert_close({name: g.mean(0) for name, g in each.items()}, e.gradient)
    plain = co.BP()(chain, batch, "cross-entropy")
    sums = plain.components().weighted(torch.ones(len(chain), dtype=F64))
    assert_close({name: sums[name] for name in plain.gradient}, plain.gradient)
    for i in range(len(chain) + 1):
        torch.testing.assert_close(plain.costates.at(i), e.costates.at(i), rtol=1e-12, atol=0)


def test_weights_that_change_between_calls_are_noticed():
    chain, batch = problem("stretch and readout")
    method = co.Penalised("log-ratio", 0.7)

    def check():
        truth = Truth(chain, batch)
        expected = truth.gradient(truth.losses + 0.7 * truth.penalty("log-ratio"))
        assert_close(method(chain, batch, "cross-entropy").gradient, expected)

    check()
    with torch.no_grad():
        chain.maps[1].W.mul_(0.5)
    check()
    chain.maps[2].W.data.mul_(2.0)  # torch counts no change here
    check()
    chain.maps[0].W = nn.Parameter(torch.randn(5, 5, dtype=F64))
    check()
    chain.maps[3].b.requires_grad_(False)
    check()
    chain.maps[1] = Dense(5, 5, "sigmoid").to(F64)
    check()
    chain.float().double()
    check()


def test_what_else_happens_in_a_chain_is_done_through_torchs_graph(count_by_hand):
    chain, batch = problem("stretch and readout")
    plain = co.BP()(chain, batch, "cross-entropy").gradient
    handle = chain.maps[1].W.register_hook(lambda g: 2 * g)
    doubled = co.BP()(chain, batch, "cross-entropy").gradient
    handle.remove()
    torch.testing.assert_close(doubled["maps.1.W"], 2 * plain["maps.1.W"])
    torch.testing.assert_close(doubled["maps.0.W"], plain["maps.0.W"])
    calls = []
    handle = chain.maps[1].register_forward_hook(lambda *_: calls.append(1))
    assert_close(co.BP()(chain, batch, "cross-entropy").gradient, plain)
    handle.remove()
    assert calls == [1]
    assert count_by_hand == [True, False, False]


def test_functions_of_the_users_own_may_read_the_weights():
    chain, batch = problem("stretch and readout")
    W = chain.maps[1].W

    def loss(y_hat, y):
        return functional.nll_loss(y_hat.log(), y, reduction="none") + W.square().sum()

    def penalty(lam):
        return lam.norms()[1] * W.sum()

    expected = through_graph(chain, batch, loss, penalty)
    assert_close(co.Penalised(penalty, 0.7)(chain, batch, loss).gradient, expected)
    expected = through_graph(chain, batch, "cross-entropy", penalty)
    assert_close(co.Penalised(penalty, 0.7)(chain, batch, "cross-entropy").gradient, expected)
    assert_close(co.BP()(chain, batch, loss).gradient, through_graph(chain, batch, loss))


def test_a_residual_map_is_differentiated_by_torch(count_by_hand):
    torch.manual_seed(0)
    chain = co.Chain(*dense([5] * 3), Residual(Dense(5, 5)), nn.Linear(5, 3), output="softmax")
    chain = chain.to(F64)
    batch = co.Batch(torch.randn(3, 5, dtype=F64), torch.tensor([0, 1, 2]))
    expected = through_graph(chain, batch, "cross-entropy", "log-ratio")
    assert_close(co.Penalised("log-ratio", 0.7)(chain, batch, "cross-entropy").gradient, expected)
    assert count_by_hand == [False]


def test_inputs_that_do_not_fit_are_refused_as_before():
    chain, batch = problem("stretch and readout")
    with pytest.raises(co.InputError, match=r"reads x \[B, 5\]; got \[3, 4\]"):
        co.BP()(chain, co.Batch(batch.u[:, :4], batch.y), "cross-entropy")
    with pytest.raises(co.InputError, match=r"class numbers must lie in 0\.\.2"):
        co.BP()(chain, co.Batch(batch.u, batch.y + 3), "cross-entropy")
    with pytest.raises(co.InputError, match="no such loss"):
        co.BP()(chain, batch, "no such loss")
    with pytest.raises(co.InputError, match="frozen"):
        co.BP()(chain.requires_grad_(False), batch, "cross-entropy")


def test_a_weight_of_zero_leaves_the_penalty_out():
    calls = []

    def count(lam):
        calls.append(1)
        return lam.norms()[1]

    chain, batch = problem("widths")
    plain = co.BP()(chain, batch, "cross-entropy")
    method = co.Penalised(count, co.penalties.pretrain(1.0, 1))
    method(chain, batch, "cross-entropy")
    assert calls == [1]
    e = method(chain, batch, "cross-entropy")
    assert method.value(chain, batch, "cross-entropy") == pytest.approx(plain.loss.item())
    assert calls == [1]
    assert e.rho == 0
    assert e.penalty.isnan()
    assert e.objective == e.loss == plain.loss
    for name, g in plain.gradient.items():
        assert torch.equal(e.gradient[name], g)

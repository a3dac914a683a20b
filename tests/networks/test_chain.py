"""A chain's costates and penalised gradients are those of torch's double backward, at any depth.

The oracle runs the same modules once more by torch alone, in float64, and differentiates twice
through everything at once.
"""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

import coadjoint as co
from last_digits import as_exact_as_float32_allows, nudged

F64 = torch.float64


class Block(nn.Module):
    """A user's own module with a skip connection."""

    def __init__(self, n):
        super().__init__()
        self.f = nn.Linear(n, n)

    def forward(self, x):
        return x + torch.tanh(self.f(x))


class Attention(nn.Module):
    """Self-attention by torch's function, whose fused kernels have no second derivative."""

    def __init__(self, n):
        super().__init__()
        self.qkv = nn.Linear(n, 3 * n)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def sequential(name):
    """The maps and the shape of one input."""
    if name == "mlp":
        return [nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4), nn.Sigmoid(), nn.Linear(4, 3)], (5,)
    if name == "cnn":
        return [
            nn.Conv2d(2, 4, 3, padding=1),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 3, 2, stride=2),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(3 * 2 * 1, 3),
        ], (2, 9, 7)
    if name == "norms":
        return [
            nn.Linear(6, 8),
            nn.LayerNorm(8),
            nn.ELU(),
            nn.Unflatten(1, (4, 2)),
            nn.GroupNorm(2, 4),
            nn.Softplus(),
            nn.Flatten(),
            nn.BatchNorm1d(8).eval(),
            nn.Linear(8, 3),
            nn.LogSoftmax(1),
        ], (6,)
    if name == "blocks":
        return [Block(6), Block(6), nn.Linear(6, 3)], (6,)
    if name == "transformer":
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        return [nn.Linear(4, 8), layer, Attention(8), nn.Flatten(), nn.Linear(40, 3)], (5, 4)
    if name == "dense":
        widths = [5, 6, 6, 6, 6, 4, 4, 4]
        dense = [co.maps.Dense(n, m) for n, m in itertools.pairwise(widths)]
        return [*dense, co.maps.Dense(4, 3, "identity")], (5,)
    if name == "mixed":
        first, second = co.maps.Dense(5, 5), co.maps.Dense(5, 5, "relu")
        tied = [co.maps.Tied(second), co.maps.Tied(first, activation="sigmoid")]
        return [first, second, *tied, nn.Linear(5, 3)], (5,)
    raise AssertionError(name)


KINDS = ["mlp", "cnn", "norms", "blocks", "transformer", "dense", "mixed"]


def problem(name, B=4, seed=0, dtype=F64):
    torch.manual_seed(seed)
    maps, shape = sequential(name)
    chain = co.Chain(*maps, output="softmax").to(dtype)
    x = torch.randn(B, *shape, dtype=dtype)
    y = torch.randint(3, (B,))
    return chain, x, y


class Truth:
    """States, costates and losses by torch alone, with one graph through everything."""

    def __init__(self, chain, x, y):
        self.parameters = dict(chain.named_parameters())
        self.x = [x.clone().requires_grad_()]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            for f in chain.maps:
                self.x.append(f(self.x[-1]))
        self.losses = nn.functional.cross_entropy(self.x[-1], y, reduction="none")
        self.lam = torch.autograd.grad(self.losses.sum(), self.x, create_graph=True)

    def log_norms(self):
        return torch.stack([lam.flatten(1).norm(dim=1).log() for lam in self.lam])

    def log_ratio(self):
        return self.log_norms()[1:].diff(dim=0).square().mean(0)

    def gradient(self, values):
        grads = torch.autograd.grad(
            values.mean(), list(self.parameters.values()), allow_unused=True
        )
        pairs = zip(self.parameters.items(), grads, strict=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}


def assert_close(ours, truth, tolerance=1e-11):
    assert ours.keys() == truth.keys()
    size = max(float(g.abs().max()) for g in truth.values())
    for name, g in truth.items():
        assert float((ours[name] - g).abs().max()) <= tolerance * size, name


@pytest.mark.parametrize("name", KINDS)
def test_costates_are_torchs(name):
    chain, x, y = problem(name)
    lam = chain(x).costates("cross-entropy", y)
    truth = Truth(chain, x, y)
    assert len(lam.log_norms()) == len(chain) + 1
    for i, expected in enumerate(truth.lam):
        assert lam.at(i).shape == expected.shape
        assert torch.allclose(lam.at(i), expected, rtol=1e-11, atol=1e-13)
    assert torch.allclose(lam.log_norms(), truth.log_norms(), rtol=1e-11)
    assert torch.allclose(lam.loss, truth.losses, rtol=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_the_loss_are_torchs(name):
    chain, x, y = problem(name)
    e = co.BP()(chain, co.Batch(x, y), "cross-entropy")
    truth = Truth(chain, x, y)
    assert_close(e.gradient, truth.gradient(truth.losses))
    assert torch.allclose(e.costates.at(1), truth.lam[1], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", KINDS)
def test_penalised_gradients_are_torchs_double_backward(name):
    chain, x, y = problem(name)
    e = co.Penalised("log-ratio", 0.7)(chain, co.Batch(x, y), "cross-entropy")
    truth = Truth(chain, x, y)
    assert torch.allclose(e.penalties, truth.log_ratio(), rtol=1e-10)
    assert_close(e.gradient, truth.gradient(truth.losses + 0.7 * truth.log_ratio()), 1e-10)


@pytest.mark.parametrize("name", KINDS)
def test_a_users_own_backward_is_the_same(name):
    chain, x, y = problem(name)
    lam = chain(x).costates("cross-entropy", y)
    (lam.loss + 0.7 * co.penalties.log_ratio(lam)).mean().backward()
    e = co.Penalised("log-ratio", 0.7)(chain, co.Batch(x, y), "cross-entropy")
    for p_name, p in chain.named_parameters():
        assert torch.allclose(p.grad, e.gradient[p_name], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", KINDS)
def test_pushes_and_pulls_are_transposes(name):
    chain, x, _ = problem(name)
    run = chain(x)
    v = torch.randn_like(x)
    changes = run.push_states(v)
    w = [torch.randn_like(state) for state in run.x[1:]]
    pulled = run.pull(w)
    before = [v, *changes[:-1]]
    for change, w_i, back, v_i in zip(changes, w, pulled, before, strict=True):
        assert torch.allclose((change * w_i).sum(), (back * v_i).sum(), rtol=1e-10)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        _, whole = torch.func.jvp(nn.Sequential(*chain.maps), (x,), (v,))
    assert torch.allclose(changes[-1], whole, rtol=1e-10, atol=1e-13)


def shrinking(dtype, L=600):
    """L maps that shrink by about 0.3, each a module by itself."""
    torch.manual_seed(0)
    maps = []
    for _ in range(L // 2):
        f = nn.Linear(6, 6, dtype=F64)
        nn.init.orthogonal_(f.weight, 0.3)
        maps += [f, nn.Tanh()]
    return co.Chain(*maps).float().to(dtype)  # the same numbers in both types


def shrinking_dense(dtype, L=600):
    """The same by dense layers, which one sweep runs."""
    chain = co.Chain.mlp(6, [6] * L, 6, gain=0.3, seed=0, dtype=F64)
    for p in chain.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, std=0.3)
    return chain.float().to(dtype)


@pytest.mark.parametrize("make", [shrinking, shrinking_dense])
def test_float32_agrees_with_float64_where_costates_have_long_left_its_range(make):
    def penalised(dtype, draw=0):
        """The log-ratios, and the gradient as one array; draw: of a change of the last digits."""
        torch.manual_seed(1)
        chain = make(dtype)
        torch.manual_seed(2)
        batch = co.Batch(torch.randn(4, 6).to(dtype), torch.zeros(4, 6, dtype=dtype))
        if draw:
            batch = replace(batch, u=nudged(batch.u, draw))
            with torch.no_grad():
                for p in chain.parameters():
                    p.copy_(nudged(p, draw))
        e = co.Penalised("log-ratio", 1.0, pretrain=1)(chain, batch, "squared")
        whole = torch.cat([g.double().flatten() for g in e.gradient.values()])
        return e.costates.log_ratios(), whole

    ratios, gradient = penalised(torch.float32)
    right_ratios, _ = penalised(F64)
    assert right_ratios.sum(0).max() < -200  # e^-200 is below the range of float32
    assert torch.allclose(ratios, right_ratios, rtol=0, atol=1e-6)
    as_exact_as_float32_allows([gradient], lambda draw: [penalised(F64, draw)[1]])


def test_a_sequential_keeps_its_own_parameters():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    chain = co.Chain(model)
    assert {id(p) for p in chain.parameters()} == {id(p) for p in model.parameters()}
    assert [type(f).__name__ for f in chain.maps] == ["Linear", "Tanh", "Linear"]
    assert (chain.inputs, chain.outputs) == (4, 2)


def test_per_sample_gradients_average_to_the_weighted_one():
    chain, x, y = problem("dense")
    batch = co.Batch(x, y, weight=torch.tensor([0.5, 2.0, 1.0, 0.0], dtype=F64))
    for method in (co.BP(), co.Penalised("variance", 0.3)):
        each = method.per_sample(chain, batch, "cross-entropy")
        mean = {name: g.mean(0) for name, g in each.items()}
        assert_close(mean, method(chain, batch, "cross-entropy").gradient)


def test_samples_of_weight_zero_may_hold_anything():
    chain, x, _ = problem("mlp")
    chain.output = "identity"
    y = torch.full((4, 3), math.nan, dtype=F64)
    y[:2] = 0
    mask = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=F64)
    e = co.BP()(chain, co.Batch(x, y, mask=mask), "squared")
    assert e.losses[2:].tolist() == [0, 0]
    assert all(torch.isfinite(g).all() for g in e.gradient.values())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 3)])
def test_inputs_that_are_not_finite_are_refused_with_their_sample(shape, value):
    x = torch.ones(shape, dtype=F64)
    x[2:, ..., 1] = value
    chain = co.Chain(nn.Linear(3, 2, dtype=F64))
    for run in (chain, lambda x: co.BP()(chain, co.Batch(x, axis=0), lambda y_hat: y_hat.sum())):
        with pytest.raises(co.InputError, match=r"holds NaN or inf, first in sample 2; clean"):
            run(x)


def test_finite_inputs_whose_sum_is_not_are_let_through():
    x = torch.full((4, 3), 1e308, dtype=F64)
    assert torch.isinf(x.sum())
    assert (co.Chain(nn.Tanh())(x).a == 1).all()


def test_components_by_layer_sum_to_the_gradient():
    for name in KINDS:
        chain, x, y = problem(name)
        e = co.BP()(chain, co.Batch(x, y), "cross-entropy")
        components = e.components()
        L = len(chain)
        assert components.norms()["joint"].shape == (L,)
        assert_close(components.weighted(torch.ones(L)), e.gradient)
        norms = [math.sqrt(sum(float(g.square().sum()) for g in components.at(i).values()))
                 for i in range(1, L + 1)]  # fmt: skip
        assert components.norms()["joint"].tolist() == pytest.approx(norms)


def test_an_activation_in_place_is_given_a_copy():
    maps = [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 3)]
    torch.manual_seed(0)
    chain = co.Chain(*maps, output="softmax").double()
    x, y = torch.randn(5, 4, dtype=F64), torch.randint(3, (5,))
    run = chain(x)
    assert torch.allclose(run.x[1], maps[0](x))  # before the activation, not after it
    lam = run.costates("cross-entropy", y)
    maps[1] = nn.ReLU()
    truth = Truth(co.Chain(*maps), x, y)
    for i in range(4):
        assert torch.allclose(lam.at(i), truth.lam[i], rtol=1e-12, atol=1e-15)


class Overwriting(nn.Module):
    def forward(self, x):
        return torch.relu_(x)


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Merging(nn.Module):
    def forward(self, x):
        return x.sum(0, keepdim=True)


def bn(**options):
    return [nn.Linear(4, 4), nn.BatchNorm1d(4, **options), nn.Linear(4, 3)]


REFUSED = {
    "batch norm": (bn(), "map 1 .BatchNorm1d. normalises by the batch"),
    "batch norm without statistics": (
        [bn(track_running_stats=False)[1].eval()], "normalises by the batch"),
    "in place": ([nn.Linear(4, 4), Overwriting()], "map 1 .Overwriting. changes its input"),
    "tuple": ([nn.Linear(4, 4), Pair()], "map 1 .Pair. returned .* one tensor"),
    "rnn": ([nn.LSTM(4, 4)], "map 0 .LSTM. returned .* one tensor"),
    "samples": ([nn.Linear(4, 4), Merging()], "map 1 .Merging. returned shape .1, 4. for 5"),
    "width": ([nn.Linear(4, 4), nn.Linear(3, 3)], r"map 1 .Linear. cannot take a state"),
    "axes": ([nn.BatchNorm2d(4).eval()], r"map 0 .BatchNorm2d. cannot take .*: expected 4D input"),
    "arguments": ([nn.MultiheadAttention(4, 1)], r"map 0 .Multihead.* cannot take .* missing 2"),
    "softmax of samples": ([nn.Softmax(0)], r"map 0 .Softmax. with dim=0 runs over the samples"),
    "log-softmax of samples": ([nn.LogSoftmax(-2)], r"map 0 .LogSoftmax. with dim=-2 runs over"),
    "softmin of samples": ([nn.Tanh(), nn.Softmin(0)], r"map 1 .Softmin. with dim=0 runs over"),
    "softmax inside": (
        [nn.Sequential(nn.Tanh(), nn.Sequential(nn.Softmax(0)))],
        "map 1 .Sequential. holds a Softmax, which"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_maps_that_cannot_have_costates_are_refused_by_name(name):
    maps, message = REFUSED[name]
    with pytest.raises(co.CoadjointError, match=message) as caught:
        co.Chain(*maps)(torch.randn(5, 4))
    assert "\n" not in str(caught.value)


def test_wrong_arguments_are_refused_in_one_line():
    chain = co.Chain(nn.Linear(4, 3), output="softmax")
    x, y = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)
    calls = [
        (lambda: co.Chain(), "at least one map"),
        (lambda: co.Chain("tanh"), "nn.Modules"),
        (lambda: co.Chain([nn.Tanh(), nn.Tanh()]), r"got a list. Unpack it: co.Chain\(\*maps\)"),
        (lambda: co.Chain(nn.ModuleList([nn.Tanh()])), "got a ModuleList. Unpack it"),
        (lambda: chain(x).loss("squared", y[:4]), r"with \[5\]: one target for each of 5 samples"),
        (lambda: chain(x).loss("cross-entropy", y.float()), r"must be integers: y.long\(\)"),
        (lambda: co.Chain(nn.Linear(2, 2), output="sofmax"), "softmax"),
        (lambda: chain(torch.zeros(5, 4, dtype=torch.long)), "real numbers"),
        (lambda: co.BP()(chain, co.Batch(x, y, axis=1), "cross-entropy"), "axis 0"),
        (lambda: co.BP()(chain, co.Batch(x, y, lengths=[1] * 5), "cross-entropy"), "no time steps"),
        (lambda: chain(x).costates(torch.ones(5)), "does not depend"),
        (lambda: chain(x).loss(torch.ones(())), "one value for each sample"),
        (lambda: co.Truncated(2, 4)(chain, co.Batch(x, y), "cross-entropy"), "no time steps"),
        (lambda: co.RTRL()(chain, co.Batch(x, y), "cross-entropy"), "no time steps"),
        (
            lambda: co.BP(segments=2)(chain, co.Batch(x, y), "cross-entropy"),
            r"no time steps. Use BP or Penalised.$",
        ),
    ]
    for call, message in calls:
        with pytest.raises(co.CoadjointError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_softmax_over_classes_is_a_map_and_a_nested_sequence_counts_as_one():
    inner = nn.Sequential(nn.Linear(4, 3), nn.Softmax(-1))
    assert len(co.Chain(inner)) == 2
    assert len(co.Chain(nn.Sequential(nn.Tanh(), inner))) == 2
    assert co.Chain(nn.Tanh(), nn.Sequential(inner))(torch.zeros(5, 4)).a.shape == (5, 3)


def test_dropout_is_drawn_once_for_a_run():
    torch.manual_seed(0)
    chain = co.Chain(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3), output="softmax")
    chain = chain.double()
    x, y = torch.randn(4, 6, dtype=F64), torch.randint(3, (4,))
    run = chain(x)
    mask = run.x[3] / run.x[2]
    lam = run.costates("cross-entropy", y)
    again = run.costates("cross-entropy", y)
    assert torch.equal(lam.at(0), again.at(0))
    assert torch.allclose(lam.at(2), lam.at(3) * mask)
    change = run.push_states(torch.ones_like(x))
    assert torch.allclose(change[2], change[1] * mask)
    with torch.no_grad():
        without_graph = chain(x)
        lam = without_graph.costates("cross-entropy", y)  # runs again, with the same mask
    mask = without_graph.x[3] / without_graph.x[2]
    assert torch.allclose(lam.at(2), lam.at(3) * mask)
    with pytest.raises(co.Unsupported, match="dropout"):
        co.BP().per_sample(chain, co.Batch(x, y), "cross-entropy")


def test_a_run_without_gradients_still_has_costates_without_a_graph():
    chain, x, y = problem("cnn")
    with torch.no_grad():
        lam = chain(x).costates("cross-entropy", y)
    truth = Truth(chain, x, y)
    assert not lam.at(0).requires_grad
    assert torch.allclose(lam.at(0), truth.lam[0], rtol=1e-11, atol=1e-14)


def test_a_loss_by_hand_has_the_same_costates():
    chain, x, y = problem("mlp")
    run = chain(x)
    losses = nn.functional.cross_entropy(run.a, y, reduction="none")
    by_hand = run.costates(losses)
    by_name = chain(x).costates("cross-entropy", y)
    assert torch.allclose(by_hand.at(0), by_name.at(0), rtol=1e-11)


def test_hooks_fire_and_are_differentiated():
    chain, x, y = problem("dense")
    calls = []
    chain.register_forward_hook(lambda *_: calls.append("chain"))
    chain.maps[2].register_forward_hook(lambda m, args, out: calls.append("map") or out * 2)
    e = co.Penalised("log-ratio", 0.3)(chain, co.Batch(x, y), "cross-entropy")
    assert calls == ["map", "chain"]
    truth = Truth(chain, x, y)
    assert_close(e.gradient, truth.gradient(truth.losses + 0.3 * truth.log_ratio()), 1e-10)


def test_chains_are_copied_pickled_and_loaded():
    chain, x, _ = problem("mixed")
    for other in (copy.deepcopy(chain), pickle.loads(pickle.dumps(chain))):
        assert torch.equal(other(x).a, chain(x).a)
        assert other.maps[2].W is other.maps[1].W  # tied weights stay tied
    fresh, _, _ = problem("mixed", seed=1)
    fresh.load_state_dict(chain.state_dict())
    assert torch.equal(fresh(x).a, chain(x).a)


def test_images_are_targets_of_images():
    torch.manual_seed(0)
    chain = co.Chain(nn.Conv2d(1, 1, 3, padding=1)).double()
    x = torch.randn(4, 1, 5, 5, dtype=F64)
    e = co.BP()(chain, co.Batch(x, x), "squared")
    assert torch.allclose(e.losses, (chain(x).a - x).square().flatten(1).sum(1))
    assert chain(x).y_hat.shape == x.shape


@pytest.mark.parametrize("activation", ["tanh", "relu", "sigmoid", "identity", "softplus", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_dense_layers_swept_together_are_those_run_one_by_one(activation, bias):
    mlp = co.Chain.mlp(7, [7] * 6, 3, activation=activation, bias=bias, seed=0, dtype=F64)
    mlp.output = "softmax"
    torch.manual_seed(3)
    x, y = torch.randn(5, 7, dtype=F64), torch.randint(3, (5,))
    e = co.Penalised("log-ratio", 0.5)(mlp, co.Batch(x, y), "cross-entropy")
    truth = Truth(mlp, x, y)
    assert_close(e.gradient, truth.gradient(truth.losses + 0.5 * truth.log_ratio()), 1e-10)


def test_a_dense_map_with_its_own_forward_is_called():
    class Doubled(co.maps.Dense):
        def forward(self, x):
            return 2 * super().forward(x)

    maps = [Doubled(3, 3, dtype=F64), Doubled(3, 3, dtype=F64)]
    x = torch.randn(2, 3, dtype=F64)
    assert torch.equal(co.Chain(*maps)(x).a, maps[1](maps[0](x)))


def test_a_linear_map_changed_after_the_run_has_no_costates():
    linear = nn.Linear(3, 2)
    run = co.Chain(nn.Tanh(), linear)(torch.randn(4, 3))
    with torch.no_grad():
        linear.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.costates("squared", torch.zeros(4, 2))

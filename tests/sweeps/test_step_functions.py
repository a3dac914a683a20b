"""Derivatives of step functions from one call with the rows of all time steps.

They are those of the same run differentiated one step at a time. A step for which that would not
hold, because it mixes samples, draws at random or is not what torch sees, is left to the latter.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm, linear, softmax

import coadjoint as co
from coadjoint.cells import steps
from coadjoint.sweeps import chunks, step_run
from coadjoint.sweeps.engines.c import compiler, row_products
from coadjoint.sweeps.step_functions import linearised, products
from coadjoint.sweeps.step_functions.linearised import Linearised
from sampling import one_in

D = 4
INPUTS = 3
LENGTHS = torch.tensor([20, 20, 17, 9, 16])
torch.manual_seed(0)
W = nn.Parameter(torch.randn(D, D, dtype=torch.float64) / 2)
R = nn.Parameter(torch.randn(D, INPUTS, dtype=torch.float64))
scalar = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
gain = nn.Parameter(torch.rand(D, dtype=torch.float64))
zero_gain = nn.Parameter(torch.zeros(D, dtype=torch.float64))


def elman(u, x):
    return torch.tanh(linear(x, W) + linear(u, R))


def columns(u, x):
    """The samples are columns."""
    return torch.tanh(W @ x.T + R @ u.T).T


def normalised(u, x):
    return torch.tanh(layer_norm(x @ W.T, (D,), gain, None) + u @ R.T)


def attention(u, x):
    """Two parts of the state weigh each other."""
    parts = x.view(-1, 2, D // 2)
    weights = softmax(parts @ parts.transpose(1, 2), -1)
    return torch.tanh((weights @ parts).flatten(1) + linear(u, R) @ W)


def linear_of_parts(u, x):
    """One matrix for both parts of the state: rows and parts lie along one axis."""
    parts = linear(x.reshape(-1, 2, D // 2), W[:2, :2])
    return torch.tanh(parts.reshape(-1, D) + linear(u, R))


def gated(u, x):
    a, b = linear(torch.cat([x, u], -1), torch.cat([W, R], 1)).chunk(2, -1)
    k = torch.sigmoid(torch.stack([a, b], -1).sum((1, 2)))[:, None]
    moved = torch.relu(torch.cat([b, a], -1)) - torch.where(x > 0, x, 0.5 * x)
    return scalar * k * moved / (1 + x.square().mean(-1, keepdim=True)).sqrt()


def with_zeros(u, x):
    padded = torch.cat([torch.zeros_like(x), x], 1)
    return torch.tanh(linear(padded, torch.cat([W, W], 1))) + x.new_zeros(len(x), D) + u @ R.T


def made_outside(u, x):
    """The weights have a history of their own."""
    return torch.tanh(linear(x, made_outside.W) + linear(u, R))


def linear_step(u, x):
    return linear(x, W) * 0.5 + linear(u, R)


def by_entries(u, x):
    first, *rest = x.unbind(1)
    return torch.tanh(torch.stack([first * rest[0], *rest], 1) @ W + u[:, :1] * u[:, 1:2] @ R.T[:1])


def in_place(u, x):
    y = linear(x, W)
    y += linear(u, R)
    return torch.tanh(y)


SEPARATE = [
    elman, columns, normalised, attention, linear_of_parts, gated, with_zeros, made_outside,
    linear_step, by_entries, in_place,
]  # fmt: skip


def centred(u, x):
    return torch.tanh(linear(x - x.mean(0), W) + linear(u, R))


def silent_batch_norm(u, x):
    """Nothing comes of the mean over samples at this value, but for the gain's gradient."""
    return elman(u, x) + zero_gain * (x - x.mean(0))


def clipped(u, x):
    """The gradient is changed on its way, and not in a linear manner."""
    y = elman(u, x)
    if y.requires_grad:
        y.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return y


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return g / 2

    generate_vmap_rule = True


def own_function(u, x):
    return Halved.apply(elman(u, x))


def changing_a_view(u, x):
    y = linear(x, W)
    part = y[:, :2]
    part += linear(u, R)[:, :2]
    return torch.tanh(y)


def branching(u, x):
    return elman(u, x) if x.sum() < 1e9 else x


def by_number_of_rows(u, x):
    return elman(u, x) * (0.5 if len(x) > 5 else 1.0)


TOGETHER = [centred, silent_batch_norm, changing_a_view, branching, by_number_of_rows, own_function]


def network(step):
    made_outside.W = W * W.detach().sign() * 0.8
    net = co.Network(step, inputs=INPUTS, hidden=D, outputs=2, dtype=torch.float64, x0="learned")
    with torch.no_grad():
        net.x0.uniform_(-1, 1)
    return net


def batch():
    generator = torch.Generator().manual_seed(1)
    u = torch.randn(20, len(LENGTHS), INPUTS, dtype=torch.float64, generator=generator)
    return co.Batch(u, torch.zeros(len(LENGTHS), 2, dtype=torch.float64), lengths=LENGTHS)


def tensors_of(net):
    return [*net.parameters(), W, R, scalar, gain, zero_gain]


def one_at_a_time(monkeypatch):
    for name in ("of", "with_states"):
        monkeypatch.setattr(step_run.Linearised, name, staticmethod(lambda *_: None))


def objective(net, twice=False, hold=None):
    """The loss and a penalty on the costates; `twice`: also on the gradient by the inputs."""
    made_outside.W = W * W.detach().sign() * 0.8
    data = batch()
    u = data.u.clone().requires_grad_(twice)
    run = net(u, lengths=data.lengths)
    lam = run.costates("squared", data.y, hold=hold)
    value = lam.loss.sum() + lam.log_ratios().nan_to_num().square().sum()
    if twice:
        (g,) = torch.autograd.grad(value, u, create_graph=True)
        value = value + g.square().sum()
    return value


def gradient(net, **options):
    grads = torch.autograd.grad(objective(net, **options), tensors_of(net), allow_unused=True)
    return [torch.zeros(()) if g is None else g for g in grads]


def watch(monkeypatch):
    """Note whether each step was linearised, and the code for it written."""
    noted = []
    prepare = Linearised.prepare

    def noting(self, twice):
        noted.append(prepare(self, twice))
        return noted[-1]

    monkeypatch.setattr(Linearised, "prepare", noting)
    return noted


def assert_same_one_at_a_time(net, monkeypatch, **options):
    """The gradient is that of the same run one step at a time, and not by chance."""
    noted = watch(monkeypatch)
    found = gradient(net, **options)
    assert noted
    assert all(noted)
    one_at_a_time(monkeypatch)
    for ours, theirs in zip(found, gradient(net, **options), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("step", SEPARATE, ids=lambda step: step.__name__)
def test_steps_at_once_as_one_at_a_time(step, monkeypatch):
    assert_same_one_at_a_time(network(step), monkeypatch)


# torch's own third derivative of layer_norm is wrong: it differs from that of its formula.
THRICE = [step for step in SEPARATE if step is not normalised]


@pytest.mark.parametrize("step", one_in(3, THRICE), ids=lambda step: step.__name__)
def test_derivatives_of_their_derivatives(step, monkeypatch):
    assert_same_one_at_a_time(network(step), monkeypatch, twice=True)


@pytest.mark.parametrize("step", [elman, steps.ResetBefore(INPUTS, D, dtype=torch.float64)])
def test_sources_that_are_held(step, monkeypatch):
    assert_same_one_at_a_time(network(step), monkeypatch, hold="source")


MODULES = [
    steps.ResetBefore(INPUTS, D),
    steps.MixedLSTM(INPUTS, D),
    steps.DeepTransition(INPUTS, D, depth=3, shortcut=True),
    steps.GatedFeedback(INPUTS, D, layers=3, unit="lstm"),
    steps.UnICORNNLayers(INPUTS, D),
    nn.RNNCell(INPUTS, D),
    nn.GRUCell(INPUTS, D),
    nn.LSTMCell(INPUTS, D),
]


@pytest.fixture
def short(monkeypatch):
    """Runs as short as those here are taken to be worth it."""
    monkeypatch.setattr(step_run, "LONG", 16)


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
def test_cells_of_the_package_and_of_torch(module, twice, short, monkeypatch):
    """They run without a graph for each step."""
    net = network(copy.deepcopy(module).double())
    assert type(net(batch().u).run.x.grad_fn).__name__.startswith("StepStates")
    assert_same_one_at_a_time(net, monkeypatch, twice=twice)


@pytest.mark.parametrize("step", [gated, normalised, steps.GatedFeedback(INPUTS, D)])
def test_several_blocks(step, short, monkeypatch):
    """Of few steps each, computed one after the other."""
    monkeypatch.setattr(linearised, "BLOCK_ELEMENTS", 3 * len(LENGTHS) * D)
    net = network(step.double() if isinstance(step, nn.Module) else step)
    assert_same_one_at_a_time(net, monkeypatch)


@pytest.mark.skipif(compiler.compiler_setup().refusal is not None, reason="needs a C compiler")
@pytest.mark.parametrize("blocks", ["one block", "several blocks"])
@pytest.mark.parametrize("step", [gated, nn.LSTMCell(INPUTS, D), steps.GatedFeedback(INPUTS, D)])
def test_products_over_rows_are_compiled(step, blocks, short, monkeypatch):
    """Those by matrices, and the sums over rows that are gradients by weights."""
    called = set()

    def noting(name, compute):
        def noted(*arguments):
            called.add(name)
            return compute(*arguments)

        return noted

    monkeypatch.setattr(chunks, "COMPILED_FROM", 0)
    monkeypatch.setattr(products, "WORTH_FROM", 0)
    for name in ("affine_rows", "join_products"):
        monkeypatch.setattr(row_products, name, noting(name, getattr(row_products, name)))
    if blocks == "several blocks":
        monkeypatch.setattr(linearised, "BLOCK_ELEMENTS", 3 * len(LENGTHS) * D)
    net = network(copy.deepcopy(step).double() if isinstance(step, nn.Module) else step)
    assert_same_one_at_a_time(net, monkeypatch)
    assert called == {"affine_rows", "join_products"}


@pytest.mark.parametrize(
    ("operator", "shapes"),
    [
        (torch.ops.aten.mm.default, [(40, 6), (6, 9)]),
        (torch.ops.aten.mm.default, [(6, 40), (40, 9)]),
        (torch.ops.aten.mm.default, [(40, 40), (40, 40)]),
        (torch.ops.aten.addmm.default, [(9,), (40, 6), (6, 9)]),
        (torch.ops.aten.addmm.default, [(40, 9), (40, 6), (6, 9)]),
        (torch.ops.aten.addmm.default, [(1,), (40, 6), (6, 9)]),
    ],
)
def test_products_as_torch_computes_them(operator, shapes, monkeypatch):
    monkeypatch.setattr(chunks, "COMPILED_FROM", 0)
    arrays = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    torch.testing.assert_close(products.computed(operator, arrays, {}, 40), operator(*arrays))


@pytest.mark.parametrize("arguments", [([0],), ([0], True), ([0, 1],), ([1],), ([-1], True)])
def test_sums_as_torch_computes_them(arguments, monkeypatch):
    monkeypatch.setattr(chunks, "COMPILED_FROM", 0)
    operator = torch.ops.aten.sum.dim_IntList
    given = (torch.randn(40, 9, dtype=torch.float64), *arguments)
    torch.testing.assert_close(products.computed(operator, given, {}, 40), operator(*given))


@pytest.mark.parametrize("samples", [1, 2])
def test_few_samples(samples, short, monkeypatch):
    noted = watch(monkeypatch)
    net = network(steps.ResetBefore(INPUTS, D, dtype=torch.float64))
    data = co.Batch(batch().u[:, :samples], batch().y[:samples])
    found = co.Penalised("log-ratio", 0.1)(net, data, "squared").gradient
    assert all(noted)
    one_at_a_time(monkeypatch)
    expected = co.Penalised("log-ratio", 0.1)(net, data, "squared").gradient
    for name, ours in found.items():
        torch.testing.assert_close(ours, expected[name], rtol=1e-9, atol=1e-11)


def test_a_step_with_hooks_keeps_its_graph(short):
    net = network(nn.GRUCell(INPUTS, D).double())
    kept = []
    net.step.register_forward_hook(lambda module, args, result: kept.append(result))
    net(batch().u)
    assert len(kept) == 20
    assert all(state.requires_grad for state in kept)


@pytest.mark.parametrize("step", TOGETHER, ids=lambda step: step.__name__)
def test_steps_that_cannot_be_taken_at_once(step, monkeypatch):
    net = network(step)
    noted = watch(monkeypatch)
    found = gradient(net)
    assert not any(noted)
    one_at_a_time(monkeypatch)
    assert all(map(torch.equal, found, gradient(net)))


def test_a_hook_that_changes_a_gradient(monkeypatch):
    """As when it is one step at a time."""
    net = network(clipped)
    found = gradient(net)
    one_at_a_time(monkeypatch)
    assert all(map(torch.equal, found, gradient(net)))


def test_weights_changed_in_between(short):
    """The run belongs to the weights it was made with."""
    net = network(nn.GRUCell(INPUTS, D).double())
    data = batch()
    run = net(data.u)
    with torch.no_grad():
        net.step.weight_hh.mul_(2)
    with pytest.raises(co.errors.Unsupported, match="returned a different state"):
        run.costates("squared", data.y)

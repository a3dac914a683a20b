"""The tangent loss 1/(2K) sum_k ||DF(u) v_k - beta_k||^2 against torch's double backward.

The oracles differentiate y_hat by u, entry by entry of y_hat, in float64.
"""

import pytest
import torch
from torch import nn

import build
import coadjoint as co
import oracles
from compare import close

F64 = torch.float64
T, B, I, O = 6, 4, 3, 2
LENGTHS = [6, 1, 4, 2]


def network(engine, **options):
    return build.network("lstm", engine=engine, **options)


def stack(engine, **options):
    torch.manual_seed(0)
    return co.Stack(["elman", "gru"], engine=engine, **(build.SIZES | options))


NETWORKS = {
    "network": (network, {}),
    "network, every": (network, {"readout": "every", "output": "sigmoid", "skip": True}),
    "network, attention": (network, {"readout": "attention", "deep": [4]}),
    "stack": (stack, {"output": "softmax"}),
    "stack, both": (stack, {"bidirectional": True, "output": "tanh"}),
    "stack, both, every": (stack, {"bidirectional": True, "readout": "every", "skip": True}),
    "stack, residual": (stack, {"residual": True, "readout": "every"}),
    "stack, residual, last": (stack, {"residual": True, "deep": [4]}),
    "stack, projected, last": (stack, {"residual": True, "hidden": [3, 5], "bidirectional": True}),
    "stack, dense": (stack, {"dense": True, "hidden": [5, 2], "readout": "every"}),
    "stack, dense, last": (stack, {"dense": True, "bidirectional": True}),
    "stack, tilted": (stack, {"readout": "tilted", "beta": 0.7, "bidirectional": True}),
}


def jacobian(y, u):
    """dy/du of one sample, [entries of y, entries of u], differentiable."""
    rows = []
    for entry in y.flatten():
        (row,) = torch.autograd.grad(entry, u, create_graph=True, allow_unused=True)
        rows.append(torch.zeros_like(u).flatten() if row is None else row.flatten())
    return torch.stack(rows)


def truth(net, u, directions, targets):
    """The tangent loss of each sample, one at a time, from its whole Jacobian.

    directions, targets: one for each k; targets of the shape of y_hat.
    """
    every = net.readout == "every"
    values = []
    for j, n in enumerate(LENGTHS):
        own = u[:n, j : j + 1].detach().requires_grad_()
        J = jacobian(net(own).y_hat, own)
        terms = []
        for v, beta in zip(directions, targets, strict=True):
            aim = beta[:n, j] if every else beta[j]
            terms.append((J @ v[:n, j].flatten() - aim.flatten()).square().sum() / 2)
        values.append(sum(terms) / len(terms))
    return torch.stack(values)


def gradients(values, net):
    weighted = (values * torch.linspace(0.5, 1.5, B, dtype=F64)).sum()
    return oracles.gradient(weighted, dict(net.named_parameters()))


def agree(ours, true, net):
    close(ours, true, 1e-12)
    close(gradients(ours, net), gradients(true, net), 1e-12)


def data(net, seed=5):
    rng = torch.Generator().manual_seed(seed)
    u = torch.randn(T, B, I, dtype=F64, generator=rng)
    v = torch.randn(2, T, B, I, dtype=F64, generator=rng)
    shape = (2, T, B, O) if net.readout == "every" else (2, B, O)
    return u, v, torch.randn(shape, dtype=F64, generator=rng)


def costates(net, u):
    return net(u, LENGTHS).costates(lambda y_hat: y_hat.square().sum(-1))


@pytest.mark.parametrize("engine", ["cpu", "reference", "autograd"])
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sampled(3)
def test_the_loss_and_its_gradient_are_those_of_the_whole_jacobian(name, engine):
    make, options = NETWORKS[name]
    net, oracle = make(engine, **options), make("autograd", **options)
    oracle.load_state_dict(net.state_dict())
    u, v, beta = data(net)
    ours = co.penalties.tangent(v[0], beta[0])(costates(net, u))
    agree_across(ours, truth(oracle, u, v[:1], beta[:1]), net, oracle)
    ours = co.penalties.tangent(v, beta)(costates(net, u))  # the mean of two, (3.14)
    agree_across(ours, truth(oracle, u, v, beta), net, oracle)


def agree_across(ours, true, net, oracle):
    close(ours, true, 1e-12)
    close(gradients(ours, net), gradients(true, oracle), 1e-12)


@pytest.mark.parametrize("name", ["network, every", "stack, both"])
def test_directions_and_targets_may_be_functions_of_the_input_or_drawn(name):
    make, options = NETWORKS[name]
    net = make("autograd", **options)
    u, _, beta = data(net)
    lam = costates(net, u)

    def along(x):
        return torch.stack([torch.sin(x), x])

    padded = lam.run.u if name.startswith("stack") else lam.trajectory.u
    G = co.penalties.tangent(along, lambda x: beta)(lam)
    agree(G, truth(net, u, along(padded), beta), net)
    signs = torch.zeros(3, T, B, I, dtype=F64)
    for k in range(3):
        for j in range(B):
            drawn = oracles.drawn_signs(T * I, k + 1, j, seed=9)
            signs[k, :, j] = torch.tensor(drawn, dtype=F64).view(T, I)
    G = co.penalties.tangent(K=3, seed=9, beta=0.2)(lam)
    agree(G, truth(net, u, signs, [torch.full_like(beta[0], 0.2)] * 3), net)


def test_penalised_gradients_of_a_stack_are_those_of_the_whole_jacobian():
    make, options = NETWORKS["stack, both, every"]
    net = make("cpu", **options)
    u, v, beta = data(net)
    e = co.Penalised(co.penalties.tangent(v, beta), 0.3)(
        net, co.Batch(u, torch.zeros(T, B, O, dtype=F64), lengths=LENGTHS), "squared"
    )
    lam = net(u, LENGTHS).costates("squared", torch.zeros(T, B, O, dtype=F64))
    expected = oracles.gradient(
        (lam.loss + 0.3 * truth(net, u, v, beta)).mean(), dict(net.named_parameters())
    )
    close(e.gradient, expected, 1e-12)


def test_dropout_is_the_same_in_the_change_as_in_the_run():
    for make, options in ((network, {}), (stack, {"bidirectional": True})):
        net = make("cpu", dropout=0.4, **options)
        u, v, _ = data(net)
        u.requires_grad_()
        torch.manual_seed(1)
        run = net(u, LENGTHS)
        close(run.push(v[0]), co.penalties.output_change(run.y_hat, u, v[0]), 1e-12)


def test_the_mean_over_signs_is_half_the_squared_frobenius_norm():
    """Of all 2^3 signs of three entries it is exact."""
    chain = co.Chain.mlp(3, [4], 2, seed=0, dtype=F64)
    x = torch.randn(1, 3, dtype=F64)
    lam = chain(x).costates("squared", torch.zeros(1, 2, dtype=F64))
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0], dtype=F64)] * 3)[:, None]
    moved = x.clone().requires_grad_()
    J = jacobian(chain(moved).y_hat[0], moved)
    close(co.penalties.tangent(signs)(lam), J.square().sum()[None] / 2, 1e-12)


# chains, and models of the user's own


class Own(nn.Module):
    """A GRU of co.nn inside a model."""

    def __init__(self, module=co.nn):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = module.GRU(I, 4, num_layers=2, bidirectional=True, dtype=F64)
        self.out = nn.Linear(8, O, dtype=F64)

    def forward(self, u):
        return torch.sigmoid(self.out(self.rnn(u)[0]))


def test_a_recorded_model_has_the_loss_by_double_backward():
    model = Own()
    twin = Own(nn)
    twin.load_state_dict(model.state_dict())
    u = torch.randn(T, B, I, dtype=F64)
    v = torch.randn_like(u)
    moved = u.clone().requires_grad_()
    change = co.penalties.output_change(model(moved), moved, v)
    ours = co.penalties.tangent_loss(change, 0.1, axis=1)
    _, along = torch.func.jvp(twin, (u,), (v,))
    true = (along - 0.1).square().sum((0, 2)) / 2
    close(ours, true.detach(), 1e-12)
    grads = torch.autograd.grad(ours.sum(), list(model.parameters()))
    theirs = []
    for j in range(B):
        own = u[:, j : j + 1].clone().requires_grad_()
        change = jacobian(twin(own), own) @ v[:, j].flatten()
        theirs.append((change - 0.1).square().sum() / 2)
    for g, h in zip(grads, torch.autograd.grad(sum(theirs), list(twin.parameters())), strict=True):
        close(g, h, 1e-12)
    with torch.no_grad():
        assert not co.penalties.output_change(model_output(model, moved), moved, v).requires_grad


def model_output(model, u):
    with torch.enable_grad():
        return model(u)


def test_images_and_chains_of_any_shape_have_the_loss():
    torch.manual_seed(0)
    chain = co.Chain.cnn((1, 8, 8), [2], 3, output="softmax", seed=0, dtype=F64)
    x = torch.randn(B, 1, 8, 8, dtype=F64)
    y = torch.tensor([0, 1, 2, 0])
    e = co.Penalised(co.penalties.tangent(co.penalties.shifts), 0.4)(
        chain, co.Batch(x, y, axis=0), "cross-entropy"
    )
    losses, terms = [], []
    for j in range(B):
        own = x[j : j + 1].clone().requires_grad_()
        y_hat = chain(own).y_hat
        J = jacobian(y_hat, own)
        losses.append(-torch.log(y_hat[0, y[j]]))
        each = [J @ s[j].flatten() for s in co.penalties.shifts(x)]
        terms.append(sum(d.square().sum() for d in each) / 4)
    expected = (torch.stack(losses) + 0.4 * torch.stack(terms)).mean()
    close(e.penalties, torch.stack(terms).detach(), 1e-12)
    close(e.gradient, oracles.gradient(expected, dict(chain.named_parameters())), 1e-12)


# the directions of images


def test_shifts_are_the_changes_of_images_that_are_moved():
    """Of a polynomial of second degree central differences are exact inside the image."""
    i, j = torch.meshgrid(torch.arange(6.0, dtype=F64), torch.arange(5.0, dtype=F64), indexing="ij")

    def image(di, dj):
        return (0.3 * (i - di) ** 2 - (i - di) * (j - dj) + 2 * (j - dj))[None, None]

    zero = torch.zeros((), dtype=F64)
    one = torch.ones((), dtype=F64)
    down = torch.func.jvp(lambda s: image(s, zero), (zero,), (one,))[1]
    right = torch.func.jvp(lambda s: image(zero, s), (zero,), (one,))[1]
    found = co.penalties.shifts(image(0.0, 0.0))
    assert found.shape == (2, 1, 1, 6, 5)
    assert torch.allclose(found[0][..., 1:-1, :], down[..., 1:-1, :], rtol=1e-12)
    assert torch.allclose(found[1][..., 1:-1], right[..., 1:-1], rtol=1e-12)


def test_flat_images_are_square_ones_and_even_ones_do_not_change():
    x = torch.randn(3, 2, 4, 4, dtype=F64)
    by_channel = co.penalties.shifts(x[:, :1].flatten(1))
    assert torch.equal(by_channel.view(2, 3, 1, 4, 4), co.penalties.shifts(x)[:, :, :1])
    assert not co.penalties.shifts(torch.full((2, 9), 3.0)).any()
    assert not co.penalties.shifts(torch.full((2, 1), 3.0)).any()
    with pytest.raises(co.InputError, match=r"needs square ones, \[B, n n\]; got \[2, 8\]"):
        co.penalties.shifts(torch.zeros(2, 8))
    with pytest.raises(co.InputError, match=r"takes images \[B, C, H, W\].*; got \[2, 3, 3\]"):
        co.penalties.shifts(torch.zeros(2, 3, 3))


# refusals


def test_what_cannot_be_a_direction_or_a_target_is_refused():
    net = build.network()
    u = torch.zeros(T, B, I, dtype=F64)
    lam = net(u).costates("squared", torch.zeros(B, O, dtype=F64))
    refused = [
        ({"v": torch.zeros(T, B, I + 1, dtype=F64)}, "expected the shape of u"),
        ({"v": lambda u: u[1:]}, "expected the shape of u"),
        ({"v": lambda u: 3}, "what the function v returned must be a tensor; got int"),
        ({"v": torch.zeros(0, T, B, I, dtype=F64)}, "v holds no direction"),
        ({"v": u, "beta": torch.zeros(7, dtype=F64)}, r"beta has shape \[7\]; expected that of y_"),
        ({"beta": torch.zeros(3, B, O, dtype=F64)}, "beta is given for 3 directions; v has 1"),
        ({"beta": torch.zeros(1, 1, 1, 1, dtype=F64), "K": 2}, "beta is given for 1 directions"),
    ]
    for options, message in refused:
        with pytest.raises(co.CoadjointError, match=message):
            co.penalties.tangent(**options)(lam)
    for options, message in (
        ({"v": u, "K": 2}, "K = 2 is the number of directions to draw, but v gives its own"),
        ({"v": 3}, "the direction v must be a tensor; got int"),
        ({"K": 0}, "K must be"),
        ({"beta": "x"}, "beta must be a number, a tensor or a function of the input; got 'x'"),
    ):
        with pytest.raises(co.CoadjointError, match=message):
            co.penalties.tangent(**options)


def test_an_encoder_decoder_is_refused_by_name():
    net = co.EncoderDecoder("elman", inputs=I, hidden=3, outputs=5)
    y = torch.tensor([[1, 2], [3, 4], [4, -1]])
    lam = net(torch.randn(T, 2, I)).costates("cross-entropy", y)
    with pytest.raises(co.Unsupported, match="which an EncoderDecoder does not compute"):
        co.penalties.tangent()(lam)


def test_changes_of_outputs_that_do_not_exist_are_refused():
    u = torch.ones(2, requires_grad=True)
    with pytest.raises(co.InputError, match=r"expected that of u, \[2\]"):
        co.penalties.output_change(2 * u, u, torch.ones(3))
    with pytest.raises(co.InputError, match=r"call u.requires_grad_\(\) before the model"):
        co.penalties.output_change(2 * u, u.detach(), torch.ones(2))
    with pytest.raises(co.InputError, match="y does not depend on u"):
        co.penalties.output_change(2 * torch.ones(2, requires_grad=True), u, torch.ones(2))
    with pytest.raises(co.InputError, match="the change is a scalar"):
        co.penalties.tangent_loss(torch.tensor(1.0))
    assert co.penalties.tangent_loss(torch.tensor([3.0, 4.0])).tolist() == [4.5, 8.0]
    assert co.penalties.output_change(u**3, u, torch.ones(2)).tolist() == [3.0, 3.0]

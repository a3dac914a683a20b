"""Maps: every product against torch's double backward, and what is refused.

The oracle does not use the package: each kind of map has a reference written with torch's
functions, differentiated twice.
"""

import copy
import math
import pickle
import random

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

import coadjoint as co
from compare import close, same_bits

DOUBLE = torch.float64
TOLERANCE = 1e-12
SEEDS = range(12)

ACTIVATIONS = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "identity": lambda z: z,
    "softplus": lambda z: torch.log1p(torch.exp(z)),
    "gelu": lambda z: 0.5 * z * (1 + torch.erf(z / math.sqrt(2))),
    "silu": lambda z: z / (1 + torch.exp(-z)),
    "elu": lambda z: torch.where(z > 0, z, torch.expm1(z.clamp(max=0))),
}


# --- kinds of maps: seed -> the map, its reference(x, parameters), and a shape of x


def any_activation(draw):
    return draw.choice(list(ACTIVATIONS))


def dense(draw):
    inputs, outputs = draw.randint(1, 7), draw.randint(1, 7)
    psi, bias = any_activation(draw), draw.random() < 0.7
    f = co.maps.Dense(inputs, outputs, psi, bias, dtype=DOUBLE)

    def reference(x, p):
        return ACTIVATIONS[psi](functional.linear(x, p["W"], p.get("b")))

    return f, reference, (draw.randint(1, 5), inputs)


def tied(draw):
    inputs, outputs = draw.randint(1, 7), draw.randint(1, 7)
    psi = any_activation(draw)
    f = co.maps.Tied(co.maps.Dense(outputs, inputs, psi, dtype=DOUBLE))

    def reference(x, p):
        return ACTIVATIONS[psi](x @ p["W"] + p["b"])

    return f, reference, (draw.randint(1, 5), inputs)


def tied_by_a_linear_function(draw):
    """tau(W) = 2 P W' Q - (the rows of W' from the last to the first) Q, with tau* by torch."""
    n, m, outputs, inputs = (draw.randint(1, 5) for _ in range(4))
    P = torch.randn(outputs, m, dtype=DOUBLE) / m
    Q = torch.randn(n, inputs, dtype=DOUBLE) / n
    given, psi = draw.random() < 0.5, any_activation(draw)

    def tau(W):
        return P @ (2 * W.T - W.T.flip(0)) @ Q

    def adjoint(G):
        middle = P.T @ G @ Q.T
        return (2 * middle - middle.flip(0)).T

    source = nn.Linear(m, n, dtype=DOUBLE)
    f = co.maps.Tied(source, tau, psi, tau_adjoint=adjoint if given else None)

    def reference(x, p):
        return ACTIVATIONS[psi](x @ tau(p["W"]).T + p["b"])

    return f, reference, (draw.randint(1, 5), inputs)


def image_shape(draw, channels, least=1):
    return draw.randint(1, 3), channels, draw.randint(least, 9), draw.randint(least, 9)


def conv(draw):
    channels, out = draw.randint(1, 3), draw.randint(1, 4)
    size = draw.randint(1, 4), draw.randint(1, 4)
    stride = draw.randint(1, 3), draw.randint(1, 3)
    padding = draw.randint(0, 2), draw.randint(0, 2)
    psi, bias = any_activation(draw), draw.random() < 0.7
    f = co.maps.Conv(channels, out, size, stride, padding, psi, bias, dtype=DOUBLE)

    def reference(x, p):
        z = functional.conv2d(x, p["W"], p.get("b"), stride=stride, padding=padding)
        return ACTIVATIONS[psi](z)

    return f, reference, image_shape(draw, channels, least=4)


def conv_of_summed_channels(draw):
    channels, out, size = draw.randint(1, 3), draw.randint(1, 4), draw.randint(1, 4)
    stride, psi = draw.randint(1, 3), any_activation(draw)
    f = co.maps.Conv(
        channels, out, size, stride, activation=psi, bias=False, summed=True, dtype=DOUBLE
    )

    def reference(x, p):
        W = p["W"][:, None].expand(-1, channels, -1, -1)
        return ACTIVATIONS[psi](functional.conv2d(x, W, stride=stride))

    return f, reference, image_shape(draw, channels, least=4)


def max_pool(draw):
    size = draw.randint(1, 3), draw.randint(1, 3)

    def reference(x, p):
        return functional.max_pool2d(x, size)

    return co.maps.MaxPool(size), reference, image_shape(draw, 2, least=3)


def max_pool_averaged(draw):
    size = draw.randint(1, 3)

    def reference(x, p):
        return x.unfold(2, size, size).unfold(3, size, size).amax((-1, -2))

    return co.maps.MaxPool(size, ties="average"), reference, image_shape(draw, 2, least=3)


def avg_pool(draw):
    size = draw.randint(1, 3), draw.randint(1, 3)

    def reference(x, p):
        return functional.avg_pool2d(x, size)

    return co.maps.AvgPool(size), reference, image_shape(draw, 2, least=3)


def flatten(draw):
    shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(2, 5)))
    return co.maps.Flatten(), lambda x, p: x.flatten(1), shape


def state_shape(draw):
    return tuple(draw.randint(1, 5) for _ in range(draw.randint(2, 4)))


def activation(draw):
    psi = any_activation(draw)
    return co.maps.Activation(psi), lambda x, p: ACTIVATIONS[psi](x), state_shape(draw)


def softmax(draw):
    def reference(x, p):
        return torch.exp(x) / torch.exp(x).sum(1, keepdim=True)

    return co.maps.Softmax(), reference, state_shape(draw)


def log_softmax(draw):
    def reference(x, p):
        return x - torch.logsumexp(x, 1, keepdim=True)

    return co.maps.LogSoftmax(), reference, state_shape(draw)


def residual(draw):
    n, middle = draw.randint(1, 5), draw.randint(1, 5)
    psi = any_activation(draw)
    body = co.maps.Dense(n, middle, psi, dtype=DOUBLE), nn.Linear(middle, n, dtype=DOUBLE)

    def reference(x, p):
        h = ACTIVATIONS[psi](functional.linear(x, p["f.0.W"], p["f.0.b"]))
        return x + functional.linear(h, p["f.1.weight"], p["f.1.bias"])

    return co.maps.Residual(*body), reference, (draw.randint(1, 5), n)


def projected_residual(draw):
    n, m = draw.randint(1, 5), draw.randint(1, 5)
    psi = any_activation(draw)
    body = co.maps.Dense(n, m, psi, dtype=DOUBLE)
    f = co.maps.Residual(body, projection="linear", inputs=n, outputs=m)

    def reference(x, p):
        own = ACTIVATIONS[psi](functional.linear(x, p["f.0.W"], p["f.0.b"]))
        return functional.linear(x, p["projection.W"]) + own

    return f, reference, (draw.randint(1, 5), n)


def residual_by_a_module(draw):
    n = draw.randint(2, 5)
    body = co.maps.Dense(n, n, "tanh", dtype=DOUBLE)
    projection = nn.Sequential(nn.Linear(n, n, dtype=DOUBLE), nn.GELU())

    def reference(x, p):
        own = torch.tanh(functional.linear(x, p["f.0.W"], p["f.0.b"]))
        around = functional.linear(x, p["projection.0.weight"], p["projection.0.bias"])
        return ACTIVATIONS["gelu"](around) + own

    return co.maps.Residual(body, projection=projection), reference, (draw.randint(1, 5), n)


def composed_with_a_shared_weight(draw):
    n, m = draw.randint(1, 5), draw.randint(1, 5)
    psi = any_activation(draw)
    encoder = co.maps.Dense(n, m, psi, dtype=DOUBLE)
    f = co.maps.Composed(encoder, co.maps.Tied(encoder, activation="sigmoid"))

    def reference(x, p):
        h = ACTIVATIONS[psi](functional.linear(x, p["0.W"], p["0.b"]))
        return torch.sigmoid(h @ p["0.W"] + p["1.b"])

    return f, reference, (draw.randint(1, 5), n)


def layer_of_the_thesis(draw):
    """(4.28): pooling of an elementwise function of a convolution."""
    psi, stride = any_activation(draw), draw.randint(1, 2)
    f = co.maps.Composed(
        co.maps.Conv(2, 3, 3, stride, activation=psi, bias=False, summed=True, dtype=DOUBLE),
        co.maps.MaxPool(2),
    )

    def reference(x, p):
        W = p["0.W"][:, None].expand(-1, 2, -1, -1)
        return functional.max_pool2d(ACTIVATIONS[psi](functional.conv2d(x, W, stride=stride)), 2)

    return f, reference, image_shape(draw, 2, least=7)


def module_of_torch(draw):
    """Any module, by torch: its second derivatives are neither zero nor symmetric in form."""
    n = draw.randint(2, 6)
    f = nn.Sequential(nn.Linear(n, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 3)).to(DOUBLE)

    def reference(x, p):
        h = functional.linear(x, p["0.weight"], p["0.bias"])
        h = h - h.mean(1, keepdim=True)
        h = h / torch.sqrt(h.square().mean(1, keepdim=True) + f[1].eps)
        h = ACTIVATIONS["gelu"](h * p["1.weight"] + p["1.bias"])
        return functional.linear(h, p["3.weight"], p["3.bias"])

    return f, reference, (draw.randint(1, 5), n)


KINDS = [
    dense,
    tied,
    tied_by_a_linear_function,
    conv,
    conv_of_summed_channels,
    max_pool,
    max_pool_averaged,
    avg_pool,
    flatten,
    activation,
    softmax,
    log_softmax,
    residual,
    projected_residual,
    residual_by_a_module,
    composed_with_a_shared_weight,
    layer_of_the_thesis,
    module_of_torch,
]


def case(kind, seed):
    """A random map of that kind with its reference, and x, v, w."""
    torch.manual_seed(seed)
    f, reference, shape = kind(random.Random(seed))
    for parameter in f.parameters():
        nn.init.normal_(parameter)  # far from the start, where psi'' matters
    x, v = torch.randn(shape, dtype=DOUBLE), torch.randn(shape, dtype=DOUBLE)
    w = torch.randn_like(f(x)).detach()
    return f, reference, x, v, w


def oracle(reference, parameters, x, v, w):
    """The five products by double backward through the reference."""
    x = x.clone().requires_grad_()
    theta = {name: value.detach().clone().requires_grad_() for name, value in parameters}
    value = reference(x, theta)
    any_w = torch.zeros_like(value, requires_grad=True)
    options = {"create_graph": True, "materialize_grads": True}
    [of_any_w] = torch.autograd.grad(value, x, any_w, **options)
    [push] = torch.autograd.grad(of_any_w, any_w, v, **options)
    [pull] = torch.autograd.grad(value, x, w, **options)
    second = (w * push).sum()
    found = {"value": value, "push": push, "pull": pull}
    bends = dict.fromkeys(["x", *theta], None)
    if second.requires_grad:
        gradients = torch.autograd.grad(second, [x, *theta.values()], **options)
        bends = dict(zip(bends, gradients, strict=True))
    found["bend"] = torch.zeros_like(x) if bends["x"] is None else bends["x"]
    found["bend_parameters"] = {name: bends[name] for name in theta}
    found["pull_parameters"] = {}
    if theta:
        pulled = torch.autograd.grad(value, list(theta.values()), w, materialize_grads=True)
        found["pull_parameters"] = dict(zip(theta, pulled, strict=True))
    return found


def all_products(module, f, x, v, w):
    """The value and the five products; module: co.maps, or the map itself with f = None."""
    first = () if f is None else (f,)
    return {
        "value": module(x) if f is None else f(x),
        "push": module.push(*first, x, v),
        "pull": module.pull(*first, x, w),
        "bend": module.bend(*first, x, v, w),
        "bend_parameters": module.bend_parameters(*first, x, v, w),
        "pull_parameters": module.pull_parameters(*first, x, w),
    }


def compare(found, expected, what):
    for name, value in expected.items():
        # a product that is zero but for rounding is judged at the scale of its parts
        close(found[name], value, TOLERANCE, f"{what}: {name}", least=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_product_equals_torchs_double_backward(kind, record_property):
    for seed in SEEDS:
        f, reference, x, v, w = case(kind, seed)
        expected = oracle(reference, f.named_parameters(), x, v, w)
        compare(all_products(co.maps, f, x, v, w), expected, f"{kind.__name__} {seed}")
        if isinstance(f, co.maps.Map):
            compare(all_products(f, None, x, v, w), expected, f"{kind.__name__} {seed}, methods")
    record_property("cases", len(SEEDS))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_is_exact_also_far_from_zero(name):
    x = torch.tensor([[-700.0, -30.0, -3.0, -0.1, 0.0, 0.1, 3.0, 30.0, 700.0]], dtype=DOUBLE)
    v, w = torch.randn_like(x), torch.randn_like(x)
    f = co.maps.Activation(name)
    torchs = {"softplus": lambda z: functional.softplus(z, 1.0, 40.0), "gelu": functional.gelu}
    torchs |= {"silu": functional.silu, "elu": functional.elu, "tanh": torch.tanh}
    reference = torchs.get(name, ACTIVATIONS[name])
    expected = oracle(lambda x, p: reference(x), [], x, v, w)
    for product, value in all_products(f, None, x, v, w).items():
        close(value, expected[product], TOLERANCE, f"{name}: {product}", least=1e-3)
        finite = not isinstance(value, dict) and value.isfinite().all()
        assert finite or value == {}


@pytest.mark.parametrize("kind", KINDS)
def test_pull_is_the_adjoint_of_push(kind):
    for seed in SEEDS:
        f, _, x, v, w = case(kind, seed + 100)
        pulled, pushed = co.maps.pull(f, x, w), co.maps.push(f, x, v)
        size = pulled.detach().norm() * v.norm()
        apart = (pulled * v).sum() - (w * pushed).sum()
        assert apart.detach().abs() <= TOLERANCE * max(size, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_bend_is_symmetric_in_two_directions(kind):
    """<bend(v, w), u> = <w, D^2 f.(v, u)> = <bend(u, w), v>."""
    for seed in SEEDS:
        f, _, x, v, w = case(kind, seed + 200)
        u = torch.randn_like(x)
        left = (co.maps.bend(f, x, v, w) * u).sum()
        right = (co.maps.bend(f, x, u, w) * v).sum()
        close(left, right, 1e-11, kind.__name__, least=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_a_batch_are_those_of_its_samples(kind):
    f, _, x, v, w = case(kind, 3)
    whole = all_products(co.maps, f, x, v, w)
    rows = [
        all_products(co.maps, f, x[i : i + 1], v[i : i + 1], w[i : i + 1]) for i in range(len(x))
    ]
    for name in ("value", "push", "pull", "bend"):
        close(whole[name], torch.cat([row[name] for row in rows]), TOLERANCE, name, least=1e-3)
    for name in ("pull_parameters", "bend_parameters"):
        for parameter, total in whole[name].items():
            summed = sum(row[name][parameter] for row in rows)
            close(total, summed, TOLERANCE, f"{name} {parameter}", least=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_products_can_be_differentiated_again(kind):
    """The derivatives of <pull, v> by x and by w are bend and push."""
    f, _, x, v, w = case(kind, 4)
    x.requires_grad_()
    w.requires_grad_()
    pulled = co.maps.pull(f, x, w)
    [by_x, by_w] = torch.autograd.grad(pulled, [x, w], v, materialize_grads=True)
    close(by_x, co.maps.bend(f, x, v, w), TOLERANCE, "by x", least=1e-3)
    close(by_w, co.maps.push(f, x, v), TOLERANCE, "by w", least=1e-3)
    with torch.no_grad():
        assert co.maps.pull(f, x, w).grad_fn is None
        assert co.maps.bend(f, x, v, w).grad_fn is None


@pytest.mark.parametrize("kind", [dense, conv, module_of_torch, composed_with_a_shared_weight])
def test_v_and_w_are_constants_even_if_computed_from_x_and_the_parameters(kind):
    f, _, x, v, w = case(kind, 5)
    expected = all_products(co.maps, f, x, v, w)
    x.requires_grad_()
    scale = x.sum() + sum(value.sum() for value in f.parameters())
    one = scale / scale.detach()  # 1, but not for derivatives
    for name, value in all_products(co.maps, f, x, v * one, w * one).items():
        close(value, expected[name], TOLERANCE, name, least=1e-3)


# --- ties


def test_the_first_maximum_counts_or_all_in_equal_parts():
    x = torch.tensor([[0.0, 7, 7, 1], [7, 7, 1, 1], [3, 3, 2, 2], [3, 2, 2, 2]], dtype=DOUBLE)
    x = x[None, None]
    w = torch.arange(1.0, 5, dtype=DOUBLE).view(1, 1, 2, 2)
    first = [[0.0, 1, 2, 0], [0, 0, 0, 0], [3, 0, 4, 0], [0, 0, 0, 0]]
    third, quarter = 1 / 3, 1.0
    average = [
        [0, third, 2, 0],
        [third, third, 0, 0],
        [1, 1, quarter, quarter],
        [1, 0, quarter, quarter],
    ]
    assert co.maps.MaxPool(2).pull(x, w)[0, 0].tolist() == first
    close(
        co.maps.MaxPool(2, "average").pull(x, w)[0, 0], torch.tensor(average, dtype=DOUBLE), 1e-15
    )


@pytest.mark.parametrize("ties", ["first", "average"])
def test_ties_are_resolved_as_torch_does_it(ties):
    torch.manual_seed(0)
    f = co.maps.MaxPool((2, 3), ties)
    for _ in range(20):
        x = torch.randint(0, 3, (2, 3, 7, 8)).to(DOUBLE)  # many ties
        v = torch.randn_like(x)
        w = torch.randn_like(f(x))

        def reference(x, p):
            if ties == "first":
                return functional.max_pool2d(x, (2, 3))
            return x.unfold(2, 2, 2).unfold(3, 3, 3).amax((-1, -2))

        compare(all_products(f, None, x, v, w), oracle(reference, [], x, v, w), ties)
        compare(all_products(co.maps.by_torch, f, x, v, w), oracle(reference, [], x, v, w), ties)


def test_rows_and_columns_left_over_are_not_read():
    x = torch.randn(1, 1, 5, 7, dtype=DOUBLE)
    for f in (co.maps.MaxPool(2), co.maps.MaxPool(2, "average"), co.maps.AvgPool(2)):
        pulled = f.pull(x, torch.ones(1, 1, 2, 3, dtype=DOUBLE))
        assert pulled.shape == x.shape
        assert not pulled[..., 4, :].any()
        assert not pulled[..., 6].any()


# --- parameters


def test_parameters_start_as_those_of_torch():
    for ours, torchs in (
        (lambda: co.maps.Dense(5, 3), lambda: nn.Linear(5, 3)),
        (lambda: co.maps.Conv(2, 4, (3, 2)), lambda: nn.Conv2d(2, 4, (3, 2))),
    ):
        torch.manual_seed(0)
        found = ours()
        torch.manual_seed(0)
        expected = torchs()
        same_bits([found.W, found.b], [expected.weight, expected.bias])


def test_the_thesiss_filters_have_one_matrix_for_each_output():
    f = co.maps.Conv(3, 4, (2, 5), summed=True)
    assert f.W.shape == (4, 2, 5)
    x = torch.randn(2, 3, 6, 6)
    in_one_channel = torch.cat([x.sum(1, keepdim=True), torch.zeros(2, 2, 6, 6)], 1)
    close(f(in_one_channel), f(x), 1e-5)  # it sees the sum of the channels alone


def test_a_tied_map_shares_the_parameter_and_its_gradient():
    encoder = co.maps.Dense(5, 3, "sigmoid", dtype=DOUBLE)
    decoder = co.maps.Tied(encoder)
    chain = nn.Sequential(encoder, decoder)
    assert decoder.W is encoder.W
    assert [name for name, _ in chain.named_parameters()] == ["0.W", "0.b", "1.b"]
    assert decoder.activation == "sigmoid"
    W, b, name = decoder.effective()
    same_bits([W, b], [encoder.W.T, decoder.b])
    assert (name, W.shape) == ("sigmoid", (5, 3))
    twin = copy.deepcopy(chain)
    assert twin[1].W is twin[0].W
    assert pickle.loads(pickle.dumps(chain))[1].W.shape == (3, 5)


def test_effective_weights_give_the_map():
    f = co.maps.Dense(3, 4, "elu", bias=False)
    W, b, name = f.effective()
    assert W is f.W
    assert b is None
    x = torch.randn(2, 3)
    same_bits(f(x), functional.elu(functional.linear(x, W)))
    assert name == "elu"


def test_frozen_parameters_have_no_gradients():
    x, v, w = (torch.randn(2, n, dtype=DOUBLE) for n in (3, 3, 4))
    for f in (co.maps.Dense(3, 4, dtype=DOUBLE), nn.Linear(3, 4, dtype=DOUBLE)):
        name = "W" if isinstance(f, co.maps.Dense) else "weight"
        getattr(f, name).requires_grad_(False)
        assert name not in co.maps.pull_parameters(f, x, w)
        assert len(co.maps.bend_parameters(f, x, v, w)) == 1


class Twice(nn.Module):
    def forward(self, W):
        return 2 * W


def test_a_parametrised_weight_has_the_gradients_of_what_is_behind_it():
    f = co.maps.Dense(3, 4, dtype=DOUBLE)
    parametrize.register_parametrization(f, "W", Twice())
    x, v, w = (torch.randn(2, n, dtype=DOUBLE) for n in (3, 3, 4))
    found = co.maps.pull_parameters(f, x, w)
    assert set(found) == {"b", "parametrizations.W.original"}
    compare(all_products(co.maps, f, x, v, w), all_products(co.maps.by_torch, f, x, v, w), "twice")


def test_hooks_and_a_new_forward_are_differentiated_too():
    class Doubled(co.maps.Dense):
        def forward(self, x):
            return 2 * super().forward(x)

    plain = co.maps.Dense(3, 4, dtype=DOUBLE)
    doubled, hooked = Doubled(3, 4, dtype=DOUBLE), co.maps.Dense(3, 4, dtype=DOUBLE)
    hooked.register_forward_hook(lambda module, args, value: 2 * value)
    x, v, w = (torch.randn(2, n, dtype=DOUBLE) for n in (3, 3, 4))
    for f in (doubled, hooked):
        f.load_state_dict(plain.state_dict())
        close(co.maps.push(f, x, v), 2 * plain.push(x, v), TOLERANCE)
        close(co.maps.pull_parameters(f, x, w), plain.pull_parameters(x, 2 * w), TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_maps_work_in_single_precision_and_say_what_they_are(kind):
    f, _, x, v, w = case(kind, 1)
    exact = all_products(co.maps, f, x, v, w)
    if kind is tied_by_a_linear_function:
        return  # its tau holds matrices in double precision
    found = all_products(co.maps, f.float(), x.float(), v.float(), w.float())
    for name, value in found.items():
        close(value, exact[name], 1e-4, name, least=1e-1)
    assert type(f).__name__ in repr(f)


def test_an_empty_batch_passes_through():
    f = co.maps.Composed(
        co.maps.Conv(1, 2, 3), co.maps.MaxPool(2), co.maps.Flatten(), co.maps.Dense(8, 3)
    )
    x = torch.zeros(0, 1, 6, 6)
    found = all_products(f, None, x, x, torch.zeros(0, 3))
    assert found["pull"].shape == x.shape
    assert all(not gradient.any() for gradient in found["bend_parameters"].values())


# --- refusals: one line each


x3 = torch.zeros(2, 3)
image = torch.zeros(2, 1, 6, 6)


def not_linear(W):
    return torch.tanh(W.T)


def not_the_adjoint(G):
    return 2 * G.T


def through_numpy(W):
    return torch.from_numpy(W.detach().numpy()).T


class Pair(nn.Module):
    def forward(self, x):
        return x, x


REFUSALS = {
    "x of Dense": (
        lambda: co.maps.Dense(3, 4)(torch.zeros(2, 5)),
        r"reads x \[B, 3\]; got \[2, 5\]",
    ),
    "x of another type": (
        lambda: co.maps.Dense(3, 4)(x3.double()),
        r"x is torch.float64, W torch.float32",
    ),
    "x of Conv": (lambda: co.maps.Conv(2, 4, 3)(image), r"reads x \[B, 2, rows, columns\]; got"),
    "a small image": (lambda: co.maps.Conv(1, 4, 7)(image), "larger than the image"),
    "a narrow image": (lambda: co.maps.Conv(1, 4, (3, 7))(image), "larger than the image"),
    "a small region": (lambda: co.maps.MaxPool(7)(image), "at least 7 x 7 places; got"),
    "x of AvgPool": (lambda: co.maps.AvgPool(2)(x3), r"got \[2, 3\]"),
    "x of Flatten": (lambda: co.maps.Flatten()(torch.zeros(3)), r"got \[3\]"),
    "x of Softmax": (lambda: co.maps.Softmax()(torch.zeros(3)), "axis 1"),
    "v": (lambda: co.maps.Dense(3, 4).push(x3, torch.zeros(2, 4)), "v must have the shape of x"),
    "w": (lambda: co.maps.Dense(3, 4).pull(x3, x3), r"w must have the shape of f\(x\), \[2, 4\]"),
    "w by torch": (lambda: co.maps.pull(nn.Tanh(), x3, x3[:1]), "w must have the shape"),
    "v by torch": (lambda: co.maps.bend(nn.Tanh(), x3, x3[:1], x3), "v must have the shape"),
    "v of Composed": (
        lambda: co.maps.Composed(nn.Tanh()).push(x3, x3[:1]),
        "v must have the shape of x",
    ),
    "whole numbers": (
        lambda: co.maps.pull(nn.Tanh(), torch.ones(2, dtype=torch.int64), x3),
        "floating-point numbers",
    ),
    "a list": (lambda: co.maps.Activation("tanh")([1.0]), "must be a tensor; got list"),
    "activation": (lambda: co.maps.Dense(3, 4, "tahn"), "did you mean 'tanh'"),
    "activation of Conv": (lambda: co.maps.Conv(1, 1, 3, activation="x"), "unknown activation"),
    "activation by name": (lambda: co.maps.Activation("swish"), "unknown activation 'swish'"),
    "ties": (lambda: co.maps.MaxPool(2, "last"), "unknown rule for ties 'last'"),
    "size": (lambda: co.maps.MaxPool((2, 2, 2)), "one whole number or two"),
    "stride": (lambda: co.maps.Conv(1, 1, 3, stride=0), "stride must be a whole number"),
    "inputs": (lambda: co.maps.Dense(0, 4), "inputs must be a whole number, at least 1; got 0"),
    "tau": (lambda: co.maps.Tied(co.maps.Dense(3, 4), not_linear), "tau is not linear"),
    "tau plus a constant": (
        lambda: co.maps.Tied(co.maps.Dense(3, 4), lambda W: W.T + 1),
        "tau is not linear",
    ),
    "tau by name": (lambda: co.maps.Tied(co.maps.Dense(3, 4), "flip"), "'transpose' or a linear"),
    "tau of no matrix": (
        lambda: co.maps.Tied(co.maps.Dense(3, 4), lambda W: W[0]),
        r"tau must return a matrix \[outputs, inputs\]; got shape \[3\]",
    ),
    "tau without torch": (
        lambda: co.maps.Tied(co.maps.Dense(3, 4), through_numpy),
        "torch cannot differentiate tau",
    ),
    "tau that is detached": (
        lambda: co.maps.Tied(co.maps.Dense(3, 4), lambda W: W.detach().T),
        "torch cannot differentiate tau",
    ),
    "tau_adjoint": (
        lambda: co.maps.Tied(co.maps.Dense(3, 4), tau_adjoint=not_the_adjoint),
        "not the adjoint of tau",
    ),
    "tau_adjoint of another shape": (
        lambda: co.maps.Tied(co.maps.Dense(3, 4), tau_adjoint=lambda G: G),
        "not the adjoint of tau",
    ),
    "tau_adjoint of no matrix": (
        lambda: co.maps.Tied(co.maps.Dense(3, 4), tau_adjoint=lambda G: 3),
        "not the adjoint of tau",
    ),
    "tau_adjoint's kind": (
        lambda: co.maps.Tied(co.maps.Dense(3, 4), tau_adjoint=3),
        "tau_adjoint must be a function",
    ),
    "a map to tie": (lambda: co.maps.Tied(nn.Tanh()), "a co.maps.Dense or an nn.Linear; got Tanh"),
    "shapes of Residual": (
        lambda: co.maps.Residual(co.maps.Dense(3, 1))(x3),
        r"f\(x\), \[2, 1\], to x, \[2, 3\]",
    ),
    "projection": (
        lambda: co.maps.Residual(nn.Tanh(), projection="conv"),
        "unknown projection 'conv'",
    ),
    "widths of a projection": (
        lambda: co.maps.Residual(nn.Tanh(), projection="linear"),
        "needs inputs= and outputs=",
    ),
    "widths of none": (lambda: co.maps.Residual(nn.Tanh(), inputs=3), "projection='linear'"),
    "kind of projection": (lambda: co.maps.Residual(nn.Tanh(), projection=3), "got 3"),
    "no map": (lambda: co.maps.Composed(), "at least one map"),
    "not a map": (lambda: co.maps.Composed(torch.tanh), "a map is a module"),
    "two outputs": (lambda: co.maps.pull(Pair(), x3, x3), "returned tuple"),
    "a transform": (
        lambda: torch.func.vmap(lambda w: co.maps.pull(nn.Tanh(), x3[:1], w[None]))(x3),
        "torch.func's transforms",
    ),
    "in place": (lambda: co.maps.pull(nn.ReLU(inplace=True), x3, x3), "inplace=False"),
    "dtype": (lambda: co.maps.Dense(3, 4, dtype=torch.float16), "float32 or float64"),
    "no forward": (lambda: co.maps.Map()(x3), "Map has no forward"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_was_expected(name):
    attempt, words = REFUSALS[name]
    kinds = (co.CoadjointError, NotImplementedError)
    with pytest.raises(kinds, match=words) as refusal:
        attempt()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_product_refuses_what_does_not_fit(kind):
    f, _, x, v, w = case(kind, 2)
    calls = {
        "v": [
            lambda v: co.maps.push(f, x, v),
            lambda v: co.maps.bend(f, x, v, w),
            lambda v: co.maps.bend_parameters(f, x, v, w),
        ],
        "w": [
            lambda w: co.maps.pull(f, x, w),
            lambda w: co.maps.pull_parameters(f, x, w),
            lambda w: co.maps.bend(f, x, v, w),
            lambda w: co.maps.bend_parameters(f, x, v, w),
        ],
        "x": [
            lambda x: co.maps.push(f, x, v),
            lambda x: co.maps.pull(f, x, w),
            lambda x: co.maps.pull_parameters(f, x, w),
            lambda x: co.maps.bend(f, x, v, w),
            lambda x: co.maps.bend_parameters(f, x, v, w),
        ],
    }
    good = {"v": v, "w": w, "x": x}
    for name in ("v", "w"):
        for call in calls[name]:
            with pytest.raises(co.InputError, match=f"{name} must have the shape of"):
                call(good[name][None])
            with pytest.raises(co.KindError, match=f"{name} is torch.float32"):
                call(good[name].float())
    for call in calls["x"]:
        with pytest.raises(co.CoadjointError):
            call(x.long())
        with pytest.raises(co.KindError, match="must be a tensor; got ndarray"):
            call(x.numpy())


def test_every_product_of_a_residual_refuses_another_shape():
    f = co.maps.Residual(co.maps.Dense(3, 1))
    w = torch.zeros(2, 1)
    for call in (
        lambda: f.push(x3, x3),
        lambda: f.pull(x3, w),
        lambda: f.pull_parameters(x3, w),
        lambda: f.bend(x3, x3, w),
        lambda: f.bend_parameters(x3, x3, w),
    ):
        with pytest.raises(co.InputError, match="the shapes must be the same"):
            call()


CURVED = [name for name in ACTIVATIONS if name not in ("relu", "identity")]


@pytest.mark.parametrize("name", CURVED)
def test_second_derivatives_can_be_differentiated_far_from_zero(name):
    x = torch.tensor([[-800.0, -40.0, 40.0, 800.0]], dtype=DOUBLE, requires_grad=True)
    one = torch.ones_like(x)
    bent = co.maps.Activation(name).bend(x, one, one)
    [third] = torch.autograd.grad(bent, x, one)
    assert third.isfinite().all()


def test_a_map_that_works_in_place_leaves_x_as_it_was():
    x = torch.full((2, 3), -1.0)
    with pytest.raises(co.Unsupported):
        co.maps.pull(nn.ReLU(inplace=True), x, x)
    assert (x == -1).all()


def test_formulas_work_inside_torchs_transforms():
    torch.manual_seed(0)
    source = co.maps.Dense(3, 8, dtype=DOUBLE)
    f = co.maps.Composed(
        co.maps.Conv(1, 2, 3, activation="tanh", dtype=DOUBLE),
        co.maps.MaxPool(2),
        co.maps.Flatten(),
        co.maps.Residual(co.maps.Dense(8, 8, dtype=DOUBLE)),
        co.maps.Tied(source, lambda W: 2 * W.T),
        co.maps.LogSoftmax(),
    )
    x = torch.randn(4, 1, 6, 6, dtype=DOUBLE)
    J = torch.func.vmap(lambda w: f.pull(x, w.expand(4, 3)))(torch.eye(3, dtype=DOUBLE))
    expected = torch.func.vmap(torch.func.jacrev(lambda x_j: f(x_j[None])[0]))(x)
    close(J.transpose(0, 1), expected, TOLERANCE)
    w = torch.randn(4, 3, dtype=DOUBLE)
    v = torch.randn_like(x)
    whole = all_products(co.maps, f, x, v, w)

    def of_one_sample(x_j, v_j, w_j):
        return all_products(co.maps, f, x_j[None], v_j[None], w_j[None])

    rows = torch.func.vmap(of_one_sample)(x, v, w)
    for name in ("pull_parameters", "bend_parameters"):
        summed = {parameter: gradient.sum(0) for parameter, gradient in rows[name].items()}
        close(summed, whole[name], TOLERANCE, name)
    for name in ("push", "pull", "bend"):
        close(rows[name].squeeze(1), whole[name], TOLERANCE, name)


def test_padding_makes_room_for_a_filter():
    assert co.maps.Conv(1, 2, 7, padding=1)(image).shape == (2, 2, 2, 2)
    assert co.maps.Conv(1, 2, (8, 6), padding=(1, 0))(image).shape == (2, 2, 1, 1)


def test_a_given_adjoint_of_tau_is_used():
    calls = []

    def adjoint(G):
        calls.append(G)
        return G.T

    f = co.maps.Tied(co.maps.Dense(3, 4), lambda W: W.T, tau_adjoint=adjoint)
    calls.clear()
    f.pull_parameters(torch.zeros(2, 4), torch.zeros(2, 3))
    assert len(calls) == 1


def test_checking_tau_draws_no_random_numbers():
    f = co.maps.Dense(3, 4)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    co.maps.Tied(f, bias=False)
    same_bits(torch.rand(3), expected)

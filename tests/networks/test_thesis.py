"""The thesis's algorithms, as transcribed in tests/support/thesis.py, against autograd and ours.

Algorithms 3.2.1, 3.3.1, 4.1.1, 4.2.1 and 4.3.1 of A. Caterini (2017) on random networks of every
kind of layer. Each network exists three times: with numpy for the transcription, as a function of
torch for autograd in double precision, and as maps of the package, whose products are compared, and
which make a co.Chain whose gradients by co.BP and co.Penalised are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import coadjoint as co
import thesis
from compare import close

TOLERANCE = 1e-12
SEEDS = range(12)
SAMPLES = 3
ETA = 0.3
PSI = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "relu": torch.relu, "identity": lambda z: z}
NAMES = sorted(PSI)


@dataclass
class Layer:
    """One layer three times.

    numpy      that of the transcription
    theta      its parameters by name, arrays
    reference  a function of torch: x [B, ...], the parameters by name -> f(x)
    map        that of the package
    names      the map's names of the parameters, by the names in theta
    """

    numpy: object
    theta: dict[str, np.ndarray]
    reference: Callable
    map: nn.Module
    names: dict[str, str]

    def __post_init__(self):
        own = dict(self.map.named_parameters())
        for name, value in self.theta.items():
            own[self.names[name]].data.copy_(torch.from_numpy(value))


def mlp_layer(rng, n, outputs=None, psi=None):
    """Psi(W x + b), (4.1)"""
    m, psi = outputs or int(rng.integers(1, 7)), psi or str(rng.choice(NAMES))
    theta = {"W": rng.normal(size=(m, n)) / np.sqrt(n), "b": rng.normal(size=m)}
    f = co.maps.Dense(n, m, psi, dtype=torch.float64)

    def reference(x, p):
        return PSI[psi](functional.linear(x, p["W"], p["b"]))

    return Layer(thesis.MLPLayer(psi), theta, reference, f, {"W": "W", "b": "b"})


def cnn_layer(rng, shape, size=None, outputs=None, summed=None):
    """Phi(Psi(C(W, x))), (4.28); size: that of the filters, without pooling"""
    channels, rows, columns = shape
    out, psi = outputs or int(rng.integers(1, 4)), str(rng.choice(NAMES))
    summed = bool(rng.integers(2)) if summed is None else summed
    stride, r = 1, 1
    if size is None:
        size = int(rng.integers(1, min(rows, 3) + 1)), int(rng.integers(1, min(columns, 3) + 1))
        stride = int(rng.integers(1, 3))
        smallest = min((rows - size[0]) // stride + 1, (columns - size[1]) // stride + 1)
        r = int(rng.integers(1, min(smallest, 2) + 1))
    filters = (out, *size) if summed else (out, channels, *size)
    theta = {"W": rng.normal(size=filters) / np.sqrt(size[0] * size[1])}
    conv = co.maps.Conv(
        channels, out, size, stride, 0, psi, bias=False, summed=summed, dtype=torch.float64
    )
    f = co.maps.Composed(conv, co.maps.MaxPool(r))

    def reference(x, p):
        W = p["W"][:, None].expand(-1, channels, -1, -1) if summed else p["W"]
        return functional.max_pool2d(PSI[psi](functional.conv2d(x, W, stride=stride)), r)

    return Layer(thesis.CNNLayer(psi, stride, r, summed), theta, reference, f, {"W": "0.W"})


def residual_layer(rng, n):
    """x + Psi(W x + b)"""
    inner = mlp_layer(rng, n, n)

    def reference(x, p):
        return x + inner.reference(x, p)

    f = co.maps.Residual(inner.map)
    return Layer(
        thesis.ResidualLayer(inner.numpy), inner.theta, reference, f, {"W": "f.0.W", "b": "f.0.b"}
    )


def softmax_layer():
    return Layer(thesis.SoftmaxLayer(), {}, lambda x, p: torch.softmax(x, 1), co.maps.Softmax(), {})


def log_softmax_layer():
    f = co.maps.LogSoftmax()
    return Layer(thesis.LogSoftmaxLayer(), {}, lambda x, p: torch.log_softmax(x, 1), f, {})


def flatten_layer():
    return Layer(thesis.FlattenLayer(), {}, lambda x, p: x.flatten(1), co.maps.Flatten(), {})


def mlp(rng):
    """Dense layers alone, and the shape of their input."""
    n = int(rng.integers(1, 7))
    layers, width = [], n
    for _ in range(int(rng.integers(1, 6))):
        layers.append(mlp_layer(rng, width))
        width = len(layers[-1].theta["b"])
    return layers, (n,)


def deep(rng):
    """Many dense layers of one width and activation, which a chain runs by one sweep."""
    n, psi = int(rng.integers(1, 7)), str(rng.choice(NAMES))
    layers = [mlp_layer(rng, n, n, psi) for _ in range(int(rng.integers(3, 9)))]
    return [*layers, mlp_layer(rng, n)], (n,)


def cnn(rng):
    """Layers of convolution and pooling, filters on sums of channels; the last one is dense.

    4.2.2 corrected: its filters are as large as the image, one for each output.
    """
    shape = int(rng.integers(1, 4)), int(rng.integers(6, 10)), int(rng.integers(6, 10))
    layers = []
    x = np.zeros(shape)
    for _ in range(int(rng.integers(1, 4))):
        layers.append(cnn_layer(rng, x.shape, summed=True))
        x = layers[-1].numpy.f(x, layers[-1].theta)
    outputs = int(rng.integers(1, 5))
    layers.append(cnn_layer(rng, x.shape, size=x.shape[1:], outputs=outputs, summed=True))
    return layers, shape


def mixed(rng):
    """Layers of every kind: images first, then rows of numbers."""
    shape = int(rng.integers(1, 4)), int(rng.integers(5, 9)), int(rng.integers(5, 9))
    layers = []
    x = np.zeros(shape)
    for _ in range(int(rng.integers(1, 3))):
        layers.append(cnn_layer(rng, x.shape))
        x = layers[-1].numpy.f(x, layers[-1].theta)
    layers.append(flatten_layer())
    n = x.size
    for _ in range(int(rng.integers(1, 5))):
        layers.append(
            [
                lambda n: mlp_layer(rng, n),
                lambda n: residual_layer(rng, n),
                lambda n: softmax_layer(),
                lambda n: log_softmax_layer(),
            ][int(rng.integers(4))](n)
        )
        n = len(layers[-1].numpy.f(np.zeros(n), layers[-1].theta))
    layers.append(mlp_layer(rng, n))
    return layers, shape


# --- the network in torch, and the gradients by name


def numbered(layers):
    """Layers and parameters by number, from 1."""
    f = {i: layer.numpy for i, layer in enumerate(layers, 1)}
    return f, {i: layer.theta for i, layer in enumerate(layers, 1)}


def tensors(layers):
    """The parameters by layer as tensors to differentiate by."""
    every = []
    for layer in layers:
        every.append({k: torch.from_numpy(v).requires_grad_() for k, v in layer.theta.items()})
    return every


def run(layers, theta, x):
    """F(x; theta) by torch."""
    for layer, p in zip(layers, theta, strict=True):
        x = layer.reference(x, p)
    return x


def flat(gradients, layers):
    """{"1.W": gradient, ...} of dicts by number."""
    named = {}
    for i, layer in enumerate(layers, 1):
        for name in layer.theta:
            named[f"{i}.{name}"] = torch.as_tensor(gradients[i][name])
    return named


def by_autograd(value, theta):
    """The gradients of a number by torch."""
    places = [(i, name) for i, p in enumerate(theta, 1) for name in p]
    values = [theta[i - 1][name] for i, name in places]
    found = torch.autograd.grad(value, values, materialize_grads=True)
    return {f"{i}.{name}": g for (i, name), g in zip(places, found, strict=True)}


def of_maps(gradients, layers):
    """The gradients of a Composed by the names of `flat`."""
    named = {}
    for i, layer in enumerate(layers, 1):
        for name in layer.theta:
            named[f"{i}.{name}"] = gradients[f"{i - 1}.{layer.names[name]}"]
    return named


def summed(every):
    """The sums over samples of dicts of gradients."""
    return {name: sum(one[name] for one in every) for name in every[0]}


def check_step(after, theta, gradients, layers):
    """theta after the step is theta - eta gradient."""
    moved = {i: thesis.step(theta[i], ETA, gradients[i]) for i in theta}
    close(flat(after, layers), flat(moved, layers), TOLERANCE, "the step", least=1e-3)


def squared(out, y):
    """J_R, (3.6), summed over samples"""
    return 0.5 * (out - y).square().sum()


def cross_entropy(out, y):
    """J_C, (3.9), summed over samples"""
    return -(y.flatten(1) * torch.log_softmax(out.flatten(1), 1)).sum()


def targets(rng, out, kind):
    """Any numbers, or one-hot vectors."""
    if kind == "regression":
        return rng.normal(size=out.shape)
    classes = out[0].size
    return np.eye(classes)[rng.integers(classes, size=len(out))].reshape(out.shape)


def draw(network, seed, kind):
    """A network with samples x and targets y, as arrays."""
    rng = np.random.default_rng(seed)
    layers, shape = network(rng)
    x = rng.normal(size=(SAMPLES, *shape))
    with torch.no_grad():
        out = run(layers, tensors(layers), torch.from_numpy(x)).numpy()
    return rng, layers, x, targets(rng, out, kind)


def first_order(layers, x, y, kind):
    """The gradient of J by autograd and by the maps' products."""
    theta = tensors(layers)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    loss = squared if kind == "regression" else cross_entropy
    expected = by_autograd(loss(run(layers, theta, x), y), theta)
    F = co.maps.Composed(*(layer.map for layer in layers))
    out = F(x).detach()
    if kind == "classification":
        out = torch.softmax(out.flatten(1), 1).view_as(out)
    return expected, of_maps(F.pull_parameters(x, out - y), layers)


KINDS = ["regression", "classification"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", [mlp, cnn, mixed])
def test_algorithm_3_2_1_generic_network(network, kind, record_property):
    for seed in SEEDS:
        _, layers, x, y = draw(network, seed, kind)
        f, theta = numbered(layers)
        found = []
        for x_j, y_j in zip(x, y, strict=True):
            after, nabla = thesis.grad_step_nn(f, x_j, y_j, theta, ETA, kind)
            check_step(after, theta, nabla, layers)
            found.append(flat(nabla, layers))
        expected, ours = first_order(layers, x, y, kind)
        close(summed(found), expected, TOLERANCE, f"{network.__name__} {seed}", least=1e-3)
        close(ours, summed(found), TOLERANCE, f"{network.__name__} {seed}, maps", least=1e-3)
    record_property("cases", len(SEEDS))


@pytest.mark.parametrize("network", [mlp, cnn, mixed])
def test_algorithm_3_3_1_higher_order_loss(network, record_property):
    mu = 0.7
    for seed in SEEDS:
        rng, layers, x, y = draw(network, seed + 50, "regression")
        v, beta = rng.normal(size=x.shape), rng.normal(size=y.shape)
        f, theta = numbered(layers)
        of_J, of_R = [], []
        for point in zip(x, y, v, beta, strict=True):
            after, (J, R) = thesis.grad_desc_high_order_nn(f, *point, theta, ETA, mu)
            total = {i: {k: J[i][k] + mu * R[i][k] for k in J[i]} for i in J}
            check_step(after, theta, total, layers)
            of_J.append(flat(J, layers))
            of_R.append(flat(R, layers))
        expected_J, ours_J = first_order(layers, x, y, "regression")
        expected_R, ours_R = tangent(layers, x, v, beta)
        what = f"{network.__name__} {seed}"
        close(summed(of_J), expected_J, TOLERANCE, f"{what}, J", least=1e-3)
        close(summed(of_R), expected_R, TOLERANCE, f"{what}, R", least=1e-3)
        close(ours_J, summed(of_J), TOLERANCE, f"{what}, J by maps", least=1e-3)
        close(ours_R, summed(of_R), TOLERANCE, f"{what}, R by maps", least=1e-3)
    record_property("cases", len(SEEDS))


def tangent(layers, x, v, beta):
    """The gradient of R, (3.12), by autograd twice and by the maps' products."""
    theta = tensors(layers)
    x, v, beta = (torch.from_numpy(value) for value in (x, v, beta))
    moved = x.clone().requires_grad_()
    out = run(layers, theta, moved)
    any_w = torch.zeros_like(out, requires_grad=True)
    [pulled] = torch.autograd.grad(out, moved, any_w, create_graph=True)
    [pushed] = torch.autograd.grad(pulled, any_w, v, create_graph=True)
    expected = by_autograd(squared(pushed, beta), theta)
    F = co.maps.Composed(*(layer.map for layer in layers))
    ours = F.bend_parameters(x, v, F.push(x, v).detach() - beta)
    return expected, of_maps(ours, layers)


@pytest.mark.parametrize("kind", KINDS)
def test_algorithm_4_1_1_mlp(kind, record_property):
    for seed in SEEDS:
        _, layers, x, y = draw(mlp, seed + 100, kind)
        psi = {i: layer.map.activation for i, layer in enumerate(layers, 1)}
        theta = {k: {i: layer.theta[k] for i, layer in enumerate(layers, 1)} for k in "Wb"}
        found = []
        for x_j, y_j in zip(x, y, strict=True):
            after, nabla = thesis.grad_desc_mlp(x_j, y_j, theta, kind, ETA, psi)
            for k in "Wb":
                for i in psi:
                    moved = torch.as_tensor(theta[k][i] - ETA * nabla[k][i])
                    close(torch.as_tensor(after[k][i]), moved, TOLERANCE, "the step", least=1e-3)
            found.append(flat({i: {"W": nabla["W"][i], "b": nabla["b"][i]} for i in psi}, layers))
        expected, ours = first_order(layers, x, y, kind)
        close(summed(found), expected, TOLERANCE, f"{seed}", least=1e-3)
        close(ours, summed(found), TOLERANCE, f"{seed}, maps", least=1e-3)
    record_property("cases", len(SEEDS))


@pytest.mark.parametrize("kind", KINDS)
def test_algorithm_4_2_1_cnn(kind, record_property):
    for seed in SEEDS:
        _, layers, x, y = draw(cnn, seed + 150, kind)
        f, theta = numbered(layers)
        psi = {i: layer.map.maps[0].activation for i, layer in enumerate(layers, 1)}
        C = {i: layer.C for i, layer in f.items()}
        Phi = {i: layer.Phi for i, layer in f.items()}
        W = {i: theta[i]["W"] for i in f}
        found = []
        for x_j, y_j in zip(x, y, strict=True):
            after, nabla = thesis.grad_desc_cnn(x_j, y_j, W, kind, ETA, psi, C, Phi)
            nabla = {i: {"W": nabla[i]} for i in f}
            check_step({i: {"W": after[i]} for i in f}, theta, nabla, layers)
            found.append(flat(nabla, layers))
        expected, ours = first_order(layers, x, y, kind)
        close(summed(found), expected, TOLERANCE, f"{seed}", least=1e-3)
        close(ours, summed(found), TOLERANCE, f"{seed}, maps", least=1e-3)
    record_property("cases", len(SEEDS))


# --- Algorithm 4.3.1


class Autoencoder:
    """Weights W_1..W_L, biases b_1..b_2L, and tau_i: the transpose, or W -> A W' B."""

    def __init__(self, rng):
        self.L = L = int(rng.integers(1, 4))
        sizes = [int(n) for n in rng.integers(1, 7, size=L + 1)]
        widths = sizes + sizes[-2::-1]  # n_i = n_{2L-i+2}
        self.W = {i: rng.normal(size=(sizes[i], sizes[i - 1])) for i in range(1, L + 1)}
        self.b = {i: rng.normal(size=widths[i]) for i in range(1, 2 * L + 1)}
        self.psi = {i: str(rng.choice(NAMES)) for i in range(1, 2 * L + 1)}
        self.tau, self.tau_star, self.torch_tau = {}, {}, {}
        for i in range(L + 1, 2 * L + 1):
            A = rng.normal(size=(widths[i], widths[i])) / np.sqrt(widths[i])
            B = rng.normal(size=(widths[i - 1], widths[i - 1])) / np.sqrt(widths[i - 1])
            self._tie(i, A, B, bool(rng.integers(2)))

    def _tie(self, i, A, B, plain):
        if plain:
            self.tau[i] = self.tau_star[i] = lambda W: W.T
            self.torch_tau[i] = "transpose"
            return
        self.tau[i] = lambda W: A @ W.T @ B
        self.tau_star[i] = lambda G: B @ G.T @ A
        left, right = torch.from_numpy(A), torch.from_numpy(B)
        self.torch_tau[i] = lambda W: left @ W.T @ right

    def xi(self, i):
        return 2 * self.L - i + 1

    def reference(self, x, W, b):
        """F(x; theta) by torch, (4.37)"""
        for i in b:
            if i <= self.L:
                K = W[i]
            elif self.torch_tau[i] == "transpose":
                K = W[self.xi(i)].T
            else:
                K = self.torch_tau[i](W[self.xi(i)])
            x = PSI[self.psi[i]](functional.linear(x, K, b[i]))
        return x

    def maps(self):
        """The layers as maps that share their weights."""
        layers = []
        for i in range(1, self.L + 1):
            m, n = self.W[i].shape
            layers.append(co.maps.Dense(n, m, self.psi[i], dtype=torch.float64))
            layers[-1].W.data.copy_(torch.from_numpy(self.W[i]))
        for i in range(self.L + 1, 2 * self.L + 1):
            tied = layers[self.xi(i) - 1]
            layers.append(co.maps.Tied(tied, self.torch_tau[i], self.psi[i]))
        for i, f in enumerate(layers, 1):
            f.b.data.copy_(torch.from_numpy(self.b[i]))
        return layers

    def theta(self):
        return {"W": self.W, "b": self.b}

    def step(self, x, loss, printed=False):
        return thesis.grad_desc_dae(
            x, self.theta(), loss, ETA, self.psi, self.tau, self.tau_star, printed
        )


def named_weights(nabla):
    """{"W1": gradient, ..., "b1": gradient, ...}"""
    return {f"{k}{i}": torch.as_tensor(g) for k in "Wb" for i, g in nabla[k].items()}


def autoencoder_by_autograd(net, x, loss):
    W = {i: torch.from_numpy(value).requires_grad_() for i, value in net.W.items()}
    b = {i: torch.from_numpy(value).requires_grad_() for i, value in net.b.items()}
    x = torch.from_numpy(x)
    J = squared if loss == "squared" else cross_entropy
    found = torch.autograd.grad(J(net.reference(x, W, b), x), [*W.values(), *b.values()])
    return dict(zip([*(f"W{i}" for i in W), *(f"b{i}" for i in b)], found, strict=True))


def autoencoder_by_maps(net, x, loss):
    F = co.maps.Composed(*net.maps())
    x = torch.from_numpy(x)
    out = F(x).detach()
    if loss == "cross-entropy":
        out = x.sum(1, keepdim=True) * torch.softmax(out, 1)
    named = F.pull_parameters(x, out - x)
    found = {}
    for name, gradient in named.items():
        number, letter = name.split(".")
        found[f"{letter}{int(number) + 1}"] = gradient
    return found


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_algorithm_4_3_1_autoencoder(loss, record_property):
    for seed in SEEDS:
        rng = np.random.default_rng(seed + 200)
        net = Autoencoder(rng)
        x = rng.uniform(size=(SAMPLES, len(net.b[2 * net.L])))
        found = []
        for x_j in x:
            after, nabla = net.step(x_j, loss)
            found.append(named_weights(nabla))
            before, moved = named_weights(net.theta()), named_weights(after)
            for name, gradient in found[-1].items():
                close(moved[name], before[name] - ETA * gradient, TOLERANCE, name, least=1e-3)
        expected = autoencoder_by_autograd(net, x, loss)
        close(summed(found), expected, TOLERANCE, f"{seed}", least=1e-3)
        close(autoencoder_by_maps(net, x, loss), summed(found), TOLERANCE, "maps", least=1e-3)
    record_property("cases", len(SEEDS))


def test_line_14_as_printed_holds_for_vectors_that_sum_to_one_alone():
    """(4.49): sigma(F) - x lacks the factor <1, x>."""
    rng = np.random.default_rng(0)
    net = Autoencoder(rng)
    x = rng.uniform(0.5, 1, size=len(net.b[2 * net.L]))
    assert abs(x.sum() - 1) > 0.3
    for point, holds in ((x, False), (x / x.sum(), True)):
        printed = named_weights(net.step(point, "cross-entropy", printed=True)[1])
        right = autoencoder_by_autograd(net, point[None], "cross-entropy")
        apart = max(float((printed[name] - right[name]).abs().max()) for name in right)
        assert (apart < 1e-12) is holds
        assert holds or apart > 1e-2


def test_the_adjoint_of_a_tied_layer_is_the_transpose_of_tau():
    """(4.44) prints tau*(W) for the transpose of tau(W); both exist where W is square."""
    torch.manual_seed(0)
    encoder = co.maps.Dense(4, 4, "identity", dtype=torch.float64)
    f = co.maps.Tied(encoder)
    x, w = torch.randn(2, 1, 4, dtype=torch.float64)
    printed = w @ encoder.W  # tau*(W) w = W' w
    right = w @ encoder.W.T
    close(f.pull(x, w), right, TOLERANCE)
    assert (f.pull(x, w) - printed).abs().max() > 0.1


# --- co.Chain: the gradient methods of the package


def half_squared(y_hat, y):
    """J_R, (3.6), of each sample"""
    return 0.5 * (y_hat - y).flatten(1).square().sum(1)


def soft_cross_entropy(y_hat, y):
    """J_C, (3.9), of each sample, for any y"""
    return -(y * torch.log(y_hat)).sum(1)


def chain_of(layers, kind):
    """The maps of the layers as a chain, its outputs in rows, and its loss."""
    maps = [layer.map for layer in layers]
    if isinstance(layers[-1].numpy, thesis.CNNLayer):
        maps.append(co.maps.Flatten())
    if kind == "regression":
        return co.Chain(*maps), half_squared
    return co.Chain(*maps, output="softmax"), "cross-entropy"


def batch_of(x, y, kind):
    """Samples along axis 0; classes by their numbers."""
    y = torch.from_numpy(y).flatten(1)
    return co.Batch(torch.from_numpy(x), y if kind == "regression" else y.argmax(1), axis=0)


def of_chain(gradient, layers):
    """The gradients of a chain by the names of `flat`; the sum over samples, not the mean."""
    plain = {name.removeprefix("maps."): SAMPLES * g for name, g in gradient.items()}
    return of_maps(plain, layers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", [mlp, deep, cnn, mixed])
def test_bp_of_a_chain_is_algorithm_3_2_1(network, kind, record_property):
    for seed in SEEDS:
        _, layers, x, y = draw(network, seed + 300, kind)
        f, theta = numbered(layers)
        found = []
        for x_j, y_j in zip(x, y, strict=True):
            _, nabla = thesis.grad_step_nn(f, x_j, y_j, theta, ETA, kind)
            found.append(flat(nabla, layers))
        chain, loss = chain_of(layers, kind)
        e = co.BP()(chain, batch_of(x, y, kind), loss)
        ours = of_chain(e.gradient, layers)
        close(ours, summed(found), TOLERANCE, f"{network.__name__} {seed}", least=1e-3)
    record_property("cases", len(SEEDS))


def values_of_R(layers, x, v, beta):
    """R of each sample, (3.12), by the transcription's layers."""
    values = []
    for x_j, v_j, beta_j in zip(x, v, beta, strict=True):
        for layer in layers:
            v_j = layer.numpy.D(x_j, layer.theta, v_j)
            x_j = layer.numpy.f(x_j, layer.theta)
        values.append(0.5 * thesis.inner(v_j - beta_j, v_j - beta_j))
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("network", [mlp, deep, cnn, mixed])
def test_the_tangent_penalty_of_a_chain_is_algorithm_3_3_1(network, record_property):
    mu = 0.7
    for seed in SEEDS:
        rng, layers, x, y = draw(network, seed + 350, "regression")
        v, beta = rng.normal(size=x.shape), rng.normal(size=y.shape)
        f, theta = numbered(layers)
        found = []
        for point in zip(x, y, v, beta, strict=True):
            _, (J, R) = thesis.grad_desc_high_order_nn(f, *point, theta, ETA, mu)
            total = {i: {k: J[i][k] + mu * R[i][k] for k in J[i]} for i in J}
            found.append(flat(total, layers))
        chain, loss = chain_of(layers, "regression")
        G = co.penalties.tangent(torch.from_numpy(v), torch.from_numpy(beta).flatten(1))
        batch = batch_of(x, y, "regression")
        e = co.Penalised(G, mu)(chain, batch, loss)
        R = torch.as_tensor(values_of_R(layers, x, v, beta))
        close(e.penalties, R, TOLERANCE, "the penalty is R, (3.12)")
        ours = of_chain(e.gradient, layers)
        close(ours, summed(found), TOLERANCE, f"{network.__name__} {seed}", least=1e-3)
    record_property("cases", len(SEEDS))


def two_sweeps(f, theta, x, e_v, source, H):
    """The gradient of Algorithm 3.3.1 by parameters, lines 6, 14 and 18, for any source.

    x       the states x_1, ..., x_{L+1} by number
    e_v     what is pulled back, e_v[i] at state x_{i+1}
    source  what enters the tangent at each state: v at x_1 for the tangent loss, dG/dlam_i at every
            state for a penalty
    H       the factor of v_{L+1} at the top of the second adjoint: the Hessian of the loss, if e_v
            is the loss's own error; 0 if it is not
    """
    L = len(f)
    v = {1: source[1]}
    for i in range(1, L + 1):
        v[i + 1] = f[i].D(x[i], theta[i], v[i]) + source[i + 1]
    e_t, nabla = H * v[L + 1], {}
    for i in range(L, 0, -1):
        first = f[i].nabla_star(x[i], theta[i], e_t)
        second = f[i].D_nabla_star(x[i], theta[i], v[i], e_v[i])
        nabla[i] = {name: first[name] + second[name] for name in first}
        e_t = f[i].D_star(x[i], theta[i], e_t) + f[i].D2_star(x[i], theta[i], v[i], e_v[i])
    return nabla


def errors(f, theta, x, top):
    """e_i, line 15: `top` pulled back through the layers above layer i."""
    e = {len(f): top}
    for i in range(len(f) - 1, 0, -1):
        e[i] = f[i + 1].D_star(x[i + 1], theta[i + 1], e[i + 1])
    return e


def slopes(name, e):
    """dG/dlam of the state above each layer; e: lam there, by number of the layer."""
    L = len(e)
    if name == "squared-norm":
        return {i: 2 * lam / L for i, lam in e.items()}
    by_log = dict.fromkeys(e, 0.0)  # G = mean over i of (log ||lam_i|| - log ||lam_{i+1}||)^2
    for i in range(1, L):
        ratio = np.log(np.linalg.norm(e[i]) / np.linalg.norm(e[i + 1]))
        by_log[i] += 2 * ratio / (L - 1)
        by_log[i + 1] -= 2 * ratio / (L - 1)
    return {i: by_log[i] * lam / np.square(lam).sum() for i, lam in e.items()}


@pytest.mark.parametrize("network", [mlp, deep, mixed])
def test_tangent_loss_and_penalties_are_one_algorithm_with_other_sources(network, record_property):
    cases, rho = 0, 0.7
    for seed in SEEDS:
        rng, layers, x, y = draw(network, seed + 500, "regression")
        v, beta = rng.normal(size=x.shape), rng.normal(size=y.shape)
        f, theta = numbered(layers)
        L = len(f)
        chain, loss = chain_of(layers, "regression")
        found = {"tangent": [], "squared-norm": [], "log-ratio": []}
        alive = True
        for x_j, y_j, v_j, beta_j in zip(x, y, v, beta, strict=True):
            states = {1: x_j}
            for i in range(1, L + 1):
                states[i + 1] = f[i].f(states[i], theta[i])
            still = {i: np.zeros_like(state) for i, state in states.items()}
            # the tangent loss: v enters at the input, and the error is that of the tangent
            pushed = v_j
            for i in range(1, L + 1):
                pushed = f[i].D(states[i], theta[i], pushed)
            e_v = errors(f, theta, states, pushed - beta_j)
            nabla = two_sweeps(f, theta, states, e_v, {**still, 1: v_j}, H=0.0)
            found["tangent"].append(flat(nabla, layers))
            _, (_, R) = thesis.grad_desc_high_order_nn(f, x_j, y_j, v_j, beta_j, theta, ETA, rho)
            close(found["tangent"][-1], flat(R, layers), TOLERANCE, "3.3.1", least=1e-3)
            # a penalty: its slopes enter at every state, and the error is that of the loss
            lam = errors(f, theta, states, states[L + 1] - y_j)
            alive = alive and all(np.any(e) for e in lam.values())
            for name in ("squared-norm", "log-ratio"):
                if name == "squared-norm" or alive:
                    g = {i + 1: slope for i, slope in slopes(name, lam).items()}
                    nabla = two_sweeps(f, theta, states, lam, {**still, **g}, H=1.0)
                    found[name].append(flat(nabla, layers))
        made = {"tangent": co.penalties.tangent(torch.from_numpy(v), torch.from_numpy(beta))}
        for name, G in found.items():
            if name == "log-ratio" and (not alive or L < 2):  # zeros are left out of it
                continue
            method = co.Penalised(made.get(name, name), rho, pretrain=1)  # rho G alone
            e = method(chain, batch_of(x, y, "regression"), loss)
            ours = of_chain(e.gradient, layers)
            expected = {key: rho * g for key, g in summed(G).items()}
            # Terms of a log-ratio cancel in some parameters: to be measured by the whole gradient.
            largest = max(float(g.norm()) for g in expected.values())
            least = largest if name == "log-ratio" else 1e-3
            close(ours, expected, TOLERANCE, f"{name} {network.__name__} {seed}", least=least)
            cases += 1
    record_property("cases", cases)


@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
def test_bp_of_a_tied_chain_is_algorithm_4_3_1(loss, record_property):
    for seed in SEEDS:
        rng = np.random.default_rng(seed + 400)
        net = Autoencoder(rng)
        x = rng.uniform(size=(SAMPLES, len(net.b[2 * net.L])))
        found = summed([named_weights(net.step(x_j, loss)[1]) for x_j in x])
        output, J = "identity", half_squared
        if loss == "cross-entropy":
            output, J = "softmax", soft_cross_entropy
        chain = co.Chain(*net.maps(), output=output)
        inputs = torch.from_numpy(x)
        e = co.BP()(chain, co.Batch(inputs, inputs, axis=0), J)
        ours = {}
        for name, gradient in e.gradient.items():
            _, number, letter = name.split(".")
            ours[f"{letter}{int(number) + 1}"] = SAMPLES * gradient
        close(ours, found, TOLERANCE, f"{seed}", least=1e-3)
    record_property("cases", len(SEEDS))


@pytest.mark.parametrize("network", [mlp, deep, cnn, mixed])
def test_costates_of_a_chain_are_the_errors_of_algorithm_3_2_1(network):
    """lam_i = e_i, and lam_0 one pull further; numbers from 0 here, from 1 in the text."""
    for seed in SEEDS:
        _, layers, x, y = draw(network, seed + 450, "regression")
        chain, loss = chain_of(layers, "regression")
        lam = chain(torch.from_numpy(x)).costates(loss, torch.from_numpy(y).flatten(1))
        f, theta = numbered(layers)
        for j in range(SAMPLES):
            states = [x[j]]
            for i in f:
                states.append(f[i].f(states[-1], theta[i]))
            e = states[-1] - y[j]
            for i in range(len(f), 0, -1):
                close(lam.at(i)[j], torch.as_tensor(e), TOLERANCE, f"lam_{i}", least=1e-3)
                e = f[i].D_star(states[i - 1], theta[i], e)
            close(lam.at(0)[j], torch.as_tensor(e), TOLERANCE, "lam_0", least=1e-3)

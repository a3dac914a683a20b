"""Penalties are right where something is exactly zero or equal.

Values, gradients and Hessians are compared with plain float64 loops. The loops and formulas are
written by entries, so that squares of norms are smooth at zero. A norm that is not squared has a
kink there; its derivatives are 0 by definition, and `kinked` says so. Second differences of the
values, which know nothing of either, confirm the smooth ones.
"""

import itertools
import math

import pytest
import torch

import coadjoint as co
import oracles
from coadjoint.objectives.penalties import PENALTIES
from compare import close

pytestmark = pytest.mark.slow

F64 = torch.float64
T, B, I, D, O = 4, 2, 2, 3, 2
# omega-published is no function of the weights, and tangent none of costates
NAMES = [name for name in PENALTIES if name not in ("omega-published", "tangent")]
KINDS = ("network", "stack", "record", "record lstm")


def kinked(x):
    """||x|| over the last axis; its derivatives are 0 at 0."""
    s = (x * x).sum(-1)
    return torch.where(s > 0, torch.sqrt(torch.where(s > 0, s, 1.0)), 0.0)


def square(x):
    return (x * x).sum(-1)


def mean(values):
    """Over what is not left out; 0 if nothing is."""
    values = list(values)
    return sum(values) / len(values) if values else torch.zeros((), dtype=F64)


def variance(n):
    n = list(n)
    return mean((a - mean(n)) ** 2 for a in n)


def ratios(lam):
    """||lam_t|| / ||lam_{t+1}||, t = 1..T-1, where both are there."""
    n = [kinked(y) for y in lam[1:]]
    return [a / b for a, b in itertools.pairwise(n) if a > 0 and b > 0]


def shares(lam):
    n = [kinked(y) for y in lam[1:]]
    return [a / sum(n) - 1 / len(n) for a in n] if sum(n) > 0 else []


def log_barrier(v):
    return sum(
        (torch.log(abs(a) / 1e-5) ** 2 for a in v if 0 < abs(a) < 1e-5), torch.zeros((), dtype=F64)
    )


def change(before, after):
    """(||h_t|| - ||h_{t-1}||)^2; after a state of zeros it is ||h_t||^2"""
    if not before.any():
        return square(after)
    return (kinked(after) - kinked(before)) ** 2


def of_one_sample(name, x, lam, back, direct, signs):
    """The docstrings' formulas.

    x, lam: t = 0..T; back: J_t' lam_t, t = 1..T; direct: d y_hat_k / dx_t by k; signs: J_t' r_t of
    random signs.
    """
    n = [kinked(y) for y in lam]
    return {
        "squared-norm": lambda: mean(square(y) for y in lam[1:]),
        "variance": lambda: variance(n[1:]),
        "variance-l1": lambda: variance(y.abs().sum() for y in lam[1:]),
        "log-ratio": lambda: mean(torch.log(r) ** 2 for r in ratios(lam)),
        "ratio": lambda: mean((r - 1) ** 2 for r in ratios(lam)),
        "log-variance": lambda: variance(torch.log(a) for a in n[1:] if a > 0),
        "end-points": lambda: (n[1] - n[-1]) ** 2,
        "share-variance": lambda: sum((a**2 for a in shares(lam)), torch.zeros((), dtype=F64)),
        "barrier": lambda: log_barrier(lam[-1]),
        "omega": lambda: mean(
            (square(b) / square(y) - 1) ** 2 for b, y in zip(back, lam[1:], strict=True) if y.any()
        ),
        "omega-norms": lambda: sum(
            (
                (kinked(b) / kinked(y) - 1) ** 2
                for b, y in zip(back, lam[1:], strict=True)
                if y.any()
            ),
            torch.zeros((), dtype=F64),
        ),
        "isometry": lambda: mean(
            torch.log(kinked(y) / math.sqrt(len(y))) ** 2 for y in signs if y.any()
        ),
        "norm-stabiliser": lambda: mean(change(a, b) for a, b in itertools.pairwise(x)),
        "output-variance": lambda: mean(variance(kinked(y) for y in of_k[1:]) for of_k in direct),
    }[name]()


def by_cell(cell, activation, p, u, start):
    """One sample's states, a node each, and step t again as a function of x_{t-1}."""

    def step(u_t, x):
        if cell == "lstm":
            h, c = x.chunk(2)
            i, f, g, o = (p["W"] @ h + p["R"] @ u_t + p["b"]).chunk(4)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            return torch.cat([torch.sigmoid(o) * torch.tanh(c), c])
        return activation(p["W"] @ x + p["R"] @ u_t + p["b"])

    x = [start]
    for u_t in u:
        x.append(step(u_t, x[-1]))
    return x, [lambda y, u_t=u_t: step(u_t, y) for u_t in u]


ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "identity": lambda a: a}


class Model:
    """The same network twice: made of coadjoint's parts, and as a loop."""

    def __init__(self, kind, activation="tanh", x0="learned", hidden=D):
        torch.manual_seed(3)
        self.kind, self.activation, self.hidden = kind, activation, hidden
        self.factor = 1.0  # of the loss
        self.fits = []  # the samples that are told y = y_hat
        self.u = torch.randn(T, B, I, dtype=F64)
        options = {"inputs": I, "hidden": hidden, "outputs": O, "dtype": F64}
        if kind == "network":
            self.module = co.Network("elman", activation=activation, x0=x0, **options)
            self.layers = [self.module]
        elif kind == "stack":
            self.module = co.Stack(["elman", "elman"], activation=activation, x0=x0, **options)
            self.layers = list(self.module.layers)
        else:
            lstm = kind == "record lstm"
            make = co.nn.LSTM if lstm else co.nn.RNN
            named = {} if lstm else {"nonlinearity": activation}
            self.module = make(I, hidden, dtype=F64, **named)
            self.module.V = torch.nn.Parameter(torch.randn(O, hidden, dtype=F64))
            self.module.b_o = torch.nn.Parameter(torch.randn(O, dtype=F64))
            self.layers = [self.module]

    def weights(self, layer):
        if self.kind.startswith("record"):
            bias = layer.bias_ih_l0 + layer.bias_hh_l0
            return {"W": layer.weight_hh_l0, "R": layer.weight_ih_l0, "b": bias}
        return {"W": layer.W, "R": layer.R, "b": layer.b}

    def loss(self, a, fits):
        """(a - y)^2, y = -1/4 or, where the sample fits, a itself"""
        y = torch.where(torch.as_tensor(fits)[..., None], a.detach(), -0.25)
        return self.factor * ((a - y) ** 2).sum(-1)

    def costates(self):
        """Of all layers, as a penalty takes them."""
        fits = [j in self.fits for j in range(B)]
        if not self.kind.startswith("record"):
            return self.module(self.u).costates(lambda a: self.loss(a, fits))
        with co.record(self.module) as tape:
            out, _ = self.module(self.u)
        a = torch.nn.functional.linear(out[-1], self.module.V, self.module.b_o)
        return tape.costates(self.loss(a, fits))

    def ours(self, name):
        return PENALTIES[name](self.costates()).mean()

    def truth(self, name):
        return mean(self.of_sample(name, j) for j in range(B))

    def of_sample(self, name, j):
        heard, runs = list(self.u[:, j]), []
        for layer in self.layers:
            start = getattr(layer, "x0", None)
            if start is None:
                start = torch.zeros(
                    (2 if self.kind == "record lstm" else 1) * self.hidden, dtype=F64
                )
            start = start + torch.zeros_like(
                start, requires_grad=True
            )  # a node that autograd can name
            cell = "lstm" if self.kind == "record lstm" else "elman"
            x, steps = by_cell(
                cell, ACTIVATIONS[self.activation], self.weights(layer), heard, start
            )
            runs.append((x, steps))
            heard = [y[: self.hidden] for y in x[1:]]
        a = self.module.V @ heard[-1] + self.module.b_o
        value = self.loss(a, j in self.fits)
        found = []
        for x, steps in runs:
            lam = torch.autograd.grad(value, x, create_graph=True)
            r = [
                torch.tensor(oracles.drawn_signs(len(y), t, j), dtype=F64)
                for t, y in enumerate(x[1:], 1)
            ]
            back, signs = (
                [
                    torch.autograd.grad(step(before), before, grad_outputs=y, create_graph=True)[0]
                    for step, before, y in zip(steps, x, ys, strict=False)
                ]
                for ys in (lam[1:], r)
            )
            direct = []
            if name == "output-variance":
                direct = [torch.autograd.grad(a_k, x, create_graph=True) for a_k in a]
            shown = [y[: self.hidden] for y in x]
            found.append(of_one_sample(name, shown, lam, back, direct, signs))
        return mean(found)

    @property
    def parameters(self):
        return [p for name, p in self.module.named_parameters()]


def derivatives(value, parameters, directions):
    """The value, the gradient, and the Hessian times each direction, flat."""

    def flat(gs):
        return torch.cat(
            [
                (torch.zeros_like(p) if g is None else g).flatten()
                for g, p in zip(gs, parameters, strict=True)
            ]
        )

    none = torch.zeros(sum(p.numel() for p in parameters), dtype=F64)
    if not value.requires_grad:
        return value, none, [none for _ in directions]
    slope = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    products = []
    for along in directions:
        dot = sum((g * d).sum() for g, d in zip(slope, along, strict=True) if g is not None)
        if not torch.is_tensor(dot) or not dot.requires_grad:
            products.append(none)
            continue
        products.append(
            flat(torch.autograd.grad(dot, parameters, retain_graph=True, allow_unused=True))
        )
    return value.detach(), flat(slope).detach(), products


def directions(parameters, count=2):
    rng = torch.Generator().manual_seed(7)
    return [
        [torch.randn(p.shape, dtype=F64, generator=rng) for p in parameters] for _ in range(count)
    ]


def readout_of_zeros(model):
    """V = 0: every costate is zero."""
    model.module.V.zero_()


def no_recurrence(model):
    """W = 0: J_t = 0, and the costates before the last are zero (of an LSTM's c they are not)."""
    for layer in model.layers:
        model.weights(layer)["W"].zero_()


def perfect_fit(model):
    """y_hat = y: every costate is zero, though V is not."""
    model.fits = range(B)


def one_sample_fits(model):
    model.fits = [1]


def dead_units(model):
    """relu: one unit never answers, and none does at step 3 (of the first layer, where there are
    two).
    """
    for layer in model.layers:
        bias = layer.bias_ih_l0 if model.kind == "record" else layer.b
        bias[0], bias[1:] = -100.0, 3.0
    model.weights(model.layers[0])["R"][:, 0] = 1.0
    model.u[2, :, 0] = -1000.0


def unread_units(model):
    """A column of zeros in V: one entry of lam_T is zero."""
    model.module.V[:, 1] = 0.0


def equal_neighbours(model):
    """W = 1 without bends: lam_t is the same for all t, to the last bit, and every
    ratio exactly 1.
    """
    for layer in model.layers:
        model.weights(layer)["W"].copy_(torch.eye(model.hidden))


def one_step(model):
    model.u = model.u[:1]


def below_the_switch(model):
    """The barrier has a value; one unit of the last costate is zero."""
    model.factor = 1e-7
    model.module.V[:, 1] = 0.0


def silent(model):
    """R = b = 0: every state is zero."""
    for layer in model.layers:
        p = model.weights(layer)
        p["R"].zero_()
        for name, bias in layer.named_parameters():
            if name in ("b", "bias_ih_l0", "bias_hh_l0"):
                bias.zero_()


POINTS = {  # what is done, and to which activation
    "V = 0": (readout_of_zeros, "tanh"),
    "W = 0": (no_recurrence, "tanh"),
    "perfect fit": (perfect_fit, "tanh"),
    "one sample fits": (one_sample_fits, "tanh"),
    "dead units": (dead_units, "relu"),
    "unread units": (unread_units, "tanh"),
    "equal neighbours": (equal_neighbours, "identity"),
    "one step": (one_step, "tanh"),
    "below the switch": (below_the_switch, "tanh"),
    "silent": (silent, "tanh"),
}


def at(kind, point, **options):
    change, activation = POINTS[point]
    if kind.startswith("record") and activation == "identity":
        pytest.skip("co.nn has no linear cell")
    if kind == "record lstm" and activation == "relu":
        pytest.skip("an LSTM has no relu")
    model = Model(kind, activation, **options)
    with torch.no_grad():
        change(model)
    return model


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.sampled(4)
def test_value_gradient_and_hessian_equal_the_loops(point, kind):
    model = at(kind, point)
    along = directions(model.parameters, 1)
    for name in NAMES:
        if name == "output-variance" and kind != "network":
            continue
        ours = derivatives(model.ours(name), model.parameters, along)
        truth = derivatives(model.truth(name), model.parameters, along)
        close(ours[0], truth[0], 1e-11, least=0.05)
        close(ours[1], truth[1], 1e-11, least=0.05)
        for product, true in zip(ours[2], truth[2], strict=True):
            close(product, true, 1e-11, least=0.05)


def test_the_points_are_what_they_say():
    def zeros(point):
        return at("network", point).costates().zeros()

    assert zeros("V = 0").tolist() == [T + 1] * B
    assert zeros("W = 0").tolist() == [T] * B
    assert zeros("perfect fit").tolist() == [T + 1] * B
    assert zeros("one sample fits").tolist() == [0, T + 1]
    assert zeros("dead units").tolist() == [3] * B
    equal = at("network", "equal neighbours").costates().log_ratios()
    assert (equal == 0).all()
    assert not at("network", "silent").costates().trajectory.x.any()


def second_difference(model, value, along):
    """d^2 value / dh^2 along a direction, by values alone."""

    def shifted(h):
        with torch.no_grad():
            for p, d in zip(model.parameters, along, strict=True):
                p.add_(h * d)
        found = float(value().detach())
        with torch.no_grad():
            for p, d in zip(model.parameters, along, strict=True):
                p.sub_(h * d)
        return found

    middle = float(value().detach())

    def by(h):
        return (shifted(h) - 2 * middle + shifted(-h)) / h**2

    return (4 * by(1e-3) - by(2e-3)) / 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "point"),
    [("squared-norm", "V = 0"), ("squared-norm", "W = 0"), ("omega", "W = 0")],
)
def test_hessians_agree_with_differences_of_values(name, point, kind):
    """omega: of the last step alone, since the others' costates are zero and left out; an LSTM's
    are not.
    """
    model = at(kind, point)
    if name == "omega":
        one_step(model)

    def value():
        return model.ours(name)

    for along in directions(model.parameters):
        _, _, (product,) = derivatives(value(), model.parameters, [along])
        curvature = float(product @ torch.cat([d.flatten() for d in along]))
        true = second_difference(model, value, along)
        assert abs(curvature) > 1e-3
        assert abs(curvature - true) < 1e-5 * abs(true)


def test_the_stabiliser_of_one_step_from_a_state_of_zeros_is_right():
    """||h_1||^2, at h_1 = 0"""
    model = at("network", "silent", x0="zero")
    one_step(model)

    def value():
        return model.ours("norm-stabiliser")

    (along,) = directions(model.parameters, 1)
    _, gradient, (product,) = derivatives(value(), model.parameters, [along])
    curvature = float(product @ torch.cat([d.flatten() for d in along]))
    true = second_difference(model, value, along)
    assert not gradient.any()
    assert true > 0.1
    assert abs(curvature - true) < 1e-5 * true


def test_omega_as_published_has_its_curvature_by_w_at_zero():
    """The mean over samples of (||W' D lam||^2 / ||lam||^2 - 1)^2, D = 1 - h^2, with h and lam
    held.
    """
    model = at("network", "W = 0")
    one_step(model)
    W = model.module.W
    lam = model.costates()
    last, h = lam.lam[1].detach(), lam.trajectory.x[1].detach()
    slope = (1 - h**2) * last

    def truth(W):
        return ((square(slope @ W) / square(last) - 1) ** 2).mean()

    along = torch.randn(W.shape, dtype=F64, generator=torch.Generator().manual_seed(7))
    value, gradient, (product,) = derivatives(
        PENALTIES["omega-published"](lam).mean(), [W], [[along]]
    )
    close(value, torch.ones((), dtype=F64), 1e-11, least=0.05)
    assert not gradient.any()
    true = torch.func.jvp(torch.func.grad(truth), (W.detach(),), (along,))[1]
    assert float(true.abs().max()) > 0.1
    close(product, true.flatten(), 1e-11, least=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_costates_too_small_for_their_type_are_not_taken_for_zeros(dtype):
    """They have a norm, with its own derivatives: the second derivative by the mantissa is 2 4^k,
    once.
    """
    net = co.Network("elman", inputs=I, hidden=D, outputs=O, activation="identity", dtype=dtype)
    with torch.no_grad():
        net.W.copy_(0.5 * torch.eye(D))
    lam = net(torch.ones(T, 1, I, dtype=dtype)).costates(lambda a: (a**2).sum(-1))
    k = 60 if dtype == torch.float32 else 500
    mantissa = lam.rows.detach().requires_grad_()
    tiny = co.Costates(lam.trajectory, mantissa, lam.powers - k, lam.loss)
    with torch.no_grad():
        mantissa[2] = 0.0  # so that not all of them are there
    (slope,) = torch.autograd.grad(tiny.squared_norms().sum(), mantissa, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), mantissa)
    unit = torch.pow(torch.tensor(4.0, dtype=F64), (lam.powers - k).double())
    for t in range(T + 1):
        assert torch.allclose(bend[t].double(), 2 * unit[t].expand(D), rtol=1e-5)
    assert math.isclose(
        float(slope[0, 0].detach()),
        2 * float(mantissa[0, 0].detach()) * float(unit[0]),
        rel_tol=1e-5,
    )

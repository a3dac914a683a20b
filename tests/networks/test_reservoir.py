"""Echo state networks agree with numpy loops, with closed forms and with published results."""

import io
import math

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.networks.expansions import EXPANSIONS, KERNELS
from coadjoint.networks.reservoir import Reservoir
from coadjoint.networks.reservoir_weights import krylov_radius

pytestmark = pytest.mark.slow

F64 = torch.float64
ALL = [*EXPANSIONS, *KERNELS]


def make(inputs=2, hidden=7, outputs=2, **options):
    defaults = {
        "leak": 0.6,
        "density": 0.5,
        "bias_scale": 0.3,
        "ridge": 1e-2,
        "dtype": F64,
        "seed": 4,
    }
    return Reservoir(inputs, hidden, outputs, **(defaults | options))


def data(T=12, B=3, inputs=2, outputs=2, seed=0, every=True):
    g = torch.Generator().manual_seed(seed)
    lead = (T, B) if every else (B,)
    return torch.randn(T, B, inputs, generator=g, dtype=F64), torch.randn(
        *lead, outputs, generator=g, dtype=F64
    )


def states(r, u, x0=None):
    """x_1..x_T of one sequence, in numpy."""
    W, R, b = (getattr(r.network, n).detach().numpy() for n in ("W", "R", "b"))
    leak, x, out = 0.6, np.zeros(len(W)) if x0 is None else x0, []
    for u_t in u.numpy():
        x = (1 - leak) * x + leak * np.tanh(W @ x + R @ u_t + b)
        out.append(x)
    return np.stack(out)


def examples(r, u, y, lengths):
    """Rows of states and targets after the washout, in numpy."""
    X, Y = [], []
    for j, n in enumerate(lengths):
        x = states(r, u[:n, j])
        X.append(x[r.washout :] if r.network.readout == "every" else x[-1:])
        Y.append(
            y[r.washout : n, j].numpy() if r.network.readout == "every" else y[j : j + 1].numpy()
        )
    return np.concatenate(X), np.concatenate(Y)


def phi(r, X, S=None):
    if r.expansion == "squares":
        return np.concatenate([X, X**2], 1)
    if r.expansion == "rbf":
        return np.array([[math.exp(-r.gamma * sum((x - s) ** 2)) for s in S] for x in X])
    if r.expansion == "polynomial":
        return np.array([[(1 + r.gamma * sum(x * s)) ** r.degree for s in S] for x in X])
    return X


def predicted(r, X, Y, at):
    """Ridge regression on rows X, Y, read at the rows `at`."""
    if r.expansion in KERNELS:
        mean = Y.mean(0)
        alpha = np.linalg.solve(phi(r, X, X) + r.ridge * np.eye(len(X)), Y - mean)
        return phi(r, at, X) @ alpha + mean
    P = phi(r, X)
    Pc, Yc = P - P.mean(0), Y - Y.mean(0)
    w = np.linalg.solve(Pc.T @ Pc + r.ridge * np.eye(P.shape[1]), Pc.T @ Yc)
    return (phi(r, at) - P.mean(0)) @ w + Y.mean(0)


# the reservoir


@pytest.mark.parametrize(
    ("hidden", "density", "radius", "links"),
    [
        (1, 0.1, 0.5, 1),
        (7, 1.0, 1.3, 7),
        (50, 0.1, 0.9, 5),
        (200, 0.001, 0.8, 1),
        (700, 0.01, 0.95, 7),
    ],
)
def test_W_has_the_spectral_radius_and_links_asked_for(hidden, density, radius, links):
    W = make(hidden=hidden, density=density, radius=radius).network.W.detach().numpy()
    assert np.abs(np.linalg.eigvals(W)).max() == pytest.approx(radius, rel=1e-10)
    assert ((W != 0).sum(1) == links).all()


def test_weights_are_uniform_on_their_scales_and_fixed():
    r = make(inputs=3, hidden=400, input_scale=0.2, bias_scale=0.7, leak=0.3)
    for name, scale in (("R", 0.2), ("b", 0.7)):
        value = getattr(r.network, name)
        assert value.abs().max() <= scale
        assert value.abs().mean() == pytest.approx(scale / 2, rel=0.1)
    weights = r.network.W[r.network.W != 0]
    assert weights.mean().abs() < 0.05 * weights.abs().max()
    assert (r.network.p["leak"] == 0.3).all()
    assert [n for n, p in r.named_parameters() if p.requires_grad] == ["network.V", "network.b_o"]


@pytest.mark.parametrize(
    ("name", "matrix"),
    [
        ("random", lambda g: g.standard_normal((300, 300))),
        (
            "a pair far out",
            lambda g: (
                g.standard_normal((200, 200)) + 40 * np.eye(200, k=1) - 40 * np.eye(200, k=-1)
            ),
        ),
        ("positive", lambda g: g.random((250, 250))),
        ("real, crowded, negative", lambda g: np.diag(np.linspace(0.1, -1, 900))),
        (
            "not normal",
            lambda g: (
                np.triu(g.standard_normal((150, 150)), 1) * 0.03 + np.diag(np.linspace(0.1, 1, 150))
            ),
        ),
    ],
)
def test_the_largest_eigenvalue_is_found_from_products_alone(name, matrix):
    A = matrix(np.random.default_rng(1))
    assert krylov_radius(lambda x: A @ x, len(A)) == pytest.approx(
        np.abs(np.linalg.eigvals(A)).max(), rel=1e-9
    )


def test_an_invariant_subspace_is_no_answer():
    assert krylov_radius(lambda x: 2 * x, 300) is None


def test_the_past_fades_below_radius_one_and_does_not_far_above():
    u = 0.05 * torch.randn(400, 1, 1, generator=torch.Generator().manual_seed(0), dtype=F64)
    starts = torch.randn(2, 100, generator=torch.Generator().manual_seed(1), dtype=F64)
    apart = {}
    for radius in (0.9, 3.0):
        net = make(inputs=1, hidden=100, radius=radius, leak=1.0, bias_scale=0.0).network
        one, two = (net(u, x0=x0).state for x0 in starts)
        apart[radius] = float((one - two).norm() / (starts[0] - starts[1]).norm())
    assert apart[0.9] < 1e-12
    assert apart[3.0] > 0.1


def test_the_same_seed_is_the_same_reservoir():
    a, b, c, single = make(), make(), make(seed=5), make(dtype=torch.float32)
    for name in ("W", "R", "b"):
        one, two = getattr(a.network, name), getattr(b.network, name)
        assert torch.equal(one, two)
        assert torch.equal(one.float(), getattr(single.network, name))
        assert not torch.equal(one, getattr(c.network, name))


# the readout


@pytest.mark.parametrize("readout", ["every", "last"])
@pytest.mark.parametrize("expansion", ALL)
def test_ridge_regression_is_the_closed_form(expansion, readout):
    every, lengths = readout == "every", [12, 7, 10, 12, 5, 9]
    u, y = data(B=6, every=every)
    if every:
        y = y.masked_fill(
            (torch.arange(12)[:, None] >= torch.tensor(lengths))[..., None], torch.nan
        )  # not read
    r = make(expansion=expansion, readout=readout, washout=3, degree=3, gamma=0.4)
    r.fit(u, y, lengths)
    X, Y = examples(r, u, y, lengths)
    new, _ = data(T=9, B=2, seed=1)
    at = [states(r, new[:, j]) for j in range(2)]
    truth = np.stack([predicted(r, X, Y, x if every else x[-1:]) for x in at], 1)
    assert torch.allclose(
        r.predict(new), torch.from_numpy(truth if every else truth[0]), rtol=1e-9, atol=1e-11
    )
    found, Y_hat = r.score(u, y, lengths), predicted(r, X, Y, X)
    assert found == pytest.approx(
        1 - ((Y_hat - Y) ** 2).sum() / ((Y - Y.mean(0)) ** 2).sum(), rel=1e-9
    )


def test_predictions_end_with_their_sequence():
    u, y = data()
    r = make().fit(u, y)
    lengths = [12, 4, 7]
    whole, cut = r.predict(u), r.predict(u, lengths)
    for j, n in enumerate(lengths):
        assert torch.allclose(cut[:n, j], whole[:n, j], rtol=1e-12, atol=0)
        assert not cut[n:, j].any()


def test_the_linear_readout_is_the_networks_own():
    u, y = data()
    r = make(washout=2).fit(u, y)
    assert torch.allclose(r.network(u).y_hat, r.predict(u), rtol=1e-12, atol=1e-14)
    batch = co.Batch(u, y, mask=(torch.arange(12) >= 2)[:, None].expand(12, 3))
    gradient = co.BPTT()(r.network, batch, "squared").gradient
    assert set(gradient) == {"V", "b_o"}
    assert torch.allclose(
        3 * gradient["V"], -2 * r.ridge * r.network.V, rtol=1e-9
    )  # the minimum of |e|^2 + r |V|^2
    assert gradient["b_o"].norm() < 1e-12


def test_without_ridge_too_few_examples_have_the_least_solution():
    u, y = data(T=4, B=1)
    r = make(ridge=0.0).fit(u, y)
    X, Y = examples(r, u, y, [4])
    V = np.linalg.pinv(X - X.mean(0)) @ (Y - Y.mean(0))
    assert torch.allclose(r.network.V, torch.from_numpy(V.T), rtol=1e-8, atol=1e-10)
    assert torch.allclose(r.predict(u), y, rtol=1e-8, atol=1e-10)


def test_nearly_dependent_features_keep_their_digits():
    """Normal equations square the condition number; the readout does not."""
    u, w = (
        torch.randn(500, 1, 1, generator=torch.Generator().manual_seed(0), dtype=F64),
        np.linspace(-1, 1, 16),
    )
    r = make(
        1,
        16,
        1,
        density=1.0,
        bias_scale=0.0,
        leak=1.0,
        ridge=0.0,
        input_scale=0.1,
        activation="identity",
    )
    X = r.network(u).x[1:, 0].numpy()
    y = X @ w
    X, centred = X - X.mean(0), y - y.mean()
    assert np.linalg.cond(X) > 1e4
    r.fit(u, torch.from_numpy(y)[:, None, None])

    def away(V):
        return np.linalg.norm(V - w) / np.linalg.norm(w)

    assert away(r.network.V.detach().numpy()[0]) < 1e-11
    assert away(np.linalg.solve(X.T @ X, X.T @ centred)) > 1e-10


@pytest.mark.parametrize("expansion", ALL)
def test_fitting_in_parts_equals_fitting_at_once(expansion):
    u, y = data(T=30, B=6)
    whole = make(expansion=expansion, washout=4).fit(u, y)
    parts = make(expansion=expansion, washout=4)
    parts.fit((u[:, at : at + 2], y[:, at : at + 2]) for at in (0, 2, 4))
    cut = make(expansion=expansion, washout=4)
    cut.fit([co.Batch(u[:5], y[:5]), (u[5:17], y[5:17]), (u[17:], y[17:], None)], chained=True)
    for other in (parts, cut):
        assert torch.allclose(other.predict(u), whole.predict(u), rtol=1e-9, atol=1e-11)
    restarted = make(expansion=expansion, washout=4).fit([(u[:5], y[:5]), (u[5:], y[5:])])
    assert not torch.allclose(restarted.predict(u), whole.predict(u), rtol=1e-4)


def test_more_rows_than_a_block_are_fitted():
    u, y = data(T=3000)
    r = make().fit(u, y)
    X, Y = examples(r, u, y, [3000] * 3)
    for j in range(3):
        truth = torch.from_numpy(predicted(r, X, Y, states(r, u[:50, j])))
        assert torch.allclose(r.predict(u[:50])[:, j], truth, rtol=1e-8, atol=1e-11)


def test_another_ridge_needs_no_other_sweep():
    u, y = data(B=6)
    again = make(ridge=5.0).fit(u, y)
    r = make().fit(u, y).solve(5.0)
    assert torch.equal(r.network.V, again.network.V)
    assert torch.equal(r.fit(u, y).network.V, again.network.V)  # a fit begins anew
    assert torch.equal(r.forget().predict(u), again.predict(u))


def test_classes_are_ones_among_zeros():
    u, _ = data(T=9, B=5)
    classes = torch.randint(3, (9, 5), generator=torch.Generator().manual_seed(2))
    one, two = make(outputs=3), make(outputs=3)
    one.fit(u, classes)
    two.fit(u, torch.nn.functional.one_hot(classes, 3).double())
    assert torch.equal(one.predict(u), two.predict(u))
    assert one.score(u, classes) == pytest.approx(
        float((one.classify(u) == classes).double().mean())
    )


@pytest.mark.parametrize("expansion", ALL)
def test_a_fitted_reservoir_is_saved_and_loaded(expansion):
    u, y = data()
    fitted, other = make(expansion=expansion).fit(u, y), make(expansion=expansion, seed=9)
    file = io.BytesIO()
    torch.save(fitted.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other.predict(u), fitted.predict(u))
    assert "fitted=True" in repr(other)


# costates


def by_autograd(r, u, y, loss, length):
    """x_0..x_T and the loss of one sequence, by torch's own operations."""
    net, x = r.network, [torch.zeros(r.network.hidden, dtype=F64).requires_grad_()]
    for u_t in u[:length]:
        x.append((1 - 0.6) * x[-1] + 0.6 * torch.tanh(net.W @ x[-1] + net.R @ u_t + net.b))

    def read(x):
        if r.expansion == "linear":
            return net.V @ x + net.b_o
        if r.expansion == "squares":
            return r.A.T @ torch.cat([x, x**2]) + r.c
        distance = ((x - r.support) ** 2).sum(1)
        k = (
            torch.exp(-r.gamma * distance)
            if r.expansion == "rbf"
            else (1 + r.gamma * (r.support @ x)) ** r.degree
        )
        return r.A.T @ k + r.c

    if net.readout == "last":
        value = loss(read(x[-1]), y)
    else:
        value = sum(loss(read(x[t]), y[t - 1]) for t in range(1 + r.washout, length + 1))
    return x, value


@pytest.mark.parametrize("readout", ["every", "last"])
@pytest.mark.parametrize("expansion", ALL)
def test_costates_and_penalties_of_every_expansion_equal_the_loop(expansion, readout):
    every, lengths = readout == "every", [5, 9]
    u, y = data(T=9, B=2, every=every)
    r = make(expansion=expansion, readout=readout, washout=2 * every).fit(
        *data(T=20, B=8, seed=5, every=every)
    )
    u = u.requires_grad_()
    lam = r.costates(u, y, lengths=lengths)
    G = co.penalties.log_ratio(lam)
    ours = torch.autograd.grad((lam.loss + 0.3 * G).sum(), u)[0]
    objective = 0
    for j, n in enumerate(lengths):
        x, value = by_autograd(
            r, u[:, j], y[:, j] if every else y[j], lambda a, b: ((a - b) ** 2).sum(), n
        )
        found = torch.autograd.grad(value, x, create_graph=True)
        assert torch.allclose(lam.lam[: n + 1, j], torch.stack(found), rtol=1e-9, atol=1e-13)
        log = torch.stack([v.norm().log() for v in found[1:]])
        objective = objective + value + 0.3 * (log[1:] - log[:-1]).square().mean()
    truth = torch.autograd.grad(objective, u)[0]
    assert (ours - truth).norm() < 1e-10 * truth.norm()


@pytest.mark.parametrize("engine", ["reference", "eager", "cpu", "autograd"])
@pytest.mark.parametrize("expansion", ["linear", "rbf"])
def test_engines_agree(expansion, engine):
    u, y = data(every=False)
    r, other = (
        make(expansion=expansion, readout="last", engine=e).fit(u, y) for e in ("reference", engine)
    )
    assert r.network.engine == "reference"
    assert other.network.engine == engine
    assert torch.allclose(other.predict(u), r.predict(u), rtol=1e-11)
    new = data(every=False, seed=3)
    assert torch.allclose(other.costates(*new).lam, r.costates(*new).lam, rtol=1e-9, atol=1e-14)


def test_costates_of_classes_are_those_of_one_hot_targets():
    u, _ = data()
    classes = torch.randint(2, (12, 3), generator=torch.Generator().manual_seed(2))
    r = make().fit(u, classes)
    ones = torch.nn.functional.one_hot(classes, 2).double()
    assert torch.equal(r.costates(u, classes).lam, r.costates(u, ones).lam)
    assert torch.isfinite(r.costates(u, classes, "cross-entropy").lam).all()


# what reservoirs are known for


def capacity(activation, hidden, delays=60):
    """Sum over delays of the squared correlation between the input, so long ago, and its best
    linear readout.
    """
    u = 2 * torch.rand(6000, 1, 1, generator=torch.Generator().manual_seed(3), dtype=F64) - 1
    past = torch.cat([torch.roll(u, k, 0) for k in range(delays)], -1)
    scale = 0.1 if activation == "identity" else 1.0
    r = make(
        1,
        hidden,
        delays,
        radius=0.9,
        leak=1.0,
        density=1.0,
        input_scale=scale,
        bias_scale=0.0,
        washout=200,
        activation=activation,
        ridge=0.0,
    )
    found, truth = r.fit(u, past).predict(u)[200:, 0].numpy(), past[200:, 0].numpy()
    return sum(np.corrcoef(found[:, k], truth[:, k])[0, 1] ** 2 for k in range(delays))


def test_memory_of_a_linear_reservoir_is_its_number_of_units():
    """Jaeger (2001): at most the number of units, and a linear one reaches it; estimates from 5,800
    steps.
    """
    for hidden in (10, 20):
        assert hidden - 0.6 < capacity("identity", hidden) < hidden + 0.3
    assert capacity("tanh", 20) < 12


def narma(T, seed):
    """y_{t+1} = 0.3 y_t + 0.05 y_t (y_t + ... + y_{t-9}) + 1.5 u_{t-9} u_t + 0.1.  Atiya & Parlos
    (2000)
    """
    u, y = np.random.default_rng(seed).uniform(0, 0.5, T), np.zeros(T)
    for t in range(9, T - 1):
        y[t + 1] = 0.3 * y[t] + 0.05 * y[t] * y[t - 9 : t + 1].sum() + 1.5 * u[t - 9] * u[t] + 0.1
    return torch.from_numpy(u[:-1])[:, None, None], torch.from_numpy(y[1:])[:, None, None]


def moving_average(train, test, taps=30):
    """The normalised error of the best linear function of the last inputs."""

    def rows(u):
        return np.stack(
            [u[taps - 1 - k : len(u) - k, 0, 0] for k in range(taps)]
            + [np.ones(len(u) - taps + 1)],
            1,
        )

    w = np.linalg.lstsq(rows(train[0].numpy()), train[1][taps - 1 :, 0, 0].numpy(), rcond=None)[0]
    truth = test[1][taps - 1 :, 0, 0].numpy()
    return np.sqrt(((rows(test[0].numpy()) @ w - truth) ** 2).mean() / truth.var())


def test_narma_is_predicted_better_than_by_a_linear_model():
    """At most 0.7 times the normalised error of 30 taps, and 0.6 times with an expansion of the
    states.
    """
    train, test = narma(2500, 0), narma(1500, 1)
    error = {"taps": moving_average(train, test)}
    for expansion in ALL:
        r = make(
            1,
            200,
            1,
            radius=0.95,
            leak=1.0,
            density=0.1,
            input_scale=0.2,
            bias_scale=0.2,
            washout=100,
            ridge=1e-8,
            expansion=expansion,
        )
        error[expansion] = math.sqrt(1 - r.fit(*train).score(*test))
    assert error["taps"] == pytest.approx(0.38, abs=0.02)  # what a linear model leaves
    assert error["linear"] < 0.7 * error["taps"], error
    for expansion in ALL[1:]:
        assert error[expansion] < 0.6 * error["taps"], error
        assert error[expansion] < error["linear"], error


def mackey_glass(T, tau=17, inner=10):
    """dx/dt = 0.2 x(t - tau) / (1 + x(t - tau)^10) - 0.1 x, one value each unit of time, less its
    mean.  Science 197 (1977)
    """
    x = [1.2] * (tau * inner + 1)
    for _ in range((T + 200) * inner):
        late = x[-1 - tau * inner]
        x.append(x[-1] + (0.2 * late / (1 + late**10) - 0.1 * x[-1]) / inner)
    series = torch.tensor(x[tau * inner + 200 * inner :: inner][:T], dtype=F64)
    return (series - series.mean())[:, None, None]


@pytest.fixture(scope="module")
def chaos():
    x = mackey_glass(3000)
    r = make(
        1,
        300,
        1,
        radius=0.95,
        leak=0.7,
        density=0.05,
        input_scale=1.0,
        bias_scale=0.2,
        washout=100,
        ridge=1e-9,
    ).fit(x[:1999], x[1:2000])
    return x, r


def test_a_chaotic_series_is_continued(chaos):
    x, r = chaos
    free = r.generate(x[1500:2000], 1000)
    assert free.shape == (1000, 1, 1)
    assert torch.isfinite(free).all()
    error = (free - x[2000:]).square() / x.var()
    assert error[:84].mean().sqrt() < 0.05
    assert free.abs().max() < 2 * x.abs().max()  # bounded after it has lost its way too
    assert free[-200:].std() > 0.3 * x.std()


def test_generation_is_the_closed_loop(chaos):
    x, r = chaos
    warm, steps = x[1500:1600], []
    history = warm
    for _ in range(5):
        steps.append(r.predict(history)[-1:])
        history = torch.cat([history, steps[-1]])
    assert torch.allclose(r.generate(warm, 5), torch.cat(steps), rtol=1e-10, atol=1e-12)
    both = r.generate(torch.cat([warm, -warm], 1), 5, lengths=[100, 60])
    assert torch.allclose(both[:, :1], torch.cat(steps), rtol=1e-10, atol=1e-12)
    assert torch.allclose(both[:, 1:], r.generate(-warm[:60], 5), rtol=1e-10, atol=1e-12)


def test_sequences_are_classified_by_their_frequency():
    g = torch.Generator().manual_seed(0)
    t = torch.arange(40)[:, None]

    def draw(n):
        y = torch.randint(3, (n,), generator=g)
        wave = torch.sin(t * (0.2 + 0.15 * y) + 6.3 * torch.rand(n, generator=g))
        return (wave + 0.1 * torch.randn(40, n, generator=g))[..., None], y

    r = Reservoir(1, 100, 3, readout="last", density=0.2, expansion="squares", ridge=0.1, leak=0.5)
    assert r.fit(draw(10) for _ in range(30)).score(*draw(300)) > 0.95


# refusals


def fitted(**options):
    return make(**options).fit(*data())


@pytest.mark.parametrize(
    ("act", "kind", "words"),
    [
        (lambda: make(radius=0.0), co.InputError,
            "radius must be a finite number, above 0; got 0.0"),
        (lambda: make(leak=1.5), co.InputError,
            "leak must be a finite number, above 0 and at most 1; got 1.5"),
        (lambda: make(density=0), co.InputError,
            "density must be a finite number, above 0 and at most 1; got 0"),
        (lambda: make(radius="big"), co.InputError, "got 'big'"),
        (lambda: make().fit([data()[0]]), co.KindError,
            "fit expects batches (u, y), (u, y, lengths) or co.Batch; got Tensor"),
        (lambda: make().costates(*data()), co.InputError, "no readout yet"),
        (lambda: make(gamma=math.nan), co.InputError, "gamma must be"),
        (lambda: make(ridge=-1.0), co.InputError,
            "ridge must be a finite number, at least 0; got -1.0"),
        (lambda: make(input_scale=-1), co.InputError, "input_scale must be"),
        (lambda: make(washout=2.5), co.InputError,
            "washout must be a whole number, at least 0; got 2.5"),
        (lambda: make(degree=0), co.InputError, "degree must be"),
        (lambda: make(seed=-1), co.InputError, "seed must be"),
        (lambda: make(hidden=0), co.InputError, "hidden must be a positive integer"),
        (lambda: make(readout="evry"), co.InputError, "did you mean 'every'"),
        (lambda: make(expansion="square"), co.InputError, "did you mean 'squares'"),
        (lambda: make().predict(data()[0]), co.InputError, "no readout yet; call fit(u, y)"),
        (lambda: make().solve(), co.InputError, "there is no data yet"),
        (lambda: make().fit([]), co.InputError, "there is no data yet"),
        (lambda: fitted().solve(-1.0), co.InputError, "ridge must be"),
        (lambda: make().fit(data()[0]), co.KindError, "expects u and y, or an iterable"),
        (lambda: make().fit(data()[0], data()[1][:5]), co.InputError,
            "shape [5, 3, 2]; with readout='every' expected [12, 3, 2]"),
        (lambda: make(readout="last").fit(*data()), co.InputError,
            "expected [3, 2], or [3] of class numbers"),
        (lambda: make(washout=12).fit(*data()), co.InputError,
            "washout = 12 leaves out all steps of sequences of 12"),
        (lambda: make().fit(data()[0], data()[1] * torch.nan), co.InputError,
            "the target y holds NaN or inf"),
        (lambda: make().fit(data()[0], torch.full((12, 3), 2)), co.InputError,
            "classes must lie in 0..1; got 2..2"),
        (lambda: make().fit(co.Batch(*data(), weight=torch.ones(3))), co.InputError,
            "does not support mask or weight"),
        (lambda: make(expansion="rbf", ridge=0.0, gamma=1e-9).fit(*data(T=80)), co.NumericalError,
            "raise ridge"),
        (lambda: fitted(inputs=2).generate(data()[0], 0), co.InputError,
            "steps must be a positive integer; got 0"),
        (lambda: make(outputs=1).fit(*data(outputs=1)).generate(data()[0], 3), co.InputError,
            "has 1 outputs and 2 inputs"),
    ],
)  # fmt: skip
def test_bad_calls_are_refused_in_one_line(act, kind, words):
    with pytest.raises(kind) as error:
        act()
    assert words in str(error.value)
    assert "\n" not in str(error.value)

"""The classics among the examples, against theorems of Perez Jensen (2024), computed here again."""

import importlib
import itertools
import math
import re
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch
from scipy import optimize, signal, stats

from paths import EXAMPLES, ROOT

FOLDER = EXAMPLES / "classics"
NAMES = ("perceptron", "hopfield", "linear_models", "relu", "convolution", "descent", "programs")


@pytest.fixture(autouse=True)
def examples_first(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


def example(name):
    return importlib.import_module(name)


# 1. Threshold units


def test_gates_compute_what_their_names_say():
    gates = example("perceptron")
    for x in itertools.product((0, 1), repeat=2):
        expected = {
            "and": x[0] and x[1],
            "or": x[0] or x[1],
            "nor": not (x[0] or x[1]),
            "x1 and not x2": x[0] and not x[1],
        }
        for name, (sigma, theta) in gates.GATES.items():
            assert gates.neuron(sigma, theta, x) == expected[name]
        assert gates.xor(x) == (x[0] != x[1])


def test_no_single_neuron_is_exclusive_or():
    """Over all signs; thresholds matter only between the values that sigma'x takes."""
    gates = example("perceptron")
    inputs = list(itertools.product((0, 1), repeat=2))
    for sigma in itertools.product((-1, 1), repeat=2):
        for theta in np.arange(-2.5, 3):
            assert [gates.neuron(sigma, theta, x) for x in inputs] != [0, 1, 1, 0]


def separable_by_linear_programme(X, y):
    """Whether y_i w'x_i >= 1 for some w."""
    signed = -np.asarray(y)[:, None] * X
    found = optimize.linprog(
        np.zeros(X.shape[1]), A_ub=signed, b_ub=-np.ones(len(X)), bounds=(None, None)
    )
    return found.status == 0


@pytest.mark.parametrize(("s", "n"), [(1, 2), (3, 3), (4, 2), (5, 3)])
def test_covers_count_is_that_of_enumeration(s, n):
    gates = example("perceptron")
    X = np.random.default_rng(s).standard_normal((s, n))
    labellings = itertools.product((-1, 1), repeat=s)
    enumerated = sum(separable_by_linear_programme(X, y) for y in labellings)
    assert gates.counted(X, passes=500) == enumerated == gates.cover(s, n)


def test_covers_count_obeys_its_recursion():
    gates = example("perceptron")
    for n in range(2, 9):
        assert gates.cover(1, n) == 2
        assert gates.cover(2 * n, n) * 2 == 2 ** (2 * n)  # half of all labellings at s = 2n
        for s in range(1, 20):
            assert gates.cover(s, 1) == 2
            assert gates.cover(s + 1, n) == gates.cover(s, n) + gates.cover(s, n - 1)


# 2. The capacity of a Hopfield network


@pytest.mark.parametrize(("s", "n"), [(9, 50), (21, 101), (30, 200)])
def test_the_exact_probability_is_that_of_a_binomial_sum(s, n):
    memory = example("hopfield")
    count = (s - 1) * (n - 1)
    law = stats.binom(count, 0.5)
    values = 2 * np.arange(count + 1) - count
    expected = law.pmf(np.arange(count + 1)) @ ((values < 1 - n) + 0.5 * (values == 1 - n))
    assert memory.exact_probability(s, n) == pytest.approx(expected, rel=1e-8)
    by_normal_law = stats.norm.sf(math.sqrt(n / s))
    assert memory.probability(s, n) == pytest.approx(by_normal_law, rel=1e-12)


def test_signs_are_as_unstable_as_the_formula_says():
    """Counts of independent draws: a mean of 12 shares, with 4 standard errors of leeway."""
    memory = example("hopfield")
    for s, n in ((31, 151), (61, 201)):
        shares = np.array([memory.measured(s, n, draws=1)[0]])
        for seed in range(12):
            X = memory.random_patterns(100 + seed, s, n)
            W = X.T @ X - s * np.eye(n)
            shares = np.append(shares, (np.where(X @ W >= 0, 1, -1) != X).mean())
        error = shares.std(ddof=1) / math.sqrt(len(shares))
        assert abs(shares.mean() - memory.exact_probability(s, n)) < 4 * error


def test_the_normal_law_is_the_limit_and_the_bound_is_safe():
    memory = example("hopfield")
    ratios = []
    for n in (50, 200, 400):
        ratios.append(memory.exact_probability(n // 5, n) / memory.probability(n // 5, n))
    assert 0.7 < ratios[0] < ratios[1] < ratios[2] < 1
    assert ratios[2] > 0.95
    for n in (100, 1000, 10**4, 10**6):  # n P -> 0 at s = n / (2 log2 n)
        held = n / (2 * math.log2(n))
        assert n * memory.probability(held, n) < 0.03
        assert n * memory.probability(2 * held, n) > 0.3


def test_recall_breaks_down_beyond_the_capacity():
    memory = example("hopfield")
    below, above = memory.overlap(30, 400, recalled=6), memory.overlap(100, 400, recalled=6)
    assert below > 0.99
    assert above < 0.7


def test_digits_are_recalled():
    pytest.importorskip("sklearn")
    import coadjoint as co

    memory = example("hopfield")
    digits = memory.digit_patterns()
    network = co.classics.Hopfield().fit(digits)
    assert np.abs(network.crosstalk()).max() < 63 / 64  # so that every digit is stable
    assert (network.predict(digits) == digits).all()
    assert memory.recall_rate(network, digits, 0.1, draws=10) > 0.9
    assert memory.count_stable(digits) == 4
    means = memory.mean_digits()
    W = means.T @ means - 10 * np.eye(64)
    stable = [all((1 if W[i] @ x >= 0 else -1) == x[i] for i in range(64)) for x in means]
    assert memory.count_stable(means) == sum(stable) == 1  # all ten are too much alike


# 3. Linear models


def weights_of(net):
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy()


def test_one_step_solves_least_squares():
    linear_model = pytest.importorskip("sklearn.linear_model")
    linear = example("linear_models")
    X, y = linear.least_squares_data(seed=3, s=57, n=5)
    net = linear.linear_chain(5, "identity")
    linear.newton(net, linear.batch_of(X, y), "squared", 1)
    one = np.column_stack([X, np.ones(57)])
    closed = np.linalg.inv(one.T @ one) @ one.T @ y
    np.testing.assert_allclose(weights_of(net), closed, rtol=1e-10)
    theirs = linear_model.LinearRegression().fit(X, y)
    np.testing.assert_allclose(weights_of(net), [*theirs.coef_, theirs.intercept_], rtol=1e-10)


def test_logistic_regression_is_that_of_scikit_learn():
    linear_model = pytest.importorskip("sklearn.linear_model")
    linear = example("linear_models")
    X, y = linear.logistic_data(seed=2, s=97, n=3)
    net = linear.linear_chain(3, "sigmoid")
    batch = linear.batch_of(X, y)
    norms = linear.newton(net, batch, "binary-cross-entropy", 8)
    assert norms[-1] < 1e-12
    theirs = linear_model.LogisticRegression(C=np.inf, tol=1e-12, max_iter=5000).fit(X, y)
    expected = [*theirs.coef_[0], *theirs.intercept_]
    np.testing.assert_allclose(weights_of(net), expected, rtol=1e-4)


def test_the_gradient_of_logistic_regression_is_that_of_the_notes():
    """The mean of (sigma(w'x) - y) x, at other weights than zero."""
    import coadjoint as co

    linear = example("linear_models")
    X, y = linear.logistic_data(seed=5, s=31, n=7)
    net = linear.linear_chain(7, "sigmoid")
    theta = np.random.default_rng(0).standard_normal(8)
    torch.nn.utils.vector_to_parameters(torch.as_tensor(theta), net.parameters())
    found = co.BP()(net, linear.batch_of(X, y), "binary-cross-entropy")
    a = X @ theta[:7] + theta[7]
    residual = 1 / (1 + np.exp(-a)) - y
    ours = np.concatenate([g.numpy().ravel() for g in found.gradient.values()])
    np.testing.assert_allclose(ours, [*(residual @ X / 31), residual.mean()], rtol=1e-12)
    signed = (2 * y - 1) * a
    assert float(found.losses.mean()) == pytest.approx(np.log1p(np.exp(-signed)).mean(), rel=1e-12)


# 4. ReLUs


def patterns_around_vertices(W, b):
    """The activation patterns of lines in general position: every region of R^2 has a corner."""
    found = set()
    for i, j in itertools.combinations(range(len(W)), 2):
        corner = np.linalg.solve(W[[i, j]], -b[[i, j]])
        signs = W @ corner + b > 0
        for here in itertools.product((False, True), repeat=2):
            signs[[i, j]] = here
            found.add(tuple(signs))
    return found


@pytest.mark.parametrize("m", [2, 3, 5, 7])
def test_a_layer_has_as_many_regions_as_zaslavsky_says(m):
    relu = example("relu")
    draw = np.random.default_rng(m)
    W, b = draw.standard_normal((m, 2)), draw.standard_normal(m)
    corners = patterns_around_vertices(W, b)
    net = relu.relu_chain((W, b), (np.ones((1, m)), [0.0]))
    plane = 1e4 * (2 * relu.SQUARE - 1)
    expected = 1 + m + m * (m - 1) // 2
    assert len(relu.regions(net, plane)) == len(corners) == relu.most_regions(m, 2) == expected


def test_parallel_hyperplanes_have_fewer_regions():
    relu = example("relu")
    W, b = np.array([[1.0, 0.0]] * 3), np.array([-0.2, -0.4, -0.6])
    assert len(relu.regions(relu.relu_chain((W, b), (np.ones((1, 3)), [0.0])))) == 4
    assert relu.most_regions(3, 2) == 7
    assert relu.most_regions(3, 5) == 2**3


def test_folds_reach_the_bound_of_montufar_in_the_plane():
    """Distinct activation patterns on a fine grid of the square, and polygons, are counted."""
    relu = example("relu")
    for m, layers in ((4, 2), (5, 2), (6, 2)):
        net = relu.relu_chain(*relu.folding_layers(m, 2, layers), (np.ones((1, m)), [0.0]))
        bound = (1 + m + m * (m - 1) // 2) * (m // 2) ** (2 * (layers - 1))
        assert relu.deep_regions(m, 2, layers) == bound
        assert len(relu.regions(net)) == bound
    axis = (np.arange(400) + 0.37) / 400
    grid = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    net = relu.relu_chain(*relu.folding_layers(4, 2, 2), (np.ones((1, 4)), [0.0]))
    x = torch.as_tensor(grid)
    with torch.no_grad():
        units = [layer for layer in net(x).x if layer.shape[1] == 4][1::2]
    patterns = np.concatenate([(unit > 0).numpy() for unit in units], 1)
    assert len(np.unique(patterns, axis=0)) == 44


def test_regions_that_meet_have_other_slopes():
    """So that activation regions are linear regions, which theorem 2.9 counts."""
    relu = example("relu")
    net = relu.relu_chain(*relu.folding_layers(4, 2, 2), (np.array([[1.0, 2.0, 3.0, 4.0]]), [0.0]))
    sides = []
    for part in relu.regions(net):
        edges = np.roll(part, -1, axis=0) - part
        normals = np.column_stack([-edges[:, 1], edges[:, 0]])
        normals /= np.linalg.norm(normals, axis=1, keepdims=True)
        middles = part + edges / 2
        is_inside = (np.abs(middles - 0.5) < 0.4999).all(1)
        sides.append(np.stack([middles + 1e-7 * normals, middles - 1e-7 * normals])[:, is_inside])
    x = torch.as_tensor(np.concatenate(sides, 1)).reshape(-1, 2).requires_grad_()
    (slopes,) = torch.autograd.grad(net(x).a.sum(), x)
    one, other = slopes.reshape(2, -1, 2)
    assert len(one) > 100
    assert (one - other).norm(dim=1).min() > 0.1


@pytest.mark.parametrize(("m", "layers"), [(3, 1), (3, 3), (5, 2)])
def test_folds_reach_the_bound_of_montufar_on_a_line(m, layers):
    """Linear pieces by their slopes: m^(L - 1) (m + 1) of them, on 0..1."""
    relu = example("relu")
    out = np.cumsum(np.ones((1, m)), 1)  # unequal weights, so that slopes differ
    net = relu.relu_chain(*relu.folding_layers(m, 1, layers), (out, [0.0]))
    x = np.linspace(0, 1, 40 * m**layers + 1)
    with torch.no_grad():
        y = net(torch.as_tensor(x)[:, None]).a.numpy()[:, 0]
    slopes = np.round(np.diff(y) / np.diff(x), 6)
    changes = np.flatnonzero(np.diff(slopes))
    pieces = 1 + np.count_nonzero(np.diff(changes, prepend=-5) > 1)  # a knot between two points
    assert pieces == m ** (layers - 1) * (m + 1) == relu.deep_regions(m, 1, layers)


def test_piecewise_linear_functions_are_sums_of_relus():
    relu = example("relu")
    draw = np.random.default_rng(1)
    knots, values = np.sort(draw.uniform(-2, 3, 8)), draw.standard_normal(8)
    net = relu.sum_of_relus(knots, values)
    x = np.linspace(-4, 5, 333)
    with torch.no_grad():
        found = net(torch.as_tensor(x)[:, None]).a.numpy()[:, 0]
    expected = np.interp(x, knots, values)
    first = (values[1] - values[0]) / (knots[1] - knots[0])
    last = (values[-1] - values[-2]) / (knots[-1] - knots[-2])
    expected = np.where(x < knots[0], values[0] + first * (x - knots[0]), expected)
    expected = np.where(x > knots[-1], values[-1] + last * (x - knots[-1]), expected)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert net.maps[0].out_features == 8  # m + 1 for m = 7 pieces


def test_barrons_error_falls_as_one_over_m():
    """It lies below (2 r C_f)^2 / m, and m times it hardly changes; C_f by numbers drawn here."""
    relu = example("relu")
    for n in (2, 7):
        lengths = np.linalg.norm(np.random.default_rng(0).standard_normal((20_000, n)), axis=1)
        assert relu.barron_constant(n) == pytest.approx(lengths.mean(), rel=0.02)
        scaled = [m * relu.barron_error(m, n, draws=12) for m in (11, 44, 176)]
        assert max(scaled) < (2 * relu.barron_constant(n)) ** 2
        assert max(scaled) < 1.8 * min(scaled)


def test_units_of_barron_average_to_the_function():
    relu = example("relu")
    x = relu.points_in_ball(9, 3, 1.3, seed=4)
    assert (np.linalg.norm(x, axis=1) <= 1.3).all()
    with torch.no_grad():
        g = relu.barron_chain(40_000, 3, 1.3, seed=1)(torch.as_tensor(x)).a.numpy()[:, 0]
    np.testing.assert_allclose(g, np.exp(-np.square(x).sum(1) / 2), atol=0.05)


# 5. Convolution and descent


@pytest.mark.parametrize(("n", "m"), [(1, 1), (7, 3), (5, 9), (31, 4)])
def test_convolution_by_matrix_fft_and_conv1d(n, m):
    convolution = example("convolution")
    draw = np.random.default_rng(n)
    f, h = draw.standard_normal(n), draw.standard_normal(m)
    expected = [sum(h[t] * f[u - t] for t in range(m) if 0 <= u - t < n) for u in range(n + m - 1)]
    H = convolution.toeplitz(h, n)
    assert H.shape == (n + m - 1, n)
    np.testing.assert_allclose(H @ f, expected, atol=1e-13)
    np.testing.assert_allclose(convolution.by_fft(f, h), expected, atol=1e-13)
    with torch.no_grad():
        by_chain = convolution.conv_chain(h)(torch.as_tensor(f)[None, None]).a.numpy().ravel()
    np.testing.assert_allclose(by_chain, expected, atol=1e-13)
    np.testing.assert_allclose(
        convolution.toeplitz(f, m) @ h, expected, atol=1e-13
    )  # f * h = h * f


def test_the_costate_of_a_convolution_is_a_correlation():
    convolution = example("convolution")
    draw = np.random.default_rng(8)
    f, h = draw.standard_normal(13), draw.standard_normal(4)
    y = draw.standard_normal(16)
    above, below = convolution.input_costate(f, h, y)
    np.testing.assert_allclose(above, 2 * (np.convolve(f, h) - y), rtol=1e-12)
    np.testing.assert_allclose(below, signal.correlate(above, h, mode="valid"), rtol=1e-10)


def test_lanczos_finds_the_extreme_eigenvalues():
    descent = example("descent")
    for s, n in ((23, 5), (7, 12)):
        net, batch, loss = descent.least_squares(s, n, seed=1)
        one = np.column_stack([batch.u.numpy(), np.ones(s)])
        known = np.linalg.eigvalsh(2 * one.T @ one / s)
        ritz = descent.spectrum(net, batch, loss, steps=min(s, n + 1))
        assert float(ritz[-1]) == pytest.approx(known[-1], rel=1e-9)
        assert float(ritz[0]) == pytest.approx(known[known > 1e-9].min(), rel=1e-6)


def check_rates(h, g, lowest, L, mu=None):
    """Sufficient decrease, lemma 3.2 and lemma 3.4, up to rounding."""
    slack = 1e-13 * abs(h[0])
    assert (h[1:] <= h[:-1] - g[:-1] / (2 * L) + slack).all()
    T = np.arange(1, len(h))
    assert (np.minimum.accumulate(g)[:-1] <= 2 * L * (h[0] - lowest) / T).all()
    if mu is not None:
        assert (g / 2 >= mu * (h - lowest) - slack).all()
        rate = (1 - mu / L) ** np.arange(len(h))
        assert (h - lowest <= rate * (h[0] - lowest) + slack).all()


@pytest.mark.parametrize(("s", "n"), [(41, 5), (9, 14)])
def test_descent_on_least_squares_keeps_its_rates(s, n):
    """With s < n + 1 the function is PL but not strongly convex."""
    descent = example("descent")
    net, batch, loss = descent.least_squares(s, n, seed=2)
    ritz = descent.spectrum(net, batch, loss, steps=min(s, n + 1))
    X, y = np.column_stack([batch.u.numpy(), np.ones(s)]), batch.y.numpy()[:, 0]
    lowest = np.mean((X @ np.linalg.lstsq(X, y, rcond=None)[0] - y) ** 2)
    assert descent.lowest(net, batch, loss) == pytest.approx(lowest, abs=1e-14)
    h, g = descent.descend(net, batch, loss, float(ritz[-1]) * (1 + 1e-12), 60)
    check_rates(h, g, lowest, float(ritz[-1]), float(ritz[0]))
    w = np.zeros(n + 1)  # the same descent, written here
    for value, square in zip(h, g, strict=True):
        slope = 2 * X.T @ (X @ w - y) / s
        assert value == pytest.approx(np.mean((X @ w - y) ** 2), rel=1e-9, abs=1e-14)
        assert square == pytest.approx(slope @ slope, rel=1e-6, abs=1e-20)
        w -= slope / float(ritz[-1])


def test_descent_on_logistic_regression_keeps_its_rate():
    """Its Hessian is largest at zero: sigma' is at most 1/4, and is 1/4 there."""
    descent = example("descent")
    net, batch, loss = descent.logistic()
    X = np.column_stack([batch.u.numpy(), np.ones(len(batch.u))])
    L = float(descent.spectrum(net, batch, loss)[-1])
    assert pytest.approx(np.linalg.eigvalsh(X.T @ X / (4 * len(X)))[-1], rel=1e-9) == L
    lowest = descent.lowest(net, batch, loss)
    h, g = descent.descend(net, batch, loss, L * (1 + 1e-12), 60)
    check_rates(h, g, lowest, L)


def test_descent_on_a_function_that_is_not_convex_keeps_its_rates():
    """h = x^2 + 3 sin^2 x, h' = 2x + 3 sin 2x, h'' = 2 + 6 cos 2x: L = 8."""
    descent = example("descent")
    for start in (5.0, -2.3):
        assert float(descent.spectrum(*descent.wave(start))[-1]) == pytest.approx(
            2 + 6 * math.cos(2 * start), rel=1e-12
        )
        h, g = descent.descend(*descent.wave(start), 8, 30)
        assert h[0] == pytest.approx(start**2 + 3 * math.sin(start) ** 2, rel=1e-12)
        assert g[0] == pytest.approx((2 * start + 3 * math.sin(2 * start)) ** 2, rel=1e-12)
        x = np.linspace(-6, 6, 5001)[:-1] + 1e-4
        ratios = (2 * x + 3 * np.sin(2 * x)) ** 2 / (2 * (x**2 + 3 * np.sin(x) ** 2))
        assert ratios.min() > 1 / 32
        check_rates(h, g, 0.0, 8.0, ratios.min())


# The page


def printed_on_the_page(name):
    page = (ROOT / "docs" / "classics.md").read_text(encoding="utf-8")
    pattern = rf"^\$ python examples/classics/{name}\.py --out docs\n(.*?)^```"
    (block,) = re.findall(pattern, page, re.M | re.S)
    return block


NUMBER = r"\d+(?:\.\d+)?(?:e[-+]\d+)?"


def check_numbers(found, page):
    """Equal but for one unit of the last printed digit; what is below 1e-10 is rounding."""
    for ours, theirs in zip(re.findall(NUMBER, found), re.findall(NUMBER, page), strict=True):
        ours, theirs = Decimal(ours), Decimal(theirs)
        is_rounding = max(ours, theirs) < Decimal("1e-10")
        is_whole = theirs.as_tuple().exponent == 0
        leeway = 0 if is_whole else Decimal(1).scaleb(theirs.as_tuple().exponent)
        assert is_rounding or abs(ours - theirs) <= leeway


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_example_prints_what_the_page_says_and_draws_its_figure(
    name, monkeypatch, tmp_path, capsys
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path)])
    example(name).main()
    (path,) = tmp_path.iterdir()
    found = capsys.readouterr().out.replace(str(tmp_path), "docs")
    page = printed_on_the_page(name)
    assert re.sub(NUMBER, "#", found) == re.sub(NUMBER, "#", page)
    check_numbers(found, page)
    drawn = (ROOT / "docs" / path.name).read_text(encoding="utf-8")
    assert path.read_text(encoding="utf-8").count("<g id=") == drawn.count("<g id=")

"""Galvan's bounds (2016, (3.24) to (3.33)) against the recursion they are drawn from,
against descent with noise on a quadratic, and against vectors.
"""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import coadjoint as co
from coadjoint.diagnostics import convergence_bounds, direction_distance

F64 = torch.float64


def pair(seed, scale):
    """A direction and a gradient of two parameters, at odd sizes, and both as one vector."""
    rng = torch.Generator().manual_seed(seed)
    g = {"W": torch.randn(3, 5, dtype=F64, generator=rng), "b": torch.randn(7, generator=rng)}
    d = {name: scale * (y + 0.7 * torch.randn(y.shape, generator=rng)) for name, y in g.items()}
    flat = [np.concatenate([y.double().numpy().ravel() for y in v.values()]) for v in (d, g)]
    return d, g, *flat


@pytest.mark.parametrize(("seed", "scale"), [(0, 1.0), (1, 0.3), (2, 4.0), (3, -1.0)])
def test_the_distance_is_that_of_the_vectors(seed, scale):
    """(3.28), (3.29)"""
    d, g, v, w = pair(seed, scale)
    far = direction_distance(d, g)
    length = np.linalg.norm(w)
    cosine = v @ w / np.linalg.norm(v) / length
    assert far.alpha == pytest.approx(np.linalg.norm(v) / length, rel=1e-12)
    assert far.cosine == pytest.approx(cosine, rel=1e-12)
    assert far.distance == pytest.approx(np.linalg.norm(v - w) / length, rel=1e-12)
    for alpha in (0.0, 0.5, 1.0, 3.0):
        scaled = alpha * length * v / np.linalg.norm(v)
        assert far.at(alpha) == pytest.approx(np.linalg.norm(scaled - w) / length, rel=1e-12)
        formula = math.sqrt(1 + alpha**2 - 2 * alpha * cosine)
        assert far.at(alpha) == pytest.approx(formula, rel=1e-9)
    assert far.at(1.0) == pytest.approx(co.optimisers.directions.distance(d, g), rel=1e-9)


def test_the_best_length_is_the_cosine():
    far = direction_distance(*pair(0, 2.0)[:2])
    best = far.at(far.cosine)
    assert best == pytest.approx(math.sqrt(1 - far.cosine**2), rel=1e-12)
    assert all(far.at(far.cosine + h) > best for h in (-0.1, -1e-3, 1e-3, 0.1))


def test_nearly_the_same_direction_keeps_its_digits():
    g = {"W": torch.tensor([1.0, 0.0], dtype=F64)}
    d = {"W": torch.tensor([1.0, 1e-9], dtype=F64)}
    assert direction_distance(d, g).distance == pytest.approx(1e-9, rel=1e-6)
    assert direction_distance(g, g).distance == 0


def test_a_zero_has_no_direction():
    g = {"W": torch.zeros(2)}
    assert math.isnan(direction_distance(g, {"W": torch.ones(2)}).alpha)
    assert math.isnan(direction_distance({"W": torch.ones(2)}, g).distance)
    with pytest.raises(co.InputError, match=r"the same parameters; got W and V"):
        direction_distance(g, {"V": g["W"]})


GRID = list(itertools.product((0.3, 1.0, 5.0), (0.0, 0.4, 0.9), (0.51, 0.7, 1.0, 5.0), (0.0, 2.0)))


@pytest.mark.parametrize(("c", "share", "factor", "start"), GRID)
def test_the_bound_holds_for_the_worst_case_of_the_recursion(c, share, factor, start):
    """(3.22): a_{j+1} <= (1 - 2 c_bar gamma) a_j + gamma^2 M^2 / 2, in fractions; a_j >= 0 may be
    anything below its bound, so where the factor is negative a_j = 0 is the worst.
    """
    L, M2 = 2 * c, 1.7
    mu = share * c / L
    c_bar = c - mu * L
    bounds = convergence_bounds(c, L, mu, M2, start, factor / c_bar)
    exact = [Fraction(x) for x in (bounds.c_bar, bounds.beta, M2)]
    c_bar, beta, M2 = exact
    largest = Fraction(start) ** 2 / 2
    for j in range(1, 60):
        assert 2 * largest <= Fraction(bounds.distance(j)) * (1 + Fraction(1, 10**12))
        decay = 1 - 2 * c_bar * beta / j
        largest = (decay * largest if decay > 0 else 0) + beta**2 * M2 / (2 * j**2)
        largest = largest.limit_denominator(10**15)


def test_formulas_are_those_of_the_text():
    c, L, mu, M2, start, beta = 3.0, 4.0, 0.5, 2.0, 1.5, 1.25
    bounds = convergence_bounds(c, L, mu, M2, start, beta)
    c_bar = c * (1 - mu * L / c)
    assert bounds.c_bar == pytest.approx(c_bar)
    assert bounds.Q_printed == max(beta**2 * M2 / (2 * c_bar - 1), start**2)  # (3.25)
    terms = (beta**2 * M2 / (2 * c_bar * beta - 1), 2 * beta**2 * M2, start**2)
    assert pytest.approx(max(terms)) == bounds.Q
    assert bounds.distance(7) == bounds.Q / 7  # (3.24)
    assert bounds.excess(7) == pytest.approx(L / 2 * bounds.Q / 7)  # (3.26) of (3.24)
    assert convergence_bounds(0.4, 1.0, 0.0, 1.0, 0.0).Q_printed == math.inf
    far = convergence_bounds(c, L, mu, M2, 1000.0)
    assert (far.Q, far.Q_printed) == (1e6, 1e6)


def test_descent_with_noise_stays_below_the_bound_and_above_the_printed_one():
    """f = ||x||^2 / 2 in three dimensions, started at its minimum; steps of size beta / j."""
    rng = np.random.default_rng(0)
    M2, beta = 1.0, 3.0
    bounds = convergence_bounds(1.0, 1.0, 0.0, M2, 0.0, beta)
    x = np.zeros((4000, 3))
    for j in range(1, 41):
        squares = (x**2).sum(1).mean()
        assert squares <= 1.1 * bounds.distance(j)
        assert (squares / 2) <= 1.1 * bounds.excess(j)
        if j == 2:
            assert squares > bounds.Q_printed / j
        noise = rng.standard_normal(x.shape) * math.sqrt(M2 / 3)
        x -= beta / j * (x + noise)


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"convexity": 0.0}, "the convexity c must be"),
        ({"smoothness": 0.5}, "the smoothness L must be"),
        ({"mu": 0.5}, "mu must be"),
        ({"mu": -0.1}, "mu must be"),
        ({"second_moment": -1.0}, "the second moment"),
        ({"start": math.nan}, "the distance of the start"),
        ({"beta": 0.5}, "beta must be"),
    ],
)
def test_what_the_proof_excludes_is_refused(chosen, words):
    given = {"convexity": 1.0, "smoothness": 2.0, "mu": 0.0, "second_moment": 1.0, "start": 1.0}
    with pytest.raises(co.InputError, match=words):
        convergence_bounds(**(given | chosen))

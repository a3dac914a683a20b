"""The Hopfield network against the formulas of Perez Jensen (2024), written out as sums here."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import coadjoint as co


def signs(seed, s, n):
    return np.random.default_rng(seed).choice([-1, 1], (s, n))


def hebbian(patterns):
    """w_ij = (1/n) sum_t x_ti x_tj, w_ii = 0, entry by entry."""
    s, n = patterns.shape
    w = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i != j:
                w[i, j] = sum(patterns[t, i] * patterns[t, j] for t in range(s)) / n
    return w


def energy(w, b, x):
    n = len(x)
    pairs = sum(w[i, j] * x[i] * x[j] for i in range(n) for j in range(n))
    return -pairs / 2 + sum(b[i] * x[i] for i in range(n))


@st.composite
def memories(draw):
    n = draw(st.integers(1, 13))
    row = st.lists(st.sampled_from([-1, 1]), min_size=n, max_size=n)
    patterns = np.array(draw(st.lists(row, min_size=1, max_size=6)))
    bias = draw(st.lists(st.integers(-8, 8), min_size=n, max_size=n))
    return patterns, np.array(bias) / 4, np.array(draw(row)), draw(st.integers(0, 9))


@given(memories())
def test_energy_never_rises_and_recall_ends_where_nothing_changes(case):
    patterns, bias, x, seed = case
    memory = co.classics.Hopfield(bias=bias, seed=seed).fit(patterns)
    w = hebbian(patterns)
    np.testing.assert_allclose(memory.weights_, w, atol=1e-15)
    path = memory.path(x)
    assert path[0].tolist() == x.tolist()
    assert (np.abs(np.diff(path, axis=0)).sum(1) == 2).all()  # one unit at a time
    along = [energy(w, bias, state) for state in path]
    np.testing.assert_allclose(memory.energy(path), along, atol=1e-12)
    assert (np.diff(along) <= 1e-12).all()
    last = path[-1]
    assert memory.predict([x])[0].tolist() == last.tolist()
    for i in range(len(x)):  # every unit has the value of lower energy, or +1
        up, down = last.copy(), last.copy()
        up[i], down[i] = 1, -1
        fall = energy(w, bias, down) - energy(w, bias, up)
        assert last[i] == (1 if fall > -1e-12 else -1)
        assert memory.field([last])[0, i] == pytest.approx(fall / 2, abs=1e-12)


def test_crosstalk_is_what_other_patterns_add():
    X = signs(0, 5, 17)
    s, n = X.shape
    memory = co.classics.Hopfield(bias=0.25).fit(X)
    expected = np.zeros((s, n))
    for t in range(s):
        for i in range(n):
            for r in set(range(s)) - {t}:
                for j in set(range(n)) - {i}:
                    expected[t, i] += X[r, i] * X[r, j] * X[t, j] / n
    np.testing.assert_allclose(memory.crosstalk(), expected, atol=1e-14)
    np.testing.assert_allclose(memory.field(X), (n - 1) / n * X + expected - 0.25, atol=1e-14)


def test_signs_flip_as_often_as_the_formula_says():
    """P = 1/2 (1 - erf(sqrt(n / 2s))), at three ratios of s to n; 4 standard errors of leeway."""
    n = 401
    for s in (57, 81, 161):
        flipped = []
        for seed in range(6):
            X = signs(seed, s, n)
            flipped.append((co.classics.Hopfield().fit(X).field(X) * X < 0).mean())
        expected = (1 - math.erf(math.sqrt(n / (2 * s)))) / 2
        error = np.std(flipped, ddof=1) / math.sqrt(len(flipped))
        # (n - 1)/n instead of 1 moves P by less than 1.5 % here
        assert np.mean(flipped) == pytest.approx(expected, abs=4 * error + 0.015 * expected)


def test_a_field_of_zero_is_exactly_zero_and_gives_plus_one():
    """1/n is rounded, and must not turn a tie."""
    n = 49
    X = signs(3, 4, n)
    memory = co.classics.Hopfield().fit(X)
    states = signs(4, 200, n)
    sums = X.T @ X - 4 * np.eye(n, dtype=int)
    tied = states @ sums == 0
    assert tied.sum() > 20
    assert ((memory.field(states) == 0) == tied).all()
    for state in states[tied.any(1)][:5]:
        for before, after in itertools.pairwise(memory.path(state)):
            i = int(np.argmax(before != after))
            assert after[i] == (1 if before @ sums[i] >= 0 else -1)


def test_few_patterns_are_recalled_from_corrupted_ones():
    n = 200
    X = signs(7, 5, n)
    memory = co.classics.Hopfield().fit(X)
    corrupted = X.copy()
    at = np.random.default_rng(8).permutation(n)[:30]
    corrupted[:, at] *= -1
    assert (memory.predict(corrupted) == X).all()
    assert (memory.predict(-X) == -X).all()  # opposites have the same energy


def test_parameters_are_those_of_scikit_learn():
    base = pytest.importorskip("sklearn.base")
    memory = base.clone(co.classics.Hopfield(max_iter=7, seed=3))
    assert memory.get_params() == {"bias": 0.0, "max_iter": 7, "seed": 3}
    assert repr(memory) == "Hopfield(bias=0.0, max_iter=7, seed=3)"


def test_it_is_the_last_step_of_a_pipeline():
    preprocessing = pytest.importorskip("sklearn.preprocessing")
    pipeline = pytest.importorskip("sklearn.pipeline")
    X = signs(7, 3, 100)
    cut = preprocessing.FunctionTransformer(np.sign)
    pipe = pipeline.make_pipeline(cut, co.classics.Hopfield()).fit(0.3 * X)
    noisy = 0.1 * X
    noisy[:, :9] *= -1
    assert (pipe.predict(noisy) == X).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda h: h.fit([[0, 1]]), "-1 and \\+1 alone"),
        (lambda h: h.fit([1, -1]), "X must be rows of numbers"),
        (lambda h: h.predict([[1]]), "not fitted yet"),
        (lambda h: h.crosstalk(), "not fitted yet"),
        (lambda h: h.fit([[1, -1]]).path([1, -1, 1]), "3 columns; expected 2"),
        (lambda h: h.set_params(bias=[1, 2]).fit([[1]]), "bias must be a finite number or 1"),
        (lambda h: h.set_params(bias="x").fit([[1]]), "bias must be .* got 'x'"),
        (lambda h: h.set_params(seed=-1).fit([[1, -1]]).path([1, 1]), "seed"),
    ],
)
def test_what_cannot_be_used_is_refused(call, words):
    with pytest.raises(co.InputError, match=words):
        call(co.classics.Hopfield())


def test_too_few_passes_are_an_error():
    memory = co.classics.Hopfield(max_iter=1).fit(signs(0, 2, 9))
    with pytest.raises(co.NumericalError, match="within 1 passes: raise max_iter"):
        memory.predict(signs(1, 1, 9))

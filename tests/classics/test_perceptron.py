"""The perceptron against Algorithm 1 and Novikoff's theorem, both written out here."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import coadjoint as co


def algorithm_1(X, y, intercept, passes):
    """Algorithm 1 of Perez Jensen (2024) in exact arithmetic: w, b and the number of updates."""
    X = [[Fraction(value) for value in row] for row in X]
    w, b, updates = [Fraction(0)] * len(X[0]), Fraction(0), 0
    for _ in range(passes):
        mistake = False
        for x, sign in zip(X, y, strict=True):
            z = sum(p * q for p, q in zip(w, x, strict=True)) + b
            f = (z > 0) - (z < 0)
            if f != sign:
                w = [p + sign * q for p, q in zip(w, x, strict=True)]
                b += sign * intercept
                mistake = True
                updates += 1
        if not mistake:
            return w, b, updates, True
    return w, b, updates, False


def separable(seed, s, n, gamma):
    """Points that the unit vector w* separates with margin gamma, at least."""
    draw = np.random.default_rng(seed)
    w = draw.standard_normal(n)
    w /= np.linalg.norm(w)
    X = draw.standard_normal((s, n))
    y = np.where(X @ w > 0, 1, -1)
    return X + gamma * y[:, None] * w, y, w


whole = st.integers(-4, 4)


@given(
    st.lists(st.tuples(whole, whole, whole), min_size=2, max_size=7),
    st.integers(1, 127),
    st.booleans(),
)
@pytest.mark.filterwarnings("ignore:the perceptron still made mistakes")
def test_it_is_algorithm_1(X, bits, intercept):
    y = [1 if bits >> i & 1 else -1 for i in range(len(X))]
    if len(set(y)) < 2:
        return
    unit = co.classics.Perceptron(fit_intercept=intercept, max_iter=9).fit(X, y)
    w, b, updates, converged = algorithm_1(X, y, intercept, 9)
    assert unit.coef_.tolist() == [[float(v) for v in w]]
    assert unit.intercept_.tolist() == [float(b)]
    assert (unit.mistakes_, unit.converged_) == (updates, converged)


@pytest.mark.parametrize("gamma", [0.03, 0.1, 0.7])
@pytest.mark.parametrize(("s", "n"), [(31, 3), (57, 11)])
def test_mistakes_are_at_most_those_of_novikoff(s, n, gamma):
    """Theorem 1.3, and the two lemmas: w*'w >= t gamma, ||w|| <= R sqrt(t)."""
    for seed in range(5):
        X, y, best = separable(seed, s, n, gamma)
        unit = co.classics.Perceptron(fit_intercept=False, max_iter=10**6).fit(X, y)
        R, reached, t = np.linalg.norm(X, axis=1).max(), (y * (X @ best)).min(), unit.mistakes_
        assert unit.converged_
        assert t <= np.floor(R**2 / reached**2)
        assert best @ unit.coef_[0] >= t * reached * (1 - 1e-12)
        assert np.linalg.norm(unit.coef_) <= R * np.sqrt(t) * (1 + 1e-12)


def test_the_bound_is_reached_by_a_single_direction():
    """R = gamma: at most one mistake, and the first pass always makes one."""
    X = np.array([[3.0, 4.0], [-3.0, -4.0]])
    assert co.classics.Perceptron(fit_intercept=False).fit(X, [1, -1]).mistakes_ == 1


def test_with_an_intercept_the_theorem_holds_for_x_and_1():
    X, y, best = separable(3, 41, 5, 0.2)
    X = X + 0.7 * best  # now y = sgn(best'x - 0.7)
    extended = np.column_stack([X, np.ones(41)])
    normal = np.append(best, -0.7) / np.hypot(1, 0.7)
    bound = np.square(extended).sum(1).max() / (y * (extended @ normal)).min() ** 2
    unit = co.classics.Perceptron(max_iter=10**6).fit(X, y)
    without = co.classics.Perceptron(fit_intercept=False, max_iter=10**6).fit(extended, y)
    assert unit.mistakes_ == without.mistakes_ <= bound
    assert unit.coef_[0].tolist() + unit.intercept_.tolist() == without.coef_[0].tolist()


def test_margin_is_the_least_signed_distance():
    X, y, _ = separable(1, 29, 7, 0.3)
    unit = co.classics.Perceptron().fit(X, y)
    w, b = unit.coef_[0], unit.intercept_[0]
    feet = X - ((X @ w + b) / (w @ w))[:, None] * w  # nearest points of the hyperplane
    np.testing.assert_allclose(feet @ w + b, 0, atol=1e-12)
    assert unit.margin(X, y) == pytest.approx(np.linalg.norm(X - feet, axis=1).min(), rel=1e-12)
    assert unit.margin(X, y) > 0
    assert unit.margin(X, -y) < 0
    assert unit.score(X, y) == 1
    assert unit.score(X, -y) == 0


def test_xor_is_not_separable():
    X, y = [[0, 0], [1, 1], [0, 1], [1, 0]], [1, 1, -1, -1]
    with pytest.warns(UserWarning, match="mistakes in pass 50: the classes may not be separable"):
        unit = co.classics.Perceptron(max_iter=50).fit(X, y)
    assert not unit.converged_
    assert unit.n_iter_ == 50


def test_on_the_hyperplane_the_first_class_is_predicted():
    unit = co.classics.Perceptron(fit_intercept=False).fit([[3.0, 0.0], [-3.0, 0.0]], ["b", "a"])
    assert unit.predict([[0.0, 5.0], [1e-9, 5.0]]).tolist() == ["a", "b"]


@pytest.mark.filterwarnings("ignore:the perceptron still made mistakes")
def test_weights_of_zero_have_no_margin():
    unit = co.classics.Perceptron(max_iter=1).fit([[0.0], [0.0]], [0, 1])
    with pytest.raises(co.InputError, match="define no hyperplane"):
        unit.margin([[0.0]], [1])


def test_labels_may_be_of_any_kind():
    X, y, _ = separable(2, 25, 3, 0.4)
    words = np.where(y > 0, "yes", "no")
    unit = co.classics.Perceptron().fit(X, words)
    assert unit.classes_.tolist() == ["no", "yes"]
    assert (unit.predict(X) == words).all()


def test_it_works_with_scikit_learn():
    pytest.importorskip("sklearn")
    from sklearn.base import clone
    from sklearn.linear_model import Perceptron
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    X, y, _ = separable(4, 60, 3, 0.5)
    unit = co.classics.Perceptron(max_iter=77)
    assert clone(unit).get_params() == {"fit_intercept": True, "max_iter": 77}
    pipe = make_pipeline(StandardScaler(), unit).fit(X, y)
    assert pipe.score(X, y) == 1
    assert cross_val_score(unit, X, y, cv=3).min() > 0.8
    assert GridSearchCV(unit, {"fit_intercept": [True, False]}, cv=3).fit(X, y).best_score_ > 0.8
    theirs = Perceptron(shuffle=False, tol=None, max_iter=200).fit(X, y)
    assert unit.fit(X, y).mistakes_ > 0
    np.testing.assert_allclose(theirs.coef_, unit.coef_, rtol=1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.fit([1, 2], [0, 1]), "X must be rows of numbers"),
        (lambda p: p.fit([["a"], ["b"]], [0, 1]), "X must be rows of numbers"),
        (lambda p: p.fit([[1.0], [np.nan]], [0, 1]), "X must be finite"),
        (lambda p: p.fit([[1], [2]], [0]), r"a label for each row of X, \[2\]"),
        (lambda p: p.fit([[1], [2], [3]], [0, 1, 2]), "two classes; got 3"),
        (lambda p: p.fit([[1], [2]], [0, 0]), "two classes; got 1"),
        (lambda p: p.fit([[1], [2]], [None, 1]), "no label for row 0"),
        (lambda p: p.fit([[1], [2]], [0.0, np.nan]), "no label for row 1"),
        (lambda p: p.predict([[1]]), "not fitted yet"),
        (lambda p: p.fit([[1], [2]], [0, 1]).predict([[1, 2]]), "2 columns; expected 1"),
        (lambda p: p.fit([[1], [2]], [0, 1]).margin([[1]], [7]), "a label that was not in fit"),
        (lambda p: p.set_params(max_iters=3), "did you mean 'max_iter'"),
        (lambda p: p.set_params(max_iter=0).fit([[1], [2]], [0, 1]), "max_iter must be"),
    ],
)
def test_what_cannot_be_used_is_refused(call, words):
    with pytest.raises(co.InputError, match=words):
        call(co.classics.Perceptron())


def test_the_intercept_is_wanted_or_not():
    with pytest.raises(co.errors.KindError, match="fit_intercept must be True or False; got 'no'"):
        co.classics.Perceptron(fit_intercept="no").fit([[1], [2]], [0, 1])

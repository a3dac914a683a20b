"""Threshold units: gates of McCulloch and Pitts, the perceptron's mistakes, and Cover's count.

    python examples/classics/perceptron.py [--out demo]

Novikoff (1962): data of radius R that a hyperplane through the origin separates with margin gamma
cost the perceptron at most R^2 / gamma^2 mistakes. Cover (1965): hyperplanes through the origin
split s points in general position of R^n in C(s, n) = 2 sum_{i < n} binom(s - 1, i) ways.
"""

import itertools
import math
import warnings

import numpy as np
from drawing import BLUE, GREEN, GREY, RED, folder_from, panels, save

import coadjoint as co

# A McCulloch-Pitts neuron is 1 if sigma'x >= theta, with x_i in {0, 1} and sigma_i in {-1, +1}.
GATES = {"and": ((1, 1), 2), "or": ((1, 1), 1), "nor": ((-1, -1), 0), "x1 and not x2": ((1, -1), 1)}


def neuron(sigma, theta, x):
    """McCulloch and Pitts: 1 if sigma'x >= theta, else 0."""
    return int(np.dot(sigma, x) >= theta)


def xor(x):
    """No single unit is exclusive or; a layer of two and a third one are."""
    one = neuron((1, -1), 1, x)
    other = neuron((-1, 1), 1, x)
    return neuron((1, 1), 1, (one, other))


def separable_data(seed, s, n, gamma):
    """s points in R^n, their signs y, and a unit vector w with y w'x > gamma."""
    draw = np.random.default_rng(seed)
    w = draw.standard_normal(n)
    w /= np.linalg.norm(w)
    X = draw.uniform(-1, 1, (s, n))
    y = np.where(X @ w > 0, 1, -1)
    return X + gamma * y[:, None] * w, y, w


def mistakes_and_bound(seed, s, n, gamma):
    """The mistakes of the perceptron on such data, and R^2 / gamma^2 for the known w."""
    X, y, w = separable_data(seed, s, n, gamma)
    unit = co.classics.Perceptron(fit_intercept=False, max_iter=10**6).fit(X, y)
    reached = (y * (X @ w)).min()
    return unit.mistakes_, np.square(X).sum(1).max() / reached**2


def cover(s, n):
    """C(s, n), of theorem 1.4."""
    return 2 * sum(math.comb(s - 1, i) for i in range(n))


def counted(X, passes=1000):
    """The labellings of the points X [s, n] on which the perceptron converges.

    Each point goes with its opposite, of the opposite label: without an intercept this changes
    nothing, and there are always two classes.
    """
    both = np.concatenate([X, -X])
    count = 0
    for y in itertools.product((-1, 1), repeat=len(X)):
        unit = co.classics.Perceptron(fit_intercept=False, max_iter=passes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it did not converge is what is asked
            unit.fit(both, [*y, *(-label for label in y)])
        count += unit.converged_
    return count


def main():
    folder = folder_from(__doc__)
    inputs = list(itertools.product((0, 1), repeat=2))
    for name, (sigma, theta) in GATES.items():
        print(f"{name}: {[neuron(sigma, theta, x) for x in inputs]}")
    print(f"xor of three neurons: {[xor(x) for x in inputs]}")
    margins = np.geomspace(0.01, 1, 9)
    found = np.array([[mistakes_and_bound(k, 50, 5, g) for k in range(8)] for g in margins])
    for gamma, row in zip(margins[::4], found[::4], strict=True):
        most, bound = row[:, 0].max(), row[:, 1].min()
        print(f"margin {gamma:.2f}: at most {most:.0f} mistakes, bound at least {bound:.0f}")
    draw = np.random.default_rng(0)
    counts = {s: counted(draw.standard_normal((s, 3))) for s in range(2, 7)}
    for s, count in counts.items():
        print(f"s = {s}, n = 3: {count} of {2**s} labellings, C(s, n) = {cover(s, 3)}")
    plot(margins, found, counts, folder)


def plot(margins, found, counts, folder):
    figure, (plane, bounds, share) = panels(3)
    X, y, _ = separable_data(1, 40, 2, 0.1)
    unit = co.classics.Perceptron(fit_intercept=False).fit(X, y)
    normal = unit.coef_[0] / np.linalg.norm(unit.coef_)
    along = np.outer([-1.6, 1.6], [normal[1], -normal[0]])
    plane.scatter(*X[y > 0].T, color=BLUE, s=14)
    plane.scatter(*X[y < 0].T, color=RED, s=14, marker="s")
    plane.plot(*along.T, color="black")
    for side in (-1, 1):
        edge = along + side * unit.margin(X, y) * normal
        plane.plot(*edge.T, color=GREY, linestyle=":")
    title = f"perceptron: {unit.mistakes_} mistakes, margin {unit.margin(X, y):.3f}"
    plane.set(title=title, xlabel="$x_1$", ylabel="$x_2$", aspect="equal")
    for k in range(found.shape[1]):
        bounds.loglog(margins, found[:, k, 0], ".", color=BLUE)
    bounds.loglog(margins, found[:, :, 1].mean(1), color=RED)
    bounds.text(0.03, 6000, "$R^2/\\gamma^2$", color=RED)
    bounds.text(0.011, 8, "mistakes", color=BLUE)
    bounds.set(title="mistakes and Novikoff's bound", xlabel="margin $\\gamma$ put into the data")
    for n, colour in ((3, GREY), (10, GREEN), (50, BLUE), (200, RED)):
        s = np.unique(np.linspace(1, 4 * n, 80).astype(int))
        share.plot(
            s / n, [cover(int(k), n) / 2 ** int(k) for k in s], color=colour, label=f"n = {n}"
        )
    s = np.array(list(counts))
    share.plot(s / 3, np.array(list(counts.values())) / 2.0**s, "o", color="black", label="counted")
    share.axvline(2, color="black", linewidth=0.6, linestyle=":")
    share.set(title="share of separable labellings, $C(s, n)/2^s$", xlabel="s / n")
    share.legend(frameon=False)
    save(figure, folder, "classics-perceptron")


if __name__ == "__main__":
    main()

"""Least squares and logistic regression as chains with one map, fitted by Newton steps.

    python examples/classics/linear_models.py [--out demo]

Least squares has the closed form w = (X'X)^-1 X'y (samples are rows of X), which one step reaches.
Logistic regression has none: its gradient is the mean of (sigma(w'x) - y) x, and a few steps lead
to where it is zero. scikit-learn finds the same weights.
"""

import numpy as np
import torch
from drawing import BLUE, RED, folder_from, panels, save
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import coadjoint as co


def least_squares_data(seed=0, s=101, n=7):
    """X [s, n], and y = w'x + b + noise."""
    draw = np.random.default_rng(seed)
    X = draw.standard_normal((s, n)) * np.arange(1, n + 1)
    return X, X @ draw.standard_normal(n) + 0.5 + 0.3 * draw.standard_normal(s)


def logistic_data(seed=0, s=151, n=5):
    """X [s, n], and y = 1 with probability sigma(w'x - 0.5), else 0."""
    draw = np.random.default_rng(seed)
    X = draw.standard_normal((s, n))
    a = X @ draw.standard_normal(n) - 0.5
    return X, (draw.uniform(size=s) < 1 / (1 + np.exp(-a))).astype(float)


def linear_chain(n, output):
    """w'x + b from w = 0 and b = 0, then the output function."""
    net = co.Chain(nn.Linear(n, 1, dtype=torch.float64), output=output)
    nn.utils.vector_to_parameters(torch.zeros(n + 1, dtype=torch.float64), net.parameters())
    return net


def batch_of(X, y):
    return co.Batch(torch.as_tensor(X), torch.as_tensor(y)[:, None])


def newton(net, batch, loss, steps):
    """theta <- theta - H^-1 g by conjugate gradients; the norms of g before each step, and after.

    A chain with one map has pre-outputs linear in its weights, so that the Gauss-Newton matrix is
    the Hessian itself. `progress` ends the iterations before rounding leads them away along the
    directions in which a singular Hessian is flat.
    """
    norms = []
    for _ in range(steps):
        curve = co.curvature.Curvature(net, batch, loss)
        g = curve.gradient()
        norms.append(float(g.norm()))
        solved = co.curvature.conjugate_gradients(curve.gauss_newton, -g, progress=1e-12)
        theta = parameters_to_vector(net.parameters()) + solved.iterates[-1]
        vector_to_parameters(theta.detach(), net.parameters())
    norms.append(float(co.curvature.Curvature(net, batch, loss).gradient().norm()))
    return norms


def main():
    folder = folder_from(__doc__)
    X, y = least_squares_data()
    net = linear_chain(X.shape[1], "identity")
    squared = newton(net, batch_of(X, y), "squared", 1)
    ours = parameters_to_vector(net.parameters()).detach().numpy()
    one = np.column_stack([X, np.ones(len(X))])
    closed = np.linalg.solve(one.T @ one, one.T @ y)
    print(
        f"least squares, one step: largest difference to the closed form "
        f"{np.abs(ours - closed).max():.0e}"
    )
    X, y = logistic_data()
    net = linear_chain(X.shape[1], "sigmoid")
    logistic = newton(net, batch_of(X, y), "binary-cross-entropy", 8)
    print(
        "logistic regression, norm of the gradient by step:",
        ", ".join(f"{value:.0e}" for value in logistic),
    )
    plot(net, X, y, squared, logistic, folder)


def plot(net, X, y, squared, logistic, folder):
    figure, (fit, norms) = panels(2)
    a = net(torch.as_tensor(X)).a.detach().numpy()[:, 0]
    grid = np.linspace(a.min(), a.max(), 100)
    fit.plot(a, y, "|", color=BLUE)
    fit.plot(grid, 1 / (1 + np.exp(-grid)), color=RED)
    bins = np.quantile(a, np.linspace(0, 1, 9))
    of = np.clip(np.digitize(a, bins) - 1, 0, 7)
    fit.plot(
        [a[of == k].mean() for k in range(8)],
        [y[of == k].mean() for k in range(8)],
        "o",
        color=BLUE,
    )
    fit.set(
        title="logistic regression: labels, their means by eighths, $\\sigma(a)$",
        xlabel="$a = w'x + b$",
    )
    norms.semilogy(squared, "s-", color=RED, label="least squares")
    norms.semilogy(logistic, "o-", color=BLUE, label="logistic regression")
    norms.set(title="norm of the gradient", xlabel="Newton steps")
    norms.legend(frameon=False)
    save(figure, folder, "classics-linear-models")


if __name__ == "__main__":
    main()

"""Gradient descent with step 1/L: its rates on smooth and on PL functions.

    python examples/classics/descent.py [--out demo]

If h is L-smooth, h(theta) falls by at least ||g||^2 / 2L at each step, so that after T steps some
||g||^2 is at most 2L (h_0 - h*) / T. If also 1/2 ||g||^2 >= mu (h - h*) everywhere (the inequality
of Polyak and Lojasiewicz, PL), h - h* falls at least by the factor 1 - mu/L at each step. L and mu
come from products with the Hessian: its extreme eigenvalues, by the method of Lanczos.
"""

import math

import numpy as np
import torch
from drawing import BLUE, GREEN, RED, folder_from, panels, save
from linear_models import batch_of, linear_chain, logistic_data, newton
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import coadjoint as co


class Wave(nn.Module):
    """(theta, sqrt(3) sin theta) for every input: its squared norm is PL but not convex."""

    def __init__(self, start):
        super().__init__()
        self.theta = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, x):
        both = torch.cat([self.theta, math.sqrt(3) * torch.sin(self.theta)])
        return both.expand(len(x), 2)


def lanczos(product, start, steps):
    """Ritz values of a symmetric matrix in the Krylov space of `start`, in ascending order.

    The extreme ones are those of the matrix on the span of the eigenvectors that `start` has a part
    in. Vectors are made orthogonal to all before them, twice, or rounding would repeat values.
    """
    basis = [start / start.norm()]
    images = []
    for _ in range(steps):
        images.append(product(basis[-1]))
        rest = images[-1].clone()
        for _ in range(2):
            for q in basis:
                rest -= (q @ rest) * q
        if rest.norm() < 1e-10 * images[-1].norm():
            break  # the space is complete
        basis.append(rest / rest.norm())
    Q = torch.stack(basis[: len(images)])
    T = Q @ torch.stack(images).T
    return torch.linalg.eigvalsh((T + T.T) / 2)


def spectrum(net, batch, loss, steps=40):
    """Ritz values of the Hessian at the chain's weights, in the Krylov space of the gradient."""
    curve = co.curvature.Curvature(net, batch, loss)
    return lanczos(curve.hessian, curve.gradient(), steps)


def descend(net, batch, loss, L, steps):
    """theta <- theta - g / L: h and ||g||^2 at theta_0..theta_T."""
    values, squares = [], []
    for _ in range(steps + 1):
        found = co.BP()(net, batch, loss)
        values.append(float(batch.mean(found.losses)))
        squares.append(found.norm**2)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter -= found.gradient[name] / L
    return np.array(values), np.array(squares)


def least_squares(s, n, seed=0):
    """A chain w'x + b at w = 0, b = 0, data it can fit exactly if n + 1 > s, and the loss."""
    draw = np.random.default_rng(seed)
    X = draw.standard_normal((s, n))
    return linear_chain(n, "identity"), batch_of(X, draw.standard_normal(s)), "squared"


def logistic():
    """Logistic regression at w = 0, b = 0, where its Hessian is largest."""
    X, y = logistic_data()
    return linear_chain(X.shape[1], "sigmoid"), batch_of(X, y), "binary-cross-entropy"


def wave(start):
    """h(theta) = theta^2 + 3 sin^2 theta."""
    zeros = torch.zeros(1, 2, dtype=torch.float64)
    return co.Chain(Wave(start)), co.Batch(zeros, zeros), "squared"


def lowest(net, batch, loss):
    """The least mean loss, by Newton steps from the chain's weights, which are put back."""
    before = parameters_to_vector(net.parameters()).detach().clone()
    newton(net, batch, loss, 10)
    value = float(batch.mean(co.BP()(net, batch, loss).losses))
    vector_to_parameters(before, net.parameters())
    return value


def main():
    folder = folder_from(__doc__)
    runs = {}
    for name, (s, n) in {"least squares": (60, 9), "more weights than data": (20, 40)}.items():
        problem = least_squares(s, n)
        ritz = spectrum(*problem, steps=min(s, n + 1))  # the rank of the Hessian
        L, mu, least = float(ritz[-1]), float(ritz[0]), lowest(*problem)
        runs[name] = (L, mu, least, *descend(*problem, L, 150))
    problem = logistic()
    L, least = float(spectrum(*problem)[-1]), lowest(*problem)
    runs["logistic regression"] = (L, None, least, *descend(*problem, L, 150))
    grid = np.concatenate([np.linspace(-6, -0.05, 120), np.linspace(0.05, 6, 120)])
    bends = [float(spectrum(*wave(theta))[-1]) for theta in grid]
    slopes = [descend(*wave(theta), 8, 0) for theta in grid]
    L, mu = max(bends), min(float(g[0] / (2 * h[0])) for h, g in slopes)
    runs["theta^2 + 3 sin^2 theta"] = (L, mu, 0.0, *descend(*wave(5.0), L, 150))
    for name, (L, mu, least, values, squares) in runs.items():
        gap = values - least
        T = np.arange(1, len(gap))
        bound = 2 * L * gap[0] / T
        text = f"{name}: L = {L:.3f}; least ||g||^2 after 150 steps {squares[:-1].min():.1e}"
        print(f"{text}, bound {bound[-1]:.1e}")
        if mu is not None:
            rate = 1 - mu / L
            print(
                f"  mu = {mu:.4f}; (h_10 - h*) / (h_0 - h*) = {gap[10] / gap[0]:.1e}, "
                f"bound {rate**10:.1e}"
            )
    plot(runs, folder)


def plot(runs, folder):
    figure, (smooth, pl) = panels(2, width=5)
    colours = dict(zip(runs, (BLUE, GREEN, "black", RED), strict=True))
    for name, (L, mu, least, values, squares) in runs.items():
        gap = values - least
        T = np.arange(1, len(gap))
        smooth.loglog(T, np.minimum.accumulate(squares)[:-1], color=colours[name], label=name)
        smooth.loglog(T, 2 * L * gap[0] / T, ":", color=colours[name])
        if mu is not None:
            steps = np.arange(len(gap))
            pl.semilogy(steps, gap / gap[0], color=colours[name], label=name)
            pl.semilogy(steps, (1 - mu / L) ** steps, ":", color=colours[name])
    smooth.set(
        title="least $||g||^2$ so far; dots: $2L(h_0 - h^*)/T$", xlabel="steps T", ylim=(1e-8, 1e4)
    )
    pl.set(
        title="$(h_T - h^*)/(h_0 - h^*)$; dots: $(1 - \\mu/L)^T$", xlabel="steps T", ylim=(1e-12, 2)
    )
    smooth.legend(frameon=False)
    pl.legend(frameon=False)
    save(figure, folder, "classics-descent")


if __name__ == "__main__":
    main()

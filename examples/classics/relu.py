"""ReLU networks: how many regions they have, sums of ReLUs, and Barron's 1/m.

    python examples/classics/relu.py [--out demo]

m hyperplanes in general position cut R^n into R(m) = sum_{i <= n} binom(m, i) regions (Zaslavsky
1975). L layers of m units can have R(m) floor(m/n)^(n (L - 1)) linear regions (Montufar et al.
2014): each layer folds the unit cube onto itself, and the last cuts every copy. A piecewise linear
function with m pieces is ax + b and m - 1 ReLUs. A function whose Fourier transform has a finite
first moment C_f is met by m sigmoid units with a squared error of at most (2 r C_f)^2 / m on a ball
of radius r (Barron 1993).
"""

import math

import numpy as np
import torch
from drawing import BLUE, GREEN, GREY, RED, folder_from, panels, save
from torch import nn

import coadjoint as co

SQUARE = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])


def most_regions(m, n):
    """R(m), of theorem 2.8."""
    return sum(math.comb(m, i) for i in range(min(n, m) + 1))


def deep_regions(m, n, layers):
    """The lower bound of theorem 2.9."""
    return most_regions(m, n) * (m // n) ** (n * (layers - 1))


def dense(W, b):
    """A linear map with these weights."""
    W = torch.as_tensor(np.asarray(W, dtype=float))
    layer = nn.Linear(W.shape[1], W.shape[0], dtype=torch.float64)
    layer.load_state_dict({"weight": W, "bias": torch.as_tensor(np.asarray(b, dtype=float))})
    return layer


def relu_chain(*layers):
    """A chain of linear maps with ReLUs behind all but the last."""
    maps = []
    for W, b in layers:
        maps += [dense(W, b), nn.ReLU()]
    return co.Chain(*maps[:-1])


def split(polygon, w, c):
    """The parts of a convex polygon [k, 2] where w'x + c > 0 and < 0, those that exist."""
    values = polygon @ w + c
    parts = []
    for side in (values, -values):
        corners = []
        for k in range(len(polygon)):
            here, there = side[k - 1], side[k]
            if here * there < 0:
                corners.append(
                    polygon[k - 1] + here / (here - there) * (polygon[k] - polygon[k - 1])
                )
            if there >= 0:
                corners.append(polygon[k])
        if side.max() > 1e-9:
            parts.append(np.array(corners))
    return parts


def regions(net, polygon=SQUARE):
    """The activation regions of a chain of linear maps and ReLUs in a polygon of the plane.

    In each of them the units of a layer are affine functions of the input, so that the next layer
    cuts it by lines.
    """
    found = [(polygon, np.eye(2), np.zeros(2))]
    for layer in net.maps:
        if isinstance(layer, nn.ReLU):
            found = [cell for part in found for cell in cut(*part)]
        else:
            W, b = layer.weight.detach().numpy(), layer.bias.detach().numpy()
            found = [(part, W @ A, W @ c + b) for part, A, c in found]
    return [part for part, _, _ in found]


def cut(polygon, A, c):
    """The regions of ReLU(Ax + c) in a polygon, each with its affine function."""
    parts = [polygon]
    for w, bias in zip(A, c, strict=True):
        parts = [piece for part in parts for piece in split(part, w, bias)]
    cells = []
    for part in parts:
        is_active = (A @ part.mean(0) + c > 0).astype(float)
        cells.append((part, is_active[:, None] * A, is_active * c))
    return cells


def folding_layers(m, n, layers):
    """Weights of theorem 2.9: layers - 1 folds of the unit cube, then m hyperplanes inside it.

    With p = floor(m/n) units for each coordinate, p x - 2p (x - 1/p)_+ + 2p (x - 2/p)_+ - ... runs
    p times between 0 and 1 as x runs from 0 to 1.
    """
    p = m // n
    knots = np.tile(np.arange(p) / p, n)
    spread = np.kron(np.eye(n), np.ones((p, 1)))  # [n p, n]: each coordinate to its units
    slopes = np.array([p, *(2 * p * (-1) ** k for k in range(1, p))])
    gather = np.kron(np.eye(n), slopes)  # [n, n p]: units of a coordinate to its zigzag
    weights = []
    before = np.eye(n)
    for _ in range(layers - 1):
        weights.append((spread @ before, -knots))
        before = gather
    W, b = crossing(m, n)
    weights.append((W @ before, b))
    return weights


def crossing(m, n):
    """m hyperplanes of R^n, n = 1 or 2, that all cross each other inside the unit cube.

    Near its border at least one unit is active: the network would be constant there otherwise, and
    two copies of a region that meet at a fold would be one.
    """
    if n == 1:
        sides = np.array([-1.0, *np.ones(m - 1)])
        return sides[:, None], -sides * (np.arange(m) + 0.5) / m
    angles = np.pi * (np.arange(m) + 0.3) / m + np.pi * (np.arange(m) % 2)
    normals = np.column_stack([np.cos(angles), np.sin(angles)])
    # tangents of a circle so small that no two meet outside of the cube
    return normals, -normals @ [0.5, 0.5] - 0.4 * np.sin(np.pi / (2 * m))


def sum_of_relus(x, y):
    """The chain ax + b + sum_i c_i (x - x_i)_+ through the points (x_i, y_i), i = 0..m.

    ax is a (x)_+ - a (-x)_+, so that there are m + 1 units for m pieces.
    """
    slopes = np.diff(y) / np.diff(x)
    W = np.concatenate([[1.0, -1.0], np.ones(len(x) - 2)])[:, None]
    b = np.concatenate([[0.0, 0.0], -x[1:-1]])
    c = np.concatenate([[slopes[0], -slopes[0]], np.diff(slopes)])[None]
    return relu_chain((W, b), (c, [y[0] - slopes[0] * x[0]]))


def barron_constant(n):
    """C_f = E||w|| of f(x) = exp(-||x||^2 / 2) = E cos(w'x), w standard normal in R^n."""
    return math.sqrt(2) * math.gamma((n + 1) / 2) / math.gamma(n / 2)


def barron_chain(m, n, radius, seed, steepness=1e4):
    """m units drawn for f(x) = exp(-||x||^2 / 2), as in Barron's proof.

    On the ball, f(x) = 1 - 2 r C_f E sin(t) [w'x > t]: the direction of w is uniform, ||w|| has the
    law of the norm of n + 1 normal numbers, and t is uniform in 0..r||w||. Steep sigmoids stand for
    the steps [w'x > t].
    """
    draw = np.random.default_rng(seed)
    w = draw.standard_normal((m, n))
    lengths = np.linalg.norm(draw.standard_normal((m, n + 1)), axis=1)
    w *= (lengths / np.linalg.norm(w, axis=1))[:, None]
    t = draw.uniform(0, radius * np.linalg.norm(w, axis=1))
    v = -2 * radius * barron_constant(n) * np.sin(t) / m
    return co.Chain(dense(steepness * w, -steepness * t), nn.Sigmoid(), dense(v[None], [1.0]))


def points_in_ball(count, n, radius, seed):
    """Points drawn uniformly from a ball, [count, n]."""
    draw = np.random.default_rng(seed)
    x = draw.standard_normal((count, n))
    length = radius * draw.uniform(size=(count, 1)) ** (1 / n)
    return length * x / np.linalg.norm(x, axis=1, keepdims=True)


def barron_error(m, n, radius=1.0, draws=10):
    """The mean over the ball, and over draws of the units, of the squared error."""
    x = points_in_ball(300, n, radius, seed=0)
    f = np.exp(-np.square(x).sum(1) / 2)
    errors = []
    with torch.no_grad():
        for seed in range(draws):
            g = barron_chain(m, n, radius, seed)(torch.as_tensor(x)).a.numpy()[:, 0]
            errors.append(np.mean((f - g) ** 2))
    return float(np.mean(errors))


def main():
    folder = folder_from(__doc__)
    for m in (3, 5, 8):
        count = len(regions(relu_chain(crossing(m, 2), (np.ones((1, m)), [0.0]))))
        print(f"{m} units in the plane: {count} regions, R(m) = {most_regions(m, 2)}")
    deep = {}
    for layers in (1, 2, 3):
        weights = folding_layers(4, 2, layers)
        deep[layers] = regions(relu_chain(*weights, (np.ones((1, 4)), [0.0])))
        bound = deep_regions(4, 2, layers)
        print(f"depth {layers}, width 4: {len(deep[layers])} regions, theorem {bound}")
    x = np.linspace(0, 1, 1001)
    pieces = {}
    for m in (4, 8, 16):
        knots = np.linspace(0, 1, m + 1)
        with torch.no_grad():
            fit = sum_of_relus(knots, target(knots))(torch.as_tensor(x)[:, None]).a.numpy()[:, 0]
        pieces[m] = fit
        print(f"{m} pieces: largest error {np.abs(fit - target(x)).max():.4f}")
    sizes = (10, 30, 100, 300, 1000)
    errors = {n: [barron_error(m, n) for m in sizes] for n in (2, 10)}
    for n, values in errors.items():
        scaled = ", ".join(f"{m * e:.2f}" for m, e in zip(sizes, values, strict=True))
        bound = (2 * barron_constant(n)) ** 2
        print(f"n = {n}: m times the squared error {scaled}; (2 r C_f)^2 = {bound:.2f}")
    plot(deep, x, pieces, sizes, errors, folder)


def target(x):
    return np.sin(5 * x) * np.exp(-x)


def plot(deep, x, pieces, sizes, errors, folder):
    figure, (one, three, lines, rates) = panels(4, width=3.5)
    for axes, layers in ((one, 1), (three, 3)):
        for k, part in enumerate(deep[layers]):
            axes.fill(*part.T, color=f"C{k % 10}", alpha=0.45, linewidth=0)
            axes.plot(*np.concatenate([part, part[:1]]).T, color="white", linewidth=0.6)
        plural = "s" if layers > 1 else ""
        title = f"{layers} layer{plural} of 4 ReLUs: {len(deep[layers])} regions"
        axes.set(title=title, xticks=[], yticks=[], aspect="equal")
    lines.plot(x, target(x), color=GREY, linewidth=3)
    for (m, fit), colour in zip(pieces.items(), (RED, GREEN, BLUE), strict=True):
        lines.plot(x, fit, color=colour, linewidth=1, label=f"{m} pieces")
    lines.set(title="a function as a sum of ReLUs", xlabel="x")
    lines.legend(frameon=False)
    for (n, values), colour in zip(errors.items(), (BLUE, RED), strict=True):
        rates.loglog(sizes, values, "o-", color=colour, label=f"n = {n}")
        bound = (2 * barron_constant(n)) ** 2
        rates.loglog(sizes, [bound / m for m in sizes], ":", color=colour)
    rates.set(title="squared error; dots: $(2rC_f)^2/m$", xlabel="units m")
    rates.legend(frameon=False)
    save(figure, folder, "classics-relu")


if __name__ == "__main__":
    main()

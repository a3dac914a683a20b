"""Convergence: Galvan's bounds for steps along directions that are not the gradient.

The method x_{j+1} = x_j - (beta / j) D_j, where D_j has the mean d_j and E ||D_j||^2 <= M^2, on a
strongly convex f. Galvan (2016), section 3.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..errors import InputError, real, whole_number
from ..gradients.evaluation import Gradient


@dataclass(frozen=True)
class DirectionDistance:
    """How far a direction d is from the gradient g, as Galvan's condition (3.33) measures it.

    alpha    ||d|| / ||g||
    on_unit  ||d/||d|| - g/||g||||, the distance of their directions; 2 - 2 cos is its square
    """

    alpha: float
    on_unit: float

    @property
    def cosine(self) -> float:
        """The cosine of the angle between d and g."""
        return 1 - self.on_unit**2 / 2

    @property
    def distance(self) -> float:
        """||d - g|| / ||g|| = sqrt(1 + alpha^2 - 2 alpha cos); the condition: at most mu < c/L."""
        return self._at(self.alpha)

    def at(self, alpha: float) -> float:
        """The distance of the same direction, scaled to the norm alpha ||g||.

        It is least at alpha = cos, where it is the sine of the angle (if the angle is acute).
        """
        return self._at(real("alpha", alpha, 0))

    def _at(self, alpha: float) -> float:
        """The distance at alpha, which may be NaN."""
        # The same as 1 + alpha^2 - 2 alpha cos, without a difference of nearly equal numbers.
        return math.hypot(1 - alpha, math.sqrt(alpha) * self.on_unit)


def direction_distance(d: Gradient, g: Gradient) -> DirectionDistance:
    """Return how far the direction d is from the gradient g; NaN where one of them is zero.

    Galvan (2016), (3.28) to (3.33). d and g hold the same parameters.

    Example: a direction at 60 degrees from the gradient, twice as long.
        >>> import math, torch
        >>> import coadjoint as co
        >>> g = {"W": torch.tensor([1.0, 0.0], dtype=torch.float64)}
        >>> d = {"W": torch.tensor([1.0, math.sqrt(3)], dtype=torch.float64)}
        >>> far = co.diagnostics.direction_distance(d, g)
        >>> [round(x, 3) for x in (far.alpha, far.cosine, far.distance, far.at(0.5))]
        [2.0, 0.5, 1.732, 0.866]
    """
    if d.keys() != g.keys():
        raise InputError(
            "a direction and a gradient must hold the same parameters; got "
            f"{', '.join(d)} and {', '.join(g)}."
        )
    d_norm = _norm(d)
    g_norm = _norm(g)
    if not (d_norm > 0 and g_norm > 0):
        return DirectionDistance(math.nan, math.nan)
    gaps = {name: d[name].double() / d_norm - g[name].double() / g_norm for name in g}
    return DirectionDistance(d_norm / g_norm, _norm(gaps))


def _norm(g: Gradient) -> float:
    """||g|| over all parameters, in float64."""
    parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in g.values()]
    return math.hypot(*map(float, parts))


@dataclass(frozen=True)
class ConvergenceBounds:
    """Galvan's bounds after j steps of size beta / j.

    c_bar      c - mu L, what is left of the strong convexity
    beta       the factor of the steps
    smoothness L, the Lipschitz constant of the gradient
    Q          E ||x_j - x_*||^2 <= Q / j, (3.24):
               max(beta^2 M^2 / (2 c_bar beta - 1), 2 beta^2 M^2, ||x_1 - x_*||^2)
    Q_printed  (3.25) to the letter: max(beta^2 M^2 / (2 c_bar - 1), ||x_1 - x_*||^2), inf where
               2 c_bar <= 1

    (3.25) lacks beta in its denominator, and its induction fails at j < 2 c_bar beta, where the
    factor 1 - 2 c_bar beta / j of (3.23) is negative: the second term of Q covers these steps.
    """

    c_bar: float
    beta: float
    smoothness: float
    Q: float
    Q_printed: float

    def distance(self, j: int) -> float:
        """Return the bound (3.24) on E ||x_j - x_*||^2, j = 1, 2, ...: Q / j."""
        return self.Q / whole_number("j", j, 1)

    def excess(self, j: int) -> float:
        """Return the bound on E f(x_j) - f(x_*), by (3.26): L Q / (2 j). (3.27) drops the j."""
        return self.smoothness * self.distance(j) / 2


def convergence_bounds(
    convexity: float,
    smoothness: float,
    mu: float,
    second_moment: float,
    start: float,
    beta: float | None = None,
) -> ConvergenceBounds:
    """Return the bounds of Galvan (2016), (3.24) to (3.27).

    Args:
        convexity: c > 0, of (3.14): <y - x, grad f(y) - grad f(x)> >= c ||y - x||^2.
        smoothness: L >= c, the Lipschitz constant of the gradient.
        mu: The largest distance of the directions, 0 <= mu < c/L (`DirectionDistance.distance`).
        second_moment: M^2 of (3.12), a bound on E ||D||^2.
        start: ||x_1 - x_*||.
        beta: The factor of the steps beta / j, above 1 / (2 c_bar); 1 / c_bar by default, which
            makes the first term of Q least.

    Example: exact gradients of a well-conditioned f, with noise.
        >>> import coadjoint as co
        >>> bounds = co.diagnostics.convergence_bounds(1.0, 2.0, 0.0, 3.0, start=1.0)
        >>> bounds.beta, bounds.Q, bounds.distance(100), bounds.excess(100)
        (1.0, 6.0, 0.06, 0.06)
    """
    c = real("the convexity c", convexity, 0, above=True)
    L = real("the smoothness L", smoothness, c)
    real("mu", mu, 0, c / L, below=True)
    M2 = real("the second moment M^2", second_moment, 0)
    squared_start = real("the distance of the start", start, 0) ** 2
    c_bar = c - mu * L
    if beta is None:
        beta = 1 / c_bar
    real("beta", beta, 1 / (2 * c_bar), above=True)
    noise = beta**2 * M2
    Q = max(noise / (2 * c_bar * beta - 1), 2 * noise, squared_start)
    printed = noise / (2 * c_bar - 1) if 2 * c_bar > 1 else math.inf
    return ConvergenceBounds(c_bar, beta, L, Q, max(printed, squared_start))

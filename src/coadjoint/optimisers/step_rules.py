"""Step rules: how much of a move is taken.

theta <- theta + rule(line) move        a function of the Line along a move -> the share of it that is taken
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InputError, real, whole_number

LinePoint = tuple[float, float, float]  # a, the objective there, and its slope


@dataclass(frozen=True)
class Line:
    """The objective along a move: a = 1 is the whole of it.

    size          ||d||, the length of the direction: the move's without its step size
    start, slope  the objective at a = 0 and how it changes there
    value(a)      the objective, infinite where it is not finite; tangent(a): with its slope, for rules that ask for it
    """

    size: float
    start: float
    slope: float
    value: Callable[[float], float]
    tangent: Callable[[float], tuple[float, float]] | None = None


@dataclass(frozen=True)
class Constant:
    """The whole move."""

    def __call__(self, line: Line) -> float:
        return 1.0


@dataclass(frozen=True)
class Galvan:
    """Step size mu if ||d|| <= c, else mu / ||d||.  Galvan (2016), eq. 3.6; not mu c / ||d||, which clipping would be"""

    c: float = 1.0

    def __post_init__(self) -> None:
        real("c", self.c, 0, above=True)

    def __call__(self, line: Line) -> float:
        return 1.0 if line.size <= self.c else 1 / line.size


@dataclass(frozen=True)
class Armijo:
    """The first a = 1, shrink, shrink^2, ... with value(a) <= start + c a slope; 0 if none of `most` has it."""

    c: float = 1e-4
    shrink: float = 0.5
    most: int = 40

    def __post_init__(self) -> None:
        for name in ("c", "shrink"):
            real(name, getattr(self, name), 0, 1, above=True, below=True)
        whole_number("most", self.most)

    def __call__(self, line: Line) -> float:
        if line.slope >= 0:
            return 0.0
        for k in range(self.most):
            a = self.shrink**k
            if line.value(a) <= line.start + self.c * a * line.slope:
                return a
        return 0.0


@dataclass(frozen=True)
class Wolfe:
    """An a with value(a) <= start + c1 a slope and |slope(a)| <= c2 |slope|, the strong conditions of Wolfe: doubled until an
    interval holds one, then cut by cubic interpolation.  Nocedal & Wright, algorithms 3.5 and 3.6

    After `most` gradients, the best a found so far that has the first condition."""

    c1: float = 1e-4
    c2: float = 0.9
    most: int = 25

    def __post_init__(self) -> None:
        for name in ("c1", "c2"):
            real(name, getattr(self, name))
        whole_number("most", self.most)
        if not 0 < self.c1 < self.c2 < 1:
            raise InputError(f"c1 and c2 must satisfy 0 < c1 < c2 < 1; got {self}.")

    def __call__(self, line: Line) -> float:
        if line.slope >= 0:
            return 0.0
        assert line.tangent is not None
        enough = lambda a, value: value <= line.start + self.c1 * a * line.slope
        flat = lambda slope: abs(slope) <= -self.c2 * line.slope
        low: LinePoint = (0.0, line.start, line.slope)  # the lowest that has enough
        high: LinePoint | None = None  # beyond it the objective has risen
        for _ in range(self.most):
            a = max(1.0, 2 * low[0]) if high is None else cubic_minimum(low, high)
            value, slope = line.tangent(a)
            if not (enough(a, value) and (value < low[1] or low[0] == 0)):
                high = (a, value, slope)
                continue
            if flat(slope):
                return a
            if slope * ((math.inf if high is None else high[0]) - low[0]) >= 0:
                high = low
            low = (a, value, slope)
        return low[0]


def cubic_minimum(low: LinePoint, high: LinePoint) -> float:
    """Where the cubic through two points and their slopes is lowest, kept off the ends by a tenth; the middle if it has none."""
    (a, fa, sa), (b, fb, sb) = low, high
    at = (a + b) / 2
    if math.isfinite(fb) and math.isfinite(sb):
        d = sa + sb - 3 * (fa - fb) / (a - b)
        if (square := d * d - sa * sb) >= 0:
            root = math.copysign(math.sqrt(square), b - a)
            if (below := sb - sa + 2 * root) != 0:
                at = b - (b - a) * (sb + root - d) / below
    least, most = sorted((a + 0.1 * (b - a), b - 0.1 * (b - a)))
    return min(max(at, least), most)


Rule = Callable[[Line], float]
STEP_RULES: dict[str, Callable[..., Rule]] = {
    "constant": Constant,
    "galvan": Galvan,
    "armijo": Armijo,
    "wolfe": Wolfe,
}

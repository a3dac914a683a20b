"""Step rules: how much of a move is taken.

theta <- theta + rule(line) move

A rule is a function of the Line along a move; it returns the share of the move that is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import InputError, real, whole_number


@dataclass(frozen=True)
class Line:
    """The objective along a move: a = 1 is the whole of it.

    size          ||d||, the length of the direction: the move's without its step size
    start, slope  the objective and its derivative by a, at a = 0
    value(a)      the objective, infinite where it is not finite
    tangent(a)    (the objective, its derivative), for rules that need it
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
        """The share of the move that is taken: 1."""
        return 1.0


@dataclass(frozen=True)
class Galvan:
    """Step size mu along the direction d if ||d|| <= c, else mu / ||d||. Galvan (2016), eq. 3.6.

    Clipping the norm of d at c would take mu c / ||d||.
    """

    c: float = 1.0

    def __post_init__(self) -> None:
        real("c", self.c, 0, above=True)

    def __call__(self, line: Line) -> float:
        """The share of the move that is taken."""
        return 1.0 if line.size <= self.c else 1 / line.size


@dataclass(frozen=True)
class Armijo:
    """The first a = 1, shrink, shrink^2, ... with value(a) <= start + c a slope.

    It is 0 if none of the first `most` meets the condition, or if the objective does not fall.
    """

    c: float = 1e-4
    shrink: float = 0.5
    most: int = 40

    def __post_init__(self) -> None:
        for name in ("c", "shrink"):
            real(name, getattr(self, name), 0, 1, above=True, below=True)
        whole_number("most", self.most)

    def __call__(self, line: Line) -> float:
        """The share of the move that is taken."""
        if line.slope >= 0:
            return 0.0
        for k in range(self.most):
            a = self.shrink**k
            if line.value(a) <= line.start + self.c * a * line.slope:
                return a
        return 0.0


class LinePoint(NamedTuple):
    """A point on a line."""

    a: float
    value: float
    slope: float


@dataclass(frozen=True)
class Wolfe:
    """An a that meets the strong Wolfe conditions.

        value(a) <= start + c1 a slope      |slope(a)| <= c2 |slope|

    a is doubled until an interval holds one, which is then cut by cubic interpolation. Nocedal &
    Wright, algorithms 3.5 and 3.6. After `most` gradients it is the best a so far that meets the
    first condition; 0 if the objective does not fall.
    """

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
        """The share of the move that is taken."""
        if line.slope >= 0:
            return 0.0
        assert line.tangent is not None
        low = LinePoint(0.0, line.start, line.slope)  # the lowest that meets the first condition
        high: LinePoint | None = None  # the other end of an interval that holds a solution
        for _ in range(self.most):
            if high is None:
                a = max(1.0, 2 * low.a)
            else:
                a = cubic_minimum(low, high)
            point = LinePoint(a, *line.tangent(a))
            has_fallen = point.value <= line.start + self.c1 * a * line.slope
            # Near the start rounding may hide the fall, so there the first condition is enough.
            is_lowest = point.value < low.value or low.a == 0
            if not (has_fallen and is_lowest):
                high = point
                continue
            if abs(point.slope) <= -self.c2 * line.slope:
                return a
            toward_high = (math.inf if high is None else high.a) - low.a
            if point.slope * toward_high >= 0:  # rising: the minimum lies between low and here
                high = low
            low = point
        return low.a


def cubic_minimum(low: LinePoint, high: LinePoint) -> float:
    """Where the cubic with these values and slopes is lowest. Nocedal & Wright, eq. 3.59.

    The middle, where the cubic has no minimum. At least a tenth of the interval away from both
    ends, so that every cut shortens the interval.
    """
    a, value_a, slope_a = low
    b, value_b, slope_b = high
    minimum = (a + b) / 2
    if math.isfinite(value_b) and math.isfinite(slope_b):
        d = slope_a + slope_b - 3 * (value_a - value_b) / (a - b)
        square = d * d - slope_a * slope_b
        if square >= 0:
            root = math.copysign(math.sqrt(square), b - a)
            denominator = slope_b - slope_a + 2 * root
            if denominator != 0:
                minimum = b - (b - a) * (slope_b + root - d) / denominator
    least, most = sorted((a + 0.1 * (b - a), b - 0.1 * (b - a)))
    return min(max(minimum, least), most)


Rule = Callable[[Line], float]
STEP_RULES: dict[str, Callable[..., Rule]] = {
    "constant": Constant,
    "galvan": Galvan,
    "armijo": Armijo,
    "wolfe": Wolfe,
}

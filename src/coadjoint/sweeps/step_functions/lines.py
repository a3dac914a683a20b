"""CodeLines: operations that are linear in one input, in as few lines of code as can be had.

Factors that follow one another become one, parts of parts and joined parts likewise, and sums of
products with the same factor become one product.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .products import Operator
from .row_rules import Place
from .tape import Replay


class CodeConstant:
    """A tensor that does not depend on the linear input: how to compute it for some of the rows.

    compute  from the values of a tape at these rows
    shape    with the few rows of the tape
    place    where its rows lie
    is_zero  is it an array of zeros?
    """

    def __init__(
        self,
        compute: Callable[[Replay], Tensor],
        shape: tuple[int, ...],
        place: Place,
        is_zero: bool = False,
    ) -> None:
        self.compute = compute
        self.shape = shape
        self.place = place
        self.is_zero = is_zero

    def at(self, values: Replay) -> Tensor:
        """The tensor, computed once for these rows."""
        known = values.constants.get(self)
        if known is None:
            known = values.constants[self] = self.compute(values)
        return known

    def derived(self, compute: Callable[[Replay], Tensor]) -> CodeConstant:
        """A constant of the same shape."""
        return CodeConstant(compute, self.shape, self.place)

    def part(self, axis: int, begin: int, length: int) -> CodeConstant:
        """The entries begin .. begin + length - 1 along an axis without rows."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return CodeConstant(lambda y: self.at(y).narrow(axis, begin, length), shape, self.place)


class Moving(NamedTuple):
    """A value that depends on the linear input: the number of its line of code."""

    line: int


class RowCount(NamedTuple):
    """The number of rows, times `each`, inside a shape."""

    each: int


class CodeLine(NamedTuple):
    """operator(*arguments, **keywords), or entry `entry` of what it returns.

    Arguments are Moving, CodeConstant, RowCount, numbers and others, and lists of them.
    """

    name: str
    operator: Operator | None
    arguments: tuple[object, ...]
    keywords: Mapping[str, object]
    shape: tuple[int, ...]
    entry: int | None = None


# Quicker to call than the operators that a tape holds.
QUICK: dict[str, Operator] = {
    "mul": torch.mul,
    "add": torch.add,
    "sub": torch.sub,
    "neg": torch.neg,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "rsub": torch.rsub,
    "mm": torch.mm,
    "bmm": torch.bmm,
    "cat": torch.cat,
    "stack": torch.stack,
    "sum": torch.sum,
    "select": torch.select,
    "squeeze": torch.squeeze,
    "unsqueeze": torch.unsqueeze,
    "transpose": torch.transpose,
    "view": Tensor.view,
    "_unsafe_view": Tensor.view,
    "expand": Tensor.expand,
}


class SharedConstants:
    """Constants that several codes share: by the numbers of their values, and slopes at them."""

    def __init__(self) -> None:
        self.by_number: dict[int, CodeConstant] = {}
        self.slopes: dict[tuple[str, CodeConstant], CodeConstant] = {}


class CodeLines:
    """CodeLines of code, in the order in which they run; the first is the linear input."""

    def __init__(self, slopes: dict[tuple[str, CodeConstant], CodeConstant]) -> None:
        """slopes: those known so far, which several codes share; it is added to."""
        self.all: list[CodeLine] = []
        self.slopes = slopes

    def append(self, line: CodeLine) -> Moving:
        """Add a line as it is."""
        self.all.append(line)
        return Moving(len(self.all) - 1)

    def add(
        self,
        name: str,
        operator: Operator,
        arguments: list[object],
        keywords: Mapping[str, object],
        shape: tuple[int, ...],
        place: Place,
    ) -> Moving:
        """Add operator(*arguments, **keywords), in fewer operations where that can be done.

        shape, place: of its result, and where rows lie in it.
        """
        first = arguments[0]
        second = arguments[1] if len(arguments) > 1 else None
        found: Moving | None = None
        if keywords:
            pass
        elif isinstance(first, Moving) and isinstance(second, CodeConstant):
            found = self.product(name, first, second, shape, place)
        elif name == "mul" and isinstance(first, CodeConstant) and isinstance(second, Moving):
            found = self.product(name, second, first, shape, place)
        elif name == "add" and isinstance(first, Moving) and isinstance(second, Moving):
            found = self.sum(first, second)
        elif name == "neg" and isinstance(first, Moving):
            found = self.negative(first)
        elif name == "slice" and isinstance(first, Moving):
            found = self.slice(first, arguments[1:], shape)
        elif name == "cat":
            found = self.joined(arguments, shape)
        if found is not None:
            return found
        return self.append(
            CodeLine(name, QUICK.get(name, operator), tuple(arguments), keywords, shape)
        )

    def factor(self, y: Moving) -> tuple[Moving, CodeConstant] | None:
        """(z, c) if y is z c, c a constant of the same shape; None otherwise."""
        line = self.all[y.line]
        if line.name != "times":
            return None
        z, c = line.arguments
        assert isinstance(z, Moving)
        assert isinstance(c, CodeConstant)
        return z, c

    def product(
        self, name: str, y: Moving, c: CodeConstant, shape: tuple[int, ...], place: Place
    ) -> Moving | None:
        """Y times a constant of its shape, or times the slope at it."""
        if c.shape != shape or c.place != place or self.all[y.line].shape != shape:
            return None
        if name == "tanh_backward":
            return self.times(y, self.slope(name, c, tanh_slope))
        if name == "sigmoid_backward":
            return self.times(y, self.slope(name, c, sigmoid_slope))
        return self.times(y, c) if name == "mul" else None

    def slope(self, name: str, y: CodeConstant, of: Callable[[Tensor], Tensor]) -> CodeConstant:
        """The slope of a function where its value is y, computed once for all that need it."""
        if (name, y) not in self.slopes:
            self.slopes[name, y] = y.derived(lambda values: of(y.at(values)))
        return self.slopes[name, y]

    def times(self, y: Moving, c: CodeConstant) -> Moving:
        """Y c, c a constant of the shape of y; one factor if y has one already."""
        line = self.all[y.line]
        factor = self.factor(y)
        if factor is not None:
            y, before = factor
            together = c.derived(lambda values: before.at(values) * c.at(values))
            return self.append(line._replace(arguments=(y, together)))
        if line.name == "cat":
            return self.times_parts(line, c)
        return self.append(CodeLine("times", torch.mul, (y, c), {}, line.shape))

    def times_parts(self, line: CodeLine, c: CodeConstant) -> Moving:
        """[y z] c = [y c_1  z c_2]: the parts may have factors already."""
        parts, axis = line.arguments
        assert isinstance(parts, list)
        assert isinstance(axis, int)
        scaled = []
        begin = 0
        for part in parts:
            length = self.all[part.line].shape[axis]
            scaled.append(self.times(part, c.part(axis, begin, length)))
            begin += length
        return self.side_by_side(scaled, axis, line.shape)

    def side_by_side(self, parts: Sequence[Moving], axis: int, shape: tuple[int, ...]) -> Moving:
        """[y z]; if all are products, [y b  z c] = [y z] [b c]."""
        factors = [self.factor(part) for part in parts]
        pairs = [factor for factor in factors if factor is not None]
        if len(pairs) < len(parts) or len({c.place for _, c in pairs}) > 1:
            return self.append(CodeLine("cat", torch.cat, (list(parts), axis), {}, shape))
        bare = self.flattened([y for y, _ in pairs], axis)
        joined = self.append(CodeLine("cat", torch.cat, (bare, axis), {}, shape))

        def compute(values: Replay) -> Tensor:
            return torch.cat([c.at(values) for _, c in pairs], axis)

        together = CodeConstant(compute, shape, pairs[0][1].place)
        return self.append(CodeLine("times", torch.mul, (joined, together), {}, shape))

    def flattened(self, parts: Sequence[Moving], axis: int) -> list[Moving]:
        """The same parts, and in place of those joined along this axis what they are joined of."""
        flat: list[Moving] = []
        for part in parts:
            line = self.all[part.line]
            is_joined = line.name == "cat" and line.arguments[1] == axis
            flat += moving_in(line.arguments) if is_joined else [part]
        return flat

    def negative(self, y: Moving) -> Moving | None:
        """-y as z (-c), if y is z c; None otherwise."""
        factor = self.factor(y)
        if factor is None:
            return None
        z, c = factor
        return self.append(
            self.all[y.line]._replace(arguments=(z, c.derived(lambda values: -c.at(values))))
        )

    def sum(self, y: Moving, z: Moving) -> Moving | None:
        """Y + z as x (b + c) if y is x b and z is x c, or as parts side by side; else None."""
        y_factor = self.factor(y)
        z_factor = self.factor(z)
        if y_factor is None or z_factor is None:
            return self.filled(y, z)
        b, c = y_factor[1], z_factor[1]
        if y_factor[0] != z_factor[0] or b.place != c.place:
            return None
        return self.times(y_factor[0], c.derived(lambda values: b.at(values) + c.at(values)))

    def filled(self, y: Moving, z: Moving) -> Moving | None:
        """Y + z if one fills the zeros of the other: two parts joined, two entries stacked."""
        a, b = self.all[y.line], self.all[z.line]
        if a.name != b.name or a.arguments[1:3] != b.arguments[1:3]:
            return None
        if a.name == "slice_backward":
            return self.parts_joined(a, b)
        return self.entries_stacked(a, b) if a.name == "select_backward" else None

    def parts_joined(self, a: CodeLine, b: CodeLine) -> Moving | None:
        """The sum of two parts of arrays of zeros, if they fill one axis."""
        axis, size = filled_axis(a)
        spans = []
        for line in (a, b):
            begin, end, step = line.arguments[3:]
            assert isinstance(begin, int)
            assert isinstance(end, int)
            spans.append((begin, min(end, size), step))
        if spans[0] > spans[1]:
            return self.parts_joined(b, a)
        if (spans[0][0], spans[1][1]) != (0, size) or spans[0][1:] != (spans[1][0], 1):
            return None
        if spans[1][2] != 1:
            return None
        parts = moving_in([a.arguments[0], b.arguments[0]])
        return self.side_by_side(parts, axis, a.shape)

    def entries_stacked(self, a: CodeLine, b: CodeLine) -> Moving | None:
        """The sum of two entries of arrays of zeros, if they are all there are along an axis."""
        axis, size = filled_axis(a)
        entries = {a.arguments[3]: a.arguments[0], b.arguments[3]: b.arguments[0]}
        if size != 2 or set(entries) != {0, 1}:
            return None
        both = [entries[0], entries[1]]
        return self.append(CodeLine("stack", torch.stack, (both, axis), {}, a.shape))

    def slice(
        self, y: Moving, arguments: Sequence[object], shape: tuple[int, ...]
    ) -> Moving | None:
        """A part of y along one axis; that of a product is the product of the parts."""
        line = self.all[y.line]
        given = list(arguments)
        axis, begin = [*given, 0, 0][:2]
        if not isinstance(axis, int) or not isinstance(begin, int) or given[3:] not in ([], [1]):
            return None
        axis %= len(shape)
        length = shape[axis]
        begin = min(begin + line.shape[axis] if begin < 0 else begin, line.shape[axis])
        factor = self.factor(y)
        if factor is not None:
            z, c = factor
            return self.times(self.narrow(z, axis, begin, length), c.part(axis, begin, length))
        return self.narrow(y, axis, begin, length)

    def narrow(self, y: Moving, axis: int, begin: int, length: int) -> Moving:
        """The entries begin .. begin + length - 1 of y along an axis."""
        line = self.all[y.line]
        if line.name == "narrow" and line.arguments[1] == axis:
            y, _, before, _ = line.arguments  # type: ignore[assignment]
            assert isinstance(before, int)
            begin += before
        shape = (*line.shape[:axis], length, *line.shape[axis + 1 :])
        wanted = CodeLine("narrow", torch.narrow, (y, axis, begin, length), {}, shape)
        if wanted in self.all:
            return Moving(self.all.index(wanted))
        return self.append(wanted)

    def joined(self, arguments: Sequence[object], shape: tuple[int, ...]) -> Moving | None:
        """Parts one after the other; those that are joined along the same axis already, too."""
        given = arguments[0]
        axis = arguments[1] if len(arguments) > 1 else 0
        assert isinstance(given, list)
        assert isinstance(axis, int)
        if not all(isinstance(part, Moving) for part in given):
            return None
        axis %= len(shape)
        parts = self.flattened(given, axis)
        return parts[0] if len(parts) == 1 else self.side_by_side(parts, axis, shape)


def tanh_slope(y: Tensor) -> Tensor:
    """The slope of tanh where its value is y."""
    return 1 - y.square()


def sigmoid_slope(y: Tensor) -> Tensor:
    """The slope of the sigmoid where its value is y."""
    return y * (1 - y)


def filled_axis(line: CodeLine) -> tuple[int, int]:
    """The axis along which a line fills a part of an array of zeros, and its length."""
    axis = line.arguments[2]
    assert isinstance(axis, int)
    axis %= len(line.shape)
    return axis, line.shape[axis]


def moving_in(y: object) -> list[Moving]:
    """The moving values among arguments, also those in lists."""
    if isinstance(y, Moving):
        return [y]
    if type(y) in (list, tuple):
        assert isinstance(y, list | tuple)
        return list(itertools.chain.from_iterable(map(moving_in, y)))
    return []

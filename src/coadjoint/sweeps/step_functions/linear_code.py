"""LinearCode: the operations of a tape that are linear in one input, as Python code for one step.

The tape holds the rows of all time steps. Its values that do not depend on the linear input (the
slopes) stay as they are and are cut by time steps; the rest is run for one step after the other.
Before that, factors that follow one another become one, so that few operations are left.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..rows import Rows
from .row_rules import SHAPED, MixesRows, Place
from .tape import FewRows, Operator, Record, Ref, Tape, memory_of

StepCode = Callable[[Tensor, tuple[Tensor, ...], int], Tensor]


class Constant:
    """A tensor that does not depend on the linear input, and where its rows lie.

    make   computes it, with all rows, when it is first read: many only lead to others
    shape  that with few rows
    """

    def __init__(self, make: Callable[[], Tensor], shape: tuple[int, ...], place: Place) -> None:
        self.make = make
        self.shape = shape
        self.place = place

    @functools.cached_property
    def tensor(self) -> Tensor:
        """The values."""
        return self.make()

    @functools.cached_property
    def tanh_slope(self) -> Constant:
        """1 - y^2 of this y."""
        return self.derived(lambda: 1 - self.tensor.square())

    @functools.cached_property
    def sigmoid_slope(self) -> Constant:
        """Y (1 - y) of this y."""
        return self.derived(lambda: self.tensor * (1 - self.tensor))

    def derived(self, make: Callable[[], Tensor]) -> Constant:
        """A constant of the same shape."""
        return Constant(make, self.shape, self.place)

    def part(self, axis: int, begin: int, length: int) -> Constant:
        """The entries begin .. begin + length - 1 along an axis without rows."""
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        return Constant(lambda: self.tensor.narrow(axis, begin, length), shape, self.place)


class Moving(NamedTuple):
    """A value that depends on the linear input: the number of its line of code."""

    line: int


class RowCount(NamedTuple):
    """The number of rows, times `each`, inside a shape."""

    each: int


class Line(NamedTuple):
    """operator(*arguments, **keywords), or entry `entry` of what it returns.

    Arguments are Moving, Constant, RowCount, numbers and others, and lists of them.
    """

    name: str
    operator: Operator | None
    arguments: tuple[object, ...]
    keywords: Mapping[str, object]
    shape: tuple[int, ...]
    entry: int | None = None


# Linear in all tensors among their arguments.
LINEAR = frozenset(
    """_to_copy _unsafe_view add alias cat clone constant_pad_nd cumsum detach expand mean neg
    permute select select_backward slice slice_backward split split_with_sizes squeeze stack sub
    sum t transpose unbind unsqueeze view""".split()
)
# Linear in one of their arguments, the first, or any one of the two factors.
LINEAR_IN_FIRST = frozenset({"div", "masked_fill", "true_divide"})
PRODUCTS = frozenset({"mul", "mm", "bmm"})
# They return the tensor they are given, if its shape and type stay the same.
SAME = frozenset({"detach", "alias", "clone", "expand", "view", "slice", "_unsafe_view", "_to_copy"})
# Quicker to call than the operators that a tape holds.
QUICK: dict[str, Operator] = {
    "mul": torch.mul,
    "add": torch.add,
    "sub": torch.sub,
    "neg": torch.neg,
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


class LinearCode:
    """The map from a linear input to a result of a tape, step by step."""

    def __init__(
        self, source: FewRows, given: int, result: int, known: dict[int, Constant]
    ) -> None:
        """source: the tape, with few rows, and where values with all rows come from.

        given, result: numbers of values of that tape, with rows along axis 0.
        known: constants by their numbers, which several codes share; it is added to.
        """
        tape = source.few
        self.source = source
        self.known = known
        self.lines: list[Line] = []
        self.values: dict[int, Moving | Constant] = {}  # by their numbers on the tape
        shape = tuple(tape.values[given].tensor.shape)
        self.values[given] = self._append(Line("given", None, (), {}, shape))
        for record in needed_records(tape, given, result):
            self._add(tape, record)
        last = self.values[result]
        if not isinstance(last, Moving):
            raise MixesRows("a result that does not depend on the input")
        self.constants: list[Constant] = []
        text, names = self._write(last)
        self.step: StepCode = compiled(text, names)
        self.slopes = [(constant.tensor, constant.place) for constant in self.constants]
        # What is left over keeps every value of the tapes alive.
        del self.source, self.known, self.lines, self.values, self.constants

    def slices(self, rows: Rows) -> list[tuple[Tensor, ...]]:
        """The constants of each time step: views."""
        by_step = []
        for tensor, place in self.slopes:
            if place is None:
                by_step.append([tensor] * rows.T)
                continue
            sizes = [n * place.each for n in rows.sizes]
            by_step.append(list(tensor.split(sizes, place.axis)))
        if not by_step:
            return [()] * rows.T
        return list(zip(*by_step, strict=True))

    # What the records of a tape become

    def _append(self, line: Line) -> Moving:
        self.lines.append(line)
        return Moving(len(self.lines) - 1)

    def _add(self, tape: Tape, record: Record) -> None:
        """Add the lines of a record whose arguments move."""
        arguments = [self._argument(tape, y) for y in record.arguments]
        keywords = {key: self._argument(tape, y) for key, y in record.keywords.items()}
        refuse_if_not_linear(record.name, arguments, keywords)
        at = SHAPED.get(record.name)
        results = [tape.values[number] for number in record.results]
        if at is not None:
            arguments[at] = self._with_row_count(arguments[at], results[0].place)
        shape = tuple(results[0].tensor.shape)
        first = arguments[0]
        if len(results) > 1:
            whole = self._append(
                Line(record.name, record.operator, tuple(arguments), keywords, shape)
            )
            for entry, number in enumerate(record.results):
                part_shape = tuple(tape.values[number].tensor.shape)
                part = Line("entry", None, (whole,), {}, part_shape, entry)
                self.values[number] = self._append(part)
            return
        (number,) = record.results
        same_type = results[0].tensor.dtype == tape.values[0].tensor.dtype
        is_same = record.name in SAME and isinstance(first, Moving) and same_type
        if is_same and isinstance(first, Moving) and self.lines[first.line].shape == shape:
            self.values[number] = first
            return
        self.values[number] = self._simplified(
            record, arguments, keywords, shape, results[0].place
        )

    def _argument(self, tape: Tape, y: object) -> object:
        """An argument of a record: Moving, Constant, a list of them, or as it is."""
        if isinstance(y, Ref):
            return self.values.get(y.value) or self._constant(tape, y.value)
        if isinstance(y, list):
            return [self._argument(tape, entry) for entry in y]
        return y

    def _constant(self, tape: Tape, number: int) -> Constant:
        """A value of the tape that does not move; views of one memory are the same constant."""
        tensor, place, _ = tape.values[number]
        number = tape.numbers_by_memory[memory_of(tensor)]
        if number not in self.known:
            compute = functools.partial(self.source.tensor, number)
            self.known[number] = Constant(compute, tuple(tensor.shape), place)
        return self.known[number]

    def _with_row_count(self, shape: object, place: Place) -> object:
        """A shape with RowCount in the place of the rows."""
        assert isinstance(shape, list | tuple)
        assert place is not None
        sizes = list(shape)
        sizes[place.axis] = RowCount(place.each)
        return sizes

    def _simplified(
        self,
        record: Record,
        arguments: list[object],
        keywords: Mapping[str, object],
        shape: tuple[int, ...],
        place: Place,
    ) -> Moving:
        """The line of a record; products with constants are joined with those before them."""
        name = record.name
        first = arguments[0]
        second = arguments[1] if len(arguments) > 1 else None
        found: Moving | None = None
        if keywords:
            pass
        elif isinstance(first, Moving) and isinstance(second, Constant):
            found = self._product(name, first, second, shape, place)
        elif name == "mul" and isinstance(first, Constant) and isinstance(second, Moving):
            found = self._product(name, second, first, shape, place)
        elif name == "add" and isinstance(first, Moving) and isinstance(second, Moving):
            found = self._sum(first, second)
        elif name == "neg" and isinstance(first, Moving):
            found = self._negative(first)
        elif name == "slice" and isinstance(first, Moving):
            found = self._slice(first, arguments[1:], shape)
        elif name == "cat":
            found = self._joined(arguments, shape)
        if found is not None:
            return found
        operator = QUICK.get(name, record.operator)
        return self._append(Line(name, operator, tuple(arguments), keywords, shape))

    def _factor(self, y: Moving) -> tuple[Moving, Constant] | None:
        """(z, c) if y is z c, c a constant of the same shape; None otherwise."""
        line = self.lines[y.line]
        if line.name != "times":
            return None
        z, c = line.arguments
        assert isinstance(z, Moving)
        assert isinstance(c, Constant)
        return z, c

    def _product(
        self, name: str, y: Moving, c: Constant, shape: tuple[int, ...], place: Place
    ) -> Moving | None:
        """Y times a constant of its shape, or times the slope at it."""
        if c.shape != shape or c.place != place or self.lines[y.line].shape != shape:
            return None
        if name == "tanh_backward":
            return self._times(y, c.tanh_slope)
        if name == "sigmoid_backward":
            return self._times(y, c.sigmoid_slope)
        return self._times(y, c) if name == "mul" else None

    def _times(self, y: Moving, c: Constant) -> Moving:
        """Y c, c a constant of the shape of y; one factor if y has one already."""
        line = self.lines[y.line]
        factor = self._factor(y)
        if factor is not None:
            y, before = factor
            together = c.derived(lambda: before.tensor * c.tensor)
            return self._append(line._replace(arguments=(y, together)))
        if line.name == "cat":
            return self._times_parts(line, c)
        return self._append(Line("times", torch.mul, (y, c), {}, line.shape))

    def _times_parts(self, line: Line, c: Constant) -> Moving:
        """[y z] c = [y c_1  z c_2]: the parts may have factors already."""
        parts, axis = line.arguments
        assert isinstance(parts, list)
        assert isinstance(axis, int)
        scaled = []
        begin = 0
        for part in parts:
            length = self.lines[part.line].shape[axis]
            scaled.append(self._times(part, c.part(axis, begin, length)))
            begin += length
        return self._append(line._replace(arguments=(scaled, axis)))

    def _negative(self, y: Moving) -> Moving | None:
        """-y as z (-c), if y is z c; None otherwise."""
        factor = self._factor(y)
        if factor is None:
            return None
        z, c = factor
        return self._append(
            self.lines[y.line]._replace(arguments=(z, c.derived(lambda: -c.tensor)))
        )

    def _sum(self, y: Moving, z: Moving) -> Moving | None:
        """Y + z as x (b + c) if y is x b and z is x c, or as parts side by side; else None."""
        y_factor = self._factor(y)
        z_factor = self._factor(z)
        if y_factor is None or z_factor is None:
            return self._side_by_side(y, z)
        b, c = y_factor[1], z_factor[1]
        if y_factor[0] != z_factor[0] or b.place != c.place:
            return None
        return self._times(y_factor[0], c.derived(lambda: b.tensor + c.tensor))

    def _side_by_side(self, y: Moving, z: Moving) -> Moving | None:
        """Y + z if one fills the zeros of the other: two parts joined, two entries stacked."""
        lines = [self.lines[y.line], self.lines[z.line]]
        shape = lines[0].shape
        if lines[0].name != lines[1].name or lines[0].arguments[1:3] != lines[1].arguments[1:3]:
            return None
        if lines[0].name == "slice_backward":
            parts = sorted((line.arguments[3:], line.arguments[0]) for line in lines)
            (first, a), (second, b) = parts
            axis = lines[0].arguments[2]
            assert isinstance(axis, int)
            size = shape[axis]
            if first[2:] != (1,) or second[2:] != (1,) or first[0] != 0 or second[1] != size:
                return None
            if first[1] != second[0]:
                return None
            return self._append(Line("cat", torch.cat, ([a, b], axis % len(shape)), {}, shape))
        if lines[0].name == "select_backward":
            axis = lines[0].arguments[2]
            assert isinstance(axis, int)
            parts = sorted((line.arguments[3], line.arguments[0]) for line in lines)
            if shape[axis] != 2 or [index for index, _ in parts] != [0, 1]:
                return None
            entries = [entry for _, entry in parts]
            return self._append(Line("stack", torch.stack, (entries, axis), {}, shape))
        return None

    def _slice(
        self, y: Moving, arguments: Sequence[object], shape: tuple[int, ...]
    ) -> Moving | None:
        """A part of y along one axis; that of a product is the product of the parts."""
        line = self.lines[y.line]
        axis, begin, _, *step = [*arguments, *[0, 0, None][len(arguments) :]]
        if not isinstance(axis, int) or not isinstance(begin, int) or step not in ([], [1]):
            return None
        axis %= len(shape)
        length = shape[axis]
        begin = min(begin + line.shape[axis] if begin < 0 else begin, line.shape[axis])
        factor = self._factor(y)
        if factor is not None:
            z, c = factor
            return self._times(self._narrow(z, axis, begin, length), c.part(axis, begin, length))
        return self._narrow(y, axis, begin, length)

    def _narrow(self, y: Moving, axis: int, begin: int, length: int) -> Moving:
        """The entries begin .. begin + length - 1 of y along an axis."""
        line = self.lines[y.line]
        if line.name == "narrow" and line.arguments[1] == axis:
            y, _, before, _ = line.arguments  # type: ignore[assignment]
            assert isinstance(before, int)
            begin += before
        shape = (*line.shape[:axis], length, *line.shape[axis + 1 :])
        wanted = Line("narrow", torch.narrow, (y, axis, begin, length), {}, shape)
        if wanted in self.lines:
            return Moving(self.lines.index(wanted))
        return self._append(wanted)

    def _joined(self, arguments: Sequence[object], shape: tuple[int, ...]) -> Moving | None:
        """Parts one after the other; those that are joined along the same axis already, too."""
        given = arguments[0]
        axis = arguments[1] if len(arguments) > 1 else 0
        assert isinstance(given, list)
        assert isinstance(axis, int)
        if not all(isinstance(part, Moving) for part in given):
            return None
        axis %= len(shape)
        parts: list[Moving] = []
        for part in given:
            line = self.lines[part.line]
            if line.name == "cat" and line.arguments[1] == axis:
                parts += moving_in(line.arguments)
            else:
                parts.append(part)
        if len(parts) == 1:
            return parts[0]
        return self._append(Line("cat", torch.cat, (parts, axis), {}, shape))

    # The code

    def _write(self, last: Moving) -> tuple[str, tuple[tuple[str, object], ...]]:
        """The source of a function of (the input, constants, rows), and the names that it uses."""
        uses = self._uses(last)
        names: dict[str, object] = {}
        body: list[str] = []
        for number, line in enumerate(self.lines):
            if not uses[number] or line.name == "given":
                continue
            if self._is_joined(number, uses):
                continue
            body.append(f"    y{number} = {self._expression(line, names, uses)}")
        unpack = "".join(f"c{i}, " for i in range(len(self.constants)))
        head = ["def step(y0, constants, rows):"]
        if unpack:
            head.append(f"    {unpack}= constants")
        source = "\n".join([*head, *body, f"    return y{last.line}"])
        return source, tuple(names.items())

    def _uses(self, last: Moving) -> list[list[int]]:
        """For each line, the lines that read it, once for each time; [-1] for the last one."""
        uses: list[list[int]] = [[] for _ in self.lines]
        uses[last.line].append(-1)
        for number in reversed(range(len(self.lines))):
            if uses[number]:
                for y in moving_in(self.lines[number].arguments):
                    uses[y.line].append(number)
        return uses

    def _is_joined(self, number: int, uses: Sequence[Sequence[int]]) -> bool:
        """Is this product written with the sum that alone reads it?"""
        (reader, *others) = uses[number]
        if others or reader < 0:
            return False
        return self._joined_term(self.lines[reader], uses) == number

    def _joined_term(self, line: Line, uses: Sequence[Sequence[int]]) -> int | None:
        """The product that a sum of two is written with, as one operation: its line, or None."""
        if line.name != "add" or line.keywords or len(line.arguments) != 2:
            return None
        for y in reversed(line.arguments):
            if not isinstance(y, Moving) or len(uses[y.line]) != 1:
                continue
            term = self.lines[y.line]
            if term.name in ("times", "mm") and term.shape == line.shape:
                return y.line
        return None

    def _expression(
        self, line: Line, names: dict[str, object], uses: Sequence[Sequence[int]]
    ) -> str:
        """The right-hand side of a line."""
        if line.name == "entry":
            (whole,) = line.arguments
            assert isinstance(whole, Moving)
            return f"y{whole.line}[{line.entry}]"
        joined = self._joined_term(line, uses)
        if joined is not None:
            term = self.lines[joined]
            (other,) = [y for y in line.arguments if y != Moving(joined)]
            function = "addcmul" if term.name == "times" else "addmm"
            names[function] = getattr(torch, function)
            terms = ", ".join(self._text(y, names) for y in (other, *term.arguments))
            return f"{function}({terms})"
        name = f"{line.name}_"
        while names.setdefault(name, line.operator) is not line.operator:
            name += "_"  # another overload of the same name
        arguments = [self._text(y, names) for y in line.arguments]
        arguments += [f"{key}={self._text(y, names)}" for key, y in line.keywords.items()]
        return f"{name}({', '.join(arguments)})"

    def _text(self, y: object, names: dict[str, object]) -> str:
        """An argument as code."""
        if isinstance(y, Moving):
            return f"y{y.line}"
        if isinstance(y, RowCount):
            return "rows" if y.each == 1 else f"{y.each} * rows"
        if isinstance(y, Constant):
            return f"c{self._place_of_constant(y)}"
        if isinstance(y, list | tuple):
            return f"[{', '.join(self._text(entry, names) for entry in y)}]"
        if y is None or isinstance(y, bool | int):
            return repr(y)
        name = f"object_{len(names)}"  # a number, a type of tensors, ...
        names[name] = y
        return name

    def _place_of_constant(self, y: Constant) -> int:
        """Where the constants of a step hold this one; it is added if they do not."""
        for i, known in enumerate(self.constants):
            if known is y:
                return i
        self.constants.append(y)
        return len(self.constants) - 1


def moving_in(y: object) -> list[Moving]:
    """The moving values among arguments, also those in lists."""
    if isinstance(y, Moving):
        return [y]
    if type(y) in (list, tuple):
        assert isinstance(y, list | tuple)
        return list(itertools.chain.from_iterable(map(moving_in, y)))
    return []


def references_in(y: object) -> list[int]:
    """The numbers of the values among the arguments of a record."""
    if isinstance(y, Ref):
        return [y.value]
    if isinstance(y, list) or type(y) is tuple:
        return list(itertools.chain.from_iterable(map(references_in, y)))
    return []


def needed_records(tape: Tape, given: int, result: int) -> list[Record]:
    """The records between a value and another that depends on it, in order."""
    moving = {given}
    depending = []
    for record in tape.records:
        read = references_in((*record.arguments, *record.keywords.values()))
        if moving.intersection(read):
            moving.update(record.results)
            depending.append(record)
    needed = {result}
    found = []
    for record in reversed(depending):
        if needed.intersection(record.results):
            needed.update(references_in((*record.arguments, *record.keywords.values())))
            found.append(record)
    return found[::-1]


def refuse_if_not_linear(
    name: str, arguments: Sequence[object], keywords: Mapping[str, object]
) -> None:
    """Refuse an operation that is not linear in those of its arguments that move."""
    if moving_in(list(keywords.values())):
        raise MixesRows(f"operation {name} with a named argument that moves")
    flat = [*itertools.chain(*([y] if not isinstance(y, list) else y for y in arguments))]
    moves = [isinstance(y, Moving) for y in flat]
    constants = [y for y in flat if isinstance(y, Constant)]
    if name in LINEAR:
        linear = not any(bool(y.tensor.any()) for y in constants)  # a constant term must be zero
    elif name in PRODUCTS:
        linear = sum(moves) == 1
    elif name == "addmm":
        linear = moves[0] and sum(moves) == 2
    elif name == "where":
        linear = not moves[0] and not any(bool(y.tensor.any()) for y in constants[1:])
    else:
        known = name in LINEAR_IN_FIRST or name.endswith(("_backward", "_backward_data"))
        linear = known and moves[0] and sum(moves) == 1
    if not linear:
        raise MixesRows(f"operation {name}, which is not linear")


@functools.lru_cache(maxsize=64)
def compiled(source: str, names: tuple[tuple[str, object], ...]) -> StepCode:
    """The function `step` of this source, in which `names` stand for these objects."""
    scope: dict[str, object] = dict(names)
    exec(compile(source, "<step>", "exec"), scope)  # the source is made above, of numbers alone
    step: StepCode = scope["step"]  # type: ignore[assignment]
    return step

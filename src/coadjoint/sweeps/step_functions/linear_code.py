"""LinearCode: the operations of a tape that are linear in one input, as a program for one step.

The tape holds the rows of all time steps. Its values that do not depend on the linear input (the
slopes) stay as they are and are cut by time steps; the rest is run for one step after the other.
`lines` sees to it that few operations are left.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from .lines import CodeConstant, CodeLine, CodeLines, Moving, RowCount, SharedConstants, moving_in
from .row_rules import SHAPED, MixesRows, Place
from .tape import Record, Ref, Replay, StepTape, memory_of

StepCode = Callable[[Tensor, tuple[Tensor, ...], int], Tensor]
Function = Callable[..., object]
Fetch = Callable[[list[object]], Sequence[object]]


# Linear in all tensors among their arguments.
NAMES = """_to_copy _unsafe_view add alias cat clone constant_pad_nd cumsum detach expand mean neg
    permute select select_backward slice slice_backward split split_with_sizes squeeze stack sub
    sum t transpose unbind unsafe_split
    unsafe_split_with_sizes unsqueeze view"""
LINEAR = frozenset(NAMES.split())
# Linear in one of their arguments, the first, or any one of the two factors.
LINEAR_IN_FIRST = frozenset({"div", "masked_fill", "true_divide"})
ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
PRODUCTS = frozenset({"mul", "mm", "bmm"})
# They return the tensor they are given, if its shape and type stay the same.
SAME = frozenset(
    {"detach", "alias", "clone", "expand", "view", "slice", "_unsafe_view", "_to_copy"}
)


GIVEN, ROWS = 0, 1  # the places of the input and of the number of rows


class StepProgram:
    """Operations on numbered values, one after the other: a function of one time step."""

    def __init__(self) -> None:
        self.values: list[object] = [None, None]  # as they are before the first operation
        self.constant_places: list[int] = []
        self.result = GIVEN
        # (the place of the result, the operation, what takes its arguments from the values)
        self.calls: list[tuple[int, Function, Fetch]] = []

    def hold(self, value: object) -> int:
        """Add a value; returns its place."""
        self.values.append(value)
        return len(self.values) - 1

    def call(self, function: Function, arguments: Sequence[int], *fixed: object) -> int:
        """Add an operation on values at these places, then on fixed ones; the result's place."""
        places = [*arguments, *map(self.hold, fixed)]
        # Of several places itemgetter makes a tuple; of one it would make the value itself.
        fetch = itemgetter(*places) if len(places) != 1 else itemgetter(one_place(places[0]))
        target = self.hold(None)
        self.calls.append((target, function, fetch))
        return target

    def __call__(self, given: Tensor, constants: Sequence[Tensor], rows: int) -> Tensor:
        """The result for one step of `rows` rows."""
        values = self.values.copy()
        values[GIVEN] = given
        values[ROWS] = rows
        for place, constant in zip(self.constant_places, constants, strict=True):
            values[place] = constant
        for target, function, fetch in self.calls:
            values[target] = function(*fetch(values))
        result = values[self.result]
        assert isinstance(result, Tensor)
        return result


def one_place(place: int) -> slice:
    """The slice with the value at this place alone."""
    return slice(place, place + 1)


def as_list(*entries: object) -> list[object]:
    """The entries as a list."""
    return list(entries)


def call_with_names(function: Function, names: Sequence[str], *arguments: object) -> object:
    """Call a function; the last arguments have these names."""
    count = len(arguments) - len(names)
    return function(*arguments[:count], **dict(zip(names, arguments[count:], strict=True)))


class LinearCode:
    """The map from one input to a result of a tape, step by step; a linear one, unless told."""

    def __init__(
        self, tape: StepTape, given: int, result: int, known: SharedConstants, linear: bool = True
    ) -> None:
        """given, result: numbers of values of the tape, with rows along axis 0.

        known: constants that several codes share; it is added to.
        linear: refuse a result that is not linear in what is given.
        """
        self.linear = linear
        self.known = known.by_number
        self.lines = CodeLines(known.slopes)
        self.values: dict[int, Moving | CodeConstant] = {}  # by their numbers on the tape
        shape = tuple(tape.values[given].tensor.shape)
        self.values[given] = self.lines.append(CodeLine("given", None, (), {}, shape))
        for record in needed_records(tape, given, result):
            self._add(tape, record)
        last = self.values[result]
        if not isinstance(last, Moving):
            raise MixesRows("a result that does not depend on the input")
        self.constants: list[CodeConstant] = []
        self.step: StepCode = self._write(last)

    def slopes(self, values: Replay, sizes: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """The constants of each time step, as views; sizes: the rows of these steps."""
        by_step = []
        for constant in self.constants:
            place = constant.place
            if place is None:
                by_step.append([constant.at(values)] * len(sizes))
                continue
            lengths = [n * place.each for n in sizes]
            by_step.append(list(constant.at(values).split(lengths, place.axis)))
        if not by_step:
            return [()] * len(sizes)
        return list(zip(*by_step, strict=True))

    # What the records of a tape become

    def _add(self, tape: StepTape, record: Record) -> None:
        """Add the lines of a record whose arguments move."""
        arguments = [self._argument(tape, y) for y in record.arguments]
        keywords = {key: self._argument(tape, y) for key, y in record.keywords.items()}
        if self.linear:
            refuse_if_not_linear(record.name, arguments, keywords)
        at = SHAPED.get(record.name)
        results = [tape.values[number] for number in record.results]
        if at is not None:
            arguments[at] = self._with_row_count(arguments[at], results[0].place)
        shape = tuple(results[0].tensor.shape)
        first = arguments[0]
        if record.entries is not None:
            whole = self.lines.append(
                CodeLine(record.name, record.operator, tuple(arguments), keywords, shape)
            )
            for entry, number in zip(record.entries, record.results, strict=True):
                part_shape = tuple(tape.values[number].tensor.shape)
                part = CodeLine("entry", None, (whole,), {}, part_shape, entry)
                self.values[number] = self.lines.append(part)
            return
        (number,) = record.results
        same_type = results[0].tensor.dtype == tape.values[0].tensor.dtype
        is_same = record.name in SAME and isinstance(first, Moving) and same_type
        if is_same and isinstance(first, Moving) and self.lines.all[first.line].shape == shape:
            self.values[number] = first
            return
        self.values[number] = self.lines.add(
            record.name, record.operator, arguments, keywords, shape, results[0].place
        )

    def _argument(self, tape: StepTape, y: object) -> object:
        """An argument of a record: Moving, CodeConstant, a list of them, or as it is."""
        if isinstance(y, Ref):
            return self.values.get(y.value) or self._constant(tape, y.value)
        if isinstance(y, list):
            return [self._argument(tape, entry) for entry in y]
        return y

    def _constant(self, tape: StepTape, number: int) -> CodeConstant:
        """A value of the tape that does not move; views of one memory are the same constant."""
        number = tape.numbers_by_memory[memory_of(tape.values[number].tensor)]
        if number not in self.known:
            tensor, place, made_by = tape.values[number]
            is_zero = made_by is not None and tape.records[made_by].name in ZEROS
            if place is None and not is_zero:
                is_zero = not bool(tensor.detach().any())
            compute = operator.methodcaller("tensor", number)
            self.known[number] = CodeConstant(compute, tuple(tensor.shape), place, is_zero)
        return self.known[number]

    def _with_row_count(self, shape: object, place: Place) -> object:
        """A shape with RowCount in the place of the rows."""
        assert isinstance(shape, list | tuple)
        assert place is not None
        sizes = list(shape)
        sizes[place.axis] = RowCount(place.each)
        return sizes

    # The program

    def _write(self, last: Moving) -> StepProgram:
        """The operations of one step, and in self.constants what they read beside the input."""
        uses = self._uses(last)
        program = StepProgram()
        places: dict[int, int] = {}  # of lines among the values of the program
        for number, line in enumerate(self.lines.all):
            if line.name == "given":
                places[number] = GIVEN
            elif uses[number] and not self._is_joined(number, uses):
                places[number] = self._add_call(program, line, places, uses)
        program.result = places[last.line]
        return program

    def _uses(self, last: Moving) -> list[list[int]]:
        """For each line, the lines that read it, once for each time; [-1] for the last one."""
        uses: list[list[int]] = [[] for _ in self.lines.all]
        uses[last.line].append(-1)
        for number in reversed(range(len(self.lines.all))):
            if uses[number]:
                for y in moving_in(self.lines.all[number].arguments):
                    uses[y.line].append(number)
        return uses

    def _is_joined(self, number: int, uses: Sequence[Sequence[int]]) -> bool:
        """Is this product written with the sum that alone reads it?"""
        (reader, *others) = uses[number]
        if others or reader < 0:
            return False
        return self._joined_term(self.lines.all[reader], uses) == number

    def _joined_term(self, line: CodeLine, uses: Sequence[Sequence[int]]) -> int | None:
        """The product that a sum of two is written with, as one operation: its line, or None."""
        if line.name != "add" or line.keywords or len(line.arguments) != 2:
            return None
        for y in reversed(line.arguments):
            if not isinstance(y, Moving) or len(uses[y.line]) != 1:
                continue
            term = self.lines.all[y.line]
            if term.name in ("times", "mm") and term.shape == line.shape:
                return y.line
        return None

    def _add_call(
        self,
        program: StepProgram,
        line: CodeLine,
        places: Mapping[int, int],
        uses: Sequence[Sequence[int]],
    ) -> int:
        """Add the operation of a line; returns the place of its result."""
        if line.name == "entry":
            (whole,) = line.arguments
            return program.call(operator.getitem, [self._place(program, whole, places)], line.entry)
        joined = self._joined_term(line, uses)
        if joined is not None:
            term = self.lines.all[joined]
            (other,) = [y for y in line.arguments if y != Moving(joined)]
            function = torch.addcmul if term.name == "times" else torch.addmm
            terms = (other, *term.arguments)
            return program.call(function, [self._place(program, y, places) for y in terms])
        assert line.operator is not None
        arguments = [self._place(program, y, places) for y in line.arguments]
        if not line.keywords:
            return program.call(line.operator, arguments)
        named = [self._place(program, y, places) for y in line.keywords.values()]
        with_names = functools.partial(call_with_names, line.operator, tuple(line.keywords))
        return program.call(with_names, [*arguments, *named])

    def _place(self, program: StepProgram, y: object, places: Mapping[int, int]) -> int:
        """The place of an argument among the values of the program."""
        if isinstance(y, Moving):
            return places[y.line]
        if isinstance(y, RowCount):
            return ROWS if y.each == 1 else program.call(operator.mul, [ROWS], y.each)
        if isinstance(y, CodeConstant):
            return program.constant_places[self._number_of_constant(program, y)]
        if isinstance(y, list | tuple):
            return program.call(as_list, [self._place(program, entry, places) for entry in y])
        return program.hold(y)

    def _number_of_constant(self, program: StepProgram, y: CodeConstant) -> int:
        """Where the constants of a step hold this one; it is added if they do not."""
        for i, known in enumerate(self.constants):
            if known is y:
                return i
        self.constants.append(y)
        program.constant_places.append(program.hold(None))
        return len(self.constants) - 1


def references_in(y: object) -> list[int]:
    """The numbers of the values among the arguments of a record."""
    if isinstance(y, Ref):
        return [y.value]
    if isinstance(y, list) or type(y) is tuple:
        return list(itertools.chain.from_iterable(map(references_in, y)))
    return []


def needed_records(tape: StepTape, given: int, result: int) -> list[Record]:
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
    constants = [y for y in flat if isinstance(y, CodeConstant)]
    if name in LINEAR:
        linear = all(y.is_zero for y in constants)  # a constant term must be zero
    elif name in PRODUCTS:
        linear = sum(moves) == 1
    elif name == "addmm":
        linear = moves[0] and sum(moves) == 2
    elif name == "where":
        linear = not moves[0] and all(y.is_zero for y in constants[1:])
    else:
        known = name in LINEAR_IN_FIRST or name.endswith(("_backward", "_backward_data"))
        linear = known and moves[0] and sum(moves) == 1
    if not linear:
        raise MixesRows(f"operation {name}, which is not linear")

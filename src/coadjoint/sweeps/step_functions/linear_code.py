"""LinearCode: the operations of a tape that are linear in one input, as Python code for one step.

The tape holds the rows of all time steps. Its values that do not depend on the linear input (the
slopes) stay as they are and are cut by time steps; the rest is run for one step after the other.
`lines` sees to it that few operations are left.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .lines import CodeConstant, CodeLine, CodeLines, Moving, RowCount, SharedConstants, moving_in
from .row_rules import SHAPED, MixesRows, Place
from .tape import Record, Ref, Replay, StepTape, memory_of

StepCode = Callable[[Tensor, tuple[Tensor, ...], int], Tensor]


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
        text, names = self._write(last)
        self.step: StepCode = compiled(text, names)

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

    # The code

    def _write(self, last: Moving) -> tuple[str, tuple[tuple[str, object], ...]]:
        """The source of a function of (the input, constants, rows), and the names that it uses."""
        uses = self._uses(last)
        names: dict[str, object] = {}
        body: list[str] = []
        for number, line in enumerate(self.lines.all):
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

    def _expression(
        self, line: CodeLine, names: dict[str, object], uses: Sequence[Sequence[int]]
    ) -> str:
        """The right-hand side of a line."""
        if line.name == "entry":
            (whole,) = line.arguments
            assert isinstance(whole, Moving)
            return f"y{whole.line}[{line.entry}]"
        joined = self._joined_term(line, uses)
        if joined is not None:
            term = self.lines.all[joined]
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
        if isinstance(y, CodeConstant):
            return f"c{self._place_of_constant(y)}"
        if isinstance(y, list | tuple):
            return f"[{', '.join(self._text(entry, names) for entry in y)}]"
        if y is None or isinstance(y, bool | int):
            return repr(y)
        name = f"object_{len(names)}"  # a number, a type of tensors, ...
        names[name] = y
        return name

    def _place_of_constant(self, y: CodeConstant) -> int:
        """Where the constants of a step hold this one; it is added if they do not."""
        for i, known in enumerate(self.constants):
            if known is y:
                return i
        self.constants.append(y)
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


@functools.lru_cache(maxsize=64)
def compiled(source: str, names: tuple[tuple[str, object], ...]) -> StepCode:
    """The function `step` of this source, in which `names` stand for these objects."""
    scope: dict[str, object] = dict(names)
    exec(compile(source, "<step>", "exec"), scope)  # the source is made above, of numbers alone
    step: StepCode = scope["step"]  # type: ignore[assignment]
    return step

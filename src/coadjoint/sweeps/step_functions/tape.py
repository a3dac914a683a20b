"""StepTape: one call of a step with the rows of all time steps, its operations written down.

The tensors that the step finds for itself (parameters of a module, variables of a closure) are
replaced by copies without a history, so that derivatives by them can be taken and handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..torch_internals import OperationMode, storage_address
from .products import Operator, computed
from .row_rules import SHAPED, MixesRows, Operand, Place, places_of_results


class OperatorOverload(Protocol):
    """An operation of torch as a dispatch mode sees it, such as aten.add.Tensor."""

    overloadpacket: Callable[..., object]
    namespace: str
    tags: Sequence[torch.Tag]

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Compute it."""

    def name(self) -> str:
        """As aten::add.Tensor."""


class Found(TorchFunctionMode):
    """A context in which tensors with a history or a gradient are replaced by others.

    stand_ins  what replaces them, by the tensor's id; None: they are found, and each replaced by a
               copy that can be differentiated by, kept in `tensors` and `copies`
    """

    def __init__(self, own: Sequence[Tensor], stand_ins: Mapping[int, Tensor] | None = None):
        # `own`: the arguments of the step, which are left as they are.
        super().__init__()
        self.tensors: list[Tensor] = []
        self.copies: list[Tensor] = []
        self.fixed = stand_ins is not None
        self.stand_ins = dict(stand_ins or {})
        self.made: dict[int, Tensor] = {id(y): y for y in own}  # and what is computed from them

    def __torch_function__(
        self,
        func: Operator,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Call `func` with the stand-ins of its arguments."""
        args = self._replaced(args)
        if kwargs:
            kwargs = dict(zip(kwargs, self._replaced(list(kwargs.values())), strict=True))
        result = func(*args, **(kwargs or {}))
        for y in result if isinstance(result, tuple | list) else (result,):
            if isinstance(y, Tensor):
                self.made[id(y)] = y
        return result

    def _replaced(self, arguments: Sequence[object]) -> list[object]:
        """The arguments, with stand-ins for tensors, also of those in lists."""
        replaced: list[object] = []
        for argument in arguments:
            if isinstance(argument, Tensor):
                argument = self._stand_in(argument)
            elif isinstance(argument, list | tuple) and type(argument) in (list, tuple):
                argument = type(argument)(self._replaced(argument))
            replaced.append(argument)
        return replaced

    def _stand_in(self, y: Tensor) -> Tensor:
        """What stands for y."""
        known = self.stand_ins.get(id(y))
        if known is not None:
            return known
        if self.fixed or not y.requires_grad or id(y) in self.made:
            return y
        copy = y.detach().requires_grad_()
        self.tensors.append(y)
        self.copies.append(copy)
        self.stand_ins[id(y)] = copy
        self.made[id(copy)] = copy
        return copy


class TapeValue(NamedTuple):
    """A tensor on the tape: its values, where its rows lie, and the operation that made it."""

    tensor: Tensor
    place: Place
    made_by: int | None  # number of the record; None for what was there before


class Ref(NamedTuple):
    """A tensor among the arguments of a record: the number of its value."""

    value: int


class Record(NamedTuple):
    """One operation: its arguments, tensors as Ref, and the values that it made.

    entries   where these are in what it returns, if that is a list; None if it is one tensor
    """

    operator: Operator
    name: str
    arguments: tuple[object, ...]
    keywords: Mapping[str, object]
    results: tuple[int, ...]
    entries: tuple[int, ...] | None


class StepTape(OperationMode):
    """A context that writes down all operations below autograd, and where rows lie in them."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.values: list[TapeValue] = []
        self.records: list[Record] = []
        self.numbers: dict[int, int] = {}  # of a value, by the id of its tensor
        self.numbers_by_memory: dict[tuple[object, ...], int] = {}
        self.holders: dict[int, set[int]] = {}  # the values that lie in one memory, by its address
        self.outdated: set[int] = set()  # those of them that have been changed through another

    def note(self, y: Tensor, place: Place, made_by: int | None = None) -> int:
        """Write down a tensor; returns its number."""
        number = len(self.values)
        self.values.append(
            TapeValue(y, place, made_by)
        )  # which keeps its id and memory from others
        self.numbers[id(y)] = number
        self.numbers_by_memory.setdefault(memory_of(y), number)
        self.holders.setdefault(storage_address(y.untyped_storage()), set()).add(number)
        return number

    def operators(self) -> list[Operator]:
        """The operations so far."""
        return [record.operator for record in self.records]

    def number_of(self, y: Tensor) -> int:
        """The number of a tensor; one that was not made on the tape is noted, without rows.

        autograd hands what it saved for a backward on in new objects, with the same memory.
        """
        number = self.numbers.get(id(y))
        if number is None:
            number = self.numbers_by_memory.get(memory_of(y))
        return self.note(y, None) if number is None else number

    def __torch_dispatch__(
        self,
        func: OperatorOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Compute an operation, and write it down."""
        kwargs = kwargs or {}
        operator = func
        if func.namespace != "aten" or "out" in kwargs:
            raise MixesRows(f"operation {func}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise MixesRows(f"random operation {func}")
        in_place = func.overloadpacket.__name__.endswith("_")
        if in_place:
            self._outdate_views(args[0])
            operator = without_mutation(func)
        arguments = [self._argument(y) for y in args]
        keywords = {key: self._argument(y) for key, y in kwargs.items()}
        result = func(*args, **kwargs)
        results = [y for y in as_tuple(result) if isinstance(y, Tensor)]
        described = [self._described(y) for y in (*arguments, *keywords.values())]
        shapes = [tuple(y.shape) for y in results]
        name = operator.overloadpacket.__name__
        places = places_of_results(name, described, shapes, self.rows)
        if in_place:  # from now on, this memory holds the new value
            self.numbers_by_memory.pop(memory_of(results[0]), None)
        made_by = len(self.records)
        made = [self.note(y, place, made_by) for y, place in zip(results, places, strict=True)]
        entries: tuple[int, ...] | None = None
        if isinstance(result, tuple | list):
            entries = tuple(i for i, y in enumerate(result) if isinstance(y, Tensor))
        record = Record(operator, name, tuple(arguments), keywords, tuple(made), entries)
        self.records.append(record)
        return result

    def _outdate_views(self, y: object) -> None:
        """Note that y is changed, and with it what shares its memory: that must not be read again.

        What was not made on the tape must not be changed.
        """
        assert isinstance(y, Tensor)
        self.number_of(y)
        for other in self.holders[storage_address(y.untyped_storage())]:
            value = self.values[other]
            if value.made_by is None:
                raise MixesRows("a tensor that is not the step's own, and changed")
            if memory_of(value.tensor) != memory_of(y) and not are_apart(value.tensor, y):
                self.outdated.add(other)

    def _argument(self, y: object) -> object:
        """An argument with tensors as Ref."""
        if isinstance(y, Tensor):
            number = self.number_of(y)
            if number in self.outdated:
                raise MixesRows("a tensor that was changed through a view of it")
            return Ref(number)
        if isinstance(y, list | tuple):
            return [self._argument(entry) for entry in y]
        return y

    def _described(self, y: object) -> object:
        """An argument with tensors as Operand."""
        if isinstance(y, Ref):
            value = self.values[y.value]
            return Operand(tuple(value.tensor.shape), value.place)
        if isinstance(y, list):
            return [self._described(entry) for entry in y]
        return y


def as_tuple(result: object) -> Iterable[object]:
    """The results of an operation, one or several."""
    return result if isinstance(result, tuple | list) else (result,)


def without_mutation(operator: OperatorOverload) -> OperatorOverload:
    """The operation that returns what this one, such as add_, writes to its argument."""
    name, _, overload = operator.name().removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, name[:-1], None)
    if packet is None:
        raise MixesRows(f"operation {operator}")
    functional: OperatorOverload = getattr(packet, overload or "default")
    return functional


def are_apart(y: Tensor, z: Tensor) -> bool:
    """Are y and z, views of one memory, columns of a matrix that have none in common?"""
    if y.dim() != 2 or y.stride() != z.stride() or y.stride()[1] != 1:
        return False
    width = y.stride()[0]  # of the matrix
    shift = (z.storage_offset() - y.storage_offset()) % width
    return y.shape[1] <= shift <= width - z.shape[1]


def memory_of(y: Tensor) -> tuple[object, ...]:
    """Where the entries of a tensor lie: tensors that have it in common have the same values."""
    return y.data_ptr(), y.shape, y.stride(), y.dtype


class Replay:
    """The values of a tape at other inputs, of any number of rows; each when it is first read.

    A tape with a few rows tells all operations; those of a derivative, too, if it was written on
    the tape.
    """

    def __init__(self, tape: StepTape, inputs: Sequence[Tensor]) -> None:
        """inputs: in place of the values that were noted first."""
        self.tape = tape
        self.rows = len(inputs[0])
        self.computed: dict[int, Tensor] = dict(enumerate(inputs))
        self.constants: dict[object, Tensor] = {}  # what is computed from values, see lines

    def tensor(self, number: int) -> Tensor:
        """The value of this number."""
        if number not in self.computed:
            value = self.tape.values[number]
            if value.made_by is None:
                self.computed[number] = value.tensor.detach()
            else:
                self._compute(self.tape.records[value.made_by])
        return self.computed[number]

    def _compute(self, record: Record) -> None:
        """Repeat an operation."""
        arguments = [self._with_tensors(y) for y in record.arguments]
        keywords = {key: self._with_tensors(y) for key, y in record.keywords.items()}
        value = self.tape.values[record.results[0]]
        if record.name in SHAPED and value.place is not None:
            shape = list(value.tensor.shape)
            shape[value.place.axis] = self.rows * value.place.each
            arguments[SHAPED[record.name]] = shape
        made = as_tuple(computed(record.operator, arguments, keywords, self.rows))
        results = [y for y in made if isinstance(y, Tensor)]
        self.computed.update(zip(record.results, results, strict=True))

    def _with_tensors(self, y: object) -> object:
        """An argument of a record with tensors in place of their numbers."""
        if isinstance(y, Ref):
            return self.tensor(y.value)
        if isinstance(y, list):
            return [self._with_tensors(entry) for entry in y]
        return y

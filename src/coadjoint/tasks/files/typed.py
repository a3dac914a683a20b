"""Typed columns of Parquet and Arrow files as numbers, words and times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...errors import one_line
from .columns import Roles, TableColumns
from .parsing import EXACT_BELOW, explain_inexact, or_without_column, parse_times
from .room import make_room
from .sheet import Options, Problems
from .table import KIND_ADVICE
from .texts import NumberTexts, TextCollector, WordCollector

if TYPE_CHECKING:
    Arrow = Any  # pyarrow has no types: its module, its arrays and their types


class ColumnReader(Protocol):
    """What columns are read from: a file, or some of its rows."""

    pa: Arrow
    schema: Arrow

    def kind(self, name: str) -> str:
        """What a column can hold."""

    def type_name(self, name: str) -> str:
        """The type of a column, for messages."""

    def read_column(self, name: str) -> Iterator[Arrow]:
        """A column in parts, as arrays of pyarrow whose values can be read."""


class BatchOfRows:
    """Some rows of a file with typed columns."""

    def __init__(self, file: ColumnReader, batch: Arrow) -> None:
        self.file = file
        self.pa = file.pa
        self.schema = file.schema
        self.batch = batch

    def kind(self, name: str) -> str:
        """What a column can hold."""
        return self.file.kind(name)

    def type_name(self, name: str) -> str:
        """The type of a column, for messages."""
        return self.file.type_name(name)

    def read_column(self, name: str) -> Iterator[Arrow]:
        """The part of a column that is in these rows."""
        yield self.batch.column(self.batch.schema.get_field_index(name))


def typed_columns(
    file: ColumnReader,
    count: int,
    first: int,
    roles: Roles,
    options: Options,
    problems: Problems,
    where: Callable[[int, str], str],
) -> TableColumns:
    """The columns of `count` rows that have a role. They are read one by one, each in parts.

    first: the number of the first row; where: puts a row and a column in words.
    """
    kind_of_line = np.int32 if first + count < 2**31 else np.int64
    columns = TableColumns(lines=np.arange(first, first + count, dtype=kind_of_line))
    columns.inputs = make_room(count, len(roles.features))
    for name in used_columns(roles):
        kind = file.kind(name)
        is_target = name in roles.targets
        is_label = is_target and (kind in ("words", "bool") or options.kind == "classify")
        if name == roles.time:
            read_times(file, name, columns, options, problems, where, first)
        elif name == roles.id or name in roles.categorical or is_label:
            collector = WordCollector()
            for array in file.read_column(name):
                collector.add(to_words(file.pa, array))
            columns.words[name] = collector.collected()
        elif is_target and options.kind is None:
            problems.add(
                f"{problems.path} column '{one_line(name)}': the target holds numbers "
                f"({file.type_name(name)}). {KIND_ADVICE}"
            )
        else:
            values = np.empty(count) if is_target else columns.inputs[:, roles.features.index(name)]
            columns.numbers[name] = values
            begin = 0
            for array in file.read_column(name):
                values[begin : begin + len(array)], inexact = to_numbers(file.pa, array)
                for row, value in inexact:
                    complaint = f"{explain_inexact(value)}{or_without_column(options)}."
                    place = where(first + begin + row, name)
                    problems.add(f"{place}: {complaint}", ("exact", name))
                begin += len(array)
    return columns


def read_times(
    file: ColumnReader,
    name: str,
    columns: TableColumns,
    options: Options,
    problems: Problems,
    where: Callable[[int, str], str],
    first: int = 1,
) -> None:
    """Put the time column into `columns`: numbers, or dates as microseconds since 1970.

    name: that of the column; where: puts a row and a column in words; first: the number of the
    first row.
    """
    pa = file.pa
    if file.kind(name) == "words":
        texts = TextCollector()
        for array in file.read_column(name):
            texts.add(to_words(pa, array))
        columns.stamps = texts.collected()
        times = parse_times(list(columns.stamps), options)
        columns.time = times.time
        columns.has_dates = times.has_dates
        columns.date_order = times.order
        for i, complaint in times.wrong:
            problems.add(f"{where(first + i, name)}: {complaint}", "time")
        return
    arrow_type = file.schema.field(name).type
    columns.has_dates = file.kind(name) == "time"
    as_written: list[np.ndarray] = []  # the numbers that are written as text
    times_in_parts: list[np.ndarray] = []
    begin = first
    for array in file.read_column(name):
        for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)):
            place = where(int(row) + begin, name)
            problems.add(f"{place}: the time is missing. Fill it in.", "time")
        if columns.has_dates:
            zone = getattr(arrow_type, "tz", None)
            if arrow_type != pa.timestamp("us", tz=zone):
                whole = pa.int32() if arrow_type.bit_width == 32 else pa.int64()
                as_written.append(array.cast(whole).fill_null(0).to_numpy())
            array = array.cast(pa.timestamp("us", tz=zone), safe=False).cast(pa.int64())
        time = array.fill_null(0).to_numpy(zero_copy_only=False)
        if time.dtype.kind == "f":
            for row in np.flatnonzero(~np.isfinite(time)):
                place = where(int(row) + begin, name)
                problems.add(f"{place}: the time is not finite. Fix the value.", "time")
        elif time.dtype == np.uint64:
            as_written.append(time)
        times_in_parts.append(time if time.dtype.kind == "f" else time.astype(np.int64))
        begin += len(time)
    columns.time = np.concatenate(times_in_parts)
    values = np.concatenate(as_written) if as_written else columns.time

    def write(values: np.ndarray) -> list[str]:
        """The times as text."""
        return to_words(pa, pa.array(values).cast(arrow_type))

    columns.stamps = NumberTexts(values, write)


def to_words(pa: Arrow, array: Arrow) -> list[str]:
    """The words of a column, "" where missing. Entries of a dictionary are shared, not copied."""
    if pa.types.is_dictionary(array.type):
        known = [word or "" for word in array.dictionary.to_pylist()]
        return ["" if i is None else known[i] for i in array.indices.to_pylist()]
    return [word or "" for word in array.cast(pa.string()).to_pylist()]


def to_numbers(pa: Arrow, array: Arrow) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The numbers of a column as float64, NaN where missing.

    Also [(row, value)] of whole numbers that a double cannot hold.
    """
    gaps = array.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    exact = array.fill_null(0).to_numpy(zero_copy_only=False)
    values = exact.astype(np.float64)
    inexact = []
    if exact.dtype.kind in "iu":
        for row in np.flatnonzero(np.abs(values) >= EXACT_BELOW):
            if int(exact[row]) != int(values[row]):
                inexact.append((int(row), int(exact[row])))
    values[gaps] = np.nan
    return values, inexact


def kind_of_column(pa: Arrow, arrow_type: Arrow) -> str:
    """What a column of this type can hold: words, whole, number, bool, time or other."""
    types = pa.types
    if types.is_dictionary(arrow_type):
        is_words = kind_of_column(pa, arrow_type.value_type) == "words"
        return "words" if is_words else "other"
    if types.is_string(arrow_type) or types.is_large_string(arrow_type):
        return "words"
    if types.is_integer(arrow_type):
        return "whole"
    if types.is_floating(arrow_type):
        return "number"
    if types.is_boolean(arrow_type):
        return "bool"
    if types.is_timestamp(arrow_type) or types.is_date(arrow_type):
        return "time"
    return "other"


def used_columns(roles: Roles) -> list[str]:
    """The columns that have a role, each once."""
    with_role = dict.fromkeys((roles.id, roles.time, *roles.targets, *roles.features))
    return [name for name in with_role if name]  # "" stands for none

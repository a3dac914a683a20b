"""Data frames in memory, of pandas, polars or pyarrow, or dictionaries of columns, as tables.

None of these packages is imported: a frame is known by its methods.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import hashlib
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import DataError, one_line
from .files.columns import TableColumns
from .files.dates import is_date
from .files.index import UNNAMED
from .files.parquet import choose_typed_roles, refuse_unfit_types
from .files.parsing import EXACT_BELOW, explain_inexact, or_without_column, parse_times
from .files.sheet import Options, Problems, Sheet
from .files.source import LoadedFile
from .files.table import KIND_ADVICE, sheet_from_columns
from .files.typed import used_columns
from .files.wide import wide_options
from .files.words import Survey

Given = Any  # arrays, lists, tensors, frames and their columns, which are known by their methods

# The kinds of columns by the kinds of NumPy's types.
KINDS = {"b": "bool", "i": "whole", "u": "whole", "f": "number", "M": "time", "U": "words"}


def is_frame(data: object) -> bool:
    """Tell whether `data` is a table with named columns: a frame, or a dictionary of columns."""
    if isinstance(data, Mapping):
        return True
    # The class is asked: a lazy frame of polars would look its columns up, with a warning.
    return hasattr(type(data), "columns") and hasattr(type(data), "__getitem__")


def columns_of(frame: Given) -> dict[str, Given]:
    """Return the columns of a frame by name, whatever holds their values.

    Of a pandas frame the index is a column too, if it has a name or holds dates.
    """
    if hasattr(frame, "collect") and hasattr(frame, "collect_schema"):  # a lazy frame of polars
        frame = frame.collect()
    if isinstance(frame, Mapping):
        return {str(name): values for name, values in frame.items()}
    if hasattr(frame, "to_pydict"):  # a table of pyarrow
        return dict(frame.to_pydict())
    first = {}
    index = getattr(frame, "index", None)
    if hasattr(frame, "reset_index") and index is not None:
        has_names = any(name is not None for name in index.names)
        if has_names:
            frame = frame.reset_index()
        elif getattr(index.dtype, "kind", "") == "M":
            first[UNNAMED] = index
    names = list(frame.columns)
    texts = list(map(str, names))
    return first | {text: frame[name] for text, name in zip(texts, names, strict=True)}


def is_missing(value: object) -> bool:
    """Tell whether a value stands for a missing one: None, NaN, NaT or pandas' NA."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, numbers.Number) and value != value


def kind_of_value(value: object) -> str:
    """Return what a Python value is: bool, whole, number, words, time or other."""
    if isinstance(value, str):
        return "words"
    if isinstance(value, bool | np.bool_):
        return "bool"
    if isinstance(value, numbers.Integral):
        return "whole"
    if isinstance(value, numbers.Real | decimal.Decimal):
        return "number"
    if isinstance(value, datetime.date | np.datetime64):
        return "time"
    return "other"


@dataclass(frozen=True, eq=False)
class TypedColumn:
    """A column: its kind, its values [N], and where they are missing [N].

    kind   words, whole, number, bool, time or other
    """

    kind: str
    values: np.ndarray
    missing: np.ndarray

    @classmethod
    def of(cls, values: Given, place: str) -> TypedColumn:
        """Return the column with these values; place: names it in messages."""
        array = to_array(values, place)
        if array.ndim != 1:
            raise DataError(f"{place} has shape {array.shape}; expected one value for each row.")
        kind = KINDS.get(array.dtype.kind, "other")
        if kind in ("number", "time"):
            return cls(kind, array, np.isnan(array) if kind == "number" else np.isnat(array))
        if array.dtype.kind != "O":
            return cls(kind, array, np.zeros(len(array), bool))
        missing = np.fromiter(map(is_missing, array), bool, len(array))
        kinds = {kind_of_value(value) for value in array[~missing]}
        if kinds <= {"whole", "number"} and len(kinds) != 1:
            kinds = {"number"}
        if "words" in kinds and "other" not in kinds:
            kinds = {"words"}
        return cls(kinds.pop() if len(kinds) == 1 else "other", array, missing)

    @property
    def type_name(self) -> str:
        """The type of the values, for messages."""
        if self.values.dtype.kind != "O":
            return str(self.values.dtype)
        names = {type(value).__name__ for value in self.values[~self.missing]}
        return one_line(" and ".join(sorted(names)), 80)

    def words(self) -> list[str]:
        """Return the values as text, "" where missing."""
        texts = [str(value).strip() for value in self.values.tolist()]
        for i in np.flatnonzero(self.missing):
            texts[i] = ""
        return texts

    def numbers(self) -> tuple[np.ndarray, list[tuple[int, int]]]:
        """Return (the values as float64, NaN where missing; whole numbers that do not fit).

        The latter are (row, value).
        """
        known = np.where(self.missing, 0, self.values)
        values = known.astype(np.float64)
        inexact = []
        if self.kind == "whole":
            for row in np.flatnonzero(np.abs(values) >= EXACT_BELOW):
                if int(known[row]) != int(values[row]):
                    inexact.append((int(row), int(known[row])))
        values[self.missing] = np.nan
        return values, inexact

    def dates(self) -> np.ndarray:
        """Return the dates as datetime64 in microseconds, in UTC where they have a time zone."""
        if self.values.dtype.kind == "M":
            return self.values.astype("datetime64[us]")
        dates = np.full(len(self.values), np.datetime64("NaT", "us"))
        for i in np.flatnonzero(~self.missing):
            dates[i] = without_zone(self.values[i])
        return dates


def without_zone(date: Given) -> Given:
    """Return a date without its time zone, in UTC."""
    zone = getattr(date, "tzinfo", None)
    if zone is None:
        return np.datetime64(date, "us")
    return np.datetime64(date.astimezone(datetime.UTC).replace(tzinfo=None), "us")


def to_array(values: Given, place: str) -> np.ndarray:
    """Return a column, list, array or tensor as an array; place: names it in messages."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() and values.itemsize < 4 else values
    convert = getattr(values, "to_numpy", None)
    try:
        if convert is not None:
            return np.asarray(convert())
        return np.asarray(values)
    except (ValueError, TypeError) as error:
        raise DataError(f"{place} cannot be read as an array: {one_line(error, 160)}.") from None


def text_of_times(times: np.ndarray) -> list[str]:
    """Return dates [n] as text: 2024-01-31, with the time of day if any has one."""
    return [text.replace("T", " ") for text in np.datetime_as_string(times, unit="auto")]


class FrameTable:
    """A frame as a table with typed columns.

    names  of its columns;  count  of its rows;  path  what it is called in messages
    """

    def __init__(self, columns: Mapping[str, Given], path: str) -> None:
        self.path = path
        self.raw = dict(columns)
        self.names = list(self.raw)
        self.read: dict[str, TypedColumn] = {}
        if not self.names:
            raise DataError(f"{path} has no columns.")
        counts = {name: len(values) for name, values in self.raw.items()}
        self.count = counts[self.names[0]]
        for name, count in counts.items():
            if count != self.count:
                raise DataError(
                    f"{path}: column '{one_line(name)}' has {count} rows and "
                    f"'{one_line(self.names[0])}' has {self.count}; expected the same."
                )
        if not self.count:
            raise DataError(f"{path} has columns but no rows.")

    def column(self, name: str) -> TypedColumn:
        """Return a column."""
        if name not in self.read:
            place = f"{self.path} column '{one_line(name)}'"
            self.read[name] = TypedColumn.of(self.raw[name], place)
        return self.read[name]

    def kind(self, name: str) -> str:
        """Return what a column holds."""
        return self.column(name).kind

    def type_name(self, name: str) -> str:
        """Return the type of a column, for messages."""
        return self.column(name).type_name

    def holds_dates(self, name: str) -> bool:
        """Tell whether a column holds times, or its first text is a date."""
        column = self.column(name)
        if column.kind != "words":
            return column.kind == "time"
        return is_date(next(filter(None, column.words()), ""))

    def survey_columns(self, names: Sequence[str], options: Options) -> dict[str, Survey]:
        """Return what the cells of those of these columns hold that are of text."""
        surveys = {}
        for name in names:
            if self.kind(name) == "words":
                surveys[name] = Survey()
                surveys[name].add(range(self.count), self.column(name).words(), options)
        return surveys

    def where(self, row: int, column: str) -> str:
        """Return a place of the table in words; rows count from 0."""
        return f"{self.path} row {row} column '{one_line(column)}'"


def read_frame(columns: Mapping[str, Given], path: str, options: Options) -> Sheet:
    """Read a frame: a long table, or with options.wide a row for each sequence.

    Args:
        columns: Its columns, by `columns_of`.
        path: What it is called in messages.
        options: How it is read, as a file is.
    """
    if options.wide:
        options = wide_options(options, ".csv", path)
    problems = Problems(path)
    table = FrameTable(columns, path)
    roles = choose_typed_roles(table, options, problems)
    refuse_unfit_types(table, roles, options, problems)
    typed = TableColumns(lines=np.arange(table.count))
    digest = hashlib.sha256()
    for name in used_columns(roles):
        column = table.column(name)
        is_target = name in roles.targets
        is_label = is_target and (column.kind in ("words", "bool") or options.kind == "classify")
        if name == roles.time:
            read_times(
                column, typed, options, problems, functools.partial(table.where, column=name)
            )
            digest.update(repr(typed.stamps).encode("utf-8", "replace"))
        elif name == roles.id or name in roles.categorical or is_label:
            typed.words[name] = column.words()
            digest.update(repr(typed.words[name]).encode("utf-8", "replace"))
        elif is_target and options.kind is None:
            problems.add(
                f"{path} column '{one_line(name)}': the target holds numbers "
                f"({column.type_name}). {KIND_ADVICE}"
            )
        else:
            typed.numbers[name], inexact = column.numbers()
            digest.update(typed.numbers[name].tobytes())
            for row, value in inexact:
                complaint = f"{explain_inexact(value)}{or_without_column(options)}."
                problems.add(f"{table.where(row, name)}: {complaint}", ("exact", name))
    problems.raise_if_any()
    source = LoadedFile(path, b"", digest.hexdigest())
    return sheet_from_columns(source, roles, typed, options, problems, table.where)


def read_times(
    column: TypedColumn, typed: TableColumns, options: Options, problems: Problems, where: Given
) -> None:
    """Put the time column into `typed`: numbers, or dates as microseconds since 1970.

    where: puts a row, counted from 0, in words.
    """
    if column.kind == "words":
        typed.stamps = column.words()
        times = parse_times(typed.stamps, options)
        typed.time = times.time
        typed.has_dates = times.has_dates
        typed.date_order = times.order
        for i, complaint in times.wrong:
            problems.add(f"{where(i)}: {complaint}", "time")
        return
    for row in np.flatnonzero(column.missing):
        problems.add(f"{where(int(row))}: the time is missing. Fill it in.", "time")
    typed.has_dates = column.kind == "time"
    if typed.has_dates:
        dates = column.dates()
        typed.stamps = text_of_times(dates)
        typed.time = dates.astype(np.int64)
        return
    typed.stamps = column.words()
    values, _ = column.numbers()
    typed.time = values
    if column.kind == "whole":
        typed.time = np.where(column.missing, 0, column.values).astype(np.int64)
    for row in np.flatnonzero(np.isinf(values)):
        problems.add(f"{where(int(row))}: the time is not finite. Fix the value.", "time")

"""Columns of a table as they are in a file, to be copied beside the predictions for its rows."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError, one_line
from .arrow import ArrowRows
from .packed import table_suffix, unpack
from .parquet import ParquetRows
from .sheet import Options, Problems, quote_names
from .source import LoadedFile, load_file
from .table import suggest_column
from .text import TextRows

WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})", re.ASCII)
REAL = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
NumberType = type[int] | type[float]


class Column(NamedTuple):
    """A column of a table: texts or other values, None where missing; or numbers, NaN there.

    arrow    the same as an array of pyarrow, with its type, if the file has types
    decimal  the decimal separator of numbers in texts
    """

    name: str
    values: Sequence[Any] | np.ndarray
    arrow: Any = None
    decimal: str = "."

    def take(self, rows: np.ndarray) -> Column:
        """The column in some rows only, by their numbers from 0."""
        arrow = None if self.arrow is None else self.arrow.take(rows)
        return self._replace(values=[self.values[row] for row in rows], arrow=arrow)


def read_columns(
    path: str | os.PathLike[str], options: Options, names: Sequence[str] | None
) -> list[Column]:
    """Read columns of a table, whatever they hold; names: which, None for all."""
    suffix = table_suffix(path)
    if suffix not in COLUMN_READERS or os.path.isdir(path):
        raise DataError(
            f"{one_line(path, 4096)} has no columns to keep: it is no table. Leave out --keep; the "
            "column 'row' says which entry a prediction belongs to."
        )
    source = unpack(load_file(path, options.max_bytes), options.max_bytes)
    return COLUMN_READERS[suffix](source, options, names)


def choose_columns(path: str, names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The columns to keep; names that the file does not have are refused."""
    if names is None:
        return list(known)
    lacking = [name for name in names if name not in known]
    if lacking:
        raise DataError(
            f"{path}: there is no column '{one_line(lacking[0])}' for --keep."
            f"{suggest_column(lacking[0], known)} Columns: {quote_names(known)}."
        )
    return list(dict.fromkeys(names))


def read_text_columns(
    source: LoadedFile, options: Options, names: Sequence[str] | None
) -> list[Column]:
    """The cells of a table in text, as they are written."""
    rows = TextRows.from_file(source, options, Problems(source.path))
    # All are those with a name, without the index of a data frame.
    chosen = choose_columns(source.path, names or rows.data_names, rows.names)
    index = [rows.names.index(name) for name in chosen]
    cells: list[list[str]] = [[] for _ in chosen]
    for _, row in rows:
        for values, k in zip(cells, index, strict=True):
            values.append(row[k])
    pairs = zip(chosen, cells, strict=True)
    return [Column(name, values, decimal=options.decimal) for name, values in pairs]


def read_parquet_columns(
    source: LoadedFile, options: Options, names: Sequence[str] | None
) -> list[Column]:
    """The columns of a Parquet file, with their types."""
    file = ParquetRows(source.path, source.open())
    return read_typed_columns(file, names)


def read_arrow_columns(
    source: LoadedFile, options: Options, names: Sequence[str] | None
) -> list[Column]:
    """The columns of an Arrow file, with their types."""
    return read_typed_columns(ArrowRows(source, options.max_bytes), names)


def read_typed_columns(file: ParquetRows, names: Sequence[str] | None) -> list[Column]:
    """The columns of a file of Parquet or Arrow, whose names and types are known."""
    chosen = choose_columns(file.path, names, file.names)
    try:
        arrays = file.read_columns(chosen)
        return [Column(name, array.to_pylist(), array) for name, array in arrays.items()]
    except Exception as error:  # pyarrow raises all kinds of errors for a damaged file
        raise file.damage_error(error) from None


ColumnReader = Callable[[LoadedFile, Options, Sequence[str] | None], list[Column]]
COLUMN_READERS: dict[str, ColumnReader] = {
    ".csv": read_text_columns,
    ".tsv": read_text_columns,
    ".txt": read_text_columns,
    ".parquet": read_parquet_columns,
    ".pq": read_parquet_columns,
    ".arrow": read_arrow_columns,
    ".feather": read_arrow_columns,
}


def with_types(column: Column) -> Column:
    """The column with numbers in place of texts that are all numbers; "" is missing.

    Whole numbers stay whole. Texts such as 007, which is no number but a name, stay texts.
    """
    is_text = all(value is None or isinstance(value, str) for value in column.values)
    if column.arrow is not None or not is_text:
        return column
    return with_number_type(column, type_of_texts(column.values, column.decimal))


def type_of_texts(texts: Iterable[str | None], decimal: str = ".") -> NumberType | None:
    """The type of numbers that all of the texts are; None if one is no number, or all are ""."""
    found: NumberType | None = None
    for text in texts:
        cell = plain_cell(text, decimal)
        if not cell:
            continue
        if found is not float and WHOLE.fullmatch(cell):
            found = int
        elif REAL.fullmatch(cell):
            found = float
        else:
            return None
    return found


def with_number_type(column: Column, number: NumberType | None) -> Column:
    """The column with its texts as numbers of a type, which they are; None leaves it."""
    if number is None:
        return column
    cells = [plain_cell(text, column.decimal) for text in column.values]
    return column._replace(values=[number(cell) if cell else None for cell in cells])


def plain_cell(text: str | None, decimal: str) -> str:
    """The text of a cell without blanks around it, with a point in numbers."""
    return (text or "").strip().replace(decimal, ".")

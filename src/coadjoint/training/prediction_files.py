"""Predictions as files: CSV, TSV, JSON, Parquet, Feather and Arrow, by the name of the file."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import itertools
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
from torch import Tensor

from ..errors import ConfigError, MissingError, StorageError, check_path, one_line
from ..tasks.description import PathLike
from ..tasks.files.kept import Column, with_types
from ..tasks.prediction import Prediction, spreadsheet_cell, text_cells
from .files import replacing

STANDARD_OUTPUT = "-"
ROWS_OF_A_PART = 1 << 16  # of files that are written in parts
Outputs = Iterable[Tensor | np.ndarray]


class TableSource(Protocol):
    """What is written as a table: a Prediction, or a table that is complete already."""

    def rows(self, outputs: Outputs) -> Iterator[list[str]]:
        """Yield the rows as text, the header first."""

    def typed_tables(self, outputs: Outputs) -> Iterator[list[Column]]:
        """Yield the columns, with their types, of one part of the rows after the other."""


@dataclass(frozen=True, eq=False)
class FullTable:
    """A table whose columns are known; it needs no outputs of a network."""

    columns: Sequence[Column]

    def rows(self, outputs: Outputs = ()) -> Iterator[list[str]]:
        """Yield the rows as text, the header first."""
        yield [spreadsheet_cell(column.name) for column in self.columns]
        cells = [text_cells(column) for column in self.columns]
        yield from map(list, zip(*cells, strict=True))

    def typed_tables(self, outputs: Outputs = ()) -> Iterator[list[Column]]:
        """Yield the columns, with their types."""
        yield [with_types(column) for column in self.columns]


Writer = Callable[[TableSource, Outputs, BinaryIO], None]


def check_output_name(path: PathLike) -> None:
    """Refuse a name that says no known format, and a format whose package is not installed."""
    if os.fspath(path) != STANDARD_OUTPUT and writer_of(path) in NEED_PYARROW:
        import_pyarrow()


def write_predictions(prediction: Prediction, path: PathLike, outputs: Outputs) -> None:
    """Write the table of predictions; the name of the file says its format, "-" prints CSV.

    The file appears complete or not at all; the file the sequences come from is never overwritten.

    Args:
        prediction: The sequences or samples.
        path: The file.
        outputs: The pre-outputs a of each batch, in order.
    """
    check_path("path", path)
    refuse_source(path, prediction.source, f"the {prediction.unit}s were", "the predictions")
    write_source(prediction, path, outputs)


def write_table(columns: Sequence[Column], path: PathLike) -> None:
    """Write a table as `write_predictions` does: its name says the format, "-" prints CSV."""
    check_path("path", path)
    write_source(FullTable(columns), path, ())


def refuse_source(path: PathLike, source: Path, what: str, result: str) -> None:
    """Refuse to write over the file that was read; what, result: words for the message."""
    path = Path(path)
    if os.fspath(path) != STANDARD_OUTPUT and path.exists() and source.exists():
        is_source = path.samefile(source)
    else:
        is_source = False
    if is_source:
        raise StorageError(
            f"{one_line(path, 400)} is the file {what} read from. Write {result} to another file."
        )


def write_source(source: TableSource, path: PathLike, outputs: Outputs) -> None:
    """Write a table to a file, or to standard output."""
    if os.fspath(path) == STANDARD_OUTPUT:
        # Nothing is printed if a later part fails.
        with tempfile.TemporaryFile("w+", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(source.rows(outputs))
            file.seek(0)
            shutil.copyfileobj(file, sys.stdout)
        return
    write = writer_of(path)
    with replacing(Path(path)) as raw:
        write(source, outputs, raw)


def writer_of(path: PathLike) -> Writer:
    """The function that writes files named like this; a name that says no format is refused."""
    name = Path(path).name.lower()
    for suffix, writer in WRITERS.items():
        if name.endswith(suffix):
            return writer
    raise ConfigError(
        f"--out {one_line(path, 400)}: the name of the file says its format; expected one of "
        f"{', '.join(WRITERS)}, or - for CSV on standard output."
    )


@contextlib.contextmanager
def as_text(raw: BinaryIO) -> Iterator[io.TextIOWrapper]:
    """A file of bytes as one of text, which is left open."""
    text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
    yield text
    text.flush()
    text.detach()  # `replacing` closes the file itself


def write_csv(prediction: TableSource, outputs: Outputs, raw: BinaryIO, sep: str = ",") -> None:
    """Write a table in text."""
    with as_text(raw) as text:
        writer = csv.writer(text, delimiter=sep, lineterminator="\n")
        writer.writerows(prediction.rows(outputs))


def write_tsv(prediction: TableSource, outputs: Outputs, raw: BinaryIO) -> None:
    """Write a table in text, its columns separated by tabs."""
    write_csv(prediction, outputs, raw, "\t")


def packed(write: Writer) -> Writer:
    """The same writer with gzip around its file; the bytes do not depend on the clock."""

    def write_packed(prediction: TableSource, outputs: Outputs, raw: BinaryIO) -> None:
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file:
            write(prediction, outputs, file)  # type: ignore[arg-type]  # it is written to alone

    return write_packed


def json_rows(prediction: TableSource, outputs: Outputs) -> Iterator[str]:
    """The rows as objects of JSON; null where there is no prediction."""
    for columns in prediction.typed_tables(outputs):
        names = [column.name for column in columns]
        for row in zip(*(column.values for column in columns), strict=True):
            values = map(plain_value, row)
            yield json.dumps(dict(zip(names, values, strict=True)), ensure_ascii=False)


def plain_value(value: Any) -> Any:
    """A value as JSON has it: NaN is null, and times are texts."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def write_json(prediction: TableSource, outputs: Outputs, raw: BinaryIO) -> None:
    """Write a list of objects, one on each line."""
    with as_text(raw) as text:
        before = "[\n"
        for row in json_rows(prediction, outputs):
            text.write(before + row)
            before = ",\n"
        text.write("\n]\n")


def write_jsonl(prediction: TableSource, outputs: Outputs, raw: BinaryIO) -> None:
    """Write one object on each line."""
    with as_text(raw) as text:
        for row in json_rows(prediction, outputs):
            text.write(f"{row}\n")


def import_pyarrow() -> Any:
    """The module pyarrow with what is written by it; it is optional."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.ipc  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise MissingError(
            "writing Parquet and Arrow files needs pyarrow: pip install 'coadjoint[data]'. Or "
            "write a .csv."
        ) from None
    return pyarrow


def arrow_tables(prediction: TableSource, outputs: Outputs) -> Iterator[Any]:
    """The parts of the table as tables of pyarrow: null where there is no prediction.

    Numbers are numbers. All parts have the types of the first, and at least ROWS_OF_A_PART rows but
    for the last.
    """
    pa = import_pyarrow()
    waiting: list[Any] = []
    schema = None
    for columns in prediction.typed_tables(outputs):
        table = pa.table({column.name: arrow_array(pa, column) for column in columns})
        schema = schema or table.schema
        waiting.append(table.cast(schema))
        if sum(map(len, waiting)) >= ROWS_OF_A_PART:
            yield pa.concat_tables(waiting)
            waiting = []
    if waiting:
        yield pa.concat_tables(waiting)


def arrow_array(pa: Any, column: Column) -> Any:
    """The values of a column as an array of pyarrow."""
    if column.arrow is not None:
        return column.arrow
    if isinstance(column.values, np.ndarray):
        return pa.array(column.values, from_pandas=True)  # NaN is null
    if all(value is None for value in column.values):
        return pa.array(column.values, pa.string())
    return pa.array(column.values)


def write_parquet(prediction: TableSource, outputs: Outputs, raw: BinaryIO) -> None:
    """Write a Parquet file."""
    tables = arrow_tables(prediction, outputs)
    first = next(tables)
    with import_pyarrow().parquet.ParquetWriter(raw, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)


def write_feather(prediction: TableSource, outputs: Outputs, raw: BinaryIO) -> None:
    """Write a Feather file of version 2, which is an Arrow file."""
    tables = arrow_tables(prediction, outputs)
    first = next(tables)
    with import_pyarrow().ipc.new_file(raw, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table, max_chunksize=ROWS_OF_A_PART)


# By the end of the name; the first that fits counts.
WRITERS: dict[str, Writer] = {
    ".csv": write_csv,
    ".tsv": write_tsv,
    ".csv.gz": packed(write_csv),
    ".tsv.gz": packed(write_tsv),
    ".parquet": write_parquet,
    ".feather": write_feather,
    ".arrow": write_feather,
    ".json": write_json,
    ".jsonl": write_jsonl,
}
NEED_PYARROW = (write_parquet, write_feather)

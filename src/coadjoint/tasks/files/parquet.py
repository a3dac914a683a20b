"""Parquet: the same long table, from typed columns."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from ...errors import DataError, MissingError, error_text, one_line
from .parsing import EXACT_BELOW, explain_inexact
from .sheet import Options, Problems, Sheet
from .source import LoadedFile, detect_format, open_file, refuse_if_too_large
from .table import Roles, TableColumns, assign_roles, sheet_from_columns

KINDS_BY_ROLE = {
    "id": ("words", "whole"),
    "time": ("whole", "number", "time"),
    "target": ("words", "whole", "number", "bool"),
    "feature": ("whole", "number", "bool"),
}
ROWS_PER_BATCH = 4096  # of a stream, at a time


class ParquetRows:
    """A Parquet file: `names`, `schema` and `count` rows; whole columns for a table, (number, cells) for a stream."""

    has_names = True

    def __init__(self, path: str, file: IO[bytes]) -> None:
        self.path, self.handle = path, file
        try:
            import pyarrow as pa  # type: ignore[import-untyped]
            import pyarrow.parquet as pq  # type: ignore[import-untyped]
        except ImportError:
            raise MissingError(
                "reading Parquet needs pyarrow: pip install 'coadjoint[data]'."
            ) from None
        self.pa = pa
        head = file.read(16)
        if head[:4] != b"PAR1":
            other = detect_format(head)
            raise DataError(
                f"{path} is named .parquet but {'holds ' + other[0] if other else 'is not Parquet'}; "
                "expected a file that begins with PAR1."
            )
        try:
            file.seek(0)
            self.file = pq.ParquetFile(file, page_checksum_verification=True)
            self.schema, self.metadata = self.file.schema_arrow, self.file.metadata
            self.names = [str(name) for name in self.schema.names]
            self.count = self.metadata.num_rows
            groups = range(self.metadata.num_row_groups)
            self.bytes = sum(self.metadata.row_group(i).total_byte_size for i in groups)
        except Exception as error:  # a damaged file ends in any kind of error
            raise self.damage_error(error) from None
        if not self.count:
            raise DataError(f"{path} has columns but no rows.")

    @classmethod
    def open(cls, path: str, options: Options) -> ParquetRows:
        return cls(path, open_file(path))

    def damage_error(self, error: Exception, where: str = "") -> DataError:
        return DataError(
            f"{self.path}{where} is not a whole Parquet file, or it is damaged: {error_text(error, 160)}. Write it again."
        )

    def read_columns(self, names: list[str]) -> dict[str, Any]:
        """Whole columns, as arrays of pyarrow."""
        table = self.file.read(columns=names)
        table.validate(full=True)
        arrays = {name: table.column(name).combine_chunks() for name in names}
        for array in arrays.values():
            array.validate(full=True)
        return arrays

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        n = 0
        try:
            for batch in self.file.iter_batches(batch_size=ROWS_PER_BATCH):
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    n += 1
                    yield n, list(row)
        except Exception as error:
            raise self.damage_error(error, f" row {n + 1}") from None

    def place(self, row: int) -> str:
        return f"{self.path} row {row}"

    def close(self) -> None:
        self.handle.close()


def read_parquet(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """Numbers, words (plain or dictionary) and times; anything else is refused with its column and type."""
    file = ParquetRows(source.path, io.BytesIO(source.data))
    pa, schema, rows = file.pa, file.schema, file.count
    of = assign_roles(file.names, options, problems)
    used = [n for n in dict.fromkeys((of.id, of.time, *of.targets, *of.features)) if n]
    need = max(file.bytes, 8 * rows * len(used))
    refuse_if_too_large(
        source.path, f"{rows:,} rows, about ", need, len(source.data), options.max_bytes
    )
    for name in used:
        kind = kind_of_column(pa, schema.field(name).type)
        role = (
            "time"
            if name == of.time
            else "id"
            if name == of.id
            else "target"
            if name in of.targets
            else "feature"
        )
        wanted = KINDS_BY_ROLE[
            "feature" if role == "target" and options.kind == "regress" else role
        ]
        if kind not in wanted:
            problems.add(
                f"{source.path} column '{one_line(name)}': type {one_line(schema.field(name).type, 80)} cannot be used here; expected {', '.join(wanted)}. "
                "Cast the column, or leave it out with --features."
            )
    problems.raise_if_any()
    try:
        return make_sheet(file, source, of, file.read_columns(used), options, problems)
    except DataError:
        raise
    except Exception as e:
        raise file.damage_error(e) from None


def kind_of_column(pa: Any, type: Any) -> str:
    """What a column may serve as."""
    t = pa.types
    if t.is_dictionary(type):
        return "words" if kind_of_column(pa, type.value_type) == "words" else "other"
    for kind, tests in {
        "words": (t.is_string, t.is_large_string),
        "whole": (t.is_integer,),
        "number": (t.is_floating,),
        "bool": (t.is_boolean,),
        "time": (t.is_timestamp, t.is_date),
    }.items():
        if any(test(type) for test in tests):
            return kind
    return "other"


def make_sheet(
    file: ParquetRows,
    source: LoadedFile,
    of: Roles,
    arrays: dict[str, Any],
    options: Options,
    problems: Problems,
) -> Sheet:
    pa = file.pa
    where = lambda row, column: f"{file.place(row)} column '{one_line(column)}'"
    columns = TableColumns(lines=np.arange(1, len(next(iter(arrays.values()))) + 1))
    for name, array in arrays.items():
        kind = kind_of_column(pa, array.type)
        if name == of.time:
            for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)):
                problems.add(
                    f"{where(int(row) + 1, name)}: the time is missing. Fill it in.", "time"
                )
            columns.stamps = to_words(pa, array)
            columns.has_dates = kind == "time"
            if columns.has_dates:
                array = array.cast(
                    pa.timestamp("us", tz=getattr(array.type, "tz", None)), safe=False
                ).cast(pa.int64())
            columns.time = array.fill_null(0).to_numpy(zero_copy_only=False)
            if columns.time.dtype.kind == "f":
                for row in np.flatnonzero(~np.isfinite(columns.time)):
                    problems.add(
                        f"{where(int(row) + 1, name)}: the time is not finite. Fix the value.",
                        "time",
                    )
            else:
                columns.time = columns.time.astype(np.int64)
        elif name == of.id or (
            name in of.targets and (kind in ("words", "bool") or options.kind == "classify")
        ):
            columns.words[name] = to_words(pa, array)
        elif name in of.targets and options.kind is None:
            problems.add(
                f"{source.path} column '{one_line(name)}': the target holds numbers ({array.type}). Pass --kind classify if they are classes, --kind regress if they are quantities."
            )
        else:
            columns.numbers[name] = to_numbers(
                pa, array, lambda row, name=name: where(row + 1, name), problems
            )
    problems.raise_if_any()
    return sheet_from_columns(source, of, columns, options, problems, where)


def to_words(pa: Any, array: Any) -> list[str]:
    """Words, "" where missing; the entries of a dictionary are shared, not copied."""
    if pa.types.is_dictionary(array.type):
        known = [w or "" for w in array.dictionary.to_pylist()]
        return ["" if i is None else known[i] for i in array.indices.to_pylist()]
    return ["" if w is None else w for w in array.cast(pa.string()).to_pylist()]


def to_numbers(pa: Any, array: Any, where: Any, problems: Problems) -> np.ndarray:
    """float64, NaN where missing; whole numbers that a double cannot hold are refused."""
    gaps = array.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    exact = array.fill_null(0).to_numpy(zero_copy_only=False)
    values = exact.astype(np.float64)
    if exact.dtype.kind in "iu":
        for row in np.flatnonzero(np.abs(values) >= EXACT_BELOW):
            if int(exact[row]) != int(values[row]):
                what = f"{explain_inexact(exact[row])}, or leave the column out with --features."
                problems.add(f"{where(int(row))}: {what}", ("exact", where(0)))
    values[gaps] = np.nan
    return values

"""Parquet: the same long table, from typed columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import DataError, MissingError, said, shown
from .parsing import EXACT
from .sheet import Options, Problems, Recording
from .source import Source
from .table import Columns, long_table, roles

WANTED = {
    "id": ("words", "whole"),
    "time": ("whole", "number", "time"),
    "target": ("words", "whole", "number", "bool"),
    "feature": ("whole", "number", "bool"),
}
RATIO, FREE = 100, 16 << 20  # unpacked : packed, judged beyond this many bytes


def read_parquet(source: Source, options: Options, problems: Problems) -> Recording:
    """Numbers, words (plain or dictionary) and times; anything else is refused with its column and type."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise MissingError("reading Parquet needs pyarrow: pip install 'coadjoint[data]'.") from None
    if source.data[:4] != b"PAR1":
        other = source.magic()
        raise DataError(
            f"{source.path} is named .parquet but {'holds ' + other[0] if other else 'is not Parquet'}; expected a file that begins with PAR1."
        )
    try:
        file = pq.ParquetFile(pa.BufferReader(source.data), page_checksum_verification=True)
        schema, rows, names = file.schema_arrow, file.metadata.num_rows, list(file.schema_arrow.names)
        declared = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
    except Exception as e:
        raise _damaged(source, e) from None
    if not rows:
        raise DataError(f"{source.path} has columns but no rows.")
    of = roles(names, options, problems)
    used = [n for n in dict.fromkeys((of.id, of.time, *of.targets, *of.features)) if n]
    need = max(declared, 8 * rows * len(used))
    if need > options.max_bytes or (need > FREE and need > RATIO * len(source.data)):
        raise DataError(
            f"{source.path} declares {rows:,} rows, about {need:,} bytes unpacked from {len(source.data):,}: over --max-bytes {options.max_bytes:,} or over {RATIO}:1. "
            "Raise --max-bytes, or write it without compression."
        )
    for name in used:
        kind = _kind(pa, schema.field(name).type)
        role = "time" if name == of.time else "id" if name == of.id else "target" if name in of.targets else "feature"
        wanted = WANTED["feature" if role == "target" and options.kind == "regress" else role]
        if kind not in wanted:
            problems.add(
                f"{source.path} column '{shown(name)}': type {shown(schema.field(name).type, 80)} cannot be used here; expected {', '.join(wanted)}. "
                "Cast the column, or leave it out with --features."
            )
    problems.stop()
    try:
        table = file.read(columns=used)
        table.validate(full=True)
        arrays = {n: table.column(n).combine_chunks() for n in used}
        for array in arrays.values():
            array.validate(full=True)
        return _recording(pa, source, of, arrays, options, problems)
    except DataError:
        raise
    except Exception as e:
        raise _damaged(source, e) from None


def _damaged(source: Source, error: Exception) -> DataError:
    return DataError(f"{source.path}: the Parquet file is damaged: {said(error, 160)}. Write it again.")


def _kind(pa: Any, type: Any) -> str:
    """What a column may serve as."""
    t = pa.types
    if t.is_dictionary(type):
        return "words" if _kind(pa, type.value_type) == "words" else "other"
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


def _recording(pa: Any, source: Source, of: Any, arrays: dict, options: Options, problems: Problems) -> Recording:
    where = lambda row, column: f"{source.path} row {row} column '{shown(column)}'"
    columns = Columns(lines=np.arange(1, len(next(iter(arrays.values()))) + 1))
    for name, array in arrays.items():
        kind = _kind(pa, array.type)
        if name == of.time:
            for row in np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)):
                problems.add(f"{where(int(row) + 1, name)}: the time is missing. Fill it in.", "time")
            columns.stamps = _words(pa, array)
            columns.dated = kind == "time"
            if columns.dated:
                array = array.cast(pa.timestamp("us", tz=getattr(array.type, "tz", None)), safe=False).cast(pa.int64())
            columns.time = array.fill_null(0).to_numpy(zero_copy_only=False)
            if columns.time.dtype.kind == "f":
                for row in np.flatnonzero(~np.isfinite(columns.time)):
                    problems.add(f"{where(int(row) + 1, name)}: the time is not finite. Fix the value.", "time")
            else:
                columns.time = columns.time.astype(np.int64)
        elif name == of.id or (name in of.targets and (kind in ("words", "bool") or options.kind == "classify")):
            columns.words[name] = _words(pa, array)
        elif name in of.targets and options.kind is None:
            problems.add(
                f"{source.path} column '{shown(name)}': the target holds numbers ({array.type}). Pass --kind classify if they are classes, --kind regress if they are quantities."
            )
        else:
            columns.numbers[name] = _numbers(pa, array, lambda row, name=name: where(row + 1, name), problems)
    problems.stop()
    return long_table(source, of, columns, options, problems, where)


def _words(pa: Any, array: Any) -> list[str]:
    """Words, "" where missing; the entries of a dictionary are shared, not copied."""
    if pa.types.is_dictionary(array.type):
        known = [w or "" for w in array.dictionary.to_pylist()]
        return ["" if i is None else known[i] for i in array.indices.to_pylist()]
    return ["" if w is None else w for w in array.cast(pa.string()).to_pylist()]


def _numbers(pa: Any, array: Any, where: Any, problems: Problems) -> np.ndarray:
    """float64, NaN where missing; whole numbers that a double cannot hold are refused."""
    gaps = array.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.int8())
    exact = array.fill_null(0).to_numpy(zero_copy_only=False)
    values = exact.astype(np.float64)
    if exact.dtype.kind in "iu":
        for row in np.flatnonzero(np.abs(values) >= EXACT):
            if int(exact[row]) != int(values[row]):
                problems.add(
                    f'{where(int(row))}: "{exact[row]}" cannot be represented exactly: whole numbers are exact up to 2^53 = {EXACT}. '
                    "Scale it, or leave the column out with --features.",
                    ("exact", where(0)),
                )
    values[gaps] = np.nan
    return values

"""Streams: the steps (u_t, y_t) of a file, one row after the other; no more than a few rows of it are ever in memory.

    .csv .tsv .txt, also .gz, and - for what is piped in      line by line
    .npy                                                      [rows, columns], mapped into memory
    .parquet .pq                                              some thousands of rows at a time

A number x_t is standardised by the rows before it: z_t = (x_t - mean_{t-1}) / std_{t-1}. What has not varied yet is 0, and
no z_t is further out than sqrt(t - 1), as no number of a sample of t is.
"""

from __future__ import annotations

import csv
import gzip
import math
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from torch import Tensor

from ...errors import DataError, MissingError, said, shown
from .arrays import read_header
from .sheet import Options, Problems
from .source import Source
from .table import check_header, check_separator

Cells = list[Any]  # texts, numbers, None where missing
Pair = tuple[Tensor, Tensor]
LINE = 1 << 20  # the longest line of a text
ROWS = 4096  # rows of a Parquet file at a time
TEXT = (".csv", ".tsv", ".txt")


# rows of files: (where the row stands, its cells)
class Text:
    """The rows of a table in UTF-8, line by line."""

    def __init__(self, path: str, options: Options) -> None:
        self.path = "standard input" if path == "-" else path
        self.sep = options.sep or ("\t" if path.lower().removesuffix(".gz").endswith(".tsv") else ",")
        self.file: IO[bytes] = sys.stdin.buffer if path == "-" else opened(path)
        if path.lower().endswith(".gz"):
            self.file = gzip.GzipFile(fileobj=self.file)  # type: ignore[assignment]
        problems, self.rows = Problems(self.path), self.read()
        self.ahead = [row for _, row in zip(range(2), self.rows, strict=False)]
        if not self.ahead:
            raise DataError(f"{self.path}: the file holds no text.")
        first = [row for _, row in self.ahead]
        check_separator(first, self.sep, problems)
        if options.header:
            self.names = [name.strip() for name in first[0]]
            check_header(self.names, options, problems)
            self.ahead = self.ahead[1:]
        else:
            self.names = [f"c{k + 1}" for k in range(len(first[0]))]

    def lines(self) -> Iterator[str]:
        n = 0
        while True:
            try:
                line = self.file.readline(LINE)
            except (OSError, EOFError, zlib.error) as error:
                raise DataError(f"{self.path}:{n + 1}: cannot be read on: {said(error)}.") from None
            if not line:
                return
            n += 1
            kind = Source(self.path, line[:4096], "").magic() if n == 1 else None
            if kind:
                raise DataError(f"{self.path} is not text in UTF-8: it holds {kind[0]}. {kind[1]}")
            if len(line) == LINE or b"\0" in line:
                what = f"a line of {LINE:,} bytes" if len(line) == LINE else "a NUL byte"
                raise DataError(f"{self.path}:{n}: {what}. This is not a table in text, or it is damaged.")
            try:
                yield line.decode("utf-8-sig" if n == 1 else "utf-8")
            except UnicodeDecodeError as e:
                raise DataError(f"{self.path}:{n}: byte 0x{line[e.start]:02x} is not UTF-8. Save the file as UTF-8.") from None  # fmt: skip

    def read(self) -> Iterator[tuple[int, Cells]]:
        reader, line, blank = csv.reader(self.lines(), delimiter=self.sep, strict=True), 1, 0
        while True:
            try:
                row = next(reader, None)
            except csv.Error as e:
                raise DataError(f'{self.path}:{line}: the quotes (") of this row do not pair up: {said(e)}. Fix the row.') from None  # fmt: skip
            if row is None:
                return
            if not row:
                blank = blank or line
            elif blank:
                raise DataError(f"{self.path}:{blank}: the line is blank, and rows follow it. Remove it.")
            else:
                yield line, row
            line = reader.line_num + 1

    def __iter__(self) -> Iterator[tuple[str, Cells]]:
        for source in (self.ahead, self.rows):
            for line, row in source:
                if len(row) != len(self.names):
                    raise DataError(f"{self.path}:{line}: expected {len(self.names)} fields, got {len(row)}. Fix the row.")  # fmt: skip
                yield f"{self.path}:{line}", row

    def close(self) -> None:
        if self.file is not sys.stdin.buffer:
            self.file.close()


class Array:
    """The rows of a .npy file, mapped into memory: columns c1, c2, ..."""

    def __init__(self, path: str, options: Options) -> None:
        self.path = path
        with opened(path) as file:
            shape, fortran, dtype = read_header(file, path)
            begin, size = file.tell(), os.fstat(file.fileno()).st_size
        if dtype.hasobject:
            raise DataError(f"{path} contains Python objects; not loaded. Write numbers [rows, columns].")
        if dtype.kind not in "fiub" or len(shape) not in (1, 2) or min(shape) < 1:
            raise DataError(f"{path} has dtype {shown(dtype)} and shape {shape}; expected numbers [rows, columns].")
        need = math.prod(shape) * dtype.itemsize
        if need != size - begin:
            raise DataError(
                f"{path}: the header says shape {shape} of {dtype}, {need:,} bytes, and the file has {size - begin:,}. "
                "It is cut off or damaged."
            )
        try:
            values = np.memmap(path, dtype, "r", begin, shape, "F" if fortran else "C")
        except (ValueError, OSError) as error:
            raise DataError(f"{path} cannot be mapped into memory: {said(error, 120)}.") from None
        self.values = values.reshape(len(values), -1)
        self.names = [f"c{k + 1}" for k in range(self.values.shape[1])]

    def __iter__(self) -> Iterator[tuple[str, Cells]]:
        for k, row in enumerate(self.values):
            yield f"{self.path} row {k + 1}", row.tolist()

    def close(self) -> None: ...


class Parquet:
    """The rows of a Parquet file, a group at a time."""

    def __init__(self, path: str, options: Options) -> None:
        try:
            import pyarrow.parquet as pq  # type: ignore[import-untyped]
        except ImportError:
            raise MissingError("reading Parquet needs pyarrow: pip install 'coadjoint[data]'.") from None
        self.path, self.handle = path, opened(path)
        try:
            self.file = pq.ParquetFile(self.handle)
            self.names = [str(name) for name in self.file.schema_arrow.names]
        except Exception as error:  # a damaged file ends in any kind of error
            raise DataError(f"{path} is not a whole Parquet file: {said(error, 120)}. Write it again.") from None

    def __iter__(self) -> Iterator[tuple[str, Cells]]:
        n = 0
        try:
            for batch in self.file.iter_batches(batch_size=ROWS):
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    n += 1
                    yield f"{self.path} row {n}", list(row)
        except Exception as error:
            raise DataError(f"{self.path} row {n + 1}: cannot be read on: {said(error, 120)}.") from None

    def close(self) -> None:
        self.handle.close()


KINDS_OF_FILE: dict[str, Any] = {".npy": Array, ".parquet": Parquet, ".pq": Parquet} | dict.fromkeys(TEXT, Text)


def opened(path: str) -> IO[bytes]:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        raise DataError(f"{shown(path, 4096)} does not exist.") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{shown(path, 4096)} cannot be opened: {said(error)}.") from None


def rows_of(path: str, options: Options) -> Any:
    name = path.lower()
    suffix = ".csv" if path == "-" else Path(name.removesuffix(".gz") if name.endswith((".csv.gz", ".tsv.gz", ".txt.gz")) else name).suffix  # fmt: skip
    if suffix not in KINDS_OF_FILE:
        raise DataError(f"{shown(path, 4096)}: files named '{shown(suffix)}' are not streamed; expected one of {', '.join(KINDS_OF_FILE)}, a .csv.gz, or - for standard input.")  # fmt: skip
    return KINDS_OF_FILE[suffix](path, options)

"""Readers of users' own data. They are strict: an error names the file, the row and the column.

source   opening, reading and decoding a file
sheet    Options, Problems, and the Sheet that a file is read into
parsing  cells as numbers and times
table    the roles of columns, and a long table as sequences
text     .csv .tsv .txt: rows, and a table
parquet  .parquet .pq: rows, and a table
arrays   .npy .npz: rows, and arrays of sequences
ts       .ts of the UEA and UCR archives
rows     the rows of a file, by its suffix
scaling  standardising a stream by the rows so far
stream   File: the steps of a file, row by row, for learning while it is read
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ...errors import DataError, one_line
from .arrays import read_npy, read_npz
from .parquet import read_parquet
from .sheet import Options, Problems, Sheet
from .source import LoadedFile, load_file
from .text import read_csv
from .ts import read_ts

__all__ = ["READERS", "Options", "Sheet", "read"]

READERS: dict[str, Callable[[LoadedFile, Options, Problems], Sheet]] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".txt": read_csv,
    ".parquet": read_parquet,
    ".pq": read_parquet,
    ".npz": read_npz,
    ".npy": read_npy,
    ".ts": read_ts,
}


def read(path: str | os.PathLike[str], options: Options | None = None) -> Sheet:
    """Read the sequences of a file; its suffix chooses the reader."""
    options = options or Options()
    source = load_file(path, options.max_bytes)
    suffix = Path(path).suffix.lower()
    if suffix not in READERS:
        raise DataError(
            f"{source.path}: cannot read files named '{one_line(suffix)}'; expected one of "
            f"{', '.join(READERS)}."
        )
    return READERS[suffix](source, options, Problems(source.path))

"""Readers of users' own data: strict, and every refusal names the file, the row, the column and the way out.

source      a file that nobody vouches for: opened, read, decoded
sheet       Options, Problems, and the Recording that comes of a file
parsing     cells as numbers and times
table       which column is what, and a long table as sequences
text        .csv .tsv .txt: its rows, and a table of them
parquet     .parquet .pq: its rows, and a table of them
arrays      .npy .npz: its rows, and arrays of sequences
ts          .ts of the UEA and UCR archives
rows        the row source of a file, by its suffix
stream      File: the steps of a file, row by row, for learning while it is read
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
    """The sequences of a file; its suffix chooses the reader."""
    options = options or Options()
    source = load_file(path, options.max_bytes)
    suffix = Path(path).suffix.lower()
    if suffix not in READERS:
        raise DataError(
            f"{source.path}: files named '{one_line(suffix)}' are not read; expected one of {', '.join(READERS)}."
        )
    return READERS[suffix](source, options, Problems(source.path))

"""The rows of a file, one after the other, for learning from a stream.

.csv .tsv .txt, also .gz, and - for standard input    as they come
.npy                                                  [rows, columns], mapped into memory
.parquet .pq                                          some thousands of rows at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from ...errors import DataError, one_line
from .arrays import ArrayRows
from .parquet import ParquetRows
from .sheet import Options
from .text import TextRows

Cells = Sequence[object]  # texts or numbers, None where missing


class RowSource(Protocol):
    """The rows of a file: iterate for (number, cells) of each.

    names      of the columns; `has_names` is whether the file gives them
    """

    path: str
    names: list[str]
    has_names: bool

    def __iter__(self) -> Iterator[tuple[int, Cells]]:
        """(number, cells) of each row; the number is a line in text, else it counts from 1."""
        ...

    def place(self, row: int) -> str:
        """The row with this number, in words: "d.csv:17"."""

    def holds_dates(self, name: str) -> bool:
        """Whether a column begins with a date."""

    def close(self) -> None:
        """Close the file."""


ROW_SOURCES: dict[str, Callable[[str, Options], RowSource]] = {
    ".csv": TextRows.open,
    ".tsv": TextRows.open,
    ".txt": TextRows.open,
    ".npy": ArrayRows.open,
    ".parquet": ParquetRows.open,
    ".pq": ParquetRows.open,
}


def open_rows(path: str, options: Options) -> RowSource:
    """Open the rows of a file, as its suffix says; "-" is CSV on standard input."""
    name = path.lower()
    if name.endswith((".csv.gz", ".tsv.gz", ".txt.gz")):
        name = name.removesuffix(".gz")
    suffix = ".csv" if path == "-" else Path(name).suffix
    if suffix not in ROW_SOURCES:
        raise DataError(
            f"{one_line(path, 4096)}: cannot stream files named '{one_line(suffix)}'; expected one "
            f"of {', '.join(ROW_SOURCES)}, a .csv.gz, or - for standard input."
        )
    return ROW_SOURCES[suffix](path, options)

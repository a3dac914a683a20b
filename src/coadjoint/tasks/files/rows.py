"""The rows of a file, one after the other: what a stream learns from.

.csv .tsv .txt, also .gz, and - for what is piped in      as they come
.npy                                                      [rows, columns], mapped into memory
.parquet .pq                                              some thousands of rows at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from ...errors import DataError, one_line
from .arrays import ArrayRows
from .parquet import ParquetRows
from .sheet import Options
from .text import TextRows

Cells = list[Any]  # texts, numbers, None where missing


class RowSource(Protocol):
    """A row source: the names of its columns (`named`: the file gives them), and (number, cells) of each row."""

    path: str
    names: list[str]
    has_names: bool

    def __iter__(self) -> Iterator[tuple[int, Cells]]: ...

    def place(self, row: int) -> str:
        """Where the row with this number stands, in words: "d.csv:17" """

    def close(self) -> None: ...


ROW_SOURCES: dict[str, Callable[[str, Options], RowSource]] = {
    ".csv": TextRows.open,
    ".tsv": TextRows.open,
    ".txt": TextRows.open,
    ".npy": ArrayRows.open,
    ".parquet": ParquetRows.open,
    ".pq": ParquetRows.open,
}


def open_rows(path: str, options: Options) -> RowSource:
    """The rows of a file; its suffix chooses how they are read."""
    name = path.lower()
    packed = name.endswith((".csv.gz", ".tsv.gz", ".txt.gz"))
    suffix = ".csv" if path == "-" else Path(name.removesuffix(".gz") if packed else name).suffix
    if suffix not in ROW_SOURCES:
        raise DataError(
            f"{one_line(path, 4096)}: files named '{one_line(suffix)}' are not streamed; expected one of {', '.join(ROW_SOURCES)}, "
            "a .csv.gz, or - for standard input."
        )
    return ROW_SOURCES[suffix](path, options)

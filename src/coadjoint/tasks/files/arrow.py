"""Arrow files (.arrow, .feather): a long table with typed columns, like Parquet.

Both are messages of Arrow's IPC format, as a stream or, with the mark ARROW1 around them, as a file
with a footer. The footer is not read. Buffers may be compressed; the size that each claims to have
once unpacked is added up before anything is unpacked.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from ...errors import DataError, one_line
from .parquet import ROWS_OF_COLUMN, ParquetRows, import_pyarrow, read_typed
from .sheet import Options, Problems, Sheet
from .source import LoadedFile, detect_format, refuse_if_too_large
from .typed import BatchOfRows

if TYPE_CHECKING:
    from .typed import Arrow

FILE_MARK = b"ARROW1\0\0"
STREAM_MARK = b"\xff\xff\xff\xff"
MOST_MESSAGES = 1_000_000
# Places of fields in the tables of Arrow's messages, and values of them.
HEADER_KIND = 1
HEADER = 2
DICTIONARY_BATCH = 2
RECORD_BATCH = 3
DATA_OF_DICTIONARY = 1
LENGTH = 0
BUFFERS = 2
COMPRESSION = 3


class BatchSize(NamedTuple):
    """What a message holds: rows of the table (none in a dictionary), and bytes once unpacked."""

    rows: int
    bytes: int


class ArrowRows(ParquetRows):
    """An Arrow file: names, types and number of rows are known before its columns are read."""

    format = "Arrow"

    def __init__(self, source: LoadedFile, max_bytes: int) -> None:
        self.path = source.path
        self.pa = import_pyarrow()
        begin = 0
        head = source.head()
        if head.startswith(FILE_MARK):
            begin = len(FILE_MARK)
        elif not head.startswith(STREAM_MARK):
            known = detect_format(head)
            content = f"holds {known[0]}" if known else "is not Arrow"
            raise DataError(
                f"{source.path} is named .arrow or .feather but {content}; expected Arrow's IPC "
                "format."
            )
        self.map: mmap.mmap | None = None
        mapped: bytes | mmap.mmap = source.contents or b""
        if source.file is not None:
            self.map = mmap.mmap(source.file.fileno(), 0, access=mmap.ACCESS_READ)
            mapped = self.map
        self.messages = self.pa.py_buffer(mapped).slice(begin)
        self.file = self  # what reads batches
        try:
            sizes = list(self._measure())
            self.schema = self._open([]).schema
            self.names = list(map(str, self.schema.names))
        except DataError:
            raise
        except Exception as error:  # pyarrow raises all kinds of errors for a damaged file
            raise self.damage_error(error) from None
        self.count = sum(size.rows for size in sizes)
        self.bytes = sum(size.bytes for size in sizes)
        what = f"{self.count:,} rows, "
        refuse_if_too_large(self.path, what, self.bytes, source.size, max_bytes)
        if not self.count:
            raise DataError(f"{self.path} has columns but no rows.")

    def _open(self, columns: list[int]) -> Arrow:
        """A reader of some columns, by number; none means all."""
        options = self.pa.ipc.IpcReadOptions(included_fields=columns, use_threads=False)
        return self.pa.ipc.open_stream(self.pa.BufferReader(self.messages), options=options)

    def _measure(self) -> Iterator[BatchSize]:
        """The size of each batch of the file; nothing is unpacked."""
        reader = self.pa.ipc.MessageReader.open_stream(self.pa.BufferReader(self.messages))
        for _ in range(MOST_MESSAGES):
            try:
                message = reader.read_next_message()
            except StopIteration:
                return
            size = measure_batch(bytes(message.metadata), memoryview(message.body))
            self._forget_pages()
            if size is not None:
                yield size
        raise DataError(f"{self.path} has more than {MOST_MESSAGES:,} messages.")

    def read_columns(self, names: list[str]) -> dict[str, Arrow]:
        """Whole columns, as arrays of pyarrow."""
        table = self._open([self.names.index(name) for name in names]).read_all()
        return self.checked_columns(table, names)

    def batches(self, names: list[str], size: int) -> Iterator[BatchOfRows]:
        """Some columns, at most `size` rows at a time."""
        for batch in self.iter_batches(size, names):
            for begin in range(0, batch.num_rows, size):
                yield BatchOfRows(self, batch.slice(begin, size))
            self._forget_pages()

    def read_column(self, name: str) -> Iterator[Arrow]:
        """A column in parts, as arrays of pyarrow whose values can be read."""
        for batch in self.iter_batches(ROWS_OF_COLUMN, [name]):
            for begin in range(0, batch.num_rows, ROWS_OF_COLUMN):
                yield batch.column(0).slice(begin, ROWS_OF_COLUMN)
        self.pa.default_memory_pool().release_unused()
        self._forget_pages()

    def _forget_pages(self) -> None:
        """Let the system take back the pages of the file that were read."""
        if self.map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self.map.madvise(mmap.MADV_DONTNEED)

    def iter_batches(self, batch_size: int, columns: list[str] | None = None) -> Iterator[Arrow]:
        """Some columns, or all, in batches as they are in the file, whatever batch_size says."""
        names = self.names if columns is None else columns
        for batch in self._open([self.names.index(name) for name in names]):
            batch.validate(full=True)  # a damaged file can hold offsets that lead out of memory
            yield batch

    def close(self) -> None:
        """Do nothing: the file is in memory."""


def read_arrow(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """Read a table of numbers, words (plain or dictionary) and times; other types are refused."""
    if source.head().startswith(b"FEA1"):
        raise DataError(
            f"{one_line(source.path, 4096)} is a Feather file of version 1. Write it again with a "
            "newer pandas, or as Parquet."
        )
    return read_typed(ArrowRows(source, options.max_bytes), source, options, problems)


def measure_batch(metadata: bytes, body: memoryview) -> BatchSize | None:
    """The size of a message; None if it holds no batch of values.

    metadata: a flatbuffer of tables: pyarrow has checked that its offsets lie inside. A compressed
    buffer begins with its size once unpacked as 8 bytes, or -1 if it is stored as it is.
    """
    root = struct.unpack_from("<I", metadata)[0]
    kind_at = field_place(metadata, root, HEADER_KIND)
    kind = 0 if kind_at is None else metadata[kind_at]
    if kind not in (DICTIONARY_BATCH, RECORD_BATCH):
        return None
    batch = follow(metadata, field_place(metadata, root, HEADER))
    if kind == DICTIONARY_BATCH:
        batch = follow(metadata, field_place(metadata, batch, DATA_OF_DICTIONARY))
    length_at = field_place(metadata, batch, LENGTH)
    rows = 0 if length_at is None else struct.unpack_from("<q", metadata, length_at)[0]
    is_compressed = field_place(metadata, batch, COMPRESSION) is not None
    size = 0
    buffers_at = field_place(metadata, batch, BUFFERS)
    if buffers_at is not None:
        buffers = follow(metadata, buffers_at)
        count = struct.unpack_from("<I", metadata, buffers)[0]
        for k in range(count):
            offset, length = struct.unpack_from("<qq", metadata, buffers + 4 + 16 * k)
            if is_compressed and length:
                length = max(length, struct.unpack_from("<q", body, offset)[0])
            size += max(length, 0)  # of a crafted file they may be negative
    return BatchSize(0 if kind == DICTIONARY_BATCH else max(rows, 0), size)


def field_place(data: bytes, table: int, number: int) -> int | None:
    """The place of a field of a flatbuffer's table; None if it is not there.

    table: its own place. It begins with the distance to a list of the places of its fields.
    """
    places = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * number
    if entry + 2 > struct.unpack_from("<H", data, places)[0]:
        return None
    distance = struct.unpack_from("<H", data, places + entry)[0]
    return table + distance if distance else None


def follow(data: bytes, place: int | None) -> int:
    """The place that the offset at `place` leads to."""
    if place is None:
        raise ValueError("a message without its content")
    target: int = place + struct.unpack_from("<I", data, place)[0]
    return target

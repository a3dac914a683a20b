"""Compressed tables in text: .csv.gz and .csv.zst, also .tsv and .txt.

What comes out is counted as it is unpacked: no more than max_bytes of it is ever in memory.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from ...errors import DataError, MissingError, error_text
from .source import ALWAYS_ALLOWED, MOST_COMPRESSION, LoadedFile

TEXT_SUFFIXES = (".csv", ".tsv", ".txt")
# How compressed files are named, and how they begin.
PACKED_SUFFIXES = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}
PROGRAMS = {".gz": "gzip", ".zst": "zstandard"}
BYTES_PER_PART = 1 << 20  # that are unpacked at a time
BYTES_FED = 1 << 10  # to zstandard at a time, which may make 32 MiB of them


def table_suffix(path: str | os.PathLike[str]) -> str:
    """The suffix that tells the format: ".csv" for data.csv.gz, ".npz" for data.npz."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes[-2:]]
    if len(suffixes) == 2 and suffixes[1] in PACKED_SUFFIXES and suffixes[0] in TEXT_SUFFIXES:
        return suffixes[0]
    return suffixes[-1] if suffixes else ""


def table_stem(path: str | os.PathLike[str]) -> str:
    """The name of a file without its suffixes: "data" for data.csv.gz."""
    stem = Path(path).stem
    is_packed = table_suffix(path) != Path(path).suffix.lower()
    return Path(stem).stem if is_packed else stem


def unpack(source: LoadedFile, max_bytes: int) -> LoadedFile:
    """The file with its text unpacked, if its name says that it is compressed.

    Refused are files that unpack to more than max_bytes, or to far more than their own size.
    """
    suffix = Path(source.path).suffix.lower()
    if table_suffix(source.path) == suffix:
        return source
    program = PROGRAMS[suffix]
    if not source.head().startswith(PACKED_SUFFIXES[suffix]):
        known = source.magic()
        content = f"it holds {known[0]}" if known else "it may be plain text"
        raise DataError(
            f"{source.path} is named {suffix} but is not compressed with {program}: {content}. "
            "Name it for what it holds."
        )

    def parts() -> Iterator[bytes]:
        """Unpack the file from its beginning."""
        is_empty = True
        try:
            for part in bounded_parts(source, unpacked_parts(source, suffix), max_bytes):
                is_empty = False
                yield part
        except (DataError, MissingError):
            raise
        except Exception as error:  # each library raises its own kinds for a damaged file
            raise DataError(
                f"{source.path} is incomplete or damaged ({program}): {error_text(error, 120)}. "
                "Write it again."
            ) from None
        if is_empty:
            raise DataError(f"{source.path}: the file is empty once unpacked (0 bytes).")

    return replace(source, unpacked=parts)


def unpacked_parts(source: LoadedFile, suffix: str) -> Iterator[bytes]:
    """What was compressed, in parts of a limited size."""
    file: Any
    if suffix == ".gz":
        file = gzip.GzipFile(fileobj=source.open())
        return iter(lambda: file.read(BYTES_PER_PART), b"")
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError:
        return parts_by_zstandard(source.open())
    # The stream would close the file at its end, and it may be read again.
    file = pyarrow.CompressedInputStream(pyarrow.PythonFile(Kept(source.open()), "r"), "zstd")
    return iter(lambda: file.read(BYTES_PER_PART), b"")


class Kept:
    """A file that stays open when it is told to close."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes of the file."""
        return self.file.read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place in the file."""
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        """Return the place in the file."""
        return self.file.tell()

    def readable(self) -> bool:
        """Tell that the file can be read."""
        return True

    def seekable(self) -> bool:
        """Tell that places in the file can be gone to."""
        return True

    def close(self) -> None:
        """Leave the file open."""


def parts_by_zstandard(file: IO[bytes]) -> Iterator[bytes]:
    """What zstandard compressed, by the package zstandard."""
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingError(
            "reading .zst files needs pyarrow: pip install 'coadjoint[data]'."
        ) from None
    unpacker: Any = None
    for fed in iter(lambda: file.read(BYTES_FED), b""):
        while fed:  # a frame may end within these bytes, and another begin
            if unpacker is None:
                unpacker = zstandard.ZstdDecompressor().decompressobj()
            yield unpacker.decompress(fed)
            fed = b""
            if unpacker.eof:
                fed = unpacker.unused_data
                unpacker = None
    if unpacker is not None:
        raise EOFError("the compressed data end too early")


def bounded_parts(source: LoadedFile, parts: Iterator[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the parts of a compressed file; too many are refused as soon as there are too many.

    source: the compressed file.
    """
    packed = source.size
    most = max(ALWAYS_ALLOWED, MOST_COMPRESSION * packed)
    size = 0
    for part in parts:
        size += len(part)
        if size > max_bytes:
            raise DataError(
                f"{source.path} has more than {max_bytes:,} bytes once unpacked, which is the "
                "limit. Raise --max-bytes, or split the file."
            )
        if size > most:
            raise DataError(
                f"{source.path} unpacks to more than {MOST_COMPRESSION} times its {packed:,} "
                "bytes. Write it without compression."
            )
        yield part

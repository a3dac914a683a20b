"""Compressed tables in text: .csv.gz and .csv.zst, also .tsv and .txt.

What comes out is counted as it is unpacked: no more than max_bytes of it is ever in memory.
"""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    if not source.data.startswith(PACKED_SUFFIXES[suffix]):
        known = source.magic()
        content = f"it holds {known[0]}" if known else "it may be plain text"
        raise DataError(
            f"{source.path} is named {suffix} but is not compressed with {program}: {content}. "
            "Name it for what it holds."
        )
    try:
        data = join_bounded(source, unpacked_parts(source.data, suffix), max_bytes)
    except (DataError, MissingError):
        raise
    except Exception as error:  # each library raises its own kinds for a damaged file
        raise DataError(
            f"{source.path} is incomplete or damaged ({program}): {error_text(error, 120)}. Write "
            "it again."
        ) from None
    if not data:
        raise DataError(f"{source.path}: the file is empty once unpacked (0 bytes).")
    return replace(source, data=data)


def unpacked_parts(data: bytes, suffix: str) -> Iterator[bytes]:
    """What was compressed, in parts of a limited size."""
    file: Any
    if suffix == ".gz":
        file = gzip.GzipFile(fileobj=io.BytesIO(data))
        return iter(lambda: file.read(BYTES_PER_PART), b"")
    try:
        import pyarrow  # type: ignore[import-untyped]
    except ImportError:
        return parts_by_zstandard(data)
    file = pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd")
    return iter(lambda: file.read(BYTES_PER_PART), b"")


def parts_by_zstandard(data: bytes) -> Iterator[bytes]:
    """What zstandard compressed, by the package zstandard."""
    try:
        import zstandard  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingError(
            "reading .zst files needs pyarrow: pip install 'coadjoint[data]'."
        ) from None
    unpacker: Any = None
    for begin in range(0, len(data), BYTES_FED):
        fed = data[begin : begin + BYTES_FED]
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


def join_bounded(source: LoadedFile, parts: Iterator[bytes], max_bytes: int) -> bytes:
    """All parts of a compressed file; too many are refused as soon as there are too many.

    source: the compressed file.
    """
    packed = len(source.data)
    most = max(ALWAYS_ALLOWED, MOST_COMPRESSION * packed)
    taken: list[bytes] = []
    size = 0
    for part in parts:
        taken.append(part)
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
    return b"".join(taken)

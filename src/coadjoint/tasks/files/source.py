"""Opening files from anywhere: nothing about their contents is taken for granted."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...errors import DataError, error_text, nearest, one_line

# How a file begins, what it is, what to do about it.
MAGIC = (
    (b"\x1f\x8b", "gzip", "Name it .csv.gz if it is a table, or unpack it (gunzip)."),
    (b"BZh", "bzip2", "Unpack it first."),
    (b"\xfd7zXZ", "xz", "Unpack it first."),
    (b"\x28\xb5\x2f\xfd", "zstandard", "Name it .csv.zst if it is a table, or unpack it."),
    (b"PAR1", "Parquet", "Name it .parquet."),
    (b"\x93NUMPY", "a NumPy array", "Name it .npy."),
    (
        b"PK\x03\x04",
        "a zip archive",
        "Save an .xlsx workbook as CSV; name a file of NumPy arrays .npz.",
    ),
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook", "Save it as CSV (UTF-8)."),
    (b"ARROW1", "Arrow IPC", "Name it .arrow."),
    (b"FEA1", "an old Feather file", "Write it again, as Parquet."),
    (b"\x89HDF", "HDF5", "Write it as .npz or Parquet."),
    (b"\xff\xfe\x00\x00", "text in UTF-32", "Save it as UTF-8."),
    (b"\xff\xfe", "text in UTF-16", "Save it as UTF-8."),
    (b"\xfe\xff", "text in UTF-16", "Save it as UTF-8."),
    (b"%PDF", "a PDF", "Give the data itself."),
    (b"<!doctype html", "a web page", "Download the file itself."),
    (b"<html", "a web page", "Download the file itself."),
)
EXCEL_WORKBOOK = ("an Excel workbook (.xlsx)", "Save it as CSV (UTF-8).")

MOST_COMPRESSION = 100  # unpacked size : packed size, for files larger than
ALWAYS_ALLOWED = 16 << 20  # bytes, unpacked
BYTES_PER_PART = 1 << 20  # that are read at a time
BYTES_OF_HEAD = 1 << 16  # from which a format is told

# What returns the bytes of a file from its beginning, in parts.
Parts = Callable[[], Iterator[bytes]]


class SharedFile(io.FileIO):
    """A file that is closed, without a warning, when nothing refers to it any more."""

    def __del__(self) -> None:
        self.close()


class SharedReader(io.BufferedReader):
    """The same with a buffer. Of a cycle, either may be closed first."""

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, eq=False)
class LoadedFile:
    """A regular file whose size and digest are known. Its bytes stay on disk until they are read.

    contents  the bytes, of what is no file on disk; None for a file
    file      the open file, if `contents` are None
    unpacked  what returns the bytes of a compressed file, in parts; None for others
    """

    path: str
    contents: bytes | None
    sha256: str
    file: IO[bytes] | None = None
    unpacked: Parts | None = None

    @property
    def size(self) -> int:
        """The bytes of the file, before they are unpacked."""
        if self.file is None:
            return len(self.contents or b"")
        return os.fstat(self.file.fileno()).st_size

    @property
    def data(self) -> bytes:
        """All bytes of the file."""
        return b"".join(self.parts()) if self.contents is None else self.contents

    def open(self) -> IO[bytes]:
        """The file itself, before it is unpacked, at its beginning."""
        if self.file is None:
            return io.BytesIO(self.contents or b"")
        self.file.seek(0)
        return self.file

    def head(self) -> bytes:
        """The first bytes of the file itself."""
        with storage_errors(self.path):
            return self.open().read(BYTES_OF_HEAD)

    def parts(self) -> Iterator[bytes]:
        """Yield the bytes of the file, unpacked, in parts."""
        if self.unpacked is not None:
            yield from self.unpacked()
            return
        yield from parts_of(self.open(), self.path)

    def text(self) -> str:
        """The file as text in UTF-8."""
        return decode_utf8(self.data, self.path)

    def magic(self) -> tuple[str, str] | None:
        """The format of the file and advice about it, if its first bytes tell."""
        return detect_format(self.head())


@contextmanager
def storage_errors(path: str) -> Iterator[None]:
    """Turn an error of the system into a DataError that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error_text(error)}.") from None


def parts_of(file: IO[bytes], path: str) -> Iterator[bytes]:
    """Yield the bytes of an open file from where it is; path: its name in messages."""
    while True:
        with storage_errors(path):
            part = file.read(BYTES_PER_PART)
        if not part:
            return
        yield part


def detect_format(data: bytes) -> tuple[str, str] | None:
    """(what a file is, what to do about it), if its first bytes tell; else None."""
    head = data[:16]
    # A web page may begin with blanks, in any case of letters.
    if head.lstrip().startswith(b"<"):
        head = head.lstrip().lower()
    for begin, kind, advice in MAGIC:
        if head.startswith(begin):
            is_workbook = begin == b"PK\x03\x04" and b"xl/" in data
            return EXCEL_WORKBOOK if is_workbook else (kind, advice)
    return None


def refuse_other_format(data: bytes, path: str) -> None:
    """Refuse a file that is no text, if its first bytes `data` tell."""
    detected = detect_format(data)
    if detected:
        kind, advice = detected
        raise DataError(f"{path} is not text in UTF-8: it holds {kind}. {advice}")


def decode_utf8(data: bytes, path: str, line: int = 1, begin: int = 0) -> str:
    """The text of UTF-8 data, with or without a byte order mark.

    `data` may be a part of the file at `path`: it begins at this line and byte.
    """
    if not begin:
        refuse_other_format(data, path)
    nul = data.find(b"\0")
    if nul >= 0:
        # Text in UTF-16 has a NUL in every other byte, or in many if it is not English.
        # Other files with many, such as programs, have them at even and at odd places.
        halves = [data[k:4096:2].count(b"\0") for k in (0, 1)]
        if not begin and sum(halves) > min(len(data), 4096) // 4 and max(halves) > 8 * min(halves):
            raise DataError(
                f"{path} looks like text in UTF-16 (every other byte is NUL). Save it as UTF-8."
            )
        nul_line = line + data.count(b"\n", 0, nul)
        raise DataError(
            f"{path}:{nul_line}: a NUL byte (byte {begin + nul} of the file). This is not a text "
            "file, or it is damaged."
        )
    try:
        return data.decode("utf-8" if begin else "utf-8-sig")  # a mark is at the beginning only
    except UnicodeDecodeError as error:
        error_line = line + data.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}:{error_line}: byte 0x{data[error.start]:02x} is not UTF-8; the file looks "
            "like latin-1 (Windows-1252). Save it as UTF-8 (iconv -f latin1 -t utf-8)."
        ) from None


def refuse_if_too_large(name: str, what: str, need: int, packed: int, max_bytes: int) -> None:
    """Refuse a file that would unpack to more than `max_bytes`, or far beyond its packed size.

    A small file that unpacks to a huge one may be made to fill the memory.
    what: how the size was found, such as "100 rows, about "; need, packed: bytes.
    """
    if need > max_bytes:
        raise DataError(
            f"{name} declares {what}{need:,} bytes unpacked, more than the limit of "
            f"{max_bytes:,}. Raise --max-bytes, or split the file."
        )
    if need > ALWAYS_ALLOWED and need > MOST_COMPRESSION * max(packed, 1):
        raise DataError(
            f"{name} declares {what}{need:,} bytes unpacked from {packed:,}, over "
            f"{MOST_COMPRESSION}:1. Write it without compression."
        )


def open_file(path: str | os.PathLike[str], flags: int = 0) -> IO[bytes]:
    """Open a file for reading; errors become DataErrors. flags: further flags of os.open."""
    name = one_line(os.fspath(path), 4096)
    try:
        raw = SharedFile(path, "rb", opener=lambda path, usual: os.open(path, usual | flags))
        return SharedReader(raw)
    except FileNotFoundError:
        raise DataError(f"{name} does not exist{suggest_name(Path(path))}") from None
    except IsADirectoryError:
        raise DataError(f"{name} is a directory; expected a file.") from None
    except PermissionError:
        raise DataError(
            f"{name} cannot be read: permission denied. Check its owner and mode (ls -l)."
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{name} cannot be opened: {error_text(error)}.") from None


def load_file(
    path: str | os.PathLike[str], max_bytes: int, follow_links: bool = True
) -> LoadedFile:
    """Open a regular file of at most max_bytes and take its digest. Pipes, devices are refused.

    follow_links: whether the path may be a link to the file. The file is closed when nothing
    refers to it any more.
    """
    name = one_line(os.fspath(path), 4096)
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    flags = getattr(os, "O_NONBLOCK", 0)
    if not follow_links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    file = open_file(path, flags)
    try:
        with storage_errors(name):
            status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DataError(
                f"{name} is a pipe or a device; expected a regular file. Save the data to a "
                "file first."
            )
        if status.st_size == 0:
            raise DataError(f"{name}: the file is empty (0 bytes).")
        if status.st_size > max_bytes:
            raise DataError(
                f"{name} has {status.st_size:,} bytes, more than the limit of {max_bytes:,}. "
                "Raise --max-bytes, or split the file."
            )
        digest = hashlib.sha256()
        for part in parts_of(file, name):
            digest.update(part)
    except BaseException:
        file.close()
        raise
    return LoadedFile(name, None, digest.hexdigest(), file)


def suggest_name(path: Path) -> str:
    """The end of "... does not exist": which file may have been meant."""
    try:
        siblings = sorted(p.name for p in path.parent.iterdir())
    except (OSError, ValueError):
        return f", and its folder '{one_line(path.parent, 200)}' cannot be listed."
    near = nearest(path.name, siblings)
    return f"; did you mean '{one_line(near)}'?" if near else "."

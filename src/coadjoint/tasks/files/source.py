"""Opening a file that nobody vouches for."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ...errors import DataError, nearest, said, shown

MAGIC = (  # how a file begins, what it is, what to do
    (b"\x1f\x8b", "gzip", "Unpack it first (gunzip)."),
    (b"BZh", "bzip2", "Unpack it first."),
    (b"\xfd7zXZ", "xz", "Unpack it first."),
    (b"\x28\xb5\x2f\xfd", "zstandard", "Unpack it first."),
    (b"PAR1", "Parquet", "Name it .parquet."),
    (b"\x93NUMPY", "a NumPy array", "Name it .npy."),
    (b"PK\x03\x04", "a zip archive", "An .xlsx workbook must be saved as CSV; NumPy arrays are named .npz."),
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook", "Save it as CSV (UTF-8)."),
    (b"ARROW1", "Arrow IPC", "Write it as Parquet."),
    (b"\x89HDF", "HDF5", "Write it as .npz or Parquet."),
    (b"\xff\xfe\x00\x00", "text in UTF-32", "Save it as UTF-8."),
    (b"\xff\xfe", "text in UTF-16", "Save it as UTF-8."),
    (b"\xfe\xff", "text in UTF-16", "Save it as UTF-8."),
    (b"%PDF", "a PDF", "Point at the data itself."),
    (b"<!doctype html", "a web page", "Download the file itself."),
    (b"<html", "a web page", "Download the file itself."),
)


@dataclass(frozen=True, eq=False)
class Source:
    """The bytes of a regular file."""

    path: str
    data: bytes
    sha256: str

    def text(self) -> str:
        """UTF-8, with or without a byte order mark."""
        kind = self.magic()
        if kind:
            raise DataError(f"{self.path} is not text in UTF-8: it holds {kind[0]}. {kind[1]}")
        at = self.data.find(b"\0")
        if at >= 0:
            if self.data.count(b"\0", 0, 4096) > min(len(self.data), 4096) // 4:
                raise DataError(f"{self.path} looks like text in UTF-16 (every other byte is NUL). Save it as UTF-8.")
            raise DataError(
                f"{self.path}:{self._line(at)}: a NUL byte (byte {at} of the file). This is not a text file, or it is damaged."
            )
        try:
            return self.data.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise DataError(
                f"{self.path}:{self._line(e.start)}: byte 0x{self.data[e.start]:02x} is not UTF-8; the file looks like latin-1 (Windows-1252). "
                "Save it as UTF-8 (iconv -f latin1 -t utf-8)."
            ) from None

    def magic(self) -> tuple[str, str] | None:
        """(what the file is, what to do) where its first bytes tell."""
        head = self.data[:16].lstrip().lower() if self.data[:16].lstrip()[:1] == b"<" else self.data[:16]
        for begin, kind, advice in MAGIC:
            if head.startswith(begin):
                return ("an Excel workbook (.xlsx)", "Save it as CSV (UTF-8).") if begin == b"PK\x03\x04" and b"xl/" in self.data else (kind, advice)  # fmt: skip
        return None

    def _line(self, at: int) -> int:
        return self.data.count(b"\n", 0, at) + 1


def load(path: str | os.PathLike[str], max_bytes: int) -> Source:
    """All bytes of a regular file of at most max_bytes; a pipe or device is not opened for reading."""
    name = shown(os.fspath(path), 4096)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise DataError(f"{name} does not exist{_nearest(Path(path))}") from None
    except PermissionError:
        raise DataError(f"{name} cannot be read: no permission. Check its owner and mode (ls -l).") from None
    except (OSError, ValueError) as e:
        raise DataError(f"{name} cannot be opened: {said(e)}.") from None
    try:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise DataError(f"{name} is a directory; expected a file.")
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{name} is a pipe or a device; expected a regular file. Save the data to a file first.")
        if status.st_size == 0:
            raise DataError(f"{name}: the file is empty (0 bytes).")
        if status.st_size > max_bytes:
            raise DataError(
                f"{name} has {status.st_size:,} bytes and at most {max_bytes:,} are read. Raise --max-bytes, or split the file."
            )
        with os.fdopen(handle, "rb", closefd=False) as f:
            data = f.read(status.st_size)
    except OSError as e:
        raise DataError(f"{name} cannot be read: {said(e)}.") from None
    finally:
        os.close(handle)
    return Source(name, data, hashlib.sha256(data).hexdigest())


def _nearest(path: Path) -> str:
    """The end of a sentence that says a file is not there: what may have been meant."""
    try:
        siblings = sorted(p.name for p in path.parent.iterdir())
    except (OSError, ValueError):
        return f", nor can its folder '{shown(path.parent, 200)}' be listed."
    near = nearest(path.name, siblings)
    return f"; did you mean '{shown(near)}'?" if near else "."

"""Files that appear whole or not at all, and the operating system's complaints in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import CoadjointError, StorageError

File = str | os.PathLike[str]


@contextlib.contextmanager
def storing(what: File) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the file."""
    try:
        yield
    except CoadjointError:
        raise
    except (OSError, ValueError) as error:
        room = ""
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            with contextlib.suppress(OSError):
                room = f" ({shutil.disk_usage(existing(Path(what))).free:,} bytes free)"
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"{os.fspath(what)!r} cannot be written: {reason}{room}. What was there before is intact; make room or choose another place."
        ) from None


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return path if path.exists() or path == path.parent else existing(path.parent)


def sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def create(path: Path) -> BinaryIO:
    """Open a file that is not there yet, never through a link."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb")


def write(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with create(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: File) -> Iterator[BinaryIO]:
    """A file to write under another name; it takes its place, whole, when the block ends, or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name[:60]}.{os.getpid()}.tmp")
    with storing(path):
        temporary.unlink(missing_ok=True)
        try:
            with create(temporary) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def replace(path: File, content: bytes | str) -> None:
    """Put a file in place of an old one, whole or not at all."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)

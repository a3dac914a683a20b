"""Files that appear whole or not at all, and the operating system's complaints in one line.

A folder may come from a stranger. What is written there is made new, or opened by `open_for_update`, never through
a link; what is deleted there is deleted by `remove` and `remove_leftovers`, which do not follow links either.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import CoadjointError, StorageError, error_text

AnyPath = str | os.PathLike[str]
# how files are opened that a stranger may have made: not every system has these
NO_LINKS = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
LEFTOVER = re.compile(
    r"\..+\.([1-9][0-9]{0,9})\.tmp", re.DOTALL
)  # what `replacing` writes to: .NAME.PID.tmp
LINK_REFUSED = "a link, and nothing is written through links: put the file or folder itself there."
# names that Windows keeps for devices, whatever follows a dot
DEVICES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{port}{n}" for port in ("com", "lpt") for n in range(10)),
}


@contextlib.contextmanager
def storage_errors(what: AnyPath) -> Iterator[None]:
    """Turn an OSError into a StorageError that names the file."""
    try:
        yield
    except CoadjointError:
        raise
    except (OSError, ValueError) as error:
        room = ""
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            with contextlib.suppress(OSError):
                room = f" ({shutil.disk_usage(nearest_existing(Path(what))).free:,} bytes free)"
        raise StorageError(
            f"{os.fspath(what)!r} cannot be written: {error_text(error)}{room}. What was there before is intact; make room or choose another place."
        ) from None


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return path if path.exists() or path == path.parent else nearest_existing(path.parent)


def sync_folder(path: Path) -> None:
    """Be sure that the names in a folder are on the disk. Windows cannot open one, and needs not."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_new(path: Path) -> BinaryIO:
    """Open a file that is not there yet, never through a link."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS, 0o666), "wb")


def open_for_update(path: Path) -> BinaryIO:
    """Open a file of a run folder to read and write it where it stands; made if it is not there.

    It must be a regular file under this name alone: what a link leads to is not the folder's."""
    with contextlib.suppress(FileNotFoundError):
        refuse_if_not_regular(
            path, os.lstat(path)
        )  # before it is opened: to open a device can do something already
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StorageError(f"{path} is {LINK_REFUSED}") from None
        raise
    try:
        refuse_if_not_regular(path, os.fstat(handle))
        if not is_same_file(handle, path):
            raise StorageError(
                f"{path} was replaced while it was opened: let one process at a time write to its folder."
            )
    except BaseException:
        os.close(handle)
        raise
    return open(handle, "r+b")


def refuse_if_not_regular(path: Path, status: os.stat_result) -> None:
    """Refuse what is not a regular file of one name."""
    if stat.S_ISLNK(status.st_mode):
        raise StorageError(f"{path} is {LINK_REFUSED}")
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or device"
        raise StorageError(f"{path} is {kind}, where a regular file belongs: remove it.")
    if status.st_nlink > 1:
        raise StorageError(
            f"{path} has {status.st_nlink} names (hard links), and writing would change the file under "
            "all of them: put a copy of its own there."
        )


def is_same_file(handle: int, path: Path) -> bool:
    """Is the open file still what stands at the path?"""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_real_folder(path: Path) -> bool:
    """Is there a folder at the path, in a folder of ours? A link or a file in its place is refused."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.S_ISLNK(mode):
        raise StorageError(f"{path} is {LINK_REFUSED}")
    if not stat.S_ISDIR(mode):
        raise StorageError(f"{path} is a file, where a folder belongs: remove it.")
    return True


def is_portable_name(text: object) -> bool:
    """Is it the plain name of a file or folder, on any system: no path, no device, nothing that a
    system would change?"""
    if not isinstance(text, str) or not 0 < len(text.encode(errors="replace")) <= 255:
        return False
    if any(c in '/\\:*?"<>|' or not c.isprintable() for c in text):
        return False
    if text[0] == " " or text[-1] in ". ":
        return False
    return text.partition(".")[0].rstrip().lower() not in DEVICES


def remove(path: Path) -> None:
    """Remove what has this name, a folder with all that it holds; of a link the link alone."""
    try:
        folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if folder:
        shutil.rmtree(path)
    else:
        os.unlink(path)


def is_process_alive(pid: int) -> bool:
    """Is there a process of this number? Yes, where there is no way to tell."""
    if os.name != "posix":  # os.kill would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove the files that processes were writing when they were killed: those that have the
    pattern of `replacing`, and the number of a process that is no more."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            left = LEFTOVER.fullmatch(path.name)
            if left is None or is_process_alive(int(left[1])):
                continue
            with contextlib.suppress(OSError):
                if stat.S_ISREG(os.lstat(path).st_mode):
                    os.unlink(path)


def write_new(path: Path, content: bytes) -> None:
    """Write a new file and wait until it is on the disk."""
    with open_new(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: AnyPath) -> Iterator[BinaryIO]:
    """A file to write under another name; it takes its place, whole, when the block ends, or not at all."""
    path = Path(path)
    temporary = path.with_name(f".{path.name[:60]}.{os.getpid()}.tmp")
    with storage_errors(path):
        temporary.unlink(missing_ok=True)
        try:
            with open_new(temporary) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def replace(path: AnyPath, content: bytes | str) -> None:
    """Put a file in place of an old one, whole or not at all."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a file of a folder that may be a stranger's: never through a link, and never a pipe, a device or a folder, which
    may be endless or may wait for ever."""
    try:
        handle = os.open(path, os.O_RDONLY | NO_LINKS)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ELOOP:
            raise StorageError(f"{path} is a link. Put the file itself in its place.") from None
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{path} cannot be read: {reason}.") from None
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return open(handle, "rb")
    os.close(handle)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
    raise StorageError(f"{path} is {kind}; expected a regular file.")


def read_regular(path: AnyPath, most: int) -> bytes:
    """The bytes of a regular file; one of more than `most` bytes is refused before anything is read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise StorageError(f"{path} has {size:,} bytes; at most {most:,} are read.")
        try:
            return file.read(size)  # what is written meanwhile is not waited for
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}.") from None


def read_lines(path: AnyPath, most_line: int) -> Iterator[bytes]:
    """The lines of a regular file, one after the other, so that its length does not matter; one of more than `most_line`
    bytes is refused."""
    with open_regular(path) as file:
        number = 0
        while True:
            try:
                line = file.readline(most_line + 1)
            except OSError as error:
                raise StorageError(f"{path} cannot be read: {error.strerror}.") from None
            if not line:
                return
            number += 1
            if len(line) > most_line:
                raise StorageError(f"{path}:{number}: the line has more than {most_line:,} bytes.")
            yield line

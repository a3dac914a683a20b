"""Files that appear complete or not at all, and the operating system's errors in one line.

A folder may come from a stranger. Files there are created new or opened by `open_for_update`, never
through a link; and `remove` and `remove_leftovers`, which delete them, do not follow links either.
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
# Flags for files that a stranger may have made. Not every system has all of them.
NO_LINKS = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
LEFTOVER = re.compile(r"\..+\.([1-9][0-9]{0,9})\.tmp", re.DOTALL)  # .NAME.PID.tmp, of `replacing`
LINK_REFUSED = (
    "a link, and coadjoint does not write through links: replace it with the file or folder itself."
)
# Names that Windows reserves for devices, whatever follows a dot.
PORTS = [f"{port}{n}" for port in ("com", "lpt") for n in range(10)]
DEVICES = {"con", "prn", "aux", "nul", *PORTS}
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def storage_errors(path: AnyPath) -> Iterator[None]:
    """Inside, an OSError becomes a StorageError that names the file; of a full disk, its room."""
    try:
        yield
    except CoadjointError:  # already worded, though some are OSErrors or ValueErrors, too
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        if isinstance(error, FileNotFoundError) and not Path(path).parent.exists():
            raise StorageError(
                f"{os.fspath(path)!r} cannot be written: its folder does not exist. Create it, or "
                "choose another place."
            ) from None
        room = ""
        if getattr(error, "errno", None) in FULL_DISK:
            with contextlib.suppress(OSError):
                room = f" ({shutil.disk_usage(nearest_existing(Path(path))).free:,} bytes free)"
        raise StorageError(
            f"{os.fspath(path)!r} cannot be written: {error_text(error)}{room}. Its previous "
            "content is intact; make room or choose another place."
        ) from None


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk; not possible on Windows, nor needed."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_new(path: Path) -> BinaryIO:
    """Create a file and open it for writing; an error if there is one, or a link, already."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINKS, 0o666)
    return open(handle, "wb")


def open_for_update(path: Path) -> BinaryIO:
    """Open a file of a run folder for reading and writing; create it if it is missing.

    It must be a regular file with this name only: the target of a link is not the folder's.
    """
    # Before opening it: to open a device can already have an effect.
    with contextlib.suppress(FileNotFoundError):
        refuse_if_not_regular(path, os.lstat(path))
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | NO_LINKS, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link has taken its place since
            raise StorageError(f"{path} is {LINK_REFUSED}") from None
        raise
    try:
        # Once more: what was opened may not be what was there a moment before.
        refuse_if_not_regular(path, os.fstat(handle))
        if not is_same_file(handle, path):
            raise StorageError(
                f"{path} was replaced while it was being opened: let only one process at a time "
                "write to its folder."
            )
    except BaseException:
        os.close(handle)
        raise
    return open(handle, "r+b")


def refuse_if_not_regular(path: Path, status: os.stat_result) -> None:
    """Refuse a link, a folder, a device, and a file with more than one name."""
    if stat.S_ISLNK(status.st_mode):
        raise StorageError(f"{path} is {LINK_REFUSED}")
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or device"
        raise StorageError(f"{path} is {kind}; expected a regular file: remove it.")
    if status.st_nlink > 1:
        raise StorageError(
            f"{path} has {status.st_nlink} names (hard links), and writing would change the file "
            "under all of them: replace it by a copy."
        )


def is_same_file(handle: int, path: Path) -> bool:
    """Whether the open file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_real_folder(path: Path) -> bool:
    """Whether there is a folder at the path. A link or a file in its place is refused."""
    try:
        mode = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    if stat.S_ISLNK(mode):
        raise StorageError(f"{path} is {LINK_REFUSED}")
    if not stat.S_ISDIR(mode):
        raise StorageError(f"{path} is a file; expected a folder: remove it.")
    return True


def is_portable_name(text: object) -> bool:
    """Whether a text can name a file on any system.

    It must not be a path or a device, nor hold anything that Windows refuses or drops.
    """
    if not isinstance(text, str) or not 0 < len(text.encode(errors="replace")) <= 255:
        return False
    if any(c in '/\\:*?"<>|' or not c.isprintable() for c in text):
        return False
    if text[0] == " " or text[-1] in ". ":  # Windows drops dots and spaces at the end
        return False
    return text.partition(".")[0].rstrip().lower() not in DEVICES


def remove(path: Path) -> None:
    """Remove a file, a link (not its target), or a folder with all it holds, if it exists."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if is_folder:
        shutil.rmtree(path)
    else:
        os.unlink(path)


def is_process_alive(pid: int) -> bool:
    """Whether there is a process with this number; True where there is no way to tell."""
    if os.name != "posix":  # os.kill would end the process there
        return True
    try:
        os.kill(pid, 0)  # signal 0 is not sent: this only looks the process up
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # the process of another user, or no number of a process
        return True
    return True


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of `replacing` whose processes are gone: they were killed."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            match = LEFTOVER.fullmatch(path.name)  # .NAME.PID.tmp
            if match is None or is_process_alive(int(match[1])):
                continue
            with contextlib.suppress(OSError):
                if stat.S_ISREG(os.lstat(path).st_mode):
                    os.unlink(path)


def write_new(path: Path, content: bytes) -> None:
    """Write a new file, and wait until it is on the disk."""
    with open_new(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replacing(path: AnyPath) -> Iterator[BinaryIO]:
    """A temporary file that takes the place of `path` when the block ends, unless it fails."""
    path = Path(path)
    # A name has at most 255 bytes, and 60 characters have at most 240 in UTF-8.
    temporary = path.with_name(f".{path.name[:60]}.{os.getpid()}.tmp")
    with storage_errors(path):
        temporary.unlink(missing_ok=True)  # of a killed process that had the same number
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
    """Put a file in place of an old one, completely or not at all."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def open_regular(path: AnyPath) -> BinaryIO:
    """Open a file for reading, in a folder that may come from a stranger.

    A link, pipe, device or folder is refused: it may be endless, or wait for ever.
    """
    try:
        handle = os.open(path, os.O_RDONLY | NO_LINKS)
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) == errno.ELOOP:
            raise StorageError(f"{path} is a link. Replace it with the file itself.") from None
        reason = getattr(error, "strerror", None) or error
        raise StorageError(f"{path} cannot be read: {reason}.") from None
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return open(handle, "rb")
    os.close(handle)
    kind = "a folder" if stat.S_ISDIR(mode) else "a pipe or device"
    raise StorageError(f"{path} is {kind}; expected a regular file.")


def read_regular(path: AnyPath, most: int) -> bytes:
    """The bytes of a regular file; one of more than `most` bytes is refused unread."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise StorageError(f"{path} has {size:,} bytes; expected at most {most:,}.")
        try:
            return file.read(size)  # not more, if the file grows meanwhile
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}.") from None


def read_lines(path: AnyPath, most_line: int) -> Iterator[bytes]:
    """The lines of a regular file, with their ends, one at a time: it may be of any length.

    A line of more than `most_line` bytes is refused.
    """
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

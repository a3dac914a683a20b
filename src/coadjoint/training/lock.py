"""A lock that gives a run folder one writer at a time."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import StorageError
from .files import (
    is_same_file,
    open_for_update,
    open_regular,
    refuse_if_not_regular,
    storage_errors,
)


class Lock:
    """Holds a run folder until it is released, or until the process ends, however that happens.

    There are two files because nobody can read a locked file on Windows: `.lock` is the locked one,
    and `lock` names the process that holds it.
    """

    def __init__(self, folder: Path) -> None:
        """Lock the folder; StorageError if another process holds it."""
        self.folder = folder
        self.path = folder / "lock"
        self.locked_path = folder / ".lock"
        self._lock = FileLock(self.locked_path, timeout=0)  # do not wait for the other process
        with storage_errors(folder):
            self._acquire()
            try:
                self._write_owner()
            except BaseException:
                self._lock.release()
                raise

    def _acquire(self) -> None:
        """Lock `.lock`; the error names the process that holds it."""
        with contextlib.suppress(FileNotFoundError):
            # FileLock would follow a link.
            refuse_if_not_regular(self.locked_path, os.lstat(self.locked_path))
        try:
            self._lock.acquire()
        except Timeout:
            raise StorageError(
                f"run folder {self.folder} is in use by {self.owner()}. "
                "Wait for it to end, or choose another --out."
            ) from None

    def _write_owner(self) -> None:
        """Write this process, its host and the time into `lock`, for others to read."""
        self.file = open_for_update(self.path)
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            self.file.truncate(0)
            self.file.write(f"pid {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
            self.file.flush()
            # Fails if `.lock` has been removed since: another process could lock a new one.
            self.status = os.lstat(self.locked_path)
        except FileNotFoundError:
            self.file.close()
            raise StorageError(
                f"{self.locked_path} was removed while it was being locked: let only one process "
                f"at a time use {self.folder}."
            ) from None
        except BaseException:
            self.file.close()
            raise

    def owner(self) -> str:
        """The process that holds the folder, in words: the line in `lock`, if it can be read."""
        with contextlib.suppress(StorageError), open_regular(self.path) as file:
            words = file.read(200).decode(errors="replace").strip()  # for one line of an error
            if words:
                return words
        return "another process"

    @property
    def is_held(self) -> bool:
        """Whether both files are still the ones that were locked."""
        try:
            status = os.lstat(self.locked_path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        is_locked_one = os.path.samestat(status, self.status)
        return is_locked_one and is_same_file(self.file.fileno(), self.path)

    def release(self) -> None:
        """Let another process have the folder."""
        self.file.close()
        self._lock.release()


def is_in_use(folder: Path) -> bool:
    """Whether another process holds a run folder. One that does not exist is free."""
    path = folder / ".lock"
    lock = FileLock(path, timeout=0)
    with storage_errors(folder):
        try:
            refuse_if_not_regular(path, os.lstat(path))
            lock.acquire()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except Timeout:
            return True
        lock.release()
        return False

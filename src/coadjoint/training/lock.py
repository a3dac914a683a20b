"""One writer for one run folder."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import StorageError
from .files import open_regular, own, regular, same, storing


class Lock:
    """Holds a run folder until it is released. The system frees it with the process, however that ends.

    Two files, because Windows lets nobody read a file that is locked: `.lock` is locked, and `lock`
    says in words who holds it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "lock"
        self.locked = folder / ".lock"
        self._lock = FileLock(self.locked, timeout=0)
        with storing(folder):
            self._acquire()
            try:
                self._sign()
            except BaseException:
                self._lock.release()
                raise

    def _acquire(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            regular(self.locked, os.lstat(self.locked))  # never through a link
        try:
            self._lock.acquire()
        except Timeout:
            raise StorageError(
                f"run folder {self.folder} is in use by {self.owner()}. Wait for it to end, or choose another --out."
            ) from None

    def _sign(self) -> None:
        """Write who holds the folder."""
        self.file = own(self.path)
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            self.file.truncate(0)
            self.file.write(f"pid {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
            self.file.flush()
            # `.lock` may have been removed before it was locked: the next process would make another
            self.status = os.lstat(self.locked)
        except FileNotFoundError:
            self.file.close()
            raise StorageError(
                f"{self.locked} was removed while it was locked: let one process at a time use {self.folder}."
            ) from None
        except BaseException:
            self.file.close()
            raise

    def owner(self) -> str:
        """Who holds the folder, in words."""
        with contextlib.suppress(StorageError), open_regular(self.path) as file:
            words = file.read(200).decode(errors="replace").strip()
            if words:
                return words
        return "another process"

    @property
    def holds(self) -> bool:
        """Are both files still what they were when the folder was locked?"""
        try:
            here = os.lstat(self.locked)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(here, self.status) and same(self.file.fileno(), self.path)

    def release(self) -> None:
        self.file.close()
        self._lock.release()

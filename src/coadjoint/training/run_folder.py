"""Run folders: what a run writes, and how it survives.

    metrics.jsonl  clock.jsonl  result.json  environment.json  model.safetensors  checkpoints/step-00001000/

A checkpoint is written under another name, each file synced to the disk, a manifest of SHA-256 sums last, and renamed:
a folder called step-N is whole or damaged from outside, never half-written. The latest one is found by looking, not by a
pointer. Rows of metrics beyond a checkpoint are cut off when a run goes on from it, and computed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import StorageError
from .files import inner, own, replace, same, storing, sweep
from .json_rows import Rows, dumps
from .storage import MOST, Checkpoint, latest, safetensors


class Lock:
    """One writer for one run folder: flock on the file `lock`, which names the owner. The kernel frees it with the process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        with storing(folder):
            self.file = own(self.path)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = self.file.read(200).decode(errors="replace").strip() or "another process"
            self.file.close()
            raise StorageError(
                f"run folder {folder} is in use by {owner}. Wait for it to end, or choose another --out."
            ) from None
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        with storing(folder):
            self.file.truncate(0)
            self.file.write(f"pid {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
            self.file.flush()
        if not same(self.file.fileno(), self.path):
            # removed before it was locked: the next process would make a file and lock that
            self.file.close()
            raise StorageError(f"{self.path} was removed while it was locked: let one process at a time use {folder}.")

    def release(self) -> None:
        self.file.close()


def create(folder: Path, need: int) -> None:
    """Make a new run folder, and be sure that it can be written and has room, before anything is computed."""
    if len(str(folder.name)) > 200 or any(ord(c) < 32 for c in str(folder)):
        raise StorageError(f"run folder {str(folder)!r}: a name has at most 200 characters and no control characters.")
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file, not a folder: choose another --out.")
    vacant(folder)
    with storing(folder):
        if not inner(folder / "checkpoints"):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)  # another process may have been quicker
        free = shutil.disk_usage(folder).free
    if free < need:
        raise StorageError(
            f"{folder} has {free:,} bytes free and this run needs about {need:,}: make room, or choose another --out."
        )


def vacant(folder: Path) -> None:
    """Be sure that no run has begun here: nothing but what comes before it, and what a crash then has left half-written."""
    before = ("lock", "checkpoints", "config.yaml", "online.json")
    here = {p.name for p in folder.iterdir()} if folder.is_dir() else set()
    if all(name in before or (name.startswith(".") and name.endswith(".tmp")) for name in here):
        return
    if here & {"metrics.jsonl", "environment.json"} and "checkpoints" in here:
        raise StorageError(
            f"{folder} already holds a run. Go on with it: coadjoint resume {shlex.quote(str(folder))}; or choose another --out."
        )
    raise StorageError(f"{folder} exists and is not empty: choose another --out.")


@dataclass(frozen=True)
class Held:
    """A run folder in the hands of its one writer. past: whether a checkpoint was there to go on from."""

    folder: Path
    lock: Lock
    metrics: Rows
    clock: Rows
    past: bool

    def sync(self) -> None:
        """Be sure, before every checkpoint, that all files are where they were, and the rows on the disk.

        Without this, a run whose files were deleted would write into nothing and end as if all were
        well."""
        resume = f"coadjoint resume {shlex.quote(str(self.folder))}"
        if not inner(self.folder / "checkpoints"):
            raise StorageError(
                f"{self.folder} (or checkpoints in it) was deleted or moved while the run went on: nothing "
                f"more can be saved. Put it back and go on from its last checkpoint: {resume}; or start the "
                "run again."
            )
        if not same(self.lock.file.fileno(), self.lock.path):
            raise StorageError(
                f"{self.lock.path} was deleted or replaced while the run went on: another process may be "
                f"writing there. Be sure that none does, and go on from the last checkpoint: {resume}"
            )
        said = []
        for rows in (self.metrics, self.clock):
            if not same(rows.file.fileno(), rows.path):
                said.append(rows.rescue())
        if said:
            raise StorageError(f"{self.folder}: {'; '.join(said)}. Go on from the last checkpoint: {resume}")
        self.metrics.sync()
        self.clock.sync()


@contextlib.contextmanager
def held(
    folder: Path,
    resume: bool,
    fallback: bool,
    need: int,
    about: Callable[[], dict[str, Any]],
    check: Callable[[Checkpoint], None],
    restore: Callable[[Checkpoint], None],
    say: Callable[[str], None],
    most: int = MOST,
) -> Iterator[Held]:
    """Hold a run folder, new (it will take `need` bytes) or one to go on with: one writer, metrics and clock open, and the
    past, if there is one, found to be whole by `check` and put back by `restore`. A file of its checkpoints has at most
    `most` bytes."""
    safetensors()
    if not resume:
        create(folder, need)
    elif not inner(folder / "checkpoints"):
        raise StorageError(f"{folder} holds no run to go on with (checkpoints is missing).")
    lock = Lock(folder)
    try:
        if not resume:
            vacant(folder)  # another run may have come and gone before the lock was ours
        sweep(folder)
        saved = latest(folder, fallback, say, check, most) if resume else None
        if saved is not None:
            restore(saved)
        else:
            if resume:
                say("There is no checkpoint yet: the run begins again at step 0.")
            replace(folder / "environment.json", dumps(about(), indent=1))
        at = saved.state if saved else {"metrics": None, "clock": None}
        with contextlib.ExitStack() as files:
            metrics = Rows(folder / "metrics.jsonl", at["metrics"])
            files.callback(metrics.close)
            clock = Rows(folder / "clock.jsonl", at["clock"])
            files.callback(clock.close)
            yield Held(folder, lock, metrics, clock, saved is not None)
    finally:
        lock.release()

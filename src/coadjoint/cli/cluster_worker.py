"""What a Dask worker does for a comparison: it trains one run at a time, in a process of its own.

What is sent to a worker is text: the folder, the run, the versions that are expected. All else is
read from the shared folder, by the same checks as anywhere.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import distributed
import numpy
import torch
from distributed import Status, get_worker
from filelock import FileLock, Timeout

from .. import __version__
from ..errors import CoadjointError, StorageError, error_text
from ..training.lock import is_in_use
from ..training.signals import Interrupted
from .outcomes import read_status
from .pool import ENDED, Outcome, command_words
from .workers import describe_failure, run_to_end

IN_USE = " is in use by "  # in the error of a run whose folder another process holds
LOCK_LOOK = 0.5  # seconds between two looks at a folder that is in use

_stopped: set[str] = set()  # the comparisons, by their tokens, that were told to stop


class UnfitWorkerError(CoadjointError):
    """A worker that cannot train the runs of a comparison."""


class RunLostError(CoadjointError):
    """A run whose process was ended from outside; Dask starts it again."""


class AssignedRun(NamedTuple):
    """A run, as it is sent to a worker."""

    cwd: str  # where the comparison was started: data files are named from there
    folder: str  # that of the comparison, seen from `cwd`
    run: str  # runs/NAME
    token: str  # of the comparison
    versions: dict[str, str]  # those of the machine where the comparison was started


def versions() -> dict[str, str]:
    """The versions that all machines must share; torch without its build (+cpu, +cu130)."""
    return {
        "coadjoint": __version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__.partition("+")[0],
        "numpy": numpy.__version__,
        "distributed": str(vars(distributed)["__version__"]),
    }


def compare_versions(expected: dict[str, str]) -> str | None:
    """How the versions differ from those expected; None if they do not."""
    here = versions()
    for name, version in expected.items():
        if here[name] != version:
            return f"{name} is {here[name]} there and {version} here"
    return None


def examine_folder(cwd: str, probe: str, token: str) -> str | None:
    """What keeps this worker from using the folder of a comparison; None if nothing does.

    probe: a folder which was made by the comparison. It holds `token` with this text, and `.lock`,
    which is locked.
    """
    if not os.path.isdir(cwd):
        return f"does not see the folder {cwd}, where the command was started"
    folder = Path(cwd) / probe
    try:
        if (folder / "token").read_text() != token:
            return f"sees another {folder.parent}"
    except OSError:
        return f"does not see {folder.parent}"
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        pass  # as it should be
    except (OSError, NotImplementedError) as error:
        return f"cannot lock files in {folder.parent} ({error_text(error)})"
    else:
        lock.release()
        return f"does not see locks that are held in {folder.parent}"
    try:
        handle, name = tempfile.mkstemp(dir=folder)
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        return f"cannot write to {folder.parent} ({error_text(error)})"
    return None


def stop_runs(token: str) -> None:
    """Tell the runs of a comparison to save and end, those that come later as well."""
    _stopped.add(token)


class LeashedProcess:
    """A coadjoint command in a process that saves and ends when this one is gone.

    It is not a child by `multiprocessing`: Dask's workers are daemons and may have none.
    """

    def __init__(self, words: list[str], cwd: str) -> None:
        """words: the command line without "coadjoint". The process starts at once."""
        self._errors = tempfile.NamedTemporaryFile(  # noqa: SIM115 (closed with the process)
            prefix="coadjoint-", suffix=".txt"
        )
        environment = {**os.environ}
        environment.setdefault("OMP_NUM_THREADS", "1")  # as in the local pool
        self._process = subprocess.Popen(
            # -P: a file torch.py in the folder is not torch
            [sys.executable, "-P", "-m", "coadjoint.cli.leashed", *words],
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    @property
    def has_ended(self) -> bool:
        """Whether the process is over."""
        return self._process.poll() is not None

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    @property
    def complaint(self) -> str | None:
        """Why the process failed; None if it did not, or runs still."""
        code = self.code
        return describe_failure(Path(self._errors.name), code) if code else None

    def wait(self, seconds: float) -> None:
        """Wait until the process ends, or until the time is over."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def stop(self) -> None:
        """Tell the run to save and end. Further calls do nothing."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def close(self) -> None:
        """Let go of the process; if it still runs, it saves and ends by itself."""
        self.stop()
        self._errors.close()


def run_assigned(task: AssignedRun) -> Outcome:
    """Train a run to its end, resume it if it has begun, leave it alone if it has ended.

    It may have been on another worker, which is gone: then its process saves and ends, and until it
    has, its folder is in use. That is waited for.
    """
    worker = get_worker()
    difference = compare_versions(task.versions)
    if difference is not None:
        raise UnfitWorkerError(f"worker {worker.address}: {difference}")
    target = Path(task.cwd) / task.folder / task.run

    def is_to_stop() -> bool:
        return task.token in _stopped or worker.status not in (Status.running, Status.paused)

    while not is_to_stop():
        look_afresh(target)
        status = read_status(target)
        if status in ENDED:
            return Outcome(None, status)
        if is_in_use(target):
            time.sleep(LOCK_LOOK)
            continue
        words = command_words(Path(task.folder), task.run, Path(task.cwd))
        process = LeashedProcess(words, task.cwd)
        complaint = run_to_end(process, is_to_stop)
        if process.code == StorageError.exit_code and IN_USE in (complaint or ""):
            continue  # another process was faster
        was_ended = process.code == Interrupted.exit_code or (process.code or 0) < 0
        if was_ended and task.token not in _stopped:
            raise RunLostError(f"{complaint} (on worker {worker.address})")
        return Outcome(complaint, read_status(target))
    return Outcome(None, read_status(target))


def look_afresh(target: Path) -> None:
    """List a run's folder and the one it lies in: NFS then asks its server what is there."""
    for folder in (target.parent, target):
        with contextlib.suppress(OSError):
            os.listdir(folder)

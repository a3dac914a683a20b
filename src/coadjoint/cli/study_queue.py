"""The queue of a study: which worker runs which trial, however many workers there are.

A worker is a process of `coadjoint tune`. Two files of the study's folder keep workers apart:

.turn         locked while a worker looks at the record and takes a trial, so that no trial is taken
              twice and no more are begun than were asked for
workers/NAME  locked by a worker as long as it lives

A trial whose worker is gone is put back into the queue and goes on in its run folder. Of a record
in a file, a worker is gone if its file is not locked any more; on a server, if its heartbeat has
been missing: machines may not see each other's locks at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from filelock import FileLock, Timeout

from ..errors import StorageError
from ..training import files
from .study_record import read_plan
from .study_storage import StoragePlace, import_optuna

if TYPE_CHECKING:
    import optuna

MOST_DEATHS = 4  # of workers under the same trial: then the trial is the cause
WAIT = 0.2  # seconds between two looks at a lock
Answer = Literal["begin", "wait", "done"]


class Turn:
    """A lock that one thread of one worker of a study holds at a time."""

    def __init__(self, folder: Path) -> None:
        """folder: that of the study, which exists."""
        self.path = folder / ".turn"
        self._mutex = threading.Lock()
        self._lock = FileLock(self.path, thread_local=False)
        self._holder: int | None = None

    def take(self, has_to_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the turn; False if `has_to_stop` says so before it comes."""
        while not has_to_stop():
            if not self._mutex.acquire(timeout=WAIT):
                continue
            if self._try_file():
                self._holder = threading.get_ident()
                return True
            self._mutex.release()
        return False

    def _try_file(self) -> bool:
        """Whether the file could be locked, within WAIT seconds."""
        with files.storage_errors(self.path):
            with contextlib.suppress(FileNotFoundError):
                files.refuse_if_not_regular(
                    self.path, os.lstat(self.path)
                )  # FileLock follows links
            with contextlib.suppress(Timeout):
                self._lock.acquire(timeout=WAIT)
                return True
        return False

    def give(self) -> None:
        """Let others have the turn; nothing happens in a thread that does not have it."""
        if self._holder == threading.get_ident():
            self._holder = None
            self._lock.release()
            self._mutex.release()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, this thread has the turn."""
        self.take()
        try:
            yield
        finally:
            self.give()


class WorkerMark:
    """The file that says that a worker lives: it is locked until the process ends."""

    def __init__(self, folder: Path) -> None:
        """folder: that of the study."""
        self.folder = folder / "workers"
        self.token = uuid.uuid4().hex[:8]
        self.name = f"{socket.gethostname()}-{os.getpid()}-{self.token}"
        with files.storage_errors(self.folder):
            self.folder.mkdir(exist_ok=True)
            self._lock = FileLock(self.folder / self.name, thread_local=False)
            self._lock.acquire(timeout=0)

    @property
    def where(self) -> str:
        """The machine and the process, in words."""
        return f"{socket.gethostname()}, pid {os.getpid()}"

    def is_alive(self, name: str) -> bool:
        """Whether the worker of this name lives; files of those that do not are removed."""
        if name == self.name:
            return True
        path = self.folder / name
        if not files.is_portable_name(name) or not path.is_file() or path.is_symlink():
            return False
        lock = FileLock(path, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        except OSError:
            return True  # cannot be told: rather wait than take a trial twice
        lock.release()
        path.unlink(missing_ok=True)
        return False

    def others(self) -> list[str]:
        """The names of the other workers that live, as far as this machine can see."""
        names = [path.name for path in self.folder.iterdir()]
        return [name for name in names if name != self.name and self.is_alive(name)]

    def remove(self) -> None:
        """Remove the file, at the end."""
        self._lock.release()
        (self.folder / self.name).unlink(missing_ok=True)


class TrialQueue:
    """Hands trials to the threads of one worker."""

    def __init__(
        self, folder: Path, study: optuna.Study, place: StoragePlace, mark: WorkerMark, turn: Turn
    ) -> None:
        """folder: that of the study. place: of its record."""
        self.folder = folder
        self.study = study
        self.place = place
        self.mark = mark
        self.turn = turn

    def look(self) -> Answer:
        """What a thread that has the turn may do: begin a trial, wait, or end.

        It waits while other workers have trials that it would take over if they died.
        """
        states = import_optuna().trial.TrialState
        self.requeue()
        begun: set[str] = set()
        has_waiting = False
        others = False
        for trial in self.study.get_trials(deepcopy=False):
            name = folder_of(trial)
            if trial.state != states.WAITING or "folder" in trial.user_attrs:
                begun.add(name)
            has_waiting = has_waiting or trial.state == states.WAITING
            is_mine = trial.user_attrs.get("worker") == self.mark.name
            others = others or (trial.state == states.RUNNING and not is_mine)
        if has_waiting or len(begun) < read_plan(self.folder)["trials"]:
            return "begin"
        return "wait" if others else "done"

    def requeue(self) -> None:
        """Put trials whose workers were stopped or are gone back into the queue.

        The caller has the turn, so that nobody does so at the same time, and no trial has just been
        taken without its worker's name.
        """
        optuna = import_optuna()
        states = optuna.trial.TrialState
        optuna.storages.fail_stale_trials(self.study)  # on a server
        for trial in self.latest():
            is_gone = trial.state == states.RUNNING and self.is_gone(trial)
            if is_gone:
                self.study.tell(trial.number, state=states.FAIL, skip_if_finished=True)
            if (is_gone or trial.state == states.FAIL) and not self.is_lost(trial):
                kept = {"left out": trial.user_attrs.get("left out", [])}
                attributes = {"folder": folder_of(trial), **kept}
                self.study.enqueue_trial(trial.params, user_attrs=attributes)

    def latest(self) -> list[optuna.trial.FrozenTrial]:
        """The last trial of each run folder."""
        by_folder = {}
        for trial in self.study.get_trials(deepcopy=False):
            by_folder[folder_of(trial)] = trial
        return list(by_folder.values())

    def is_gone(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether the worker of a running trial is known to be gone."""
        name = trial.user_attrs.get("worker")
        if name is None:  # it died before it wrote its name
            return True
        return self.place.kind != "server" and not self.mark.is_alive(str(name))

    def is_lost(self, trial: optuna.trial.FrozenTrial) -> bool:
        """Whether too many workers died under a trial, so that it is not tried again."""
        return is_lost(trial, self.study.get_trials(deepcopy=False))


def is_lost(trial: optuna.trial.FrozenTrial, trials: Iterable[optuna.trial.FrozenTrial]) -> bool:
    """Whether too many workers died under a trial; trials: all those of its study."""
    if trial.user_attrs.get("stopped"):
        return False
    deaths: Counter[str] = Counter()
    for other in trials:
        if other.state.name == "FAIL" and not other.user_attrs.get("stopped"):
            deaths[folder_of(other)] += 1
    return deaths[folder_of(trial)] >= MOST_DEATHS


def folder_of(trial: optuna.trial.FrozenTrial | optuna.Trial) -> str:
    """The name of a trial's run folder; a trial that is tried again has that of the first."""
    return str(trial.user_attrs.get("folder") or f"trial-{trial.number}")


def wait_for_folder(run: Path, has_to_stop: Callable[[], bool]) -> None:
    """Wait until no process writes to a run folder.

    The run of a worker that was killed saves and ends by itself, but it may take a while.
    """
    lock = FileLock(run / ".lock", thread_local=False)
    while run.is_dir() and not has_to_stop():
        try:
            with contextlib.suppress(FileNotFoundError):
                files.refuse_if_not_regular(run / ".lock", os.lstat(run / ".lock"))
            lock.acquire(timeout=WAIT)
        except Timeout:
            continue
        except OSError as error:
            raise StorageError(f"{run} cannot be locked: {error.strerror}.") from None
        lock.release()
        return

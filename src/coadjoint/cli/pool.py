"""Pools: where the runs of a comparison are trained. Each works through an executor of Python's."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from .workers import Worker, run_to_end

ENDED = ("success", "finished", "early-stopped", "failed")  # of a run that is not started again


class Outcome(NamedTuple):
    """What came of starting or resuming a run."""

    complaint: str | None  # why its process failed, if it did
    status: str | None = None  # that in result.json, as the machine of the run sees it


class RunElsewhere(NamedTuple):
    """A run that is under way on another machine."""

    name: str
    place: str
    share: float  # of its steps, from 0 to 1


class RunPool(Protocol):
    """Where runs are trained, many at a time: on this machine, or on a cluster."""

    most: int  # the largest number of runs at a time so far
    failure: str | None  # why no run can start any more
    flags: str  # what a command line needs to use the same pool again: " --on tcp://..."

    def size(self) -> int:
        """The number of runs at a time."""

    def start(self, folder: Path, run: str) -> Future[Outcome]:
        """Start a run, or resume it if it has begun. folder: the comparison's; run: runs/NAME."""

    def complaint(self, future: Future[Outcome]) -> str | None:
        """Why a run failed, once its future is done; None if it did not."""

    def places(self) -> Mapping[str, str]:
        """Where runs are under way, by their names; {} if all are here."""

    def stop(self, at_once: bool) -> None:
        """Tell all runs to save and end. at_once: do not wait for those that are elsewhere."""

    def close(self) -> None:
        """Let go of everything; runs that are under way are stopped."""


class LocalPool:
    """Processes of this machine, each of which is watched by a thread of the executor."""

    failure: str | None = None
    flags: str = ""

    def __init__(self, jobs: int) -> None:
        """jobs: the number of processes at a time."""
        self.most = jobs
        self.executor: Executor = ThreadPoolExecutor(jobs)
        self.stopping = threading.Event()

    def size(self) -> int:
        """The number of processes at a time."""
        return self.most

    def start(self, folder: Path, run: str) -> Future[Outcome]:
        """Start a run, or resume it if it has begun."""
        return self.executor.submit(self.run, command_words(folder, run))

    def run(self, words: list[str]) -> Outcome:
        """Run a command to its end."""
        return Outcome(run_to_end(Worker(words), self.stopping.is_set))

    def complaint(self, future: Future[Outcome]) -> str | None:
        """Why a run failed; None if it did not."""
        return future.result().complaint

    def places(self) -> Mapping[str, str]:
        """Nothing: all runs are here."""
        return {}

    def stop(self, at_once: bool) -> None:
        """Tell all runs to save and end."""
        self.stopping.set()

    def close(self) -> None:
        """Stop the runs that are left, which happens only if this process fails itself."""
        self.stopping.set()
        self.executor.shutdown()


def command_words(folder: Path, run: str, cwd: Path | None = None) -> list[str]:
    """The command line, without "coadjoint", that starts a run or resumes it if it has begun.

    folder: the comparison's. run: runs/NAME. cwd: where the command is to run, if not here.
    """
    target = folder / run
    if ((cwd or Path()) / target / "config.yaml").exists():
        # --fallback: nobody is there to choose an earlier checkpoint if the last one is damaged.
        return ["resume", str(target), "--fallback", "--quiet"]
    config = folder / "configs" / f"{target.name}.yaml"
    return ["train", "--config", str(config), "--out", str(target), "--quiet"]

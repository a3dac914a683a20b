"""Workers: the runs of a comparison, each in its own process, so that a crash ends one run only."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from .program import main

# A process that has ended says so once, through a pipe. Threads look at each other's processes when
# they start one, so only one may look at a time: the other would read nothing and take it for a
# crash.
LOOKING = threading.Lock()
STARTING = threading.Lock()  # held while the environment is changed for a new process
SERVER_GONE = 255  # the exit code of a process whose server was killed, as Python has it
PRELOADED = ["coadjoint.cli.preloaded"]  # by the server that processes are forked from


@functools.cache
def process_context() -> ForkServerContext | SpawnContext:
    """How processes start.

    On Linux they are forks of a server that has imported torch once and runs nothing. Elsewhere
    they start afresh: Windows has no fork, and on macOS loaded libraries do not survive one.
    """
    if sys.platform != "linux" or not hasattr(os, "fork"):
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Inside, processes start with one torch thread each, unless OMP_NUM_THREADS is set."""
    name = "OMP_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


class Worker:
    """A coadjoint command that runs in its own process."""

    def __init__(self, words: Sequence[str]) -> None:
        """words: the command line without "coadjoint". The process starts at once."""
        handle, name = tempfile.mkstemp(prefix="coadjoint-", suffix=".txt")
        os.close(handle)
        self._errors = Path(name)  # what the process writes to stderr
        # The process saves and ends when this pipe closes: whatever ends us, even SIGKILL, closes
        # it.
        their_end, self._leash = process_context().Pipe(duplex=False)
        arguments = (list(words), their_end, name)
        self.process = process_context().Process(target=run_command, args=arguments)
        with STARTING, one_thread_each():
            start_process(self.process)
        their_end.close()  # the process has its own copy
        self._told_to_stop = False

    @property
    def has_ended(self) -> bool:
        """Whether the process is over."""
        with LOOKING:
            return self.process.exitcode is not None

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process, or the server that it was forked from is gone."""
        code = self.process.exitcode
        return code is not None and (code < 0 or code == SERVER_GONE)

    def wait(self, seconds: float) -> None:
        """Wait until the process ends, or until the time is over."""
        wait_for([self], seconds)

    @property
    def complaint(self) -> str | None:
        """Why the process failed; None if it did not, or runs still."""
        code = self.process.exitcode
        if not code:
            return None
        return describe_failure(self._errors, code)

    def stop(self) -> None:
        """Tell the run to save and end. Further calls do nothing."""
        if not self._told_to_stop:
            self._told_to_stop = True
            with contextlib.suppress(OSError):
                self._leash.send_bytes(b"stop")

    def close(self) -> None:
        """Let go of the process; if it still runs, it saves and ends by itself."""
        self._leash.close()
        with contextlib.suppress(OSError):
            self._errors.unlink()


class AnyWorker(Protocol):
    """A run in a process of its own: a Worker, or one that was started in another way."""

    @property
    def has_ended(self) -> bool:
        """Whether the process is over."""

    @property
    def complaint(self) -> str | None:
        """Why the process failed; None if it did not, or runs still."""

    def wait(self, seconds: float) -> None:
        """Wait until the process ends, or until the time is over."""

    def stop(self) -> None:
        """Tell the run to save and end."""

    def close(self) -> None:
        """Let go of the process."""


def run_to_end(
    worker: AnyWorker, is_to_stop: Callable[[], bool], seconds: float = 0.1
) -> str | None:
    """Wait until a run ends; returns why its process failed, None if it did not.

    is_to_stop: asked each time `seconds` have passed; if true, the run is told to save and end.
    """
    try:
        while not worker.has_ended:
            worker.wait(seconds)
            if is_to_stop():
                worker.stop()
        return worker.complaint
    finally:
        worker.close()


def describe_failure(errors: Path, code: int) -> str:
    """Why a process failed: what it wrote to stderr, the file `errors`, or its exit code."""
    with contextlib.suppress(OSError):
        text = errors.read_text(encoding="utf-8", errors="replace").strip()
        if text:
            return text
    return f"ended without an error message (exit code {code})"


def start_process(process: BaseProcess, tries: int = 50) -> None:
    """Start a process, with several tries.

    The fork server may just have been killed: the system takes a moment to notice, and then another
    server starts. 50 tries take 5 seconds; the last one lets its error out.
    """
    for _ in range(tries - 1):
        try:
            with LOOKING:
                process.start()
            return
        except (ConnectionError, EOFError):
            time.sleep(0.1)
    with LOOKING:
        process.start()


def wait_for(workers: Sequence[Worker], seconds: float) -> None:
    """Wait until one of the workers ends, or until the time is over."""
    wait_for_any([worker.process.sentinel for worker in workers], seconds)


def run_command(words: list[str], leash: Connection, errors: str) -> None:
    """Run a command line, in the process of a worker.

    words: the command line without "coadjoint". leash: closes, or says "stop", when the run is to
    end. errors: the file that stderr goes to; stdout goes nowhere.
    """
    sys.argv = ["coadjoint", *words]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    sys.stderr = open(errors, "a", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    # Compiled libraries write to descriptors 1 and 2, not to sys.stdout and sys.stderr.
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    threading.Thread(target=stop_when_told, args=(leash, errors), daemon=True).start()
    main()


def stop_when_told(leash: Connection, errors: str) -> None:
    """Stop this run as SIGTERM would when the comparison that started it says so, or is gone.

    leash: the pipe to the comparison. errors: the file that stderr goes to.
    """
    try:
        leash.recv_bytes()  # waits, in a thread of its own
    except (EOFError, OSError):
        with contextlib.suppress(OSError):  # nobody is left to read it
            os.unlink(errors)
    signal.raise_signal(signal.SIGTERM)

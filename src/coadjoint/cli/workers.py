"""Workers: the runs of a comparison, each in a process of its own, so that one that crashes takes nothing with it."""

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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

from .program import main

PRELOADED = ["coadjoint.cli.preloaded"]  # by the server that processes are forked from


@functools.cache
def process_context() -> Any:
    """How processes begin: on Linux as forks of a server that has imported torch once and runs nothing; elsewhere anew,
    since Windows has no fork and on macOS libraries that were loaded do not survive one."""
    if sys.platform != "linux" or not hasattr(os, "fork"):
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Inside, processes begin with one thread for each operation of torch, unless the user has said how many."""
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
    """A command line of coadjoint that runs in a process of its own."""

    def __init__(self, words: Sequence[str]) -> None:
        handle, name = tempfile.mkstemp(prefix="coadjoint-", suffix=".txt")
        os.close(handle)
        self._said = Path(name)  # what it complains of
        # The process saves and ends when this is closed: whatever ends us, even SIGKILL, closes it.
        theirs, self._leash = process_context().Pipe(duplex=False)
        self.process = process_context().Process(
            target=run_command, args=(list(words), theirs, name)
        )
        with one_thread_each():
            start_process(self.process)
        theirs.close()
        self._told = False  # to stop

    @property
    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    @property
    def complaint(self) -> str | None:
        """Why the process that has ended has failed; None if it has not."""
        code = self.process.exitcode
        if not code:
            return None
        with contextlib.suppress(OSError):
            said = self._said.read_text(encoding="utf-8", errors="replace").strip()
            if said:
                return said
        return f"ended without a word (exit code {code})"

    def stop(self) -> None:
        """Tell the run to save and end; once is enough."""
        if not self._told:
            self._told = True
            with contextlib.suppress(OSError):
                self._leash.send_bytes(b"stop")

    def close(self) -> None:
        """Forget the process; one that still runs saves and ends by itself."""
        self._leash.close()
        with contextlib.suppress(OSError):
            self._said.unlink()


def start_process(process: Any, tries: int = 50) -> None:
    """Start a process. The server that it is forked from may just have been killed: the system takes a moment to tell, and
    then another server is begun."""
    for _ in range(tries - 1):
        try:
            return process.start()
        except (ConnectionError, EOFError):
            time.sleep(0.1)
    return process.start()


def wait_for(workers: Sequence[Worker], seconds: float) -> None:
    """Until one of them ends, or so long."""
    wait_for_any([worker.process.sentinel for worker in workers], seconds)


def run_command(words: list[str], leash: Connection, complaints: str) -> None:
    """In the process: run a command line."""
    sys.argv = ["coadjoint", *words]
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  until the process ends
    sys.stderr = open(complaints, "a", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)  # what libraries say, too
    os.dup2(sys.stderr.fileno(), 2)
    threading.Thread(target=stop_when_told, args=(leash, complaints), daemon=True).start()
    main()


def stop_when_told(leash: Connection, complaints: str) -> None:
    """Let this run save and end, as SIGTERM would, when the comparison that began it says so, or is gone."""
    try:
        leash.recv_bytes()
    except (EOFError, OSError):
        with contextlib.suppress(OSError):  # nobody will read it
            os.unlink(complaints)
    signal.raise_signal(signal.SIGTERM)

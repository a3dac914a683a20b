"""A Dask scheduler and its workers as processes of their own, for tests that kill them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE = 600  # seconds until a test gives up waiting; never the time that something takes
QUIETLY = ["--no-dashboard"]


def eventually(condition, what, process=None):
    """Wait until a condition holds, and return what it returned.

    process: a command that must not end meanwhile; what it complained of is in the error.
    """
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        has_ended = process is not None and process.poll() is not None
        found = condition()
        if found:
            return found
        if has_ended:
            complaint = process.communicate()[1]
            raise AssertionError(f"{what}: ended with {process.returncode} before: {complaint}")
        time.sleep(0.02)
    raise AssertionError(f"waited in vain: {what}")


class DaskProcesses:
    """A scheduler and workers, named w1, w2, ...; all are killed at the end."""

    def __init__(self, folder, *flags):
        """flags: of the scheduler, the workers and the comparison alike, such as those of TLS."""
        self.folder = Path(folder)
        self.flags = list(flags)
        self.processes = []
        self.workers = {}
        place = self.folder / "scheduler.json"
        protocol = ["--protocol", "tls"] if flags else []
        words = ["--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(place), *protocol]
        self.scheduler = self.start("dask_scheduler", "scheduler", *words)
        eventually(lambda: place.exists() and place.read_text().endswith("}"), "the scheduler")
        self.address = json.loads(place.read_text())["address"]

    def start(self, module, name, *words):
        """Start a program of Dask's; its output goes to NAME.log."""
        command = [sys.executable, "-m", f"distributed.cli.{module}", *words, *QUIETLY, *self.flags]
        with open(self.folder / f"{name}.log", "w") as log:
            # a group of its own: a signal to the comparison's group does not reach it
            process = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )
        self.processes.append(process)
        return process

    def add_worker(self):
        """Start one more worker, and wait until the scheduler knows it."""
        name = f"w{len(self.workers) + 1}"
        words = [self.address, "--nthreads", "1", "--no-nanny", "--name", name]
        self.workers[name] = self.start("dask_worker", name, *words)
        log = self.folder / f"{name}.log"
        eventually(lambda: "Registered to:" in log.read_text(), f"worker {name}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()


def owner(run):
    """The process that holds, or held, a run folder."""
    try:
        return int((run / "lock").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None


def parent(pid):
    """The process that started another."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def has_begun(run):
    """Whether a run has taken steps: its process, if it has."""
    path = run / "metrics.jsonl"
    return path.exists() and path.stat().st_size and owner(run)


def is_gone(pid):
    """Whether a process has ended; one that nobody has waited for counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def start_coadjoint(folder, *words):
    """Start the command line in a folder."""
    command = [sys.executable, "-m", "coadjoint", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes)


def kill(pid, number=signal.SIGKILL):
    """Send a signal to a process."""
    os.kill(pid, number)

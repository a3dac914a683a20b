"""Compare: one task or several, under several settings and seeds, each run in a process of its own; tables and a page.

A comparison is a folder of run folders and `compare.json`, whose rows are methods on tasks. It goes on where it stopped:
runs that have ended are not repeated, others are resumed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Worker:
    """A process that has imported torch, and takes run after run, each into a fork of its own: a run begins at once, and one
    that crashes takes nothing with it."""

    def __init__(self) -> None:
        begin = [sys.executable, "-c", "from coadjoint.compare import serve; serve()"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process = subprocess.Popen(begin, bufsize=0, env=environment, **pipes)  # type: ignore[call-overload]
        self.at: tuple[dict[str, Any], dict[str, Any]] | None = None
        self.said, self.complaint = b"", b""
        for pipe in (self.process.stdout, self.process.stderr):
            os.set_blocking(pipe.fileno(), False)

    @property
    def busy(self) -> bool:
        return self.at is not None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def begin(self, folder: Path, row: dict[str, Any], r: dict[str, Any]) -> None:
        self.at, self.said, self.complaint = (row, r), b"", b""
        target = folder / r["folder"]
        if (target / "config.yaml").exists():
            words = ["resume", str(target), "--fallback"]
        else:
            words = ["train", "--config", str(folder / "configs" / f"{target.name}.yaml"), "--out", str(target)]
        with contextlib.suppress(BrokenPipeError):  # it has died: poll tells
            self.process.stdin.write(json.dumps([*words, "--quiet"]).encode() + b"\n")

    def poll(self) -> tuple[dict[str, Any], dict[str, Any], str | None] | None:
        """The run that has just ended, and what it complained of; None while it goes on."""
        dead = not self.alive
        self.said += self.process.stdout.read() or b""
        self.complaint += self.process.stderr.read() or b""
        if self.at is None or (self.said.count(b"\n") < 2 and not dead):
            return None
        (row, r), self.at = self.at, None
        code = int(self.said.split()[1]) if self.said.count(b"\n") > 1 else self.process.returncode
        why = self.complaint.decode(errors="replace").strip() or f"ended without a word (exit code {code})"
        return row, r, why if code else None

    def stop(self) -> None:
        """Tell the run to save and end."""
        if self.busy and b"\n" in self.said:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self.said.split()[0]), signal.SIGTERM)

    def dismiss(self) -> None:
        """No more runs will come: an idle worker ends, a busy one after its run."""
        self.process.stdin.close()
        if not self.busy:
            self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


def idle_of(workers: list[Worker], jobs: int) -> Worker | None:
    """A worker that has nothing to do, a new one if there may be more; those that have died are forgotten."""
    workers[:] = [worker for worker in workers if worker.busy or worker.alive]
    idle = next((worker for worker in workers if not worker.busy), None)
    if idle is None and len(workers) < jobs:
        workers.append(idle := Worker())
    return idle


def serve() -> None:
    """Run command lines, a JSON list on each line of stdin; answer with the number of the process, and its exit code.

    The signals of a terminal are for the runs: a worker ends when its stdin does, and so does the
    run that it has begun."""
    before = {s: signal.signal(s, signal.SIG_IGN) for s in SIGNALS}
    from ..sweeps.torch_internals import load_compiler
    from ..training import loop  # noqa: F401
    from . import program

    load_compiler()  # here, and not in every run

    with contextlib.suppress(ImportError):
        import jinja2  # noqa: F401
        import safetensors.torch  # noqa: F401
    for line in sys.stdin:
        sys.argv = ["coadjoint", *json.loads(line)]
        worker, pid = os.getpid(), os.fork()
        if pid == 0:
            for s, handler in before.items():
                signal.signal(s, handler)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # stdout is for the answers
            threading.Thread(target=end_with, args=(worker,), daemon=True).start()
            program.main()
        with contextlib.suppress(BrokenPipeError):  # nobody waits for the answers any more
            print(pid, flush=True)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        try:
            print(code, flush=True)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python flushes at its end goes nowhere
            return


def end_with(worker: int) -> None:
    """Let this run save and end, as SIGTERM would, when the comparison that began it is gone, or the
    worker between them.

    The comparison holds the other end of stdin: whatever ends it, even SIGKILL, closes that."""
    stdin = select.poll()
    stdin.register(0, 0)  # nothing is to be read: that it was hung up is told unasked
    while os.getppid() == worker and not stdin.poll(500):
        pass
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nobody reads its complaints any more
    os.kill(os.getpid(), signal.SIGTERM)

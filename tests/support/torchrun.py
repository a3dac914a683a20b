"""torchrun as tests start it: on this machine, one thread for each process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from paths import ROOT, SUPPORT

GRACE = 300  # seconds, for a machine that is busy


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT / "src", SUPPORT)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def torchrun(processes: int, *words: object, nodes: str = "--standalone") -> list[str]:
    """The command line that starts `words`, a script or "-m" and a module, so many times."""
    launch = [sys.executable, "-m", "torch.distributed.run", *nodes.split()]
    return [*launch, "--nproc-per-node", str(processes), *map(str, words)]


def start(processes: int, *words: object, cwd: Path, **options: str) -> subprocess.Popen[str]:
    """Start torchrun; its output goes to files in `cwd`, named by `name`."""
    name = options.pop("name", "torchrun")
    with (cwd / f"{name}.out").open("w") as out, (cwd / f"{name}.err").open("w") as err:
        return subprocess.Popen(
            torchrun(processes, *words, **options),
            cwd=cwd,
            env=environment(),
            stdout=out,
            stderr=err,
            text=True,
        )


def said(cwd: Path, name: str = "torchrun") -> list[str]:
    """The lines of coadjoint among what torchrun wrote to stderr."""
    lines = (cwd / f"{name}.err").read_text(errors="replace").splitlines()
    return [line for line in lines if line.startswith("coadjoint:")]


def worker(torchrun: subprocess.Popen[str], rank: int) -> int | None:
    """The process of a rank; None if there is none (yet)."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):  # it has ended meanwhile
            continue
        if parent == torchrun.pid and f"RANK={rank}".encode() in variables:
            return int(entry.name)
    return None


def wait_for_rows(folder: Path, rows: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has written so many rows, or has ended."""
    path = folder / "metrics.jsonl"
    deadline = time.monotonic() + GRACE
    while process.poll() is None and time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b"\n") >= rows:
            return
        time.sleep(0.02)

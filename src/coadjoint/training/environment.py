"""Run folders: what a run writes, and how it survives.

    metrics.jsonl  clock.jsonl  result.json  environment.json  model.safetensors  checkpoints/step-00001000/

A checkpoint is written under another name, each file synced to the disk, a manifest of SHA-256 sums last, and renamed:
a folder called step-N is whole or damaged from outside, never half-written. The latest one is found by looking, not by a
pointer. Rows of metrics beyond a checkpoint are cut off when a run goes on from it, and computed again.
"""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import encodable


def environment(seed: int, device: str, command: str | None = None) -> dict[str, Any]:
    """Where and with what a run was made."""
    from .. import __version__

    command = command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "coadjoint": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "seed": seed,
        "revision": revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": encodable(command),
    }


def processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def revision() -> str | None:
    """The git revision of this package's source, with a plus sign if it was changed; None if it is not in a repository."""
    here = Path(__file__).parent
    git = lambda *words: subprocess.run(
        ["git", "-C", str(here), *words], capture_output=True, text=True, timeout=5, check=True
    ).stdout.strip()
    try:
        if not git("ls-files", "--", "environment.py"):
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", str(here)) else "")
    except (OSError, subprocess.SubprocessError):
        return None

"""Where and with what a run was made."""

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

from .. import __version__
from ..errors import escape_undecodable


def describe_environment(seed: int, device: str, command: str | None = None) -> dict[str, Any]:
    """Where and with what a run was made."""
    command = command or " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "coadjoint": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "seed": seed,
        "revision": git_revision(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": escape_undecodable(command),
    }


def processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_revision() -> str | None:
    """The git revision of this package's source, with a plus sign if it was changed; None if it is not in a repository."""
    here = Path(__file__).parent
    git = lambda *words: subprocess.run(
        ["git", "-C", str(here), *words], capture_output=True, text=True, timeout=5, check=True
    ).stdout.strip()
    try:
        if not git("ls-files", "--", "environment.py"):
            return None
        return git("rev-parse", "HEAD") + (
            "+" if git("status", "--porcelain", "--", str(here)) else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None

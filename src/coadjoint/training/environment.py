"""The environment of a run: versions, hardware, command."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from .. import __version__
from ..errors import escape_undecodable, hide_passwords
from .json_types import JsonObject

HERE = Path(__file__).parent


def describe_environment(seed: int, device: str, command: str | None = None) -> JsonObject:
    """The versions, hardware and command of a run, for environment.json.

    command: the command line; by default the one that started this process. Passwords in it are
    hidden.
    """
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
        "command": hide_passwords(escape_undecodable(command)),
    }


def processor_name() -> str:
    """The model of the processor, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():  # Linux
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_revision() -> str | None:
    """The git revision of this package's source, with "+" if the source was changed since.

    Changed: any file that the repository tracks, or a new file in the package. New files elsewhere
    do not count: a run folder is one. None if the source is not in a repository.
    """
    try:
        # An installed copy may lie inside a repository that does not track it.
        if not run_git("ls-files", "--", "environment.py"):
            return None
        changed = run_git("status", "--porcelain", "--untracked-files=no")
        new = run_git("status", "--porcelain", "--", str(HERE.parent))
        return run_git("rev-parse", "HEAD") + ("+" if changed or new else "")
    except (OSError, subprocess.SubprocessError):
        return None


def run_git(*words: str) -> str:
    """What `git words...` prints in the folder of this file; an error if it fails or hangs."""
    command = ["git", "-C", str(HERE), *words]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    return finished.stdout.strip()

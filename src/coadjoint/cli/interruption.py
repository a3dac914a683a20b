"""Ctrl-C before a run catches signals itself: what was written by then, in one line."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path

from .program import fail_interrupted

# Each begins a folder that `coadjoint resume` goes on with.
BEGINNINGS = ("config.yaml", "compare.json", "tune.json")


@contextlib.contextmanager
def told_when_interrupted(folder: Path | None) -> Iterator[None]:
    """Inside, Ctrl-C ends the program with a line on what is in the folder of a run.

    folder: None as long as it has no name.
    """
    try:
        yield
    except KeyboardInterrupt:
        fail_interrupted(describe_folder(folder))


def describe_folder(folder: Path | None) -> str:
    """What an interrupted command left in the folder of its run, comparison or search."""
    if folder is None or not folder.exists():
        return "Interrupted before the first step; nothing was written."
    if any((folder / name).exists() for name in BEGINNINGS):
        return f"Interrupted. Resume with: coadjoint resume {shlex.quote(str(folder))}"
    return "Interrupted before the first step."

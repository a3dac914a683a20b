"""Whether torchrun has started this process; without torch, so that the command line can ask."""

from __future__ import annotations

import os

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether torchrun, or something like it, has started this process as one of a group."""
    return all(name in os.environ for name in VARIABLES)


def rank() -> int:
    """The number of this process in its group; 0 without one."""
    return int(os.environ["RANK"]) if is_launched() else 0


def size() -> int:
    """How many processes the group has; 1 without one."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def local_rank() -> int:
    """The number of this process among those on this machine."""
    return int(os.environ.get("LOCAL_RANK", 0)) if is_launched() else 0


def local_size() -> int:
    """How many processes of the group are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if is_launched() else 1

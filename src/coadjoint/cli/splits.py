"""What is split off from the training file: in a new run, and in run folders of older versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .schema import Config, DataSection

if TYPE_CHECKING:
    from ..tasks.task import Task


def split_to_read(data: DataSection, has_begun: bool) -> tuple[float, ...] | None:
    """The shares for `Data.read`; None for its defaults.

    has_begun: `data` is that of a run folder. Up to version 0.8 a run with a held-out file split
    nothing off, whatever --split said, and its config.yaml has no shares or three. Since then it
    has two, those of train and of the part without a file.
    """
    files = [path for path in (data.valid, data.test) if path is not None]
    if not has_begun or not files:
        return data.split
    if len(files) == 2:
        return None
    if data.split is None or len(data.split) == 3:
        return (1.0, 0.0)
    return data.split


def resolved_split(task: Task) -> tuple[float, ...] | None:
    """The shares of the training file that a task was made with; None for built-in tasks."""
    shares: tuple[float, ...] | None = getattr(task, "shares", None)
    return shares


def explain_lack_of_validation(config: Config, option: str) -> str:
    """One line: why there is no validation set for an option such as --patience; what to do."""
    data = config.data
    if data.train is None:
        return f"{option} needs a validation set, and task '{config.task.name}' has none."
    split = "0.8,0.2" if data.test else "0.8,0.1,0.1"
    if data.split is None:
        return (
            f"{option} needs a validation set, and {data.train} is too small to split one off: "
            f"give --valid FILE, or a share: --split {split}."
        )
    return (
        f"{option} needs a validation set, and --split gives it no share: pass "
        f"--split {split}, or give --valid FILE."
    )

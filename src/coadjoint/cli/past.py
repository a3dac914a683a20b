"""Resumed runs: where their data lies, and which settings may differ from those they began with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import StorageError
from ..training.network_section import Shape
from .flags import KeyValues, errors_name_flags, to_plain_dict
from .program import print_escaped
from .schema import Config

if TYPE_CHECKING:
    from ..tasks.files.stream import File
    from ..tasks.task import Task
    from ..training.storage import CheckpointOutline

# Keys of [training] that may change when a run is resumed.
MAY_CHANGE = (
    "steps", "patience", "checkpoint", "keep", "threads", "logger", "tensorboard", "device",
)  # fmt: skip


def refuse_if_changed(config: Config, past: CheckpointOutline | None) -> None:
    """Refuse a config that differs from the description in the checkpoint of the run.

    past: the outline of that checkpoint, or None without one. Only keys that both have are
    compared. Resuming compares all of the description, but only once the network is built.
    """
    if past is None:
        return
    for name, section in to_plain_dict(config).items():
        before = described_section(past.description, name)
        for key, now in section.items():
            if name == "training" and key in MAY_CHANGE:
                continue
            if key in before and before[key] != now:
                where = f"network.{key}" if name == "network" else f"settings.{name}.{key}"
                raise StorageError(
                    f"{past.source} cannot be resumed: {where} has changed since the run began "
                    f"({before[key]!r} then, {now!r} now). Restore it in config.yaml, or start a "
                    "new run."
                )


def stand_where_it_began(run: Path, config: Config, quiet: bool) -> Path:
    """Change to the folder in which a run was started, if its data is not found from here.

    The files of the data are named from there. Returns the run folder as seen from the new place.
    """
    from ..training.report.read import read_mapping
    from ..training.report.run_again import starting_folder

    file = config.data.train
    if file is None or Path(file).exists():
        return run
    folder = run.resolve()
    command = read_mapping(folder / "environment.json", []).get("command")
    place = starting_folder(str(command or ""), folder)
    if place is None or not (place / file).exists():
        return run
    if not quiet:
        print_escaped(f"{file} is not here: changing to {place}, where the run was started.")
    os.chdir(place)
    return folder.relative_to(place)


def described_section(description: object, name: str) -> KeyValues:
    """A section of the description in a checkpoint; {} where the file holds something else."""
    # The network is described by itself, because a model file needs it to be built again.
    path = [name] if name == "network" else ["settings", name]
    for part in path:
        if not isinstance(description, dict):
            return {}
        description = description.get(part)
    return description if isinstance(description, dict) else {}


def refuse_if_other_network(
    config: Config, task: Task | File, past: CheckpointOutline | None
) -> None:
    """Refuse a config whose network is not the checkpoint's, before memory is taken for it.

    The names, shapes and types of the tensors are compared. past: None without a checkpoint.
    """
    from ..training.model_schema import outline_network
    from ..training.restore import compare_tensors

    if past is None:
        return
    with errors_name_flags():
        tensors = outline_network(config.network, Shape.of(task), config.training.precision)
    compare_tensors(tensors, past.outline, past.source)

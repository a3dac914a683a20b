"""Files that a command reads and writes: one that exists is replaced only with --force."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import typer

from ..errors import ConfigError, DataError, StorageError, one_line

PRINTED = "-"  # the name of standard output
FORCE = typer.Option(False, "--force", help="replace files that exist")


def check_inputs(run: Path, data: Path | None = None) -> None:
    """Refuse a run without a model, and data that do not exist, before any output is refused.

    They are read, and refused for what they hold, only afterwards.
    """
    from ..tasks.files.source import suggest_name
    from ..training import predict, schemas

    weights = predict.find_weights(run)
    if isinstance(weights, Path):
        predict.open_network(weights, schemas.read_header(weights), None)
    if data is not None and not data.exists():
        raise DataError(f"{one_line(data, 4096)} does not exist{suggest_name(data)}")


def refuse_existing(path: Path, force: bool, option: str = "--out") -> None:
    """Refuse what is no file, a place in no folder, and unless --force was given a file.

    option: the one that names the file. This comes before any work.
    """
    name = one_line(path, 4096)
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a pipe or device"
        raise ConfigError(f"{name} is {kind}: pass the name of a file to {option}.")
    if not path.parent.is_dir():
        raise StorageError(
            f"{name} cannot be written: its folder does not exist. Create it, or choose another "
            "place."
        )
    if os.path.lexists(path) and not force:
        raise ConfigError(f"{name} exists. Pass another {option}, or --force to replace it.")


def check_outputs(paths: Mapping[str, Path | None], force: bool) -> None:
    """Refuse what `refuse_existing` does, of several files of one command, and equal names.

    paths: by the option that names each; None and "-" are no files. A page is never printed.
    """
    options: dict[Path, str] = {}
    for option, path in paths.items():
        if option == "--page" and str(path) == PRINTED:
            raise ConfigError("--page needs the name of a file: a page is not printed.")
        if path is None or str(path) == PRINTED:
            continue
        refuse_existing(path, force, option)
        other = options.setdefault(path.resolve(), option)
        if other != option:
            raise ConfigError(
                f"{other} and {option} both name {one_line(path, 4096)}: give them different names."
            )

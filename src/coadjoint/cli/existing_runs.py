"""Comparisons of runs that exist already: their settings, grouped into rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError, StorageError
from ..training import files
from . import common_settings
from . import flags as setting_flags
from .compared_runs import refuse_if_occupied
from .flags import KeyValues
from .outcomes import read_result, record_outcome


def compare_existing(paths: Sequence[Path], folder: Path, command: str | None) -> KeyValues:
    """Make a comparison of existing runs, and return the content of its compare.json.

    Runs whose settings are the same but for the seed, the threads and the device share a row.
    """
    from ..training import environment, json_rows

    refuse_if_occupied(folder)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("a run is named twice: name each folder once.")
    rows: dict[str, KeyValues] = {}
    metrics: dict[str, str] = {}  # by task
    for path in paths:
        config = setting_flags.read_run_config(path)
        result = read_result(path)
        if result is None:
            raise StorageError(f"{path} has no result yet. Resume with: coadjoint resume {path}")
        task = config.task.name or str(config.data.train)
        metric = result["metric"]
        if metrics.setdefault(task, metric) != metric:
            raise StorageError(
                f"{path} is scored by '{metric}', the others by '{metrics[task]}': they cannot be "
                "compared."
            )
        values = common_settings.resolved_settings(config)
        new_row = {
            "task": task,
            "metric": metric,
            "goal": result["goal"],
            "name": path.name,
            "values": values,
            "runs": [],
        }
        row = rows.setdefault(json.dumps(values), new_row)
        run = {"seed": config.training.seed, "folder": path.resolve().name}
        record_outcome(path, run, metric)
        row["runs"].append(run)
    resolved = [row["values"] for row in rows.values()]
    for task in metrics:
        keep_differing_settings([row for row in rows.values() if row["task"] == task])
    content = {
        "command": command,
        "rows": list(rows.values()),
        "environment": environment.describe_environment(0, "cpu", command),
    }
    common_settings.put_settings(content, resolved)
    with files.storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.replace(folder / "compare.json", json_rows.dumps(content, indent=1))
    return content


def keep_differing_settings(rows: Sequence[KeyValues]) -> None:
    """Replace the "values" of rows, by section, by "settings": the keys in which rows differ."""
    flat: list[KeyValues] = []
    for row in rows:
        keys: KeyValues = {}
        for section in row.pop("values").values():
            keys.update(section)
        flat.append(keys)
    every_key = sorted({key for keys in flat for key in keys})
    differing = [k for k in every_key if any(keys.get(k) != flat[0].get(k) for keys in flat)]
    for row, keys in zip(rows, flat, strict=True):
        row["settings"] = {key: keys.get(key) for key in differing}

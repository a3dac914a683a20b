"""Outcomes of the runs of a comparison: what result.json says, as rows of compare.json hold it."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import StorageError
from ..training import schemas
from .flags import KeyValues


def read_result(run: Path) -> KeyValues | None:
    """The content of a run's result.json, checked; None if there is none yet."""
    path = run / "result.json"
    if not os.path.lexists(path):
        return None
    return schemas.read(path, schemas.TrainingResultSchema)


def read_status(run: Path) -> str | None:
    """How a run ended; None if it has not ended, or if its result cannot be read."""
    try:
        result = read_result(run)
    except StorageError:
        return None
    return None if result is None else str(result["status"])


def record_outcome(run: Path, entry: KeyValues, metric: str) -> None:
    """Put the outcome of a run, with its value of the metric, into its entry of compare.json.

    run: the folder of the run. What the entry said of an earlier outcome is replaced.
    """
    entry.setdefault("error", None)  # or what the process of the run wrote to stderr
    entry.update(status="waiting", success=False, steps=None, seconds=None, work=None, metric=None)
    try:
        result = read_result(run)
    except StorageError as error:
        entry["error"] = str(error)
        return
    if result is None:
        return
    # A run that succeeded is judged at its success, even if it went on.
    success = bool(result["success"])
    prefix = "success_" if success else ""
    metrics = result.get("metrics", {})
    final = metrics.get("test", metrics.get("valid", {}))  # a task may lack either split
    value = final.get(metric)
    entry["status"] = result["status"]
    entry["success"] = success
    entry["steps"] = result[f"{prefix}step"]
    entry["seconds"] = round(result[f"{prefix}seconds"], 1)
    entry["work"] = result.get(f"{prefix}work")
    # result.json has the text "NaN" for a metric that is not finite.
    entry["metric"] = value if isinstance(value, int | float) else None
    entry["error"] = result.get("reason") or entry["error"]


def describe_end(entry: KeyValues) -> str:
    """One line about a run that has ended: "plain-seed-0: success at step 1,200 (33 s)".

    entry: that of the run in compare.json.
    """
    how = str(entry["status"])
    if entry["error"]:
        how += f": {entry['error']}"
    elif entry["steps"] is not None:
        how += f" at step {entry['steps']:,} ({entry['seconds']:.0f} s)"
    on_one_line = " ".join(how.split())  # an error may have several
    return f"{Path(entry['folder']).name}: {on_one_line}"

"""Outcomes of the runs of a comparison: what result.json says, as rows of compare.json hold it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import CoadjointError, StorageError
from ..training import files, schemas, settings
from .flags import KeyValues

STEP = re.compile(rb'"step":(\d+)')  # in a row of metrics.jsonl
LONGEST_ROW = 2**16  # bytes at the end of metrics.jsonl that hold its last step


def refuse_if_outside(folder: Path, names: Sequence[object]) -> None:
    """Refuse a compare.json that names runs other than its own, runs/NAME.

    The file may be a stranger's: what it names is never followed elsewhere.
    """
    for name in names:
        home, _, leaf = str(name).partition("/")
        if home != "runs" or not files.is_portable_name(leaf):
            raise StorageError(
                f"{folder / 'compare.json'} names the run {str(name)!r}, but a comparison resumes "
                "only its own runs, runs/NAME. Resume others one by one: coadjoint resume RUN"
            )
        files.is_real_folder(folder / "runs" / leaf)  # refuses a link
    files.is_real_folder(folder / "runs")


def read_comparison(folder: Path) -> KeyValues:
    """The contents of compare.json, checked."""
    path = folder / "compare.json"
    if not path.exists():
        raise StorageError(f"{folder} holds no comparison (compare.json is missing).")
    return schemas.read(path, schemas.ComparisonSchema)


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


def share_done(run: Path) -> float:
    """The share of its steps that a run has taken, as of its last validation; 0 if unknown."""
    path = run / "metrics.jsonl"
    try:
        steps = settings.load(run / "config.yaml").values["training"]["steps"]
        if not path.is_file():  # a run that has just begun has none
            return 0.0
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - LONGEST_ROW, 0))
            taken = STEP.findall(file.read(LONGEST_ROW))
    except (CoadjointError, OSError, LookupError, TypeError):
        return 0.0
    if not taken or not isinstance(steps, int) or steps < 1:
        return 0.0
    return min(int(taken[-1]) / steps, 1.0)


def record_outcome(run: Path, entry: KeyValues, metric: str) -> None:
    """Put the outcome of a run, with its value of the metric, into its entry of compare.json.

    run: the folder of the run. What the entry said of an earlier outcome is replaced. The metric is
    that of the validation set; only of a task that has none, that of the test set. "split" says
    which, and "test" is the value on a test set that is not used for ranking.
    """
    entry.setdefault("error", None)  # or what the process of the run wrote to stderr
    entry.update(status="waiting", success=False, steps=None, seconds=None, work=None, metric=None)
    entry.update(split=None, test=None)
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
    split = "valid" if "valid" in metrics else "test"  # a task may lack either
    entry["status"] = result["status"]
    entry["success"] = success
    entry["steps"] = result[f"{prefix}step"]
    entry["seconds"] = round(result[f"{prefix}seconds"], 1)
    entry["work"] = result.get(f"{prefix}work")
    if split in metrics:
        entry["split"] = split
        entry["metric"] = finite_metric(metrics[split], metric)
    if split == "valid" and "test" in metrics:
        entry["test"] = finite_metric(metrics["test"], metric)
    if result["status"] == "interrupted":  # by a signal, whose name tells nothing here
        entry["error"] = None
    else:
        entry["error"] = result.get("reason") or entry["error"]


def finite_metric(values: KeyValues, metric: str) -> float | None:
    """The value of a metric; None without one: result.json has the text "NaN" for it."""
    value = values.get(metric)
    return value if isinstance(value, int | float) else None


def describe_end(entry: KeyValues) -> str:
    """One line about a run that has ended: "plain-seed-0: success at step 1,200 (33 s)".

    entry: that of the run in compare.json.
    """
    how = str(entry["status"])
    if entry["error"]:
        how += f": {entry['error']}"
    elif how == "waiting":
        how = "interrupted before its first step"
    elif entry["steps"] is not None:
        how += f" at step {entry['steps']:,} ({entry['seconds']:.0f} s)"
    on_one_line = " ".join(how.split())  # an error may have several
    return f"{Path(entry['folder']).name}: {on_one_line}"

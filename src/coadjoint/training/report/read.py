"""What run folders hold, however damaged: each fault becomes a sentence on the page."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...errors import CoadjointError, MissingError, StorageError, check_path
from .. import files, schemas, settings, storage
from .curves import TRAINING_KEYS, Curve, CurveStore
from .text import Row, clean, duration, finite_or_nan, metric_stem, parse_goal, plural, short_number

MAX_FILE_BYTES, MAX_LINE_BYTES = (
    200_000_000,
    4 << 20,
)  # bytes of a file that is read whole; of a line of one that is read line by line
NOT_METRICS = ("kind", "split", "step", "sequences")


def scan_rows(path: Path, faults: list[str], word: str = "") -> Iterator[Row]:
    """The objects of a JSON-lines file, of the lines that hold `word`; what cannot be read adds a sentence to `faults`."""
    bad, n, line = [], 0, ""
    try:
        for n, content in enumerate(files.read_lines(path, MAX_LINE_BYTES), 1):
            line = content.decode("utf-8", "replace")
            if word not in line or not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if isinstance(row, dict):
                yield row
            else:
                bad.append(n)
    except StorageError as error:
        faults.append(
            f"{path.name} could not be read{f' beyond line {n}' if n else ''}: {_reason(path, error)}"
        )
    if bad and bad[-1] == n and not line.endswith("\n"):
        bad.pop()
        faults.append(f"The last line of {path.name} was cut off, as by a crash; it is left out.")
    if bad:
        where = ", ".join(map(str, bad[:5])) + (", …" if len(bad) > 5 else "")
        faults.append(f"{path.name}: {plural(len(bad), 'unreadable line')} left out ({where}).")


def _reason(path: Path, error: object) -> str:
    """What an error says of a file that was named already."""
    text = (clean(error).splitlines() or ["damaged"])[0]
    return text.removeprefix(str(path)).lstrip(": ").removeprefix("cannot be read: ")[:200]


def read_rows(path: str | Path) -> list[Row]:
    """The rows of a JSON-lines file, without a last line that a crash cut off."""
    check_path("path", path)
    return list(scan_rows(Path(path), []))


def read_mapping(path: Path, faults: list[str]) -> Row:
    """A mapping from a JSON or YAML file; {} where there is none, and a sentence in `faults` if it is damaged."""
    if not os.path.lexists(path):
        return {}
    try:
        content = files.read_regular(path, MAX_FILE_BYTES)
        value = (
            json.loads(content.decode())
            if path.suffix == ".json"
            else settings.load(path, content).values
        )
        if isinstance(value, dict):
            return value
        faults.append(f"{path.name} could not be read: it holds no mapping.")
    except (ValueError, RecursionError, CoadjointError) as error:
        faults.append(f"{path.name} could not be read: {_reason(path, error)}")
    return {}


def _check_model(path: Path, faults: list[str]) -> None:
    """A sentence in `faults` if the model of a run is damaged: whoever reads the page may want to use it."""
    if not os.path.lexists(path):
        return
    try:
        description = schemas.read_metadata(path, schemas.read_header(path))
        if description.get("sha256") is None:
            return  # of a version that wrote none
        with files.open_regular(path) as file:
            if not storage.is_model_intact(file, description["sha256"]):
                faults.append(
                    f"{path.name} is damaged: it does not have the SHA-256 sum that it carries."
                )
    except StorageError as error:
        faults.append(f"{path.name} cannot be used: {_reason(path, error)}")
    except MissingError:
        return


def as_mapping(value: object) -> Row:
    return value if isinstance(value, dict) else {}


def as_mappings(value: object) -> list[Row]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def describe_outcome(result: Row, last: float) -> tuple[str, str, str]:
    """Tone, word, and what happened."""
    status, at, goal = (
        result.get("status"),
        short_number(result.get("step") or last),
        parse_goal(result.get("goal"))[2],
    )
    why = f": {clean(result['reason'])}" if result.get("reason") else ""
    if result.get("success") is True:
        seconds = finite_or_nan(result.get("success_seconds"))
        when = short_number(result.get("success_step") or last) + (
            f", after {duration(seconds)}" if seconds == seconds else ""
        )
        after = "" if status in ("success", "finished") else f"; {clean(status)} at step {at}{why}"
        return "good", "Success", f"at step {when}" + (f": {goal}" if goal else "") + after
    missed = f", without reaching {goal}" if goal else ""
    told = {
        "success": ("good", "Success", f"at step {at}{why}"),
        "finished": ("calm", "Finished", f"{at} steps{missed}"),
        "early-stopped": ("calm", "Stopped early", f"at step {at}{missed}{why}"),
        "interrupted": ("warn", "Interrupted", f"at step {at}{why}"),
        "failed": ("bad", "Failed", f"at step {at}{why}"),
    }
    unknown = (
        "warn",
        "No result",
        f"the last recorded step is {at}; the run goes on, or ended without a word",
    )
    return told.get(str(status), unknown)


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds; probes: step -> (t, log10 |lam_t|, log10 norms of the temporal components)."""

    config: Row
    environment: Row
    result: Row
    store: CurveStore
    probes: dict[float, list[np.ndarray]]
    faults: list[str]
    clipped_share: float  # share of the steps
    axis: str = ""  # of the probes, where it is not time

    @property
    def last_step(self) -> float:
        return max(
            (
                self.store.curve("train", k)[1][-1]
                for k in TRAINING_KEYS
                if ("train", k) in self.store
            ),
            default=math.nan,
        )

    def held_out(self, stem: str) -> list[Curve]:
        """The curves of a metric and its variants, for each split."""
        keys = [key for key in self.store if key[0] == "held-out" and metric_stem(key[2]) == stem]
        return [self.store.curve(*key, name=f"{key[2]} ({key[1]})") for key in keys]


def read_run(folder: Path) -> RunRecord:
    faults: list[str] = []
    config, environment, result = (
        read_mapping(folder / f, faults) for f in ("config.yaml", "environment.json", "result.json")
    )
    store, skipped, clipped = CurveStore(), Counter[str](), 0
    probes: dict[float, list[np.ndarray]] = {}
    axis = ""
    vector = lambda values: np.array(
        [finite_or_nan(v) for v in values] if isinstance(values, list) else []
    )
    for row in scan_rows(folder / "metrics.jsonl", faults):
        kind, step = row.get("kind"), finite_or_nan(row.get("step"))
        if kind == "train":
            store.put(row, TRAINING_KEYS, "train")
            clipped += row.get("clipped") is True
            skipped.update([clean(row["skipped"])] if row.get("skipped") else [])
        elif kind == "held-out":
            store.put(
                row, (k for k in row if k not in NOT_METRICS), "held-out", str(row.get("split", ""))
            )
        elif kind == "probe" and step == step:
            probes[step] = [vector(row.get(key)) for key in ("t", "log10_costates", "temporal")]
            store.put(row, ("decay", "radius"), "probe")
            axis = clean(row.get("axis") or "")
            norms = as_mapping(row.get("gradients"))
            store.put(norms | {"step": step}, (k for k in norms if k != "step"), "norm")
    if os.path.lexists(folder / "clock.jsonl"):
        for row in scan_rows(folder / "clock.jsonl", faults):
            store.put(row, ("seconds",), "clock")
    _check_model(folder / "model.safetensors", faults)
    faults += [f"{plural(n, 'step')} skipped: {why}." for why, n in skipped.most_common(5)]
    trained = len(store.get(("train", "gradient"), ((),))[0])
    return RunRecord(
        config, environment, result, store, probes, faults, clipped / max(1, trained), axis
    )


def folder_within(folder: Path, run: Row) -> Path | None:
    """The run's folder, if it lies within the compare folder."""
    try:
        path = (folder / str(run.get("folder") or "..")).resolve()
        return path if path.is_relative_to(folder.resolve()) and path.is_dir() else None
    except (OSError, ValueError):
        return None


def held_out_curve(path: Path, metric: str, faults: list[str]) -> tuple[str, Curve]:
    """The held-out curve of a run: of `metric` or, if none is named, of the first that is not the loss."""
    store = CurveStore()
    for row in (
        scan_rows(path / "metrics.jsonl", faults, '"held-out"')
        if os.path.lexists(path / "metrics.jsonl")
        else ()
    ):
        if row.get("kind") == "held-out":
            store.put(row, (k for k in row if k not in NOT_METRICS), str(row.get("split", "")))
    metric = metric or next((key[1] for key in store if key[1] != "loss"), "loss" if store else "")
    splits = sorted(
        (key[0] for key in store if key[1] == metric), key=lambda split: split != "test"
    )
    return metric, store.curve(splits[0] if splits else "", metric)

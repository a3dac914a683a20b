"""Compare: one task under several settings and seeds, each run in a process of its own; one table, one page.

A comparison is a folder of run folders and `compare.json`. It goes on where it stopped: runs that have ended are not
repeated, others are resumed.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import config as configs
from . import files, settings
from .errors import CoadjointError, ConfigError, StorageError

ENDED = ("success", "finished", "early-stopped", "failed")
MOST = 10_000  # runs of a comparison
Tick = Callable[[int, int, str | None], None]  # runs that have ended, all of them, the one that ended just now


@dataclass(frozen=True)
class Variant:
    """A row of the table: a name, and what it changes of the common config."""

    name: str
    values: dict[str, dict[str, Any]]  # by section
    shown: dict[str, Any] = field(default_factory=dict)


def variants(text: str) -> list[Variant]:
    """'clipped clip=1 lr=1e-2|1e-3' -> one row for each choice among alternatives."""
    words = text.split()
    if not words or "=" in words[0]:
        raise ConfigError(f"--method takes a name and settings, 'clipped clip=1 lr=1e-2|1e-3'; got {text!r}.")
    name, choices = words[0], []
    for word in words[1:]:
        key, sign, value = word.partition("=")
        section = "optimiser" if key == "optimiser" else configs.HOMES.get(key.replace("-", "_"))
        if not sign or section is None:
            why = configs.nearest((key.replace("-", "_"),)) if sign else f"{word!r} is not key=value."
            raise ConfigError(f"--method {name}: {why}")
        leaf = "name" if key == "optimiser" else key.replace("-", "_")
        choices.append([(section, leaf, configs.from_flag(section, leaf, v)) for v in value.split("|")])
    rows = []
    varied = {c[0][1] for c in choices if len(c) > 1}
    for combination in itertools.product(*choices):
        values: dict[str, dict[str, Any]] = {}
        for section, leaf, value in combination:
            values.setdefault(section, {})[leaf] = value
        label = " ".join([name, *(f"{leaf}={v}" for _, leaf, v in combination if leaf in varied)])
        rows.append(Variant(label, values, {leaf: v for _, leaf, v in combination}))
    return rows


def plain_name(name: str) -> str:
    """A name for a folder: letters, digits and . _ - alone."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)


def vacant(folder: Path) -> None:
    """Be sure that a comparison can be laid out here."""
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file, not a folder: choose another --out.")
    if (folder / "compare.json").exists():
        raise StorageError(
            f"{folder} already holds a comparison. Go on with it: coadjoint resume {shlex.quote(str(folder))}; or choose another --out."
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise StorageError(f"{folder} exists and is not empty: choose another --out.")


def start(
    base: dict[str, dict[str, Any]],
    rows: Sequence[Variant],
    seeds: Sequence[int],
    folder: Path,
    command: str | None = None,
) -> None:
    """Check every config and lay out the folder: nothing runs yet."""
    names = [plain_name(row.name) for row in rows]
    twice = [row.name for row, name in zip(rows, names, strict=True) if names.count(name) > 1]
    if twice:
        raise ConfigError(f"two methods share the name '{twice[0]}', or that of a folder: give each its own.")
    if len(rows) * len(seeds) > MOST:
        raise ConfigError(f"{len(rows)} methods x {len(seeds)} seeds are more than {MOST:,} runs: compare fewer.")
    vacant(folder)
    table: list[dict[str, Any]] = []
    resolved = []
    goal, metric, about = None, "loss", ""
    for row in rows:
        merged = {s: {**base.get(s, {}), **row.values.get(s, {})} for s in configs.SECTIONS}
        runs = []
        for seed in seeds:
            merged["training"] = {**merged["training"], "seed": seed}
            config = configs.resolve(None, merged)
            resolved.append(config)
            runs.append({"seed": seed, "folder": f"runs/{plain_name(row.name)}-seed-{seed}", "status": "waiting"})
        try:
            task = configs.build(config).task
        except CoadjointError as error:
            error.args = (f"--method {row.name}: {error}",)
            raise
        goal, metric = (str(task.goal) if task.goal else None), task.metric
        about = config.task.name or str(config.data.train)
        if isinstance(config.task.length, int):
            about += f", {config.task.length} steps"
        table.append({"name": row.name, "settings": row.shown, "runs": runs})
    with files.storing(folder):
        (folder / "runs").mkdir(parents=True)
        (folder / "configs").mkdir()
    for config, run in zip(resolved, [run for row in table for run in row["runs"]], strict=True):
        settings.dump(configs.plain(config), folder / "configs" / f"{Path(run['folder']).name}.yaml")
    from . import runs as storage

    found = {
        "command": command,
        "task": about,
        "goal": goal,
        "metric": metric,
        "rows": table,
        "environment": storage.environment(seeds[0], "cpu", command),
    }
    files.replace(folder / "compare.json", storage.dumps(found, indent=1))


def read(folder: Path) -> dict[str, Any]:
    path = folder / "compare.json"
    if not path.exists():
        raise StorageError(f"{folder} holds no comparison (compare.json is missing).")
    found = settings.read_json(path, 50_000_000, StorageError)
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise StorageError(f"{path} is not a comparison.")
    return found


def run(folder: Path, jobs: int, tick: Tick = lambda done, total, what: None) -> dict[str, Any]:
    """Run what has not ended yet, `jobs` at a time, and collect the results."""
    found = read(folder)
    waiting = [r for row in found["rows"] for r in row["runs"] if status(folder / r["folder"]) not in ENDED]
    total = sum(len(row["runs"]) for row in found["rows"])
    tick(total - len(waiting), total, None)
    active: list[tuple[subprocess.Popen[bytes], dict[str, Any]]] = []
    caught: list[int] = []
    before = {
        s: signal.signal(s, lambda n, _: caught.append(n)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        while (waiting and not caught) or active:
            while waiting and not caught and len(active) < jobs:
                r = waiting.pop(0)
                active.append((launch(folder, r), r))
            for process, r in list(active):
                if process.poll() is None:
                    continue
                active.remove((process, r))
                r["error"] = (process.stderr.read() if process.stderr else b"").decode(errors="replace").strip() or None
                outcome(folder / r["folder"], r, found["metric"])
                tick(total - len(waiting) - len(active), total, ended(r))
            if caught:
                for process, _ in active:
                    process.terminate()
            time.sleep(0.05)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    collect(folder, found)
    if caught:
        from .training import Interrupted

        raise Interrupted(
            f"{signal.Signals(caught[0]).name}: every run was saved. Go on with: coadjoint resume {shlex.quote(str(folder))}"
        )
    return found


def ended(r: dict[str, Any]) -> str:
    """One line of a run that has ended: "plain-seed-0: success at step 1,200 (33 s)"."""
    how = f"{r['status']}: {r['error']}" if r["error"] else str(r["status"])
    at = f" at step {r['steps']:,} ({r['seconds']:.0f} s)" if r["steps"] is not None else ""
    return f"{Path(r['folder']).name}: {' '.join(how.split())}{'' if r['error'] else at}"


def launch(folder: Path, r: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A run in a process of its own, which starts no new process group: a terminal's Ctrl-C reaches it too."""
    target = folder / r["folder"]
    if (target / "config.yaml").exists():
        words = ["resume", str(target), "--fallback"]
    else:
        words = ["train", "--config", str(folder / "configs" / f"{target.name}.yaml"), "--out", str(target)]
    quiet = [sys.executable, "-m", "coadjoint", *words, "--quiet"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    return subprocess.Popen(quiet, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def status(run: Path) -> str | None:
    try:
        return json.loads((run / "result.json").read_text()).get("status")
    except (OSError, ValueError, AttributeError):
        return None


def collect(folder: Path, found: dict[str, Any]) -> None:
    """Put every run's outcome into compare.json."""
    for row in found["rows"]:
        for r in row["runs"]:
            outcome(folder / r["folder"], r, found["metric"])
    from . import runs as storage

    files.replace(folder / "compare.json", storage.dumps(found, indent=1))


def outcome(run: Path, r: dict[str, Any], metric: str) -> None:
    ended = status(run)
    r.setdefault("error", None)
    r.update(status=ended or "waiting", success=False, steps=None, seconds=None, metric=None)
    if ended is None:
        return
    result = json.loads((run / "result.json").read_text())
    values = result.get("metrics", {})
    r["success"] = bool(result["success"])
    r["steps"] = result["success_step"] if r["success"] else result["step"]
    r["seconds"] = round(result["success_seconds"] if r["success"] else result["seconds"], 1)
    r["metric"] = values.get("test", values.get("valid", {})).get(metric)
    r["error"] = result.get("reason") or r["error"]


def existing(paths: Sequence[Path], folder: Path, command: str | None) -> dict[str, Any]:
    """A comparison of runs that are there already, by their folders."""
    from . import runs as storage

    vacant(folder)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("a run is named twice: name each folder once.")
    rows: dict[str, dict[str, Any]] = {}
    metric, goal = None, None
    for path in paths:
        config = configs.read(path)
        if status(path) is None:
            raise StorageError(f"{path} has no result yet. Go on with: coadjoint resume {path}")
        result = json.loads((path / "result.json").read_text())
        metric, goal = metric or result["metric"], goal or result["goal"]
        if result["metric"] != metric:
            raise StorageError(
                f"{path} is judged by '{result['metric']}', the others by '{metric}': they do not compare."
            )
        values = configs.plain(config)
        seed = values["training"].pop("seed", 0)
        for key in ("threads", "device"):
            values["training"].pop(key, None)
        row = rows.setdefault(json.dumps(values), {"name": path.name, "settings": {}, "values": values, "runs": []})
        r = {"seed": seed, "folder": os.path.relpath(path, folder)}
        outcome(path, r, metric)
        row["runs"].append(r)
    flat = [{k: v for s in row.pop("values").values() for k, v in s.items()} for row in rows.values()]
    for row, mine in zip(rows.values(), flat, strict=True):
        row["settings"] = {
            k: mine.get(k) for k in sorted({k for f in flat for k in f}) if any(f.get(k) != mine.get(k) for f in flat)
        }
    found = {
        "command": command, "task": "runs", "goal": goal, "metric": metric, "rows": list(rows.values()),
        "environment": storage.environment(0, "cpu", command),
    }  # fmt: skip
    with files.storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.replace(folder / "compare.json", storage.dumps(found, indent=1))
    return found


def spread(values: Iterable[float | None], form: str = ",.0f") -> str:
    """median (least - greatest)"""
    known = sorted(v for v in values if v is not None)
    if not known:
        return "-"
    middle = format(statistics.median(known), form)
    return middle if len(known) == 1 else f"{middle} ({format(known[0], form)} - {format(known[-1], form)})"


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: success, steps and seconds to success, the metric; median and range over seeds."""
    heads = ["method", "success", "steps to success", "seconds to success", found["metric"]]
    rows = []
    for row in found["rows"]:
        won = [r for r in row["runs"] if r["success"]]
        failed = sum(r["status"] not in ("success", "finished", "early-stopped") for r in row["runs"])
        rows.append([
            row["name"],
            f"{len(won)} of {len(row['runs'])}" + (f", {failed} failed" if failed else ""),
            spread([r["steps"] for r in won]),
            spread([r["seconds"] for r in won]),
            spread([r["metric"] for r in row["runs"]], ".4g"),
        ])  # fmt: skip
    return heads, rows

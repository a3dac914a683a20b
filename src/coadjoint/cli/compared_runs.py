"""Compare: one task or several, under several settings and seeds, each run in a process of its own.

A comparison is a folder of run folders and `compare.json`, whose rows are methods on tasks. It goes on where it stopped:
runs that have ended are not repeated, others are resumed.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CoadjointError, ConfigError, StorageError, choose
from ..training import files, schemas, settings
from ..training.report.comparison import BUDGETS
from ..training.signals import Interrupted, handling_stop_signals
from . import build, schema
from . import flags as setting_flags
from .workers import Worker, wait_for

ENDED = ("success", "finished", "early-stopped", "failed")
MOST_RUNS = 10_000  # runs of a comparison
Tick = Callable[
    [int, int, str | None], None
]  # runs that have ended, all of them, the one that ended just now


@dataclass(frozen=True)
class Variant:
    """A method or a task: a name, and what it changes of the common config."""

    name: str
    values: dict[str, dict[str, Any]]  # by section
    shown: dict[str, Any] = field(default_factory=dict)


def parse_variants(
    text: str, what: str = "--method", example: str = "clipped clip=1 lr=1e-2|1e-3"
) -> list[Variant]:
    """'clipped clip=1 lr=1e-2|1e-3' -> one for each choice among alternatives; cell=all is every cell that can be trained."""
    words = text.split()
    if not words or "=" in words[0]:
        raise ConfigError(f"{what} takes a name and settings, {example!r}; got {text!r}.")
    name, choices = words[0], []
    for word in words[1:]:
        key, sign, value = word.partition("=")
        section = (
            "optimiser" if key == "optimiser" else schema.SECTION_OF.get(key.replace("-", "_"))
        )
        if not sign or section is None:
            why = (
                setting_flags.explain_unknown((key.replace("-", "_"),))
                if sign
                else f"{word!r} is not key=value."
            )
            raise ConfigError(f"{what} {name}: {why}")
        leaf = "name" if key == "optimiser" else key.replace("-", "_")
        among = [
            v
            for one in value.split("|")
            for v in (cell_names() if (leaf, one) == ("cell", "all") else [one])
        ]
        choices.append([(section, leaf, setting_flags.parse_flag(section, leaf, v)) for v in among])
    found = []
    varied = {c[0][1] for c in choices if len(c) > 1}
    for combination in itertools.product(*choices):
        values: dict[str, dict[str, Any]] = {}
        for section, leaf, value in combination:
            values.setdefault(section, {})[leaf] = value
        said = lambda v: (
            ",".join(v) if isinstance(v, list) and all(isinstance(w, str) for w in v) else v
        )
        called = lambda section, leaf: section if leaf == "name" else leaf
        label = " ".join(
            [
                name,
                *(f"{called(s, leaf)}={said(v)}" for s, leaf, v in combination if leaf in varied),
            ]
        )
        found.append(Variant(label, values, {called(s, leaf): v for s, leaf, v in combination}))
    return found


def cell_names() -> list[str]:
    """Every cell that can be trained, those of a formula first."""
    from ..cells.library import CELLS
    from ..cells.steps import STEPS

    return [*CELLS, *STEPS]


def parse_tasks(text: str) -> list[Variant]:
    """'addition length=100' -> a built-in task with settings of its own."""
    from ..tasks import TASKS

    found = parse_variants(text, "a task", "addition length=100")
    name = choose("task", text.split()[0], TASKS)
    return [
        Variant(v.name, {**v.values, "task": {**v.values.get("task", {}), "name": name}}, v.shown)
        for v in found
    ]


def task_title(config: schema.Config, name: str = "") -> str:
    """A task in words: "addition, 100 steps, curriculum 20,2000"; and what else tells it from others, by its name."""
    said = lambda v, sign: sign.join(map(str, v)) if isinstance(v, tuple) else str(v)
    given = setting_flags.given_values(config.task)
    task, length = given.pop("name", str(config.data.train)), given.pop("length", None)
    steps = [] if length is None else [f"{said(length, ' to ')} steps"]
    own = [key if value is True else f"{key} {said(value, ',')}" for key, value in given.items()]
    other = [
        word.replace("=", " ")
        for word in name.split()[1:]
        if word.partition("=")[0] not in schema.TaskSection.model_fields
    ]
    return ", ".join([task, *steps, *own, *other])


def folder_name(name: str) -> str:
    """A name for a folder: letters, digits and . _ - alone."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in name)


def refuse_if_occupied(folder: Path) -> None:
    """Be sure that a comparison can be laid out here."""
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file, not a folder: choose another --out.")
    if (folder / "compare.json").exists():
        raise StorageError(
            f"{folder} already holds a comparison. Go on with it: coadjoint resume {shlex.quote(str(folder))}; or choose another --out."
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise StorageError(f"{folder} exists and is not empty: choose another --out.")


def lay_out(
    base: dict[str, dict[str, Any]],
    rows: Sequence[Variant],
    seeds: Sequence[int],
    folder: Path,
    command: str | None = None,
    on: Sequence[Variant] = (Variant("", {}),),
) -> None:
    """Check every config, of every row on every task, and lay out the folder: nothing runs yet."""
    for what, given, way in (
        ("methods", rows, "give each its own"),
        ("tasks", on, "write 'addition length=50|100' for one task in two settings"),
    ):
        names = [folder_name(one.name) for one in given]
        twice = [one.name for one, name in zip(given, names, strict=True) if names.count(name) > 1]
        if twice:
            raise ConfigError(
                f"two {what} share the name '{twice[0]}', or that of a folder: {way}."
            )
    if len(on) * len(rows) * len(seeds) > MOST_RUNS:
        many = f"{len(on)} tasks x " if len(on) > 1 else ""
        raise ConfigError(
            f"{many}{len(rows)} methods x {len(seeds)} seeds are more than {MOST_RUNS:,} runs: compare fewer."
        )
    refuse_if_occupied(folder)
    table: list[dict[str, Any]] = []
    resolved = []
    for task, row in itertools.product(on, rows):
        merged = {
            s: {**base.get(s, {}), **task.values.get(s, {}), **row.values.get(s, {})}
            for s in schema.SECTIONS
        }
        named, runs = " ".join(filter(None, (task.name if len(on) > 1 else "", row.name))), []
        began = time.perf_counter()
        try:
            if not files.is_portable_name(f"{folder_name(named)}-seed-{max(seeds)}.yaml"):
                raise ConfigError(
                    "its name makes no name for a folder: choose a shorter one, and none that a device has."
                )
            for seed in seeds:
                config = setting_flags.resolve(
                    None, {**merged, "training": {**merged["training"], "seed": seed}}
                )
                resolved.append(config)
                runs.append(
                    {
                        "seed": seed,
                        "folder": f"runs/{folder_name(named)}-seed-{seed}",
                        "status": "waiting",
                    }
                )
            job = build.build(config)
        except CoadjointError as error:
            where = f"task {task.name}, " if len(on) > 1 else ""
            error.args = (f"{where}--method {row.name}: {' '.join(str(error).split())}",)
            raise
        table.append({
            "task": task_title(config, task.name), "metric": job.task.metric, "goal": str(job.task.goal) if job.task.goal else None,
            "name": row.name, "settings": row.shown,
            "budget": {key: value for key in BUDGETS if (value := getattr(config.training, key)) is not None},
            "pace": round((time.perf_counter() - began) * job.arguments["steps"]),  # for the order of the runs
            "runs": runs,
        })  # fmt: skip
    with files.storage_errors(folder):
        (folder / "runs").mkdir(parents=True)
        (folder / "configs").mkdir()
    for config, run in zip(resolved, [run for row in table for run in row["runs"]], strict=True):
        settings.dump(
            setting_flags.to_plain_dict(config),
            folder / "configs" / f"{Path(run['folder']).name}.yaml",
        )
    from ..training import environment, json_rows

    found = {
        "command": command,
        "tasks": {
            row["task"]: task.shown for row, task in zip(table[:: len(rows)], on, strict=True)
        },
        "rows": table,
        "environment": environment.describe_environment(seeds[0], "cpu", command),
    }
    files.replace(folder / "compare.json", json_rows.dumps(found, indent=1))


def read_comparison(folder: Path) -> dict[str, Any]:
    path = folder / "compare.json"
    if not path.exists():
        raise StorageError(f"{folder} holds no comparison (compare.json is missing).")
    return schemas.read(path, schemas.ComparisonSchema)


def run_all(folder: Path, jobs: int, tick: Tick = lambda done, total, what: None) -> dict[str, Any]:
    """Run what has not ended yet, `jobs` at a time, and collect the results."""
    found, began = read_comparison(folder), time.monotonic()
    every = [(row, r) for row in found["rows"] for r in row["runs"]]
    refuse_if_outside(folder, [r.get("folder") for _, r in every])
    files.remove_leftovers(folder)
    waiting = [(row, r) for row, r in every if read_status(folder / r["folder"]) not in ENDED]
    waiting.sort(
        key=lambda one: -one[0].get("pace", 0)
    )  # the longest first: at the end no core waits for another
    total = len(every)
    tick(total - len(waiting), total, None)
    workers: dict[Worker, tuple[dict[str, Any], dict[str, Any]]] = {}
    caught: list[int] = []
    try:
        with handling_stop_signals(lambda number, _: caught.append(number)):
            while (waiting and not caught) or workers:
                while waiting and not caught and len(workers) < jobs:
                    row, r = waiting.pop(0)
                    workers[Worker(command_words(folder, r))] = row, r
                wait_for(list(workers), 0.1)
                for worker in [worker for worker in workers if worker.has_ended]:
                    row, r = workers.pop(worker)
                    r["error"] = worker.complaint
                    worker.close()
                    record_outcome(folder / r["folder"], r, row["metric"])
                    tick(total - len(waiting) - len(workers), total, describe_end(r))
                for worker in workers if caught else ():
                    worker.stop()
    finally:
        for worker in workers:
            worker.close()
    found["seconds"] = round(found.get("seconds", 0) + time.monotonic() - began, 1)
    found["jobs"] = jobs
    collect(folder, found)
    if caught:
        raise Interrupted(
            f"{signal.Signals(caught[0]).name}: every run was saved. Go on with: coadjoint resume {shlex.quote(str(folder))}"
        )
    return found


def command_words(folder: Path, r: dict[str, Any]) -> list[str]:
    """The command line of a run: begun, or gone on with."""
    target = folder / r["folder"]
    if (target / "config.yaml").exists():
        return ["resume", str(target), "--fallback", "--quiet"]
    config = folder / "configs" / f"{target.name}.yaml"
    return ["train", "--config", str(config), "--out", str(target), "--quiet"]


def refuse_if_outside(folder: Path, names: Sequence[object]) -> None:
    """Be sure that every run is one of this comparison's own, runs/NAME.

    What a file names is never followed elsewhere."""
    for name in names:
        home, _, leaf = str(name).partition("/")
        if home != "runs" or not files.is_portable_name(leaf):
            raise StorageError(
                f"{folder / 'compare.json'} names the run {str(name)!r}, and a comparison goes on with its own alone, "
                "runs/NAME. Go on with others by themselves: coadjoint resume RUN"
            )
        files.is_real_folder(folder / "runs" / leaf)
    files.is_real_folder(folder / "runs")


def describe_end(r: dict[str, Any]) -> str:
    """One line of a run that has ended: "plain-seed-0: success at step 1,200 (33 s)"."""
    how = f"{r['status']}: {r['error']}" if r["error"] else str(r["status"])
    at = f" at step {r['steps']:,} ({r['seconds']:.0f} s)" if r["steps"] is not None else ""
    return f"{Path(r['folder']).name}: {' '.join(how.split())}{'' if r['error'] else at}"


def read_result(run: Path) -> dict[str, Any] | None:
    """What came of a run; None if it has no result yet."""
    path = run / "result.json"
    return schemas.read(path, schemas.TrainingResultSchema) if os.path.lexists(path) else None


def read_status(run: Path) -> str | None:
    """How a run ended; None if it has not, or does not say so in words that can be read."""
    try:
        result = read_result(run)
    except StorageError:
        return None
    return None if result is None else str(result["status"])


def collect(folder: Path, found: dict[str, Any]) -> None:
    """Put every run's outcome into compare.json."""
    for row in found["rows"]:
        for r in row["runs"]:
            record_outcome(folder / r["folder"], r, row["metric"])
    from ..training import json_rows

    files.replace(folder / "compare.json", json_rows.dumps(found, indent=1))


def record_outcome(run: Path, r: dict[str, Any], metric: str) -> None:
    r.setdefault("error", None)
    r.update(status="waiting", success=False, steps=None, seconds=None, work=None, metric=None)
    try:
        result = read_result(run)
    except StorageError as error:
        r["error"] = str(error)
        return
    if result is None:
        return
    r["status"] = result["status"]
    values = result.get("metrics", {})
    value = values.get("test", values.get("valid", {})).get(metric)
    r["success"] = bool(result["success"])
    r["steps"] = result["success_step"] if r["success"] else result["step"]
    r["seconds"] = round(result["success_seconds"] if r["success"] else result["seconds"], 1)
    r["work"] = result.get("success_work" if r["success"] else "work")
    r["metric"] = (
        value if isinstance(value, int | float) else None
    )  # "NaN", where states left their range
    r["error"] = result.get("reason") or r["error"]


def compare_existing(paths: Sequence[Path], folder: Path, command: str | None) -> dict[str, Any]:
    """A comparison of runs that are there already, by their folders."""
    from ..training import environment, json_rows

    refuse_if_occupied(folder)
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("a run is named twice: name each folder once.")
    rows: dict[str, dict[str, Any]] = {}
    judged: dict[str, str] = {}
    for path in paths:
        config = setting_flags.read_run_config(path)
        result = read_result(path)
        if result is None:
            raise StorageError(f"{path} has no result yet. Go on with: coadjoint resume {path}")
        task, metric = config.task.name or str(config.data.train), result["metric"]
        if judged.setdefault(task, metric) != metric:
            raise StorageError(
                f"{path} is judged by '{metric}', the others by '{judged[task]}': they do not compare."
            )
        values = setting_flags.to_plain_dict(config)
        seed = values["training"].pop("seed", 0)
        for key in ("threads", "device"):
            values["training"].pop(key, None)
        new = {
            "task": task,
            "metric": metric,
            "goal": result["goal"],
            "name": path.name,
            "values": values,
            "runs": [],
        }
        row = rows.setdefault(json.dumps(values), new)
        r = {"seed": seed, "folder": path.resolve().name}
        record_outcome(path, r, metric)
        row["runs"].append(r)
    for task in judged:
        here = [row for row in rows.values() if row["task"] == task]
        flat = [{k: v for s in row.pop("values").values() for k, v in s.items()} for row in here]
        differ = [
            k
            for k in sorted({k for f in flat for k in f})
            if any(f.get(k) != flat[0].get(k) for f in flat)
        ]
        for row, mine in zip(here, flat, strict=True):
            row["settings"] = {k: mine.get(k) for k in differ}
    found = {
        "command": command,
        "rows": list(rows.values()),
        "environment": environment.describe_environment(0, "cpu", command),
    }
    with files.storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files.replace(folder / "compare.json", json_rows.dumps(found, indent=1))
    return found

"""Defaults for your own data: the search for them, and the table of docs/own-data.md.

    python benchmarks/own_data.py prepare SETS --music FOLDER    sets of other packages, as arrays
    python benchmarks/own_data.py choose SETS choose.jsonl       a search over candidate defaults
    python benchmarks/own_data.py refine SETS refine.jsonl       changes of the defaults, one by one
    python benchmarks/own_data.py report SETS OUT                our defaults and a loop of torch
    python benchmarks/own_data.py linear SETS OUT                linear models and MiniRocket
    python benchmarks/own_data.py ranking choose.jsonl           the candidates, best first
    python benchmarks/own_data.py table SETS OUT                 the table, in Markdown

`prepare` needs the packages named in own_sets.py, `linear` scikit-learn and aeon; the others need
this package alone. Runs are made by --jobs processes of one thread each; finished ones are lines of
the file, and a second call with the same file makes those that are missing.

Defaults are chosen on the sets whose role is "choose" and reported on the others. Where a set has
no validation part, 15% of its training sequences are drawn for it by the seed, for all methods
alike. Series of --kind next are split in order of time (70%, 15%, 15%), trained in windows, and
tested as a whole. The test metric is that of the weights with the best validation.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2, 3, 4)
CANDIDATES = {"sequence": 34, "next": 26, "sample": 24}
STEPS = {"first": 800, "second": 1600}
FINALISTS = {"sequence": 4, "next": 5, "sample": 5}
WARMUP_SHARE = 0.05
VALIDATIONS = 40
LONG = 200  # time steps of sequences on which a run takes minutes

Row = dict[str, Any]
Settings = dict[str, dict[str, Any]]


def group_of(meta: Row) -> str:
    """What the defaults may depend on: one answer for a sequence, for each step, or no time."""
    if meta["at"] == "sample":
        return "sample"
    return "next" if meta["kind"] == "next" else "sequence"


# ------------------------------------------------------------------ candidates


def named_candidates(group: str) -> list[Row]:
    """Candidates worth a try by themselves."""
    if group == "sample":
        return [
            {"chain": "64x2", "lr": 1e-3, "batch": 32},
            {"chain": "64x2", "lr": 3e-3, "batch": 16, "dropout": 0.2},
            {"chain": "128x1", "lr": 3e-3, "batch": 16, "activation": "relu", "decay": 0.1},
        ]
    if group == "next":
        base: Row = {"cell": "gru", "hidden": 64, "lr": 3e-3, "batch": 16, "window": 64}
        return [
            base,
            base | {"persistence": True},
            base | {"persistence": True, "lr": 1e-2},
            base | {"persistence": True, "lr": 1e-3, "decay": 0.1},
        ]
    base = {"cell": "gru", "hidden": 64, "lr": 3e-3, "batch": 16}
    return [
        base,
        base | {"readout": "mean"},
        base | {"readout": "mean", "bidirectional": True},
        base | {"bidirectional": True},
        base | {"readout": "attention", "bidirectional": True},
        base | {"readout": "mean", "bidirectional": True, "lr": 1e-2},
        base | {"cell": "lstm"},
        base | {"readout": "mean", "hidden": 128, "dropout": 0.1},
    ]


CHOICES: dict[str, dict[str, list[Any]]] = {
    "sequence": {
        "cell": ["gru", "gru", "lstm"],
        "hidden": [32, 64, 64, 128],
        "bidirectional": [None, None, True],
        "readout": [None, "mean", "mean", "attention", "tilted"],
        "layers": [None, None, None, 2],
        "dropout": [None, None, 0.1, 0.3],
        "lr": [1e-3, 3e-3, 3e-3, 1e-2],
        "batch": [8, 16, 32],
        "decay": [None, 0.01, 0.1],
        "init": [None, None, "orthogonal"],
        "skip": [None, None, True],
    },
    "next": {
        "cell": ["gru", "gru", "lstm", "elman"],
        "hidden": [32, 64, 64, 128],
        "persistence": [None, True, True],
        "skip": [None, True],
        "layers": [None, None, None, 2],
        "lr": [1e-3, 3e-3, 3e-3, 1e-2],
        "batch": [4, 8, 16, 32],
        "decay": [None, None, 0.01, 0.1],
        "window": [32, 64, 128],
        "init": [None, None, "orthogonal"],
    },
    "sample": {
        "chain": ["64x1", "64x2", "128x2", "256x2"],
        "activation": [None, "relu", "silu"],
        "dropout": [None, 0.1, 0.2, 0.5],
        "lr": [1e-3, 3e-3, 1e-2],
        "batch": [16, 32, 64],
        "decay": [None, 0.01, 0.1, 0.3],
    },
}


def candidates(group: str) -> list[Row]:
    """The named candidates and random ones, without repetition, always the same."""
    draw = random.Random(19)
    found = named_candidates(group)
    while len(found) < CANDIDATES[group]:
        drawn: Row = {}
        for key, values in CHOICES[group].items():
            value = draw.choice(values)
            if value is not None:
                drawn[key] = value
        if drawn not in found:
            found.append(drawn)
    return found


def settings_of(candidate: Row, meta: Row, steps: int) -> Settings:
    """The sections of a config: cosine with warm-up, clipped to norm 1, for so many steps."""
    network: Row = {}
    for key in ("cell", "hidden", "bidirectional", "readout", "layers", "dropout", "init", "skip"):
        if key in candidate:
            network[key] = candidate[key]
    for key in ("chain", "activation", "persistence"):
        if key in candidate:
            network[key] = candidate[key]
    if candidate.get("persistence"):
        network["skip"] = True
    optimiser = {
        "lr": candidate["lr"],
        "schedule": "cosine",
        "warmup": round(WARMUP_SHARE * steps),
    }
    if "decay" in candidate:
        optimiser |= {"name": "adamw", "weight_decay": candidate["decay"]}
    training = {
        "steps": steps,
        "every": math.ceil(steps / VALIDATIONS),
        "batch": candidate["batch"],
        "clip": 1.0,
    }
    settings: Settings = {"network": network, "optimiser": optimiser, "training": training}
    window = window_of(candidate.get("window"), meta)
    if window is not None:
        settings["data"] = {"window": window}
    return settings


def window_of(wanted: int | None, meta: Row) -> int | None:
    """The window of a set that is one long series: as wanted, and at most a quarter of it."""
    size: list[int] = meta["sizes"].get("train_u", [2])
    if meta["at"] != "every" or size[0] > 1:
        return None
    return min(wanted or 100, size[1] // 4)


# Fields of training.own_defaults.OwnDefaults: those of the first search, and longer runs.
FIRST = {"least_steps": 800, "most_steps": 2000, "epochs": 200, "chunk": 32}
LONGER = {"least_steps": 2000, "most_steps": 6000, "epochs": 600}
REFINED_SEEDS = {"sequence": (0, 1), "next": (0, 1, 2)}


def variants(group: str) -> dict[str, Row]:
    """Changes of the defaults by name: "settings" by section, "fields" of OwnDefaults."""
    slow: Settings = {"optimiser": {"lr": 3e-3}}
    decay: Settings = {"optimiser": {"name": "adamw", "weight_decay": 0.1}}
    if group == "sequence":
        return {
            "defaults": {},
            "longer": {"fields": LONGER},
            "lr 3e-3": {"settings": slow},
            "longer, lr 3e-3": {"settings": slow, "fields": LONGER},
            "dropout 0.2": {"settings": {"network": {"dropout": 0.2}}},
            "hidden 128, lr 3e-3": {"settings": slow | {"network": {"hidden": 128}}},
            "decay 0.1": {"settings": decay},
            "longer, decay 0.1": {"settings": decay, "fields": LONGER},
        }
    slower: Settings = {"optimiser": {"lr": 1e-3}}
    free: Settings = {"network": {"persistence": False}}
    small: Settings = {"network": {"hidden": 64}}
    few: Settings = {"training": {"batch": 8}}
    large = LONGER | {"chunk": 128}
    return {
        "defaults": {},
        "longer": {"fields": LONGER},
        "lr 1e-3": {"settings": slower},
        "longer, lr 1e-3": {"settings": slower, "fields": LONGER},
        "chunk 64": {"fields": {"chunk": 64}},
        "chunk 128": {"fields": {"chunk": 128}},
        "longer, chunk 64": {"fields": LONGER | {"chunk": 64}},
        "longer, chunk 128": {"fields": LONGER | {"chunk": 128}},
        "hidden 64": {"settings": {"network": {"hidden": 64}}},
        "decay 0.1": {"settings": decay},
        "dropout 0.2": {"settings": {"network": {"dropout": 0.2}}},
        "lstm": {"settings": {"network": {"cell": "lstm"}}},
        "no persistence": {"settings": free},
        "no persistence, longer": {"settings": free, "fields": LONGER},
        "no persistence, lr 1e-3": {"settings": free | slower},
        "longer, chunk 256": {"fields": LONGER | {"chunk": 256}},
        "longer, chunk 128, decay 0.1": {"settings": decay, "fields": large},
        "longer, chunk 128, hidden 64": {"settings": small, "fields": large},
        "longer, chunk 128, batch 8": {"settings": few, "fields": large},
        "longer, chunk 128, lstm": {"settings": {"network": {"cell": "lstm"}}, "fields": large},
        "longer, chunk 128, no persistence": {"settings": free, "fields": large},
        "batch 8": {"settings": few},
        "chunk 128, batch 8": {"settings": few, "fields": {"chunk": 128}},
        "chunk 128, batch 8, decay 0.1": {"settings": few | decay, "fields": {"chunk": 128}},
    }


# ------------------------------------------------------------------ a pool of runs


def carry_out(job: Row) -> Row:
    """One run, in a process of the pool; a run that fails says why."""
    import own_runs
    import torch

    torch.set_num_threads(1)
    folder = Path(job["folder"])
    try:
        if job["method"] == "lstm":
            device = job.get("device", "cpu")
            found = own_runs.run_lstm(folder, job["set"], job["window"], job["seed"], device)
        else:
            with changed_defaults(job.get("fields", {})):
                found = own_runs.run_ours(folder, job["set"], job["settings"], job["seed"])
    except Exception as error:  # a candidate that cannot be built must not end the search
        found = {"error": f"{type(error).__name__}: {error}"}
    return {key: value for key, value in job.items() if key != "folder"} | found


@contextlib.contextmanager
def changed_defaults(fields: dict[str, int]) -> Iterator[None]:
    """Other fields of the defaults for your own data, for as long as this lasts."""
    from coadjoint.training import own_defaults

    choose_defaults = own_defaults.choose_defaults

    def choose_changed(*given: Any) -> Any:
        return dataclasses.replace(choose_defaults(*given), **fields)

    own_defaults.choose_defaults = choose_changed
    try:
        yield
    finally:
        own_defaults.choose_defaults = choose_defaults


def key_of(row: Row) -> str:
    """What makes two runs the same."""
    return json.dumps([row[key] for key in ("method", "stage", "set", "name", "seed")])


def read_rows(path: Path) -> list[Row]:
    """The finished runs."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def run_all(jobs: Iterable[Row], path: Path, processes: int, deadline: float) -> None:
    """Make the runs that are not in the file yet, in order, until the deadline.

    Finished runs are written as they come; those that are under way at the deadline are given up.
    """
    done = {key_of(row) for row in read_rows(path)}
    waiting = [job for job in jobs if key_of(job) not in done]
    print(f"{path.name}: {len(waiting)} runs, {len(done)} done before", flush=True)
    pool = multiprocessing.get_context("spawn").Pool(processes)
    count = 0
    with path.open("a", encoding="utf-8") as file:
        found = pool.imap_unordered(carry_out, waiting)
        while count < len(waiting):
            try:
                row = found.next(max(0.1, deadline - time.time()))
            except multiprocessing.TimeoutError:
                break
            file.write(json.dumps(row) + "\n")
            file.flush()
            count += 1
    for worker in multiprocessing.active_children():
        worker.kill()  # Pool.terminate waits for what a busy worker may never send
    left = len(waiting) - count
    print(f"{path.name}: {count} runs made, {left} left for want of time", flush=True)


# ------------------------------------------------------------------ stages


def read_meta(folder: Path) -> dict[str, Row]:
    """sets.json."""
    found: dict[str, Row] = json.loads((folder / "sets.json").read_text(encoding="utf-8"))
    return found


def choose(folder: Path, path: Path, only: list[str], processes: int, minutes: float) -> None:
    """Try all candidates for a few steps, then the best of each group for longer."""
    meta = read_meta(folder)
    chosen = [name for name, about in meta.items() if about["role"] == "choose"]
    chosen = [name for name in chosen if not only or name in only]
    begin = time.time()
    jobs = []
    found = {group: candidates(group) for group in CANDIDATES}
    for number in range(max(CANDIDATES.values())):
        for name in chosen:
            group = group_of(meta[name])
            if number < len(found[group]):
                jobs.append(job_of(folder, "first", name, meta[name], found[group][number], 0))
    # Long runs first would be faster, but the deadline must not leave a candidate half tried.
    run_all(jobs, path, processes, begin + 60 * minutes * 0.62)
    jobs = []
    finalists = {}
    for group, count in FINALISTS.items():
        finalists[group] = [name for name, *_ in rank(read_rows(path), group, "first")][:count]
    for seed in (1, 2):
        for name in sorted(chosen, key=lambda name: -steps_in(meta[name])):
            for text in finalists[group_of(meta[name])]:
                jobs.append(job_of(folder, "second", name, meta[name], json.loads(text), seed))
    run_all(jobs, path, processes, begin + 60 * minutes * 0.93)
    print_ranking(path)


def refine(folder: Path, path: Path, only: list[str], processes: int, minutes: float) -> None:
    """Try changes of the defaults, as they are now, on the sets to choose on."""
    meta = read_meta(folder)
    names = [name for name in meta if meta[name]["role"] == "choose"]
    names = [name for name in names if not only or name in only]
    jobs = []
    for name in sorted(names, key=lambda name: -entries_of(meta[name])):
        group = group_of(meta[name])
        if group not in REFINED_SEEDS:
            continue
        for seed in REFINED_SEEDS[group]:
            for variant, changes in variants(group).items():
                fields = changes.get("fields", {})
                if "chunk" in fields and window_of(None, meta[name]) is None:
                    continue  # there is nothing to cut
                job = {"method": "ours", "stage": "refine", "group": group, "set": name}
                job |= {"kind": meta[name]["kind"], "name": variant, "seed": seed}
                job |= {"settings": changes.get("settings", {}), "folder": str(folder)}
                jobs.append(job | {"fields": FIRST | fields})
    run_all(jobs, path, processes, time.time() + 60 * minutes)
    print_refined(path)


def print_refined(path: Path) -> None:
    """Each change against the defaults: the mean difference in what is lost, set by set."""
    rows = [row for row in read_rows(path) if row["stage"] == "refine" and "error" not in row]
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for row in rows:
        by_set = found.setdefault(row["group"], {}).setdefault(row["name"], {})
        by_set.setdefault(row["set"], []).append(value_of(row, "valid"))
    for group, by_name in found.items():
        sets = list(by_name["defaults"])
        print(f"\n{group}: wrong answers or log mse, less those of the defaults")
        print(f"{'':22s} {'mean':>7s}", *(f"{name[:9]:>9s}" for name in sets))
        for name, by_set in by_name.items():
            change = {}
            for key in by_set:
                base = statistics.fmean(by_name["defaults"][key])
                change[key] = statistics.fmean(by_set[key]) - base
            mean = statistics.fmean(max(-0.5, min(0.5, value)) for value in change.values())
            cells = [f"{change[key]:9.3f}" if key in change else " " * 9 for key in sets]
            print(f"{name:22s} {mean:7.3f}", *cells)


def steps_in(meta: Row) -> int:
    """The time steps of the longest training sequence; long runs are started first."""
    size: list[int] = meta["sizes"].get("train_u", [0, 0])
    return size[1] if size[0] > 1 else 0


def job_of(folder: Path, stage: str, name: str, meta: Row, candidate: Row, seed: int) -> Row:
    """A run of a candidate."""
    return {
        "method": "ours",
        "stage": stage,
        "group": group_of(meta),
        "set": name,
        "kind": meta["kind"],
        "name": json.dumps(candidate),
        "settings": settings_of(candidate, meta, STEPS[stage]),
        "seed": seed,
        "folder": str(folder),
    }


def report(folder: Path, out: Path, only: list[str], given: argparse.Namespace) -> None:
    """Our defaults and the loop of torch, five seeds each: ours.jsonl and lstm.jsonl, at once."""
    methods = given.methods.split(",")
    out.mkdir(parents=True, exist_ok=True)
    if len(methods) > 1:
        commands = [[sys.executable, *sys.argv, "--methods", method] for method in methods]
        for process in [subprocess.Popen(command) for command in commands]:
            process.wait()
        return
    meta = read_meta(folder)
    deadline = time.time() + 60 * given.budget_minutes
    jobs = []
    for name, seed in report_order({name: meta[name] for name in meta if not only or name in only}):
        about = meta[name]
        job = {"stage": "report", "group": group_of(about), "set": name, "seed": seed}
        job |= {"kind": about["kind"], "name": "defaults", "folder": str(folder)}
        if methods == ["ours"]:
            jobs.append(job | {"method": "ours", "settings": {}})
        elif about["at"] != "sample":
            window = {"window": window_of(None, about), "device": given.device}
            jobs.append(job | {"method": "lstm"} | window)
    processes = given.jobs if methods == ["ours"] else given.lstm_jobs
    run_all(jobs, out / f"{methods[0]}.jsonl", processes, deadline)
    os._exit(0)  # what is left of the pool is not waited for


def report_order(meta: dict[str, Row]) -> list[tuple[str, int]]:
    """(set, seed) of all runs: sets to report on first, each with its first seed before others.

    The first seed goes from short sequences to long ones, so that there is something soon. Then
    come all runs on long ones, so that none is left for the end, and the others seed by seed.
    """
    order = []
    for role in ("report", "choose"):
        names = [name for name in meta if meta[name]["role"] == role]
        names.sort(key=lambda name: entries_of(meta[name]))
        order += [(name, SEEDS[0]) for name in names]
        long = [name for name in reversed(names) if entries_of(meta[name]) > LONG]
        for name in long:
            order += [(name, seed) for seed in SEEDS[1:]]
        for seed in SEEDS[1:]:
            order += [(name, seed) for name in reversed(names) if name not in long]
    return order


def entries_of(meta: Row) -> int:
    """About how long a run takes: the steps of its longest sequence, 1 for tables."""
    sequences, steps = meta["sizes"].get("train_u", [2, 1])[:2]
    return int(steps if sequences > 1 else min(steps, 100))


# ------------------------------------------------------------------ what came of it

RULES = ("valid", "loss", "last")


def value_of(row: Row, rule: str) -> float:
    """What a run loses: the share of wrong answers, or the logarithm of its mse."""
    import own_runs

    found = own_runs.outcome(row["course"], row["kind"] == "classify", rule)
    if row["kind"] == "classify":
        return 1 - found
    return math.log(found) if found > 0 else math.nan


def rank(rows: list[Row], group: str, stage: str, rule: str = "loss") -> list[tuple[Any, ...]]:
    """(candidate, mean regret, mean rank, sets) of a stage, best first.

    The regret on a set is the distance from its best candidate, in shares of wrong answers or in
    the logarithm of the mse, at most 0.5.
    """
    values: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["method"] == "ours" and (row["stage"], row["group"]) == (stage, group):
            value = math.inf if "error" in row else value_of(row, rule)
            value = math.inf if math.isnan(value) else value
            values.setdefault(row["set"], {}).setdefault(row["name"], []).append(value)
    regrets: dict[str, list[float]] = {}
    ranks: dict[str, list[float]] = {}
    for by_name in values.values():
        means = {name: statistics.fmean(found) for name, found in by_name.items()}
        best = min(means.values())
        ordered = sorted(means.values())
        for name, mean in means.items():
            regrets.setdefault(name, []).append(min(0.5, mean - best))
            ranks.setdefault(name, []).append(ordered.index(mean) / max(1, len(ordered) - 1))
    complete = [name for name in regrets if len(regrets[name]) == len(values)]
    table = []
    for name in complete:
        table.append((name, statistics.fmean(regrets[name]), statistics.fmean(ranks[name])))
    return sorted(table, key=lambda line: line[1] + 0.1 * line[2])


def print_ranking(path: Path) -> None:
    """The best candidates of each group and stage, by each rule that keeps weights."""
    rows = read_rows(path)
    for row in rows:
        if "error" in row:
            print("error:", row["set"], row["name"], row["error"][:150])
    for stage in STEPS:
        for group in CANDIDATES:
            for rule in RULES:
                print(f"\n{stage}, {group}, weights by {rule}: regret, rank, candidate")
                for name, regret, place in rank(rows, group, stage, rule)[:8]:
                    print(f"  {regret:.3f}  {place:.2f}  {name}")


def main() -> None:
    """Parse the command line."""
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    stages = ("prepare", "choose", "refine", "report", "linear", "ranking", "table")
    parser.add_argument("stage", choices=stages)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--music", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget-minutes", type=float, default=8)
    parser.add_argument("--methods", default="ours,lstm", help="report: ours, lstm or both")
    parser.add_argument("--device", default="cpu", help="report: of the loop of torch")
    parser.add_argument("--lstm-jobs", type=int, default=6, help="report: processes of that loop")
    parser.add_argument("--sets", default="", help="only these: a,b,c")
    given = parser.parse_args()
    only = [name for name in given.sets.split(",") if name]
    if given.stage == "prepare":
        import own_sets

        own_sets.prepare(given.paths[0], given.music)
    elif given.stage == "choose":
        choose(given.paths[0], given.paths[1], only, given.jobs, given.budget_minutes)
    elif given.stage == "refine":
        refine(given.paths[0], given.paths[1], only, given.jobs, given.budget_minutes)
    elif given.stage == "report":
        report(given.paths[0], given.paths[1], only, given)
    elif given.stage == "ranking":
        print_ranking(given.paths[0])
    else:
        import own_table

        getattr(own_table, given.stage)(*given.paths, only)


if __name__ == "__main__":
    main()

"""Plain tanh networks on the four sets of polyphonic music: a published table, and our best.

    python benchmarks/music.py run table --data DIR --out FILE --seconds 8000
    python benchmarks/music.py run tune --data DIR --out FILE --seconds 8000
    python benchmarks/music.py run final --data DIR --out FILE --seconds 8000
    python benchmarks/music.py table FILE                 the tables of docs/results.md
    python benchmarks/music.py table FILE --write PAGE    put them into that page
    python benchmarks/music.py figure FILE music.svg      its figure

DIR holds JSB_Chorales.mat, MuseData.mat, Nottingham.mat and Piano_midi.mat. FILE gets one row of
JSON for each finished run; runs that it holds already are not repeated. Several parts may be named
after `run`: their runs share the time.

table  Galvan (2016), Table 4.1: MuseData, 50 to 300 units, whole pieces one by one, loss averaged
       over steps, SGD with step size 1e-3, gradients clipped at norm 3. It prints no number of
       epochs and no start; ours are 200 epochs and a spectral radius of 0.9. Also 60 epochs with
       a step size a hundred times as large.
tune   each set, plain and penalised, by a list of settings with seed 0.
final  the setting with the best validation of each set and method, with three other seeds.

Every run is one process with one thread. When the time is over, a run ends with the weights of its
best validation so far and is marked "time".
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

import coadjoint as co
from coadjoint.tasks.music import Music

SETS = {
    "Piano-midi": "Piano_midi.mat",
    "Nottingham": "Nottingham.mat",
    "MuseData": "MuseData.mat",
    "JSB": "JSB_Chorales.mat",
}
UNITS = (50, 100, 200, 300)
PARTS = ("table", "tune", "final")
FINAL_SEEDS = (10, 11, 12)
TABLE_EPOCHS = 200
FASTER_EPOCHS = 60  # of the table's rows with the larger step size
EPOCHS = {"Piano-midi": 60, "Nottingham": 50, "MuseData": 60, "JSB": 120}
# Wider plain networks with more dropout, tried last: (units, dropout), with a step size of 1e-3.
WIDER = {"Piano-midi": ((300, 0.2), (300, 0.3), (400, 0.2), (400, 0.3))}
# What was best for plain networks where no penalised one had it: two penalties are given it, too.
BEST_PLAIN: dict[str, dict[str, Any]] = {
    "Piano-midi": {"rate": 1e-3, "dropout": 0.2},
    "Nottingham": {"units": 300, "dropout": 0.1},
}
RESERVED = 15  # seconds at the end of a run for its last measurements
# Seconds of an epoch with 200 units, plain, batches of 8 and parts of 100 steps: a rough guess.
EPOCH_SECONDS = {"Piano-midi": 0.9, "Nottingham": 2.0, "MuseData": 2.8, "JSB": 0.28}
Row = dict[str, object]


@dataclass(frozen=True)
class Run:
    """One training run. What is None or 0 is left out."""

    part: str
    data: str
    units: int
    seed: int = 0
    optimiser: str = "adam"
    rate: float = 2e-3
    schedule: str = "cosine"
    epochs: int = 60
    patience: int | None = None
    batch: int = 8
    chunk: int | None = 100
    clip: float = 5.0
    radius: float = 0.9
    penalty: str | None = None
    weight: float = 0.0
    falls: bool = False  # whether the weight falls with the inverse of the step, tenfold in all
    dropout: float = 0.0
    noise: float = 0.0

    @property
    def method(self) -> str:
        """Plain or penalised."""
        return "penalised" if self.penalty else "plain"

    @property
    def key(self) -> str:
        """What tells it from other runs."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def expected(self) -> float:
        """A guess of its seconds; a run of the table may be cut at any epoch."""
        if self.part == "table":
            return 0.0
        size = (self.units**2 + 176 * self.units) / (200**2 + 176 * 200)
        sweeps = 2.2 if self.penalty else 1.0
        return EPOCH_SECONDS[self.data] * (0.3 + 0.7 * size) * sweeps * self.epochs + RESERVED


# ------------------------------------------------------------------ the lists of runs


def table_runs() -> list[Run]:
    """The rows of Table 4.1 as printed, and with a larger step size."""
    printed = Run(
        part="table",
        data="MuseData",
        units=UNITS[0],
        optimiser="sgd",
        rate=1e-3,
        schedule="constant",
        epochs=TABLE_EPOCHS,
        batch=1,
        chunk=None,
        clip=3.0,
    )
    as_printed = [replace(printed, units=units) for units in reversed(UNITS)]
    faster = [replace(run, rate=0.1, epochs=FASTER_EPOCHS) for run in as_printed]
    return as_printed + faster


def tuning_runs() -> list[Run]:
    """The settings that are compared by validation, with seed 0."""
    runs = []
    for data, epochs in EPOCHS.items():
        base = Run("tune", data, 200, epochs=epochs)
        is_small = data in ("Piano-midi", "JSB")
        dropout = 0.2 if is_small else 0.1
        other = replace(base, units=100) if is_small else replace(base, units=300)
        runs += [
            base,
            replace(base, rate=1e-3),
            replace(base, dropout=dropout),
            other,
            replace(other, dropout=dropout),
        ]
        penalised = [
            replace(base, penalty="log-ratio", weight=1.0),
            replace(base, penalty="log-ratio", weight=10.0),
            replace(base, penalty="omega", weight=1.0),
            replace(base, penalty="omega", weight=1.0, falls=True),
        ]
        runs += penalised
        # The smaller step size, which a plain network is given, too.
        runs += [replace(run, rate=1e-3) for run in (penalised[0], penalised[3])]
        runs.append(replace(penalised[0], dropout=dropout))
        if is_small:
            runs += [replace(run, dropout=dropout) for run in penalised[1:]]
            runs.append(replace(base, rate=1e-3, dropout=dropout))
        for units, share in WIDER.get(data, ()):
            runs.append(replace(base, units=units, rate=1e-3, dropout=share))
        if data in BEST_PLAIN:
            as_plain = BEST_PLAIN[data]
            runs += [replace(run, **as_plain) for run in (penalised[0], penalised[3])]
    return sorted(runs, key=lambda run: -run.expected)


def final_runs(rows: list[Row]) -> list[Run]:
    """The best setting of each set and method among the rows of `tune`, with other seeds."""
    runs = []
    for data in SETS:
        for method in ("plain", "penalised"):
            row = best_tuned(rows, data, method)
            if row is None:
                continue
            setting = replace(run_of(row), part="final")
            runs += [replace(setting, seed=seed) for seed in FINAL_SEEDS]
    return sorted(runs, key=lambda run: -run.expected)


def run_of(row: Row) -> Run:
    """The run that a row belongs to."""
    return Run(**row["run"])  # type: ignore[arg-type]


def best_tuned(rows: list[Row], data: str, method: str) -> Row | None:
    """The row of `tune` with the best validation; None without any."""
    tuned = []
    for row in rows:
        run = run_of(row)
        if (run.part, run.data, run.method) == ("tune", data, method) and "nll" in row:
            tuned.append(row)
    return min(tuned, key=lambda row: row["nll"]["valid"], default=None)  # type: ignore[index]


# ------------------------------------------------------------------ one run


@functools.lru_cache(maxsize=1)
def load(folder: str, data: str, chunk: int | None) -> Music:
    """A set, whose loss is the mean over the steps of a piece."""
    task = Music(Path(folder) / SETS[data], chunk)
    task.reduce = "mean"
    return task


def gradient_method(run: Run, steps: int) -> co.BPTT | co.Penalised:
    """Plain, or with a penalty whose weight is constant or falls to a tenth."""
    if run.penalty is None:
        return co.BPTT()
    weight = co.penalties.inverse_time(run.weight, 9 / steps) if run.falls else run.weight
    return co.Penalised(run.penalty, weight)


def optimiser_of(run: Run) -> co.optimisers.Optimiser:
    """SGD or Adam, with a constant step size or one that falls to a hundredth."""
    is_cosine = run.schedule == "cosine"
    schedule = co.optimisers.cosine(0.01) if is_cosine else co.optimisers.constant()
    make = {"sgd": co.optimisers.sgd, "adam": co.optimisers.adam}[run.optimiser]
    return make(run.rate, schedule=schedule)


class Curve:
    """What a run measures: the loss of the steps of each epoch, and each validation."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.curve: dict[str, list[float]] = {"train": [], "valid": [], "valid by piece": []}

    def __call__(self, row: dict[str, object]) -> None:
        """Note a row of metrics."""
        if row["kind"] == "train" and "loss" in row:
            self.losses.append(float(str(row["loss"])))
        if row["kind"] != "held-out" or row["step"] == 0:
            return
        values = {
            "train": sum(self.losses) / max(1, len(self.losses)),
            "valid": row["nll"],
            "valid by piece": row["loss"],
        }
        for name, value in values.items():
            self.curve[name].append(round(float(str(value)), 3))
        self.losses.clear()


def train(run: Run, folder: str, deadline: float) -> Row:
    """Train one network until its epochs, its patience or the time is over."""
    torch.set_num_threads(1)
    begin = time.time()
    task = load(folder, run.data, run.chunk)
    net = co.Network(
        "elman",
        inputs=task.inputs,
        hidden=run.units,
        outputs=task.outputs,
        output=task.output,
        readout=task.readout,
        dropout=run.dropout,
    )
    co.initialisers.initialise(net, "spectral", radius=run.radius, seed=run.seed)
    per_epoch = task.steps_per_epoch(run.batch)
    steps = per_epoch * run.epochs
    curve = Curve()
    result = co.train(
        net,
        task,
        gradient=gradient_method(run, steps),
        optimiser=optimiser_of(run),
        steps=steps,
        batch=run.batch,
        clip=run.clip,
        weight_noise=run.noise,
        seconds=max(1.0, deadline - time.time() - RESERVED),
        seed=run.seed,
        every=per_epoch,
        patience=run.patience,
        probes=1,
        nonfinite="skip",
        loggers=[curve],
    )
    is_cut = result.status == "finished" and result.step < steps
    return {
        "run": asdict(run),
        "status": "time" if is_cut else result.status,
        "epochs": round(result.step / per_epoch, 2),
        "best epoch": round((result.best_step or result.step) / per_epoch, 2),
        "seconds": round(time.time() - begin, 1),
        "skipped": result.skipped,
        "nll": {split: round(m["nll"], 4) for split, m in result.metrics.items()},
        "nll by piece": {split: round(m["loss"], 4) for split, m in result.metrics.items()},
        "curve": curve.curve,
        "version": co.__version__,
        "torch": torch.__version__,
    }


# ------------------------------------------------------------------ many runs


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; none if there is no file."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def listed_runs(parts: list[str], rows: list[Row]) -> list[Run]:
    """The runs of these parts that have no row yet, those of the table first."""
    runs: list[Run] = []
    for part in parts:
        if part == "table":
            runs += table_runs()
        elif part == "tune":
            runs += tuning_runs()
        else:
            runs += final_runs(rows)
    done = {run_of(row).key for row in rows}
    return [run for run in runs if run.key not in done]


def next_run(pending: list[Run], left: float) -> Run | None:
    """Take the first run that can end in the seconds left; None if there is none."""
    for k, run in enumerate(pending):
        if max(run.expected, 3 * RESERVED) <= left:
            return pending.pop(k)
    return None


def run_all(pending: list[Run], folder: str, out: Path, seconds: float, jobs: int) -> None:
    """Run as many as the time allows, `jobs` at a time, and append their rows to the file."""
    deadline = time.time() + seconds
    # Large arrays are taken and given back in every step: let the C library keep their pages.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = os.environ["MALLOC_TRIM_THRESHOLD_"] = str(2**32)
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    running: dict[concurrent.futures.Future[Row], Run] = {}
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool,
        out.open("a", encoding="utf-8") as file,
    ):
        while True:
            while len(running) < jobs:
                run = next_run(pending, deadline - time.time())
                if run is None:
                    break
                running[pool.submit(train, run, folder, deadline)] = run
            if not running:
                break
            done, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                report(future, running.pop(future), file)
    print(f"{len(pending)} runs were not begun", flush=True)


def report(future: concurrent.futures.Future[Row], run: Run, file: object) -> None:
    """Write the row of a run that ended, or say why it failed."""
    error = future.exception()
    if error is not None:
        print(f"failed: {run}: {error!r}", file=sys.stderr, flush=True)
        return
    row = future.result()
    print(json.dumps(row), file=file, flush=True)  # type: ignore[call-overload]
    shown = {key: row[key] for key in ("status", "epochs", "seconds", "nll", "nll by piece")}
    print(f"{run}: {shown}", flush=True)


def main() -> None:
    """Run, or show what was kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train, and append to a file")
    run.add_argument("parts", nargs="+", choices=PARTS)
    run.add_argument("--data", required=True, help="the folder of the four .mat files")
    run.add_argument("--out", type=Path, required=True, help="the .jsonl file of rows")
    run.add_argument("--from", dest="before", type=Path, nargs="*", default=[], metavar="FILE")
    run.add_argument("--seconds", type=float, default=540, help="the time for all runs (540)")
    run.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    run.add_argument("--only", default="", help="one set")
    table = commands.add_parser("table", help="print the tables")
    table.add_argument("files", type=Path, nargs="+")
    table.add_argument("--write", type=Path, metavar="PAGE", help="replace the tables of a page")
    figure = commands.add_parser("figure", help="draw the curves of the published table")
    figure.add_argument("files", type=Path, nargs="+")
    figure.add_argument("svg", type=Path)
    options = parser.parse_args()
    for path in options.before if options.command == "run" else options.files:
        if not path.is_file():
            parser.error(f"{path} does not exist.")
    if options.command == "run":
        rows = [row for path in [*options.before, options.out] for row in read_rows(path)]
        pending = listed_runs(options.parts, rows)
        pending = [run for run in pending if options.only in ("", run.data)]
        run_all(pending, options.data, options.out, options.seconds, options.jobs)
        return
    import music_table

    rows = [row for path in options.files for row in read_rows(path)]
    if options.command == "figure":
        music_table.draw(rows, options.svg)
    elif options.write:
        music_table.write(rows, options.write)
    else:
        print("\n\n".join(music_table.tables(rows).values()))


if __name__ == "__main__":
    main()

"""Penalised backpropagation with and without a held source, on temporal order.

    python benchmarks/hold.py --device cuda --json hold.jsonl          runs, and appends to the file
    python benchmarks/hold.py --table hold.jsonl                       the table of docs/results.md
    python benchmarks/hold.py --device cuda --check                    gradients against a loop

Three methods from a vanishing start (spectral radius 0.5), with equal budgets: plain
backpropagation; the penalty log-ratio of weight 4 with its exact gradient; the same penalty with
hold="source". 64 tanh units, batches of 64, Adam, gradients clipped to norm 1, no curriculum. The
step sizes are 1e-3 for sequences of length 100, and 3e-4 and 1e-3 for 200.

Every 500 steps a run is judged on 2,000 sequences that it does not train on. It has succeeded, and
ends, if at most one of them is answered wrongly. The weights at its end are tested on 10,000 more.

A finished run is one line of the file, written at once. Runs that are in the file are not
repeated. After --seconds the runs that are under way end with "cut": true; they are not counted,
and repeated when the command is given again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor

import coadjoint as co

WEIGHT = 4.0
RADIUS = 0.5
HIDDEN = 64
BATCH = 64
EVERY = 500
VALIDATION = 2000
TEST = 10_000
GOAL = 0.9995
METHODS = ("plain", "exact", "held")
SETTINGS = ((100, 1e-3), (200, 3e-4), (200, 1e-3))  # length and step size
SEEDS = (100, 101, 102, 103, 104)
NAMES = {"plain": "plain", "exact": "penalised", "held": "penalised, source held"}


@dataclass(frozen=True)
class Run:
    """One training run."""

    length: int
    lr: float
    method: str
    seed: int
    steps: int


class Row(TypedDict):
    """What a run has reached: one line of the file."""

    length: int
    lr: float
    method: str
    seed: int
    steps: int
    weight: float
    done: int  # steps
    success: bool
    accuracy: float  # of the last weights, on 10,000 sequences
    curve: list[float]  # accuracy on 2,000 sequences, every 500 steps
    radius: float  # of W at the end
    seconds: float
    error: str
    cut: bool
    device: str


def make_method(name: str) -> co.BPTT | co.Penalised:
    """The gradient method by its name in METHODS."""
    if name == "plain":
        return co.BPTT()
    return co.Penalised("log-ratio", WEIGHT, hold="source" if name == "held" else None)


def share_right(net: co.Network, batches: Iterable[co.Batch]) -> float:
    """The share of sequences that are answered correctly."""
    right = 0
    count = 0
    with torch.no_grad():
        for batch in batches:
            right += int((net.run(batch).a.argmax(-1) == batch.y).sum())
            count += len(batch.y)
    return right / count


def train(run: Run, device: str, deadline: float) -> Row:
    """Train until success, until the budget is spent, or until the time `deadline`."""
    began = time.time()
    net = co.Network("elman", inputs=6, hidden=HIDDEN, outputs=4, output="softmax", device=device)
    co.initialisers.initialise(net, "spectral", radius=RADIUS, std=0.1, seed=run.seed)
    task = co.tasks.TemporalOrder(run.length)

    def held_out(draw: str, n: int) -> list[co.Batch]:
        """New sequences on the device, others for each name of a draw."""
        batches = task.held_out("test", run.seed, draw, n)
        return [batch.to(torch.float32, device) for batch in batches]

    method = make_method(run.method)
    validation = held_out("validation", VALIDATION)
    adam = torch.optim.Adam(net.parameters(), run.lr, fused=device == "cuda")
    curve: list[float] = []
    success = False
    error = ""
    step = 0
    while step < run.steps and not success and time.time() < deadline:
        batch = task.batch(step, BATCH, run.seed).to(torch.float32, device)
        try:
            method(net, batch, "cross-entropy").write_grad(net)
        except co.NumericalError as raised:
            error = str(raised)
            break
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
        step += 1
        if step % EVERY == 0:
            curve.append(share_right(net, validation))
            success = curve[-1] >= GOAL
    is_over = success or step == run.steps or bool(error)
    W = net.W.detach().cpu().double()
    return {
        "length": run.length,
        "lr": run.lr,
        "method": run.method,
        "seed": run.seed,
        "steps": run.steps,
        "weight": 0.0 if run.method == "plain" else WEIGHT,
        "done": step,
        "success": success,
        "accuracy": share_right(net, held_out("final", TEST)),
        "curve": curve,
        "radius": round(float(torch.linalg.eigvals(W).abs().max()), 4),
        "seconds": round(time.time() - began, 1),
        "error": error,
        "cut": not is_over,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


# ------------------------------------------------------------------ many runs


def work(arguments: tuple[Run, str, float]) -> Row | None:
    """One run in a process of the pool; None if there is no time left to begin it."""
    run, device, deadline = arguments
    torch.set_num_threads(1)
    return None if time.time() > deadline else train(run, device, deadline)


def read_rows(path: Path) -> list[Row]:
    """The runs in the file that were not cut."""
    if not path.exists():
        return []
    rows: list[Row] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [row for row in rows if not row["cut"]]


def key(row: Row) -> tuple[float | str, ...]:
    """What makes a run the one that it is: the values of Run."""
    return (row["length"], row["lr"], row["method"], row["seed"], row["steps"])


def list_runs(options: argparse.Namespace) -> list[Run]:
    """The runs in order: for each seed all methods, the first two settings before the third."""
    chosen = [(T, lr) for T, lr in SETTINGS if T in options.lengths and lr in options.lr]
    runs: list[Run] = []
    for settings in (chosen[:2], chosen[2:]):
        for seed in options.seeds:
            for length, lr in settings:
                runs += [Run(length, lr, method, seed, options.steps) for method in METHODS]
    return runs


def run_all(options: argparse.Namespace) -> None:
    """Run what is not in the file yet, in several processes, and append to it."""
    deadline = time.time() + options.seconds
    known = {key(row) for row in read_rows(options.json)}
    wanted = [run for run in list_runs(options) if tuple(asdict(run).values()) not in known]
    print(f"{len(wanted)} runs in {options.processes} processes", flush=True)
    spawn = multiprocessing.get_context("spawn")
    jobs = [(run, options.device, deadline) for run in wanted]
    with spawn.Pool(options.processes) as pool, options.json.open("a", encoding="utf-8") as file:
        for row in pool.imap_unordered(work, jobs):
            if row is not None:
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(
                    f"T = {row['length']}, lr {row['lr']:g}, {row['method']}, seed {row['seed']}: "
                    f"{row['done']} steps, {row['accuracy']:.4f}, {row['seconds']} s"
                    f"{' (cut)' if row['cut'] else ''}{' ' + row['error']}",
                    flush=True,
                )


# ------------------------------------------------------------------ the check


def loop_gradient(net: co.Network, batch: co.Batch, held: bool) -> dict[str, Tensor]:
    """The gradient of the mean of L + 4 G in float64, by torch's autograd of a loop over time."""
    p = {name: value.detach().double().requires_grad_() for name, value in net.named_parameters()}
    u = batch.u.double()
    x = u.new_zeros(u.shape[1], HIDDEN)
    states: list[Tensor] = []
    for u_t in u:
        x = torch.tanh(x @ p["W"].T + u_t @ p["R"].T + p["b"])
        states.append(x)
    loss = torch.nn.functional.cross_entropy(x @ p["V"].T + p["b_o"], batch.y, reduction="none")
    (lam,) = torch.autograd.grad(loss.sum(), x, create_graph=True)
    if held:
        lam = lam.detach()
    logs = [lam.norm(dim=1).log()]
    for t in reversed(range(len(states) - 1)):
        (lam,) = torch.autograd.grad(states[t + 1], states[t], lam, create_graph=True)
        logs.append(lam.norm(dim=1).log())
    G = torch.stack(logs).diff(dim=0).square().mean(0)
    grads = torch.autograd.grad((loss + WEIGHT * G).mean(), list(p.values()))
    return dict(zip(p, grads, strict=True))


def check(device: str) -> None:
    """Compare both penalised gradients with the loop, in the first and in a later call.

    On a GPU, later calls replay a captured graph.
    """
    net = co.Network("elman", inputs=6, hidden=HIDDEN, outputs=4, output="softmax", device=device)
    co.initialisers.initialise(net, "spectral", radius=RADIUS, std=0.1, seed=0)
    batch = co.tasks.TemporalOrder(30).batch(0, BATCH, 0).to(torch.float32, device)
    for name in ("exact", "held"):
        truth = loop_gradient(net, batch, name == "held")
        method = make_method(name)
        for call in range(6):
            found = method(net, batch, "cross-entropy").gradient
            if call in (0, 5):
                worst = max(float((found[k] - y).norm() / y.norm()) for k, y in truth.items())
                print(f"{name}, call {call}: relative difference at most {worst:.1e}")


# ------------------------------------------------------------------ the table


def median_and_range(values: Sequence[float], form: str) -> str:
    """The median and the range, "-" of nothing."""
    if not values:
        return "-"
    low, middle, high = (
        format(value, form) for value in (min(values), statistics.median(values), max(values))
    )
    return middle if low == high else f"{middle} ({low} - {high})"


def print_table(rows: Sequence[Row]) -> None:
    """The Markdown of docs/results.md: one line for each budget, length, step size and method."""
    print("| length, step size | method | success | steps to success | % correct | radius of W |")
    print("|---|---|---|---|---|---|")
    budgets = sorted({row["steps"] for row in rows})
    for budget, (length, lr), method in itertools.product(budgets, SETTINGS, METHODS):
        line = (length, lr, method, budget)
        of_line = [row for row in rows if line == (*key(row)[:3], row["steps"])]
        if not of_line:
            continue
        solved = [row["done"] for row in of_line if row["success"]]
        right = [100 * row["accuracy"] for row in of_line]
        radii = [row["radius"] for row in of_line]
        within = f", {budget:,} steps" if len(budgets) > 1 else ""
        print(
            f"| {length}, {lr:g}{within} | {NAMES[method]} | {len(solved)} of {len(of_line)} "
            f"| {median_and_range(solved, ',.0f')} | {median_and_range(right, '.1f')} "
            f"| {median_and_range(radii, '.2f')} |"
        )


def main() -> None:
    """Read the arguments, and run or print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, default=Path("hold.jsonl"))
    parser.add_argument("--table", type=Path, help="print the table of this file, and run nothing")
    parser.add_argument("--check", action="store_true", help="compare gradients, and run nothing")
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--lengths", type=int, nargs="+", default=(100, 200))
    parser.add_argument("--lr", type=float, nargs="+", default=(1e-3, 3e-4))
    options = parser.parse_args()
    if options.table:
        if not options.table.is_file():
            parser.error(f"{options.table} does not exist.")
        print_table(read_rows(options.table))
    elif options.check:
        check(options.device)
    else:
        run_all(options)


if __name__ == "__main__":
    main()

"""Deep tanh networks on the digits: which start and which method make them trainable.

    python benchmarks/depth.py                      the table of docs/depth.md
    python benchmarks/depth.py --depths 10 --seeds 2 --steps 200

For each depth (hidden layers of 64 tanh units), start and method, the learning rate is chosen on
the tuning seeds by validation accuracy; the other seeds are reported: test accuracy of the weights
with the best validation accuracy, and the number of training steps until the validation accuracy
first exceeds 95%. Every run has the same number of training steps, pretraining included. Batches
of 64, Adam, gradients clipped to norm 1, the rate falling linearly to a tenth.

Methods: plain; log-ratio, whose weight falls from 1 to 0 over the first 500 steps; isometry, which
minimises that penalty alone for the first 300 steps at the rate 3e-3 and then trains plainly.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
from dataclasses import dataclass, replace

import numpy as np
import torch

import coadjoint as co

STARTS = {
    "gaussian 0.5": ("gaussian", 0.5),
    "gaussian 1.0": ("gaussian", 1.0),
    "orthogonal": ("orthogonal", 1.0),
}
METHODS = ("plain", "log-ratio", "isometry")
RATES = (1e-3, 2e-4)
TUNING_SEEDS = (0, 1)
FIRST_REPORTED_SEED = 10
PRETRAINING = 300
PRETRAINING_RATE = 3e-3
EVERY = 50
GOAL = 0.95


@dataclass(frozen=True)
class Run:
    """One training run."""

    depth: int
    start: str
    method: str
    rate: float
    seed: int
    steps: int


@dataclass(frozen=True)
class Outcome:
    """What a run has reached."""

    valid: float  # the best accuracy
    test: float  # of the weights with that accuracy
    first: int | None  # the first step with a validation accuracy above GOAL


def gradient_method(run: Run) -> co.BP | co.Penalised:
    """The method of the steps after pretraining."""
    if run.method == "log-ratio":
        return co.Penalised("log-ratio", co.penalties.linear(1.0, 0.0, 500))
    return co.BP()


def train(run: Run) -> Outcome:
    """Train one network."""
    torch.set_num_threads(1)
    task = co.tasks.make("digits-flat")
    start, gain = STARTS[run.start]
    net = co.Chain.mlp(
        64, [64] * run.depth, 10, output="softmax", start=start, gain=gain, seed=run.seed
    )
    pretraining = PRETRAINING if run.method == "isometry" else 0
    alone = co.Penalised("isometry", 1.0, pretrain=PRETRAINING)
    method = gradient_method(run)
    adam = torch.optim.Adam(net.parameters(), run.rate)
    best = Outcome(0.0, 0.0, None)
    for step in range(run.steps):
        is_pretraining = step < pretraining
        rate = run.rate * (1 - 0.9 * step / run.steps)
        if is_pretraining:
            rate = PRETRAINING_RATE
        elif step == pretraining:
            adam = torch.optim.Adam(net.parameters(), rate)
        adam.param_groups[0]["lr"] = rate
        batch = net.move_batch(task.batch(step, 64, run.seed))
        chosen = alone if is_pretraining else method
        chosen(net, batch, task.loss).write_grad(net)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
        if (step + 1) % EVERY == 0:
            best = updated(best, net, task, step + 1)
    return best


def updated(best: Outcome, net: co.Chain, task: co.tasks.Task, step: int) -> Outcome:
    """The outcome after the validation at this step."""
    valid = co.evaluate(net, task, "valid")["accuracy"]
    if valid > GOAL and best.first is None:
        best = replace(best, first=step)
    if valid > best.valid:
        test = co.evaluate(net, task, "test")["accuracy"]
        best = replace(best, valid=valid, test=test)
    return best


def run_all(runs: list[Run], jobs: int) -> dict[Run, Outcome]:
    """The outcomes of all runs, in processes of one thread each."""
    context = multiprocessing.get_context("spawn")
    outcomes = {}
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for run, outcome in zip(runs, pool.map(train, runs), strict=True):
            outcomes[run] = outcome
            print(f"  {len(outcomes)} of {len(runs)} {run} {outcome}", flush=True)
    return outcomes


def describe(outcomes: list[Outcome]) -> str:
    """The reported runs of one line of the table, in words."""
    tests = np.array([outcome.test for outcome in outcomes])
    steps = sorted(outcome.first for outcome in outcomes if outcome.first is not None)
    reached = f"{len(steps)} of {len(outcomes)}"
    if steps:
        reached += f": {', '.join(map(str, steps))}"
    return f"{tests.mean():.3f} | {tests.min():.3f} to {tests.max():.3f} | {reached}"


def main() -> None:
    """Tune, report and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[10, 30, 100])
    parser.add_argument("--seeds", type=int, default=5, help="seeds to report (5)")
    parser.add_argument("--steps", type=int, default=1500, help="training steps of a run (1500)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    options = parser.parse_args()
    cases = list(itertools.product(options.depths, STARTS, METHODS))
    print("choosing the learning rates", flush=True)
    tuning = []
    for (depth, start, method), rate, seed in itertools.product(cases, RATES, TUNING_SEEDS):
        tuning.append(Run(depth, start, method, rate, seed, options.steps))
    tuning.sort(key=lambda run: -run.depth)  # the longest first
    tuned = run_all(tuning, options.jobs)
    chosen = {}
    for case in cases:
        accuracy = {}
        for rate in RATES:
            runs = [Run(*case, rate, seed, options.steps) for seed in TUNING_SEEDS]
            accuracy[rate] = sum(tuned[run].valid for run in runs)
        chosen[case] = max(accuracy, key=lambda rate: accuracy[rate])
    print("reporting", flush=True)
    reported = []
    for case in cases:
        for seed in range(FIRST_REPORTED_SEED, FIRST_REPORTED_SEED + options.seeds):
            reported.append(Run(*case, chosen[case], seed, options.steps))
    found = run_all(sorted(reported, key=lambda run: -run.depth), options.jobs)
    print("\n| depth | start | method | rate | test accuracy | range | > 95%, at step |")
    print("|---|---|---|---|---|---|---|")
    for case in cases:
        outcomes = [found[run] for run in reported if (run.depth, run.start, run.method) == case]
        depth, start, method = case
        print(f"| {depth} | {start} | {method} | {chosen[case]:g} | {describe(outcomes)} |")


if __name__ == "__main__":
    main()

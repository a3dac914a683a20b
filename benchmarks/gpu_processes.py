"""Training on one GPU by several processes at once, compared with one after the other.

    python benchmarks/gpu_processes.py
    python benchmarks/gpu_processes.py --processes 2 --cell lstm --hidden 512

Each process trains a network of its own on temporal order, as the runs of `coadjoint compare` do.
The milliseconds of a step are printed for one process alone and for N processes at once. The ratio
is the time of N runs at once divided by that of N runs one after the other: up to 1, running them
together costs nothing. It needs torch and numpy alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch

import coadjoint as co
from coadjoint.training.plan import TrainingPlan
from coadjoint.training.trainer import Training

WARM_UP = 64  # steps, in which kernels are compiled and gradients recorded
MANY = 10**9  # steps: a run neither ends nor looks at held-out data while it is timed
READY = "ready"
GO = "go"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--cell", default="elman")
    parser.add_argument("--T", type=int, default=200)
    parser.add_argument("--B", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try this script")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def train_when_told(asked: argparse.Namespace) -> None:
    """Warm up, say so, wait for the word, and print the milliseconds of a step."""
    task = co.tasks.TemporalOrder(asked.T)
    net = co.Network(
        asked.cell,
        inputs=task.inputs,
        hidden=asked.hidden,
        outputs=task.outputs,
        output=task.output,
        device=asked.device,
    )
    plan = TrainingPlan(
        gradient=co.Penalised("log-ratio", 0.1),
        optimiser=co.optimisers.adam(1e-3),
        clip=1.0,
        batch=asked.B,
        steps=MANY,
        every=MANY,
        checkpoint=MANY,
    )
    training = Training(net, task, plan)
    with training.folder.open(training):
        for _ in range(WARM_UP):
            training.advance()
        wait_for_gpu(asked.device)
        print(READY, flush=True)
        sys.stdin.readline()
        begin = time.perf_counter()
        for _ in range(asked.steps):
            training.advance()
        wait_for_gpu(asked.device)
        print(1e3 * (time.perf_counter() - begin) / asked.steps, flush=True)


def wait_for_gpu(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def time_at_once(count: int) -> list[float]:
    """Start `count` workers, let them train at the same time -> the milliseconds of a step of each.

    They begin when all of them have warmed up.
    """
    command = [sys.executable, *sys.argv, "--worker"]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        for worker in workers:
            if worker.stdout.readline().strip() != READY:
                raise SystemExit("a worker ended before it was ready: see its message above.")
        for worker in workers:
            worker.stdin.write(f"{GO}\n")
            worker.stdin.flush()
        return [float(worker.stdout.readline()) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main() -> None:
    asked = parse_arguments()
    if asked.worker:
        train_when_told(asked)
        return
    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: give --device cpu to try this benchmark.")
    where = torch.cuda.get_device_name() if asked.device == "cuda" else "CPU"
    print(
        f"{where}, torch {torch.__version__}: {asked.cell}, T = {asked.T}, B = {asked.B}, "
        f"{asked.hidden} units, penalised, {asked.steps} steps"
    )
    (alone,) = time_at_once(1)
    print(f"alone: {alone:.2f} ms a step", flush=True)
    together = time_at_once(asked.processes)
    texts = ", ".join(f"{ms:.2f}" for ms in together)
    print(f"{asked.processes} at once: {texts} ms a step")
    print(f"ratio: {max(together) / (asked.processes * alone):.2f}")


if __name__ == "__main__":
    main()

"""Calls of one step, as decoders and agents make them: ours against torch.nn on a CPU.

    python benchmarks/one_step.py                      modules and cells, all sizes
    python benchmarks/one_step.py --kinds LSTM,LSTMCell --sizes 1x128x1,64x64x2

A size is samples x units x layers; cells have one layer. For each, the time of a call without
gradients, and of a step in a loop of 100 calls with one backward, in microseconds; then ours
divided by torch.nn's, at most 1.1. Bursts of calls take turns, and the fastest fifth counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn

import coadjoint as co

KINDS = "RNN,LSTM,GRU,RNNCell,LSTMCell,GRUCell"
SIZES = "1x16x1,1x128x1,1x128x2,16x128x1,1x512x1,64x512x1,64x64x2"
STEPS = 100  # of a loop with one backward
BURST_US = 300.0  # of one turn
TURNS_US = 600_000.0  # of all turns of a contender
LIMIT = 1.1


def burst(run: Callable[[], object], calls: int) -> float:
    """Microseconds of a call, the mean of `calls` in a row, in the time of this thread alone."""
    began = time.thread_time_ns()
    for _ in range(calls):
        run()
    return (time.thread_time_ns() - began) / calls / 1e3


def fastest_fifth(times: list[float]) -> float:
    """The time that a fifth of the turns stay below: others were disturbed."""
    return sorted(times)[len(times) // 5]


def compare(ours: Callable[[], object], theirs: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of a call of ours and of theirs, in turns."""
    burst(ours, 3)  # warms up
    us = max(burst(theirs, 3), 1.0)
    calls = max(1, int(BURST_US / us))
    turns = max(7, min(400, int(TURNS_US / (us * calls))))
    pairs = [(burst(ours, calls), burst(theirs, calls)) for _ in range(turns)]
    return fastest_fifth([a for a, _ in pairs]), fastest_fifth([b for _, b in pairs])


def runs_of(
    module: nn.Module, u: torch.Tensor, state: object, is_cell: bool
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A call without gradients, and a loop of single steps with one backward."""

    def call() -> object:
        with torch.no_grad():
            return module(u, state)

    def loop() -> None:
        hx = state
        for _ in range(STEPS):
            out = module(u, hx)
            hx = out if is_cell else out[1]
        last = out[0] if isinstance(out, tuple) else out
        last.sum().backward()

    return call, loop


def measure(kind: str, B: int, d: int, layers: int) -> str:
    """One row: the times and ratios of a kind of module at a size."""
    is_cell = kind.endswith("Cell")
    arguments = (d, d) if is_cell else (d, d, layers)
    theirs = getattr(nn, kind)(*arguments)
    ours = getattr(co.nn, kind)(*arguments)
    ours.load_state_dict(theirs.state_dict())
    u = torch.randn(B, d) if is_cell else torch.randn(1, B, d)
    h = torch.zeros(B, d) if is_cell else torch.zeros(layers, B, d)
    state = (h, h) if kind.startswith("LSTM") else h
    our_runs = runs_of(ours, u, state, is_cell)
    their_runs = runs_of(theirs, u, state, is_cell)
    row = f"{kind:8s} {f'{B}x{d}x{layers}':9s}"
    for our_run, their_run, steps in zip(our_runs, their_runs, (1, STEPS), strict=True):
        a, b = compare(our_run, their_run)
        mark = " " if a <= LIMIT * b else "!"
        row += f"{a / steps:10.1f}{b / steps:10.1f}{a / b:7.2f}x{mark}"
    return row


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--sizes", default=SIZES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':19s}{'no gradients: ours, torch.nn':>28s}{'100 steps, a backward':>30s}")
    for kind in options.kinds.split(","):
        for size in options.sizes.split(","):
            B, d, layers = map(int, size.split("x"))
            if layers == 1 or not kind.endswith("Cell"):
                print(measure(kind, B, d, layers), flush=True)


if __name__ == "__main__":
    main()

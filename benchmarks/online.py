"""The speed and the memory of learning online from a stream of random inputs (Linux).

    python benchmarks/online.py 100000 30                    real-time recurrent learning
    python benchmarks/online.py 100000 30 truncated 10 50    truncated backpropagation

The arguments are the number of steps and of units of an elman network, and for truncated
backpropagation k1 and k2. Memory is printed after a tenth of the steps and at the end.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import coadjoint as co


def resident() -> int:
    """The bytes of this process that are in memory now."""
    found = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in found if line.startswith("VmRSS"))


def stream(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Two inputs; the target is the first one of three steps before."""
    generator, past = torch.Generator().manual_seed(1), deque([0.0] * 4, maxlen=4)
    for _ in range(steps):
        u = torch.randn(2, generator=generator)
        past.append(float(u[0]))
        yield u, torch.tensor([past[0]])


def main(
    steps: str = "100000", units: str = "30", learner: str = "rtrl", k1: str = "10", k2: str = "50"
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    total, marks = int(steps), dict[int, int]()
    net = co.Network("elman", inputs=2, hidden=int(units), outputs=1, readout="every")
    method = co.RTRL() if learner == "rtrl" else co.Truncated(int(k1), int(k2))

    def watched() -> Iterator[tuple[Tensor, Tensor]]:
        for t, pair in enumerate(stream(total)):
            if t in (total // 10, total - 1):
                marks[t] = resident()
            yield pair

    begin, spent = time.perf_counter(), time.process_time()
    found = co.online.learn(
        net, watched(), "squared", method, co.optimisers.adam(1e-3), every=max(total // 10, 1)
    )
    seconds, spent = time.perf_counter() - begin, time.process_time() - spent
    early, late = marks.values()
    print(
        f"{total} steps of {units} units by {learner}: {total / seconds:.0f} steps/s, "
        f"{total / spent:.0f} for each second of CPU time"
    )
    print(
        f"memory {early / 1e6:.1f} MB after {total // 10} steps, {late / 1e6:.1f} MB after "
        f"{total}: growth {(late - early) / 1e3:.0f} kB"
    )
    print(
        f"loss of the last 1000 steps {found.recent['loss']:.4f}, of all {found.so_far['loss']:.4f}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The memory of one gradient, predicted and measured in a fresh process (Linux).

    python benchmarks/memory.py elman 100000 8 256 log-ratio auto
    python benchmarks/memory.py elman 100000 8 256 plain auto

The arguments are the cell, T, B, the number of units, `plain` or the name of a penalty, and the
number of segments (or `auto`, or `none`).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import coadjoint as co


def kilobytes(key: str) -> int:
    return next(
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if key in line
    )


def problem(cell: str, T: int, B: int, units: int, readout: str) -> tuple[co.Network, co.Batch]:
    torch.manual_seed(0)
    net = co.Network(cell, inputs=2, hidden=units, outputs=2, readout=readout)
    return net, co.Batch(
        torch.randn(T, B, 2), torch.randn(*((T, B) if readout == "every" else (B,)), 2)
    )


def main(
    cell: str, T: str, B: str, units: str, name: str, segments: str, readout: str = "last"
) -> None:
    torch.set_num_threads(1)
    co.gradients.memory.steady()
    cut = None if segments == "none" else segments if segments == "auto" else int(segments)
    method = co.BPTT(cut) if name == "plain" else co.Penalised(name, 0.1, cut)
    method(
        *problem(cell, 64, 2, 8, readout), "squared"
    )  # code that is loaded or compiled on first use
    net, batch = problem(cell, int(T), int(B), int(units), readout)
    predicted, before, begin = (
        co.gradients.memory.predict(net, int(T), int(B), method),
        kilobytes("VmRSS"),
        time.perf_counter(),
    )
    print(f"predicted {predicted / 1e6:.1f} MB", flush=True)
    e = method(net, batch, "squared")
    peak = 1024 * (kilobytes("VmHWM") - before)
    seconds = time.perf_counter() - begin
    print(
        f"measured {peak / 1e6:.1f} MB, {predicted / peak:.3f} of it predicted; {seconds:.1f} s, "
        f"engine {net.engine}, {e}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])

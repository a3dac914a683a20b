"""The parallel scan against the compiled loop: plain and penalised gradients of linear recurrences.

    python benchmarks/scan.py                  on the CPU, 1 and 64 samples
    python benchmarks/scan.py --device cuda    on a GPU, 1 sample

Sequences have 1,000 and 10,000 steps, networks 128 units. Each line shows the time of the loop and
of the scan (the shortest of several alternating calls), their ratio (above 1 the scan is faster)
and the relative difference of the two gradients.
"""

from __future__ import annotations

import argparse
import time

import torch

import coadjoint as co

METHODS = {"plain": lambda: co.BPTT(), "penalised": lambda: co.Penalised("log-ratio", 0.1)}
INPUTS, OUTPUTS = 4, 2


def gradient(cell: str, T: int, B: int, d: int, method: str, engine: str, device: str):
    """A function that takes the gradient once, and waits for it."""
    torch.manual_seed(0)
    net = co.Network(
        getattr(co.cells, cell),
        inputs=INPUTS,
        hidden=d,
        outputs=OUTPUTS,
        engine=engine,
        device=device,
    )
    batch = co.Batch(torch.randn(T, B, INPUTS).to(device), torch.randn(B, OUTPUTS).to(device))
    take = METHODS[method]()

    def once() -> dict[str, torch.Tensor]:
        found = take(net, batch, "squared").gradient
        if device == "cuda":
            torch.cuda.synchronize()
        return found

    return once


def seconds(once) -> float:
    start = time.perf_counter()
    once()
    return time.perf_counter() - start


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    worst = [
        float((one[n] - other[n]).norm() / max(other[n].norm(), one[n].norm()))
        for n in one
        if one[n].any()
    ]
    return max(worst)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cells", default="mingru,minlstm,lru")
    parser.add_argument("--lengths", default="1000,10000")
    parser.add_argument("--samples", help="1,64 on a CPU and 1 on a GPU, if not given")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    asked = parser.parse_args()

    def numbers(text):
        return [int(n) for n in text.split(",")]

    samples = numbers(asked.samples or ("1" if asked.device == "cuda" else "1,64"))
    where = (
        torch.cuda.get_device_name()
        if asked.device == "cuda"
        else f"cpu, {torch.get_num_threads()} threads"
    )
    print(f"{where}; {asked.units} units, float32")
    for cell in asked.cells.split(","):
        for T in numbers(asked.lengths):
            for B in samples:
                for method in asked.methods.split(","):
                    pair = [
                        gradient(cell, T, B, asked.units, method, e, asked.device)
                        for e in (asked.device, "scan")
                    ]
                    for once in pair * (
                        4 if asked.device == "cuda" else 1
                    ):  # they compile, and may be recorded on a GPU
                        once()
                    times = [[seconds(once) for once in pair] for _ in range(asked.repeats)]
                    loop, scan = (min(column) * 1e3 for column in zip(*times, strict=True))
                    print(
                        f"{cell:8} T {T:6} B {B:3} {method:10} loop {loop:9.2f} ms  scan "
                        f"{scan:9.2f} ms  "
                        f"ratio {loop / scan:6.2f}  apart {apart(pair[0](), pair[1]()):.0e}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

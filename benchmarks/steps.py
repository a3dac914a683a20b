"""The time of one training step, plain and penalised.

    python benchmarks/steps.py cpu eager,cpu 60
    python benchmarks/steps.py cuda cuda 200

The arguments are the device, the engines and the number of steps. The task is temporal order with
200 steps and 20 samples, the network has 64 tanh units.
"""

from __future__ import annotations

import sys
import time

import torch

import coadjoint as co


def milliseconds(device: str, engine: str, method: co.BPTT | co.Penalised, steps: int) -> float:
    net = co.Network(
        "elman", inputs=6, hidden=64, outputs=4, output="softmax", device=device, engine=engine
    )
    co.initialisers.initialise(net, "spectral", radius=0.5, seed=0)
    task, adam = co.tasks.TemporalOrder(200), torch.optim.Adam(net.parameters(), 1e-3)
    start = 0.0
    for i in range(-10, steps):  # the first ten compile and record
        if i == 0:
            _wait(device)
            start = time.perf_counter()
        batch = task.batch(10 + i, 20, 0).to(torch.float32, device)
        method(net, batch, "cross-entropy").write_grad(net)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        adam.step()
    _wait(device)
    return (time.perf_counter() - start) / steps * 1e3


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    where, engines, count = sys.argv[1:]
    for engine in engines.split(","):
        for name, method in (("plain", co.BPTT()), ("penalised", co.Penalised("log-ratio", 1.0))):
            print(
                f"{where} {engine} {name}: {milliseconds(where, engine, method, int(count)):.2f} "
                "ms a step",
                flush=True,
            )

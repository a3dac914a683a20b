"""Gradients of step functions on a CPU: ours against a loop written by hand in torch.

    python benchmarks/step_functions.py
    python benchmarks/step_functions.py --cells gru-before,own --sizes 100x20x50,200x64x128
    PYTHONPATH=../older/src python benchmarks/step_functions.py --alone

A size is steps x samples x units. For each, the plain gradient and the penalised one (log-ratio),
in milliseconds, and the hand-written loop's: the states in a list, torch.autograd.grad with
create_graph=True by all of them, the penalty, and a second gradient. The two take turns, and the
fastest turn counts. Last, ours divided by theirs. `--alone` leaves the loop out, for versions that
cannot run it. `own` is a step of a user's, which keeps the
graph of each step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

import coadjoint as co

CELLS = "gru-before,lstm-mixed,deep-transition,gated-feedback,own"
SIZES = "100x20x50"
TURNS = 7


class Own(nn.Module):
    """A softmax over all units, which no formula can express."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(inputs, hidden)
        self.score = nn.Linear(hidden, hidden)

    def forward(self, u: Tensor, x: Tensor) -> Tensor:
        return self.cell(u, x * torch.softmax(self.score(x), -1))


def by_hand(net: co.Network, batch: co.Batch, penalised: bool) -> tuple[Tensor, ...]:
    """The gradient of the mean loss, and of rho times the penalty log-ratio, by torch alone."""
    B = batch.u.shape[1]
    states = [net.x0.expand(B, net.n).clone().requires_grad_()]
    for u in batch.u:
        states.append(net.call_step(u, states[-1]))
    a = states[-1][:, : net.hidden] @ net.V.T + net.b_o
    losses = nn.functional.cross_entropy(a, batch.y, reduction="none")
    objective = losses.mean()
    if penalised:
        lam = torch.autograd.grad(losses.sum(), states, create_graph=True)
        logs = torch.stack([y.norm(dim=1) for y in lam]).log()
        objective = objective + 0.1 * (logs[1:-1] - logs[2:]).square().mean(0).mean()
    return torch.autograd.grad(objective, list(net.parameters()))


def seconds(run: Callable[..., object], *arguments: object) -> float:
    """The time of a call, of this process alone."""
    began = time.process_time()
    run(*arguments)
    return time.process_time() - began


def compare(cell: str, T: int, B: int, hidden: int, alone: bool) -> None:
    """Print the row of a cell at one size."""
    task = co.tasks.TemporalOrder(T)
    step = Own(task.inputs, hidden) if cell == "own" else cell
    net = co.Network(step, inputs=task.inputs, hidden=hidden, outputs=task.outputs)
    batch = task.batch(0, B, seed=0)
    size = f"{T}x{B}x{hidden}"
    row = f"{cell:16}{size:>10}"
    for method in (co.BPTT(), co.Penalised("log-ratio", 0.1)):
        penalised = isinstance(method, co.Penalised)
        best = [float("inf")] * 2
        for _ in range(TURNS):
            ours = seconds(method, net, batch, "cross-entropy")
            theirs = float("nan") if alone else seconds(by_hand, net, batch, penalised)
            best = [min(best[0], ours), theirs if alone else min(best[1], theirs)]
        row += f"  {1e3 * best[0]:9.1f} {1e3 * best[1]:9.1f} {best[0] / best[1]:7.2f}"
    print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--alone", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = f"{'ms':>9} {'by hand':>9} {'ratio':>7}"
    print(f"{'':28}{'plain':>27}  {'penalised':>27}")
    print(f"{'':28}{columns}  {columns}")
    for size in arguments.sizes.split(","):
        for cell in arguments.cells.split(","):
            compare(cell, *map(int, size.split("x")), arguments.alone)


if __name__ == "__main__":
    main()

"""Penalised backpropagation under accelerate: the same two lines as in a plain loop.

    python examples/loop_accelerate.py [steps]         (pip install accelerate)
    torchrun --standalone --nproc-per-node 2 examples/loop_accelerate.py      (in two processes)

The model, the task and the gradients are those of loop_plain.py. Of every batch each process takes
its share, so that the weights are those of one process.
"""

import sys

import torch
from loop_plain import Reader, batch, told
from loop_share import share
from torch.nn.functional import cross_entropy

import coadjoint as co

try:
    from accelerate import Accelerator, PartialState
except ImportError:
    sys.exit("this example needs accelerate, which is not installed: pip install accelerate")


def train(steps, weight=2.0):
    torch.manual_seed(0)
    # Without cpu=True, processes that torchrun starts on CPUs would each train alone.
    accelerator, model = Accelerator(cpu=not torch.cuda.is_available()), Reader()
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    model, optimiser = accelerator.prepare(model, optimiser)
    for step in range(steps):
        u, y, factor = share(*batch(step), accelerator.process_index, accelerator.num_processes)
        u, y = u.to(accelerator.device), y.to(accelerator.device)
        with co.record(model) as tape:  # one line
            loss = cross_entropy(model(u), y, reduction="none")
        loss = loss + weight * tape.penalty("log-ratio", loss)  # and another
        optimiser.zero_grad()
        accelerator.backward(loss.mean() * factor)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    model = train(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
    if PartialState().is_main_process:
        print(f"penalised: {told(model.cpu())}")
    PartialState().destroy_process_group()

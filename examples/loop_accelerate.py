"""Penalised backpropagation under accelerate: the same two lines as in a plain loop.

    python examples/loop_accelerate.py [steps]         (pip install accelerate)
    accelerate launch examples/loop_accelerate.py      (on several devices)

The model, the task and the gradients are those of loop_plain.py.
"""

import sys

import torch
from loop_plain import Reader, batch, told
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import coadjoint as co

try:
    from accelerate import Accelerator, PartialState
except ImportError:
    sys.exit("this example needs accelerate, which is not installed: pip install accelerate")


def train(steps, weight=2.0):
    torch.manual_seed(0)
    accelerator, model = Accelerator(), Reader()
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    loader = DataLoader(
        [batch(step) for step in range(steps)], collate_fn=lambda batches: batches[0]
    )
    model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    for u, y in loader:
        with co.record(model) as tape:  # one line
            loss = cross_entropy(model(u), y, reduction="none")
        loss = loss + weight * tape.penalty("log-ratio", loss)  # and another
        optimiser.zero_grad()
        accelerator.backward(loss.mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    model = train(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
    if PartialState().is_main_process:
        print(f"penalised: {told(model.cpu())}")

"""Penalised backpropagation under FSDP2, which spreads the weights over processes.

    torchrun --standalone --nproc-per-node 2 examples/loop_fsdp.py [steps]

The model, the task and the gradients are those of loop_plain.py. A sharded module holds its
weights only while its forward runs, so co.record, the loss and the penalty are inside that.
"""

import importlib
import sys

import torch
from loop_plain import Reader, batch, told
from loop_share import share
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import coadjoint as co


class WithLoss(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.model, self.weight = Reader(), weight

    def forward(self, u, y):
        with co.record(self.model) as tape:  # one line
            loss = cross_entropy(self.model(u), y, reduction="none")
        return loss + self.weight * tape.penalty("log-ratio", loss)  # and another


def train(steps, weight=2.0):
    """The trained weights, complete in every process."""
    torch.manual_seed(0)
    rank, processes = distributed.get_rank(), distributed.get_world_size()
    model = WithLoss(weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (processes,)))
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(steps):
        u, y, factor = share(*batch(step), rank, processes)
        optimiser.zero_grad()
        (model(u, y).mean() * factor).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    trained = Reader()
    complete = {name: p.full_tensor() for name, p in model.model.state_dict().items()}
    trained.load_state_dict(complete)
    return trained


if __name__ == "__main__":
    # Imported while a process group exists, it would keep the group's threads alive to the end.
    importlib.import_module("torch._dynamo")
    distributed.init_process_group("gloo")
    model = train(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
    if distributed.get_rank() == 0:
        print(f"penalised: {told(model)}")
    distributed.destroy_process_group()

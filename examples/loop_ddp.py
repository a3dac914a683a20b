"""Penalised backpropagation in two processes under DistributedDataParallel, with unequal shares.

    python examples/loop_ddp.py [steps]

The model and the task are those of loop_plain.py. Each process has a part of every batch.
DistributedDataParallel averages gradients over processes as if each had the same number of samples,
so the loss of n of B samples is multiplied by n * processes / B. Then the weights are those of a
single process.
"""

import importlib
import sys
import tempfile

import torch
from loop_plain import Reader, batch
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import coadjoint as co

SHARES = (slice(0, 13), slice(13, 20))  # of 20 samples, for each process


def train(steps, wrap, share, scale, weight=2.0):
    """`scale`: how often the mean loss of the share counts."""
    torch.manual_seed(0)
    model = wrap(Reader())
    optimiser = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(steps):
        u, y = batch(step)
        u, y = u[:, share].double(), y[share]
        with co.record(model) as tape:  # one line
            loss = cross_entropy(model(u), y, reduction="none")
        loss = loss + weight * tape.penalty("log-ratio", loss)  # and another
        optimiser.zero_grad()
        (loss.mean() * scale).backward()
        optimiser.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def work(rank, store, steps):
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    processes = len(SHARES)
    # DistributedDataParallel imports it, and imported while a group exists, it keeps that group:
    # threads of the group would then live on after destroy_process_group and may end the process
    # with SIGABRT when Python exits.
    importlib.import_module("torch._dynamo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=processes
    )
    share = SHARES[rank]
    n = share.stop - share.start
    B = SHARES[-1].stop
    scaled = train(steps, DistributedDataParallel, share, n * processes / B)
    unscaled = train(steps, DistributedDataParallel, share, 1.0)
    if rank == 0:
        alone = train(steps, lambda model: model, slice(0, B), 1.0)
        for name, found in (
            ("loss * n * processes / B", scaled),
            ("mean loss of each share", unscaled),
        ):
            print(
                f"{name}: weights differ from those of one process by "
                f"{(found - alone).abs().max():.1e}"
            )
    distributed.destroy_process_group()


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (f"{folder}/store", steps), nprocs=len(SHARES))

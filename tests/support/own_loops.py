"""One of two processes that run the loops of the examples.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/support/own_loops.py OUT

OUT receives a JSON table from the first process. "found": by loop, the largest difference of a
trained weight from that of loop_plain.py in one process, relative to the largest weight of that
parameter. "refused": the messages of loops that are refused.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import coadjoint as co
from paths import EXAMPLES

SAMPLES = 21  # shares of 11 and 10
STEPS = 3
WEIGHT = 2.0
LOOPS = ("loop_fsdp", "loop_accelerate", "loop_lightning")


def gap(found: nn.Module, alone: nn.Module) -> float:
    worst = 0.0
    expected = dict(alone.named_parameters())
    for name, parameter in found.named_parameters():
        difference = (parameter - expected[name]).abs().max() / expected[name].abs().max()
        worst = max(worst, float(difference))
    return worst


def static_lightning() -> nn.Module:
    """The trained model of loop_lightning.py under DDPStrategy(static_graph=True)."""
    loop = importlib.import_module("loop_lightning")
    strategy = importlib.import_module("lightning.pytorch.strategies").DDPStrategy
    ordinary = loop.lightning.Trainer

    def trainer(**options: object) -> object:
        return ordinary(**{**options, "strategy": strategy(static_graph=True)})

    loop.lightning.Trainer = trainer
    return loop.train(STEPS, WEIGHT)


def static_accelerate() -> str:
    """What loop_accelerate.py, where co.record is around the model, is refused with."""
    loop = importlib.import_module("loop_accelerate")
    options = importlib.import_module("accelerate").DistributedDataParallelKwargs
    loop.Accelerator = functools.partial(
        loop.Accelerator, kwargs_handlers=[options(static_graph=True)]
    )
    try:
        loop.train(1, WEIGHT)
    except co.Unsupported as refusal:
        return str(refusal)
    return "accepted"


def main(out: str) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    # imported later, while the group exists, it would keep the group and its threads
    importlib.import_module("torch._dynamo")
    dist.init_process_group("gloo")
    sys.path.insert(0, str(EXAMPLES))
    plain = importlib.import_module("loop_plain")

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = plain.TASK.batch(step, SAMPLES, seed=0)
        return drawn.u.double(), drawn.y

    plain.batch = batch
    alone = plain.train(STEPS, WEIGHT)
    sharing = importlib.import_module("loop_share")
    share = sharing.share

    def checked_share(u: torch.Tensor, y: torch.Tensor, rank: int, processes: int) -> object:
        # a loop that does not know of the other process would be exact, too
        assert (rank, processes) == (dist.get_rank(), dist.get_world_size())
        return share(u, y, rank, processes)

    sharing.share = checked_share
    found: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in LOOPS:
        try:
            loop = importlib.import_module(name)
        except SystemExit:  # its package is not installed
            continue
        found[name] = gap(loop.train(STEPS, WEIGHT), alone)
        dist.barrier()
    if "loop_lightning" in found:
        found["lightning, static_graph"] = gap(static_lightning(), alone)
    if "loop_accelerate" in found:
        refused["accelerate, static_graph"] = static_accelerate()
    untrained = plain.train(0, WEIGHT)
    found["nothing learned"] = gap(untrained, alone)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"found": found, "refused": refused}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

"""One of two processes that train a wrapped model with a penalty.

    python tests/support/ranks.py RANK STORE OUT CASE ...

Its gradients are compared with those of a single process. CASE is "wrapper/place". OUT receives a
JSON table with the largest relative difference of a gradient over two training steps of each case,
or its refusal.
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import coadjoint as co

WORLD = 2
SAMPLES = 8
WEIGHT = 0.3
PLACES = (
    "around",  # co.record around the wrapped model
    "inner",  # around the recurrent module inside it, which is called through the wrapper
    "inside",  # record, loss and penalty in the model's own forward
    "self",  # the same, recording the model and not the recurrent module alone
    "begun",  # recorded in forward, and the penalty asked for outside
    "later",  # around the wrapped model, from the second step on
)
OUTPUTS = ("outputs", "outputs-inside")  # as "around" and "inside", for outputs by their names
AT = ["**enter", "**out"]
NETWORKS = (
    "network",
    "network-inside",
)  # a co.Network that is wrapped itself, or called by the wrapped module


class Reader(nn.Module):
    """A recurrence and a readout, with a parameter that nothing uses."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 3)
        self.rnn = co.nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(8, 4)
        self.place = place

    def losses(self, u: Tensor, y: Tensor) -> Tensor:
        h, _ = self.rnn(self.enter(u))
        return cross_entropy(self.out(h[:, -1]), y, reduction="none")

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        if self.place not in ("inside", "self", "begun", "outputs-inside"):
            return self.losses(u, y)
        if self.place == "outputs-inside":
            with co.record(self, at=AT) as tape:
                loss = self.losses(u, y)
            return loss + WEIGHT * tape.penalty("log-ratio", loss)
        with co.record(self if self.place == "self" else self.rnn) as tape:
            loss = self.losses(u, y)
        if self.place == "begun":
            self.tape = tape
            return loss
        return loss + WEIGHT * tape.penalty("log-ratio", loss)


class Told(nn.Module):
    """A network, and the penalised loss of what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.network = co.Network("gru", inputs=3, hidden=4, outputs=4)

    def forward(self, u: Tensor, y: Tensor) -> Tensor:
        return penalised(self.network, u, y)


def penalised(network: nn.Module, u: Tensor, y: Tensor) -> Tensor:
    lam = network(u.transpose(0, 1)).costates("cross-entropy", y)
    return lam.loss + WEIGHT * co.penalties.log_ratio(lam)


def fresh(place: str) -> nn.Module:
    torch.manual_seed(1)
    if place in NETWORKS:
        told = Told()
        return told.network if place == "network" else told
    return Reader(place)


def objective(model: nn.Module, reader: nn.Module, step: int, u: Tensor, y: Tensor) -> Tensor:
    """The mean penalised loss; `model` is the reader, wrapped or not."""
    if isinstance(reader, co.Network):
        return penalised(model, u, y).mean()
    if isinstance(reader, Told):
        return model(u, y).mean()
    if reader.place == "outputs":
        with co.record(model, at=AT) as tape:
            loss = model(u, y)
        return (loss + WEIGHT * tape.penalty("log-ratio", loss)).mean()
    if reader.place in ("inside", "self", "outputs-inside") or (
        reader.place == "later" and step == 0
    ):
        return model(u, y).mean()
    if reader.place == "begun":
        loss = model(u, y)
        return (loss + WEIGHT * reader.tape.penalty("log-ratio", loss)).mean()
    with co.record(reader.rnn if reader.place == "inner" else model) as tape:
        loss = model(u, y)
    return (loss + WEIGHT * tape.penalty("log-ratio", loss)).mean()


def parallel(**options: bool) -> Callable[[nn.Module], nn.Module]:
    def wrap(reader: nn.Module) -> nn.Module:
        reader.unused = nn.Parameter(
            torch.zeros(2), requires_grad="find_unused_parameters" in options
        )
        return DistributedDataParallel(reader, **options)

    return wrap


def shard(*parts: str, **options: bool) -> Callable[[nn.Module], nn.Module]:
    """Shard the parts of the reader on their own, then the reader ("" stands for it)."""

    def wrap(reader: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (WORLD,))
        for part in parts:
            fully_shard(reader.get_submodule(part), mesh=mesh, **options)
        return reader

    return wrap


def flatten(**options: Any) -> Callable[[nn.Module], nn.Module]:
    def wrap(reader: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(reader, device_id=torch.device("cpu"), **options)

    return wrap


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": parallel(),
    "ddp-unused": parallel(find_unused_parameters=True),
    "ddp-static": parallel(static_graph=True),
    "ddp-static-unused": parallel(static_graph=True, find_unused_parameters=True),
    "ddp-views": parallel(gradient_as_bucket_view=True),
    "ddp-no-sync": parallel(),
    "sharded": shard(""),
    "sharded-freed": shard("", reshard_after_forward=True),
    "sharded-kept": shard("", reshard_after_forward=False),
    "sharded-rnn": shard("rnn", ""),
    "sharded-readout": shard("out", ""),
    "sharded-encoder": shard("enter", ""),
    "flat": flatten(use_orig_params=True),
    "flat-alone": flatten(use_orig_params=False),
    "flat-grad": flatten(use_orig_params=True, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
}


def gap(ours: nn.Module, alone: nn.Module) -> float:
    """The largest difference of a gradient from that of one process, relative to its
    largest entry.
    """
    if isinstance(ours, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(ours, with_grads=True):
            found = torch.cat([parameter.grad.flatten() for parameter in ours.parameters()])
        expected = torch.cat([parameter.grad.flatten() for parameter in alone.parameters()])
        return float((found - expected).abs().max() / expected.abs().max())
    truth = {name: parameter.grad for name, parameter in alone.named_parameters()}
    worst = 0.0
    for name, parameter in ours.named_parameters():
        expected = truth.get(name.removeprefix("module."))
        if expected is None:  # the parameter that nothing uses
            assert "unused" in name
            continue
        found = parameter.grad
        if found is None:
            return float("inf")
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


def backward(model: nn.Module, reader: nn.Module, step: int, u: Tensor, y: Tensor) -> None:
    """The gradient of the mean over the samples, at once."""
    objective(model, reader, step, u, y).backward()


def backward_in_parts(model: nn.Module, reader: nn.Module, step: int, u: Tensor, y: Tensor) -> None:
    """The same in two halves; the processes exchange gradients in the second alone."""
    half = len(u) // 2
    with model.no_sync():
        (objective(model, reader, step, u[:half], y[:half]) / 2).backward()
    (objective(model, reader, step, u[half:], y[half:]) / 2).backward()


def outcome(case: str, rank: int) -> float | str:
    wrapper, place = case.split("/")
    torch.manual_seed(0)
    u, y = torch.randn(SAMPLES, 6, 3), torch.randint(0, 4, (SAMPLES,))
    share = SAMPLES // WORLD
    mine = slice(rank * share, (rank + 1) * share)
    alone, reader = fresh(place), fresh(place)
    model = WRAPPERS[wrapper](reader)
    optimisers = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, model)]
    worst = 0.0
    try:
        for step in range(2):
            for optimiser in optimisers:
                optimiser.zero_grad()
            objective(alone, alone, step, u, y).backward()
            take = backward_in_parts if wrapper == "ddp-no-sync" else backward
            take(model, reader, step, u[mine], y[mine])
            worst = max(worst, gap(model, alone))
            for optimiser in optimisers:
                optimiser.step()
    except co.Unsupported as refusal:
        return str(refusal)
    return worst


def main(rank: int, store: str, out: str, cases: list[str]) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    # imported later, while the group exists, it would keep the group and its threads
    importlib.import_module("torch._dynamo")
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=patience
    )
    found: dict[str, float | str] = {}
    for case in cases:
        found[case] = outcome(case, rank)
        dist.barrier()
    Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:])

"""Wrappers that spread a module over processes, and why some of them cannot stand between costates and their loss.

Costates come from a gradient that is taken before the backward pass. A wrapper's hooks cannot tell one from the other:

    DistributedDataParallel(static_graph=True)   averages over processes when the first gradient has gone by, here that of
                                                 the costates, and never sees the one that is trained on
    fully_shard, FullyShardedDataParallel        free their weights then, and the second derivative has none to read

Inside the wrapped module's forward neither has put its hooks on anything yet, and all is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Unsupported
from .torch_internals import is_idle, is_shard_of_flat_weights, sharded_modules, wrapper_in_forward

SINK = "_DDPSinkBackward"  # stands on the outputs of a DistributedDataParallel
SHARDED = (
    "RegisterPostBackwardFunctionBackward"  # stands on the inputs of what fully_shard has sharded
)


def is_distributed() -> bool:
    """Is this process one of several that work together?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def refuse_wrappers_between(
    loss: Tensor, outputs: Iterable[Tensor], recorded: Mapping[nn.Module, str]
) -> None:
    """Refuse a gradient from the loss to the outputs of the recorded modules that would set off a wrapper's hooks."""
    if not is_distributed():
        return
    for module, name in recorded.items():
        if any(is_idle(state) for state in shards_of(module)):
            raise sharding_error(
                f"{name or 'the module'} is inside a module that fully_shard has sharded"
            )
    if any(is_sharded_weight(node) for node in reachable_nodes(loss.grad_fn)):
        raise sharding_error(
            "the loss depends on weights that FullyShardedDataParallel has sharded"
        )
    for node in wrapper_nodes_between(loss, outputs):
        if node.name() == SINK and is_waiting_for_first(node):
            raise Unsupported(
                "DistributedDataParallel(static_graph=True) takes the gradient that costates are made of for the "
                "backward pass, and would leave the rest of it unaveraged: put co.record, the loss and the penalty "
                "inside the forward of the wrapped module, or leave out static_graph=True."
            )
        if node.name() == SHARDED:
            raise sharding_error(
                "a module between the recorded one and the loss is sharded by fully_shard on its own"
            )


def sharding_error(what: str) -> Unsupported:
    return Unsupported(
        f"{what}, which frees weights that costates need: put co.record, the loss and the penalty "
        "inside the forward of one sharded module, and shard no part of that one from the recurrence to the loss on "
        "its own."
    )


def refuse_wrapper_around(network: nn.Module) -> None:
    """Refuse a wrapper right around a network. It looks for tensors in what forward returns, and in a trajectory sees none."""
    if not is_distributed():
        return
    wrapper = wrapper_in_forward()
    if wrapper is not None and wrapper.module is network and wrapper.static_graph:
        raise wrapper_error(network, "DistributedDataParallel(static_graph=True)")
    if "torch.distributed.fsdp" in sys.modules and isinstance(
        network, torch.distributed.fsdp.FSDPModule
    ):
        raise wrapper_error(network, "fully_shard")


def wrapper_error(network: nn.Module, wrapper: str) -> Unsupported:
    kind = type(network).__name__.removeprefix(
        "FSDP"
    )  # fully_shard gives what it shards a class of its own
    return Unsupported(
        f"{wrapper} looks for tensors in what a module returns, and a co.{kind} returns a run in which it sees none: "
        f"give it a module of your own that calls the {kind} and returns the loss, with the penalty added."
    )


def shards_of(module: nn.Module) -> list[Any]:
    """The states that fully_shard keeps of the modules around `module`, and of itself."""
    inside = lambda outer: any(inner is module for inner in outer.modules())
    return [state for outer, state in sharded_modules() if inside(outer)]


def is_sharded_weight(node: Any) -> bool:
    """Is this the end of the graph at the weights of a FullyShardedDataParallel (FSDP1) whose forward has ended? It keeps them
    in one flat array, whole in the forward, and this process's share of it otherwise."""
    return is_shard_of_flat_weights(getattr(node, "variable", None))


def is_waiting_for_first(sink: Any) -> bool:
    """Does a wrapper wait at this node for the first gradient that comes by, to see the order of its parameters?"""
    wrapper = sink.ddp_weakref()
    return wrapper is not None and wrapper.static_graph


def wrapper_nodes_between(loss: Tensor, outputs: Iterable[Tensor]) -> list[Any]:
    """The wrappers' nodes of torch's graph that a gradient from the loss to the outputs goes through."""
    ends = {output.grad_fn for output in outputs}
    nodes = [node for node in reachable_nodes(loss.grad_fn) if node.name() in (SINK, SHARDED)]
    return [node for node in nodes if not ends.isdisjoint(reachable_nodes(node))]


def reachable_nodes(top: Any) -> set[Any]:
    """`top` and every node that a gradient at it can reach."""
    found = {top}
    waiting = [top]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in found:
                found.add(node)
                waiting.append(node)
    return found

"""Wrappers that spread a module over processes, and why some cannot lie between costates and loss.

Costates come from a gradient that is taken before the backward pass. The hooks of a wrapper cannot
tell one from the other:

    DistributedDataParallel(static_graph=True)   averages over processes after the first gradient,
                                                 here that of the costates, and never sees the one
                                                 that is trained on
    fully_shard, FullyShardedDataParallel        free their weights after it, and the second
                                                 derivative has none to read

Inside the forward of the wrapped module neither has set its hooks yet, and everything is exact.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..errors import Unsupported
from .torch_internals import is_idle, is_shard_of_flat_weights, sharded_modules, wrapper_in_forward

# Names of nodes in torch's graph: on the outputs of a DistributedDataParallel, and on the inputs of
# a module that fully_shard has sharded.
SINK = "_DDPSinkBackward"
SHARDED = "RegisterPostBackwardFunctionBackward"


def is_distributed() -> bool:
    """Is this process one of several that work together?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def refuse_wrappers_between(
    loss: Tensor, outputs: Iterable[Tensor], recorded: Mapping[nn.Module, str]
) -> None:
    """Refuse a gradient from the loss to the outputs of recorded modules if it sets off hooks.

    recorded: the modules, each with its name for the message.
    """
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
                "DistributedDataParallel(static_graph=True) mistakes the gradient that computes "
                "costates for the backward pass, and would not average the other gradients: put "
                "co.record, the loss and the penalty inside the forward of the wrapped module, "
                "or leave out static_graph=True."
            )
        if node.name() == SHARDED:
            raise sharding_error(
                "a module between the recorded one and the loss is sharded by fully_shard "
                "separately"
            )


def sharding_error(reason: str) -> Unsupported:
    """The error for weights that are freed before the second derivative."""
    return Unsupported(
        f"{reason}, which frees weights that costates need: put co.record, the loss and the "
        "penalty inside the forward of one sharded module, and do not shard any part of it "
        "between the recurrence and the loss separately."
    )


def refuse_wrapper_around(network: nn.Module) -> None:
    """Refuse a wrapper directly around a network.

    It sets its hooks on the tensors that a module returns. A network returns a run, in which it
    finds none, so that its hooks would never be called.
    """
    if not is_distributed():
        return
    wrapper = wrapper_in_forward()
    if wrapper is not None and wrapper.module is network and wrapper.static_graph:
        raise wrapper_error(network, "DistributedDataParallel(static_graph=True)")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(network, fsdp.FSDPModule):
        raise wrapper_error(network, "fully_shard")


def wrapper_error(network: nn.Module, wrapper: str) -> Unsupported:
    """The error for a wrapper directly around a network."""
    # fully_shard puts its prefix before the name of the class.
    kind = type(network).__name__.removeprefix("FSDP")
    return Unsupported(
        f"{wrapper} looks for tensors in a module's return value, but a co.{kind} returns a run, "
        f"in which it finds none: wrap a module that calls the {kind} and returns the loss with "
        "the penalty added."
    )


def shards_of(module: nn.Module) -> list[object]:
    """The states that fully_shard keeps of `module` and of the modules around it."""
    states = []
    for outer, state in sharded_modules():
        if any(inner is module for inner in outer.modules()):
            states.append(state)
    return states


def is_sharded_weight(node: Node) -> bool:
    """Is this the leaf of FullyShardedDataParallel's (FSDP1's) weights, after its forward?

    It keeps them in one flat array: complete during the forward, this process's share otherwise.
    """
    return is_shard_of_flat_weights(getattr(node, "variable", None))


def is_waiting_for_first(sink: Node) -> bool:
    """Is this the node of a DistributedDataParallel(static_graph=True)?

    It waits for the first gradient, to see the order of its parameters.
    """
    wrapper = sink.ddp_weakref()  # type: ignore[attr-defined]
    return wrapper is not None and wrapper.static_graph


def wrapper_nodes_between(loss: Tensor, outputs: Iterable[Tensor]) -> list[Node]:
    """The nodes of wrappers that a gradient from the loss to the outputs goes through."""
    output_nodes = {output.grad_fn for output in outputs}
    nodes = [node for node in reachable_nodes(loss.grad_fn) if node.name() in (SINK, SHARDED)]
    return [node for node in nodes if not output_nodes.isdisjoint(reachable_nodes(node))]


def reachable_nodes(top: Node | None) -> set[Node]:
    """`top`, a node of torch's graph, and all nodes that a gradient at it can reach."""
    if top is None:
        return set()
    reached = {top}
    waiting = [top]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in reached:
                reached.add(node)
                waiting.append(node)
    return reached

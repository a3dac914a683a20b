"""Count the objects, bytes and graph nodes that are alive in this process.

They are counted rather than measured, so no allocator, free list or other process can disturb the
result.
"""

import gc
import sys
from typing import NamedTuple

import torch


class Alive(NamedTuple):
    objects: int  # everything that the interpreter can reach
    bytes: int  # of these objects themselves, and of the storages of tensors, each once
    # of the autograd graphs that live tensors hold on to: torch keeps them where the interpreter
    # does not look
    nodes: int

    def more_than(self, before: "Alive") -> "Alive":
        """What has been added since."""
        return Alive(*(now - then for now, then in zip(self, before, strict=True)))


def reachable() -> list[object]:
    """All objects that the garbage collector knows, and all that these refer to: numbers and texts,
    for instance.

    A loop and no comprehensions: what one of those takes from outside would be found, with all the
    addresses in it.
    """
    gc.collect()
    found: dict[int, object] = {}
    latest = gc.get_objects()
    while latest:
        for each in latest:
            found[id(each)] = each
        referred, latest = gc.get_referents(*latest), []
        for each in referred:
            if id(each) not in found:
                found[id(each)] = each
                latest.append(each)
    return list(found.values())


def nodes_behind(tensors: list[torch.Tensor]) -> int:
    """The nodes of the graphs that these tensors came from."""
    found = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    latest = list(found)
    while latest:
        behind = {node for each in latest for node, _ in each.next_functions if node is not None}
        latest = list(behind - found)
        found |= behind
    return len(found)


def alive() -> Alive:
    everything = reachable()
    tensors = [each for each in everything if issubclass(type(each), torch.Tensor)]
    # asking a tensor for its storage makes an object that stays: such objects are left out, and
    # their bytes counted here
    storages = [each for each in everything if issubclass(type(each), torch.UntypedStorage)]
    others = [each for each in everything if not issubclass(type(each), torch.UntypedStorage)]
    storages += [tensor.untyped_storage() for tensor in tensors]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    size = sum(sys.getsizeof(each, 0) for each in others) + sum(held.values())
    return Alive(len(others), size, nodes_behind(tensors))

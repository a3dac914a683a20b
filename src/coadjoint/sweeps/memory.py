"""Large arrays are used again: a fresh one costs page faults, which take longer than filling it.

A storage is handed out again when nobody else holds it: no tensor, no view, no graph. Sizes that
are no longer requested are dropped, and so are idle storages beyond twice the bytes that were ever
in use: batches whose sizes keep changing would fill the memory. `release()` frees the rest.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage

from .pointers import is_traced
from .torch_internals import holder_count

SMALL = 1 << 17  # bytes below which the allocator itself is quick
STALE = 200  # requests after which a size counts as no longer in use
IDLE = 256 << 20  # bytes of idle storages that are kept in any case
_storages: dict[int, list[UntypedStorage]] = {}  # by size in bytes
_last_request: dict[int, int] = {}  # by size: the number of the latest request for it
_most_in_use = 0  # bytes at a time, as far as it was counted
_request_numbers = itertools.count()
_lock = threading.Lock()


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """An array of this shape whose values are not set, with the type and device of `like`.

    A large one on a CPU lies in memory that was used before, where such memory is free.
    """
    size = math.prod(shape) * like.element_size()
    if size < SMALL or like.device.type != "cpu":
        return like.new_empty(tuple(shape))
    # Deterministic mode fills what torch allocates, and a traced tensor has no storage to share.
    if torch.are_deterministic_algorithms_enabled() or is_traced(like):
        return like.new_empty(tuple(shape))
    with _lock:  # until the array holds the storage, another thread might take it too
        storage = _find_storage(size)
        array = like.new_empty(0)
        array.set_(storage, 0, tuple(shape))  # type: ignore[call-overload]
        return array


def _find_storage(size: int) -> UntypedStorage:
    """A storage of `size` bytes that nobody else holds."""
    number = next(_request_numbers)
    _last_request[size] = number
    storages = _storages.setdefault(size, [])
    for storage in storages:
        if holder_count(storage) == 1:  # its Python object, which `storages` holds, alone
            return storage
    stale_sizes = [old for old, last in _last_request.items() if number - last > STALE]
    for stale_size in stale_sizes:
        del _storages[stale_size]
        del _last_request[stale_size]
    _drop_idle(size)
    storage = UntypedStorage(size)
    storages.append(storage)
    return storage


def _drop_idle(new: int) -> None:
    """Before `new` bytes are added: drop idle storages if they are many beside those in use.

    The sizes that were requested last are kept.
    """
    global _most_in_use
    kept = sum(size * len(storages) for size, storages in _storages.items())
    if kept <= IDLE:
        return
    idle = {}  # bytes, by size
    for size, storages in _storages.items():
        idle[size] = size * sum(holder_count(storage) == 1 for storage in storages)
    idle_bytes = sum(idle.values())
    _most_in_use = max(_most_in_use, kept - idle_bytes + new)
    excess = idle_bytes - max(IDLE, 2 * _most_in_use)
    for size in sorted(filter(idle.get, idle), key=_last_request.__getitem__):
        if excess <= 0:
            return
        _storages[size] = [storage for storage in _storages[size] if holder_count(storage) > 1]
        excess -= idle[size]


def release() -> None:
    """Free the memory that is kept for the next sweep."""
    global _most_in_use
    with _lock:
        _storages.clear()
        _last_request.clear()
        _most_in_use = 0

"""Large arrays are used again: a fresh one costs a page fault for every 4 kB, about as much as a sweep over it.

A storage is handed out again when nobody else holds it: no tensor, no view, no graph. Sizes that are no longer asked
for are dropped; `release()` gives back the rest.
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
STALE = 200  # requests after which a size counts as no longer asked for
_kept: dict[int, list[UntypedStorage]] = {}
_asked: dict[int, int] = {}
_clock = itertools.count()
_lock = threading.Lock()


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """An array whose values are not set, of the kind of `like`."""
    size = math.prod(shape) * like.element_size()
    if (
        size < SMALL
        or like.device.type != "cpu"
        or torch.are_deterministic_algorithms_enabled()
        or is_traced(like)
    ):
        return like.new_empty(tuple(shape))
    with _lock:
        now = _asked[size] = next(_clock)
        storages = _kept.setdefault(size, [])
        free = next((s for s in storages if holder_count(s) == 1), None)
        if free is None:
            for other in [n for n, last in _asked.items() if now - last > STALE]:
                del _kept[other], _asked[other]
            free = UntypedStorage(size)
            storages.append(free)
        return like.new_empty(0).set_(free, 0, tuple(shape))  # type: ignore[call-overload]


def release() -> None:
    """Give back the memory that is kept for the next sweep."""
    with _lock:
        _kept.clear()
        _asked.clear()

"""Checks of values: made at once on a CPU, and later on a GPU, where an answer waits for all work before it.

While a gradient is being recorded as a CUDA graph no answer can be had at all. Its checks are collected and made after each
replay (graphs.py). What is being recorded belongs to the thread that records: other threads check at once, as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple


class Doubt(NamedTuple):
    """Something that must hold, to be asked later."""

    holds: Any  # a tensor
    wrong: Callable[[], Exception | None]  # what to raise if it does not; None for a false alarm


# The doubts of the recording under way in this thread; None outside a recording.
_collected: ContextVar[list[Doubt] | None] = ContextVar("coadjoint_doubts", default=None)


@contextlib.contextmanager
def deferred() -> Iterator[list[Doubt]]:
    """Inside, and in this thread alone, doubts are collected instead of asked."""
    doubts: list[Doubt] = []
    token = _collected.set(doubts)
    try:
        yield doubts
    finally:
        _collected.reset(token)


def is_deferred() -> bool:
    """Is this thread recording?"""
    return _collected.get() is not None


def insist(holds: Any, wrong: Callable[[], Exception | None]) -> None:
    """`holds` must be true: now, or whenever the recording is replayed."""
    doubts = _collected.get()
    if doubts is not None:
        doubts.append(Doubt(holds, wrong))
        return
    if not holds:
        raise_if(wrong())


def ask(doubts: list[Doubt]) -> None:
    """Raise what is wrong, if anything is: one answer for all doubts, then each of them."""
    for doubt in doubts:
        if not doubt.holds.item():
            raise_if(doubt.wrong())


def raise_if(error: Exception | None) -> None:
    if error is not None:
        raise error

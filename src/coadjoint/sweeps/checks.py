"""Checks of values: made at once on a CPU, and later on a GPU, where an answer waits for all work before it.

While a gradient is being recorded as a CUDA graph no answer can be had at all. Its checks are collected and made after each
replay (graphs.py). What is being recorded belongs to the thread that records: other threads check at once, as ever.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple


class Check(NamedTuple):
    """Something that must hold, to be asked later."""

    holds: Any  # a tensor
    make_error: Callable[
        [], Exception | None
    ]  # what to raise if it does not; None for a false alarm


# The checks of the recording under way in this thread; None outside a recording.
_collected: ContextVar[list[Check] | None] = ContextVar("coadjoint_doubts", default=None)


@contextlib.contextmanager
def defer_checks() -> Iterator[list[Check]]:
    """Inside, and in this thread alone, checks are collected instead of asked."""
    checks: list[Check] = []
    token = _collected.set(checks)
    try:
        yield checks
    finally:
        _collected.reset(token)


def is_deferring_checks() -> bool:
    """Is this thread recording?"""
    return _collected.get() is not None


def require(holds: Any, make_error: Callable[[], Exception | None]) -> None:
    """`holds` must be true: now, or whenever the recording is replayed."""
    checks = _collected.get()
    if checks is not None:
        checks.append(Check(holds, make_error))
        return
    if not holds:
        raise_unless_none(make_error())


def raise_failures(checks: list[Check]) -> None:
    """Raise what is make_error, if anything is: one answer for all checks, then each of them."""
    for check in checks:
        if not check.holds.item():
            raise_unless_none(check.make_error())


def raise_unless_none(error: Exception | None) -> None:
    if error is not None:
        raise error

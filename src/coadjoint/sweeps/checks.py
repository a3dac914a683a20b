"""Checks of values: made at once on a CPU, later on a GPU, where an answer waits for queued work.

    Check                something that must hold, and the error if it does not
    require              make a check now; while a CUDA graph is captured, collect it
    defer_checks         inside, checks are collected
    raise_failures       make collected checks
    plan.require_finite  a sweep's check that its values are finite
    plan.settle_checks   make the checks that a sweep has collected

While a gradient is captured as a CUDA graph no value can be read at all. Its checks are collected
and made after each replay (gradients/captured.py). A capture belongs to the thread that makes it:
other threads check at once, as always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

MakeError = Callable[[], Exception | None]


class Check(NamedTuple):
    """Something that must hold, to be checked later."""

    holds: Tensor  # a bool
    make_error: MakeError  # what to raise if it does not hold; None for a false alarm


# The checks of the capture under way in this thread; None outside a capture.
_collected: ContextVar[list[Check] | None] = ContextVar("coadjoint_checks", default=None)


@contextlib.contextmanager
def defer_checks() -> Iterator[list[Check]]:
    """Inside, and in this thread alone, checks are collected instead of made."""
    checks: list[Check] = []
    token = _collected.set(checks)
    try:
        yield checks
    finally:
        _collected.reset(token)


def is_deferring_checks() -> bool:
    """Is this thread inside `defer_checks`?"""
    return _collected.get() is not None


def require(holds: Tensor, make_error: MakeError) -> None:
    """`holds`, one bool, must be true: now, or after each replay if this thread captures a graph.

    make_error(): the error otherwise; None if a closer look finds that all is well.
    """
    checks = _collected.get()
    if checks is not None:
        checks.append(Check(holds, make_error))
    elif not holds:
        raise_error(make_error())


def raise_failures(checks: Sequence[Check]) -> None:
    """Raise the error of the first check that fails, if any does."""
    for check in checks:
        if not check.holds.item():
            raise_error(check.make_error())


def raise_error(error: Exception | None) -> None:
    """Raise `error`; do nothing for None, a false alarm."""
    if error is not None:
        raise error

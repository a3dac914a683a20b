"""Checks of values: made at once on a CPU, later on a GPU, where an answer waits for queued work.

    Check                something that must hold, and the error if it does not
    answers_late         whether an answer would wait: of values on a GPU
    require              make a check now; while a CUDA graph is captured, collect it
    defer_checks         inside, checks are collected
    leave_replays        inside, replayed gradients leave their checks to the caller
    settle               make collected checks, with one answer for all that hold
    raise_failures       the same, with an answer for each
    plan.require_finite  a sweep's check that its values are finite
    plan.settle_checks   make the checks that a sweep has collected

While operations are captured as a CUDA graph no value can be read at all. Their checks are
collected and made after each replay (gradients/captured.py, engines/cuda/captured_function.py). A
capture belongs to the thread that makes it: other threads check at once, as always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

MakeError = Callable[[], Exception | None]


class Check(NamedTuple):
    """Something that must hold, to be checked later."""

    holds: Tensor  # a bool
    make_error: MakeError  # what to raise if it does not hold; None for a false alarm


# The checks of the capture under way in this thread; None outside a capture.
_collected: ContextVar[list[Check] | None] = ContextVar("coadjoint_checks", default=None)
# Where replayed gradients leave their checks in this thread; None: they make them.
_left: ContextVar[list[Check] | None] = ContextVar("coadjoint_left_checks", default=None)


def answers_late(y: Tensor) -> bool:
    """Does reading a value of y wait for queued work? It does on a GPU."""
    return y.is_cuda


@contextlib.contextmanager
def defer_checks(checks: list[Check] | None = None) -> Iterator[list[Check]]:
    """Inside, and in this thread alone, checks are collected instead of made.

    checks: the list to which they are added; None for a new one.
    """
    if checks is None:
        checks = []
    token = _collected.set(checks)
    try:
        yield checks
    finally:
        _collected.reset(token)


def is_deferring_checks() -> bool:
    """Is this thread inside `defer_checks`?"""
    return _collected.get() is not None


def new_checks() -> list[Check]:
    """The list to which a sweep adds its checks: that of `defer_checks`, or one of its own."""
    checks = _collected.get()
    return [] if checks is None else checks


@contextlib.contextmanager
def leave_replays() -> Iterator[list[Check]]:
    """Inside, and in this thread alone, a replayed gradient does not wait: it leaves its check.

    The caller makes the checks before the next replay, which overwrites what they read.
    """
    checks: list[Check] = []
    token = _left.set(checks)
    try:
        yield checks
    finally:
        _left.reset(token)


def left_checks() -> list[Check] | None:
    """Where a replay leaves its check: the list of `leave_replays`; None: it makes the check."""
    return _left.get()


def require(holds: Tensor, make_error: MakeError) -> None:
    """`holds`, one bool, must be true: now, or after each replay if this thread captures a graph.

    make_error(): the error otherwise; None if a closer look finds that all is well.
    """
    checks = _collected.get()
    if checks is not None:
        checks.append(Check(holds, make_error))
    elif not holds:
        raise_error(make_error())


def settle(checks: list[Check]) -> None:
    """Make the checks collected so far and forget them; the first that fails raises its error."""
    made = checks[:]
    checks.clear()
    # One answer for all checks first: each answer waits for the GPU.
    if made and not all_hold(made).item():
        raise_failures(made)


def all_hold(checks: Sequence[Check]) -> Tensor:
    """Do all checks hold? One bool, on their device."""
    return torch.stack([check.holds for check in checks]).all()


def raise_failures(checks: Sequence[Check]) -> None:
    """Raise the error of the first check that fails, if any does."""
    for check in checks:
        if not check.holds.item():
            raise_error(check.make_error())


def raise_error(error: Exception | None) -> None:
    """Raise `error`; do nothing for None, a false alarm."""
    if error is not None:
        raise error

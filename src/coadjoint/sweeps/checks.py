"""Checks of values: made at once on a CPU, later on a GPU, where an answer waits for queued work.

    Check                something that must hold, and the error if it does not
    FailureCounts        how many checks have failed, counted where they are made
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

MakeError = Callable[[], Exception | None]


class FailureCounts:
    """How many checks have failed, at each of PLACES places: counted on their device.

    A CUDA graph counts at a place of its own. To read all counts waits for the device once, and
    whoever knows a count from before knows whether a check has failed since.
    """

    PLACES = 64

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self.counts = torch.zeros(self.PLACES, dtype=torch.int64, device=device)
        self.seen = [0] * self.PLACES  # the counts as somebody has read them; they never fall
        self.taken = 0
        self.read()  # other streams will count: they must not do so before the zeros are there

    def take_place(self) -> FailurePlace:
        """A place that nobody has."""
        self.taken += 1
        return FailurePlace(self, self.taken - 1)

    def read(self) -> list[int]:
        """Wait for the device and return all counts."""
        values: list[int] = self.counts.tolist()
        self.seen = values
        return values


class FailurePlace(NamedTuple):
    """A place of FailureCounts."""

    table: FailureCounts
    number: int

    def add(self, failed: Tensor) -> None:
        """Count a check, on its device; failed: a bool."""
        self.table.counts[self.number].add_(failed)

    def last_seen(self) -> Count:
        """The count as somebody has read it: it may have grown since."""
        return Count(self.table, self.number, self.table.seen[self.number])


class Count(NamedTuple):
    """A check of which this is known: there had been `before` failures at its place or more."""

    table: FailureCounts
    number: int
    before: int

    def is_same(self, counts: Counts) -> bool:
        """Is it still that? If not, the failure may be that of another check: make_error looks."""
        return counts[self.table][self.number] == self.before


Counts = Mapping[FailureCounts, Sequence[int]]  # as one thread has read them


class Check(NamedTuple):
    """Something that must hold, to be checked later."""

    holds: Tensor | Count  # a bool; or where its failure would have been counted
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
    if not made:
        return
    counts = read_counts(made)
    if not have_held(made, counts):
        raise_failures(made, counts)


def read_counts(checks: Sequence[Check]) -> Counts:
    """The counts of failures that these checks refer to: one answer of the GPU for each table."""
    tables = {check.holds.table for check in checks if isinstance(check.holds, Count)}
    return {table: table.read() for table in tables}


def have_held(checks: Sequence[Check], counts: Counts) -> bool:
    """Have all checks held? One answer of the GPU for all that are not counted."""
    others: list[Check] = []
    for check in checks:
        if not isinstance(check.holds, Count):
            others.append(check)
        elif not check.holds.is_same(counts):
            return False
    return not others or bool(all_hold(others).item())


def all_hold(checks: Sequence[Check]) -> Tensor:
    """Do all checks hold that are not counted? One bool, on their device."""
    holds = [check.holds for check in checks if isinstance(check.holds, Tensor)]
    return holds[0] if len(holds) == 1 else torch.stack(holds).all()


def raise_failures(checks: Sequence[Check], counts: Counts | None = None) -> None:
    """Raise the error of the first check that fails, if any does. counts: None to read them."""
    if counts is None:
        counts = read_counts(checks)
    for check in checks:
        holds = check.holds
        if not (holds.is_same(counts) if isinstance(holds, Count) else holds.item()):
            raise_error(check.make_error())


def raise_error(error: Exception | None) -> None:
    """Raise `error`; do nothing for None, a false alarm."""
    if error is not None:
        raise error

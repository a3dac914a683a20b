"""Training: a loop over steps, each of them a function of (weights, optimiser, step, seed) and of nothing else.

Batches, held-out sequences and schedules are functions of the step, so a run that goes on from a checkpoint does what it
would have done. What depends on the past is kept in `Progress`, and saved.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import CoadjointError


class Interrupted(CoadjointError):
    """A signal stopped the run; it was saved and can go on."""

    exit_code = 75


@contextmanager
def interruptible(go_on: str = "") -> Iterator[list[str]]:
    """Note the first SIGINT, SIGTERM or SIGHUP in the list, to stop after the step; a second SIGINT ends at once.

    A signal that was ignored stays ignored: `nohup` and background jobs count on it."""
    caught: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught and number == signal.SIGINT:
            raise Interrupted(f"interrupted twice: stopped at once, after the last checkpoint. {go_on}".rstrip())
        caught.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    heard = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    before = {s: signal.signal(s, note) for s in heard}
    try:
        yield caught
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)

"""Signals: a run is asked to stop, and does so after its step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import CoadjointError

# Those that ask a program to end; each system has some of them.
STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
    if hasattr(signal, name)
)


class Interrupted(CoadjointError):
    """A signal stopped the run; it was saved and can go on."""

    exit_code = 75


@contextmanager
def handling_stop_signals(note: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `note(number, frame)` hears of the signals that ask to stop.

    A signal that was ignored stays ignored: `nohup` and background jobs count on it."""
    heard = [s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    before = {s: signal.signal(s, note) for s in heard}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


@contextmanager
def interruptible(go_on: str = "") -> Iterator[list[str]]:
    """Note the first signal in the list, to stop after the step; a second SIGINT ends at once."""
    caught: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        if caught and number == signal.SIGINT:
            raise Interrupted(
                f"interrupted twice: stopped at once, after the last checkpoint. {go_on}".rstrip()
            )
        caught.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may hear of signals
        return
    with handling_stop_signals(note):
        yield caught

"""Signals: when a run is asked to stop, it stops after its present step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..errors import CoadjointError

# The signals that ask a program to end. Each system has only some of them.
NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
STOP_SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


class Interrupted(CoadjointError):
    """A signal stopped the run; if it has a folder, it was saved and can be resumed.

    >>> import coadjoint as co, signal
    >>> task = co.tasks.TemporalOrder(10)
    >>> net = co.Network("elman", inputs=6, hidden=3, outputs=4, output="softmax")
    >>> def stop(row):
    ...     if row["kind"] == "train":
    ...         signal.raise_signal(signal.SIGTERM)
    >>> try:
    ...     co.train(net, task, steps=3, tests=10, probes=2, loggers=[stop], folder="run")
    ... except co.Interrupted as error:
    ...     print(error)
    Interrupted by SIGTERM; saved at step 1. Resume with: coadjoint resume run
    """

    exit_code = 75


def describe_interruption(signal_name: str) -> str:
    """The first words of a message: "Interrupted" by Ctrl-C, "Interrupted by SIGTERM"."""
    return "Interrupted" if signal_name == "SIGINT" else f"Interrupted by {signal_name}"


@contextmanager
def handling_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, `handler(number, frame)` is called for signals that ask to stop: see STOP_SIGNALS.

    A signal that was ignored stays ignored: `nohup` and background jobs rely on that.
    """
    handled = [s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    before = {s: signal.signal(s, handler) for s in handled}
    try:
        yield
    finally:
        for s, previous in before.items():
            signal.signal(s, previous)


@contextmanager
def interruptible(resume_hint: str = "") -> Iterator[list[str]]:
    """Inside, signals that ask to stop only add their names to the list that is yielded.

    The run looks into it after each step. A SIGINT after another signal raises Interrupted at once;
    resume_hint: the end of its message.
    """
    caught: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        """The handler: record the signal's name, or raise at a SIGINT after another signal."""
        if caught and number == signal.SIGINT:
            words = (
                "Interrupted twice: stopped at once; steps since the last checkpoint are lost. "
                f"{resume_hint}"
            )
            raise Interrupted(words.rstrip())
        caught.append(signal.Signals(number).name)

    if threading.current_thread() is not threading.main_thread():
        yield caught  # Python allows signal handlers in the main thread only
        return
    with handling_stop_signals(note):
        yield caught

"""Count function calls instead of measuring time, so that a busy machine changes nothing."""

import signal
import sys
import threading
import time
from contextlib import contextmanager

# seconds of this process's own, for one call that never comes back: a pattern that tries everything
PROCESSOR = 120


class TooMuch(AssertionError):
    pass


class Calls:
    """The number of calls of functions so far."""

    count = 0


@contextmanager
def counted(most=None):
    """Count the calls of functions, those written in C among them; more than `most` of them are
    TooMuch.

    What one call does inside is not counted. Against one that does not end there is a limit of
    processor time, some hundred times what anything here takes.
    """
    calls = Calls()
    before = sys.getprofile()
    main = threading.current_thread() is threading.main_thread()

    def note(frame, event, argument):
        if event in ("call", "c_call"):
            calls.count += 1
            if most is not None and calls.count > most:
                sys.setprofile(before)
                raise TooMuch(f"more than {most:,} calls")

    def spent(number, frame):
        raise TooMuch(f"more than {PROCESSOR} s of processor time")

    if main:
        handler = signal.signal(signal.SIGVTALRM, spent)
        signal.setitimer(signal.ITIMER_VIRTUAL, PROCESSOR)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)
        if main:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, handler)


def until(condition, process=None):
    """Wait until the condition holds, ten minutes at most; the process must not end meanwhile."""
    end = time.monotonic() + 600
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)

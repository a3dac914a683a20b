"""A coadjoint command that saves and ends when whoever started it is gone.

    python -m coadjoint.cli.leashed train ...

The process that starts it holds the other end of its stdin. Whatever ends that process, even
SIGKILL, closes the pipe; then this command stops as SIGTERM would stop it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from .program import main


def stop_when_let_go(leash: int) -> None:
    """Wait until the pipe closes, in a thread of its own; then stop this command."""
    while os.read(leash, 1):
        pass
    signal.raise_signal(signal.SIGTERM)


def run_on_leash() -> None:
    """Run the command line of this process until it ends, or until stdin closes."""
    leash = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the command itself has nothing to read
    os.close(nothing)
    sys.argv[0] = "coadjoint"
    threading.Thread(target=stop_when_let_go, args=(leash,), daemon=True).start()
    main()


if __name__ == "__main__":
    run_on_leash()

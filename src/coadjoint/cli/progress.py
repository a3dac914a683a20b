"""Progress of many runs or measurements: a line for each that is done, and a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from ..errors import escape_controls

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressReporter:
    """A context whose value reports progress: one line per finished item, a bar on a terminal."""

    def __init__(self, quiet: bool, name: str = "runs", to: TextIO | None = None) -> None:
        """quiet: print nothing; name: of the bar; to: the stream to print to, stdout by default."""
        self.quiet = quiet
        self.name = name
        self.to = to or sys.stdout
        self.bar: Progress | None = None
        self.task: TaskID

    def __enter__(self) -> Callable[[float, int, str | None], None]:
        """Show the bar, if there is a terminal to show it on; returns `report`."""
        if self.to.isatty() and not self.quiet:
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(file=self.to))
            self.bar.start()
            self.task = self.bar.add_task(self.name, total=None)
        return self.report

    def report(self, done: float, total: int, text: str | None) -> None:
        """Report that `done` of `total` items are finished; text: what to print, if anything.

        done may be a fraction: 2.5 is half of the third item.
        """
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)
            if text:
                line = escape_controls(text)
                self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif text and not self.quiet:
            print(escape_controls(f"{done:g} of {total}: {text}"), flush=True, file=self.to)

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is and give the terminal back."""
        if self.bar is not None:
            self.bar.stop()

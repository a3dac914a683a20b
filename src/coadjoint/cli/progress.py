"""Progress of many runs or measurements: a line for each that is done, and a bar on a terminal."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..errors import escape_controls

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


# Takes the number of items that are done (2.5: half of the third, too), that of all items, and a
# line about the latest, if there is one.
Report = Callable[[float, int, str | None], None]
LOOK = 1.0  # seconds between two looks at runs that are not over: each look reads files


class ProgressReporter:
    """A context whose value reports progress: one line per finished item, a bar on a terminal."""

    def __init__(self, quiet: bool, name: str = "runs", to: TextIO | None = None) -> None:
        """quiet: print nothing; name: of the bar; to: the stream to print to, stdout by default."""
        self.quiet = quiet
        self.name = name
        self.to = to or sys.stdout
        self.bar: Progress | None = None
        self.task: TaskID
        self.furthest = 0.0  # what the bar shows

    def __enter__(self) -> Report:
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
            self.furthest = max(self.furthest, done)  # a bar never moves back
            self.bar.update(self.task, completed=self.furthest, total=total)
            if text:
                line = escape_controls(text)
                self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif text and not self.quiet:
            print(escape_controls(f"{done:g} of {total}: {text}"), flush=True, file=self.to)

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is and give the terminal back."""
        if self.bar is not None:
            self.bar.stop()


class RunsReporter:
    """Reports the runs of a comparison: how far they are, and a line about each that has ended."""

    def __init__(self, report: Report, total: int, runs: Sequence[Path], in_order: bool) -> None:
        """total: the number of all runs; runs: those that have not ended yet.

        in_order: a line waits until all runs before have theirs.
        """
        self.report = report
        self.total = total
        self.waiting = list(runs)  # those without a line so far
        self.in_order = in_order
        self.lines: dict[Path, str] = {}  # about runs that have ended, until they are reported
        self.looked = time.monotonic()
        report(total - len(runs), total, None)

    def end(self, run: Path, line: str) -> None:
        """Report that a run has ended."""
        self.lines[run] = line
        due = [run]
        if self.in_order:
            due = list(itertools.takewhile(self.lines.__contains__, self.waiting))
        for name in due:
            self.waiting.remove(name)
            self.report(self.total - len(self.waiting), self.total, self.lines.pop(name))

    def look(self, running: Iterable[Path]) -> None:
        """Report how far the runs are, at most once in LOOK seconds; running: those under way."""
        from .outcomes import share_done

        if time.monotonic() - self.looked < LOOK:
            return
        self.looked = time.monotonic()
        ended = self.total - len(self.waiting) + len(self.lines)
        self.report(ended + sum(map(share_done, running)), self.total, None)

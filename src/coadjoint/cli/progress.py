"""Progress of many runs or measurements: a line for each that is done, and a bar on a terminal."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from ..errors import escape_controls
from .pool import RunElsewhere

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


# Takes the number of items that are done (2.5: half of the third, too), that of all items, and a
# line about the latest, if there is one.
Report = Callable[[float, int, str | None], None]
# Takes the runs that are under way elsewhere.
Show = Callable[[Sequence[RunElsewhere]], None]
LOOK = 1.0  # seconds between two looks at runs that are not over: each look reads files


def report_nothing(done: float, total: int, text: str | None) -> None:
    """Ignore the progress of runs."""


def show_nothing(runs: Sequence[RunElsewhere]) -> None:
    """Ignore where runs are."""


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
        self.runs: Sequence[RunElsewhere] = ()  # what the table below the bar shows
        self.told: dict[str, str] = {}  # without a bar: where each run is, as last printed

    def __enter__(self) -> Report:
        """Show the bar, if there is a terminal to show it on; returns `report`."""
        if self.to.isatty() and not self.quiet:
            from rich.console import Console

            from .run_table import BarWithRuns

            self.bar = BarWithRuns(lambda: self.runs, Console(file=self.to))
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

    def show(self, runs: Sequence[RunElsewhere]) -> None:
        """Show which runs are where: in a table below the bar, or a line for each that moved."""
        self.runs = runs
        if self.bar is not None:
            self.bar.refresh()
            return
        for run in runs:
            if self.told.get(run.name) != run.place and not self.quiet:
                print(escape_controls(f"{run.name}: on {run.place}"), flush=True, file=self.to)
            self.told[run.name] = run.place

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it is and give the terminal back."""
        self.runs = ()
        if self.bar is not None:
            self.bar.stop()


class RunsReporter:
    """Reports the runs of a comparison: how far they are, and a line about each that has ended."""

    def __init__(
        self,
        report: Report,
        total: int,
        runs: Sequence[Path],
        in_order: bool,
        show: Show = show_nothing,
    ) -> None:
        """total: the number of all runs; runs: those that have not ended yet.

        in_order: a line waits until all runs before have theirs. show: takes what runs elsewhere.
        """
        self.report = report
        self.show = show
        self.places: Mapping[str, str] = {}  # where runs are, by name, as of the last look
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

    def look(
        self, running: Iterable[Path], find_places: Callable[[], Mapping[str, str]] = dict
    ) -> None:
        """Report how far the runs are, at most once in LOOK seconds; running: those under way.

        find_places: says where runs are, by name, if they are elsewhere.
        """
        from .outcomes import share_done

        if time.monotonic() - self.looked < LOOK:
            return
        self.looked = time.monotonic()
        self.places = find_places()
        shares = {run.name: share_done(run) for run in running}
        ended = self.total - len(self.waiting) + len(self.lines)
        self.report(ended + sum(shares.values()), self.total, None)
        elsewhere = []
        for name, share in shares.items():
            if name in self.places:
                elsewhere.append(RunElsewhere(name, self.places[name], share))
        self.show(elsewhere)

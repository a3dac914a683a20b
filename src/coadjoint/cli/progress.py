"""Progress of many runs or measurements: a line for each that is done, and a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from ..training.display import escape_controls


class ProgressReporter:
    """What is done, a line each; on a terminal a bar below them."""

    def __init__(self, quiet: bool, name: str = "runs", to: TextIO | None = None) -> None:
        self.quiet, self.name, self.to = quiet, name, to or sys.stdout
        self.bar: Any = None

    def __enter__(self) -> Callable[[float, int, str | None], None]:
        if self.to.isatty() and not self.quiet:
            from rich.console import Console
            from rich.progress import Progress

            self.bar = Progress(console=Console(file=self.to))
            self.bar.start()
            self.task = self.bar.add_task(self.name, total=None)
        return self.tick

    def tick(self, done: float, total: int, what: str | None) -> None:
        line = escape_controls(what if self.bar is not None else f"{done:g} of {total}: {what}")
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total)
            if what:
                self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        elif what and not self.quiet:
            print(line, flush=True, file=self.to)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

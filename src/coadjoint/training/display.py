"""Display: the progress of a run, as a bar on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ..errors import escape_controls
from .json_types import Row

REDRAW = 0.2  # seconds between two updates of the bar


class Display(Protocol):
    """Shows the progress of a run."""

    def step(self, step: int, row: Row) -> None:
        """Called after every step, with its row of metrics."""

    def validation(self, step: int, rows: Sequence[Row]) -> None:
        """Called after every validation, with its rows."""

    def say(self, text: str) -> None:
        """Called with a message to show."""

    def close(self) -> None:
        """Called once, at the end."""


class Silent:
    """Shows nothing."""

    def step(self, step: int, row: Row) -> None:
        """Ignore a step."""

    def validation(self, step: int, rows: Sequence[Row]) -> None:
        """Ignore a validation."""

    def say(self, text: str) -> None:
        """Ignore a message."""

    def close(self) -> None:
        """Nothing to close."""


class Lines:
    """Prints one line for each validation."""

    def __init__(self, name: str, steps: int | None, metric: str) -> None:
        """name: of the task. steps: of the run, None if unknown. metric: the one to show."""
        self.name = name
        self.steps = steps
        self.metric = metric
        self.row: Row = {}  # of the latest step
        # the first step that was shown, and when: a resumed run does not begin at step 1
        self.first_step: int | None = None
        self.first_time = 0.0
        self.latest: dict[str, str] = {}  # the figures of the latest validation, as text

    def step(self, step: int, row: Row) -> None:
        """Keep the row of a step for the next line; nothing is printed."""
        self.row = row
        if self.first_step is None:
            self.first_step = step
            self.first_time = time.monotonic()

    def validation(self, step: int, rows: Sequence[Row]) -> None:
        """Print a line with the metric of the task and the decay of the costates, if known.

        rows: one "held-out" row for each split, and one "probe" row.
        """
        for row in rows:
            if row["kind"] == "held-out" and self.metric in row:
                self.latest[self.metric] = f"{row[self.metric]:.4g}"
            elif row["kind"] == "probe" and row["decay"] is not None:
                last = "L" if "axis" in row else "T"  # a chain ends with its layer L
                self.latest[f"log10 |lam_0|/|lam_{last}|"] = f"{row['decay']:.1f}"
        self.draw(step)

    def fields(self, step: int) -> list[str]:
        """The texts of a line: loss, |grad|, the metric, the decay, steps/s, time left."""
        fields = []
        if "loss" in self.row:
            fields.append(f"loss {self.row['loss']:.4g}")
            fields.append(f"|grad| {self.row['gradient']:.1e}")
        fields += [f"{name} {value}" for name, value in self.latest.items()]
        if self.first_step is not None and step > self.first_step:
            seconds = max(time.monotonic() - self.first_time, 1e-9)  # a coarse clock may say 0
            rate = (step - self.first_step) / seconds
            fields.append(f"{rate:.0f} steps/s")
            if self.steps is not None:
                fields.append(f"{(self.steps - step) / rate:.0f} s left")
        return fields

    def draw(self, step: int) -> None:
        """Print one line: the name, "step/steps" (or the step alone), and the fields."""
        progress = str(step)
        if self.steps is not None:
            progress = f"{step:>{len(str(self.steps))}}/{self.steps}"
        line = f"{self.name}  {progress}  " + "  ".join(self.fields(step))
        print(escape_controls(line), flush=True)

    def say(self, text: str) -> None:
        """Print a message."""
        print(escape_controls(text), flush=True)

    def close(self) -> None:
        """Nothing to close."""


class Bar(Lines):
    """A bar that moves, with the same fields."""

    def __init__(self, name: str, steps: int | None, metric: str) -> None:
        """Start a bar of the package rich, with the fields of `Lines` as its note."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().__init__(name, steps, metric)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(20),  # characters wide
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.bar = self.progress.add_task(escape_controls(name), total=steps, note="")
        self.progress.start()
        self.drawn = 0.0  # when the bar was last updated

    def step(self, step: int, row: Row) -> None:
        """Move the bar, a few times a second at most."""
        super().step(step, row)
        if time.monotonic() - self.drawn > REDRAW:
            self.draw(step)

    def draw(self, step: int) -> None:
        """Move the bar to a step."""
        self.drawn = time.monotonic()
        note = escape_controls("  ".join(self.fields(step)))
        note = note.replace("[", r"\[")  # rich takes [...] for markup
        self.progress.update(self.bar, completed=step, note=note)

    def say(self, text: str) -> None:
        """Print a message above the bar."""
        self.progress.console.print(escape_controls(text), markup=False, highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.progress.stop()


def make_display(choice: Display | bool, name: str, steps: int | None, metric: str) -> Display:
    """The display a user chose.

    choice: True is a bar on a terminal and lines elsewhere, False shows nothing, and a display
    is used as it is. name: of the task. steps: None if their number is unknown.
    """
    if not isinstance(choice, bool):
        return choice
    if not choice:
        return Silent()
    kind = Bar if sys.stdout.isatty() else Lines
    return kind(name, steps, metric)


class OldDisplay(Protocol):
    """A display as it was before 0.7.1, with `look` in place of `validation`."""

    step: Callable[[int, Row], None]
    look: Callable[[int, Sequence[Row]], None]
    say: Callable[[str], None]
    close: Callable[[], None]


class RenamedLook:
    """Shows a run through a display whose `validation` still has its old name, `look`."""

    def __init__(self, old: OldDisplay) -> None:
        """Warn, and take over the methods of the old display."""
        warnings.warn(
            "a display's method `look` is now called `validation`: rename it.",
            DeprecationWarning,
            stacklevel=2,
        )
        self.step = old.step
        self.validation = old.look
        self.say = old.say
        self.close = old.close


D = TypeVar("D")


def accept_old_display(display: D) -> D | RenamedLook:
    """The display as it is; one that has `look` in place of `validation` through an adapter."""
    if callable(getattr(display, "look", None)) and not hasattr(display, "validation"):
        return RenamedLook(display)  # type: ignore[arg-type]
    return display

"""Display: the progress of a run, as a bar on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from ..errors import escape_controls
from .json_types import Row
from .metric_names import split_metric
from .pace import Budget, Pace

REDRAW = 0.2  # seconds between two updates of the bar
BAR_WIDTH = 20  # characters
SHORTEST_BAR = 5
MOST_OF_NAME = 24  # characters of the task's name
LEAST_OF_NAME = 8
MOST_LINES = (
    20  # of a run whose number of steps is known: the start, the first validation, the rest
)
LEAST_GROWTH = 1.2  # of the step from line to line, if the number of steps is unknown
# What a narrow terminal leaves out, the least important first.
DISPENSABLE = ("rate", "gradient", "decay", "loss")
DECAY = "decay: log10 |lam_0|/|lam_T|; -3: from end to start, the gradient shrinks to a thousandth"
DECAY_OF_LAYERS = (
    "decay: log10 |lam_0|/|lam_L|; -3: from output to input, the gradient shrinks to a thousandth"
)


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
    """Prints at most MOST_LINES lines, evenly spread over the run, each after a validation."""

    def __init__(
        self,
        name: str,
        steps: int | None,
        metric: str,
        every: int | None = None,
        budgets: Sequence[Budget] = (),
    ) -> None:
        """name: of the task. steps: of the run, None or ENDLESS if unknown. metric: to show.

        every: the steps between two validations. budgets: those that end the run.
        """
        self.name = name
        self.pace = Pace(steps, every, budgets)
        self.steps = self.pace.steps
        self.metric = metric
        self.row: Row = {}  # of the latest step
        self.latest: dict[str, str] = {}  # the figures of the latest validation, as text
        self.printed_step: int | None = None  # that of the last line
        self.printed_part: int | None = None  # the part of the run that it was in
        self.pending: str | None = None  # the line of the last validation, if not yet printed

    def step(self, step: int, row: Row) -> None:
        """Keep the row of a step for the next line; nothing is printed."""
        self.row = row
        self.pace.step(step)

    def validation(self, step: int, rows: Sequence[Row]) -> None:
        """Print a line with the metric of the task and the decay of the costates, if known.

        rows: one "held-out" row for each split, and one "probe" row. The metric is shown with the
        name of its split: "valid accuracy 0.93".
        """
        self.pace.validation()
        for row in rows:
            if row["kind"] == "held-out" and self.metric in row:
                name = split_metric(row.get("split"), self.metric)
                self.latest["metric"] = f"{name} {row[self.metric]:.4g}"
            elif row["kind"] == "probe" and row["decay"] is not None:
                self.latest["decay"] = f"decay {row['decay']:.1f}"
        self.draw(step)

    def fields(self, step: int) -> dict[str, str]:
        """The texts of a line by name: loss, gradient, metric, decay, rate, time left."""
        fields = {}
        if "loss" in self.row:
            fields["loss"] = f"loss {self.row['loss']:.4g}"
            fields["gradient"] = f"|grad| {self.row['gradient']:.1e}"
        fields |= self.latest
        rate = self.pace.rate
        if rate is not None:
            fields["rate"] = f"{rate:.0f} steps/s"
        left = self.pace.seconds_left(step)
        if left is not None:
            fields["left"] = f"{describe_seconds(left)} left"
        return fields

    def draw(self, step: int) -> None:
        """Print one line: the name, "step/steps" (or "step 574" without a limit), and the fields.

        A line that is not due is kept: it is printed at the end if it is the last.
        """
        progress = f"step {step}"
        if self.steps is not None:
            progress = f"{step:>{len(str(self.steps))}}/{self.steps}"
        self.pending = f"{self.name}  {progress}  " + "  ".join(self.fields(step).values())
        if self.is_due(step):
            self.printed_step = step
            self.printed_part = self.pace.part(step, MOST_LINES - 2)
            self.flush()

    def is_due(self, step: int) -> bool:
        """Whether the line of a step is printed at once.

        The first two and the last are. Those between are spread evenly over the steps or the
        budget of the run or, if it has neither, ever more thinly.
        """
        before = self.printed_step
        if not before or step == self.steps:  # None, or step 0
            return True
        part = self.pace.part(step, MOST_LINES - 2)
        if part is None:
            return step >= before * LEAST_GROWTH
        return part > (self.printed_part or 0)

    def flush(self) -> None:
        """Print the line of the last validation, if it was not."""
        if self.pending is not None:
            print(escape_controls(self.pending), flush=True)
            self.pending = None

    def say(self, text: str) -> None:
        """Print a message."""
        print(escape_controls(text), flush=True)

    def close(self) -> None:
        """Print the last line, if it was not: a run may end before its last step."""
        self.flush()


class BarLine(NamedTuple):
    """What a bar shows beside the step: a name, the width of the bar itself, and a note."""

    name: str
    bar: int
    note: str


class Bar(Lines):
    """A bar that moves, with the same fields as far as there is room for them."""

    def __init__(
        self,
        name: str,
        steps: int | None,
        metric: str,
        every: int | None = None,
        budgets: Sequence[Budget] = (),
    ) -> None:
        """Start a bar of the package rich, with the fields of `Lines` as its note."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        super().__init__(name, steps, metric, every, budgets)
        # Columns that may not wrap keep their width: the note gives way. Names are no markup.
        self.bar_column = BarColumn(BAR_WIDTH)
        self.progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
            self.bar_column,
            MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=self.counter_width)),
            TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True)),
        )
        # the terminal's width, and what the line gave up for it: it does not flicker with numbers
        self.width = 0
        self.widest_bar = BAR_WIDTH
        self.longest_name = MOST_OF_NAME
        first = self.fit({})
        self.bar = self.progress.add_task(first.name, total=self.steps, note="")
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
        line = self.fit(self.fields(step))
        self.bar_column.bar_width = line.bar
        self.progress.update(self.bar, completed=step, description=line.name, note=line.note)

    @property
    def counter_width(self) -> int:
        """Characters that "step/steps" takes at most; "step/?" has room for a million steps."""
        return 9 if self.steps is None else 2 * len(str(self.steps)) + 1

    def fit(self, fields: dict[str, str]) -> BarLine:
        """The line for this terminal: the metric and the time left, the rest where there is room.

        First the DISPENSABLE fields are left out, then the bar is shortened, then the name.
        """
        if self.progress.console.width != self.width:
            self.width = self.progress.console.width
            self.widest_bar = BAR_WIDTH
            self.longest_name = MOST_OF_NAME
        name = shorten(escape_controls(self.name), self.longest_name)
        shown = {key: escape_controls(text) for key, text in fields.items()}

        def excess() -> int:
            """Characters too many; the columns have a space between them."""
            note = "  ".join(shown.values())
            taken = len(name) + 1 + self.widest_bar + 1 + self.counter_width + 1 + len(note)
            return taken - self.width

        for key in DISPENSABLE:
            if excess() > 0:
                shown.pop(key, None)
        if excess() > 0:
            self.widest_bar = max(SHORTEST_BAR, self.widest_bar - excess())
        if excess() > 0:
            self.longest_name = max(LEAST_OF_NAME, len(name) - excess())
            name = shorten(name, self.longest_name)
        return BarLine(name, self.widest_bar, "  ".join(shown.values()))

    def say(self, text: str) -> None:
        """Print a message above the bar."""
        self.progress.console.print(escape_controls(text), markup=False, highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self.progress.stop()


def shorten(name: str, most: int) -> str:
    """A name in at most `most` characters; "…" stands for the rest."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def describe_seconds(seconds: float) -> str:
    """A time that is left, roughly: "42 s", "5 min", "3.2 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def make_display(
    choice: Display | bool,
    name: str,
    steps: int | None,
    metric: str,
    every: int | None = None,
    budgets: Sequence[Budget] = (),
) -> Display:
    """The display a user chose.

    choice: True is a bar on a terminal and lines elsewhere, False shows nothing, and a display
    is used as it is. The other arguments are those of `Lines`.
    """
    if not isinstance(choice, bool):
        return choice
    if not choice:
        return Silent()
    kind = Bar if sys.stdout.isatty() else Lines
    return kind(name, steps, metric, every, budgets)


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

"""Display: a run while it goes on; a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import escape_controls

Row = dict[str, Any]


class Display(Protocol):
    """What shows a run while it goes on."""

    def step(self, step: int, row: Row) -> None: ...
    def validation(self, step: int, rows: Sequence[Row]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class Silent:
    """Shows nothing."""

    def step(self, step: int, row: Row) -> None: ...
    def validation(self, step: int, rows: Sequence[Row]) -> None: ...
    def say(self, text: str) -> None: ...
    def close(self) -> None: ...


class Lines:
    """One line for each look."""

    def __init__(self, name: str, steps: int | None, metric: str) -> None:
        self.name, self.steps, self.metric = name, steps, metric
        self.row: Row = {}
        self.began: tuple[int, float] | None = None
        self.seen: dict[str, str] = {}

    def step(self, step: int, row: Row) -> None:
        self.row = row
        if self.began is None:
            self.began = step, time.monotonic()

    def validation(self, step: int, rows: Sequence[Row]) -> None:
        for row in rows:
            if row["kind"] == "held-out" and self.metric in row:
                self.seen[self.metric] = f"{row[self.metric]:.4g}"
            elif row["kind"] == "probe" and row["decay"] is not None:
                self.seen["log10 |lam_0|/|lam_T|"] = f"{row['decay']:.1f}"
        self.draw(step)

    def fields(self, step: int) -> list[str]:
        """loss, |grad|, the metric, the decay, steps/s, time left"""
        found = []
        if "loss" in self.row:
            found += [f"loss {self.row['loss']:.4g}", f"|grad| {self.row['gradient']:.1e}"]
        found += [f"{name} {value}" for name, value in self.seen.items()]
        if self.began is not None and step > self.began[0]:
            rate = (step - self.began[0]) / max(time.monotonic() - self.began[1], 1e-9)
            found += [f"{rate:.0f} steps/s"]
            found += [] if self.steps is None else [f"{(self.steps - step) / rate:.0f} s left"]
        return found

    def draw(self, step: int) -> None:
        at = f"{step}" if self.steps is None else f"{step:>{len(str(self.steps))}}/{self.steps}"
        print(escape_controls(f"{self.name}  {at}  " + "  ".join(self.fields(step))), flush=True)

    def say(self, text: str) -> None:
        print(escape_controls(text), flush=True)

    def close(self) -> None: ...


class Bar(Lines):
    """A bar that moves, with the same fields."""

    def __init__(self, name: str, steps: int | None, metric: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        super().__init__(name, steps, metric)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.progress = Progress(*columns)
        self.bar = self.progress.add_task(escape_controls(name), total=steps, note="")
        self.progress.start()
        self.drawn = 0.0

    def step(self, step: int, row: Row) -> None:
        super().step(step, row)
        if time.monotonic() - self.drawn > 0.2:
            self.draw(step)

    def draw(self, step: int) -> None:
        self.drawn = time.monotonic()
        self.progress.update(
            self.bar,
            completed=step,
            note=escape_controls("  ".join(self.fields(step))).replace("[", r"\["),
        )

    def say(self, text: str) -> None:
        self.progress.console.print(escape_controls(text), markup=False, highlight=False)

    def close(self) -> None:
        self.progress.stop()


def make_display(wanted: Display | bool, name: str, steps: int | None, metric: str) -> Display:
    """What the user has asked for: True is a bar on a terminal, lines elsewhere.

    steps: None where nobody knows how many there will be."""
    if not isinstance(wanted, bool):
        return wanted
    if not wanted:
        return Silent()
    kind = Bar if sys.stdout.isatty() else Lines
    return kind(name, steps, metric)


class RenamedLook:
    """Shows a run through a display whose `validation` still has its old name, `look`."""

    def __init__(self, old: Any) -> None:
        warnings.warn(
            "a display's method `look` is now called `validation`: rename it.",
            DeprecationWarning,
            stacklevel=2,
        )
        self.step = old.step
        self.validation = old.look
        self.say = old.say
        self.close = old.close


def accept_old_display(shown: Any) -> Any:
    """The display as it is; one that has `look` in place of `validation` through an adapter."""
    if callable(getattr(shown, "look", None)) and not hasattr(shown, "validation"):
        return RenamedLook(shown)
    return shown

"""The table of runs below a bar of progress: what runs where, and how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..errors import escape_controls
from .pool import RunElsewhere

WIDEST_PLACE = 36  # characters
MOST_ROWS = 20  # runs in the table; more would not fit a terminal


class BarWithRuns(Progress):
    """A bar of progress and, if runs are under way elsewhere, a table of them below."""

    def __init__(self, runs: Callable[[], Sequence[RunElsewhere]], console: Console) -> None:
        """runs: returns those to show."""
        self.runs = runs  # first: rich asks for what to show at once
        super().__init__(console=console)

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bar, and the table if it has rows."""
        yield from super().get_renderables()
        shown = self.runs()
        if shown:
            yield table_of(shown)


def table_of(runs: Sequence[RunElsewhere]) -> Table:
    """The runs as a table; on a narrow terminal long names take several lines."""
    table = Table(box=None, pad_edge=False, expand=True)
    # the end of a name tells runs apart: "lr-0.01-seed-3"
    table.add_column("run", overflow="fold", ratio=1)
    table.add_column("on", no_wrap=True, overflow="ellipsis", max_width=WIDEST_PLACE)
    table.add_column("done", no_wrap=True, justify="right", width=4)
    for run in runs[:MOST_ROWS]:
        table.add_row(plain_text(run.name), plain_text(run.place), f"{run.share:.0%}")
    if len(runs) > MOST_ROWS:
        table.add_row(f"and {len(runs) - MOST_ROWS} more", "", "")
    return table


def plain_text(text: str) -> Text:
    """Text from outside, without markup and control characters."""
    return Text(escape_controls(text, lines=False))

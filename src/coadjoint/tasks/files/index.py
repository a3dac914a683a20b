"""The index of a data frame, which pandas and R write as a first column without a name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .sheet import Options

UNNAMED = "Unnamed: 0"  # what pandas calls a first column without a name
ARROW_INDEX = "__index_level_0__"  # what pandas calls an index without a name in typed files
TEXT_NOTE = "the first column has no name and counts the rows, like an index: it is left out"
OTHER_NOTE = "the first column has no name, and training did not use it: it is left out"
ARROW_NOTE = (
    f"column '{ARROW_INDEX}', the index of a data frame, is left out; --time {ARROW_INDEX} would "
    "take it for the time"
)


class IndexColumn(NamedTuple):
    """A first column that is left out.

    start   the number in the first row; None if the numbers are not checked
    """

    start: int | None
    note: str


def is_asked_for(name: str, options: Options) -> bool:
    """Whether an option names the column."""
    return name in {options.id, options.time, *(options.target or ()), *(options.features or ())}


def find_index(name: str, cells: Sequence[str], options: Options) -> IndexColumn | None:
    """Whether the first column of a table in text is an index; None if it is data.

    It has no name, or the one that pandas gives it, and counts 0, 1, 2, ... or 1, 2, 3, ... In a
    file that is read like another the numbers may be any: they are those of other rows.
    name: that of the column; cells: its first ones.
    """
    if name not in ("", UNNAMED) or is_asked_for(UNNAMED, options):
        return None
    if options.use != "train":
        return IndexColumn(None, OTHER_NOTE)
    for start in (0, 1):
        if all(cell.strip() == str(start + i) for i, cell in enumerate(cells)):
            return IndexColumn(start, TEXT_NOTE)
    return None

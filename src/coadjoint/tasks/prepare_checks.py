"""What `prepare` refuses of tables that train would refuse, or read otherwise, as a whole."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..errors import DataError, one_line
from .chunks import ChunkedTable
from .files.sheet import Sheet


class TargetGaps:
    """Counts the targets of a sequence, whose rows come in several parts.

    A sequence may have its target in every row, in a single one, or nowhere. Otherwise some are
    missing.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin another sequence."""
        self.given = 0
        self.missing = 0
        self.place = ""  # of the first that is missing

    def add(self, sheet: Sheet, y: np.ndarray, rows: slice) -> None:
        """Look at targets y [n, k] of rows of a sheet; missing are NaN, or labels below 0."""
        lacks = y < 0 if y.dtype.kind == "i" else np.isnan(y)
        gaps = np.argwhere(lacks)
        if len(gaps) and not self.missing:
            row, column = gaps[0].tolist()
            self.place = sheet.place(rows.start + row, sheet.targets[column])
        count = int(lacks.any(1).sum())
        self.missing += count
        self.given += len(y) - count

    def refuse(self, name: str) -> None:
        """Refuse a sequence that lacks some of its targets."""
        if self.given > 1 and self.missing:
            raise DataError(
                f"{self.place}: the target is missing, and {self.given} other rows of sequence "
                f"'{one_line(name)}' have one. Fill it in, or pass --missing drop|mask."
            )


def refuse_new_columns(table: ChunkedTable, known: Collection[str], first: str) -> None:
    """Refuse a column that the first table does not have; first, known: its name and columns."""
    new = [name for name in table.names if name not in known]
    if new:
        raise DataError(
            f"{table.source.path} column '{one_line(new[0])}': {one_line(first)}, the first table, "
            "has no such column. Remove it, or name the inputs: --features a,b."
        )


def refuse_other_form(table: ChunkedTable, first: Sheet, name: str) -> None:
    """Refuse arrays after a table, a table after arrays, and arrays of other widths than the first.

    first, name: the first file, and what it is called.
    """
    if first.has_names == table.has_names:
        same = table.has_names or (table.roles.features, table.roles.targets) == (
            first.features,
            first.targets,
        )
        if same:
            return
        raise DataError(
            f"{table.source.path} has {len(table.roles.features)} features and "
            f"{len(table.roles.targets)} targets; {one_line(name)}, the first file, has "
            f"{len(first.features)} and {len(first.targets)}. Expected the same."
        )
    kinds = ("arrays", "a table")
    raise DataError(
        f"{table.source.path} holds {kinds[table.has_names]} and {one_line(name)}, the first file, "
        f"{kinds[first.has_names]}. Prepare them one by one."
    )

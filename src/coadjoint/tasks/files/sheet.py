"""The contents of a data file and how to read it.

Sheet     the sequences of a file, one after the other
Options   how a file is read
Problems  what is wrong with a file
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import numpy as np

from ...errors import ConfigError, DataError, one_line
from .dates import ORDERS, months_of
from .texts import take_texts

MISSING = ("refuse", "drop", "ffill", "mask")
KINDS = ("classify", "regress", "next")
ROWS = ("steps", "samples")
CELLS_LISTED = 5  # problems listed for one column
DAY = 86_400e6  # microseconds
ROWS_LOOKED_AT = 1 << 16  # at a time
LINES_LISTED = 20  # problems listed for one file
EVEN_OUT = "Resample to a regular step"


def quote_names(names: Sequence[object], limit: int = 12) -> str:
    """Names in quotes, the first `limit` of them: "'a', 'b' and 3 more"."""
    text = ", ".join(f"'{one_line(name)}'" for name in names[:limit])
    if len(names) > limit:
        text += f" and {len(names) - limit:,} more"
    return text


@dataclass(frozen=True)
class Options:
    """How files are read.

    id, time     a column; None looks for one called id, or for one called time or timestamp, or
                 date, datetime or ds if it holds dates; "" means none
    target       columns; None looks for target, label or class
    features     columns; None takes every column without another role
    kind         "classify", "regress" or "next"; None decides by the labels, if they are words
    at           "last" (one target per sequence) or "every" (one per step); None if the file
                 leaves no choice
    sep, decimal, thousands, header
                 the format of a text table; sep None is a tab for .tsv and a comma otherwise
    dates        "day-first" or "month-first", if dates are written as 01/02/2024; None asks the
                 column
    categorical  columns of words that are features; ("auto",) takes every column of words
    missing      "refuse", "drop", "ffill" or "mask"
    rows         what a row of a table, or the first axis of an array, counts: "steps" of
                 sequences, or "samples" without time
    max_bytes    the largest size of a file, unpacked
    wide         whether a row of a table is a whole sequence, with a column for each step
    steps        the columns of the steps of a wide table, if it is read like another
    ahead        (column, option) of what is predicted or known ahead, for messages
    use          what the file is for: "train"; "held-out", with the columns of the training file;
                 or "predict", with all settings of a trained model. Messages advise accordingly.
    """

    id: str | None = None
    time: str | None = None
    target: tuple[str, ...] | None = None
    features: tuple[str, ...] | None = None
    kind: str | None = None
    at: str | None = None
    sep: str | None = None
    decimal: str = "."
    thousands: str = ""
    header: bool = True
    dates: str | None = None
    categorical: tuple[str, ...] = ()
    missing: str = "refuse"
    max_bytes: int = 4 << 30
    rows: str = "steps"
    wide: bool = False
    steps: Sequence[str] | None = None
    ahead: tuple[tuple[str, str], ...] = ()
    use: str = "train"

    def advise(self, at_training: str, at_prediction: str) -> str:
        """The advice that fits the use of the file: `predict` has only flags for reading it."""
        return at_prediction if self.use == "predict" else at_training

    @property
    def ways_to_fill(self) -> str:
        """What may be done with missing values in a file to predict from, as a flag's value."""
        return "drop|ffill" if self.rows == "steps" else "drop"

    def __post_init__(self) -> None:
        groups_digits = self.thousands in ("", ",", ".", " ", "'")
        positive = type(self.max_bytes) is int and self.max_bytes > 0
        rules = (
            ("kind", self.kind in (None, *KINDS), "classify, regress or next"),
            ("at", self.at in (None, "last", "every"), "last or every"),
            ("missing", self.missing in MISSING, ", ".join(MISSING)),
            ("sep", is_separator(self.sep), "one character such as , ; | or a tab"),
            ("decimal", self.decimal in (".", ","), "'.' or ','"),
            (
                "thousands",
                groups_digits and self.thousands != self.decimal,
                "one of , . ' or a space, and not the decimal separator",
            ),
            ("dates", self.dates in (None, *ORDERS), " or ".join(ORDERS)),
            ("max-bytes", positive, "a positive whole number"),
            ("rows", self.rows in ROWS, " or ".join(ROWS)),
        )
        for name, holds, expected in rules:
            if not holds:
                value = getattr(self, name.replace("-", "_"))
                raise ConfigError(f"--{name} must be {expected}; got {value!r}.")


def is_separator(sep: object) -> bool:
    """Whether `sep` can separate columns: None, or a character that is not part of a number."""
    if sep is None:
        return True
    if not isinstance(sep, str) or len(sep) != 1:
        return False
    return not sep.isalnum() and sep not in '"\r\n\0+-.'


class Problems:
    """The problems of one file, reported together: a summary, then one line each."""

    def __init__(self, path: str, collect_all: bool = True) -> None:
        """collect_all: report problems together; otherwise the first one is raised at once."""
        self.path = path
        self.collect_all = collect_all
        self.groups: dict[object, list[str]] = {}
        self.counts: dict[object, int] = {}

    def add(self, text: str, group: object = None, count: int = 1) -> None:
        """Add a problem. Of a group, such as a column, only the first few are listed.

        Without a group it is a group of its own; count: how many problems the text stands for.
        """
        if group is None:
            group = text
        lines = self.groups.setdefault(group, [])
        self.counts[group] = self.counts.get(group, 0) + count
        if len(lines) < CELLS_LISTED:
            lines.append(text)
        if not self.collect_all:
            raise self.error()

    def refuse(self, text: str, group: object = None) -> NoReturn:
        """Raise at once, for a problem after which nothing can be read."""
        self.add(text, group)
        raise self.error()

    def raise_if_any(self) -> None:
        """Raise one error for all problems so far."""
        if self.groups:
            raise self.error()

    def error(self) -> DataError:
        """The error that lists the problems."""
        lines = [line for group in self.groups.values() for line in group]
        total = sum(self.counts.values())
        if total == 1:
            return DataError(lines[0])
        shown = lines[:LINES_LISTED]
        summary = f"{self.path}: {total:,} problems"
        if total > len(shown):
            summary += f", of which {len(shown):,} are listed"
        return DataError("\n".join([f"{summary}:", *shown]))


@dataclass(frozen=True, eq=False)
class Sheet:
    """n sequences of a file, one after the other in N rows.

    A sample without time counts as a sequence, whatever its shape: its rows are the places after
    the first axis of the shape, and its features lie along that axis.

    features  C names; `has_names` is whether the file gives them, or they are mere positions
    u         [N, C] float64, NaN where missing
    lengths   [n];  ids [n]
    y         numbers [., k] float64 (NaN where missing) or labels [.] str ("" where missing), as
              an array or as `WordList`; or None
    y_per     "step": y has N entries; "sequence": n entries
    time      [N] int64 or float64, and `stamps` as they are written, or None
    lines     [N] the line of the file for each row; `where(line, column)` puts it in words
    columns   the columns that were taken as "id" and "time"; "stamps" if times are dates, and
              "dates" if those have their day or their month first
    categories  {feature: its words}: u holds their numbers, from 0
    shape     of a sample without time, C first: (C,), or (C, height, width) for an image; None if
              the rows are steps in time
    rows      [N] the number that each row has in the file, from 0, whatever was left out or sorted;
              None if each entry of the file is a whole sequence: see `input_rows`
    rows_by_line  whether rows are numbered in the order of their lines, and `rows` is not needed
    has_ids   whether ids that are in no column are names in the file, and not mere numbers
    layout    what the axes of an array, or the columns of a wide table, were taken for; "" for
              other tables
    steps     the columns of the time steps of a wide table; () for other files
    """

    path: str
    sha256: str
    features: tuple[str, ...]
    u: np.ndarray
    lengths: np.ndarray
    ids: list[str]
    where: Callable[[int, str], str]
    lines: np.ndarray
    targets: tuple[str, ...] = ()
    y: np.ndarray | Any = None
    y_per: str = "step"
    time: np.ndarray | None = None
    stamps: Sequence[str] | None = None
    has_names: bool = True
    columns: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shape: tuple[int, ...] | None = None
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    rows: np.ndarray | None = None
    rows_by_line: bool = False
    has_ids: bool = False
    layout: str = ""
    steps: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """What the sheet holds n of, for messages: "sequence" or "sample"."""
        return "sequence" if self.shape is None else "sample"

    @property
    def may_hold_samples(self) -> bool:
        """Whether nothing in a table says that its rows are steps in time, and not samples."""
        has_role = any(self.columns.get(role) for role in ("id", "time"))
        is_one_sequence = self.shape is None and len(self.lengths) == 1
        return is_one_sequence and self.has_names and not has_role

    @property
    def has_dates(self) -> bool:
        """Whether times are dates, in microseconds since 1970."""
        return bool(self.columns.get("stamps"))

    @cached_property
    def starts(self) -> np.ndarray:
        """The first row of each sequence, [n]."""
        return np.asarray(np.cumsum(self.lengths) - self.lengths)

    @property
    def input_rows(self) -> np.ndarray:
        """The row of the file that each row comes from, [N], from 0.

        A row of a table; or the entry along the first axis of an array of sequences or samples.
        """
        if self.rows is not None:
            return self.rows
        if self.rows_by_line:
            return number_rows(self.lines)
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @property
    def id_column(self) -> str:
        """The name of the ids that the file gives: that of their column; "" if it gives none."""
        return self.columns.get("id", "") or ("id" if self.has_ids else "")

    def place(self, row: int | np.integer, column: str) -> str:
        """The line and column of a value, in words, for an error."""
        return self.where(int(self.lines[row]), column)

    def take(self, keep: np.ndarray) -> Sheet:
        """The rows where `keep` [N] is true. A sequence may end up empty."""
        y = self.y
        if y is not None and self.y_per == "step":
            y = y[keep]
        time = self.time
        if time is not None:
            time = time[keep]
        stamps = self.stamps
        if stamps is not None:
            stamps = take_texts(stamps, np.flatnonzero(keep))
        return replace(
            self,
            u=self.u[keep],
            lengths=np.add.reduceat(keep.astype(np.int64), self.starts),
            lines=self.lines[keep],
            rows=self.input_rows[keep],
            rows_by_line=False,
            y=y,
            time=time,
            stamps=stamps,
        )

    def take_whole(self, keep: np.ndarray) -> Sheet:
        """The sequences where `keep` [n] is true, with all their rows."""
        rows = self.take(np.repeat(keep, self.lengths))
        y = rows.y
        if y is not None and self.y_per == "sequence":
            y = y[keep]
        ids = [name for name, kept in zip(self.ids, keep, strict=True) if kept]
        return replace(rows, lengths=self.lengths[keep], ids=ids, y=y)

    def describe_uneven_step(
        self, advice: str = f"{EVEN_OUT}, or pass --irregular allow."
    ) -> str | None:
        """The first time step that differs from the usual one by more than 1%, in words.

        The usual time step is the median. None if all are even. advice: what to do, in sentences.
        """
        if self.time is None:
            return None
        if has_one_step(self.time, self.starts):
            return None
        inside = np.ones(len(self.time), bool)  # rows with a row before them in their sequence
        inside[self.starts] = False
        rows = np.flatnonzero(inside)
        if not len(rows):
            return None
        time = self.time
        months = months_of(time) if self.has_dates else None
        if months is not None:  # even in months, if not in days
            time = months
        steps = (time[rows] - time[rows - 1]).astype(np.float64)
        usual = float(np.median(steps))
        # A difference of two large times is only as exact as the times are.
        rounding = 8 * np.finfo(np.float64).eps * float(np.abs(time.astype(np.float64)).max())
        odd = np.flatnonzero(np.abs(steps - usual) > 0.01 * usual + rounding)
        if not len(odd):
            return None
        size, unit = 1.0, ""
        if months is not None:
            unit = " months"
        elif self.has_dates and usual >= DAY:
            size, unit = DAY, " d"
        elif self.has_dates:
            size, unit = 1e6, " s"  # dates are in microseconds
        first = odd[0]
        return (
            f"{self.place(rows[first], self.columns['time'])}: the time step is "
            f"{steps[first] / size:g}{unit} and the usual one is {usual / size:g}{unit} "
            f"({len(odd):,} of {len(steps):,} steps differ). {advice}"
        )


def number_rows(lines: np.ndarray) -> np.ndarray:
    """The number of each row in its file, from 0, in whatever order the rows are now.

    lines: the line of each. Blank lines and line breaks within cells do not count.
    """
    if (lines[1:] > lines[:-1]).all():
        return np.arange(len(lines))
    return np.unique(lines, return_inverse=True)[1].reshape(-1)


def has_one_step(time: np.ndarray, starts: np.ndarray) -> bool:
    """Whether all steps of whole times are the same, which needs little memory to find out.

    time [N]: those of sequences one after the other, which begin at the rows `starts`.
    """
    if time.dtype.kind != "i":
        return False
    known: set[int] = set()
    for begin in range(1, len(time), ROWS_LOOKED_AT):
        end = min(begin + ROWS_LOOKED_AT, len(time))
        inside = np.ones(end - begin, bool)
        of_block = starts[np.searchsorted(starts, begin) : np.searchsorted(starts, end)]
        inside[of_block - begin] = False
        steps = time[begin:end][inside] - time[begin - 1 : end - 1][inside]
        known.update(np.unique(steps).tolist())
        if len(known) > 1:
            return False
    return True


def refuse_bad_values(sheet: Sheet, options: Options, problems: Problems) -> Sheet:
    """The sheet, unless values are infinite, or missing and `options.missing` is "refuse"."""
    for j, name in enumerate(sheet.features):
        column = sheet.u[:, j]
        for row in np.flatnonzero(np.isinf(column)):
            place = sheet.place(row, name)
            problems.add(f"{place}: the value is infinite. Fix it.", ("inf", j))
        gaps = np.flatnonzero(np.isnan(column))
        if len(gaps) == len(column) and options.missing != "mask":
            advice = options.advise(
                "Leave the column out with --features.", "Fill it in: the model needs it."
            )
            problems.add(
                f"{sheet.path} column '{one_line(name)}': every value is missing. {advice}"
            )
        elif len(gaps) and options.missing == "refuse":
            # The places without the column, which the message names once.
            places = [sheet.place(row, name).split(" column ")[0] for row in gaps[:CELLS_LISTED]]
            advice = options.advise(
                "Fill them in, or pass --missing drop|ffill|mask.",
                f"Fill them in, or pass --missing {options.ways_to_fill}.",
            )
            count = f"{len(gaps):,} of {len(column):,} values"
            problems.add(
                f"{sheet.place(gaps[0], name)}: {count} are missing, the first at "
                f"{', '.join(places)}. {advice}"
            )
    if sheet.y is not None and sheet.y.dtype.kind == "f":
        for index, k in np.argwhere(np.isinf(sheet.y)):
            row = sheet.starts[index] if sheet.y_per == "sequence" else index
            place = sheet.place(row, sheet.targets[k])
            problems.add(f"{place}: the target is infinite. Fix it.")
    problems.raise_if_any()
    return sheet

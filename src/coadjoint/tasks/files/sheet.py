"""Recording: what a file holds, as sequences one after the other; Options: how it is read; Problems: why it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NoReturn

import numpy as np

from ...errors import ConfigError, DataError, one_line

MISSING = ("refuse", "drop", "ffill", "mask")
KINDS = ("classify", "regress", "next")
CELLS_LISTED, LINES_LISTED = 5, 20  # cells listed for one column, lines listed for one file


def quote_names(names: Sequence[object], limit: int = 12) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(f"'{one_line(n)}'" for n in names[:limit]) + more


@dataclass(frozen=True)
class Options:
    """How files are read.

    id, time            a column; None looks for one called id, or time or timestamp; "" means there is none
    target, features    columns; None looks for target, label or class, and takes every other column as a feature
    kind                "classify", "regress", "next", or None if the labels are words
    at                  "last" (one target for a sequence), "every" (one for each step), or None if the file leaves no choice
    sep, decimal, thousands, header    the text of a table; sep None is a tab for .tsv and a comma otherwise
    missing             "refuse", "drop", "ffill" or "mask"
    max_bytes           the most that a file may hold, unpacked
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
    missing: str = "refuse"
    max_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        rules = (
            ("kind", self.kind in (None, *KINDS), "classify, regress or next"),
            ("at", self.at in (None, "last", "every"), "last or every"),
            ("missing", self.missing in MISSING, ", ".join(MISSING)),
            ("sep", self.sep is None or self._character(self.sep), "one character such as , ; | or a tab"),
            ("decimal", self.decimal in (".", ","), "'.' or ','"),
            ("thousands", self.thousands in ("", ",", ".", " ", "'") and self.thousands != self.decimal, "one of , . ' or a space, and not the decimal sign"),
            ("max-bytes", type(self.max_bytes) is int and self.max_bytes > 0, "a positive whole number"),
        )  # fmt: skip
        for name, good, expected in rules:
            if not good:
                raise ConfigError(
                    f"--{name} must be {expected}; got {getattr(self, name.replace('-', '_'))!r}."
                )

    @staticmethod
    def _character(sep: str) -> bool:
        return (
            isinstance(sep, str) and len(sep) == 1 and not sep.isalnum() and sep not in '"\r\n\0+-.'
        )


class Problems:
    """What is wrong with one file, told together: a summary, then one line each; the first alone, if not collect_all."""

    def __init__(self, path: str, collect_all: bool = True) -> None:
        self.path, self.collect_all = path, collect_all
        self.groups: dict[object, list[str]] = {}
        self.counts: dict[object, int] = {}

    def add(self, text: str, group: object = None, count: int = 1) -> None:
        """One problem. Of a group (a column, say) the first few are listed and the others counted."""
        group = text if group is None else group
        lines = self.groups.setdefault(group, [])
        self.counts[group] = self.counts.get(group, 0) + count
        if len(lines) < CELLS_LISTED:
            lines.append(text)
        if not self.collect_all:
            raise self.error()

    def refuse(self, text: str, group: object = None) -> NoReturn:
        """A problem that nothing can be read beyond."""
        self.add(text, group)
        raise self.error()

    def raise_if_any(self) -> None:
        if self.groups:
            raise self.error()

    def error(self) -> DataError:
        lines = [line for group in self.groups.values() for line in group]
        total = sum(self.counts.values())
        if total == 1:
            return DataError(lines[0])
        first = f"{self.path}: {total} problems" + (f", of which {min(len(lines), LINES_LISTED)} are listed:" if total > len(lines[:LINES_LISTED]) else ":")  # fmt: skip
        return DataError("\n".join([first, *lines[:LINES_LISTED]]))


@dataclass(frozen=True, eq=False)
class Sheet:
    """n sequences, one after the other in N rows.

    features  C names; `named` is whether the file gives them, or they are mere positions
    u         [N, C] float64, NaN where missing
    lengths   [n];  ids [n]
    y         numbers [., k] float64 (NaN where missing) or labels [.] str ("" where missing), or None
    per       "step": y has N entries; "sequence": n entries
    time      [N] int64 or float64, and `stamps` as they are written, or None
    lines     [N] where each row stands in the file: `where(line, column)` says it in words
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
    y: np.ndarray | None = None
    y_per: str = "step"
    time: np.ndarray | None = None
    stamps: list[str] | None = None
    has_names: bool = True
    columns: dict[str, str] = field(
        default_factory=dict
    )  # "id", "time" -> the column that was taken
    notes: tuple[str, ...] = ()

    @cached_property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths) - self.lengths

    def place(self, row: int | np.integer, column: str) -> str:
        return self.where(int(self.lines[row]), column)

    def take(self, keep: np.ndarray) -> Sheet:
        """The rows where `keep` [N] is true. A sequence may end up empty."""
        of_step = lambda v: v[keep] if v is not None and self.y_per == "step" else v
        return replace(
            self,
            u=self.u[keep],
            lengths=np.add.reduceat(keep.astype(np.int64), self.starts),
            lines=self.lines[keep],
            y=of_step(self.y),
            time=None if self.time is None else self.time[keep],
            stamps=None
            if self.stamps is None
            else [s for s, k in zip(self.stamps, keep, strict=True) if k],
        )

    def describe_uneven_step(self) -> str | None:
        """The first row whose time step differs by more than 1% from the usual one (the median), in words."""
        if self.time is None:
            return None
        inside = np.ones(len(self.time), bool)
        inside[self.starts] = False
        rows = np.flatnonzero(inside)
        if not len(rows):
            return None
        steps = (self.time[rows] - self.time[rows - 1]).astype(np.float64)
        usual = float(np.median(steps))
        rounding = 8 * np.finfo(np.float64).eps * float(np.abs(self.time.astype(np.float64)).max())
        odd = np.flatnonzero(np.abs(steps - usual) > 0.01 * usual + rounding)
        if not len(odd):
            return None
        second = 1e6 if self.columns.get("stamps") else 1.0
        unit = " s" if self.columns.get("stamps") else ""
        return (
            f"{self.place(rows[odd[0]], self.columns['time'])}: the time step is {steps[odd[0]] / second:g}{unit} and the usual one is "
            f"{usual / second:g}{unit} ({len(odd)} of {len(steps)} steps differ). Resample to a regular step, or pass --irregular allow."
        )


def refuse_bad_values(recording: Sheet, options: Options, problems: Problems) -> Sheet:
    """Refuse what is infinite, and what is missing unless an option says what to do about it."""
    u = recording.u
    for j, name in enumerate(recording.features):
        column = u[:, j]
        for row in np.flatnonzero(np.isinf(column)):
            problems.add(
                f"{recording.place(row, name)}: the value is infinite, not finite. Fix the value.",
                ("inf", j),
            )
        gaps = np.flatnonzero(np.isnan(column))
        if len(gaps) == len(column) and options.missing != "mask":
            problems.add(
                f"{recording.path} column '{one_line(name)}': every value is missing. Leave the column out with --features."
            )
        elif len(gaps) and options.missing == "refuse":
            first = ", ".join(
                recording.place(row, name).split(" column ")[0] for row in gaps[:CELLS_LISTED]
            )
            problems.add(
                f"{recording.place(gaps[0], name)}: {len(gaps)} of {len(column)} values are missing, the first at {first}. "
                f"Fill them in, or pass --missing drop|ffill|mask.",
            )
    if recording.y is not None and recording.y.dtype.kind == "f":
        for row, k in np.argwhere(np.isinf(recording.y)):
            where = recording.starts[row] if recording.y_per == "sequence" else row
            problems.add(
                f"{recording.place(where, recording.targets[k])}: the target is infinite, not finite. Fix the value."
            )
    problems.raise_if_any()
    return recording

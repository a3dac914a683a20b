"""Streams: the steps (u_t, y_t) of a file, row by row. Only a small part of it is in memory.

Numbers are standardised by the rows before: z_t = (x_t - mean_{t-1}) / std_{t-1} (see scaling).
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn, TypedDict

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError, DataError, KindError, StorageError, brief, check_path, one_line
from ..description import ColumnNames, Description, PathLike
from ..preparation import column_names, labels_of
from .index import TEXT_NOTE
from .parsing import is_number, number_in_cell
from .rows import Cells, open_rows
from .scaling import RunningScale, ScaleState
from .sheet import Options, Problems, quote_names
from .table import assign_roles

Pair = tuple[Tensor, Tensor]  # (u_t, y_t)
MOST_CLASSES = 10_000  # that a first pass over a file collects


class StreamState(TypedDict):
    """A File as a checkpoint holds it: its place, and what the next step depends on."""

    rows: int  # taken so far
    sha256: str  # a running hash of these rows
    id: str  # of the last row
    before: list[float] | None  # the last row, gaps filled
    last: list[float] | None  # the last row, standardised
    scale: ScaleState
    target_scale: ScaleState
    counts: list[float]  # of the classes so far


class File:
    """The steps of a file: iterate for (u_t, y_t), or None where another sequence begins.

    kind "regress"    y_t is the target column of the row, in units of its standard deviation so far
    kind "classify"   y_t is the index of its label in `classes`; if these are not given, a first
                      pass over the file finds them
    kind "next"       y_t is the next row
    missing           "refuse" a blank cell, or "ffill" it from the row before; targets are never
                      filled in
    standardise       inputs, and targets that are numbers, by the mean and variance of the rows
                      before
    A sequence begins where the id changes. The other arguments are those of [data] in a settings
    file. `notes` say what was chosen. `state` is the place in the file and all that the next step
    depends on; a restored stream reads the rows so far again, and refuses if they differ.
    """

    readout = "every"

    def __init__(
        self,
        path: PathLike,
        *,
        target: ColumnNames = None,
        features: ColumnNames = None,
        kind: str | None = None,
        classes: Sequence[str] | None = None,
        id: str | None = None,
        time: str | None = None,
        standardise: bool = True,
        missing: str = "refuse",
        sep: str | None = None,
        decimal: str = ".",
        thousands: str = "",
        header: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        check_path("path", path)
        if missing not in ("refuse", "ffill"):
            raise ConfigError(
                f"--missing must be refuse or ffill for a stream; got {brief(missing)}."
            )
        if dtype not in (torch.float32, torch.float64):
            raise KindError(f"dtype must be torch.float32 or torch.float64; got {brief(dtype)}.")
        check_columns("target", target)
        check_columns("features", features)
        self.options = Options(
            id=id,
            time=time,
            target=column_names(target),
            features=column_names(features),
            kind=kind,
            at="every",
            sep=sep,
            decimal=decimal,
            thousands=thousands,
            header=header,
            missing=missing,
        )
        self.path = os.fspath(path)
        self.dtype = dtype
        self.name = "stream" if self.path == "-" else Path(self.path).name.split(".")[0]
        self.source = open_rows(self.path, self.options)
        names = getattr(self.source, "data_names", self.source.names)  # without an index
        problems = Problems(self.source.path)
        self.roles = assign_roles(names, self.options, problems, self.source.holds_dates)
        self.index = {name: k for k, name in enumerate(self.source.names)}
        self.notes = list(self.roles.notes)
        if getattr(self.source, "index", None) is not None:
            self.notes.insert(0, TEXT_NOTE)
        self.rows = iter(self.source)
        first = next(self.rows, None)
        if first is None:
            raise DataError(f"{self.source.path} holds no rows.")
        self.waiting: tuple[int, Cells] | None = first  # read already, not taken yet
        self.kind = kind or self.guess_kind(first[1], classes)
        self.labels = self.find_classes(classes) if self.kind == "classify" else []
        self.code = {label: k for k, label in enumerate(self.labels)}
        if classes is not None and self.kind != "classify":
            raise ConfigError(f"--classes applies to --kind classify, not to --kind {self.kind}.")
        if self.kind == "classify" and len(self.roles.targets) > 1:
            raise DataError(
                f"{self.source.path}: labels must be in one column; --target names "
                f"{quote_names(self.roles.targets)}."
            )
        self.inputs = len(self.roles.features)
        self.scale = RunningScale(self.inputs, standardise)
        if self.kind == "classify":
            self.outputs = len(self.labels)
            self.output = "softmax"
            self.loss = "cross-entropy"
            self.metric = "accuracy"
            self.target_scale = RunningScale(self.outputs, False)
        else:
            self.outputs = self.inputs if self.kind == "next" else len(self.roles.targets)
            self.output = "identity"
            self.loss = "squared"
            self.metric = "mse"
            self.target_scale = self.scale
            if self.kind == "regress":
                self.target_scale = RunningScale(self.outputs, standardise)
        self.counts = np.zeros(self.outputs)  # of the classes so far
        self.count = 0  # rows taken
        self.hash = b""  # of these rows
        self.skip = 0  # rows that a restored stream reads again
        self.expected_hash = ""  # of those rows
        self.last_id = ""
        self.before: np.ndarray | None = None  # the last row, gaps filled
        self.last: np.ndarray | None = None  # the last row, standardised
        self.score_latest: Callable[[Tensor], dict[str, float]]
        self.check_first_row(self.source.place(first[0]), first[1])

    def check_first_row(self, place: str, cells: Cells) -> None:
        """Refuse a first row that cannot be used, before anything begins."""
        self.fill_missing(place, self.numbers(place, cells, self.roles.features), None)
        if self.kind == "regress":
            self.numbers(place, cells, self.roles.targets)
        elif self.kind == "classify":
            self.label_index(place, cells)

    def guess_kind(self, cells: Cells, classes: Sequence[str] | None) -> str:
        """The kind: "regress" if the first targets are numbers and no classes are given."""
        targets = [cells[self.index[name]] for name in self.roles.targets]
        words = [t for t in targets if isinstance(t, str) and not is_number(t, self.options)]
        kind = "classify"
        if classes is not None:
            why = "classes are given"
        elif words:
            why = "the first target is a word"
        else:
            kind = "regress"
            why = "the first target is a number"
        self.notes.append(f"kind: {kind} ({why})")
        return kind

    def find_classes(self, given: Sequence[str] | None) -> list[str]:
        """The classes that are given, or those that a first pass over the file finds."""
        if given is not None:
            labels = [str(label).strip() for label in given]
            if len(set(labels)) != len(labels) or len(labels) < 2 or not all(labels):
                raise ConfigError(
                    "--classes must be at least two different labels; got "
                    f"{','.join(labels) or 'none'}."
                )
            return labels
        if self.path == "-":
            raise ConfigError(
                "the classes of standard input cannot be found beforehand: give --classes a,b,c."
            )
        target = self.roles.targets[0]
        where = f"{self.source.path} column '{one_line(target)}'"
        words: set[str] = set()
        with closing(open_rows(self.path, self.options)) as rows:
            for _, cells in rows:
                words.add(label_text(cells[self.index[target]]))
                if len(words) > MOST_CLASSES:
                    raise DataError(
                        f"{where}: more than {MOST_CLASSES:,} classes. Pass --kind regress."
                    )
        words.discard("")
        labels = labels_of(words, where)
        self.notes.append(f"{len(labels)} classes, found in a first pass: {quote_names(labels)}")
        return labels

    def __iter__(self) -> Iterator[Pair | None]:
        """Take the rows; of a restored stream, those so far are only compared by their hash."""
        while (row := self.waiting or next(self.rows, None)) is not None:
            self.waiting = None
            number, cells = row
            is_known = self.count < self.skip  # a restored stream has learned from this row
            steps = [] if is_known else self.steps_from_row(self.source.place(number), cells)
            self.count += 1  # only now: a row that is refused was not taken
            text = repr(cells).encode("utf-8", "surrogatepass")
            self.hash = hashlib.sha256(self.hash + text).digest()
            if is_known and self.count == self.skip and self.hash.hex() != self.expected_hash:
                raise self.changed_rows_error()
            yield from steps
        if self.count < self.skip:
            raise self.changed_rows_error()

    def changed_rows_error(self) -> StorageError:
        """The error of a restored stream whose first rows are not the same."""
        return StorageError(
            f"{self.source.path}: its first {self.skip:,} rows differ from those that this run has "
            "learned from. Give the same stream from its beginning, or start a new run."
        )

    def steps_from_row(self, place: str, cells: Cells) -> list[Pair | None]:
        """The step that a row gives, and before it None if another sequence begins.

        To predict the next row, the first row of a sequence gives no step. place: the row in words.
        The row is scaled and scored by the rows before it, and only then counts among them.
        """
        row_id = label_text(cells[self.index[self.roles.id]]) if self.roles.id else ""
        begins = self.count > 0 and row_id != self.last_id
        before = self.before
        last = self.last
        if begins:
            before = None
            last = None
        x = self.fill_missing(place, self.numbers(place, cells, self.roles.features), before)
        z = self.scale(x)
        u: np.ndarray | None = z
        if self.kind == "classify":
            k = self.label_index(place, cells)
            y = torch.tensor(k)
            # The most frequent class so far is the baseline.
            usual = int(self.counts.argmax()) if self.counts.any() else None
            self.score_latest = functools.partial(classification_scores, k, usual)
            self.counts[k] += 1
        else:
            t = x  # the target, in its own units
            if self.kind == "next":
                u = last  # None in the first row of a sequence
            else:
                t = self.numbers(place, cells, self.roles.targets)
                self.refuse_missing(
                    place, t, self.roles.targets, "Targets are never filled in. Fix it."
                )
            scale = self.target_scale
            y = torch.tensor(scale(t), dtype=self.dtype)
            self.score_latest = functools.partial(regression_scores, t, scale.centre, scale.std)
            if self.kind == "regress":  # else it is the scale of the inputs, which is next
                scale.add(t)
        self.scale.add(x)
        self.last_id = row_id
        self.before = x
        self.last = z
        steps: list[Pair | None] = []
        if begins:
            steps.append(None)
        if u is not None:
            steps.append((torch.tensor(u, dtype=self.dtype), y))
        return steps

    def numbers(self, place: str, cells: Cells, names: Sequence[str]) -> np.ndarray:
        """The numbers of a row in these columns, NaN where missing. place: the row in words."""
        values = np.empty(len(names))
        for j, name in enumerate(names):
            value = number_in_cell(cells[self.index[name]], self.options)
            if isinstance(value, str):
                complaint = value.replace("drop|ffill|mask", "ffill")  # what a stream can do
                raise DataError(f"{place} column '{one_line(name)}': {complaint}")
            values[j] = value
        return values

    def fill_missing(self, place: str, x: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        """The row x with its gaps filled from the row before, if that is allowed."""
        if not np.isnan(x).any():
            return x
        if self.options.missing == "refuse":
            self.refuse_gap(place, x, self.roles.features, "Fill it in, or pass --missing ffill.")
        if before is None:
            advice = "There is no row before it to fill it from. Fix it."
            self.refuse_gap(place, x, self.roles.features, advice)
        return np.where(np.isnan(x), before, x)

    def refuse_missing(self, place: str, x: np.ndarray, names: Sequence[str], advice: str) -> None:
        """Refuse a row with a missing value."""
        if np.isnan(x).any():
            self.refuse_gap(place, x, names, advice)

    def refuse_gap(self, place: str, x: np.ndarray, names: Sequence[str], advice: str) -> NoReturn:
        """Raise the error about the first missing value of a row."""
        name = names[int(np.isnan(x).argmax())]
        raise DataError(f"{place} column '{one_line(name)}': the value is missing. {advice}")

    def label_index(self, place: str, cells: Cells) -> int:
        """The index of a row's label among the classes."""
        label = label_text(cells[self.index[self.roles.targets[0]]])
        if label not in self.code:
            complaint = "the label is missing"
            if label:
                known = quote_names(self.labels)
                complaint = f"'{one_line(label)}' is not one of the classes {known}"
            column = one_line(self.roles.targets[0])
            raise DataError(
                f"{place} column '{column}': {complaint}. Fix it, or add it to --classes."
            )
        return self.code[label]

    def score(self, a: Tensor) -> dict[str, float]:
        """The scores of the answer a to the latest step, in the units of the target.

        "baseline" is the score of the mean of the rows before, or of their most frequent class.
        """
        return self.score_latest(a)

    def state(self) -> StreamState:
        """The place in the file and all that the next step depends on."""
        return {
            "rows": self.count,
            "sha256": self.hash.hex(),
            "id": self.last_id,
            "before": None if self.before is None else self.before.tolist(),
            "last": None if self.last is None else self.last.tolist(),
            "scale": self.scale.state(),
            "target_scale": self.target_scale.state(),
            "counts": self.counts.tolist(),
        }

    def complaint(self, place: StreamState) -> str | None:
        """What is wrong with a state that was read from a file; None if it can be restored."""
        targets = len(self.target_scale.mean)
        lengths = {
            "before": (place["before"], self.inputs),
            "last": (place["last"], self.inputs),
            "scale.mean": (place["scale"]["mean"], self.inputs),
            "scale.M": (place["scale"]["M"], self.inputs),
            "target_scale.mean": (place["target_scale"]["mean"], targets),
            "target_scale.M": (place["target_scale"]["M"], targets),
            "counts": (place["counts"], self.outputs),
        }
        for key, (values, expected) in lengths.items():
            if values is not None and len(values) != expected:
                return f"'stream.{key}' has {len(values)} entries; expected {expected}"
        return None

    def restore(self, state: StreamState) -> None:
        """Continue after the rows of a state: they are read again, and must be the same."""
        self.skip = state["rows"]
        self.expected_hash = state["sha256"]
        self.last_id = state["id"]
        self.before = None if state["before"] is None else np.array(state["before"])
        self.last = None if state["last"] is None else np.array(state["last"])
        self.counts = np.array(state["counts"])
        self.scale.restore(state["scale"])
        self.target_scale.restore(state["target_scale"])

    def describe(self) -> dict[str, object]:
        """What `coadjoint predict` needs to know of the data, with the means so far."""
        target_mean: list[float] = []
        target_std: list[float] = []
        if self.kind != "classify":
            target_mean = self.target_scale.centre.tolist()
            target_std = nonzero_std(self.target_scale)
        options = self.options
        description = Description(
            kind=self.kind,
            at="every",
            features=list(self.roles.features),
            targets=[] if self.kind == "next" else list(self.roles.targets),
            labels=self.labels,
            mean=self.scale.centre.tolist(),
            std=nonzero_std(self.scale),
            target_mean=target_mean,
            target_std=target_std,
            masked=[],
            named=self.source.has_names,
            columns={"id": self.roles.id, "time": self.roles.time},
            window=None,
            dtype=str(self.dtype).removeprefix("torch."),
            reading={
                "sep": options.sep,
                "decimal": options.decimal,
                "thousands": options.thousands,
                "header": options.header,
                "missing": options.missing,
                "irregular": "allow",
            },
        )
        return asdict(description)

    def close(self) -> None:
        """Close the file."""
        self.source.close()


def check_columns(name: str, columns: object) -> None:
    """Refuse an argument that is neither the name of a column nor a list of names."""
    if columns is None or isinstance(columns, str):
        return
    if isinstance(columns, list | tuple) and all(isinstance(column, str) for column in columns):
        return
    raise KindError(
        f"{name} must be the name of a column, or a list of them; got {brief(columns)}."
    )


def nonzero_std(scale: RunningScale) -> list[float]:
    """The standard deviations of a scale, 1 where a column has not varied."""
    return [float(x) for x in np.where(scale.std > 0, scale.std, 1.0)]


def regression_scores(
    t: np.ndarray, mean: np.ndarray, std: np.ndarray, a: Tensor
) -> dict[str, float]:
    """The errors of mean + std a at target t, and the mean's squared error as a baseline."""
    error = mean + std * a.detach().double().numpy().reshape(-1) - t
    return {
        "mse": float((error * error).mean()),
        "mae": float(np.abs(error).mean()),
        "baseline": float(((mean - t) ** 2).mean()),
    }


def classification_scores(k: int, usual: int | None, a: Tensor) -> dict[str, float]:
    """1 or 0: is a largest at class k, and is k the usual class (None: there is none yet)."""
    return {"accuracy": float(int(a.argmax()) == k), "baseline": float(usual == k)}


def label_text(cell: object) -> str:
    """A label as text; "" where missing."""
    return "" if cell is None else str(cell).strip()

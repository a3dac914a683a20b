"""Streams: the steps (u_t, y_t) of a file, one row after the other; no more than a part of it is ever in memory.

A number x_t is standardised by the rows before it: z_t = (x_t - mean_{t-1}) / std_{t-1}. What has not varied yet is 0, and
no z_t is further out than sqrt(t - 1), as no number of a sample of t is.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError, DataError, KindError, StorageError, brief, check_path, one_line
from ..description import ColumnNames, Description, PathLike
from ..preparation import column_names, labels_of
from .parsing import is_number, number_in_cell
from .rows import Cells, open_rows
from .sheet import Options, Problems, quote_names
from .table import assign_roles

Pair = tuple[Tensor, Tensor]
MOST_CLASSES = 10_000  # the most that a first pass collects


class RunningScale:
    """Mean and variance of the rows so far, [C]:

    mean_t = mean_{t-1} + (x_t - mean_{t-1}) / t,   M_t = M_{t-1} + (x_t - mean_{t-1}) (x_t - mean_t),   var_t = M_t / t"""

    def __init__(self, columns: int, on: bool) -> None:
        self.t, self.mean, self.M, self.on = 0, np.zeros(columns), np.zeros(columns), on

    @property
    def std(self) -> np.ndarray:
        return (
            np.sqrt(self.M / self.t)
            if self.on and self.t
            else np.full(len(self.M), 0.0 if self.on else 1.0)
        )

    @property
    def centre(self) -> np.ndarray:
        return self.mean * self.on

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """z_{t+1}, of the row after these."""
        if not self.on:
            return x
        std, most = self.std, math.sqrt(self.t)
        z = np.divide(x - self.mean, std, out=np.zeros_like(x), where=std > 0)
        return np.clip(z, -most, most)

    def add(self, x: np.ndarray) -> None:
        self.t += 1
        before = x - self.mean
        self.mean = self.mean + before / self.t
        self.M = self.M + before * (x - self.mean)

    def state(self) -> dict[str, Any]:
        return {"t": self.t, "mean": self.mean.tolist(), "M": self.M.tolist()}

    def restore(self, state: dict[str, Any]) -> None:
        self.t, self.mean, self.M = state["t"], np.array(state["mean"]), np.array(state["M"])


class File:
    """The steps of a file: iterate for (u_t, y_t), or None where another sequence begins (the id changes).

    kind "regress"    y_t is the target column of the row, learned in units of its standard deviation so far
    kind "classify"   y_t is the number of its label among `classes`; without them a first pass over the file finds them
    kind "next"       y_t is the next row
    missing           "refuse" a blank cell, or "ffill" it from the row before; a target is never filled in
    standardise       inputs, and targets that are numbers, by the mean and variance of the rows before
    `notes` says what was chosen. `state` is the place in the file and all that the next step depends on; a restored stream
    reads the rows that were taken again, and refuses if they are not the same. The other arguments are those of [data].
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
        for name, columns in (("target", target), ("features", features)):
            listed_ = isinstance(columns, list | tuple) and all(
                isinstance(column, str) for column in columns
            )
            if columns is not None and not isinstance(columns, str) and not listed_:
                raise KindError(
                    f"{name} must be the name of a column, or a list of them; got {brief(columns)}."
                )
        reading: dict[str, Any] = {
            "sep": sep,
            "decimal": decimal,
            "thousands": thousands,
            "header": header,
        }
        self.options = Options(
            id,
            time,
            column_names(target),
            column_names(features),
            kind,
            "every",
            missing=missing,
            **reading,
        )
        self.path, self.dtype, self.reading = os.fspath(path), dtype, reading | {"missing": missing}
        self.name = "stream" if self.path == "-" else Path(self.path).name.split(".")[0]
        self.source = open_rows(self.path, self.options)
        problems = Problems(self.source.path)
        self.of = assign_roles(self.source.names, self.options, problems)
        self.index = {name: k for k, name in enumerate(self.source.names)}
        self.notes = list(self.of.notes)
        self.rows = iter(self.source)
        self.waiting: tuple[int, Cells] | None = next(self.rows, None)
        if self.waiting is None:
            raise DataError(f"{self.source.path} holds no rows.")
        self.kind = kind or self.guessed(classes)
        self.labels = self.classes(classes) if self.kind == "classify" else []
        self.code = {label: k for k, label in enumerate(self.labels)}
        if classes is not None and self.kind != "classify":
            raise ConfigError(
                f"--classes belongs to --kind classify, and this is --kind {self.kind}."
            )
        classify = self.kind == "classify"
        if classify and len(self.of.targets) > 1:
            raise DataError(
                f"{self.source.path}: labels come in one column; --target names {quote_names(self.of.targets)}."
            )
        self.inputs = len(self.of.features)
        self.outputs = (
            len(self.labels)
            if classify
            else self.inputs
            if self.kind == "next"
            else len(self.of.targets)
        )
        self.output, self.loss = (
            ("softmax", "cross-entropy") if classify else ("identity", "squared")
        )
        self.metric = "accuracy" if classify else "mse"
        self.scale = RunningScale(self.inputs, standardise)
        self.target_scale = (
            self.scale
            if self.kind == "next"
            else RunningScale(self.outputs, standardise and not classify)
        )
        self.counts = np.zeros(self.outputs)  # of classes, so far
        self.count, self.sum, self.skip = (
            0,
            b"",
            0,
        )  # rows taken, a sum over them, rows to pass over
        self.word = ""  # the id of the row before
        self.before: np.ndarray | None = None  # it, filled
        self.last: np.ndarray | None = None  # its z, for the next one
        self.worth: Callable[[Tensor], dict[str, float]]
        self.try_first(self.source.place(self.waiting[0]), self.waiting[1])

    def try_first(self, place: str, cells: Cells) -> None:
        """A first row that cannot be used is refused before anything begins."""
        self.filled(place, self.numbers(place, cells, self.of.features), None)
        if self.kind == "regress":
            self.numbers(place, cells, self.of.targets)
        elif self.kind == "classify":
            self.label(place, cells)

    def guessed(self, classes: Sequence[str] | None) -> str:
        """Regression if the first target is a number, and no classes are given."""
        assert self.waiting is not None
        cells = [self.waiting[1][self.index[t]] for t in self.of.targets]
        words = [c for c in cells if isinstance(c, str) and not is_number(c, self.options)]
        kind = "classify" if classes is not None or words else "regress"
        why = "classes are given" if classes is not None else "the first target is " + ("a word" if words else "a number")  # fmt: skip
        self.notes.append(f"kind: {kind} ({why})")
        return kind

    def classes(self, given: Sequence[str] | None) -> list[str]:
        if given is not None:
            labels = [str(label).strip() for label in given]
            if len(set(labels)) != len(labels) or len(labels) < 2 or not all(labels):
                raise ConfigError(
                    f"--classes must be at least two different labels; got {','.join(labels) or 'none'}."
                )
            return labels
        if self.path == "-":
            raise ConfigError(
                "the classes of what is piped in cannot be found beforehand: give them, --classes a,b,c."
            )
        found: set[str] = set()
        column = self.index[self.of.targets[0]]
        with closing(open_rows(self.path, self.options)) as again:
            for _, cells in again:
                found.add(label_text(cells[column]))
                if len(found) > MOST_CLASSES:
                    raise DataError(f"{self.source.path} column '{one_line(self.of.targets[0])}': more than {MOST_CLASSES:,} classes. Pass --kind regress.")  # fmt: skip
        found.discard("")
        where = f"{self.source.path} column '{one_line(self.of.targets[0])}'"
        labels = labels_of(found, where)
        self.notes.append(f"{len(labels)} classes, found in a first pass: {quote_names(labels)}")
        return labels

    def __iter__(self) -> Iterator[Pair | None]:
        while (row := self.waiting or next(self.rows, None)) is not None:
            self.waiting = None
            passed = self.count < self.skip
            found = [] if passed else self.steps(self.source.place(row[0]), row[1])
            self.count += 1  # a row that is refused was not taken
            self.sum = hashlib.sha256(
                self.sum + repr(row[1]).encode("utf-8", "surrogatepass")
            ).digest()
            if passed and self.count == self.skip and self.sum.hex() != self.expected:
                raise self.changed()
            yield from found
        if self.count < self.skip:
            raise self.changed()

    def changed(self) -> StorageError:
        return StorageError(
            f"{self.source.path}: its first {self.skip:,} rows are not those that this run has learned from. "
            "Give the same stream from its beginning, or start a new run."
        )

    def steps(self, place: str, cells: Cells) -> list[Pair | None]:
        """What a row brings: a pair, and before it None if another sequence begins."""
        word = label_text(cells[self.index[self.of.id]]) if self.of.id else ""
        begins = self.count > 0 and word != self.word
        before, last = (None, None) if begins else (self.before, self.last)
        x = self.filled(place, self.numbers(place, cells, self.of.features), before)
        z = self.scale(x)
        if self.kind == "classify":
            k = self.label(place, cells)
            u: np.ndarray | None = z
            y = torch.tensor(k)
            self.worth = functools.partial(
                classification_scores, k, int(self.counts.argmax()) if self.counts.any() else None
            )
            self.counts[k] += 1
        else:
            t = x if self.kind == "next" else self.numbers(place, cells, self.of.targets)
            self.refuse(place, t, self.of.targets, "A target is not filled in: fix it.")
            u = last if self.kind == "next" else z
            y = torch.tensor(self.target_scale(t), dtype=self.dtype)
            self.worth = functools.partial(
                regression_scores, t, self.target_scale.centre, self.target_scale.std
            )
            if self.kind == "regress":
                self.target_scale.add(t)
        self.scale.add(x)
        self.word, self.before, self.last = word, x, z
        pair = [] if u is None else [(torch.tensor(u, dtype=self.dtype), y)]
        return [None, *pair] if begins else [*pair]

    def numbers(self, place: str, cells: Cells, names: Sequence[str]) -> np.ndarray:
        found = np.empty(len(names))
        for j, name in enumerate(names):
            value = number_in_cell(cells[self.index[name]], self.options)
            if isinstance(value, str):
                raise DataError(
                    f"{place} column '{one_line(name)}': {value.replace('drop|ffill|mask', 'ffill')}"
                )
            found[j] = value
        return found

    def filled(self, place: str, x: np.ndarray, before: np.ndarray | None) -> np.ndarray:
        if not np.isnan(x).any():
            return x
        if self.options.missing == "refuse":
            self.refuse(place, x, self.of.features, "Fill it in, or pass --missing ffill.")
        if before is None:
            self.refuse(
                place, x, self.of.features, "There is no row before it to fill it from: fix it."
            )
        return np.where(np.isnan(x), before, x)  # type: ignore[arg-type]

    def refuse(self, place: str, x: np.ndarray, names: Sequence[str], what_to_do: str) -> None:
        if np.isnan(x).any():
            name = names[int(np.isnan(x).argmax())]
            raise DataError(
                f"{place} column '{one_line(name)}': the value is missing. {what_to_do}"
            )

    def label(self, place: str, cells: Cells) -> int:
        label = label_text(cells[self.index[self.of.targets[0]]])
        if label not in self.code:
            what = (
                f"'{one_line(label)}' is none of the classes {quote_names(self.labels)}"
                if label
                else "the label is missing"
            )
            raise DataError(
                f"{place} column '{one_line(self.of.targets[0])}': {what}. Fix it, or name it in --classes."
            )
        return self.code[label]

    def score(self, a: Tensor) -> dict[str, float]:
        """What the answer a to the latest step is worth, in the target's own units; baseline: what the mean of the rows before,
        or their most frequent class, would have been."""
        return self.worth(a)

    def state(self) -> dict[str, Any]:
        plain = lambda x: None if x is None else x.tolist()
        return {
            "rows": self.count, "sha256": self.sum.hex(), "id": self.word, "before": plain(self.before), "last": plain(self.last),
            "scale": self.scale.state(), "target_scale": self.target_scale.state(), "counts": self.counts.tolist(),
        }  # fmt: skip

    def complaint(self, place: dict[str, Any]) -> str | None:
        """What is wrong with a place that was read from a file; None if it can be restored."""
        lengths = {
            "before": (place["before"], self.inputs),
            "last": (place["last"], self.inputs),
            "scale.mean": (place["scale"]["mean"], self.inputs),
            "scale.M": (place["scale"]["M"], self.inputs),
            "target_scale.mean": (place["target_scale"]["mean"], len(self.target_scale.mean)),
            "target_scale.M": (place["target_scale"]["M"], len(self.target_scale.M)),
            "counts": (place["counts"], self.outputs),
        }
        for key, (values, expected) in lengths.items():
            if values is not None and len(values) != expected:
                return f"'stream.{key}' has {len(values)} entries; expected {expected}"
        return None

    def restore(self, state: dict[str, Any]) -> None:
        """Go on after the rows that were taken: they are read again, and must be the same."""
        array = lambda x: None if x is None else np.array(x)
        self.skip, self.expected, self.word = state["rows"], state["sha256"], state["id"]
        self.before, self.last, self.counts = (
            array(state["before"]),
            array(state["last"]),
            np.array(state["counts"]),
        )
        self.scale.restore(state["scale"])
        self.target_scale.restore(state["target_scale"])

    def describe(self) -> dict[str, Any]:
        """As co.tasks.data describes its data, with the means so far: what `coadjoint predict` needs of a model."""
        mean, std = lambda s: s.centre.tolist(), lambda s: np.where(s.std > 0, s.std, 1.0).tolist()
        t_mean, t_std = (
            ([], [])
            if self.kind == "classify"
            else (mean(self.target_scale), std(self.target_scale))
        )
        targets = [] if self.kind == "next" else list(self.of.targets)
        return asdict(
            Description(
                self.kind, "every", list(self.of.features), targets, self.labels, mean(self.scale), std(self.scale), t_mean, t_std,
                [], self.source.has_names, {"id": self.of.id, "time": self.of.time}, None, str(self.dtype).removeprefix("torch."),
                self.reading | {"irregular": "allow"},
            )
        )  # fmt: skip

    def close(self) -> None:
        self.source.close()


def regression_scores(
    t: np.ndarray, mean: np.ndarray, std: np.ndarray, a: Tensor
) -> dict[str, float]:
    """Of mean + std a, and of the mean alone."""
    e = mean + std * a.detach().double().numpy().reshape(-1) - t
    return {
        "mse": float((e * e).mean()),
        "mae": float(np.abs(e).mean()),
        "baseline": float(((mean - t) ** 2).mean()),
    }


def classification_scores(k: int, usual: int | None, a: Tensor) -> dict[str, float]:
    return {"accuracy": float(int(a.argmax()) == k), "baseline": float(usual == k)}


def label_text(cell: Any) -> str:
    return "" if cell is None else str(cell).strip()

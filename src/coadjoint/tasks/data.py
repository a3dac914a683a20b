"""Data: users' own sequences as a task; Prediction: new sequences for a network that was trained on it."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import files
from ..batch import Batch
from ..errors import ConfigError, DataError, InputError, NumericalError, StorageError, shown
from .readers import Options, Recording, read
from .readers.recording import KINDS, Problems, listed
from .task import Collection, Scores, Sequences, right, rng

REAL_LABEL = re.compile(r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?|[+-]?(nan|inf)", re.ASCII)
WHOLE_LABEL = re.compile(r"[+-]?\d{1,300}", re.ASCII)
Names = str | Sequence[str] | None
Path_ = str | os.PathLike[str]


@dataclass(frozen=True)
class Description:
    """What a network must know of the data it was trained on, in plain JSON types."""

    kind: str
    at: str
    features: list[str]
    targets: list[str]
    labels: list[str]
    mean: list[float]
    std: list[float]
    target_mean: list[float]
    target_std: list[float]
    masked: list[str]  # features with an input that says "is missing"
    named: bool  # features are matched by name, not by position
    columns: dict[str, str]
    window: int | None
    dtype: str
    reading: dict[str, Any]  # sep, decimal, thousands, header, missing, irregular
    files: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: dict[str, Any]) -> Description:
        """Check a description that came with a model: it is a stranger's."""
        if not isinstance(given, dict) or {f.name for f in fields(cls)} != set(given):
            raise DataError("the model's description of its data is damaged: its keys are not those expected.")
        d = cls(**given)
        for name, fine in d.judged():
            if not fine:
                raise DataError(f"the model's description of its data is damaged: '{name}' is not what it should be.")
        return d

    def judged(self) -> Iterator[tuple[str, bool]]:
        """Each field and whether it is fine, one after the other: later ones are looked at if the earlier ones are."""
        yield "kind", isinstance(self.kind, str) and self.kind in KINDS
        yield "at", self.at in ("last", "every")
        yield "features", _words(self.features) and len(self.features) > 0 and _different(self.features)
        yield "mean", _reals(self.mean) and len(self.mean) == len(self.features)
        yield "std", _reals(self.std) and len(self.std) == len(self.features) and min(self.std) > 0
        yield "targets", _words(self.targets) and _different(self.targets)
        yield "labels", _words(self.labels) and _different(self.labels)
        yield "labels", (len(self.labels) > 1) == (self.kind == "classify")
        yield "target_mean", _reals(self.target_mean)
        yield "target_std", _reals(self.target_std) and all(s > 0 for s in self.target_std)
        yield "target_std", len(self.target_mean) == len(self.target_std)
        yield "masked", _words(self.masked) and _different(self.masked) and set(self.masked) <= set(self.features)
        yield "named", isinstance(self.named, bool)
        columns = self.columns if isinstance(self.columns, dict) else {}
        yield "columns", set(columns) == {"id", "time"} and _words(list(columns.values()))
        yield "window", self.window is None or (type(self.window) is int and self.window > 0)
        yield "dtype", self.dtype in ("float32", "float64")
        reading = self.reading if isinstance(self.reading, dict) else {"": ""}
        yield "reading", set(reading) <= READING
        for name, value in reading.items():
            kind = {"header": bool, "sep": str | None}.get(name, str)
            yield f"reading.{name}", isinstance(value, kind)


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _different(words: list[str]) -> bool:
    return len(set(words)) == len(words)


def _reals(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) in (int, float) and math.isfinite(x) for x in value)


READING = {"sep", "decimal", "thousands", "header", "missing", "irregular"}


@dataclass(frozen=True, eq=False)
class Cut:
    """A recording whose gaps are dealt with, and its pieces: (sequence, first row, row after the last)."""

    recording: Recording
    pieces: list[tuple[int, int, int]]
    notes: tuple[str, ...] = ()

    def name(self, piece: int) -> str:
        i, start, stop = self.pieces[piece]
        begin = start - int(self.recording.starts[i])
        whole = stop - start == self.recording.lengths[i]
        return self.recording.ids[i] if whole else f"{self.recording.ids[i]}[{begin}:{begin + stop - start}]"


class Data(Collection):
    """Sequences from files: classification, regression, or prediction of the next step.

    kind "classify"  labels are the sorted words of the target column; softmax and cross-entropy
    kind "regress"   one output for each target, learned in units of its standard deviation, scored in its own units
    kind "next"      u_1..u_{T-1} are inputs and u_2..u_T targets
    at "last"        one target for a sequence: that of its last row; "every": one for each row
    `notes` says what was chosen for the user: columns, rows left out, constant features.
    """

    def __init__(self, sets: dict[str, Sequences], description: Description, notes: tuple[str, ...], name: str) -> None:
        self.name, self.description, self.notes = name, description, notes
        classify = description.kind == "classify"
        self.inputs = len(description.features) + len(description.masked)
        self.outputs = len(description.labels) if classify else len(description.target_std)
        self.readout = description.at
        self.output = "softmax" if classify else "identity"
        self.loss = "cross-entropy" if classify else "squared"
        self.reduce = "mean" if self.readout == "every" else "sum"
        self.metric, self.lower = ("accuracy", False) if classify else ("mse", True)
        super().__init__(sets)

    def describe(self) -> dict[str, Any]:
        """Plain JSON types, for the metadata of a model; `Data.for_prediction` reads it back."""
        return asdict(self.description)

    @classmethod
    def read(
        cls,
        train: Path_,
        *,
        valid: Path_ | None = None,
        test: Path_ | None = None,
        split: Sequence[float] = (0.8, 0.1, 0.1),
        seed: int = 0,
        id: str | None = None,
        time: str | None = None,
        target: Names = None,
        features: Names = None,
        kind: str | None = None,
        at: str | None = None,
        window: int | None = None,
        standardise: bool = True,
        missing: str = "refuse",
        irregular: str = "refuse",
        overlap: str = "refuse",
        sep: str | None = None,
        decimal: str = ".",
        thousands: str = "",
        header: bool = True,
        dtype: str = "float32",
        max_bytes: int = 4 << 30,
    ) -> Data:
        """Read files (.csv .tsv .txt .parquet .pq .npz .npy .ts) into a task.

        valid, test   files of held-out sequences; with neither, `split` divides the sequences of `train` (with seed)
        window        cut sequences into pieces of this many rows; one long sequence is then split in order of time
        missing       "refuse", "drop" rows, "ffill" from the row before, "mask": zero, and an input that says so
        irregular     "refuse" or "allow" unequal time steps; overlap: "refuse" or "allow" sequences in two files
        The other arguments are those of readers.Options.
        """
        for flag, value, known in (
            ("irregular", irregular, ("refuse", "allow")),
            ("overlap", overlap, ("refuse", "allow")),
            ("dtype", dtype, ("float32", "float64")),
        ):
            if value not in known:
                raise ConfigError(f"--{flag} must be {' or '.join(known)}; got {value!r}.")
        if window is not None and (type(window) is not int or window < (2 if kind == "next" else 1)):
            raise ConfigError(f"--window must be a whole number of rows, at least {2 if kind == 'next' else 1}; got {window!r}.")  # fmt: skip
        reading = {"sep": sep, "decimal": decimal, "thousands": thousands, "header": header, "missing": missing}
        options = Options(id, time, _names(target), _names(features), kind, at, max_bytes=max_bytes, **reading)  # type: ignore[arg-type]
        recordings = _files({"train": train, "valid": valid, "test": test}, options)
        first = recordings["train"]
        kind = kind or _kind(first)
        labels = _labels(first) if kind == "classify" else []
        coded = {s: _coded(r, labels) if labels else r for s, r in recordings.items()}
        at = _at(coded["train"], kind, at)
        _judge_target(coded["train"], kind, labels)
        cuts = {s: _cut(_filled(r, kind, at, missing, irregular), kind, at, window, missing) for s, r in coded.items()}
        if overlap == "refuse":
            _refuse_overlap(cuts)
        notes = [*first.notes, *(note for cut in cuts.values() for note in cut.notes)]
        parts: dict[str, tuple[Cut, list[int]]] = {s: (c, list(range(len(c.pieces)))) for s, c in cuts.items()}
        if len(cuts) == 1:
            parts = _split(cuts["train"], split, seed, kind == "classify" and at == "last")
            copies = _copies(parts)
            if copies:
                notes.append(f"{copies} held-out sequences have the same inputs as a training sequence")
        masked = [f for j, f in enumerate(first.features) if missing == "mask" and any(np.isnan(c.recording.u[:, j]).any() for c in cuts.values())]  # fmt: skip
        cut, index = parts["train"]
        rows = np.concatenate([np.arange(*cut.pieces[i][1:]) for i in index])
        absent = [f for f, gone in zip(first.features, np.isnan(cut.recording.u[rows]).all(0), strict=True) if gone]
        if absent:
            raise DataError(f"{first.path}: in the training sequences every value of {listed(absent)} is missing. Leave the column out with --features.")  # fmt: skip
        mean, std = _scale(cut.recording.u[rows], standardise)
        still = _constant(cut.recording.u[rows])
        notes += [f"feature '{shown(f)}' is constant in training" for f, s in zip(first.features, still, strict=True) if s]  # fmt: skip
        t_mean, t_std = mean, std
        if kind != "next":
            y = np.concatenate([np.atleast_2d(_target(cut, i, at)) for i in index])
            t_mean, t_std = _scale(y, standardise and kind == "regress")
            if kind == "regress" and _constant(y).any():
                name = first.targets[int(np.flatnonzero(_constant(y))[0])]
                raise DataError(f"{first.path} column '{shown(name)}': the target is constant in the training sequences: nothing can be learned.")  # fmt: skip
        elif still.all():
            raise DataError(f"{first.path}: every feature is constant, so the next step holds nothing to learn.")
        description = Description(
            kind, at, list(first.features), list(first.targets), labels, mean.tolist(), std.tolist(),
            t_mean.tolist() if kind != "classify" else [], t_std.tolist() if kind != "classify" else [],
            masked, first.named, {c: first.columns.get(c, "") for c in ("id", "time")}, window, dtype,
            reading | {"irregular": irregular},
            {s: {"name": Path(p).name, "sha256": recordings[s].sha256} for s, p in (("train", train), ("valid", valid), ("test", test)) if p is not None},
        )  # fmt: skip
        ready = {s: _inputs(c.recording, description) for s, (c, _) in parts.items()}
        sets = {s: _sequences(c, index, ready[s], description) for s, (c, index) in parts.items() if index}
        return cls(sets, description, tuple(dict.fromkeys(notes)), Path(train).stem)

    @staticmethod
    def for_prediction(description: dict[str, Any], path: Path_, **reading: Any) -> Prediction:
        """New sequences for a network whose data had this description; columns are matched by name.

        reading  options that differ in this file: sep, decimal, thousands, header, missing, irregular, max_bytes
        """
        d = Description.of(description)
        unknown = set(reading) - READING - {"max_bytes"}
        if unknown:
            raise InputError(f"unknown reading options {listed(sorted(unknown))}; known: {', '.join(sorted(READING))}, max_bytes.")  # fmt: skip
        how = d.reading | reading
        irregular = how.pop("irregular", "refuse")
        columns: dict[str, Any] = {"id": d.columns["id"], "time": d.columns["time"]}
        options = Options(**columns, target=tuple(d.targets), features=tuple(d.features), kind="next", **how)
        recording = _as_trained(read(path, options), d)
        recording = _filled(recording, "predict", d.at, how.get("missing", "refuse"), irregular)
        cut = _cut(recording, "predict", d.at, d.window, "refuse")
        return Prediction(d, Path(path), cut, _inputs(cut.recording, d))

    def _of(self, split: str, index: Sequence[int] | np.ndarray) -> Batch:
        """Targets that are missing (NaN, class -1) get weight 0 in the loss."""
        batch = super()._of(split, index)
        if self.readout != "every" or self.description.reading["missing"] != "mask":
            return batch
        gap = batch.y.isnan().any(-1) if batch.y.is_floating_point() else batch.y < 0
        y = batch.y.masked_fill(gap[..., None] if batch.y.is_floating_point() else gap, 0)
        return replace(batch, y=y, mask=(~gap).to(batch.u.dtype))

    def show(self, a: Tensor, y: Tensor) -> list[tuple[str, str]]:
        """Labels as they were read, numbers in their own units."""
        d = self.description
        if d.labels:
            return [(d.labels[int(t)], d.labels[int(p)]) for t, p in zip(y, a.argmax(-1), strict=True)]
        mean, std = (torch.tensor(v, dtype=a.dtype) for v in (d.target_mean, d.target_std))
        return super().show(a * std + mean, y.reshape(a.shape) * std + mean)

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Accuracy, or mean squared and absolute error in the target's own units, over the entries that count."""
        a, y = a.detach(), batch.y.to(a.device)
        if self.readout == "every":
            counts = torch.arange(len(a), device=a.device)[:, None] < torch.as_tensor(batch.lengths, device=a.device)
            counts = counts if batch.mask is None else counts & (batch.mask.to(a.device) != 0)
            a, y = a[counts], y[counts]
        if self.description.kind == "classify":
            return {"accuracy": right(a.argmax(-1) == y)}
        e = (a.double() - y.double()) * torch.tensor(self.description.target_std, dtype=torch.float64, device=a.device)
        return {"mse": (float(e.square().sum()), float(e.numel())), "mae": (float(e.abs().sum()), float(e.numel()))}


@dataclass(frozen=True, eq=False)
class Prediction:
    """New sequences, scaled as those of training, in the order of their file."""

    description: Description
    source: Path
    cut: Cut
    u: np.ndarray  # [N, inputs]

    def __len__(self) -> int:
        return len(self.cut.pieces)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.cut.recording.notes + self.cut.notes

    @property
    def ids(self) -> list[str]:
        return [self.cut.name(i) for i in range(len(self))]

    def batches(self, n: int = 1000) -> Iterator[tuple[list[str], Batch]]:
        """(ids, batch) of at most n sequences, in the order of the file."""
        ids = self.ids
        for k in range(0, len(self), n):
            chosen = Sequences([self.u[start:stop] for _, start, stop in self.cut.pieces[k : k + n]])
            yield ids[k : k + n], chosen.batch(range(len(chosen)), self.description.at == "every")

    def write(self, path: Path_, outputs: Iterable[Tensor | np.ndarray]) -> None:
        """Predictions as CSV, from the pre-outputs a of each batch: [B, outputs], or [T, B, outputs] at every step.

        Columns: id, the time if there is one, prediction, and one probability for each class. With kind "next" a row
        predicts the step after it. The file appears whole or not at all; the input is never written over.
        """
        path = Path(path)
        if path.exists() and self.source.exists() and path.samefile(self.source):
            raise StorageError(f"{shown(path, 400)} is the file the sequences were read from. Write the predictions elsewhere.")  # fmt: skip
        with files.replacing(path) as raw:
            text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
            csv.writer(text, lineterminator="\n").writerows(self._rows(outputs))
            text.flush()
            text.detach()

    def _rows(self, outputs: Iterable[Tensor | np.ndarray]) -> Iterator[list[str]]:
        d, recording = self.description, self.cut.recording
        every, stamps = d.at == "every", recording.stamps
        many = d.features if d.kind == "next" else d.targets
        names = [f"prediction {n}" for n in many] if len(many) > 1 else ["prediction"]
        classes = [f"probability {label}" for label in d.labels]
        yield [_safe(c) for c in ("id", *(["time"] if stamps else []), *names, *classes)]
        piece = 0
        for a in outputs:
            a = np.asarray(a.detach().cpu() if isinstance(a, Tensor) else a, dtype=np.float64)
            width = len(d.labels) or len(d.target_std)
            if a.ndim != 2 + every or a.shape[-1] != width or piece + a.shape[every] > len(self):
                raise InputError(f"outputs have shape {list(a.shape)}; expected [{'T, ' if every else ''}B, {width}] for the batches of {len(self)} sequences, in their order.")  # fmt: skip
            for j in range(a.shape[every]):
                i, start, stop = self.cut.pieces[piece]
                values = a[: stop - start, j] if every else a[j : j + 1]
                if not np.isfinite(values).all() or len(values) < (stop - start if every else 1):
                    raise NumericalError(f"the outputs for sequence '{shown(self.cut.name(piece))}' are not finite, or too few; nothing was written.")  # fmt: skip
                name = _safe(recording.ids[i] if every else self.cut.name(piece))
                for k, cells in enumerate(self._cells(values)):
                    row = start + k if every else stop - 1
                    yield [name, *([_safe(stamps[row])] if stamps else []), *cells]
                piece += 1
        if piece != len(self):
            raise InputError(f"outputs for {piece} sequences; expected {len(self)}.")

    def _cells(self, a: np.ndarray) -> Iterator[list[str]]:
        d = self.description
        if d.kind == "classify":
            p = np.exp(a - a.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            for row in p:
                yield [_safe(d.labels[int(row.argmax())]), *(f"{x:.9g}" for x in row)]
        else:
            for row in a * np.array(d.target_std) + np.array(d.target_mean):
                yield [f"{x:.9g}" for x in row]


def _safe(cell: str) -> str:
    """Text that a spreadsheet would run as a formula gets an apostrophe; numbers stay."""
    risky = cell[:1] in ("=", "+", "-", "@", "\t", "\r") and not re.fullmatch(r"[+-][\d.:eE+-]*\d", cell)
    return f"'{cell}" if risky else cell.encode("utf-8", "backslashreplace").decode()


def _names(names: Names) -> tuple[str, ...] | None:
    return None if names is None else (names,) if isinstance(names, str) else tuple(names)


def _files(paths: dict[str, Path_ | None], options: Options) -> dict[str, Recording]:
    """Each split's file; held-out files must have the columns of the training file, and be other files."""
    recordings: dict[str, Recording] = {}
    for split, path in paths.items():
        if path is None:
            continue
        if recordings:
            first = recordings["train"]
            options = replace(options, kind=options.kind or _kind(first))
            if first.named:
                options = replace(options, id=first.columns["id"], time=first.columns["time"], target=first.targets, features=first.features)  # fmt: skip
        new = read(path, options)
        for other, old in recordings.items():
            if old.sha256 == new.sha256:
                raise DataError(f"{new.path} ({split}) and {old.path} ({other}) hold the same bytes (SHA-256 {new.sha256[:12]}...): held-out data must be other data.")  # fmt: skip
            if len(old.features) != len(new.features):
                raise DataError(f"{new.path} ({split}) has {len(new.features)} features and {old.path} ({other}) has {len(old.features)}; expected the same.")  # fmt: skip
            if old.per != new.per or (old.y is None) != (new.y is None) or len(old.targets) != len(new.targets):
                raise DataError(f"{new.path} ({split}) has {len(new.targets)} targets and {old.path} ({other}) has {len(old.targets)}; expected the same.")  # fmt: skip
        recordings[split] = new
    return recordings


def _kind(recording: Recording) -> str:
    return "regress" if recording.y is not None and recording.y.dtype.kind == "f" else "classify"


def _labels(recording: Recording) -> list[str]:
    """The classes: sorted, as numbers if all of them are whole numbers."""
    assert recording.y is not None
    found = sorted({w for w in recording.y.tolist() if w})
    where = f"{recording.path} column '{shown(recording.targets[0])}'"
    real = [w for w in found if REAL_LABEL.fullmatch(w)]
    if real:
        raise DataError(f'{where}: "{shown(real[0])}" is a real number, and classes are words or whole numbers. Pass --kind regress, or write the labels without a decimal point.')  # fmt: skip
    if len(found) < 2:
        what = f"one class only, '{shown(found[0])}'" if found else "no labels: every one is missing"
        raise DataError(f"{where}: there is {what}; expected at least two classes.")
    return sorted(found, key=int) if all(WHOLE_LABEL.fullmatch(w) for w in found) else found


def _coded(recording: Recording, labels: list[str]) -> Recording:
    """Labels as class numbers [., 1], NaN where missing; a label that training has not is refused."""
    assert recording.y is not None
    index = {w: float(k) for k, w in enumerate(labels)} | {"": math.nan}
    problems = Problems(recording.path)
    first: dict[str, int] = {}
    for at, w in enumerate(recording.y.tolist()):
        first.setdefault(w, at)
    for w, at in first.items():
        if w in index:
            continue
        row = at if recording.per == "step" else int(recording.starts[at])
        problems.add(f"{recording.place(row, recording.targets[0])}: label '{shown(w)}' does not occur in the training file, whose labels are {listed(labels)}.", "unseen")  # fmt: skip
    problems.stop()
    return replace(recording, y=np.array([index[w] for w in recording.y.tolist()])[:, None])


def _at(recording: Recording, kind: str, at: str | None) -> str:
    """Where the target is: asked for, or the only possibility."""
    if kind == "next":
        if at == "last":
            raise ConfigError("--kind next predicts at every step; leave --at out.")
        return "every"
    if recording.per == "sequence":
        if at == "every":
            raise DataError(f"{recording.path} has one target for each sequence; --at every needs one for each step.")
        return "last"
    if at:
        return at
    assert recording.y is not None
    low, high = np.fmin.reduceat(recording.y, recording.starts), np.fmax.reduceat(recording.y, recording.starts)
    alike = bool((np.isnan(low) | (low == high)).all())
    if alike and len(recording.lengths) > 1:
        return "last"
    why = "there is one sequence" if alike else "the target changes within sequences"
    raise DataError(f"{recording.path}: {why}. Pass --at every to predict it at each row, --at last to predict that of the last row.")  # fmt: skip


def _judge_target(recording: Recording, kind: str, labels: list[str]) -> None:
    """A target that is all missing, or is one of the inputs, is refused."""
    if kind == "next":
        return
    y = recording.y
    assert y is not None
    if labels and all(WHOLE_LABEL.fullmatch(w) for w in labels):
        y = np.append([float(w) for w in labels], np.nan)[np.nan_to_num(y, nan=len(labels)).astype(int)]
    for k, name in enumerate(recording.targets):
        if np.isnan(y[:, k]).all():
            raise DataError(f"{recording.path} column '{shown(name)}': every target is missing.")
        for j, feature in enumerate(recording.features):
            if recording.per == "step" and np.array_equal(y[:, k], recording.u[:, j], equal_nan=True):
                raise DataError(f"{recording.path}: target '{shown(name)}' equals input '{shown(feature)}' in every row. Leave the input out with --features.")  # fmt: skip


def _filled(recording: Recording, kind: str, at: str, missing: str, irregular: str) -> Recording:
    """The recording with rows dropped or filled as asked, at regular times."""
    notes = list(recording.notes)
    gaps = np.isnan(recording.u)
    if missing == "drop":
        lost = gaps.any(1)
        if kind in ("classify", "regress") and at == "every" and recording.per == "step":
            lost |= np.isnan(recording.y).any(1)  # type: ignore[arg-type]
        if lost.any():
            ids = recording.ids
            recording = recording.take(~lost)
            empty = [ids[i] for i in np.flatnonzero(recording.lengths == 0)]
            if empty:
                raise DataError(f"{recording.path}: without the rows that miss a value, sequences {listed(empty)} have length 0. Remove them, or pass --missing mask.")  # fmt: skip
            notes.append(f"{int(lost.sum())} rows of {recording.path} miss a value and are left out")
    if missing == "ffill" and gaps.any():
        row = np.arange(len(gaps))[:, None]
        latest = np.maximum.accumulate(np.where(gaps, -1, row), 0)
        first = np.repeat(recording.starts, recording.lengths)[:, None]
        problems = Problems(recording.path)
        for r, j in np.argwhere(latest < first):
            problems.add(f"{recording.place(r, recording.features[j])}: the value is missing and the sequence has none before it, so --missing ffill cannot fill it. Fix it, or pass --missing drop|mask.", ("ffill", j))  # fmt: skip
        problems.stop()
        recording = replace(recording, u=np.take_along_axis(recording.u, latest, 0))
        notes.append(f"{int(gaps.sum())} values of {recording.path} are those of the row before")
    if irregular == "refuse" and (text := recording.uneven()):
        raise DataError(text)
    return replace(recording, notes=tuple(notes))


def _cut(recording: Recording, kind: str, at: str, window: int | None, missing: str) -> Cut:
    """Sequences or windows of them, with those left out that have no target."""
    pieces: list[tuple[int, int, int]] = []
    problems, left = Problems(recording.path), 0
    least = 2 if kind == "next" else 1
    for i, (start, T) in enumerate(zip(recording.starts.tolist(), recording.lengths.tolist(), strict=True)):
        need = max(window or 0, least)
        if need > T:
            rule = f"--window {window}" if window else "--kind next"
            problems.add(f"{recording.place(start, recording.columns.get('id') or 'id')}: sequence '{shown(recording.ids[i])}' has length {T}; {rule} needs at least {need}.", "short")  # fmt: skip
            continue
        for k in range(0, T, window or T):
            stop = min(k + (window or T), T)
            if stop - k < least or (window and at == "last" and stop - k < window):
                left += stop - k
            else:
                pieces.append((i, start + k, start + stop))
    problems.stop()
    notes = [f"{left} rows of {recording.path} at the ends of sequences do not fill a window and are left out"] if left else []  # fmt: skip
    cut = Cut(recording, pieces)
    if kind in ("classify", "regress"):
        gaps = [np.isnan(_target(cut, i, at)) for i in range(len(pieces))]
        lacking = [g.all() if missing == "mask" and at == "every" else g.any() for g in gaps]
        if any(lacking) and missing not in ("drop", "mask"):
            for i in np.flatnonzero(lacking).tolist():
                row = pieces[i][1] + int(np.argwhere(gaps[i])[0][0]) if at == "every" else pieces[i][2] - 1
                problems.add(f"{recording.place(row, recording.targets[0])}: the target of sequence '{shown(cut.name(i))}' is missing. Fill it in, or pass --missing drop|mask.", "target")  # fmt: skip
            problems.stop()
        if any(lacking):
            notes.append(f"{sum(lacking)} sequences of {recording.path} have no target and are left out")
            cut = replace(cut, pieces=[p for p, g in zip(pieces, lacking, strict=True) if not g])
    return replace(cut, notes=tuple(notes))


def _target(cut: Cut, piece: int, at: str) -> np.ndarray:
    """The target of a piece in its own units: [k] at the last row, [T, k] at every row; NaN where missing."""
    i, start, stop = cut.pieces[piece]
    y = cut.recording.y
    assert y is not None
    if cut.recording.per == "sequence":
        return y[i]
    if at == "every":
        return y[start:stop]
    last, rows = y[stop - 1], y[start:stop]
    if np.isnan(last).any():  # a label that is written once stands for the whole sequence
        low, high = np.fmin.reduce(rows), np.fmax.reduce(rows)
        return np.where(np.isnan(last) & (low == high), low, last)
    return last


def _contents(cut: Cut, piece: int) -> bytes:
    _, start, stop = cut.pieces[piece]
    return hashlib.blake2b(np.ascontiguousarray(cut.recording.u[start:stop]).tobytes(), digest_size=16).digest()


def _refuse_overlap(cuts: dict[str, Cut]) -> None:
    """A sequence whose inputs stand in two files."""
    met: dict[bytes, tuple[str, str]] = {}
    for split, cut in cuts.items():
        new = {_contents(cut, i): (split, cut.name(i)) for i in range(len(cut.pieces))}
        both = [h for h in new if h in met]
        if both:
            other, name = met[both[0]]
            raise DataError(
                f"{cut.recording.path} ({split}): {len(both)} of its sequences stand in the {other} file too, the first is '{shown(new[both[0]][1])}', there '{shown(name)}'. "
                "Remove them, or pass --overlap allow."
            )
        met |= new


def _copies(parts: dict[str, tuple[Cut, list[int]]]) -> int:
    seen = {_contents(parts["train"][0], i) for i in parts["train"][1]}
    return sum(_contents(cut, i) in seen for s, (cut, index) in parts.items() if s != "train" for i in index)


def _split(cut: Cut, split: Sequence[float], seed: int, stratify: bool) -> dict[str, tuple[Cut, list[int]]]:
    """Sequences dealt to train, valid and test; windows of one sequence stay together.

    The order is random, with each class spread evenly over it; windows of a single sequence keep the order of time.
    """
    if len(split) != 3 or not all(isinstance(s, int | float) and 0 <= s <= 1 for s in split) or abs(sum(split) - 1) > 1e-9 or split[0] == 0:  # fmt: skip
        raise ConfigError(f"--split must be three shares (train, valid, test) that add up to 1; got {list(split)}.")
    owner = np.array([i for i, _, _ in cut.pieces])
    units = np.unique(owner)
    if len(units) == 1:
        owner = units = np.arange(len(cut.pieces))
        order = units
    else:
        order = rng(seed, "split").permutation(units)
        if stratify:
            of = {owner[p]: int(_target(cut, p, "last")[0]) for p in range(len(owner))}
            classes = np.array([of[u] for u in order])
            order = order[np.argsort((_ranks(classes) + 0.5) / np.bincount(classes)[classes], kind="stable")]
    n = len(units)
    held = [max(1, round(n * s)) if s else 0 for s in split[1:]]
    if n - sum(held) < 1:
        raise DataError(
            f"{cut.recording.path} has {n} sequence{'s' * (n != 1)}, too few to split into {1 + sum(h > 0 for h in held)} sets. "
            "Pass --valid and --test files, --split 1,0,0, or --window to cut one long sequence into pieces."
        )
    bounds = {"train": (0, n - sum(held)), "valid": (n - sum(held), n - held[1]), "test": (n - held[1], n)}
    chosen = {s: set(order[a:b].tolist()) for s, (a, b) in bounds.items()}
    return {s: (cut, [p for p, o in enumerate(owner.tolist()) if o in own]) for s, own in chosen.items()}


def _ranks(classes: np.ndarray) -> np.ndarray:
    """How many entries of the same class stand before each."""
    by = np.argsort(classes, kind="stable")
    first = np.searchsorted(classes[by], classes[by])
    ranks = np.empty(len(classes), int)
    ranks[by] = np.arange(len(classes)) - first
    return ranks


def _constant(values: np.ndarray) -> np.ndarray:
    return np.fmin.reduce(values) == np.fmax.reduce(values)


def _scale(values: np.ndarray, standardise: bool) -> tuple[np.ndarray, np.ndarray]:
    """(mean, standard deviation) of each column, gaps aside; 1 for a constant one. Large values do not overflow."""
    if not standardise:
        return np.zeros(values.shape[1]), np.ones(values.shape[1])
    size = np.nan_to_num(np.fmax.reduce(np.abs(values)), nan=1.0)
    size = np.where(size == 0, 1.0, size)
    mean, std = np.nanmean(values / size, 0) * size, np.nanstd(values / size, 0) * size
    return mean, np.where(_constant(values) | (std == 0), 1.0, std)


def _inputs(recording: Recording, d: Description) -> np.ndarray:
    """[N, inputs]: (u - mean) / std, zero where missing, then the inputs that say what is missing."""
    gaps = np.isnan(recording.u)
    for j in np.flatnonzero(gaps.any(0)):
        if recording.features[j] not in d.masked:
            row = int(np.flatnonzero(gaps[:, j])[0])
            raise DataError(f"{recording.place(row, recording.features[j])}: the value is missing, and no value of this feature was missing in training: the network has no input for that. Fill it in.")  # fmt: skip
    u = _cast((recording.u - np.array(d.mean)) / np.array(d.std), d.dtype, lambda r, j: recording.place(r, recording.features[j]))  # fmt: skip
    flags = gaps[:, [recording.features.index(f) for f in d.masked]]
    return np.concatenate([np.where(gaps, 0, u), flags.astype(u.dtype)], 1)


def _cast(values: np.ndarray, dtype: str, place: Any) -> np.ndarray:
    """Values in the type of training; one that is too large for it is refused."""
    large = np.argwhere(np.abs(values) > np.finfo(dtype).max)
    if len(large):
        r, j = map(int, large[0])
        raise DataError(f"{place(r, j)}: {values[r, j]:g} is not finite in {dtype}. Scale the column, leave --standardise on, or train in float64.")  # fmt: skip
    return values.astype(dtype)


def _sequences(cut: Cut, index: list[int], u: np.ndarray, d: Description) -> Sequences:
    """Pieces with their targets: class numbers (-1 where missing), or numbers in units of the training deviation."""
    pieces, names = [cut.pieces[i] for i in index], [cut.name(i) for i in index]
    if d.kind == "next":
        v = np.where(np.isnan(cut.recording.u), np.nan, u[:, : len(d.features)]).astype(d.dtype)
        return Sequences([u[a : b - 1] for _, a, b in pieces], [v[a + 1 : b] for _, a, b in pieces], names)
    raw = [_target(cut, i, d.at) for i in index]
    if d.kind == "classify":
        whole = [np.nan_to_num(y[..., 0], nan=-1).astype(np.int64) for y in raw]
        y: Sequence[Any] = whole if d.at == "every" else [int(w) for w in whole]
    else:
        place = lambda row, k: f"{cut.recording.path} column '{shown(cut.recording.targets[k])}'"
        y = [_cast(np.atleast_2d((y - np.array(d.target_mean)) / np.array(d.target_std)), d.dtype, place) for y in raw]
        y = y if d.at == "every" else [v[0] for v in y]
    return Sequences([u[a:b] for _, a, b in pieces], y, names)


def _as_trained(recording: Recording, d: Description) -> Recording:
    """A file's features are those of training: by name where they have names, else by number."""
    if d.named and not recording.named:
        raise DataError(f"{recording.path} has no column names, and the network reads {listed(d.features)} by name. Give a table (.csv or .parquet).")  # fmt: skip
    if len(recording.features) != len(d.features):
        raise DataError(f"{recording.path} has {len(recording.features)} features and the network was trained on {len(d.features)}.")  # fmt: skip
    return replace(recording, features=tuple(d.features))

"""Data: users' own sequences as a task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError, InputError, one_line
from ..objectives.batch import Batch
from .description import READING, ColumnNames, Description, PathLike
from .files import read
from .files.sheet import Options, quote_names
from .prediction import Prediction
from .preparation import (
    PreparedSheet,
    as_trained,
    coded,
    column_names,
    constant,
    count_copies,
    cut_up,
    filled,
    inputs_of,
    judge_target,
    kind_of,
    labels_in,
    read_all,
    refuse_overlap,
    scale_of,
    sequences_of,
    split_up,
    target_at,
    target_of,
)
from .task import Collection, Scores, Sequences, count_right


class Data(Collection):
    """Sequences from files: classification, regression, or prediction of the next step.

    kind "classify"  labels are the sorted words of the target column; softmax and cross-entropy
    kind "regress"   one output for each target, learned in units of its standard deviation, scored in its own units
    kind "next"      u_1..u_{T-1} are inputs and u_2..u_T targets
    at "last"        one target for a sequence: that of its last row; "every": one for each row
    `notes` says what was chosen for the user: columns, rows left out, constant features.
    """

    def __init__(
        self,
        sets: dict[str, Sequences],
        description: Description,
        notes: tuple[str, ...],
        name: str,
    ) -> None:
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
        train: PathLike,
        *,
        valid: PathLike | None = None,
        test: PathLike | None = None,
        split: Sequence[float] = (0.8, 0.1, 0.1),
        seed: int = 0,
        id: str | None = None,
        time: str | None = None,
        target: ColumnNames = None,
        features: ColumnNames = None,
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
        least = 2 if kind == "next" else 1
        if window is not None and (type(window) is not int or window < least):
            raise ConfigError(
                f"--window must be a whole number of rows, at least {least}; got {window!r}."
            )
        reading: dict[str, Any] = {
            "sep": sep,
            "decimal": decimal,
            "thousands": thousands,
            "header": header,
            "missing": missing,
        }
        options = Options(
            id,
            time,
            column_names(target),
            column_names(features),
            kind,
            at,
            max_bytes=max_bytes,
            **reading,
        )
        recordings = read_all({"train": train, "valid": valid, "test": test}, options)
        first = recordings["train"]
        kind = kind or kind_of(first)
        labels = labels_in(first) if kind == "classify" else []
        numbered = {s: coded(r, labels) if labels else r for s, r in recordings.items()}
        at = target_at(numbered["train"], kind, at)
        judge_target(numbered["train"], kind, labels)
        cuts = {
            s: cut_up(filled(r, kind, at, missing, irregular), kind, at, window, missing)
            for s, r in numbered.items()
        }
        if overlap == "refuse":
            refuse_overlap(cuts)
        notes = [*first.notes, *(note for cut in cuts.values() for note in cut.notes)]
        parts: dict[str, tuple[PreparedSheet, list[int]]] = {
            s: (c, list(range(len(c.pieces)))) for s, c in cuts.items()
        }
        if len(cuts) == 1:
            parts = split_up(cuts["train"], split, seed, kind == "classify" and at == "last")
            copies = count_copies(parts)
            if copies:
                notes.append(
                    f"{copies} held-out sequences have the same inputs as a training sequence"
                )
        masked = [f for j, f in enumerate(first.features) if missing == "mask" and any(np.isnan(c.recording.u[:, j]).any() for c in cuts.values())]  # fmt: skip
        cut, index = parts["train"]
        rows = np.concatenate([np.arange(*cut.pieces[i][1:]) for i in index])
        absent = [
            f
            for f, gone in zip(first.features, np.isnan(cut.recording.u[rows]).all(0), strict=True)
            if gone
        ]
        if absent:
            raise DataError(f"{first.path}: in the training sequences every value of {quote_names(absent)} is missing. Leave the column out with --features.")  # fmt: skip
        mean, std = scale_of(cut.recording.u[rows], standardise)
        still = constant(cut.recording.u[rows])
        notes += [f"feature '{one_line(f)}' is constant in training" for f, s in zip(first.features, still, strict=True) if s]  # fmt: skip
        t_mean, t_std = mean, std
        if kind != "next":
            y = np.concatenate([np.atleast_2d(target_of(cut, i, at)) for i in index])
            t_mean, t_std = scale_of(y, standardise and kind == "regress")
            if kind == "regress" and constant(y).any():
                name = first.targets[int(np.flatnonzero(constant(y))[0])]
                raise DataError(f"{first.path} column '{one_line(name)}': the target is constant in the training sequences: nothing can be learned.")  # fmt: skip
        elif still.all():
            raise DataError(
                f"{first.path}: every feature is constant, so the next step holds nothing to learn."
            )
        description = Description(
            kind, at, list(first.features), list(first.targets), labels, mean.tolist(), std.tolist(),
            t_mean.tolist() if kind != "classify" else [], t_std.tolist() if kind != "classify" else [],
            masked, first.has_names, {c: first.columns.get(c, "") for c in ("id", "time")}, window, dtype,
            reading | {"irregular": irregular},
            {s: {"name": Path(p).name, "sha256": recordings[s].sha256} for s, p in (("train", train), ("valid", valid), ("test", test)) if p is not None},
        )  # fmt: skip
        ready = {s: inputs_of(c.recording, description) for s, (c, _) in parts.items()}
        sets = {
            s: sequences_of(c, index, ready[s], description)
            for s, (c, index) in parts.items()
            if index
        }
        return cls(sets, description, tuple(dict.fromkeys(notes)), Path(train).stem)

    @staticmethod
    def for_prediction(description: dict[str, Any], path: PathLike, **reading: Any) -> Prediction:
        """New sequences for a network whose data had this description; columns are matched by name.

        reading  options that differ in this file: sep, decimal, thousands, header, missing, irregular, max_bytes
        """
        d = Description.of(description)
        unknown = set(reading) - READING - {"max_bytes"}
        if unknown:
            raise InputError(f"unknown reading options {quote_names(sorted(unknown))}; known: {', '.join(sorted(READING))}, max_bytes.")  # fmt: skip
        how = d.reading | reading
        irregular = how.pop("irregular", "refuse")
        columns: dict[str, Any] = {"id": d.columns["id"], "time": d.columns["time"]}
        options = Options(
            **columns, target=tuple(d.targets), features=tuple(d.features), kind="next", **how
        )
        recording = as_trained(read(path, options), d)
        recording = filled(recording, "predict", d.at, how.get("missing", "refuse"), irregular)
        cut = cut_up(recording, "predict", d.at, d.window, "refuse")
        return Prediction(d, Path(path), cut, inputs_of(cut.recording, d))

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
            return [
                (d.labels[int(t)], d.labels[int(p)]) for t, p in zip(y, a.argmax(-1), strict=True)
            ]
        mean, std = (torch.tensor(v, dtype=a.dtype) for v in (d.target_mean, d.target_std))
        return super().show(a * std + mean, y.reshape(a.shape) * std + mean)

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Accuracy, or mean squared and absolute error in the target's own units, over the entries that count."""
        a, y = a.detach(), batch.y.to(a.device)
        if self.readout == "every":
            counts = torch.arange(len(a), device=a.device)[:, None] < torch.as_tensor(
                batch.lengths, device=a.device
            )
            counts = counts if batch.mask is None else counts & (batch.mask.to(a.device) != 0)
            a, y = a[counts], y[counts]
        if self.description.kind == "classify":
            return {"accuracy": count_right(a.argmax(-1) == y)}
        e = (a.double() - y.double()) * torch.tensor(
            self.description.target_std, dtype=torch.float64, device=a.device
        )
        return {
            "mse": (float(e.square().sum()), float(e.numel())),
            "mae": (float(e.abs().sum()), float(e.numel())),
        }

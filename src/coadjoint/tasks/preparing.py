"""Preparing: tables and arrays, read once in chunks of rows, become arrays on disk for `train`.

The rule: the rows of a sequence follow one another in one file, in order of time. A sequence may
not go on in another file. Without an id column each file is one sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from ..errors import DataError, one_line
from .array_files import ArrayWriter
from .chunks import appears_again, open_table, out_of_order
from .description import JsonDict, PathLike
from .files.sheet import Options, Sheet, quote_names
from .filling import carried_forward, complain_of_first_gap
from .preparation import kind_of, options_like
from .prepare_checks import TargetGaps, refuse_new_columns, refuse_other_form
from .prepared import DESCRIPTION
from .prepared_description import FORMAT, digest_of
from .prepared_words import (
    numbers_of_labels,
    values_of_labels,
    with_common_words,
    with_hashed_words,
)
from .running_moments import RunningMoments, WrittenRows
from .step_range import StepRange
from .uneven import describe_uneven

STEPS_LOOKED_AT = 1 << 20  # whose median is the usual time step
Progress = Callable[[int, float], None]  # the number of a file, and the share that was read


class Preparing:
    """The arrays of a set that is being written into a folder."""

    def __init__(self, folder: Path, options: Options, irregular: str) -> None:
        self.folder = folder
        self.options = options
        self.irregular = irregular
        self.arrays: dict[str, ArrayWriter] = {}
        self.features: tuple[str, ...] = ()
        self.first: Sheet | None = None
        self.names: set[str] = set()  # the columns of the first table
        self.sources: list[JsonDict] = []
        self.categories: dict[str, dict[str, int]] = {}
        self.labels: dict[str, int] = {}
        self.seen: set[str] = set()
        self.rows = 0
        self.lost = 0  # rows that --missing drop leaves out
        self.notes: list[str] = []
        # Of the sequence that is being written.
        self.id: str | None = None
        self.unfilled: dict[int, str] = {}  # complaints by feature, if none has a value so far
        self.last_time: float | int | None = None
        self.last_row: np.ndarray | None = None
        self.hash = hashlib.blake2b(digest_size=16)
        self.target_range: tuple[np.ndarray, np.ndarray] | None = None
        self.target_gaps = TargetGaps()
        self.begin = 0
        self.place = ""
        self.target_changes = False
        self.equals_input: np.ndarray | None = None  # [targets, features]

    def read(self, path: PathLike, progress: Progress) -> None:
        """Read a table into the arrays."""
        # Gaps are dealt with here: a chunk does not know the rows before it.
        reads = self.options
        if self.options.missing != "refuse":
            reads = replace(reads, missing="mask")
        if self.first is not None:
            reads = self._like_first(reads)
        table = open_table(path, reads, len(self.seen))
        if self.first is None:
            self.names = set(table.names)
        else:
            refuse_other_form(table, self.first, self.sources[0]["name"])
            if self.options.features is None and not self.options.wide:
                refuse_new_columns(table, self.names, self.sources[0]["name"])
        if reads.kind is None and not table.roles.targets:
            raise DataError(f"{table.source.path}: no target column.")
        self.sources.append(
            {
                "name": Path(path).name,
                "first": self.rows,
                "sha256": table.source.sha256,
                "bytes": table.source.size,
            }
        )
        for sheet in table.chunks(reads):
            if self.first is None:
                self._begin(sheet, table.is_exact_in_32_bits)
            self._add(self._named(sheet, path))
            progress(len(self.sources) - 1, table.share_read())
        self._end_sequence()

    def _named(self, sheet: Sheet, path: PathLike) -> Sheet:
        """Return a chunk with an id for each sequence, and with a target for each row."""
        has_ids = bool(sheet.columns.get("id"))
        if sheet.steps:
            ids = sheet.ids if has_ids else [str(len(self.seen) + i) for i in range(len(sheet.ids))]
            rows = np.repeat(np.arange(len(ids)), sheet.lengths)
            y = None if sheet.y is None else sheet.y[rows]
            return replace(sheet, ids=ids, y=y, y_per="step")
        if has_ids or not sheet.has_names:
            return sheet
        # The rows of a file without ids are one sequence, called like the file.
        name = "all" if len(self.sources) == 1 else Path(path).stem
        return replace(sheet, ids=[name])

    def _like_first(self, reads: Options) -> Options:
        """Return the options that read a further file like the first."""
        first = self.first
        assert first is not None
        if not first.has_names:
            return options_like(first, reads)
        return replace(
            reads,
            id=first.columns["id"],
            time=first.columns["time"],
            target=first.targets if reads.kind != "next" else reads.target,
            features=first.features,
            categorical=tuple(first.categories),
            steps=first.steps or None,
            kind=reads.kind or kind_of(first),
            dates=first.columns.get("dates", reads.dates),
            use="held-out",
        )

    def _begin(self, sheet: Sheet, is_exact: bool) -> None:
        """Open the arrays for sheets like the first."""
        self.first = sheet
        self.features = sheet.features
        self.notes = list(sheet.notes)
        if self.options.kind is None:
            self.options = replace(self.options, kind=kind_of(sheet))
        columns = len(self.features)
        self.moments = RunningMoments(columns)
        self.steps = StepRange(columns)
        self.categories = {name: {} for name in sheet.categories}
        self.arrays["u"] = self._array("u", np.float32 if is_exact else np.float64, columns)
        self.arrays["starts"] = self._array("starts", np.int64)
        self.arrays["ids"] = self._array("ids", np.uint8)
        self.arrays["id_ends"] = self._array("id_ends", np.int64)
        self.arrays["hashes"] = self._array("hashes", np.uint8, 16)
        if sheet.y is not None:
            kind = np.int32 if self.options.kind == "classify" else np.float64
            self.arrays["y"] = self._array("y", kind, len(sheet.targets))
            self.equals_input = np.ones((len(sheet.targets), columns), bool)
        if sheet.time is not None:
            self.arrays["time"] = self._array("time", sheet.time.dtype)

    def _array(self, name: str, dtype: DTypeLike, columns: int | None = None) -> ArrayWriter:
        """Return a new array of the folder."""
        return ArrayWriter(self.folder / f"{name}.npy", dtype, columns)

    def _add(self, sheet: Sheet) -> None:
        """Write a chunk of rows; its first sequence may go on from the chunk before."""
        stored = values = sheet.y
        if sheet.y is not None and self.options.kind == "classify":
            stored = numbers_of_labels(sheet, self.labels)
            values = values_of_labels(sheet)
        u = with_common_words(sheet, self.categories)
        chunk = WrittenRows(u, stored, values, sheet.time)
        kept: list[WrittenRows] = []
        begun: list[int] = []  # rows of the chunk that begin a sequence
        before = self.rows
        for i, name in enumerate(sheet.ids):
            start = int(sheet.starts[i])
            rows = slice(start, start + int(sheet.lengths[i]))
            if name != self.id:
                self._end_sequence()
                self._begin_sequence(name, sheet, start)
                begun.append(self.rows - before)
            elif sheet.time is not None:
                self._check_time(sheet, start)
            if sheet.time is not None:
                self.last_time = sheet.time[rows.stop - 1]
            if chunk.y is not None:
                self.target_gaps.add(sheet, chunk.y[rows], rows)
            taken = self._without_gaps(sheet, rows, chunk.part(rows))
            self._look_at_sequence(taken)
            kept.append(taken)
            self.rows += len(taken.u)
        if self.options.missing in ("drop", "ffill"):
            chunk = WrittenRows.joined(kept)
        if len(chunk.u):
            self._write(chunk, np.array(begun, np.int64), sheet)

    def _begin_sequence(self, name: str, sheet: Sheet, row: int) -> None:
        """Begin a sequence, whose id must be new."""
        self.place = sheet.place(row, sheet.columns.get("id") or "id")
        if name in self.seen:
            raise appears_again(self.place, name)
        self.seen.add(name)
        self.id = name
        self.begin = self.rows
        self.last_time = None
        self.last_row = None
        self.hash = hashlib.blake2b(digest_size=16)
        self.target_range = None
        self.target_gaps.begin()
        self.arrays["starts"].append(np.array([self.rows]))

    def _check_time(self, sheet: Sheet, row: int) -> None:
        """Refuse a time that is not later than that of the last row of the chunk before."""
        assert sheet.time is not None
        if self.last_time is None or sheet.time[row] > self.last_time:
            return
        place = sheet.place(row, sheet.columns["time"])
        if sheet.time[row] == self.last_time:
            raise DataError(
                f"{place}: the time is the same as in the row before. Remove one of the rows."
            )
        raise out_of_order(place)

    def _without_gaps(self, sheet: Sheet, rows: slice, part: WrittenRows) -> WrittenRows:
        """Return rows of the present sequence with gaps filled, or left out, as asked for."""
        if self.options.missing == "ffill":
            return part._replace(u=self._filled(sheet, rows, part.u))
        if self.options.missing != "drop":
            return part
        keep = ~np.isnan(part.u).any(1)
        self.lost += int((~keep).sum())
        return part.part(keep)

    def _look_at_sequence(self, rows: WrittenRows) -> None:
        """Take the hash of rows of the present sequence, and notice targets that change."""
        if not len(rows.u):
            return
        hashed = with_hashed_words(rows.u, self.features, self.categories)
        self.hash.update(np.ascontiguousarray(hashed).tobytes())
        y = rows.y
        if y is None or self.target_changes:
            return
        numbers = np.where(y < 0, np.nan, y) if y.dtype.kind == "i" else y
        low = np.fmin.reduce(numbers)
        high = np.fmax.reduce(numbers)
        if self.target_range is not None:
            low = np.fmin(low, self.target_range[0])
            high = np.fmax(high, self.target_range[1])
        self.target_range = (low, high)
        self.target_changes = bool(((low != high) & ~np.isnan(low)).any())

    def _write(self, chunk: WrittenRows, begun: np.ndarray, sheet: Sheet) -> None:
        """Write a chunk of rows; begun: which of them begin a sequence."""
        self.moments.add(chunk.u)
        self.steps.add(chunk.u, begun[begun < len(chunk.u)])
        self._write_inputs(chunk.u, sheet)
        if chunk.y is not None and chunk.values is not None:
            self.arrays["y"].append(chunk.y)
            assert self.equals_input is not None
            for k, j in np.argwhere(self.equals_input):
                same = np.array_equal(chunk.values[:, k], chunk.u[:, j], equal_nan=True)
                self.equals_input[k, j] = same
        if chunk.time is not None:
            self.arrays["time"].append(chunk.time)

    def _write_inputs(self, u: np.ndarray, sheet: Sheet) -> None:
        """Write inputs; numbers that do not fit the type of the array are refused."""
        array = self.arrays["u"]
        stored = u.astype(array.dtype)
        if array.dtype == np.float32:
            wrong = np.argwhere((stored != u) & ~np.isnan(u))
            if len(wrong):
                j = int(wrong[0][1])
                raise DataError(
                    f"{sheet.path} column '{one_line(self.features[j])}': "
                    f"{u[tuple(wrong[0])]:.17g} needs 64 bits, but the columns of the first file "
                    "have 32. Give the files the same types."
                )
        array.append(stored)

    def _filled(self, sheet: Sheet, rows: slice, u: np.ndarray) -> np.ndarray:
        """Return inputs with gaps filled from the row before, which may be in another chunk."""
        part = replace(sheet, u=u, lengths=np.array([len(u)]))
        filled = carried_forward(part)
        if self.last_row is not None:
            filled = np.where(np.isnan(filled), self.last_row, filled)
        for r, j in np.argwhere(np.isnan(filled)).tolist():
            if j not in self.unfilled:
                place = sheet.place(rows.start + r, self.features[j])
                self.unfilled[j] = complain_of_first_gap(place, str(self.id))
        for j, complaint in self.unfilled.items():
            if self.moments.count[j] or not np.isnan(sheet.u[:, j]).all():
                raise DataError(complaint)
        self.last_row = filled[-1]
        return filled

    def _end_sequence(self) -> None:
        """End the present sequence; one without any row is refused."""
        if self.id is None:
            return
        if self.options.missing not in ("drop", "mask"):
            self.target_gaps.refuse(self.id)
        if self.rows == self.begin:
            raise DataError(
                f"{self.place}: without the rows that lack a value, sequence "
                f"'{one_line(self.id)}' has length 0. Remove it, or pass --missing mask."
            )
        encoded = np.frombuffer(self.id.encode("utf-8", "replace"), np.uint8)
        self.arrays["ids"].append(encoded)
        self.arrays["id_ends"].append(np.array([self.arrays["ids"].count]))
        self.arrays["hashes"].append(np.frombuffer(self.hash.digest(), np.uint8)[None])
        self.id = None

    def finish(self) -> JsonDict:
        """Close the arrays, write description.json, and return it."""
        assert self.first is not None
        first = self.first
        self.arrays["starts"].append(np.array([self.rows]))
        arrays = {name: array.close() for name, array in self.arrays.items()}
        self._refuse_at_the_end()
        columns = {name: text for name, text in first.columns.items() if text or name != "dates"}
        found = self.steps.equal()
        kind = self.options.kind
        if self.lost:
            rows = "1 row" if self.lost == 1 else f"{self.lost:,} rows"
            self.notes.append(f"{rows} with a missing input left out (--missing drop)")
        reading: JsonDict = {
            "sep": self.options.sep,
            "decimal": self.options.decimal,
            "thousands": self.options.thousands,
            "header": self.options.header,
            "dates": first.columns.get("dates", self.options.dates),
            "missing": self.options.missing,
            "irregular": self.irregular,
        }
        if first.steps:
            reading |= {"wide": True, "steps": list(first.steps)}
        names = self.features
        about: JsonDict = {
            "format": FORMAT,
            "rows": self.rows,
            "sequences": len(self.seen),
            "features": list(names),
            "targets": list(first.targets) if first.y is not None else [],
            "kind": kind,
            "columns": columns,
            "categories": {name: list(words) for name, words in self.categories.items()},
            "labels": list(self.labels),
            "reading": reading,
            "arrays": arrays,
            "sources": self.sources,
            "moments": self.moments.described(),
            "target_changes": self.target_changes,
            "equal_steps": {names[j]: step for j, step in found.items()},
            "uneven": self._uneven_step(),
            "notes": self.notes,
        }
        if not first.has_names:
            about["array"] = {"has_ids": first.has_ids, "layout": first.layout}
        about["sha256"] = digest_of(about)
        text = json.dumps(about, indent=1, ensure_ascii=True, allow_nan=False)
        (self.folder / DESCRIPTION).write_text(text + "\n", encoding="utf-8")
        return about

    def _refuse_at_the_end(self) -> None:
        """Refuse what only all rows together can tell."""
        assert self.first is not None
        path = quote_names([source["name"] for source in self.sources], 3)
        for name, count in zip(self.features, self.moments.count.tolist(), strict=True):
            if not count:
                raise DataError(
                    f"{path} column '{one_line(name)}': every value is missing. Leave the column "
                    "out with --features."
                )
        if self.equals_input is None:
            return
        for k, j in np.argwhere(self.equals_input):
            raise DataError(
                f"{path}: target '{one_line(self.first.targets[k])}' equals input "
                f"'{one_line(self.features[j])}' in every row. Leave the input out with "
                "--features."
            )

    def _uneven_step(self) -> str:
        """Return a sentence on the first time step that is not the usual one; "" if all are even.

        The usual step is the median of the first STEPS_LOOKED_AT.
        """
        if "time" not in self.arrays:
            return ""
        text = describe_uneven(self.folder, self.first, self.sources, STEPS_LOOKED_AT)
        if text and self.irregular == "refuse":
            rows = "1 row" if self.lost == 1 else f"{self.lost:,} rows"
            cause = f" --missing drop left out {rows}, which may make gaps." if self.lost else ""
            raise DataError(text + cause)
        return text


def prepare(
    paths: Sequence[PathLike],
    folder: Path,
    options: Options,
    irregular: str = "refuse",
    progress: Progress = lambda number, share: None,
) -> JsonDict:
    """Read tables into the arrays of a prepared set, in a folder that exists; see `prepared`.

    Args:
        paths: The tables, in their order.
        folder: Where the arrays are written.
        options: How the tables are read.
        irregular: "refuse" or "allow" unequal time steps.
        progress: Is told how much was read of which file: its number, and a share of it.
    """
    preparing = Preparing(folder, options, irregular)
    for path in paths:
        preparing.read(path, progress)
    return preparing.finish()

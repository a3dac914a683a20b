"""Arrays of sequences (.npz, .npy) in chunks of steps: what `prepare` reads of them at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import IO

import numpy as np

from ..errors import ConfigError, DataError, one_line
from .files.arrays import (
    AXES,
    MEMBERS,
    NPY,
    as_targets,
    check_lengths,
    describe_layout,
    is_per_step,
    read_ids,
    refuse_inexact,
    to_float64,
)
from .files.columns import Roles
from .files.numpy_files import (
    ExpectedArray,
    damage_named,
    decode_bytes,
    find_members,
    read_array,
    read_checked_header,
    read_exactly,
)
from .files.parsing import EXACT_BELOW
from .files.sheet import Options, Problems, Sheet, refuse_bad_values
from .files.source import LoadedFile

ARRAYS = (".npz", ".npy")
ROWS_PER_CHUNK = 1 << 15
NUMBERS_PER_CHUNK = 1 << 19
OF_TABLES = ("id", "time", "target", "features", "categorical")


class ArrayOnDisk:
    """An array of a file, read from its beginning, some rows at a time.

    shape, dtype   those of the header, which is checked;  name  what messages call it
    """

    def __init__(
        self,
        open_file: Callable[[], IO[bytes]],
        size: int,
        name: str,
        expected: ExpectedArray,
        watch: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """open_file: opens the file at its beginning; size: its bytes; watch: around each read."""
        self.open_file = open_file
        self.size = size
        self.name = name
        self.expected = expected
        self.watch = watch
        with watch(), open_file() as file:
            self.shape, order, self.dtype = read_checked_header(file, size, name, expected)
        if order == "F" and len(self.shape) > 1:
            raise DataError(
                f"{name} is stored by columns (Fortran order), and prepare reads it row by row. "
                "Write numpy.ascontiguousarray of it, or pass the file to train."
            )

    def whole(self) -> np.ndarray:
        """All of it."""
        with self.watch(), self.open_file() as file:
            return read_array(file, self.size, self.name, self.expected)

    def blocks(self, axes: int, rows: int) -> Iterator[np.ndarray]:
        """Yield [n, ...] with up to `rows` rows; the first `axes` axes together count rows."""
        count = math.prod(self.shape[:axes])
        rest = self.shape[axes:]
        width = math.prod(rest) * self.dtype.itemsize
        with self.watch():
            file = self.open_file()
        with file:
            with self.watch():
                read_checked_header(file, self.size, self.name, self.expected)
            for begin in range(0, count, rows):
                n = min(rows, count - begin)
                with self.watch():
                    values = np.frombuffer(read_exactly(file, n * width), self.dtype)
                values = values.reshape(n, *rest)
                if self.dtype.kind == "S":
                    values = decode_bytes(values, self.name)
                yield values


class ArrayChunks:
    """The sequences of a .npz or .npy file, as `read_npz` and `read_npy` read them as a whole."""

    has_names = False

    def __init__(self, source: LoadedFile, suffix: str, options: Options, known: int) -> None:
        """known: how many sequences there are already; without ids, numbers go on from there."""
        if options.use == "train":  # a file that is read like the first has the options of that
            refuse_options_of_tables(source.path, options)
        self.source = source
        self.problems = Problems(source.path)
        self.known = known
        self.rows_read = 0
        members, name, notes = self._open(suffix, options)
        self.u = members["u"]
        self.name = name
        self._arrange(members, name)
        self.ids = self._read_ids(members)
        self.has_ids = "ids" in members
        features = tuple(f"u{j}" for j in range(self.columns))
        self.y = members.get("y")
        self.y_is_per_step = False
        self.is_of_whole_labels = False
        targets: tuple[str, ...] = ()
        if self.y is not None:
            targets = self._look_at_targets(self.y, options)
        elif options.kind != "next":
            self.problems.refuse(
                f"{source.path} holds inputs only (no array 'y'). Pass --kind next to predict the "
                "next step, or add y to an .npz."
            )
        self.roles = Roles("", "", targets, features, notes)
        self.names = list(features)
        dtype = self.u.dtype
        most = 4 if dtype.kind == "f" else 2
        self.is_exact_in_32_bits = dtype.kind == "b" or dtype.itemsize <= most

    def _open(
        self, suffix: str, options: Options
    ) -> tuple[dict[str, ArrayOnDisk], str, tuple[str, ...]]:
        """The arrays by the names that are expected, the name of the inputs, and notes."""
        source = self.source
        if suffix == ".npy":

            def watch() -> AbstractContextManager[None]:
                return damage_named(source, "u")

            def open_copy() -> IO[bytes]:
                return open(source.path, "rb")

            return {"u": ArrayOnDisk(open_copy, source.size, source.path, NPY, watch)}, "", ()
        found = find_members(source, MEMBERS, f"an array {AXES}, and y", options)
        arrays = {}
        for name, info in found.infos.items():
            actual = found.in_file[name]
            arrays[name] = ArrayOnDisk(
                lambda info=info: found.archive.open(info),  # type: ignore[misc]
                info.file_size,
                f"{source.path} array '{actual}'",
                MEMBERS[name],
                lambda actual=actual: damage_named(source, actual),  # type: ignore[misc]
            )
        return arrays, found.in_file["u"], found.notes

    def _arrange(self, members: dict[str, ArrayOnDisk], name: str) -> None:
        """Find out how the sequences lie in u.

        steps    of each entry of a padded u [n, T, C]; None if rows lie one after the other
        lengths  [n];  columns  C;  axes  of u that count rows
        """
        shape = self.u.shape
        path = self.source.path
        is_named_u = name == "u"
        self.layout = describe_layout(name, shape)
        if "lengths" in members:
            self.layout = f"{name} {list(shape)} with lengths"
        elif len(shape) == 2 and is_named_u:
            self.problems.refuse(
                f"{path} array 'u' has shape {shape}; expected {AXES}. For one feature write "
                "u[:, :, None]; for sequences of unequal length, one after the other, add lengths "
                "(n,)."
            )
        elif len(shape) == 2:
            shape = (*shape, 1)
        lengths = np.array([math.prod(shape[:1])])  # of a single sequence (T,)
        if "lengths" in members:
            lengths = members["lengths"].whole()
        elif len(shape) == 3:
            lengths = np.full(shape[0], shape[1])
        if len(shape) == 1:
            shape = (*shape, 1)
        check_lengths(path, lengths, shape, self.problems)
        self.lengths = lengths.astype(np.int64)
        self.steps = shape[1] if len(shape) == 3 else None
        self.columns = shape[-1]
        self.axes = len(shape) - 1
        self.shape = shape
        self.ends = np.cumsum(self.lengths)
        self.count = math.prod(shape[:-1])

    def _read_ids(self, members: dict[str, ArrayOnDisk]) -> list[str]:
        """The names of the sequences."""
        if "ids" not in members:
            return [str(self.known + i) for i in range(len(self.lengths))]
        given = members["ids"].whole()
        ids = read_ids(self.source.path, given, len(self.lengths), self.problems)
        self.problems.raise_if_any()
        return ids

    def _look_at_targets(self, y: ArrayOnDisk, options: Options) -> tuple[str, ...]:
        """Find out what the targets belong to, and return their names."""
        path = self.source.path
        like_y = np.broadcast_to(np.zeros((), np.int8), y.shape)
        like_u = np.broadcast_to(np.zeros((), np.int8), self.shape)
        self.y_is_per_step = is_per_step(path, like_y, like_u, self.lengths, options, self.problems)
        axes = self.axes if self.y_is_per_step else 1
        self.y_axes = axes
        is_label = y.dtype.kind in "USb" or options.kind == "classify"
        if is_label and y.dtype.kind == "f":
            blocks = y.blocks(axes, ROWS_PER_CHUNK)
            self.is_of_whole_labels = all(map(are_whole, blocks))
        return tuple(f"y{k}" for k in range(1 if is_label else math.prod(y.shape[axes:])))

    def _targets(self, y: np.ndarray, options: Options) -> np.ndarray:
        """Some targets as `as_targets` returns them, which looks at all of them at once."""
        if self.is_of_whole_labels:
            y = y.astype(np.int64)
        elif options.kind == "classify" and y.dtype.kind == "f":
            y = np.array([str(value) for value in y.reshape(-1).tolist()]).reshape(y.shape)
        return as_targets(self.source.path, y, options, self.problems)

    def share_read(self) -> float:
        """Return how much of the file was read, by its rows."""
        return self.rows_read / max(1, self.count)

    def where(self, row: int, column: str) -> str:
        """A row of u, padding included, and a column in words."""
        sequence = self._sequences(np.array([row]))[0]
        if column not in self.names:
            return f"{self.source.path} {column} of sequence {sequence}"
        j = self.names.index(column)
        entry = f"[{row}, {j}]"
        if self.steps is not None:
            entry = f"[{sequence}, {row % self.steps}, {j}]"
        return f"{self.source.path} {self.name or 'u'}{entry} column '{column}'"

    def _sequences(self, rows: np.ndarray) -> np.ndarray:
        """The sequences that rows of u belong to."""
        if self.steps is not None:
            return rows // self.steps
        return np.searchsorted(self.ends, rows, side="right")

    def chunks(self, options: Options) -> Iterator[Sheet]:
        """Yield the rows of the file, some at a time."""
        size = min(ROWS_PER_CHUNK, max(256, NUMBERS_PER_CHUNK // self.columns))
        targets: Iterator[np.ndarray] | None = None
        of_sequences: np.ndarray | None = None
        if self.y is not None and self.y_is_per_step:
            targets = self.y.blocks(self.y_axes, size)
        elif self.y is not None:
            of_sequences = self._targets(self.y.whole(), options)
        for block in self.u.blocks(self.axes, size):
            rows = np.arange(self.rows_read, self.rows_read + len(block))
            self.rows_read += len(block)
            sequence = self._sequences(rows)
            keep = np.ones(len(rows), bool)
            if self.steps is not None:
                keep = rows % self.steps < self.lengths[sequence]
            y = None if targets is None else next(targets)[keep]
            if not keep.any():
                continue
            y = None if y is None else self._targets(y, options)
            if of_sequences is not None:
                y = of_sequences[sequence[keep]]
            yield self._sheet(block.reshape(len(block), -1)[keep], rows[keep], y, options)

    def _sheet(
        self, u: np.ndarray, rows: np.ndarray, y: np.ndarray | None, options: Options
    ) -> Sheet:
        """Some rows of u [n, C] and their targets as a sheet."""

        def place(index: list[int]) -> str:
            return self.where(int(rows[index[0]]), self.names[index[1]])

        refuse_inexact(u, place, self.problems)
        self.problems.raise_if_any()
        sequences, lengths = np.unique(self._sequences(rows), return_counts=True)
        sheet = Sheet(
            self.source.path,
            self.source.sha256,
            self.roles.features,
            to_float64(u),
            lengths,
            [self.ids[i] for i in sequences.tolist()],
            self.where,
            rows,
            targets=self.roles.targets,
            y=y,
            has_names=False,
            columns={"id": "", "time": ""},
            notes=self.roles.notes,
            has_ids=self.has_ids,
            layout=self.layout,
        )
        return refuse_bad_values(sheet, options, self.problems)


def are_whole(values: np.ndarray) -> bool:
    """Whether numbers are whole ones that a double holds, and may be classes."""
    return bool((values == np.round(values)).all() and np.abs(values).max() < EXACT_BELOW)


def refuse_options_of_tables(path: str, options: Options) -> None:
    """Refuse options that name columns: those of an array have no names."""
    for name in OF_TABLES:
        if getattr(options, name):
            raise ConfigError(
                f"{one_line(path, 4096)} holds arrays, whose columns have no names: leave out "
                f"--{name}."
            )

"""Rows that stay on disk, in a .npy file: a slice is read when it is asked for.

They are read with pread and not mapped: a map of the whole file would count as address space, and
a file that is cut off while it is mapped would end the program.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..errors import DataError, error_text, one_line
from .files.numpy_files import ExpectedArray, read_checked_header
from .files.source import open_file

Key = int | slice | tuple[slice, int | list[int]]


@dataclass(frozen=True, eq=False)
class RowsOnDisk:
    """Rows [N, C] of a .npy file as doubles.

    path     of the file;  file  its descriptor, which stays open
    begin    where its values begin;  stored  their type;  count, width  of rows and of columns
    columns  the columns that are taken; None for all
    renamed  {column: new numbers}: of columns that hold numbers of words; NaN stays
    """

    path: str
    file: int
    begin: int
    stored: np.dtype
    count: int
    width: int
    columns: tuple[int, ...] | None = None
    renamed: Mapping[int, np.ndarray] = field(default_factory=dict)
    dtype: np.dtype = field(default_factory=lambda: np.dtype(np.float64))

    @classmethod
    def open(cls, path: Path, expected: ExpectedArray, shape: Sequence[int]) -> RowsOnDisk:
        """Open a file whose header is checked: it must have this shape, and all its bytes."""
        name = one_line(path, 4096)
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        with open_file(path, getattr(os, "O_NONBLOCK", 0)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise DataError(f"{name} is no regular file. Prepare the folder again.")
            size = status.st_size
            found, order, dtype = read_checked_header(file, size, name, expected)
            begin = file.tell()
            if tuple(found) != tuple(shape) or order != "C":
                raise DataError(
                    f"{name} has shape {found}; description.json says {tuple(shape)}. The folder "
                    "is damaged: prepare it again."
                )
            descriptor = os.dup(file.fileno())
        width = found[1] if len(found) > 1 else 1
        return cls(name, descriptor, begin, dtype, found[0], width)

    def __del__(self) -> None:
        # A copy with other columns shares the descriptor: it has a duplicate of its own.
        os.close(self.file)

    def changed(
        self, columns: tuple[int, ...] | None, renamed: Mapping[int, np.ndarray], labels: bool
    ) -> RowsOnDisk:
        """Return the same rows with other columns, or other numbers of words."""
        return RowsOnDisk(
            self.path,
            os.dup(self.file),
            self.begin,
            self.stored,
            self.count,
            self.width,
            columns,
            renamed,
            np.dtype(object) if labels else np.dtype(np.float64),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows and of columns."""
        return self.count, self.width if self.columns is None else len(self.columns)

    @property
    def nbytes(self) -> int:
        """The bytes of all rows as doubles."""
        return 8 * self.shape[0] * self.shape[1]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: Key) -> np.ndarray:
        if isinstance(key, tuple):
            rows, column = key
            part: np.ndarray = self[rows][:, column]
            return part
        if not isinstance(key, slice):
            place = range(self.count)[key]
            row: np.ndarray = self.read(place, place + 1)[0]
            return row
        start, stop, step = key.indices(self.count)
        if step != 1:
            raise TypeError("rows on disk are read in their order.")
        return self.read(start, max(start, stop))

    def raw(self, start: int, stop: int) -> np.ndarray:
        """Return rows start, ..., stop - 1 with all columns, as they are stored."""
        size = self.stored.itemsize * self.width
        wanted = (stop - start) * size
        data = bytearray(wanted)
        view = memoryview(data)
        done = 0
        while done < wanted:
            try:
                count = os.preadv(self.file, [view[done:]], self.begin + start * size + done)
            except OSError as error:
                raise DataError(f"{self.path} cannot be read: {error_text(error)}.") from None
            if not count:
                raise DataError(f"{self.path} is cut off: row {start} is not there any more.")
            done += count
        return np.frombuffer(data, self.stored).reshape(stop - start, self.width)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return rows start, ..., stop - 1 as doubles."""
        rows = self.raw(start, stop)
        if self.columns is not None and self.columns != tuple(range(self.width)):
            rows = rows[:, list(self.columns)]
        # Row by row in memory, like rows that were read at once: sums have the same bits then.
        values = np.array(rows, dtype=np.float64, order="C")
        if not np.isfinite(values.sum()) and np.isinf(values).any():
            raise self._damaged(start, "an infinite value")
        for column, numbers in self.renamed.items():
            codes = values[:, column]
            if (codes >= len(numbers)).any():
                raise self._damaged(start, "a number that no word has")
            known = np.where(np.isnan(codes) | (codes < 0), len(numbers), codes).astype(np.int64)
            values[:, column] = np.append(numbers, np.nan)[known]
        return values

    def _damaged(self, start: int, what: str) -> DataError:
        """Return the error for a value that was not written by `prepare`."""
        return DataError(
            f"{self.path}: the rows from {start} on hold {what}. The folder is damaged: prepare it "
            "again."
        )

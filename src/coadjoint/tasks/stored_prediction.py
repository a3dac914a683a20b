"""Predictions for a prepared set, one batch at a time: rows and answers need not fit in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
from torch import Tensor

from ..errors import InputError
from .asked import AskedRows
from .cutting import PreparedSheet
from .description import Description
from .files.kept import Column, NumberType, type_of_texts, with_number_type
from .files.texts import Texts, take_texts
from .prediction import Prediction
from .stored_sets import StoredInputs

ROWS_OF_A_TABLE = 1 << 14
NOTHING = np.zeros(0, np.int64)
NO_ROWS = AskedRows(NOTHING, None, None, None, NOTHING)


@dataclass(frozen=True, eq=False)
class StoredPrediction(Prediction):
    """The sequences of a prepared set; its rows are those of the folder, in their order.

    Which rows a part of the predictions belongs to is found when the part is made.
    """

    @classmethod
    def of(cls, description: Description, source: Path, cut: PreparedSheet) -> StoredPrediction:
        """Return the predictions for the pieces of a stored sheet."""
        u = cast(np.ndarray, StoredInputs(cut.sheet, description))
        return cls(description, source, cut, u, NO_ROWS)

    @property
    def row_count(self) -> int:
        """The number of rows that get a prediction."""
        return len(self.cut.sheet.u) if self.description.at == "every" else len(self)

    def tables(self, outputs: Iterable[Tensor | np.ndarray]) -> Iterator[list[Column]]:
        """Yield the columns of the predictions, of some ROWS_OF_A_TABLE rows at a time.

        Rows become texts, which take many times the memory of their numbers.
        """
        samples_axis = 1 if self.description.at == "every" else 0
        done = 0  # pieces
        for a in outputs:
            self._check_shape(a, done)
            end = done + int(a.shape[samples_axis])
            for first, last in self._portions(done, end):
                of_portion = slice(first - done, last - done)
                values = a[:, of_portion] if samples_axis else a[of_portion]
                yield self.part(first, last).table([values])
            done = end
        if done != len(self):
            raise InputError(f"got outputs for {done} {self.unit}s; expected {len(self)}.")

    def table(self, outputs: Iterable[Tensor | np.ndarray]) -> list[Column]:
        """Return all predictions as columns, in memory."""
        return self.part(0, len(self)).table(outputs)

    def typed_tables(self, outputs: Iterable[Tensor | np.ndarray]) -> Iterator[list[Column]]:
        """Yield the parts of the table, with numbers in place of ids and times that are numbers.

        A column has one type in all parts.
        """
        types = self._types()
        for columns in self.tables(outputs):
            yield [with_number_type(column, types.get(column.name)) for column in columns]

    def part(self, begin: int, end: int) -> Prediction:
        """Return the predictions for pieces begin, ..., end - 1, with the rows they belong to."""
        pieces = self.cut.pieces[begin:end]
        sheet = self.cut.sheet
        spans = np.array(pieces, np.int64).reshape(-1, 3)
        if self.description.at == "every":  # the pieces are whole sequences
            row = np.arange(spans[0, 1], spans[-1, 2]) if len(spans) else NOTHING
            owner = np.repeat(spans[:, 0], spans[:, 2] - spans[:, 1])
        else:
            row = spans[:, 2] - 1
            owner = spans[:, 0]
        ids = None
        if sheet.id_column:
            # Few of the names differ: each is made once.
            names = texts_at(sheet.ids, np.unique(owner))
            first = int(owner[0]) if len(owner) else 0
            ids = [names[k] for k in (owner - first).tolist()]
        stamps = None
        if sheet.stamps is not None:
            stamps = texts_at(sheet.stamps, row)
        asked = AskedRows(row, None, ids, stamps, np.arange(len(row)))
        cut = replace(self.cut, pieces=pieces)
        return Prediction(self.description, self.source, cut, self.u, asked)

    def _portions(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the pieces begin, ..., end - 1 as (first, after the last) of a table each."""
        spans = np.array(self.cut.pieces[begin:end], np.int64).reshape(-1, 3)
        rows = np.ones(len(spans), np.int64)
        if self.description.at == "every":
            rows = spans[:, 2] - spans[:, 1]
        table = (np.cumsum(rows) - rows) // ROWS_OF_A_TABLE
        bounds = [0, *(1 + np.flatnonzero(np.diff(table))).tolist(), len(spans)]
        for first, last in itertools.pairwise(bounds):
            yield begin + first, begin + last

    def _names(self) -> list[str]:
        """Return the names of the columns."""
        return self.part(0, 1)._names()

    def _types(self) -> dict[str, NumberType | None]:
        """Return the types of the columns of ids and times, by their names."""
        columns = [column.name for column in self.part(0, 1)._beside()]
        sheet = self.cut.sheet
        texts: list[Sequence[str]] = []
        if sheet.id_column:
            texts.append(sheet.ids)
        if sheet.stamps is not None and self.description.at == "every":
            texts.append(sheet.stamps)
        elif sheet.stamps is not None:
            ends = np.array([piece.stop - 1 for piece in self.cut.pieces])
            texts.append(take_texts(sheet.stamps, ends))
        # They stand after the numbers of the rows, in this order.
        return {n: type_of_texts(t) for n, t in zip(columns[1:], texts, strict=True)}


def texts_at(texts: Sequence[str], places: np.ndarray) -> list[str]:
    """Return the texts at these places as strings."""
    taken = take_texts(texts, places)
    return taken.to_list() if isinstance(taken, Texts) else list(taken)

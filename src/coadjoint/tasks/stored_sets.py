"""Sequences whose rows stay on disk: inputs and targets of a piece are made when it is drawn.

They have the bits of those that are made at once, because each row is scaled by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

import numpy as np

from .ahead import ahead_of
from .cutting import Part, Piece
from .description import Description
from .files.sheet import Sheet
from .prepared import times_between
from .scaling import class_targets, inputs_of, origins_of, predicted_columns, real_targets
from .task import Origin, Sequences

Entry = Any  # of a list: inputs, targets, names or origins


class Made(Sequence[Entry]):
    """A list whose entries are made when they are asked for."""

    def __init__(self, count: int, make: Callable[[int], Entry]) -> None:
        self.entries = count
        self.make = make

    def __len__(self) -> int:
        return self.entries

    @overload
    def __getitem__(self, key: int) -> Entry: ...
    @overload
    def __getitem__(self, key: slice) -> list[Entry]: ...

    def __getitem__(self, key: int | slice) -> Entry:
        if isinstance(key, slice):
            return [self.make(i) for i in range(self.entries)[key]]
        return self.make(range(self.entries)[key])

    def __iter__(self) -> Iterator[Entry]:
        for i in range(self.entries):
            yield self.make(i)


class StoredPieces(Made):
    """The inputs [T, inputs] of each piece of a part."""

    def __init__(self, part: Part, description: Description) -> None:
        super().__init__(len(part.chosen), self.inputs)
        self.part = part
        self.description = description
        rows = np.array([stop - start for _, start, stop in part.pieces], np.int64)
        self.horizon = 0  # rows at the end of a piece that are targets only
        if description.kind == "next":
            self.horizon = ahead_of(description).horizon
        self.lengths = rows - self.horizon
        self.mean = np.array(description.mean)
        self.std = np.array(description.std)
        # The inputs are the scaled numbers and nothing else.
        self.is_plain = description.width == len(description.features)
        self.is_plain &= not description.categories and not description.ahead.get("known")

    def rows_of(self, i: int) -> np.ndarray:
        """Return the inputs of all rows of piece i."""
        sequence, start, stop = self.part.cut.pieces[self.part.chosen[i]]
        sheet = self.part.cut.sheet
        if self.is_plain:
            with np.errstate(over="ignore"):
                exact = (sheet.u[start:stop] - self.mean) / self.std
                scaled: np.ndarray = exact.astype(self.description.dtype)
            if np.isfinite(scaled).all():  # otherwise the way below says what is wrong
                return scaled
        # Inputs may be those of later rows, and of earlier ones, outside of the piece.
        first = int(sheet.starts[sequence])
        end = first + int(sheet.lengths[sequence])
        earlier = rows_before(self.description)
        later = self.horizon if self.description.ahead.get("known") else 0
        begin = max(first, start - earlier)
        rows = slice_sheet(sheet, begin, min(stop + later, end), self.description)
        return inputs_of(rows, self.description)[start - begin : stop - begin]

    def inputs(self, i: int) -> np.ndarray:
        """Return the inputs of piece i."""
        rows = self.rows_of(i)
        return rows[: len(rows) - self.horizon]

    def target(self, i: int) -> Entry:
        """Return the target of piece i, or the targets of its steps."""
        d = self.description
        if d.kind == "next":
            return ahead_of(d).targets_of(predicted_columns(self.rows_of(i), d))
        one = Part(self.part.cut, [self.part.chosen[i]])
        if d.kind == "classify" and d.at == "last":
            stop = self.part.cut.pieces[self.part.chosen[i]].stop
            number = float(one.cut.sheet.y[stop - 1][0])
            if number == number:  # a label that is missing may stand in another row
                return int(number)
        return class_targets(one, d.at)[0] if d.kind == "classify" else real_targets(one, d)[0]

    def origin(self, i: int) -> Origin:
        """Return where the targets of piece i stand in the file."""
        return origins_of(Part(self.part.cut, [self.part.chosen[i]]), self.description)[0]

    def chunked(self, chunk: int) -> Sequences:
        """Return the sequences cut into pieces of at most `chunk` steps: see `cut_into_chunks`."""
        pieces = []
        for sequence, start, stop in self.part.pieces:
            for begin in range(start, stop - self.horizon, chunk):
                end = min(begin + chunk, stop - self.horizon)
                pieces.append(Piece(sequence, begin, end + self.horizon))
        cut = replace(self.part.cut, pieces=pieces)
        chosen = list(range(len(pieces)))
        whole = StoredPieces(Part(cut, chosen), self.description)
        if self.description.reading.get("missing") == "mask":
            # Where gaps are masked, a piece may have no target at all.
            chosen = [i for i in chosen if has_target(whole.target(i))]
        return stored_sequences(Part(cut, chosen), self.description)


class StoredInputs:
    """The inputs [N, inputs] of rows on disk for a prediction, by slices within one sequence."""

    def __init__(self, sheet: Sheet, description: Description) -> None:
        self.sheet = sheet
        self.description = description

    def __len__(self) -> int:
        return len(self.sheet.u)

    def __getitem__(self, rows: slice) -> np.ndarray:
        sheet = self.sheet
        sequence = int(np.searchsorted(sheet.starts, rows.start, "right")) - 1
        # Inputs may be those of earlier rows of the sequence.
        begin = max(int(sheet.starts[sequence]), rows.start - rows_before(self.description))
        part = slice_sheet(sheet, begin, rows.stop, self.description)
        return inputs_of(part, self.description, "")[rows.start - begin :]


def has_target(target: Entry) -> bool:
    """Tell whether a piece has a target at any step."""
    values = np.asarray(target)
    return not bool(np.isnan(values).all())


def rows_before(description: Description) -> int:
    """Return how many earlier rows of its sequence the inputs of a row are made of."""
    since_one_before = 1 if description.gap else 0
    lags: list[int] = description.ahead.get("lags", [])
    return max([since_one_before, *lags])


def slice_sheet(sheet: Sheet, start: int, stop: int, description: Description) -> Sheet:
    """Return rows start, ..., stop - 1 of one sequence as a sheet of their own, in memory.

    Times are read if there are inputs made of them.
    """
    u = sheet.u[start:stop]
    lines = np.arange(start, stop)
    time = times_between(sheet, start, stop) if description.gap else None
    lengths = np.array([len(u)])
    return replace(sheet, u=u, lengths=lengths, lines=lines, ids=[""], y=None, time=time)


def stored_sequences(part: Part, description: Description) -> Sequences:
    """Return the pieces of one split with their targets; nothing is read yet."""
    pieces = StoredPieces(part, description)
    count = len(pieces)
    names = Made(count, lambda i: part.cut.name(part.chosen[i]))
    return Sequences(pieces, Made(count, pieces.target), names, Made(count, pieces.origin))


def is_stored(sequences: object) -> bool:
    """Tell whether the rows of a set are on disk."""
    return isinstance(getattr(sequences, "u", None), StoredPieces)

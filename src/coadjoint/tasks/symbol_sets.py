"""Sequences of symbols as sets: the inputs of a piece are made when it is drawn.

A text of a million characters is kept as its numbers, and not as a million rows of inputs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .cutting import Part, Piece
from .description import Description
from .files.sheet import Sheet
from .scaling import origins_of
from .stored_sets import Made
from .task import Sequences


def input_rows(description: Description) -> np.ndarray:
    """Return the inputs of each symbol of a vocabulary, and of an unknown one, [K + 1, K]."""
    shares = np.array(description.shares[description.features[0]])
    rows = np.zeros((len(shares) + 1, len(shares)))
    rows[:-1] = np.eye(len(shares)) - shares
    return rows.astype(description.dtype)


def input_codes(sheet: Sheet, description: Description) -> np.ndarray:
    """Return the row of `input_rows` for each row of a sheet, [N]."""
    codes: np.ndarray = sheet.u[:, 0].astype(np.int32)
    clipped: np.ndarray = np.minimum(codes, len(description.labels))
    return clipped


class SymbolPieces(Made):
    """The inputs [T - 1, K] of each piece of T symbols; its targets are the T - 1 after the first.

    codes: of all symbols of the sheet, by `input_codes`.
    """

    def __init__(self, part: Part, description: Description, codes: np.ndarray) -> None:
        super().__init__(len(part.chosen), self.inputs)
        self.part = part
        self.description = description
        self.codes = codes
        self.rows = input_rows(description)
        self.pieces = part.pieces
        self.lengths = np.array([stop - start - 1 for _, start, stop in self.pieces], np.int64)

    def inputs(self, i: int) -> np.ndarray:
        """Return the inputs of piece i."""
        _, start, stop = self.pieces[i]
        made: np.ndarray = self.rows[self.codes[start : stop - 1]]
        return made

    def target(self, i: int) -> np.ndarray:
        """Return the next symbol at each step of piece i, [T - 1]; -1 for an unknown one."""
        _, start, stop = self.pieces[i]
        codes = self.codes[start + 1 : stop].astype(np.int64)
        return np.where(codes < len(self.description.labels), codes, -1)

    def chunked(self, chunk: int) -> Sequences:
        """Return the sequences cut into pieces of at most `chunk` steps."""
        pieces = []
        for sequence, start, stop in self.pieces:
            for begin in range(start, stop - 1, chunk):
                pieces.append(Piece(sequence, begin, min(begin + chunk + 1, stop)))
        cut = replace(self.part.cut, pieces=pieces)
        return of_pieces(Part(cut, list(range(len(pieces)))), self.description, self.codes)


class SymbolInputs:
    """The inputs [N, K] of all rows of a sheet, by slices: those of a slice are made for it."""

    def __init__(self, sheet: Sheet, description: Description) -> None:
        self.codes = input_codes(sheet, description)
        self.rows = input_rows(description)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, chosen: slice) -> np.ndarray:
        made: np.ndarray = self.rows[self.codes[chosen]]
        return made


def symbol_sequences(part: Part, description: Description) -> Sequences:
    """Return the pieces of one split with the next symbols as targets."""
    return of_pieces(part, description, input_codes(part.cut.sheet, description))


def of_pieces(part: Part, description: Description, codes: np.ndarray) -> Sequences:
    """Return what `symbol_sequences` does, of the codes of the sheet."""
    pieces = SymbolPieces(part, description, codes)
    targets = Made(len(pieces), pieces.target)
    return Sequences(pieces, targets, part.names, origins_of(part, description))

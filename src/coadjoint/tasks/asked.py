"""AskedRows: the rows of the input that a prediction is asked for, in the input's order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .cutting import PreparedSheet
from .files.sheet import Sheet
from .files.texts import take_texts


@dataclass(frozen=True, eq=False)
class AskedRows:
    """M rows of the input, those that cannot be predicted among them.

    row     [M] their numbers in the file, from 0, ascending
    step    [M] the time step, from 0, where a row of the file is a whole sequence; None elsewhere
    ids     [M] the id of the sequence or sample, as the file has it; None without ids
    stamps  [M] the time, as it is written; None without times
    place   [K] where in M each prediction belongs, K <= M
    """

    row: np.ndarray
    step: np.ndarray | None
    ids: list[str] | None
    stamps: list[str] | None
    place: np.ndarray


def find_asked_rows(sheet: Sheet, kept: np.ndarray, cut: PreparedSheet, at: str) -> AskedRows:
    """Find the rows to predict: each row at "every"; at "last", the last row of each piece.

    A sequence of which no row can be read is asked for by its last row, at "last".

    Args:
        sheet: The file as it was read.
        kept: The rows of the sheet that can be read, [N].
        cut: These rows, in the pieces that are predicted one after the other.
        at: "every" or "last".
    """
    origin = np.flatnonzero(kept)  # of the rows of `cut` in the sheet
    sequence = np.repeat(np.arange(len(sheet.lengths)), sheet.lengths)
    if at == "every":
        predicted = origin
        rest = np.flatnonzero(~kept)
    else:
        ends = np.array([piece.stop - 1 for piece in cut.pieces], dtype=np.int64)
        predicted = origin[ends]
        is_read = np.zeros(len(sheet.lengths), bool)
        is_read[sequence[predicted]] = True
        rest = (sheet.starts + sheet.lengths - 1)[~is_read]
    asked = np.concatenate([predicted, rest])
    step = asked - sheet.starts[sequence[asked]]
    order = np.lexsort((step, sheet.input_rows[asked]))
    place = np.empty(len(asked), np.int64)
    place[order] = np.arange(len(asked))
    asked = asked[order]
    row = sheet.input_rows[asked]
    ids = None
    if sheet.id_column:
        ids = [sheet.ids[i] for i in sequence[asked]]
    stamps = None
    if sheet.stamps is not None:
        stamps = list(take_texts(sheet.stamps, asked))
    has_several_steps = at == "every" and len(np.unique(row)) < len(row)
    return AskedRows(
        row, step[order] if has_several_steps else None, ids, stamps, place[: len(predicted)]
    )

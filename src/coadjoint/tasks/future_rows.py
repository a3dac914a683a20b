"""Rows of the future at the end of series: what is known in advance, without what is predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..errors import DataError, one_line
from .description import Description
from .files.sheet import Options, Problems, Sheet, refuse_bad_values
from .scaling import own_inputs_of


def split_future(sheet: Sheet, d: Description, options: Options) -> tuple[Sheet, list[np.ndarray]]:
    """Return the rows of the past, and of each series the known inputs of its future, [F, inputs].

    The future is the rows at the end of a series in which every predicted column is empty. Empty
    cells in the past are refused, if `options.missing` says so, and so are those of known columns
    in the future.
    """
    known = [sheet.features.index(name) for name in d.ahead["known"]]
    predicted = [sheet.features.index(name) for name in d.ahead["predicted"]]
    is_empty = np.isnan(sheet.u[:, predicted]).all(1)
    is_future = np.zeros(len(sheet.u), bool)
    for name, start, T in zip(sheet.ids, sheet.starts, sheet.lengths, strict=True):
        filled = np.flatnonzero(~is_empty[start : start + T])
        if not len(filled):
            raise DataError(f"{sheet.path}: series '{one_line(name)}' has no value to go on from.")
        is_future[start + filled[-1] + 1 : start + T] = True
    past = sheet.take(~is_future)
    refuse_bad_values(past, options, Problems(sheet.path))
    u = sheet.u.copy()
    gaps = np.argwhere(is_future[:, None] & np.isnan(u[:, known]))
    if len(gaps):
        row, j = gaps[0]
        raise DataError(
            f"{sheet.place(row, sheet.features[known[j]])}: the value is missing, and the column "
            "is to be known in advance. Fill it in."
        )
    unknown = np.isnan(u) & is_future[:, None]
    u[unknown] = np.broadcast_to(np.array(d.mean), u.shape)[unknown]  # 0 after scaling
    whole = replace(sheet, u=np.where(is_future[:, None], u, np.nan_to_num(u)))
    inputs = own_inputs_of(whole, d, "")[:, d.known_places]
    future = []
    for start, T in zip(sheet.starts, sheet.lengths, strict=True):
        rows = np.arange(start, start + T)
        future.append(inputs[rows[is_future[rows]]])
    return past, future

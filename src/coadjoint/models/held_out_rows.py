"""Which rows of series a network was not trained on, by the held_out.json of its run."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..errors import one_line
from ..tasks.ahead import Ahead
from ..tasks.files.sheet import Sheet
from ..training import schemas
from ..training.held_out_schema import MOST_TEXT, HeldOutSchema

TOLERANCE = 1e-4  # of values in held_out.json, relative to the largest


def held_out_rows(folder: Path | None, sheet: Sheet, ahead: Ahead) -> dict[str, int]:
    """Return the first held-out row of each series of a sheet, from 0; {} if none is known.

    A series counts if it holds the held-out values of the run in the same rows: the training file
    itself, or a newer one with more rows at the end.

    Args:
        folder: The run folder; None if there is none.
        sheet: The series.
        ahead: What is predicted.
    """
    per_step = len(ahead.predicted) * ahead.copies
    first_names = [one_line(name, MOST_TEXT) for name in ahead.output_names[:per_step]]
    first_names = first_names[:: ahead.copies]
    path = None if folder is None else folder / "held_out.json"
    if path is None or not path.is_file():
        return {}
    record = schemas.read(path, HeldOutSchema)
    # Of several steps and quantiles the first output of each column, which is of the next row.
    places = [record["outputs"].index(name) for name in first_names if name in record["outputs"]]
    if record["kind"] != "next" or len(places) < len(ahead.predicted):
        return {}
    columns = [sheet.features.index(name) for name in ahead.predicted]
    first_rows: dict[str, int] = {}
    for split in record["splits"].values():
        kept = split["kept"]
        true = np.array(kept["true"], dtype=float).T[:, places]
        begin = 0
        for name, first, length in zip(kept["series"], kept["first"], kept["lengths"], strict=True):
            values = true[begin : begin + length]
            begin += length
            if name in sheet.ids and is_at(values, sheet, sheet.ids.index(name), first, columns):
                first_rows[name] = min(first, first_rows.get(name, first))
    return first_rows


def is_at(values: np.ndarray, sheet: Sheet, series: int, first: int, columns: list[int]) -> bool:
    """Tell whether a series has these values from row `first` on."""
    start = int(sheet.starts[series]) + first
    if first + len(values) > int(sheet.lengths[series]):
        return False
    here = sheet.u[start : start + len(values), columns]
    size = TOLERANCE * float(np.nanmax(np.abs(here), initial=0.0))
    return bool(np.allclose(values, here, rtol=0, atol=size, equal_nan=True))

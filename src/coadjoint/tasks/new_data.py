"""New sequences or samples for a trained network, read by the description of its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, InputError
from .asked import find_asked_rows
from .cutting import cut_for_prediction
from .description import PREDICTION_OPTIONS, ColumnNames, Description, JsonDict
from .files.kept import read_columns
from .files.sheet import Options, Sheet, quote_names
from .future_rows import split_future, with_future
from .memory import InMemory, Source, read_source
from .option_checks import check_choice, refuse_options_of_time
from .prediction import Prediction
from .preparation import column_names, encode_labels, fill_for_prediction, match_features
from .scaling import inputs_of


def read_new(
    description: JsonDict | Description,
    source: Source,
    *,
    keep: ColumnNames | bool = None,
    whole: bool = False,
    labelled: bool = False,
    **reading: Any,
) -> Prediction:
    """Read new sequences or samples; arguments as in `Data.for_prediction`.

    labelled: whether the targets are read too; data without them are refused.
    """
    d = description
    if not isinstance(d, Description):
        d = Description.of(d)
    known = PREDICTION_OPTIONS
    unknown = set(reading) - known
    if unknown:
        raise InputError(
            f"unknown reading options {quote_names(sorted(unknown))}; "
            f"known: {', '.join(sorted(known))}."
        )
    how = {"id": d.columns["id"], "time": d.columns["time"], **d.reading, **reading}
    irregular = how.pop("irregular", "refuse")
    missing = how.get("missing", "refuse")
    check_choice("irregular", irregular, ("refuse", "allow"))
    if d.sample_shape is not None:
        refuse_options_of_time(time=how["time"], missing=missing, irregular=irregular)
    has_targets = labelled and d.kind in ("classify", "regress")
    options = Options(
        target=tuple(d.targets),
        features=tuple(d.features),
        # Without targets to read, those that the file has are not taken for features.
        kind=d.kind if has_targets else "next",
        at=d.at if has_targets else None,
        rows="steps" if d.sample_shape is None else "samples",
        use="predict",
        categorical=tuple(d.categories),
        **how,
    )
    has_known = bool(d.ahead.get("known"))
    # Rows of the future lack what is predicted: they are told apart before gaps are refused.
    reads = replace(options, missing="mask") if has_known else options
    sheet = match_features(match_arrays(read_source(source, reads), source, d), d)
    future: list[np.ndarray] = []
    if has_known:
        sheet, future = split_future(sheet, d, options)
    if has_targets and d.kind == "classify":
        sheet = encode_labels(sheet, d.labels)
    filled, kept = fill_for_prediction(sheet, missing, irregular)
    cut = cut_for_prediction(filled, d.at, None if whole else d.window)
    asked = find_asked_rows(sheet, kept, cut, d.at)
    path = Path(source.path if isinstance(source, InMemory) else source)
    u = inputs_of(cut.sheet, d, "")
    if has_known:
        u = with_future(u, cut.sheet, d, future)
    prediction = Prediction(d, path, cut, u, asked, future=future)
    if keep is None or keep is False:
        return prediction
    if isinstance(source, InMemory):
        raise InputError("keep copies columns of a file; data in memory are at hand already.")
    names = None if keep is True else column_names(keep)
    return prediction.with_columns(read_columns(source, options, names))


def match_arrays(sheet: Sheet, source: Source, description: Description) -> Sheet:
    """Return the sheet of arrays in memory as if its columns had the names of training.

    They are taken by position. Files are not: a file without names may have any order.
    """
    is_array = isinstance(source, InMemory) and not source.is_frame
    if not is_array or not description.named:
        return sheet
    if description.categories:
        raise DataError(
            f"{sheet.path} is an array of numbers, and the network reads words in "
            f"{quote_names(list(description.categories))}. Give a frame with these columns."
        )
    note = f"columns are taken in the order of training: {quote_names(description.features)}"
    return replace(sheet, has_names=True, notes=(*sheet.notes, note))

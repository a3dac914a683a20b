"""New sequences or samples for a trained network, read by the description of its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from ..errors import DataError, InputError, OptionError
from .ahead import ahead_of
from .asked import find_asked_rows
from .cutting import cut_for_prediction, target_of
from .description import PREDICTION_OPTIONS, ColumnNames, Description, JsonDict, Option
from .files.kept import read_columns
from .files.samples import samples_of_rows
from .files.sheet import Options, Sheet, quote_names
from .filling import fill_for_prediction, refuse_uneven
from .future_rows import split_future
from .memory import InMemory, Source, read_source
from .option_checks import check_choice, refuse_options_of_time
from .prediction import Prediction
from .preparation import (
    column_names,
    encode_labels,
    match_features,
)
from .prepared import StoredSheet, in_memory, is_prepared
from .scaling import inputs_of
from .stored_prediction import StoredPrediction
from .stored_sets import StoredInputs
from .symbol_sets import SymbolInputs
from .symbols import read_new_sheet


def read_new(
    description: JsonDict | Description,
    source: Source,
    *,
    keep: ColumnNames | bool = None,
    whole: bool = False,
    labelled: bool = False,
    target: ColumnNames = None,
    in_parts: bool = False,
    **reading: Option,
) -> Prediction:
    """Read new sequences or samples; arguments as in `Data.for_prediction`.

    labelled: whether the targets are read too; data without them are refused. target: their
    columns, if they are called otherwise than in training. in_parts: leave the rows of a prepared
    set on disk, and make the inputs of a batch when it is drawn, as far as the network allows.
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
    columns = column_names(target) or tuple(d.targets)
    if d.symbols:  # what follows a symbol is its target, and stands in no column of its own
        refuse_other_columns(d, columns)
        columns = ()
    has_targets = labelled and d.kind in ("classify", "regress") and not d.symbols
    options = Options(
        target=columns,
        features=tuple(d.features),
        # Without targets to read, those that the file has are not taken for features.
        kind=d.kind if has_targets else "next",
        at=d.at if has_targets else None,
        rows="steps" if d.sample_shape is None else "samples",
        use="predict",
        categorical=tuple(d.categories),
        **how,
    )
    if d.symbols:
        return read_new_symbols(d, source, options)
    has_known = bool(d.ahead.get("known"))
    # Rows of the future lack what is predicted: they are told apart before gaps are refused.
    reads = options
    if has_known and not is_prepared(source):
        reads = replace(options, missing="mask")
    sheet = match_features(match_arrays(read_source(source, reads), source, d), d)
    future: list[np.ndarray] = []
    if has_targets and d.kind == "classify":
        sheet = encode_labels(sheet, d.labels)
    window = None if whole else d.window
    is_on_disk = False
    if isinstance(sheet, StoredSheet):
        refuse_uneven(sheet, irregular)
        is_on_disk = in_parts and not has_known
        sheet = sheet if is_on_disk else in_memory(sheet, options.max_bytes, bool(d.gap))
    if has_known:
        sheet, future = split_future(sheet, d, options)
    path = Path(source.path if isinstance(source, InMemory) else source)
    if is_on_disk and not labelled and not keep:
        return StoredPrediction.of(d, path, cut_for_prediction(sheet, d.at, window))
    if is_on_disk:
        # Gaps were dealt with when the set was written.
        sheet = replace(sheet, rows=np.arange(len(sheet.u)))
        filled, kept = sheet, np.ones(len(sheet.u), bool)
    else:
        filled, kept = fill_for_prediction(sheet, missing, irregular)
    cut = cut_for_prediction(filled, d.at, window)
    asked = find_asked_rows(sheet, kept, cut, d.at)
    if is_on_disk:
        u = cast(np.ndarray, StoredInputs(cut.sheet, d))
    else:
        u = inputs_of(cut.sheet, d, "", future)
    prediction = Prediction(d, path, cut, u, asked, future=future)
    if keep is None or keep is False:
        return prediction
    if isinstance(source, InMemory):
        raise InputError("keep copies columns of a file; data in memory are at hand already.")
    names = None if keep is True else column_names(keep)
    return prediction.with_columns(read_columns(source, options, names))


def refuse_other_columns(description: Description, target: tuple[str, ...]) -> None:
    """Refuse another column of targets than that of the symbols."""
    d = description
    if target not in (tuple(d.features), tuple(d.targets)):
        raise OptionError(
            f"$target does nothing here: the network predicts the next {d.symbols}. Leave it out."
        )


def read_new_symbols(description: Description, source: Source, options: Options) -> Prediction:
    """Read new sequences of symbols; what follows each is its target."""
    sheet = read_new_sheet(description, source, options)
    cut = cut_for_prediction(sheet, "every", None)
    asked = find_asked_rows(sheet, np.ones(len(sheet.u), bool), cut, "every")
    path = Path(source.path if isinstance(source, InMemory) else source)
    u = cast(np.ndarray, SymbolInputs(sheet, description))
    return Prediction(description, path, cut, u, asked)


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


def targets_of(prediction: Prediction) -> np.ndarray:
    """Return the targets of data that were read with them, a row for each row of `collect`.

    They are class numbers [K, 1], or numbers [K, k] in the units of the data; NaN where missing.
    With kind "next" the targets of a row are the H rows after it, which the last H rows lack; with
    kind "reconstruct" it is the sample itself. Refused are networks that predict quantiles.
    """
    d = prediction.description
    cut = prediction.cut
    sheet = cut.sheet
    if d.kind == "reconstruct":
        assert d.sample_shape is not None
        return samples_of_rows(sheet.u, d.sample_shape).reshape(len(cut.pieces), -1)
    if d.kind == "next":
        ahead = ahead_of(d)
        if ahead.quantiles:
            raise InputError(
                "a network that predicts quantiles is judged by coadjoint forecast --rolling K, or "
                "model.roll."
            )
        columns = [sheet.features.index(name) for name in ahead.predicted]
        of_pieces = []
        for _, start, stop in cut.pieces:  # each is a whole sequence
            after = np.full((stop - start, ahead.width), np.nan)
            count = stop - start - ahead.horizon
            if count > 0:
                after[:count] = ahead.targets_of(sheet.u[start:stop, columns])
            of_pieces.append(after)
        return np.concatenate(of_pieces)
    if sheet.y is None:
        raise DataError(f"{sheet.path} has no targets to compare the predictions with.")
    if d.at == "every" and sheet.y_per == "sequence":
        raise DataError(
            f"{sheet.path} has one target for each sequence; the network answers at every step."
        )
    parts = [target_of(cut, i, d.at) for i in range(len(cut.pieces))]
    return np.concatenate([np.atleast_2d(part) for part in parts])

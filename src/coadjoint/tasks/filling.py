"""Gaps of a sheet: rows without a value are left out, or filled from the row before."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from ..errors import DataError, one_line
from .files.sheet import EVEN_OUT, Problems, Sheet, quote_names
from .prepared import StoredSheet


def fill_gaps(sheet: Sheet, kind: str, at: str, missing: str, irregular: str) -> Sheet:
    """Return the sheet with gaps dropped or filled if `missing` is "drop" or "ffill".

    Samples without time are dropped whole, and cannot be filled from a row before.

    Irregular time steps are refused if `irregular` is "refuse". Gaps of a prepared set were dealt
    with when it was written.
    """
    if isinstance(sheet, StoredSheet):
        refuse_uneven(sheet, irregular)
        return sheet
    rest = sheet
    if missing == "drop" and sheet.shape is not None:
        rest = drop_samples(sheet)
    elif missing == "drop":
        rest = drop_rows(sheet, kind, at)
    elif missing == "ffill":
        rest = fill_forward(sheet)
    if irregular == "refuse":
        others = "--missing mask or ffill"
        refuse_irregular(sheet, rest, missing, others, "--irregular allow or --gaps")
    return rest


def fill_for_prediction(sheet: Sheet, missing: str, irregular: str) -> tuple[Sheet, np.ndarray]:
    """Return the rows of a sheet that can be predicted from, and which these are, [N] bool.

    With missing "drop", rows (samples, if they have no time) that lack a value are left out; with
    "ffill", gaps are filled, and those rows are left out that have no value before a gap. Their
    predictions stay empty. A file without any other row is refused, and so are irregular time steps
    if `irregular` is "refuse".
    """
    lost = np.zeros(len(sheet.u), bool)
    gaps = np.isnan(sheet.u)
    if missing == "ffill" and gaps.any():
        u = carried_forward(sheet)
        count = int((gaps & ~np.isnan(u)).sum())
        note = note_on_filled(count, sheet)
        sheet = replace(sheet, u=u, notes=(*sheet.notes, note))
    if missing in ("drop", "ffill"):
        lost = np.isnan(sheet.u).any(1)
    if sheet.shape is not None:
        lost = np.repeat(np.logical_or.reduceat(lost, sheet.starts), sheet.lengths)
    if lost.all():
        raise DataError(
            f"{sheet.path}: every {sheet.unit} lacks a value in each of its rows, so none is left. "
            "Fill in the values."
        )
    rest = sheet
    if lost.any():
        what = "row" if sheet.shape is None else "sample"
        count = int(lost.sum()) // (math.prod(sheet.shape[1:]) if sheet.shape else 1)
        read = "it" if count == 1 else "them"
        note = f"{lacking(count, what, sheet)}: the network does not read {read}"
        taken = sheet.take(~lost)
        is_left = taken.lengths > 0
        ids = [name for name, left in zip(sheet.ids, is_left, strict=True) if left]
        y = taken.y
        if y is not None and taken.y_per == "sequence":
            y = y[is_left]
        notes = (*sheet.notes, note)
        rest = replace(taken, lengths=taken.lengths[is_left], ids=ids, notes=notes, y=y)
    if irregular == "refuse":
        refuse_irregular(sheet, rest, missing, "--missing ffill", "--irregular allow")
    return rest, ~lost


def refuse_irregular(sheet: Sheet, rest: Sheet, missing: str, others: str, allowing: str) -> None:
    """Refuse time steps that are not even, and say so if rows that were left out may be the cause.

    Args:
        sheet: With all rows.
        rest: Without those that lack a value.
        missing: The value of --missing that left them out.
        others: The options that keep these rows.
        allowing: The options that allow uneven steps.
    """
    lost = len(sheet.u) - len(rest.u)
    advice = f"{EVEN_OUT}, or pass {allowing}."
    if lost and sheet.describe_uneven_step() is None:
        which = "1 row that lacks a value, which makes a gap"
        if lost > 1:
            which = f"{lost:,} rows that lack a value, which makes gaps"
        left_out = f"--missing {missing} left out {which}"
        advice = f"{left_out}. Pass {others} to keep them, or {allowing}."
    elif lost:
        rows = "1 row that lacks a value" if lost == 1 else f"{lost:,} rows that lack a value"
        advice += f" Some gaps may come from --missing {missing}, which left out {rows}."
    text = rest.describe_uneven_step(advice)
    if text:
        raise DataError(text)


def refuse_uneven(sheet: StoredSheet, irregular: str) -> None:
    """Refuse the uneven time steps of a prepared set if `irregular` is "refuse"."""
    assert sheet.about is not None
    if irregular == "refuse" and sheet.about["uneven"]:
        raise DataError(sheet.about["uneven"])


def lacking(count: int, what: str, sheet: Sheet) -> str:
    """Return the beginning of a note: "2 rows of new.csv lack a value"."""
    which = f"1 {what} of {sheet.path} lacks"
    if count > 1:
        which = f"{count:,} {what}s of {sheet.path} lack"
    return f"{which} a value"


def note_on_lost(count: int, what: str, sheet: Sheet) -> str:
    """Return a note on rows or samples that were left out."""
    return f"{lacking(count, what, sheet)} and {'is' if count == 1 else 'are'} left out"


def note_on_filled(count: int, sheet: Sheet) -> str:
    """Return a note on gaps that were filled."""
    which = f"1 missing value of {sheet.path} is"
    if count > 1:
        which = f"{count:,} missing values of {sheet.path} are"
    return f"{which} filled from the row before"


def complain_of_first_gap(place: str, name: str) -> str:
    """Return an error's text on a gap at the begin of a sequence, which is called `name`."""
    return (
        f"{place}: the value is missing and sequence '{one_line(name)}' has none before it, so "
        "--missing ffill cannot fill it. Fix it, or pass --missing drop|mask."
    )


def complain_of_empty(sheet: Sheet, j: int, empty: np.ndarray) -> str:
    """Return an error's text on a feature j that has no value at all in some sequences.

    empty [sequences]: in which of them.
    """
    first = int(sheet.starts[int(np.argmax(empty))])
    names = [name for name, is_empty in zip(sheet.ids, empty, strict=True) if is_empty]
    have = "has" if len(names) == 1 else "have"
    total = f"{len(empty):,} sequence{'s' * (len(empty) != 1)}"
    return (
        f"{sheet.place(first, sheet.features[j])}: {len(names):,} of {total} {have} no value at "
        f"all ({quote_names(names, 3)}), so --missing ffill has nothing to fill from. Leave the "
        "column out with --features, remove these sequences, or pass --missing mask."
    )


def drop_rows(sheet: Sheet, kind: str, at: str) -> Sheet:
    """Return the sheet without the rows that lack an input, or a target that each row must have.

    kind and at say whether it must.
    """
    lost = np.isnan(sheet.u).any(1)
    if kind in ("classify", "regress") and at == "every" and sheet.y_per == "step":
        assert sheet.y is not None
        lost |= np.isnan(sheet.y).any(1)
    if not lost.any():
        return sheet
    rest = sheet.take(~lost)
    empty = [sheet.ids[i] for i in np.flatnonzero(rest.lengths == 0)]
    if empty:
        raise DataError(
            f"{sheet.path}: without the rows that lack a value, sequences {quote_names(empty)} "
            f"have length 0. Remove them, or pass --missing mask."
        )
    note = note_on_lost(int(lost.sum()), "row", sheet)
    return replace(rest, notes=(*sheet.notes, note))


def drop_samples(sheet: Sheet) -> Sheet:
    """Return the sheet without the samples that lack an input."""
    lost = np.logical_or.reduceat(np.isnan(sheet.u).any(1), sheet.starts)
    if not lost.any():
        return sheet
    if lost.all():
        raise DataError(
            f"{sheet.path}: every sample lacks a value, so none is left. Fill in the values, or "
            "pass --missing mask."
        )
    note = note_on_lost(int(lost.sum()), "sample", sheet)
    rest = sheet.take_whole(~lost)
    return replace(rest, notes=(*sheet.notes, note))


def carried_forward(sheet: Sheet) -> np.ndarray:
    """Return the inputs [N, C] with each missing one replaced by the value before it.

    NaN where the sequence has no value before it.
    """
    gaps = np.isnan(sheet.u)
    row = np.arange(len(gaps))[:, None]
    # The last row with a value, up to each row; -1 if there is none.
    latest = np.maximum.accumulate(np.where(gaps, -1, row), 0)
    first = np.repeat(sheet.starts, sheet.lengths)[:, None]  # row of the same sequence
    return np.where(latest < first, np.nan, np.take_along_axis(sheet.u, latest, 0))


def fill_forward(sheet: Sheet) -> Sheet:
    """Return the sheet with each missing input replaced by the value before it."""
    gaps = np.isnan(sheet.u)
    if not gaps.any():
        return sheet
    filled = carried_forward(sheet)
    problems = Problems(sheet.path)
    unfilled = np.isnan(filled)
    for j in np.flatnonzero(unfilled.any(0)).tolist():
        empty = np.logical_and.reduceat(gaps[:, j], sheet.starts)  # [sequences]
        if empty.any():
            problems.add(complain_of_empty(sheet, j, empty))
            unfilled[:, j] &= ~np.repeat(empty, sheet.lengths)
    left = np.argwhere(unfilled)
    for r, j in left[np.argsort(sheet.lines[left[:, 0]], kind="stable")]:
        name = sheet.ids[int(np.searchsorted(sheet.starts, r, "right")) - 1]
        problems.add(complain_of_first_gap(sheet.place(r, sheet.features[j]), name), "ffill")
    problems.raise_if_any()
    note = note_on_filled(int(gaps.sum()), sheet)
    return replace(sheet, u=filled, notes=(*sheet.notes, note))

"""WordList and gaps in time as inputs.

A column of words is one input for each word: 1 where the cell holds the word, less the share of the
training rows that hold it. So a word that training did not know, like a missing one, is 0 in all of
them, which is their mean. The map that reads the inputs then has a learned vector for each word: an
embedding.

The time since the row before, d, is the input log(1 + d / usual), standardised; usual is the median
in training. The first row of a sequence has none before it: 0, the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError, DataError, one_line
from .blocks import block_slices
from .cutting import Part
from .description import Description, Gap
from .files.sheet import Sheet, quote_names
from .files.table import AUTO
from .files.words import recur_too_rarely
from .prepared import StoredSheet, renumber_stored
from .row_blocks import chosen_inputs
from .stored_gaps import described_gap, measure_stored_gap

MOST_WORDS = 256  # inputs of a column; rarer words share one
MOST_BYTES = 4 << 30  # of the inputs of a file


def align_categories(sheets: Mapping[str, Sheet]) -> dict[str, Sheet]:
    """Return the sheets with the same number for the same word in all of them.

    So rows can be compared. WordList of the training file come first.
    """
    known: dict[str, dict[str, int]] = {}
    aligned = {}
    for split, sheet in sheets.items():
        if not sheet.categories:
            aligned[split] = sheet
            continue
        is_stored = isinstance(sheet, StoredSheet)
        u = sheet.u if is_stored else sheet.u.copy()
        categories = {}
        for name, words in sheet.categories.items():
            numbers = known.setdefault(name, {})
            new = np.array([numbers.setdefault(word, len(numbers)) for word in words] + [0])
            categories[name] = tuple(numbers)
            if isinstance(sheet, StoredSheet):
                sheet = renumber_stored(sheet, name, new)
                u = sheet.u
                continue
            column = sheet.features.index(name)
            u[:, column] = renumber(u[:, column], new)
        aligned[split] = replace(sheet, u=u, categories=categories)
    return aligned


def renumber(codes: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return new[code] for each code, NaN where it is NaN."""
    is_missing = np.isnan(codes)
    numbers = new[np.where(is_missing, 0, codes).astype(np.int64)].astype(np.float64)
    return np.where(is_missing, np.nan, numbers)


class Encodings(NamedTuple):
    """What a `Description` holds on words and gaps."""

    categories: dict[str, list[str]]
    shares: dict[str, list[float]]
    gap: Gap


def measure_encodings(part: Part, standardise: bool, gaps: bool) -> Encodings:
    """Measure words, and with `gaps` the time between rows, in the training pieces."""
    categories, shares = measure_categories(part, standardise)
    return Encodings(categories, shares, measure_gap(part, standardise) if gaps else {})


def measure_categories(
    part: Part, standardise: bool
) -> tuple[dict[str, list[str]], dict[str, list[float]]]:
    """Return the words of each categorical feature in training, and their shares of the rows.

    If there are more than MOST_WORDS, the rarest share an input, whose share is one more at the
    end. Without `standardise` the shares are 0, so that nothing is subtracted. A column in which
    hardly a word recurs is refused.

    Args:
        part: The training pieces.
        standardise: Whether inputs are to have mean 0.
    """
    categories: dict[str, list[str]] = {}
    shares: dict[str, list[float]] = {}
    sheet = part.cut.sheet
    all_counts = count_words(part)
    for name, words in sheet.categories.items():
        counts = all_counts[name]
        total = int(counts.sum())
        if recur_too_rarely(int((counts > 0).sum()), total):
            raise DataError(
                f"{sheet.path} column '{one_line(name)}': {int((counts > 0).sum()):,} different "
                f"words in {total:,} training rows recur too rarely to learn from. Leave "
                "the column out with --features."
            )
        by_count = np.argsort(-counts, kind="stable")
        kept = [int(k) for k in by_count if counts[k]]
        has_rest = len(kept) > MOST_WORDS
        if has_rest:
            kept = kept[: MOST_WORDS - 1]
        kept.sort(key=lambda k: words[k])
        fractions = [counts[k] / max(total, 1) for k in kept]
        if has_rest:
            fractions.append(1.0 - sum(fractions))
        categories[name] = [words[k] for k in kept]
        shares[name] = [float(x) * standardise for x in fractions]
    return categories, shares


def count_words(part: Part) -> dict[str, np.ndarray]:
    """Return how often each word of each categorical feature is in the rows of a part."""
    sheet = part.cut.sheet
    counts = {name: np.zeros(len(words), np.int64) for name, words in sheet.categories.items()}
    if not counts:
        return {}
    for block in chosen_inputs(part).blocks():
        for name, of_words in counts.items():
            codes = block[:, sheet.features.index(name)]
            present = codes[~np.isnan(codes)].astype(np.int64)
            of_words += np.bincount(present, minlength=len(of_words))
    return counts


def encode_categories(
    sheet: Sheet, values: np.ndarray, description: Description
) -> list[np.ndarray]:
    """Return the inputs of each categorical feature, [n, its inputs], in rows values [n, C]."""
    width = sum(map(len, description.shares.values()))
    need = len(sheet.u) * (width + len(description.features)) * 8
    if width and need > MOST_BYTES:
        raise DataError(
            f"{sheet.path}: {width} inputs for words in {len(sheet.u):,} rows take {need:,} bytes, "
            f"more than {MOST_BYTES:,}. Use fewer rows, or train on fewer columns of words."
        )
    blocks = []
    for name, words in description.categories.items():
        shares = np.array(description.shares[name])
        place = {word: k for k, word in enumerate(words)}
        # A word that training did not know counts among the rare ones, if there are any.
        rest = len(words) if len(shares) > len(words) else -1
        of_sheet = sheet.categories[name]
        new = np.array([place.get(word, rest) for word in of_sheet] + [-1])
        codes = renumber(values[:, sheet.features.index(name)], new)
        rows = np.flatnonzero(~np.isnan(codes) & (codes >= 0))
        is_known = np.zeros(len(codes), bool)
        is_known[rows] = True
        block = np.zeros((len(codes), len(shares)), description.dtype)
        block[is_known] -= shares.astype(description.dtype)
        block[rows, codes[rows].astype(np.int64)] += 1
        blocks.append(block)
    return blocks


def notes_on_encodings(sheet: Sheet, description: Description) -> list[str]:
    """Return notes on the inputs that are made of words and of gaps in the training file."""
    notes = []
    if description.categories:
        counts = [f"'{one_line(name)}' ({len(w)})" for name, w in description.categories.items()]
        notes.append(f"words as inputs: {', '.join(counts)}")
    if description.gap:
        notes.append(f"input for gaps in time: '{one_line(description.list_own_inputs()[-1][0])}'")
    if description.gap and not describe_uneven_step(sheet):
        notes.append(f"the time steps of {sheet.path} are even: --gaps adds nothing to learn from")
    return notes


def describe_uneven_step(sheet: Sheet) -> str | None:
    """Return a sentence on the first time step that is not the usual one; nothing if all are."""
    if isinstance(sheet, StoredSheet) and sheet.about is not None:
        return str(sheet.about["uneven"])
    return sheet.describe_uneven_step()


def notes_on_words(sheet: Sheet, description: Description) -> list[str]:
    """Return notes on words that training did not know, and on those that share an input."""
    notes = []
    for name, words in description.categories.items():
        has_rest = len(description.shares[name]) > len(words)
        present = sorted(present_words(sheet, sheet.features.index(name)))
        known = set(words)
        unknown = [sheet.categories[name][k] for k in present]
        unknown = [word for word in unknown if word not in known]
        if not unknown:
            continue
        which, s = "1 word is", "s"
        if len(unknown) > 1:
            which, s = f"{len(unknown):,} words are", ""
        treated = f"share{s} one input" if has_rest else f"count{s} as the mean of those known"
        notes.append(
            f"{sheet.path} column '{one_line(name)}': {which} rare or not in the training rows and "
            f"{treated}: {quote_names(unknown, 3)}"
        )
    return notes


def present_words(sheet: Sheet, column: int) -> set[int]:
    """Return the numbers of the words that a column holds."""
    present: set[int] = set()
    for block in block_slices(len(sheet.u), len(sheet.features)):
        codes = sheet.u[block][:, column]
        present.update(np.unique(codes[~np.isnan(codes)]).astype(np.int64).tolist())
    return present


def check_encoding_options(
    categorical: tuple[str, ...], gaps: bool, kind: str | None, rows: str, wide: bool
) -> None:
    """Refuse inputs beside the features where inputs are to be reconstructed, or have no time."""
    if wide and categorical:
        raise ConfigError(
            "--categorical names columns of words, but with --wide the columns are time steps. "
            "Leave it out."
        )
    if kind == "reconstruct" and categorical:
        raise ConfigError(
            "--categorical adds inputs that cannot be reconstructed. Leave the columns out with "
            "--features."
        )
    if gaps and rows == "samples":
        raise ConfigError(
            "--gaps needs sequences of time steps; the rows here are samples without time. Leave "
            "it out."
        )


def refuse_unfit_words(sheet: Sheet, kind: str | None, categorical: tuple[str, ...]) -> None:
    """Refuse --categorical for a file that is no table, and next steps of words alone."""
    if categorical not in ((), AUTO) and not sheet.categories:
        raise DataError(
            f"{sheet.path} is no table: --categorical names columns of a .csv or .parquet file. "
            "Leave it out."
        )
    if kind == "next" and len(sheet.categories) == len(sheet.features):
        raise DataError(
            f"{sheet.path}: --kind next predicts the columns of numbers, and there are none beside "
            f"--categorical {quote_names(sheet.features)}."
        )


def times_since(sheet: Sheet) -> np.ndarray:
    """Return the time since the row before, [N], in the units of `sheet.time`.

    NaN in the first row of a sequence.
    """
    assert sheet.time is not None
    time = sheet.time
    since = np.full(len(time), np.nan)
    since[1:] = (time[1:] - time[:-1]).astype(np.float64)
    since[sheet.starts] = np.nan
    return since


def measure_gap(part: Part, standardise: bool) -> Gap:
    """Return the scale of the time since the row before, in the rows of the training pieces."""
    sheet = part.cut.sheet
    if isinstance(sheet, StoredSheet):
        return measure_stored_gap(part, standardise)
    if sheet.time is None:
        raise DataError(
            f"{sheet.path}: --gaps needs a time column. Name it with --time, or leave --gaps out."
        )
    since = times_since(sheet)[rows_of(part)]
    since = since[~np.isnan(since)]
    if not len(since):
        raise DataError(
            f"{sheet.path}: --gaps needs sequences of two rows or more. Leave --gaps out."
        )
    usual = float(np.median(since))
    logs = np.log1p(since / usual)
    mean, std = float(logs.mean()), float(logs.std())
    return described_gap(usual, mean, std, sheet.has_dates, standardise)


def rows_of(part: Part) -> np.ndarray:
    """Return which rows of its sheet are in a part, [N]."""
    is_used = np.zeros(len(part.cut.sheet.u), bool)
    for _, start, stop in part.pieces:
        is_used[start:stop] = True
    return is_used


def encode_gap(sheet: Sheet, description: Description) -> list[np.ndarray]:
    """Return the input for the time since the row before, [N, 1]; none without such an input."""
    gap = description.gap
    if not gap:
        return []
    if sheet.time is None:
        raise DataError(
            f"{sheet.path} has no times, and the network reads the time since the row before. Add "
            "a column of times, or name it with --time."
        )
    if bool(gap["dates"]) != sheet.has_dates:
        kinds = ("numbers", "dates")
        raise DataError(
            f"{sheet.path}: times are {kinds[sheet.has_dates]} and were "
            f"{kinds[bool(gap['dates'])]} in training; expected the same."
        )
    since = times_since(sheet)
    scaled = (np.log1p(since / gap["usual"]) - gap["mean"]) / gap["std"]
    return [np.nan_to_num(scaled, nan=0.0).astype(description.dtype)[:, None]]

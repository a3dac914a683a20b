"""From files to sheets: several files read alike, labels as numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from ..errors import ConfigError, DataError, one_line
from .description import ColumnNames, Description
from .files.sheet import Options, Problems, Sheet, quote_names
from .files.texts import WordCollector, WordList
from .memory import Source, read_source
from .prepared import StoredSheet, encode_stored_labels, stored_labels

ROWS_COMPARED = 1 << 14  # at a time
REAL_LABEL = re.compile(
    r"[+-]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?|[+-]?(nan|inf)", re.ASCII
)
WHOLE_REAL_LABEL = re.compile(r"^([+-]?\d{1,300})\.0*$", re.ASCII)
WHOLE_LABEL = re.compile(r"[+-]?\d{1,300}", re.ASCII)


def column_names(names: ColumnNames) -> tuple[str, ...] | None:
    """Return one name or several as a tuple; None, if names are not given, stays None."""
    if names is None:
        return None
    return (names,) if isinstance(names, str) else tuple(names)


def read_all(paths: Mapping[str, Source | None], options: Options) -> dict[str, Sheet]:
    """Read the file of each split, by the columns of the training file, which comes first.

    Splits without a path (None) are left out. Held-out files must have as many features and
    targets, and must be different files.
    """
    sheets: dict[str, Sheet] = {}
    for split, path in paths.items():
        if path is None:
            continue
        if sheets:
            options = options_like(sheets["train"], options)
        sheet = read_source(path, options)
        for other_split, other in sheets.items():
            refuse_different_columns(sheet, split, other, other_split)
        sheets[split] = sheet
    return sheets


def options_like(first: Sheet, options: Options) -> Options:
    """Return the options that read a held-out file like the training file."""
    options = replace(options, kind=options.kind or kind_of(first), use="held-out")
    if not first.has_names:  # columns are known by position: there are no names to ask for
        return options
    if first.steps:
        options = replace(options, steps=first.steps)
    return replace(
        options,
        id=first.columns["id"],
        time=first.columns["time"],
        target=first.targets,
        features=first.features,
        categorical=tuple(first.categories),
        dates=first.columns.get("dates", options.dates),
    )


def refuse_different_columns(new: Sheet, split: str, old: Sheet, old_split: str) -> None:
    """Refuse a held-out file with the bytes of another, or with other columns."""
    if old.sha256 == new.sha256:
        raise DataError(
            f"{new.path} ({split}) and {old.path} ({old_split}) hold the same bytes "
            f"(SHA-256 {new.sha256[:12]}...): each split needs its own data."
        )
    if len(old.features) != len(new.features):
        raise DataError(
            f"{new.path} ({split}) has {len(new.features)} features and {old.path} ({old_split}) "
            f"has {len(old.features)}; expected the same."
        )
    if old.shape != new.shape:
        raise DataError(
            f"{new.path} ({split}) has samples of shape {show_shape(new.shape)} and {old.path} "
            f"({old_split}) of {show_shape(old.shape)}; expected the same."
        )
    same_targets = len(old.targets) == len(new.targets) and (old.y is None) == (new.y is None)
    if same_targets and old.y_per != new.y_per:
        raise DataError(
            f"{new.path} ({split}) has a target for each {new.y_per} and {old.path} ({old_split}) "
            f"for each {old.y_per}; expected the same. Prepare both files, or neither."
        )
    if not same_targets:
        raise DataError(
            f"{new.path} ({split}) has {len(new.targets)} targets and {old.path} ({old_split}) "
            f"has {len(old.targets)}; expected the same."
        )


def show_shape(shape: tuple[int, ...] | None) -> str:
    """Return the shape of a sample as text: "[1, 8, 8]"."""
    return str(list(shape or ()))


def match_features(sheet: Sheet, description: Description) -> Sheet:
    """Return the sheet with its features named as in training.

    A file without names is refused if the network reads by name, and so is another number of
    features.
    """
    if description.named and not sheet.has_names:
        raise DataError(
            f"{sheet.path} has no column names, and the network reads "
            f"{quote_names(description.features)} by name. Give a table (.csv or .parquet)."
        )
    if len(sheet.features) != len(description.features):
        raise DataError(
            f"{sheet.path} has {len(sheet.features)} features and the network was trained on "
            f"{len(description.features)}."
        )
    if sheet.shape is not None and sheet.shape != description.sample_shape:
        raise DataError(
            f"{sheet.path} has samples of shape {show_shape(sheet.shape)} and the network was "
            f"trained on {show_shape(description.sample_shape)}."
        )
    return replace(sheet, features=tuple(description.features))


def kind_of(sheet: Sheet) -> str:
    """Return the task that the target suggests: numbers are regressed, words classified."""
    has_numbers = sheet.y is not None and sheet.y.dtype.kind == "f"
    return "regress" if has_numbers else "classify"


def labels_in(sheet: Sheet) -> list[str]:
    """Return the classes in the target column of a sheet."""
    where = f"{sheet.path} column '{one_line(sheet.targets[0])}'"
    if isinstance(sheet, StoredSheet):
        return labels_of(stored_labels(sheet), where)
    return labels_of(label_words(sheet).present, where)


def label_words(sheet: Sheet) -> WordList:
    """Return the labels of a sheet, with 1.0 as 1: a data frame writes it so beside a gap."""
    words = sheet.y
    if not isinstance(words, WordList):
        collector = WordCollector()
        collector.add(words.tolist())
        words = collector.collected()
    plain = {word: WHOLE_REAL_LABEL.sub(r"\1", word) for word in words.different}
    return words.renamed(plain)


def labels_of(words: Iterable[str], where: str) -> list[str]:
    """Return the classes among labels, where "" is a missing one.

    They are sorted, as numbers if all of them are whole numbers. Real numbers and a single class
    are refused. `where` names their column in messages.
    """
    labels = sorted({word for word in words if word})
    real = [word for word in labels if REAL_LABEL.fullmatch(word)]
    if real:
        raise DataError(
            f'{where}: "{one_line(real[0])}" is a real number, but classes are words or whole '
            "numbers. Pass --kind regress, or write the labels without a decimal point."
        )
    if len(labels) < 2:
        what = "no labels: every one is missing"
        if labels:
            what = f"one class only, '{one_line(labels[0])}'"
        raise DataError(f"{where}: there is {what}; expected at least two classes.")
    if are_whole_numbers(labels):
        labels.sort(key=int)
    return labels


def are_whole_numbers(labels: list[str]) -> bool:
    """Tell whether all labels are whole numbers."""
    return all(WHOLE_LABEL.fullmatch(word) for word in labels)


def encode_labels(sheet: Sheet, labels: list[str]) -> Sheet:
    """Return the sheet with labels as class numbers, NaN where missing.

    labels: the classes, in the order of their numbers. y is then [N, 1], or [n, 1] with a label for
    each sequence. A label that does not occur in the training file is refused.
    """
    if isinstance(sheet, StoredSheet):
        return encode_stored_labels(sheet, labels)
    number = {word: float(k) for k, word in enumerate(labels)} | {"": math.nan}
    words = label_words(sheet)
    problems = Problems(sheet.path)
    for k, word in enumerate(words.different):
        is_used = word not in number and bool((words.numbers == k).any())
        if not is_used:
            continue
        i = int(np.argmax(words.numbers == k))
        # Entry i belongs to row i, or to sequence i, which is named by its first row.
        row = i if sheet.y_per == "step" else int(sheet.starts[i])
        problems.add(
            f"{sheet.place(row, sheet.targets[0])}: label '{one_line(word)}' does not occur in the "
            f"training file, whose labels are {quote_names(labels)}.",
            "unseen",
        )
    problems.raise_if_any()
    codes = np.array([number.get(word, math.nan) for word in words.different])
    return replace(sheet, y=codes[words.numbers][:, None])


def choose_readout(sheet: Sheet, kind: str, at: str | None) -> str:
    """Return where the target is, "last" or "every": as chosen (`at`), or the only possibility.

    A target that is constant within each of several sequences belongs to the sequences.
    """
    if kind == "next":
        if at == "last":
            raise ConfigError("--kind next predicts at every step; leave --at out.")
        return "every"
    if sheet.y_per == "sequence":
        if at == "every":
            raise DataError(
                f"{sheet.path} has one target for each sequence; --at every needs one for each "
                "step."
            )
        return "last"
    if at:
        return at
    is_constant_within = is_target_constant_within(sheet)
    if is_constant_within and len(sheet.lengths) > 1:
        return "last"
    why = "the target changes within sequences"
    if is_constant_within:
        why = "there is one sequence"
    if sheet.may_hold_samples:
        raise DataError(
            f"{sheet.path} has neither an id nor a time column, so its {len(sheet.u):,} rows are "
            "one sequence. If each row is a sample of its own, pass --chain 64x2, a network "
            "without time. If rows are steps in time, pass --at every to predict the target at "
            "each of them, or --kind next to predict the next row."
        )
    raise DataError(
        f"{sheet.path}: {why}. Pass --at every to predict it at each row, --at last to predict "
        "that of the last row."
    )


def is_target_constant_within(sheet: Sheet) -> bool:
    """Tell whether no sequence has two different targets."""
    if isinstance(sheet, StoredSheet):
        assert sheet.about is not None
        return not sheet.about["target_changes"]
    # The least and largest target of each sequence; NaN if all are missing.
    low = np.fmin.reduceat(sheet.y, sheet.starts)
    high = np.fmax.reduceat(sheet.y, sheet.starts)
    return bool((np.isnan(low) | (low == high)).all())


def notes_on_single_rows(sheet: Sheet) -> list[str]:
    """Return a note on sequences of one row each, which may be meant as samples."""
    if sheet.shape is not None or len(sheet.lengths) < 2 or sheet.lengths.max() > 1:
        return []
    return [f"every sequence of {sheet.path} has one row: for samples without time, pass --chain"]


def check_target(sheet: Sheet, kind: str, labels: list[str]) -> None:
    """Refuse a target that is missing everywhere, or that equals an input in every row.

    labels: the classes that the numbers in the target stand for; none in a regression.
    """
    if kind in ("next", "reconstruct") or isinstance(sheet, StoredSheet):
        return  # of a prepared set it was refused when it was written
    y = sheet.y
    assert y is not None
    values = None
    if labels and are_whole_numbers(labels):
        # Labels that are numbers are compared with the inputs by value, not by class number.
        values = np.append([float(word) for word in labels], np.nan)
    for k, name in enumerate(sheet.targets):
        if np.isnan(y[:, k]).all():
            raise DataError(f"{sheet.path} column '{one_line(name)}': every target is missing.")
        if sheet.y_per != "step":
            continue
        for j, feature in enumerate(sheet.features):
            if are_equal_columns(y[:, k], sheet.u[:, j], values):
                raise DataError(
                    f"{sheet.path}: target '{one_line(name)}' equals input '{one_line(feature)}' "
                    "in every row. Leave the input out with --features."
                )


def are_equal_columns(y: np.ndarray, u: np.ndarray, values: np.ndarray | None) -> bool:
    """Tell whether targets y [N] equal inputs u [N]; missing values are equal, too.

    values: those of the class numbers in y, NaN at the end; None if y holds values itself.
    """
    for begin in range(0, len(u), ROWS_COMPARED):
        block = y[begin : begin + ROWS_COMPARED]
        if values is not None:
            block = values[np.nan_to_num(block, nan=len(values) - 1).astype(int)]
        if not np.array_equal(block, u[begin : begin + ROWS_COMPARED], equal_nan=True):
            return False
    return True

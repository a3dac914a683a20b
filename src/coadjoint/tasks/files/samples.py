"""Samples without time in NumPy arrays: .npz with x (n, ...) and y, or .npy with x alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .arrays import as_targets, read_ids, refuse_inexact, to_float64
from .numpy_files import ExpectedArray, read_archive, read_array
from .sheet import Options, Problems, Sheet, refuse_bad_values
from .source import LoadedFile

SHAPES = "x (n, features), (n, channels, height, width) or (n, ...): samples first"
# The arrays of an .npz file.
SAMPLE_MEMBERS = {
    "x": ExpectedArray("f", tuple(range(2, 9)), SHAPES),
    "y": ExpectedArray("fU", (1, 2), "(n,) or (n, k)"),
    "ids": ExpectedArray("iU", (1,), "(n,)"),
}
# What the axes of an array are taken for, by their number.
SAMPLE_AXES = {
    2: "samples, features",
    3: "samples, height, width",
    4: "samples, channels, height, width",
}
FEWEST_PIXELS = 5  # along height and width, for an array to be taken for images
MOST_CHANNELS = 4


def read_npy_samples(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """Read x (n, ...): inputs only, for prediction."""
    x = read_array(source.open(), source.size, source.path, SAMPLE_MEMBERS["x"])
    no_notes = ()
    return sheet_of_arrays(source, {"x": x}, no_notes, options, problems)


def read_npz_samples(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """Read x (n, ...) with optional y (n,) or (n, k) and ids (n,); x may be called X or X_train."""
    needed = f"an array {SHAPES}, and y"
    arrays, name, notes = read_archive(source, SAMPLE_MEMBERS, needed, options)
    return sheet_of_arrays(source, arrays, notes, options, problems, name)


def sheet_of_arrays(
    source: LoadedFile,
    arrays: dict[str, np.ndarray],
    notes: tuple[str, ...],
    options: Options,
    problems: Problems,
    name: str = "x",
    names: Sequence[str] | None = None,
) -> Sheet:
    """The samples of x, in a sheet.

    Images without an axis of channels, (n, height, width), get one.
    arrays: x, and perhaps ids and y; name: that of x in the file; names: those of the features, by
    default x0, x1, ...
    """
    x = arrays["x"]
    n = len(x)
    given = x.shape
    if x.ndim == 3:
        x = x[:, None]
        notes += (f"samples of shape {list(given[1:])} are read as [1, {given[1]}, {given[2]}]",)
    if looks_channels_last(given):
        notes += (
            f"x has shape {list(given)}: if its channels are last, write x.transpose(0, 3, 1, 2), "
            "because convolutions read them first",
        )
    shape = x.shape[1:]

    def entry(index: tuple[int, ...]) -> str:
        """The place of an entry of x in the file, in words."""
        # The axis that was added is no axis of the file.
        numbers = index if x.ndim == len(given) else (index[0], *index[2:])
        return f"{source.path} {name}[{', '.join(map(str, numbers))}]"

    refuse_inexact(x, lambda index: entry(tuple(index)), problems)
    y = arrays.get("y")
    targets: tuple[str, ...] = ()
    if y is not None:
        if len(y) != n:
            problems.refuse(
                f"{source.path} array 'y' has shape {y.shape} but x has {n} samples (shape "
                f"{given}); expected y to begin with {n}."
            )
        y = as_targets(source.path, y, options, problems)
        count = 1 if y.ndim == 1 else y.shape[1]
        targets = tuple(f"y{k}" for k in range(count))
    elif options.kind != "next":
        problems.add(
            f"{source.path} holds inputs only (no array 'y'). Write x and y with numpy.savez."
        )
    ids = read_ids(source.path, arrays.get("ids"), n, problems)
    problems.raise_if_any()
    features = tuple(names or (f"x{j}" for j in range(shape[0])))
    places = math.prod(shape[1:])

    def where(row: int, column: str) -> str:
        i, place = divmod(row, places)
        if column not in features:
            return f"{source.path} {column} of sample {i}"
        inner = np.unravel_index(place, shape[1:]) if len(shape) > 1 else ()
        return entry((i, features.index(column), *map(int, inner)))

    sheet = Sheet(
        source.path,
        source.sha256,
        features,
        rows_of_samples(to_float64(x)),
        np.full(n, places),
        ids,
        where,
        np.arange(n * places),
        targets=targets,
        y=y,
        y_per="sequence",
        has_names=False,
        notes=notes,
        shape=shape,
        has_ids="ids" in arrays,
        layout=f"{name} {list(given)}: {SAMPLE_AXES.get(len(given), 'samples first')}",
    )
    return refuse_bad_values(sheet, options, problems)


def rows_of_samples(x: np.ndarray) -> np.ndarray:
    """The samples [n, C, ...] as rows of C features, a row for each place of each sample."""
    n, C = x.shape[:2]
    places_last = x.reshape(n, C, -1)
    return np.ascontiguousarray(places_last.transpose(0, 2, 1)).reshape(-1, C)


def samples_of_rows(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The samples [n, C, ...] whose rows these are: the inverse of `rows_of_samples`."""
    C = rows.shape[1]
    places_first = rows.reshape(-1, math.prod(shape[1:]), C)
    n = len(places_first)
    return np.ascontiguousarray(places_first.transpose(0, 2, 1)).reshape(n, C, *shape[1:])


def looks_channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape may hold images with their channels last."""
    if len(shape) != 4:
        return False
    _, first, second, last = shape
    return last <= MOST_CHANNELS and min(first, second) >= FEWEST_PIXELS

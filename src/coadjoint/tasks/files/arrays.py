"""Sequences in NumPy arrays: .npz with u or X (n, T, C) and y, or .npy with u alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ...errors import DataError, error_text
from .numpy_files import ExpectedArray, read_archive, read_array, read_checked_header
from .parsing import EXACT_BELOW, explain_inexact
from .sheet import Options, Problems, Sheet, refuse_bad_values
from .source import LoadedFile, open_file
from .table import KIND_ADVICE

AXES = "u (n, T, C): sequences first, then steps, then features"


NPY = ExpectedArray(
    "f",
    (1, 2, 3),
    "(n, T, C) or (n, T): sequences, steps, features; or (T,): one sequence",
    doubles=True,
)
STREAM = ExpectedArray("f", (1, 2), "numbers [rows, columns]")
# The arrays of an .npz file.
MEMBERS = {
    "u": ExpectedArray("f", (2, 3), f"{AXES}; or u (sum of lengths, C) with lengths", doubles=True),
    "y": ExpectedArray("fU", (1, 2, 3), "(n,), (n, k), (n, T) or (n, T, k)"),
    "lengths": ExpectedArray("i", (1,), "(n,) whole numbers"),
    "ids": ExpectedArray("iU", (1,), "(n,)"),
}


def read_npy(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """Read u (n, T, C), (n, T) or (T,): inputs only, for next-step prediction."""
    u = read_array(source.open(), source.size, source.path, NPY)
    arrays = {"u": u}
    layout = describe_layout("", u.shape)
    if u.ndim == 1:
        arrays = {"u": u[:, None], "lengths": np.array([len(u)])}
    elif u.ndim == 2:
        arrays["u"] = u[..., None]
    no_notes = ()
    sheet = make_sheet(source, arrays, no_notes, options, problems)
    return replace(sheet, layout=layout)


def read_npz(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """Read u with optional y, lengths (n,) and ids (n,).

    u  (n, T, C), or (sum of lengths, C) if lengths are given
    y  (n,) or (n, k): one per sequence; (n, T), (n, T, k), or as many rows as a ragged u: one per
       step

    u may be called X, x or X_train, and is then also (n, T), for one feature; or (T, C), for one
    sequence, if each row has its target (options.at is "every").
    """
    arrays, name, notes = read_archive(source, MEMBERS, f"an array {AXES}, and y", options)
    u = arrays["u"]
    layout = describe_layout(name, u.shape)
    if "lengths" in arrays:
        layout = f"{name} {list(u.shape)} with lengths"
    elif u.ndim == 2 and name != "u" and is_one_sequence(u, arrays.get("y"), options):
        layout = f"{name} {list(u.shape)}: steps, features"
        arrays["lengths"] = np.array([len(u)])
    elif u.ndim == 2 and name != "u":
        arrays["u"] = u[..., None]
    sheet = make_sheet(source, arrays, notes, options, problems, name)
    return replace(sheet, layout=layout)


def is_one_sequence(u: np.ndarray, y: np.ndarray | None, options: Options) -> bool:
    """Whether u (rows, C) is one sequence: each of its rows has a target, if that was asked for."""
    if y is None or options.at != "every":
        return False
    return len(y) == len(u) and y.shape[:2] != u.shape


def describe_layout(name: str, shape: tuple[int, ...]) -> str:
    """What the axes of an array are taken for."""
    what = f"{name} {list(shape)}".strip()
    if len(shape) == 1:
        return f"{what}: the steps of one sequence"
    if len(shape) == 2:
        return f"{what}: sequences, steps of one feature"
    return f"{what}: sequences, steps, features"


class ArrayRows:
    """The rows of a .npy file [rows, columns], mapped into memory: (number, cells) of each.

    The columns are called c1, c2, ...
    """

    has_names = False

    def __init__(self, path: str) -> None:
        self.path = path
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            shape, order, dtype = read_checked_header(file, size, path, STREAM)
            begin = file.tell()
        try:
            values = np.memmap(path, dtype, "r", begin, shape, order)  # type: ignore[call-overload]
        except (ValueError, OSError) as error:
            raise DataError(
                f"{path} cannot be mapped into memory: {error_text(error, 120)}."
            ) from None
        self.values = values.reshape(len(values), -1)
        self.names = [f"c{k + 1}" for k in range(self.values.shape[1])]

    @classmethod
    def open(cls, path: str, options: Options) -> ArrayRows:
        """The rows of the file at `path`; options: none applies."""
        return cls(path)

    def __iter__(self) -> Iterator[tuple[int, list[object]]]:
        """(number, cells) of each row, from 1."""
        for number, row in enumerate(self.values, 1):
            yield number, row.tolist()

    def place(self, row: int) -> str:
        """A row of the file, in words: "d.npy row 17"."""
        return f"{self.path} row {row}"

    def holds_dates(self, name: str) -> bool:
        """False: an array holds numbers."""
        return False

    def close(self) -> None:
        """Do nothing: the mapping ends with this object."""


def make_sheet(
    source: LoadedFile,
    arrays: dict[str, np.ndarray],
    notes: tuple[str, ...],
    options: Options,
    problems: Problems,
    name: str = "u",
    names: Sequence[str] | None = None,
) -> Sheet:
    """The sequences of u, padded (n, T, C) or one after the other (sum of lengths, C).

    arrays: u, and perhaps lengths, ids and y; without lengths all sequences have T steps.
    name: that of u in the file; names: those of the features, by default u0, u1, ...
    """
    u = arrays["u"]
    lengths = arrays.get("lengths")
    if lengths is None:
        if u.ndim == 2:
            problems.refuse(
                f"{source.path} array 'u' has shape {u.shape}; expected {AXES}. For one feature "
                "write u[:, :, None]; for sequences of unequal length, one after the other, add "
                "lengths (n,)."
            )
        lengths = np.full(len(u), u.shape[1])
    check_lengths(source.path, lengths, u.shape, problems)
    lengths = lengths.astype(np.int64)
    keep: np.ndarray | None = None  # [n, T] the entries that are not padding
    rows = u
    if u.ndim == 3:
        keep = np.arange(u.shape[1])[None, :] < lengths[:, None]
        rows = u.reshape(-1, u.shape[2]) if keep.all() else u[keep]
    starts = np.cumsum(lengths) - lengths
    features = tuple(names or (f"u{j}" for j in range(rows.shape[1])))

    def where(row: int, column: str) -> str:
        i = int(np.searchsorted(starts, row, side="right")) - 1
        if column not in features:
            return f"{source.path} {column} of sequence {i}"
        j = features.index(column)
        entry = f"[{row}, {j}]" if keep is None else f"[{i}, {row - int(starts[i])}, {j}]"
        return f"{source.path} {name}{entry} column '{column}'"

    refuse_inexact(rows, lambda index: where(index[0], features[index[1]]), problems)
    ids = read_ids(source.path, arrays.get("ids"), len(lengths), problems)
    y = arrays.get("y")
    y_per = "step"
    if y is not None:
        y, y_per = prepare_targets(source.path, y, u, lengths, keep, options, problems)
    elif options.kind != "next":
        advice = options.advise(
            "Pass --kind next to predict the next step, or add y to an .npz.", "Add the targets."
        )
        problems.add(f"{source.path} holds inputs only (no array 'y'). {advice}")
    problems.raise_if_any()
    targets: tuple[str, ...] = ()
    if y is not None:
        count = 1 if y.ndim == 1 else y.shape[1]
        targets = tuple(f"y{k}" for k in range(count))
    sheet = Sheet(
        source.path,
        source.sha256,
        features,
        to_float64(rows),
        lengths,
        ids,
        where,
        np.arange(len(rows), dtype=np.int32 if len(rows) < 2**31 else np.int64),
        targets=targets,
        y=y,
        y_per=y_per,
        has_names=False,
        notes=notes,
        rows=np.arange(len(rows)) if keep is None else None,
        has_ids="ids" in arrays,
    )
    return refuse_bad_values(sheet, options, problems)


def check_lengths(
    path: str, lengths: np.ndarray, shape: tuple[int, ...], problems: Problems
) -> None:
    """Refuse lengths that do not fit u, whose shape is given."""
    is_padded = len(shape) == 3
    longest = shape[1] if is_padded else shape[0]
    if is_padded and len(lengths) != shape[0]:
        problems.add(
            f"{path} array 'lengths' has {len(lengths)} entries but u has {shape[0]} sequences "
            f"(shape {shape}; {AXES})."
        )
    for i in np.flatnonzero((lengths < 1) | (lengths > longest)):
        problems.add(
            f"{path} lengths[{i}]: sequence {i} has length {lengths[i]}; expected 1..{longest}.",
            "lengths",
        )
    total = sum(map(int, lengths))
    if not is_padded and not problems.groups and total != shape[0]:
        problems.add(
            f"{path}: the lengths add up to {total} but u has {shape[0]} rows; expected u (sum of "
            "lengths, C)."
        )
    problems.raise_if_any()


def read_ids(path: str, ids: np.ndarray | None, count: int, problems: Problems) -> list[str]:
    """The names of the sequences; their numbers if there is no array 'ids'."""
    if ids is None:
        return list(map(str, range(count)))
    names = to_texts(ids, f"{path} array 'ids'")
    if len(names) != count or len(set(names)) != count:
        problems.add(
            f"{path} array 'ids' has {len(names)} entries, {len(set(names))} of them different; "
            f"expected {count} different ones."
        )
    return names


def to_float64(values: np.ndarray) -> np.ndarray:
    """The values as a contiguous array of doubles."""
    return np.ascontiguousarray(values, dtype=np.float64)


def refuse_inexact(
    values: np.ndarray, where: Callable[[list[int]], str], problems: Problems
) -> None:
    """Report whole numbers that a double cannot hold; where: puts an index in words."""
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8:
        return
    for index in np.argwhere(np.abs(values.astype(np.float64)) >= EXACT_BELOW):
        exact = int(values[tuple(index)])
        if int(float(exact)) != exact:
            problems.add(f"{where(index.tolist())}: {explain_inexact(exact)}.", "exact")


def to_texts(values: np.ndarray, name: str) -> list[str]:
    """The entries as text without surrounding spaces."""
    try:
        texts = [str(value).strip() for value in values.tolist()]
        "".join(texts).encode()
    except ValueError:
        raise DataError(f"{name} holds text that is not Unicode. Write it again.") from None
    return texts


def prepare_targets(
    path: str,
    y: np.ndarray,
    u: np.ndarray,
    lengths: np.ndarray,
    keep: np.ndarray | None,
    options: Options,
    problems: Problems,
) -> tuple[np.ndarray, str]:
    """(y, "step" or "sequence"): an entry per step or per sequence, numbers [., k] or labels [.].

    keep: the steps [n, T] of a padded u that are not padding; None if u is not padded.
    """
    per_step = is_per_step(path, y, u, lengths, options, problems)
    y_per = "step" if per_step else "sequence"
    if per_step and keep is not None:
        y = y[keep]
    return as_targets(path, y, options, problems), y_per


def as_targets(path: str, y: np.ndarray, options: Options, problems: Problems) -> np.ndarray:
    """Y as numbers [., k] or labels [.], whichever it holds and options.kind asks for."""
    is_label = y.dtype.kind in "Ub" or options.kind == "classify"
    if not is_label:
        if options.kind is None:
            problems.refuse(f"{path} array 'y' holds numbers ({y.dtype}). {KIND_ADVICE}")
        refuse_inexact(y, lambda index: f"{path} y[{index[0]}]", problems)
        return to_float64(y.reshape(len(y), -1))
    if options.kind == "regress":
        problems.refuse(f"{path} array 'y' has dtype {y.dtype}; --kind regress needs numbers.")
    if y.ndim > 1 and y.shape[-1] == 1:
        y = y[..., 0]  # a single column of labels
    if y.dtype.kind == "f" and bool((y == np.round(y)).all()) and np.abs(y).max() < EXACT_BELOW:
        y = y.astype(np.int64)  # whole numbers, which may be classes
    if y.ndim > 1:
        problems.refuse(f"{path} array 'y' has {y.shape[-1]} columns of labels; expected one.")
    return np.array(to_texts(y, f"{path} array 'y'"), dtype=object)


def is_per_step(
    path: str,
    y: np.ndarray,
    u: np.ndarray,
    lengths: np.ndarray,
    options: Options,
    problems: Problems,
) -> bool:
    """Whether y has a target per step, or else one per sequence; other shapes are refused.

    A shape that fits both is decided by options.at.
    """
    count = len(lengths)
    is_padded = u.ndim == 3
    fits_steps = y.shape[:2] == u.shape[:2] if is_padded else len(y) == len(u)
    fits_sequences = len(y) == count and y.ndim < 3
    if fits_steps and fits_sequences:
        if is_padded and y.ndim == 2 and not options.at:
            problems.refuse(
                f"{path} array 'y' has shape {y.shape}: is it a value for each of {u.shape[1]} "
                f"steps, or {y.shape[1]} targets per sequence? Pass --at every or --at last."
            )
        return options.at == "every"
    if not fits_steps and not fits_sequences:
        hint = ""
        if is_padded and len(y) == u.shape[1]:
            hint = " The axes of u look swapped: write u.transpose(1, 0, 2)."
        problems.refuse(
            f"{path} array 'y' has shape {y.shape} but u has {count} sequences (shape {u.shape}; "
            f"{AXES}); expected y to begin with {count}.{hint}"
        )
    return fits_steps

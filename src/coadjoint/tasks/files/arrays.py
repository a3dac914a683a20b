"""NumPy arrays: .npz with u (n, T, C) and y, or .npy with u alone. Nothing in them is ever unpickled."""

from __future__ import annotations

import io
import math
import os
import warnings
import zipfile
from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from ...errors import DataError, error_text, one_line
from .parsing import EXACT_BELOW, explain_inexact
from .sheet import Options, Problems, Sheet, refuse_bad_values
from .source import LoadedFile, open_file, refuse_if_too_large

AXES = "u (n, T, C): sequences first, then steps, then features"
MEMBERS = ("u", "y", "lengths", "ids")


def read_npy(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """u (n, T, C) or (n, T): inputs only, for next-step prediction."""
    u = read_array(io.BytesIO(source.data), len(source.data), source.path, "f", (2, 3), "(n, T, C) or (n, T): sequences, steps, features")  # fmt: skip
    return make_sheet(source, {"u": u[..., None] if u.ndim == 2 else u}, (), options, problems)


def read_npz(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """u (n, T, C) with optional lengths (n,), or u (sum of lengths, C) with lengths; y and ids are optional.

    y  (n,) or (n, k): one for each sequence; (n, T), (n, T, k), or as many rows as a ragged u: one for each step
    """
    try:
        archive = zipfile.ZipFile(io.BytesIO(source.data))
        infos = archive.infolist()
    except Exception as e:
        kind = source.magic()
        what = (
            f"holds {kind[0]}"
            if kind and "zip" not in kind[0]
            else f"is not a whole zip archive ({error_text(e, 80)})"
        )
        raise DataError(
            f"{source.path} is named .npz but {what}. Write it with numpy.savez."
        ) from None
    names = [i.filename.removesuffix(".npy") for i in infos]
    if len(set(names)) != len(names):
        raise DataError(
            f"{source.path}: an array appears twice in the archive. Write it again with numpy.savez."
        )
    found = {n: i for n, i in zip(names, infos, strict=True) if n in MEMBERS}
    if "u" not in found:
        raise DataError(
            f"{source.path} holds {', '.join(one_line(n) for n in names[:12]) or 'no arrays'}; expected an array {AXES}, and y."
        )
    need = sum(i.file_size for i in found.values())
    refuse_if_too_large(source.path, "", need, need, options.max_bytes)
    for name, info in found.items():
        refuse_if_too_large(
            f"{source.path}: '{name}'", "", info.file_size, info.compress_size, options.max_bytes
        )
    wanted = {
        "u": ("f", (2, 3), f"{AXES}; or u (sum of lengths, C) with lengths"),
        "y": ("fU", (1, 2, 3), "(n,), (n, k), (n, T) or (n, T, k)"),
        "lengths": ("i", (1,), "(n,) whole numbers"),
        "ids": ("iU", (1,), "(n,)"),
    }
    arrays = {}
    for name, info in found.items():
        if options.kind == "next" and name == "y":
            continue
        try:
            with archive.open(info) as f:
                arrays[name] = read_array(
                    f, info.file_size, f"{source.path} array '{name}'", *wanted[name]
                )
        except DataError:
            raise
        except Exception as e:
            raise DataError(
                f"{source.path}: array '{name}' is damaged: {error_text(e, 80)}. Write it again."
            ) from None
    notes = tuple(f"array '{one_line(n)}' is left out" for n in names if n not in MEMBERS)
    return make_sheet(source, arrays, notes, options, problems)


def read_header(f: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether it is in Fortran's order, dtype) of an array; f then stands at its numbers."""
    headers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            version = npy.read_magic(f)
            if version not in headers:
                raise ValueError(f"format {version[0]}.{version[1]}, expected 1.0 or 2.0")
            return headers[version](f)
    except zipfile.BadZipFile:
        raise
    except Exception as e:
        raise DataError(
            f"{name} is not a NumPy array: {error_text(e, 80)}. Write it with numpy.save or numpy.savez."
        ) from None


def read_checked_header(
    f: IO[bytes], size: int, name: str, kinds: str, dims: tuple[int, ...], expected: str
) -> tuple[tuple[int, ...], str, np.dtype]:
    """(shape, its order "C" or "F", dtype) of an array that can be used, before anything is allocated; size: of the file."""
    shape, fortran, dtype = read_header(f, name)
    if dtype.hasobject:
        raise DataError(f"{name} contains Python objects; not loaded. Write numbers: {expected}.")
    accepted = {"f": "float, integer or boolean", "U": "text", "i": "integer"}
    fits = (dtype.kind in "fiub" and "f" in kinds) or (dtype.kind in "iu" and "i" in kinds) or (dtype.kind == "U" and "U" in kinds)  # fmt: skip
    if not fits or dtype.names or dtype.shape or (dtype.kind == "f" and dtype.itemsize > 8):
        raise DataError(
            f"{name} has dtype {one_line(dtype)} and shape {shape}; expected {' or '.join(accepted[k] for k in kinds)} numbers of at most 64 bits."
        )
    if len(shape) not in dims or any(s < 0 for s in shape):
        raise DataError(f"{name} has {len(shape)} dimensions, shape {shape}; expected {expected}.")
    need, here = math.prod(shape) * dtype.itemsize, size - f.tell()
    if need != here:
        raise DataError(
            f"{name}: the header says shape {shape} of {dtype}, {need:,} bytes, and the file has {here:,}. It is cut off or damaged."
        )
    if not need:
        raise DataError(f"{name} is empty: shape {shape}; expected {expected}.")
    return shape, "F" if fortran else "C", dtype


def read_array(f: IO[bytes], size: int, name: str, *wanted: Any) -> np.ndarray:
    """One array, read whole; `wanted` as judged_header takes it."""
    shape, order, dtype = read_checked_header(f, size, name, *wanted)
    need = math.prod(shape) * dtype.itemsize
    data = np.frombuffer(f.read(need), dtype=dtype).reshape(shape, order=order)  # type: ignore[call-overload]
    return np.ascontiguousarray(data, dtype=dtype.newbyteorder("="))


class ArrayRows:
    """The rows of a .npy file [rows, columns], mapped into memory: (number, cells) of columns c1, c2, ..."""

    has_names = False

    def __init__(self, path: str) -> None:
        self.path = path
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            shape, order, dtype = read_checked_header(
                file, size, path, "f", (1, 2), "numbers [rows, columns]"
            )
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
        return cls(path)

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        for k, row in enumerate(self.values, 1):
            yield k, row.tolist()

    def place(self, row: int) -> str:
        return f"{self.path} row {row}"

    def close(self) -> None: ...


def make_sheet(source: LoadedFile, arrays: dict[str, np.ndarray], notes: tuple[str, ...], options: Options, problems: Problems) -> Sheet:  # fmt: skip
    u, y, lengths = arrays["u"], arrays.get("y"), arrays.get("lengths")
    padded = u.ndim == 3
    if not padded and lengths is None:
        problems.refuse(
            f"{source.path} array 'u' has shape {u.shape}; expected {AXES}. For one feature write u[:, :, None]; for sequences of unequal length, one after the other, add lengths (n,)."
        )
    n = len(u) if padded else len(lengths)  # type: ignore[arg-type]
    T = u.shape[1] if padded else 0
    lengths = np.full(n, T) if lengths is None else lengths
    check_lengths(source.path, lengths, u.shape, problems)
    lengths = lengths.astype(np.int64)
    keep = np.arange(T)[None, :] < lengths[:, None] if padded else None
    rows = to_float64(u[keep] if keep is not None else u)
    starts = np.cumsum(lengths) - lengths
    features = tuple(f"u{j}" for j in range(rows.shape[1]))

    def where(row: int, column: str) -> str:
        i = int(np.searchsorted(starts, row, side="right")) - 1
        if column not in features:
            return f"{source.path} {column} of sequence {i}"
        step, j = row - int(starts[i]), features.index(column)
        return f"{source.path} u[{i}, {step}, {j}] column '{column}'" if padded else f"{source.path} u[{row}, {j}] column '{column}'"  # fmt: skip

    refuse_inexact(u[keep] if keep is not None else u, lambda r, j: where(r, features[j]), problems)
    ids = [str(i) for i in range(n)]
    if "ids" in arrays:
        ids = to_texts(arrays["ids"], f"{source.path} array 'ids'")
        if len(ids) != n or len(set(ids)) != n:
            problems.add(f"{source.path} array 'ids' has {len(ids)} entries, {len(set(ids))} of them different; expected {n} different ones.")  # fmt: skip
    per = "step"
    if y is not None:
        y, per = split_targets(source.path, y, u.shape, n, keep, len(rows), options, problems)
    elif options.kind != "next":
        problems.add(f"{source.path} holds inputs only (no array 'y'). Pass --kind next to predict the next step, or add y to an .npz.")  # fmt: skip
    problems.raise_if_any()
    targets = () if y is None else tuple(f"y{k}" for k in range(1 if y.ndim == 1 else y.shape[1]))
    recording = Sheet(
        source.path, source.sha256, features, rows, lengths, ids, where, np.arange(len(rows)),
        targets=targets, y=y, y_per=per, has_names=False, notes=notes,
    )  # fmt: skip
    return refuse_bad_values(recording, options, problems)


def check_lengths(
    path: str, lengths: np.ndarray, shape: tuple[int, ...], problems: Problems
) -> None:
    longest = shape[1] if len(shape) == 3 else shape[0]
    if len(shape) == 3 and len(lengths) != shape[0]:
        problems.add(
            f"{path} array 'lengths' has {len(lengths)} entries and u has {shape[0]} sequences (shape {shape}; {AXES})."
        )
    for i in np.flatnonzero((lengths < 1) | (lengths > longest)):
        problems.add(
            f"{path} lengths[{i}]: sequence {i} has length {lengths[i]}; expected 1..{longest}.",
            "lengths",
        )
    if len(shape) == 2 and not problems.groups and sum(map(int, lengths)) != shape[0]:
        problems.add(
            f"{path}: the lengths add up to {sum(map(int, lengths))} and u has {shape[0]} rows; expected u (sum of lengths, C)."
        )
    problems.raise_if_any()


def to_float64(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, dtype=np.float64)


def refuse_inexact(values: np.ndarray, where, problems: Problems) -> None:  # type: ignore[no-untyped-def]
    """Whole numbers that a double cannot hold are problems."""
    if values.dtype.kind not in "iu" or values.dtype.itemsize < 8:
        return
    for at in np.argwhere(np.abs(values.astype(np.float64)) >= EXACT_BELOW):
        exact = int(values[tuple(at)])
        if int(float(exact)) != exact:
            problems.add(f"{where(*map(int, at))}: {explain_inexact(exact)}.", "exact")


def to_texts(values: np.ndarray, name: str) -> list[str]:
    try:
        words = [str(v).strip() for v in values.tolist()]
        "".join(words).encode()
    except ValueError:
        raise DataError(f"{name} holds text that is not Unicode. Write it again.") from None
    return words


def split_targets(path: str, y: np.ndarray, shape: tuple[int, ...], n: int, keep: np.ndarray | None, rows: int, options: Options, problems: Problems) -> tuple[np.ndarray, str]:  # fmt: skip
    """(y [., k] numbers or [.] words, "step" or "sequence")."""
    step = y.shape[:2] == shape[:2] if keep is not None else len(y) == rows
    whole = len(y) == n and y.ndim < 3
    if step and whole and y.ndim == 2 and keep is not None:
        step = options.at == "every" if options.at else problems.refuse(f"{path} array 'y' has shape {y.shape}: a value for each of {shape[1]} steps, or {y.shape[1]} targets of each sequence? Pass --at every or --at last.")  # fmt: skip
    elif step and whole:
        step = options.at == "every"
    if not step and not whole:
        swapped = " The axes of u look swapped: write u.transpose(1, 0, 2)." if keep is not None and len(y) == shape[1] else ""  # fmt: skip
        problems.refuse(f"{path} array 'y' has shape {y.shape} and u has {n} sequences (shape {shape}; {AXES}); expected y to begin with {n}.{swapped}")  # fmt: skip
    if step and keep is not None:
        y = y[keep]
    words = y.dtype.kind in "Ub" or options.kind == "classify"
    if not words and options.kind is None:
        problems.refuse(f"{path} array 'y' holds numbers ({y.dtype}). Pass --kind classify if they are classes, --kind regress if they are quantities.")  # fmt: skip
    if words and options.kind == "regress":
        problems.refuse(f"{path} array 'y' has dtype {y.dtype}; --kind regress needs numbers.")
    if words:
        if y.ndim > 1 and y.shape[-1] == 1:
            y = y[..., 0]
        if y.ndim > 1:
            problems.refuse(f"{path} array 'y' has {y.shape[-1]} columns of labels; expected one.")
        return np.array(
            to_texts(y, f"{path} array 'y'"), dtype=object
        ), "step" if step else "sequence"
    refuse_inexact(y, lambda i, *k: f"{path} y[{i}]", problems)
    return to_float64(y.reshape(len(y), -1)), "step" if step else "sequence"

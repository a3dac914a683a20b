"""Your own data in memory: arrays, lists, tensors and frames, read as files are.

InMemory   inputs and targets that a sheet is made from
source_of  a path as it is, or anything else as InMemory
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from ..errors import DataError, InputError, brief, one_line
from . import files
from .description import PathLike
from .files.arrays import describe_layout, is_one_sequence, make_sheet
from .files.columns import TableColumns
from .files.samples import sheet_of_arrays
from .files.sheet import Options, Problems, Sheet
from .files.source import LoadedFile
from .frames import (
    Given,
    TypedColumn,
    columns_of,
    is_frame,
    is_missing,
    read_frame,
    read_times,
    to_array,
)
from .prepared import is_prepared, read_prepared

TARGET = "target"  # the name of targets beside a frame that have none of their own
TIME = "time"  # the name of times beside arrays


@dataclass(frozen=True, eq=False)
class InMemory:
    """Sequences or samples in memory.

    name     what they are called in messages: "argument NAME"
    inputs   [n, T, C], [n, T] (one feature), [T] (one sequence), a list of [T_i, C] or [T_i]; or
             with lengths [sum of lengths, C]; of samples [n, ...]; or a frame
    targets  [n], [n, k]; or for each step [n, T], [n, T, k] or a list of [T_i] or [T_i, k]; beside
             a frame a value for each row
    lengths  [n], if inputs are padded or one after the other
    ids      [n] names
    times    numbers or dates: [T], the same for all; [n, T], or a list of [T_i]
    """

    name: str
    inputs: Given
    targets: Given = None
    lengths: Given = None
    ids: Given = None
    times: Given = None

    @property
    def path(self) -> str:
        """What stands in messages in place of a file's name."""
        return f"argument {self.name}"

    @property
    def is_frame(self) -> bool:
        """Whether the inputs are a table with named columns."""
        return is_frame(self.inputs)

    def read(self, options: Options) -> Sheet:
        """Return the sheet that a file of the same contents is read into."""
        if not self.is_frame:
            return read_arrays(self, options)
        beside = {"lengths": self.lengths, "ids": self.ids, "times": self.times}
        given = [name for name, value in beside.items() if value is not None]
        if given:
            raise InputError(
                f"{given[0]} is for arrays; of a frame, name the columns: id='...', time='...'."
            )
        columns = columns_of(self.inputs)
        if self.targets is not None:
            name = str(getattr(self.targets, "name", None) or TARGET)
            if options.target is not None and len(options.target) == 1:
                name = options.target[0]
            columns[name] = self.targets
            options = replace(options, target=(name,))
        return read_frame(columns, self.path, options)


Source = PathLike | InMemory


def source_of(data: Given, name: str, **beside: Given) -> Source:
    """Return a path as it is, and anything else as InMemory.

    Args:
        data: A path, arrays or a frame; for held-out data also (inputs, targets).
        name: What it is called in messages.
        **beside: targets, lengths, ids, times.
    """
    if isinstance(data, InMemory):
        return data
    given = {key: value for key, value in beside.items() if value is not None}
    if isinstance(data, str | os.PathLike):
        if given:
            raise InputError(
                f"{next(iter(given))} is for arrays; of the file {one_line(data, 200)} name the "
                "columns: id='...', time='...', target='...'."
            )
        return data
    if isinstance(data, tuple) and len(data) == 2 and "targets" not in given:
        inputs, targets = data
        return InMemory(name, inputs, targets, **given)
    if data is None or isinstance(data, bool | int | float):
        raise InputError(
            f"{name} must be a path, an array, a list of arrays or a frame; got {brief(data)}."
        )
    return InMemory(name, data, **given)


def name_of(source: Source) -> str:
    """Return the name of a file without its folder, or that of an argument."""
    return source.name if isinstance(source, InMemory) else os.path.basename(os.fspath(source))


def read_source(source: Source, options: Options) -> Sheet:
    """Read a file, or data in memory."""
    if isinstance(source, InMemory):
        return source.read(options)
    if is_prepared(source):
        return read_prepared(source, options)
    return files.read(source, options)


def is_ragged(values: Given) -> bool:
    """Tell whether `values` is a list, or an array of objects, that holds arrays."""
    if isinstance(values, np.ndarray) and values.dtype.kind != "O":
        return False
    is_list = isinstance(values, list | tuple | np.ndarray)
    return is_list and len(values) > 0 and all(has_axes(value) for value in values)


def has_axes(value: Given) -> bool:
    """Tell whether a value is an array, tensor, column or list, and not a number or a word."""
    if isinstance(value, str | bytes):
        return False
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def numbers_of(values: Given, place: str) -> np.ndarray:
    """Return an array of numbers; one of anything else is refused.

    Objects are numbers or missing; truth values are 0 and 1.
    """
    array = to_array(values, place)
    if array.dtype.kind == "O":
        flat = TypedColumn.of(array.reshape(-1), place)
        if flat.kind not in ("number", "whole", "bool"):
            raise DataError(
                f"{place} holds {flat.type_name}; expected numbers. Columns of words are read "
                "from a frame."
            )
        array = flat.numbers()[0].reshape(array.shape)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"{place} has type {array.dtype}; expected numbers. Columns of words are read from a "
            "frame."
        )
    if array.size == 0:
        raise DataError(f"{place} has shape {list(array.shape)}: it is empty.")
    return array.astype(np.uint8) if array.dtype.kind == "b" else array


def read_arrays(held: InMemory, options: Options) -> Sheet:
    """Read arrays of sequences, or of samples without time."""
    options = replace(options, wide=False, steps=None)
    path = held.path
    problems = Problems(path)
    names = options.features
    arrays: dict[str, np.ndarray] = {}
    if options.rows == "samples":
        x = numbers_of(held.inputs, path)
        arrays["x"] = x[:, None] if x.ndim == 1 else x
        layout = ""
        width = x.shape[1] if x.ndim not in (1, 3) else 1
        of_steps = None
    else:
        layout = put_sequences(held, options, arrays)
        width = arrays["u"].shape[-1]
        of_steps = steps_of(arrays)
    if names is not None and len(names) != width:
        which = "feature" if len(names) == 1 else "features"
        raise DataError(
            f"{path} has {width} features, and {len(names)} {which} are named: "
            f"{', '.join(map(one_line, names[:12]))}."
        )
    if held.targets is not None and options.kind != "next":
        arrays["y"] = targets_of(held, of_steps, arrays, options)
    if held.ids is not None:
        arrays["ids"] = np.array([str(name) for name in held.ids])
    source = LoadedFile(path, b"", digest_of(arrays))
    if options.rows == "samples":
        sheet = sheet_of_arrays(source, arrays, (), options, problems, "", names)
        return replace(sheet, layout=sheet.layout.strip())
    sheet = make_sheet(source, arrays, (), options, problems, "", names)
    if sheet.targets and options.target is not None and len(options.target) == len(sheet.targets):
        sheet = replace(sheet, targets=options.target)
    if held.times is not None:
        sheet = with_times(sheet, held, options)
    # An entry of the data is a whole sequence, unless the data are one.
    is_single = sheet.rows is not None and held.lengths is None and not is_ragged(held.inputs)
    return replace(sheet, layout=layout, rows=sheet.rows if is_single else None)


def put_sequences(held: InMemory, options: Options, arrays: dict[str, np.ndarray]) -> str:
    """Put u, and lengths if the sequences differ, into `arrays`; return what axes were taken for.

    u is [n, T, C], or [sum of lengths, C].
    """
    path = held.path
    if is_ragged(held.inputs) and held.lengths is None:
        rows = []
        for i, sequence in enumerate(held.inputs):
            values = numbers_of(sequence, f"{path}[{i}]")
            if values.ndim > 2:
                raise DataError(
                    f"{path}[{i}] has shape {list(values.shape)}; expected [T, C] or [T]."
                )
            rows.append(values.reshape(len(values), -1))
        widths = [values.shape[1] for values in rows]
        other = next((i for i, width in enumerate(widths) if width != widths[0]), None)
        if other is not None:
            raise DataError(
                f"{path}[{other}] has {widths[other]} features and {path}[0] has {widths[0]}; "
                "expected the same."
            )
        arrays["u"] = np.concatenate(rows)
        arrays["lengths"] = np.array([len(values) for values in rows])
        return f"a list of {len(rows)} sequences, each steps, features"
    u = numbers_of(held.inputs, path)
    if u.ndim not in (1, 2, 3):
        raise DataError(
            f"{path} has shape {list(u.shape)}; expected [n, T, C] (sequences, steps, features), "
            "[n, T] for one feature, or a list of [T_i, C]."
        )
    layout = describe_layout("", u.shape)
    if held.lengths is not None:
        arrays["lengths"] = to_array(held.lengths, "argument lengths").reshape(-1)
        if u.ndim == 2 and int(arrays["lengths"].sum()) != len(u):
            u = u[..., None]  # padded sequences of one feature
        arrays["u"] = u if u.ndim > 1 else u[:, None]
        return f"{list(u.shape)} with lengths"
    if u.ndim == 1:
        arrays |= {"u": u[:, None], "lengths": np.array([len(u)])}
    elif u.ndim == 2 and is_one(u, held.targets, options):
        arrays |= {"u": u, "lengths": np.array([len(u)])}
        layout = f"{list(u.shape)}: steps, features"
    else:
        arrays["u"] = u if u.ndim == 3 else u[..., None]
    return layout


def is_one(u: np.ndarray, targets: Given, options: Options) -> bool:
    """Tell whether u (rows, columns) is one sequence, and not sequences of one feature.

    It is if several features are known by name and there is a column for each, or if each row has
    its target.
    """
    if options.features is not None and len(options.features) > 1:
        return bool(u.shape[1] == len(options.features))
    y = None if targets is None else to_array(targets, "argument targets")
    return options.features is None and is_one_sequence(u, y, options)


def steps_of(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return the steps of each sequence, [n]."""
    u = arrays["u"]
    return arrays.get("lengths", np.full(len(u), u.shape[1]))


def targets_of(
    held: InMemory, steps: np.ndarray | None, arrays: dict[str, np.ndarray], options: Options
) -> np.ndarray:
    """Return the targets as numbers or words, "" where a label is missing.

    Args:
        held: The data.
        steps: Of each sequence; None for samples.
        arrays: u or x.
        options: The kind, and where the targets are.
    """
    place = "argument targets"
    targets = held.targets
    if is_frame(targets):
        targets = to_array(targets, place)
    is_list = is_ragged(targets) and not isinstance(targets, np.ndarray | Tensor)
    of_each = [len(entry) for entry in targets] if is_list or is_ragged(targets) else []
    if steps is not None and options.at != "last" and of_each == steps.tolist():
        parts = [labels_or_numbers(entry, place, options) for entry in targets]
        if "lengths" in arrays and arrays["u"].ndim == 2:
            return np.concatenate(parts)
        targets = np.stack(parts) if len(set(of_each)) == 1 else pad_targets(parts, arrays)
    y = labels_or_numbers(targets, place, options)
    count = len(steps) if steps is not None else len(arrays["x"])
    unit = "samples" if steps is None else "sequences"
    fits = len(y) == count or (steps is not None and len(y) == int(steps.sum()))
    if not fits:
        raise DataError(f"{place} has {len(y)} entries, and {held.path} {count} {unit}.")
    return y


def pad_targets(parts: list[np.ndarray], arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Return targets for each step of padded sequences, [n, T, ...]; padding is not read."""
    shape = (len(parts), arrays["u"].shape[1], *parts[0].shape[1:])
    padded = np.zeros(shape, np.result_type(*parts))
    for i, part in enumerate(parts):
        padded[i, : len(part)] = part
    return padded


def labels_or_numbers(values: Given, place: str, options: Options) -> np.ndarray:
    """Return targets as numbers, or labels as words; None, NaN and NA are missing."""
    array = to_array(values, place)
    if array.dtype.kind in "biu" or (array.dtype.kind == "f" and options.kind != "classify"):
        return array
    if array.dtype.kind == "U":
        return array
    flat = array.reshape(-1)
    if array.dtype.kind == "O" and options.kind != "classify":
        column = TypedColumn.of(flat, place)
        if column.kind in ("whole", "number"):
            return column.numbers()[0].reshape(array.shape)
    words = ["" if is_missing(value) else label_text(value) for value in flat.tolist()]
    return np.array(words).reshape(array.shape)


def label_text(value: Given) -> str:
    """Return a label as text: 1.0 as 1."""
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if is_whole else str(value).strip()


def with_times(sheet: Sheet, held: InMemory, options: Options) -> Sheet:
    """Return the sheet with the times of its rows; within a sequence they must increase."""
    place = "argument times"
    lengths = sheet.lengths.tolist()
    times = held.times
    if is_ragged(times):
        parts = [to_array(part, place) for part in times]
    else:
        array = to_array(times, place)
        parts = list(array) if array.ndim == 2 else [array] * len(lengths)
        if array.ndim == 1 and len(array) == sum(lengths):
            parts = np.split(array, np.cumsum(lengths)[:-1])
        parts = [part[:length] for part, length in zip(parts, lengths, strict=False)]
    if [len(part) for part in parts] != lengths:
        raise DataError(
            f"{place}: expected a time for each of {sum(lengths)} steps of {len(lengths)} "
            "sequences: [T], the same for all, [n, T], or a list of [T_i]."
        )
    problems = Problems(place)
    columns = TableColumns()

    def where(row: int) -> str:
        return sheet.where(row, TIME)

    column = TypedColumn.of(np.concatenate(parts), place)
    if column.kind not in ("words", "whole", "number", "time"):
        raise DataError(f"{place} holds {column.type_name}; expected numbers or dates.")
    read_times(column, columns, options, problems, where)
    problems.raise_if_any()
    assert columns.time is not None
    is_first = np.zeros(sum(lengths), bool)
    is_first[sheet.starts] = True
    late = np.flatnonzero((np.diff(columns.time) <= 0) & ~is_first[1:])
    if len(late):
        raise DataError(
            f"{where(int(late[0]) + 1)}: the time is not later than that of the step before. Sort "
            "the steps."
        )
    roles = {"id": "", "time": TIME}
    if columns.has_dates:
        roles["stamps"] = "1"  # a mark: times are dates
    if columns.date_order:
        roles["dates"] = columns.date_order
    return replace(sheet, time=columns.time, stamps=columns.stamps, columns=roles)


def digest_of(arrays: dict[str, np.ndarray]) -> str:
    """Return a SHA-256 sum of arrays."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()

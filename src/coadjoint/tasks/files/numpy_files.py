"""Arrays in .npy and .npz files, checked before they are read. Nothing is ever unpickled."""

from __future__ import annotations

import math
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, NamedTuple

import numpy as np
from numpy.lib import format as npy

from ...errors import DataError, error_text, one_line
from .room import make_room
from .sheet import Options
from .source import LoadedFile, refuse_if_too_large

NUMBERS_PER_BLOCK = 1 << 17  # that are in memory at a time, in the type of the file


@dataclass(frozen=True)
class ExpectedArray:
    """What an array must be.

    kinds     the accepted dtypes: f for numbers, i for whole numbers, U for text
    dims      the accepted numbers of dimensions
    shape     what it should be, in words
    doubles   whether its numbers are read as doubles, but for whole numbers of 64 bits, which a
              double may not hold
    """

    kinds: str
    dims: tuple[int, ...]
    shape: str
    doubles: bool = False

    def accepts(self, dtype: np.dtype) -> bool:
        """Whether entries of this dtype can be used."""
        # Neither records, nor arrays in entries, nor numbers that a double cannot hold.
        if dtype.names or dtype.shape or (dtype.kind == "f" and dtype.itemsize > 8):
            return False
        if dtype.kind in "iu" and "i" in self.kinds:
            return True
        if dtype.kind in "US":
            return "U" in self.kinds
        return dtype.kind in "fiub" and "f" in self.kinds

    def describe_kinds(self) -> str:
        """The accepted dtypes, in words."""
        words = {"f": "float, integer or boolean", "U": "text", "i": "integer"}
        return " or ".join(words[kind] for kind in self.kinds)


class Archive(NamedTuple):
    """The arrays of an .npz file.

    arrays   by the names that were expected
    inputs   the name that the inputs have in the file
    notes    on arrays that are left out
    """

    arrays: dict[str, np.ndarray]
    inputs: str
    notes: tuple[str, ...]


# Names of the inputs and of the targets that belong to them, beside those that are expected.
OTHER_NAMES = (
    ("X", "y"),
    ("X", "Y"),
    ("x", "y"),
    ("X_train", "y_train"),
    ("X_train", "Y_train"),
    ("x_train", "y_train"),
)


def names_in_archive(names: Sequence[str], inputs: str, path: str) -> dict[str, str]:
    """{expected name: name in the file} of the inputs and the targets, as far as they are there.

    inputs: the expected name of the inputs, which wins; else they have one of the usual names.
    """
    if inputs in names:
        return {inputs: inputs, "y": "y"}
    found = [known for known in dict.fromkeys(x for x, _ in OTHER_NAMES) if known in names]
    if not found:
        return {}
    if len(found) > 1:
        raise DataError(
            f"{path} holds {' and '.join(found)}: which are the inputs? Call one of them {inputs}."
        )
    targets = [y for x, y in OTHER_NAMES if x == found[0]]
    return {inputs: found[0], "y": next((y for y in targets if y in names), targets[0])}


class Members(NamedTuple):
    """The arrays of an .npz file that are to be read, whose sizes are checked.

    archive  the file;  infos  by the names that were expected;  in_file  their names in the file
    notes    on arrays that are left out
    """

    archive: zipfile.ZipFile
    infos: dict[str, zipfile.ZipInfo]
    in_file: dict[str, str]
    notes: tuple[str, ...]


def read_archive(
    source: LoadedFile, expected: dict[str, ExpectedArray], needed: str, options: Options
) -> Archive:
    """The arrays of an .npz file, as `find_members` finds them."""
    members = find_members(source, expected, needed, options)
    arrays = {}
    for name, info in members.infos.items():
        place = f"{source.path} array '{members.in_file[name]}'"
        with damage_named(source, members.in_file[name]), members.archive.open(info) as file:
            arrays[name] = read_array(file, info.file_size, place, expected[name])
    return Archive(arrays, members.in_file[next(iter(expected))], members.notes)


def find_members(
    source: LoadedFile, expected: dict[str, ExpectedArray], needed: str, options: Options
) -> Members:
    """The arrays of an .npz file, none of which is read yet.

    expected: the arrays that are read; the first, the inputs, must be there. needed: it in words.
    Inputs and targets may have other usual names, such as X and y. To predict the next step y is
    not read.
    """
    archive = open_archive(source)
    infos = archive.infolist()
    names = [info.filename.removesuffix(".npy") for info in infos]
    if len(set(names)) != len(names):
        raise DataError(
            f"{source.path}: an array appears twice in the archive. Write it again with "
            "numpy.savez."
        )
    inputs = next(iter(expected))
    in_file = {name: name for name in expected} | names_in_archive(names, inputs, source.path)
    known = dict(zip(names, infos, strict=True))
    members = {name: known[actual] for name, actual in in_file.items() if actual in known}
    if inputs not in members:
        found = ", ".join(map(one_line, names[:12])) or "no arrays"
        raise DataError(f"{source.path} holds {found}; expected {needed}.")
    # Sizes are checked before anything is unpacked: of all arrays together against max_bytes (with
    # the packed size left out of it), and of each also against its packed size.
    need = sum(info.file_size for info in members.values())
    refuse_if_too_large(source.path, "", need, need, options.max_bytes)
    for name, info in members.items():
        place = f"{source.path}: '{in_file[name]}'"
        refuse_if_too_large(place, "", info.file_size, info.compress_size, options.max_bytes)
    if options.kind == "next":
        members.pop("y", None)
    left_out = [name for name in names if name not in in_file.values()]
    notes = tuple(f"array '{one_line(name)}' is left out" for name in left_out)
    return Members(archive, members, in_file, notes)


@contextmanager
def damage_named(source: LoadedFile, name: str) -> Iterator[None]:
    """Turn the errors of reading an array of an archive into a DataError that names it."""
    try:
        yield
    except (DataError, GeneratorExit):
        raise
    except Exception as error:  # zipfile raises all kinds of errors for a damaged file
        raise DataError(
            f"{source.path}: array '{name}' is damaged: {error_text(error, 80)}. Write it again."
        ) from None


def open_archive(source: LoadedFile) -> zipfile.ZipFile:
    """The zip archive that an .npz file is."""
    try:
        return zipfile.ZipFile(source.open())
    except Exception as error:  # zipfile raises all kinds of errors for a damaged file
        content = f"is not a complete zip archive ({error_text(error, 80)})"
        known = source.magic()
        if known and "zip" not in known[0]:
            content = f"holds {known[0]}"
        raise DataError(
            f"{source.path} is named .npz but {content}. Write it with numpy.savez."
        ) from None


def read_header(file: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether it is in Fortran order, dtype) of an array; its values come next."""
    headers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            version = npy.read_magic(file)
            if version not in headers:
                raise ValueError(f"format {version[0]}.{version[1]}, expected 1.0 or 2.0")
            return headers[version](file)
    except zipfile.BadZipFile:
        raise
    except Exception as error:
        raise DataError(
            f"{name} is not a NumPy array: {error_text(error, 80)}. Write it with numpy.save or "
            "numpy.savez."
        ) from None


def read_checked_header(
    file: IO[bytes], size: int, name: str, expected: ExpectedArray
) -> tuple[tuple[int, ...], str, np.dtype]:
    """(shape, order "C" or "F", dtype) of a usable array, before anything is allocated.

    size: the bytes of the file.
    """
    shape, is_fortran, dtype = read_header(file, name)
    if dtype.hasobject:
        instead = "numbers, or text by astype(str)" if "U" in expected.kinds else "numbers"
        raise DataError(
            f"{name} contains Python objects; not loaded. Write {instead}: {expected.shape}."
        )
    if not expected.accepts(dtype):
        raise DataError(
            f"{name} has dtype {one_line(dtype)} and shape {shape}; expected "
            f"{expected.describe_kinds()} numbers of at most 64 bits."
        )
    if len(shape) not in expected.dims or any(length < 0 for length in shape):
        raise DataError(
            f"{name} has {len(shape)} dimensions, shape {shape}; expected {expected.shape}."
        )
    need = math.prod(shape) * dtype.itemsize
    bytes_left = size - file.tell()
    if need != bytes_left:
        raise DataError(
            f"{name}: the header says shape {shape} of {dtype}, {need:,} bytes, but the file has "
            f"{bytes_left:,}. It is cut off or damaged."
        )
    if not need:
        raise DataError(f"{name} is empty: shape {shape}; expected {expected.shape}.")
    return shape, "F" if is_fortran else "C", dtype


def read_array(file: IO[bytes], size: int, name: str, expected: ExpectedArray) -> np.ndarray:
    """A whole array, in this machine's byte order; size: the bytes of the file."""
    shape, order, dtype = read_checked_header(file, size, name, expected)
    need = math.prod(shape) * dtype.itemsize
    is_whole = dtype.kind in "iu" and dtype.itemsize == 8
    if expected.doubles and order == "C" and dtype.kind in "fiub" and not is_whole:
        return read_doubles(file, shape, dtype)
    flat = np.frombuffer(file.read(need), dtype=dtype)
    values = flat.reshape(shape, order=order)  # type: ignore[call-overload]
    if dtype.kind == "S":
        return decode_bytes(values, name)
    return np.ascontiguousarray(values, dtype=dtype.newbyteorder("="))


def read_doubles(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Numbers as doubles, with a small part of the file in memory."""
    count = math.prod(shape)
    values = make_room(count, 1).reshape(-1)
    for begin in range(0, count, NUMBERS_PER_BLOCK):
        end = min(begin + NUMBERS_PER_BLOCK, count)
        values[begin:end] = np.frombuffer(read_exactly(file, (end - begin) * dtype.itemsize), dtype)
    return values.reshape(shape)


def read_exactly(file: IO[bytes], size: int) -> bytes:
    """The next `size` bytes of a file that has them."""
    data = file.read(size)
    if len(data) != size:
        raise EOFError("the data end too early")
    return data


def decode_bytes(values: np.ndarray, name: str) -> np.ndarray:
    """Texts in bytes as texts."""
    try:
        return np.char.decode(values, "utf-8")
    except ValueError:
        raise DataError(f"{name} holds text that is not UTF-8. Write it again.") from None

"""Prepared sets: the folder that `coadjoint prepare` writes, as a sheet whose rows stay on disk.

description.json  what the arrays hold, how the files were read, digests
u.npy             [N, C] the features, row by row, sequence by sequence
starts.npy        [n + 1] the first row of each sequence, and N
y.npy             [N, k] targets, or numbers of labels; not for kind "next"
time.npy          [N] times, if there are any
ids.npy, id_ends.npy    the ids one after the other as UTF-8, and where each ends
hashes.npy        [n, 16] a hash of the features of each sequence
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from ..errors import ConfigError, DataError, error_text, one_line
from .blocks import count_gaps
from .description import JsonDict, PathLike
from .files.sheet import Options, Sheet, quote_names
from .files.source import load_file
from .files.table import AUTO
from .files.texts import NumberTexts, PackedTexts
from .files.wide import describe_steps
from .prepared_description import EXPECTED, digest_of, first_wrong
from .stored_rows import RowsOnDisk

DESCRIPTION = "description.json"
LARGEST_DESCRIPTION = 1 << 28  # bytes
SMALL = ("starts", "ids", "id_ends", "hashes")  # arrays that are read into memory


@dataclass(frozen=True, eq=False)
class PreparedSet:
    """A checked description of a prepared set, and its folder."""

    folder: Path
    about: JsonDict

    @property
    def name(self) -> str:
        """The folder, for messages."""
        return one_line(self.folder, 4096)

    def array(self, name: str) -> RowsOnDisk:
        """Return an array of the folder, whose shape and size are checked."""
        path = self.folder / f"{name}.npy"
        if not path.exists():
            raise DataError(f"{one_line(path, 4096)} is missing. Prepare the folder again.")
        return RowsOnDisk.open(path, EXPECTED[name], self.about["arrays"][name]["shape"])

    def whole(self, name: str) -> np.ndarray:
        """Return a small array as whole numbers."""
        rows = self.array(name)
        parts = [rows[:0].astype(np.int64)]
        for block in slices(len(rows)):
            parts.append(rows[block].astype(np.int64))
        values = np.concatenate(parts)
        return values.reshape(self.about["arrays"][name]["shape"])

    def check_digests(self, progress: Callable[[int], None] = lambda count: None) -> None:
        """Compare the values of every array with their SHA-256 sums."""
        for name, entry in self.about["arrays"].items():
            rows = self.array(name)
            digest = hashlib.sha256()
            size = rows.stored.itemsize * rows.width
            for block in slices(len(rows), max(1, (1 << 22) // size)):
                count = (block.stop - block.start) * size
                digest.update(os.pread(rows.file, count, rows.begin + block.start * size))
                progress(count)
            if digest.hexdigest() != entry["sha256"]:
                raise DataError(
                    f"{rows.path}: the values are not those that were written (SHA-256 "
                    f"{digest.hexdigest()[:12]}..., expected {entry['sha256'][:12]}...). Prepare "
                    "the folder again."
                )


def slices(count: int, size: int = 1 << 16) -> list[slice]:
    """Return slices of 0..count - 1."""
    return [slice(b, min(b + size, count)) for b in range(0, count, size)]


def is_prepared(path: object) -> bool:
    """Tell whether a path is the folder of a prepared set."""
    if not isinstance(path, str | os.PathLike) or not os.path.isdir(path):
        return False
    # A folder of this name whose description is lost or cannot be read is a damaged set.
    is_called_so = Path(os.fspath(path)).suffix == ".co"
    return is_called_so or os.path.isfile(os.path.join(path, DESCRIPTION))


def open_prepared(path: PathLike) -> PreparedSet:
    """Open a prepared set, perhaps a stranger's: its description is checked, and its sizes."""
    folder = Path(path)
    source = load_file(folder / DESCRIPTION, LARGEST_DESCRIPTION)
    try:
        about = json.loads(source.data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source.path} is not JSON: {error_text(error, 120)}.") from None
    wrong = first_wrong(about)
    if wrong:
        raise DataError(
            f"{source.path} is damaged: '{wrong}' is not valid. Prepare the folder again."
        )
    if about.get("sha256", digest_of(about)) != digest_of(about):
        raise DataError(
            f"{source.path} was changed after it was written. Prepare the folder again, with the "
            "options that are meant."
        )
    prepared = PreparedSet(folder, about)
    for name in about["arrays"]:
        prepared.array(name)  # refuses another shape, or a file of another size
    return prepared


@dataclass(frozen=True, eq=False)
class StoredSheet(Sheet):
    """A sheet whose u, y and times are `RowsOnDisk`; about: the description of the set."""

    about: JsonDict | None = None
    hashes: np.ndarray | None = None  # [n, 16] bytes, of the features of each sequence
    times: RowsOnDisk | None = None  # [N, 1], for inputs made of them; `time` is None


def read_prepared(path: PathLike, options: Options) -> StoredSheet:
    """Return a prepared set as a sheet.

    Options that differ from those it was read with are refused; fewer features may be asked for.
    """
    prepared = open_prepared(path)
    about = prepared.about
    refuse_other_options(prepared, options)
    names = about["features"]
    chosen = list(names) if options.features is None else list(options.features)
    lacking = [name for name in chosen if name not in names]
    if lacking:
        raise DataError(
            f"{prepared.name} has no feature {quote_names(lacking)}; it was prepared with "
            f"{quote_names(names)}. Prepare it again with --features."
        )
    categories = {}
    renamed = {}
    for name in chosen:
        if name in about["categories"]:
            words = about["categories"][name]
            categories[name] = tuple(sorted(words))
            rank = {word: k for k, word in enumerate(categories[name])}
            renamed[chosen.index(name)] = np.array([rank[word] for word in words], np.float64)
    columns = tuple(names.index(name) for name in chosen)
    u = prepared.array("u").changed(columns, renamed, False)
    y = None
    if "y" in about["arrays"] and options.kind != "next":
        y = prepared.array("y").changed(None, {}, about["kind"] == "classify")
    starts = prepared.whole("starts")
    lengths = np.diff(starts)
    if starts[0] != 0 or starts[-1] != about["rows"] or lengths.min() < 1:
        raise DataError(f"{prepared.name}: starts.npy is damaged. Prepare the folder again.")
    has_dates = bool(about["columns"].get("stamps"))
    stamps = None
    times = None
    if "time" in about["arrays"]:
        write = functools.partial(write_times, has_dates=has_dates)
        times = prepared.array("time")
        stamps = NumberTexts(cast(np.ndarray, Flat(times)), write)
    if len(about["sources"]) == 1:
        digest = about["sources"][0]["sha256"]
    else:
        digest = about["arrays"]["u"]["sha256"]
    array = about.get("array", {})
    steps = tuple(about["reading"].get("steps", ()))
    sheet = StoredSheet(
        prepared.name,
        digest,
        tuple(chosen),
        cast(np.ndarray, u),
        lengths,
        cast("list[str]", read_ids(prepared)),
        functools.partial(place_in_source, about["sources"]),
        cast(np.ndarray, range(about["rows"])),
        targets=tuple(about["targets"]) if y is not None else (),
        y=y,
        time=None,
        stamps=stamps,
        columns=dict(about["columns"]),
        notes=tuple(about["notes"]),
        has_names="array" not in about,
        has_ids=array.get("has_ids", False),
        layout=describe_steps(steps) if steps else array.get("layout", ""),
        steps=steps,
        categories=categories,
        about=about,
        hashes=prepared.whole("hashes"),
        times=times,
    )
    return sheet


class Flat:
    """Rows of a single column as numbers [N]."""

    def __init__(self, rows: RowsOnDisk) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: slice | np.ndarray) -> np.ndarray:
        if isinstance(places, slice):
            start, stop, step = places.indices(len(self.rows))
            return self.rows.read(start, max(start, stop))[::step, 0]
        values = np.empty(len(places))
        for block in slices(len(places)):
            some = places[block]
            first, last = int(some.min()), int(some.max())
            if last - first < 8 * len(some):  # one read is quicker than many
                values[block] = self.rows.read(first, last + 1)[some - first, 0]
            else:
                values[block] = [self.rows[int(place)][0] for place in some]
        return values


def write_times(values: np.ndarray, has_dates: bool) -> list[str]:
    """Return times as text: numbers, or dates in the form of ISO 8601."""
    if not has_dates:
        return [f"{value:.17g}" for value in np.asarray(values).tolist()]
    dates = np.asarray(values).astype(np.int64).astype("datetime64[us]")
    return [text.replace("T", " ") for text in np.datetime_as_string(dates, unit="auto")]


def read_ids(prepared: PreparedSet) -> PackedTexts:
    """Return the ids of a set."""
    ends = prepared.whole("id_ends")
    packed = prepared.whole("ids")
    is_valid = ends[-1] == len(packed) and bool((np.diff(ends) >= 0).all()) and ends[0] >= 0
    if not is_valid:
        raise DataError(f"{prepared.name}: ids.npy is damaged. Prepare the folder again.")
    return PackedTexts(packed.astype(np.uint8).tobytes(), ends)


def place_in_source(sources: list[JsonDict], row: int, column: str) -> str:
    """Put a row of a set and a column in words, by the file that the row comes from."""
    source = sources[bisect_right([entry["first"] for entry in sources], row) - 1]
    return f"{one_line(source['name'])} row {row - source['first'] + 1} column '{one_line(column)}'"


def refuse_other_options(prepared: PreparedSet, options: Options) -> None:
    """Refuse options of reading that differ from those that a set was prepared with."""
    about = prepared.about
    is_wide = bool(about["reading"].get("wide"))
    if options.rows == "samples" or (options.wide and not is_wide):
        flag = "--chain" if options.rows == "samples" else "--wide"
        raise ConfigError(
            f"{prepared.name} is a prepared set of sequences; {flag} reads tables. Give the table."
        )
    # "auto" is every column of words, which those of the set are.
    named_words = () if options.categorical == AUTO else options.categorical
    settled = {
        "id": (options.id, about["columns"]["id"]),
        "time": (options.time, about["columns"]["time"]),
        "kind": (options.kind, about["kind"]),
        "categorical": (named_words or None, tuple(about["categories"])),
    }
    if options.kind != "next" and about["kind"] != "next":
        target = None if options.target is None else tuple(options.target)
        settled["target"] = (target, tuple(about["targets"]))
    if options.use == "predict":
        settled = {}
    for name, (asked, stored) in settled.items():
        if asked is not None and asked != stored:
            raise ConfigError(
                f"{prepared.name} was prepared with --{name} {show(stored)}, not {show(asked)}. "
                "Leave the option out, or prepare the set again."
            )
    if options.missing not in ("refuse", about["reading"]["missing"]):
        raise ConfigError(
            f"{prepared.name} was prepared with --missing {about['reading']['missing']}, not "
            f"{options.missing}. Leave the option out, or prepare the set again."
        )


def show(value: object) -> str:
    """Return the value of an option as it is given."""
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    return one_line(text) or "''"


def gaps_in(sheet: Sheet) -> np.ndarray:
    """Return how many values of each feature are missing, [C]."""
    if not isinstance(sheet, StoredSheet):
        return count_gaps(sheet.u)
    assert sheet.about is not None
    known = dict(zip(sheet.about["features"], sheet.about["moments"]["missing"], strict=True))
    return np.array([known[name] for name in sheet.features])


def renumber_stored(sheet: StoredSheet, name: str, new: np.ndarray) -> StoredSheet:
    """Return the sheet with new[k] in place of the number k of a word in the column `name`."""
    rows = cast(RowsOnDisk, sheet.u)
    column = sheet.features.index(name)
    before = rows.renamed[column]
    renamed = {**rows.renamed, column: new[before.astype(np.int64)]}
    return replace(sheet, u=cast(np.ndarray, rows.changed(rows.columns, renamed, False)))


def stored_labels(sheet: StoredSheet) -> list[str]:
    """Return the labels of a set, in the order of their numbers."""
    assert sheet.about is not None
    labels: list[str] = sheet.about["labels"]
    return labels


def encode_stored_labels(sheet: StoredSheet, labels: list[str]) -> StoredSheet:
    """Return the sheet with labels as class numbers; labels: the classes in their order."""
    number = {word: float(k) for k, word in enumerate(labels)}
    unseen = [word for word in stored_labels(sheet) if word not in number]
    if unseen:
        raise DataError(
            f"{sheet.path}: label '{one_line(unseen[0])}' does not occur in the training file, "
            f"whose labels are {quote_names(labels)}."
        )
    codes = np.array([number[word] for word in stored_labels(sheet)])
    return replace(sheet, y=cast(RowsOnDisk, sheet.y).changed(None, {0: codes}, False))


class Reading(NamedTuple):
    """What a prepared set settles of the options of `Data.read`."""

    kind: str | None
    missing: str
    irregular: str
    reading: JsonDict


def settle_reading(train: object, kind: str | None, missing: str, irregular: str) -> Reading | None:
    """Return how a prepared training set was read; None for other data.

    missing, irregular: as asked for.
    """
    if not is_prepared(train):
        return None
    about = open_prepared(cast(PathLike, train)).about
    reading = about["reading"]
    if missing == "refuse":
        missing = reading["missing"]
    if irregular == "refuse":
        irregular = reading["irregular"]
    return Reading(kind or about["kind"], missing, irregular, reading)


def in_memory(sheet: StoredSheet, max_bytes: int, with_times: bool) -> Sheet:
    """Return a stored sheet with its rows in memory; too many are refused.

    with_times: whether inputs are made of the times.
    """
    rows = cast(RowsOnDisk, sheet.u)
    if rows.nbytes > max_bytes:
        raise DataError(
            f"{sheet.path} has {rows.nbytes:,} bytes as doubles, more than the limit of "
            f"{max_bytes:,}. Raise --max-bytes, or give the source files one by one."
        )
    y = None if sheet.y is None else sheet.y[:]
    numbers = np.arange(len(rows))
    time = times_between(sheet, 0, len(rows)) if with_times else None
    return replace(
        sheet, u=rows[:], y=y, ids=list(sheet.ids), lines=numbers, rows=numbers, time=time
    )


def times_between(sheet: Sheet, start: int, stop: int) -> np.ndarray | None:
    """Return the times of rows start, ..., stop - 1 of a stored sheet; None if it has none."""
    times = sheet.times if isinstance(sheet, StoredSheet) else None
    return None if times is None else times.raw(start, stop)[:, 0]

"""Readers of users' own data. They are strict: an error names the file, the row and the column.

source   opening, reading and decoding a file
packed   compressed tables in text
sheet    Options, Problems, and the Sheet that a file is read into
dates    dates and times as people write them
index    the index of a data frame, which is left out
parsing  cells as numbers and times
room     memory that is given back as soon as it is not needed
texts    long lists of texts in little memory
columns  Roles and TableColumns: the columns of a table
ordering the rows of a table by sequence and time
words    columns of words among the features
wide     tables with one row for each sequence
table    the roles of columns, and a long table as sequences
text     .csv .tsv .txt: rows, and a table
characters  .txt: a text as a sequence of characters, and which .txt are tables
text_times  the time column of a text
parquet  .parquet .pq: rows, and a table
typed    typed columns as numbers, words and times
arrow    .arrow .feather: a table
numpy_files  arrays in .npy and .npz files, checked before they are read
arrays   .npy .npz: rows, and arrays of sequences
samples  .npy .npz: arrays of samples without time
images   folders of images
ts       .ts of the UEA and UCR archives
kept     columns of a table as they are written, to copy beside predictions
rows     the rows of a file, by its suffix
scaling  standardising a stream by the rows so far
stream   File: the steps of a file, row by row, for learning while it is read
"""

from __future__ import annotations

import os
from collections.abc import Callable

from ...errors import DataError, one_line
from .arrays import read_npy, read_npz
from .arrow import read_arrow
from .images import read_images
from .packed import table_suffix, unpack
from .parquet import read_parquet
from .samples import read_npy_samples, read_npz_samples
from .sheet import Options, Problems, Sheet
from .source import LoadedFile, load_file
from .text import read_csv
from .ts import read_ts
from .wide import wide_options

__all__ = ["READERS", "SAMPLE_READERS", "Options", "Sheet", "read"]

Reader = Callable[[LoadedFile, Options, Problems], Sheet]

READERS: dict[str, Reader] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".txt": read_csv,
    ".parquet": read_parquet,
    ".pq": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".npz": read_npz,
    ".npy": read_npy,
    ".ts": read_ts,
}
# Of samples without time; a folder of images has no suffix.
SAMPLE_READERS: dict[str, Reader] = {
    ".csv": read_csv,
    ".tsv": read_csv,
    ".txt": read_csv,
    ".parquet": read_parquet,
    ".pq": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".npz": read_npz_samples,
    ".npy": read_npy_samples,
}


def read(path: str | os.PathLike[str], options: Options | None = None) -> Sheet:
    """Read the sequences of a file; its suffix chooses the reader.

    With options.rows "samples" the file holds samples without time, and may be a folder of images.
    """
    options = options or Options()
    is_of_samples = options.rows == "samples"
    readers = SAMPLE_READERS if is_of_samples else READERS
    if os.path.isdir(path):
        if is_of_samples:
            return read_images(path, options)
        reads_images = options.advise(
            "A folder of images is read for a network without time (--chain).",
            "Only a network without time reads a folder of images.",
        )
        raise DataError(f"{one_line(path, 4096)} is a directory; expected a file. {reads_images}")
    source = load_file(path, options.max_bytes)
    suffix = table_suffix(path)
    if suffix not in readers:
        kinds = f"{', '.join(readers)}; or text as .csv.gz or .csv.zst"
        if suffix in READERS:
            raise DataError(
                f"{source.path}: {suffix} files hold sequences, which a network without time does "
                f"not read; expected one of {kinds}, or a folder of images."
            )
        advice = options.advise(" For a text of characters, pass --kind next --text.", "")
        raise DataError(
            f"{source.path}: cannot read files named '{one_line(suffix)}'; expected one of {kinds}."
            f"{'' if is_of_samples else advice}"
        )
    if options.wide:
        options = wide_options(options, suffix, source.path)
    return readers[suffix](unpack(source, options.max_bytes), options, Problems(source.path))

"""Tables in chunks of rows: what `prepare` reads, of which a small part is in memory.

A chunk is a sheet by itself: its values are checked as those of a whole file are. Arrays have
chunks in `array_chunks`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import numpy as np

from ..errors import ConfigError, DataError, one_line
from .array_chunks import ARRAYS, ArrayChunks
from .files.arrow import ArrowRows
from .files.columns import Roles, TableColumns
from .files.packed import table_suffix, unpack
from .files.parquet import ParquetRows, choose_typed_roles, refuse_unfit_types
from .files.parsing import parse_times
from .files.sheet import Options, Problems, Sheet
from .files.source import LoadedFile, load_file
from .files.table import AUTO, assign_roles, sheet_from_columns
from .files.text import TextRows, read_columns, survey_columns, with_note
from .files.texts import WordList
from .files.typed import typed_columns, used_columns
from .files.wide import choose_steps, wide_options
from .files.words import choose_categorical

ROWS_PER_CHUNK = 1 << 15
NUMBERS_PER_CHUNK = 1 << 19  # of tables with many columns: a chunk is in memory several times
TEXT = (".csv", ".tsv", ".txt")
TYPED = (".parquet", ".pq", ".arrow", ".feather")
EXACT_TYPES = ("float", "halffloat", "int8", "int16", "uint8", "uint16", "bool")  # in 32 bits
Where = Callable[[int, str], str]


class ChunkedTable(Protocol):
    """A file that is read in chunks."""

    source: LoadedFile
    roles: Roles
    names: list[str]  # of its columns
    has_names: bool  # whether the file gives them
    is_exact_in_32_bits: bool

    def chunks(self, options: Options) -> Iterator[Sheet]:
        """Yield the rows of the file, some at a time."""

    def share_read(self) -> float:
        """Return how much of the file was read, from 0 to 1."""


def open_table(path: str | os.PathLike[str], options: Options, known: int = 0) -> ChunkedTable:
    """Open a table, or arrays; other files are refused by name. known: sequences so far."""
    suffix = table_suffix(path)
    name = one_line(path, 4096)
    if suffix not in TEXT + TYPED + ARRAYS:
        raise ConfigError(
            f"{name}: prepare reads tables ({', '.join(TEXT + TYPED)}; text also as .csv.gz) and "
            f"arrays ({', '.join(ARRAYS)}), row by row. A file named '{one_line(suffix)}' is read "
            "as a whole: pass it to train."
        )
    if options.at and suffix not in ARRAYS:
        raise ConfigError("--at says where y belongs in arrays; for a table, pass it to train.")
    source = load_file(path, options.max_bytes)
    if options.wide:
        options = wide_options(options, suffix, source.path)
    if suffix in ARRAYS:
        return ArrayChunks(source, suffix, options, known)
    if suffix in TEXT:
        return TextChunks(unpack(source, options.max_bytes), options)
    return TypedChunks(source, suffix, options)


def rows_at_once(roles: Roles) -> int:
    """Return how many rows make a chunk."""
    return min(ROWS_PER_CHUNK, max(256, NUMBERS_PER_CHUNK // max(1, len(roles.features))))


class TextChunks:
    """A table in text."""

    has_names = True
    is_exact_in_32_bits = False

    def __init__(self, source: LoadedFile, options: Options) -> None:
        self.source = source
        self.problems = Problems(source.path)
        self.rows = TextRows.from_file(source, options, self.problems)
        found = assign_roles(self.rows.data_names, options, self.problems, self.rows.holds_dates)
        self.roles = with_note(found, self.rows.index)
        self.names = list(self.rows.data_names)
        if options.wide:
            self.roles = choose_steps(self.roles, options, self.problems)
        if options.categorical == AUTO:
            again = TextRows.from_file(source, options, Problems(source.path))
            surveys = survey_columns(again, self.roles.features, options)
            self.roles = choose_categorical(self.roles, surveys)

    def share_read(self) -> float:
        """Return how much of the file was read, by its bytes."""
        file = self.source.file
        return 1.0 if file is None else file.tell() / max(1, self.source.size)

    def chunks(self, options: Options) -> Iterator[Sheet]:
        """Yield the rows of the file, some at a time."""

        def where(line: int, column: str) -> str:
            return f"{self.rows.place(line)} column '{one_line(column)}'"

        blocks = self.rows.blocks()
        while True:
            some = SomeBlocks(self.rows, blocks, rows_at_once(self.roles))
            if some.is_over:
                self.problems.raise_if_any()
                return
            columns = read_columns(some, self.roles, options, self.problems)
            if columns.stamps is not None and columns.time is None:
                times = parse_times(list(columns.stamps), options)
                columns.time = times.time
                columns.has_dates = times.has_dates
                columns.date_order = times.order
                for i, complaint in times.wrong:
                    place = where(int(columns.lines[i]), self.roles.time)
                    self.problems.add(f"{place}: {complaint}", "time")
                options = replace(options, dates=times.order or options.dates)
            yield chunk_sheet(self.source, self.roles, columns, options, self.problems, where)


class SomeBlocks:
    """Some of the blocks of a text, as rows."""

    def __init__(
        self, rows: TextRows, blocks: Iterator[tuple[list[int], list[list[str]]]], most: int
    ) -> None:
        """most: rows, after which the last block ends."""
        self.names = rows.names
        self.rows = rows
        self.taken: list[tuple[list[int], list[list[str]]]] = []
        count = 0
        for block in blocks:
            self.taken.append(block)
            count += len(block[0])
            if count >= most:
                break

    def place(self, line: int) -> str:
        """A line of the file, in words."""
        return self.rows.place(line)

    @property
    def is_over(self) -> bool:
        """Whether there are none left."""
        return not self.taken

    def blocks(self) -> Iterator[tuple[list[int], list[list[str]]]]:
        """The lines and the cells of some rows at a time, which are then forgotten."""
        while self.taken:
            yield self.taken.pop(0)


class TypedChunks:
    """A table with typed columns."""

    has_names = True

    def __init__(self, source: LoadedFile, suffix: str, options: Options) -> None:
        self.source = source
        self.problems = Problems(source.path)
        if suffix in (".parquet", ".pq"):
            self.file = ParquetRows(source.path, source.open())
        else:
            self.file = ArrowRows(source, options.max_bytes)
        self.roles = choose_typed_roles(self.file, options, self.problems)
        refuse_unfit_types(self.file, self.roles, options, self.problems)
        self.names = list(self.file.names)
        numbers = [name for name in self.roles.features if name not in self.roles.categorical]
        types = {str(self.file.schema.field(name).type) for name in numbers}
        self.is_exact_in_32_bits = types <= set(EXACT_TYPES)
        self.rows_read = 0

    def share_read(self) -> float:
        """Return how much of the file was read, by its rows."""
        return float(self.rows_read / max(1, self.file.count))

    def chunks(self, options: Options) -> Iterator[Sheet]:
        """Yield the rows of the file, some at a time."""
        file = self.file

        def where(row: int, column: str) -> str:
            return f"{file.place(row)} column '{one_line(column)}'"

        first = 1
        try:
            for batch in file.batches(used_columns(self.roles), rows_at_once(self.roles)):
                count = batch.batch.num_rows
                columns = typed_columns(
                    batch, count, first, self.roles, options, self.problems, where
                )
                self.problems.raise_if_any()
                options = replace(options, dates=columns.date_order or options.dates)
                first += count
                self.rows_read += count
                yield chunk_sheet(self.source, self.roles, columns, options, self.problems, where)
        except (DataError, ConfigError):
            raise
        except Exception as error:  # pyarrow raises all kinds of errors for a damaged file
            raise file.damage_error(error, f" row {first}") from None


def chunk_sheet(
    source: LoadedFile,
    roles: Roles,
    columns: TableColumns,
    options: Options,
    problems: Problems,
    where: Where,
) -> Sheet:
    """Return some rows as a sheet; rows that are out of order are refused.

    Missing values are told apart later, where "refuse" says what to do about them.
    """
    problems.raise_if_any()
    refuse_split_sequences(roles, columns, where)
    if columns.time is not None:
        refuse_unsorted(roles, columns, where)
    return sheet_from_columns(source, roles, columns, options, problems, where)


def refuse_split_sequences(roles: Roles, columns: TableColumns, where: Where) -> None:
    """Refuse an id that appears again after other ids."""
    if not roles.id:
        return
    words = columns.words[roles.id]
    assert isinstance(words, WordList)
    numbers = words.numbers
    begins = np.flatnonzero(np.concatenate([[True], numbers[1:] != numbers[:-1]]))
    seen: set[int] = set()
    for row in begins.tolist():
        if int(numbers[row]) in seen:
            raise appears_again(where(int(columns.lines[row]), roles.id), words[row])
        seen.add(int(numbers[row]))


def appears_again(place: str, name: str) -> DataError:
    """Return the error for an id that appears again."""
    return DataError(
        f"{place}: id '{one_line(name)}' appears again after other rows. The rows of a sequence "
        "must follow one another in one file: sort them, or give the sequence another id."
    )


def refuse_unsorted(roles: Roles, columns: TableColumns, where: Where) -> None:
    """Refuse a row whose time is before that of the row before it, in the same sequence."""
    time = columns.time
    assert time is not None
    is_late = time[1:] < time[:-1]
    if roles.id:
        words = columns.words[roles.id]
        assert isinstance(words, WordList)
        numbers = words.numbers
        is_late &= numbers[1:] == numbers[:-1]
    late = np.flatnonzero(is_late)
    if len(late):
        raise out_of_order(where(int(columns.lines[late[0] + 1]), roles.time))


def out_of_order(place: str) -> DataError:
    """Return the error for a row that comes too late."""
    return DataError(
        f"{place}: the time is before that of the row before it. prepare reads rows once, in "
        "their order: sort the file by id and time."
    )

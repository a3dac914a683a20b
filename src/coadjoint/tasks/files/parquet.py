"""Parquet files: a long table with typed columns, and its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Protocol

from ...errors import DataError, MissingError, error_text, one_line
from .columns import Roles
from .dates import is_date
from .index import ARROW_INDEX, ARROW_NOTE, is_asked_for
from .sheet import Options, Problems, Sheet
from .source import LoadedFile, detect_format, open_file, refuse_if_too_large
from .table import AUTO, assign_roles, sheet_from_columns
from .typed import BatchOfRows, kind_of_column, to_words, typed_columns, used_columns
from .wide import choose_steps
from .words import Survey, advise_on_words, choose_categorical

if TYPE_CHECKING:
    from .typed import Arrow

# The kinds of column that may have a role.
KINDS_BY_ROLE = {
    "id": ("words", "whole"),
    "time": ("whole", "number", "time", "words"),
    "target": ("words", "whole", "number", "bool"),
    "feature": ("whole", "number", "bool"),
    "categorical": ("words", "whole", "number", "bool"),
}
ROWS_PER_BATCH = 4096  # of a stream
ROWS_OF_COLUMN = 1 << 14  # that are in memory at a time
BYTES_BUFFERED = 1 << 16  # of a column in a file


class TypedTable(Protocol):
    """A table whose columns have types."""

    names: list[str]

    def kind(self, name: str) -> str:
        """What a column can hold: words, whole, number, bool, time or other."""

    def type_name(self, name: str) -> str:
        """The type of a column, for messages."""

    def holds_dates(self, name: str) -> bool:
        """Whether a column holds times, or its first text is a date."""

    def survey_columns(self, names: Sequence[str], options: Options) -> dict[str, Survey]:
        """What the cells of those of these columns hold that are of text."""


class ParquetRows:
    """A Parquet file: iterate for (number, cells) of its rows, or read whole columns.

    names, schema, count    of its columns, their types, and of its rows
    """

    has_names = True
    format = "Parquet"

    def __init__(self, path: str, file: IO[bytes]) -> None:
        self.path = path
        self.handle = file
        self.pa = import_pyarrow()
        head = file.read(16)
        if head[:4] != b"PAR1":
            known = detect_format(head)
            content = f"holds {known[0]}" if known else "is not Parquet"
            raise DataError(
                f"{path} is named .parquet but {content}; expected a file that begins with PAR1."
            )
        try:
            file.seek(0)
            self.file = self.pa.parquet.ParquetFile(
                file, page_checksum_verification=True, pre_buffer=False, buffer_size=BYTES_BUFFERED
            )
            self.schema = self.file.schema_arrow
            metadata = self.file.metadata
            self.names = list(map(str, self.schema.names))
            self.count = metadata.num_rows
            groups = range(metadata.num_row_groups)
            self.bytes = sum(metadata.row_group(i).total_byte_size for i in groups)
        except Exception as error:  # pyarrow raises all kinds of errors for a damaged file
            raise self.damage_error(error) from None
        if not self.count:
            raise DataError(f"{path} has columns but no rows.")

    @classmethod
    def open(cls, path: str, options: Options) -> ParquetRows:
        """The rows of the file at `path`; options: none applies."""
        return cls(path, open_file(path))

    def damage_error(self, error: Exception, where: str = "") -> DataError:
        """The error to raise for an error of pyarrow; where: the place after the file's name."""
        return DataError(
            f"{self.path}{where} is incomplete or damaged: {error_text(error, 160)}. Write the "
            f"{self.format} file again."
        )

    def read_columns(self, names: list[str]) -> dict[str, Arrow]:
        """Whole columns, as arrays of pyarrow."""
        return self.checked_columns(self.file.read(columns=names), names)

    def batches(self, names: list[str], size: int) -> Iterator[BatchOfRows]:
        """Some columns, at most `size` rows at a time."""
        for batch in self.file.iter_batches(batch_size=size, columns=names, use_threads=False):
            batch.validate(full=True)
            yield BatchOfRows(self, batch)

    def read_column(self, name: str) -> Iterator[Arrow]:
        """A column in parts, as arrays of pyarrow whose values can be read."""
        for batch in self.file.iter_batches(
            batch_size=ROWS_OF_COLUMN, columns=[name], use_threads=False
        ):
            # A damaged file can hold offsets that lead out of memory.
            batch.validate(full=True)
            yield batch.column(0)
        self.pa.default_memory_pool().release_unused()

    def checked_columns(self, table: Arrow, names: list[str]) -> dict[str, Arrow]:
        """Columns of a table of pyarrow, as arrays whose values can be read."""
        # A damaged file can hold offsets that lead out of memory. Both what was read and what
        # combine_chunks made of it are checked before values are read.
        table.validate(full=True)
        arrays = {name: table.column(name).combine_chunks() for name in names}
        for array in arrays.values():
            array.validate(full=True)
        return arrays

    def __iter__(self) -> Iterator[tuple[int, list[object]]]:
        """(number, cells) of each row, from 1, with some thousands of rows in memory."""
        number = 0
        try:
            for batch in self.file.iter_batches(batch_size=ROWS_PER_BATCH):
                columns = [column.to_pylist() for column in batch.columns]
                for cells in zip(*columns, strict=True):
                    number += 1
                    yield number, list(cells)
        except Exception as error:
            raise self.damage_error(error, f" row {number + 1}") from None

    def kind(self, name: str) -> str:
        """What a column can hold: see `kind_of_column`."""
        return kind_of_column(self.pa, self.schema.field(name).type)

    def type_name(self, name: str) -> str:
        """The type of a column, for messages."""
        return one_line(self.schema.field(name).type, 80)

    def holds_dates(self, name: str) -> bool:
        """Whether a column holds times, or its first text is a date."""
        kind = self.kind(name)
        if kind != "words":
            return kind == "time"
        try:
            batch = next(self.file.iter_batches(batch_size=ROWS_PER_BATCH, columns=[name]))
            return is_date(next(filter(None, batch.column(0).to_pylist()), ""))
        except Exception as error:
            raise self.damage_error(error) from None

    def survey_columns(self, names: Sequence[str], options: Options) -> dict[str, Survey]:
        """What the cells of those of these columns hold that are of text."""
        surveys = {}
        for name in names:
            if self.kind(name) == "words":
                surveys[name] = Survey()
                row = 1
                for array in self.read_column(name):
                    words = to_words(self.pa, array)
                    surveys[name].add(range(row, row + len(words)), words, options)
                    row += len(words)
        return surveys

    def place(self, row: int) -> str:
        """A row of the file, in words: "d.parquet row 17"."""
        return f"{self.path} row {row}"

    def close(self) -> None:
        """Close the file."""
        self.handle.close()


def import_pyarrow() -> Arrow:
    """The module pyarrow, which is optional."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError:
        raise MissingError(
            "reading Parquet and Arrow files needs pyarrow: pip install 'coadjoint[data]'."
        ) from None
    return pyarrow


def read_parquet(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """Read a table of numbers, words (plain or dictionary) and times; other types are refused."""
    file = ParquetRows(source.path, source.open())
    return read_typed(file, source, options, problems)


def read_typed(
    file: ParquetRows, source: LoadedFile, options: Options, problems: Problems
) -> Sheet:
    """The sequences of a table with typed columns."""
    roles = choose_typed_roles(file, options, problems)
    used = used_columns(roles)
    need = max(file.bytes, 8 * file.count * len(used))  # as declared, or as doubles in memory
    what = f"{file.count:,} rows, about "
    refuse_if_too_large(source.path, what, need, source.size, options.max_bytes)
    refuse_unfit_types(file, roles, options, problems)
    try:
        return make_sheet(file, source, roles, options, problems)
    except DataError:
        raise
    except Exception as error:
        raise file.damage_error(error) from None


def choose_typed_roles(file: TypedTable, options: Options, problems: Problems) -> Roles:
    """The roles of the columns of a table, whose types are known."""
    names = file.names
    is_index_left_out = ARROW_INDEX in names and not is_asked_for(ARROW_INDEX, options)
    if is_index_left_out and options.time is None:
        is_index_left_out = not file.holds_dates(ARROW_INDEX)
    if is_index_left_out:
        names = [name for name in names if name != ARROW_INDEX]
    roles = assign_roles(names, options, problems, file.holds_dates)
    if is_index_left_out:
        roles = replace(roles, notes=(ARROW_NOTE, *roles.notes))
    if options.wide:
        roles = choose_steps(roles, options, problems)
    if options.categorical == AUTO:
        roles = choose_categorical(roles, file.survey_columns(roles.features, options))
    return roles


def refuse_unfit_types(
    file: TypedTable, roles: Roles, options: Options, problems: Problems
) -> None:
    """Refuse columns whose type does not fit their role."""
    for name in used_columns(roles):
        expected = kinds_for(name, roles, options)
        kind = file.kind(name)
        if kind in expected:
            continue
        advice = f"Cast the column{options.advise(', or leave it out with --features', '')}."
        if kind in ("words", "time") and name not in (roles.id, roles.time):
            holds = "dates" if file.holds_dates(name) else "words"
            usable = []
            for other in roles.features:
                if file.kind(other) in kinds_for(other, roles, options):
                    usable.append(other)
            advice = advise_on_words(name, holds, usable, roles, options)
        problems.add(
            f"{problems.path} column '{one_line(name)}': type {file.type_name(name)} cannot be "
            f"used here; expected {', '.join(expected)}. {advice}"
        )
    problems.raise_if_any()


def kinds_for(name: str, roles: Roles, options: Options) -> tuple[str, ...]:
    """The kinds that a column may have in its role; a target to regress must hold numbers."""
    if name == roles.time:
        return KINDS_BY_ROLE["time"]
    if name == roles.id:
        return KINDS_BY_ROLE["id"]
    if name in roles.targets and options.kind != "regress":
        return KINDS_BY_ROLE["target"]
    if name in roles.categorical:
        return KINDS_BY_ROLE["categorical"]
    return KINDS_BY_ROLE["feature"]


def make_sheet(
    file: ParquetRows,
    source: LoadedFile,
    roles: Roles,
    options: Options,
    problems: Problems,
) -> Sheet:
    """The sequences of a table. Its columns are read one by one, each in parts."""

    def where(row: int, column: str) -> str:
        return f"{file.place(row)} column '{one_line(column)}'"

    columns = typed_columns(file, file.count, 1, roles, options, problems, where)
    problems.raise_if_any()
    return sheet_from_columns(source, roles, columns, options, problems, where)

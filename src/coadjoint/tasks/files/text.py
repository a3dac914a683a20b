"""Tables in text (.csv .tsv .txt): their rows, to be collected into a table or streamed."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import IO, Protocol

import numpy as np

from ...errors import DataError, error_text, one_line
from .columns import Roles, TableColumns
from .dates import is_date
from .index import UNNAMED, IndexColumn, find_index, is_asked_for
from .packed import table_suffix
from .parsing import is_number, parse_numbers, parse_times
from .room import Numbers, RowBlocks
from .sheet import CELLS_LISTED, Options, Problems, Sheet
from .source import LoadedFile, decode_utf8, open_file, refuse_other_format
from .table import AUTO, DATE_NAMES, USUAL_NAMES, assign_roles, sheet_from_columns
from .text_times import PartsFile, TimeCollector
from .texts import WordCollector
from .wide import choose_steps, counts_up
from .words import Survey, choose_categorical, complain_of_words

ROWS_PER_BLOCK = 1 << 11  # turned into numbers at a time, so that the text of few rows is in memory
BYTES_PER_PART = 1 << 16  # of a stream that are read at a time
LONGEST_LINE = 1 << 20  # bytes of a line of a stream
LONGEST_IN_FILE = 1 << 28  # of a line of a file: of a wide table it may hold many steps
ROWS_AHEAD = 101  # of a file, from which its separator and width are checked


class TextRows:
    """The rows of a table in UTF-8 text with a separator: (line, cells), one cell per name.

    names     those of the header, or c1, c2, ...
    problems  where unusable rows are reported; if it collects all problems, reading goes on
    """

    has_names = True

    def __init__(
        self,
        path: str,
        lines: Iterable[str],
        options: Options,
        problems: Problems,
        ahead: int,
        file: IO[bytes] | None = None,
    ) -> None:
        """ahead: rows to look at before the first is taken; file: what `close` closes."""
        self.path = path
        self.problems = problems
        self.file = file
        sep = options.sep
        if sep is None:
            sep = "\t" if table_suffix(path) == ".tsv" else ","
        self.rest = self._parse_rows(csv.reader(lines, delimiter=sep, strict=True))
        self.ahead = list(itertools.islice(self.rest, ahead))
        if not self.ahead:
            problems.refuse(f"{path}: the file holds no text.")
        first = [cells for _, cells in self.ahead]
        check_separator(first, sep, problems)
        self.names = [f"c{k + 1}" for k in range(len(first[0]))]
        self.index: IndexColumn | None = None
        if options.header:
            self.names = list(map(str.strip, first[0]))
            self._set_index_aside([cells for cells in first[1:] if cells], options)
            check_header(self.names, options, Problems(path))  # all of the header's at once
            del self.ahead[0]
        width = len(self.names)
        if not self.ahead:
            problems.refuse(f"{path} has a header but no rows.")
        # Every row is one longer than the header: the index column of a data frame has no name.
        if options.header and {len(cells) for _, cells in self.ahead} == {width + 1}:
            problems.refuse(
                f"{path}: the header has {width} names, but rows have {width + 1} fields. Name "
                "every column in line 1."
            )

    @property
    def data_names(self) -> list[str]:
        """The names of the columns without an index that is left out."""
        return self.names if self.index is None else self.names[1:]

    def _set_index_aside(self, rows: list[list[str]], options: Options) -> None:
        """Name a first column without a name, and leave it out if it is an index of numbers.

        rows: the cells of the first rows. R writes no name at all for it, so that every row is one
        longer than the header.
        """
        first_cells = [row[0] for row in rows]
        if {len(row) for row in rows} == {len(self.names) + 1}:
            index = find_index("", first_cells, options)
            if index is not None and index.start is not None:
                self.index = index
                self.names = [UNNAMED, *self.names]
        elif rows:
            self.index = find_index(self.names[0], first_cells, options)
        is_time = options.time is None and is_date(next(iter(first_cells), ""))
        is_used = is_time or is_asked_for(UNNAMED, options)
        if self.index is not None or (not self.names[0] and is_used):
            self.names[0] = UNNAMED

    def _check_index(self, line: int, cell: str, number: int) -> None:
        """Report a row that the index does not count; number: that of the row, from 0."""
        assert self.index is not None
        if self.index.start is None or cell.strip() == str(self.index.start + number):
            return
        self.problems.add(
            f"{self.path}:{line}: the first column has no name and counts the rows up to here, but "
            f'this is "{one_line(cell)}". Name the column, or remove it.',
            "index",
        )

    @classmethod
    def from_file(cls, source: LoadedFile, options: Options, problems: Problems) -> TextRows:
        """All rows of a file, of which a small part is in memory."""
        lines = read_lines(PartsFile(source.parts()), source.path, LONGEST_IN_FILE)
        return cls(source.path, lines, options, problems, ROWS_AHEAD)

    @classmethod
    def open(cls, path: str, options: Options) -> TextRows:
        """The rows of a file, a .gz, or standard input ("-"), with a small part in memory."""
        file: IO[bytes] = sys.stdin.buffer if path == "-" else open_file(path)
        if path.lower().endswith(".gz"):
            file = gzip.GzipFile(fileobj=file)  # type: ignore[assignment]
        name = "standard input" if path == "-" else path
        problems = Problems(name, collect_all=False)
        # Two rows ahead: the header and a first row are needed before the stream begins.
        return cls(name, read_lines(file, name), options, problems, 2, file)

    def _parse_rows(self, reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
        """Rows and the line that each begins on; blank lines are allowed at the end only."""
        blank = 0  # the first blank line; 0 if there is none
        line = 1
        while True:
            try:
                row = next(reader, None)
            except csv.Error as error:
                # A quote that is never closed takes the rest of the file as one field.
                unclosed = "end of data" in str(error) or "field larger" in str(error)
                why = "one opens and is never closed" if unclosed else error_text(error)
                self.problems.refuse(
                    f'{self.path}:{line}: the quotes (") of this row do not pair up: {why}. '
                    "Fix the row, or double the quotes inside a cell."
                )
            if row is None:
                return
            if not row:
                blank = blank or line
            elif blank:
                advice = "Remove it."
                if table_suffix(self.path) == ".txt":
                    advice += " If the file holds a text, not a table, pass --kind next --text."
                self.problems.refuse(
                    f"{self.path}:{blank}: the line is blank, but rows follow it. {advice}"
                )
            else:
                yield line, row
            line = reader.line_num + 1  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        """(line, cells) of each row; rows of another width are reported and left out."""
        width = len(self.names)
        for number, (line, row) in enumerate(itertools.chain(self.ahead, self.rest)):
            if len(row) == width:
                if self.index is not None:
                    self._check_index(line, row[0], number)
                yield line, row
            else:
                self.problems.add(
                    f"{self.path}:{line}: expected {width} fields, got {len(row)}. Fix the row.",
                    "fields",
                )

    def blocks(self) -> Iterator[tuple[list[int], list[list[str]]]]:
        """The lines and the cells of some thousands of rows at a time."""
        lines: list[int] = []
        rows: list[list[str]] = []
        for line, row in self:
            lines.append(line)
            rows.append(row)
            if len(rows) == ROWS_PER_BLOCK:
                yield lines, rows
                lines = []
                rows = []
        if rows:
            yield lines, rows

    def holds_dates(self, name: str) -> bool:
        """Whether the first cell of a column that is not blank, in the rows ahead, is a date."""
        k = self.names.index(name)
        cells = (row[k] for _, row in self.ahead if len(row) > k and row[k].strip())
        return is_date(next(cells, ""))

    def place(self, line: int) -> str:
        """A line of the file, in words: "d.csv:17"."""
        return f"{self.path}:{line}"

    def close(self) -> None:
        """Close the file; standard input stays open."""
        if self.file is not None and self.file is not sys.stdin.buffer:
            self.file.close()


class RowsInBlocks(Protocol):
    """Rows of a text: all, or some of them."""

    names: list[str]

    def place(self, line: int) -> str:
        """A line of the file, in words."""

    def blocks(self) -> Iterator[tuple[list[int], list[list[str]]]]:
        """The lines and the cells of some thousands of rows at a time."""


def read_lines(
    file: IO[bytes] | PartsFile, path: str, longest: int = LONGEST_LINE
) -> Iterator[str]:
    """The lines of text in UTF-8 as they come; path: the file's name in messages.

    From a pipe, whatever is there is taken, without waiting for more than the end of a line.
    longest: bytes of a line that are too many.
    """
    rest = b""  # the beginning of a line whose end has not come yet
    line = 1  # number of the first line that was not yielded yet
    begin = 0  # its first byte
    while True:
        try:
            part = file.read1(BYTES_PER_PART)  # type: ignore[union-attr]
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path}:{line}: cannot be read further: {error_text(error)}."
            ) from None
        data = rest + part
        end = len(data)
        if not begin:
            refuse_other_format(data, path)
        if part:
            # A line ends in \n, \r\n or \r; a \r at the very end may be the first half of \r\n.
            end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1
        rest = data[end:]
        if len(rest) >= longest:
            long_line = line + data.count(b"\n", 0, end)
            raise DataError(
                f"{path}:{long_line}: a line of {longest:,} bytes or more. This is not a "
                "table in text, or it is damaged."
            )
        if end:
            yield from io.StringIO(decode_utf8(data[:end], path, line, begin), newline="")
            line += data.count(b"\n", 0, end)
            begin += end
        if not part:
            return


def read_csv(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """Read a table in UTF-8 text; every row has as many fields as the header has names."""
    rows = TextRows.from_file(source, options, problems)
    found = assign_roles(rows.data_names, options, problems, rows.holds_dates)
    roles = with_note(found, rows.index)
    if options.wide:
        roles = choose_steps(roles, options, problems)
    if options.categorical == AUTO:
        again = TextRows.from_file(source, options, Problems(source.path))
        roles = choose_categorical(roles, survey_columns(again, roles.features, options))

    def where(line: int, column: str) -> str:
        return f"{rows.place(line)} column '{one_line(column)}'"

    columns = read_columns(rows, roles, options, problems)
    if columns.stamps is not None and columns.time is None:
        times = parse_times(list(columns.stamps), options)
        columns.time = times.time
        columns.has_dates = times.has_dates
        columns.date_order = times.order
        for i, complaint in times.wrong:
            place = where(int(columns.lines[i]), roles.time)
            problems.add(f"{place}: {complaint}", "time")
    return sheet_from_columns(source, roles, columns, options, problems, where)


def read_columns(
    rows: RowsInBlocks, roles: Roles, options: Options, problems: Problems
) -> TableColumns:
    """The columns that have a role: numbers parsed, words and times as they are written.

    Targets are words, unless options.kind is "regress"; if it is None they may turn out as labels.
    """
    index = {name: k for k, name in enumerate(rows.names)}
    words = [roles.id] if roles.id else []
    words += roles.categorical
    numeric = [name for name in roles.features if name not in roles.categorical]
    if options.kind in (None, "classify"):
        words += roles.targets
    elif options.kind == "regress":
        numeric += roles.targets
    place = {name: j for j, name in enumerate(roles.features)}
    inputs = RowBlocks(len(place))
    targets: dict[str, list[np.ndarray]] = {name: [] for name in numeric if name not in place}
    surveys = {name: Survey() for name in numeric}
    complaints: dict[str, list[str]] = {name: [] for name in numeric}
    wrong_cells = dict.fromkeys(numeric, 0)
    columns = TableColumns()
    collectors = {name: WordCollector() for name in words}
    times = TimeCollector()
    lines = Numbers(np.uint32)
    for block_lines, block in rows.blocks():
        cells = list(zip(*block, strict=True))
        rows_of_block = np.zeros((len(block), len(place)))
        for name in numeric:
            values, wrong = parse_numbers(cells[index[name]], options)
            if name in place:
                rows_of_block[:, place[name]] = values
            else:
                targets[name].append(values)
            if wrong:
                surveys[name].add(block_lines, cells[index[name]], options)
            else:
                surveys[name].other_cells += len(values)
            for i, complaint in wrong[:CELLS_LISTED]:
                where = f"{rows.place(block_lines[i])} column '{one_line(name)}'"
                complaints[name].append(f"{where}: {complaint}")
            wrong_cells[name] += len(wrong)
        inputs.append(rows_of_block)
        for name in words:
            collectors[name].add(list(map(str.strip, cells[index[name]])))
        if roles.time:
            times.add(list(map(str.strip, cells[index[roles.time]])))
        lines.append(np.array(block_lines))
    of_words = {name for name, survey in surveys.items() if survey.is_of_words}
    usable = [name for name in roles.features if name not in of_words]
    for name, of_cells in complaints.items():
        survey = surveys[name]
        if name in of_words:  # one complaint about the column says more than one for each cell
            where = f"{rows.place(survey.first[0])} column '{one_line(name)}'"
            complaint = complain_of_words(name, survey, usable, roles, options)
            of_cells = [f"{where}: {complaint}"]
            wrong_cells[name] = 1
        for complaint in of_cells[:CELLS_LISTED]:
            problems.add(complaint, ("cells", name))
        unlisted = wrong_cells[name] - min(len(of_cells), CELLS_LISTED)
        if unlisted:
            problems.add(of_cells[0], ("cells", name), unlisted)
    if not lines.rows.count:  # every row was unusable, and is among the problems
        problems.raise_if_any()
    columns.lines = lines.join()
    columns.inputs = inputs.join()
    columns.numbers = {name: np.concatenate(blocks) for name, blocks in targets.items()}
    for name in numeric:
        if name in place:
            columns.numbers[name] = columns.inputs[:, place[name]]
    columns.words = {name: collector.collected() for name, collector in collectors.items()}
    if roles.time:
        columns.stamps, columns.time = times.collected()
    return columns


def survey_columns(rows: TextRows, names: Iterable[str], options: Options) -> dict[str, Survey]:
    """What the cells of these columns hold."""
    index = {name: k for k, name in enumerate(rows.names)}
    surveys = {name: Survey() for name in names}
    for lines, block in rows.blocks():
        cells = list(zip(*block, strict=True))
        for name, survey in surveys.items():
            survey.add(lines, cells[index[name]], options)
    return surveys


def check_separator(rows: list[list[str]], sep: str, problems: Problems) -> None:
    """Refuse a single column whose first two lines hold another separator equally often.

    rows: the cells of the first rows, as split by `sep`.
    """
    if len(rows) < 2 or len(rows[0]) > 1:
        return
    first = rows[0][0]
    second = sep.join(rows[1])
    for other in ";\t|, ":
        if other != sep and 0 < first.count(other) == second.count(other):
            name = {"\t": "tab", " ": "space"}.get(other, other)
            flag = {"\t": "$'\\t'"}.get(other, f"'{other}'")
            problems.refuse(
                f"{problems.path}: there is only one column, '{one_line(first)}'; the file looks "
                f"{name}-separated. Pass --sep {flag}."
            )


def advise_on_name(k: int, options: Options) -> str:
    """The end of "column ... has no name"; the first one may be an index that does not count."""
    if k > 0 or options.use != "train":
        return ". Name it, or remove the column."
    return (
        ", and does not count the rows 0, 1, 2, ... like an index. Name it, remove it, or pass "
        f"--time or --id '{UNNAMED}'."
    )


def with_note(roles: Roles, index: IndexColumn | None) -> Roles:
    """The roles, with a note on an index that is left out."""
    return roles if index is None else replace(roles, notes=(index.note, *roles.notes))


def check_header(names: list[str], options: Options, problems: Problems) -> None:
    """Refuse a first row that looks like data, and columns without names.

    A number may be the name of a column if a name that was asked for, or a usual one, is there too.
    """
    asked = {options.id, options.time, *(options.target or ()), *(options.features or ())}
    usual = {*DATE_NAMES, *(name for names in USUAL_NAMES.values() for name in names)}
    is_header = any(name and (name in asked or name.casefold() in usual) for name in names)
    numbers = [name for name in names if is_number(name, options)]
    is_header |= options.wide and counts_up(numbers)
    if numbers and not is_header:
        advice = options.advise(
            "Pass --no-header (columns are then c1, c2, ...), or add a header.",
            "Add a header, which the training file has.",
        )
        problems.refuse(
            f'{problems.path}:1: the first row looks like data ("{one_line(numbers[0])}"), not '
            f"names. {advice}"
        )
    for k, name in enumerate(names):
        if not name:
            problems.add(
                f"{problems.path}:1: column {k + 1} has no name{advise_on_name(k, options)}",
                "names",
            )
    problems.raise_if_any()

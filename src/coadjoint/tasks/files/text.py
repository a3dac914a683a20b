"""Tables in text (.csv .tsv .txt): one row source, which a table collects and a stream follows."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import IO

import numpy as np

from ...errors import DataError, error_text, one_line
from .parsing import is_number, parse_numbers, parse_times
from .sheet import Options, Problems, Sheet
from .source import LoadedFile, decode_utf8, open_file
from .table import USUAL_NAMES, TableColumns, assign_roles, sheet_from_columns

ROWS_PER_BLOCK = (
    1 << 12
)  # rows turned into numbers at a time: the text of a block is gone before the next is read
BYTES_PER_PART = 1 << 16  # bytes of a stream that are read at a time
LONGEST_LINE = 1 << 20  # bytes of the longest line of a stream
ROWS_AHEAD = 101  # rows of a whole file that are looked at before the first is taken


class TextRows:
    """The rows of a table in UTF-8 text with a separator: (line, cells), as many cells as there are names.

    names     those of the header, or c1, c2, ...
    problems  what is told of a row that cannot be used; the rows after it are read nevertheless, if `problems` is collect_all
    """

    has_names = True

    def __init__(
        self, path: str, lines: Iterable[str], options: Options, problems: Problems, ahead: int, file: IO[bytes] | None = None
    ) -> None:  # fmt: skip
        self.path, self.problems, self.file = path, problems, file
        sep = options.sep or ("\t" if path.lower().removesuffix(".gz").endswith(".tsv") else ",")
        self.rest = self._parsed(csv.reader(lines, delimiter=sep, strict=True))
        self.ahead = list(itertools.islice(self.rest, ahead))
        if not self.ahead:
            problems.refuse(f"{path}: the file holds no text.")
        first = [cells for _, cells in self.ahead]
        check_separator(first, sep, problems)
        self.names = [f"c{k + 1}" for k in range(len(first[0]))]
        if options.header:
            self.names = [name.strip() for name in first[0]]
            check_header(self.names, options, Problems(path))
            del self.ahead[0]
        width = len(self.names)
        if not self.ahead:
            problems.refuse(f"{path} has a header but no rows.")
        if options.header and {len(cells) for _, cells in self.ahead} == {width + 1}:
            problems.refuse(
                f"{path}: the header has {width} names, rows have {width + 1} fields. Name every column in line 1."
            )

    @classmethod
    def from_file(cls, source: LoadedFile, options: Options, problems: Problems) -> TextRows:
        """All rows of a file that was read into memory."""
        return cls(
            source.path, io.StringIO(source.text(), newline=""), options, problems, ROWS_AHEAD
        )

    @classmethod
    def open(cls, path: str, options: Options) -> TextRows:
        """The rows of a file, of a .gz, or of what is piped in (path "-"), without more of it in memory than a part."""
        file: IO[bytes] = sys.stdin.buffer if path == "-" else open_file(path)
        if path.lower().endswith(".gz"):
            file = gzip.GzipFile(fileobj=file)  # type: ignore[assignment]
        name = "standard input" if path == "-" else path
        return cls(
            name, read_lines(file, name), options, Problems(name, collect_all=False), 2, file
        )

    def _parsed(self, reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
        """Rows and the line that each begins on; a blank line may only stand at the end."""
        blank, line = 0, 1
        while True:
            try:
                row = next(reader, None)
            except csv.Error as e:
                unclosed = "end of data" in str(e) or "field larger" in str(e)
                why = "one opens and is never closed" if unclosed else error_text(e)
                self.problems.refuse(
                    f'{self.path}:{line}: the quotes (") of this row do not pair up: {why}. '
                    "Fix the row, or double the quotes inside a cell."
                )
            if row is None:
                return
            if not row:
                blank = blank or line
            elif blank:
                self.problems.refuse(
                    f"{self.path}:{blank}: the line is blank, and rows follow it. Remove it."
                )
            else:
                yield line, row
            line = reader.line_num + 1  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[tuple[int, list[str]]]:
        width = len(self.names)
        for line, row in itertools.chain(self.ahead, self.rest):
            if len(row) == width:
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
                lines, rows = [], []
        if rows:
            yield lines, rows

    def place(self, line: int) -> str:
        return f"{self.path}:{line}"

    def close(self) -> None:
        if self.file is not None and self.file is not sys.stdin.buffer:
            self.file.close()


def read_lines(file: IO[bytes], path: str) -> Iterator[str]:
    """The lines of a text in UTF-8, as they come: what a pipe has is taken, and no more waited for than a line needs."""
    rest, line, begin = b"", 1, 0
    while True:
        try:
            part = file.read1(BYTES_PER_PART)  # type: ignore[attr-defined]
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}:{line}: cannot be read on: {error_text(error)}.") from None
        data = rest + part
        # a line ends in \n, \r\n or \r; of a \r at the very end nobody knows yet
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1)) + 1 if part else len(data)
        rest = data[end:]
        if len(rest) >= LONGEST_LINE:
            at = line + data.count(b"\n", 0, end)
            raise DataError(
                f"{path}:{at}: a line of {LONGEST_LINE:,} bytes. This is not a table in text, or it is damaged."
            )
        if end:
            yield from io.StringIO(decode_utf8(data[:end], path, line, begin), newline="")
            line += data.count(b"\n", 0, end)
            begin += end
        if not part:
            return


def read_csv(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """A table in UTF-8 text with a separator; every row has as many fields as the header has names."""
    source_rows = TextRows.from_file(source, options, problems)
    of = assign_roles(source_rows.names, options, problems)
    index = {n: k for k, n in enumerate(source_rows.names)}
    wordy = [n for n in (of.id, *(of.targets if options.kind in (None, "classify") else ())) if n]
    numeric = [*of.features, *(of.targets if options.kind == "regress" else ())]
    parts: dict[str, list[np.ndarray]] = {n: [] for n in numeric}
    columns = TableColumns(words={n: [] for n in wordy}, stamps=[] if of.time else None)
    same: dict[str, str] = {}  # one string for all cells that read alike
    lines: list[np.ndarray] = []
    where = lambda line, column: f"{source_rows.place(line)} column '{one_line(column)}'"
    for start, block in source_rows.blocks():
        cells = list(zip(*block, strict=True))
        for name in numeric:
            values, wrong = parse_numbers(cells[index[name]], options)
            parts[name].append(values)
            for i, what in wrong:
                problems.add(f"{where(start[i], name)}: {what}", ("cells", name))
        for name in wordy:
            columns.words[name] += [
                same.setdefault(c, c) for c in map(str.strip, cells[index[name]])
            ]
        if columns.stamps is not None:
            columns.stamps += map(str.strip, cells[index[of.time]])
        lines.append(np.array(start, np.int64))
    if not lines:
        problems.raise_if_any()
    columns.lines = np.concatenate(lines)
    columns.numbers = {n: np.concatenate(p) for n, p in parts.items()}
    if columns.stamps is not None:
        columns.time, columns.has_dates, wrong = parse_times(columns.stamps, options)
        for i, what in wrong:
            problems.add(f"{where(int(columns.lines[i]), of.time)}: {what}", "time")
    return sheet_from_columns(source, of, columns, options, problems, where)


def check_separator(rows: list[list[str]], sep: str, problems: Problems) -> None:
    """One column in which another separator stands equally often in the first two lines."""
    if len(rows) < 2 or len(rows[0]) > 1:
        return
    first, second = rows[0][0], sep.join(rows[1])
    for other in ";\t|, ":
        if other != sep and 0 < first.count(other) == second.count(other):
            name = {"\t": "tab", " ": "space"}.get(other, other)
            flag = {"\t": "$'\\t'"}.get(other, f"'{other}'")
            problems.refuse(
                f"{problems.path}: there is one column '{one_line(first)}'; the file looks {name}-separated. Pass --sep {flag}."
            )


def check_header(names: list[str], options: Options, problems: Problems) -> None:
    """Numbers among the names are data, unless a name that was asked for or is usual stands there too."""
    asked = {options.id, options.time, *(options.target or ()), *(options.features or ())} - {
        None,
        "",
    }
    known = any(n in asked or n.casefold() in sum(USUAL_NAMES.values(), ()) for n in names)
    digits = [n for n in names if is_number(n, options)]
    if digits and not known:
        problems.refuse(
            f'{problems.path}:1: the first row looks like data ("{one_line(digits[0])}"), not names. Pass --no-header (columns are then c1, c2, ...), or add a header.'
        )
    for k, name in enumerate(names):
        if not name:
            problems.add(
                f"{problems.path}:1: column {k + 1} has no name. Name it, or remove the column.",
                "names",
            )
    problems.raise_if_any()

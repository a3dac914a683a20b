"""Texts as sequences of characters, and which .txt files are tables instead."""

from __future__ import annotations

import csv
import itertools
import os

import numpy as np

from ...errors import one_line
from .packed import table_stem, table_suffix, unpack
from .sheet import Sheet
from .source import load_file

CHARACTER = "character"  # the name of the one feature of a text
SEPARATORS = ",;\t| "
LINES_LOOKED_AT = 100


def read_characters(path: str | os.PathLike[str], max_bytes: int) -> Sheet:
    """Read a text in UTF-8 as one sequence of characters; u holds their numbers, [N, 1].

    Characters are numbered in the order of their code points. Every end of a line is one character,
    a line feed, however the file writes it; a byte order mark is left out.
    """
    source = unpack(load_file(path, max_bytes), max_bytes)
    text = source.text().replace("\r\n", "\n").replace("\r", "\n")
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    different, numbers = np.unique(points, return_inverse=True)
    starts = np.concatenate([[True], points[:-1] == ord("\n")])

    def where(line: int, _column: str) -> str:
        return f"{source.path}:{line}"

    return Sheet(
        source.path,
        source.sha256,
        (CHARACTER,),
        numbers.astype(np.float64)[:, None],
        np.array([len(points)]),
        [table_stem(path)],
        where,
        np.cumsum(starts),
        columns={"id": "", "time": ""},
        categories={CHARACTER: tuple(map(chr, different.tolist()))},
        rows=np.arange(len(points)),
        layout=f"{len(points):,} characters, {len(different):,} of them different",
    )


def may_be_text(path: str | os.PathLike[str], max_bytes: int) -> bool:
    """Tell whether a file is a text of characters by its name, .txt, and holds no table."""
    is_named_so = table_suffix(path) == ".txt" and os.path.isfile(path)
    return is_named_so and not holds_table(path, max_bytes)


def holds_table(path: str | os.PathLike[str], max_bytes: int) -> bool:
    """Tell whether a file in text is a table of numbers.

    It is one if, with one of SEPARATORS, its first lines have equally many cells, each of them but
    the first (the header) holds a number, and the header holds none, or all cells are numbers.
    """
    source = unpack(load_file(path, max_bytes), max_bytes)
    head = next(source.parts(), b"")
    # The last line of a part may be incomplete.
    lines = head.decode("utf-8-sig", "replace").rstrip("\r\n").splitlines()
    if len(lines) > LINES_LOOKED_AT:
        lines = lines[:LINES_LOOKED_AT]
    return any(are_rows(lines, separator) for separator in SEPARATORS)


def are_rows(lines: list[str], separator: str) -> bool:
    """Tell whether lines are a header and rows that hold a number each, or numbers alone."""
    try:
        rows = list(csv.reader(lines, delimiter=separator, strict=True))
    except csv.Error:
        return False
    if len(rows) < 2 or len({len(row) for row in rows}) != 1:
        return False
    if any(map(is_number, rows[0])):
        return all(all(map(is_number, row)) for row in rows)
    return all(any(map(is_number, row)) for row in itertools.islice(rows, 1, None))


def is_number(cell: str) -> bool:
    """Tell whether a cell is a number in digits."""
    try:
        float(cell)
    except ValueError:
        return False
    return any(map(str.isdigit, cell))


def show_symbol(word: str) -> str:
    """A symbol in quotes, spelled out if it cannot be seen."""
    return one_line(ascii(word) if word.isspace() else f"'{word}'")


def show_symbols(symbols: list[str], limit: int = 12) -> str:
    """Symbols in quotes, of which those that cannot be seen are spelled out."""
    shown = [show_symbol(word) for word in symbols[:limit]]
    more = f" and {len(symbols) - limit} more" if len(symbols) > limit else ""
    return f"{', '.join(shown)}{more}"

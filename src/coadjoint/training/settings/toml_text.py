"""TOML: values from tomllib, lines of keys from a scan of the text."""

from __future__ import annotations

import re
import tomllib

from .text import MAX_DEPTH, TOO_DEEP, Address, Notes
from .values import Value, check_values

TOKEN = re.compile(
    r"""\#[^\n]*
    | (?P<word>"{3}[^"\\]*+(?:(?:\\.?|"{1,2}(?!"))[^"\\]*+)*+(?:"{3,5})?  # strings, closed or not
             | '{3}[^']*+(?:'{1,2}(?!')[^']*+)*+(?:'{3,5})?
             | "[^"\\\n]*+(?:\\[^\n]?[^"\\\n]*+)*+"?
             | '[^'\n]*+'?
             | [^\s"'\#=\[\]{},.]+)
    | [\n=\[\]{}]""",
    re.VERBOSE | re.DOTALL,
)


def read(text: str, notes: Notes) -> Value:
    """The values of a TOML text; lines and problems go to the notes.

    tomllib's errors are worded anew, with the line of the problem.
    """
    repeated = _note_lines(text, notes)
    try:
        values = tomllib.loads(text)
    except ValueError as e:
        # "Cannot overwrite a value": tomllib's error does not say where the key was first.
        if repeated and str(e).startswith("Cannot"):
            notes.problems += repeated
            raise notes.as_error() from None
        if not isinstance(e, tomllib.TOMLDecodeError):  # int() refuses thousands of digits
            raise notes.failure(
                None, "an integer is beyond 64 bits. Write a smaller one."
            ) from None
        # tomllib's errors end with "(at line 3, column 5)" or "(at end of document)"
        reason, _, place = " ".join(str(e).split()).partition(" (at ")
        if place.startswith("line"):
            line = int(place.split()[1].rstrip(","))
        else:
            line = text.rstrip().count("\n") + 1
        raise notes.failure(line, f"not TOML: {reason}.") from None
    check_values(values, (), notes)
    return values


def _note_lines(text: str, notes: Notes) -> list[str]:
    """Note the line of every key outside inline tables; returns the problems of repeated keys.

    Nesting that tomllib would follow too deep is refused here. Text that is not TOML is left for
    tomllib to refuse.
    """
    # Shares the lines, but not the problems: a repeated key is one only if tomllib says so.
    repeated = Notes(notes.name, lines=notes.lines)
    last_index: dict[Address, int] = {}  # of each array of tables
    table: Address = ()  # the one whose header came last
    parts: list[str] = []  # of the dotted key or header that is being read
    line = 1
    depth = 0  # of brackets in the present value
    place = ""  # the brackets of a table's header so far, or "=" inside a value
    for token in TOKEN.finditer(text):
        symbol = token[0]
        if symbol == "\n" and not depth:  # the end of a header or a value
            place = ""
            parts = []
        elif place == "=":  # inside a value only brackets count
            depth += (symbol in "[{") - (symbol in "]}")
        elif token["word"]:
            parts.append(_unquoted_key(symbol))
        elif symbol == "=" and parts:
            place = "="
            address = (*table, *parts)
            repeated.note_key(address, line, address in notes.lines)
        elif symbol == "[":
            place += "["
        elif symbol == "]" and parts and place in ("[", "[["):
            table = _table_address(parts, last_index, place == "[[", notes, line)
            repeated.note_key(table, line, table in notes.lines)
            place = "]"
        if max(depth, len(parts)) > MAX_DEPTH:
            raise notes.failure(line, TOO_DEEP)
        line += symbol.count("\n")
    return repeated.problems


def _table_address(
    parts: list[str], last_index: dict[Address, int], is_array: bool, notes: Notes, line: int
) -> Address:
    """The address of the table with header [parts], or [[parts]] for an array of tables.

    In [fruit.variety], where fruit is an array of two tables so far, "fruit" means the last of
    them: the address is ("fruit", 1, "variety"). A header [[fruit]] would begin ("fruit", 2).

    last_index: the index of the last table of each array so far; [[parts]] adds one to its own.
    """
    table: Address = ()  # of the parts so far, with an index after each array
    unindexed: Address = ()  # the same without the index after the last part
    for part in parts:
        unindexed = (*table, part)
        table = unindexed
        if unindexed in last_index:
            table = (*unindexed, last_index[unindexed])
    if not is_array:
        return table
    last_index[unindexed] = last_index.get(unindexed, -1) + 1
    notes.note_key(unindexed, line)
    return (*unindexed, last_index[unindexed])


def _unquoted_key(text: str) -> str:
    """A part of a key without its quotes and escapes; unchanged if the string is not valid TOML."""
    if text[0] not in "\"'":
        return text
    try:
        key = tomllib.loads(f"key = {text}")["key"]
    except ValueError:
        return text
    return str(key)

"""TOML: tomllib gives the values, a scan the lines."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from .text import MAX_DEPTH, TOO_DEEP, Address, Notes
from .values import check_values

TOML = re.compile(
    r"""\#[^\n]*
    | (?P<word>"{3}[^"\\]*+(?:(?:\\.?|"{1,2}(?!"))[^"\\]*+)*+(?:"{3,5})?  # strings, closed or not
             | '{3}[^']*+(?:'{1,2}(?!')[^']*+)*+(?:'{3,5})?
             | "[^"\\\n]*+(?:\\[^\n]?[^"\\\n]*+)*+"?
             | '[^'\n]*+'?
             | [^\s"'\#=\[\]{},.]+)
    | [\n=\[\]{}]""",
    re.VERBOSE | re.DOTALL,
)


def read(text: str, notes: Notes) -> Any:
    twice = _toml_lines(text, notes)
    try:
        values = tomllib.loads(text)
    except ValueError as e:
        if twice and str(e).startswith("Cannot"):
            notes.problems += twice
            raise notes.as_error() from None
        if not isinstance(e, tomllib.TOMLDecodeError):  # int() refuses thousands of digits
            raise notes.failure(
                None, "an integer is beyond 64 bits. Write a smaller one."
            ) from None
        reason, _, at = " ".join(str(e).split()).partition(" (at ")
        line = (
            int(at.split()[1].rstrip(","))
            if at.startswith("line")
            else text.rstrip().count("\n") + 1
        )
        raise notes.failure(line, f"not TOML: {reason}.") from None
    check_values(values, (), notes)
    return values


def _toml_lines(text: str, notes: Notes) -> list[str]:
    """Notes the line of every key outside inline tables; returns what appears twice.

    What tomllib would follow too deep is refused here. What is not TOML is left for tomllib to say.
    """
    twice = Notes(notes.name, lines=notes.lines)
    last: dict[Address, int] = {}  # array of tables -> the index of its last one so far
    table: Address = ()
    parts: list[str] = []
    line, nest, place = 1, 0, ""
    for token in TOML.finditer(text):
        s = token[0]
        if s == "\n" and not nest:
            place, parts = "", []
        elif place == "=":
            nest += (s in "[{") - (s in "]}")
        elif token["word"]:
            parts.append(_toml_key(s))
        elif s == "=" and parts:
            place, address = "=", (*table, *parts)
            twice.note_key(address, line, address in notes.lines)
        elif s == "[":
            place += "["
        elif s == "]" and parts and place in ("[", "[["):
            table = ()
            for part in parts:  # through the last table of each array
                array = (*table, part)
                table = (*array, last[array]) if array in last else array
            if place == "[[":
                last[array] = last.get(array, -1) + 1
                table = (*array, last[array])
                notes.note_key(array, line)
            twice.note_key(table, line, table in notes.lines)
            place = "]"
        if max(nest, len(parts)) > MAX_DEPTH:
            raise notes.failure(line, TOO_DEEP)
        line += s.count("\n")
    return twice.problems


def _toml_key(text: str) -> str:
    try:
        return tomllib.loads(f"key = {text}")["key"] if text[0] in "\"'" else text
    except ValueError:
        return text

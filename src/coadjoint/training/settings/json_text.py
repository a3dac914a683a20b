"""JSON: read strictly, with the line of every key, or quickly, without lines.

PyYAML would not do: it refuses tabs between tokens, DEL in a text and keys of more than a thousand
characters, misreads U+0085 and surrogate pairs, and takes four times as long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from .text import MAX_DEPTH, TOO_DEEP, Notes
from .values import MAX_DIGITS, Event, Value, build, check_range, check_values, parse_scalar

TOKEN = re.compile(
    r'(?P<quoted>"[^"\\]*+(?:\\.?[^"\\]*+)*+"?)|(?P<plain>[-+.\w]+)|[{}\[\]\n]', re.DOTALL
)


def read(text: str, notes: Notes) -> Value:
    """The value of a JSON text; lines and problems go to the notes.

    json.loads checks the grammar, and the value is then built from tokens, which know their lines.
    """
    depth = 0
    for token in tokens(text):  # before json.loads, which recurses as deep as the text goes
        if token.kind in "{[":
            depth += 1
        elif token.kind in "}]":
            depth -= 1
        if depth > MAX_DEPTH:
            raise notes.failure(token.line, TOO_DEEP)
    try:
        # This checks the grammar alone; numbers are not converted.
        json.loads(text, parse_int=len, parse_float=len, parse_constant=len)
    except json.JSONDecodeError as e:
        raise notes.failure(e.lineno, f"column {e.colno}: not JSON: {e.msg}.") from None
    events = unquoted_tokens(text)
    return build(next(events), events, (), notes)


def read_quickly(text: str) -> Value:
    """The value that `read` returns, many times faster.

    ValueError or RecursionError for anything that `read` may refuse.
    """

    def parse_int(digits: str) -> int:
        # The first digits of a longer number are beyond 64 bits already, and quick to convert.
        return check_range(int(digits[:MAX_DIGITS]))

    value: Value = json.loads(
        text,
        object_pairs_hook=_unique_keys,
        parse_int=parse_int,
        parse_float=parse_scalar,
        parse_constant=parse_scalar,  # refuses NaN and Infinity
    )
    if _depth(value, MAX_DEPTH + 1) > MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    if "\\ud" in text.lower():  # an escape that may be half of a surrogate pair
        notes = Notes("")
        check_values(value, (), notes)
        if notes.problems:
            raise ValueError(notes.problems[0])
    return value


def _unique_keys(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    """The pairs of a JSON object as a dict; ValueError if a key appears twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key appears twice")
    return mapping


def _depth(value: Value, most: int) -> int:
    """How deep mappings and lists are nested, 0 for a scalar; counted up to `most`."""
    if not isinstance(value, dict | list) or most == 0:
        return 0
    entries = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(entry, most - 1) for entry in entries), default=0)


def tokens(text: str) -> Iterator[Event]:
    """Brackets, quoted texts (with their quotes) and plain words, with their lines.

    Commas, colons and spaces are left out: whether they are right is not checked here.
    """
    line = 1
    for token in TOKEN.finditer(text):
        if token[0] == "\n":
            line += 1
        else:
            kind = token.lastgroup or token[0]  # "quoted", "plain", or the bracket itself
            yield Event(kind, token[0], line)


def unquoted_tokens(text: str) -> Iterator[Event]:
    """The tokens of a valid JSON text, quoted ones without quotes and escapes."""
    for token in tokens(text):
        if token.kind == "quoted":
            yield token._replace(text=json.loads(token.text))
        else:
            yield token

"""JSON: read strictly, with the line of every key; or quickly, where no line is asked for.

PyYAML would not do: it refuses tabs between tokens, DEL in a text and keys of more than a thousand
characters, reads U+0085 and surrogate pairs as something else, and takes four times as long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from .text import MAX_DEPTH, TOO_DEEP, Notes
from .values import Event, build, check_range, check_values, parse_scalar

JSON = re.compile(
    r'(?P<quoted>"[^"\\]*+(?:\\.?[^"\\]*+)*+"?)|(?P<plain>[-+.\w]+)|[{}\[\]\n]', re.DOTALL
)


def read(text: str, notes: Notes) -> Any:
    nest = 0
    for event in events(text):  # before json follows them
        nest += (event.kind in "{[") - (event.kind in "}]")
        if nest > MAX_DEPTH:
            raise notes.failure(event.line, TOO_DEEP)
    try:
        json.loads(text, parse_int=len, parse_float=len, parse_constant=len)  # the grammar alone
    except json.JSONDecodeError as e:
        raise notes.failure(e.lineno, f"column {e.colno}: not JSON: {e.msg}.") from None
    found = (e._replace(text=json.loads(e.text)) if e.kind == "quoted" else e for e in events(text))
    return build(next(found), found, (), notes)


def read_quickly(text: str) -> Any:
    """The value that `read` gives, many times quicker; ValueError or RecursionError for anything that it may refuse."""
    value = json.loads(
        text,
        object_pairs_hook=_once,
        parse_int=lambda digits: check_range(
            int(digits[:21])
        ),  # 21 characters are beyond 64 bits already
        parse_float=parse_scalar,
        parse_constant=parse_scalar,
    )
    if _levels(value, MAX_DEPTH + 1) > MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    if "\\ud" in text.lower():
        notes = Notes("")
        check_values(value, (), notes)
        if notes.problems:
            raise ValueError(notes.problems[0])
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key appears twice")
    return mapping


def _levels(value: Any, most: int) -> int:
    """How many mappings and lists stand inside each other, counted up to `most`."""
    if not isinstance(value, dict | list) or most == 0:
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((_levels(entry, most - 1) for entry in inner), default=0)


def events(text: str) -> Iterator[Event]:
    line = 1
    for token in JSON.finditer(text):
        if token[0] == "\n":
            line += 1
        else:
            yield Event(token.lastgroup or token[0], token[0], line)

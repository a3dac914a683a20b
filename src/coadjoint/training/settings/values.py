"""Values: what a word without quotes means, what a file may hold, and values from the events of JSON and YAML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .text import MAX_DEPTH, MAX_KEY, TOO_DEEP, Address, Notes, line_of, show

SURROGATE = re.compile(r"[\ud800-\udfff]")
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None} | {
    word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
AMBIGUOUS = [
    (r"no|off|n", "write '{0}' in quotes if you mean the word, false if you mean false."),
    (r"yes|on|y", "write '{0}' in quotes if you mean the word, true if you mean true."),
    (r"none", "write '{0}' in quotes if you mean the word, null if you mean nothing."),
    (
        r"[-+]?\.?(inf|infinity|nan)",
        "not a finite number. Write '{0}' in quotes if you mean the word.",
    ),
    (
        r"[-+]?0[0-9_]+(\.[0-9_]*)?(e[-+]?[0-9]+)?",
        "octal to some readers. Drop the leading zero, or quote it.",
    ),
    (r"[-+]?0[box][0-9a-f_]+", "not a decimal number. Write it in decimal, or quote it."),
    (
        r"[-+]?[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?",
        "base 60 to some readers. Write a plain number, or quote it.",
    ),
    (r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t\s].*)?", "a date to some readers. Quote it."),
    (
        r"[-+]?[0-9.]+_[0-9_.]*(e[-+]?[0-9_]+)?",
        "a number to some readers. Write it without _, or quote it.",
    ),
    (r"<<", "merge keys are not allowed. Write the keys out."),
]


def check_range(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("beyond 64 bits. Write a smaller integer.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number. Write one that is.")
    if isinstance(value, str) and SURROGATE.search(value):
        raise ValueError("not text: it holds half of a surrogate pair.")
    return value


def parse_scalar(text: str) -> Any:
    """What an unquoted word means, in a file or as a flag's value; ValueError, with the reason, if that is not clear."""
    if text in WORDS:
        return WORDS[text]
    if INTEGER.fullmatch(text):
        return check_range(int(text[:21]))  # 21 characters are beyond 64 bits already
    if FLOAT.fullmatch(text):
        value = check_range(float(text))
        if value == 0 and re.search("[1-9]", re.split("[eE]", text)[0]):
            raise ValueError("closer to 0 than any float. Write 0.")
        return value
    for pattern, advice in AMBIGUOUS:
        if re.fullmatch(pattern, text, re.IGNORECASE):
            raise ValueError(advice.format(text))
    return check_range(text)


def parse_key(text: str) -> str:
    if not isinstance(parse_scalar(text), str):
        raise ValueError("a key must be text. Write it in quotes.")
    return text


def is_word(text: str) -> bool:
    """Whether text means itself without quotes."""
    try:
        return (
            bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./+-]*", text)) and parse_scalar(text) == text
        )
    except ValueError:
        return False


class Event(NamedTuple):
    kind: str  # { } [ ] "plain" "quoted"
    text: str
    line: int


def build(event: Event, events: Iterator[Event], address: Address, notes: Notes) -> Any:
    """The value that begins with an event. Depth is bounded, so recursion is."""
    if event.kind in "{[" and len(address) == MAX_DEPTH:
        raise notes.failure(event.line, TOO_DEEP)
    if event.kind == "[":
        items: list[Any] = []
        while (entry := next(events)).kind != "]":
            items.append(
                build(entry, events, notes.note_key((*address, len(items)), entry.line), notes)
            )
        return items
    if event.kind == "{":
        mapping: dict[str, Any] = {}
        while (entry := next(events)).kind != "}":
            if entry.kind in "{[":
                raise notes.failure(entry.line, "a key must be text; got a list or mapping.")
            key = leaf(entry, "a key", parse_key, notes)
            at = notes.note_key((*address, key), entry.line, key in mapping)
            mapping[key] = build(next(events), events, at, notes)
        return mapping
    return leaf(event, show(address), parse_scalar, notes)


def leaf(event: Event, what: str, plain: Callable[[str], Any], notes: Notes) -> Any:
    try:
        return (plain if event.kind == "plain" else check_range)(event.text)
    except ValueError as e:
        notes.add(event.line, f"{what} is {show(event.text)[1:-1]}: {e}")
        return event.text


def check_values(value: Any, address: Address, notes: Notes) -> None:
    """Notes what is not plain data: objects, dates, numbers out of range, keys that are not text."""
    say = lambda text: notes.add(line_of(notes.lines, address), f"{show(address)}: {text}")
    if isinstance(value, Mapping | list | tuple) and len(address) == MAX_DEPTH:
        say(TOO_DEEP)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str) or len(key) > MAX_KEY:
                say(f"key {show(key)} must be text of at most {MAX_KEY} characters.")
            check_values(key, address, notes)
            check_values(entry, (*address, str(key)), notes)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            check_values(entry, (*address, i), notes)
    elif not isinstance(value, str | int | float | None):
        say(
            f"must be text, a number, true, false or null; got {type(value).__name__}. Write it as text."
        )
    else:
        try:
            check_range(value)
        except ValueError as e:
            say(str(e))

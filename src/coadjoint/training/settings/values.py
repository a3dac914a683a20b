"""Values: what an unquoted word means, what a file may hold, and values from parser events."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias, TypeVar

from .text import MAX_DEPTH, MAX_KEY, TOO_DEEP, Address, Notes, line_of, show

Scalar: TypeAlias = str | int | float | bool | None
Value: TypeAlias = "Scalar | list[Value] | dict[str, Value]"
S = TypeVar("S", bound=Scalar)

SURROGATE = re.compile(r"[\ud800-\udfff]")
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
MAX_DIGITS = 21  # integers with more characters are beyond 64 bits, and slow to convert
WORDS = {
    "": None,
    "~": None,
    "null": None,
    "Null": None,
    "NULL": None,
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
# Words that YAML readers understand differently, and what to write instead.
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


def check_range(value: S) -> S:
    """The value itself; ValueError for integers beyond 64 bits, and numbers that are not finite.

    Also for a str with half of a surrogate pair, which cannot be written as UTF-8.
    """
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("beyond 64 bits. Write a smaller integer.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number. Write one that is.")
    if isinstance(value, str) and SURROGATE.search(value):
        raise ValueError("not text: it holds half of a surrogate pair.")
    return value


def parse_scalar(text: str) -> Scalar:
    """What an unquoted word means, in a file or as the value of a flag.

    ValueError, with the reason, if readers do not agree on its meaning.
    """
    if text in WORDS:
        return WORDS[text]
    if INTEGER.fullmatch(text):
        # The first digits of a longer number are beyond 64 bits already, and quick to convert.
        return check_range(int(text[:MAX_DIGITS]))
    if FLOAT.fullmatch(text):
        value = check_range(float(text))
        mantissa = re.split("[eE]", text)[0]
        # a number other than 0 that underflowed, such as 1e-400
        if value == 0 and re.search("[1-9]", mantissa):
            raise ValueError("closer to 0 than any float. Write 0.")
        return value
    for pattern, advice in AMBIGUOUS:
        if re.fullmatch(pattern, text, re.IGNORECASE):
            raise ValueError(advice.format(text))
    return check_range(text)


def check_key(text: str) -> None:
    """Raise ValueError for an unquoted key that means a number, true or null instead of text."""
    if not isinstance(parse_scalar(text), str):
        raise ValueError("a key must be text. Write it in quotes.")


def is_word(text: str) -> bool:
    """Whether a text can be written without quotes: all readers take it for the same word."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./+-]*", text):
        return False
    try:
        return parse_scalar(text) == text
    except ValueError:
        return False


class Event(NamedTuple):
    """A token of JSON or an event of the YAML parser."""

    kind: str  # { } [ ] "plain" "quoted"
    text: str
    line: int


def build(event: Event, events: Iterator[Event], address: Address, notes: Notes) -> Value:
    """The value that begins with `event`; the events of its entries are taken from `events`.

    address: where the value is. The lines of keys, and problems, go to the notes.
    """
    if event.kind in "{[" and len(address) == MAX_DEPTH:  # bounds the recursion, too
        raise notes.failure(event.line, TOO_DEEP)
    if event.kind == "[":
        return _build_list(events, address, notes)
    if event.kind == "{":
        return _build_mapping(events, address, notes)
    try:
        if event.kind == "plain":
            return parse_scalar(event.text)
        return check_range(event.text)  # a text in quotes means itself
    except ValueError as e:
        return _note_scalar(event, show(address), e, notes)


def _build_list(events: Iterator[Event], address: Address, notes: Notes) -> list[Value]:
    """The list whose "[" was just taken from the events, up to its "]"."""
    items: list[Value] = []
    while (entry := next(events)).kind != "]":
        place = notes.note_key((*address, len(items)), entry.line)
        items.append(build(entry, events, place, notes))
    return items


def _build_mapping(events: Iterator[Event], address: Address, notes: Notes) -> dict[str, Value]:
    """The mapping whose "{" was just taken from the events, up to its "}"."""
    mapping: dict[str, Value] = {}
    while (entry := next(events)).kind != "}":
        if entry.kind in "{[":
            raise notes.failure(entry.line, "a key must be text; got a list or mapping.")
        key = entry.text
        try:
            if entry.kind == "plain":
                check_key(key)
            check_range(key)
        except ValueError as e:
            _note_scalar(entry, "a key", e, notes)
        place = notes.note_key((*address, key), entry.line, key in mapping)
        mapping[key] = build(next(events), events, place, notes)
    return mapping


def _note_scalar(event: Event, what: str, problem: ValueError, notes: Notes) -> str:
    """Note that a key or value cannot be understood; returns its text, to go on with.

    what: "a key", or the address of the value.
    """
    without_quotes = show(event.text)[1:-1]
    notes.add(event.line, f"{what} is {without_quotes}: {problem}")
    return event.text


def check_values(value: object, address: Address, notes: Notes) -> None:
    """Note everything in a value that settings cannot hold, as problems.

    That is objects and dates, numbers out of range, keys that are long or no text, deep nesting.
    address: where the value is.
    """
    line = line_of(notes.lines, address)
    place = show(address)
    if isinstance(value, Mapping | list | tuple) and len(address) == MAX_DEPTH:
        notes.add(line, f"{place}: {TOO_DEEP}")
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str) or len(key) > MAX_KEY:
                text = f"key {show(key)} must be text of at most {MAX_KEY} characters."
                notes.add(line, f"{place}: {text}")
            check_values(key, address, notes)  # a key may hold half of a surrogate pair, too
            check_values(entry, (*address, str(key)), notes)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            check_values(entry, (*address, i), notes)
    elif not isinstance(value, str | int | float | None):
        kind = type(value).__name__
        text = f"must be text, a number, true, false or null; got {kind}. Write it as text."
        notes.add(line, f"{place}: {text}")
    else:
        try:
            check_range(value)
        except ValueError as e:
            notes.add(line, f"{place}: {e}")

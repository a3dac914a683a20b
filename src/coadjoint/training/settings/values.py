"""Values from events, which are the same for JSON and YAML; and what values may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .notes import DEPTH, KEY, TOO_DEEP, Address, Notes, line_of, show
from .scalars import in_range, plain_key, scalar


class Event(NamedTuple):
    kind: str  # { } [ ] "plain" "quoted"
    text: str
    line: int


def build(event: Event, events: Iterator[Event], address: Address, notes: Notes) -> Any:
    """The value that begins with an event. Depth is bounded, so recursion is."""
    if event.kind in "{[" and len(address) == DEPTH:
        raise notes.stop(event.line, TOO_DEEP)
    if event.kind == "[":
        items: list[Any] = []
        while (entry := next(events)).kind != "]":
            items.append(build(entry, events, notes.key((*address, len(items)), entry.line), notes))
        return items
    if event.kind == "{":
        mapping: dict[str, Any] = {}
        while (entry := next(events)).kind != "}":
            if entry.kind in "{[":
                raise notes.stop(entry.line, "a key must be text; got a list or mapping.")
            key = leaf(entry, "a key", plain_key, notes)
            at = notes.key((*address, key), entry.line, key in mapping)
            mapping[key] = build(next(events), events, at, notes)
        return mapping
    return leaf(event, show(address), scalar, notes)


def leaf(event: Event, what: str, plain: Callable[[str], Any], notes: Notes) -> Any:
    try:
        return (plain if event.kind == "plain" else in_range)(event.text)
    except ValueError as e:
        notes.add(event.line, f"{what} is {show(event.text)[1:-1]}: {e}")
        return event.text


def inspect(value: Any, address: Address, notes: Notes) -> None:
    """Notes what is not plain data: objects, dates, numbers out of range, keys that are not text."""
    say = lambda text: notes.add(line_of(notes.lines, address), f"{show(address)}: {text}")
    if isinstance(value, Mapping | list | tuple) and len(address) == DEPTH:
        say(TOO_DEEP)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str) or len(key) > KEY:
                say(f"key {show(key)} must be text of at most {KEY} characters.")
            inspect(key, address, notes)
            inspect(entry, (*address, str(key)), notes)
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            inspect(entry, (*address, i), notes)
    elif not isinstance(value, str | int | float | None):
        say(f"must be text, a number, true, false or null; got {type(value).__name__}. Write it as text.")
    else:
        try:
            in_range(value)
        except ValueError as e:
            say(str(e))

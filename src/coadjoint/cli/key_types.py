"""The types of settings, and their description in words."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

from .schema import SECTIONS

LARGEST_NUMBER = 1e38  # which float32 holds
LEAST_LIMIT_OF_TYPE = 2**31  # from here on, a bound is that of an integer type and not of a key


def alternatives(annotation: object) -> list[object]:
    """The members of a union without None: `int | tuple[int, int] | None` has two.

    An annotation that is no union is its own and only alternative.
    """
    if get_origin(annotation) in (None, Annotated, Literal, tuple, list):
        return [annotation]
    return [member for member in get_args(annotation) if member is not NoneType]


def find_key_types() -> dict[tuple[str, str], list[object]]:
    """{(section, key): the types that its value may have}, from the annotations of the schema."""
    key_types = {}
    for name, section in SECTIONS.items():
        hints = get_type_hints(section, include_extras=True)
        for key in section.model_fields:
            key_types[name, key] = alternatives(hints[key])
    return key_types


KEY_TYPES = find_key_types()


def choices(types: Sequence[object]) -> list[object]:
    """The values of all Literals among the types of a key; [] if it has none."""
    return [value for t in types if get_origin(t) is Literal for value in get_args(t)]


def join_or(values: Sequence[object]) -> str:
    """The values as a list in words: "a, b or c"."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


def describe_types(types: Sequence[object]) -> str:
    """The types of a key in words: "a number greater than 0", "loose or strict"."""
    return " or ".join(describe_type(t, types) for t in types)


def describe_type(t: object, others: Sequence[object]) -> str:
    """One type in words; `others`: all types of its key, which are described beside it.

    t is a Literal, a tuple of two or three, a bounded number (Annotated), a list, str or bool.
    """
    origin = get_origin(t)
    parts = get_args(t)
    if origin is Literal:
        return join_or(parts)
    if origin is tuple:
        count = "two" if len(parts) == 2 else "three"
        if len(set(parts)) > 1:
            return f"{count} values, {' and '.join(describe_types([part]) for part in parts)}"
        if parts[0] in others:  # "a whole number from 1 to 9 or two of them"
            return f"{count} of them"
        return f"{count} values, each {describe_types([parts[0]])}"
    if origin is Annotated:  # parts: int or float, and the Field that bounds it
        noun = "a whole number" if parts[0] is int else "a number"
        bounds = describe_bounds(parts[1].metadata)
        if parts[0] is int and bounds == "of at least 1":
            return "a positive whole number"
        return f"{noun} {bounds}".rstrip()
    if origin is list:
        return "a list of strings" if parts[0] is str else "a list of them"
    return "text" if t is str else "true or false"


def describe_bounds(metadata: Sequence[object]) -> str:
    """[Ge(1), Lt(10)] -> "from 1 to 9"; "" without bounds.

    A bounded number without "gt" has "ge", and only whole numbers have "lt". A bound that only
    keeps a whole number inside an int32 or int64 is left out: "of at least 1".
    """
    limits: dict[str, float] = {}
    for bound in metadata:
        for name in ("ge", "gt", "le", "lt"):
            if hasattr(bound, name):
                limits[name] = getattr(bound, name)
    if not limits:
        return ""
    if "gt" in limits:
        text = f"greater than {limits['gt']}"
        if limits.get("le", LARGEST_NUMBER) < LARGEST_NUMBER:
            text += f" and at most {limits['le']}"
        return text
    most = limits.get("le")
    if most is None and limits.get("lt", LEAST_LIMIT_OF_TYPE) < LEAST_LIMIT_OF_TYPE:
        most = limits["lt"] - 1
    return f"of at least {limits['ge']}" if most is None else f"from {limits['ge']} to {most}"

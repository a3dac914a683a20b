"""Check that saved tensors fit the object they are restored to."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

MOST_NAMED = 6  # missing tensors that are named in a message


def misfit(expected: Mapping[str, Tensor], found: Mapping[str, object]) -> str | None:
    """Say how saved tensors `found` differ from those `expected`, by name, type or shape.

    The answer is a part of a sentence, as in "it lacks W"; None if they do not differ.
    """
    missing = sorted(set(expected) - set(found))
    if missing:
        names = ", ".join(missing[:MOST_NAMED])
        more = ""
        if len(missing) > MOST_NAMED:
            more = f" and {len(missing) - MOST_NAMED} more"
        return f"it lacks {names}{more}"
    for name, value in sorted(found.items()):
        if name not in expected:
            return f"{name!a} does not belong to it"
        if not has_same_shape(value, expected[name]):
            return f"{name!a} is {describe_value(value)}; expected {describe_value(expected[name])}"
    return None


def has_same_shape(value: object, expected: Tensor) -> bool:
    """Tell whether `value` is a tensor of the type and shape of `expected`."""
    if not isinstance(value, Tensor):
        return False
    return value.dtype == expected.dtype and value.shape == expected.shape


def describe_value(value: object) -> str:
    """Describe a tensor by type and shape, as in "float32 [3, 4]", and anything else by itself."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"the value {value!r}"

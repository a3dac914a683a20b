"""Whether the tensors and numbers that were saved fit what they are restored to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def misfit(expected: Mapping[str, Tensor], found: Mapping[str, Any]) -> str | None:
    """How tensors differ from those that are expected, by name, type and shape; None if they do not."""
    missing = sorted(set(expected) - set(found))
    if missing:
        more = f" and {len(missing) - 6} more" if len(missing) > 6 else ""
        return f"it lacks {', '.join(missing[:6])}{more}"
    for name, given in sorted(found.items()):
        if name not in expected:
            return f"{name!a} does not belong to it"
        mine = expected[name]
        if not isinstance(given, Tensor) or given.dtype != mine.dtype or given.shape != mine.shape:
            return f"{name!a} is {describe_value(given)}; expected {describe_value(mine)}"
    return None


def describe_value(value: Any) -> str:
    """A tensor in words: "float32 [3, 4]"."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"the value {value!r}"

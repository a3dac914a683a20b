"""Run folders: what a run writes, and how it survives.

    metrics.jsonl  clock.jsonl  result.json  environment.json  model.safetensors  checkpoints/step-00001000/

A checkpoint is written under another name, each file synced to the disk, a manifest of SHA-256 sums last, and renamed:
a folder called step-N is whole or damaged from outside, never half-written. The latest one is found by looking, not by a
pointer. Rows of metrics beyond a checkpoint are cut off when a run goes on from it, and computed again.
"""

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
            return f"{name!a} is {told(given)}; expected {told(mine)}"
    return None


def told(value: Any) -> str:
    """A tensor in words: "float32 [3, 4]"."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return f"the value {value!r}"

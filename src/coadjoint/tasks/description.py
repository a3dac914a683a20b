"""Description: what a network must know of the data it was trained on."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import DataError
from .files.sheet import KINDS

ColumnNames = str | Sequence[str] | None
PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Description:
    """What a network must know of the data it was trained on, in plain JSON types."""

    kind: str
    at: str
    features: list[str]
    targets: list[str]
    labels: list[str]
    mean: list[float]
    std: list[float]
    target_mean: list[float]
    target_std: list[float]
    masked: list[str]  # features with an input that says "is missing"
    named: bool  # features are matched by name, not by position
    columns: dict[str, str]
    window: int | None
    dtype: str
    reading: dict[str, Any]  # sep, decimal, thousands, header, missing, irregular
    files: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, given: dict[str, Any]) -> Description:
        """Check a description that came with a model: it is a stranger's."""
        if not isinstance(given, dict) or {f.name for f in fields(cls)} != set(given):
            raise DataError(
                "the model's description of its data is damaged: its keys are not those expected."
            )
        d = cls(**given)
        for name, fine in d.judged():
            if not fine:
                raise DataError(
                    f"the model's description of its data is damaged: '{name}' is not what it should be."
                )
        return d

    def judged(self) -> Iterator[tuple[str, bool]]:
        """Each field and whether it is fine, one after the other: later ones are looked at if the earlier ones are."""
        yield "kind", isinstance(self.kind, str) and self.kind in KINDS
        yield "at", self.at in ("last", "every")
        yield (
            "features",
            _words(self.features) and len(self.features) > 0 and _different(self.features),
        )
        yield "mean", _reals(self.mean) and len(self.mean) == len(self.features)
        yield "std", _reals(self.std) and len(self.std) == len(self.features) and min(self.std) > 0
        yield "targets", _words(self.targets) and _different(self.targets)
        yield "labels", _words(self.labels) and _different(self.labels)
        yield "labels", (len(self.labels) > 1) == (self.kind == "classify")
        yield "target_mean", _reals(self.target_mean)
        yield "target_std", _reals(self.target_std) and all(s > 0 for s in self.target_std)
        yield "target_std", len(self.target_mean) == len(self.target_std)
        yield (
            "masked",
            _words(self.masked)
            and _different(self.masked)
            and set(self.masked) <= set(self.features),
        )
        yield "named", isinstance(self.named, bool)
        columns = self.columns if isinstance(self.columns, dict) else {}
        yield "columns", set(columns) == {"id", "time"} and _words(list(columns.values()))
        yield "window", self.window is None or (type(self.window) is int and self.window > 0)
        yield "dtype", self.dtype in ("float32", "float64")
        reading = self.reading if isinstance(self.reading, dict) else {"": ""}
        yield "reading", set(reading) <= READING
        for name, value in reading.items():
            kind = {"header": bool, "sep": str | None}.get(name, str)
            yield f"reading.{name}", isinstance(value, kind)


def _words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _different(words: list[str]) -> bool:
    return len(set(words)) == len(words)


def _reals(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(x) in (int, float) and math.isfinite(x) for x in value
    )


READING = {"sep", "decimal", "thousands", "header", "missing", "irregular"}

"""Types of values in the JSON files of run folders."""

from __future__ import annotations

from typing import Any

JsonValue = Any  # whatever JSON can say
JsonObject = dict[str, JsonValue]
Row = JsonObject  # a line of metrics.jsonl

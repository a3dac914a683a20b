"""Types of what run folders hold as JSON."""

from __future__ import annotations

from typing import Any

JsonValue = Any  # whatever JSON can say
JsonObject = dict[str, JsonValue]
Row = JsonObject  # a line of metrics.jsonl

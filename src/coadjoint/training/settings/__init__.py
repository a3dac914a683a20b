"""Settings: TOML, YAML and JSON files read strictly, with the line of every key.

A file becomes nested dicts and lists of str, int, float, bool and None, or an error that lists its
problems line by line. Text that readers understand differently is refused, not guessed: `no`,
`012`, `1:30`, a key that appears twice. A file is data: it names no types and repeats nothing by
reference, and its size and depth are bounded.

text                              from a path to text; the lines of keys, and the problems
json_text, yaml_text, toml_text   one reader for each format
values                            what words without quotes mean; values from parser events
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CoadjointError, ConfigError
from .. import files
from ..files import AnyPath
from . import json_text, toml_text, yaml_text
from .text import MAX_BYTES, Address, Notes, decode, display_name, line_of, read_bytes, show
from .values import SURROGATE, Value, check_values, parse_scalar

__all__ = ["MAX_BYTES", "SURROGATE", "Settings", "dump", "load", "parse_scalar", "read_json"]


@dataclass(frozen=True)
class Settings:
    """The values of a file, and the lines of its keys: lines[("training", "lr")] = 12."""

    values: dict[str, Any]
    name: str
    lines: Mapping[Address, int]

    def where(self, address: Sequence[str | int] = ()) -> str:
        """The place of a key, "run.yaml:12"; if its line is unknown, that of the key around it.

        address: the keys and indices that lead to it; () is the whole file.
        """
        line = line_of(self.lines, tuple(address))
        return self.name if line is None else f"{self.name}:{line}"


def load(path: AnyPath, content: bytes | None = None) -> Settings:
    """Read a .toml, .yaml, .yml or .json file, or its `content` if that has been read already.

    An empty file holds no settings.
    """
    notes = Notes(display_name(path))
    suffix = Path(path).suffix.lower()
    if suffix not in READERS and os.path.isfile(path):  # else `read_bytes` says what is wrong
        raise notes.failure(
            None, f"settings are read from {', '.join(READERS)} files; got {show(suffix)}."
        )
    if content is None:
        content = read_bytes(path, MAX_BYTES, notes)
    text = decode(content, MAX_BYTES, notes)
    values = READERS[suffix](text, notes) if text.strip() else {}
    if not isinstance(values, dict):
        kind = type(values).__name__
        raise notes.failure(1, f"the top level must be a mapping of keys to values; got {kind}.")
    notes.check()
    return Settings(values, notes.name, notes.lines)


def read_json(
    source: AnyPath | bytes,
    max_bytes: int = MAX_BYTES,
    error: type[CoadjointError] = ConfigError,
    name: str = "JSON text",
) -> Any:
    """The value of a JSON file (a Path) or text (str or bytes), read as strictly as by `load`.

    max_bytes  a larger file or text is refused
    error      the kind of error to raise
    name       what errors call a text
    """
    if isinstance(source, os.PathLike):
        notes = Notes(display_name(source), error)
        content = read_bytes(source, max_bytes, notes)
    else:
        notes = Notes(name, error)
        content = source.encode(errors="surrogatepass") if isinstance(source, str) else source
    text = decode(content, max_bytes, notes)
    try:
        return json_text.read_quickly(text)
    except (ValueError, RecursionError):
        pass  # the careful reader, below, says where and why
    if len(text) > MAX_BYTES:  # too long for the careful reader, which is slow
        raise notes.failure(
            None,
            "not JSON, or it has a key that appears twice, a number out of range or too many "
            "levels.",
        )
    value = json_text.read(text, notes)
    notes.check()
    return value


def dump(mapping: Mapping[str, object], path: AnyPath) -> None:
    """Write YAML that `load` reads back to the same values, completely or not at all."""
    path = Path(path)
    notes = Notes(display_name(path))
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise notes.failure(None, "settings are written as YAML. Name the file .yaml.")
    check_values(mapping, (), notes)
    notes.check()
    data = yaml_text.to_yaml(mapping).encode() if mapping else b"\n"
    if len(data) > MAX_BYTES:
        raise notes.failure(
            None, f"{len(data):,} bytes of settings; at most {MAX_BYTES:,} can be read back."
        )
    files.replace(path, data)


READERS: dict[str, Callable[[str, Notes], Value]] = {
    ".toml": toml_text.read,
    ".yaml": yaml_text.read,
    ".yml": yaml_text.read,
    ".json": json_text.read,
}

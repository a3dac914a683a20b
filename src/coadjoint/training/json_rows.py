"""Rows of JSON, one on each line of a file: appended, read back, and known by their SHA-256 sum."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from ..errors import StorageError
from .files import open_for_update, replacing, storage_errors

BLOCK = 2**20  # bytes of a long file that are read at a time


def to_json_types(value: Any) -> Any:
    """The value in JSON's types: numbers that JSON lacks become the strings NaN, Infinity, -Infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(k): to_json_types(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(v) for v in value]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return to_json_types(value.tolist())
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def dumps(value: Any, **options: Any) -> str:
    return json.dumps(to_json_types(value), allow_nan=False, ensure_ascii=False, **options)


class JsonRows:
    """An append-only file of JSON lines that knows its length and its SHA-256."""

    def __init__(self, path: Path, at: dict[str, Any] | None = None) -> None:
        """Begin a new file, or go on after the first at["bytes"] bytes, whose sum must be at["sha256"]."""
        self.path = path
        self.file: BinaryIO
        self.bytes, self.sum = 0, hashlib.sha256()
        if at is not None and not os.path.lexists(path):
            raise StorageError(
                f"{path} is missing: the run cannot go on without the rows before its checkpoint."
            )
        with storage_errors(path):
            self.file = open_for_update(path)
            try:
                if at is not None:
                    self.verify_recorded(at)
                self.file.truncate(self.bytes)
                self.file.seek(self.bytes)
            except BaseException:
                self.file.close()
                raise

    def verify_recorded(self, at: dict[str, Any]) -> None:
        """Take the rows that a checkpoint has recorded as they are; they must be those."""
        while self.bytes < at["bytes"] and (
            part := self.file.read(min(BLOCK, at["bytes"] - self.bytes))
        ):
            self.bytes += len(part)
            self.sum.update(part)
        if self.position != at:
            raise StorageError(
                f"{self.path} does not begin with the {at['bytes']:,} bytes its checkpoint recorded: it was "
                "changed or cut. Restore it, or start the run again."
            )

    @property
    def position(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self.sum.hexdigest()}

    def append(self, row: dict[str, Any]) -> None:
        line = (dumps(row, separators=(",", ":")) + "\n").encode()
        with storage_errors(self.path):
            self.file.write(line)
        self.bytes += len(line)
        self.sum.update(line)

    def flush(self) -> None:
        with storage_errors(self.path):
            self.file.flush()

    def sync(self) -> None:
        self.flush()
        with storage_errors(self.path):
            os.fsync(self.file.fileno())

    def read_blocks(self) -> Iterator[bytes]:
        """What was written so far, whatever has become of the path since."""
        self.flush()
        at = 0
        while at < self.bytes and (part := self.read_at(at)):
            yield part
            at += len(part)

    def read_at(self, at: int) -> bytes:
        """A part of what was written; the next row is still appended at the end."""
        self.file.seek(at)
        try:
            return self.file.read(min(BLOCK, self.bytes - at))
        finally:
            self.file.seek(self.bytes)

    def lines(self) -> Iterator[bytes]:
        rest = b""
        for part in self.read_blocks():
            *whole, rest = (rest + part).split(b"\n")
            yield from whole

    def rescue(self) -> str:
        """The path is not this file any more: write the rows once more, and say where. What stands there
        now is left alone."""
        to = self.path
        number = 0
        while os.path.lexists(to):
            number += 1
            to = self.path.with_name(f"{self.path.name}.kept-{number}")
        with replacing(to) as file:
            for part in self.read_blocks():
                file.write(part)
        if to == self.path:
            return f"{self.path.name} was deleted while the run went on; its rows were put back"
        back = f"mv {shlex.quote(str(to))} {shlex.quote(str(self.path))}"
        return f"{self.path.name} was replaced while the run went on; its rows are in {to.name}, and belong back: {back}"

    def close(self) -> None:
        with storage_errors(self.path):
            self.file.close()


@dataclass(frozen=True)
class StoredRows:
    """The rows that a run has written, to be read when they are asked for: a long run has more than fit in memory."""

    path: Path
    bytes: int

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with contextlib.ExitStack() as files:
            try:
                file = files.enter_context(open(self.path, "rb"))
            except OSError as error:
                raise StorageError(
                    f"{self.path} cannot be read: {error.strerror}. The rows of a run stay there: put it back."
                ) from None
            left = self.bytes
            while left > 0 and (line := file.readline(left)):
                left -= len(line)
                yield from_json_types(parse_row(line, self.path))


def parse_row(line: bytes, path: Path) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise StorageError(
            f"{path} holds a line that is not a row of metrics: {line[:60]!r}. Restore it."
        )
    return value


def from_json_types(value: Any) -> Any:
    """What `to_json_types` has made strings of, as numbers again."""
    if isinstance(value, dict):
        return {key: from_json_types(v) for key, v in value.items()}
    if isinstance(value, list):
        return [from_json_types(v) for v in value]
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value

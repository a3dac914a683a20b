"""Files of JSON lines: appended to, read back, and verified by their SHA-256 sum."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from torch import Tensor

from ..errors import StorageError
from .files import open_for_update, replacing, storage_errors
from .json_types import JsonObject, JsonValue

NUMBER_LINES = re.compile(r"\[\n( *-?\d[\d.eE+-]*,?\n)+ *\]")
ROW_ENCODER = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"))
PLAIN = {str, int, float, bool, type(None)}  # types of values that cannot change
MOST_WAITING = 16  # rows
BLOCK = 2**20  # bytes of a long file that are read at a time


def to_json_types(value: object) -> JsonValue:
    """The value in JSON's types: tensors and arrays as lists, unknown objects as their str.

    NaN and infinities become the strings NaN, Infinity and -Infinity.
    """
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): to_json_types(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_types(item) for item in value]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return to_json_types(value.tolist())
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return str(value)


def dumps(
    value: object, *, indent: int | None = None, separators: tuple[str, str] | None = None
) -> str:
    """JSON text of any value; what JSON lacks is written as `to_json_types` says."""
    plain = to_json_types(value)
    return json.dumps(
        plain, allow_nan=False, ensure_ascii=False, indent=indent, separators=separators
    )


def join_numbers(text: str) -> str:
    """JSON text with indents in which a list of numbers stands on one line.

    A string has no line breaks of its own, so that the lists found are no part of one.
    """
    return NUMBER_LINES.sub(lambda match: "".join(match[0].split()), text)


class JsonRows:
    """An append-only file of JSON lines that knows its length and its SHA-256 sum."""

    def __init__(self, path: Path, at: JsonObject | None = None) -> None:
        """Begin a new file, or continue one after its first at["bytes"] bytes.

        at: the `position` that a checkpoint recorded; None empties the file. The sum of those
        bytes must be at["sha256"]; what follows them is cut off.
        """
        self.path = path
        self.file: BinaryIO
        self.waiting: list[JsonObject] = []  # rows that are not in the file yet
        self.written = 0  # bytes
        self.sum = hashlib.sha256()  # of what was written
        if at is not None and not os.path.lexists(path):
            raise StorageError(
                f"{path} is missing: the run cannot be resumed without the rows before its "
                "checkpoint. Put it back."
            )
        with storage_errors(path):
            self.file = open_for_update(path)
            try:
                if at is not None:
                    self.verify_recorded(at)
                self.file.truncate(self.written)
                self.file.seek(self.written)
            except BaseException:
                self.file.close()
                raise

    def verify_recorded(self, at: JsonObject) -> None:
        """Read the rows that a checkpoint recorded; refuse the file if they have changed.

        at: the length and sum of these rows, as `position` returned them.
        """
        while self.written < at["bytes"]:
            block = self.file.read(min(BLOCK, at["bytes"] - self.written))
            if not block:  # the file is shorter
                break
            self.written += len(block)
            self.sum.update(block)
        if self.position != at:
            raise StorageError(
                f"{self.path} does not begin with the {at['bytes']:,} bytes that its checkpoint "
                "recorded: it was changed or cut off. Restore it, or start a new run."
            )

    @property
    def byte_count(self) -> int:
        """The length of all rows so far."""
        self.write_waiting()
        return self.written

    @property
    def position(self) -> JsonObject:
        """The length and sum of all rows so far."""
        self.write_waiting()
        return {"bytes": self.written, "sha256": self.sum.hexdigest()}

    def append(self, row: JsonObject) -> None:
        """Add one row at the end.

        Rows of plain values are written together: a row of each training step takes less time so.
        """
        if not PLAIN.issuperset(map(type, row.values())):  # a list in it may change
            self.write_waiting()
            self.write([row])
            return
        self.waiting.append(row.copy())
        if len(self.waiting) == MOST_WAITING:
            self.write_waiting()

    def write_waiting(self) -> None:
        """Write the rows that wait."""
        if self.waiting:
            rows = self.waiting
            self.waiting = []
            self.write(rows)

    def write(self, rows: list[JsonObject]) -> None:
        """Write rows at the end of the file."""
        lines = [ROW_ENCODER.encode(to_json_types(row)) for row in rows]
        text = "".join(f"{line}\n" for line in lines).encode()
        with storage_errors(self.path):
            self.file.write(text)
        self.written += len(text)
        self.sum.update(text)

    def flush(self) -> None:
        """Let other processes read all rows so far."""
        self.write_waiting()
        with storage_errors(self.path):
            self.file.flush()

    def sync(self) -> None:
        """Wait until all rows so far are on the disk."""
        self.flush()
        with storage_errors(self.path):
            os.fsync(self.file.fileno())

    def read_blocks(self) -> Iterator[bytes]:
        """What was written so far, in blocks, even if the path was deleted or replaced since."""
        self.flush()
        start = 0
        while start < self.byte_count:
            block = self.read_at(start)
            if not block:
                break
            yield block
            start += len(block)

    def read_at(self, start: int) -> bytes:
        """A block of what was written, from byte `start` on; rows are still appended at the end."""
        self.write_waiting()
        self.file.seek(start)
        try:
            return self.file.read(min(BLOCK, self.written - start))
        finally:
            self.file.seek(self.written)

    def lines(self) -> Iterator[bytes]:
        """The lines that were written so far, without their ends."""
        rest = b""  # the beginning of a line that goes on in the next block
        for block in self.read_blocks():
            *complete, rest = (rest + block).split(b"\n")
            yield from complete

    def rescue(self) -> str:
        """Write the rows once more, because the path is no longer this file; say where they are.

        What stands at the path now is left alone.
        """
        copy = self.path
        number = 0
        while os.path.lexists(copy):
            number += 1
            copy = self.path.with_name(f"{self.path.name}.kept-{number}")
        with replacing(copy) as file:
            for block in self.read_blocks():
                file.write(block)
        name = self.path.name
        if copy == self.path:
            return f"{name} was deleted during the run; its rows were put back"
        move = f"mv {shlex.quote(str(copy))} {shlex.quote(str(self.path))}"
        return (
            f"{name} was replaced during the run; its rows are in {copy.name}. "
            f"Put them back: {move}"
        )

    def close(self) -> None:
        """Write what waits, and close the file."""
        try:
            self.write_waiting()
        finally:
            with storage_errors(self.path):
                self.file.close()


@dataclass(frozen=True)
class StoredRows:
    """The rows a run has written, read when they are used: they may not fit in memory."""

    path: Path
    bytes: int  # of the file's beginning, which this run has written

    def __iter__(self) -> Iterator[JsonObject]:
        """The rows in the first `bytes` bytes: a resumed run may have appended more."""
        # An ExitStack closes the file; `with open` would put the reading into the `try`, too.
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(open(self.path, "rb"))
            except OSError as error:
                raise StorageError(
                    f"{self.path} cannot be read: {error.strerror}. A result reads its rows from "
                    "there: put the file back."
                ) from None
            bytes_left = self.bytes
            while bytes_left > 0:
                line = file.readline(bytes_left)
                if not line:
                    break
                bytes_left -= len(line)
                yield {key: from_json_types(v) for key, v in parse_row(line, self.path).items()}


def parse_row(line: bytes, path: Path) -> JsonObject:
    """The JSON object in a line of metrics.jsonl; anything else is refused. `path` is for that."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise StorageError(
            f"{path} has a line that is not a row of metrics: {line[:60]!r}. Restore the file."
        )
    return value


def from_json_types(value: JsonValue) -> JsonValue:
    """The value with the strings NaN, Infinity and -Infinity as numbers again."""
    if isinstance(value, dict):
        return {key: from_json_types(item) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json_types(item) for item in value]
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return value

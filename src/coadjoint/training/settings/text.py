"""From a path to text, and the notes taken while a file is read.

Files must be regular, UTF-8 and of bounded size. Problems are collected line by line, so that one
error can list them all.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import CoadjointError, ConfigError, error_text, nearest
from ..files import AnyPath

MAX_BYTES = 1_000_000  # of a file
MAX_DEPTH = 8  # of mappings and lists inside each other
MAX_KEY = 1000  # characters of a key
MAX_PROBLEMS = 20  # listed in one error
TOO_DEEP = f"nested more than {MAX_DEPTH} deep. Flatten it."
Address = tuple[str | int, ...]  # of a value: the keys and indices that lead to it


@dataclass
class Notes:
    """What was found in a file so far: the line of each key, and the problems."""

    name: str
    error: type[CoadjointError] = ConfigError
    lines: dict[Address, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, line: int | None, text: str) -> None:
        """Add a problem, at a line if it has one; reading goes on."""
        place = self.name if line is None else f"{self.name}:{line}"
        self.problems.append(f"{place}: {text}")

    def failure(self, line: int | None, text: str) -> CoadjointError:
        """The error to raise for a problem after which the file cannot be read further."""
        self.add(line, text)
        return self.as_error()

    def as_error(self) -> CoadjointError:
        """An error that lists the problems, the first MAX_PROBLEMS of them."""
        lines = self.problems[:MAX_PROBLEMS]
        more = len(self.problems) - MAX_PROBLEMS
        if more > 0:
            lines.append(f"{self.name}: and {more} more problems.")
        return self.error("\n".join(lines))

    def check(self) -> None:
        """Raise an error if there are problems."""
        if self.problems:
            raise self.as_error()

    def note_key(self, address: Address, line: int, is_repeated: bool = False) -> Address:
        """Note the line of a key, and a problem if the key is repeated; returns its address.

        Of a repeated key the first line is kept.
        """
        first = self.lines.setdefault(address, line)
        if is_repeated:
            self.add(
                line, f"key {show(address[-1])} appears twice (first at line {first}). Remove one."
            )
        return address


def line_of(lines: Mapping[Address, int], address: Address) -> int | None:
    """The line of a key, or of the nearest key around it; None if none is known."""
    for length in range(len(address), 0, -1):
        line = lines.get(address[:length])
        if line is not None:
            return line
    return None


def show(value: object) -> str:
    """A value in quotes, on one line, at most 60 characters; an address (a tuple) as 'a.b.0'."""
    text = ".".join(map(str, value)) if isinstance(value, tuple) else str(value)
    quoted = repr(text)
    return quoted if len(quoted) <= 60 else f"{quoted[:57]}..."


def display_name(path: AnyPath) -> str:
    """A path for messages, quoted if it holds characters that cannot be printed."""
    name = os.fspath(path)
    return name if name.isprintable() else repr(name)


def read_bytes(path: AnyPath, max_bytes: int, notes: Notes) -> bytes:
    """The content of a regular file, at most one byte more than max_bytes of it.

    By that byte `decode` sees that the file is too large. Whatever cannot be read raises the error
    of the notes.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                return file.read(max_bytes + 1)
        if stat.S_ISDIR(mode):
            reason = "is a directory. Name a file in it."
        else:
            reason = "is a pipe or device. Name a regular file."
    except (FileNotFoundError, NotADirectoryError):
        reason = f"does not exist. {nearest_path(Path(path))}"
    except PermissionError:
        reason = "no permission to read it. Change its mode or owner."
    except (OSError, ValueError) as e:
        reason = f"cannot be read ({error_text(e)}). Check the name."
    raise notes.failure(None, reason)


def nearest_path(path: Path) -> str:
    """A hint for a path that does not exist: a similar name for the first part that is missing."""
    while path.parent != path and not path.parent.is_dir():
        path = path.parent
    with contextlib.suppress(OSError):
        near = nearest(path.name, os.listdir(path.parent))
        if near:
            return f"Did you mean {display_name(path.parent / near)}?"
    return "Check the name and the folder."


def decode(raw: bytes, max_bytes: int, notes: Notes) -> str:
    """UTF-8 bytes as text, without a byte order mark; other encodings and longer files fail."""
    if len(raw) > max_bytes:
        raise notes.failure(None, f"is larger than the limit of {max_bytes:,} bytes.")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise notes.failure(None, "is UTF-16 text. Save it as UTF-8.")
    if b"\0" in raw:
        line = raw.count(b"\n", 0, raw.index(0)) + 1
        raise notes.failure(line, "holds NUL bytes: it is UTF-16, or not text. Save it as UTF-8.")
    try:
        return raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        reason = f"byte 0x{raw[e.start]:02x} is not UTF-8 (latin-1?). Save it as UTF-8."
        raise notes.failure(line, reason) from None

"""A file of settings on its way to text: regular, UTF-8, of bounded size; and what is found wrong with it, line by line."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import CoadjointError, ConfigError, error_text, nearest

MAX_BYTES, MAX_DEPTH, MAX_PROBLEMS = (
    1_000_000,
    8,
    20,
)  # of a file; of mappings and lists inside each other; problems in one error
MAX_KEY = 1000  # characters of a key
TOO_DEEP = f"nested more than {MAX_DEPTH} deep. Flatten it."
Address = tuple[str | int, ...]


@dataclass
class Notes:
    """What is found on the way through a file: the line of each key, and the problems."""

    name: str
    error: type[CoadjointError] = ConfigError
    lines: dict[Address, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, line: int | None, text: str) -> None:
        self.problems.append(f"{self.name}{'' if line is None else f':{line}'}: {text}")

    def failure(self, line: int | None, text: str) -> CoadjointError:
        """The error for a file that cannot be read further."""
        self.add(line, text)
        return self.as_error()

    def as_error(self) -> CoadjointError:
        more = len(self.problems) - MAX_PROBLEMS
        return self.error(
            "\n".join(
                self.problems[:MAX_PROBLEMS]
                + [f"{self.name}: and {more} more problems."] * (more > 0)
            )
        )

    def check(self) -> None:
        if self.problems:
            raise self.as_error()

    def note_key(self, address: Address, line: int, again: bool = False) -> Address:
        """The address of a key that stands here, perhaps again."""
        first = self.lines.setdefault(address, line)
        if again:
            self.add(
                line, f"key {show(address[-1])} appears twice (first at line {first}). Remove one."
            )
        return address


def line_of(lines: Mapping[Address, int], address: Address) -> int | None:
    around = (address[:n] for n in range(len(address), 0, -1))
    return next((lines[a] for a in around if a in lines), None)


def show(value: object) -> str:
    """In quotes, on one line, not too long; an address with dots."""
    shown = repr(".".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def display_name(path: Any) -> str:
    name = os.fspath(path)
    return name if name.isprintable() else repr(name)


# from a path to text
def read_bytes(path: Any, max_bytes: int, notes: Notes) -> bytes:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            with open(path, "rb") as file:
                return file.read(max_bytes + 1)
        kind = (
            "a directory. Name a file in it"
            if stat.S_ISDIR(mode)
            else "a pipe or device. Name a regular file"
        )
        reason = f"is {kind}."
    except (FileNotFoundError, NotADirectoryError):
        reason = f"does not exist. {nearest_path(Path(path))}"
    except PermissionError:
        reason = "no permission to read it. Change its mode or owner."
    except (OSError, ValueError) as e:
        reason = f"cannot be read ({error_text(e)}). Check the name."
    raise notes.failure(None, reason)


def nearest_path(path: Path) -> str:
    """A hint for the first part of a path that is not there."""
    while path.parent != path and not path.parent.is_dir():
        path = path.parent
    with contextlib.suppress(OSError):
        near = nearest(path.name, os.listdir(path.parent))
        if near:
            return f"Did you mean {display_name(path.parent / near)}?"
    return "Check the name and the folder."


def decode(raw: Any, max_bytes: int, notes: Notes) -> str:
    if len(raw) > max_bytes:
        raise notes.failure(None, f"is larger than {max_bytes:,} bytes, the most that is read.")
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise notes.failure(None, "is UTF-16 text. Save it as UTF-8.")
    if b"\0" in raw:
        raise notes.failure(
            raw.count(b"\n", 0, raw.index(0)) + 1,
            "holds NUL bytes: UTF-16, or no text. Save it as UTF-8.",
        )
    try:
        return raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise notes.failure(
            line, f"byte 0x{raw[e.start]:02x} is not UTF-8 (latin-1?). Save it as UTF-8."
        ) from None

"""What is found on the way through a file of settings: the line of each key, and the problems."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import CoadjointError, ConfigError

BYTES, DEPTH, SHOWN = 1_000_000, 8, 20  # of a file; of mappings and lists inside each other; problems in one error
KEY = 1000  # characters of a key
TOO_DEEP = f"nested more than {DEPTH} deep. Flatten it."
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

    def stop(self, line: int | None, text: str) -> CoadjointError:
        """The error for a file that cannot be read further."""
        self.add(line, text)
        return self.all()

    def all(self) -> CoadjointError:
        more = len(self.problems) - SHOWN
        return self.error("\n".join(self.problems[:SHOWN] + [f"{self.name}: and {more} more problems."] * (more > 0)))

    def check(self) -> None:
        if self.problems:
            raise self.all()

    def key(self, address: Address, line: int, again: bool = False) -> Address:
        """The address of a key that stands here, perhaps again."""
        first = self.lines.setdefault(address, line)
        if again:
            self.add(line, f"key {show(address[-1])} appears twice (first at line {first}). Remove one.")
        return address


def line_of(lines: Mapping[Address, int], address: Address) -> int | None:
    around = (address[:n] for n in range(len(address), 0, -1))
    return next((lines[a] for a in around if a in lines), None)


def show(value: object) -> str:
    """In quotes, on one line, not too long; an address with dots."""
    shown = repr(".".join(map(str, value)) if isinstance(value, tuple) else str(value))
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def name_of(path: Any) -> str:
    name = os.fspath(path)
    return name if name.isprintable() else repr(name)

"""Parts of a text: its bytes as they come, and its time column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .dates import is_date
from .parsing import parse_whole
from .room import Numbers
from .texts import NumberTexts, TextCollector


class PartsFile:
    """A file of which the parts come one by one."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self.parts = parts

    def read1(self, _size: int) -> bytes:
        """The next part, whatever its size; b"" at the end."""
        return next(self.parts, b"")


class TimeCollector:
    """Collects the time column in parts; whole numbers are read at once.

    Other times are read when all of them are there: what the first one is decides.
    """

    def __init__(self) -> None:
        self.numbers: Numbers | None = Numbers(np.int64)
        self.texts: TextCollector | None = None  # as long as numbers are written like themselves

    def add(self, cells: list[str]) -> None:
        """Add some cells."""
        numbers = None
        if self.numbers is not None and not is_date(next(filter(None, cells), "")):
            numbers = parse_whole(cells)
        is_plain = numbers is not None and list(map(str, numbers.tolist())) == cells
        if self.texts is None and not is_plain:
            assert self.numbers is not None
            before = self.numbers.join()
            self.texts = TextCollector()
            self.texts.add(list(map(str, before.tolist())))
            self.numbers = Numbers(np.int64)
            self.numbers.append(before)
        if self.texts is not None:
            self.texts.add(cells)
        if self.numbers is not None and numbers is not None:
            self.numbers.append(numbers)
        else:
            self.numbers = None

    def collected(self) -> tuple[Sequence[str], np.ndarray | None]:
        """The times as they are written, and as whole numbers if all of them are such."""
        numbers = None if self.numbers is None else self.numbers.join()
        if self.texts is not None:
            return self.texts.collected(), numbers
        assert numbers is not None
        return NumberTexts(numbers, lambda values: list(map(str, values.tolist()))), numbers

"""Long lists of texts, in less memory than a string for each.

WordList        few different ones, as numbers
PackedTexts  any, one after the other
NumberTexts  numbers or times, written as text when they are asked for
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import overload

import numpy as np

from .room import Numbers

NUMBERS_COUNTED = 1 << 16  # at a time
Places = np.ndarray | slice  # of texts in a list


class Texts(Sequence[str]):
    """A list of texts; a part of it is such a list, too."""

    def __len__(self) -> int:
        raise NotImplementedError

    def take(self, places: Places) -> Texts:
        """Return the texts at these places."""
        raise NotImplementedError

    def to_list(self) -> list[str]:
        """Return all texts as strings."""
        raise NotImplementedError

    @overload
    def __getitem__(self, key: int) -> str: ...
    @overload
    def __getitem__(self, key: slice | np.ndarray) -> Texts: ...

    def __getitem__(self, key: int | slice | np.ndarray) -> str | Texts:
        if isinstance(key, slice | np.ndarray):
            return self.take(key)
        place = range(len(self))[key]
        return self.take(slice(place, place + 1)).to_list()[0]

    def __iter__(self) -> Iterator[str]:
        for begin in range(0, len(self), 1 << 12):
            yield from self.take(slice(begin, begin + (1 << 12))).to_list()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Texts | list | tuple):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self[:20])) + " ..." * (len(self) > 20)


class WordList(Texts):
    """Texts of which few differ: numbers [N] in the list of the different ones.

    The different ones are in the order of their first appearance.
    """

    def __init__(self, numbers: np.ndarray, different: Sequence[str]) -> None:
        self.numbers = numbers
        self.different = different

    dtype = np.dtype(object)  # as an array of strings would have

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, places: Places) -> WordList:
        """Return the words at these places, or where `places` is true."""
        return WordList(self.numbers[places], self.different)

    @property
    def present(self) -> list[str]:
        """The different words that the list holds."""
        counts = np.zeros(len(self.different), np.int64)
        for begin in range(0, len(self), NUMBERS_COUNTED):
            part = self.numbers[begin : begin + NUMBERS_COUNTED]
            counts += np.bincount(part, minlength=len(counts))
        return [word for word, count in zip(self.different, counts, strict=True) if count]

    def tolist(self) -> list[str]:
        """Return all words as strings, as an array would."""
        return self.to_list()

    def renamed(self, names: Mapping[str, str]) -> WordList:
        """Return the list with other words."""
        return WordList(self.numbers, [names[word] for word in self.different])

    def to_list(self) -> list[str]:
        """Return all words as strings."""
        return [self.different[i] for i in self.numbers.tolist()]


class WordCollector:
    """Collects a column of words in parts."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}
        self.numbers = Numbers(np.int32)

    def add(self, words: Sequence[str]) -> None:
        """Add some words."""
        known = self.known
        for word in dict.fromkeys(words):
            if word not in known:
                known[word] = len(known)
        self.numbers.append(np.fromiter(map(known.__getitem__, words), np.int32, len(words)))

    def collected(self) -> WordList:
        """Return all words."""
        return WordList(self.numbers.join(), list(self.known))


class PackedTexts(Texts):
    """Texts one after the other in UTF-8; ends [N] says where each ends."""

    def __init__(
        self, packed: bytes | bytearray, ends: np.ndarray, places: np.ndarray | None = None
    ) -> None:
        self.packed = packed
        self.ends = ends
        self.places = places  # of those that this list holds; None for all

    def __len__(self) -> int:
        return len(self.ends) if self.places is None else len(self.places)

    def take(self, places: Places) -> PackedTexts:
        """Return the texts at these places."""
        mine = self.places
        if mine is None and isinstance(places, slice):
            mine = np.arange(*places.indices(len(self.ends)))
        elif mine is None:
            mine = np.asarray(places)
        else:
            mine = mine[places]
        return PackedTexts(self.packed, self.ends, mine)

    def to_list(self) -> list[str]:
        """Return all texts as strings."""
        places = np.arange(len(self.ends)) if self.places is None else self.places
        begins = np.where(places > 0, self.ends[places - 1], 0)
        pairs = zip(begins.tolist(), self.ends[places].tolist(), strict=True)
        return [self.packed[a:b].decode("utf-8", "surrogatepass") for a, b in pairs]


class TextCollector:
    """Collects a column of texts in parts."""

    def __init__(self) -> None:
        self.packed = bytearray()
        self.ends = Numbers(np.int64)

    def add(self, texts: Sequence[str]) -> None:
        """Add some texts."""
        joined = "".join(texts)
        pieces: Sequence[str] | list[bytes] = texts
        if not joined.isascii():
            pieces = [text.encode("utf-8", "surrogatepass") for text in texts]
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        self.ends.append(len(self.packed) + np.cumsum(lengths))
        self.packed += joined.encode("utf-8", "surrogatepass")

    def collected(self) -> PackedTexts:
        """Return all texts."""
        return PackedTexts(self.packed, self.ends.join())


class NumberTexts(Texts):
    """Numbers or times [N], written by `write` when they are asked for."""

    def __init__(self, values: np.ndarray, write: Callable[[np.ndarray], list[str]]) -> None:
        self.values = values
        self.write = write

    def __len__(self) -> int:
        return len(self.values)

    def take(self, places: Places) -> NumberTexts:
        """Return the texts at these places."""
        return NumberTexts(self.values[places], self.write)

    def to_list(self) -> list[str]:
        """Return all texts as strings."""
        return self.write(self.values)


def take_texts(texts: Sequence[str], places: np.ndarray) -> Sequence[str]:
    """Return the texts at these places [n], of a list or of `Texts`."""
    if isinstance(texts, Texts):
        return texts.take(places)
    return [texts[i] for i in places.tolist()]

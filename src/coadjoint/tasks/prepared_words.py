"""Words and labels of a set that is being prepared: each has one number in all its chunks."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence

import numpy as np

from .files.sheet import Sheet
from .preparation import label_words

Numbered = dict[str, int]  # words, and the number that each has in all chunks


def with_common_words(sheet: Sheet, categories: Mapping[str, Numbered]) -> np.ndarray:
    """Return the inputs of a chunk with the same number for a word in all chunks.

    categories: the words so far, by feature; new ones are added.
    """
    if not sheet.categories:
        return sheet.u
    u = sheet.u.copy()
    for name, words in sheet.categories.items():
        known = categories[name]
        new = np.array([known.setdefault(word, len(known)) for word in words] + [np.nan])
        j = sheet.features.index(name)
        codes = np.where(np.isnan(u[:, j]), len(words), u[:, j]).astype(np.int64)
        u[:, j] = new[codes]
    return u


def with_hashed_words(
    u: np.ndarray, features: Sequence[str], categories: Mapping[str, Numbered]
) -> np.ndarray:
    """Return inputs with a hash in place of each word's number, which is this set's own."""
    if not categories:
        return u
    hashed = u.copy()
    for name, words in categories.items():
        j = features.index(name)
        numbers = np.array([*map(number_by_hash, words), np.nan])
        hashed[:, j] = numbers[np.where(np.isnan(u[:, j]), len(words), u[:, j]).astype(int)]
    return hashed


def numbers_of_labels(sheet: Sheet, known: Numbered) -> np.ndarray:
    """Return labels of a chunk as numbers [n, 1], -1 if missing; new ones are added to known."""
    words = label_words(sheet)
    new = [-1 if not word else known.setdefault(word, len(known)) for word in words.different]
    stored: np.ndarray = np.array(new, np.int32)[words.numbers][:, None]
    return stored


def values_of_labels(sheet: Sheet) -> np.ndarray:
    """Return the numbers that labels are [n, 1], NaN where they are missing or words."""
    words = label_words(sheet)
    values = np.array([value_of(word) for word in words.different])
    of_rows: np.ndarray = values[words.numbers][:, None]
    return of_rows


@functools.cache
def number_by_hash(word: str) -> float:
    """Return a number that hardly another word has."""
    digest = hashlib.blake2b(word.encode("utf-8", "replace"), digest_size=6).digest()
    return float(int.from_bytes(digest, "little"))


def value_of(word: str) -> float:
    """Return the number that a label is; NaN for a word."""
    try:
        value = float(word)
    except ValueError:
        return math.nan
    return value

"""Words without quotes: a value, or a ValueError with the reason."""

from __future__ import annotations

import math
import re
from typing import Any

SURROGATE = re.compile(r"[\ud800-\udfff]")
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None} | {
    word: word.lower() == "true" for word in ("true", "True", "TRUE", "false", "False", "FALSE")
}
AMBIGUOUS = [
    (r"no|off|n", "write '{0}' in quotes if you mean the word, false if you mean false."),
    (r"yes|on|y", "write '{0}' in quotes if you mean the word, true if you mean true."),
    (r"none", "write '{0}' in quotes if you mean the word, null if you mean nothing."),
    (r"[-+]?\.?(inf|infinity|nan)", "not a finite number. Write '{0}' in quotes if you mean the word."),
    (r"[-+]?0[0-9_]+(\.[0-9_]*)?(e[-+]?[0-9]+)?", "octal to some readers. Drop the leading zero, or quote it."),
    (r"[-+]?0[box][0-9a-f_]+", "not a decimal number. Write it in decimal, or quote it."),
    (r"[-+]?[0-9][0-9_]*(:[0-9]+)+(\.[0-9_]*)?", "base 60 to some readers. Write a plain number, or quote it."),
    (r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([t\s].*)?", "a date to some readers. Quote it."),
    (r"[-+]?[0-9.]+_[0-9_.]*(e[-+]?[0-9_]+)?", "a number to some readers. Write it without _, or quote it."),
    (r"<<", "merge keys are not allowed. Write the keys out."),
]


def in_range(value: Any) -> Any:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("beyond 64 bits. Write a smaller integer.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number. Write one that is.")
    if isinstance(value, str) and SURROGATE.search(value):
        raise ValueError("not text: it holds half of a surrogate pair.")
    return value


def scalar(text: str) -> Any:
    """What an unquoted word means, in a file or as a flag's value; ValueError, with the reason, if that is not clear."""
    if text in WORDS:
        return WORDS[text]
    if INTEGER.fullmatch(text):
        return in_range(int(text[:21]))  # 21 characters are beyond 64 bits already
    if FLOAT.fullmatch(text):
        value = in_range(float(text))
        if value == 0 and re.search("[1-9]", re.split("[eE]", text)[0]):
            raise ValueError("closer to 0 than any float. Write 0.")
        return value
    for pattern, advice in AMBIGUOUS:
        if re.fullmatch(pattern, text, re.IGNORECASE):
            raise ValueError(advice.format(text))
    return in_range(text)


def plain_key(text: str) -> str:
    if not isinstance(scalar(text), str):
        raise ValueError("a key must be text. Write it in quotes.")
    return text


def is_word(text: str) -> bool:
    """Whether text means itself without quotes."""
    try:
        return bool(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_./+-]*", text)) and scalar(text) == text
    except ValueError:
        return False

"""Errors about data that were passed to a model in Python, whose advice names arguments."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ..errors import DataError
from ..tasks.description import PREDICTION_OPTIONS

WORD = r"(?:NAME|drop|ffill|mask|allow|refuse|day-first|month-first)"
FLAG = re.compile(rf"(?<![\w-])--([a-z][a-z-]*)(?: ('[^']*'|{WORD}(?:\|{WORD})*))?")


@contextlib.contextmanager
def errors_name_arguments() -> Iterator[None]:
    """Inside, errors about data name arguments: id="NAME" for --id NAME.

    The command line prints the text with flags, which they keep.
    """
    try:
        yield
    except DataError as error:
        text = str(error)
        in_python = FLAG.sub(spell, text)
        if in_python == text:
            raise
        renamed = type(error)(in_python)
        renamed.with_flags = text
        raise renamed from None


def spell(match: re.Match[str]) -> str:
    """Return a flag and its value as an argument: missing="drop" or "ffill"."""
    name = match[1].replace("-", "_")
    if name not in {*PREDICTION_OPTIONS, "target"}:
        return match[0]
    if match[2] is None:
        return f"{name}="
    values = match[2].strip("'").split("|")
    return f"{name}=" + " or ".join(f'"{value}"' for value in values)

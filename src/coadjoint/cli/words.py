"""Settings in one text: 'clipped clip=1 lr=1e-2|1e-3' as words."""

from __future__ import annotations

import shlex

from ..errors import ConfigError


def split_words(text: str, what: str) -> list[str]:
    """The words of a text; quotes keep one with spaces together: chain='conv 8 3, tanh, 64'."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    lexer.escape = ""  # a backslash is one of a path
    try:
        return list(lexer)
    except ValueError:
        raise ConfigError(f"{what}: a quotation mark is not closed in {text!r}.") from None

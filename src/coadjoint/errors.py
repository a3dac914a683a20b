"""Errors: what was expected, what came, what to do."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any


class CoadjointError(Exception):
    """Every error this library raises on purpose. `exit_code` is what the command line ends with."""

    exit_code = 2


class InputError(CoadjointError, ValueError):
    """A value that cannot be used: a shape, a name, a length, a number."""


class KindError(CoadjointError, TypeError):
    """An object of the wrong kind: a dtype, a function that returns something else."""


class Unsupported(CoadjointError, NotImplementedError):
    """A request that is understood and declined; the text names the reason and the way out."""


class NumericalError(CoadjointError, ArithmeticError):
    """A number left the range of its type; the text names the time step."""

    exit_code = 5


class ConfigError(InputError):
    """A setting that cannot be used; the text names the file and line, or the flag."""


class OptionError(ConfigError):
    """Options that do not go together, or that do nothing.

    The words name an option as $option: the text has the keyword of Python there, and the command
    line puts its flag. "$$" stands for a dollar sign."""

    def __init__(self, words: str) -> None:
        self.template = words
        super().__init__(self.text_with(str))

    def text_with(self, spell: Callable[[str], str]) -> str:
        """The text with the options as `spell` writes them."""
        put = lambda found: "$" if found[1] == "$" else spell(found[1])
        return re.sub(r"\$(\$|\w+)", put, self.template)


class DataError(InputError):
    """A file of data that cannot be used as it stands; the text names the file, row and column."""

    exit_code = 3


class StorageError(CoadjointError, OSError):
    """A run folder, checkpoint or disk that cannot be used; what was there before is untouched."""

    exit_code = 4


class MissingError(CoadjointError, ImportError):
    """Something this machine lacks: an optional package, a device."""

    exit_code = 7


# text from outside, made safe to print
def escape_controls(text: object, lines: bool = True) -> str:
    """Text whose control sequences are spelled out, not obeyed; its lines stay lines, or become one."""
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() or (lines and c == "\n") else repr(c)[1:-1] for c in plain)


def one_line(text: object, limit: int = 40) -> str:
    """Text on one line, without control sequences and not too long."""
    plain = str(text)
    return escape_controls(plain[:limit], lines=False) + ("..." if len(plain) > limit else "")


def escape_undecodable(text: str) -> str:
    """Text that UTF-8 can hold: the bytes of a file's name that are no UTF-8 are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException, limit: int = 200) -> str:
    """What another library's error says, to stand inside a sentence of ours: on one line, without its own full stop."""
    words = str(getattr(error, "strerror", None) or error) or type(error).__name__
    if len(error.args) > 1 and words == str(
        error.args
    ):  # a text and where it stood, as tokenize has them
        words = str(error.args[0])
    return one_line(" ".join(words.split()).rstrip(" .:;,!?"), limit)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name that is most like this one, upper and lower case alike; None if none is."""
    spelled: dict[str, str] = {}
    for each in known:
        spelled.setdefault(each.casefold(), each)
    near = difflib.get_close_matches(name.casefold(), spelled, n=1, cutoff=cutoff)
    return spelled[near[0]] if near else None


def choose(kind: str, name: object, known: Iterable[str]) -> str:
    """`name` if it is one of `known`, else an error that offers the nearest one."""
    names = sorted(known)
    if isinstance(name, str) and name in names:
        return name
    if not isinstance(name, str):
        raise KindError(
            f"{kind} must be a name, one of {', '.join(names)}; got {type(name).__name__}."
        )
    near = nearest(name, names)
    hint = f"did you mean '{near}'? " if near else ""
    raise InputError(f"unknown {kind} '{one_line(name, 80)}'; {hint}Known: {', '.join(names)}.")


AppliesTable = Mapping[
    str, tuple[str, tuple[str, ...]]
]  # option: (the option that decides, those of its values that use it)


def idle_options(
    applies: AppliesTable, given: Mapping[str, Any], chosen: Mapping[str, str]
) -> list[str]:
    """A line, in the words of an OptionError, for each option given that does nothing here."""
    return [
        f"${option} does nothing with ${by} {chosen[by]}: it belongs to {', '.join(values)}."
        for option, (by, values) in applies.items()
        if given.get(option) is not None and chosen[by] not in values
    ]


def refuse_options(lines: list[str]) -> None:
    """Raise one OptionError for all of the lines, if there are any."""
    if lines:
        raise OptionError("\n".join(lines))


MAX_COUNT = 2**31 - 1  # of anything that is counted


def whole_number(name: str, value: Any, least: int = 1, most: int = MAX_COUNT) -> int:
    """`value`, a whole number from least to most."""
    counts = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not counts or int(value) < least:
        raise InputError(f"{name} must be a whole number, at least {least}; got {brief(value)}.")
    if int(value) > most:
        raise InputError(f"{name} must be a whole number, at most {most:,}; got {brief(value)}.")
    return int(value)


def real(
    name: str,
    value: Any,
    least: float = -math.inf,
    most: float = math.inf,
    above: bool = False,
    below: bool = False,
) -> float:
    """`value`, a finite number from least (or above it) to most (or below it)."""
    number = (
        isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    )
    if (
        number
        and least <= value <= most
        and not (above and value == least)
        and not (below and value == most)
    ):
        return value
    bounds = []
    if least > -math.inf:
        bounds.append(f"{'above' if above else 'at least'} {least:g}")
    if most < math.inf:
        bounds.append(f"{'below' if below else 'at most'} {most:g}")
    words = ", ".join(["a finite number", " and ".join(bounds)] if bounds else ["a finite number"])
    raise InputError(f"{name} must be {words}; got {brief(value)}.")


def check_seed(value: Any) -> int:
    """What random numbers begin from."""
    if isinstance(value, numbers.Integral) and 0 <= int(value) < 2**63:
        return int(value)
    raise InputError(f"a seed is a whole number in 0..2^63 - 1; got {brief(value)}.")


def check_kind(name: str, value: Any, kinds: Any, expected: str) -> None:
    """An object of one of our classes, or of Python's."""
    if not isinstance(value, kinds):
        raise KindError(f"{name} must be {expected}; got {brief(value)}.")


def check_path(name: str, value: Any) -> None:
    check_kind(name, value, (str, os.PathLike), "the name of a file or folder")


def brief(value: object) -> str:
    """A value that was not expected, in one short line; of an object that is no number and no text, its kind."""
    if value is None or isinstance(value, str | numbers.Number):
        return one_line(repr(value), 60)
    text = repr(value) if isinstance(value, list | tuple | dict) and len(value) < 5 else ""
    return one_line(text, 60) if text and "\n" not in text else type(value).__name__


def renamed_attributes(module: str, renamed: Mapping[str, str]) -> Callable[[str], object]:
    """A `__getattr__` for `module` that finds renamed attributes under their old names and warns."""

    def find(name: str) -> object:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = renamed[name]
        warnings.warn(
            f"{module}.{name} is now {module}.{new}; the old name goes in 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(sys.modules[module], new)

    return find

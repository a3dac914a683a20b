"""Errors: what was expected, what was given, what to do. Also the checks that raise them."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from types import UnionType


class CoadjointError(Exception):
    """The base of every error that this library raises on purpose.

    `exit_code` is the exit code of the command line.

    Example:
        >>> import coadjoint as co
        >>> try:
        ...     co.cells.named("lstmm")
        ... except co.CoadjointError as error:
        ...     print(error.exit_code, error)
        2 unknown cell 'lstmm'; did you mean 'lstm'? Known: ...
    """

    exit_code = 2


class InputError(CoadjointError, ValueError):
    """A value that cannot be used: a shape, a name, a length, a number.

    Example:
        >>> import coadjoint as co
        >>> co.cells.structures.LowRank(rank=0)
        Traceback (most recent call last):
        coadjoint.errors.InputError: rank must be a whole number, at least 1; got 0.
    """


class KindError(CoadjointError, TypeError):
    """An object of the wrong kind: a dtype, a function that returns something else.

    Example:
        >>> import coadjoint as co
        >>> co.penalties.penalty(3)
        Traceback (most recent call last):
        coadjoint.errors.KindError: a penalty is a name, a Penalty or a function of ...
    """


class Unsupported(CoadjointError, NotImplementedError):
    """A request that is understood but not supported; the text says why and what to do.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> co.Network("elman", inputs=1, hidden=1, outputs=1, dtype=torch.float16)
        Traceback (most recent call last):
        coadjoint.errors.Unsupported: parameters are float32 or float64; got torch.float16. ...
    """


class NumericalError(CoadjointError, ArithmeticError):
    """A number left the range of its dtype; the text names the time step.

    Example:
        >>> import coadjoint as co
        >>> co.NumericalError.exit_code
        5
    """

    exit_code = 5


class ConfigError(InputError):
    """A setting that cannot be used; the text names the file and line, or the flag.

    Example:
        >>> import coadjoint as co
        >>> issubclass(co.ConfigError, co.InputError)
        True
    """


class OptionError(ConfigError):
    """Options that contradict each other, or that have no effect.

    template  the text, with an option written as $option, and "$$" for a dollar sign. The text of
              the error has Python's keywords there; the command line puts its flags.
    """

    def __init__(self, template: str) -> None:
        self.template = template
        super().__init__(self.text_with(str))  # str leaves names as they are: Python's keywords

    def text_with(self, spell: Callable[[str], str]) -> str:
        """The text with each $option as `spell` writes it, and "$" for "$$"."""

        def replace(match: re.Match[str]) -> str:
            return "$" if match[1] == "$" else spell(match[1])

        return re.sub(r"\$(\$|\w+)", replace, self.template)


class DataError(InputError):
    """A data file that cannot be used; the text names the file, row and column.

    Example:
        >>> import coadjoint as co
        >>> co.DataError.exit_code
        3
    """

    exit_code = 3
    with_flags: str | None = None  # the text for the command line, if it differs


class StorageError(CoadjointError, OSError):
    """A run folder, checkpoint or disk that cannot be used; earlier files are untouched.

    Example:
        >>> import coadjoint as co
        >>> co.StorageError.exit_code
        4
    """

    exit_code = 4


class MissingError(CoadjointError, ImportError):
    """Something that this machine lacks: an optional package, a device.

    Example:
        >>> import coadjoint as co
        >>> co.MissingError.exit_code
        7
    """

    exit_code = 7


class LostProcess(CoadjointError):
    """Another process of the same run has died, or cannot be reached.

    Example:
        >>> from coadjoint.errors import LostProcess
        >>> LostProcess.exit_code
        6
    """

    exit_code = 6


# Text from outside, made safe to print.
PASSWORD = re.compile(  # user:PASSWORD@ in a URL, or password=PASSWORD in its query
    r"(://[^\s:/@]*):\S*@|(password=)[^\s&'\"]+", re.IGNORECASE
)


def hide_passwords(text: str) -> str:
    """A text in which the passwords of URLs are "***": those of commands are kept in files.

    "postgresql://me:secret@host/db?password=more" -> "postgresql://me:***@host/db?password=***"
    """

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}:***@" if match[1] is not None else f"{match[2]}***"

    return PASSWORD.sub(replace, text)


def escape_controls(text: object, lines: bool = True) -> str:
    """Text whose control characters are written out, so that a terminal does not obey them.

    lines  whether line breaks stay; otherwise they are written out too
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    allowed = "\n" if lines else ""
    # repr writes a control character out; [1:-1] takes off its quotes
    return "".join(c if c.isprintable() or c in allowed else repr(c)[1:-1] for c in plain)


def one_line(text: object, limit: int = 40) -> str:
    """Text on one line, without control characters, cut after `limit` characters."""
    plain = str(text)
    dots = "..." if len(plain) > limit else ""
    return escape_controls(plain[:limit], lines=False) + dots


def escape_undecodable(text: str) -> str:
    """Text that UTF-8 can hold: bytes of a file's name that are not UTF-8 are written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException, limit: int = 200) -> str:
    """The text of another library's error, to be quoted in a sentence.

    It is on one line and has no full stop at its end.
    """
    # an OSError's strerror has the words alone; str() would add its number and the file
    words = str(getattr(error, "strerror", None) or error) or type(error).__name__
    # tokenize raises errors of a text and a position; str() would show both as a tuple
    if len(error.args) > 1 and words == str(error.args):
        words = str(error.args[0])
    return one_line(" ".join(words.split()).rstrip(" .:;,!?"), limit)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.65) -> str | None:
    """The known name most like `name`, regardless of case; None if none is similar.

    cutoff  the least similarity that counts, from 0 (anything) to 1 (the same), as in difflib
    """
    by_folded: dict[str, str] = {}
    for known_name in known:
        by_folded.setdefault(known_name.casefold(), known_name)
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=cutoff)
    return by_folded[near[0]] if near else None


def choose(kind: str, name: object, known: Iterable[str]) -> str:
    """`name` if it is one of `known`, else an error that suggests the nearest one.

    kind  what the names are names of, for the error: "cell", "loss"
    """
    names = sorted(known)
    if isinstance(name, str) and name in names:
        return name
    if not isinstance(name, str):
        raise KindError(
            f"{kind} must be a name, one of {', '.join(names)}; got {type(name).__name__}."
        )
    near = nearest(name, names)
    hint = f"; did you mean '{near}'?" if near else "."
    raise InputError(f"unknown {kind} '{one_line(name, 80)}'{hint} Known: {', '.join(names)}.")


# option -> (the option that decides whether it is used, the values of that option that use it)
AppliesTable = Mapping[str, tuple[str, tuple[str, ...]]]


def idle_options(
    applies: AppliesTable, given: Mapping[str, object], chosen: Mapping[str, str]
) -> list[str]:
    """A line for each given option that has no effect, as a template of an OptionError.

    applies  which options depend on which
    given    the options that were given; None is the same as not given
    chosen   the values of the options that decide
    """
    lines = []
    for option, (decider, values) in applies.items():
        if given.get(option) is not None and chosen[decider] not in values:
            lines.append(
                f"${option} does nothing with ${decider} {chosen[decider]}: "
                f"it belongs to {', '.join(values)}."
            )
    return lines


def refuse_options(lines: list[str]) -> None:
    """Raise one OptionError for all of the lines, if there are any."""
    if lines:
        raise OptionError("\n".join(lines))


MAX_COUNT = 2**31 - 1  # of units, samples, steps, ...


def whole_number(name: str, value: object, least: int = 1, most: int = MAX_COUNT) -> int:
    """`value` as an int; anything but a whole number in least..most is refused.

    name  what the number is, for the error
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or int(value) < least:
        raise InputError(f"{name} must be a whole number, at least {least}; got {brief(value)}.")
    if int(value) > most:
        raise InputError(f"{name} must be a whole number, at most {most:,}; got {brief(value)}.")
    return int(value)


def real(
    name: str,
    value: object,
    least: float = -math.inf,
    most: float = math.inf,
    above: bool = False,
    below: bool = False,
) -> float:
    """`value` itself; anything but a finite number in least..most is refused.

    name          what the number is, for the error
    above, below  whether `least` and `most` themselves are refused too
    """
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
        number: float = value  # type: ignore[assignment]  # floats, ints and numpy's numbers
        at_excluded_end = (above and number == least) or (below and number == most)
        if least <= number <= most and not at_excluded_end:
            return number
    expected = "a finite number"
    bounds = []
    if least > -math.inf:
        bounds.append(f"{'above' if above else 'at least'} {least:g}")
    if most < math.inf:
        bounds.append(f"{'below' if below else 'at most'} {most:g}")
    if bounds:
        expected += f", {' and '.join(bounds)}"
    raise InputError(f"{name} must be {expected}; got {brief(value)}.")


def check_seed(value: object) -> int:
    """A seed of random numbers as an int in 0..2^63 - 1; anything else is refused."""
    if isinstance(value, numbers.Integral) and 0 <= int(value) < 2**63:
        return int(value)
    raise InputError(f"seed must be a whole number in 0..2^63 - 1; got {brief(value)}.")


Kinds = type | UnionType | tuple[type | UnionType, ...]


def check_kind(name: str, value: object, kinds: Kinds, expected: str) -> None:
    """Refuse a value that is not an instance of `kinds`.

    name, expected  what the value is and what it must be, for the error
    """
    if not isinstance(value, kinds):
        raise KindError(f"{name} must be {expected}; got {brief(value)}.")


def check_path(name: str, value: object) -> None:
    """Refuse a value that is not a path."""
    check_kind(name, value, (str, os.PathLike), "the name of a file or folder")


def brief(value: object) -> str:
    """An unexpected value in one short line: numbers, text and short lists; else its type."""
    if value is None or isinstance(value, str | numbers.Number):
        return one_line(repr(value), 60)
    if isinstance(value, list | tuple | dict) and len(value) < 5:
        text = repr(value)
        if "\n" not in text:  # arrays inside a list take several lines
            return one_line(text, 60)
    return type(value).__name__


def renamed_attributes(module: str, renamed: Mapping[str, str]) -> Callable[[str], object]:
    """A `__getattr__` for `module` that finds renamed attributes under their old names.

    It warns each time. `renamed` holds the new names by the old ones.
    """

    def find(name: str) -> object:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = renamed[name]
        warnings.warn(
            f"{module}.{name} is now {module}.{new}; the old name will be removed in 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(sys.modules[module], new)

    return find

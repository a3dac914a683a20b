"""The parts of a page: tables, sections and the page itself, as the template shows them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..pace import ENDLESS
from .figures import PageFigure
from .text import Row, clean

Cell = str | tuple[str, str]  # text, or text and link
MAX_DEPTH = 8  # of nested settings
NAMING_KEYS = ("name", "method", "kind", "cell", "path")  # settings that say what a section is
SETTING_LABELS = {"lr": "learning rate"}  # settings whose key is short


@dataclass(frozen=True)
class Table:
    """A table; columns other than `text` hold numbers."""

    caption: str
    head: list[str]
    rows: list[list[Cell]]
    none: str  # the text in place of an empty table
    note: str
    text: set[int]
    folded: bool


class MatrixCell(NamedTuple):
    """A count of a matrix, and the classes of its style."""

    text: str
    style: str


@dataclass(frozen=True)
class Matrix:
    """A confusion matrix: a row for each true class, a column for each predicted one."""

    caption: str
    labels: list[tuple[str, str]]  # short, and in full
    rows: list[list[MatrixCell]]
    recall: list[str]
    precision: list[str]  # [] leaves out their row
    is_upright: bool  # the labels of columns stand upright
    is_dense: bool
    folded: bool
    note: str


def make_table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    none: str,
    text: Iterable[int] = (0, 1),
    most: int = 400,
    folded: bool = False,
) -> Table:
    """A table of at most `most` rows, its text made safe; a cell is text or (text, link).

    none: the text in place of an empty table. text: the columns that do not hold numbers.
    folded: the page shows the table only when it is opened.
    """
    first_rows = list(itertools.islice(rows, most + 1))  # one more, to see whether there are more
    cells = [list(map(_cell, row)) for row in first_rows[:most]]
    note = f"The first {most:,} rows; there are more." if len(first_rows) > most else ""
    return Table(caption, list(map(clean, head)), cells, none, note, set(text), folded)


def _cell(value: object) -> Cell:
    """A cell of a table: (text, link) as it is, anything else as safe text."""
    return value if isinstance(value, tuple) else clean(value)


@dataclass(frozen=True)
class PageSection:
    """A part of the page with a heading."""

    id: str
    title: str
    lead: str = ""
    figures: Sequence[PageFigure] = ()
    tables: Sequence[Table] = ()
    commands: dict[str, str] = field(default_factory=dict)  # what a command does -> the command
    pairs: bool = False  # tables stand side by side
    matrices: Sequence[Matrix] = ()

    @property
    def ordered_figures(self) -> list[PageFigure]:
        """The figures that are drawn, then those that say why they are empty."""
        return sorted(self.figures, key=lambda figure: bool(figure.empty))


@dataclass(frozen=True)
class Page:
    """All that the template shows."""

    kind: str
    name: str
    title: str
    outcome: tuple[str, str, str]  # tone, headline, details
    facts: dict[str, str]
    notices: list[str]
    cards: dict[str, str]
    sections: list[PageSection]
    clock: Row | None = None  # steps and seconds, so that figures can tell the time


def flatten_settings(value: object, name: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted name, text): {"a": {"b": [1, 2]}} gives ("a.b", "1, 2").

    name, depth: of this value inside the settings. Deeper than MAX_DEPTH, a mapping is one text.
    """
    # an empty mapping inside is shown as {}; no settings at all give nothing
    if isinstance(value, dict) and (value or depth == 0) and depth < MAX_DEPTH:
        for key, inner in value.items():
            dotted = f"{name}.{key}" if name else str(key)
            yield from flatten_settings(inner, dotted, depth + 1)
    elif isinstance(value, list):
        yield name, _join_list(value)
    else:
        yield name, clean(value)


def configuration_rows(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as `flatten_settings` has them; a run that only a budget ends has no limit.

    Its number of steps is the largest one that can be stored.
    """
    for dotted, text in flatten_settings(value, name):
        is_endless = dotted.split(".")[-1] == "steps" and text == str(ENDLESS)
        yield dotted, "no limit" if is_endless else text


def _join_list(values: Iterable[object]) -> str:
    """[1, 2] -> "1, 2"."""
    return ", ".join(map(str, values))


def _naming_key(settings: Row) -> str:
    """The setting that says what the section is; "" if none does."""
    for key in NAMING_KEYS:
        if isinstance(settings.get(key), str):
            return key
    return ""


def describe_settings(section: object) -> str:
    """{"name": "temporal-order", "length": 100} -> "temporal-order, length 100".

    Of a true setting only the key is shown, of a false one nothing; at most eight are shown.
    """
    if not isinstance(section, dict):
        return clean(section or "")
    words = []
    settings = {}
    for key, value in section.items():
        settings[key] = _join_list(value) if isinstance(value, list) else value
    naming_key = _naming_key(settings)
    for key, value in settings.items():
        if key == naming_key or not isinstance(value, str | int | float):
            continue
        label = SETTING_LABELS.get(key, str(key))
        word = label if value is True else f"{label} {value}"
        if not word.endswith(" False"):
            words.append(word)
    name = [settings[naming_key]] if naming_key else []
    return clean(", ".join(name + words[:8]))

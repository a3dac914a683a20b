"""Columns of words among the features: which they are, what to do about them, and their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...errors import one_line
from .columns import Roles
from .dates import is_date
from .parsing import MISSING_TEXTS, TRUTH, is_text, parse_all_at_once
from .sheet import Options, Problems, quote_names

FEW_WORDS = 20  # that a column may hold however short it is
FEATURES_LISTED = 10
WORDS_KEPT = 100_000  # of a column, to tell words that recur from those that do not
WHOLE_REAL = re.compile(r"([+-]?\d+)\.0+", re.ASCII)


@dataclass
class Survey:
    """What the cells of a column hold, but for missing ones.

    words   the different ones, up to WORDS_KEPT;  first  a word and its row
    """

    text_cells: int = 0
    other_cells: int = 0
    words: set[str] = field(default_factory=set)
    first: tuple[int, str] = (0, "")

    def add(self, rows: Sequence[int], cells: Sequence[str], options: Options) -> None:
        """Take in some cells and the rows they are in."""
        if parse_all_at_once(cells, options) is not None:
            self.other_cells += len(cells)
            return
        known: dict[str, bool] = {}
        for row, cell in zip(rows, cells, strict=True):
            word = cell.strip()
            if word.casefold() in MISSING_TEXTS:
                continue
            if word not in known:
                known[word] = is_text(word, options)
            if not known[word]:
                self.other_cells += 1
                continue
            self.text_cells += 1
            if not self.first[1]:
                self.first = (row, word)
            if len(self.words) < WORDS_KEPT:
                self.words.add(word)

    @property
    def is_of_words(self) -> bool:
        """Whether words prevail; a single one among numbers is more likely a mistake."""
        return self.text_cells > max(1, self.other_cells)

    @property
    def is_of_names(self) -> bool:
        """Whether most words occur once, as names and free text do."""
        return recur_too_rarely(len(self.words), self.text_cells)


def recur_too_rarely(words: int, cells: int) -> bool:
    """Whether so many different words in so many cells leave nothing to learn from any of them."""
    return words > FEW_WORDS and 2 * words > cells


def choose_categorical(roles: Roles, surveys: dict[str, Survey]) -> Roles:
    """The roles of --categorical auto: columns of words are features, but for those of names.

    surveys: of the features that may hold words.
    """
    chosen = []
    left_out = []
    for name, survey in surveys.items():
        if not survey.is_of_words:
            continue
        example = survey.first[1]
        if is_date(example):
            left_out.append(f"column '{one_line(name)}' holds dates and is left out")
        elif survey.is_of_names:
            count = f"{len(survey.words):,} different words in {survey.text_cells:,} cells"
            left_out.append(f"column '{one_line(name)}' holds {count} and is left out")
        else:
            chosen.append(name)
    of_words = {name for name, survey in surveys.items() if survey.is_of_words}
    features = [name for name in roles.features if name not in of_words or name in chosen]
    notes = (*roles.notes, *left_out)
    return replace(roles, features=tuple(features), categorical=tuple(chosen), notes=notes)


def check_categorical(roles: Roles, options: Options, problems: Problems) -> Roles:
    """The roles with the columns of --categorical, each of which must be a feature."""
    for name in options.categorical:
        if name in roles.features:
            continue
        why = "there is no such column among the features"
        if name in (roles.id, roles.time, *roles.targets):
            role = "target" if name in roles.targets else "id or time"
            why = f"it is the {role} column"
        problems.add(
            f"{problems.path}: --categorical '{one_line(name)}': {why}. Features: "
            f"{quote_names(roles.features)}."
        )
    problems.raise_if_any()
    return replace(roles, categorical=options.categorical)


def complain_of_words(
    name: str, survey: Survey, others: Sequence[str], roles: Roles, options: Options
) -> str:
    """The one complaint about a column of words that was to hold numbers.

    others: the features that do hold numbers.
    """
    example = survey.first[1]
    total = survey.text_cells + survey.other_cells
    holds = "words, not numbers"
    kind = "words"
    if is_date(example):
        holds = "dates"
        kind = "dates"
    elif survey.is_of_names:
        holds = "words, most of them different"
        kind = "names"
    return (
        f'{survey.text_cells:,} of {total:,} cells hold {holds}, such as "{one_line(example)}". '
        f"{advise_on_words(name, kind, others, roles, options)}"
    )


def advise_on_words(
    name: str, kind: str, others: Sequence[str], roles: Roles, options: Options
) -> str:
    """What to do about a column that holds words, where numbers are expected.

    kind: "words"; "dates"; or "names", which hardly recur. others: the features that do hold
    numbers.
    """
    if name in roles.targets:
        return "Pass --kind classify if they are classes."
    if options.use == "predict":
        return "The model was trained on numbers in this column."
    flag_name = shell_word(name)
    ways = []
    if kind == "dates" and options.rows == "steps" and not roles.time:
        ways.append(f"--time {flag_name} if they order the rows")
    if kind == "words":
        ways.append(f"--categorical {flag_name} to use them as inputs")
    if kind == "words" and options.rows == "steps" and not roles.id:
        ways.append(f"--id {flag_name} if they name the sequences")
    listed = ",".join(map(shell_word, others[:FEATURES_LISTED]))
    if len(others) > FEATURES_LISTED:
        listed += ",..."
    ways.append(f"--features {listed or 'a,b'} to leave the column out")
    return f"Pass {', or '.join(ways)}."


def shell_word(name: str) -> str:
    """The name of a column as it is given to a flag: in quotes if it holds more than letters."""
    text = one_line(name)
    return text if re.fullmatch(r"[\w.-]+", text) else f"'{text}'"


def canonical_word(cell: str) -> str:
    """A word as it is compared: "" where missing, 1.0 as 1, True and TRUE as true."""
    word = cell.strip()
    folded = word.casefold()
    if folded in MISSING_TEXTS:
        return ""
    if folded in TRUTH:
        return folded
    whole = WHOLE_REAL.fullmatch(word)
    return whole[1] if whole else word


def encode_words(cells: Iterable[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """(the number of each cell's word, NaN where missing; the words in order of their numbers).

    WordList are sorted.
    """
    canonical: dict[str, str] = {}
    words = []
    for cell in cells:
        if cell not in canonical:
            canonical[cell] = canonical_word(cell)
        words.append(canonical[cell])
    known = tuple(sorted(set(words) - {""}))
    number = {word: float(k) for k, word in enumerate(known)} | {"": np.nan}
    return np.array([number[word] for word in words], dtype=np.float64), known

"""Sequences of symbols: the characters of a text, or the words in a column of a table.

A network reads one symbol at each step, as an input for each symbol of the vocabulary: 1 for the
symbol that is there, less its share of the training symbols. It answers with the next one, as a
class. The vocabulary is that of the training file. A symbol that is not in it is 0 in all inputs,
and no target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..errors import ConfigError, DataError, one_line
from .cutting import Part, cut_into_pieces, refuse_overlap, slide_windows
from .description import READING_OPTIONS, Description, JsonDict
from .files.characters import may_be_text, read_characters, show_symbols
from .files.packed import TEXT_SUFFIXES, table_stem, table_suffix, unpack
from .files.sheet import Options, Problems, Sheet
from .files.source import load_file
from .files.table import AUTO
from .files.text import TextRows
from .files.words import Survey
from .memory import InMemory, Source, read_source
from .option_checks import check_choice, check_stride, check_window
from .overview import Overview, make_overview
from .preparation import are_whole_numbers, column_names, read_all
from .sets import digests_of
from .shares import FEWEST_ROWS, divide
from .symbol_sets import symbol_sequences
from .task import Sequences

MOST_SYMBOLS = 4096  # of a vocabulary
DEFAULT_SHARE = 0.1  # of a text: the set to validate, and the set to test
# Options of tables, and of numbers: their defaults. A text takes none of them.
OF_TABLES: JsonDict = {
    "id": None,
    "time": None,
    "target": None,
    "features": None,
    "categorical": None,
    "dates": None,
    "sep": None,
    "decimal": ".",
    "thousands": "",
    "header": True,
    "wide": False,
    "irregular": "refuse",
}
OF_NUMBERS: JsonDict = {
    "horizon": None,
    "strategy": None,
    "known": None,
    "quantiles": None,
    "lags": None,
    "gaps": False,
    "missing": "refuse",
    "rows": "steps",
    "noise": 0.0,
}


class SymbolData(NamedTuple):
    """What a `Data` of symbols is made of."""

    sets: dict[str, Sequences]
    description: Description
    notes: tuple[str, ...]
    name: str
    shares: tuple[float, ...] | None
    overview: Overview

    @property
    def parts(self) -> tuple[dict[str, Sequences], Description, tuple[str, ...], str]:
        """The first arguments of `Data`."""
        return self.sets, self.description, self.notes, self.name


def read_symbols(paths: Mapping[str, Source | None], given: JsonDict) -> SymbolData | None:
    """Read sequences of symbols; None if the training file holds none.

    Args:
        paths: The file of each split, or None.
        given: The other arguments of `Data.read`, by name.
    """
    train = paths["train"]
    assert train is not None
    if given["kind"] != "next":
        if given["text"]:
            raise ConfigError("--text goes with --kind next, which predicts the next character.")
        return None
    if given["text"]:
        return read_texts(paths, given, "")
    if is_text(train, given):
        note = f"{one_line(train, 200)} is read as a text of characters; --no-text reads a table"
        return read_texts(paths, given, note)
    column = symbol_column(train, given)
    if column is None:
        return None
    return read_column(paths, given, column)


def is_text(train: Source, given: JsonDict) -> bool:
    """Tell whether a file is a text, if nothing says so: a .txt without a table or options of one.

    The lags "auto" are nobody's wish: see `training.own_defaults`.
    """
    if isinstance(train, InMemory) or given["text"] is False:
        return False
    if asked(given, OF_TABLES | OF_NUMBERS):
        return False
    return may_be_text(train, given["max_bytes"])


def asked(given: JsonDict, defaults: JsonDict) -> list[str]:
    """Return the names of options that differ from their defaults."""
    names = []
    for name, default in defaults.items():
        value = given[name]
        is_nothing = value is None or value == () or value == []
        if not is_nothing and value != default and value != "auto":
            names.append(name)
    return names


def refuse_asked(given: JsonDict, defaults: JsonDict, what: str) -> None:
    """Refuse options that differ from their defaults; what: what they do not go with."""
    names = asked(given, defaults)
    if given["at"] == "last":
        names.append("at")
    if names:
        flag = "no-header" if names[0] == "header" else names[0].replace("_", "-")
        raise ConfigError(f"--{flag} does not go with {what}. Leave it out.")


def symbol_column(train: Source, given: JsonDict) -> str | None:
    """Return the one column to predict, if it holds words and no option speaks of numbers."""
    named = column_names(given["target"]) or column_names(given["features"]) or ()
    if len(named) != 1 or given["wide"] or asked(given, OF_NUMBERS):
        return None
    if named[0] in (column_names(given["categorical"]) or ()):
        return named[0]
    return named[0] if holds_words(train, named[0], given) else None


def holds_words(train: Source, column: str, given: JsonDict) -> bool:
    """Tell whether words prevail in a column; not if there is no such column."""
    options = options_of(given, column, AUTO)
    if isinstance(train, InMemory):
        if not train.is_frame:
            return False
        return column in read_source(train, options).categories
    suffix = table_suffix(train)
    if suffix in (".parquet", ".pq", ".arrow", ".feather"):
        return column in read_source(train, options).categories
    if suffix not in TEXT_SUFFIXES:
        return False
    try:
        source = unpack(load_file(train, given["max_bytes"]), given["max_bytes"])
        rows = TextRows.from_file(source, options, Problems(source.path))
        place = rows.names.index(column)
        lines, cells = next(rows.blocks())
    except (DataError, ValueError, StopIteration):
        return False  # the reader of numbers says what is wrong
    survey = Survey()
    survey.add(lines, [row[place] for row in cells], options)
    return survey.is_of_words


def options_of(given: JsonDict, column: str, categorical: tuple[str, ...]) -> Options:
    """Return the options that read one column of a table."""
    return Options(
        id=given["id"],
        time=given["time"],
        features=(column,),
        kind="next",
        sep=given["sep"],
        decimal=given["decimal"],
        thousands=given["thousands"],
        header=given["header"],
        dates=given["dates"],
        max_bytes=given["max_bytes"],
        categorical=categorical,
    )


def read_texts(paths: Mapping[str, Source | None], given: JsonDict, note: str) -> SymbolData:
    """Read the text of each split."""
    refuse_asked(given, OF_TABLES | OF_NUMBERS, "a text of characters (--text)")
    sheets = {}
    for split, path in paths.items():
        if path is None:
            continue
        if isinstance(path, InMemory):
            raise ConfigError(f"{path.path}: a text is read from a file; pass its path.")
        sheets[split] = read_characters(path, given["max_bytes"])
        refuse_same_file(sheets, split)
    if given["split"] is None and given["window"] is None and len(sheets) == 1:
        refuse_if_too_short(sheets["train"])
    reading: JsonDict = {"missing": "refuse", "irregular": "allow"}
    return assemble(paths, sheets, given, "character", reading, [note] if note else [])


def refuse_if_too_short(sheet: Sheet) -> None:
    """Refuse a text whose end is too short to be held out, as it is by default."""
    vocabulary_of(sheet, "character")  # refuses a text of one character, whatever its length
    n = int(sum(sheet.lengths))
    if round(n * DEFAULT_SHARE) < FEWEST_ROWS:
        raise DataError(
            f"{sheet.path} has {n} characters, too few to split into 3 sets: each held-out set is "
            f"a tenth of them, at least {FEWEST_ROWS}. Pass a longer text, --valid and --test "
            "files, or --split 1,0,0."
        )


def refuse_same_file(sheets: Mapping[str, Sheet], split: str) -> None:
    """Refuse the text of a split that is that of another."""
    for other, sheet in sheets.items():
        if other != split and sheet.sha256 == sheets[split].sha256:
            raise DataError(
                f"{sheets[split].path} ({split}) and {sheet.path} ({other}) hold the same bytes: "
                "each split needs its own data."
            )


def read_column(paths: Mapping[str, Source | None], given: JsonDict, column: str) -> SymbolData:
    """Read the same column of the table of each split."""
    others = [name for name in column_names(given["features"]) or () if name != column]
    if others:
        raise ConfigError(
            f"--kind next of symbols reads the column '{one_line(column)}' alone. Leave --features "
            "out."
        )
    refuse_asked(given, OF_NUMBERS, f"--kind next of the words in '{one_line(column)}'")
    sheets = read_all(paths, options_of(given, column, (column,)))
    reading = {name: given[name] for name in READING_OPTIONS}
    reading["dates"] = sheets["train"].columns.get("dates", given["dates"])
    return assemble(paths, sheets, given, "symbol", reading, [])


def assemble(
    paths: Mapping[str, Source | None],
    sheets: dict[str, Sheet],
    given: JsonDict,
    unit: str,
    reading: JsonDict,
    notes: list[str],
) -> SymbolData:
    """Return sets, description and overview of the sheets of all splits, which hold one feature.

    unit: what a symbol is called; reading: how other files are to be read like these; notes: what
    was chosen so far.
    """
    window = given["window"]
    check_choice("overlap", given["overlap"], ("refuse", "allow"))
    check_choice("dtype", given["dtype"], ("float32", "float64"))
    check_window(window, "next")
    check_stride(given["stride"], window)
    column = sheets["train"].features[0]
    vocabulary = vocabulary_of(sheets["train"], unit)
    cuts = {}
    for split, sheet in sheets.items():
        numbered = number_symbols(sheet, vocabulary)
        notes += [*sheet.notes, *notes_on_unknown(numbered, len(vocabulary), unit)]
        cuts[split] = cut_into_pieces(numbered, "next", "every", window, "refuse")
        notes += cuts[split].notes
    if given["overlap"] == "refuse":
        refuse_overlap(cuts)
    division = divide(cuts, given["split"], given["seed"], False, "every")
    notes += division.notes
    parts = division.parts
    parts["train"] = slide_windows(parts["train"], window, given["stride"])
    description = Description(
        kind="classify",
        at="every",
        features=[column],
        targets=[f"next {column}"],
        labels=vocabulary,
        mean=[0.0],
        std=[1.0],
        target_mean=[],
        target_std=[],
        masked=[],
        named=True,
        columns={role: sheets["train"].columns.get(role, "") for role in ("id", "time")},
        window=window,
        dtype=given["dtype"],
        reading=reading,
        files=digests_of(paths, sheets),
        categories={column: vocabulary},
        shares={column: shares_of(parts["train"], len(vocabulary), given["standardise"])},
        symbols=unit,
    )
    notes = list(dict.fromkeys([*notes, *notes_on_training(parts["train"], description)]))
    named = {split: replace(cut.sheet, notes=()) for split, cut in cuts.items()}
    overview = make_overview(named, cuts, parts, description, notes)
    sets = {name: symbol_sequences(part, description) for name, part in parts.items()}
    train = paths["train"]
    assert train is not None
    return SymbolData(
        {name: data for name, data in sets.items() if len(data)},
        description,
        tuple(notes),
        "data" if isinstance(train, InMemory) else table_stem(train),
        division.shares,
        overview,
    )


def vocabulary_of(sheet: Sheet, unit: str) -> list[str]:
    """Return the symbols of a sheet, sorted; as numbers if all are whole ones."""
    refuse_gaps(sheet)
    vocabulary = sorted(sheet.categories[sheet.features[0]])
    if unit == "symbol" and are_whole_numbers(vocabulary):
        vocabulary.sort(key=int)
    if len(vocabulary) < 2:
        raise DataError(
            f"{sheet.path} holds one {unit} only, {show_symbols(vocabulary)}; expected at least "
            "two different ones."
        )
    if len(vocabulary) > MOST_SYMBOLS:
        raise DataError(
            f"{sheet.path} holds {len(vocabulary):,} different {unit}s; at most {MOST_SYMBOLS:,} "
            "can be predicted. Replace the rarest by one."
        )
    return vocabulary


def refuse_gaps(sheet: Sheet) -> None:
    """Refuse a column with a missing symbol."""
    gaps = np.flatnonzero(np.isnan(sheet.u[:, 0]))
    if len(gaps):
        place = sheet.place(int(gaps[0]), sheet.features[0])
        raise DataError(
            f"{place}: the symbol is missing, in {len(gaps):,} rows. Remove these rows, or write a "
            "word of their own."
        )


def number_symbols(sheet: Sheet, vocabulary: Sequence[str]) -> Sheet:
    """Return the sheet with symbols numbered as in the vocabulary, and the next one of each as y.

    Others come behind it in `categories`. y is NaN for the last row of a sequence, and where the
    next symbol is not in the vocabulary.
    """
    refuse_gaps(sheet)
    column = sheet.features[0]
    place = {word: k for k, word in enumerate(vocabulary)}
    for word in sheet.categories[column]:
        place.setdefault(word, len(place))
    new = np.array([place[word] for word in sheet.categories[column]], dtype=np.float64)
    codes = new[sheet.u[:, 0].astype(np.int64)]
    following = np.append(codes[1:], np.nan)
    following[sheet.starts + sheet.lengths - 1] = np.nan
    following[following >= len(vocabulary)] = np.nan
    return replace(
        sheet,
        u=codes[:, None],
        y=following[:, None],
        targets=(f"next {column}",),
        categories={column: tuple(place)},
    )


def shares_of(part: Part, count: int, standardise: bool) -> list[float]:
    """Return the share of each symbol in the training pieces; 0 without `standardise`."""
    counts = count_symbols(part, count)
    return [float(share) * standardise for share in counts / max(1, counts.sum())]


def count_symbols(part: Part, count: int) -> np.ndarray:
    """Return how often each of `count` symbols is in the pieces of a part."""
    counts = np.zeros(count, np.int64)
    for _, start, stop in part.pieces:
        codes = part.cut.sheet.u[start:stop, 0].astype(np.int64)
        counts += np.bincount(codes[codes < count], minlength=count)
    return counts


def notes_on_unknown(sheet: Sheet, known: int, unit: str) -> list[str]:
    """Return a note on the symbols of a numbered sheet behind the first `known`."""
    codes = sheet.u[:, 0]
    count = int((codes >= known).sum())
    if not count:
        return []
    words = sheet.categories[sheet.features[0]][known:]
    return [
        f"{sheet.path}: {count:,} of {len(codes):,} {unit}s are not in the vocabulary: "
        f"{show_symbols(list(words), 5)}. They are read as an unknown {unit}, and no target"
    ]


def notes_on_training(part: Part, description: Description) -> list[str]:
    """Return a note on symbols that the training part lacks."""
    counts = count_symbols(part, len(description.labels))
    absent = [word for word, n in zip(description.labels, counts, strict=True) if not n]
    if not absent:
        return []
    unit = description.symbols
    which = f"1 {unit} is" if len(absent) == 1 else f"{len(absent)} {unit}s are"
    return [f"{which} in held-out parts only, and cannot be learned: {show_symbols(absent, 5)}"]


def read_new_sheet(description: Description, source: Source, options: Options) -> Sheet:
    """Read symbols for a trained network, numbered by its vocabulary."""
    d = description
    if d.symbols == "character":
        if isinstance(source, InMemory):
            raise DataError(f"{source.path}: the network reads a text; pass the path of a file.")
        sheet = read_characters(source, options.max_bytes)
    else:
        sheet = read_source(source, options)
    numbered = number_symbols(sheet, d.labels)
    notes = notes_on_unknown(numbered, len(d.labels), d.symbols)
    return replace(numbered, notes=(*sheet.notes, *notes))

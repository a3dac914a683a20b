"""Text files of the UEA and UCR archives (.ts): one sequence a line, dimensions split by ':', values by ','."""

from __future__ import annotations

import math

import numpy as np

from ...errors import one_line
from .parsing import parse_number, parse_numbers
from .sheet import Options, Problems, Sheet, quote_names, refuse_bad_values
from .source import LoadedFile

PLAIN_OPTIONS = Options()  # points and no grouping, whatever tables use
TAGS = ("problemname", "timestamps", "missing", "univariate", "dimension", "dimensions", "equallength", "serieslength", "classlabel", "targetlabel", "data")  # fmt: skip


def read_ts(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """@tags, then @data and the cases. Lengths may differ between cases, not between the dimensions of one."""
    lines = source.text().splitlines()
    tags, begin = read_tags(lines, problems)
    labelled, classes, regress = read_label_tags(tags, options, problems)
    cases: list[np.ndarray] = []
    marks: list[int] = []
    words: list[str] = []
    dims = read_count(tags, "dimensions", problems) or read_count(tags, "dimension", problems)
    if tags.get("univariate", (0, ""))[1].strip().casefold() == "true":
        dims = dims or 1
    for line, text in enumerate(lines[begin:], begin + 1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        parts = text.strip().split(":")
        label = parts.pop().strip() if labelled else ""
        dims = dims or len(parts)
        if len(parts) != dims:
            problems.add(f"{source.path}:{line}: expected {dims} dimensions{' and a label' if labelled else ''} split by ':', got {len(parts)}. Fix the line.", "dims")  # fmt: skip
            continue
        case = [
            parse_dimension(p, f"{source.path}:{line} dimension {k}", k, problems)
            for k, p in enumerate(parts)
        ]
        if len({len(c) for c in case}) > 1:
            problems.add(f"{source.path}:{line}: the dimensions have {', '.join(str(len(c)) for c in case[:8])} values; expected the same number in each.", "length")  # fmt: skip
            continue
        if classes and label not in classes:
            problems.add(f"{source.path}:{line}: label '{one_line(label)}' is not one of those in @classLabel: {quote_names(classes)}.", "label")  # fmt: skip
        cases.append(np.stack(case, 1))
        marks.append(line)
        words.append(label)
    if not cases and not problems.groups:
        problems.add(f"{source.path} has @data but no sequences after it.")
    problems.raise_if_any()
    y: np.ndarray | None = None
    if labelled and options.kind != "next":
        y = np.array(words, dtype=object)
        if regress:
            y = parse_targets(words, marks, source, problems)
    features = tuple(f"dim{k}" for k in range(dims))
    lengths = np.array([len(c) for c in cases])
    starts, of = np.cumsum(lengths) - lengths, np.repeat(np.arange(len(cases)), lengths)

    def where(row: int, column: str) -> str:
        at = f" value {row - starts[of[row]] + 1}" if column in features else ""
        return f"{source.path}:{marks[of[row]]} column '{column}'{at}"

    recording = Sheet(
        source.path, source.sha256, features, np.concatenate(cases), lengths, [str(i) for i in range(len(cases))], where, np.arange(len(of)),
        targets=("label",) if y is not None else (), y=y, y_per="sequence", has_names=False,
    )  # fmt: skip
    return refuse_bad_values(recording, options, problems)


def read_tags(lines: list[str], problems: Problems) -> tuple[dict[str, tuple[int, str]], int]:
    """({tag: (line, rest)}, the line after @data)."""
    tags: dict[str, tuple[int, str]] = {}
    for line, text in enumerate(lines, 1):
        text = text.strip()
        if not text or text.startswith("#"):
            continue
        tag, _, rest = text[1:].partition(" ")
        if not text.startswith("@"):
            problems.refuse(
                f"{problems.path}:{line}: expected a tag such as @problemName or @data, got '{one_line(text)}'."
            )
        if tag.casefold() not in TAGS:
            problems.add(f"{problems.path}:{line}: unknown tag '@{one_line(tag)}'; known: {', '.join('@' + t for t in TAGS)}.")  # fmt: skip
        elif tag.casefold() in tags:
            problems.add(f"{problems.path}:{line}: tag '@{one_line(tag)}' appears twice (first at line {tags[tag.casefold()][0]}).")  # fmt: skip
        tags.setdefault(tag.casefold(), (line, rest.strip()))
        if tag.casefold() == "data":
            break
    line, rest = tags.get("timestamps", (0, "false"))
    if rest.casefold() != "false":
        problems.add(f"{problems.path}:{line}: @timestamps {one_line(rest)} is not read: steps are taken as regular, and times would be lost. Resample, write plain values and '@timestamps false'.")  # fmt: skip
    if "data" not in tags:
        problems.add(f"{problems.path}: there is no @data line, so no sequences.")
    problems.raise_if_any()
    return tags, tags["data"][0]


def read_label_tags(
    tags: dict[str, tuple[int, str]], options: Options, problems: Problems
) -> tuple[bool, list[str], bool]:
    """(whether lines end with a label, the classes that are declared, whether labels are quantities)."""
    given = {t: tags[t][1].split() for t in ("classlabel", "targetlabel") if t in tags}
    on = {t: bool(words) and words[0].casefold() == "true" for t, words in given.items()}
    kind = "regress" if on.get("targetlabel") else "classify"
    labelled = any(on.values())
    if options.kind != "next":
        if not labelled:
            problems.refuse(f"{problems.path}: there is no '@classLabel true ...' or '@targetLabel true', so there is no target. Pass --kind next to predict the next step.")  # fmt: skip
        if (
            options.kind
            and options.kind != kind
            and not (kind == "classify" and not given["classlabel"][1:])
        ):
            problems.refuse(f"{problems.path}: the file is labelled for --kind {kind} (@{'targetLabel' if kind == 'regress' else 'classLabel'}); --kind {options.kind} was asked for.")  # fmt: skip
    classes = given.get("classlabel", [])[1:] if on.get("classlabel") else []
    return labelled, classes, (options.kind or kind) == "regress"


def read_count(tags: dict[str, tuple[int, str]], tag: str, problems: Problems) -> int:
    line, rest = tags.get(tag, (0, ""))
    if rest and not (rest.isascii() and rest.isdigit() and len(rest) < 7 and int(rest)):
        problems.refuse(
            f"{problems.path}:{line}: @{tag} must be a positive whole number; got '{one_line(rest)}'."
        )
    return int(rest) if rest else 0


def parse_dimension(text: str, where: str, k: int, problems: Problems) -> np.ndarray:
    cells = text.split(",")
    values, wrong = parse_numbers(cells, PLAIN_OPTIONS)
    for i, what in wrong:
        problems.add(f"{where} value {i + 1}: {what}", ("cells", k))
    return values


def parse_targets(
    words: list[str], marks: list[int], source: LoadedFile, problems: Problems
) -> np.ndarray:
    values = np.full((len(words), 1), math.nan)
    for i, word in enumerate(words):
        value = parse_number(word, PLAIN_OPTIONS)
        if isinstance(value, str):
            problems.add(f"{source.path}:{marks[i]} column 'label': {value}", "targets")
        else:
            values[i, 0] = value
    return values

"""Text files of the UEA and UCR archives (.ts).

One sequence per line, its dimensions separated by ':', the values of a dimension by ','.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ...errors import one_line
from .parsing import parse_number, parse_numbers
from .sheet import Options, Problems, Sheet, quote_names, refuse_bad_values
from .source import LoadedFile

PLAIN_OPTIONS = Options()  # decimal points, no grouping of digits
TAGS = (
    "problemname", "timestamps", "missing", "univariate", "dimension", "dimensions", "equallength",
    "serieslength", "classlabel", "targetlabel", "data",
)  # fmt: skip

Tags = dict[str, tuple[int, str]]  # (line, text after the tag), by tag


class Labels(NamedTuple):
    """What the tags say about labels."""

    exist: bool  # lines end with a label
    classes: list[str]  # those that are declared
    are_numbers: bool  # quantities to predict, not classes


class Cases(NamedTuple):
    """The sequences of a file: values [T, dims], line and label of each."""

    values: list[np.ndarray]
    lines: list[int]
    labels: list[str]


def read_ts(source: LoadedFile, options: Options, problems: Problems) -> Sheet:
    """Read @tags, then the sequences after @data.

    Lengths may differ between sequences, but not between the dimensions of one.
    """
    lines = source.text().splitlines()
    tags, begin = read_tags(lines, problems)
    labels = read_label_tags(tags, options, problems)
    dims = read_count(tags, "dimensions", problems) or read_count(tags, "dimension", problems)
    if not dims and tags.get("univariate", (0, ""))[1].strip().casefold() == "true":
        dims = 1
    cases = read_cases(lines, begin, dims, labels, problems)
    y: np.ndarray | None = None
    if labels.exist and options.kind != "next":
        if labels.are_numbers:
            y = parse_targets(cases, problems)
        else:
            y = np.array(cases.labels, dtype=object)
    features = tuple(f"dim{k}" for k in range(cases.values[0].shape[1]))
    lengths = np.array(list(map(len, cases.values)))
    starts = np.cumsum(lengths) - lengths
    case_of_row = np.repeat(np.arange(len(lengths)), lengths)

    def where(row: int, column: str) -> str:
        case = case_of_row[row]
        place = f"{source.path}:{cases.lines[case]} column '{column}'"
        return f"{place} value {row - starts[case] + 1}" if column in features else place

    sheet = Sheet(
        source.path,
        source.sha256,
        features,
        np.concatenate(cases.values),
        lengths,
        list(map(str, range(len(lengths)))),
        where,
        np.arange(len(case_of_row)),
        targets=() if y is None else ("label",),
        y=y,
        y_per="sequence",
        has_names=False,
    )
    return refuse_bad_values(sheet, options, problems)


def read_tags(lines: list[str], problems: Problems) -> tuple[Tags, int]:
    """The tags before the data, and the number of the @data line, from 1.

    Blank lines and comments (#) are skipped. Files with timestamps are refused.
    """
    tags: Tags = {}
    for line, text in enumerate(lines, 1):
        text = text.strip()
        if not text or text.startswith("#"):
            continue
        if not text.startswith("@"):
            problems.refuse(
                f"{problems.path}:{line}: expected a tag such as @problemName or @data, got "
                f"'{one_line(text)}'."
            )
        word, _, rest = text[1:].partition(" ")
        tag = word.casefold()
        if tag not in TAGS:
            known = ", ".join(f"@{name}" for name in TAGS)
            problems.add(
                f"{problems.path}:{line}: unknown tag '@{one_line(word)}'; known: {known}."
            )
        elif tag in tags:
            problems.add(
                f"{problems.path}:{line}: tag '@{one_line(word)}' appears twice (first at line "
                f"{tags[tag][0]})."
            )
        tags.setdefault(tag, (line, rest.strip()))  # of a tag that appears twice, the first
        if tag == "data":
            break
    line, rest = tags.get("timestamps", (0, "false"))
    if rest.casefold() != "false":
        problems.add(
            f"{problems.path}:{line}: @timestamps {one_line(rest)} cannot be read: steps are taken "
            "to be regular, and the times would be lost. Resample, write plain values and "
            "'@timestamps false'."
        )
    if "data" not in tags:
        problems.add(f"{problems.path}: there is no @data line, so there are no sequences.")
    problems.raise_if_any()
    return tags, tags["data"][0]


def read_label_tags(tags: Tags, options: Options, problems: Problems) -> Labels:
    """What @classLabel and @targetLabel say about labels; another options.kind is refused."""
    words = {tag: tags[tag][1].split() for tag in ("classlabel", "targetlabel") if tag in tags}
    has_classes = is_true(words.get("classlabel", []))
    has_numbers = is_true(words.get("targetlabel", []))
    classes = words["classlabel"][1:] if has_classes else []
    kind = "regress" if has_numbers else "classify"
    if options.kind != "next":
        if not has_classes and not has_numbers:
            problems.refuse(
                f"{problems.path}: there is no '@classLabel true ...' or '@targetLabel true', so "
                "there is no target. Pass --kind next to predict the next step."
            )
        # Without declared classes, labels may be numbers.
        may_be_numbers = kind == "classify" and not classes
        if options.kind and options.kind != kind and not may_be_numbers:
            tag = "targetLabel" if has_numbers else "classLabel"
            problems.refuse(
                f"{problems.path}: the file is labelled for --kind {kind} (@{tag}), not for --kind "
                f"{options.kind}."
            )
    are_numbers = (options.kind or kind) == "regress"
    return Labels(has_classes or has_numbers, classes, are_numbers)


def is_true(words: list[str]) -> bool:
    """Whether the text after a tag begins with "true"."""
    return bool(words) and words[0].casefold() == "true"


def read_count(tags: Tags, tag: str, problems: Problems) -> int:
    """The number after a tag; 0 if the tag is not there. More than six digits are refused."""
    line, text = tags.get(tag, (0, ""))
    if not text:
        return 0
    is_count = text.isascii() and text.isdigit() and len(text) < 7 and int(text) > 0
    if not is_count:
        problems.refuse(
            f"{problems.path}:{line}: @{tag} must be a positive whole number; got "
            f"'{one_line(text)}'."
        )
    return int(text)


def read_cases(
    lines: list[str], begin: int, dims: int, labels: Labels, problems: Problems
) -> Cases:
    """The sequences after line `begin`, of `dims` dimensions each; 0: as many as the first has."""
    cases = Cases([], [], [])
    for line, text in enumerate(lines[begin:], begin + 1):
        if not text.strip() or text.lstrip().startswith("#"):
            continue
        place = f"{problems.path}:{line}"
        parts = text.strip().split(":")
        label = parts.pop().strip() if labels.exist else ""
        dims = dims or len(parts)
        if len(parts) != dims:
            and_label = " and a label" if labels.exist else ""
            problems.add(
                f"{place}: expected {dims} dimensions{and_label} separated by ':', got "
                f"{len(parts)}. Fix the line.",
                "dims",
            )
            continue
        columns = []
        for k, part in enumerate(parts):
            columns.append(parse_dimension(part, f"{place} dimension {k}", k, problems))
        sizes = list(map(len, columns))
        if len(set(sizes)) > 1:
            problems.add(
                f"{place}: the dimensions have {', '.join(map(str, sizes[:8]))} values; expected "
                "the same number in each.",
                "length",
            )
            continue
        if labels.classes and label not in labels.classes:
            problems.add(
                f"{place}: label '{one_line(label)}' is not one of those in @classLabel: "
                f"{quote_names(labels.classes)}.",
                "label",
            )
        cases.values.append(np.stack(columns, 1))
        cases.lines.append(line)
        cases.labels.append(label)
    if not cases.values and not problems.groups:
        problems.add(f"{problems.path} has @data but no sequences after it.")
    problems.raise_if_any()
    return cases


def parse_dimension(text: str, where: str, k: int, problems: Problems) -> np.ndarray:
    """The values of dimension k of one sequence; `where` begins a complaint."""
    values, wrong = parse_numbers(text.split(","), PLAIN_OPTIONS)
    for i, complaint in wrong:
        problems.add(f"{where} value {i + 1}: {complaint}", ("cells", k))
    return values


def parse_targets(cases: Cases, problems: Problems) -> np.ndarray:
    """The labels of the n sequences as numbers, [n, 1]; those that are none become problems."""
    values = np.full((len(cases.labels), 1), math.nan)
    for i, label in enumerate(cases.labels):
        value = parse_number(label, PLAIN_OPTIONS)
        if isinstance(value, str):
            place = f"{problems.path}:{cases.lines[i]} column 'label'"
            problems.add(f"{place}: {value}", "targets")
        else:
            values[i, 0] = value
    return values

"""Overview: what was read from the files, so that a user sees it before training begins."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from ..errors import one_line
from .ahead import ahead_of
from .blocks import block_slices
from .cutting import Part, PreparedSheet
from .description import Description, JsonDict
from .files.characters import show_symbol
from .files.sheet import Sheet
from .prepared import StoredSheet, gaps_in
from .step_range import StepRange

NAMES_SHOWN = 12  # features, targets or classes in a line
LABEL_WIDTH = 10  # of the first column of the text


@dataclass(frozen=True)
class FileOverview:
    """What one file holds, before gaps are dealt with.

    rows      of a table; for an array or a wide table the steps of all sequences
    lengths   the least, the median and the largest number of steps; [] for samples without time
    layout    what the axes of an array, or the columns of a wide table, were taken for
    """

    name: str
    rows: int
    sequences: int
    lengths: list[float]
    layout: str = ""


@dataclass(frozen=True)
class GapOverview:
    """What was missing, and what was done about it, in all files together."""

    policy: str  # of --missing
    values: int = 0  # missing inputs
    rows_left_out: int = 0  # or samples without time
    values_filled: int = 0
    values_masked: int = 0
    masked: list[str] = field(default_factory=list)  # features
    is_prepared: bool = False  # gaps were dealt with when the set was written


@dataclass(frozen=True)
class SplitOverview:
    """What one split holds: pieces are sequences, windows of them, or samples."""

    pieces: int
    steps: int  # of all pieces; of samples without time, the places of their features


@dataclass(frozen=True)
class Overview:
    """What was read, in plain JSON types: `pairs` and `text` show it, `to_dict` returns it.

    unit       "sequence", "window" or "sample": what a piece is
    predicted  targets, or for kind "next" and "reconstruct" the features
    classes    how often each label occurs in all splits, by pieces or (at "every") by rows
    hints      features that look like a time or an index
    notes      what was chosen for the user
    symbols    what a symbol is called, if classes are symbols; see `Description`
    """

    unit: str
    kind: str
    at: str
    window: int | None
    files: dict[str, FileOverview]
    features: list[str]
    shape: list[int] | None
    predicted: list[str]
    classes: dict[str, int]
    gaps: GapOverview
    splits: dict[str, SplitOverview]
    hints: list[str]
    notes: list[str]
    symbols: str = ""

    def to_dict(self) -> JsonDict:
        """Return the overview in plain JSON types, with its text under "lines"."""
        lines = [list(pair) for pair in self.pairs()]
        return asdict(self) | {"lines": lines}

    def pairs(self) -> list[tuple[str, str]]:
        """Return (label, text) of each line; a label is empty where a line belongs to the last."""
        lines: list[tuple[str, str]] = []
        for split, file in self.files.items():
            label = "data" if len(self.files) == 1 else split
            lines.append((label, self._describe_file(file)))
        lines.append(("inputs", self._describe_inputs()))
        lines += self._describe_target()
        lines += [("", hint) for hint in self.hints]
        lines += [("missing", text) for text in self._describe_gaps()]
        lines.append(("split", self._describe_splits()))
        labels = ["note"] + [""] * len(self.notes)
        lines += zip(labels, self.notes, strict=False)
        return lines

    def text(self, width: int = 100) -> str:
        """Return the lines in two columns, folded at words to this width."""
        lines = []
        for label, content in self.pairs():
            lines += textwrap.wrap(
                content,
                max(width, 2 * LABEL_WIDTH),
                initial_indent=label.ljust(LABEL_WIDTH),
                subsequent_indent=" " * LABEL_WIDTH,
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(lines)

    def _describe_file(self, file: FileOverview) -> str:
        """Rows, sequences and lengths of a file."""
        name = one_line(file.name)
        layout = f"; {file.layout}" if file.layout else ""
        if not file.lengths:
            return f"{name}: {count(file.sequences, 'sample')}{layout}"
        least, median, most = file.lengths
        lengths = f"of {count(int(most), 'step')}"
        if least < most:
            lengths = f"of {least:,.0f} to {most:,.0f} steps (median {median:,g})"
        sequences = count(file.sequences, "sequence")
        if layout:  # no rows of steps
            return f"{name}: {sequences} {lengths}{layout}"
        return f"{name}: {count(file.rows, 'row')} in {sequences} {lengths}"

    def _describe_inputs(self) -> str:
        """The features by name; of images the shape."""
        if self.shape is not None and len(self.shape) > 1:
            return f"samples of shape {self.shape}"
        return f"{count(len(self.features), 'feature')}: {shorten(self.features)}"

    def _describe_target(self) -> list[tuple[str, str]]:
        """What is predicted, and the classes with their counts."""
        names = shorten(self.predicted)
        if self.kind == "next":
            is_all = len(self.predicted) == len(self.features)
            which = f"every feature: {names}" if is_all else names
            return [("predicts", f"the next step of {which}")]
        if self.kind == "reconstruct":
            return [("predicts", "the inputs themselves")]
        where = " at every step" if self.at == "every" else ""
        if self.kind == "regress":
            return [("predicts", f"{names}{where} ({count(len(self.predicted), 'number')})")]
        show = show_symbol if self.symbols else one_line
        counted = [f"{show(label)} ({n:,})" for label, n in self.classes.items()]
        classes = f"{len(counted)} classes: {join_some(counted)}"
        return [("predicts", f"{names}{where}, {classes}")]

    def _describe_gaps(self) -> list[str]:
        """What was missing, if anything was or a policy was chosen."""
        gaps = self.gaps
        if gaps.policy == "refuse":
            return []
        unit = "sample" if self.unit == "sample" else "row"
        parts = []
        if gaps.rows_left_out:
            rows = count(gaps.rows_left_out, unit)
            parts.append(f"{rows} with a missing {self._needed()} left out (--missing drop)")
        if gaps.values_filled:
            values = count(gaps.values_filled, "value")
            parts.append(f"{values} filled from the row before (--missing ffill)")
        if gaps.values_masked:
            values = count(gaps.values_masked, "value")
            marked = f"in {shorten(gaps.masked)}; another input of the network marks them"
            parts.append(f"{values} masked, {marked} (--missing mask)")
        after = " after `coadjoint prepare`" if gaps.is_prepared else ""
        return parts or [f"no input is missing{after} (--missing {gaps.policy})"]

    def _needed(self) -> str:
        """What a row or sample is left out without; those without a target may have a note."""
        has_targets = self.kind in ("classify", "regress") and self.at == "every"
        return "input or target" if has_targets and self.unit != "sample" else "input"

    def _describe_splits(self) -> str:
        """The numbers of pieces, and of their steps, in each split."""
        parts: list[str] = []
        for name, split in self.splits.items():
            pieces = f"{split.pieces:,}"
            if not parts:  # the noun once
                pieces = count(split.pieces, self.unit)
            steps = "" if self.unit == "sample" else f" ({count(split.steps, 'step')})"
            parts.append(f"{name} {pieces}{steps}")
        text = ", ".join(parts)
        if self.window is None:
            return text
        most = "" if self.at == "last" else "at most "
        return f"{text}; windows of {most}{count(self.window, 'step')}"


def make_overview(
    sheets: Mapping[str, Sheet],
    cuts: Mapping[str, PreparedSheet],
    parts: Mapping[str, Part],
    description: Description,
    notes: Sequence[str],
) -> Overview:
    """Return what was read.

    Args:
        sheets: The files as they were read, by split; the training file first.
        cuts: The same files with gaps dealt with, cut into pieces.
        parts: The pieces of each split.
        description: The description of the data.
        notes: What was chosen for the user. Those on gaps are said by the counts already.
    """
    first = sheets["train"]
    d = description
    predicted = d.numeric if d.kind in ("next", "reconstruct") else d.targets
    if d.kind == "next":
        predicted = ahead_of(d).output_names
    unit = first.unit
    if d.window is not None:
        unit = "window"
    return Overview(
        unit=unit,
        kind=d.kind,
        at=d.at,
        window=d.window,
        files={name: overview_of_file(sheet) for name, sheet in sheets.items()},
        features=list(d.features),
        shape=None if d.sample_shape is None else list(d.sample_shape),
        predicted=list(predicted),
        classes=count_classes(parts, d),
        gaps=overview_of_gaps(sheets, cuts, d),
        splits={name: overview_of_split(part) for name, part in parts.items() if part.chosen},
        hints=hints_on_time(first, d),
        notes=[note for note in notes if note not in said_by_counts(sheets, cuts)],
        symbols=d.symbols,
    )


def said_by_counts(sheets: Mapping[str, Sheet], cuts: Mapping[str, PreparedSheet]) -> set[str]:
    """Return the notes on gaps, which the counts of an overview say already."""
    said: set[str] = set()
    for name, cut in cuts.items():
        said.update(cut.sheet.notes[len(sheets[name].notes) :])
    return said


def overview_of_file(sheet: Sheet) -> FileOverview:
    """Return what a file holds."""
    lengths: list[float] = []
    rows = len(sheet.lengths)
    if sheet.shape is None:
        rows = len(sheet.u)
        figures = (np.min(sheet.lengths), np.median(sheet.lengths), np.max(sheet.lengths))
        lengths = [float(figure) for figure in figures]
    return FileOverview(Path(sheet.path).name, rows, len(sheet.lengths), lengths, sheet.layout)


def overview_of_gaps(
    sheets: Mapping[str, Sheet], cuts: Mapping[str, PreparedSheet], description: Description
) -> GapOverview:
    """Return how many values were missing, and what was done about them."""
    policy = str(description.reading.get("missing", "refuse"))
    values = sum(int(gaps_in(sheet).sum()) for sheet in sheets.values())
    lost = 0
    for name, sheet in sheets.items():
        after = cuts[name].sheet
        lost += len(sheet.u) - len(after.u)
        if sheet.shape is not None:  # a sample is lost as a whole, with all its rows
            lost += len(sheet.lengths) - len(after.lengths) - (len(sheet.u) - len(after.u))
    return GapOverview(
        policy,
        values,
        rows_left_out=lost,
        values_filled=values if policy == "ffill" else 0,
        values_masked=values if policy == "mask" else 0,
        masked=list(description.masked),
        is_prepared=any(isinstance(sheet, StoredSheet) for sheet in sheets.values()),
    )


def overview_of_split(part: Part) -> SplitOverview:
    """Return the number of pieces in a split, and of their steps."""
    return SplitOverview(len(part.chosen), sum(stop - start for _, start, stop in part.pieces))


def count_classes(parts: Mapping[str, Part], description: Description) -> dict[str, int]:
    """Return how often each label occurs in all splits; {} if there are none."""
    if not description.labels:
        return {}
    counts = np.zeros(len(description.labels), np.int64)
    for part in parts.values():
        for i in range(len(part.chosen)):
            target = part.target(i, description.at)
            known = target[~np.isnan(target)].astype(np.int64)
            counts += np.bincount(known, minlength=len(counts))
    return dict(zip(description.labels, counts.tolist(), strict=True))


def hints_on_time(sheet: Sheet, description: Description) -> list[str]:
    """Return a sentence on each feature that looks like a time or an index."""
    if sheet.steps:
        return []  # the one feature of a wide table
    steps = equal_steps(sheet)
    others = [name for name in sheet.features if name not in steps]
    hints = []
    for name, step in steps.items():
        subject = one_line(name)
        if description.kind == "next":
            subject += ", which is predicted too,"
        rows = f"by {step:g} from row to row, like a time or an index"
        hints.append(f"{subject} increases {rows}. {advise_on_time(name, others, sheet)}")
    return hints


def advise_on_time(name: str, others: Sequence[str], sheet: Sheet) -> str:
    """Return what to do about a feature that may be a time; others: features that are not."""
    if not sheet.has_names:
        return "If it is one, leave it out of the array."
    if not others:
        return "If it is one, there is no other feature to learn from."
    ways = []
    role = "id" if sheet.shape is not None else "time"
    if not sheet.columns.get(role):
        ways.append(f"--{role} {quote(name)}")
    if len(others) <= NAMES_SHOWN:
        ways.append(f"--features {quote(','.join(others))}")
    else:
        ways.append("--features with the columns to use")
    return f"If it is one, pass {' or '.join(ways)}."


def equal_steps(sheet: Sheet) -> dict[str, float]:
    """Return the features that increase by equal steps in every sequence, with the step.

    Samples are looked at in the order of their file.
    """
    if sheet.shape is not None and len(sheet.shape) > 1:
        return {}  # images and other arrays
    if isinstance(sheet, StoredSheet):
        assert sheet.about is not None
        known: dict[str, float] = sheet.about["equal_steps"]
        return {name: known[name] for name in sheet.features if name in known}
    steps = StepRange(len(sheet.features))
    starts = sheet.starts if sheet.shape is None else np.zeros(1, np.int64)
    for block in block_slices(len(sheet.u), len(sheet.features)):
        of_block = starts[
            np.searchsorted(starts, block.start) : np.searchsorted(starts, block.stop)
        ]
        steps.add(sheet.u[block], of_block - block.start)
    found = steps.equal()
    names = [name for name in sheet.features if name not in sheet.categories]
    places = {name: sheet.features.index(name) for name in names}
    return {name: found[j] for name, j in places.items() if j in found}


def quote(text: str) -> str:
    """Return a word of a command line, in quotes where a shell needs them."""
    return shlex.quote(one_line(text, 200))


def count(number: int, noun: str) -> str:
    """Return a count and its noun: "1 row", "12,000 rows"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorten(names: Sequence[str]) -> str:
    """Return names with commas between them; of many, the first and the last."""
    return join_some([one_line(name) for name in names])


def join_some(words: Sequence[str]) -> str:
    """Return words with commas between them; of many, the first few and the last."""
    if len(words) > NAMES_SHOWN:
        words = [*words[: NAMES_SHOWN - 2], "...", words[-1]]
    return ", ".join(words)

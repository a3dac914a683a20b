"""Classes and what they are taken for: the confusion matrix and the figures of each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .answers import SplitAnswers
from .page_parts import Matrix, MatrixCell, Table, make_table
from .text import NO_VALUE, short_number

MOST_MATRIX_CLASSES = 60  # with more, a matrix is no longer read
MOST_CONFUSIONS = 15  # in the list of the most common ones
FEW_CLASSES = 6  # a matrix of so few needs no list of confusions
SHORT_LABEL = 22  # characters
MOST_ACROSS = 70  # characters of all columns; with more, their labels stand upright
SHADES = 9
FOLDED_ROWS = 15  # a longer table is folded
SHADING = "The darker a cell, the larger its share of the row. Blue: right; orange: wrong."
SHORTENED = "Labels are shortened; the table of classes has them in full."
LEAST_CUT = 8  # characters that all labels share and that are cut


@dataclass(frozen=True)
class Confusion:
    """counts [classes, classes]: how often class i was taken for class j."""

    labels: list[str]
    counts: np.ndarray
    uncounted: int = 0  # wrong answers of rare pairs, which the file does not list

    @classmethod
    def of(cls, labels: list[str], split: SplitAnswers) -> Confusion:
        """The counts of a split."""
        counts = np.zeros((len(labels), len(labels)), dtype=np.int64)
        for true, predicted, count in split.data["confusion"]:
            counts[true, predicted] = count
        return cls(labels, counts, split.data["uncounted"])

    @property
    def support(self) -> np.ndarray:
        """How many targets each class has."""
        support: np.ndarray = self.counts.sum(1)
        return support

    @property
    def recall(self) -> np.ndarray:
        """The share of each class that is recognised; NaN for a class without targets."""
        return _shares(self.counts.diagonal(), self.support)

    @property
    def precision(self) -> np.ndarray:
        """The share of the predictions of each class that are right; NaN for one never said."""
        return _shares(self.counts.diagonal(), self.counts.sum(0))

    @property
    def balanced_accuracy(self) -> float:
        """The mean of the recalls, over the classes that have targets."""
        recall = self.recall[self.support > 0]
        return float(recall.mean()) if len(recall) else float("nan")

    def matrix(self, caption: str, folded: bool) -> Matrix | None:
        """The matrix for the page; None if there are too many classes."""
        K = len(self.labels)
        if K > MOST_MATRIX_CLASSES:
            return None
        shares = self.counts / np.maximum(1, self.support)[:, None]
        cells = []
        for i in range(K):
            row = []
            for j in range(K):
                shade = int(np.ceil(shares[i, j] * SHADES))
                tone = "hit" if i == j else "miss"
                count = int(self.counts[i, j])
                row.append(MatrixCell(f"{count:,}", f"{tone} q{shade}" if count else "zero"))
            cells.append(row)
        short = short_labels(self.labels)
        is_dense = K > FEW_CLASSES * 2
        precision = []
        if not is_dense:  # the table of classes has them, too
            precision = [short_number(float(value), 2) for value in self.precision]
        notes = [SHADING]
        if short != self.labels:
            notes.append(SHORTENED)
        if self.uncounted:
            notes.append(f"{self.uncounted:,} wrong answers of rare pairs are left out.")
        return Matrix(
            caption,
            list(zip(short, self.labels, strict=True)),
            cells,
            [short_number(float(value), 2) for value in self.recall],
            precision,
            is_upright=max(map(len, short)) * K > MOST_ACROSS,
            is_dense=is_dense,
            folded=folded,
            note=" ".join(notes),
        )

    def class_table(self, caption: str) -> Table:
        """Precision, recall, F1 and counts of each class, the worst recall first."""
        with np.errstate(invalid="ignore"):
            f1 = 2 * self.precision * self.recall / (self.precision + self.recall)
        columns = (self.precision, self.recall, f1, self.support, self.counts.sum(0))
        order = np.argsort(np.nan_to_num(self.recall, nan=2.0), kind="stable")
        if len(self.labels) <= FEW_CLASSES * 2:  # few classes are found in their own order
            order = np.arange(len(self.labels))
        rows = []
        for k in order:
            values = [short_number(float(column[k]), 3) for column in columns]
            rows.append([self.labels[k], *values])
        heads = ["class", "precision", "recall", "F1", "support", "predicted"]
        folded = len(rows) > FOLDED_ROWS
        return make_table(caption, heads, rows, "No classes.", (0,), 2000, folded)

    def worst_table(self, caption: str) -> Table | None:
        """The most common confusions; None for a few classes, whose matrix is read at once."""
        if len(self.labels) <= FEW_CLASSES:
            return None
        wrong = self.counts.copy()
        np.fill_diagonal(wrong, 0)
        order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_CONFUSIONS]
        rows = []
        for i, j in zip(*np.unravel_index(order, wrong.shape), strict=True):
            if wrong[i, j]:
                share = wrong[i, j] / self.support[i]
                row = [self.labels[i], self.labels[j], f"{wrong[i, j]:,}", f"{share:.0%}"]
                rows.append(row)
        heads = ["true class", "taken for", "count", "of the class"]
        return make_table(caption, heads, rows, "None: every answer is right.", (0, 1))


def _shares(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """The ratio part / whole, NaN where the whole is 0."""
    return np.where(whole > 0, part / np.maximum(1, whole), np.nan)


def short_labels(labels: Sequence[str], most: int = SHORT_LABEL) -> list[str]:
    """Labels of at most about `most` characters, all different.

    Of long ones, what all of them begin or end with is cut, then the middle. Labels that would
    then be alike have their number before them.
    """
    if max(map(len, labels), default=0) <= most:
        return list(labels)
    begin = count_shared(labels)
    end = count_shared([label[begin:][::-1] for label in labels])
    begin = begin if begin >= LEAST_CUT else 0
    end = end if end >= LEAST_CUT else 0
    short = []
    for label in labels:
        middle = label[begin : len(label) - end].strip() or NO_VALUE
        text = f"{'…' if begin else ''}{middle}{'…' if end else ''}"
        short.append(cut_middle(text, most))
    if len(set(short)) < len(short):
        return [f"{k}: {cut_middle(text, most - 4)}" for k, text in enumerate(short)]
    return short


def count_shared(texts: Sequence[str]) -> int:
    """How many characters all texts begin with, up to the end of a word.

    The first and the last of them in their order tell.
    """
    first = min(texts)
    last = max(texts)
    shared = 0
    while shared < len(first) and first[shared] == last[shared]:
        shared += 1
    while 0 < shared < len(last) and first[shared - 1].isalnum():  # not within a word
        shared -= 1
    return shared


def cut_middle(text: str, most: int) -> str:
    """Text of at most `most` characters, without its middle if it is longer."""
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[: most - 1 - half]}…{text[len(text) - half :]}"

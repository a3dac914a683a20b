"""Outputs of a network as answers: labels or numbers in their units, in the form of the data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..tasks.ahead import ahead_of
from ..tasks.description import Description
from ..tasks.memory import InMemory, Source, is_ragged
from ..tasks.prediction import Prediction, softmax

Answers = np.ndarray | list[np.ndarray]


def labels_of(description: Description) -> list[str] | list[int]:
    """Return the classes: whole numbers, if all labels are, else words.

    Example: labels of a file are words; 007 is no number.
        >>> from coadjoint.models.answers import plain_labels
        >>> plain_labels(["0", "1"]), plain_labels(["0", "007"])
        ([0, 1], ['0', '007'])
    """
    return plain_labels(description.labels)


def plain_labels(labels: list[str]) -> list[str] | list[int]:
    """Return labels as whole numbers if all of them are written as such, else as they are."""
    try:
        numbers = [int(label) for label in labels]
    except ValueError:
        return list(labels)
    is_plain = all(str(number) == label for number, label in zip(numbers, labels, strict=True))
    return numbers if is_plain else list(labels)


def decide(a: np.ndarray, description: Description) -> np.ndarray:
    """Return the answers of pre-outputs a [M, outputs]: [M], or [M, k] for k > 1 numbers.

    A label is None, and a number NaN, where a is NaN. A reconstructed sample has its own shape.
    """
    if description.kind != "classify":
        mean, std = description.target_scale()
        if description.kind == "next":
            a = ahead_of(description).repair(a)
        values = a * std + mean
        if description.kind == "reconstruct":
            return np.asarray(values.reshape(-1, *(description.sample_shape or ())))
        return np.asarray(values[:, 0] if values.shape[1] == 1 else values)
    labels = labels_of(description)
    is_empty = np.isnan(a[:, 0])
    numbers = np.where(is_empty[:, None], 0, a).argmax(-1)
    if not is_empty.any():
        return np.asarray(np.array(labels)[numbers])
    answers = np.array([labels[k] for k in numbers], dtype=object)
    answers[is_empty] = None
    return answers


def probabilities(a: np.ndarray) -> np.ndarray:
    """Return softmax(a), [M, classes]."""
    return softmax(a)


def arrange(answers: np.ndarray, prediction: Prediction, source: Source) -> Answers:
    """Return the answers [M, ...] in the form of the data.

    Tables get one for each row that is asked for, in their order, and so do the steps of a single
    sequence. Arrays with one answer for each sequence get [n, ...]; with several, an array for
    each sequence, which are one array [n, T, ...] if the data came as one.

    Args:
        answers: Of the rows asked for, in their order.
        prediction: The data as they were read.
        source: The data as they were given.
    """
    d = prediction.description
    row = prediction.asked.row
    has_several = prediction.asked.step is not None or len(np.unique(row)) < len(row)
    if not isinstance(source, InMemory):
        return list(split_by_row(answers, row)) if has_several else answers
    is_split = has_several or (d.at == "every" and d.sample_shape is None)
    if source.is_frame or not is_split or is_single(source, d):
        return answers
    parts = list(split_by_row(answers, row))
    is_even = len({len(part) for part in parts}) == 1
    if is_even and not is_ragged(source.inputs) and source.lengths is None:
        return np.stack(parts)
    return parts


def is_single(source: InMemory, description: Description) -> bool:
    """Tell whether arrays are one sequence, [T] or [T, C], and not several."""
    if is_ragged(source.inputs) or source.lengths is not None:
        return False
    axes = np.ndim(source.inputs)
    return axes == 1 or (axes == 2 and len(description.features) > 1)


def split_by_row(answers: np.ndarray, row: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the answers of each sequence; row: the sequence of each answer, ascending."""
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    yield from np.split(answers, starts[1:])

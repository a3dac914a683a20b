"""Digits: 1,797 handwritten digits of 8 x 8 pixels, read in pieces."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from ..errors import InputError, MissingError
from ..objectives.batch import Batch
from .synthetic import agree
from .task import Collection, Scores, Sequences, count_right, rng

EACH = 30  # of each digit, in "valid" and in "test"


class Digits(Collection):
    """Which digit 0..9 an image shows, read `pixels` at a time, row by row; grey values 0..16 divided by 16.

    pixels    1: 64 steps of one input; 8: 8 steps (rows) of eight inputs
    permuted  the 64 pixels in a fixed random order

    The images come with scikit-learn. The split is the same for every seed: 30 of each digit in "valid", 30 in "test" and
    the other 1,197 in "train". Cross-entropy at the last step; metric "accuracy", chance 1/10.
    """

    name = "digits"
    outputs = 10
    output, loss = "softmax", "cross-entropy"
    metric, lower = "accuracy", False

    def __init__(self, pixels: int = 1, permuted: bool = False) -> None:
        if isinstance(pixels, bool) or pixels not in (1, 8):
            raise InputError(f"digits are read 1 or 8 pixels at a time; got pixels={pixels!r}.")
        self.pixels, self.permuted, self.inputs = int(pixels), permuted, int(pixels)
        images, labels = load()
        if permuted:
            images = images[:, rng(0, "digits", "pixels").permutation(64)]
        u = images.reshape(len(images), 64 // pixels, pixels)
        super().__init__(
            {
                split: Sequences(u[index], labels[index])
                for split, index in split_indices(labels).items()
            }
        )

    def score(self, a: Tensor, batch: Batch) -> Scores:
        return {"accuracy": count_right(agree(a, batch.y))}

    def baseline(self) -> dict[str, float]:
        return {"loss": math.log(10), "accuracy": 0.1}


def load() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 64] in 0..1 and labels [1797]."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingError(
            "task 'digits' needs scikit-learn: pip install 'coadjoint[data]'."
        ) from error
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels.astype(np.int64)


def split_indices(labels: np.ndarray) -> dict[str, np.ndarray]:
    """The images of each split."""
    order = rng(0, "digits", "split").permutation(len(labels))
    of = [order[labels[order] == digit] for digit in range(10)]
    cuts = {"valid": slice(EACH), "test": slice(EACH, 2 * EACH), "train": slice(2 * EACH, None)}
    return {
        split: np.sort(np.concatenate([index[cut] for index in of])) for split, cut in cuts.items()
    }

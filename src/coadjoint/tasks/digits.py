"""Digits: 1,797 handwritten digits of 8 x 8 pixels, read in pieces or at once."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from ..errors import InputError, MissingError
from ..objectives.batch import Batch
from .denoising import Denoising
from .generated import is_predicted
from .task import Collection, Samples, Scores, Sequences, count_right, pairs_of_text, rng

EACH = 30  # images of each digit in "valid", and in "test"
PIXELS = 64
IMAGE = (1, 8, 8)


class DigitClasses(Collection):
    """Tell which digit 0..9 an image shows: what its readings by step and at once share."""

    outputs = 10
    output = "softmax"
    loss = "cross-entropy"
    metric = "accuracy"
    lower = False

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Return the accuracy of the largest outputs."""
        return {"accuracy": count_right(is_predicted(a, batch.y))}

    def baseline(self) -> dict[str, float]:
        """Return the metrics of a uniform guess."""
        return {"loss": math.log(10), "accuracy": 0.1}

    def denoising(self, noise: float) -> NoisyDigits:
        """Return the task of restoring the images from noisy ones."""
        return NoisyDigits(noise)


class Digits(DigitClasses):
    """Tell which digit 0..9 an image shows, reading it row by row.

    pixels    1: 64 steps of one input; 8: 8 steps (rows) of eight inputs
    permuted  whether the 64 pixels come in a fixed random order

    The images come with scikit-learn; their grey values 0..16 are divided by 16. The split is the
    same for every seed: 30 of each digit in "valid", 30 in "test", and the other 1,197 in "train".
    Cross-entropy at the last step; metric "accuracy", chance 1/10.
    """

    name = "digits"

    def __init__(self, pixels: int = 1, permuted: bool = False) -> None:
        if isinstance(pixels, bool) or pixels not in (1, 8):
            raise InputError(f"digits are read 1 or 8 pixels at a time; got pixels={pixels!r}.")
        self.pixels = int(pixels)
        self.permuted = permuted
        self.inputs = self.pixels
        images, labels = load_images()
        if permuted:
            images = images[:, rng(0, "digits", "pixels").permutation(PIXELS)]
        u = images.reshape(len(images), PIXELS // pixels, pixels)
        sets = {}
        for split, index in split_indices(labels).items():
            sets[split] = Sequences(u[index], labels[index])
        super().__init__(sets)


class FlatDigits(DigitClasses):
    """Tell which digit 0..9 an image shows, from its 64 pixels at once: a vector without time.

    Images, split and metric are those of `Digits`.
    """

    name = "digits-flat"
    inputs = PIXELS
    shape = (PIXELS,)
    image_shape = IMAGE

    def __init__(self) -> None:
        super().__init__(load_samples(self.name, self.shape))


class DigitImages(DigitClasses):
    """Tell which digit 0..9 an image shows, as one channel of 8 x 8 pixels, for convolutions.

    Images, split and metric are those of `Digits`.
    """

    name = "digits-image"
    inputs = PIXELS
    shape = IMAGE

    def __init__(self) -> None:
        super().__init__(load_samples(self.name, self.shape))


class NoisyDigits(Denoising):
    """Restore the 64 pixels of a digit from their noisy copies, for an autoencoder.

    noise  the standard deviation of the noise; pixels are in 0..1

    Images and split are those of `Digits`; metric "mse", the squared error per pixel.
    """

    image_shape = IMAGE

    def __init__(self, noise: float = 0.2) -> None:
        name = "digits-denoise"
        super().__init__(name, load_samples(name, (PIXELS,)), noise)

    def show(self, a: Tensor, y: Tensor) -> list[tuple[str, str]]:
        """Return the rows of pixels as figures 0 (white) to 9 (black): "00593000 ..."."""
        return pairs_of_text(draw_rows, y, a)


def draw_rows(pixels: Tensor) -> str:
    """Return an image [64] as its eight rows, one figure 0..9 for each pixel in 0..1."""
    figures = (pixels * 9).round().clamp(0, 9).nan_to_num().long().tolist()
    rows = ["".join(map(str, figures[k : k + 8])) for k in range(0, PIXELS, 8)]
    return " ".join(rows)


def load_samples(task: str, shape: tuple[int, ...]) -> dict[str, Samples]:
    """Return the images of each split in this shape, with their labels. task: for the error."""
    images, labels = load_images(task)
    x = images.reshape(len(images), *shape)
    splits = split_indices(labels)
    return {split: Samples(x[index], labels[index]) for split, index in splits.items()}


def load_images(task: str = "digits") -> tuple[np.ndarray, np.ndarray]:
    """Return the images [1797, 64] in 0..1 and their labels [1797]. task: for the error."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingError(
            f"task '{task}' needs scikit-learn: pip install 'coadjoint[data]'."
        ) from error
    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32), labels.astype(np.int64)


def split_indices(labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the numbers of the images in each split, in ascending order."""
    order = rng(0, "digits", "split").permutation(len(labels))
    valid = []
    test = []
    train = []
    for digit in range(10):
        images = order[labels[order] == digit]  # their numbers, in random order
        valid.append(images[:EACH])
        test.append(images[EACH : 2 * EACH])
        train.append(images[2 * EACH :])
    splits = {"valid": valid, "test": test, "train": train}
    return {split: np.sort(np.concatenate(index)) for split, index in splits.items()}

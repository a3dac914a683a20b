"""Predictions for new sequences, written to a file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from ..errors import StorageError, check_path, shown
from ..tasks.description import Path_
from ..tasks.prediction import Prediction
from .files import replacing


def write_predictions(prediction: Prediction, path: Path_, outputs: Iterable[Tensor | np.ndarray]) -> None:
    """Predictions as CSV: the rows of `prediction.rows(outputs)`.

    The file appears whole or not at all; the input is never written over."""
    check_path("path", path)
    path = Path(path)
    if path.exists() and prediction.source.exists() and path.samefile(prediction.source):
        raise StorageError(
            f"{shown(path, 400)} is the file the sequences were read from. Write the predictions elsewhere."
        )
    with replacing(path) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8", newline="")
        csv.writer(text, lineterminator="\n").writerows(prediction.rows(outputs))
        text.flush()
        text.detach()

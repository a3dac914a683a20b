"""Whether data that are judged are those of training, by their SHA-256 sum."""

from __future__ import annotations

import numpy as np

from ..tasks.cutting import count_held_out
from ..tasks.description import JsonDict
from ..tasks.new_data import targets_of
from ..tasks.prediction import Prediction
from ..tasks.shares import FEWEST

TOO_GOOD = "these figures are too good."


def note_on_training(prediction: Prediction, settings: JsonDict) -> str | None:
    """Return a sentence on how much of the data was for training; None if they are other data.

    Args:
        prediction: The data, with their targets.
        settings: Those of training; they hold the shares that were split off.
    """
    d = prediction.description
    sum_then = d.files.get("train", {}).get("sha256")
    if sum_then is None or sum_then != prediction.cut.sheet.sha256:
        return None
    n = count_sequences(prediction)
    held_out = held_out_shares(settings)
    if held_out is None:
        return (
            f"The model was trained on these data, apart from what was held out of them: {TOO_GOOD}"
        )
    if not any(held_out):
        return f"All of these data were used for training: {TOO_GOOD}"
    percentage = f"{100 * (1 - sum(held_out)):.3g}%"
    if n == 1:  # it is split in order of time
        rows = f"{d.symbols}s" if d.symbols else "rows"
        return f"The first {percentage} of the {rows} were used for training: {TOO_GOOD}"
    if d.at == "every" and n < FEWEST:  # they may have been split in order of time, each for itself
        return f"{percentage} of these data were used for training: {TOO_GOOD}"
    used = n - sum(count_held_out(n, share) for share in held_out)
    return f"{used:,} of {n:,} {prediction.unit}s were used for training: {TOO_GOOD}"


def count_sequences(prediction: Prediction) -> int:
    """Return how many sequences have a target, as those that training could use."""
    of_piece = np.array([piece.sequence for piece in prediction.cut.pieces])
    if prediction.description.at != "every":
        has_target = ~np.isnan(targets_of(prediction)).any(1)
        of_piece = of_piece[has_target]
    return len(np.unique(of_piece))


def held_out_shares(settings: JsonDict) -> list[float] | None:
    """Return the shares of the training file that were held out; None if they are not known.

    They follow the share of training, which is the first of two or three.
    """
    of_data = settings.get("data")
    if not isinstance(of_data, dict):
        return None
    split = of_data.get("split")
    if split is None and of_data.get("valid") and of_data.get("test"):
        return []
    if not isinstance(split, list | tuple) or len(split) < 2:
        return None
    if not all(isinstance(share, int | float) for share in split):
        return None
    return list(split[1:])

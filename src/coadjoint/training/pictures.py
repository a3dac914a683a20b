"""Pictures of a few held-out samples, for the report: inputs and, of an autoencoder, outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ..objectives.batch import Batch
from ..tasks.task import Task
from .json_types import JsonObject
from .picture_schema import GREYS, MOST_PIXELS


def make_pictures(task: Task, batch: Batch, outputs: Tensor, k: int) -> JsonObject | None:
    """The first `k` samples of a batch as pictures; None if they are not images.

    outputs: the pre-outputs a [B, ...] for this batch. If the targets are images as well, those of
    an autoencoder, outputs and targets are drawn, too.

    Returns "size", [channels, height, width] with 1 channel (grey) or 3; "range", the values drawn
    black and white; "rows" of {"label", "images"}, an image as whole numbers 0..255 in the order of
    its channels, rows and columns; and "scaled_from", [height, width], if images were larger.
    """
    inputs = task.as_images(batch.u[:k].detach().cpu())
    if inputs is None:
        return None
    drawn = {"input": inputs}
    is_restored = task.output == "identity" and batch.y[0].numel() == inputs[0].numel()
    if is_restored:
        target = task.as_images(batch.y[:k].detach().cpu())
        output = task.as_images(outputs[:k].detach().cpu())
        assert target is not None
        assert output is not None
        is_noisy = not torch.equal(inputs, target)
        drawn = {"noisy input" if is_noisy else "input": inputs, "reconstruction": output}
        if is_noisy:
            drawn["clean target"] = target
        low, high = value_range(target)
    else:
        low, high = value_range(inputs)
    rows = []
    for label, pixels in drawn.items():
        greys = ((scale_down(pixels) - low) / (high - low) * GREYS).nan_to_num(0.0)
        images = greys.round().clamp(0, GREYS).long().flatten(1).tolist()
        rows.append({"label": label, "images": images})
    pictures: JsonObject = {
        "size": list(scale_down(inputs).shape[1:]),
        "range": [low, high],
        "rows": rows,
    }
    full = list(inputs.shape[2:])
    if full != pictures["size"][1:]:
        pictures["scaled_from"] = full
    return pictures


def value_range(pixels: Tensor) -> tuple[float, float]:
    """The least and the greatest value, with 6 digits; the greatest is larger in any case."""
    low, high = (float(f"{x:.6g}") for x in pixels.aminmax())
    if abs(low) < 1e-6 * high:  # rounding, of a 0 that was scaled and scaled back
        low = 0.0
    return low, high if high > low else low + 1


def scale_down(pixels: Tensor) -> Tensor:
    """Images [B, channels, height, width] of at most MOST_PIXELS along a side, in 1 or 3 channels.

    Larger ones are averaged over areas, and other numbers of channels over channels.
    """
    pixels = pixels.double()
    if pixels.shape[1] not in (1, 3):
        pixels = pixels.mean(1, keepdim=True)
    height, width = pixels.shape[2:]
    shrink = max(1.0, max(height, width) / MOST_PIXELS)
    if shrink == 1:
        return pixels
    smaller = (math.ceil(height / shrink), math.ceil(width / shrink))
    return adaptive_avg_pool2d(pixels, smaller)

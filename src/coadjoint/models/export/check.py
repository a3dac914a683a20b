"""Does an exported network answer as the network itself does?

Both read random columns in the user's units: numbers around the mean of training, gaps where a
column may have them, words that training knew and did not know. The network reads them by the
functions that read files, the exported one by what was written into it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...networks.chain import Chain
from ...networks.interface import Net
from ...objectives.batch import Batch
from ...tasks.cutting import Piece
from ...tasks.description import Description
from ...tasks.encoding import times_since
from ...tasks.files.sheet import Sheet
from ...tasks.scaling import arrange_samples, inputs_of
from ...tasks.task import Samples, Sequences
from .units import read_outputs

SIZES = ((3, 5), (2, 12))  # samples and steps of each comparison
MOST_LAGGED = 200  # steps more, so that a comparison has rows with all their lags
SHARE_MISSING = 0.2

# x [B, ...] float64 and lengths [B] -> the outputs of an exported network, float64
Answer = Callable[[np.ndarray, np.ndarray | None], np.ndarray]


@dataclass(frozen=True)
class ExportCheck:
    """One comparison: the largest difference relative to the largest output, and its size.

    steps: 0 for samples without time.
    """

    samples: int
    steps: int
    difference: float


@dataclass(frozen=True)
class Drawn:
    """Random columns, and the pre-outputs of the network for them.

    x        [B, T, columns] or [B, ...]; lengths [B], or None for samples without time
    a        [B, outputs], or [B, T, outputs]
    """

    x: np.ndarray
    lengths: np.ndarray | None
    a: np.ndarray


def compare(net: Net, data: Description | None, answer: Answer) -> list[ExportCheck]:
    """Compare an exported network with the network itself, at two sizes."""
    checks = []
    lags = [] if data is None else data.ahead.get("lags", [])
    longer = min(max(lags, default=0), MOST_LAGGED)
    for samples, length in SIZES:
        steps = 0 if isinstance(net, Chain) else length + longer
        generator = np.random.default_rng(samples)
        drawn = draw(net, data, samples, steps, generator)
        found = answer(drawn.x, drawn.lengths)
        checks.append(ExportCheck(samples, steps, relative_difference(net, data, drawn, found)))
    return checks


def relative_difference(
    net: Net, data: Description | None, drawn: Drawn, found: np.ndarray
) -> float:
    """The largest difference of the outputs, in units of the largest of them.

    Numbers are compared without the mean and the scale of the targets.
    """
    if data is not None:
        expected = read_outputs(data, drawn.a)
    elif net.output == "identity":
        expected = drawn.a
    else:
        phi = {"softmax": lambda a: torch.softmax(a, -1)}.get(str(net.output))
        phi = phi or getattr(torch, str(net.output))
        expected = phi(torch.from_numpy(drawn.a)).numpy()
    shift, scale = 0.0, 1.0
    if data is not None and data.kind != "classify":
        shift, scale = data.target_scale()  # type: ignore[assignment]
    if found.shape != expected.shape:
        return float("inf")
    apart = np.abs(found - expected) / scale
    size = np.abs((expected - shift) / scale)
    if net.readout == "every" and drawn.lengths is not None:
        steps = np.arange(expected.shape[1])
        has_step = steps < drawn.lengths[:, None]
        if not np.isnan(found[~has_step]).all():
            return float("inf")
        apart = apart[has_step]
        size = size[has_step]
    worst = float(apart.max())
    # A difference that is not a number is one.
    return worst / max(float(size.max()), 1e-30) if np.isfinite(worst) else float("inf")


def draw(
    net: Net, data: Description | None, samples: int, steps: int, generator: np.random.Generator
) -> Drawn:
    """Random columns and what the network makes of them."""
    if isinstance(net, Chain):
        return draw_samples(net, data, samples, generator)
    lengths = generator.integers(1, steps + 1, samples)
    lengths[0] = steps
    if data is None:
        x = draw_numbers((samples, steps, net.inputs), generator)
        rows = [row[:length] for row, length in zip(x, lengths, strict=True)]
    else:
        sheet = draw_sheet(data, lengths, generator)
        x, rows = columns_of(sheet, data, steps)
    batch = Sequences(rows).batch(range(samples), every=net.readout == "every")
    a = run(net, batch)
    return Drawn(x, lengths, a.swapaxes(0, 1) if net.readout == "every" else a)


def draw_numbers(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Normal random numbers in float64 that are the same in float32."""
    return generator.normal(size=shape).astype(np.float32).astype(np.float64)


def run(net: Net, batch: Batch) -> np.ndarray:
    """The pre-outputs of a batch, in float64."""
    with torch.no_grad():
        a = net.run(net.move_batch(batch)).a
    return a.detach().cpu().to(torch.float64).numpy()


def draw_samples(
    net: Chain, data: Description | None, samples: int, generator: np.random.Generator
) -> Drawn:
    """Random samples without time, and the pre-outputs of the network for them."""
    if data is None:
        x = draw_numbers((samples, *(net.shape or (net.inputs,))), generator)
        return Drawn(x, None, run(net, Samples(x).batch(range(samples), every=False)))
    shape = data.sample_shape
    assert shape is not None
    places = int(np.prod(shape[1:]))
    sheet = draw_sheet(data, np.full(samples, places), generator)
    x = sheet.u.reshape(samples, places, -1).transpose(0, 2, 1).reshape(samples, *shape)
    pieces = [Piece(i, i * places, (i + 1) * places) for i in range(samples)]
    chosen = Samples(arrange_samples(pieces, inputs_of(sheet, data), data))
    return Drawn(x, None, run(net, chosen.batch(range(samples), every=False)))


def draw_sheet(data: Description, lengths: np.ndarray, generator: np.random.Generator) -> Sheet:
    """A sheet of random rows, as a reader of files would make it."""
    count = int(lengths.sum())
    u = generator.normal(data.mean, data.std, (count, len(data.features)))
    categories = {}
    for name, words in data.categories.items():
        unknown = "unknown"
        while unknown in words:
            unknown += "?"
        categories[name] = (*words, unknown)
        u[:, data.features.index(name)] = generator.integers(0, len(words) + 1, count)
    for name in data.masked:
        column = data.features.index(name)
        u[generator.random(count) < SHARE_MISSING, column] = np.nan
    time = None
    columns = {}
    if data.gap:
        time = np.cumsum(generator.uniform(0.5, 2.0, count) * data.gap["usual"])
        if data.gap["dates"]:
            time = time.astype(np.int64)  # microseconds
            columns["stamps"] = "dates"
    return Sheet(
        path="random rows",
        sha256="",
        features=tuple(data.features),
        u=u,
        lengths=lengths,
        ids=[str(i) for i in range(len(lengths))],
        where=lambda line, column: f"row {line}",
        lines=np.arange(count),
        time=time,
        columns=columns,
        categories=categories,
    )


def columns_of(sheet: Sheet, data: Description, steps: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The columns, padded with NaN to [B, steps, columns], and the inputs of each sequence."""
    values = sheet.u
    if data.gap:
        values = np.column_stack([values, times_since(sheet)])
    inputs = inputs_of(sheet, data)
    x = np.full((len(sheet.lengths), steps, values.shape[1]), np.nan)
    rows = []
    for i, (start, length) in enumerate(zip(sheet.starts, sheet.lengths, strict=True)):
        x[i, :length] = values[start : start + length]
        rows.append(inputs[start : start + length])
    return x, rows

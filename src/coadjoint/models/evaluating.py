"""All metrics of a model on labelled data, with confidence intervals by the bootstrap.

Sequences (or samples) are drawn with replacement, as many as there are, and every metric is
measured again; its interval holds the middle share `level` of these values. The steps of a
sequence depend on each other, so they stay together. Of fewer than FEWEST_SEQUENCES sequences with
an answer at every step, blocks of consecutive rows are drawn in their place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from ..errors import DataError, InputError, whole_number
from ..tasks.ahead import ahead_of
from ..tasks.description import Description, JsonDict
from ..tasks.metrics import (
    OF_CLASSES,
    OF_NUMBERS,
    ClassTally,
    NumberTally,
    log_loss_as,
    of_symbols,
)
from ..tasks.new_data import targets_of
from ..tasks.prediction import Prediction, softmax
from ..tasks.task import rng
from .bootstrap import ClassSample, NumberSample, resampled_weights

FEWEST_SEQUENCES = 10
RESAMPLES = 1000
LEVEL = 0.95
MOST_WORK = 2 * 10**9  # resamples times entries times classes, for intervals of the AUC


@dataclass(frozen=True)
class Estimate:
    """A figure and its confidence interval; low and high are NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def to_dict(self) -> dict[str, float | None]:
        """Return the numbers in plain JSON types, null for NaN."""
        return {name: None if math.isnan(x) else x for name, x in vars(self).items()}


Figures = dict[str, Estimate]


@dataclass(frozen=True, eq=False)
class Assessment:
    """What a model is worth on labelled data.

    kind, at   those of the model;  labels  its classes
    unit       "sequence" or "sample";  sequences  how many;  entries  with a target
    metrics    all metrics of tasks.metrics, by name
    by_class   by label: precision, recall, f1 and auc
    by_target  by name, if several numbers are predicted: the metrics of each
    support    by label: the entries that have it
    confusion  [K, K] counts: rows are true classes, columns predicted ones
    baselines  by name, the metrics of answers without a network: "majority", the most common class
               of these data; "mean", that of training; "last value"
    level, resamples, seed, drawn   of the intervals; drawn: what is drawn with replacement, in
               words
    notes      what was chosen or left out when the data were read
    """

    kind: str
    at: str
    labels: list[str]
    unit: str
    sequences: int
    entries: int
    metrics: Figures
    by_class: dict[str, Figures]
    by_target: dict[str, Figures]
    support: dict[str, int]
    confusion: np.ndarray | None
    baselines: dict[str, dict[str, float]]
    level: float
    resamples: int
    seed: int
    drawn: str
    notes: tuple[str, ...] = ()
    prediction: Prediction | None = field(default=None, repr=False)
    outputs: np.ndarray | None = field(default=None, repr=False)

    def to_dict(self) -> JsonDict:
        """Return all figures in plain JSON types; NaN is null."""
        confusion = None if self.confusion is None else self.confusion.tolist()
        baselines = {}
        for name, figures in self.baselines.items():
            baselines[name] = {key: None if math.isnan(x) else x for key, x in figures.items()}
        return {
            "format": 1,
            "kind": self.kind,
            "at": self.at,
            f"{self.unit}s": self.sequences,
            "entries": self.entries,
            "metrics": plain_figures(self.metrics),
            "classes": {label: plain_figures(f) for label, f in self.by_class.items()},
            "targets": {name: plain_figures(f) for name, f in self.by_target.items()},
            "labels": self.labels,
            "support": self.support,
            "confusion": confusion,
            "baselines": baselines,
            "intervals": {
                "level": self.level,
                "resamples": self.resamples,
                "seed": self.seed,
                "drawn": self.drawn,
            },
            "notes": list(self.notes),
        }


def plain_figures(figures: Figures) -> JsonDict:
    """Return figures in plain JSON types."""
    return {name: estimate.to_dict() for name, estimate in figures.items()}


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries that have a target.

    a     [N, outputs] pre-outputs, in the units of the network
    y     [N] class numbers, or [N, k] numbers in the units of the data
    unit  [N] what is drawn with replacement that each belongs to, from 0
    drawn  these units, in words
    """

    a: np.ndarray
    y: np.ndarray
    unit: np.ndarray
    drawn: str


def assess(
    prediction: Prediction,
    a: np.ndarray,
    *,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
    seed: int = 0,
) -> Assessment:
    """Measure outputs on labelled data.

    Args:
        prediction: The data, read with their targets.
        a: The pre-outputs [K, outputs], by `Prediction.collect`.
        resamples: Of the bootstrap; 0 leaves the intervals out.
        level: The share of resamples that an interval holds.
        seed: Of the resamples.
    """
    resamples = whole_number("resamples", resamples, 0)
    if not isinstance(level, int | float) or not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1; got {level!r}.")
    d = prediction.description
    y = targets_of(prediction)
    has_target = ~np.isnan(y).any(1)
    notes = list(prediction.notes)
    if not has_target.any():
        raise DataError(f"{prediction.source}: no entry has a target, so nothing can be judged.")
    lost = int((~has_target).sum()) - rows_at_ends(prediction)
    if lost > 0:
        which = "1 entry has" if lost == 1 else f"{lost:,} entries have"
        notes.append(f"{which} no target: left out")
    units, drawn = choose_units(prediction, has_target)
    entries = Entries(a[has_target], y[has_target], units, drawn)
    if not units.max():
        resamples = 0
        notes.append(f"there are no intervals: {drawn} cannot be drawn from")
    measure = measure_classes if d.labels else measure_numbers
    figures = measure(entries, d, resamples, level, seed, notes)
    return Assessment(
        kind=d.kind,
        at=d.at,
        labels=d.labels,
        unit=prediction.unit,
        sequences=len(prediction.cut.sheet.lengths),
        entries=int(has_target.sum()),
        baselines=measure_baselines(prediction, entries, has_target),
        level=float(level),
        resamples=resamples,
        seed=seed,
        drawn=drawn,
        notes=tuple(dict.fromkeys(notes)),
        prediction=prediction,
        outputs=a,
        **figures,
    )


def rows_at_ends(prediction: Prediction) -> int:
    """Return how many rows have no target because the next ones are not in the data."""
    d = prediction.description
    if d.symbols:
        return len(prediction.cut.sheet.lengths)
    if d.kind != "next":
        return 0
    return int(np.minimum(prediction.cut.sheet.lengths, ahead_of(d).horizon).sum())


def choose_units(prediction: Prediction, has_target: np.ndarray) -> tuple[np.ndarray, str]:
    """Return (the number of the unit of each entry with a target, the units in words).

    Units are what the bootstrap draws: sequences, samples, or blocks of rows.
    """
    d = prediction.description
    of_piece = np.array([piece.sequence for piece in prediction.cut.pieces])
    lengths = np.ones(len(of_piece), np.int64)
    if d.at == "every":
        lengths = np.array([stop - start for _, start, stop in prediction.cut.pieces])
    sequence = np.repeat(of_piece, lengths)[has_target]
    numbers, unit = np.unique(sequence, return_inverse=True)
    plural = "s" * (len(numbers) != 1)
    drawn = f"{len(numbers):,} {prediction.unit}{plural}"
    if d.at != "every" or len(numbers) >= FEWEST_SEQUENCES:
        return unit, drawn
    step = np.concatenate([np.arange(length) for length in lengths])[has_target]
    block = math.ceil(math.sqrt(len(step) / len(numbers)))
    pairs = np.stack([unit, step // block], 1)
    blocks, unit = np.unique(pairs, axis=0, return_inverse=True)
    return unit.reshape(-1), f"{len(blocks):,} blocks of {block} rows"


def measure_classes(
    entries: Entries, d: Description, resamples: int, level: float, seed: int, notes: list[str]
) -> JsonDict:
    """Return the figures of classes: the fields of an Assessment by name."""
    K = len(d.labels)
    y = entries.y[:, 0].astype(np.int64)
    tally = ClassTally(K, list(OF_CLASSES))
    tally.add(torch.from_numpy(entries.a), torch.from_numpy(y))
    sample = ClassSample(softmax(entries.a), log_softmax_at(entries.a, y), y)
    whole = sample.figures(np.ones(len(y)))
    work = resamples * len(y) * K
    if work > MOST_WORK:
        sample = sample.without_auc()
        notes.append("the AUC has no interval: there are too many entries for it")
    values = tally.values()
    drawn = draw_figures(sample.figures, entries.unit, resamples, seed)
    low, high = bounds(drawn, level)
    by_class: dict[str, Figures] = {}
    for k, label in enumerate(d.labels):
        by_class[label] = {}
        for name in ("precision", "recall", "f1", "auc"):
            key = f"class {name}"
            column = (whole[key][k], low[key][k], high[key][k])
            by_class[label][name] = Estimate(*map(float, column))
    guess = entries.a.argmax(-1)
    confusion = np.zeros((K, K), np.int64)
    np.add.at(confusion, (y, guess), 1)
    metrics = {}
    for name, value in values.items():
        metrics[name] = Estimate(value, float(low[name]), float(high[name]))
    if d.symbols:
        metrics = of_log_loss(metrics["log-loss"], d.symbols) | metrics
    counts = np.bincount(y, minlength=K).tolist()
    return {
        "metrics": metrics,
        "by_class": by_class,
        "by_target": {},
        "support": dict(zip(d.labels, counts, strict=True)),
        "confusion": confusion,
    }


def of_log_loss(log_loss: Estimate, unit: str) -> Figures:
    """Return the metrics of the next symbol that are the log-loss in other units, by name."""
    figures = {}
    for name in of_symbols(unit):
        ends = [log_loss_as(name, value) for value in vars(log_loss).values()]
        if ends[0]:
            figures[name] = Estimate(*(end[name] for end in ends))
    return figures


def log_softmax_at(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return -log softmax(a)_y of each entry, [N]."""
    log_p = torch.log_softmax(torch.from_numpy(a), -1).numpy()
    return np.asarray(-np.take_along_axis(log_p, y[:, None], 1)[:, 0])


def measure_numbers(
    entries: Entries, d: Description, resamples: int, level: float, seed: int, notes: list[str]
) -> JsonDict:
    """Return the figures of numbers: the fields of an Assessment by name."""
    mean, std = d.target_scale()
    tally = NumberTally(list(OF_NUMBERS), mean, std)
    scaled = (entries.y - mean) / std
    tally.add(torch.from_numpy(entries.a), torch.from_numpy(scaled))
    sample = NumberSample(entries.a * std + mean, entries.y, rounding_of(mean, std))
    whole = sample.figures(np.ones(len(entries.y)))
    drawn = draw_figures(sample.figures, entries.unit, resamples, seed)
    low, high = bounds(drawn, level)
    metrics = {}
    for name, value in tally.values().items():
        metrics[name] = Estimate(value, float(low[name]), float(high[name]))
    names = target_names(d)
    by_target: dict[str, Figures] = {}
    if len(names) > 1:
        for k, target in enumerate(names):
            by_target[target] = {}
            for name in OF_NUMBERS:
                key = f"target {name}"
                column = (whole[key][k], low[key][k], high[key][k])
                by_target[target][name] = Estimate(*map(float, column))
    return {
        "metrics": metrics,
        "by_class": {},
        "by_target": by_target,
        "support": {},
        "confusion": None,
    }


def rounding_of(mean: np.ndarray, std: np.ndarray) -> np.ndarray:
    """Return the size below which a target counts as zero, as in `metrics.NumberTally`."""
    return np.asarray(8 * np.finfo(np.float64).eps * np.maximum(np.abs(mean), std))


def target_names(description: Description) -> list[str]:
    """Return the names of the numbers that are predicted; [] for the entries of samples."""
    if description.kind == "reconstruct":
        return []
    if description.kind == "next":
        return ahead_of(description).output_names
    return description.targets


Sample = Callable[[np.ndarray], dict[str, np.ndarray]]


def draw_figures(
    figures: Sample, unit: np.ndarray, resamples: int, seed: int
) -> dict[str, np.ndarray]:
    """Return the figures of each resample, [resamples, ...] by name; of none, NaN.

    Args:
        figures: Of the entries with these weights.
        unit: That of each entry.
        resamples: How many to draw.
        seed: Of the draws.
    """
    collected: dict[str, list[np.ndarray]] = {}
    if not resamples:
        lacking = figures(np.ones(len(unit)))
        return {name: np.full_like(value, np.nan)[None] for name, value in lacking.items()}
    for weights in resampled_weights(int(unit.max()) + 1, resamples, rng(seed, "bootstrap")):
        for name, value in figures(weights[unit]).items():
            collected.setdefault(name, []).append(value)
    return {name: np.stack(values) for name, values in collected.items()}


def bounds(
    drawn: dict[str, np.ndarray], level: float
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the ends of the intervals by name; NaN where no resample has the figure."""
    ends = []
    for share in ((1 - level) / 2, (1 + level) / 2):
        found = {}
        for name, values in drawn.items():
            known = np.where(np.isnan(values).all(0), 0.0, values)
            end = np.nanquantile(known, share, axis=0)
            found[name] = np.where(np.isnan(values).all(0), np.nan, end)
        ends.append(found)
    return ends[0], ends[1]


def measure_baselines(
    prediction: Prediction, entries: Entries, has_target: np.ndarray
) -> dict[str, dict[str, float]]:
    """Return the metrics of answers that need no network, by name."""
    d = prediction.description
    if d.labels:
        y = entries.y[:, 0].astype(np.int64)
        votes = np.bincount(y, minlength=len(d.labels)).astype(np.float64)
        tally = ClassTally(len(d.labels), ["accuracy", "balanced-accuracy", "f1"])
        tally.add(torch.from_numpy(votes).expand(len(y), -1), torch.from_numpy(y))
        return {"majority": tally.values()}
    mean, std = d.target_scale()
    found = {}
    for name, guess in guesses_of_numbers(prediction, entries, has_target):
        tally_of_numbers = NumberTally(list(OF_NUMBERS), mean, std)
        scaled = [torch.from_numpy((values - mean) / std) for values in (guess, entries.y)]
        tally_of_numbers.add(*scaled)
        found[name] = tally_of_numbers.values()
    return found


def guesses_of_numbers(
    prediction: Prediction, entries: Entries, has_target: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, guesses [N, k]): the mean of training if it is known, and the last value."""
    d = prediction.description
    mean, std = d.target_scale()
    is_scaled = bool(np.any(mean != 0) or np.any(std != 1))
    if is_scaled:
        yield "mean", np.broadcast_to(mean, entries.y.shape)
    if d.kind == "next":
        sheet = prediction.cut.sheet
        ahead = ahead_of(d)
        columns = [sheet.features.index(name) for name in ahead.predicted]
        rows = [sheet.u[start:stop, columns] for _, start, stop in prediction.cut.pieces]
        now = np.concatenate(rows)[has_target]
        if not np.isnan(now).any():
            yield "last value", ahead.spread(now)


def share_text(level: float) -> str:
    """Return a level in words: "95%"."""
    return f"{100 * level:g}%"

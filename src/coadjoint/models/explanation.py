"""Explanation: what the predictions for a file come from, by column, by step and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import escape_undecodable, one_line
from ..tasks.files.kept import Column

TOP = 8  # columns and steps in the summary
BAR = 24  # characters
QUANTITY_WORDS = {
    "log-odds": "the log-odds, log p / (1 - p),",
    "probability": "the probability",
    "logit": "the logit (the pre-output)",
}
METHOD_WORDS = {
    "integrated-gradients": "integrated gradients",
    "gradient-x-input": "gradient x input",
}
BASELINE_WORDS = {
    "mean": "the mean of training",
    "zero": "inputs of zero",
    "first": "the first row of each sequence",
    "given": "the given inputs",
}


@dataclass(frozen=True, eq=False)
class Explained:
    """What one output of a sequence or sample comes from.

    name          of the sequence, window or sample;  id: of the sequence or sample it belongs to
    output        the class, target or feature that is explained;  step: where, None for the last
    value         of the output;  baseline: of the output at the baseline
    gap           sum of the attributions - (value - baseline)
    relative_gap  |gap| by the sum of |attributions|
    nodes         the number of points on the way from the baseline to the input
    attributions  [T, columns], or of a sample without time [columns, ...]
    costates      [T + 1] log10 ||d output / d x_t|| from the initial state on, or by layer [L + 1];
                  -inf where it is zero
    rows          [T] the rows of the file, from 0;  times: as the file has them, or None
    first_step    the number of the first row within its sequence, 0 unless this is a window
    """

    name: str
    id: str
    output: str
    step: int | None
    value: float
    baseline: float
    gap: float
    relative_gap: float
    nodes: int
    attributions: np.ndarray
    costates: np.ndarray
    rows: np.ndarray
    first_step: int = 0
    times: Sequence[str] | None = None


@dataclass(frozen=True, eq=False)
class Explanation:
    """What the predictions of a network for a file come from.

    method, baseline, quantity   as in `explain`; quantity is "value" for numbers
    columns    the columns of the file
    samples    what was found for each sequence or sample, in the order of the file
    by_layer   whether the network has no time, so that costates go by layer
    predicted  whether each sample's own predicted class is explained
    at_every   whether the network has an output at every step
    """

    method: str
    baseline: str
    quantity: str
    columns: list[str]
    samples: Sequence[Explained]
    unit: str
    source: Path
    notes: tuple[str, ...] = ()
    by_layer: bool = False
    predicted: bool = False
    at_every: bool = False
    tolerance: float = 1e-4
    id_name: str = ""
    time_name: str = ""

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def attributions(self) -> list[np.ndarray]:
        """Those of each sequence [T, columns], or of each sample [columns, ...]."""
        return [sample.attributions for sample in self.samples]

    @property
    def values(self) -> np.ndarray:
        """The explained outputs, [n]."""
        return np.array([sample.value for sample in self.samples])

    @property
    def gaps(self) -> np.ndarray:
        """Sums of attributions less the change of the output from the baseline, [n]."""
        return np.array([sample.gap for sample in self.samples])

    @property
    def is_complete(self) -> bool:
        """Whether every relative gap is within the tolerance."""
        return all(sample.relative_gap <= self.tolerance for sample in self.samples)

    @property
    def is_image(self) -> bool:
        """Whether samples have places in a plane, for a heatmap of each."""
        return self.by_layer and self.samples[0].attributions.ndim == 3

    @cached_property
    def by_column(self) -> np.ndarray:
        """Means over samples of the sum over steps (or places) of |attribution|, [columns]."""
        axis = 0 if self.by_layer else 1
        sums = []
        for values in self.attributions:
            columns_first = np.moveaxis(np.abs(values), axis, 0)
            sums.append(columns_first.reshape(len(self.columns), -1).sum(1))
        means: np.ndarray = np.array(sums).mean(0)
        return means

    @cached_property
    def by_step(self) -> np.ndarray:
        """Means over sequences of the sum over columns of |attribution|, by steps from the end.

        Entry s is that of the s-th row before the last, over the sequences that have it; empty for
        samples without time.
        """
        if self.by_layer:
            return np.empty(0)
        return mean_from_end([np.abs(values).sum(1) for values in self.attributions])

    @cached_property
    def mean_costates(self) -> np.ndarray:
        """Means over samples of log10 ||d output / d x||, zeros aside, NaN where all are zero.

        By steps from the end for sequences, entry s that of x_{T - s}; by layer from the input on
        for samples.
        """
        logs = [sample.costates for sample in self.samples]
        if self.by_layer:
            return finite_mean(np.array(logs))
        return mean_from_end(logs)

    @property
    def step_names(self) -> list[str]:
        """The entries of `by_step` in words."""
        names = ["last step"]
        for s in range(1, len(self.by_step)):
            names.append(f"{s} step{'s' * (s > 1)} before the last")
        return names[: len(self.by_step)]

    def describe_output(self) -> str:
        """What is explained, in words."""
        outputs = list(dict.fromkeys(sample.output for sample in self.samples))
        text = f"'{one_line(outputs[0])}'"
        if self.quantity == "value":
            text += ", in its units,"
        elif self.predicted:
            text = f"{QUANTITY_WORDS[self.quantity]} of the predicted class"
        else:
            text = f"{QUANTITY_WORDS[self.quantity]} of class {text}"
        if self.at_every:
            steps = {sample.step for sample in self.samples}
            all_last = all(s.step == len(s.rows) - 1 for s in self.samples)
            where = f"step {min(step or 0 for step in steps)}" if len(steps) == 1 else "one step"
            text = text.rstrip(",") + (", at the last step" if all_last else f", at {where}") + ","
        count = len(self)
        return f"{text} of {count:,} {self.unit}{'s' * (count != 1)}"

    def describe_method(self) -> str:
        """How it is explained, in words."""
        text = f"{METHOD_WORDS[self.method]} from {BASELINE_WORDS[self.baseline]}"
        if self.method == "gradient-x-input":
            return text
        least = min(sample.nodes for sample in self.samples)
        most = max(sample.nodes for sample in self.samples)
        points = f"{least}" if least == most else f"{least} to {most}"
        return f"{text}, {points} points"

    def describe_gap(self) -> str:
        """How complete the attributions are, in words."""
        worst = max(self.samples, key=lambda sample: sample.relative_gap)
        text = (
            "sum of attributions - change of the output: at most "
            f"{np.abs(self.gaps).max():.2g}, {100 * worst.relative_gap:.2g}% of the attributions"
        )
        if self.method == "gradient-x-input":
            return f"{text}; it is 0 for linear networks only"
        if not self.is_complete:
            return f"{text}, above the tolerance of {100 * self.tolerance:.2g}%"
        return text

    def summary(self) -> str:
        """What was found, in a few lines: the columns and steps with the largest attributions."""
        lines = [
            f"explains  {self.describe_output()}",
            f"method    {self.describe_method()}",
            f"gap       {self.describe_gap()}",
            "",
            f"mean |attribution| of a {self.unit}, by column:",
            *bars(self.columns, self.by_column),
        ]
        if len(self.by_step) > 1:
            lines += ["", "by step:", *bars(self.step_names, self.by_step)]
        return "\n".join(lines)

    def table(self) -> list[Column]:
        """The attributions as columns of a table.

        One row for each row of a sequence, with the norm of the costate there; or one for each
        sample without time, with its output at the input and at the baseline.
        """
        if self.by_layer:
            return self._table_of_samples()
        samples = self.samples
        rows = np.concatenate([sample.rows for sample in samples])
        counts = [len(sample.rows) for sample in samples]
        steps = [np.arange(n) + s.first_step for n, s in zip(counts, samples, strict=True)]
        columns = [Column("row", rows), Column("step", np.concatenate(steps))]
        has_windows = any(sample.name != sample.id for sample in samples)
        if has_windows:
            columns.append(Column("window", repeat_each([s.name for s in samples], counts)))
        elif self.id_name:
            columns.append(Column(self.id_name, repeat_each([s.id for s in samples], counts)))
        if samples[0].times is not None:
            times = [escape_undecodable(time) for s in samples for time in s.times or ()]
            columns.append(Column(self.time_name or "time", times))
        columns.append(Column("output", repeat_each([s.output for s in samples], counts)))
        values = np.concatenate(self.attributions)
        for name, of_column in zip(self.columns, values.T, strict=True):
            columns.append(Column(f"attribution {name}", of_column))
        logs = np.concatenate([sample.costates[1:] for sample in samples])
        columns.append(Column("costate", 10.0**logs))
        return with_different_names(columns)

    def _table_of_samples(self) -> list[Column]:
        """The table of samples without time."""
        samples = self.samples
        columns = [Column("row", np.concatenate([sample.rows for sample in samples]))]
        if self.id_name:
            columns.append(Column(self.id_name, [escape_undecodable(s.id) for s in samples]))
        columns += [
            Column("output", [escape_undecodable(s.output) for s in samples]),
            Column("value", self.values),
            Column("baseline", np.array([s.baseline for s in samples])),
            Column("gap", self.gaps),
        ]
        places = samples[0].attributions.shape[1:]
        for k, name in enumerate(self.columns):
            for place in np.ndindex(places):
                of_place = np.array([s.attributions[(k, *place)] for s in samples])
                entry = f"{name}{list(place)}" if places else name
                columns.append(Column(f"attribution {entry}", of_place))
        return with_different_names(columns)


def with_different_names(columns: list[Column]) -> list[Column]:
    """The columns; one of the file that is called like one of ours gets an underscore."""
    taken: set[str] = set()
    renamed = []
    for column in columns:
        name = column.name
        while name in taken:
            name += "_"
        taken.add(name)
        renamed.append(column._replace(name=name))
    return renamed


def repeat_each(texts: Sequence[str], counts: Sequence[int]) -> list[str]:
    """Each text as often as its count says."""
    repeated: list[str] = []
    for text, count in zip(texts, counts, strict=True):
        repeated += [escape_undecodable(text)] * count
    return repeated


def finite_mean(values: np.ndarray) -> np.ndarray:
    """Means over the first axis of the entries that are finite; NaN where none is."""
    is_finite = np.isfinite(values)
    counts = is_finite.sum(0)
    totals = np.where(is_finite, values, 0).sum(0)
    return np.where(counts > 0, totals / np.maximum(counts, 1), np.nan)


def mean_from_end(series: Sequence[np.ndarray]) -> np.ndarray:
    """Means of series of different lengths, aligned at their ends: entry s is s before the last."""
    longest = max(map(len, series))
    aligned = np.full((len(series), longest), np.nan)
    for row, values in zip(aligned, series, strict=True):
        row[: len(values)] = values[::-1]
    return finite_mean(aligned)


def bars(names: Sequence[str], sizes: np.ndarray, most: int = TOP) -> list[str]:
    """Lines with the largest sizes as bars, the largest first, and their share of all."""
    order = np.argsort(-np.nan_to_num(sizes), kind="stable")[:most]
    total = np.nansum(sizes)
    width = max(len(one_line(names[k], 30)) for k in order)
    largest = sizes[order[0]]
    lines = []
    for k in order:
        length = round(BAR * sizes[k] / largest) if largest > 0 else 0
        share = 100 * sizes[k] / total if total > 0 else 0
        name = one_line(names[k], 30).ljust(width)
        lines.append(f"  {name}  {'█' * length:<{BAR}}  {sizes[k]:.3g} ({share:.0f}%)")
    if len(names) > most:
        lines.append(f"  and {len(names) - most:,} more")
    return lines

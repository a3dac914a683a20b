"""Baselines for your own data: what is reached without a network, on the same splits.

majority        classes: the largest class of the training set, for every entry
mean            numbers: the mean of the training set
last value      the next step is like this one
seasonal naive  the next step is like the one a season before it, if there is a season
linear          ridge regression, or for classes the better of a ridge classifier and logistic
                regression, on the flattened sequence (or a summary of it, if it is long), on the
                sample, or with a target at every step on that step and those before it. Its
                strength is the one with the best metric on the validation set (of equal ones, with
                the best loss); without a validation set, on every fifth training entry

An entry is a sequence or sample, or a time step if every one has a target. Time and memory are
bounded: of very many entries some are used to fit, very many inputs are projected at random.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from .ahead import ahead_of, present_inputs
from .linear import LinearModel, logistic_path, ridge_path
from .season import MOST_SHORT_ROWS, season_of_values
from .stored_sets import is_stored
from .task import Samples, Sequences, rng

if TYPE_CHECKING:
    from .description import Description
    from .judging import JudgedCollection

MOST_INPUTS = 1000  # of a linear model, if there are as many entries
MOST_ENTRIES = 20_000  # to fit it
MOST_NUMBERS = 10**7  # entries times inputs to fit it
MOST_WEIGHTS = 10**6  # of it
MOST_HELD_OUT = 10**9  # entries times inputs to judge it
LOGISTIC = 10**8  # numbers to read in a fit of logistic regression
FEWEST_ITERATIONS = 20  # of it
BLOCK = 4 * 10**6  # numbers of inputs at a time
LAGS = 20  # steps before the present one, with a target at every step
SUMMARY = "the mean, deviation, least, largest, first and last value of each input"


@dataclass(frozen=True)
class Baseline:
    """A baseline: what it is, and its metrics by split and name; none if it was left out."""

    name: str
    about: str
    metrics: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Inputs:
    """How the inputs of a linear model are made of a set.

    form   "sample", "flat", "summary" or "lags"
    size   steps of a flattened sequence, or lags
    width  the number of inputs, before they are projected
    most   the number of inputs after a projection; None without one
    """

    form: str
    size: int
    width: int
    most: int | None = None

    @property
    def about(self) -> str:
        """The inputs in words."""
        words = {
            "sample": "the sample",
            "flat": f"the flattened sequence ({self.size} steps)",
            "summary": SUMMARY,
            "lags": "the present step" + (f" and {self.size} before it" if self.size else ""),
        }
        if self.most is not None:
            return f"{self.most} random projections of {words[self.form]}"
        return words[self.form]

    @property
    def count(self) -> int:
        """The number of inputs."""
        return self.most or self.width

    def rows(self, data: Sequences | Samples, entries: np.ndarray) -> np.ndarray:
        """Return the inputs [n, count] of entries [n, 2] of (sequence, step)."""
        if self.most is None:
            return self._whole_rows(data, entries)
        parts = []
        for block in blocks(len(entries), self.width):
            parts.append(project(self._whole_rows(data, entries[block]), self.most))
        return np.concatenate(parts)

    def _whole_rows(self, data: Sequences | Samples, entries: np.ndarray) -> np.ndarray:
        """Return the inputs [n, width] before they are projected."""
        if isinstance(data, Samples):
            rows = data.x[entries[:, 0]].reshape(len(entries), -1)
        elif self.form == "lags":
            rows = lagged_rows(data, entries, self.size)
        else:
            make = summary_row if self.form == "summary" else flat_row
            rows = np.stack([make(data.u[i], self.size) for i in entries[:, 0]])
        numbers: np.ndarray = rows.astype(np.float64)
        return numbers


def flat_row(u: np.ndarray, size: int) -> np.ndarray:
    """Return the first `size` steps of u [T, C] in one row; missing ones are zero."""
    row = np.zeros((size, u.shape[1]))
    row[: min(len(u), size)] = u[:size]
    return row.reshape(-1)


def summary_row(u: np.ndarray, _size: int) -> np.ndarray:
    """Return the SUMMARY of u [T, C] in one row."""
    return np.concatenate([u.mean(0), u.std(0), u.min(0), u.max(0), u[0], u[-1]])


def lagged_rows(data: Sequences, entries: np.ndarray, lags: int) -> np.ndarray:
    """Return for each entry its step and the `lags` steps before it; zero before the first."""
    chosen, place = np.unique(entries[:, 0], return_inverse=True)
    gap = np.zeros((lags, data.u[0].shape[1]), data.u[0].dtype)
    parts: list[np.ndarray] = []
    starts = []
    start = 0
    for i in chosen:
        parts += [gap, data.u[i]]
        starts.append(start + lags)
        start += lags + len(data.u[i])
    steps = np.concatenate(parts)
    now = np.array(starts)[place] + entries[:, 1]
    return np.concatenate([steps[now - lag] for lag in range(lags + 1)], 1)


def project(rows: np.ndarray, most: int) -> np.ndarray:
    """Return `most` sums of inputs with random signs, each input in one of them."""
    draw = rng(0, "projection", rows.shape[1])
    order = draw.permutation(rows.shape[1])
    signs = draw.choice((-1.0, 1.0), rows.shape[1])
    starts = np.linspace(0, rows.shape[1], most, endpoint=False).astype(int)
    sums: np.ndarray = np.add.reduceat((rows * signs)[:, order], starts, 1)
    return sums


def entries_of(data: Sequences | Samples, every: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the entries with a target as [n, 2] of (sequence, step), and their targets."""
    assert data.y is not None
    if every:
        y = np.concatenate([np.asarray(target) for target in data.y])
        lengths = [len(np.asarray(target)) for target in data.y]
        steps = np.concatenate([np.arange(length) for length in lengths])
        entries = np.stack([np.repeat(np.arange(len(lengths)), lengths), steps], 1)
    else:
        y = np.asarray(data.y)
        entries = np.stack([np.arange(len(y)), np.zeros(len(y), int)], 1)
    if y.dtype.kind == "f":
        y = y.reshape(len(y), -1)
        has_target = ~np.isnan(y).any(1)
    else:
        has_target = y >= 0
    return entries[has_target], y[has_target]


def choose_inputs(task: JudgedCollection, entries: int) -> Inputs:
    """Choose what a linear model reads; entries: how many there are in training."""
    train = task.whole_training
    limit = MOST_INPUTS if entries > MOST_INPUTS else MOST_NUMBERS // entries
    if isinstance(train, Samples):
        width = int(np.prod(train.x.shape[1:]))
        return Inputs("sample", 1, width, limit if width > limit else None)
    C = train.u[0].shape[1]
    longest = int(train.steps().max())
    if task.readout == "every":
        lags = max(0, min(LAGS, longest - 1, limit // C - 1))
        if task.description.ahead.get("lags") and longest <= MOST_SHORT_ROWS:
            # Held-out parts have few rows with 20 before them, and all have their lags as inputs.
            lags = 0
        width = (lags + 1) * C
        return Inputs("lags", lags, width, limit if width > limit else None)
    if longest * C <= limit:
        return Inputs("flat", longest, longest * C)
    width = 6 * C
    return Inputs("summary", longest, width, limit if width > limit else None)


def find_baselines(task: JudgedCollection) -> list[Baseline]:
    """Return the baselines of a task, with their metrics on its held-out sets."""
    if not task.splits:
        return []
    task, looked_at = in_memory(task)
    baselines = [constant_baseline(task)]
    kind = task.description.kind
    if kind == "next":
        baselines.insert(0, last_value(task))
        season = season_of_training(task)
        if season > 1:
            baselines.insert(0, seasonal_naive(task, season))
    # An autoencoder must not copy its inputs, which a linear model would do.
    if kind != "reconstruct" or task.noise:
        try:
            baselines.insert(0, linear_baseline(task))
        except (MemoryError, np.linalg.LinAlgError) as error:
            why = "out of memory" if isinstance(error, MemoryError) else str(error)
            baselines.insert(0, Baseline("linear", f"left out: {why}", {}))
    return [replace(one, about=one.about + looked_at) for one in baselines]


def in_memory(task: JudgedCollection) -> tuple[JudgedCollection, str]:
    """Return the task with sequences that are on disk in memory, and a note on it.

    Of very many, some are taken, evenly spread over each set: MOST_NUMBERS inputs at most.
    """
    sets = {"train": task.whole_training, **{split: task.sets[split] for split in task.splits}}
    if not any(is_stored(data) for data in sets.values()):
        return task, ""
    notes = []
    for name, data in sets.items():
        if not is_stored(data):
            continue
        mean_steps = float(data.steps().mean())
        most = max(1, int(MOST_NUMBERS / (mean_steps * (task.inputs + task.outputs))))
        chosen = thin(len(data), most)
        if len(chosen) < len(data):
            notes.append(f"{len(chosen):,} of {len(data):,} {name} sequences")
        sets[name] = data.pick(chosen)
    loaded = copy.copy(task)
    loaded.sets = sets
    loaded.uncut = None
    return loaded, f" (by {', '.join(notes)})" if notes else ""


def judge(task: JudgedCollection, a: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Return the metrics of outputs a [n, outputs] for targets y."""
    tally = task.tally(task.metrics)
    tally.add(torch.from_numpy(a), torch.from_numpy(y))
    return tally.values()


def constant_baseline(task: JudgedCollection) -> Baseline:
    """Return the baseline that ignores the inputs: the largest class, or the mean."""
    every = task.readout == "every"
    _, y = entries_of(task.whole_training, every)
    labels = task.description.labels
    if labels:
        # The shares of the classes are the best outputs that ignore the inputs, by the loss too.
        shares = np.bincount(y, minlength=len(labels)) / len(y)
        outputs = np.log(np.maximum(shares, 1e-12))
        about = f"class '{labels[int(shares.argmax())]}' for every entry"
        name = "majority"
    else:
        outputs = y.astype(np.float64).mean(0)
        about = "the mean of the training set"
        name = "mean"
    metrics = {}
    for split in task.splits:
        targets = entries_of(task.sets[split], every)[1]
        tally = task.tally(task.metrics)
        for block in blocks(len(targets), task.outputs):
            part = targets[block]
            tally.add(torch.from_numpy(np.tile(outputs, (len(part), 1))), torch.from_numpy(part))
        metrics[split] = tally.values()
    return Baseline(name, about, metrics)


def last_value(task: JudgedCollection) -> Baseline:
    """Return the baseline that predicts the step it has just read."""
    columns = present_inputs(task.description)
    metrics = {}
    for split in task.splits:
        data = task.sets[split]
        entries, y = entries_of(data, every=True)
        now = Inputs("lags", 0, 0).rows(data, entries)
        metrics[split] = judge(task, now[:, columns], y)
    return Baseline("last value", "the step before", metrics)


def season_of_training(task: JudgedCollection) -> int:
    """Return the rows of a season; 1 without one.

    It is that of the lags s - 1 and s, if they are inputs, else of a single training series by its
    autocorrelation. Of several series, or windows, many lack the steps of a season before.
    """
    d = task.description
    lags = d.ahead.get("lags", [])
    if len(lags) > 2 and lags[-1] - lags[-2] == 1:
        return int(lags[-1])
    train = task.whole_training
    if not isinstance(train, Sequences) or len(train.u) > 1:
        return 1
    column = d.numeric.index(ahead_of(d).predicted[0])
    return season_of_values(np.asarray(train.u[0][:, column], dtype=np.float64))


def seasonal_naive(task: JudgedCollection, season: int) -> Baseline:
    """Return the baseline that predicts the step a season before the one to be predicted.

    Where a sequence has no such step, it predicts the step it has just read.
    """
    d = task.description
    ahead = ahead_of(d)
    columns = [d.numeric.index(name) for name in ahead.predicted]
    metrics = {}
    for split in task.splits:
        data = task.sets[split]
        assert isinstance(data, Sequences)
        entries, y = entries_of(data, every=True)
        steps = []
        for h in range(1, ahead.horizon + 1):
            back = -h % season  # the rows from the step a season before to the present one
            values = earlier_values(data, entries, d, columns, back)
            steps.append(np.repeat(values, ahead.copies, 1))
        metrics[split] = judge(task, np.concatenate(steps, 1), y)
    about = f"the step {season} steps before it, or the last value where there is none"
    return Baseline("seasonal naive", about, metrics)


def earlier_values(
    data: Sequences, entries: np.ndarray, description: Description, columns: list[int], back: int
) -> np.ndarray:
    """Return columns [n, k] of the steps `back` before entries, or of the entries themselves.

    If that is a lag, it is an input of the entry, also where the sequence begins later.
    """
    lags = description.ahead.get("lags", [])
    step = np.where(entries[:, 1] >= back, entries[:, 1] - back, entries[:, 1])
    if back in lags:
        first = description.width - description.lagged_width + lags.index(back) * len(columns)
        columns = list(range(first, first + len(columns)))
        step = entries[:, 1]
    rows = Inputs("lags", 0, 0).rows(data, np.stack([entries[:, 0], step], 1))
    return rows[:, columns]


class Chooser:
    """Keeps the linear model with the best metric so far; equal ones are decided by the loss."""

    def __init__(self, task: JudgedCollection) -> None:
        self.task = task
        self.best: tuple[tuple[float, float], str, LinearModel] | None = None

    def offer(self, method: str, model: LinearModel, X: np.ndarray, y: np.ndarray) -> None:
        """Judge a model by the inputs X and targets y."""
        a = model.predict(X)
        value = judge(self.task, a, y)[self.task.metric]
        value = value if self.task.lower else -value
        # On a few entries many models have the same accuracy.
        key = (value, cross_entropy(a, y) if self.task.description.labels else value)
        if self.best is None or key < self.best[0]:
            self.best = (key, method, model)


def cross_entropy(a: np.ndarray, y: np.ndarray) -> float:
    """Return the mean of -log softmax(a)_y for outputs a [n, classes] and class numbers y [n]."""
    return float(torch.nn.functional.cross_entropy(torch.from_numpy(a), torch.from_numpy(y)))


def linear_baseline(task: JudgedCollection) -> Baseline:
    """Return the linear model whose strength is the best on the validation set."""
    every = task.readout == "every"
    train = task.whole_training
    entries, y = entries_of(train, every)
    inputs = choose_inputs(task, len(entries))
    held_out = {split: entries_of(task.sets[split], every) for split in task.splits}
    if sum(len(e) for e, _ in held_out.values()) * inputs.width > MOST_HELD_OUT:
        return Baseline("linear", "left out: there are too many held-out entries", {})
    if inputs.count * task.outputs > MOST_WEIGHTS:
        return Baseline("linear", "left out: there are too many inputs and outputs", {})
    width = max(inputs.count, task.outputs)  # numbers of an entry
    chosen = thin(len(entries), min(MOST_ENTRIES, max(1, MOST_NUMBERS // width)))
    X = inputs.rows(train, entries[chosen])
    y = y[chosen]
    # Summaries have units of their own.
    mean = X.mean(0)
    std = np.where(X.std(0) > 0, X.std(0), 1.0) if inputs.form == "summary" else np.ones_like(mean)
    X = (X - mean) / std
    if "valid" in held_out:
        judged, targets = held_out["valid"]
        part = thin(len(judged), max(1, MOST_NUMBERS // width))
        X_judged = (inputs.rows(task.sets["valid"], judged[part]) - mean) / std
        method, model = best_model(task, (X, y), (X_judged, targets[part]))
    else:
        is_judged = np.arange(len(X)) % 5 == 4
        rest = (X[~is_judged], y[~is_judged])
        method, model = best_model(task, rest, (X[is_judged], y[is_judged]))
    metrics = {}
    for split, (its_entries, its_targets) in held_out.items():
        tally = task.tally(task.metrics)
        data = task.sets[split]
        for block in blocks(len(its_entries), max(inputs.width, task.outputs)):
            a = model.predict((inputs.rows(data, its_entries[block]) - mean) / std)
            tally.add(torch.from_numpy(a), torch.from_numpy(its_targets[block]))
        metrics[split] = tally.values()
        if method == "ridge classifier":  # its outputs are no probabilities
            metrics[split].pop("log-loss", None)
    of_lags = " with its lags" if task.description.ahead.get("lags") else ""
    return Baseline("linear", f"{method} on {inputs.about}{of_lags}", metrics)


def best_model(
    task: JudgedCollection,
    fit: tuple[np.ndarray, np.ndarray],
    judged: tuple[np.ndarray, np.ndarray],
) -> tuple[str, LinearModel]:
    """Return the model of all methods and strengths, fitted to `fit`, that is best on `judged`."""
    X, y = fit
    chooser = Chooser(task)
    classes = len(task.description.labels)
    if not classes:
        for model in ridge_path(X, y.astype(np.float64)):
            chooser.offer("ridge regression", model, *judged)
    else:
        for model in ridge_path(X, np.eye(classes)[y]):
            chooser.offer("ridge classifier", model, *judged)
        # An output costs as much as some 50 inputs.
        iterations = min(100, LOGISTIC // (len(X) * classes * (X.shape[1] + 50)))
        if iterations >= FEWEST_ITERATIONS:
            for model in logistic_path(X, y, classes, iterations):
                chooser.offer("logistic regression", model, *judged)
    if chooser.best is None:
        raise np.linalg.LinAlgError("no model is finite")
    return chooser.best[1], chooser.best[2]


def thin(count: int, most: int) -> np.ndarray:
    """Return at most `most` numbers of 0..count - 1, evenly spread."""
    if count <= most:
        return np.arange(count)
    return np.linspace(0, count - 1, most).astype(int)


def blocks(count: int, inputs: int) -> Iterator[slice]:
    """Yield slices of 0..count - 1 whose inputs fit into memory."""
    size = max(1, BLOCK // inputs)
    for start in range(0, count, size):
        yield slice(start, start + size)

"""What the best weights of a run predict for its held-out data: the content of held_out.json.

The page draws its confusion matrices, errors and forecasts from it. Counts and errors are those of
all targets of a split; the targets themselves are kept up to MOST_VALUES numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import NumericalError, one_line
from ..networks.interface import Net
from ..networks.judge import evaluation_mode
from ..objectives.batch import Batch
from ..tasks.ahead import ahead_of
from ..tasks.data import Data
from ..tasks.stored_sets import is_stored
from ..tasks.task import LARGEST_BATCH, Collection, Origin, Sequences, Task
from . import files
from .held_out_schema import MOST_CLASSES, MOST_OUTPUTS, MOST_TEXT
from .json_rows import dumps
from .json_types import JsonObject
from .looks import AT_ONCE, Looks

MOST_TARGETS = 1_000_000  # outputs of a split on disk that are looked at
MOST_VALUES = 20_000  # targets of a split that are kept, as numbers
MOST_SEQUENCES = 500  # of a split that are kept, if each has a target at every step
MOST_PAIRS = 20_000  # different pairs of a class and a wrong answer that are counted
DIGITS = 7  # of the numbers in the file: those of float32


@dataclass(frozen=True)
class TargetNames:
    """What the targets of a task are: classes (labels), or numbers (outputs)."""

    kind: str
    labels: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    @staticmethod
    def of(task: Task) -> TargetNames | None:
        """Those of a finite task; None if the page has nothing to draw for it."""
        if not isinstance(task, Collection) or task.readout not in ("last", "every"):
            return None
        if task.output == "softmax" and task.outputs <= MOST_CLASSES:
            labels = list(map(str, range(task.outputs)))
            if isinstance(task, Data):
                labels = task.description.labels
            return TargetNames("classify", labels=[one_line(text, MOST_TEXT) for text in labels])
        if not isinstance(task, Data) or task.output != "identity":
            return None
        d = task.description
        names = d.targets if d.kind == "regress" else d.numeric
        if d.kind == "next":
            names = ahead_of(d).output_names
        if len(names) != task.outputs or len(names) > MOST_OUTPUTS:  # the pixels of images
            return None
        return TargetNames(d.kind, outputs=[one_line(text, MOST_TEXT) for text in names])


@dataclass(frozen=True)
class Answer:
    """The targets of one sequence, or sample, and what the network says.

    true, predicted  [T, k]: k numbers, or one class; T is 1 for one target. NaN where there is no
                     target
    probability      [T], of the class that was predicted; of numbers, empty
    """

    number: int  # of the sequence in its split
    true: np.ndarray
    predicted: np.ndarray
    probability: np.ndarray


def write_held_out(
    folder: Path,
    net: Net,
    task: Task,
    step: int,
    n: int,
    looks: Looks = AT_ONCE,
) -> None:
    """Write held_out.json into a run folder; a task without it has none of earlier weights.

    The other arguments are those of `collect_held_out`.
    """
    path = folder / "held_out.json"
    outputs = collect_held_out(net, task, step, n, looks)
    if outputs is not None:
        files.replace(path, dumps(outputs, separators=(",", ":")))
        return
    with files.storage_errors(path):
        path.unlink(missing_ok=True)


def collect_held_out(
    net: Net, task: Task, step: int, n: int, looks: Looks = AT_ONCE
) -> JsonObject | None:
    """The content of held_out.json; None for a task that the page draws nothing of.

    step: that of the weights. n: sequences in a batch. looks: as in `evaluate`. A split on which
    the network overflows is left out.
    """
    names = TargetNames.of(task)
    if names is None or not task.splits:
        return None
    assert isinstance(task, Collection)
    splits = {}
    for split in task.splits:
        try:
            answers = list(collect_answers(net, task, names, split, n, looks))
        except NumericalError:
            continue
        held = task.sets[split]
        origins = held.origins if isinstance(held, Sequences) else None
        is_every = task.readout == "every"
        splits[split] = describe_split(names, answers, is_every, held.ids, origins)
    return {
        "format": 1,
        "step": step,
        "kind": names.kind,
        "at": task.readout,
        "labels": names.labels,
        "outputs": names.outputs,
        "splits": splits,
    }


def collect_answers(
    net: Net,
    task: Collection,
    names: TargetNames,
    split: str,
    n: int,
    looks: Looks = AT_ONCE,
) -> Iterator[Answer]:
    """The answer to every sequence of a split, in batches of n, in the order of their lengths."""
    if looks.segments is not None and looks.samples is not None:
        n = min(n, looks.samples)
    with torch.no_grad(), evaluation_mode(net):
        for index in indices_to_draw(task, split, n):
            batch = net.move_batch(task.held_out_batch(split, index))
            a = looks.run(net, batch, task.loss).a.detach().cpu().double()
            yield from split_batch(task, names, index, a, batch)


def indices_to_draw(task: Collection, split: str, n: int) -> Iterator[np.ndarray]:
    """The numbers of the sequences in each batch; of very many on disk, some, evenly spread."""
    data = task.sets[split]
    most = len(data)
    if is_stored(data):
        steps = float(data.steps().mean()) if task.readout == "every" else 1.0
        most = max(1, int(MOST_TARGETS / (steps * task.outputs)))
    if most >= len(data):
        yield from task.held_out_indices(split, n)
        return
    chosen = np.linspace(0, len(data) - 1, most).astype(int)
    longest = int(data.steps()[chosen].max())
    size = max(1, min(n, LARGEST_BATCH // longest))
    for begin in range(0, len(chosen), size):
        yield chosen[begin : begin + size]


def split_batch(
    task: Collection, names: TargetNames, index: np.ndarray, a: Tensor, batch: Batch
) -> Iterator[Answer]:
    """The answers of a batch. index: the numbers of its sequences; a: their pre-outputs."""
    y = batch.y.detach().cpu().double()
    is_every = task.readout == "every"
    if not is_every:  # one step for each sequence
        a = a[None]
        y = y[None]
    probability = torch.empty(a.shape[0], a.shape[1], 0)
    if names.labels:
        probability, predicted = a.softmax(-1).max(-1, keepdim=True)
        predicted = predicted.double()
    else:
        assert isinstance(task, Data)
        mean, std = (torch.from_numpy(scale) for scale in task.description.target_scale())
        predicted = a * std + mean
        y = y.reshape(a.shape) * std + mean
    true = y.reshape(predicted.shape)
    if batch.mask is not None:
        true = true.masked_fill(batch.mask.cpu()[..., None] == 0, torch.nan)
    lengths = torch.ones(len(index), dtype=torch.long)
    if is_every:
        lengths = torch.as_tensor(batch.lengths)
    for j, (number, T) in enumerate(zip(index.tolist(), lengths.tolist(), strict=True)):
        yield Answer(
            number,
            true[:T, j].numpy(),
            predicted[:T, j].numpy(),
            probability[:T, j].reshape(-1).numpy(),
        )


def describe_split(
    names: TargetNames,
    answers: list[Answer],
    is_every: bool,
    ids: Sequence[str] | None,
    origins: Sequence[Origin] | None,
) -> JsonObject:
    """A split of held_out.json: counts or errors of all targets, and the targets that are kept.

    is_every: whether every step has a target. ids, origins: of the sequences, by their numbers.
    """
    true = np.concatenate([answer.true for answer in answers])
    predicted = np.concatenate([answer.predicted for answer in answers])
    described: JsonObject = {
        "sequences": len(answers),
        "targets": int(np.isfinite(true).any(1).sum()),
        "confusion": [],
        "uncounted": 0,
        "errors": [],
    }
    if names.labels:
        described |= count_confusions(true[:, 0], predicted[:, 0])
    else:
        described["errors"] = measure_errors(true, predicted)
    answers = sorted(answers, key=lambda answer: answer.number)
    width = max(1, true.shape[1])
    described["kept"] = keep_answers(answers, width, is_every, ids, origins)
    return described


def count_confusions(true: np.ndarray, predicted: np.ndarray) -> JsonObject:
    """How often each class was taken for each, as [true, predicted, count], the most first.

    Right answers are all counted, and of wrong ones the MOST_PAIRS most common pairs; "uncounted"
    are the rest.
    """
    known = np.isfinite(true)
    pairs = np.stack([true[known], predicted[known]], 1).astype(np.int64)
    different, counts = np.unique(pairs, axis=0, return_counts=True)
    rows = np.column_stack([different, counts])
    rows = rows[np.argsort(-rows[:, 2], kind="stable")]
    is_right = rows[:, 0] == rows[:, 1]
    wrong = rows[~is_right]
    counted = np.concatenate([rows[is_right], wrong[:MOST_PAIRS]])
    return {"confusion": counted.tolist(), "uncounted": int(wrong[MOST_PAIRS:, 2].sum())}


def measure_errors(true: np.ndarray, predicted: np.ndarray) -> list[JsonObject]:
    """For each output: the targets with a value, and the errors of the predictions, all of them.

    mae, rmse    the mean absolute error, and the root of the mean squared error
    r2           1 - sum of squared errors / sum of squared deviations of the targets from their
                 mean; None if the targets are all equal
    mean         the mean of target - prediction
    """
    rows: list[JsonObject] = []
    for k in range(true.shape[1]):
        known = np.isfinite(true[:, k]) & np.isfinite(predicted[:, k])
        error = true[known, k] - predicted[known, k]
        row: JsonObject = {"count": len(error)}
        if len(error):
            spread = np.square(true[known, k] - true[known, k].mean()).sum()
            row |= {
                "mae": float(np.abs(error).mean()),
                "rmse": float(np.sqrt(np.square(error).mean())),
                "mean": float(error.mean()),
                "r2": float(1 - np.square(error).sum() / spread) if spread else None,
            }
        rows.append(row)
    return rows


def keep_answers(
    answers: list[Answer],
    width: int,
    is_every: bool,
    names: Sequence[str] | None,
    origins: Sequence[Origin] | None,
) -> JsonObject:
    """Targets and predictions of a split, by output, with the names and times of their rows.

    width: numbers for each target; the other arguments are those of `describe_split`. Of too many
    sequences some are kept, evenly spaced; of long ones, with a target at every step, the last
    steps.
    """
    budget = max(1, MOST_VALUES // width)
    most = min(budget, MOST_SEQUENCES) if is_every else budget
    chosen = answers
    if len(answers) > most:
        chosen = [answers[i] for i in np.linspace(0, len(answers) - 1, most).astype(int)]
    steps = max(1, budget // len(chosen))
    ids = []
    series = []
    first = []
    times: list[str] = []
    for answer in chosen:
        T = len(answer.true)
        skipped = max(0, T - steps)
        ids.append(one_line(names[answer.number] if names else answer.number, MOST_TEXT))
        if origins is not None:
            origin = origins[answer.number]
            series.append(one_line(origin.series, MOST_TEXT))
            first.append(origin.first + skipped)
            times += [one_line(text, MOST_TEXT) for text in origin.times[skipped:]]
    true = np.concatenate([answer.true[-steps:] for answer in chosen])
    predicted = np.concatenate([answer.predicted[-steps:] for answer in chosen])
    probability = np.concatenate([answer.probability[-steps:] for answer in chosen])
    return {
        "ids": ids,
        "series": series,
        "first": first,
        "lengths": [min(steps, len(answer.true)) for answer in chosen],
        "times": times,
        "true": [short_numbers(column) for column in true.T],
        "predicted": [short_numbers(column) for column in predicted.T],
        "probability": [float(f"{p:.3g}") for p in probability],
    }


def short_numbers(values: np.ndarray) -> list[float | None]:
    """Numbers in DIGITS digits; None for those that are not finite."""
    return [float(f"{x:.{DIGITS}g}") if np.isfinite(x) else None for x in values]

"""One run on one prepared set: this package with given settings, or a plain loop around nn.LSTM.

run_ours(folder, name, settings, seed)    the course of a run: validations, and tests of the best
run_lstm(folder, name, seed)              the same for the loop
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from coadjoint.cli import build, flags
from coadjoint.objectives.batch import Batch
from coadjoint.tasks.data import Data
from coadjoint.tasks.task import Samples, Sequences
from coadjoint.training import loop, validation

VALID_SHARE = 0.15  # of the training sequences, where a set does not come with a validation part
Part = dict[str, np.ndarray]
Settings = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Prepared:
    """A set: kind and at as in `Data`, at "sample" for tables; its parts by name."""

    name: str
    kind: str
    at: str
    role: str
    parts: dict[str, Part]

    @property
    def is_higher_better(self) -> bool:
        """Whether its metric is an accuracy."""
        return self.kind == "classify"


def load(folder: Path, name: str, seed: int) -> Prepared:
    """A prepared set; what is missing, a validation part, is drawn by the seed."""
    meta = json.loads((folder / "sets.json").read_text(encoding="utf-8"))[name]
    parts: dict[str, Part] = {}
    with np.load(folder / f"{name}.npz") as file:
        for key in file.files:
            part, _, array = key.partition("_")
            parts.setdefault(part, {})[array] = file[key]
    if "valid" not in parts:
        train = parts["train"]
        y = train["y"] if meta["kind"] == "classify" else np.zeros(len(train["y"]))
        is_valid = draw_validation(y, seed)
        parts["valid"] = {key: array[is_valid] for key, array in train.items()}
        parts["train"] = {key: array[~is_valid] for key, array in train.items()}
    return Prepared(name, meta["kind"], meta["at"], meta["role"], parts)


def draw_validation(y: np.ndarray, seed: int) -> np.ndarray:
    """Which samples validate: VALID_SHARE of them, spread over the classes."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(y))
    by_class = order[np.argsort(y[order], kind="stable")]
    count = max(1, round(VALID_SHARE * len(y)))
    places = (np.arange(count) + 0.5) * len(y) / count
    is_valid = np.zeros(len(y), bool)
    is_valid[by_class[places.astype(int)]] = True
    return is_valid


def write_training_file(part: Part, path: Path) -> None:
    """The training part as an .npz that `Data.read` takes."""
    np.savez(path, **part)


def read_task(prepared: Prepared, path: Path, given: Settings) -> tuple[build.Config, Data]:
    """The config and the task of the training part; other parts are scaled as it is.

    Series are validated and tested as a whole: their state is carried from the first step on.
    """
    write_training_file(prepared.parts["train"], path)
    data = {"train": str(path), "kind": prepared.kind, "split": [1.0, 0.0, 0.0]}
    if prepared.at == "every" and prepared.kind != "next":
        data["at"] = "every"
    values = {key: dict(section) for key, section in given.items()}
    values["data"] = data | values.get("data", {})
    if prepared.at == "sample":
        values.setdefault("network", {}).setdefault("chain", "64x2")
    config = build.resolve_dependent_keys(flags.resolve(None, values))
    task = build.task_of(config)
    assert isinstance(task, Data)
    for name in ("valid", "test"):
        task.sets[name] = scaled(task, prepared.parts[name])
    task.splits = ("valid", "test")
    return config, task


def scaled(task: Data, part: Part) -> Sequences | Samples:
    """A part by the means and deviations of the training part."""
    d = task.description
    mean, std = np.array(d.mean, np.float32), np.array(d.std, np.float32)
    y: Any = part.get("y")
    if d.kind == "classify":
        number = {label: k for k, label in enumerate(d.labels)}
        y = np.vectorize(lambda label: number.get(label, 0))(y).astype(np.int64)
    elif d.kind == "regress":
        target_mean, target_std = d.target_scale()
        y = ((y.reshape(len(y), -1) - target_mean) / target_std).astype(np.float32)
    if "x" in part:
        return Samples((part["x"] - mean) / std, y)
    lengths = part.get("lengths", np.full(len(part["u"]), part["u"].shape[1]))
    u = [(row[:n] - mean) / std for row, n in zip(part["u"], lengths, strict=True)]
    if d.kind == "next":
        return Sequences([row[:-1] for row in u], [row[1:] for row in u])
    return Sequences(u, list(y))


Course = list[dict[str, float]]  # of validations: step, valid, loss, and test where it was measured


def run_ours(folder: Path, name: str, given: Settings, seed: int) -> dict[str, Any]:
    """Train with these settings; return the course of the run and what was resolved."""
    prepared = load(folder, name, seed)
    given = {key: dict(section) for key, section in given.items()}
    given.setdefault("training", {})["seed"] = seed
    with tempfile.TemporaryDirectory() as place:
        config, task = read_task(prepared, Path(place) / "train.npz", given)
    begin = time.perf_counter()
    config = build.resolve_defaults(config, task, "cpu")
    net = build.network_of(config, task, "cpu")
    arguments = build.train_arguments(config, net, task) | {"probes": 1, "nonfinite": "skip"}
    course: Course = []
    best = {"valid": math.inf, "loss": math.inf}
    sign = -1 if prepared.is_higher_better else 1

    def note(row: dict[str, Any]) -> None:
        """Test whenever the metric or the loss of the validation part is the best so far."""
        if row["kind"] != "held-out" or row["step"] == 0 or row.get("split") != "valid":
            return
        entry = {"step": row["step"], "valid": row[task.metric], "loss": row["loss"]}
        improved = False
        for key, value in (("valid", sign * entry["valid"]), ("loss", entry["loss"])):
            if value < best[key]:
                best[key] = value
                improved = True
        if improved or row["step"] >= arguments["steps"]:
            tested = validation.evaluate(net, task, "test", seed)
            entry["test"] = tested[task.metric]
        course.append(entry)

    loop.train(net, task, **arguments, loggers=[note])
    return {
        "course": course,
        "seconds": round(time.perf_counter() - begin, 2),
        "parameters": sum(p.numel() for p in net.parameters()),
        "steps": arguments["steps"],
    }


class PlainLSTM(nn.Module):
    """nn.LSTM with 64 units and a linear layer on its last step, or on every step."""

    def __init__(self, inputs: int, outputs: int, every: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, 64)
        self.linear = nn.Linear(64, outputs)
        self.every = every

    def forward(self, batch: Batch) -> Tensor:
        if self.every:
            out: Tensor = self.linear(self.lstm(batch.u)[0])
            return out
        packed = pack_padded_sequence(batch.u, batch.lengths, enforce_sorted=False)
        last: Tensor = self.linear(self.lstm(packed)[1][0][-1])
        return last


def lstm_loss(task: Data, a: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy or mean squared error, over all steps that count."""
    y = batch.y
    if task.readout == "every":
        is_step = torch.arange(len(a))[:, None] < batch.lengths
        a, y = a[is_step], y[is_step]
    if task.description.kind == "classify":
        return nn.functional.cross_entropy(a, y)
    return nn.functional.mse_loss(a, y.reshape(a.shape))


LSTM_BATCH = 32
LSTM_PATIENCE = 20  # validations
LSTM_STEPS = 2000  # at least, unless its patience ends it
LSTM_EPOCHS = 20  # at least


def run_lstm(folder: Path, name: str, window: int | None, seed: int) -> dict[str, Any]:
    """Train the plain loop: Adam with 1e-3, batches of 32, standardised inputs, early stopping."""
    prepared = load(folder, name, seed)
    data = {"data": {"window": window}} if window else {}
    with tempfile.TemporaryDirectory() as place:
        _, task = read_task(prepared, Path(place) / "train.npz", data)
    begin = time.perf_counter()
    torch.manual_seed(seed)
    net = PlainLSTM(task.inputs, task.outputs, task.readout == "every")
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    per_epoch = task.steps_per_epoch(LSTM_BATCH)
    steps = max(LSTM_EPOCHS * per_epoch, LSTM_STEPS)
    every = max(per_epoch, math.ceil(steps / 50))
    course: Course = []
    best = math.inf
    waited = 0
    for step in range(1, steps + 1):
        batch = task.batch(step - 1, LSTM_BATCH, seed)
        loss = lstm_loss(task, net(batch), batch)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % every and step < steps:
            continue
        measured = measure(net, task, "valid")
        entry = {"step": step, "valid": measured[task.metric], "loss": measured["loss"]}
        waited += 1
        if measured["loss"] < best:
            best, waited = measured["loss"], 0
            entry["test"] = measure(net, task, "test")[task.metric]
        course.append(entry)
        if waited >= LSTM_PATIENCE:
            break
    parameters = sum(p.numel() for p in net.parameters())
    seconds = round(time.perf_counter() - begin, 2)
    return {"course": course, "seconds": seconds, "parameters": parameters, "steps": steps}


def measure(net: Callable[[Batch], Tensor], task: Data, split: str) -> dict[str, float]:
    """The loss and the metric of a part, as `validation.evaluate` does it for a network of ours."""
    totals: dict[str, list[float]] = {}
    with torch.no_grad():
        for batch in task.held_out(split, 0):
            a = net(batch)
            count = float(len(batch.lengths))
            scores = {"loss": (float(lstm_loss(task, a, batch)) * count, count)}
            scores |= task.score(a, batch)
            for key, (total, weight) in scores.items():
                before = totals.setdefault(key, [0.0, 0.0])
                before[0] += total
                before[1] += weight
    return {key: total / weight for key, (total, weight) in totals.items()}


def outcome(course: Course, higher: bool, rule: str = "loss") -> float:
    """The test metric of the weights that a rule keeps: best by "valid" or "loss", or "last"."""
    if rule == "last":
        return course[-1].get("test", math.nan)
    tested = [entry for entry in course if "test" in entry]
    if not tested:
        return math.nan
    sign = -1 if higher and rule == "valid" else 1
    # Equal accuracies are decided by the loss, as a run does.
    chosen = min(tested, key=lambda entry: (sign * entry[rule], entry["loss"]))
    return chosen["test"]

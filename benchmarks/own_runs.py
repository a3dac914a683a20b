"""One run on one prepared set: this package with given settings, or a plain loop around nn.LSTM.

run_ours(folder, name, settings, seed)    the course of a run: validations, and tests of the best
run_lstm(folder, name, window, seed, device)    the same for the loop
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coadjoint.cli import build, build_task, flags
from coadjoint.cli.schema import Config
from coadjoint.objectives.batch import Batch
from coadjoint.tasks.data import Data
from coadjoint.tasks.task import Samples, Sequences
from coadjoint.training import loop, validation

TABLE_CHAIN = "256x2"  # the layers for a table
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
    def is_series(self) -> bool:
        """Whether it is one series whose next step is to be predicted."""
        return self.kind == "next" and len(self.parts["train"]["u"]) == 1

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


def read_task(prepared: Prepared, path: Path, given: Settings) -> tuple[Config, Data, Settings]:
    """The config, the task of the training part, and what was given; other parts are scaled alike.

    Series are validated and tested as a whole: their state is carried from the first step on.
    """
    if prepared.is_series:
        return read_series(prepared, path, given)
    arrays: dict[str, Any] = dict(prepared.parts["train"])
    np.savez(path, **arrays)
    data = {"train": str(path), "kind": prepared.kind, "split": [1.0, 0.0, 0.0]}
    if prepared.at == "every" and prepared.kind != "next":
        data["at"] = "every"
    values = {key: dict(section) for key, section in given.items()}
    values["data"] = data | values.get("data", {})
    if prepared.at == "sample":
        values.setdefault("network", {}).setdefault("chain", TABLE_CHAIN)
    config = build.resolve_dependent_keys(flags.resolve(None, values))
    task = build_task.task_of(config)
    assert isinstance(task, Data)
    for name in ("valid", "test"):
        task.sets[name] = scaled(task, prepared.parts[name])
    task.splits = ("valid", "test")
    return config, task, values


def read_series(prepared: Prepared, path: Path, given: Settings) -> tuple[Config, Data, Settings]:
    """The same for one series, read as a whole and split in order of time, as a user would."""
    parts = [prepared.parts[name]["u"] for name in ("train", "valid", "test")]
    whole = np.concatenate(parts, axis=1)
    np.savez(path, u=whole)
    values = {key: dict(section) for key, section in given.items()}
    shares = [part.shape[1] / whole.shape[1] for part in parts]
    data = {"train": str(path), "kind": "next", "split": shares}
    values["data"] = data | values.get("data", {})
    config = build.resolve_dependent_keys(flags.resolve(None, values))
    task = build_task.task_of(config)
    assert isinstance(task, Data)
    steps = [int(task.sets[name].steps()[0]) + 1 for name in ("train", "valid", "test")]
    assert steps == [part.shape[1] for part in parts], (prepared.name, steps)
    return config, task, values


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
        config, task, given = read_task(prepared, Path(place) / "train.npz", given)
    begin = time.perf_counter()
    config, _ = build.resolve_own_defaults(config, given, task)
    config = build.resolve_defaults(config, task, "cpu")
    net = build.network_of(config, task, "cpu")
    arguments = build.train_arguments(config, net, task) | {"probes": 1, "nonfinite": "skip"}
    course: Course = []
    watched = Watched(-1 if prepared.is_higher_better else 1)

    def note(row: dict[str, Any]) -> None:
        """Test whenever the metric or the loss of the validation part is the best so far."""
        if row["kind"] != "held-out" or row["step"] == 0 or row.get("split") != "valid":
            return
        entry = {"step": row["step"], "valid": row[task.metric], "loss": row["loss"]}
        if watched.improves(entry) or row["step"] >= arguments["steps"]:
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

    def forward(self, u: Tensor, lengths: Tensor) -> Tensor:
        """u [T, B, inputs], padded behind each sequence: [T, B, outputs] or [B, outputs]."""
        h = self.lstm(u)[0]
        if not self.every:
            # What comes behind the last step of a sequence does not reach it.
            h = h[lengths - 1, torch.arange(len(lengths), device=h.device)]
        out: Tensor = self.linear(h)
        return out


@dataclass(frozen=True)
class Padded:
    """A part of a set on the device of the loop: u [T, N, inputs], y, lengths [N]."""

    batch: Batch
    u: Tensor
    y: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, task: Data, split: str, device: str) -> Padded:
        """All sequences of a part."""
        part = task.sets[split]
        batch = part.batch(range(len(part)), task.readout == "every")
        tensors: Any = (batch.u, batch.y, batch.lengths)
        u, y, lengths = (x.to(device) for x in tensors)
        return cls(batch, u, y, lengths)

    def pick(self, chosen: Tensor, every: bool) -> tuple[Tensor, Tensor, Tensor]:
        """u, y and lengths of some sequences; steps that are padding for all are left out."""
        lengths = self.lengths[chosen]
        y = self.y[:, chosen] if every else self.y[chosen]
        return self.u[:, chosen], y, lengths


def lstm_loss(task: Data, a: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    """Cross-entropy or mean squared error, over all steps that count."""
    if task.readout == "every":
        is_step = torch.arange(len(a), device=a.device)[:, None] < lengths
        a, y = a[is_step], y[is_step]
    if task.description.kind == "classify":
        return nn.functional.cross_entropy(a, y)
    return nn.functional.mse_loss(a, y.reshape(a.shape))


LSTM_BATCH = 32
LSTM_PATIENCE = 20  # validations
LSTM_STEPS = 6000  # unless its patience ends it
LSTM_VALIDATIONS = 200


def run_lstm(
    folder: Path, name: str, window: int | None, seed: int, device: str = "cpu"
) -> dict[str, Any]:
    """Train the plain loop: Adam with 1e-3, batches of 32, standardised inputs, early stopping."""
    prepared = load(folder, name, seed)
    with tempfile.TemporaryDirectory() as place:
        _, task, _ = read_task(prepared, Path(place) / "train.npz", {"data": {"lags": [0]}})
    if window is not None:
        task.cut_training(window)
    begin = time.perf_counter()
    torch.manual_seed(seed)
    every = task.readout == "every"
    parts = {split: Padded.of(task, split, device) for split in ("train", "valid", "test")}
    train = parts["train"]
    net = PlainLSTM(task.inputs, task.outputs, every).to(device)
    optimiser = torch.optim.Adam(net.parameters(), 1e-3)
    interval = math.ceil(LSTM_STEPS / LSTM_VALIDATIONS)
    sign = -1 if prepared.is_higher_better else 1
    watched = Watched(sign)
    course: Course = []
    order = torch.empty(0, dtype=torch.int64, device=device)
    for step in range(1, LSTM_STEPS + 1):
        if len(order) == 0:
            order = torch.randperm(len(train.lengths), device=device)
        u, y, lengths = train.pick(order[:LSTM_BATCH], every)
        order = order[LSTM_BATCH:]
        loss = lstm_loss(task, net(u, lengths), y, lengths)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % interval:
            continue
        measured = measure(net, task, parts["valid"])
        entry = {"step": step, "valid": measured[task.metric], "loss": measured["loss"]}
        if watched.improves(entry):
            entry["test"] = measure(net, task, parts["test"])[task.metric]
        course.append(entry)
        if watched.waited >= LSTM_PATIENCE:
            break
    parameters = sum(p.numel() for p in net.parameters())
    seconds = round(time.perf_counter() - begin, 2)
    return {"course": course, "seconds": seconds, "parameters": parameters, "steps": step}


class Watched:
    """The best validation so far, by the loss and by the metric with the loss for ties.

    sign: -1 if more of the metric is better. waited: validations since the loss was the best.
    """

    def __init__(self, sign: int) -> None:
        self.sign = sign
        self.loss = math.inf
        self.metric = (math.inf, math.inf)
        self.waited = 0

    def improves(self, entry: dict[str, float]) -> bool:
        """Whether this validation is the best by either."""
        pair = (self.sign * entry["valid"], entry["loss"])
        by_loss = entry["loss"] < self.loss
        by_metric = pair < self.metric
        self.waited = 0 if by_loss else self.waited + 1
        self.loss = min(self.loss, entry["loss"])
        self.metric = min(self.metric, pair)
        return by_loss or by_metric


def measure(net: PlainLSTM, task: Data, part: Padded) -> dict[str, float]:
    """The loss and the metric of a part, as `validation.evaluate` does it for a network of ours."""
    with torch.no_grad():
        a = net(part.u, part.lengths)
        loss = float(lstm_loss(task, a, part.y, part.lengths))
        scores = task.score(a.cpu(), part.batch)
    measured = {key: total / weight for key, (total, weight) in scores.items()}
    return measured | {"loss": loss}


def chosen_entry(course: Course, higher: bool, rule: str) -> dict[str, float]:
    """The validation whose weights are kept: the best by "valid" or "loss", of those tested."""
    tested = [entry for entry in course if "test" in entry]
    sign = -1 if higher and rule == "valid" else 1
    # Equal accuracies are decided by the loss, as a run does.
    return min(tested, key=lambda entry: (sign * entry[rule], entry["loss"]))


def outcome(course: Course, higher: bool, rule: str = "loss") -> float:
    """The test metric of the weights that a rule keeps: best by "valid" or "loss", or "last"."""
    if rule == "last":
        return course[-1].get("test", math.nan)
    if not any("test" in entry for entry in course):
        return math.nan
    return chosen_entry(course, higher, rule)["test"]

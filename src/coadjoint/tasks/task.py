"""Task: a source of batches, and the rule by which outputs are judged. It never sees a network."""

from __future__ import annotations

import functools
import math
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError, check_seed, choose, whole_number
from ..objectives.batch import Batch
from ..objectives.losses import LossLike

STEPS = 100_000  # of a held-out batch, padding included
Scores = dict[
    str, tuple[float, float]
]  # name -> (total, count); a metric is the sum of totals over the sum of counts


def rng(seed: int, *keys: int | str) -> np.random.Generator:
    """The random numbers that belong to these keys and to no others: what a step draws does not depend on the past."""
    check_seed(seed)
    words = [zlib.crc32(key.encode()) if isinstance(key, str) else key for key in keys]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, len(words), *words])))


@dataclass(frozen=True)
class Goal:
    """Success: a metric of the held-out sequences that reaches a threshold."""

    metric: str
    threshold: float
    most: bool = False  # True: at most the threshold, False: at least

    def is_met(self, value: float) -> bool:
        return value <= self.threshold if self.most else value >= self.threshold

    def met(self, value: float) -> bool:
        """The same as `is_met`, by its name before 0.7.1."""
        warnings.warn("Goal.met is called Goal.is_met now.", DeprecationWarning, stacklevel=2)
        return self.is_met(value)

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.most else '>='} {self.threshold:g}"


class Task:
    """What a network reads and writes, where batches come from, and how outputs are judged.

    inputs, outputs  entries of u_t and of a
    readout          "last", "every", or "sequence" where the answer has a length of its own (an EncoderDecoder);
                     output: the output function; loss, reduce: as in Trajectory.loss
    metric, lower    the score that is watched, and whether less of it is better; goal: success, or None
    size             number of training sequences; None if they are generated without end
    splits           held-out sets: ("test",) or ("valid", "test")
    """

    name: str
    inputs: int
    outputs: int
    readout: str = "last"
    output: str = "identity"
    loss: LossLike = "squared"
    reduce: str = "sum"
    metric: str = "loss"
    lower: bool = True
    goal: Goal | None = None
    size: int | None = None
    splits: tuple[str, ...] = ("test",)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The training batch number `step` = 0, 1, ...: a function of its arguments alone, so a run can go on anywhere."""
        raise NotImplementedError

    def held_out(
        self, split: str, seed: int, draw: int | str = 0, n: int = 1000
    ) -> Iterator[Batch]:
        """The batches of a held-out set. Generated tasks draw `n` fresh sequences for each `draw`; finite ones give them all."""
        raise NotImplementedError

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Judge the pre-outputs a, [B, outputs] or [T, B, outputs]; of a sequence, those of what was said by itself."""
        raise NotImplementedError

    def show(self, a: Tensor, y: Tensor) -> list[tuple[str, str]]:
        """Target and prediction of a few sequences in words: a and y of one step, [B, outputs] and [B, ...], or, with
        readout "sequence", of whole answers [B, U, ...]."""
        if self.output == "softmax":
            return [(str(int(t)), str(int(p))) for t, p in zip(y, a.argmax(-1), strict=True)]
        if self.output == "sigmoid":
            on = lambda v: (
                " ".join(str(k) for k in v.reshape(-1).nonzero()[:, 0].tolist()) or "none"
            )
            return [(on(t), on(p)) for t, p in zip(y > 0.5, a > 0, strict=True)]
        tell = lambda v: " ".join(f"{x:.4g}" for x in v.reshape(-1).tolist())
        return [(tell(t), tell(p)) for t, p in zip(y, a, strict=True)]


def count_right(correct: Tensor) -> tuple[float, float]:
    """A score of one for each entry that is right."""
    return float(correct.sum()), float(correct.numel())


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences u_i [T_i, inputs] with targets y_i: a number or class each ("last"), or [T_i, ...] ("every"), or none."""

    u: Sequence[np.ndarray]
    y: Sequence[Any] | None = None
    ids: Sequence[str] | None = None

    def __len__(self) -> int:
        return len(self.u)

    def pick(self, index: Sequence[int] | np.ndarray) -> Sequences:
        of = lambda values: None if values is None else [values[i] for i in index]
        return Sequences([self.u[i] for i in index], of(self.y), of(self.ids))

    def batch(self, index: Sequence[int] | np.ndarray, every: bool, reduce: str = "sum") -> Batch:
        """The chosen sequences, padded with zeros to the longest."""
        u = [torch.from_numpy(np.ascontiguousarray(self.u[i])) for i in index]
        y = None
        if self.y is not None:
            rows = [torch.as_tensor(self.y[i]) for i in index]
            y = pad_sequence(rows) if every else torch.stack(rows)
        return Batch(pad_sequence(u), y, lengths=torch.tensor([len(s) for s in u]), reduce=reduce)


@functools.lru_cache(maxsize=4)
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order of n sequences in an epoch."""
    return rng(seed, "epoch", epoch).permutation(n)


class Collection(Task):
    """A finite set of sequences in splits: "train", and "valid" and "test" where there are any.

    Training runs through a new permutation in each epoch; the last batch of an epoch may be smaller.
    """

    def __init__(self, sets: dict[str, Sequences]) -> None:
        if not len(sets.get("train", Sequences([]))):
            raise InputError(f"task '{self.name}' has no training sequences.")
        self.sets = sets
        self.size = len(sets["train"])
        self.splits = tuple(s for s in ("valid", "test") if s in sets and len(sets[s]))

    def steps_per_epoch(self, size: int) -> int:
        return math.ceil(len(self.sets["train"]) / size)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        check_seed(seed)
        epoch, k = divmod(
            whole_number("step", step, 0, 2**62), self.steps_per_epoch(whole_number("size", size))
        )
        return self._of(
            "train", permutation(len(self.sets["train"]), seed, epoch)[k * size : (k + 1) * size]
        )

    def held_out(
        self, split: str, seed: int, draw: int | str = 0, n: int = 1000
    ) -> Iterator[Batch]:
        """All sequences of a split, in batches of at most `n`, short ones together so that little is padded."""
        whole_number("n", n)
        lengths = np.array([len(u) for u in self.sets[choose("split", split, self.sets)].u])
        order, begin = np.argsort(lengths, kind="stable"), 0
        for end in range(1, len(order) + 1):
            more = (
                end < len(order)
                and end - begin < n
                and (end + 1 - begin) * lengths[order[end]] <= STEPS
            )
            if not more:
                yield self._of(split, order[begin:end])
                begin = end

    def _of(self, split: str, index: Sequence[int] | np.ndarray) -> Batch:
        return self.sets[split].batch(index, self.readout == "every", self.reduce)

"""Task: a source of batches, and the rule by which outputs are judged. It never sees a network."""

from __future__ import annotations

import functools
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError, check_seed, choose, whole_number
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from .metrics import Tally

LARGEST_BATCH = 100_000  # time steps of a held-out batch, padding included
MOST_NUMBERS = 100  # shown of one target
ENTRIES_PER_STEP = 100  # of a sample without time: as many entries count as one time step

# Scores by name as (total, count): a metric is the sum of totals over the sum of counts.
Scores = dict[str, tuple[float, float]]
Index = Sequence[int] | np.ndarray


def rng(seed: int, *keys: int | str) -> np.random.Generator:
    """Return a generator of the random numbers that belong to this seed and these keys alone.

    What a training step draws therefore does not depend on the steps before it.
    """
    check_seed(seed)
    words = [zlib.crc32(key.encode()) if isinstance(key, str) else key for key in keys]
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, len(words), *words])))


@dataclass(frozen=True)
class Goal:
    """Success: a metric of the held-out sequences reaches a threshold."""

    metric: str
    threshold: float
    most: bool = False  # True: at most the threshold; False: at least

    def is_met(self, value: float) -> bool:
        """Tell whether `value` of the metric is a success."""
        return value <= self.threshold if self.most else value >= self.threshold

    def met(self, value: float) -> bool:
        """Do the same as `is_met`: its old name."""
        message = "Goal.met is now Goal.is_met; the old name will be removed in 1.0."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.is_met(value)

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.most else '>='} {self.threshold:g}"


class Task:
    """What a network reads and writes, where batches come from, and how outputs are judged.

    inputs, outputs  the entries of u_t (of a sample without time) and of a
    shape            the shape of a sample without time, such as (1, 8, 8); None for sequences
    image_shape      (channels, height, width) of a sample that is an image, for pictures of it;
                     None for a sample without, and for one whose `shape` says it
    readout          "last", "every", or "sequence" if the answer has its own length (for an
                     EncoderDecoder)
    output           the output function
    loss, reduce     as in Trajectory.loss
    metric           the score to watch
    lower            whether less of the metric is better
    goal             the metric's threshold for success, or None
    size             the number of training sequences; None if they are generated without end
    splits           the held-out sets: ("test",) or ("valid", "test")
    """

    name: str
    inputs: int
    outputs: int
    shape: tuple[int, ...] | None = None
    image_shape: tuple[int, ...] | None = None
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
        """Return training batch number `step` = 0, 1, ..., of `size` sequences.

        It depends on these arguments alone, so a run can resume at any step.
        """
        raise NotImplementedError

    def held_out(
        self, split: str, seed: int, draw: int | str = 0, n: int = 1000
    ) -> Iterator[Batch]:
        """Yield the batches of a held-out set.

        A generated task draws `n` new sequences for each `draw`; a finite one yields all it has.
        """
        raise NotImplementedError

    def score(self, a: Tensor, batch: Batch) -> Scores:
        """Judge the pre-outputs a, [B, outputs] or [T, B, outputs].

        With readout "sequence", a belongs to the tokens that the network chose itself.
        """
        raise NotImplementedError

    def reduce_by(self, reduce: str) -> None:
        """Let the loss of a sequence be the "mean" or the "sum" over its time steps (or tokens).

        It holds in training and on held-out sequences. Refused for a task with one target for each
        sequence; metrics other than the loss stay as they are.
        """
        choose("reduce", reduce, ("mean", "sum"))
        if self.readout == "last":
            raise InputError(
                "reduce is over the time steps of a sequence with a target at every step; this "
                "task has one target for each sequence or sample."
            )
        self.reduce = reduce

    @property
    def selectors(self) -> dict[str, bool]:
        """The metrics that may choose the best weights, and whether less of each is better."""
        return {"loss": True, self.metric: self.lower}

    def selector(self, name: str | None = None) -> tuple[str, bool]:
        """Return the metric that chooses the best weights, and whether less of it is better.

        name: one of `selectors`; None is the task's own metric.
        """
        chosen = self.metric if name is None else choose("metric", name, self.selectors)
        return chosen, self.selectors[chosen]

    def tally(self) -> Tally | None:
        """Return what collects the metrics that are no means over entries; None without any.

        It is given the entries of `counted_entries`, batch by batch.
        """
        return None

    def counted_entries(self, a: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the pre-outputs [n, outputs] and targets [n, ...] of the entries that count."""
        return a.detach(), batch.y.to(a.device)

    def show(self, a: Tensor, y: Tensor) -> list[tuple[str, str]]:
        """Return target and prediction of a few sequences as text.

        a and y are those of one step, [B, outputs] and [B, ...]; with readout "sequence" those of
        complete answers, [B, U, ...].
        """
        if self.output == "softmax":
            return pairs_of_text(class_text, y, a.argmax(-1))
        if self.output == "sigmoid":
            return pairs_of_text(list_true, y > 0.5, a > 0)
        return pairs_of_text(list_numbers, y, a)

    def as_images(self, values: Tensor) -> Tensor | None:
        """Return inputs, targets or outputs [B, ...] as images [B, channels, height, width].

        None if the samples of this task are no images: they have neither an `image_shape` nor three
        axes.
        """
        shape = self.image_shape or self.shape
        if shape is None or len(shape) != 3:
            return None
        return values.reshape(-1, *shape)


def pairs_of_text(
    text: Callable[[Tensor], str], targets: Tensor, guesses: Tensor
) -> list[tuple[str, str]]:
    """Return the text of each target with that of its guess."""
    return [(text(target), text(guess)) for target, guess in zip(targets, guesses, strict=True)]


def class_text(number: Tensor) -> str:
    """Return a class number as text."""
    return str(int(number))


def list_true(on: Tensor) -> str:
    """Return the numbers of the entries that are true, as text: "0 4", or "none"."""
    numbers = on.reshape(-1).nonzero()[:, 0].tolist()
    return " ".join(map(str, numbers)) or "none"


def list_numbers(values: Tensor) -> str:
    """Return numbers as text, with four digits each; of very many, the first MOST_NUMBERS."""
    numbers = values.reshape(-1)
    text = " ".join(f"{x:.4g}" for x in numbers[:MOST_NUMBERS].tolist())
    return text if len(numbers) <= MOST_NUMBERS else f"{text} … ({len(numbers):,} numbers)"


def count_right(correct: Tensor) -> tuple[float, float]:
    """Return the score (number of true entries, number of entries)."""
    return float(correct.sum()), float(correct.numel())


class Origin(NamedTuple):
    """Where the targets of a sequence stand in its file.

    series  the name of the series that the sequence is, or is a window of
    first   the row of the first target within the series, counted from 0
    times   the time of each target as the file has it; () if it has none
    """

    series: str
    first: int
    times: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences u_i [T_i, inputs] with their targets and names.

    y        one target for each: a number or class (readout "last"), or [T_i, ...] ("every"); or
             None
    origins  where the targets of each stand in its file; None if they come from no file
    """

    u: Sequence[np.ndarray]
    y: Sequence[np.ndarray | float] | None = None
    ids: Sequence[str] | None = None
    origins: Sequence[Origin] | None = None

    def __len__(self) -> int:
        return len(self.u)

    def steps(self) -> np.ndarray:
        """Return the time steps of each sequence, [N]."""
        lengths = getattr(self.u, "lengths", None)  # of sequences on disk: none of them is read
        return np.array(list(map(len, self.u))) if lengths is None else lengths

    def pick(self, index: Index) -> Sequences:
        """Return the sequences with these numbers, in their order."""
        u = [self.u[int(i)] for i in index]
        y = None if self.y is None else [self.y[int(i)] for i in index]
        ids = None if self.ids is None else [self.ids[i] for i in index]
        origins = None if self.origins is None else [self.origins[i] for i in index]
        return Sequences(u, y, ids, origins)

    def batch(self, index: Index, every: bool, reduce: str = "sum") -> Batch:
        """Return the chosen sequences, padded with zeros to the longest.

        Args:
            index: Their numbers.
            every: Whether each step has a target.
            reduce: As in Batch.
        """
        u = [torch.from_numpy(np.ascontiguousarray(self.u[i])) for i in index]
        y = None
        if self.y is not None:
            targets = [torch.as_tensor(self.y[i]) for i in index]
            y = pad_sequence(targets) if every else torch.stack(targets)
        lengths = torch.tensor(list(map(len, u)))
        return Batch(pad_sequence(u), y, lengths=lengths, reduce=reduce)


def steps_for_entries(entries: int) -> int:
    """Return how many time steps a sample without time counts as."""
    return math.ceil(entries / ENTRIES_PER_STEP)


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples without time, with their targets and names.

    x  [N, ...], an array whose first axis counts them
    y  [N] numbers or classes, or [N, outputs]; or None

    Example:
        >>> import numpy as np
        >>> from coadjoint.tasks import Samples
        >>> images = Samples(np.zeros((5, 1, 8, 8), np.float32), np.arange(5))
        >>> images.batch([3, 0]).u.shape
        torch.Size([2, 1, 8, 8])
    """

    x: np.ndarray
    y: np.ndarray | None = None
    ids: Sequence[str] | None = None

    def __post_init__(self) -> None:
        counts = [len(values) for values in (self.x, self.y, self.ids) if values is not None]
        if len(set(counts)) > 1:
            raise InputError(
                f"x, y and ids must have as many entries as there are samples; got {counts}."
            )

    def __len__(self) -> int:
        return len(self.x)

    def steps(self) -> np.ndarray:
        """Return how many time steps each sample counts as, by its entries, [N]."""
        return np.full(len(self), steps_for_entries(math.prod(self.x.shape[1:])))

    def pick(self, index: Index) -> Samples:
        """Return the samples with these numbers, in their order."""
        chosen = np.asarray(index, dtype=np.int64)
        y = None if self.y is None else self.y[chosen]
        ids = None if self.ids is None else [self.ids[i] for i in chosen]
        return Samples(self.x[chosen], y, ids)

    def batch(self, index: Index, every: bool = False, reduce: str = "sum") -> Batch:
        """Return the chosen samples, along axis 0.

        Args:
            index: Their numbers.
            every: Whether each time step has a target: never.
            reduce: As in Batch.
        """
        if every:
            raise InputError("samples without time have one target each; got readout 'every'.")
        chosen = self.pick(index)
        y = None if chosen.y is None else torch.from_numpy(chosen.y)
        return Batch(torch.from_numpy(chosen.x), y, reduce=reduce, axis=0)


@functools.lru_cache(maxsize=4)
def permutation(n: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of n sequences in an epoch."""
    return rng(seed, "epoch", epoch).permutation(n)


class Collection(Task):
    """A finite set of sequences, or samples, in splits: "train", perhaps "valid" and "test".

    Training goes through a new permutation in each epoch. The last batch of an epoch may be
    smaller.
    """

    def __init__(self, sets: Mapping[str, Sequences | Samples]) -> None:
        if not len(sets.get("train", ())):
            raise InputError(f"task '{self.name}' has no training sequences.")
        self.sets: dict[str, Sequences | Samples] = dict(sets)
        self.size = len(sets["train"])
        self.splits = tuple(s for s in ("valid", "test") if s in sets and len(sets[s]))

    def steps_per_epoch(self, size: int) -> int:
        """Return the number of batches of `size` sequences in an epoch."""
        return math.ceil(len(self.sets["train"]) / size)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Return training batch number `step`, a part of its epoch's permutation."""
        check_seed(seed)
        step = whole_number("step", step, 0, 2**62)
        # Batch k of this epoch.
        epoch, k = divmod(step, self.steps_per_epoch(whole_number("size", size)))
        order = permutation(len(self.sets["train"]), seed, epoch)
        return self._batch_of("train", order[k * size : (k + 1) * size])

    def held_out(
        self, split: str, seed: int, draw: int | str = 0, n: int = 1000
    ) -> Iterator[Batch]:
        """Yield all sequences of a split in batches of at most `n`.

        They come in order of length, so that batches hold little padding. A batch ends before its
        padded steps exceed LARGEST_BATCH. seed and draw are not needed.
        """
        for index in self.held_out_indices(split, n):
            yield self._batch_of(split, index)

    def held_out_indices(self, split: str, n: int = 1000) -> Iterator[np.ndarray]:
        """Yield the numbers of the sequences in each batch of `held_out`, in their order."""
        whole_number("n", n)
        lengths = self.sets[choose("split", split, self.sets)].steps()
        order = np.argsort(lengths, kind="stable")
        begin = 0
        for end in range(1, len(order) + 1):
            if end < len(order) and end - begin < n:
                steps_with_next = (end + 1 - begin) * lengths[order[end]]
                if steps_with_next <= LARGEST_BATCH:
                    continue
            yield order[begin:end]
            begin = end

    def held_out_batch(self, split: str, index: Index) -> Batch:
        """Return the sequences of a split with these numbers, as `held_out` yields them."""
        return self._batch_of(split, index)

    def _batch_of(self, split: str, index: Index) -> Batch:
        """Return the sequences or samples of a split with these numbers, as a batch."""
        return self.sets[split].batch(index, self.readout == "every", self.reduce)

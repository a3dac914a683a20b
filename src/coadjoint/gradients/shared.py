"""Shared: one gradient by many processes."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import errors
from ..errors import CoadjointError, InputError, NumericalError, Unsupported, check_kind
from ..networks.interface import Net
from ..objectives.batch import SAMPLE_AXIS, Batch
from ..objectives.draws import drawing
from ..objectives.losses import LossLike
from ..sweeps.layout import tensor_of
from .evaluation import Evaluation, Gradient, GradientTuple, evaluation_without_run
from .method import Method, check_arguments, trained_parameters
from .penalised import Penalised
from .processes import (
    add_up_and_tell,
    drawing_by,
    gather_objects,
    own_shards,
    process_count,
    sum_rows,
)
from .trial import ENOUGH, Trial

Fault = tuple[int, str, str]  # of a shard: its number, the name of its error, the text


class Shared(Method):
    """One gradient by many processes: each evaluates a share of the batch.

    Every process is given the same network and the same batch. The samples are dealt out to S
    shards of n_s samples, so that all have about as many time steps, and

        gradient = sum over s of n_s / B gradient_s

    is the gradient of the whole batch, as are losses and penalties. It is the same on all
    processes, which exchange one vector for each shard.

    Args:
        method: BPTT() (the default), Penalised(...), Truncated(...), RTRL(...), or one's own
            whose gradient is a mean over samples.
        shards: S. None: one for each process; the result is that of one process up to rounding. A
            number: so many, whatever the number of processes, summed in their order, so that the
            bits are the same on any number of processes up to S.

    Dropout and zoneout draw by shard: the draws of a shard are the same on any number of processes.
    Penalties that draw directions draw by sample, the same as without shards.

    Refused: 'omega-published', one value for the whole batch; a loss, a penalty, a method, a step
    function or a map of one's own that mixes samples, see trial.py; a method that keeps a state of
    its own; more processes than shards.

    Processes are those of torch.distributed (see docs/scale.md for torchrun). Without a process
    group there is one, which evaluates all shards:

        >>> import torch, coadjoint as co
        >>> _ = torch.manual_seed(0)
        >>> net = co.Network("gru", inputs=1, hidden=2, outputs=1).double()
        >>> batch = co.Batch(torch.ones(5, 3, 1).double(), torch.zeros(3, 1).double())
        >>> whole = co.BPTT()(net, batch, "squared").gradient
        >>> shared = co.Shared(co.BPTT(), shards=2)(net, batch, "squared").gradient
        >>> all(torch.allclose(whole[name], shared[name]) for name in whole)
        True
    """

    def __init__(self, method: Method, shards: int | None = None) -> None:
        check_kind("method", method, Method, "a gradient method like co.BPTT()")
        if isinstance(method, Shared):
            raise InputError("this method is shared already: give shards to one co.Shared alone.")
        if shards is not None:
            errors.whole_number("shards", shards)
        self.method = method
        self.shards = shards
        self.segments = method.segments
        self.state = method.state  # the same object: what changes there, changes here
        self.read_signal: Callable[[], int] = int  # what to tell the others; int() is 0, nothing
        self.heard = 0  # the largest number that any process has told so far
        self.trial = Trial()
        refuse_if_mixing(method)
        self._refuse_own_state()

    @property
    def is_checked(self) -> bool:
        """Whether parts of one's own were seen to treat samples apart; True if there are none."""
        trial = self.trial
        return trial.net is not None and (not trial.own or trial.tried >= ENOUGH)

    @property
    def step(self) -> int:
        """The step of the method inside, if it counts steps."""
        step: int = getattr(self.method, "step")  # noqa: B009  -- only some methods have it
        return step

    @step.setter
    def step(self, step: int) -> None:
        setattr(self.method, "step", step)  # noqa: B010

    def __call__(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        """Compute the gradient, and count a step if the method inside does."""
        evaluation = self.evaluate(net, batch, loss)
        if hasattr(self.method, "step"):
            self.step += 1
        return evaluation

    def sweeps(self, net: Net, T: int) -> float:
        """Return how many sweeps over a sequence of T steps one gradient costs, in all."""
        return self.method.sweeps(net, T)

    def per_sample(self, net: Net, batch: Batch, loss: LossLike) -> Gradient:
        """Compute the gradients of single samples, as the method inside does; nothing is shared."""
        return self.method.per_sample(net, batch, loss)

    def evaluate(self, net: Net, batch: Batch, loss: LossLike) -> Evaluation:
        """Compute the gradient of the whole batch; every process must call this."""
        batch = check_arguments(net, batch)
        shards = self._shard_count()
        self._refuse_own_state()
        cut = self._cut(net, batch, loss, shards)
        self.method.begin_step()
        before = dict(self.state)
        factors = objective_factors(self.method)
        self.trial.check(self.method, net, batch, loss, factors)
        flat = FlatEvaluation(trained_parameters(net), cut.B, self.method.summed_state)

        def evaluate_shard(part: Batch, index: Sequence[int], row: Tensor) -> None:
            """Fill in the row of one shard."""
            self.state.update(before)
            evaluation = self.method.evaluate(net, part, loss)
            refuse_other_factors(self.method, evaluation, factors)
            sums = [self.state[name] - before[name] for name in flat.sums]
            flat.write(row, evaluation, index, sums)

        rows = torch.zeros(
            len(own_shards(shards)), flat.width, dtype=flat.dtype, device=flat.device
        )
        total = self._combine(cut, shards, rows, evaluate_shard)
        self.state.update(before)
        for name, value in flat.read_sums(total).items():
            # Counts stay whole numbers.
            kind = type(before[name])
            self.state[name] = before[name] + kind(value)
        rho, share = factors
        return evaluation_without_run(net, batch, loss, flat.read(total), rho, share)

    def value(self, net: Net, batch: Batch, loss: LossLike) -> float:
        """Compute the objective without its gradient; every process must call this."""
        batch = check_arguments(net, batch)
        shards = self._shard_count()
        cut = self._cut(net, batch, loss, shards)
        rows = torch.zeros(len(own_shards(shards)), 1 + NOTES, dtype=torch.float64)

        def evaluate_shard(part: Batch, index: Sequence[int], row: Tensor) -> None:
            """Write the objective of one shard into its row."""
            row[0] = self.method.value(net, part, loss) * (len(index) / cut.B)

        return float(self._combine(cut, shards, rows, evaluate_shard)[0])

    def _shard_count(self) -> int:
        """The number of shards; fewer than there are processes are refused."""
        P = process_count()
        shards = self.shards or P
        if shards < P:
            raise InputError(
                f"{P} processes cannot share {shards} shard{'s' if shards > 1 else ''}: start at "
                f"most {shards}."
            )
        return shards

    def _cut(self, net: Net, batch: Batch, loss: LossLike, shards: int) -> Cut:
        """Cut the batch into shards; one that cannot be cut is refused as the method would."""
        try:
            return Cut.of(batch, net.readout, shards)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            self.method.value(net, batch, loss)  # says what is wrong with the batch
            if isinstance(error, CoadjointError):
                raise
            raise InputError(
                f"this batch cannot be cut into shards: {errors.error_text(error)}."
            ) from None

    def _combine(
        self,
        cut: Cut,
        shards: int,
        rows: Tensor,
        evaluate_shard: Callable[[Batch, Sequence[int], Tensor], None],
    ) -> Tensor:
        """Evaluate the shards of this process into `rows`; return the sum over all shards.

        The last NOTES entries of a row say whether something went wrong, what this process wants
        the others to know, and which batch it was given. An error in one shard is raised by all.
        """
        faults: list[Fault] = []
        # All processes draw the same number, and go on from the same state.
        seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        for row, k in zip(rows, own_shards(shards), strict=True):
            row[-1] = cut.mark
            if k not in cut.parts:
                continue
            index = cut.dealt[k]
            part = cut.parts[k]
            try:
                with drawing_by(seed + k), drawing(samples=tuple(index)):
                    evaluate_shard(part, index, row)
            except CoadjointError as error:
                row[:-2] = 0
                row[-3] = 1
                faults.append((k, type(error).__name__, str(error)))
        rows[:, -2] = self.read_signal()
        if self.shards is None:
            total, marks = add_up_and_tell(rows[0], cut.mark)
            refuse_different_batches(marks)
            self.heard = max(self.heard, int(total[-2] > 0))
        else:
            total, notes = sum_rows(rows, shards, NOTES)
            refuse_different_batches(notes[:, -1].tolist())
            self.heard = max(self.heard, int(notes[:, -2].max()))
        if total[-3] > 0:
            raise_first(faults, shards)
        return total

    def _refuse_own_state(self) -> None:
        """Refuse a method whose state is more than a step, a weight and sums over samples."""
        own = set(self.method.state) - {"step", "rho", *self.method.summed_state}
        if own:
            raise Unsupported(
                f"{type(self.method).__name__} keeps a state of its own "
                f"({', '.join(sorted(own))}), which processes cannot share: name sums over samples "
                "in summed_state, or train with one process."
            )


LOOKED_AT = 64  # entries of a tensor, spread evenly, by which batches are compared
NOTES = 3  # entries at the end of a row: fault, signal, fingerprint of the batch


@dataclass(frozen=True)
class Cut:
    """A batch cut into shards."""

    B: int
    mark: float  # the fingerprint of the whole batch
    dealt: list[list[int]]  # the samples of every shard
    parts: dict[int, Batch]  # the shards of this process that have samples, by their numbers

    @staticmethod
    def of(batch: Batch, readout: str, shards: int) -> Cut:
        """Cut a batch for a network with this readout."""
        sizes = batch.sizes.tolist()
        refuse_other_counts(batch, readout, len(sizes))
        dealt = deal(sizes, shards)
        parts = {}
        for k in own_shards(shards):
            if len(dealt[k]) == len(sizes):
                parts[k] = batch
            elif dealt[k]:
                parts[k] = batch.select(dealt[k], readout)
        return Cut(len(sizes), fingerprint(batch), dealt, parts)


@dataclass
class FlatEvaluation:
    """The places of gradient, losses, penalties and sums in one row.

    gradient | losses [B] | penalties [B] | sums | notes
    """

    parameters: dict[str, nn.Parameter]
    B: int
    sums: tuple[str, ...]

    def __post_init__(self) -> None:
        like = next(iter(self.parameters.values()))
        self.dtype = like.dtype
        self.device = like.device
        self.n = sum(p.numel() for p in self.parameters.values())
        self.width = self.n + 2 * self.B + len(self.sums) + NOTES

    def write(
        self, row: Tensor, evaluation: Evaluation, index: Sequence[int], sums: Sequence[float]
    ) -> None:
        """Fill in the evaluation of the samples `index`, its gradient weighted by their share."""
        parts = [evaluation.gradient[name].reshape(-1) for name in self.parameters]
        row[: self.n] = torch.cat(parts) * (len(index) / self.B)
        places = torch.tensor(index, device=row.device)
        row[self.n + places] = evaluation.losses
        row[self.n + self.B + places] = evaluation.penalties
        if sums:
            row[-NOTES - len(sums) : -NOTES] = torch.tensor(sums, dtype=row.dtype)

    def read(self, row: Tensor) -> GradientTuple:
        """The losses, penalties and gradient of the whole batch."""
        gradient = {}
        start = 0
        for name, p in self.parameters.items():
            gradient[name] = row[start : start + p.numel()].view_as(p).clone()
            start += p.numel()
        losses = row[start : start + self.B].clone()
        penalties = row[start + self.B : start + 2 * self.B].clone()
        return GradientTuple(losses, penalties, gradient)

    def read_sums(self, row: Tensor) -> dict[str, float]:
        """The sums over all samples, by name."""
        if not self.sums:
            return {}
        values = row[-NOTES - len(self.sums) : -NOTES].tolist()
        return dict(zip(self.sums, values, strict=True))


def unshared(method: Method) -> Method:
    """The method that a Shared one wraps; any other method as it is."""
    return method.method if isinstance(method, Shared) else method


def deal(sizes: Sequence[int], shards: int) -> list[list[int]]:
    """Deal samples out to shards, so that they have about as many time steps.

    The longest come first, forth and back over the shards. Of fewer samples than shards, some
    shards have none. The samples of a shard stay in their order.

    >>> deal([5, 9, 7, 2, 8], 2)
    [[0, 1, 3], [2, 4]]
    """
    order = sorted(range(len(sizes)), key=lambda j: -sizes[j])
    dealt: list[list[int]] = [[] for _ in range(shards)]
    for k, j in enumerate(order):
        lap, place = divmod(k, shards)
        dealt[place if lap % 2 == 0 else shards - 1 - place].append(j)
    return [sorted(index) for index in dealt]


def refuse_other_counts(batch: Batch, readout: str, B: int) -> None:
    """Refuse targets, masks, weights or states of another number of samples than u has."""
    axis = SAMPLE_AXIS[readout]
    counted = [("y", batch.y, axis), ("mask", batch.mask, axis), ("weight", batch.weight, 0)]
    if batch.x0 is not None and batch.x0.dim() > 1:  # [n] is one state for all samples
        counted.append(("x0", batch.x0, 0))
    for name, values, place in counted:
        if values is not None and tensor_of(name, values).shape[place] != B:
            raise InputError(f"{name} must have {B} samples, as u has.")


def refuse_if_mixing(method: Method) -> None:
    """Refuse a penalty that is known to mix samples."""
    if isinstance(method, Penalised) and method.penalty.mixes_samples:
        raise Unsupported(
            f"penalty '{method.penalty.name}' is one value for the whole batch, which processes "
            "cannot share: use 'omega', or train with one process."
        )


def objective_factors(method: Method) -> tuple[float, float]:
    """The weight rho of the penalty and the factor of the loss, in the present step."""
    if isinstance(method, Penalised):
        return method.rho(method.step), method.share
    return 0.0, 1.0


def refuse_other_factors(
    method: Method, evaluation: Evaluation, factors: tuple[float, float]
) -> None:
    """Refuse a method of one's own that weighs a penalty: other processes do not know how."""
    if (evaluation.rho, evaluation.share) != factors:
        raise Unsupported(
            f"{type(method).__name__} weighs a penalty by a rule of its own, which processes "
            "cannot share: use co.Penalised."
        )


def fingerprint(batch: Batch) -> float:
    """A number below 2^20, so exact in any dtype, by which processes see that batches differ."""
    words = batch.sizes.tolist()
    for values in (batch.u, batch.y, batch.weight):
        if isinstance(values, Tensor):
            entries = values.reshape(-1)
            words += entries[:: 1 + len(entries) // LOOKED_AT].tolist()
    return float(zlib.crc32(repr(words).encode()) % 2**20)


def refuse_different_batches(prints: Sequence[float]) -> None:
    """Refuse batches that are not the same on all processes."""
    if len(set(prints)) > 1:
        raise InputError(
            "the processes were given different batches: each must draw the same one, by the same "
            "seed, from the same data."
        )


def raise_first(faults: list[Fault], shards: int) -> None:
    """Raise the error of the first shard that has one, the same in every process."""
    found: list[Fault] = []
    for of_process in gather_objects(faults):
        found += of_process
    k, name, text = min(found)
    kind = getattr(errors, name, NumericalError)
    error: CoadjointError = kind.__new__(
        kind, f"{text.rstrip('.')} (in shard {k + 1} of {shards})."
    )
    raise error

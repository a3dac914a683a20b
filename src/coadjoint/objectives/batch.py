"""Batch: the data that a gradient method is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from ..errors import InputError, KindError, brief, choose
from ..sweeps.layout import tensor_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

MOVED = ("u", "y", "mask", "weight", "x0")  # the tensors of a batch
# By the readout: where y and mask have their samples, and whether they begin with u's time steps.
SAMPLE_AXIS = {"last": 0, "every": 1, "sequence": 1}
HAS_STEPS_OF_U = {"last": False, "every": True, "sequence": False}


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets of B samples.

    u        [T, B, inputs], a list of [T_i, inputs], or a PackedSequence
    y        [B, ...] for readout "last", [T, B, ...] for readout "every"; None if the loss takes
             y_hat alone
    lengths  [B], if samples end before T
    mask     [T, B] (or [B]) weights of the loss's entries; 0 leaves one out
    weight   [B] weights of the samples: the objective is the mean over samples of
             weight_j (L_j + rho G_j)
    x0       [B, n] or [n], the initial states
    reduce   "sum" or "mean" of a sample's loss over its steps
    axis     the axis of u along which its samples lie: 1 for sequences, time-major; 0 for inputs
             [B, ...] without time. None, the default: as the network reads it, 0 for a co.Chain

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> batch = co.Batch(torch.zeros(5, 3, 2), y=torch.tensor([0, 1, 0]), lengths=[5, 2, 4])
        >>> batch.sizes
        tensor([5, 2, 4])
        >>> batch.select([1, 2]).u.shape
        torch.Size([4, 2, 2])
    """

    u: Any
    y: Any = None
    lengths: ArrayLike | None = None
    mask: Tensor | None = None
    weight: Tensor | None = None
    x0: Tensor | None = None
    reduce: str = "sum"
    axis: int | None = None

    def __post_init__(self) -> None:
        if self.axis not in (None, 0, 1) or isinstance(self.axis, bool):  # True equals 1
            raise InputError(f"axis is that of the samples in u, 0 or 1; got {brief(self.axis)}.")

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Batch:
        """The batch with its real numbers in `dtype`, on `device`. Class numbers stay integers."""
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise KindError(
                "dtype must be a real floating-point dtype such as torch.float64; got "
                f"{brief(dtype)}."
            )
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError, ValueError):
            raise InputError(
                f"device must be a torch device such as 'cpu' or 'cuda'; got {brief(device)}."
            ) from None

        parts: dict[str, Tensor] = {}  # those that have to be moved
        for name in MOVED:
            values = getattr(self, name)
            if not isinstance(values, Tensor):  # None, a list, a PackedSequence: left as it is
                continue
            new_dtype = dtype if values.is_floating_point() else values.dtype
            if values.dtype is not new_dtype or values.device != target:
                parts[name] = values.to(target, new_dtype)
        if not parts:
            return self
        return replace(
            self,
            u=parts.get("u", self.u),
            y=parts.get("y", self.y),
            mask=parts.get("mask", self.mask),
            weight=parts.get("weight", self.weight),
            x0=parts.get("x0", self.x0),
        )

    @property
    def sizes(self) -> Tensor:
        """The length of each sample, [B]; 1 for inputs without time."""
        if self.axis == 0:
            return torch.ones(len(self.u), dtype=torch.long)
        if isinstance(self.u, PackedSequence):
            return pad_packed_sequence(self.u)[1]
        if isinstance(self.u, list | tuple):
            return torch.tensor([len(sample) for sample in self.u])
        if self.lengths is None:
            return torch.full((self.u.shape[1],), len(self.u))
        return torch.as_tensor(self.lengths).cpu()

    @property
    def extent(self) -> tuple[int, int]:
        """The number of samples, and the length of the longest: len(sizes) and max(sizes)."""
        if self.axis != 0 and isinstance(self.u, Tensor) and self.lengths is None:
            return self.u.shape[1], len(self.u)
        sizes = self.sizes
        return len(sizes), int(sizes.max())

    def select(self, index: object, readout: str = "last") -> Batch:
        """The batch of some of these samples, in the order of index, cut to the longest of them.

        index    their numbers, or [B] booleans
        readout  of the network that the batch is for: with "last", y and mask begin with the
                 samples; with "every", with time; with "sequence", with the steps of an answer
                 that has its own length, which are not cut
        """
        choose("readout", readout, ("last", "every", "sequence"))
        sizes = self.sizes
        chosen = _sample_numbers(index, len(sizes))
        new_sizes = sizes[chosen]
        T = int(new_sizes.max())
        x0 = self.x0
        if x0 is not None and x0.dim() > 1:  # [n] is one state for all samples
            x0 = _take(x0, chosen)
        sample_axis = SAMPLE_AXIS[readout]
        steps = T if HAS_STEPS_OF_U[readout] else None
        return replace(
            self,
            u=self._select_inputs(chosen, sizes, T),
            y=_take(self.y, chosen, sample_axis, steps),
            lengths=None if self.lengths is None else new_sizes,
            mask=_take(self.mask, chosen, sample_axis, steps),
            weight=_take(self.weight, chosen),
            x0=x0,
        )

    def _select_inputs(
        self, chosen: Tensor, sizes: Tensor, T: int
    ) -> Tensor | list[Tensor] | PackedSequence | None:
        """The inputs of the chosen samples, in the form that u has: tensor, list or packed.

        sizes  the lengths of all samples, [B]
        T      the greatest length of a chosen one; a tensor is cut to it
        """
        if self.axis == 0:
            return _take(self.u, chosen)
        if isinstance(self.u, PackedSequence):  # before the next test: it is a tuple
            padded = pad_packed_sequence(self.u)[0]
            samples = [padded[: sizes[j], j] for j in chosen.tolist()]
            return pack_sequence(samples, enforce_sorted=False)
        if isinstance(self.u, list | tuple):
            return [self.u[j] for j in chosen.tolist()]
        return _take(self.u, chosen, 1, T)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over samples of weight_j values_j, [B] -> scalar."""
        if self.weight is None:
            return values.mean()
        # `weights` looks for the samples on axis 1
        return (self.weights(values[None]) * values).mean()

    def weights(self, like: Tensor) -> Tensor:
        """The weight of each sample, [B]; 1 for all if the batch has no weights.

        like  [any, B, ...], a tensor whose B, dtype and device they get
        """
        B = like.shape[1]
        if self.weight is None:
            return like.new_ones(B)
        weight = tensor_of("weight", self.weight, like).to(like.dtype)
        if weight.shape != (B,) or not torch.isfinite(weight).all():
            raise InputError(
                f"weight has shape {list(weight.shape)}; "
                f"expected one finite weight for each of {B} samples."
            )
        return weight


def _sample_numbers(index: object, B: int) -> Tensor:
    """The numbers, in 0..B - 1, of the samples that `index` names by numbers or by [B] booleans."""
    chosen = tensor_of("index", index).cpu()
    if chosen.dtype == torch.bool and chosen.shape == (B,):
        chosen = chosen.nonzero()[:, 0]
    holds_numbers = not chosen.is_floating_point() and chosen.dtype != torch.bool
    if chosen.dim() != 1 or not len(chosen) or not holds_numbers:
        raise InputError(
            f"select takes sample indices, or one boolean for each of {B} samples; got {index!r}."
        )
    if int(chosen.min()) < 0 or int(chosen.max()) >= B:
        raise InputError(f"samples are numbered 0..{B - 1}; got {chosen.tolist()}.")
    return chosen


def _take(values: object, chosen: Tensor, axis: int = 0, steps: int | None = None) -> Tensor | None:
    """The chosen samples, which lie along `axis`; None if there are no values.

    steps  where axis 0 is time, how many steps to keep; None keeps all
    """
    if values is None:
        return None
    array = tensor_of("the data of the samples", values)
    if steps is not None:
        array = array.narrow(0, 0, steps)
    return array.index_select(axis, chosen.to(array.device))

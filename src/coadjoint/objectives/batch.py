"""Batch: what a gradient method sees of the data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from ..errors import InputError, KindError, brief, choose
from ..sweeps.layout import tensor_of


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets of B samples.

    u        [T, B, inputs], a list of [T_i, inputs], or a PackedSequence
    y        [B, ...] for readout "last", [T, B, ...] for readout "every"; None for a loss of y_hat alone
    lengths  [B], if samples end before T
    mask     [T, B] (or [B]) weights of the loss's entries; 0 leaves one out
    weight   [B] weights of the samples: the objective is the mean over samples of weight_j (L_j + rho G_j)
    x0       [B, n] or [n], where the states begin
    reduce   "sum" or "mean" of a sample's loss over its steps
    axis     of u along which its samples lie: 1 for sequences, time-major; 0 for inputs [B, ...] without time
    """

    u: Any
    y: Any = None
    lengths: Any = None
    mask: Tensor | None = None
    weight: Tensor | None = None
    x0: Tensor | None = None
    reduce: str = "sum"
    axis: int = 1

    def __post_init__(self) -> None:
        if self.axis not in (0, 1) or isinstance(self.axis, bool):
            raise InputError(f"axis is that of the samples in u, 0 or 1; got {brief(self.axis)}.")

    def to(self, dtype: torch.dtype, device: torch.device | str) -> Batch:
        """The same batch with real numbers of this type, on this device. Class numbers stay integers."""
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise KindError(
                f"a batch is moved to a type of real numbers, torch.float64 say; got {brief(dtype)}."
            )
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError, ValueError):
            raise InputError(
                f"a batch is moved to a device that torch knows; got {brief(device)}."
            ) from None
        real = lambda v: (
            v.to(device, dtype if v.is_floating_point() else None) if isinstance(v, Tensor) else v
        )
        values: dict[str, Any] = {
            name: real(getattr(self, name)) for name in ("u", "y", "mask", "weight", "x0")
        }
        return replace(self, **values)

    @property
    def sizes(self) -> Tensor:
        """[B]: the length of each sample; 1 where there is no time"""
        if self.axis == 0:
            return torch.ones(len(self.u), dtype=torch.long)
        if isinstance(self.u, PackedSequence):
            return pad_packed_sequence(self.u)[1]
        if isinstance(self.u, list | tuple):
            return torch.tensor([len(s) for s in self.u])
        if self.lengths is None:
            return torch.full((self.u.shape[1],), len(self.u))
        return torch.as_tensor(self.lengths).cpu()

    def select(self, index: Any, readout: str = "last") -> Batch:
        """The batch of some of these samples, in the order of index, cut to the longest of them.

        index    their numbers, or [B] booleans
        readout  of the network it is for: with "last" y and mask begin with the samples, with "every" and "sequence" (an
                 answer that has steps of its own, which are not cut) with time
        """
        choose("readout", readout, ("last", "every", "sequence"))
        sizes = self.sizes
        B, chosen = len(sizes), tensor_of("index", index).cpu()
        chosen = (
            chosen.nonzero()[:, 0]
            if chosen.dtype == torch.bool and chosen.shape == (B,)
            else chosen
        )
        if (
            chosen.dim() != 1
            or not len(chosen)
            or chosen.is_floating_point()
            or chosen.dtype == torch.bool
        ):
            raise InputError(
                f"select takes the numbers of some samples, or a boolean for each of {B}; got {index!r}."
            )
        if int(chosen.min()) < 0 or int(chosen.max()) >= B:
            raise InputError(f"samples are numbered 0..{B - 1}; got {chosen.tolist()}.")
        n = sizes[chosen]
        T = int(n.max())

        def of(values: Any, time: int | None, rest: int | None = None) -> Any:
            """The chosen samples of an array whose axis `rest` holds them, and of time the first T."""
            if values is None:
                return None
            values = tensor_of("what belongs to the samples", values)
            values = values if time is None else values.narrow(time, 0, T)
            return values.index_select(rest or 0, chosen.to(values.device))

        u, lengths = self.u, None if self.lengths is None else n
        if self.axis == 0:
            u = of(u, None)
        elif isinstance(u, PackedSequence):  # a tuple too
            padded = pad_packed_sequence(u)[0]
            u = pack_sequence(
                [padded[: sizes[j], j] for j in chosen.tolist()], enforce_sorted=False
            )
        elif isinstance(u, list | tuple):
            u = [u[j] for j in chosen.tolist()]
        else:
            u = of(u, 0, 1)
        axes = {"last": (None, 0), "every": (0, 1), "sequence": (None, 1)}[readout]
        x0 = self.x0 if self.x0 is None or self.x0.dim() == 1 else of(self.x0, None)
        weight, y, mask = of(self.weight, None), of(self.y, *axes), of(self.mask, *axes)
        return replace(self, u=u, y=y, lengths=lengths, mask=mask, weight=weight, x0=x0)

    def mean(self, values: Tensor) -> Tensor:
        """The mean over samples of weighted values, [B] -> scalar."""
        return (
            values.mean() if self.weight is None else (self.weights(values[None]) * values).mean()
        )

    def weights(self, like: Tensor) -> Tensor:
        """The weight of each sample, for an array [., B, ...] of them."""
        B = like.shape[1]
        if self.weight is None:
            return like.new_ones(B)
        weight = tensor_of("weight", self.weight, like).to(like.dtype)
        if weight.shape != (B,) or not torch.isfinite(weight).all():
            raise InputError(
                f"weight has shape {list(weight.shape)}; expected one finite weight for each of {B} samples."
            )
        return weight

"""Layout: how the user's sequences lie in the flat rows of a sweep, and what is refused on the way there."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..cells.parameters import DTYPES, HALF_PRECISION
from ..errors import InputError, KindError, Unsupported, brief
from .pointers import has_lost_memory, refuse_if_without_values
from .pointwise import vmap_error
from .rows import Rows, uniform_rows
from .torch_internals import is_batched

Sequences = Tensor | PackedSequence | Sequence[Tensor]


def check_dense(name: str, y: Any) -> Tensor:
    """y, a tensor whose numbers all stand in memory, none left out."""
    if not isinstance(y, Tensor):
        raise KindError(f"{name} must be a tensor; got {type(y).__name__}.")
    if y.is_nested:
        raise KindError(
            f"{name} is a nested tensor; expected a plain one: pad it, and give lengths=."
        )
    if y.layout != torch.strided:
        raise KindError(
            f"{name} is a sparse tensor; expected a dense one: {name.split()[-1].strip('`')}.to_dense()."
        )
    if not torch.compiler.is_compiling() and has_lost_memory(y):
        raise InputError(
            f"{name} has lost its memory: its storage is smaller than its shape. Pass a tensor that was not freed."
        )
    return y


def tensor_of(name: str, value: Any, like: Tensor | None = None) -> Tensor:
    """A dense tensor from anything that torch can make one of, on the device of `like`."""
    try:
        y = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise KindError(
            f"{name} must be a tensor, or numbers to make one of; got {brief(value)}."
        ) from None
    if check_dense(name, y).is_meta and (like is None or not like.is_meta):
        raise InputError(f"{name} is on meta: it has a shape but no numbers.")
    return y if like is None else y.to(like.device)


@dataclass(frozen=True, eq=False)
class Layout:
    """How samples of different lengths lie in flat rows (see sweeps.rows)."""

    rows: Rows
    order: np.ndarray | None  # the sample of each sorted position; None if nothing was moved

    @staticmethod
    def of(lengths: Sequence[int] | None, T: int, B: int) -> Layout:
        if lengths is None or min(lengths) == T:
            return Layout(uniform_rows(T, B), None)
        n = np.array(lengths)
        order = np.argsort(-n, kind="stable")
        return Layout(Rows((n > np.arange(T)[:, None]).sum(1).tolist()), order)

    @property
    def is_dense(self) -> bool:
        """Are rows [T, B, .] as they stand?"""
        return self.rows.uniform and self.order is None

    @property
    def sample(self) -> Tensor:
        """The user's sample of each row of a step array."""
        return (
            self.rows.sample
            if self.order is None
            else torch.from_numpy(self.order[self.rows.index.sample])
        )

    @functools.cached_property
    def inverse_order(self) -> np.ndarray | None:
        return None if self.order is None else np.argsort(self.order)

    def flat(self, y: Tensor) -> Tensor:
        """[T, B, ...] -> [N, ...]; what stands beyond a sample's length is not read."""
        if self.is_dense:
            return y.flatten(0, 1)
        return y[(self.rows.time - 1).to(y.device), self.sample.to(y.device)]

    def sort(self, y: Tensor) -> Tensor:
        """Samples [B, ...] into the order of the rows."""
        return (
            y
            if self.order is None
            else y.index_select(0, torch.from_numpy(self.order).to(y.device))
        )

    def unsort(self, y: Tensor) -> Tensor:
        return (
            y
            if self.inverse_order is None
            else y.index_select(0, torch.from_numpy(self.inverse_order).to(y.device))
        )

    def padded(self, y: Tensor, fill: float = 0) -> Tensor:
        """Step rows [N, ...] -> [T, B, ...]."""
        T, B = self.rows.T, self.rows.B
        if self.is_dense:
            return y.unflatten(0, (T, B))
        index = ((self.rows.time - 1) * B + self.sample).to(y.device)
        return y.new_full((T * B, *y.shape[1:]), fill).index_copy(0, index, y).unflatten(0, (T, B))

    def padded_states(self, x: Tensor, fill: float = 0) -> Tensor:
        """State rows [B + N, ...] -> [T + 1, B, ...]."""
        B = self.rows.B
        if self.is_dense:
            return x.unflatten(0, (self.rows.T + 1, B))
        return torch.cat([self.unsort(x[:B])[None], self.padded(x[B:], fill)])

    @property
    def lengths(self) -> Tensor:
        n = self.rows.lengths
        return n if self.inverse_order is None else n[torch.from_numpy(self.inverse_order)]

    @property
    def mask(self) -> Tensor:
        """[T + 1, B]: does the state exist"""
        return torch.arange(self.rows.T + 1)[:, None] <= self.lengths


class HasLayout:
    """What lies in a layout: lengths [B], mask [T + 1, B]."""

    layout: Layout

    @property
    def lengths(self) -> Tensor:
        return self.layout.lengths

    @property
    def mask(self) -> Tensor:
        return self.layout.mask


def lay_out(u: Any, lengths: Any, inputs: int, like: Tensor) -> tuple[Layout, Tensor]:
    """The layout and the step rows [N, inputs] of [T, B, inputs], a list of [T_i, inputs], or a PackedSequence."""
    if isinstance(u, Tensor) and is_batched(u):
        raise vmap_error()
    if like.dtype not in DTYPES:
        raise Unsupported(HALF_PRECISION.format(like.dtype))
    if isinstance(u, PackedSequence):
        if lengths is not None:
            raise InputError("a PackedSequence knows its lengths; leave out lengths=.")
        check_like("u", u.data, like)
        rows, order, flat = Rows(u.batch_sizes.tolist()), u.sorted_indices, u.data
        if (
            rows.uniform and u.unsorted_indices is not None
        ):  # of equal length, yet not in the order they came
            flat, order = (
                flat.unflatten(0, (rows.T, rows.B))[:, u.unsorted_indices].flatten(0, 1),
                None,
            )
        layout = Layout(rows, None if order is None else np.array(order.tolist()))
    elif isinstance(u, Tensor):
        check_like("u", u, like)
        if u.dim() != 3 or u.shape[2] != inputs:
            hint = ""
            if u.dim() == 3:
                hint = f" but this network reads {inputs} inputs"
            raise InputError(
                f"`u` has shape {tuple(u.shape)}{hint}; expected [T, B, {inputs}]. coadjoint is time-major: for batch-first data pass `u.transpose(0, 1)`."
            )
        T, B = u.shape[:2]
        if T == 0 or B == 0:
            raise InputError(
                f"`u` has shape {tuple(u.shape)}: {'no time steps' if T == 0 else 'an empty batch'}; expected at least one step and one sample."
            )
        layout = Layout.of(check_lengths(lengths, T, B), T, B)
        flat = layout.flat(u)
    elif isinstance(u, list | tuple):
        if lengths is not None:
            raise InputError("a list of sequences knows its lengths; leave out lengths=.")
        if not u:
            raise InputError("`u` is an empty list; expected at least one sequence [T_i, inputs].")
        for i, s in enumerate(u):
            if isinstance(s, Tensor):
                check_dense(f"sequence {i} of `u`", s)
            if not isinstance(s, Tensor) or s.dim() != 2 or s.shape[1] != inputs or not len(s):
                got = tuple(s.shape) if isinstance(s, Tensor) else type(s).__name__
                raise InputError(
                    f"sequence {i} of `u` has shape {got}; expected [T_i, {inputs}] with T_i >= 1."
                )
            check_like(f"sequence {i} of `u`", s, like)
        n = [len(s) for s in u]
        layout = Layout.of(n, max(n), len(u))
        begins = torch.from_numpy(np.cumsum(n) - n)
        flat = torch.cat(list(u))[begins[layout.sample] + layout.rows.time - 1]
    else:
        raise KindError(
            f"`u` must be a tensor [T, B, {inputs}], a list of tensors or a PackedSequence; got {type(u).__name__}."
        )
    if flat.shape[-1] != inputs:
        raise InputError(
            f"the PackedSequence holds {flat.shape[-1]} inputs but this network reads {inputs}."
        )
    if (
        not flat.is_cuda
        and not math.isfinite(flat.sum().item())
        and (error := nonfinite_error(layout, flat))
    ):
        raise error
    return layout, flat


def nonfinite_error(layout: Layout, u: Tensor) -> InputError | None:
    """What to say of inputs that hold NaN or inf, if they do."""
    bad = (~torch.isfinite(u)).any(1).nonzero()
    if not len(bad):
        return None
    row = int(bad[0, 0])
    return InputError(
        f"`u` holds NaN or inf, first at step {int(layout.rows.time[row])} of sample {int(layout.sample[row])} (counting steps from 1); clean the data, or shorten that sample with lengths=."
    )


def check_lengths(lengths: Any, T: int, B: int) -> list[int] | None:
    if lengths is None:
        return None
    n = tensor_of("lengths", lengths).cpu()
    if n.is_floating_point() or n.is_complex() or n.dtype == torch.bool:
        raise KindError(f"lengths must be integers; got {n.dtype}.")
    if tuple(n.shape) != (B,):
        raise InputError(
            f"lengths has shape {list(n.shape)}; expected one length for each of {B} samples."
        )
    if int(n.min()) < 1 or int(n.max()) > T:
        b = int(((n < 1) | (n > T)).nonzero()[0, 0])
        raise InputError(
            f"lengths must lie in 1..{T} (the number of steps of `u`); sample {b} has {int(n[b])}."
        )
    if int(n.max()) < T:
        raise InputError(
            f"the longest sample has {int(n.max())} steps but `u` has {T}; pass `u[:{int(n.max())}]`, so that T is the length of the longest."
        )
    return n.tolist()


def check_like(name: str, y: Tensor, like: Tensor) -> None:
    check_dense(name, y)
    if y.device != like.device:
        raise InputError(
            f"{name} is on {y.device} but the network is on {like.device}; move one of them with .to()."
        )
    if y.dtype != like.dtype:
        raise KindError(
            f"{name} is {str(y.dtype)[6:]} but the network is {str(like.dtype)[6:]}; convert it with {name.split()[0].strip('`')}.to({like.dtype})."
        )
    refuse_if_without_values(name, y)
    refuse_if_without_values("the network's weight", like)

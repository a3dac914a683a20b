"""Layout: how the user's sequences lie in the flat rows of a sweep, and which are refused."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..cells.parameters import DTYPES, HALF_PRECISION
from ..errors import InputError, KindError, Unsupported, brief
from .checks import answers_late
from .functions import vmap_error
from .pointers import has_lost_memory, refuse_if_without_values
from .rows import Indices, Rows, uniform_rows
from .torch_internals import is_batched

Sequences = Tensor | PackedSequence | Sequence[Tensor]


def check_dense(name: str, y: object) -> Tensor:
    """`y`, if it is a tensor whose numbers are all in memory; otherwise an error.

    name: what the message calls it, such as "sequence 3 of `u`".
    """
    if not isinstance(y, Tensor):
        raise KindError(f"{name} must be a tensor; got {type(y).__name__}.")
    if y.is_nested:
        raise KindError(
            f"{name} is a nested tensor; expected a plain one: pad it, and pass lengths=."
        )
    if y.layout != torch.strided:
        argument = name.split()[-1].strip("`")  # its last word, such as u
        raise KindError(f"{name} is a sparse tensor; expected a dense one: {argument}.to_dense().")
    # Under torch.compile there is no memory yet to look at.
    if not torch.compiler.is_compiling() and has_lost_memory(y):
        raise InputError(
            f"{name} was freed: its storage is smaller than its shape. Pass a tensor with its data."
        )
    return y


def tensor_of(name: str, value: object, like: Tensor | None = None) -> Tensor:
    """A dense tensor from anything that torch can convert, on the device of `like` if given.

    name: what a message calls it.
    """
    try:
        y = value if isinstance(value, Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise KindError(
            f"{name} must be a tensor, or numbers to make one from; got {brief(value)}."
        ) from None
    if check_dense(name, y).is_meta and (like is None or not like.is_meta):
        raise InputError(f"{name} is on meta, a device without values.")
    return y if like is None else y.to(like.device)


@dataclass(frozen=True, eq=False)
class Layout:
    """How samples of different lengths lie in flat rows (see sweeps.rows)."""

    rows: Rows
    order: Indices | None  # the sample at each sorted position; None if nothing was moved

    @staticmethod
    def of(lengths: Sequence[int] | None, T: int, B: int) -> Layout:
        """For B samples of these lengths, the longest T; None: all have T steps."""
        if lengths is None or min(lengths) == T:
            return Layout(uniform_rows(T, B), None)
        n = np.array(lengths)
        order = np.argsort(-n, kind="stable")  # the longest first
        samples_at_step = (n > np.arange(T)[:, None]).sum(1)  # step t + 1 exists where n > t
        return Layout(Rows(samples_at_step.tolist()), order)

    @property
    def is_dense(self) -> bool:
        """Are the rows those of an array [T, B, .] as it lies, without padding or sorting?"""
        return self.rows.uniform and self.order is None

    @property
    def sample(self) -> Tensor:
        """The number of the user's sample to which each row of a step array belongs, [N]."""
        if self.order is None:
            return self.rows.sample
        return torch.from_numpy(self.order[self.rows.index.sample])

    @functools.cached_property
    def inverse_order(self) -> Indices | None:
        """The sorted position of each sample; None if nothing was moved."""
        return None if self.order is None else np.argsort(self.order)

    def flat(self, y: Tensor) -> Tensor:
        """[T, B, ...] -> [N, ...]; values beyond a sample's length are not read."""
        if self.is_dense:
            return y.flatten(0, 1)
        step = self.rows.time - 1  # times count from 1
        return y[step.to(y.device), self.sample.to(y.device)]

    def sort(self, y: Tensor) -> Tensor:
        """Samples [B, ...] in the order of the rows."""
        if self.order is None:
            return y
        return y.index_select(0, torch.from_numpy(self.order).to(y.device))

    def unsort(self, y: Tensor) -> Tensor:
        """Samples [B, ...] in the user's order."""
        if self.inverse_order is None:
            return y
        return y.index_select(0, torch.from_numpy(self.inverse_order).to(y.device))

    def padded(self, y: Tensor, fill: float = 0) -> Tensor:
        """Step rows [N, ...] -> [T, B, ...] in the user's order; `fill` after a sample's end."""
        T = self.rows.T
        B = self.rows.B
        flat = y
        if not self.is_dense:
            # Step t of sample i is row (t - 1) B + i of the padded array.
            index = ((self.rows.time - 1) * B + self.sample).to(y.device)
            flat = y.new_full((T * B, *y.shape[1:]), fill).index_copy(0, index, y)
        out: Tensor = flat.unflatten(0, (T, B))
        return out

    def padded_states(self, x: Tensor, fill: float = 0) -> Tensor:
        """State rows [B + N, ...] -> [T + 1, B, ...]; the initial states come first."""
        B = self.rows.B
        if self.is_dense:
            out: Tensor = x.unflatten(0, (self.rows.T + 1, B))
            return out
        return torch.cat([self.unsort(x[:B])[None], self.padded(x[B:], fill)])

    @property
    def lengths(self) -> Tensor:
        """The number of steps of each sample, in the user's order, [B]."""
        n = self.rows.lengths
        return n if self.inverse_order is None else n[torch.from_numpy(self.inverse_order)]

    @property
    def mask(self) -> Tensor:
        """[T + 1, B]: does the state exist?"""
        return torch.arange(self.rows.T + 1)[:, None] <= self.lengths


class HasLayout:
    """Something whose samples lie in a layout: lengths [B], mask [T + 1, B]."""

    layout: Layout

    @property
    def lengths(self) -> Tensor:
        """The number of steps of each sample, [B]."""
        return self.layout.lengths

    @property
    def mask(self) -> Tensor:
        """[T + 1, B]: does the state exist?"""
        return self.layout.mask


def lay_out(u: object, lengths: object, inputs: int, like: Tensor) -> tuple[Layout, Tensor]:
    """The layout and the step rows [N, inputs] of the user's sequences.

    u: [T, B, inputs], with lengths or without; a list of [T_i, inputs]; or a PackedSequence. Its
    type and device must be those of `like`. NaN and inf are refused on a CPU; a GPU would have to
    be waited for.
    """
    if isinstance(u, Tensor) and is_batched(u):
        raise vmap_error()
    if like.dtype not in DTYPES:
        raise Unsupported(HALF_PRECISION.format(like.dtype))
    if isinstance(u, PackedSequence):
        refuse_lengths(lengths, "a PackedSequence")
        layout, flat = _lay_out_packed(u, inputs, like)
    elif isinstance(u, Tensor):
        layout, flat = _lay_out_padded(u, lengths, inputs, like)
    elif isinstance(u, list | tuple):
        refuse_lengths(lengths, "a list of sequences")
        layout, flat = _lay_out_list(u, inputs, like)
    else:
        raise KindError(
            f"`u` must be a tensor [T, B, {inputs}], a list of tensors or a PackedSequence; got "
            f"{type(u).__name__}."
        )
    # A sum is quicker than a test of every number, which follows only if the sum is not finite.
    if not answers_late(flat) and not math.isfinite(flat.sum().item()):
        error = nonfinite_error(layout, flat)
        if error is not None:
            raise error
    return layout, flat


def refuse_lengths(lengths: object, what: str) -> None:
    """Refuse lengths= beside sequences that have them."""
    if lengths is not None:
        raise InputError(f"{what} knows its lengths; leave out lengths=.")


def _lay_out_packed(u: PackedSequence, inputs: int, like: Tensor) -> tuple[Layout, Tensor]:
    """`lay_out` of a PackedSequence, whose data are step rows already, the longest sample first."""
    check_like("u", u.data, like)
    rows = Rows(u.batch_sizes.tolist())
    flat = u.data
    order = None if u.sorted_indices is None else np.array(u.sorted_indices.tolist())
    if rows.uniform and u.unsorted_indices is not None:
        # All have one length, but the packing has moved them: back, and the layout is dense.
        flat = flat.unflatten(0, (rows.T, rows.B))[:, u.unsorted_indices].flatten(0, 1)
        order = None
    if flat.shape[-1] != inputs:
        raise InputError(
            f"the PackedSequence holds {flat.shape[-1]} inputs but this network reads {inputs}."
        )
    return Layout(rows, order), flat


def _lay_out_padded(u: Tensor, lengths: object, inputs: int, like: Tensor) -> tuple[Layout, Tensor]:
    """`lay_out` of a tensor [T, B, inputs]; lengths None: all samples have T steps."""
    check_like("u", u, like)
    if u.dim() != 3 or u.shape[2] != inputs:
        hint = ""
        if u.dim() == 3:
            hint = f" but this network reads {inputs} inputs"
        raise InputError(
            f"`u` has shape {tuple(u.shape)}{hint}; expected [T, B, {inputs}]. coadjoint is "
            "time-major: for batch-first data pass `u.transpose(0, 1)`."
        )
    T, B = u.shape[:2]
    if T == 0 or B == 0:
        missing = "no time steps" if T == 0 else "an empty batch"
        raise InputError(
            f"`u` has shape {tuple(u.shape)}: {missing}; expected at least one step and one sample."
        )
    layout = Layout.of(check_lengths(lengths, T, B), T, B)
    return layout, layout.flat(u)


def _lay_out_list(u: Sequence[object], inputs: int, like: Tensor) -> tuple[Layout, Tensor]:
    """`lay_out` of a list of tensors [T_i, inputs]."""
    if not u:
        raise InputError("`u` is an empty list; expected at least one sequence [T_i, inputs].")
    sequences = [_check_sequence(i, y, inputs, like) for i, y in enumerate(u)]
    n = [len(y) for y in sequences]
    layout = Layout.of(n, max(n), len(n))
    begins = torch.from_numpy(np.cumsum(n) - n)  # of each sequence, when all are joined
    flat = torch.cat(sequences)[begins[layout.sample] + layout.rows.time - 1]
    return layout, flat


def _check_sequence(i: int, y: object, inputs: int, like: Tensor) -> Tensor:
    """Sequence i of the user's list, `y`, if it is a tensor [T_i, inputs] of the kind of `like`."""
    name = f"sequence {i} of `u`"
    if not isinstance(y, Tensor):
        raise InputError(
            f"{name} is a {type(y).__name__}; expected a tensor [T_i, {inputs}] with T_i >= 1."
        )
    check_dense(name, y)
    if y.dim() != 2 or y.shape[1] != inputs or not len(y):
        raise InputError(
            f"{name} has shape {tuple(y.shape)}; expected [T_i, {inputs}] with T_i >= 1."
        )
    check_like(name, y, like)
    return y


def nonfinite_error(layout: Layout, u: Tensor) -> InputError | None:
    """The error for input rows with NaN or inf; None if there are none."""
    bad = (~torch.isfinite(u)).any(1).nonzero()
    if not len(bad):
        return None
    row = int(bad[0, 0])
    step = int(layout.rows.time[row])
    return InputError(
        f"`u` holds NaN or inf, first at step {step} of sample {int(layout.sample[row])} (counting "
        "steps from 1); clean the data, or shorten that sample with lengths=."
    )


def check_lengths(lengths: object, T: int, B: int) -> list[int] | None:
    """The lengths of B samples as a list of ints, in 1..T and the longest T; None stays None."""
    if lengths is None:
        return None
    n = tensor_of("lengths", lengths).cpu()
    if n.is_floating_point() or n.is_complex() or n.dtype == torch.bool:
        raise KindError(f"lengths must be integers; got {n.dtype}.")
    if tuple(n.shape) != (B,):
        raise InputError(
            f"lengths has shape {list(n.shape)}; expected one length for each of {B} samples."
        )
    longest = int(n.max())
    if int(n.min()) < 1 or longest > T:
        sample = int(((n < 1) | (n > T)).nonzero()[0, 0])
        raise InputError(
            f"lengths must lie in 1..{T} (the number of steps of `u`); sample {sample} has "
            f"{int(n[sample])}."
        )
    if longest < T:
        raise InputError(
            f"the longest sample has {longest} steps but `u` has {T}; pass `u[:{longest}]`, so "
            "that T is the length of the longest."
        )
    values: list[int] = n.tolist()
    return values


def check_like(name: str, y: Tensor, like: Tensor) -> None:
    """Refuse a tensor that is not dense, or not of the type and device of `like`, a weight."""
    check_dense(name, y)
    if y.device != like.device:
        raise InputError(
            f"{name} is on {y.device} but the network is on {like.device}; move one of them with "
            ".to()."
        )
    if y.dtype != like.dtype:
        argument = name.split()[0].strip("`")  # its first word: u, or sequence
        raise KindError(  # [6:] leaves out "torch."
            f"{name} is {str(y.dtype)[6:]} but the network is {str(like.dtype)[6:]}; convert it "
            f"with {argument}.to({like.dtype})."
        )
    refuse_if_without_values(name, y)
    refuse_if_without_values("the network's weight", like)

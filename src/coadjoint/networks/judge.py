"""Judge: from pre-outputs to the loss of each sample.

y_hat = phi(a),  L_j = sum over the rows of sample j that count of weight * loss(y_hat, y)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import InputError, choose
from ..objectives import losses
from ..objectives.losses import LossLike
from ..sweeps.checks import require
from ..sweeps.layout import HasLayout, Layout, check_dense, tensor_of
from ..sweeps.rows import Rows
from .interface import Net

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, eq=False)
class Judge:
    """A loss with its targets and weights in rows.

    There is a row for each sample (readout "last") or for each step ("every").
    """

    network: Net
    layout: Layout
    loss: LossLike
    y: Tensor | None
    weight: Tensor | None  # of each row; rows of weight zero do not count
    reduce: str

    @staticmethod
    def of(
        net: Net,
        layout: Layout,
        loss: LossLike,
        y: ArrayLike | None,
        mask: ArrayLike | None,
        reduce: str,
        like: Tensor,
    ) -> Judge:
        """Check targets and mask and bring them into rows; arguments as in `RunOutputs.loss`.

        like  a tensor of the network's type, on its device
        """
        choose("reduce", reduce, ("sum", "mean"))
        y_rows = None if y is None else _target_rows(net, layout, y, like)
        weight = None if mask is None else _weight_rows(net, layout, mask, like)
        if y_rows is not None and y_rows.is_floating_point():
            counted = y_rows if weight is None else y_rows[weight != 0]
            message = (
                "the target y holds NaN or inf in entries that count. Clean it, or exclude those "
                "entries with mask=."
            )
            require(torch.isfinite(counted).all(), lambda: InputError(message))
        return Judge(net, layout, loss, y_rows, weight, reduce)

    @property
    def every(self) -> bool:
        """Whether there is an output, and a row, for each step."""
        return self.network.readout == "every"

    def restrict_to(self, rows: Rows) -> Judge:
        """The same loss on a segment of the time steps, whose rows are given (readout "every")."""
        first_row = self.layout.rows.starts[rows.begin]
        segment = slice(first_row, first_row + rows.N)
        return replace(
            self,
            layout=Layout(rows, None),  # samples stay in the order of the rows
            y=None if self.y is None else self.y[segment],
            weight=None if self.weight is None else self.weight[segment],
        )

    @functools.cached_property
    def counted_rows(self) -> Tensor | None:
        """The indices of the rows that count; None if all do."""
        return None if self.weight is None else self.weight.nonzero()[:, 0]

    def select_counted(self, y: Tensor) -> Tensor:
        """The rows of y that count; y has a row for each output."""
        return y if self.counted_rows is None else y[self.counted_rows]

    def samples_of_rows(self, device: torch.device) -> Tensor:
        """The sample of each row that counts, as a position in the order of the rows."""
        rows = self.layout.rows
        if self.every:
            return self.select_counted(rows.sample_on(device))
        return self.select_counted(torch.arange(rows.B, device=device))

    def row_losses(self, a_rows: Tensor) -> Tensor:
        """The weighted loss of each row that counts."""
        a_rows = self.select_counted(a_rows)
        y = None if self.y is None else self.select_counted(self.y)
        if not len(a_rows):
            return a_rows.sum(-1)  # an empty result that is still a function of a
        rows = self.layout.rows
        # By chunks, unless the bits cannot depend on where a sequence is cut: see _losses_by_chunk.
        is_one_block = len(rows.chunks) == 1 or (rows.uniform and self.weight is None)
        if not self.every or is_one_block:
            value = losses.entry_losses(self.loss, a_rows, y, self.network.output)
        else:
            value = self._losses_by_chunk(a_rows, y)
        return value if self.weight is None else value * self.select_counted(self.weight)

    def _losses_by_chunk(self, a_rows: Tensor, y: Tensor | None) -> Tensor:
        """The loss of each row, one chunk of steps after the other.

        torch rounds the last entries of an array differently from those before (it vectorises
        by rows.LANES). With the chunks separated, a sequence evaluated in segments has the bits
        of one evaluated at once.
        """
        ends = torch.tensor([chunk.stop for chunk in self.layout.rows.chunks])
        if self.counted_rows is not None:  # the ends of the chunks among the rows that count
            ends = torch.searchsorted(self.counted_rows.cpu(), ends)
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        targets = [None] * len(sizes) if y is None else y.split(sizes)
        parts: list[Tensor] = []
        for a_part, y_part in zip(a_rows.split(sizes), targets, strict=True):
            if len(a_part):
                parts.append(losses.entry_losses(self.loss, a_part, y_part, self.network.output))
        return torch.cat(parts)

    def sample_losses(self, a_rows: Tensor) -> Tensor:
        """The loss of each sample, [B], in the user's order."""
        total = self.row_losses(a_rows)
        # Otherwise there is exactly one row for each sample, which is both its sum and its mean.
        if self.every or self.weight is not None:
            total = self.apply_reduction(self.sum_by_sample(total))
        return self.layout.unsort(total)

    def sum_by_sample(self, values: Tensor, onto: Tensor | None = None) -> Tensor:
        """The sum of each sample's values, [B] in the order of the rows.

        values  one for each row that counts
        onto    the sums of earlier steps, to which they are added; None: zero
        """
        rows = self.layout.rows
        if onto is None:
            onto = values.new_zeros(rows.B)
        if rows.uniform and self.weight is None and self.every and not values.is_cpu:
            # A GPU adds the terms of index_add in any order; here in the same one each time.
            total: Tensor = values.unflatten(0, (rows.T, rows.B)).sum(0)
            return onto + total
        return onto.index_add(0, self.samples_of_rows(values.device), values)

    def apply_reduction(self, total: Tensor) -> Tensor:
        """The totals [B] as they are (reduce="sum"), or divided by the sum of weights ("mean")."""
        if self.reduce == "sum":
            return total
        if self.weight is not None:
            count = self.sum_by_sample(self.select_counted(self.weight))
        elif self.every:
            count = self.layout.rows.lengths_like(total)
        else:
            count = torch.ones_like(total)
        return total / torch.where(count == 0, 1, count)  # a sample without rows has loss 0


def _leading_axes(net: Net, layout: Layout) -> tuple[int, ...]:
    """[T, B] or [B]: the axes that targets and masks begin with."""
    rows = layout.rows
    return (rows.T, rows.B) if net.readout == "every" else (rows.B,)


def _into_rows(net: Net, layout: Layout, y: Tensor) -> Tensor:
    """[T, B, ...] in step rows (readout "every"), or [B, ...] in the order of the rows."""
    return layout.flat(y) if net.readout == "every" else layout.sort(y)


def _target_rows(net: Net, layout: Layout, y: ArrayLike, like: Tensor) -> Tensor:
    """The targets in rows; refused unless they begin with [T, B] or [B]. like: of their device."""
    lead = _leading_axes(net, layout)
    y = tensor_of("the target y", y, like)
    if tuple(y.shape[: len(lead)]) != lead:
        expected = expected_target(net, layout, y)
        raise InputError(f"the target y has shape {list(y.shape)}; {expected}")
    return _into_rows(net, layout, y)


def expected_target(net: Net, layout: Layout, y: Tensor) -> str:
    """The end of an error about targets of another shape: what they must be, and a hint."""
    T, B = layout.rows.T, layout.rows.B
    if net.sample_axis == 0:
        return f"it must begin with [{B}]: one target for each of {B} samples."
    if net.readout == "every":
        return f"with readout='every' it must begin with [{T}, {B}] ([T, B, ...], time-major)."
    hint = ""
    if y.dim() and len(y) == T:
        hint = (
            f" The input has T = {T} steps of B = {B} samples; if it is the other way round, pass "
            "u.transpose(0, 1): u is time-major, [T, B, inputs]."
        )
    return f"with readout='{net.readout}' it must begin with [{B}] (one for each sample).{hint}"


def _weight_rows(net: Net, layout: Layout, mask: ArrayLike, like: Tensor) -> Tensor:
    """The mask as weights of the rows; refused unless it is [T, B] or [B], and finite."""
    lead = _leading_axes(net, layout)
    mask = tensor_of("the loss mask", mask, like)
    if tuple(mask.shape) != lead:
        raise InputError(f"the loss mask has shape {list(mask.shape)}; expected {list(lead)}.")
    weight = _into_rows(net, layout, mask).to(like.dtype)
    if not torch.isfinite(weight).all():
        raise InputError("the loss mask holds NaN or inf; expected finite weights.")
    return weight


class RunOutputs(HasLayout):
    """The outputs of a run and their loss, in the user's order: u, a, y_hat, loss."""

    layout: Layout
    network: Net
    u_rows: Tensor  # [N, inputs]
    a_rows: Tensor  # [B, outputs] in the order of the rows, or [N, outputs]

    @functools.cached_property
    def u(self) -> Tensor:
        """The inputs [T, B, inputs] after dropout; padding is zero."""
        return self.layout.padded(self.u_rows)

    @functools.cached_property
    def a(self) -> Tensor:
        """The pre-outputs, [B, outputs] or [T, B, outputs]."""
        return self._from_rows(self.a_rows)

    @functools.cached_property
    def y_hat(self) -> Tensor:
        """The outputs phi(a), shaped like a."""
        return self._from_rows(losses.output_function(self.network.output)(self.a_rows))

    def _from_rows(self, y: Tensor) -> Tensor:
        """Output rows as [B, ...] in the user's order, or padded to [T, B, ...]."""
        return self.layout.unsort(y) if self.network.readout == "last" else self.layout.padded(y)

    def loss(
        self,
        loss: LossLike | Tensor,
        y: ArrayLike | None = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
    ) -> Tensor:
        """The loss of each sample, [B].

        loss    a name, a Loss, a function of (y_hat, y) on the entries that count, or values [B]
                computed from this run
        y       [B, ...] (readout "last") or [T, B, ...] ("every"); padding is not read
        mask    weights of the entries, [T, B] or [B]; an entry of weight zero does not count,
                whatever y holds there
        reduce  "sum" or "mean" over a sample's steps that count
        """
        return self.loss_from_rows(loss, y, mask, reduce, self.a_rows)

    def judge(
        self, loss: LossLike, y: ArrayLike | None, mask: ArrayLike | None, reduce: str
    ) -> Judge:
        """The loss as a function of pre-outputs in rows; arguments as in `loss`."""
        return Judge.of(self.network, self.layout, loss, y, mask, reduce, self.a_rows)

    def loss_from_rows(
        self,
        loss: LossLike | Tensor,
        y: ArrayLike | None,
        mask: Tensor | None,
        reduce: str,
        a_rows: Tensor,
    ) -> Tensor:
        """The loss of each sample, [B], for pre-outputs in place of this run's own.

        A loss given as values [B] is returned as it is, after a check. Arguments as in `loss`.
        """
        if not isinstance(loss, Tensor):
            return self.judge(loss, y, mask, reduce).sample_losses(a_rows)
        return check_loss_values(loss, self.layout.rows.B)


def check_loss_values(loss: Tensor, B: int) -> Tensor:
    """Return a loss that was given as values; refused unless there is one for each sample, [B]."""
    if check_dense("the loss", loss).shape != (B,):
        got = "a scalar" if loss.dim() == 0 else f"shape {list(loss.shape)}"
        raise InputError(
            f"the loss is {got}; expected one value for each sample, shape [{B}]. coadjoint "
            "averages over samples itself."
        )
    return loss


@contextlib.contextmanager
def evaluation_mode(net: Net) -> Iterator[None]:
    """Switch the network to eval() inside a `with` block: no dropout, no noise."""
    was_training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(was_training)

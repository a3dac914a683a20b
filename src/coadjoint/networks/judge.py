"""Judge: from outputs to the loss of each sample.

y_hat = phi(a),  L_j = sum over what counts of weight * loss(y_hat, y)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, choose
from ..objectives import losses
from ..objectives.losses import LossLike
from ..sweeps.checks import require
from ..sweeps.layout import HasLayout, Layout, check_dense, tensor_of
from ..sweeps.rows import Rows
from .interface import Net


@dataclass(frozen=True, eq=False)
class Judge:
    """A loss and what it compares with, in rows: those of the samples (readout "last") or of their steps ("every")."""

    network: Net
    layout: Layout
    loss: LossLike
    y: Tensor | None
    weight: Tensor | None  # of each row; those of weight zero are left out
    reduce: str

    @staticmethod
    def of(
        net: Net,
        layout: Layout,
        loss: LossLike,
        y: Any,
        mask: Tensor | None,
        reduce: str,
        like: Tensor,
    ) -> Judge:
        """Arguments as in `Trajectory.loss`, checked; like: an array of the network's type."""
        every, B, T = net.readout == "every", layout.rows.B, layout.rows.T
        choose("reduce", reduce, ("sum", "mean"))
        lead = (T, B) if every else (B,)
        if y is not None:
            y = tensor_of("the target y", y, like)
            if tuple(y.shape[: len(lead)]) != lead:
                raise InputError(
                    f"the target y has shape {list(y.shape)}; with readout='{net.readout}' it must begin with {list(lead)}"
                    + (" ([T, B, ...], time-major)." if every else " (one for each sample).")
                )
            y = layout.flat(y) if every else layout.sort(y)
        weight = None
        if mask is not None:
            mask = tensor_of("the loss mask", mask, like)
            if tuple(mask.shape) != lead:
                raise InputError(
                    f"the loss mask has shape {list(mask.shape)}; expected {list(lead)}."
                )
            weight = (layout.flat(mask) if every else layout.sort(mask)).to(like.dtype)
            if not torch.isfinite(weight).all():
                raise InputError("the loss mask holds NaN or inf; expected finite weights.")
        if y is not None and y.is_floating_point():
            counts = y if weight is None else y[weight != 0]
            wrong = "the target y holds NaN or inf on entries that count; clean it, or leave those entries out with mask=."
            require(torch.isfinite(counts).all(), lambda: InputError(wrong))
        return Judge(net, layout, loss, y, weight, reduce)

    @property
    def every(self) -> bool:
        return self.network.readout == "every"

    def restrict_to(self, rows: Rows) -> Judge:
        """The same for some of the time steps (readout "every")."""
        begin = self.layout.rows.starts[rows.begin]
        cut = lambda y: None if y is None else y[begin : begin + rows.N]
        return replace(self, layout=Layout(rows, None), y=cut(self.y), weight=cut(self.weight))

    @functools.cached_property
    def counted_rows(self) -> Tensor | None:
        """The rows that count; None if all do."""
        return None if self.weight is None else self.weight.nonzero()[:, 0]

    def select_counted(self, y: Tensor) -> Tensor:
        """y in the rows that count."""
        return y if self.counted_rows is None else y[self.counted_rows]

    def samples_of_rows(self, device: torch.device) -> Tensor:
        """The sample of each row that counts, in the rows' order."""
        rows = self.layout.rows
        return self.select_counted(
            rows.sample.to(device) if self.every else torch.arange(rows.B, device=device)
        )

    def row_losses(self, pre: Tensor) -> Tensor:
        """The weighted loss of each row that counts, from a = pre."""
        rows, pre = self.layout.rows, self.select_counted(pre)
        y = None if self.y is None else self.select_counted(self.y)
        if not len(pre):
            return pre.sum(-1)
        if not self.every or len(rows.chunks) == 1 or (rows.uniform and self.weight is None):
            value = losses.entry_losses(self.loss, pre, y, self.network.output)
        else:  # rows that are not a multiple of rows.LANES: torch's vectors end elsewhere unless each chunk is apart
            ends = torch.tensor([c.stop for c in rows.chunks])
            if self.counted_rows is not None:
                ends = torch.searchsorted(self.counted_rows.cpu(), ends)
            sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
            ys = [None] * len(sizes) if y is None else y.split(sizes)
            found = zip(pre.split(sizes), ys, sizes, strict=True)
            value = torch.cat(
                [
                    losses.entry_losses(self.loss, a, b, self.network.output)
                    for a, b, n in found
                    if n
                ]
            )
        return value if self.weight is None else value * self.select_counted(self.weight)

    def sample_losses(self, pre: Tensor) -> Tensor:
        """The loss of each sample, [B], in the user's order."""
        total = self.row_losses(pre)
        if self.every or self.weight is not None:
            total = self.apply_reduction(self.sum_by_sample(total))
        return self.layout.unsort(total)

    def sum_by_sample(self, values: Tensor, onto: Tensor | None = None) -> Tensor:
        """The values of each sample added up, onto those of earlier steps."""
        onto = values.new_zeros(self.layout.rows.B) if onto is None else onto
        return onto.index_add(0, self.samples_of_rows(values.device), values)

    def apply_reduction(self, total: Tensor) -> Tensor:
        """Divided by the weight of what counts, with reduce="mean"."""
        if self.reduce == "sum":
            return total
        rows = self.layout.rows
        if self.weight is None:
            count = rows.lengths.to(total) if self.every else torch.ones_like(total)
        else:
            count = self.sum_by_sample(self.select_counted(self.weight))
        return total / torch.where(count == 0, 1, count)


class RunOutputs(HasLayout):
    """What a run of a network says of its outputs: u, a, y_hat, loss."""

    layout: Layout
    network: Any
    u_rows: Tensor  # step rows
    a_rows: Tensor  # a, in rows: [B, outputs] in the rows' order or [N, outputs]

    @functools.cached_property
    def u(self) -> Tensor:
        return self.layout.padded(self.u_rows)

    @functools.cached_property
    def a(self) -> Tensor:
        return self._outward(self.a_rows)

    @functools.cached_property
    def y_hat(self) -> Tensor:
        return self._outward(losses.output_function(self.network.output)(self.a_rows))

    def _outward(self, y: Tensor) -> Tensor:
        return self.layout.unsort(y) if self.network.readout == "last" else self.layout.padded(y)

    def loss(
        self,
        loss: LossLike | Tensor,
        y: Any = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
    ) -> Tensor:
        """The loss of each sample, [B].

        loss    a name, a Loss, a function of (y_hat, y) on the entries that count, or [B] values made from this trajectory
        y       [B, ...] (readout "last") or [T, B, ...] (readout "every"); padding is not read
        mask    [T, B] (or [B]) weights of the entries; zero leaves one out, whatever y holds there
        reduce  "sum" or "mean" over a sample's own steps that count
        """
        return self._loss(loss, y, mask, reduce, self.a_rows)

    def _loss(
        self, loss: LossLike | Tensor, y: Any, mask: Tensor | None, reduce: str, pre: Tensor
    ) -> Tensor:
        B = self.layout.rows.B
        if isinstance(loss, Tensor):
            if check_dense("the loss", loss).shape != (B,):
                what = "a scalar" if loss.dim() == 0 else f"shape {list(loss.shape)}"
                raise InputError(
                    f"the loss is {what}; expected one value for each sample, shape [{B}]. coadjoint averages over samples itself."
                )
            return loss
        return Judge.of(self.network, self.layout, loss, y, mask, reduce, pre).sample_losses(pre)


@contextlib.contextmanager
def evaluation_mode(net: Net) -> Iterator[None]:
    """Without dropout and noise."""
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)

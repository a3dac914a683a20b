"""How a sequence is cut into segments, and what one segment needs and leaves behind."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..networks.judge import Judge
from ..networks.network import Network
from ..sweeps.layout import Layout
from ..sweeps.overflow import check_range
from ..sweeps.plan import Saved, SweepPlan, settle_checks
from ..sweeps.rows import Rows

Segments = int | str | bool | None


def parse_segments(segments: Segments) -> Segments:
    """Return a positive number of segments, "auto" for about sqrt(T), or None for no segments.

    True means "auto", and False means None. Anything else is refused.
    """
    if segments is None or segments is False:
        return None
    if segments is True or segments == "auto":
        return "auto"
    if isinstance(segments, int) and segments >= 1:
        return segments
    raise InputError(f"segments must be a positive whole number, 'auto' or None; got {segments!r}.")


def segment_steps(rows: Rows, segments: Segments) -> int:
    """Return the steps of a segment: T / segments or about sqrt(T), rounded up to whole chunks.

    A chunk is the steps that are summed at once. Whole chunks give the same sums as no segments.
    """
    steps = math.sqrt(rows.T) if segments == "auto" else rows.T / int(segments or 1)
    return rows.chunk_steps * math.ceil(steps / rows.chunk_steps)


class SegmentRun(NamedTuple):
    """The forward sweep of one segment."""

    plan: SweepPlan
    saved: Saved
    u: Tensor  # the inputs, step rows

    @property
    def rows(self) -> Rows:
        """The rows of the segment."""
        return self.plan.rows


class LossSource(NamedTuple):
    """The derivative of the loss by the states of one segment, with readout "every".

    It is the source of the costates: what each step's own loss adds to them.
    """

    judge: Judge
    pre: Tensor  # a = V h + b_o, a leaf
    value: Tensor  # the weighted loss of each row that counts
    of_pre: Tensor  # dL/da
    s: Tensor  # V' dL/da as a state array [B + N, n]


class SegmentCostates(NamedTuple):
    """The costates of one segment."""

    lam: Tensor  # mantissas, state rows
    delta: Tensor  # dL/da_t, step rows
    k: Tensor  # exponents, state rows


class Boundary(NamedTuple):
    """J' lam at the state that a segment begins with, as mantissa 2^exponent."""

    mantissa: Tensor  # [b, n], for the b samples that reach the segment
    exponent: Tensor  # [b]


def boundary_after(boundaries: Sequence[Boundary], i: int) -> Boundary | None:
    """Return the boundary where segment i ends; None for the last segment."""
    return boundaries[i + 1] if i + 1 < len(boundaries) else None


def check_segment(plan: SweepPlan, end: Tensor, what: str, states: Callable[[], Tensor]) -> None:
    """Raise at once if the sweep of a segment left the range of its type.

    The check of a whole sequence may come later, but the arrays of a segment are gone by then.

    Args:
        plan: The plan of the sweep, which holds its checks.
        end: What the sweep ended with: it is not finite if anything before it is not.
        what: What was swept, for the message.
        states: Returns the array of all steps, to find the step in.
    """
    check_range(plan, end, what, states)
    settle_checks(plan)


def detach_or_none(y: Tensor | None) -> Tensor | None:
    """Return a tensor without its graph, and None as it is."""
    return None if y is None else y.detach()


def refuse_constant_loss(values: Tensor) -> None:
    """Refuse a loss that does not depend on the states."""
    if not values.requires_grad:
        raise InputError(
            "the loss does not depend on the states of this trajectory: it has no costates."
        )


class LastStates:
    """Each sample's last state, its loss, and with readout "last" the source of the costates.

    Args:
        net: The network.
        layout: The layout of the whole sequence.
        judge: The loss of the whole sequence.
        x: The last state of each sample, [B, n] in the rows' order.
        total: With readout "every", the summed loss of each sample, [B]. With readout "last" None:
            the loss is then computed here from x.
    """

    def __init__(
        self, net: Network, layout: Layout, judge: Judge, x: Tensor, total: Tensor | None
    ) -> None:
        self.judge = judge
        self.x = x.requires_grad_(total is None)
        # Derivatives of the objective, filled in by the adjoint passes. That by the start is, until
        # the pass is over, that by the state which the segment swept last begins with.
        self.of_start: Tensor | None = None
        self.of_V: Tensor | None = None
        self.of_b_o: Tensor | None = None
        if total is not None:
            self.losses = layout.unsort(judge.apply_reduction(total))
            return
        with torch.enable_grad():
            self.V = net.V.detach().requires_grad_()
            self.b_o = None if net.b_o is None else net.b_o.detach().requires_grad_()
            self.losses = judge.sample_losses(
                net.read_states(layout, self.x, self.x, self.V, self.b_o)
            )
            refuse_constant_loss(self.losses)

    @functools.cached_property
    def source(self) -> Tensor | None:
        """dL/dx at the last state, [B, n] with its graph; None with readout "every"."""
        if self.judge.every:
            return None
        with torch.enable_grad():
            (source,) = torch.autograd.grad(self.losses.sum(), self.x, create_graph=True)
        return source

    @property
    def s_last(self) -> Tensor | None:
        """The source without its graph."""
        return detach_or_none(self.source)

    def share(self, of_loss: Tensor) -> Tensor:
        """Return the objective's derivative by each sample's sum of step losses, [B].

        It is in the rows' order. `of_loss` [B] is the derivative by the samples' losses, which are
        those sums, divided by the number of steps if the loss is a mean.
        """
        if not self.judge.every:  # no steps to sum over
            return of_loss
        return self.judge.apply_reduction(self.judge.layout.sort(of_loss))

    def pull(self, of_loss: Tensor, of_source: Tensor | None) -> Tensor | None:
        """Return the objective's derivative by the last states, and keep those by V and b_o.

        None with readout "every", where the segments read the states out.

        Args:
            of_loss: Its derivative by the losses, [B].
            of_source: Its derivative by `source`, [B, n]; None if it does not depend on costates.
        """
        if self.judge.every:
            return None
        values = [self.losses]
        seeds = [of_loss]
        if of_source is not None and self.source is not None and self.source.requires_grad:
            values.append(self.source)
            seeds.append(of_source)
        leaves = [self.x, self.V]
        if self.b_o is not None:
            leaves.append(self.b_o)
        with torch.enable_grad():
            grads = torch.autograd.grad(values, leaves, seeds, allow_unused=True)
        self.of_V = grads[1]
        if self.b_o is not None:
            self.of_b_o = grads[2]
        of_last: Tensor | None = grads[0]
        return of_last

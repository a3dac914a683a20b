"""Looks at a network in segments: its outputs, and how its gradient decays, in little memory.

A run of training that computes its gradients in segments looks at held-out data in the same way.
What is kept is what the look is for: the pre-outputs, or the norms of costates and components.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..networks.interface import Net
from ..networks.judge import RunOutputs
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps.affine import affine
from ..sweeps.costates import BaseCostates
from ..sweeps.layout import Layout
from .evaluation import Gradient
from .method import require_one_layer
from .segment_norms import CostateNorms, TrajectoryWithoutStates
from .segment_parts import Boundary, SegmentCostates, SegmentRun, Segments
from .segments import SegmentedGradient
from .temporal import Temporal


@dataclass(frozen=True, eq=False)
class SegmentedRun(RunOutputs):
    """The outputs of a run whose states were not kept; what it has is that of RunOutputs."""

    network: Net
    layout: Layout
    u_rows: Tensor
    a_rows: Tensor


@torch.no_grad()
def run_in_segments(net: Net, batch: Batch, loss: LossLike, segments: Segments) -> SegmentedRun:
    """Run a network of one layer over a batch, segment by segment, without derivatives.

    The pre-outputs are those of `net.run(batch)`. Refused are the networks whose gradient is
    refused in segments.
    """
    layer = require_one_layer(net, "sweeps in segments")
    sweeps = SegmentedLook(layer, batch, loss, segments)
    return SegmentedRun(net, sweeps.layout, sweeps.u, sweeps.outputs())


class GradientDecay(NamedTuple):
    """How a gradient decays within the sequences of a batch."""

    gradient: Gradient  # of the mean loss
    costates: BaseCostates  # of which only the norms may be known
    component_norms: Tensor | None  # of the gradient by W, R and b, [T]; None if it has none


def decay_in_segments(net: Net, batch: Batch, loss: LossLike, segments: Segments) -> GradientDecay:
    """Compute the gradient of a batch, its costates' norms, and the norms of its components."""
    layer = require_one_layer(net, "sweeps in segments")
    return SegmentedLook(layer, batch, loss, segments).decay()


class SegmentedLook(SegmentedGradient):
    """A network and a batch that is looked at in segments."""

    component_norms: list[Tensor] | None = None  # by segment, from the last one; None: not asked

    def outputs(self) -> Tensor:
        """Return the pre-outputs: of each sample in the rows' order, or of all steps in rows."""
        rows = self.layout.rows
        self.begins[0].copy_(self.weights.start)
        x_last = self.u.new_empty(rows.B, self.net.slots * self.net.hidden)
        steps = [self._outputs_segment(i, x_last) for i in range(len(self.sizes))]
        if self.judge.every:
            return torch.cat(steps)
        return self.net.read_states(self.layout, x_last, x_last, self.net.V, self.net.b_o)

    def _outputs_segment(self, i: int, x_last: Tensor) -> Tensor:
        """Run segment i, write its last states to `x_last`, and return its pre-outputs.

        They are empty with readout "last".
        """
        run = self.sweep(i)
        x = run.saved.x
        rows = run.rows
        x_last[: rows.B] = rows.last(x)
        if self.going(i):
            self.begins[i + 1].copy_(x[self.end_rows(i)])
        if not self.judge.every:
            return x.new_empty(0)
        return affine(rows, self.net.visible_state(x[rows.B :]), self.net.V, self.net.b_o)

    def decay(self) -> GradientDecay:
        """Return the gradient and the norms; see `GradientDecay`."""
        gradient = self.loss_gradient().gradient
        last_states = self.forward()
        of_sums = last_states.share(torch.ones_like(last_states.losses))
        self.component_norms = []
        norms, _ = self.pass_costates(last_states, of_sums)
        trajectory = TrajectoryWithoutStates(self.net, self.layout, self.u, "a probe")
        lam = CostateNorms(trajectory, "a probe", norms, last_states.losses.detach())
        components = torch.cat(self.component_norms[::-1])
        return GradientDecay(gradient, lam, components)

    def costates(
        self,
        i: int,
        run: SegmentRun,
        s: Tensor | None,
        ended: Tensor | None,
        later: Boundary | None,
    ) -> SegmentCostates:
        """Return the costates of segment i, and note the norms of its components if asked."""
        found = super().costates(i, run, s, ended, later)
        if self.component_norms is not None:
            self.component_norms.append(self._component_norms(run, found))
        return found

    def _component_norms(self, run: SegmentRun, costates: SegmentCostates) -> Tensor:
        """Return the norm of each step's component of the gradient, [steps of the segment]."""
        rows = run.rows
        one_row = self.u.new_empty(1, self.layout.rows.B)
        weights = self.layout.sort(self.batch.weights(one_row))[: rows.B]
        components = Temporal.of_rows(
            self.net,
            Layout(rows, None),  # samples stay in the order of the rows
            self.cell,
            run.saved,
            self.W is not None,
            run.u,
            costates.lam[rows.B :],
            costates.k[rows.B :],
            weights / self.layout.rows.B,
        )
        return components.norms()["joint"]

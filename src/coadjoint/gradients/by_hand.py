"""The gradient of a chain of dense layers by hand: sweeps over depth without torch's graph.

    L            forward ->, adjoint <-                              and one product for the weights
    L + rho G    forward ->, costates <-, tangents ->, adjoint <-    and two

torch differentiates only what is small: the loss by the outputs, and G by what it reads, which are
costates as a rule. Chains with other maps, and functions of the user's own, which may read the
weights themselves, are differentiated through torch's graph (bptt.py, penalised.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..networks.chain import Chain
from ..networks.chain_loss import losses_and_slopes
from ..networks.chain_parts import Part, Slopes, is_written_down, split_run
from ..networks.chain_run import ChainCostates, ChainRun
from ..networks.interface import Net
from ..networks.stretches import ScaledBlock
from ..objectives.batch import Batch
from ..objectives.losses import LOSSES, LossLike
from ..sweeps.functions import is_transformed
from ..sweeps.rows import scale
from ..sweeps.torch_internals import autocast_is_on

# share L + rho G of each sample, [B], and G, from its costates
Objective = Callable[[ChainCostates], tuple[Tensor, Tensor]]
GradientById = dict[int, Tensor]


class PartCostates(ChainCostates):
    """Costates whose run is made of leaves of torch's graph, when it is first read.

    Few penalties read it: most take the costates alone.
    """

    def __init__(self, gradient: HandGradient, blocks: Sequence[ScaledBlock], loss: Tensor) -> None:
        self.gradient = gradient
        self.blocks = blocks
        self.loss = loss

    @functools.cached_property
    def trajectory(self) -> ChainRun:  # type: ignore[override]
        """The run as a function of the leaves of its parts."""
        run = self.gradient.run
        stretches = [part.differentiable() for part in self.gradient.parts]
        return ChainRun(run.network, run.batch, run.input, stretches)


class HandGradient:
    """The gradient of a chain for one batch, of L or of share L + rho G.

    run     of the chain, without a graph
    losses  of each sample, [B]
    """

    def __init__(self, run: ChainRun, batch: Batch, loss: LossLike, needs_costates: bool) -> None:
        self.run = run
        self.batch = batch
        self.parts: list[Part] = split_run(run)
        with torch.enable_grad():
            self.a = run.a.detach().requires_grad_()
            judge = run.judge(loss, batch.y, batch.mask, batch.reduce)
            self.value, top = losses_and_slopes(judge, self.a)
            if top is None:  # this loss has no formula for its slope
                ones = torch.ones_like(self.value)
                (top,) = torch.autograd.grad(
                    self.value, self.a, ones, create_graph=needs_costates, retain_graph=True
                )
        self.top = top  # dL/da, a function of a
        self.losses = self.value.detach()

    @staticmethod
    def of(
        net: Net, batch: Batch, loss: LossLike, needs_costates: bool = False
    ) -> HandGradient | None:
        """The gradient of this network by hand; None if it must go through torch's graph."""
        chain = net.as_chain if isinstance(net, Net) else None
        if chain is None or not can_be_by_hand(chain, batch, loss):
            return None
        with torch.no_grad():
            run = chain.run(batch)
        return HandGradient(run, batch, loss, needs_costates)

    @torch.no_grad()
    def loss_gradient(self) -> GradientById:
        """The gradient of the mean loss, by the id of each parameter."""
        B = len(self.losses)
        shares = self.batch.weights(self.losses[None]) / B
        return self._adjoint(self.top.detach() * shares[:, None], [()] * len(self.parts))

    @torch.no_grad()
    def penalised_gradient(
        self, objective: Objective
    ) -> tuple[GradientById, Tensor, ChainCostates]:
        """The gradient of the mean objective, the penalties [B], and the costates.

        objective: takes the costates, and returns its values [B] and those of the penalty.
        """
        blocks = self.run.costate_blocks(self.top.detach(), [part.costates for part in self.parts])
        k_top = blocks[-1].exponent[-1]
        mantissas = [block.mantissa.detach().requires_grad_() for block in blocks]
        losses = self.losses.detach().requires_grad_()
        leaf_blocks: list[ScaledBlock] = []
        for block, mantissa in zip(blocks, mantissas, strict=True):
            leaf_blocks.append(ScaledBlock(mantissa, block.exponent))
        with torch.enable_grad():
            lam = PartCostates(self, leaf_blocks, losses)
            values, penalties = objective(lam)
            leaves = [leaf for part in self.parts for leaf in part.leaves]
            found = torch.autograd.grad(
                self.batch.mean(values), [losses, *mantissas, *leaves], allow_unused=True
            )
        by_loss = found[0]
        by_mantissas = found[1 : 1 + len(mantissas)]
        by_leaves = iter(found[1 + len(mantissas) :])
        slopes = [tuple(itertools.islice(by_leaves, len(part.leaves))) for part in self.parts]
        by_top = self._tangents(by_mantissas, blocks)
        gradient = self._adjoint(self._slope_by_a(by_loss, by_top, k_top), slopes)
        return gradient, penalties.detach(), ChainCostates(self.run, blocks, self.losses)

    def _tangents(self, slopes: Slopes, blocks: Sequence[ScaledBlock]) -> Tensor | None:
        """The penalty's slope by the mantissa of lam_L; None if it does not depend on costates.

        slopes: by the mantissas of each block.
        """
        sizes = [len(block.mantissa) for block in blocks]
        starts = itertools.accumulate(sizes, initial=0)
        by_start = dict(zip(starts, slopes, strict=False))  # `starts` has the end, too
        carried: Tensor | None = None
        begin = 0
        for part in self.parts:
            # A part without a block of its own: its costate is the last of the block below.
            slope = add_to_first(by_start.get(begin), carried)
            carried = None if slope is None else part.tangents(slope)
            begin += len(part.layers)
        last = add_to_first(by_start.get(begin), carried)
        return None if last is None else last[0]

    def _slope_by_a(self, by_loss: Tensor | None, by_top: Tensor | None, k: Tensor) -> Tensor:
        """The objective's slope by the pre-outputs, [B, n].

        by_loss: its slope by the losses, [B]; by_top: by the mantissa of lam_L; k: its exponents.
        """
        outputs: list[Tensor] = []
        slopes: list[Tensor] = []
        if by_loss is not None:
            outputs.append(self.value)
            slopes.append(by_loss)
        if by_top is not None and self.top.requires_grad:  # or its own slope is 0
            outputs.append(self.top)
            slopes.append(scale(by_top, -k[:, None]))
        if not outputs:
            return torch.zeros_like(self.a)
        (slope,) = torch.autograd.grad(outputs, self.a, slopes)
        return slope

    def _adjoint(self, slope: Tensor, by_leaves: Sequence[Slopes]) -> GradientById:
        """The gradient by the id of each parameter, from the objective's slope by a, [B, n]."""
        gradient: GradientById = {}
        for part, of_leaves in zip(reversed(self.parts), reversed(by_leaves), strict=True):
            slope = part.adjoint(slope, of_leaves)
            for parameter, g in part.gradients():
                key = id(parameter)
                # Several layers may share a parameter.
                gradient[key] = gradient[key] + g if key in gradient else g
        return gradient


def add_to_first(slope: Tensor | None, term: Tensor | None) -> Tensor | None:
    """slope [rows, B, n] with `term` added to its first row; None stands for zeros."""
    if term is None:
        return slope
    if slope is None:
        return term[None]
    return torch.cat([slope[:1] + term, slope[1:]])


def can_be_by_hand(chain: Chain, batch: Batch, loss: LossLike) -> bool:
    """Whether all maps are written down, and nothing but the maps and the loss is differentiated.

    A loss of the user's own may read the weights, which are no inputs of the sweeps.
    """
    x = batch.u
    is_known = isinstance(loss, str) or any(loss is known for known in LOSSES.values())
    is_plain = isinstance(x, Tensor) and x.dim() == 2 and x.device.type in ("cpu", "cuda")
    if not is_known or not is_plain or autocast_is_on() or is_transformed():
        return False
    if x.dtype not in (torch.float32, torch.float64) or chain.must_be_called():
        return False
    return all(map(is_written_down, chain.maps))

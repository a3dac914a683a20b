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
from typing import NamedTuple

import torch
from torch import Tensor

from ..networks.chain import Chain
from ..networks.chain_loss import slope_formula
from ..networks.chain_parts import ChainPart, CostateSlope, Slopes, split_run
from ..networks.chain_run import ChainCostates, ChainRun
from ..networks.interface import Net
from ..networks.stretches import ScaledBlock, normalise
from ..networks.written_layers import WrittenLayers, written_layers
from ..objectives.batch import Batch
from ..objectives.losses import LOSSES, LossLike, LossPoint
from ..sweeps.affine import plus
from ..sweeps.costates import BaseCostates
from ..sweeps.functions import is_transformed
from ..sweeps.norms import norm_rates
from ..sweeps.rows import scale
from ..sweeps.torch_internals import autocast_is_on

GradientById = dict[int, Tensor]


class PartCostates(ChainCostates):
    """Costates whose norms are leaves of torch's graph, and so are their mantissas.

    The run is made of leaves, too, when it is first read: most penalties take norms alone. Norms
    are differentiated once, and need no second derivative where they are zero.
    """

    def __init__(self, gradient: HandGradient, blocks: Sequence[ScaledBlock], loss: Tensor) -> None:
        self.gradient = gradient
        self.blocks = blocks
        self.loss = loss

    @functools.cached_property
    def size(self) -> Tensor:
        """The norms of the mantissas, [L + 1, B]."""
        with torch.no_grad():
            size = super().size
        return size.requires_grad_()

    @property
    def has_norms(self) -> bool:
        """Whether `size` has been read."""
        return "size" in vars(self)

    @functools.cached_property
    def trajectory(self) -> ChainRun:  # type: ignore[override]
        """The run as a function of the leaves of its parts."""
        run = self.gradient.run
        stretches = [part.differentiable() for part in self.gradient.parts]
        return ChainRun(run.network, run.batch, run.input, stretches)


class PenaltySlopes(NamedTuple):
    """The slopes of a penalty by what it was computed from; None for zeros."""

    by_mantissas: Sequence[Tensor | None]  # of each block of costates, [rows, B, n]
    rates: Tensor | None  # [L + 1, B]: through their norms, by rates * mantissa
    by_loss: Tensor | None  # [B]
    by_leaves: Sequence[Slopes]  # of each part, if the penalty has read the run


class HandGradient:
    """The gradient of a chain for one batch, of L or of share L + rho G.

    run     of the chain, without a graph
    layers  what the chain holds
    losses  of each sample, [B]
    """

    def __init__(
        self, run: ChainRun, layers: WrittenLayers, batch: Batch, loss: LossLike, twice: bool
    ) -> None:
        self.run = run
        self.layers = layers
        self.batch = batch
        self.parts: list[ChainPart] = split_run(run, layers)
        self.a = run.a.detach()
        judge = run.judge(loss, batch.y, batch.mask, batch.reduce)
        self.formula = slope_formula(judge)
        self.point: LossPoint | None = None
        if self.formula is None:
            with torch.enable_grad():
                a = self.a.requires_grad_()
                value = judge.sample_losses(a)
                (self.top,) = torch.autograd.grad(value.sum(), a, create_graph=twice)
            self.losses = value.detach()
            return
        self.point = self.formula.point(self.a, run.network.output)
        if self.point is not None:
            self.losses = self.point.value
            self.top = self.point.slope
        else:
            self.losses = judge.sample_losses(self.a)
            self.top = self.formula.slope(self.a)  # dL/da

    @staticmethod
    def of(net: Net, batch: Batch, loss: LossLike, twice: bool = False) -> HandGradient | None:
        """The gradient of this network by hand; None if it must go through torch's graph.

        twice: the loss must be differentiable twice, for `penalised_gradient`.
        """
        chain = net.as_chain if isinstance(net, Net) else None
        if chain is None or not can_be_by_hand(chain, batch, loss):
            return None
        layers = written_layers(chain, list(chain.maps))
        if layers is None or not layers.trained:  # without any, the caller refuses the network
            return None
        with torch.no_grad():
            return HandGradient(chain.run_written(batch, layers), layers, batch, loss, twice)

    @torch.no_grad()
    def loss_gradient(self) -> GradientById:
        """The gradient of the mean loss, by the id of each parameter."""
        return self._adjoint(self._slope_by_a(self._sample_shares(), None), [()] * len(self.parts))

    @torch.no_grad()
    def penalised_gradient(
        self,
        G: Callable[[ChainCostates], Tensor],
        rho: float | Tensor,
        share: float = 1.0,
        with_slope: Callable[[BaseCostates], tuple[Tensor, Tensor]] | None = None,
        held: bool = False,
    ) -> tuple[GradientById, Tensor, ChainCostates]:
        """The gradient of the mean of share L + rho G, the penalties [B], and the costates.

        G: a function of costates and their run. share: 1, or 0 to leave out the loss. with_slope:
        G with its slope by norms, if there is a formula; see Penalty. held: lam_L = dL/da is a
        constant to the derivative of G.
        """
        top = self.top.detach()
        mantissa, k = normalise(top)
        blocks = self.run.costate_blocks(mantissa, k, [part.costates for part in self.parts])
        lam = ChainCostates(self.run, blocks, self.losses)
        shares = self._sample_shares()
        if with_slope is not None and lam.complete:
            penalties, slope = with_slope(lam)
            rates = norm_rates(lam.size, slope * (rho * shares))
            slopes = PenaltySlopes([None] * len(blocks), rates, None, [()] * len(self.parts))
        else:
            penalties, slopes = self._slopes_by_torch(G, blocks, rho * shares)
        by_top = self._tangents(slopes, blocks)
        if held:
            by_top = None
        if by_top is not None and mantissa is not top:
            by_top = scale(by_top, -k[:, None])
        by_loss = plus(shares if share else None, slopes.by_loss)
        gradient = self._adjoint(self._slope_by_a(by_loss, by_top), slopes.by_leaves)
        return gradient, penalties, lam

    def _sample_shares(self) -> Tensor:
        """The share of each sample in a mean, [B]."""
        B = len(self.losses)
        if self.batch.weight is None:
            return self.losses.new_full((B,), 1 / B)
        return self.batch.weights(self.losses[None]) / B

    def _slopes_by_torch(
        self, G: Callable[[ChainCostates], Tensor], blocks: Sequence[ScaledBlock], weights: Tensor
    ) -> tuple[Tensor, PenaltySlopes]:
        """The penalties, [B], and the slopes of sum_j weights_j G_j."""
        losses = self.losses.detach().requires_grad_()
        mantissas = [block.mantissa.detach().requires_grad_() for block in blocks]
        exponents = [block.exponent for block in blocks]
        with torch.enable_grad():
            lam = PartCostates(self, list(map(ScaledBlock, mantissas, exponents)), losses)
            penalties = G(lam)
        sizes = [lam.size] if lam.has_norms else []
        leaves = [leaf for part in self.parts for leaf in part.leaves]
        inputs = [losses, *mantissas, *sizes, *leaves]
        grads: Slopes = torch.autograd.grad(penalties, inputs, weights, allow_unused=True)
        found = iter(grads)
        by_loss = next(found)
        by_mantissas = list(itertools.islice(found, len(mantissas)))
        by_size = next(found) if lam.has_norms else None
        rates = None if by_size is None else norm_rates(lam.size.detach(), by_size)
        by_leaves = [tuple(itertools.islice(found, len(part.leaves))) for part in self.parts]
        return penalties.detach(), PenaltySlopes(by_mantissas, rates, by_loss, by_leaves)

    def _tangents(self, slopes: PenaltySlopes, blocks: Sequence[ScaledBlock]) -> Tensor | None:
        """The penalty's slope by the mantissa of lam_L; None if it does not depend on costates."""
        by_start = slopes_by_start(slopes, blocks)
        if not by_start:
            return None
        carried: Tensor | None = None
        begin = 0
        for part in self.parts:
            # A part without a block of its own: its costate is the last of the block below.
            slope = by_start.get(begin)
            if slope is not None or carried is not None:
                carried = part.tangents(slope, carried)
            begin += len(part.layers)
        last = by_start.get(begin)
        return carried if last is None else last.first_row(carried)

    def _slope_by_a(self, by_loss: Tensor | None, by_top: Tensor | None) -> Tensor:
        """The objective's slope by the pre-outputs, [B, n], from those by the losses and lam_L."""
        top = self.top.detach()
        slope = torch.zeros_like(top) if by_loss is None else by_loss[:, None] * top
        if by_top is not None:
            slope = slope + self._loss_bend(by_top)
        return slope

    def _loss_bend(self, change: Tensor) -> Tensor:
        """The change of dL/da along a change of a, [B, n]."""
        if self.point is not None:
            return self.point.bend(change)
        formula = self.formula
        if formula is not None and formula.loss.bend is not None:
            return formula.loss.bend(self.a, formula.y, change)
        top = self.top
        if formula is not None:
            with torch.enable_grad():
                top = formula.slope(self.a.requires_grad_())
        if not top.requires_grad:  # the loss is made of straight lines
            return torch.zeros_like(change)
        (bend,) = torch.autograd.grad(top, self.a, change)
        return bend

    def _adjoint(self, slope: Tensor, by_leaves: Sequence[Slopes]) -> GradientById:
        """The gradient by the id of each parameter, from the objective's slope by a, [B, n]."""
        gradient: GradientById = {}
        weights = self.layers.weights
        biases = self.layers.biases
        end = len(weights)
        for part, of_leaves in zip(reversed(self.parts), reversed(by_leaves), strict=True):
            slope = part.adjoint(slope, of_leaves)
            begin = end - len(part.layers)
            part.add_gradients(gradient, weights[begin:end], biases[begin:end])
            end = begin
        return gradient


def slopes_by_start(
    slopes: PenaltySlopes, blocks: Sequence[ScaledBlock]
) -> dict[int, CostateSlope]:
    """The penalty's slope by each block of costates that it reads, by the number of its first."""
    by_start: dict[int, CostateSlope] = {}
    begin = 0
    for block, entries in zip(blocks, slopes.by_mantissas, strict=True):
        end = begin + len(block.mantissa)
        rates = None if slopes.rates is None else slopes.rates[begin:end]
        if entries is not None or rates is not None:
            by_start[begin] = CostateSlope(block.mantissa, entries, rates)
        begin = end
    return by_start


def can_be_by_hand(chain: Chain, batch: Batch, loss: LossLike) -> bool:
    """Whether the loss is a known one of a plain batch, and torch does nothing around the run.

    The maps must be written down, too: see `written_layers`. A loss of the user's own may read the
    weights, which are no inputs of the sweeps.
    """
    x = batch.u
    is_known = isinstance(loss, str) or any(loss is known for known in LOSSES.values())
    is_plain = isinstance(x, Tensor) and x.dim() == 2 and x.device.type in ("cpu", "cuda")
    if not is_known or not is_plain or autocast_is_on() or is_transformed():
        return False
    is_ours = type(chain).run is Chain.run and not chain.must_be_called()
    return is_ours and x.dtype in (torch.float32, torch.float64)

"""Parts of a chain whose gradients are written down: dense layers, one by one or swept together.

A part is a stretch of a run that has no graph. `costates` and `adjoint` are called from the last
part to the first, `tangents` from the first to the last:

    costates   lam_i of its states, from lam of its last state
    tangents   the penalty's slope by that lam, from its slopes by all lam_i
    adjoint    the objective's slope by the state before it, from the slope by its last state;
               on the way, the gradients by its weights

A plain gradient needs `adjoint` alone. The algebra is that of Caterini (2017), section 3.3, with
the penalty's slopes as sources of the tangents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..sweeps.affine import plus
from ..sweeps.dense import dense_tangent, layer_gradients
from ..sweeps.norms import norm
from ..sweeps.plan import Saved
from ..sweeps.rows import scale
from ..sweeps.run import FormulaRun
from ..sweeps.torch_internals import change_count
from .chain_run import ChainRun
from .dense_stretch import DenseStretch
from .maps import Dense, Tied
from .maps.elementwise import ELEMENTWISE
from .stretches import LinearStretch, MapStretch, ScaledBlock, Stretch, normalise
from .written_layers import WrittenLayers

Slopes = Sequence[Tensor | None]  # by each of a part's leaves; none if nothing has read them


class CostateSlope(NamedTuple):
    """The penalty's slope by a block of mantissas, entries + rates * mantissa; None for zeros."""

    mantissa: Tensor  # [rows, B, n]
    entries: Tensor | None  # [rows, B, n]
    rates: Tensor | None  # [rows, B], through the norms

    def first_row(self, carried: Tensor | None = None) -> Tensor:
        """The slope by the first costate of the block and what is carried to it, [B, n]."""
        total = carried
        if self.entries is not None:
            total = plus(total, self.entries[0])
        if self.rates is not None:
            total = plus(total, self.rates[0, :, None] * self.mantissa[0])
        return torch.zeros_like(self.mantissa[0]) if total is None else total


class ChainPart(ABC):
    """Consecutive layers of a run without a graph, and their products.

    layers    the maps
    leaves    of torch's graph: what a penalty may have read of this part, see `differentiable`
    """

    # The gradients by the matrices of the layers, [L, m, n], and by their biases, [L, m].
    by_matrices: Tensor
    by_biases: Tensor

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self.leaves: list[Tensor] = []

    @abstractmethod
    def costates(self, lam: Tensor) -> ScaledBlock:
        """The costates as Stretch.costates returns them, from lam [B, n] of the last state."""

    @abstractmethod
    def tangents(self, slope: CostateSlope | None, carried: Tensor | None) -> Tensor:
        """The penalty's slope by the lam that `costates` was given, [B, n].

        slope: that by the mantissas of its block. carried [B, n]: what the part before returned, to
        be added at the first row.
        """

    @abstractmethod
    def adjoint(self, slope: Tensor, by_leaves: Slopes) -> Tensor:
        """The objective's slope by the state before, [B, n], from that by the last state.

        by_leaves: the penalty's slopes by `leaves`. What the costates of this part add is included
        if `tangents` was called.
        """

    @abstractmethod
    def differentiable(self) -> Stretch:
        """The stretch as a function of `leaves`, which are made here."""

    def add_gradients(
        self,
        gradient: dict[int, Tensor],
        weights: Sequence[nn.Parameter],
        biases: Sequence[nn.Parameter | None],
    ) -> None:
        """Add the gradients by the weights and biases of the layers, by their ids."""
        by_matrices = self.by_matrices.unbind(0)
        for layer, W, by_matrix in zip(self.layers, weights, by_matrices, strict=True):
            by_W = layer.pull_matrix(by_matrix) if type(layer) is Tied else by_matrix
            key = id(W)
            gradient[key] = gradient[key] + by_W if key in gradient else by_W
        for b, by_bias in zip(biases, self.by_biases.unbind(0), strict=True):
            key = id(b)  # where there is no bias, that of None, which nobody asks for
            is_shared = key in gradient and b is not None
            gradient[key] = gradient[key] + by_bias if is_shared else by_bias


class SweptPart(ChainPart):
    """Dense layers of one width: each method is one sweep over depth."""

    def __init__(self, stretch: DenseStretch, layers: Sequence[nn.Module]) -> None:
        super().__init__(layers)
        self.run = stretch.run
        self.delta: Tensor | None = None  # of the costates, step rows
        self.change: Tensor | None = None  # m_i, the tangents of the states before each layer
        self.bend: Tensor | None = None

    def costates(self, lam: Tensor) -> ScaledBlock:
        """The scaled adjoint sweep."""
        plan = self.run.plan
        rows = plan.rows
        self.lam, self.delta, k = plan.engine.adjoint(
            plan, self.run.saved, self.run.W, None, lam, None, None, scaled=True, keep=True
        )
        assert k is not None
        self.k = k
        by_state = (rows.T + 1, rows.B)
        size = norm(self.lam).view(by_state)
        return ScaledBlock(self.lam.view(*by_state, -1), k.view(by_state), size)

    def tangents(self, slope: CostateSlope | None, carried: Tensor | None) -> Tensor:
        """The tangent sweep in the units of the costates, and the bend of all layers."""
        rows = self.run.plan.rows
        entries = None if slope is None else self._state_rows(slope.entries)
        rates = None if slope is None else self._state_rows(slope.rates)
        assert self.run.W is not None
        m, self.bend = dense_tangent(
            self.run.plan, self.run.saved, self.run.W, self.lam, self.k, carried, entries, rates
        )
        self.change = rows.prev(m)
        return rows.last(m)

    def _state_rows(self, y: Tensor | None) -> Tensor | None:
        """Values [T + 1, B, ...] of a block as state rows; None for zeros.

        Of T rows: the last costate is the first of the block above, where its slope is counted.
        """
        if y is None:
            return None
        if len(y) == self.run.plan.rows.T:
            y = torch.cat([y, torch.zeros_like(y[:1])])
        return y.flatten(0, 1)

    def adjoint(self, slope: Tensor, by_leaves: Slopes) -> Tensor:
        """The adjoint sweep, and one product or two for the weights of all layers."""
        plan = self.run.plan
        saved = self.run.saved
        of_W, of_a, of_x, of_last = by_leaves or (None,) * 4
        by_last = plus(slope, of_last)
        by_a = plus(self.bend, of_a)
        # Without a link, unscaled; lam is read at the first state alone.
        lam, delta, _ = plan.engine.adjoint(
            plan, saved, self.run.W, of_x, by_last, by_a, None, scaled=False, keep=False
        )
        x = plan.rows.prev(saved.x)
        lam_delta = None if self.change is None else self.delta
        self.by_matrices, self.by_biases = layer_gradients(plan, delta, x, lam_delta, self.change)
        if of_W is not None:
            self.by_matrices += of_W
        return lam[: plan.rows.B]

    def differentiable(self) -> DenseStretch:
        """The same run, made of W, a, x and its last states."""
        run = self.run
        assert run.W is not None
        arrays = (run.W, run.saved.a, run.saved.x, run.last)
        self.leaves = [y.detach().requires_grad_() for y in arrays]
        W, a, x, last = self.leaves
        saved = Saved(a, run.saved.v, x, run.saved.p, run.saved.q)
        return DenseStretch(FormulaRun(run.plan, saved, W, last))


class SinglePart(ChainPart):
    """One layer y = psi(z), z = K x + b."""

    def __init__(self, stretch: MapStretch, layer: nn.Module) -> None:
        super().__init__([layer])
        self.K, self.b, self.activation = effective_weights(layer)
        self.x = stretch.before
        self.y = stretch.last
        self.psi = ELEMENTWISE[self.activation]
        self.change: Tensor | None = None  # m, the tangent of x
        self.bend: Tensor | None = None  # c = psi''(z) (K m) lam
        self.slope: Tensor | None = None  # psi'(z); None for 1
        if self.activation != "identity":
            self.z = linear(self.x, self.K, self.b)
            self.slope = self.psi.slope(self.z, self.y)

    def through_psi(self, w: Tensor) -> Tensor:
        """psi'(z) w."""
        return w if self.slope is None else self.slope * w

    def costates(self, lam: Tensor) -> ScaledBlock:
        """K' delta, delta = psi'(z) lam."""
        self.lam = lam
        self.delta = self.through_psi(lam)
        pulled = self.delta @ self.K
        mantissa, k = normalise(pulled)
        self.k = None if mantissa is pulled else k
        return ScaledBlock(mantissa[None], k[None])

    def tangents(self, slope: CostateSlope | None, carried: Tensor | None) -> Tensor:
        """psi'(z) (K m), where m is the slope at true scale."""
        m = carried if slope is None else slope.first_row(carried)
        assert m is not None
        if self.k is not None:
            m = scale(m, -self.k[:, None])
        self.change = m
        dz = m @ self.K.T
        if self.slope is not None:
            self.bend = self.psi.curvature(self.z, self.y) * dz * self.lam
        return self.through_psi(dz)

    def adjoint(self, slope: Tensor, by_leaves: Slopes) -> Tensor:
        """K' d, d = psi'(z) slope + c; the gradients are d x' + delta m' by K and d by b."""
        of_x, of_K, of_b = by_leaves or (None,) * 3
        d = self.through_psi(slope)
        if self.bend is not None:
            d = d + self.bend
        by_K = d.T @ self.x
        if self.change is not None:
            by_K += self.delta.T @ self.change
        by_b = d.sum(0)
        by_x = d @ self.K
        for total, term in ((by_K, of_K), (by_b, of_b), (by_x, of_x)):
            if term is not None:
                total += term
        self.by_matrices = by_K[None]
        self.by_biases = by_b[None]
        return by_x

    def differentiable(self) -> MapStretch:
        """The map of x, K and b."""
        b = self.x.new_zeros(len(self.K)) if self.b is None else self.b
        self.leaves = [y.detach().requires_grad_() for y in (self.x, self.K, b)]
        x, K, b = self.leaves
        y = self.psi.value(linear(x, K, b))
        if self.activation == "identity":
            return LinearStretch(x, y, K, change_count(K))
        return MapStretch(x, y)


def effective_weights(layer: nn.Module) -> tuple[Tensor, Tensor | None, str]:
    """The matrix of a layer, its bias or None, and the name of its activation."""
    if isinstance(layer, nn.Linear):
        return layer.weight, layer.bias, "identity"
    assert isinstance(layer, Dense | Tied)
    return layer.effective()


def split_run(run: ChainRun, layers: WrittenLayers) -> list[ChainPart]:
    """The parts of a run whose maps are all written down, one for each stretch."""
    maps = layers.maps
    parts: list[ChainPart] = []
    begin = 0
    for stretch in run.stretches:
        end = begin + len(stretch)
        if isinstance(stretch, DenseStretch):
            parts.append(SweptPart(stretch, maps[begin:end]))
        else:
            assert isinstance(stretch, MapStretch)
            parts.append(SinglePart(stretch, maps[begin]))
        begin = end
    return parts

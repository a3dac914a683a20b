"""J of a chain: how its states x_1, ..., x_L change with the weights: J v and J' w.

x_i is made by theta_1, ..., theta_i:

    J  v:  dx_i = Df_i dx_{i-1} + (df_i / dtheta_i) v_i      map by map, or one tangent sweep for
                                                             dense layers of one width
    J' w:  one backward pass through the graph of a run, which is made once
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..networks.chain_calls import attention_with_derivatives, call_map
from ..networks.chain_run import ChainRun
from ..networks.dense_stretch import DenseStretch
from ..networks.maps import Dense, Tied
from .weight_jacobian import Jacobian, vector_products


class MapTangent:
    """The derivative of one map by its state and the weights."""

    def __init__(
        self, index: int, module: nn.Module, x: Tensor, parameters: Sequence[Tensor]
    ) -> None:
        # From a copy of the state: weights that earlier maps share do not lead through it.
        before = x.detach().requires_grad_()
        after = call_map(index, module, before.clone())
        self.like = after.detach()
        self.jacobian = Jacobian([after], [before, *parameters])

    def push(self, v: Tensor | None, direction: Sequence[Tensor]) -> list[Tensor]:
        """The change of the state after the map; v is that of the state before, None for zero."""
        (change,) = self.jacobian.push([v, *direction])
        return [torch.zeros_like(self.like) if change is None else change]


class SweepTangent:
    """The derivative of dense layers of one width, x_i = psi(W_i x_{i-1} + b_i), by a sweep."""

    def __init__(
        self,
        stretch: DenseStretch,
        layers: Sequence[nn.Module],
        before: Sequence[Tensor],
        parameters: Sequence[Tensor],
    ) -> None:
        self.stretch = stretch
        self.before = torch.stack([x.detach() for x in before])  # [L, B, n]
        weights: list[Tensor] = []
        biases: list[Tensor] = []
        for layer in layers:
            assert isinstance(layer, Dense | Tied)
            W, b, _ = layer.effective()
            weights.append(W)
            biases.append(W.new_zeros(len(W)) if b is None else b)
        self.to_weights = Jacobian([*weights, *biases], parameters)
        self.zeros = [torch.zeros_like(y) for y in (*weights, *biases)]

    def push(self, v: Tensor | None, direction: Sequence[Tensor]) -> list[Tensor]:
        """The changes of the states after the layers; v is that before them, None for zero."""
        L, B, n = self.before.shape
        changes: list[Tensor] = []
        for zero, change in zip(self.zeros, self.to_weights.push(direction), strict=True):
            changes.append(zero if change is None else change)
        with torch.no_grad():
            dW = torch.stack(changes[:L])
            db = torch.stack(changes[L:])
            base = torch.baddbmm(db[:, None], self.before, dW.transpose(1, 2))
            first = self.before.new_zeros(B, n) if v is None else v
            dx = self.stretch.run.push(base.reshape(L * B, n), None, None, first)
        return list(self.stretch.rows.states(dx)[1:])


class ChainJacobian:
    """J of a run of a chain: how its pre-outputs a = x_L and its states change with the weights.

    Changes of the states are rows [B, n_1 + ... + n_L], those of x_1, ..., x_L side by side.

    parameters   those that change
    """

    first = 0  # rows before those that structural damping counts; x_0 is not among the states here

    def __init__(self, run: ChainRun, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = list(parameters.values())
        self.tangents: list[MapTangent | SweepTangent] = []
        chain = run.network
        with torch.enable_grad(), attention_with_derivatives(chain):
            again = chain.repeat(run)  # with a graph of its own: that of the run may be used up
            begin = 0
            for stretch in again.stretches:
                end = begin + len(stretch.states)
                self.tangents.append(self._tangent(again, begin, end))
                begin = end
        self.states = again.x[1:]
        self.widths = [x[0].numel() for x in self.states]

    def _tangent(self, run: ChainRun, begin: int, end: int) -> MapTangent | SweepTangent:
        """The derivative of maps begin..end - 1, which are one stretch of the run."""
        maps = list(run.network.maps)
        stretch = run.stretches[len(self.tangents)]
        if isinstance(stretch, DenseStretch):
            return SweepTangent(stretch, maps[begin:end], run.x[begin:end], self.parameters)
        return MapTangent(begin, maps[begin], run.x[begin], self.parameters)

    def push(self, direction: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """J direction = (da, dx): the changes of pre-outputs [B, n_L] and states.

        direction: a change of each parameter, in the order of `parameters`.
        """
        changes: list[Tensor] = []
        v = None
        for tangent in self.tangents:
            changes += tangent.push(v, direction)
            v = changes[-1]
        rows = [dx.flatten(1) for dx in changes]
        return rows[-1], torch.cat(rows, 1)

    def pull(self, of_a: Tensor | None, of_x: Tensor | None) -> list[Tensor]:
        """The gradient of <of_a, a> + <of_x, x> by each parameter."""
        bars: list[Tensor | None] = [None] * len(self.states)
        if of_x is not None:
            parts = of_x.split(self.widths, 1)
            bars = [y.reshape(x.shape) for y, x in zip(parts, self.states, strict=True)]
        if of_a is not None:
            source = of_a.reshape(self.states[-1].shape)
            last = bars[-1]
            bars[-1] = source if last is None else last + source
        outputs = [x if x.requires_grad else None for x in self.states]
        gradients: list[Tensor] = []
        found = vector_products(outputs, self.parameters, bars)
        for p, g in zip(self.parameters, found, strict=True):
            gradients.append(torch.zeros_like(p) if g is None else g)
        return gradients

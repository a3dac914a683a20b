"""J of a chain: how its states x_1, ..., x_L change with the weights: J v and J' w.

x_i is made by theta_1, ..., theta_i. The states are outputs of one graph, which is made once: J' w
is one backward pass through the maps, and its derivative by w gives J v.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..networks.chain_run import ChainRun
from .weight_jacobian import Jacobian


class ChainJacobian:
    """J of a run of a chain: how its pre-outputs a = x_L and its states change with the weights.

    Changes of the states are rows [B, n_1 + ... + n_L], those of x_1, ..., x_L side by side.

    parameters   those that change
    """

    first = 0  # rows before those that structural damping counts; x_0 is not among the states here

    def __init__(self, run: ChainRun, parameters: dict[str, nn.Parameter]) -> None:
        # A graph of its own: that of the run may have been used up.
        with torch.enable_grad():
            states = run.network.repeat(run).x[1:]
            self.jacobian = Jacobian(states, list(parameters.values()))
        self.shapes = [x.shape for x in states]
        self.widths = [x[0].numel() for x in states]
        self.like = states[-1].detach()

    def push(self, direction: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """J direction = (da, dx): the changes of pre-outputs [B, n_L] and states.

        direction: a change of each parameter, in the order of `parameters`.
        """
        changes: list[Tensor] = []
        for shape, dx in zip(self.shapes, self.jacobian.push(direction), strict=True):
            changes.append(self.like.new_zeros(shape) if dx is None else dx)
        rows = [dx.flatten(1) for dx in changes]
        return rows[-1], torch.cat(rows, 1)

    def pull(self, of_a: Tensor | None, of_x: Tensor | None) -> list[Tensor]:
        """The gradient of <of_a, a> + <of_x, x> by each parameter."""
        bars: list[Tensor | None] = [None] * len(self.shapes)
        if of_x is not None:
            parts = of_x.split(self.widths, 1)
            bars = [y.reshape(shape) for y, shape in zip(parts, self.shapes, strict=True)]
        if of_a is not None:
            source = of_a.reshape(self.shapes[-1])
            last = bars[-1]
            bars[-1] = source if last is None else last + source
        gradients: list[Tensor] = []
        for p, g in zip(self.jacobian.inputs, self.jacobian.pull(bars), strict=True):
            gradients.append(torch.zeros_like(p) if g is None else g)
        return gradients

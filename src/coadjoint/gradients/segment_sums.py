"""The sums over time that make up a gradient, added segment by segment."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..networks.effective_weights import WeightAndBias
from ..networks.network import Network
from ..sweeps.affine import plus
from ..sweeps.chunks import Sum
from .evaluation import Gradient, name_gradients
from .segment_parts import LastStates, SegmentRun

READOUT = ("V", "b_o")


class SweptWeights(NamedTuple):
    """The weights as the sweeps take them, with the graph that made them from the parameters."""

    start: Tensor  # x_0 [B, n] in the rows' order
    W: Tensor | None
    p: Tensor | None  # the cell's own parameters
    base: WeightAndBias  # (R, b) of the inputs added to W r(x)
    side: WeightAndBias | None  # (R, b) of the inputs beside it, v


class GradientSums:
    """Sums over time, each under the name of the weight that it is the gradient of.

    Terms of the costates' own derivatives are summed apart, under "... of lam": they are added
    where the gradient without segments adds them, so that the bits are the same.
    """

    def __init__(self, net: Network, weights: SweptWeights) -> None:
        self.net = net
        self.weights = weights
        self.sums: dict[str, Sum] = {}

    def needs(self, name: str) -> bool:
        """Tell whether V, b_o or the field `name` of SweptWeights exists and is trained."""
        owner = self.net if name in READOUT else self.weights
        value = getattr(owner, name)
        if isinstance(value, tuple):  # (R, b)
            return any(y is not None and y.requires_grad for y in value)
        return value is not None and value.requires_grad

    def sum(self, name: str) -> Sum:
        """Return the sum under `name`, making it if needed."""
        return self.sums.setdefault(name, Sum())

    def total(self, name: str) -> Tensor | None:
        """Return the value of the sum under `name`; None if nothing was added to it."""
        return self.sums[name].total() if name in self.sums else None

    def add_input_weights(self, name: str, run: SegmentRun, delta: Tensor) -> None:
        """Add delta u' to the sum of R and delta to that of b, for the rows of one segment.

        Args:
            name: "base" or "side", the inputs that R and b belong to.
            run: The run of the segment.
            delta: The derivative by R u + b, step rows.
        """
        weights = self.weights.base if name == "base" else self.weights.side
        assert weights is not None
        R, b = weights
        if R.requires_grad:
            self.sum(f"{name} R").add_product(run.rows, delta, run.u)
        if b is not None and b.requires_grad:
            self.sum(f"{name} b").add_rows(run.rows, delta)

    def add_readout(self, run: SegmentRun, of_pre: Tensor) -> None:
        """Add dL/da h' to the sum of V and dL/da to that of b_o, for the rows of one segment."""
        rows = run.rows
        if self.needs("V"):
            self.sum("V").add_product(rows, of_pre, self.net.visible_state(run.saved.x[rows.B :]))
        if self.needs("b_o"):
            self.sum("b_o").add_rows(rows, of_pre)

    def gradient(self, last: LastStates) -> Gradient:
        """Pull the sums through the graph that made the weights from the parameters."""
        weights = self.weights
        total = self.total
        of_W = plus(total("W"), total("W of lam"))
        of_p = plus(total("p"), total("p of lam"))
        of_V_by_lam = total("V of lam")  # [hidden, outputs], since lam = V' dL/da
        transposed = None if of_V_by_lam is None else of_V_by_lam.t()
        of_V = plus(last.of_V, total("V"), transposed)
        of_b_o = plus(last.of_b_o, total("b_o"))
        # Each weight with its gradient.
        pairs: list[tuple[Tensor | None, Tensor | None]] = [
            (weights.W, of_W),
            (weights.p, of_p),
            (weights.base[0], total("base R")),
            (weights.base[1], total("base b")),
        ]
        if weights.side is not None:
            pairs.append((weights.side[0], total("side R")))
            pairs.append((weights.side[1], total("side b")))
        pairs += [(weights.start, last.of_start), (self.net.V, of_V), (self.net.b_o, of_b_o)]
        outputs = []
        seeds = []
        for y, g in pairs:
            if y is not None and g is not None and y.requires_grad:
                outputs.append(y)
                seeds.append(g)
        parameters = {name: p for name, p in self.net.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            grads = torch.autograd.grad(
                outputs, list(parameters.values()), seeds, allow_unused=True
            )
        return name_gradients(parameters, grads)

"""Losses at one point with the slopes of torch's graph, bit for bit, but without that graph.

torch takes longer to record and differentiate a dozen operations on a few rows than a sweep takes.
Here the same operations are written down in the order of its graph: the loss of each entry, its
slope, and the slope of its slope, for the losses that are used most.

    value               L_i                                    [entries]
    slope(g)            d/da sum_i g_i L_i                     [entries, outputs]
    bend(v, g)          d/da (<v, slope(1)> + sum_i g_i L_i)   likewise; g None for zeros
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor
from torch.nn.functional import nll_loss

from .losses import LOSSES, Loss, LossLike, Output, check_classes, same_shape


class GraphPoint(Protocol):
    """A loss at one point, with the bits of torch's graph."""

    value: Tensor

    def slope(self, g: Tensor) -> Tensor:
        """The slope of sum_i g_i L_i, for g [entries]."""

    def bend(self, v: Tensor, g: Tensor | None) -> Tensor:
        """The slope of <v, slope(1)> + sum_i g_i L_i, for v [entries, outputs]."""


class SquaredPoint:
    """share sum over outputs of (a - y)^2; share: 1 or 1/2."""

    def __init__(self, name: str, share: float, a: Tensor, y: Tensor) -> None:
        self.share = share
        self.error = a - same_shape(name, a, y)
        value = self.error.square().sum(-1)
        self.value = value if share == 1 else share * value

    def slope(self, g: Tensor) -> Tensor:
        """2 share g_i (a - y)."""
        return (g * self.share)[:, None] * (self.error * 2)

    def bend(self, v: Tensor, g: Tensor | None) -> Tensor:
        """2 share v + slope(g)."""
        bend = v * (2 * self.share)
        return bend if g is None else bend + self.slope(g)


class ClassPoint:
    """-log softmax(a)_y of class numbers y, as losses.log_softmax computes it.

    e: the exponentials of a - max a, with 0 at the greatest entry, which is 1 less their sum.
    """

    def __init__(self, a: Tensor, y: Tensor) -> None:
        y = check_classes(a, y).long()
        self.greatest = a.argmax(-1, keepdim=True)
        self.y = y[:, None]
        below = (a - a.gather(-1, self.greatest)).scatter_(-1, self.greatest, 0.0)
        self.e = below.exp().scatter_(-1, self.greatest, 0.0)
        others = self.e.sum(-1, keepdim=True)
        self.whole = others + 1
        self.value = nll_loss(below - others.log1p(), y, reduction="none")

    def _through_differences(self, by_below: Tensor) -> Tensor:
        """The slope by a from that by a - max a, which is overwritten; each row sums to zero."""
        slope = by_below.scatter_(-1, self.greatest, 0.0)
        return slope.scatter_(-1, self.greatest, -slope.sum(-1, keepdim=True))

    def slope(self, g: Tensor) -> Tensor:
        """g_i (softmax(a) - e_y)."""
        g = g[:, None]
        by_below = self.e * (g / self.whole)
        return self._through_differences(by_below.scatter_add_(-1, self.y, -g))

    def bend(self, v: Tensor, g: Tensor | None) -> Tensor:
        """The slope of <v, softmax(a) - e_y>, and slope(g)."""
        share = self.whole.reciprocal()
        v = (v - v.gather(-1, self.greatest)).scatter_(-1, self.greatest, 0.0)
        by_share = (v * self.e).sum(-1, keepdim=True)
        by_others = -by_share * (share / self.whole)
        if g is not None:
            by_others = g[:, None] / self.whole + by_others
        by_below = (by_others + v * share) * self.e
        if g is not None:
            by_below.scatter_add_(-1, self.y, -g[:, None])
        return self._through_differences(by_below)


def graph_point(loss: LossLike, a: Tensor, y: Tensor | None, output: Output) -> GraphPoint | None:
    """The loss at a, [entries, outputs]; None where torch's graph must be taken."""
    known = LOSSES.get(loss) if isinstance(loss, str) else loss
    if y is None or not isinstance(known, Loss) or output not in (known.folds or ("identity",)):
        return None
    if known is LOSSES["squared"]:
        return SquaredPoint("squared", 1.0, a, y)
    if known is LOSSES["half-squared"]:
        return SquaredPoint("half-squared", 0.5, a, y)
    if known is LOSSES["cross-entropy"] and not y.is_floating_point():
        return ClassPoint(a, y)
    return None

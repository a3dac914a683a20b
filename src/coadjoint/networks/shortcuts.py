"""Shortcuts: how the output of a layer contains the output of the layer below.

y^l = h^l + y^{l-1}         Added: residual layers of one width
y^l = h^l + P^l y^{l-1}     Projected: residual layers, where the widths differ
y^l = [y^{l-1}, h^l]        Joined: dense connections, so that y^l = [h^1, ..., h^l]

All are linear in (h^l, y^{l-1}): changes of both are combined as the values are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Shortcut(Protocol):
    """The way from y^{l-1} to y^l, all of them in rows [., width]."""

    def combine(self, h: Tensor, below: Tensor) -> Tensor:
        """y^l from h^l and y^{l-1}; with their changes, its change."""
        ...

    def to_own(self, g: Tensor) -> Tensor:
        """The gradient by h^l from that by y^l."""
        ...

    def to_below(self, g: Tensor) -> Tensor:
        """The gradient by y^{l-1} from that by y^l, not counting the way through h^l."""
        ...


@dataclass(frozen=True)
class Added:
    """y^l = h^l + y^{l-1}."""

    def combine(self, h: Tensor, below: Tensor) -> Tensor:
        """The sum of both."""
        return h + below

    def to_own(self, g: Tensor) -> Tensor:
        """The gradient itself."""
        return g

    def to_below(self, g: Tensor) -> Tensor:
        """The gradient itself."""
        return g


@dataclass(frozen=True, eq=False)
class Projected:
    """y^l = h^l + P y^{l-1}: a residual layer with a projection.

    It is that of Perez Jensen, Deep Learning (lecture notes, 2024), section 2.3; P is V there. With
    two directions, P has one block for each.
    """

    P: Tensor  # [width of y^l, width of y^{l-1}]

    def combine(self, h: Tensor, below: Tensor) -> Tensor:
        """The sum of h and P below."""
        return h + below @ self.P.T

    def to_own(self, g: Tensor) -> Tensor:
        """The gradient itself."""
        return g

    def to_below(self, g: Tensor) -> Tensor:
        """The product P' g of each row."""
        return g @ self.P


@dataclass(frozen=True)
class Joined:
    """y^l = [y^{l-1}, h^l]."""

    width_below: int  # of y^{l-1}

    def combine(self, h: Tensor, below: Tensor) -> Tensor:
        """Both side by side, the lower layers first."""
        return torch.cat([below, h], 1)

    def to_own(self, g: Tensor) -> Tensor:
        """The last entries, which are those of h."""
        return g[:, self.width_below :]

    def to_below(self, g: Tensor) -> Tensor:
        """The first entries, which are those of the lower layers."""
        return g[:, : self.width_below]

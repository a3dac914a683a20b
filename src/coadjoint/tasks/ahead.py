"""Ahead: what a network of kind "next" predicts: which columns, how far, and which quantiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from .description import Description


class Ahead(NamedTuple):
    """What is predicted at each row.

    predicted  k columns, in the order of the features
    horizon    H, the steps that are predicted at once
    known      columns that are known in advance: inputs are their values one step later
    quantiles  the levels of Q quantiles, ascending; () for the mean alone

    Outputs are those of step 1, then of step 2, ...; of a step those of the first column, then of
    the second, ...; and of a column its quantiles.
    """

    predicted: list[str]
    horizon: int = 1
    known: tuple[str, ...] = ()
    quantiles: tuple[float, ...] = ()

    def arrange(self, a: np.ndarray) -> np.ndarray:
        """Return outputs [..., H k Q] as [..., H, k, Q]; quantiles that cross are sorted."""
        Q = max(1, len(self.quantiles))
        shaped = a.reshape(*a.shape[:-1], self.horizon, len(self.predicted), Q)
        return np.sort(shaped, -1) if Q > 1 else shaped

    @property
    def middle(self) -> int:
        """The number of the quantile nearest to the median, which is fed back."""
        if not self.quantiles:
            return 0
        return int(np.argmin(np.abs(np.array(self.quantiles) - 0.5)))


def ahead_of(description: Description) -> Ahead:
    """Return what a network with this description predicts."""
    return Ahead(description.numeric)

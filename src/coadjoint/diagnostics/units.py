"""Units: how saturated they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import real
from ..gradients.evaluation import Evaluation
from .charts import Array, Chart, Figure
from .finding import check_evaluation, nan_mean, require_one_layer
from .weights import slopes_at_rest, unit_slopes


@dataclass(frozen=True)
class Saturation:
    """share [T]: of the units of all samples at step t that are flat; units [d]: share of steps at which each unit is."""

    t: Array
    share: Array
    units: Array
    flat: float

    def chart(self) -> Chart:
        about = f"share of units whose slope is below {self.flat:g} of that at rest: they pass nothing on to the past"
        return Chart(
            "Saturation",
            about,
            "time t",
            "share of units",
            (("saturated", self.t, self.share),),
            share=True,
        )

    def figures(self) -> list[Figure]:
        return [
            Figure("saturated", 100 * float(self.units.mean()), "% of units and steps", "slope near 0: nothing passes"),
            Figure("units saturated at more than 95% of steps", float((self.units > 0.95).sum()), f"of {len(self.units)}", "they have stopped learning"),
        ]  # fmt: skip


def saturation(e: Evaluation, flat: float = 0.05) -> Saturation:
    """A unit is saturated at a step where no pre-activation moves it: where |dx/da|, the largest over its slots and gates, is
    below `flat` times what it is at rest (state 0, pre-activation 0 or 1, the steeper). For tanh: |h| > 0.975 with 0.05; for
    relu: the unit is off."""
    check_evaluation(e)
    real("flat, a share of the slope at rest,", flat, 0, 1, above=True, below=True)
    slopes = unit_slopes(e)
    there = ~np.isnan(slopes)
    net = require_one_layer(e, "saturation")
    flats = np.where(there, np.nan_to_num(slopes) < flat * slopes_at_rest(net), np.nan)
    return Saturation(np.arange(1, len(slopes) + 1), nan_mean(flats.reshape(len(flats), -1)), nan_mean(flats.reshape(-1, net.hidden), 0), flat)  # fmt: skip

"""Units: their slopes, and how saturated they are."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import Unsupported, real
from ..gradients.evaluation import Evaluation
from ..networks.chain_run import DEPTH, ChainRun
from ..networks.network import Network
from ..sweeps import slopes as step_slopes
from ..sweeps.costates import TIME, Axis
from .charts import Array, Chart, Figure
from .depth import chain_of, chain_run_of, relative_slopes
from .finding import (
    check_evaluation,
    nan_mean,
    require_formula,
    require_one_layer,
    to_numpy,
    trajectory_of,
)


@dataclass(frozen=True)
class Saturation:
    """How often units are saturated.

    t      [T]: the time steps; for a chain the layers that have an activation
    share  [T]: the share of saturated units, of all samples, at each step
    units  [d]: the share of steps at which each unit is saturated; for a chain the share of
           samples, with the units of all layers side by side
    flat   the slope, as a share of that at rest, below which a unit counts as saturated
    axis   what the states are numbered by
    """

    t: Array
    share: Array
    units: Array
    flat: float
    axis: Axis = TIME

    def chart(self) -> Chart:
        """The share of saturated units over time."""
        return Chart(
            title="Saturation",
            about=(
                f"share of units whose slope is below {self.flat:g} of that at rest; they pass "
                f"almost nothing back to earlier {self.axis.step}s"
            ),
            x=self.axis.label,
            y="share of units",
            curves=(("saturated", self.t, self.share),),
            share=True,
        )

    def figures(self) -> list[Figure]:
        """The share over all units and steps, and how many units are saturated nearly always."""
        share = 100 * float(self.units.mean())
        stuck = float((self.units > 0.95).sum())
        of = "steps" if self.axis == TIME else "samples"
        return [
            Figure("saturated", share, f"% of units and {of}", "slope near 0: nothing passes"),
            Figure(
                f"units saturated at more than 95% of {of}",
                stuck,
                f"of {len(self.units)}",
                "they have stopped learning",
            ),
        ]


def saturation(e: Evaluation, flat: float = 0.05) -> Saturation:
    """How many units no pre-activation can move.

    A unit is saturated at a step where |dx/da|, the largest over its slots and gates, is below
    `flat` times its value at rest (state 0, pre-activation 0 or 1, the steeper). For tanh and 0.05:
    |h| > 0.975; for relu: the unit is off.

    Units of a chain are the entries of the states after dense layers, convolutions and elementwise
    functions; maps whose activation is the identity have none.
    """
    check_evaluation(e)
    real("flat, a share of the slope at rest,", flat, 0, 1, above=True, below=True)
    if chain_of(e, "saturation") is not None:
        return saturation_by_layer(chain_run_of(e), flat)
    slopes = unit_slopes(e)  # [T, B, d], NaN past a sample's end
    net = require_one_layer(e, "saturation")
    # nan_to_num only avoids a comparison with NaN: those entries become NaN again.
    is_flat = np.nan_to_num(slopes) < flat * slopes_at_rest(net)
    flats = np.where(np.isnan(slopes), np.nan, is_flat)
    T = len(flats)
    by_step = nan_mean(flats.reshape(T, -1))
    by_unit = nan_mean(flats.reshape(-1, net.hidden), 0)
    return Saturation(np.arange(1, T + 1), by_step, by_unit, flat)


def saturation_by_layer(run: ChainRun, flat: float) -> Saturation:
    """How many units of each layer of a chain are saturated."""
    layers: list[int] = []
    shares: list[float] = []
    units: list[Array] = []
    for i, slopes in relative_slopes(run):
        is_flat = slopes < flat
        layers.append(i)
        shares.append(float(is_flat.mean()))
        units.append(is_flat.mean(0))
    if not layers:
        raise Unsupported(
            "saturation: none of the maps of this chain is known to have an activation. Use "
            "co.maps, or torch's modules such as nn.Tanh()."
        )
    return Saturation(np.array(layers), np.array(shares), np.concatenate(units), flat, DEPTH)


def unit_slopes(e: Evaluation) -> Array:
    """The largest |dx / da| of each unit over its slots and gates, [T, B, units].

    NaN past a sample's end. Pre-activations that the cell keeps in v rather than in a count as
    well; data in v (a mask, noise) do not.
    """
    net, run = require_formula(e, "the slopes of units")
    cell = run.plan.cell
    rows = run.plan.rows
    saved = run.saved
    d = net.hidden
    arguments_in_v = (len(cell.side_entries) - len(cell.given)) * d  # data come last
    wrt = ("a", "v") if arguments_in_v else ("a",)
    pull = step_slopes.step_map(cell).pulled(("x",), wrt)
    steepest = torch.zeros(rows.N, d, dtype=run.x.dtype, device=run.x.device)
    before = rows.prev(saved.x)
    with torch.no_grad():
        for slot in range(len(cell.slots)):
            # Ones in one slot: a unit's slot depends on its own entries of a alone, so this
            # pulls back the slopes of all units at once.
            bar = torch.zeros_like(run.x[rows.B :])
            bar[:, slot * d : (slot + 1) * d] = 1
            back = pull((saved.x[rows.B :], saved.q), saved.a, saved.v, before, saved.p, bar)
            by_a = back["a"]
            by_v = back.get("v")
            if by_v is not None:
                by_v = by_v[:, :arguments_in_v]
            for part in (by_a, by_v):
                if part is not None:
                    steepest = torch.maximum(steepest, part.unflatten(1, (-1, d)).abs().amax(1))
    return to_numpy(trajectory_of(e).layout.padded(steepest, math.nan))


def slopes_at_rest(net: Network) -> Array:
    """The largest |dx / da| of each unit at rest, [units].

    At rest the state is 0 and all pre-activations are 0 or 1, whichever is steeper: relu has no
    slope at 0.
    """
    cell = net.cell
    assert cell is not None
    d = net.hidden
    arguments_in_v = (len(cell.side_entries) - len(cell.given)) * d  # data come last
    p = {name: value.detach() for name, value in net.p.items()}
    x = net.x0.new_zeros(1, net.n)
    steepest = np.zeros(d)

    def step(base: Tensor, side: Tensor | None = None) -> Tensor:
        """x_t from state 0: base and side are all that drives the step."""
        return cell.step(base, side, None, x, p)

    for a in (0.0, 1.0):
        arguments = [x.new_full((1, len(cell.gates) * d), a)]
        if cell.side_entries:
            arguments.append(x.new_full((1, len(cell.side_entries) * d), a))
        pull = torch.func.vjp(step, *arguments)[1]
        for slot in range(len(cell.slots)):
            bar = torch.zeros_like(x)
            bar[:, slot * d : (slot + 1) * d] = 1
            by_base, *by_side = pull(bar)
            parts = [by_base, *(y[:, :arguments_in_v] for y in by_side)]
            slopes = np.abs(to_numpy(torch.cat(parts, 1))).reshape(-1, d)
            steepest = np.maximum(steepest, slopes.max(0))
    return steepest

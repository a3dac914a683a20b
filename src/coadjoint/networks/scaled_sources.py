"""Sources of an adjoint in units of powers of two, and the costate they make together.

A layer of a stack receives gradients from the layers above it. These are far too small or too large
for their type where costates vanish or explode, so each comes with a unit: s 2^unit, an integer for
each row. Before an adjoint sweep can run, all sources of a layer must be brought to one unit.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..sweeps.layout import Layout
from ..sweeps.rows import NO_EXPONENT, SAFE_EXPONENT, Rows, exponent, scale
from ..sweeps.run import CostateRows, SweepRun

ScaledSource = tuple[Tensor, Tensor | None]  # s and its unit (s 2^unit) by rows; None: true scale


def steps_to_states(rows: Rows, unit: Tensor) -> Tensor:
    """The units of step rows [N] as units of state rows [B + N]: x_0 has that of the first step."""
    return torch.cat([unit[: rows.B], unit])


def costate_from_sources(
    rows: Rows, run: SweepRun, sources: list[ScaledSource], s_last: Tensor | None
) -> CostateRows | None:
    """The costate of a run from its sources; None if there are none.

    sources  gradients s 2^unit by the states, s [B + N, n] each; unit None: at true scale
    s_last   the gradient by each sample's last state, [B, n], at true scale
    """
    if all(unit is None for _, unit in sources):
        return _costate_at_true_scale(run, sources, s_last)
    true_scale = torch.zeros(len(run.x), dtype=torch.int32, device=run.x.device)
    values = [s for s, _ in sources]
    units = [true_scale if unit is None else unit for _, unit in sources]
    exponents = [exponent(s.detach()) for s in values]
    safe = SAFE_EXPONENT[run.x.dtype]

    def sweep_in_units(size: Tensor) -> tuple[Tensor, CostateRows]:
        """(unit, costate) of a sweep in units of 2^size [B + N], or larger where it must be."""
        unit = units_of_bounded_fall(rows, size, safe)
        total: Tensor | None = None
        for s, source_unit, source_exponent in zip(values, units, exponents, strict=True):
            shift = source_unit - unit
            # Zeros stay zeros in any unit; scaled by a huge power they would become NaN.
            is_zero = (source_exponent == NO_EXPONENT) & (shift > safe)
            scaled = scale(s, torch.where(is_zero, NO_EXPONENT, shift)[:, None])
            total = scaled if total is None else torch.add(total, scaled)
        last = None if s_last is None else scale(s_last, -rows.last(unit)[:, None])
        return unit, run.costate(total, last, None, unit)

    unit, costate = sweep_in_units(_largest_size(rows, units, exponents, s_last))
    # The units were chosen by the sources. The costate may turn out much larger or smaller, if
    # this layer forgets more slowly than those above it. Then its own size makes better units.
    of_mantissa = exponent(costate.mantissa.detach())
    is_zero = of_mantissa == NO_EXPONENT
    drift = torch.where(is_zero, 0, costate.exponent - unit)
    if drift.abs().max() > safe:
        size = torch.where(is_zero, NO_EXPONENT, of_mantissa + costate.exponent)
        _, costate = sweep_in_units(size)
    return costate


def _costate_at_true_scale(
    run: SweepRun, sources: list[ScaledSource], s_last: Tensor | None
) -> CostateRows | None:
    """The costate of the top layer, whose one source is the gradient of the loss itself.

    None if it has neither that source nor s_last.
    """
    if sources:
        s = sources[0][0]
        # The loss reads the states where its gradient is not zero.
        return run.costate(s, s_last, exponent(s.detach()) != NO_EXPONENT)
    if s_last is None:
        return None
    return run.costate(None, s_last, None)


def _largest_size(
    rows: Rows, units: list[Tensor], exponents: list[Tensor], s_last: Tensor | None
) -> Tensor:
    """The exponent of the largest source of each state, [B + N]; NO_EXPONENT where all are zero.

    units, exponents  of each source s 2^unit: the unit, and the exponent of max |s|, [B + N]
    s_last            the source at each sample's last state, [B, n], or None
    """
    sizes: list[Tensor] = []
    for unit, own_exponent in zip(units, exponents, strict=True):
        is_zero = own_exponent == NO_EXPONENT
        sizes.append(torch.where(is_zero, NO_EXPONENT, own_exponent + unit))
    size = functools.reduce(torch.maximum, sizes)
    if s_last is None:
        return size
    # At the last states, the larger one of `size` and the exponent of s_last.
    at_last = rows.last(size)
    excess = torch.maximum(at_last, exponent(s_last.detach())) - at_last
    return size + rows.last_transposed(excess[:, None])[:, 0]


def units_of_bounded_fall(rows: Rows, unit: Tensor, fall: int) -> Tensor:
    """Units [B + N] at least as large as `unit`, falling at most by `fall` to the state before.

    The factors 2^(difference) between neighbouring states then stay in range. A state without a
    unit (NO_EXPONENT) takes that of the state after it, or 0 if no later state has one.
    """
    dense = Layout(rows, None).padded_states(unit, NO_EXPONENT)
    # Backwards in time, as an adjoint runs. With a ramp added, "falls by at most `fall`" means
    # "does not fall": a running maximum.
    ramp = torch.where(dense == NO_EXPONENT, 0, fall).flip(0).cumsum(0)
    bounded = (dense.flip(0) + ramp).cummax(0).values - ramp
    # Real units are small integers; NO_EXPONENT is so low that anything near it is no unit.
    known = torch.where(bounded > NO_EXPONENT // 2, bounded, 0).flip(0)
    return rows.flatten_states(known).to(unit.dtype)

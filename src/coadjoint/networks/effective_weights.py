"""EffectiveWeights: the weights of a recurrence as its cell's formula takes them.

A Recurrence stores raw parameters. W may be masked or have a structure, a cell may transform W, R
and b (`Cell.weights`), and the rows of R and b are for two groups of entries: those added to
W r(x), the base, and those used beside it, the side.

    z_t = W r(x_{t-1}) + base_t,    base_t = R_base u_t + b_base,    side_t = R_side u_t + b_side
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cells.cell import Cell

if TYPE_CHECKING:
    from .recurrence import Recurrence

WeightAndBias = tuple[Tensor, Tensor | None]
InputWeights = tuple[WeightAndBias, WeightAndBias | None]  # of the base, and of the side if any


def without_biases(input_weights: InputWeights | None) -> InputWeights | None:
    """The same weights without biases: a change of the input drives the steps through R alone."""
    if input_weights is None:
        return None
    (R, _), side = input_weights
    if side is None:
        return (R, None), None
    return (R, None), (side[0], None)


class EffectiveWeights:
    """The weights of a recurrence with structure, mask and the cell's own transformation applied.

    W              [gates d, reads d]; None if the cell has none
    R, b           rows for everything the inputs drive: gates, then further inputs of the cell
    input_weights  the same by group: ((R_base, b_base), (R_side, b_side)), the latter None if the
                   cell has no side entries
    p              the per-unit parameters of the cell, concatenated; None if it has none
    x0             the default first state
    """

    def __init__(self, recurrence: Recurrence) -> None:
        assert recurrence.cell is not None
        self.recurrence = recurrence
        self.cell = recurrence.cell
        W: Tensor | None = recurrence.W  # looked up once: a structured W is computed each time
        R: Tensor = recurrence.R
        b: Tensor | None = recurrence.b
        if W is not None and recurrence.mask is not None:
            W = W * recurrence.mask
        if self.cell.weights is not None:
            assert W is not None
            W, R, b = self.cell.weights(W, R, b, dict(recurrence.p.items()))
        self.W = W
        self.R = R
        self.b = b

    @property
    def x0(self) -> Tensor:
        """The default first state, [n]."""
        return self.recurrence.x0

    @property
    def p(self) -> Tensor | None:
        """The per-unit parameters of the cell, concatenated; None if it has none."""
        parameters = self.recurrence.p
        if not len(parameters):
            return None
        # Times one: otherwise the gradients would be views of one array, sharing its memory.
        return torch.cat([values * 1 for values in parameters.values()])

    @property
    def input_weights(self) -> InputWeights:
        """((R_base, b_base), (R_side, b_side)); the side is None if the cell has none."""
        cell = self.cell
        if cell.driven_entries == cell.gates and not cell.side:
            return (self.R, self.b), None  # all rows are for gates that are added to W r(x)
        # The base has a block for every gate: of zeros where the inputs add nothing to W r(x).
        base: list[str | None] = []
        for gate in cell.gates:
            is_in_base = gate in cell.driven_entries and gate not in cell.side
            base.append(gate if is_in_base else None)
        side = [*cell.side, *cell.inputs]
        return self._select(base), self._select(side) if side else None

    def _select(self, entries: Sequence[str | None]) -> WeightAndBias:
        """The rows of R and b for these entries, one block of d rows each; zeros for None."""
        bias = None if self.b is None else self._select_rows(self.b, entries)
        return self._select_rows(self.R, entries), bias

    def _select_rows(self, y: Tensor, entries: Sequence[str | None]) -> Tensor:
        """The blocks of d rows of y (R or b) for these driven entries; zeros for None."""
        d = self.recurrence.hidden
        zeros = y.new_zeros(d, *y.shape[1:])
        blocks: list[Tensor] = []
        for entry in entries:
            if entry is None:
                blocks.append(zeros)
            else:
                first = self.cell.driven_entries.index(entry) * d
                blocks.append(y[first : first + d])
        return torch.cat(blocks)

    def step_function(self) -> Callable[..., Tensor]:
        """One step in torch operations: (base_t, x_{t-1}) or (base_t, side_t, x_{t-1}) -> x_t."""
        return formula_step(self.cell, self.W, self.p)


def formula_step(cell: Cell, W: Tensor | None, p: Tensor | None) -> Callable[..., Tensor]:
    """A cell's formula as a step function: (base_t, x_{t-1}) or (base_t, side_t, x_{t-1}) -> x_t.

    p  the per-unit parameters of the cell, concatenated; None if it has none
    """
    parameters: dict[str, Tensor] = {}
    if p is not None:
        parameters.update(zip(cell.parameters, p.chunk(len(cell.parameters)), strict=True))

    def step(base: Tensor, *side_and_state: Tensor) -> Tensor:
        """x_t from base_t, side_t if the cell has a side, and x_{t-1}, the last argument."""
        *side, x = side_and_state
        return cell.step(base, side[0] if side else None, W, x, parameters)

    return step

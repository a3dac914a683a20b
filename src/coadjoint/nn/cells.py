"""RNNCell, LSTMCell and GRUCell: one step at a time, with torch.nn's arguments, outputs and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cells.cell import Cell
from ..errors import KindError
from ..sweeps.affine import affine
from ..sweeps.pointers import refuse_if_without_memory
from ..sweeps.rows import uniform_rows
from ..sweeps.torch_internals import autocast_is_on
from .frame import (
    FORMULAS,
    Frame,
    check_input,
    check_weights,
    find_formula,
    merge_biases,
    reset_bias,
    run_sweep,
    seen_as_operators,
    split_base_and_side,
)


class CellModule(nn.RNNCellBase):
    """What RNNCell, LSTMCell and GRUCell share: torch's cell, run as a sweep of one step."""

    slots = 1
    mode = "RNN"
    _engine = "auto"

    def formula(self) -> tuple[str, Cell, str]:
        mode = f"RNN_{self.nonlinearity.upper()}" if isinstance(self, nn.RNNCell) else self.mode
        if mode not in FORMULAS:
            raise RuntimeError(f"Unknown nonlinearity: {self.nonlinearity}")
        return mode, *find_formula(mode)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """As torch.nn's: h', of an LSTMCell (h', c')."""
        mode, cell, name = self.formula()
        check_weights(self.weight_hh)
        check_input(input, self.weight_hh)
        states = [] if hx is None else list(hx) if self.slots > 1 else [hx]
        self._check_shapes(input, states)
        single = input.dim() == 1
        u = input[None] if single else input
        states = [y[None] if single else y for y in states]
        if autocast_is_on():
            u, states = u.to(self.weight_hh.dtype), [y.to(self.weight_hh.dtype) for y in states]
        B = len(u)
        if not torch.compiler.is_compiling():
            refuse_if_without_memory(
                [("the input", u), *(("hx", y) for y in states), *self.named_parameters()]
            )
        frame = Frame(
            1, B, None if B == 0 or seen_as_operators(u, self.weight_hh) else uniform_rows(1, B)
        )
        x0 = torch.cat(states or [u.new_zeros(B, self.hidden_size)] * self.slots, 1)
        if B == 0:
            x = x0 + sum(p.sum() for p in self.parameters()) * u.sum() * 0
        else:
            v = affine(
                frame.rows, u, self.weight_ih, merge_biases(mode, self.bias_ih, self.bias_hh)
            )
            base, side = split_base_and_side(cell, v)
            p = reset_bias(mode, self.weight_hh, self.bias_hh)
            x = run_sweep(cell, name, self._engine, frame, base, side, self.weight_hh, x0, p)[1]
        found = [frame.copy_out(y) for y in x.chunk(self.slots, 1)]
        found = [y[0] for y in found] if single else found
        return tuple(found) if self.slots > 1 else found[0]

    def _check_shapes(self, input: Tensor, states: list[Tensor]) -> None:
        """torch.nn's checks, in its words."""
        name = type(self).__name__
        if input.dim() not in (1, 2):
            raise ValueError(f"{name}: Expected input to be 1D or 2D, got {input.dim()}D instead")
        for i, y in enumerate(states):
            which = f"hx[{i}]" if self.slots > 1 else "hidden"
            if y.dim() not in (1, 2):
                raise ValueError(f"{name}: Expected {which} to be 1D or 2D, got {y.dim()}D instead")
            if y.shape[-1] != self.hidden_size:
                raise RuntimeError(
                    f"hidden{i} has inconsistent hidden_size: got {y.shape[-1]}, expected {self.hidden_size}"
                )
            if y.dim() != input.dim() or (y.dim() == 2 and len(y) != len(input)):
                sizes = [len(t) if t.dim() == 2 else "none" for t in (input, y)]
                raise RuntimeError(
                    f"Input batch size {sizes[0]} doesn't match hidden{i} batch size {sizes[1]}"
                )
        if input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"input has inconsistent input_size: got {input.shape[-1]} expected {self.input_size}"
            )
        if not autocast_is_on():
            for y in (input, *states):
                if y.dtype != self.weight_hh.dtype:
                    raise KindError(
                        f"{name}: got {y.dtype} but the weights are {self.weight_hh.dtype}; convert with .to()."
                    )


class RNNCell(CellModule, nn.RNNCell):
    """torch.nn.RNNCell, by the sweeps' formulas."""


class LSTMCell(CellModule, nn.LSTMCell):
    """torch.nn.LSTMCell, by the sweeps' formulas."""

    slots, mode = 2, "LSTM"


class GRUCell(CellModule, nn.GRUCell):
    """torch.nn.GRUCell, by the sweeps' formulas."""

    mode = "GRU"

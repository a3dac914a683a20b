"""RNNCell, LSTMCell and GRUCell: one step at a time, with torch.nn's arguments and weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import KindError
from ..sweeps.affine import affine
from ..sweeps.rows import uniform_rows
from ..sweeps.torch_internals import autocast_is_on, nothing_intervenes
from .frame import (
    Frame,
    SweepInputs,
    check_input,
    check_memory,
    check_weights,
    find_formula,
    is_seen_as_operators,
    merge_biases,
    reset_bias,
    run_sweep,
    split_base_and_side,
    zero_of,
)
from .one_step import step_of_cell

RNN_MODES = {"tanh": "RNN_TANH", "relu": "RNN_RELU"}


class CellModule(nn.RNNCellBase):
    """What RNNCell, LSTMCell and GRUCell share: torch's cell.

    It is torch's own operations (one_step), on a CPU and on a GPU; otherwise, or where torch traces
    or transforms them, a sweep of one step.
    """

    slots = 1  # of the state: 2 for h and c
    mode = "RNN"
    nonlinearity: str  # of an RNNCell
    _engine = "auto"

    def _find_mode(self) -> str:
        """The key of frame.FORMULAS for this cell, as in "RNN_TANH"."""
        if self.mode != "RNN":
            return self.mode
        mode = RNN_MODES.get(self.nonlinearity)
        if mode is None:
            raise RuntimeError(f"Unknown nonlinearity: {self.nonlinearity}")
        return mode

    # Any: torch.nn declares hx and the result differently for each of the three.
    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """The next state, as torch.nn's cells return it: h', or (h', c') of an LSTMCell.

        input [B, inputs] or [inputs]; hx: the state before, zeros if it is None.
        """
        mode = self._find_mode()
        if self._engine == "auto" and nothing_intervenes():
            out = step_of_cell(self, mode, self.slots, input, hx)
            if out is not None:
                return out
        W = self.weight_hh
        check_weights(W)
        check_input(input, W)
        states: list[Tensor] = []
        if hx is not None:
            states = list(hx) if self.slots > 1 else [hx]
        self._check_shapes(input, states)
        single = input.dim() == 1  # one sample without the axis of samples
        u = input
        if single:
            u = input[None]
            states = [y[None] for y in states]
        if autocast_is_on():  # sweeps run in the type of the weights
            u = u.to(W.dtype)
            states = [y.to(W.dtype) for y in states]
        if not torch.compiler.is_compiling():
            check_memory(u, states, self.named_parameters())
        B = len(u)
        x0 = torch.cat(states or [u.new_zeros(B, self.hidden_size)] * self.slots, 1)
        # Where torch.compile traces, the sweep is one operator, without rows.
        rows = None if B == 0 or is_seen_as_operators(u, W) else uniform_rows(1, B)
        frame = Frame(1, B, rows)
        if B == 0:  # nothing to sweep over, but a gradient of zero for every parameter
            x = x0 + zero_of(self, u)
        else:
            cell, name = find_formula(mode)
            b = merge_biases(mode, self.bias_ih, self.bias_hh)
            base, side = split_base_and_side(cell, affine(frame.rows, u, self.weight_ih, b))
            p = reset_bias(mode, W, self.bias_hh)
            inputs = SweepInputs(cell, name, base, side, W, x0, p)
            _, x, _ = run_sweep(self._engine, frame, inputs)
        after = [frame.copy_out(y) for y in x.chunk(self.slots, 1)]
        if single:
            after = [y[0] for y in after]
        return tuple(after) if self.slots > 1 else after[0]

    def _check_shapes(self, input: Tensor, states: list[Tensor]) -> None:
        """Refuse wrong shapes and types of the input and of h (and c), in torch.nn's words."""
        name = type(self).__name__
        if input.dim() not in (1, 2):
            raise ValueError(f"{name}: Expected input to be 1D or 2D, got {input.dim()}D instead")
        for i, y in enumerate(states):
            which = f"hx[{i}]" if self.slots > 1 else "hidden"
            if y.dim() not in (1, 2):
                raise ValueError(f"{name}: Expected {which} to be 1D or 2D, got {y.dim()}D instead")
            if y.shape[-1] != self.hidden_size:
                raise RuntimeError(
                    f"hidden{i} has inconsistent hidden_size: got {y.shape[-1]}, expected "
                    f"{self.hidden_size}"
                )
            if y.dim() != input.dim() or (y.dim() == 2 and len(y) != len(input)):
                raise RuntimeError(
                    f"Input batch size {batch_size(input)} doesn't match hidden{i} batch size "
                    f"{batch_size(y)}"
                )
        if input.shape[-1] != self.input_size:
            raise RuntimeError(
                f"input has inconsistent input_size: got {input.shape[-1]} expected "
                f"{self.input_size}"
            )
        if autocast_is_on():  # types are then converted
            return
        for y in (input, *states):
            if y.dtype != self.weight_hh.dtype:
                raise KindError(
                    f"{name}: got {y.dtype} but the weights are {self.weight_hh.dtype}; convert "
                    "with .to()."
                )


def batch_size(y: Tensor) -> int | str:
    """The number of samples of an input or state; "none" without the axis of samples."""
    return len(y) if y.dim() == 2 else "none"


class RNNCell(CellModule, nn.RNNCell):
    """torch.nn.RNNCell, twice differentiable on every device.

    h' = tanh(W_ih u + b_ih + W_hh h + b_hh), or relu.

    >>> import torch
    >>> import coadjoint as co
    >>> cell = co.nn.RNNCell(3, 4)
    >>> h = cell(torch.randn(2, 3), torch.zeros(2, 4))
    >>> h.shape
    torch.Size([2, 4])
    """


class LSTMCell(CellModule, nn.LSTMCell):
    """torch.nn.LSTMCell, twice differentiable on every device.

    c' = f c + i g, h' = o tanh(c').

    >>> import torch
    >>> import coadjoint as co
    >>> h, c = co.nn.LSTMCell(3, 4)(torch.randn(2, 3))
    >>> h.shape, c.shape
    (torch.Size([2, 4]), torch.Size([2, 4]))
    """

    slots = 2
    mode = "LSTM"


class GRUCell(CellModule, nn.GRUCell):
    """torch.nn.GRUCell, twice differentiable on every device.

    h' = (1 - z) n + z h, n = tanh(W_in u + b_in + r (W_hn h + b_hn)).

    >>> import torch
    >>> import coadjoint as co
    >>> torch_cell = torch.nn.GRUCell(3, 4)
    >>> cell = co.nn.GRUCell(3, 4)
    >>> _ = cell.load_state_dict(torch_cell.state_dict())
    >>> u = torch.randn(2, 3)
    >>> torch.allclose(cell(u), torch_cell(u), atol=1e-6)
    True
    """

    mode = "GRU"

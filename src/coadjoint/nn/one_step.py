"""One step of a module on a CPU, by torch's own functions: no rows, plan or tape.

A decoder or an agent calls its module for every step, and what a sweep sets up for a call then
takes longer than the step. On a CPU, torch's cells and its RNN and GRU are made of differentiable
operations, so that they have derivatives of any order, as sweeps have. Its LSTM may be one
operation of oneDNN, which has one derivative: it is run cell by cell. Calls that are unusual in any
way are left to the sweeps, and so are the refusals: the functions here return None for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import dropout

from ..cells.parameters import DTYPES
from ..sweeps.pointers import PLAIN, has_memory
from ..sweeps.torch_internals import fused_cell, is_wrapped, own_parameters
from .layers import LayeredModule

CELLS = {
    "RNN_TANH": fused_cell("rnn_tanh_cell"),
    "RNN_RELU": fused_cell("rnn_relu_cell"),
    "LSTM": fused_cell("lstm_cell"),
    "GRU": fused_cell("gru_cell"),
}
LAYERS = {
    "RNN_TANH": fused_cell("rnn_tanh"),
    "RNN_RELU": fused_cell("rnn_relu"),
    "GRU": fused_cell("gru"),
}
STRIDED = torch.strided
CELL_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

Hidden = Tensor | tuple[Tensor, ...]  # h, of an LSTM (h, c)


def step_of_cell(
    cell: nn.RNNCellBase, mode: str, slots: int, input: Tensor, hx: object
) -> Hidden | None:
    """The next state of a cell module; None if a sweep must compute it.

    input [B, inputs] or [inputs]; hx: the state before, of so many slots; zeros if it is None.
    """
    weights = usual_weights(own_parameters(cell), CELL_WEIGHTS)
    if weights is None or not is_usual(input, weights[1]):
        return None
    shape = input.shape
    is_single = len(shape) == 1  # one sample without the axis of samples
    if shape[-1:] != (cell.input_size,) or len(shape) > 2 or shape[0] == 0:
        return None
    states = usual_states(hx, slots, (*shape[:-1], cell.hidden_size), input)
    if states is None:
        return None
    if is_single:
        input = input.unsqueeze(0)
        states = tuple(y.unsqueeze(0) for y in states)
    if slots > 1:
        pair: tuple[Tensor, ...] = CELLS[mode](input, states, *weights)
        return tuple(y.squeeze(0) for y in pair) if is_single else pair
    h: Tensor = CELLS[mode](input, states[0], *weights)
    return h.squeeze(0) if is_single else h


def step_of_layers(
    module: LayeredModule, names: Sequence[str], input: object, hx: object
) -> tuple[Tensor, Hidden] | None:
    """The output and h_n (and c_n) of a module for an input of one step.

    None if there are more steps, or if sweeps must compute it. names: of all weights, direction by
    direction.
    """
    weights = usual_weights(own_parameters(module), names)
    if weights is None or not is_usual(input, weights[1]):
        return None
    shape = input.shape
    is_single = len(shape) == 2  # one sequence without the axis of samples
    axis = 1 if module.batch_first and not is_single else 0  # of time
    if len(shape) not in (2, 3) or shape[axis] != 1 or shape[-1] != module.input_size:
        return None
    samples = () if is_single else (shape[1 - axis],)
    if samples == (0,):
        return None
    directions = 2 if module.bidirectional else 1
    state_shape = (module.num_layers * directions, *samples, module.hidden_size)
    states = usual_states(hx, module.slots, state_shape, input)
    if states is None:
        return None
    if is_single:
        input = input.unsqueeze(axis)
        states = tuple(y.unsqueeze(1) for y in states)
    if module.slots > 1:
        output, states = step_by_cells(module, input.select(axis, 0), states, weights, directions)
        output = output.unsqueeze(axis)
    else:
        output, h = LAYERS[module.mode](
            input,
            states[0],
            weights,
            module.bias,
            module.num_layers,
            module.dropout,
            module.training,
            module.bidirectional,
            module.batch_first,
        )
        states = (h,)
    if is_single:
        output = output.squeeze(1)
        states = tuple(y.squeeze(1) for y in states)
    return output, (states if module.slots > 1 else states[0])


def step_by_cells(
    module: LayeredModule,
    u: Tensor,
    states: tuple[Tensor, ...],
    weights: Sequence[Tensor | None],
    directions: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The top layer's h' [B, directions hidden], and all h' and c', [layers directions, B, hidden].

    u [B, inputs]; states: all h and c; weights: direction by direction.
    """
    count = module.num_layers * directions
    of_each = len(weights) // count
    if count == 1:  # the gradient of a squeeze is a view, that of unbind a copy
        before = [tuple([y.squeeze(0) for y in states])]
    else:
        before = list(zip(*[y.unbind(0) for y in states], strict=True))
    after: list[tuple[Tensor, ...]] = []
    cell = CELLS[module.mode]
    for layer in range(module.num_layers):
        if layer and module.dropout:
            u = dropout(u, module.dropout, module.training)
        for i in range(layer * directions, (layer + 1) * directions):
            after.append(cell(u, before[i], *weights[i * of_each : (i + 1) * of_each]))
        u = after[-1][0]
        if directions > 1:
            u = torch.cat([after[-2][0], u], 1)
    # Stacks are copies, so that each result can be changed in place. No derivative reads h' itself.
    last = tuple([torch.stack(y) for y in zip(*after, strict=True)])
    return u, last


def usual_weights(
    own: Mapping[str, Parameter | None], names: Sequence[str]
) -> list[Tensor | None] | None:
    """The parameters of these names; None if one of them is not an ordinary tensor with values.

    own: those of the module itself. A parametrised weight, which is computed at every call, is not
    among them.
    """
    weights: list[Tensor | None] = []
    for name in names:
        w = own.get(name)
        # Written out as far as it goes, because to call a function takes as long as to ask.
        if type(w) in PLAIN and w is not None and w.untyped_storage().nbytes() >= w.nbytes:
            weights.append(w)
        elif w is None and name in own:  # a cell without biases
            weights.append(w)
        else:
            return None
    return weights


def usual_states(
    hx: object, slots: int, shape: tuple[int, ...], input: Tensor
) -> tuple[Tensor, ...] | None:
    """h (and c) of this shape, of the type of the input; None if hx is something else.

    Zeros if hx is None.
    """
    if hx is None:
        return (input.new_zeros(shape),) * slots
    states = (hx,) if slots == 1 else hx
    if not isinstance(states, tuple | list) or len(states) != slots:
        return None
    for y in states:
        if not is_usual(y, input) or y.shape != shape:
            return None
    return tuple(states)


def is_usual(y: object, like: Tensor | None) -> TypeGuard[Tensor]:
    """Is y an ordinary tensor with values on a CPU, of the type of `like`, float32 or float64?"""
    return (
        isinstance(y, Tensor)
        and type(y) in PLAIN
        and like is not None
        and y.is_cpu
        and like.is_cpu
        and y.dtype is like.dtype
        and y.dtype in DTYPES
        and y.layout is STRIDED
        and not y.is_nested
        and not is_wrapped(y)
        and has_memory(y)
    )

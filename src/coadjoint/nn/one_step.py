"""One step of a module on a CPU, by torch's own cells: no rows, plan or tape.

A decoder or an agent calls its module for every step, and what a sweep sets up for a call then
takes longer than the step. torch's cells are compositions of differentiable operations on a CPU, so
that they have derivatives of any order, as sweeps have. Calls that are unusual in any way are left
to the sweeps, and so are the refusals: a function here returns None for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from ..cells.parameters import DTYPES
from ..sweeps.pointers import PLAIN, has_memory
from ..sweeps.torch_internals import fused_cell, is_wrapped, own_parameters
from .layers import LayeredModule

STEPS = {
    "RNN_TANH": fused_cell("rnn_tanh_cell"),
    "RNN_RELU": fused_cell("rnn_relu_cell"),
    "LSTM": fused_cell("lstm_cell"),
    "GRU": fused_cell("gru_cell"),
}
KEEP_RESULT = ("RNN_TANH", "RNN_RELU")  # their derivatives read h', which a user may change
CELL_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

States = tuple[Tensor, ...]  # h, of an LSTM h and c


def step_of_cell(
    cell: nn.RNNCellBase, mode: str, slots: int, input: Tensor, hx: object
) -> States | None:
    """The next state of a cell module; None if a sweep must compute it.

    input [B, inputs] or [inputs]; hx: the state before, of so many slots; zeros if it is None.
    """
    weights = usual_weights(own_parameters(cell), CELL_WEIGHTS)
    if weights is None or not is_usual(input, weights[1]):
        return None
    is_single = input.dim() == 1  # one sample without the axis of samples
    u = input.unsqueeze(0) if is_single else input
    if u.dim() != 2 or u.shape[1] != cell.input_size or not len(u):
        return None
    if hx is None:
        states: States = (u.new_zeros(len(u), cell.hidden_size),) * slots
    else:
        shape = (cell.hidden_size,) if is_single else (len(u), cell.hidden_size)
        given = usual_states(hx, slots, shape, weights[1])
        if given is None:
            return None
        states = tuple(y.unsqueeze(0) for y in given) if is_single else given
    out = step(mode, u, states, weights)
    if mode in KEEP_RESULT and out[0].requires_grad:
        out = (out[0].clone(),)
    return tuple(y.squeeze(0) for y in out) if is_single else out


def step_of_layers(
    module: LayeredModule, names: Sequence[str], input: object, hx: object
) -> tuple[Tensor, list[Tensor]] | None:
    """The output and h_n (and c_n) of a module for an input of one step.

    None if there are more steps, or if sweeps must compute it. names: of all weights, direction by
    direction.
    """
    weights = usual_weights(own_parameters(module), names)
    if weights is None or not isinstance(input, Tensor) or not is_usual(input, weights[1]):
        return None
    is_single = input.dim() == 2  # one sequence [1, inputs] without the axis of samples
    axis = 1 if module.batch_first and not is_single else 0  # of time
    if input.dim() not in (2, 3) or input.shape[axis] != 1:
        return None
    u = input if is_single else input.select(axis, 0)
    if u.shape[1] != module.input_size or not len(u):
        return None
    directions = 1 + module.bidirectional
    count = module.num_layers * directions
    states: list[States] | None = None
    if hx is not None:
        shape = (count, module.hidden_size)
        if not is_single:
            shape = (count, len(u), module.hidden_size)
        given = usual_states(hx, module.slots, shape, weights[1])
        if given is None:
            return None
        states = split_layers(given, is_single)
    last: list[States] = []  # h' (and c') of each layer and direction
    of_each = len(names) // count  # weights of each layer and direction
    for layer in range(module.num_layers):
        if layer:
            u = dropout(u, module.dropout, module.training)
        for number in range(layer * directions, (layer + 1) * directions):
            if states is None:
                before: States = (u.new_zeros(len(u), module.hidden_size),) * module.slots
            else:
                before = states[number]
            own = weights[number * of_each : (number + 1) * of_each]
            last.append(step(module.mode, u, before, own))
        heads = [y[0] for y in last[-directions:]]
        u = heads[0] if directions == 1 else torch.cat(heads, 1)
    joined = [torch.stack(y) for y in zip(*last, strict=True)]  # copies, unlike the output
    is_read_again = module.mode in KEEP_RESULT and directions == 1
    output = u.clone() if is_read_again and u.requires_grad else u
    if is_single:
        return output, [y.squeeze(1) for y in joined]
    return output.unsqueeze(axis), joined


def step(mode: str, u: Tensor, states: States, weights: Sequence[Tensor | None]) -> States:
    """torch's cell: the states after a step, each [B, hidden], for u [B, inputs]."""
    if len(states) == 1:
        return (STEPS[mode](u, states[0], *weights),)
    after: States = STEPS[mode](u, states, *weights)
    return after


def split_layers(states: States, is_single: bool) -> list[States]:
    """The states [layers directions, B, .] of each layer and direction, [B, .].

    is_single: without the axis of samples.
    """
    if is_single:
        states = tuple(y.unsqueeze(1) for y in states)
    if len(states[0]) == 1:  # the gradient of a squeeze is a view, that of unbind a copy
        return [tuple(y.squeeze(0) for y in states)]
    return list(zip(*[y.unbind(0) for y in states], strict=True))


def usual_weights(
    own: Mapping[str, Tensor | None], names: Sequence[str]
) -> list[Tensor | None] | None:
    """The parameters of these names; None if one of them is not an ordinary tensor on a CPU.

    own: those of the module itself. A parametrised weight, which is computed at every call, is not
    among them.
    """
    weights = []
    for name in names:
        w = own.get(name, "missing")
        if w is not None and not (type(w) in PLAIN and w.is_cpu and has_memory(w)):
            return None
        weights.append(w)
    return weights


def usual_states(
    hx: object, slots: int, shape: tuple[int, ...], W: Tensor | None
) -> States | None:
    """h (and c) of this shape and of the type of W; None if hx is something else."""
    states = hx if slots > 1 else (hx,)
    if not isinstance(states, tuple | list) or len(states) != slots:
        return None
    for y in states:
        if not is_usual(y, W) or y.shape != shape:
            return None
    return tuple(states)


def is_usual(y: object, W: Tensor | None) -> TypeGuard[Tensor]:
    """Is y an ordinary tensor on a CPU, of the type of the weight W, which sweeps can have?"""
    return (
        W is not None
        and type(y) in PLAIN
        and y.is_cpu
        and y.dtype is W.dtype
        and y.dtype in DTYPES
        and y.layout is torch.strided
        and not y.is_nested
        and not is_wrapped(y)
        and has_memory(y)
    )

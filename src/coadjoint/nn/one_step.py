"""One step of a module on a CPU or a GPU, by torch's own functions: no rows, plan or tape.

A decoder or an agent calls its module for every step, and what a sweep sets up for a call then
takes longer than the step. torch's cells are made of differentiable operations, so that they have
derivatives of any order, as sweeps have: on a GPU an LSTM's and a GRU's gates are one kernel, whose
derivative is another one, or written out where it will be differentiated. So are the layers of an
RNN and a GRU on a CPU. All others are run cell by cell: an LSTM's may be one operation of oneDNN on
a CPU, and those on a GPU are cuDNN's, which have one derivative. Calls that are unusual in any way
are left to the sweeps, and so are the refusals: the functions here return None for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence

from ..cells.parameters import DTYPES
from ..sweeps.pointers import PLAIN, has_memory
from ..sweeps.torch_internals import fused_cell, own_parameters
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
COPIED = ("RNN_TANH", "RNN_RELU")  # modes whose new state is copied
CELL_WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")

Hidden = Tensor | tuple[Tensor, ...]  # h, of an LSTM (h, c)


def step_of_cell(
    cell: nn.RNNCellBase, mode: str, slots: int, input: Tensor, hx: Hidden | None
) -> Hidden | None:
    """The next state of a cell module; None if a sweep must compute it.

    input [B, inputs] or [inputs]; hx: the state before, of so many slots; zeros if it is None.
    """
    weights = usual_weights(own_parameters(cell), CELL_WEIGHTS)
    if weights is None or not is_usual(input, weights[1]):
        return None
    shape = input.shape
    if len(shape) == 1:  # one sample without the axis of samples
        return step_of_sample(cell, mode, slots, input, hx)
    if len(shape) != 2 or shape[1] != cell.input_size or shape[0] == 0:
        return None
    states = usual_states(hx, slots, (shape[0], cell.hidden_size), input)
    if states is None:
        return None
    if slots > 1:
        h, c = CELLS[mode](input, states, *weights)
        return h, free_memory(c)
    return free_to_change(CELLS[mode](input, states[0], *weights), mode)


def free_to_change(after: Tensor, mode: str) -> Tensor:
    """The new h, which may be changed in place before a backward pass, as that of a sweep.

    The derivative of tanh and ReLU is computed from their values, so that these are copied.
    """
    return after.clone() if mode in COPIED and after.requires_grad else after


def free_memory(c: Tensor) -> Tensor:
    """The new c of an LSTM, which may be changed in place before a backward pass.

    The derivative of the one kernel on a GPU reads c, that of the operations on a CPU does not.
    """
    return c.clone() if c.requires_grad and is_on_gpu(c) else c


def is_on_gpu(y: Tensor) -> bool:
    """Is y on a GPU, where the cells are one kernel and the layers are cuDNN's?"""
    return y.is_cuda


def step_of_sample(
    cell: nn.RNNCellBase, mode: str, slots: int, input: Tensor, hx: Hidden | None
) -> Hidden | None:
    """The same as step_of_cell for input [inputs] and states [hidden]."""
    if hx is not None:
        states = usual_states(hx, slots, (cell.hidden_size,), input)
        if states is None:
            return None
        hx = states[0][None] if slots == 1 else tuple(y[None] for y in states)
    after = step_of_cell(cell, mode, slots, input[None], hx)
    if after is None or isinstance(after, Tensor):
        return None if after is None else after[0]
    return tuple(y[0] for y in after)


def step_of_layers(
    module: LayeredModule, names: Sequence[str], input: Tensor | PackedSequence, hx: Hidden | None
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
        states = [y.unsqueeze(1) for y in states]
    if module.slots > 1 or is_on_gpu(input):
        output, last = step_by_cells(module, input.select(axis, 0), states, weights, directions)
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
        output = free_to_change(output, module.mode)
        last = (free_to_change(h, module.mode),)
    if is_single:
        output = output.squeeze(1)
        last = tuple(y.squeeze(1) for y in last)
    return output, (last if module.slots > 1 else last[0])


def step_by_cells(
    module: LayeredModule,
    u: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    directions: int,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The top layer's h' [B, directions hidden], and all h' (and c') of the layers.

    u [B, inputs]; states: all h (and c), [layers directions, B, hidden], as those returned;
    weights: direction by direction.
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
            own = weights[i * of_each : (i + 1) * of_each]
            if module.slots > 1:
                after.append(cell(u, before[i], *own))
            else:
                after.append((cell(u, before[i][0], *own),))
        u = after[-1][0]
        if directions > 1:
            u = torch.cat([after[-2][0], u], 1)
    # Stacks are copies, so that each result can be changed in place.
    last = tuple([own_stack(y, slot) for slot, y in enumerate(zip(*after, strict=True))])
    return (u if directions > 1 else free_to_change(u, module.mode)), last


def own_stack(states: Sequence[Tensor], slot: int) -> Tensor:
    """One state of each layer and direction, in own memory: [layers directions, B, hidden].

    slot: 0 for h, which is the output, too; 1 for c, which nothing else reads without gradients.
    """
    if slot and len(states) == 1 and not states[0].requires_grad:
        return states[0].unsqueeze(0)
    return torch.stack(tuple(states))


def usual_weights(own: Mapping[str, Tensor | None], names: Sequence[str]) -> list[Tensor] | None:
    """The parameters of these names; None if one of them is not an ordinary tensor with values.

    own: those of the module itself. A parametrised weight, which is computed at every call, is not
    among them. A cell without biases has None for them, which is left out.
    """
    weights: list[Tensor] = []
    try:
        for name in names:
            w = own.get(name)
            if w is None and name in own:
                continue
            if type(w) not in PLAIN or w is None:
                return None
            # Too little memory: it was freed, by a wrapper that shards or offloads the module.
            if w.untyped_storage().nbytes() < w.nbytes:
                return None
            weights.append(w)
    except RuntimeError:  # stored in another way, as a sparse tensor, or wrapped by torch.func
        return None
    W = weights[1]  # weight_hh
    return weights if (W.is_cpu or W.is_cuda) and W.dtype in DTYPES else None


def usual_states(
    hx: Hidden | None, slots: int, shape: tuple[int, ...], input: Tensor
) -> list[Tensor] | None:
    """H (and c) of this shape, of the type of the input; None if hx is something else.

    Zeros if hx is None.
    """
    if hx is None:
        return [input.new_zeros(shape)] * slots
    if slots == 1:
        return [hx] if is_usual(hx, input) and hx.shape == shape else None
    given = hx
    if type(given) not in (tuple, list) or len(given) != slots:
        return None
    states: list[Tensor] = []
    for y in given:
        if not is_usual(y, input) or y.shape != shape:
            return None
        states.append(y)
    return states


def is_usual(y: object, like: Tensor) -> TypeGuard[Tensor]:
    """Is y an ordinary tensor with values, of the type and on the device of `like`?"""
    return (
        type(y) in PLAIN
        and isinstance(y, Tensor)
        and y.dtype is like.dtype
        and y.device == like.device
        and not y.is_nested
        and has_memory(y)
    )

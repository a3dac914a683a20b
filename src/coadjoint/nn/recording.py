"""Record what the modules of co.nn do, and ask for their costates.

    with co.record(model) as tape:
        loss = per_sample_loss(model(u), y)                    # [B]
    loss = loss + 0.1 * tape.penalty("log-ratio", loss)        # penalised backpropagation
    loss.mean().backward()

A module is a stack of sweeps. Its top ones receive the loss's gradient by the module's outputs; each receives from those
above it what they would send down, in units of their costates, so that nothing vanishes on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..errors import InputError, KindError, Unsupported
from ..networks.layers import (
    DirectionRun,
    Layer,
    Recorded,
    costates_through_layers,
    pull_back,
    refuse_transforms,
)
from ..objectives.penalties import penalty
from ..sweeps.costates import Costates
from ..sweeps.layout import Layout
from ..sweeps.torch_internals import is_compiled
from ..sweeps.wrappers import refuse_wrappers_between


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module."""

    layout: Layout
    output: Tensor
    last: list[Tensor]  # h_n (and c_n), as they were returned
    levels: list[Layer]
    module: str = ""
    number: int = 0


class _Active(threading.local):
    """The tapes that are recording, in this thread."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def __bool__(self) -> bool:
        return bool(self.tapes)


active_tapes = _Active()


def note_call(module: nn.Module, call: Call) -> None:
    for tape in active_tapes.tapes:
        if module in tape.names:
            tape.add_call(module, call)


@dataclass(eq=False)
class Tape:
    """What `record` returns: the calls of the modules of co.nn inside `module`."""

    names: dict[nn.Module, str]
    calls: list[Call] = field(default_factory=list)

    def __enter__(self) -> Tape:
        self.calls.clear()
        active_tapes.tapes.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        active_tapes.tapes.remove(self)

    def __repr__(self) -> str:
        return f"<tape of {len(self.calls)} calls of {len(self.names)} modules>"

    def add_call(self, module: nn.Module, call: Call) -> None:
        name = self.names[module]
        number = sum(c.module == name for c in self.calls)
        self.calls.append(replace(call, module=name, number=number))

    def costates(self, loss: Tensor) -> Recorded:
        """lam_t = dL/dx_t of each sample's own loss, for every layer, direction and call. loss: [B], made from the outputs;
        sample j's value must depend on sample j alone. Differentiable, for penalties, unless gradients are switched off."""
        if not self.calls:
            raise InputError(
                "nothing was recorded: call the module inside `with co.record(module) as tape:`, and not through torch.compile."
            )
        if not isinstance(loss, Tensor):
            raise KindError(
                f"the loss must be a tensor of one value for each sample; got {type(loss).__name__}."
            )
        sizes = {call.layout.rows.B: None for call in self.calls}
        if loss.numel() not in sizes or loss.dim() > 1:
            what = "a scalar" if loss.dim() == 0 else f"of shape {list(loss.shape)}"
            raise InputError(
                f"the loss is {what}; expected one value for each sample, shape {' or '.join(f'[{B}]' for B in sizes)}: use "
                "reduction='none' and average after the penalty has been added."
            )
        refuse_transforms()
        if not loss.requires_grad:
            raise InputError(
                "the loss does not depend on what was recorded, or gradients were off (torch.no_grad)."
            )
        again, device = torch.is_grad_enabled(), loss.device.type
        calls = [call for call in self.calls if call.levels[0].directions[0].run.x.requires_grad]
        outputs = [y for call in calls for y in (call.output, *call.last)]
        called = {call.module for call in calls}
        refuse_wrappers_between(
            loss, outputs, {m: name for m, name in self.names.items() if name in called}
        )
        each = torch.ones_like(loss)
        grads = (
            torch.autograd.grad(loss, outputs, each, True, again, allow_unused=True)
            if outputs
            else ()
        )
        found, items = dict(zip(map(id, outputs), grads, strict=True)), list[Costates]()
        with torch.autocast(device, enabled=False):
            for call in calls:
                g, *g_last = (found.get(id(y)) for y in (call.output, *call.last))
                if g is not None or any(y is not None for y in g_last):
                    items += costates_of_call(
                        call, g, g_last, loss if again else loss.detach(), again
                    )
        if not items:
            raise InputError(
                "the loss does not depend on the outputs that were recorded, or they carry no gradient (torch.no_grad, "
                "reentrant checkpointing): there are no costates."
            )
        return Recorded(items, loss)

    def penalty(self, G: Any, loss: Tensor) -> Tensor:
        """G of the costates, [B]: the mean over layers, directions and calls. G: a name, or any function of Costates."""
        return penalty(G)(self.costates(loss))


def record(module: nn.Module) -> Tape:
    """Record the calls of every co.nn.RNN, LSTM and GRU inside `module`, for `with co.record(module) as tape:`."""
    if not isinstance(module, nn.Module):
        raise KindError(f"record expects a torch.nn.Module; got {type(module).__name__}.")
    inside = lambda m: [y for y in m.modules() if is_recordable(y)]
    if any(is_compiled(m) and inside(m) for m in module.modules()):
        raise Unsupported(
            "a compiled module cannot be recorded: its recurrences have one derivative. Record the module that was given to "
            "torch.compile, and call that one."
        )
    names: dict[nn.Module, str] = {
        m: name for name, m in module.named_modules() if is_recordable(m)
    }
    if not names:
        found = {type(m).__name__ for m in module.modules() if isinstance(m, nn.RNNBase)}
        hint = (
            f" It has torch.nn's {', '.join(sorted(found))}: co.nn has the same, and co.nn.replace(model) puts them in."
            if found
            else ""
        )
        raise InputError(
            f"there is no co.nn.RNN, LSTM or GRU inside {type(module).__name__}.{hint}"
        )
    return Tape(names)


def is_recordable(module: nn.Module) -> bool:
    """Does the module note its calls on a tape? Those of co.nn do: RNN, LSTM, GRU."""
    return getattr(module, "recordable", False) is True


def costates_of_call(
    call: Call, g: Tensor | None, g_last: Sequence[Tensor | None], loss: Tensor, again: bool
) -> list[Costates]:
    """The costates of a call from the loss's gradient by its outputs."""
    rows = call.layout.rows
    if loss.numel() != rows.B:
        raise InputError(
            f"the loss has {loss.numel()} values, but it depends on a call of {call.module or 'the module'} with {rows.B} "
            "samples: every call must have one sample for each value."
        )
    if g is not None:
        top = call.levels[-1].y
        g = g if call.output is top else pull_back([call.output], [top], [g], again)[0]
    D = len(call.levels[0].directions)
    last = [
        [
            last_state_gradient(call, piece, g_last, layer * D + i)
            for i, piece in enumerate(level.directions)
        ]
        for layer, level in enumerate(call.levels)
    ]
    where = lambda layer, direction: (call.module, call.number, layer, direction)
    return costates_through_layers(
        call.layout, call.levels, g, last, loss.reshape(rows.B), again, where
    )


def last_state_gradient(
    call: Call, piece: DirectionRun, g_last: Sequence[Tensor | None], i: int
) -> Tensor | None:
    """The loss's gradient by the last states, [B, n], from those by h_n (and c_n)."""
    if all(g is None for g in g_last):
        return None
    B, n = call.layout.rows.B, piece.run.x.shape[1]
    parts: list[Tensor] = []
    for g in g_last:
        y = (
            piece.run.x.new_zeros(B, piece.hidden)
            if g is None
            else call.layout.sort(g.reshape(-1, B, g.shape[-1])[i])
        )
        parts.append(
            y @ piece.project if piece.project is not None and g is not None and not parts else y
        )
    s = torch.cat(parts, 1)
    return pad(s, (0, n - s.shape[1]))

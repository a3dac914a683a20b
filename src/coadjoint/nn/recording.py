"""Record the calls of co.nn's modules, and compute their costates.

    with co.record(model) as tape:
        loss = per_sample_loss(model(u), y)                    # [B]
    loss = loss + 0.1 * tape.penalty("log-ratio", loss)        # penalised backpropagation
    loss.mean().backward()

A module is a stack of sweeps. Its top layer receives the loss's gradient with respect to the
module's outputs; each layer below receives what those above send down, in units of their costates,
so that nothing vanishes on the way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

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
from ..objectives.penalties import Penalty, penalty
from ..sweeps.costates import Costates
from ..sweeps.layout import Layout
from ..sweeps.torch_internals import is_compiled
from ..sweeps.wrappers import refuse_wrappers_between
from .recorded_outputs import OutputTape
from .submodules import Places


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded call of a module."""

    layout: Layout  # of the samples and steps in its rows
    output: Tensor  # as it was returned
    last: list[Tensor]  # h_n (and c_n), as they were returned
    layers: list[Layer]  # their sweeps and outputs
    module: str = ""  # its name in the recorded model
    number: int = 0  # among the calls of that module

    @property
    def returned(self) -> list[Tensor]:
        """All tensors that the call has returned."""
        return [self.output, *self.last]


class _ActiveTapes(threading.local):
    """The tapes that are recording, in this thread."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def __bool__(self) -> bool:
        return bool(self.tapes)


active_tapes = _ActiveTapes()


def note_call(module: nn.Module, call: Call) -> None:
    """Add the call to every tape that records this module."""
    for tape in active_tapes.tapes:
        if module in tape.names:
            tape.add_call(module, call)


@dataclass(eq=False)
class Tape:
    """The recorded calls of the modules of co.nn inside a model; `co.record` makes one.

    >>> import torch
    >>> import coadjoint as co
    >>> module = co.nn.GRU(2, 3)
    >>> with co.record(module) as tape:
    ...     output, _ = module(torch.randn(4, 5, 2))
    >>> tape
    <tape of 1 calls of 1 modules>
    >>> loss = output[-1].square().sum(-1)  # [B]
    >>> (loss + 0.1 * tape.penalty("log-ratio", loss)).mean().backward()
    >>> module.weight_hh_l0.grad.shape
    torch.Size([9, 3])
    """

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
        """Append a call of one of the recorded modules, with the module's name and its number."""
        name = self.names[module]
        number = sum(earlier.module == name for earlier in self.calls)
        self.calls.append(replace(call, module=name, number=number))

    def costates(self, loss: Tensor) -> Recorded:
        """The costates lam_t = dL/dx_t of each sample's own loss, by layer, direction and call.

        loss: [B], computed from the outputs; the value of sample j must depend on sample j alone.
        Differentiable, for penalties, unless gradients are switched off.
        """
        self._check_loss(loss)
        again = torch.is_grad_enabled()  # whether the costates may be differentiated again
        # Calls without a graph (torch.no_grad) have no costates.
        calls = [call for call in self.calls if call.layers[0].directions[0].run.x.requires_grad]
        outputs: list[Tensor] = []
        called = set()
        for call in calls:
            outputs += call.returned
            called.add(call.module)
        recorded = {module: name for module, name in self.names.items() if name in called}
        refuse_wrappers_between(loss, outputs, recorded)
        gradients = self._gradients(loss, outputs, again)
        items: list[Costates] = []
        with torch.autocast(loss.device.type, enabled=False):
            for call in calls:
                # The loss's gradient by the output and by h_n (and c_n), None if it reads none.
                g, *g_last = [gradients.get(id(y)) for y in call.returned]
                if g is not None or any(y is not None for y in g_last):
                    own_loss = loss if again else loss.detach()
                    items += costates_of_call(call, g, g_last, own_loss, again)
        if not items:
            raise InputError(
                "the loss does not depend on the outputs that were recorded, or they carry no "
                "gradient (torch.no_grad, reentrant checkpointing): there are no costates."
            )
        return Recorded(items, loss)

    def _check_loss(self, loss: Tensor) -> None:
        """Refuse a loss that is not [B] with a graph, or one without recorded calls."""
        if not self.calls:
            raise InputError(
                "nothing was recorded: call the module inside `with co.record(module) as tape:`, "
                "and not through torch.compile."
            )
        if not isinstance(loss, Tensor):
            raise KindError(
                "the loss must be a tensor of one value for each sample; got "
                f"{type(loss).__name__}."
            )
        sizes = dict.fromkeys(call.layout.rows.B for call in self.calls)
        if loss.numel() not in sizes or loss.dim() > 1:
            got = "a scalar" if loss.dim() == 0 else f"of shape {list(loss.shape)}"
            expected = " or ".join(f"[{B}]" for B in sizes)
            raise InputError(
                f"the loss is {got}; expected one value for each sample, shape {expected}: use "
                "reduction='none' and average after the penalty has been added."
            )
        refuse_transforms()
        if not loss.requires_grad:
            raise InputError(
                "the loss does not depend on the recorded calls, or gradients were off "
                "(torch.no_grad)."
            )

    def _gradients(
        self, loss: Tensor, outputs: list[Tensor], create_graph: bool
    ) -> dict[int, Tensor | None]:
        """The gradient of each sample's loss by each output, under the output's id.

        Samples do not depend on each other, so the sum of their losses is differentiated once for
        all. The graph is retained for the user's own backward.
        """
        if not outputs:
            return {}
        ones = torch.ones_like(loss)
        grads = torch.autograd.grad(loss, outputs, ones, True, create_graph, allow_unused=True)
        return dict(zip(map(id, outputs), grads, strict=True))

    def penalty(self, G: str | Penalty | Callable[..., Tensor], loss: Tensor) -> Tensor:
        """G of the costates, [B]: the mean over layers, directions and calls.

        G: the name of a penalty, or any function of Costates. loss: as in `costates`.
        """
        return penalty(G)(self.costates(loss))


@overload
def record(module: nn.Module) -> Tape: ...
@overload
def record(
    module: nn.Module, at: Places, *, output: int | str | None = None, axis: int = 0
) -> OutputTape: ...
def record(
    module: nn.Module,
    at: Places | None = None,
    *,
    output: int | str | None = None,
    axis: int = 0,
) -> Tape | OutputTape:
    """Record the calls of every co.nn.RNN, LSTM and GRU inside `module`, as a context manager.

    With `at`, record the outputs of any submodules of any model instead: transformers, models with
    skip connections, or with a forward of their own. Then

    at      names of submodules: "blocks.*" is blocks.0, blocks.1, ..., but not blocks.0.attn (`*`
            does not cross a dot; `**` does); a list of such patterns; or the modules themselves
    output  which one to record if a module returns several tensors: a number or a key
    axis    of the samples in all recorded outputs: 0, or 1 for time-major models

    and `tape.costates(loss)` is one co.nn.OutputCostates over all outputs in the order of the
    calls. Its `lam.at(i)` is the whole derivative of each sample's loss by the i-th output, through
    later outputs and around them, kept as a mantissa and a power of two, so that it neither
    vanishes nor overflows from one recorded output to the next. Refused by name: patterns
    that match nothing, batch normalisation in training mode, reentrant checkpoints, torch.compile,
    modules that return several tensors without `output`. Changes in place after a recorded output
    do no harm, since the model goes on with a copy.

    >>> import torch
    >>> import coadjoint as co
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    >>> with co.record(model, at="*") as tape:
    ...     y = model(torch.randn(5, 2))
    >>> lam = tape.costates(y[:, 0])  # of the loss L = y
    >>> lam.names, [list(lam.at(i).shape) for i in range(3)]
    (['0', '1', '2'], [[5, 3], [5, 3], [5, 1]])
    >>> torch.allclose(lam.at(1), model[2].weight)
    True

    Without `at`, each module of co.nn is a stack of recurrences with costates over time.
    Of the loss ||h_T||^2 / 2 the last costate is lam_T = h_T:

    >>> import torch
    >>> import coadjoint as co
    >>> module = co.nn.RNN(2, 3)
    >>> with co.record(module) as tape:
    ...     output, _ = module(torch.randn(4, 5, 2))  # [T, B, inputs]
    >>> (lam,) = tape.costates(output[-1].square().sum(-1) / 2)  # one layer, one direction
    >>> lam.lam.shape  # [T + 1, B, n]
    torch.Size([5, 5, 3])
    >>> torch.allclose(lam.lam[-1], output[-1])
    True
    """
    if not isinstance(module, nn.Module):
        raise KindError(f"record expects a torch.nn.Module; got {type(module).__name__}.")
    if at is not None:
        return OutputTape(module, at, output, axis)
    if output is not None or axis != 0:
        raise InputError("output= and axis= belong to at=: co.record(model, at='blocks.*').")
    for inner in module.modules():
        if is_compiled(inner) and any(map(is_recordable, inner.modules())):
            raise Unsupported(
                "a compiled module cannot be recorded: its recurrences have only one derivative. "
                "Record the module that was given to torch.compile, and call that one."
            )
    names: dict[nn.Module, str] = {}
    for name, inner in module.named_modules():
        if is_recordable(inner):
            names[inner] = name
    if not names:
        kinds = {type(m).__name__ for m in module.modules() if isinstance(m, nn.RNNBase)}
        hint = ""
        if kinds:
            hint = (
                f" It has torch.nn's {', '.join(sorted(kinds))}: use co.nn's instead; "
                "co.nn.replace(model) puts them in."
            )
        raise InputError(
            f"there is no co.nn.RNN, LSTM or GRU inside {type(module).__name__}.{hint} "
            "Other modules are recorded by their names: co.record(model, at='blocks.*')."
        )
    return Tape(names)


def is_recordable(module: nn.Module) -> bool:
    """Tell whether the module notes its calls on a tape: RNN, LSTM and GRU of co.nn do."""
    return getattr(module, "recordable", False) is True


def costates_of_call(
    call: Call, g: Tensor | None, g_last: Sequence[Tensor | None], loss: Tensor, again: bool
) -> list[Costates]:
    """The costates of all layers and directions of a call.

    g: the loss's gradient by the call's output; g_last: by its h_n (and c_n); None where it is
    zero. loss: of each sample, [B]. again: the costates will be differentiated.
    """
    rows = call.layout.rows
    if loss.numel() != rows.B:
        raise InputError(
            f"the loss has {loss.numel()} values, but it depends on a call of "
            f"{call.module or 'the module'} with {rows.B} samples: every call must have one sample "
            "for each value."
        )
    # From the output as it was returned, [T, B, .] or another shape, to the top layer's rows.
    top_rows = call.layers[-1].y
    if g is not None and call.output is not top_rows:
        g = pull_back([call.output], [top_rows], [g], again)[0]
    directions = len(call.layers[0].directions)
    last: list[list[Tensor | None]] = []  # the gradient by the last states, by layer and direction
    for i, layer in enumerate(call.layers):
        numbered = enumerate(layer.directions, start=i * directions)
        last.append([last_state_gradient(call, run, g_last, number) for number, run in numbered])

    def place(layer: int, direction: str) -> tuple[str, int, int, str]:
        return call.module, call.number, layer, direction

    own_loss = loss.reshape(rows.B)
    return costates_through_layers(call.layout, call.layers, g, last, own_loss, again, place)


def last_state_gradient(
    call: Call, run: DirectionRun, g_last: Sequence[Tensor | None], number: int
) -> Tensor | None:
    """The loss's gradient by a direction's last states, [B, n]; None if it is zero.

    run: the sweep of the direction. g_last: the gradients by h_n (and c_n), which are [layers
    directions, B, .]. number: of the direction, among those of all layers.
    """
    if all(g is None for g in g_last):
        return None
    B = call.layout.rows.B
    x = run.run.x
    parts: list[Tensor] = []
    for slot, g in enumerate(g_last):  # h, then c
        if g is None:
            part = x.new_zeros(B, run.hidden)
        else:
            # The axis of samples may be missing, for a single sequence.
            part = call.layout.sort(g.reshape(-1, B, g.shape[-1])[number])
            if slot == 0 and run.project is not None:  # h = W_hr m, and the state holds m
                part = part @ run.project
        parts.append(part)
    by_state = torch.cat(parts, 1)
    # Zeros for a further slot that is not returned: the masked h of recurrent dropout.
    return pad(by_state, (0, x.shape[1] - by_state.shape[1]))

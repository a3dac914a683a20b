"""Record what the modules of co.nn do, and ask for their costates.

    with co.record(model) as tape:
        loss = per_sample_loss(model(u), y)                    # [B]
    loss = loss + 0.1 * tape.penalty("log-ratio", loss)        # penalised backpropagation
    loss.mean().backward()

A module is a stack of sweeps. Its top ones receive the loss's gradient by the module's outputs; each receives from those
above it what they would send down, in units of their costates, so that nothing vanishes on the way.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .errors import InputError, KindError, Unsupported
from .network import Costates, Layout, Passage
from .penalties import penalty
from .sweeps import Stepped, Swept, scale
from .sweeps.derivatives import settle
from .sweeps.rows import Rows, exponent

DIRECTIONS = ("forward", "reverse")
Source = tuple[Tensor, Tensor | None]  # s and its unit: s 2^unit, for each state row


@dataclass(frozen=True, eq=False)
class Layer(Passage):
    """One layer of a recorded module in one direction. Time runs the way the layer reads: that of direction "reverse"
    begins at the end of the sequence."""

    module: str  # its name in the module that was recorded; "" for that module itself
    call: int  # of that module, from 0
    layer: int
    direction: str  # "forward" or "reverse"


@dataclass(frozen=True, eq=False)
class Piece:
    """What a layer leaves behind in one direction."""

    run: Swept | Stepped
    drive: list[Tensor]  # what the inputs said to its steps
    project: Tensor | None
    turned: bool


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module."""

    layout: Layout
    output: Tensor
    last: list[Tensor]  # h_n (and c_n), as they were returned
    pieces: list[list[Piece]]  # of each layer, in each direction
    hidden: int
    module: str = ""
    number: int = 0


class _Active(threading.local):
    """The tapes that are recording, in this thread."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def __bool__(self) -> bool:
        return bool(self.tapes)


active = _Active()


def note(module: nn.Module, call: Call) -> None:
    for tape in active.tapes:
        if module in tape.names:
            tape.enter(module, call)


class Recorded(Sequence[Costates]):
    """The costates of every layer and direction that the loss depends on, from the first call's first layer on.

    `lam.trajectory` of each names its module, call, layer and direction; `select` picks by these."""

    def __init__(self, items: Sequence[Costates], loss: Tensor) -> None:
        self.items, self.loss = tuple(items), loss

    @overload
    def __getitem__(self, i: int) -> Costates: ...
    @overload
    def __getitem__(self, i: slice) -> Recorded: ...
    def __getitem__(self, i: int | slice) -> Costates | Recorded:
        return Recorded(self.items[i], self.loss) if isinstance(i, slice) else self.items[i]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return "<costates of " + "; ".join(map(name_of, self.items)) + ">"

    def select(self, **where: Any) -> Recorded:
        """Those of module=, call=, layer=, direction= ("forward" or "reverse")."""
        for name in where:
            if name not in ("module", "call", "layer", "direction"):
                raise InputError(f"costates are selected by module, call, layer or direction; got {name!r}.")
        found = [lam for lam in self if all(getattr(lam.trajectory, n) == v for n, v in where.items())]
        if not found:
            raise InputError(f"no costates of {where}; there are those of " + "; ".join(map(name_of, self)) + ".")
        return Recorded(found, self.loss)


def name_of(lam: Costates) -> str:
    at: Any = lam.trajectory
    return f"{at.module or 'the module'}, call {at.call}, layer {at.layer}, {at.direction}"


@dataclass(eq=False)
class Tape:
    """What `record` returns: the calls of the modules of co.nn inside `module`."""

    names: dict[nn.Module, str]
    calls: list[Call] = field(default_factory=list)

    def __enter__(self) -> Tape:
        active.tapes.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        active.tapes.remove(self)

    def __repr__(self) -> str:
        return f"<tape of {len(self.calls)} calls of {len(self.names)} modules>"

    def enter(self, module: nn.Module, call: Call) -> None:
        name = self.names[module]
        number = sum(c.module == name for c in self.calls)
        self.calls.append(replace(call, module=name, number=number))

    def costates(self, loss: Tensor) -> Recorded:
        """lam_t = dL/dx_t of each sample's own loss, for every layer, direction and call. loss: [B], made from the outputs;
        sample j's value must depend on sample j alone. Differentiable, for penalties, unless gradients are switched off."""
        if not self.calls:
            raise InputError("nothing was recorded: call the module inside `with co.record(module) as tape:`.")
        if not isinstance(loss, Tensor):
            raise KindError(f"the loss must be a tensor of one value for each sample; got {type(loss).__name__}.")
        B = self.calls[0].layout.rows.B
        if loss.shape != (B,) and not (B == 1 and loss.dim() == 0):
            what = "a scalar" if loss.dim() == 0 else f"of shape {list(loss.shape)}"
            raise InputError(
                f"the loss is {what}; expected one value for each sample, shape [{B}]: use reduction='none' and average "
                "after the penalty has been added."
            )
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise Unsupported(
                "costates of a recording are made by torch.autograd, which torch.func's transforms do not see. Use backward() "
                "or torch.autograd.grad, or co.Network."
            )
        outputs = [y for call in self.calls for y in (call.output, *call.last)]
        if not loss.requires_grad:
            raise InputError("the loss does not depend on what was recorded, or gradients were off (torch.no_grad).")
        again = torch.is_grad_enabled()
        found = iter(torch.autograd.grad(loss.sum(), outputs, create_graph=again, retain_graph=True, allow_unused=True))
        items: list[Costates] = []
        for call in self.calls:
            sources = [next(found) for _ in (call.output, *call.last)]
            items += down(call, sources[0], sources[1:], loss if again else loss.detach(), again)
        if not items:
            raise InputError("the loss does not depend on the outputs that were recorded: there are no costates.")
        return Recorded(items, loss)

    def penalty(self, G: Any, loss: Tensor) -> Tensor:
        """G of the costates, [B]: the mean over layers, directions and calls. G: a name, or any function of Costates."""
        return penalty(G)(self.costates(loss))


def record(module: nn.Module) -> Tape:
    """Record the calls of every co.nn.RNN, LSTM and GRU inside `module`, for `with co.record(module) as tape:`."""
    from .nn import Layers  # it is made of this module

    if not isinstance(module, nn.Module):
        raise KindError(f"record expects a torch.nn.Module; got {type(module).__name__}.")
    if isinstance(module, torch._dynamo.OptimizedModule):
        raise Unsupported(
            "a compiled module cannot be recorded: its recurrences have one derivative. Record the module that was given to "
            "torch.compile, and call that one."
        )
    names: dict[nn.Module, str] = {m: name for name, m in module.named_modules() if isinstance(m, Layers)}
    if not names:
        found = {type(m).__name__ for m in module.modules() if isinstance(m, nn.RNNBase)}
        hint = (
            f" It has torch.nn's {', '.join(sorted(found))}: co.nn has the same, and co.nn.replace(model) puts them in."
            if found
            else ""
        )
        raise InputError(f"there is no co.nn.RNN, LSTM or GRU inside {type(module).__name__}.{hint}")
    return Tape(names)


def down(call: Call, g: Tensor | None, g_last: Sequence[Tensor | None], loss: Tensor, again: bool) -> list[Costates]:
    """The costates of a call from the loss's gradient by its outputs: of the top layer, then by what it sends down."""
    rows, D = call.layout.rows, len(call.pieces[0])
    tops = [piece.run.x for piece in call.pieces[-1]]
    pull = lambda ys, xs, gs: torch.autograd.grad(ys, xs, gs, create_graph=again, retain_graph=True, allow_unused=True)
    received = [None] * D if g is None else pull([call.output], tops, [g])
    arriving: list[list[Source]] = [[] if s is None else [(s, None)] for s in received]
    items: list[list[Costates]] = []
    for layer in reversed(range(len(call.pieces))):
        here, found = call.pieces[layer], []
        with torch.set_grad_enabled(again):
            for i, (piece, sources) in enumerate(zip(here, arriving, strict=True)):
                s, s_last, unit = joined(rows, sources, ends(call, piece, g_last, layer * D + i))
                if s is not None or s_last is not None:
                    run = strict(piece.run)
                    found.append((piece, run, run.costate(s, s_last, None, unit)))
        named = [
            (Layer(call.layout, run, call.hidden, call.module, call.number, layer, DIRECTIONS[p.turned]), c)
            for p, run, c in found
        ]
        items.insert(0, [Costates(at, c.mantissa, c.exponent, loss.reshape(rows.B)) for at, c in named])
        if layer == 0:
            break
        below = call.pieces[layer - 1]
        arriving = [[] for _ in below]
        for piece, _, costate in found:
            k = costate.exponent[rows.B :]
            k = rows.turned(k) if piece.turned else k
            with torch.set_grad_enabled(again):
                pairs = zip(piece.drive, costate.drive(), strict=True)
            sent = [(y, gy) for y, gy in pairs if y.requires_grad and gy is not None]
            received = pull([y for y, _ in sent], [p.run.x for p in below], [gy for _, gy in sent])
            for lower, sources, s in zip(below, arriving, received, strict=True):
                if s is not None:
                    sources.append((s, of_states(rows, rows.turned(k) if lower.turned else k)))
    for piece in (p for layer in call.pieces for p in layer):
        if isinstance(piece.run, Swept) and not again:
            settle(piece.run.plan)
    return [lam for layer in items for lam in layer]


def strict(run: Swept | Stepped) -> Swept | Stepped:
    """Costates that leave the range of their type are an error, whatever the module lets through."""
    return replace(run, plan=replace(run.plan, checked=True)) if isinstance(run, Swept) else run


def of_states(rows: Rows, k: Tensor) -> Tensor:
    """What steps have, [N], for the states: x_0 has that of the first step."""
    return torch.cat([k[: rows.B], k])


def ends(call: Call, piece: Piece, g_last: Sequence[Tensor | None], i: int) -> Tensor | None:
    """The loss's gradient by the last states, [B, n], from those by h_n (and c_n)."""
    if all(g is None for g in g_last):
        return None
    B, n = call.layout.rows.B, piece.run.x.shape[1]
    parts: list[Tensor] = []
    for g in g_last:
        y = piece.run.x.new_zeros(B, call.hidden) if g is None else call.layout.sort(g.reshape(-1, B, g.shape[-1])[i])
        parts.append(y @ piece.project if piece.project is not None and g is not None and not parts else y)
    s = torch.cat(parts, 1)
    return pad(s, (0, n - s.shape[1]))


def joined(
    rows: Rows, sources: list[Source], s_last: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(s, s_last, unit): the sources added up in one unit for each state, large enough for all; None if it is 1."""
    units = [unit for _, unit in sources if unit is not None]
    if not units:
        return (sources[0][0] if sources else None), s_last, None
    unit = functools.reduce(torch.maximum, units)
    if s_last is not None:
        own = rows.last(unit)
        unit = unit + rows.last_back((torch.maximum(own, exponent(s_last.detach())) - own)[:, None])[:, 0]
        s_last = scale(s_last, -rows.last(unit)[:, None])
    parts = [scale(s, ((0 if k is None else k) - unit)[:, None]) for s, k in sources]
    return functools.reduce(torch.add, parts), s_last, unit

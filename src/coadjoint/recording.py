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
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .costates import Costates, Passage
from .errors import InputError, KindError, Unsupported
from .layout import Layout
from .penalties import PARTS, penalty
from .sweeps import Stepped, Swept, scale
from .sweeps.autograd import Costate
from .sweeps.derivatives import settle
from .sweeps.rows import NONE, ROOM, Rows, exponent
from .wrappers import refuse_wrappers

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
    drive: Sequence[Tensor]  # what the inputs said to its steps
    hidden: int
    turned: bool
    project: Tensor | None = None
    mask: Tensor | None = None  # [B, d], of recurrent dropout


@dataclass(frozen=True, eq=False)
class Level:
    """A layer of a stack."""

    pieces: list[Piece]  # in each direction
    y: Tensor  # what it hands on, step rows: of the pieces' states, and of the level below where it is residual
    residual: bool = False


@dataclass(frozen=True, eq=False)
class Masked:
    """A run under recurrent dropout. Its last slot r = m h is h by another name: the state is what stands before it."""

    run: Swept | Stepped
    mask: Tensor  # m, [B + N, d]

    @property
    def x(self) -> Tensor:
        return self.run.x[:, : -self.mask.shape[1]]

    @property
    def last(self) -> Tensor:
        return self.run.last[:, : -self.mask.shape[1]]

    def seen(self, lam: Tensor) -> Tensor:
        """lam^h + m lam^r, and the other slots; of state rows or step rows"""
        d, m = self.mask.shape[1], self.mask[-len(lam) :]
        return torch.cat([lam[:, :d] + m * lam[:, -d:], lam[:, d:-d]], 1)

    def pull(self, lam: Tensor) -> Tensor:
        """J_t' lam_t, as Swept has it."""
        return self.seen(self.run.pull(pad(lam, (0, self.mask.shape[1]))))


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module."""

    layout: Layout
    output: Tensor
    last: list[Tensor]  # h_n (and c_n), as they were returned
    levels: list[Level]
    module: str = ""
    number: int = 0


class _Active(threading.local):
    """The tapes that are recording, in this thread."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    def __bool__(self) -> bool:
        return bool(self.tapes)


active = _Active()


def refuse_transforms() -> None:
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Unsupported(
            "costates of a recording are made by torch.autograd, which torch.func's transforms do not see. Use backward() "
            "or torch.autograd.grad, or co.Network."
        )


def attached(u: Tensor) -> Tensor:
    """The inputs of a layer that is recorded: costates exist where nothing is trained, too."""
    refuse_transforms()
    return u if u.requires_grad or not torch.is_grad_enabled() else u.detach().requires_grad_()


def note(module: nn.Module, call: Call) -> None:
    for tape in active.tapes:
        if module in tape.names:
            tape.enter(module, call)


class Recorded(Sequence[Costates]):
    """The costates of every layer and direction of the calls that the loss depends on, from the first call's first layer on.

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

    def detach(self) -> Recorded:
        """The same costates without their graph."""
        return Recorded([lam.detach() for lam in self.items], self.loss.detach())

    def select(self, **where: Any) -> Recorded:
        """Those of module=, call=, layer=, direction= ("forward" or "reverse")."""
        for name in where:
            if name not in PARTS:
                raise InputError(f"costates are selected by module, call, layer or direction; got {name!r}.")
        found = [lam for lam in self if all(getattr(lam.trajectory, n) == v for n, v in where.items())]
        if not found:
            raise InputError(f"no costates of {where}; there are those of " + "; ".join(map(name_of, self)) + ".")
        return Recorded(found, self.loss)

    def whole(self) -> Costates:
        """The costates of all states as one: lam_t of the stack, its layers' side by side in one unit for each step.

        Of layers that read in one direction: states of two directions at one step have different pasts."""
        if not self.items:
            raise InputError("there are no costates to join.")
        first: Any = self.items[0].trajectory
        for lam in self.items:
            at: Any = lam.trajectory
            if (at.direction, at.call, at.module) != (first.direction, first.call, first.module):
                raise Unsupported(
                    "costates are joined where their steps are the same: of one call, in one direction. Use "
                    "select(direction='forward'), and module= and call= if there are several."
                )
        e = [exponent(lam.rows.detach()) for lam in self.items]
        units = [torch.where(k == NONE, NONE, lam.powers) for k, lam in zip(e, self.items, strict=True)]
        top = functools.reduce(torch.maximum, units)
        top = torch.where(top == NONE, 0, top).to(self.items[0].powers.dtype)
        rows = torch.cat([scale(lam.rows, (lam.powers - top)[:, None]) for lam in self.items], 1)
        run: Any = Joined([lam.trajectory.run for lam in self.items])
        shown = [lam.trajectory.shown for lam in self.items]
        return Costates(Together(first.layout, run, first.hidden, shown), rows, top, self.items[0].loss)


@dataclass(frozen=True, eq=False)
class Together(Passage):
    """Several layers as one."""

    parts: Sequence[Tensor]  # what each shows

    @property
    def shown(self) -> Tensor:
        return torch.cat(list(self.parts), 2)


@dataclass(frozen=True, eq=False)
class Joined:
    """The runs of several layers as one: their states side by side."""

    runs: Sequence[Any]

    @property
    def x(self) -> Tensor:
        return torch.cat([run.x for run in self.runs], 1)

    @property
    def last(self) -> Tensor:
        return torch.cat([run.last for run in self.runs], 1)

    def pull(self, lam: Tensor) -> Tensor:
        raise Unsupported(
            "this penalty takes the Jacobian of one layer's step: use it for each layer, not on the whole."
        )


def name_of(lam: Costates) -> str:
    at: Any = lam.trajectory
    call = f"{at.module or 'the module'}, call {at.call}, " if at.module or at.call else ""
    return f"{call}layer {at.layer}, {at.direction}"


@dataclass(eq=False)
class Tape:
    """What `record` returns: the calls of the modules of co.nn inside `module`."""

    names: dict[nn.Module, str]
    calls: list[Call] = field(default_factory=list)

    def __enter__(self) -> Tape:
        self.calls.clear()
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
            raise InputError(
                "nothing was recorded: call the module inside `with co.record(module) as tape:`, and not through torch.compile."
            )
        if not isinstance(loss, Tensor):
            raise KindError(f"the loss must be a tensor of one value for each sample; got {type(loss).__name__}.")
        sizes = {call.layout.rows.B: None for call in self.calls}
        if loss.numel() not in sizes or loss.dim() > 1:
            what = "a scalar" if loss.dim() == 0 else f"of shape {list(loss.shape)}"
            raise InputError(
                f"the loss is {what}; expected one value for each sample, shape {' or '.join(f'[{B}]' for B in sizes)}: use "
                "reduction='none' and average after the penalty has been added."
            )
        refuse_transforms()
        if not loss.requires_grad:
            raise InputError("the loss does not depend on what was recorded, or gradients were off (torch.no_grad).")
        again, device = torch.is_grad_enabled(), loss.device.type
        calls = [call for call in self.calls if call.levels[0].pieces[0].run.x.requires_grad]
        outputs = [y for call in calls for y in (call.output, *call.last)]
        called = {call.module for call in calls}
        refuse_wrappers(loss, outputs, {m: name for m, name in self.names.items() if name in called})
        each = torch.ones_like(loss)
        grads = torch.autograd.grad(loss, outputs, each, True, again, allow_unused=True) if outputs else ()
        found, items = dict(zip(map(id, outputs), grads, strict=True)), list[Costates]()
        with torch.autocast(device, enabled=False):
            for call in calls:
                g, *g_last = (found.get(id(y)) for y in (call.output, *call.last))
                if g is not None or any(y is not None for y in g_last):
                    items += of_call(call, g, g_last, loss if again else loss.detach(), again)
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
    from .nn import Layers  # it is made of this module

    if not isinstance(module, nn.Module):
        raise KindError(f"record expects a torch.nn.Module; got {type(module).__name__}.")
    inside = lambda m: [y for y in m.modules() if isinstance(y, Layers)]
    if any(compiled(m) and inside(m) for m in module.modules()):
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


def compiled(module: nn.Module) -> bool:
    dynamo: Any = sys.modules.get("torch._dynamo")  # slow to import, and not needed to know that nobody did
    return module._compiled_call_impl is not None or (dynamo is not None and isinstance(module, dynamo.OptimizedModule))


def of_call(call: Call, g: Tensor | None, g_last: Sequence[Tensor | None], loss: Tensor, again: bool) -> list[Costates]:
    """The costates of a call from the loss's gradient by its outputs."""
    rows = call.layout.rows
    if loss.numel() != rows.B:
        raise InputError(
            f"the loss has {loss.numel()} values, but it depends on a call of {call.module or 'the module'} with {rows.B} "
            "samples: every call must have one sample for each value."
        )
    if g is not None:
        top = call.levels[-1].y
        g = g if call.output is top else pulled([call.output], [top], [g], again)[0]
    D = len(call.levels[0].pieces)
    last = [
        [ends(call, piece, g_last, layer * D + i) for i, piece in enumerate(level.pieces)]
        for layer, level in enumerate(call.levels)
    ]
    where = lambda layer, direction: (call.module, call.number, layer, direction)
    return down(call.layout, call.levels, g, last, loss.reshape(rows.B), again, where)


def pulled(ys: Sequence[Tensor], xs: Sequence[Tensor], gs: Sequence[Tensor], again: bool) -> Sequence[Tensor | None]:
    return torch.autograd.grad(ys, xs, gs, create_graph=again, retain_graph=True, allow_unused=True)


def down(
    layout: Layout,
    levels: Sequence[Level],
    g: Tensor | None,
    g_last: Sequence[Sequence[Tensor | None]],
    loss: Tensor,
    again: bool,
    where: Callable[[int, str], tuple[Any, ...]],
) -> list[Costates]:
    """The costates of a stack from the loss's gradient by what its top hands on, g, and by the last states of each piece:
    of the top layer, then by what it sends down. where(layer, direction): the names of what is found."""
    rows = layout.rows
    items: list[Costates] = []
    arriving: list[Source] = [] if g is None else [(g, None)]  # at y, in units of the steps
    for layer in reversed(range(len(levels))):
        level, found = levels[layer], []
        sources: list[list[Source]] = [[] for _ in level.pieces]
        for s, k in arriving:
            for piece, own, by_x in zip(
                level.pieces, sources, pulled([level.y], [p.run.x for p in level.pieces], [s], again), strict=True
            ):
                if by_x is not None:
                    turn = rows.turned if piece.turned else lambda k: k
                    own.append((by_x, None if k is None else of_states(rows, turn(k))))
        with torch.set_grad_enabled(again):
            for piece, own, s_last in zip(level.pieces, sources, g_last[layer], strict=True):
                run = strict(piece.run)
                costate = swept(rows, run, own, s_last)
                if costate is not None:
                    found.append((piece, run, costate))
            named = [costates(layout, where(layer, DIRECTIONS[each[0].turned]), *each, loss) for each in found]
            items = named + items
        if layer == 0:
            break
        below = levels[layer - 1].y
        sent = arriving if level.residual else []
        for piece, _, costate in found:
            with torch.set_grad_enabled(again):
                driven = list(zip(piece.drive, costate.drive(), strict=True))
            pairs = [(y, gy) for y, gy in driven if y.requires_grad and gy is not None]
            down_here = pulled([y for y, _ in pairs], [below], [gy for _, gy in pairs], again)[0] if pairs else None
            if down_here is not None:
                k = costate.exponent[rows.B :]
                sent = [*sent, (down_here, rows.turned(k) if piece.turned else k)]
        arriving = sent
    for piece in (p for level in levels for p in level.pieces):
        if isinstance(piece.run, Swept) and not again:
            settle(piece.run.plan)
    return items


def costates(
    layout: Layout, names: tuple[Any, ...], piece: Piece, run: Any, costate: Costate, loss: Tensor
) -> Costates:
    """What is found, by its names."""
    lam, rows = costate.mantissa, layout.rows
    if piece.mask is not None:
        run = Masked(run, torch.cat([piece.mask, piece.mask.index_select(0, rows.sample.to(lam.device))]))
        lam = run.seen(lam)
    return Costates(Layer(layout, run, piece.hidden, *names), lam, costate.exponent, loss.to(lam.dtype))


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
        y = piece.run.x.new_zeros(B, piece.hidden) if g is None else call.layout.sort(g.reshape(-1, B, g.shape[-1])[i])
        parts.append(y @ piece.project if piece.project is not None and g is not None and not parts else y)
    s = torch.cat(parts, 1)
    return pad(s, (0, n - s.shape[1]))


def swept(rows: Rows, run: Swept | Stepped, sources: list[Source], s_last: Tensor | None) -> Costate | None:
    """The costate that the sources make; None if there are none.

    Sources in different units are added up in that of the costate they make. It is that of the largest of them, unless the
    layer forgets more slowly than those above it: then what is found says which."""
    if all(k is None for _, k in sources):  # at true scale: one source at most
        s = sources[0][0] if sources else None
        read = None if s is None else exponent(s.detach()) != NONE
        return None if s is None and s_last is None else run.costate(s, s_last, read)
    true = torch.zeros(len(run.x), dtype=torch.int32, device=run.x.device)
    scaled = [(s, true if k is None else k) for s, k in sources]
    room, powers = ROOM[run.x.dtype], [(exponent(s.detach()), k) for s, k in scaled]
    size = functools.reduce(torch.maximum, [torch.where(e == NONE, NONE, e + k) for e, k in powers])
    if s_last is not None:
        own = rows.last(size)
        size = size + rows.last_back((torch.maximum(own, exponent(s_last.detach())) - own)[:, None])[:, 0]

    def attempt(size: Tensor) -> tuple[Tensor, Costate]:
        unit = gentle(rows, size, room)
        shifts = [torch.where((e == NONE) & (k - unit > room), NONE, k - unit)[:, None] for e, k in powers]
        s = functools.reduce(torch.add, [scale(s, shift) for (s, _), shift in zip(scaled, shifts, strict=True)])
        own = None if s_last is None else scale(s_last, -rows.last(unit)[:, None])
        return unit, run.costate(s, own, None, unit)

    unit, found = attempt(size)
    e = exponent(found.mantissa.detach())
    if torch.where(e == NONE, 0, found.exponent - unit).abs().max() > room:
        _, found = attempt(torch.where(e == NONE, NONE, e + found.exponent))
    return found


def gentle(rows: Rows, unit: Tensor, fall: int) -> Tensor:
    """Units at least as large that never fall by more than 2^fall from a state to the one before it, so that the links
    between them stay in range. A state without one (NONE) has the unit of the state after it."""
    dense = Layout(rows, None).padded_states(unit, NONE)
    ramp = torch.where(dense == NONE, 0, fall).flip(0).cumsum(0)
    found = (dense.flip(0) + ramp).cummax(0).values - ramp
    return rows.of_states(torch.where(found > NONE // 2, found, 0).flip(0)).to(unit.dtype)

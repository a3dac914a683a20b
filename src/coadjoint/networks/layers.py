"""Costates through several layers.

A stack, or a module of co.nn, is a stack of sweeps. Its top ones receive the loss's gradient by its outputs; each receives
from those above it what they would send down, in units of their costates, so that nothing vanishes on the way.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError, Unsupported
from ..objectives.penalties import PARTS
from ..sweeps.costates import Costates, RecurrenceRun
from ..sweeps.layout import Layout
from ..sweeps.rows import NO_EXPONENT, SAFE_EXPONENT, Rows, exponent, scale
from ..sweeps.run import CostateRows, RunView, SweepRun
from ..sweeps.torch_internals import innermost_transform

DIRECTIONS = ("forward", "reverse")
ScaledSource = tuple[Tensor, Tensor | None]  # s and its unit: s 2^unit, for each state row


@dataclass(frozen=True, eq=False)
class LayerRun(RecurrenceRun):
    """One layer of a recorded module in one direction. Time runs the way the layer reads: that of direction "reverse"
    begins at the end of the sequence."""

    module: str  # its name in the module that was recorded; "" for that module itself
    call: int  # of that module, from 0
    layer: int
    direction: str  # "forward" or "reverse"


@dataclass(frozen=True, eq=False)
class DirectionRun:
    """What a layer leaves behind in one direction."""

    run: SweepRun
    drive: Sequence[Tensor]  # what the inputs said to its steps
    hidden: int
    turned: bool
    project: Tensor | None = None
    mask: Tensor | None = None  # [B, d], of recurrent dropout


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of a stack."""

    directions: list[DirectionRun]  # in each direction
    y: Tensor  # what it hands on, step rows: of the pieces' states, and of the level below where it is residual
    residual: bool = False


@dataclass(frozen=True, eq=False)
class DroppedOutRun(RunView):
    """A run under recurrent dropout. Its last slot r = m h is h by another name: the state is what stands before it."""

    run: SweepRun
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


def refuse_transforms() -> None:
    if innermost_transform() is not None:
        raise Unsupported(
            "costates of a recording are made by torch.autograd, which torch.func's transforms do not see. Use backward() "
            "or torch.autograd.grad, or co.Network."
        )


def require_gradient(u: Tensor) -> Tensor:
    """The inputs of a layer that is recorded: costates exist where nothing is trained, too."""
    refuse_transforms()
    return u if u.requires_grad or not torch.is_grad_enabled() else u.detach().requires_grad_()


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
        return "<costates of " + "; ".join(map(describe_place, self.items)) + ">"

    def detach(self) -> Recorded:
        """The same costates without their graph."""
        return Recorded([lam.detach() for lam in self.items], self.loss.detach())

    def select(self, **where: Any) -> Recorded:
        """Those of module=, call=, layer=, direction= ("forward" or "reverse")."""
        for name in where:
            if name not in PARTS:
                raise InputError(
                    f"costates are selected by module, call, layer or direction; got {name!r}."
                )
        found = [
            lam for lam in self if all(getattr(lam.trajectory, n) == v for n, v in where.items())
        ]
        if not found:
            raise InputError(
                f"no costates of {where}; there are those of "
                + "; ".join(map(describe_place, self))
                + "."
            )
        return Recorded(found, self.loss)

    @property
    def layers(self) -> Sequence[Costates]:
        """Those of each layer and direction."""
        return self.items

    def forwards(self) -> Costates:
        """The layers of the first module that read forwards, as one; of an encoder and a decoder, the encoder's."""
        first: Any = self.items[0].trajectory
        return self.select(module=first.module, call=first.call, direction="forward").joined()

    def joined(self) -> Costates:
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
        units = [
            torch.where(k == NO_EXPONENT, NO_EXPONENT, lam.powers)
            for k, lam in zip(e, self.items, strict=True)
        ]
        top = functools.reduce(torch.maximum, units)
        top = torch.where(top == NO_EXPONENT, 0, top).to(self.items[0].powers.dtype)
        rows = torch.cat([scale(lam.rows, (lam.powers - top)[:, None]) for lam in self.items], 1)
        run = JoinedRun([lam.trajectory.run for lam in self.items])
        shown = [lam.trajectory.visible_states for lam in self.items]
        return Costates(
            JoinedLayers(first.layout, run, first.hidden, shown), rows, top, self.items[0].loss
        )

    def whole(self) -> Costates:
        """The old name of `joined`, until 1.0."""
        warnings.warn(
            "Recorded.whole() is now called joined(); the old name goes in 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.joined()


@dataclass(frozen=True, eq=False)
class JoinedLayers(RecurrenceRun):
    """Several layers as one."""

    parts: Sequence[Tensor]  # what each shows

    @property
    def visible_states(self) -> Tensor:
        return torch.cat(list(self.parts), 2)


@dataclass(frozen=True, eq=False)
class JoinedRun(RunView):
    """The runs of several layers as one: their states side by side."""

    runs: Sequence[SweepRun]

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


def describe_place(lam: Costates) -> str:
    at: Any = lam.trajectory
    call = f"{at.module or 'the module'}, call {at.call}, " if at.module or at.call else ""
    return f"{call}layer {at.layer}, {at.direction}"


def pull_back(
    ys: Sequence[Tensor], xs: Sequence[Tensor], gs: Sequence[Tensor], again: bool
) -> Sequence[Tensor | None]:
    return torch.autograd.grad(ys, xs, gs, create_graph=again, retain_graph=True, allow_unused=True)


def costates_through_layers(
    layout: Layout,
    levels: Sequence[Layer],
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
    arriving: list[ScaledSource] = [] if g is None else [(g, None)]  # at y, in units of the steps
    for layer in reversed(range(len(levels))):
        level, found = levels[layer], []
        sources: list[list[ScaledSource]] = [[] for _ in level.directions]
        for s, k in arriving:
            for piece, own, by_x in zip(
                level.directions,
                sources,
                pull_back([level.y], [p.run.x for p in level.directions], [s], again),
                strict=True,
            ):
                if by_x is not None:
                    turn = rows.reverse_time if piece.turned else lambda k: k
                    own.append((by_x, None if k is None else steps_to_states(rows, turn(k))))
        with torch.set_grad_enabled(again):
            for piece, own, s_last in zip(level.directions, sources, g_last[layer], strict=True):
                run = piece.run.with_checks()  # whatever the module lets through
                costate = costate_from_sources(rows, run, own, s_last)
                if costate is not None:
                    found.append((piece, run, costate))
            named = [
                name_costates(layout, where(layer, DIRECTIONS[each[0].turned]), *each, loss)
                for each in found
            ]
            items = named + items
        if layer == 0:
            break
        below = levels[layer - 1].y
        sent = arriving if level.residual else []
        for piece, _, costate in found:
            with torch.set_grad_enabled(again):
                driven = list(zip(piece.drive, costate.drive(), strict=True))
            pairs = [(y, gy) for y, gy in driven if y.requires_grad and gy is not None]
            down_here = (
                pull_back([y for y, _ in pairs], [below], [gy for _, gy in pairs], again)[0]
                if pairs
                else None
            )
            if down_here is not None:
                k = costate.exponent[rows.B :]
                sent = [*sent, (down_here, rows.reverse_time(k) if piece.turned else k)]
        arriving = sent
    if not again:
        for piece in (p for level in levels for p in level.directions):
            piece.run.settle()
    return items


def name_costates(
    layout: Layout,
    names: tuple[Any, ...],
    piece: DirectionRun,
    run: SweepRun,
    costate: CostateRows,
    loss: Tensor,
) -> Costates:
    """What is found, by its names."""
    lam, rows = costate.mantissa, layout.rows
    if piece.mask is not None:
        masked = DroppedOutRun(
            run, torch.cat([piece.mask, piece.mask.index_select(0, rows.sample.to(lam.device))])
        )
        run, lam = masked, masked.seen(lam)
    return Costates(
        LayerRun(layout, run, piece.hidden, *names), lam, costate.exponent, loss.to(lam.dtype)
    )


def steps_to_states(rows: Rows, k: Tensor) -> Tensor:
    """What steps have, [N], for the states: x_0 has that of the first step."""
    return torch.cat([k[: rows.B], k])


def costate_from_sources(
    rows: Rows, run: SweepRun, sources: list[ScaledSource], s_last: Tensor | None
) -> CostateRows | None:
    """The costate that the sources make; None if there are none.

    Sources in different units are added up in that of the costate they make. It is that of the largest of them, unless the
    layer forgets more slowly than those above it: then what is found says which."""
    if all(k is None for _, k in sources):  # at true scale: one source at most
        s = sources[0][0] if sources else None
        read = None if s is None else exponent(s.detach()) != NO_EXPONENT
        return None if s is None and s_last is None else run.costate(s, s_last, read)
    true = torch.zeros(len(run.x), dtype=torch.int32, device=run.x.device)
    scaled = [(s, true if k is None else k) for s, k in sources]
    room, powers = SAFE_EXPONENT[run.x.dtype], [(exponent(s.detach()), k) for s, k in scaled]
    size = functools.reduce(
        torch.maximum, [torch.where(e == NO_EXPONENT, NO_EXPONENT, e + k) for e, k in powers]
    )
    if s_last is not None:
        own = rows.last(size)
        size = (
            size
            + rows.last_transposed((torch.maximum(own, exponent(s_last.detach())) - own)[:, None])[
                :, 0
            ]
        )

    def attempt(size: Tensor) -> tuple[Tensor, CostateRows]:
        unit = units_of_bounded_fall(rows, size, room)
        shifts = [
            torch.where((e == NO_EXPONENT) & (k - unit > room), NO_EXPONENT, k - unit)[:, None]
            for e, k in powers
        ]
        s = functools.reduce(
            torch.add, [scale(s, shift) for (s, _), shift in zip(scaled, shifts, strict=True)]
        )
        own = None if s_last is None else scale(s_last, -rows.last(unit)[:, None])
        return unit, run.costate(s, own, None, unit)

    unit, found = attempt(size)
    e = exponent(found.mantissa.detach())
    if torch.where(e == NO_EXPONENT, 0, found.exponent - unit).abs().max() > room:
        _, found = attempt(torch.where(e == NO_EXPONENT, NO_EXPONENT, e + found.exponent))
    return found


def units_of_bounded_fall(rows: Rows, unit: Tensor, fall: int) -> Tensor:
    """Units at least as large that never fall by more than 2^fall from a state to the one before it, so that the links
    between them stay in range. A state without one (NONE) has the unit of the state after it."""
    dense = Layout(rows, None).padded_states(unit, NO_EXPONENT)
    ramp = torch.where(dense == NO_EXPONENT, 0, fall).flip(0).cumsum(0)
    found = (dense.flip(0) + ramp).cummax(0).values - ramp
    return rows.flatten_states(torch.where(found > NO_EXPONENT // 2, found, 0).flip(0)).to(
        unit.dtype
    )

"""Costates through several layers.

A stack, or a module of co.nn, is a sequence of sweeps. The loss's gradient enters at the output of
the top layer and at the last states; each layer then sends a gradient down to the layer below it.
It travels in units of powers of two (networks/scaled_sources.py), so that it cannot vanish.

Layer, DirectionRun   what a layer of a stack leaves behind for its costates
LayerRun              the states of one layer in one direction, named by their place
Recorded              the costates of all layers, joined and selected
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError, Unsupported
from ..objectives.penalties import PARTS
from ..sweeps.costates import Costates, RecurrenceRun
from ..sweeps.layout import Layout
from ..sweeps.rows import NO_EXPONENT, Rows, exponent, scale
from ..sweeps.run import CostateRows, RunView, SweepRun
from ..sweeps.torch_internals import innermost_transform
from .effective_weights import InputWeights
from .scaled_sources import ScaledSource, costate_from_sources, steps_to_states
from .shortcuts import Shortcut

DIRECTIONS = ("forward", "reverse")
Place = tuple[str, int, int, str]  # module, call, layer and direction of a LayerRun


@dataclass(frozen=True, eq=False)
class LayerRun(RecurrenceRun):
    """The states of one layer in one direction.

    Time runs in the direction of reading: a layer with direction "reverse" begins at the end of
    the sequence.
    """

    module: str  # its name inside the recorded module; "" for that module itself
    call: int  # the number of the module's call, from 0
    layer: int
    direction: str  # "forward" or "reverse"


@dataclass(frozen=True, eq=False)
class DirectionRun:
    """The sweep of a layer in one direction."""

    run: SweepRun
    drive: Sequence[Tensor]  # what the inputs added to its steps
    hidden: int
    reverse: bool
    project: Tensor | None = None  # of an LSTM with projections
    mask: Tensor | None = None  # of recurrent dropout, [B, d]
    input_weights: InputWeights | None = None  # those that made the drive; None: a step function
    slot_names: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Layer:
    """The sweeps of a layer and its output."""

    directions: list[DirectionRun]
    y: Tensor  # the output in step rows: visible states, with the output below by the shortcut
    shortcut: Shortcut | None = None
    mask: Tensor | None = None  # the dropout mask of what the layer receives


@dataclass(frozen=True, eq=False)
class DroppedOutRun(RunView):
    """A run under recurrent dropout, seen without its last slot.

    The last slot r = m h holds the masked copy of h that the next step reads. It is h by another
    name, so it is not counted as a part of the state.
    """

    run: SweepRun
    mask: Tensor  # m, [B + N, d]

    @property
    def x(self) -> Tensor:
        """The states without r."""
        return self.run.x[:, : -self.mask.shape[1]]

    @property
    def last(self) -> Tensor:
        """Each sample's last state without r."""
        return self.run.last[:, : -self.mask.shape[1]]

    def fold_mask(self, lam: Tensor) -> Tensor:
        """Costates by h with the path through r: lam^h + m lam^r, then the other slots.

        lam is given by state rows or step rows, and returned without the slot r.
        """
        d = self.mask.shape[1]
        m = self.mask[-len(lam) :]  # step rows are the last N of the B + N state rows
        return torch.cat([lam[:, :d] + m * lam[:, -d:], lam[:, d:-d]], 1)

    def pull(self, lam: Tensor) -> Tensor:
        """J_t' lam_t for all steps at once, J_t = dx_t/dx_{t-1} of the state x without r."""
        # The loss never reads r itself, so zeros stand for lam^r.
        return self.fold_mask(self.run.pull(pad(lam, (0, self.mask.shape[1]))))


def refuse_transforms() -> None:
    """Refuse torch.func's transforms, which cannot see gradients taken by torch.autograd."""
    if innermost_transform() is not None:
        raise Unsupported(
            "costates of several layers are computed by torch.autograd, which torch.func's "
            "transforms cannot see. Use backward() or torch.autograd.grad, or co.Network."
        )


def require_gradient(u: Tensor) -> Tensor:
    """The input u of a recorded layer, as a tensor that requires a gradient.

    Costates are taken from a graph, which must exist even if no weight is trained. Without
    gradients (torch.no_grad) u is returned as it is.
    """
    refuse_transforms()
    if u.requires_grad or not torch.is_grad_enabled():
        return u
    return u.detach().requires_grad_()


class Recorded(Sequence[Costates]):
    """The costates of several layers: one Costates for each call, layer and direction.

    They come in the order of the calls, in each from the first layer up. `lam.trajectory` of each
    has its module, call, layer and direction, by which `select` chooses.

    Example:
        >>> import torch, coadjoint as co
        >>> net = co.Stack(["elman", "gru"], inputs=1, hidden=4, outputs=1)
        >>> lam = net(torch.zeros(5, 2, 1)).costates("squared", torch.zeros(2, 1))
        >>> lam
        <costates of layer 0, forward; layer 1, forward>
        >>> lam.select(layer=1)[0].lam.shape, lam.joined().lam.shape
        (torch.Size([6, 2, 4]), torch.Size([6, 2, 8]))
    """

    def __init__(self, items: Sequence[Costates], loss: Tensor, run: object = None) -> None:
        self.items = tuple(items)
        self.loss = loss
        self.run = run  # of the whole network, if there is one

    @overload
    def __getitem__(self, i: int) -> Costates: ...
    @overload
    def __getitem__(self, i: slice) -> Recorded: ...
    def __getitem__(self, i: int | slice) -> Costates | Recorded:
        if isinstance(i, slice):
            return Recorded(self.items[i], self.loss, self.run)
        return self.items[i]

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        return "<costates of " + "; ".join(map(describe_place, self.items)) + ">"

    def detach(self) -> Recorded:
        """The same costates without their graph."""
        return Recorded([lam.detach() for lam in self.items], self.loss.detach(), self.run)

    def select(self, **where: object) -> Recorded:
        """The costates of module=, call=, layer=, direction= ("forward" or "reverse").

        A selection that matches nothing is refused.
        """
        for name in where:
            if name not in PARTS:
                raise InputError(
                    f"costates are selected by module, call, layer or direction; got {name!r}."
                )
        matching: list[Costates] = []
        for lam in self:
            run = lam.trajectory
            if all(getattr(run, name) == value for name, value in where.items()):
                matching.append(lam)
        if not matching:
            places = "; ".join(map(describe_place, self))
            raise InputError(f"no costates match {where}; recorded: {places}.")
        return Recorded(matching, self.loss, self.run)

    @property
    def layers(self) -> Sequence[Costates]:
        """The costates of each layer and direction."""
        return self.items

    def forwards(self) -> Costates:
        """The costates of the forward layers in the first recorded call, joined into one.

        The first call of an encoder-decoder is that of its encoder.
        """
        first = layer_run(self.items[0])
        return self.select(module=first.module, call=first.call, direction="forward").joined()

    def joined(self) -> Costates:
        """The costates of all layers as one: lam_t of a state that holds the layers' side by side.

        All must be of one call and one direction: at one step, the states of two directions depend
        on different parts of the sequence.
        """
        if not self.items:
            raise InputError("there are no costates to join.")
        first = layer_run(self.items[0])
        for lam in self.items:
            run = layer_run(lam)
            if (run.direction, run.call, run.module) != (first.direction, first.call, first.module):
                raise Unsupported(
                    "only costates of one call and one direction can be joined. Use "
                    "select(direction='forward'), and module= and call= if there are several."
                )
        # One unit for each state: the largest of the layers' units, zero costates left out.
        units: list[Tensor] = []
        for lam in self.items:
            is_zero = exponent(lam.rows.detach()) == NO_EXPONENT
            units.append(torch.where(is_zero, NO_EXPONENT, lam.powers))
        unit = functools.reduce(torch.maximum, units)
        unit = torch.where(unit == NO_EXPONENT, 0, unit).to(self.items[0].powers.dtype)
        rows = torch.cat([scale(lam.rows, (lam.powers - unit)[:, None]) for lam in self.items], 1)
        run_of_all = JoinedRun([lam.trajectory.run for lam in self.items])
        layers = [lam.trajectory for lam in self.items]
        trajectory = JoinedLayers(first.layout, run_of_all, first.hidden, layers)
        return Costates(trajectory, rows, unit, self.items[0].loss)

    def whole(self) -> Costates:
        """The old name of `joined`, until 1.0."""
        warnings.warn(
            "Recorded.whole() is now called joined(); the old name will be removed in 1.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.joined()


@dataclass(frozen=True, eq=False)
class JoinedLayers(RecurrenceRun):
    """The states of several layers as one state."""

    layers: Sequence[RecurrenceRun]

    @property
    def visible_states(self) -> Tensor:
        """The visible states of all layers side by side, [T + 1, B, .]."""
        return torch.cat([layer.visible_states for layer in self.layers], 2)

    def slot_columns(self, names: Sequence[str]) -> list[slice]:
        """The entries of the slots with these names in every layer."""
        columns: list[slice] = []
        begin = 0  # of a layer's entries in the state of all
        for layer in self.layers:
            own = layer.slot_columns(names)
            columns += [slice(begin + each.start, begin + each.stop) for each in own]
            begin += layer.run.x.shape[1]
        return columns


@dataclass(frozen=True, eq=False)
class JoinedRun(RunView):
    """The runs of several layers as one, with their states side by side."""

    runs: Sequence[SweepRun]

    @property
    def x(self) -> Tensor:
        """The states of all layers, [B + N, n]."""
        return torch.cat([run.x for run in self.runs], 1)

    @property
    def last(self) -> Tensor:
        """Each sample's last states of all layers, [B, n]."""
        return torch.cat([run.last for run in self.runs], 1)

    def pull(self, lam: Tensor) -> Tensor:
        """Refused: the Jacobian of one step has entries between layers, which no sweep knows."""
        raise Unsupported(
            "this penalty needs the Jacobian of one layer's step. Use it on each layer, not on "
            "the layers joined (on='whole')."
        )


def layer_run(lam: Costates) -> LayerRun:
    """The run that these costates belong to; they must be of one layer, not joined."""
    run = lam.trajectory
    assert isinstance(run, LayerRun)
    return run


def describe_place(lam: Costates) -> str:
    """The place of costates in words: "encoder, call 0, layer 1, forward"."""
    run = layer_run(lam)
    place = f"layer {run.layer}, {run.direction}"
    if run.module or run.call:
        return f"{run.module or 'the module'}, call {run.call}, {place}"
    return place


def pull_back(
    ys: Sequence[Tensor], xs: Sequence[Tensor], gs: Sequence[Tensor], create_graph: bool
) -> Sequence[Tensor | None]:
    """sum_i gs_i' dys_i/dxs_j for each j; None where no y depends on x_j.

    The graph is kept for further calls. create_graph: the result can be differentiated again.
    """
    return torch.autograd.grad(
        ys, xs, gs, create_graph=create_graph, retain_graph=True, allow_unused=True
    )


class FoundCostate(NamedTuple):
    """The costate of one direction of a layer."""

    direction: DirectionRun
    run: SweepRun  # that of the direction, with the checks that costates need
    costate: CostateRows


def costates_through_layers(
    layout: Layout,
    layers: Sequence[Layer],
    g: Tensor | None,
    g_last: Sequence[Sequence[Tensor | None]],
    loss: Tensor,
    create_graph: bool,
    place_of: Callable[[int, str], Place],
) -> list[Costates]:
    """The costates of all layers and directions, in the order of the layers, the first layer first.

    g             the loss's gradient by the output of the top layer, in step rows; None: zero
    g_last        its gradient by the last states of each layer and direction, [B, n]; None: zero
    loss          of each sample, [B]
    create_graph  the costates can be differentiated again
    place_of      (layer, direction) -> the place to record
    """
    costates: list[Costates] = []
    arriving: list[ScaledSource] = []  # gradients by the output of the present layer
    if g is not None:
        arriving.append((g, None))
    for index in reversed(range(len(layers))):
        layer = layers[index]
        found_costates = _sweep_layer(layout.rows, layer, arriving, g_last[index], create_graph)
        named: list[Costates] = []
        with torch.set_grad_enabled(create_graph):
            for found in found_costates:
                place = place_of(index, DIRECTIONS[found.direction.reverse])
                named.append(name_costates(layout, place, found, loss))
        costates = named + costates
        if index > 0:
            below = layers[index - 1].y
            sent = _send_down(layout.rows, found_costates, below, create_graph)
            if layer.shortcut is not None:  # the layer's output contains the output below
                with torch.set_grad_enabled(create_graph):
                    passed = [(layer.shortcut.to_below(s), unit) for s, unit in arriving]
                sent = [*passed, *sent]
            arriving = sent
    # A backward pass makes the sweeps' checks; without a graph there will be none.
    if not create_graph:
        for layer in layers:
            for direction_run in layer.directions:
                direction_run.run.settle()
    return costates


def _sweep_layer(
    rows: Rows,
    layer: Layer,
    arriving: Sequence[ScaledSource],
    g_last: Sequence[Tensor | None],
    create_graph: bool,
) -> list[FoundCostate]:
    """The costates of a layer's directions, without those that no gradient reaches.

    arriving  (s, unit): the loss's gradients s 2^unit by the layer's output, in step rows; unit
              None is 0
    g_last    its gradients by the last states [B, n], one for each direction; None: zero
    """
    states = [direction.run.x for direction in layer.directions]
    sources: list[list[ScaledSource]] = [[] for _ in layer.directions]  # gradients by states
    for by_y, unit in arriving:
        by_states = pull_back([layer.y], states, [by_y], create_graph)
        for direction, its_sources, by_x in zip(layer.directions, sources, by_states, strict=True):
            if by_x is None:
                continue
            if unit is None:
                its_sources.append((by_x, None))
                continue
            # The states of the reverse direction begin at the end of the sequence.
            read_unit = rows.reverse_time(unit) if direction.reverse else unit
            its_sources.append((by_x, steps_to_states(rows, read_unit)))
    found: list[FoundCostate] = []
    with torch.set_grad_enabled(create_graph):
        for direction, its_sources, s_last in zip(layer.directions, sources, g_last, strict=True):
            # A module of co.nn may let states out of range pass; its costates must not.
            run = direction.run.with_checks()
            costate = costate_from_sources(rows, run, its_sources, s_last)
            if costate is not None:
                found.append(FoundCostate(direction, run, costate))
    return found


def _send_down(
    rows: Rows, found: Sequence[FoundCostate], below: Tensor, create_graph: bool
) -> list[ScaledSource]:
    """The gradients s 2^unit by `below`, the output of the layer underneath, in step rows.

    There is one pair (s, unit) for each direction whose drive depends on `below`.
    """
    sent: list[ScaledSource] = []
    for direction, _, costate in found:
        with torch.set_grad_enabled(create_graph):
            by_drive = costate.drive()
        driven: list[Tensor] = []
        gradients: list[Tensor] = []
        for drive, gradient in zip(direction.drive, by_drive, strict=True):
            if drive.requires_grad and gradient is not None:
                driven.append(drive)
                gradients.append(gradient)
        if not driven:
            continue
        (by_below,) = pull_back(driven, [below], gradients, create_graph)
        if by_below is not None:
            unit = costate.exponent[rows.B :]
            sent.append((by_below, rows.reverse_time(unit) if direction.reverse else unit))
    return sent


def name_costates(layout: Layout, place: Place, found: FoundCostate, loss: Tensor) -> Costates:
    """The costates of one direction of a layer, named by their place; loss of each sample, [B].

    The last slot of recurrent dropout, a masked copy of h, is folded into h.
    """
    direction, run, costate = found
    lam = costate.mantissa
    if direction.mask is not None:
        mask_of_steps = direction.mask.index_select(0, layout.rows.sample.to(lam.device))
        dropped_out = DroppedOutRun(run, torch.cat([direction.mask, mask_of_steps]))
        lam = dropped_out.fold_mask(lam)
        run = dropped_out
    trajectory = LayerRun(layout, run, direction.hidden, *place, slot_names=direction.slot_names)
    return Costates(trajectory, lam, costate.exponent, loss.to(lam.dtype))

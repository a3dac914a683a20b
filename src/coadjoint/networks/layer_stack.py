"""Layers: recurrences on top of each other, in one direction or both.

y^0   = u
x^l   = the states of layer l, driven by y^{l-1} (after dropout, during training)
y^l   = h^l, the visible part of x^l; both directions side by side if bidirectional;
        y^{l-1} + h^l if residual, P^l y^{l-1} + h^l where their widths differ;
        [y^{l-1}, h^l] if dense; layers above the first are then driven by [u, y^{l-1}]
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..cells import library, steps
from ..cells.activations import Activation
from ..cells.cell import Cell
from ..errors import InputError, KindError, OptionError
from ..sweeps.layout import Layout, check_like
from ..sweeps.rows import Rows
from .effective_weights import without_biases
from .interface import check_positive
from .layers import DIRECTIONS, DirectionRun, Layer, require_gradient
from .readout import check_dropout, draw_dropout_mask
from .recurrence import Recurrence
from .shortcuts import Added, Joined, Projected, Shortcut
from .text import compact_repr

# A cell's name, a cell, a module, or a function (inputs, hidden) -> one of these or a step.
CellLike = str | Cell | nn.Module | Callable[..., object]
SWITCHES = ("bidirectional", "residual", "dense")  # of all layers, on or off


def option_names(cell: CellLike) -> Sequence[str]:
    """The names of the options of a cell given by name; others take none."""
    if not isinstance(cell, str):
        return ()
    return list(steps.options(cell) if cell in steps.STEPS else library.options(cell))


def make_cell(cell: CellLike, inputs: int, hidden: int) -> str | Cell | nn.Module | CellLike:
    """A name, cell or module as it is, or what a function (inputs, hidden) -> cell returns."""
    if isinstance(cell, str | Cell | nn.Module):
        return cell
    if not callable(cell):
        raise KindError(
            "a layer is a cell's name, a cell made with @co.cell, a module, or a function "
            f"(inputs, hidden) -> step; got {cell!r}."
        )
    return cast(CellLike, cell(inputs, hidden))  # Recurrence refuses anything else


class Layers(nn.Module):
    """The recurrences of a stack; arguments as in Stack.

    levels  the recurrences by layer and direction
    widths  the number of entries of y^1, ..., y^L
    P       the projections of residual layers that are not as wide as the layer below, by layer and
            direction: P["1"][0].weight is that of layer 1, forward
    n       the number of entries of all states: layer by layer, the forward direction first
    """

    __repr__ = compact_repr

    def __init__(
        self,
        cells: Sequence[CellLike],
        *,
        inputs: int,
        hidden: int | Sequence[int],
        bidirectional: bool,
        residual: bool,
        dense: bool,
        dropout: float,
        activation: Activation | None,
        x0: str,
        bias: bool,
        structure: str | None,
        engine: str,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        **options: object,
    ) -> None:
        super().__init__()
        units = _units_of_layers(cells, inputs, hidden)
        switches = {"bidirectional": bidirectional, "residual": residual, "dense": dense}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise KindError(f"{name} must be True or False; got {value!r}.")
        if residual and dense:
            raise OptionError(
                "$residual adds the output of the layer below, $dense puts it beside the layer's "
                "own: choose one."
            )
        self.dropout = check_dropout(dropout, "the outputs between layers")
        self.residual = residual
        self.dense = dense
        self.bidirectional = bidirectional
        _refuse_unknown_options(cells, activation, options)
        self.widths: list[int] = []
        self.levels = nn.ModuleList()
        for cell, d in zip(cells, units, strict=True):
            if bidirectional and isinstance(cell, nn.Module):
                raise InputError(
                    "a module has one set of weights, which both directions would share. Name the "
                    "cell, or give a function (inputs, hidden) -> step that makes one for each "
                    "direction."
                )
            known = option_names(cell)
            width_below = self._width_read(inputs)
            directions: list[Recurrence] = []
            for _ in range(2 if bidirectional else 1):
                recurrence = Recurrence(
                    make_cell(cell, width_below, d),
                    inputs=width_below,
                    hidden=d,
                    activation=activation if "activation" in known else None,
                    x0=x0,
                    bias=bias,
                    mask=None,
                    structure=structure,
                    engine=engine,
                    slots=None,
                    dtype=dtype,
                    device=device,
                    **{name: value for name, value in options.items() if name in known},
                )
                directions.append(recurrence)
            self.levels.append(nn.ModuleList(directions))
            width = sum(recurrence.visible_width for recurrence in directions)
            self.widths.append(width + self.widths[-1] if dense and self.widths else width)
        self.n = sum(recurrence.n for recurrence in self)
        self.P = nn.ModuleDict()
        if residual:
            self._make_projections(next(iter(self)).x0)

    def _width_read(self, inputs: int) -> int:
        """The number of entries that the next layer above those made so far reads."""
        if not self.widths:
            return inputs
        return self.widths[-1] + inputs if self.dense else self.widths[-1]

    def _make_projections(self, like: Tensor) -> None:
        """Make P of each layer whose width is not that of the layer below.

        Each direction has its own, so that both have an end: see `top_at_end`.

        like  a tensor with the dtype and device of the network
        """
        directions = 1 + self.bidirectional
        for index, (below, width) in enumerate(itertools.pairwise(self.widths), start=1):
            if below == width:
                continue
            by_direction = nn.ModuleList()
            for _ in range(directions):
                sizes = (below // directions, width // directions)
                P = nn.Linear(*sizes, bias=False, dtype=like.dtype, device=like.device)
                by_direction.append(P)
            self.P[str(index)] = by_direction

    def reset_parameters(self) -> None:
        """Draw all parameters again, as the constructor does; a learned x0 becomes zero."""
        for recurrence in self:
            recurrence.reset_parameters()
        for P in self.P.modules():
            if isinstance(P, nn.Linear):
                P.reset_parameters()

    def shortcut(self, index: int) -> Shortcut | None:
        """How the output of a layer contains that of the layer below; None if it does not."""
        if index == 0:
            return None
        if self.dense:
            return Joined(self.widths[index - 1])
        if not self.residual:
            return None
        if str(index) not in self.P:
            return Added()
        weights = list(self.P[str(index)].parameters())
        return Projected(weights[0] if len(weights) == 1 else torch.block_diag(*weights))

    @property
    def by_layer(self) -> list[list[Recurrence]]:
        """The recurrences by layer and direction."""
        levels: list[list[Recurrence]] = []
        for level in self.levels:
            levels.append(list(cast(Sequence[Recurrence], level)))
        return levels

    def __iter__(self) -> Iterator[Recurrence]:
        for layer in self.by_layer:
            yield from layer

    def initial_states(self, x0: Tensor | None, B: int) -> list[Tensor]:
        """The first state of each recurrence, [B, n_l]; x0 [B, n] or [n] holds all side by side."""
        if x0 is None:
            return [recurrence.initial_state(None, B) for recurrence in self]
        check_like("x0", x0, next(iter(self)).x0)
        if tuple(x0.shape) not in ((B, self.n), (self.n,)):
            raise InputError(
                f"x0 has shape {list(x0.shape)}; expected [{B}, {self.n}] or [{self.n}]: the "
                "states of all layers."
            )
        parts = x0.split([recurrence.n for recurrence in self], -1)
        pairs = zip(self, parts, strict=True)
        return [recurrence.initial_state(part, B) for recurrence, part in pairs]

    def run(self, layout: Layout, u: Tensor, x0: Tensor | None) -> list[Layer]:
        """The sweeps of all layers over step rows u [N, inputs], from the first layer up.

        x0  the first states of all layers side by side, [B, n] or [n]; None: their own
        """
        rows = layout.rows
        starts = iter(self.initial_states(x0, rows.B))
        y = u
        if not any(p.requires_grad for p in self.levels[0].parameters()):
            y = require_gradient(y)  # costates exist even if no weight is trained
        layers: list[Layer] = []
        for index, recurrences in enumerate(self.by_layer):
            received = y
            mask = None
            if index > 0 and self.dropout and self.training:
                mask = draw_dropout_mask(self.dropout, y.shape, y)
                received = y * mask
            if index > 0 and self.dense:
                received = torch.cat([u, received], 1)
            directions: list[DirectionRun] = []
            visible: list[Tensor] = []
            # There is one recurrence, "forward", or a second one, "reverse".
            for recurrence, direction in zip(recurrences, DIRECTIONS, strict=False):
                reverse = direction == "reverse"
                read = rows.reverse_time(received) if reverse else received
                run, drive, input_weights = recurrence.sweep(layout, read, next(starts))
                h = recurrence.visible_state(run.x[rows.B :])
                visible.append(rows.reverse_time(h) if reverse else h)
                parts = [part for part in drive if part is not None]
                direction_run = DirectionRun(
                    run,
                    parts,
                    recurrence.hidden,
                    reverse,
                    input_weights=input_weights,
                    slot_names=recurrence.slot_names,
                )
                directions.append(direction_run)
            h = torch.cat(visible, 1)
            shortcut = self.shortcut(index)
            y = h if shortcut is None else shortcut.combine(h, y)
            layers.append(Layer(directions, y, shortcut, mask))
        return layers

    def push(self, rows: Rows, layers: Sequence[Layer], du: Tensor) -> tuple[Tensor, Tensor]:
        """The changes of y^L and of `top_at_end` along a change du [N, inputs] of the inputs."""
        dy = du
        at_end: list[Tensor] = []
        for index, layer in enumerate(layers):
            recurrences = self.by_layer[index]
            received = dy if layer.mask is None else dy * layer.mask
            if index > 0 and self.dense:
                received = torch.cat([du, received], 1)
            visible: list[Tensor] = []
            last: list[Tensor] = []
            for recurrence, direction in zip(recurrences, layer.directions, strict=True):
                read = rows.reverse_time(received) if direction.reverse else received
                drive = recurrence.drive(read, without_biases(direction.input_weights))
                dx = direction.run.push(*drive)
                dh = recurrence.visible_state(dx[rows.B :])
                visible.append(rows.reverse_time(dh) if direction.reverse else dh)
                last.append(recurrence.visible_state(rows.last(dx)))
            dh = torch.cat(visible, 1)
            dy = dh if layer.shortcut is None else layer.shortcut.combine(dh, dy)
            at_end.append(torch.cat(last, 1))
        return dy, combine_layers(layers, at_end)

    def output_parts(self) -> list[tuple[int, bool]]:
        """(the number of entries, whether they are of direction "reverse") of each part of y^L."""
        shown = self.by_layer if self.dense else self.by_layer[-1:]
        parts: list[tuple[int, bool]] = []
        for recurrences in shown:
            for index, recurrence in enumerate(recurrences):
                parts.append((recurrence.visible_width, index == 1))
        return parts

    def last_visible_states(self, layers: Sequence[Layer]) -> list[Tensor]:
        """The visible state of each layer after the last step of each of its directions.

        [B, width] in the order of the rows, both directions side by side.
        """
        by_layer: list[Tensor] = []
        for recurrences, layer in zip(self.by_layer, layers, strict=True):
            visible: list[Tensor] = []
            for recurrence, direction in zip(recurrences, layer.directions, strict=True):
                visible.append(recurrence.visible_state(direction.run.last))
            by_layer.append(torch.cat(visible, 1))
        return by_layer

    def top_at_end(self, layers: Sequence[Layer]) -> Tensor:
        """y^L after the last step of each direction, [B, widths[-1]] in the order of the rows.

        The last step of the reverse direction is the first one of the sequence.
        """
        return combine_layers(layers, self.last_visible_states(layers))

    def last_state_gradients(
        self, layers: Sequence[Layer], g: Tensor | None
    ) -> list[list[Tensor | None]]:
        """The loss's gradient by the last states [B, n_l], by layer and direction.

        g is its gradient by `top_at_end`, [B, widths[-1]]. The result is None everywhere if g is
        None, and for layers below the top unless shortcuts lead to it.
        """
        gradients: list[list[Tensor | None]] = []
        for recurrences, layer in zip(reversed(self.by_layer), reversed(layers), strict=True):
            if g is None:
                gradients.insert(0, [None] * len(recurrences))
                continue
            own = g if layer.shortcut is None else layer.shortcut.to_own(g)
            parts = own.split([recurrence.visible_width for recurrence in recurrences], 1)
            by_direction: list[Tensor | None] = []
            for recurrence, part in zip(recurrences, parts, strict=True):
                by_direction.append(recurrence.visible_state_transpose(part))
            gradients.insert(0, by_direction)
            g = None if layer.shortcut is None else layer.shortcut.to_below(g)
        return gradients


def combine_layers(layers: Sequence[Layer], visible: Sequence[Tensor]) -> Tensor:
    """The output of the top layer from what each layer shows, [., widths[-1]].

    visible  h^1, ..., h^L at one step of each direction, or their changes
    """
    y = visible[0]
    for layer, h in zip(layers[1:], visible[1:], strict=True):
        y = h if layer.shortcut is None else layer.shortcut.combine(h, y)
    return y


def _units_of_layers(
    cells: Sequence[CellLike], inputs: int, hidden: int | Sequence[int]
) -> list[int]:
    """The units of each layer; refused unless `cells` is a list and `hidden` fits it."""
    if isinstance(cells, str) or not isinstance(cells, Sequence) or not cells:
        raise KindError(f"a stack takes a list of cells, from the input up; got {cells!r}.")
    if not isinstance(hidden, int | list | tuple):
        raise KindError(f"hidden must be an integer or a list of integers; got {hidden!r}.")
    units = [hidden] * len(cells) if isinstance(hidden, int) else list(hidden)
    check_positive(inputs=inputs, **{f"hidden[{i}]": d for i, d in enumerate(units)})
    if len(units) != len(cells):
        raise InputError(
            f"{len(cells)} layers have hidden={hidden!r}; expected one number, or one for each "
            "layer."
        )
    return units


def _refuse_unknown_options(
    cells: Sequence[CellLike], activation: Activation | None, options: dict[str, object]
) -> None:
    """Refuse options that no layer has."""
    known = {name for cell in cells for name in option_names(cell)}
    names = [*options] if activation is None else ["activation", *options]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise KindError(f"no layer of this stack has an option {', '.join(unknown)}.")

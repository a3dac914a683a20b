"""Layers: recurrences on top of each other, in one direction or both.

y^0   = u
x^l   = the states of layer l, driven by y^{l-1} (after dropout, during training)
y^l   = h^l, the visible part of x^l; both directions side by side if bidirectional;
        y^{l-1} + h^l if residual
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ..cells import library, steps
from ..cells.activations import Activation
from ..cells.cell import Cell
from ..errors import InputError, KindError
from ..sweeps.layout import Layout, check_like
from ..sweeps.rows import Rows
from .effective_weights import without_biases
from .interface import check_positive
from .layers import DIRECTIONS, DirectionRun, Layer, require_gradient
from .readout import check_dropout, draw_dropout_mask
from .recurrence import Recurrence

# A cell's name, a cell, a module, or a function (inputs, hidden) -> one of these or a step.
CellLike = str | Cell | nn.Module | Callable[..., object]


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
    n       the number of entries of all states: layer by layer, the forward direction first
    """

    def __init__(
        self,
        cells: Sequence[CellLike],
        *,
        inputs: int,
        hidden: int | Sequence[int],
        bidirectional: bool,
        residual: bool,
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
        for name, value in (("bidirectional", bidirectional), ("residual", residual)):
            if not isinstance(value, bool):
                raise KindError(f"{name} must be True or False; got {value!r}.")
        self.dropout = check_dropout(dropout, "the outputs between layers")
        self.residual = residual
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
            width_below = self.widths[-1] if self.widths else inputs
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
            self.widths.append(sum(recurrence.visible_width for recurrence in directions))
        if residual and len(set(self.widths)) > 1:
            raise InputError(
                "residual connections add the outputs of layers, which must then have the same "
                f"width; got {self.widths}. Give all layers the same units."
            )
        self.n = sum(recurrence.n for recurrence in self)

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
            is_residual = self.residual and index > 0
            h = torch.cat(visible, 1)
            y = h + y if is_residual else h
            layers.append(Layer(directions, y, is_residual, mask))
        return layers

    def push(self, rows: Rows, layers: Sequence[Layer], du: Tensor) -> tuple[Tensor, Tensor]:
        """The changes of y^L and of `top_at_end` along a change du [N, inputs] of the inputs."""
        dy = du
        at_end: list[Tensor] = []
        for recurrences, layer in zip(self.by_layer, layers, strict=True):
            received = dy if layer.mask is None else dy * layer.mask
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
            dy = dh + dy if layer.residual else dh
            at_end.append(torch.cat(last, 1))
        return dy, functools.reduce(torch.add, at_end) if self.residual else at_end[-1]

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
        visible = self.last_visible_states(layers)
        # With residual connections, y^L is the sum of all layers' visible states.
        return functools.reduce(torch.add, visible) if self.residual else visible[-1]

    def last_state_gradients(self, g: Tensor | None) -> list[list[Tensor | None]]:
        """The loss's gradient by the last states [B, n_l], by layer and direction.

        g is its gradient by `top_at_end`, [B, widths[-1]]. The result is None everywhere if g is
        None, and for layers below the top unless residual connections add them to it.
        """
        gradients: list[list[Tensor | None]] = []
        for index, recurrences in enumerate(self.by_layer):
            is_top = index + 1 == len(self.levels)
            if g is None or not (self.residual or is_top):
                gradients.append([None] * len(recurrences))
                continue
            parts = g.split([recurrence.visible_width for recurrence in recurrences], 1)
            by_direction: list[Tensor | None] = []
            for recurrence, part in zip(recurrences, parts, strict=True):
                by_direction.append(recurrence.visible_state_transpose(part))
            gradients.append(by_direction)
        return gradients


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

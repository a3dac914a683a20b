"""Stack: layers of recurrences on top of each other, in one direction or in both, and a readout of the top.

y^0   = u
x^l   = the states of layer l, driven by y^{l-1} (with dropout, in training)
y^l   = h^l, what layer l shows of x^l; [h^l forward, h^l reverse] if bidirectional; y^{l-1} + h^l if residual
a     = V y^L + D u + b_o,  y_hat = phi(a)

lam^l_t = dL/dx^l_t counts the way through the layers above as part of what the loss says to layer l at step t.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cells import library, steps
from ..cells.activations import Activation
from ..cells.cell import Cell
from ..errors import InputError, KindError
from ..objectives.batch import Batch
from ..objectives.losses import LossLike, Output
from ..sweeps.costates import RecurrenceRun
from ..sweeps.engines import Choice
from ..sweeps.layout import Layout, check_like, lay_out
from ..sweeps.wrappers import refuse_wrapper_around
from .interface import check_positive
from .judge import RunOutputs
from .layers import (
    DIRECTIONS,
    DirectionRun,
    Layer,
    LayerRun,
    Recorded,
    costates_through_layers,
    pull_back,
    refuse_transforms,
    require_gradient,
)
from .readout import DROPOUT_MASK, Readout, check_dropout, draw_dropout_mask
from .recurrence import Recurrence

CellLike = str | Cell | nn.Module | Callable[..., Any]


class Layers(nn.Module):
    """The recurrences of a stack: arguments as in Stack.

    `widths` are the entries of y^1, ..., y^L, `n` those of all states together: layer by layer, in each the forward one first."""

    def __init__(
        self,
        kinds: Sequence[CellLike],
        *,
        inputs: int,
        hidden: int | Sequence[int],
        bidirectional: bool,
        residual: bool,
        dropout: float,
        activation: Activation | None,
        **given: Any,
    ) -> None:
        super().__init__()
        if isinstance(kinds, str) or not isinstance(kinds, Sequence) or not kinds:
            raise KindError(
                f"a stack is made of a list of cells, from the input up; got {kinds!r}."
            )
        if not isinstance(hidden, int | list | tuple):
            raise KindError(f"hidden is a whole number, or a list of them; got {hidden!r}.")
        for word, value in (("bidirectional", bidirectional), ("residual", residual)):
            if not isinstance(value, bool):
                raise KindError(f"{word} is True or False; got {value!r}.")
        units = [hidden] * len(kinds) if isinstance(hidden, int) else list(hidden)
        check_positive(inputs=inputs, **{f"hidden[{i}]": d for i, d in enumerate(units)})
        if len(units) != len(kinds):
            raise InputError(
                f"{len(kinds)} layers have hidden={hidden!r}; expected one number, or one for each layer."
            )
        dropout = check_dropout(dropout, "what layers hand on")
        common = {
            k: given.pop(k)
            for k in ("x0", "bias", "structure", "engine", "dtype", "device")
            if k in given
        }
        options = given if activation is None else {"activation": activation, **given}
        unknown = [
            name for name in options if not any(name in option_names(kind) for kind in kinds)
        ]
        if unknown:
            raise KindError(f"no layer of this stack has an option {', '.join(unknown)}.")
        self.dropout, self.residual, self.bidirectional = dropout, residual, bidirectional
        self.widths: list[int] = []
        self.levels = nn.ModuleList()
        for kind, d in zip(kinds, units, strict=True):
            below = self.widths[-1] if self.widths else inputs
            own = {name: value for name, value in options.items() if name in option_names(kind)}
            if bidirectional and isinstance(kind, nn.Module):
                raise InputError(
                    "a module is one direction: its weights would be those of both. Give cells by name, or a function "
                    "(inputs, hidden) -> step that makes one for each direction."
                )
            level = [
                Recurrence(make_cell(kind, below, d), inputs=below, hidden=d, **common, **own)
                for _ in range(1 + bidirectional)
            ]
            self.levels.append(nn.ModuleList(level))
            self.widths.append(sum(layer.visible_width for layer in level))
        if residual and len(set(self.widths)) > 1:
            raise InputError(
                f"residual connections add what layers hand on, and theirs have {self.widths} entries: give all the same units."
            )
        self.n = sum(layer.n for layer in self)

    @property
    def by_layer(self) -> list[list[Recurrence]]:
        """By level and direction."""
        return [list(level) for level in self.levels]  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[Recurrence]:
        return (layer for level in self.by_layer for layer in level)

    def initial_states(self, x0: Tensor | None, B: int) -> list[Tensor]:
        """The first states of all layers, [B, n] each, from those of all together."""
        if x0 is None:
            return [layer.initial_state(None, B) for layer in self]
        check_like("x0", x0, next(iter(self)).x0)
        if tuple(x0.shape) not in ((B, self.n), (self.n,)):
            raise InputError(
                f"x0 has shape {list(x0.shape)}; expected [{B}, {self.n}] or [{self.n}]: all layers' states."
            )
        return [
            layer.initial_state(y, B)
            for layer, y in zip(self, x0.split([layer.n for layer in self], -1), strict=True)
        ]

    def run(self, layout: Layout, u: Tensor, x0: Tensor | None) -> list[Layer]:
        """The levels over step rows u."""
        rows, starts, y = layout.rows, iter(self.initial_states(x0, layout.rows.B)), u
        if not any(p.requires_grad for p in self.levels[0].parameters()):
            y = require_gradient(y)  # costates exist where nothing is trained, too
        found: list[Layer] = []
        for i, level in enumerate(self.by_layer):
            z = (
                y * draw_dropout_mask(self.dropout, y.shape, y)
                if self.dropout and self.training and i > 0
                else y
            )
            pieces, heads = [], []
            for layer, direction in zip(level, DIRECTIONS, strict=False):
                turned = direction == "reverse"
                run, drive, _ = layer.sweep(
                    layout, rows.reverse_time(z) if turned else z, next(starts)
                )
                h = layer.visible_state(run.x[rows.B :])
                heads.append(rows.reverse_time(h) if turned else h)
                pieces.append(
                    DirectionRun(run, [d for d in drive if d is not None], layer.hidden, turned)
                )
            add = self.residual and i > 0
            y = torch.cat(heads, 1) + y if add else torch.cat(heads, 1)
            found.append(Layer(pieces, y, add))
        return found

    def last_visible_states(self, found: Sequence[Layer]) -> list[list[Tensor]]:
        """What each layer shows after its last step, by level and direction."""
        both = zip(self.by_layer, found, strict=True)
        return [
            [layer.visible_state(p.run.last) for layer, p in zip(m, f.directions, strict=True)]
            for m, f in both
        ]

    def top_at_end(self, found: Sequence[Layer]) -> Tensor:
        """y^L after the last step of each direction, [B, sizes[-1]] in the rows' order: for the reverse one, that is the
        beginning of the sequence."""
        lasts = [torch.cat(heads, 1) for heads in self.last_visible_states(found)]
        return functools.reduce(torch.add, lasts) if self.residual else lasts[-1]

    def last_state_gradients(self, g: Tensor | None) -> list[list[Tensor | None]]:
        """The loss's gradient by the last states of each layer, from that by `top_at_end`."""
        out: list[list[Tensor | None]] = []
        for i, level in enumerate(self.by_layer):
            if g is None or not (self.residual or i + 1 == len(self.levels)):
                out.append([None] * len(level))
                continue
            parts = g.split([layer.visible_width for layer in level], 1)
            out.append(
                [
                    layer.visible_state_transpose(part)
                    for layer, part in zip(level, parts, strict=True)
                ]
            )
        return out


def option_names(kind: CellLike) -> Sequence[str]:
    """The options of a cell."""
    if not isinstance(kind, str):
        return ()
    return list(steps.options(kind) if kind in steps.STEPS else library.options(kind))


def make_cell(kind: CellLike, inputs: int, hidden: int) -> Any:
    """A cell, or what a function (inputs, hidden) -> cell or step makes."""
    if isinstance(kind, str | Cell | nn.Module):
        return kind
    if not callable(kind):
        raise KindError(
            f"a layer is a cell's name, a cell made with @co.cell, a module, or a function (inputs, hidden) -> step; got {kind!r}."
        )
    return kind(inputs, hidden)


@dataclass(frozen=True, eq=False)
class StackRun(RunOutputs):
    """One run of a stack over a batch.

    u [T, B, inputs], a and y_hat [B, outputs] or [T, B, outputs], lengths [B], mask [T+1, B]; `layers[l]`: the states of
    layer l, x [T+1, B, n_l], by direction (that of "reverse" begins at the end); state [B, n]: the last states of all.
    """

    layout: Layout
    network: Stack
    u_rows: Tensor
    levels: list[Layer]
    readout_input: Tensor  # what the readout looks at: y^L of all steps, or after the last ones
    a_rows: Tensor

    def __repr__(self) -> str:
        rows = self.layout.rows
        return f"<StackRun of {rows.B} samples, T = {rows.T}, {len(self.levels)} layers, readout {self.network.readout!r}>"

    @functools.cached_property
    def layers(self) -> list[dict[str, RecurrenceRun]]:
        name = lambda l, p: LayerRun(self.layout, p.run, p.hidden, "", 0, l, DIRECTIONS[p.turned])
        return [
            {DIRECTIONS[p.turned]: name(l, p) for p in level.directions}
            for l, level in enumerate(self.levels)
        ]

    @property
    def states(self) -> Tensor:
        """Those of all layers side by side, [T + 1, B, n]."""
        return torch.cat([at.x for level in self.layers for at in level.values()], 2)

    @functools.cached_property
    def state(self) -> Tensor:
        return self.layout.unsort(
            torch.cat([p.run.last for level in self.levels for p in level.directions], 1)
        )

    def costates(
        self,
        loss: LossLike | Tensor,
        y: Any = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
    ) -> Recorded:
        """lam_t = dL/dx_t of each sample's own loss, for every layer and direction, from the first layer on; arguments as in
        `loss`. Differentiable, for penalties."""
        refuse_transforms()
        again, net = torch.is_grad_enabled(), self.network
        with torch.enable_grad():
            value = self._loss(loss, y, mask, reduce, self.a_rows)
        if not value.requires_grad or not self.readout_input.requires_grad:
            raise InputError(
                "the loss does not depend on the states of this run, or it was made without gradients (torch.no_grad)."
            )
        (g,) = pull_back([value], [self.readout_input], [torch.ones_like(value)], again)
        if g is None:
            raise InputError(
                "the loss does not depend on the states of this run, but on something else."
            )
        steps, last = (g, None) if net.reads_all_steps else (None, g)
        value = value if again else value.detach()
        where = lambda layer, direction: ("", 0, layer, direction)
        return Recorded(
            costates_through_layers(
                self.layout,
                self.levels,
                steps,
                net.layers.last_state_gradients(last),
                value,
                again,
                where,
            ),
            value,
        )


class Stack(Readout):
    """Recurrent layers on top of each other, and a linear readout.

    cells          one for each layer, from the input up: names, cells made with @co.cell, or functions (inputs, hidden) ->
                   step; any mix
    hidden         units of each layer; one number, or one for each
    bidirectional  each layer reads the sequence in both directions and hands on both; readout "last" then reads what each
                   direction has at its own end, that of the reverse one being the first step
    residual       a layer adds to what it receives: y^l = y^{l-1} + h^l, from the second on
    dropout        the share that is dropped, in training, of the inputs, of y^l on the way to the next layer, and of what the
                   readout looks at; never on the way from one state to the next
    readout, output, beta, steps, skip, deep, x0, bias, structure, engine, dtype, device: as in co.Network, for all layers
    options        of cells given by name, for the layers that have them: eps=0.05, ...

    BPTT and Penalised take it like a Network; its costates are a sequence, one for each layer and direction (co.Recorded). A
    penalty of them is the mean over layers; `penalty.on(...)` chooses layers, or the states of all layers as one.
    """

    why_indivisible = "a stack runs layer by layer over whole sequences"

    def __init__(
        self,
        cells: Sequence[CellLike],
        *,
        inputs: int,
        hidden: int | Sequence[int],
        outputs: int,
        bidirectional: bool = False,
        residual: bool = False,
        dropout: float = 0.0,
        activation: Activation | None = None,
        readout: str = "last",
        output: Output = "identity",
        x0: str = "zero",
        bias: bool = True,
        structure: str | None = None,
        skip: bool = False,
        beta: float | None = None,
        steps: int | None = None,
        deep: int | Sequence[int] = (),
        engine: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_positive(inputs=inputs, outputs=outputs)
        if beta is not None and not str(readout).startswith("tilted"):
            options["beta"], beta = beta, None
        self.inputs, self.outputs, self.dropout = (
            inputs,
            outputs,
            check_dropout(dropout, "what is handed on"),
        )
        self.layers = Layers(
            cells, inputs=inputs, hidden=hidden, bidirectional=bidirectional, residual=residual, dropout=dropout,
            activation=activation, x0=x0, bias=bias, structure=structure, engine=engine, dtype=dtype, device=device, **options,
        )  # fmt: skip
        wide = self.layers.widths[-1]
        self._make_readout(
            wide, readout=readout, output=output, bias=bias, skip=skip, beta=beta, steps=steps, deep=deep,
            make={"dtype": torch.get_default_dtype() if dtype is None else dtype, "device": device},
        )  # fmt: skip
        self._draw_readout(1 / math.sqrt(wide))

    @property
    def recurrences(self) -> Iterator[tuple[str, Recurrence]]:
        for l, level in enumerate(self.layers.by_layer):
            for layer, way in zip(level, ("", ", reverse"), strict=False):
                yield f", layer {l}{way}", layer

    @property
    def readout_width(self) -> int:
        return self.layers.widths[-1]

    @property
    def engine(self) -> Choice:
        """The engine of the first layer."""
        return next(iter(self.layers)).engine

    def reset_parameters(self) -> None:
        for layer in self.layers:
            layer.reset_parameters()
        self._draw_readout(1 / math.sqrt(self.layers.widths[-1]))

    def extra_repr(self) -> str:
        kinds = ", ".join(m.name for m, *_ in self.layers.by_layer)
        words = [w for w in ("bidirectional", "residual") if getattr(self.layers, w)]
        return f"[{kinds}]{''.join(f', {w}' for w in words)}, inputs={self.inputs}, outputs={self.outputs}, readout={self.summary or self.readout!r}"

    def run(self, batch: Batch, called: bool = False) -> StackRun:
        if not called and self._must_be_called(batch):
            return self(batch.u, batch.lengths, batch.x0)
        refuse_wrapper_around(self)
        layout, rows_u = lay_out(batch.u, batch.lengths, self.inputs, self.V)
        input_mask = self.dropout_mask(layout.rows.N, self.inputs)
        rows_u = rows_u if input_mask is None else rows_u * input_mask
        levels = self.layers.run(layout, rows_u, batch.x0)
        seen = levels[-1].y if self.reads_all_steps else self.layers.top_at_end(levels)
        dropped, more = self.dropout_mask(*seen.shape), self.extra_weights()
        more |= {} if dropped is None else {DROPOUT_MASK: dropped}
        pre = self.pre_outputs(layout.rows, seen, self.V, self.b_o, rows_u, more)
        return StackRun(layout, self, rows_u, levels, seen, pre)

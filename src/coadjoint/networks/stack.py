"""Stack: layers of recurrences on top of each other, and a readout of the top one.

y^0   = u
x^l   = the states of layer l, driven by y^{l-1} (after dropout, during training)
y^l   = h^l, the visible part of x^l; both directions side by side if bidirectional;
        y^{l-1} + h^l if residual, P^l y^{l-1} + h^l where their widths differ;
        [y^{l-1}, h^l] if dense; layers above the first are then driven by [u, y^{l-1}]
a     = V y^L + D u + b_o,  y_hat = phi(a)

lam^l_t = dL/dx^l_t. The paths through the layers above count as a part of the loss at step t.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cells.activations import Activation
from ..errors import InputError
from ..objectives import losses
from ..objectives.batch import Batch
from ..objectives.losses import LossLike, Output
from ..sweeps.costates import RecurrenceRun
from ..sweeps.engines import Choice
from ..sweeps.layout import Layout, check_dense, lay_out
from ..sweeps.torch_internals import forward_mode
from ..sweeps.wrappers import refuse_wrapper_around
from .interface import check_positive, holds_source
from .judge import RunOutputs
from .layer_stack import SWITCHES, CellLike, Layers
from .layers import (
    DIRECTIONS,
    Layer,
    LayerRun,
    Place,
    Recorded,
    costates_through_layers,
    pull_back,
    refuse_transforms,
)
from .readout import DROPOUT_MASK, Extra, Readout, check_dropout
from .recurrence import Recurrence
from .text import compact_repr, dtype_texts, layers_text, output_text, sizes_text

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(frozen=True, eq=False)
class StackRun(RunOutputs):
    """One run of a Stack over a batch.

    u         [T, B, inputs], after dropout
    a, y_hat  [B, outputs], or [T, B, outputs] with readout "every"
    layers    layers[l][direction].x are the states of layer l, [T + 1, B, n_l]; those of direction
              "reverse" begin at the end of the sequence
    state     [B, n], the last states of all layers, which the next call may take as x0
    lengths   [B]; mask [T + 1, B] is true where a state exists

    Example:
        Two linear layers with one unit each, x^l_t = x^l_{t-1} / 2 + y^{l-1}_t. The lower layer
        reaches the last output by T - t + 1 paths, so lam^1_t = (T - t + 1) / 2^(T - t) for t >= 1:

        >>> import torch, coadjoint as co
        >>> net = co.Stack(
        ...     ["elman"] * 2, inputs=1, hidden=1, outputs=1, activation="identity", bias=False
        ... )
        >>> for name, p in net.named_parameters():
        ...     _ = p.requires_grad_(False).fill_(0.5 if name.endswith("W") else 1.0)
        >>> run = net(torch.ones(3, 1, 1))
        >>> for lam in run.costates(lambda y_hat, y: y_hat[:, 0], torch.zeros(1, 1)):
        ...     print(lam.lam.flatten().tolist())
        [0.375, 0.75, 1.0, 1.0]
        [0.125, 0.25, 0.5, 1.0]
    """

    layout: Layout
    network: Stack
    u_rows: Tensor
    recorded_layers: list[Layer]
    readout_input: Tensor  # y^L in rows: of all steps, or after the last step of each direction
    a_rows: Tensor
    V: Tensor  # the readout's weights in this run, which stay when the network is trained on
    extra: Extra
    input_mask: Tensor | None = None  # the dropout mask of the inputs, [N, inputs]

    def __repr__(self) -> str:
        rows = self.layout.rows
        return (
            f"<StackRun of {rows.B} samples, T = {rows.T}, {len(self.recorded_layers)} layers, "
            f"readout {self.network.readout!r}>"
        )

    @functools.cached_property
    def layers(self) -> list[dict[str, RecurrenceRun]]:
        """The states of each layer by direction: layers[0]["forward"].x."""
        layers: list[dict[str, RecurrenceRun]] = []
        for index, layer in enumerate(self.recorded_layers):
            by_direction: dict[str, RecurrenceRun] = {}
            for direction_run in layer.directions:
                direction = DIRECTIONS[direction_run.reverse]
                place: Place = ("", 0, index, direction)
                by_direction[direction] = LayerRun(
                    self.layout,
                    direction_run.run,
                    direction_run.hidden,
                    *place,
                    slot_names=direction_run.slot_names,
                )
            layers.append(by_direction)
        return layers

    @property
    def states(self) -> Tensor:
        """The states of all layers side by side, [T + 1, B, n]."""
        return torch.cat([run.x for layer in self.layers for run in layer.values()], 2)

    @functools.cached_property
    def state(self) -> Tensor:
        """The last states of all layers side by side, [B, n]."""
        last: list[Tensor] = []
        for layer in self.recorded_layers:
            for direction_run in layer.directions:
                last.append(direction_run.run.last)
        return self.layout.unsort(torch.cat(last, 1))

    def costates(
        self,
        loss: LossLike | Tensor,
        y: ArrayLike | None = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
        hold: str | None = None,
    ) -> Recorded:
        """lam_t = dL/dx_t of each sample's own loss, for every layer and direction.

        Arguments as in `loss`. The costates are differentiable if gradients are enabled, for
        penalties. With hold="source", the loss's derivative by the readout's input, the outputs of
        the top layer, is a constant in their derivatives; what a layer sends down to the next one
        is not.
        """
        held = holds_source(hold)
        refuse_transforms()
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            value = self.loss_from_rows(loss, y, mask, reduce, self.a_rows)
        if not value.requires_grad or not self.readout_input.requires_grad:
            raise InputError(
                "the loss does not depend on the states of this run, or the run was made without "
                "gradients (torch.no_grad)."
            )
        twice = create_graph and not held
        (g,) = pull_back([value], [self.readout_input], [torch.ones_like(value)], twice)
        if g is None:
            raise InputError(
                "the loss does not depend on the states of this run but on other tensors. Compute "
                "it from this run's y_hat or a."
            )
        # g is the gradient by y^L at all steps, or by y^L at the end, as the readout reads it.
        by_steps = None
        by_end = None
        if self.network.reads_all_steps:
            by_steps = g
        else:
            by_end = g
        if not create_graph:
            value = value.detach()
        costates = costates_through_layers(
            self.layout,
            self.recorded_layers,
            by_steps,
            self.network.layers.last_state_gradients(self.recorded_layers, by_end),
            value,
            create_graph,
            lambda layer, direction: ("", 0, layer, direction),
        )
        return Recorded(costates, value, self)

    def push(self, du: Tensor) -> Tensor:
        """DF(u) du, the change of y_hat along a change du of the inputs, shaped like y_hat.

        Differentiable. du has the shape of u. It changes, one after the other, the layers' states,
        the readout's features z, its pre-outputs a = V z + D u + b_o and y_hat = phi(a).
        """
        if check_dense("the direction du", du).shape != self.u.shape:
            raise InputError(
                f"the direction du has shape {list(du.shape)}; expected the shape of u, "
                f"{list(self.u.shape)}."
            )
        net = self.network
        rows = self.layout.rows
        du_rows = self.layout.flat(du)
        if self.input_mask is not None:
            du_rows = du_rows * self.input_mask
        dy, dy_at_end = net.layers.push(rows, self.recorded_layers, du_rows)
        dh = dy if net.reads_all_steps else dy_at_end

        def features(h: Tensor) -> Tensor:
            """What V multiplies, from the readout's input."""
            return net.readout_features(rows, h, self.extra)

        if net.is_linear:  # then features(h + dh) = features(h) + features(dh)
            dz = features(dh)
        else:
            with forward_mode():
                dz = torch.func.jvp(features, (self.readout_input,), (dh,))[1]
        da = dz @ self.V.T
        if "D" in self.extra:
            da = da + net.at_outputs(rows, du_rows) @ self.extra["D"].T
        phi = losses.output_function(net.output)
        with forward_mode():
            dy_hat = torch.func.jvp(phi, (self.a_rows,), (da,))[1]
        return self._from_rows(dy_hat)


class Stack(Readout):
    """Recurrent layers on top of each other, and a linear readout.

    cells          one for each layer, from the input up: names, cells made with @co.cell, modules,
                   or functions (inputs, hidden) -> step; any mix
    hidden         units of each layer; one number, or one for each
    bidirectional  each layer reads the sequence in both directions and passes both on. Readout
                   "last" then reads each direction after its own last step, which for the reverse
                   one is the first step of the sequence.
    residual       y^l = y^{l-1} + h^l from the second layer on; P^l y^{l-1} + h^l, with a trained
                   matrix P^l (layers.P), where the layer is not as wide as the one below
    dense          from the second layer on, a layer reads the inputs and the outputs of all layers
                   below, [u, h^1, ..., h^{l-1}], and the readout reads [h^1, ..., h^L]
    dropout        the share that is dropped during training of the inputs, of y^l on the way to the
                   next layer, and of the readout's input; never from one state to the next
    options        of cells given by name, for the layers that have them: eps=0.05, ...

    readout, output, beta, steps, skip, deep, x0, bias, structure, engine, dtype and device are as
    in co.Network, for all layers.

    BPTT and Penalised take a Stack like a Network. Its costates are a co.Recorded, one Costates for
    each layer and direction. A penalty is the mean over them; `penalty.on(...)` selects layers, or
    joins the states of all layers.

    Example:
        >>> import torch, coadjoint as co
        >>> net = co.Stack(["gru", "lstm"], inputs=2, hidden=[8, 4], outputs=1, bidirectional=True)
        >>> run = net(torch.zeros(5, 3, 2))
        >>> run.y_hat.shape, run.layers[0]["reverse"].x.shape
        (torch.Size([3, 1]), torch.Size([6, 3, 8]))
    """

    why_indivisible = "a stack runs layer by layer over entire sequences"

    def __init__(
        self,
        cells: Sequence[CellLike],
        *,
        inputs: int,
        hidden: int | Sequence[int],
        outputs: int,
        bidirectional: bool = False,
        residual: bool = False,
        dense: bool = False,
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
        **options: object,
    ) -> None:
        super().__init__()
        check_positive(inputs=inputs, outputs=outputs)
        if beta is not None and not str(readout).startswith("tilted"):
            options["beta"] = beta  # an option of some cells, too
            beta = None
        self.inputs = inputs
        self.outputs = outputs
        self.dropout = check_dropout(dropout, "the inputs and of the outputs of layers")
        self.layers = Layers(
            cells,
            inputs=inputs,
            hidden=hidden,
            bidirectional=bidirectional,
            residual=residual,
            dense=dense,
            dropout=dropout,
            activation=activation,
            x0=x0,
            bias=bias,
            structure=structure,
            engine=engine,
            dtype=dtype,
            device=device,
            **options,
        )
        self._make_readout(
            self.readout_width,
            readout=readout,
            output=output,
            bias=bias,
            skip=skip,
            beta=beta,
            steps=steps,
            deep=deep,
            make={"dtype": torch.get_default_dtype() if dtype is None else dtype, "device": device},
        )
        self._draw_readout(1 / math.sqrt(self.readout_width))

    @property
    def recurrences(self) -> Iterator[tuple[str, Recurrence]]:
        """The recurrent layers, each with its place in words: ", layer 0, reverse"."""
        for index, directions in enumerate(self.layers.by_layer):
            # There is one direction, or a second one, the reverse.
            for recurrence, suffix in zip(directions, ("", ", reverse"), strict=False):
                yield f", layer {index}{suffix}", recurrence

    @property
    def carries_state(self) -> bool:
        """Whether a sequence may be run in parts: see `Net.carries_state`."""
        reads_forward_only = self.summary is None and not self.layers.bidirectional
        return reads_forward_only and not any(r.cell and r.cell.given for r in self.layers)

    @property
    def readout_width(self) -> int:
        """The number of entries of y^L, by which initialisers scale the readout."""
        return self.layers.widths[-1]

    @property
    def engine(self) -> Choice:
        """The engine of the first layer."""
        return next(iter(self.layers)).engine

    def reset_parameters(self) -> None:
        """Draw all parameters again, as the constructor does; a learned x0 becomes zero."""
        self.layers.reset_parameters()
        self._draw_readout(1 / math.sqrt(self.readout_width))

    def extra_repr(self) -> str:
        """The text between the brackets of repr(net)."""
        first = [directions[0] for directions in self.layers.by_layer]
        names, options = layers_text([each.name for each in first], [each.cell for each in first])
        words = [names, *options]
        words += [name for name in SWITCHES if getattr(self.layers, name)]
        hidden = [each.hidden for each in first]
        words += [sizes_text(self.inputs, hidden, self.outputs)]
        words += [f"readout={self.summary or self.readout!r}", output_text(self.output)]
        words += [*dtype_texts(self), f"engine={first[0]._engine!r}"]
        return ", ".join(words)

    __repr__ = compact_repr

    def run(self, batch: Batch, called: bool = False) -> StackRun:
        """The run over a batch. called: by `forward`, so that torch's hooks have fired already."""
        if not called and self._must_be_called(batch):
            stack_run: StackRun = self(batch.u, batch.lengths, batch.x0)
            return stack_run
        refuse_wrapper_around(self)
        layout, u_rows = lay_out(batch.u, batch.lengths, self.inputs, self.V)
        input_mask = self.dropout_mask(layout.rows.N, self.inputs)
        if input_mask is not None:
            u_rows = u_rows * input_mask
        layers = self.layers.run(layout, u_rows, batch.x0)
        readout_input = layers[-1].y
        if not self.reads_all_steps:
            readout_input = self.layers.top_at_end(layers)
        readout_mask = self.dropout_mask(*readout_input.shape)
        extra = self.extra_weights()
        if readout_mask is not None:
            extra[DROPOUT_MASK] = readout_mask
        V = self.V
        a_rows = self.pre_outputs(layout.rows, readout_input, V, self.b_o, u_rows, extra)
        return StackRun(layout, self, u_rows, layers, readout_input, a_rows, V, extra, input_mask)

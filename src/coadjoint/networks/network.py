"""Network -> Trajectory -> Costates.

x_t   = f(W r(x_{t-1}), R u_t + b, x_{t-1}, p)     t = 1..T
a     = V h + D u + b_o,  y_hat = phi(a)           h what the cell shows of x, at the last step, at every step or of all steps
lam_t = dL/dx_t                                    t = 0..T, each sample's own loss, check_positive
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..cells.activations import Activation
from ..cells.cell import Cell
from ..errors import InputError, Unsupported
from ..objectives import losses
from ..objectives.batch import Batch
from ..objectives.losses import LossLike, Output
from ..sweeps.costates import Costates, RecurrenceRun
from ..sweeps.layout import Layout, check_dense, lay_out, tensor_of
from ..sweeps.rows import Rows
from ..sweeps.torch_internals import forward_mode_is_on, innermost_transform
from ..sweeps.wrappers import refuse_wrapper_around
from .judge import RunOutputs
from .readout import DROPOUT_MASK, Readout, check_dropout
from .recurrence import EffectiveWeights, InputWeights, Recurrence, check_positive


@dataclass(frozen=True, eq=False)
class Trajectory(RecurrenceRun, RunOutputs):
    """One run of a network over a batch.

    u [T, B, inputs] (what dropout left of it), x [T+1, B, n], a and y_hat [B, outputs] or [T, B, outputs], state [B, n] (each
    sample's last, for the next call), lengths [B], mask [T+1, B]. Padding is zero. n is the number of units times the slots of
    the cell.
    """

    network: Network
    u_rows: Tensor  # step rows
    a_rows: Tensor  # a, in rows: [B, outputs] in the rows' order or [N, outputs]
    V: Tensor  # the readout and input weights of this run, whatever the network holds later
    b_o: Tensor | None
    extra: dict[str, Tensor]  # what else the readout has
    input_weights: InputWeights | None
    input_mask: Tensor | None = None  # the mask of the inputs, in rows, where some are dropped

    def __repr__(self) -> str:
        T, B, n = self.layout.rows.T, self.layout.rows.B, self.run.x.shape[1]
        return f"<Trajectory of {B} samples, T = {T}, {n} state entries, readout {self.network.readout!r}>"

    @property
    def readout_input(self) -> Tensor:
        """What the readout looks at, in rows: the states of all steps, or each sample's last."""
        return self.network.readout_input(self.layout.rows, self.run.x, self.run.last)

    def read_states(self, x: Tensor, last: Tensor) -> Tensor:
        return self.network.read_states(
            self.layout, x, last, self.V, self.b_o, self.u_rows, self.extra
        )

    def costates(
        self,
        loss: LossLike | Tensor,
        y: Any = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
    ) -> Costates:
        """lam_t = dL/dx_t of each sample's own loss; arguments as in `loss`. Differentiable, for penalties."""
        run, every = self.run, self.network.readout == "every"
        by_x = self.network.reads_all_steps
        x, last, pre, attached = run.x, run.last, self.a_rows, run.x.requires_grad
        dual, mapped = forward_mode_is_on(), innermost_transform() is not None
        recorded = (
            (torch.is_grad_enabled() and (attached or self.a_rows.requires_grad)) or dual or mapped
        )
        s, s_last = None, None
        if mapped and not isinstance(loss, Tensor):  # torch.func allows no leaves of our own
            of = lambda h: self._loss(loss, y, mask, reduce, self.read_states(h, h))
            value, pull, *_ = torch.func.vjp(of, x if by_x else last)
            source = pull(torch.ones_like(value))[0]
            s, s_last = (source, None) if by_x else (None, source)
        else:
            with torch.enable_grad():
                if not (attached and recorded) and not isinstance(loss, Tensor):
                    leaf = lambda h: (
                        h + torch.zeros_like(h).requires_grad_()
                        if dual
                        else h.detach().requires_grad_()
                    )
                    x, last = leaf(run.x), leaf(run.last)
                    pre = self.read_states(x, last)
                value = self._loss(loss, y, mask, reduce, pre)
                if not value.requires_grad or not x.requires_grad:
                    raise InputError(
                        "the loss does not depend on the states of this trajectory: it has no costates."
                    )
                s, s_last = torch.autograd.grad(
                    value.sum(), [x, last], create_graph=recorded, allow_unused=True
                )
            if s is None and s_last is None:
                raise InputError(
                    "the loss does not depend on the states of this trajectory, but on something else."
                )
        declared = None
        if every and s is not None and not isinstance(loss, Tensor):
            counts = torch.ones(self.layout.rows.N, dtype=torch.bool, device=s.device)
            if mask is not None:
                counts = self.layout.flat(tensor_of("the loss mask", mask, s)) != 0
            declared = torch.cat([counts.new_zeros(self.layout.rows.B), counts])
        with torch.set_grad_enabled(recorded):
            found = run.costate(s, s_last, declared)
        return Costates(self, found.mantissa, found.exponent, value if recorded else value.detach())

    def push(self, du: Tensor) -> Tensor:
        """The change of y_hat along a change du of the inputs: DF(u) . du, shaped like y_hat. Differentiable."""
        if check_dense("the direction du", du).shape != self.u.shape:
            raise InputError(
                f"the direction du has shape {list(du.shape)}; expected that of u, {list(self.u.shape)}."
            )
        net, rows, flat = self.network, self.layout.rows, self.layout.flat(du)
        flat = flat if self.input_mask is None else flat * self.input_mask
        mu = self.run.push(*net.drive(flat, without_biases(self.input_weights)))
        of = lambda x: net.readout_features(
            rows, net.readout_input(rows, x, rows.last(x)), self.extra
        )
        h = of(mu) if net.is_linear else torch.func.jvp(of, (self.run.x,), (mu,))[1]
        da = h @ self.V.T
        if "D" in self.extra:
            da = da + net.at_outputs(rows, flat) @ self.extra["D"].T
        phi = losses.output_function(net.output)
        return self._outward(torch.func.jvp(phi, (self.a_rows,), (da,))[1])


def without_biases(input_weights: InputWeights | None) -> InputWeights | None:
    """The same weights without their biases: what a change of the input says."""
    return (
        None
        if input_weights is None
        else (input_weights[0][:1] + (None,), input_weights[1] and (input_weights[1][0], None))
    )


class Network(Recurrence, Readout):
    """A recurrent layer and a linear readout.

    cell        a name ("elman", "lstm", "gru", ...; co.cells.CELLS and co.cells.steps.STEPS have them all), a cell made with
                @co.cell, a torch cell module (RNNCell, LSTMCell, GRUCell) or any step function (u_t, x) -> x; what is no
                formula runs on the autograd engine
    activation  "tanh", "sigmoid", "relu", "identity", "softplus" or a function written with co.tanh, co.exp, ...
    readout     "last": y_hat at each sample's last step; "every": at every step; or one y_hat for each sample of all its steps:
                "tilted" reads (1/beta) log mean_t exp(beta h_t), "tilted-tanh" the same with a tanh around the mean,
                "attention" sum_t a_t h_t, a = softmax over its own steps of tanh(w . h_t + b_t). `net.readout` then is
                "last", where y_hat goes, and `net.summary` says which
    beta        of the tilted readouts, 1 if not given
    steps       of "attention": how many b_t there are, 1 if not given; later steps take the last of them
    skip        add D u to the readout, u of the steps that it reads
    deep        hidden layers of the readout, by their widths: V reads tanh(O h + c) in place of h, and so on
    dropout     the share of u, and of what the readout looks at, that is dropped in training: entry by entry, anew at every
                step, the rest scaled by 1 / (1 - dropout); never on the way from one state to the next. Costates and penalised
                gradients are those of the network that is left. Zaremba, Sutskever & Vinyals (2014)
    output      phi: "identity", "sigmoid", "softmax", "tanh" or a function
    x0          "zero", "learned", or a tensor [n]; a call may give its own
    mask        a fixed mask on W, shaped like W: zeros are absent connections
    structure   of W: "antisymmetric", "orthogonal", "cayley", "diagonal", "low-rank", "dale" or a torch parametrisation
                (co.parametrisations); some cells bring their own
    engine      "auto", "cpu", "eager", "cuda", "scan", "reference", "autograd"; `net.engine` says which runs,
                `net.engine.why` why
    slots       for a step function: how many parts of size `hidden` its state has
    options     of a cell given by name: eps=0.05, ...

    Parameters: W (recurrent), R (input), b, V (readout), b_o, D if skip, w_a and b_a of an attention, x0 if learned, the
    cell's own under `p` and those of `deep`. All are drawn uniformly from +-1/sqrt(hidden), as torch.nn does, but a structured W begins where
    its structure says (its raw parameter is parametrizations.W.original); see co.initialisers for others.
    """

    def __init__(
        self,
        cell: str | Cell | nn.Module | Callable[..., Any] = "elman",
        *,
        inputs: int,
        hidden: int,
        outputs: int,
        activation: Activation | None = None,
        readout: str = "last",
        output: Output = "identity",
        x0: str | Tensor = "zero",
        bias: bool = True,
        mask: Tensor | None = None,
        structure: str | nn.Module | None = None,
        skip: bool = False,
        beta: float | None = None,
        steps: int | None = None,
        deep: int | Sequence[int] = (),
        dropout: float = 0.0,
        engine: str = "auto",
        slots: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        check_positive(outputs=outputs)
        if beta is not None and not str(readout).startswith("tilted"):
            options["beta"], beta = beta, None  # some cells have one too
        super().__init__(
            cell, inputs=inputs, hidden=hidden, activation=activation, x0=x0, bias=bias, mask=mask, structure=structure,
            engine=engine, slots=slots, dtype=dtype, device=device, **options,
        )  # fmt: skip
        self.outputs, self.dropout = (
            outputs,
            check_dropout(dropout, "inputs and of what the readout reads"),
        )
        self._make_readout(
            self.visible_width, readout=readout, output=output, bias=bias, skip=skip, beta=beta, steps=steps, deep=deep,
            make={"dtype": self.x0.dtype, "device": device},
        )  # fmt: skip
        self._draw_readout(1 / math.sqrt(hidden))

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(hidden); a structured W and the cell's own parameters begin where their definition says, x0 at
        zero, a deep output where torch.nn's layers do."""
        super().reset_parameters()
        self._draw_readout(1 / math.sqrt(self.hidden))

    def extra_repr(self) -> str:
        return f"{self.name}, inputs={self.inputs}, hidden={self.hidden}, outputs={self.outputs}, readout={self.summary or self.readout!r}, engine={self._engine!r}"

    @property
    def one_layer(self) -> Network:
        return self

    @property
    def recurrences(self) -> Iterable[tuple[str, Recurrence]]:
        return (("", self),)

    @property
    def readout_width(self) -> int:
        return self.visible_width

    def graph_key(self) -> Hashable | None:
        drops = self.dropout and self.training
        if self.cell is None or drops or self.engine not in ("cuda", "scan"):
            return None
        return self.cell, str(self.engine), self.readout, self.output, self.training

    def refuse_if_indivisible(self, what: str) -> None:
        if self.summary is not None:
            raise Unsupported(
                f"{what}: readout='{self.summary}' reads all steps of a sequence at once. Use BPTT or Penalised without segments."
            )
        self.refuse_if_random(what)
        super().refuse_if_indivisible(what)

    def weights_for_segments(self) -> EffectiveWeights:
        """The weights of a sweep over a part of a sequence."""
        self.refuse_if_indivisible("sweeps in segments")
        self.refuse_if_not_linear("a sweep in segments")
        if self.visible_slots != [0]:
            raise Unsupported(
                "a sweep in segments has no readout of several slots. Use BPTT or Penalised without segments."
            )
        return self.effective_weights()

    def readout_input(self, rows: Rows, x: Tensor, last: Tensor) -> Tensor:
        """What the readout looks at: the states of all steps, or each sample's last."""
        return self.visible_state(x[rows.B :] if self.reads_all_steps else last)

    def read_states(
        self, layout: Layout, x: Tensor, last: Tensor, V: Tensor, b_o: Tensor | None,
        u: Tensor | None = None, more: dict[str, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """a, in rows."""
        return self.pre_outputs(
            layout.rows, self.readout_input(layout.rows, x, last), V, b_o, u, more
        )

    def run(self, batch: Batch, called: bool = False) -> Trajectory:
        if not called and self._must_be_called(batch):
            return self(batch.u, batch.lengths, batch.x0)
        refuse_wrapper_around(self)
        layout, rows_u = lay_out(batch.u, batch.lengths, self.inputs, self.V)
        rows, V, b_o, more = layout.rows, self.V, self.b_o, self.extra_weights()
        input_mask, seen = (
            self.dropout_mask(rows.N, self.inputs),
            self.dropout_mask(rows.N if self.reads_all_steps else rows.B, self.visible_width),
        )
        rows_u = rows_u if input_mask is None else rows_u * input_mask
        more |= {} if seen is None else {DROPOUT_MASK: seen}
        run, _, input_weights = self.sweep(layout, rows_u, self.initial_state(batch.x0, rows.B))
        pre = self.read_states(layout, run.x, run.last, V, b_o, rows_u, more)
        return Trajectory(
            layout, run, self.hidden, self, rows_u, pre, V, b_o, more, input_weights, input_mask
        )

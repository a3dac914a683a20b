"""Network -> Trajectory -> Costates.

x_t   = f(W r(x_{t-1}), R u_t + b, x_{t-1}, p)     t = 1..T
a     = V h + D u + b_o,  y_hat = phi(a)           h: the visible part of x at the last step, at
                                                   every step, or a summary of all steps
lam_t = dL/dx_t                                    t = 0..T, L the loss of each sample

networks/readout.py lists every link of the chain from u to a with its formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

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
from .effective_weights import EffectiveWeights, InputWeights
from .interface import check_positive
from .judge import RunOutputs
from .readout import DROPOUT_MASK, Extra, Readout, check_dropout
from .recurrence import Recurrence

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


class Sources(NamedTuple):
    """The loss of each sample and its direct derivatives by the states: what an adjoint needs."""

    loss: Tensor  # [B]
    s: Tensor | None  # by all states, [B + N, n]
    s_last: Tensor | None  # by each sample's last state, [B, n]


def leaf_copy(h: Tensor) -> Tensor:
    """The values of h as a new leaf, at which a graph can begin."""
    if forward_mode_is_on():
        return h + torch.zeros_like(h).requires_grad_()  # detach() would drop the tangent
    return h.detach().requires_grad_()


@dataclass(frozen=True, eq=False)
class Trajectory(RecurrenceRun, RunOutputs):
    """One run of a Network over a batch.

    u        [T, B, inputs], after dropout
    x        [T + 1, B, n], the states from x_0 on; n is the number of units times slots of the cell
    a, y_hat [B, outputs], or [T, B, outputs] with readout "every"
    state    [B, n], each sample's last state, which the next call may take as x0
    lengths  [B]; mask [T + 1, B] is true where a state exists. Padding is zero.

    Example:
        A linear network with one unit, x_t = x_{t-1} / 2 + u_t, has lam_t = (1/2)^(T - t):

        >>> import coadjoint as co
        >>> net = co.Network(inputs=1, hidden=1, outputs=1, activation="identity", bias=False)
        >>> net = net.requires_grad_(False)
        >>> _ = net.W.fill_(0.5), net.R.fill_(1.0), net.V.fill_(1.0)
        >>> run = net(torch.ones(3, 1, 1))
        >>> run.x.flatten().tolist()
        [0.0, 1.0, 1.5, 1.75]
        >>> run.costates(lambda y_hat, y: y_hat, torch.zeros(1, 1)).lam.flatten().tolist()
        [0.125, 0.25, 0.5, 1.0]
    """

    network: Network
    u_rows: Tensor  # [N, inputs]
    a_rows: Tensor  # [B, outputs] in the order of the rows, or [N, outputs]
    V: Tensor  # the weights of this run, which stay as they are when the network is trained on
    b_o: Tensor | None
    extra: Extra
    input_weights: InputWeights | None
    input_mask: Tensor | None = None  # the dropout mask of the inputs, [N, inputs]

    def __repr__(self) -> str:
        rows = self.layout.rows
        entries = self.run.x.shape[1]
        return (
            f"<Trajectory of {rows.B} samples, T = {rows.T}, {entries} state entries, "
            f"readout {self.network.readout!r}>"
        )

    @property
    def readout_input(self) -> Tensor:
        """The visible states the readout reads, in rows: of all steps, or each sample's last."""
        return self.network.readout_input(self.layout.rows, self.run.x, self.run.last)

    def read_states(self, x: Tensor, last: Tensor) -> Tensor:
        """The pre-outputs a, in rows, of other states in place of this run's own."""
        return self.network.read_states(
            self.layout, x, last, self.V, self.b_o, self.u_rows, self.extra
        )

    def costates(
        self,
        loss: LossLike | Tensor,
        y: ArrayLike | None = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
    ) -> Costates:
        """lam_t = dL/dx_t of each sample's own loss; arguments as in `loss`.

        They are differentiable, for penalties.
        """
        is_given = isinstance(loss, Tensor)
        under_torch_func = innermost_transform() is not None
        has_graph = self.run.x.requires_grad or self.a_rows.requires_grad
        differentiable = (
            (torch.is_grad_enabled() and has_graph) or forward_mode_is_on() or under_torch_func
        )
        loss_of = functools.partial(self._loss, loss, y, mask, reduce)
        if under_torch_func and not is_given:
            sources = self._sources_by_func(loss_of)
        else:
            reuse_graph = is_given or (differentiable and self.run.x.requires_grad)
            sources = self._sources_by_autograd(loss_of, reuse_graph, differentiable)
        declared = None
        if self.network.readout == "every" and sources.s is not None and not is_given:
            declared = self._states_with_loss(mask, sources.s)
        with torch.set_grad_enabled(differentiable):
            found = self.run.costate(sources.s, sources.s_last, declared)
        value = sources.loss if differentiable else sources.loss.detach()
        return Costates(self, found.mantissa, found.exponent, value)

    def _sources_by_func(self, loss_of: Callable[[Tensor], Tensor]) -> Sources:
        """The sources inside a transform of torch.func, which does not allow leaves of our own."""

        def loss_of_states(h: Tensor) -> Tensor:
            return loss_of(self.read_states(h, h))

        if self.network.reads_all_steps:
            value, pull, *_ = torch.func.vjp(loss_of_states, self.run.x)
            return Sources(value, pull(torch.ones_like(value))[0], None)
        value, pull, *_ = torch.func.vjp(loss_of_states, self.run.last)
        return Sources(value, None, pull(torch.ones_like(value))[0])

    def _sources_by_autograd(
        self, loss_of: Callable[[Tensor], Tensor], reuse_graph: bool, differentiable: bool
    ) -> Sources:
        """The sources by torch.autograd.

        reuse_graph     differentiate through the graph of this run; otherwise the readout is
                        evaluated again from copies of the states, at which its graph begins
        differentiable  record the derivative, so that it can be differentiated again
        """
        with torch.enable_grad():
            if reuse_graph:
                x = self.run.x
                last = self.run.last
                a_rows = self.a_rows
            else:
                x = leaf_copy(self.run.x)
                last = leaf_copy(self.run.last)
                a_rows = self.read_states(x, last)
            value = loss_of(a_rows)
            if not value.requires_grad or not x.requires_grad:
                raise InputError(
                    "the loss does not depend on the states of this trajectory, "
                    "so it has no costates."
                )
            s, s_last = torch.autograd.grad(
                value.sum(), [x, last], create_graph=differentiable, allow_unused=True
            )
        if s is None and s_last is None:
            raise InputError(
                "the loss does not depend on the states of this trajectory but on other tensors. "
                "Compute it from this trajectory's y_hat, a or x."
            )
        return Sources(value, s, s_last)

    def _states_with_loss(self, mask: Tensor | None, like: Tensor) -> Tensor:
        """[B + N], true for the states that the loss reads: those of steps that count, not x_0."""
        rows = self.layout.rows
        counts = torch.ones(rows.N, dtype=torch.bool, device=like.device)
        if mask is not None:
            counts = self.layout.flat(tensor_of("the loss mask", mask, like)) != 0
        return torch.cat([counts.new_zeros(rows.B), counts])

    def push(self, du: Tensor) -> Tensor:
        """DF(u) du, the change of y_hat along a change du of the inputs, shaped like y_hat.

        Differentiable. du has the shape of u.
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
        dx = self.run.push(*net.drive(du_rows, without_biases(self.input_weights)))

        def features(x: Tensor) -> Tensor:
            return net.readout_features(rows, net.readout_input(rows, x, rows.last(x)), self.extra)

        if net.is_linear:
            dz = features(dx)
        else:
            dz = torch.func.jvp(features, (self.run.x,), (dx,))[1]
        da = dz @ self.V.T
        if "D" in self.extra:
            da = da + net.at_outputs(rows, du_rows) @ self.extra["D"].T
        phi = losses.output_function(net.output)
        dy_hat = torch.func.jvp(phi, (self.a_rows,), (da,))[1]
        return self._from_rows(dy_hat)


def without_biases(input_weights: InputWeights | None) -> InputWeights | None:
    """The same weights without biases: a change of the input drives the steps through R alone."""
    if input_weights is None:
        return None
    (R, _), side = input_weights
    if side is None:
        return (R, None), None
    return (R, None), (side[0], None)


class Network(Recurrence, Readout):
    """A recurrent layer and a linear readout.

    cell        the name of a cell ("elman", "lstm", "gru", ...; see co.cells.CELLS and
                co.cells.steps.STEPS), a cell made with @co.cell, a torch cell module (RNNCell,
                LSTMCell, GRUCell) or any step function (u_t, x) -> x. Modules and step functions
                run on the autograd engine.
    activation  "tanh", "sigmoid", "relu", "identity", "softplus", or a function written with
                torch.tanh, torch.exp, ...
    readout     "last": y_hat at each sample's last step; "every": at every step; or one y_hat for
                each sample from all its steps: "tilted", (1/beta) log mean_t exp(beta h_t),
                "tilted-tanh", the same with a tanh around the mean, or "attention",
                sum_t alpha_t h_t, alpha = softmax over its steps of tanh(w_a . h_t + b_t). For
                these three `net.readout` is "last" and `net.summary` has the name.
    beta        of the tilted readouts; default 1
    steps       of "attention": the number of biases b_t; default 1. Later steps use the last one.
    skip        add D u to the readout, u at the steps with an output
    deep        widths of hidden layers in the readout: V reads tanh(O h + c) instead of h
    dropout     the share of u and of the readout's input that is dropped during training: each
                entry of each step by itself, the others scaled by 1 / (1 - dropout); never from
                one state to the next. Costates and penalised gradients are those of the network
                that remains. Zaremba, Sutskever & Vinyals (2014).
    output      phi: "identity", "sigmoid", "softmax", "tanh", or a function
    x0          "zero", "learned", or a tensor [n]; a call may pass another one
    mask        a fixed mask on W, shaped like W: zeros remove connections
    structure   of W: "antisymmetric", "orthogonal", "cayley", "diagonal", "low-rank", "dale", or a
                torch parametrisation; some cells have their own (co.cells.structures)
    engine      "auto", "cpu", "eager", "cuda", "scan", "reference" or "autograd". `net.engine` is
                the engine in use, `net.engine.why` the reason.
    slots       for a step function: the number of parts of size `hidden` in its state
    options     of a cell given by name: eps=0.05, ...

    Parameters: W (recurrent), R (input), b, V (readout), b_o; D with skip; w_a and b_a with
    "attention"; x0 if learned; those of the cell under `p`, and those of `deep`. All are drawn
    uniformly from +-1/sqrt(hidden), as in torch.nn, except a structured W, which is drawn as its
    structure says (its raw parameter is parametrizations.W.original). co.initialisers has others.

    Example:
        >>> import coadjoint as co
        >>> net = co.Network("gru", inputs=2, hidden=8, outputs=1)
        >>> run = net(torch.zeros(5, 3, 2))
        >>> run.x.shape, run.y_hat.shape
        (torch.Size([6, 3, 8]), torch.Size([3, 1]))
    """

    def __init__(
        self,
        cell: str | Cell | nn.Module | Callable[..., object] = "elman",
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
        **options: object,
    ) -> None:
        check_positive(outputs=outputs)
        if beta is not None and not str(readout).startswith("tilted"):
            options["beta"] = beta  # an option of some cells, too
            beta = None
        super().__init__(
            cell,
            inputs=inputs,
            hidden=hidden,
            activation=activation,
            x0=x0,
            bias=bias,
            mask=mask,
            structure=structure,
            engine=engine,
            slots=slots,
            dtype=dtype,
            device=device,
            **options,
        )
        self.outputs = outputs
        self.dropout = check_dropout(dropout, "the inputs and of the readout's input")
        self._make_readout(
            self.visible_width,
            readout=readout,
            output=output,
            bias=bias,
            skip=skip,
            beta=beta,
            steps=steps,
            deep=deep,
            make={"dtype": self.x0.dtype, "device": device},
        )
        self._draw_readout(1 / math.sqrt(hidden))

    def reset_parameters(self) -> None:
        """Draw all parameters again, as the constructor does; a learned x0 becomes zero."""
        super().reset_parameters()
        self._draw_readout(1 / math.sqrt(self.hidden))

    def extra_repr(self) -> str:
        """The text between the brackets of repr(net)."""
        return (
            f"{self.name}, inputs={self.inputs}, hidden={self.hidden}, outputs={self.outputs}, "
            f"readout={self.summary or self.readout!r}, engine={self._engine!r}"
        )

    @property
    def one_layer(self) -> Network:
        """This network itself."""
        return self

    @property
    def recurrences(self) -> Iterable[tuple[str, Recurrence]]:
        """Its one recurrence, which needs no place in words."""
        return (("", self),)

    @property
    def readout_width(self) -> int:
        """The number of visible state entries, by which initialisers scale the readout."""
        return self.visible_width

    def graph_key(self) -> Hashable | None:
        """A key for the CUDA graph of this network's gradient; None if it cannot be captured."""
        is_random = self.dropout and self.training
        if self.cell is None or is_random or self.engine not in ("cuda", "scan"):
            return None
        return self.cell, str(self.engine), self.readout, self.output, self.training

    def refuse_if_indivisible(self, what: str) -> None:
        """Refuse the method `what` if a part of a sequence is not enough for this network."""
        if self.summary is not None:
            raise Unsupported(
                f"{what}: readout='{self.summary}' reads all steps of a sequence at once. "
                "Use BPTT or Penalised without segments."
            )
        self.refuse_if_random(what)
        super().refuse_if_indivisible(what)

    def weights_for_segments(self) -> EffectiveWeights:
        """The weights for sweeps in segments; networks that need an entire sequence are refused."""
        self.refuse_if_indivisible("sweeps in segments")
        self.refuse_if_not_linear("a sweep in segments")
        if self.visible_slots != [0]:
            raise Unsupported(
                "a sweep in segments does not support a readout of several slots. "
                "Use BPTT or Penalised without segments."
            )
        return self.effective_weights()

    def readout_input(self, rows: Rows, x: Tensor, last: Tensor) -> Tensor:
        """The visible states that the readout reads, in rows: of all steps, or each sample's last.

        x     all states, [B + N, n]
        last  each sample's last state, [B, n]
        """
        return self.visible_state(x[rows.B :] if self.reads_all_steps else last)

    def read_states(
        self,
        layout: Layout,
        x: Tensor,
        last: Tensor,
        V: Tensor,
        b_o: Tensor | None,
        u: Tensor | None = None,
        extra: Extra | None = None,
    ) -> Tensor:
        """The pre-outputs a of states, in rows; x and last as in `readout_input`, u step rows."""
        h = self.readout_input(layout.rows, x, last)
        return self.pre_outputs(layout.rows, h, V, b_o, u, extra)

    def run(self, batch: Batch, called: bool = False) -> Trajectory:
        """The run over a batch. called: by `forward`, so that torch's hooks have fired already."""
        if not called and self._must_be_called(batch):
            trajectory: Trajectory = self(batch.u, batch.lengths, batch.x0)
            return trajectory
        refuse_wrapper_around(self)
        layout, u_rows = lay_out(batch.u, batch.lengths, self.inputs, self.V)
        rows = layout.rows
        # Both masks are drawn before the sweep, the inputs' first: a seed fixes this order.
        input_mask = self.dropout_mask(rows.N, self.inputs)
        readout_mask = self.dropout_mask(
            rows.N if self.reads_all_steps else rows.B, self.visible_width
        )
        if input_mask is not None:
            u_rows = u_rows * input_mask
        V = self.V
        b_o = self.b_o
        extra = self.extra_weights()
        if readout_mask is not None:
            extra[DROPOUT_MASK] = readout_mask
        run, _, input_weights = self.sweep(layout, u_rows, self.initial_state(batch.x0, rows.B))
        a_rows = self.read_states(layout, run.x, run.last, V, b_o, u_rows, extra)
        return Trajectory(
            layout=layout,
            run=run,
            hidden=self.hidden,
            network=self,
            u_rows=u_rows,
            a_rows=a_rows,
            V=V,
            b_o=b_o,
            extra=extra,
            input_weights=input_weights,
            input_mask=input_mask,
        )

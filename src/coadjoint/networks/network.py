"""Network: one recurrent layer and a readout. Its run is a Trajectory.

x_t   = f(W r(x_{t-1}), R u_t + b, x_{t-1}, p)     t = 1..T
a     = V h + D u + b_o,  y_hat = phi(a)           h: the visible part of x at the last step, at
                                                   every step, or a summary of all steps

networks/readout.py lists every link of the chain from u to a with its formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ..cells.activations import Activation
from ..cells.cell import Cell
from ..errors import Unsupported
from ..objectives.batch import Batch
from ..objectives.losses import Output
from ..sweeps.engines.cuda.repeatable import function_key, weights_are_repeatable
from ..sweeps.layout import Layout, lay_out
from ..sweeps.rows import Rows
from ..sweeps.run import SweepRun
from ..sweeps.wrappers import refuse_wrapper_around
from .captured_runs import NetworkKey, Recordings, recordings_of
from .effective_weights import EffectiveWeights
from .interface import check_positive
from .readout import DROPOUT_MASK, Extra, Readout, check_dropout
from .recurrence import Recurrence
from .text import dtype_texts, option_texts, output_text, sizes_text
from .trajectory import Trajectory

CAPTURED_ENGINES = ("cuda", "scan")


class Network(Recurrence, Readout):
    """A recurrent layer and a linear readout.

    cell        the name of a cell ("elman", "lstm", "gru", ...; see co.cells.CELLS and
                co.cells.steps.STEPS), a cell made with @co.cell, a torch cell module (RNNCell,
                LSTMCell, GRUCell) or any step function (u_t, x) -> x. Modules and step functions
                run on the autograd engine.
    activation  "tanh", "sigmoid", "relu", "identity", "softplus", or a function written with
                torch.tanh, torch.exp, ...
    readout     "last": y_hat at each sample's last step; "every": at every step; or one y_hat for
                each sample from all its steps: "mean", (1/T) sum_t h_t, "tilted",
                (1/beta) log mean_t exp(beta h_t), "tilted-tanh", the same with a tanh around the
                mean, or "attention", sum_t alpha_t h_t, alpha = softmax over its steps of
                tanh(w_a . h_t + b_t). For these `net.readout` is "last" and `net.summary` has the
                name.
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
        >>> import torch, coadjoint as co
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
        self._draw_readout(bound=1 / math.sqrt(hidden))

    def reset_parameters(self) -> None:
        """Draw all parameters again, as the constructor does; a learned x0 becomes zero."""
        super().reset_parameters()
        self._draw_readout(bound=1 / math.sqrt(self.hidden))

    def extra_repr(self) -> str:
        """The text between the brackets of repr(net)."""
        words = [self.name, *option_texts(self.cell)]
        words += [sizes_text(self.inputs, [self.hidden], self.outputs)]
        words += [f"readout={self.summary or self.readout!r}", output_text(self.output)]
        return ", ".join([*words, *dtype_texts(self), f"engine={self._engine!r}"])

    @property
    def one_layer(self) -> Network:
        """This network itself."""
        return self

    @property
    def recurrences(self) -> Iterable[tuple[str, Recurrence]]:
        """Its one recurrence, which needs no place in words."""
        return (("", self),)

    @property
    def carries_state(self) -> bool:
        """Whether a sequence may be run in parts: see `Net.carries_state`."""
        return self.summary is None and not (self.cell and self.cell.given)

    @property
    def readout_width(self) -> int:
        """The number of visible state entries, by which initialisers scale the readout."""
        return self.visible_width

    def graph_key(self) -> NetworkKey | None:
        """A key for the CUDA graph of this network's gradient; None if it cannot be captured.

        Only runs on GPU kernels without fresh random numbers can be captured and repeated.
        """
        is_random = self.dropout and self.training
        engine = self.engine
        if self.cell is None or is_random or engine not in CAPTURED_ENGINES:
            return None
        output = function_key(self.output)
        if output is None or not weights_are_repeatable(self):
            return None
        read = (self.readout, self.summary, getattr(self, "beta", None))
        return self.cell, str(engine), *read, output, self.training

    @functools.cached_property
    def recordings(self) -> Recordings:
        """What is captured of the runs of this network and replayed, on a GPU."""
        return Recordings()

    def refuse_if_indivisible(self, what: str) -> None:
        """Refuse the method `what`, which runs one part of a sequence after the other.

        Refused are summaries of all steps, dropout in training, and cells that are given data for
        an entire sequence.
        """
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
        if self.visible_slots != [0]:  # segments read the first slot of the state alone
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
        """The pre-outputs a of states, in rows of steps or of samples.

        x, last  all states [B + N, n] and each sample's last [B, n]
        u        the inputs in step rows, read if the readout has a skip D
        extra    the readout's weights other than V and b_o, and its dropout mask
        """
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
        # Only for a caller's own loop: a gradient method calls `run`, and captures all of itself.
        call = recordings_of(self, batch) if called else None
        swept = None
        run: SweepRun
        if call is not None:
            x0 = None if batch.x0 is None else self.initial_state(batch.x0, rows.B)
            swept = call.recordings.replay_sweep(self, call.network_key, layout, u_rows, x0)
        if swept is None:
            start = self.initial_state(batch.x0, rows.B)
            run, _, input_weights = self.sweep(layout, u_rows, start)
        else:
            run, input_weights = swept
        a_rows = self.read_states(layout, run.x, run.last, V, b_o, u_rows, extra)
        return Trajectory(
            layout=layout,
            run=run,
            hidden=self.hidden,
            slot_names=self.slot_names,
            network=self,
            u_rows=u_rows,
            a_rows=a_rows,
            V=V,
            b_o=b_o,
            extra=extra,
            input_weights=input_weights,
            input_mask=input_mask,
            recordings=None if call is None else call.recordings,
        )

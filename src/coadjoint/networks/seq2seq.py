"""Sequence to sequence: an encoder reads u, a decoder writes y, token by token.

h_1..h_T = y^L of the encoder, a stack of recurrences over u; end: the same after the last step of each direction
s_0  = tanh(S end + b_s)
e_tj = v_a . tanh(W_a s_{t-1} + U_a h_j + b_a),  alpha_t = softmax over the sample's own j,  c_t = sum_j alpha_tj h_j
s_t  = f(W r(s_{t-1}), R [E y_{t-1}; c_t] + b, s_{t-1}, p)
a_t  = V s_t + C c_t + b_o,  y_hat_t = softmax(a_t)

Bahdanau, Cho & Bengio (ICLR 2015); without attention c_t = end (Cho et al. 2014, Sutskever et al. 2014). Tokens are
0..K-1, and K is the end; y_0, the beginning, has an embedding of its own. Under teacher forcing y_{t-1} is the target's;
when the network decodes, it is what it said.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..cells.activations import Activation
from ..cells.parameters import check_dtype_and_device
from ..errors import InputError, KindError, Unsupported, brief
from ..objectives.batch import Batch
from ..objectives.losses import LossLike
from ..sweeps.costates import Costates
from ..sweeps.engines import Choice
from ..sweeps.layout import HasLayout, Layout, lay_out, tensor_of
from ..sweeps.rows import Rows
from ..sweeps.run import RunView, StepFunctionRun
from ..sweeps.wrappers import refuse_wrapper_around
from . import decoding
from .decoding import Decoded
from .interface import SequenceNet, check_positive
from .judge import Judge
from .layers import Layer, LayerRun, Recorded, costates_through_layers, refuse_transforms
from .network import Network
from .stack import CellLike, Layers, make_cell, option_names

MAX_LAYERS = 1000  # the most
STEPWISE = Choice(
    "autograd",
    "a decoder takes one step at a time; the layers of `net.encoder` have engines of their own.",
)


class EncoderOutput(NamedTuple):
    """What the decoder knows of the inputs, for n samples in some order."""

    end: Tensor  # [n, E]
    h: Tensor | None = None  # [n, T, E]; None without attention
    keys: Tensor | None = None  # U_a h, [n, T, A]
    bar: Tensor | None = None  # [n, T]: -inf where there is no h_j; None if all are there

    def of(self, index: Tensor | slice) -> EncoderOutput:
        h, keys, bar = (None if y is None else y[index] for y in self[1:])
        return EncoderOutput(self.end[index], h, keys, bar)


@dataclass(frozen=True, eq=False)
class DecoderSweep(RunView):
    """A run of the decoder. Each context stands behind the state that it has made, where no step reads it: the loss reaches
    c_t there, and its costate is no part of the state's."""

    run: StepFunctionRun
    n: int  # entries of s

    @property
    def x(self) -> Tensor:
        return self.run.x[:, : self.n]

    @property
    def last(self) -> Tensor:
        return self.run.last[:, : self.n]

    @property
    def c(self) -> Tensor:
        """Step rows."""
        return self.run.x[self.run.rows.B :, self.n :]

    def pull(self, lam: Tensor) -> Tensor:
        """J_t' lam_t, as Stepped has it."""
        return self.run.pull(pad(lam, (0, self.run.x.shape[1] - self.n)))[:, : self.n]


@dataclass(frozen=True, eq=False)
class DecoderRun(HasLayout):
    """One run of an EncoderDecoder: the encoder has read u; the decoder runs for what is asked.

    u [T, B, inputs], lengths [B]; a [U, B, outputs], alignment [U, B, T]: of greedy decoding, what the network says by itself.
    """

    network: EncoderDecoder
    layout: Layout
    u_rows: Tensor  # step rows
    x0: Tensor | None
    levels: list[Layer]  # of the encoder

    def __repr__(self) -> str:
        return f"<DecoderRun of {self.layout.rows.B} samples, T = {self.layout.rows.T}>"

    @property
    def u(self) -> Tensor:
        return self.layout.padded(self.u_rows)

    @property
    def h(self) -> Tensor:
        """h_1..h_T of all samples, as step rows [N, E]."""
        return self.levels[-1].y

    @property
    def states(self) -> Tensor:
        """Those of the encoder's layers side by side, [T + 1, B, n]."""
        runs = [piece.run for level in self.levels for piece in level.directions]
        return torch.cat([self.layout.padded_states(run.x) for run in runs], 2)

    @functools.cached_property
    def greedy(self) -> Decoded:
        return self.decode()

    @property
    def a(self) -> Tensor:
        return self.greedy.a

    @property
    def alignment(self) -> Tensor:
        return self.greedy.alignment

    def loss(
        self, loss: LossLike, y: Any = None, *, mask: Tensor | None = None, reduce: str = "sum"
    ) -> Tensor:
        """The loss of each sample under teacher forcing, [B].

        loss    a name, a Loss or a function of (y_hat, y) on the tokens that count
        y       [U, B] tokens: each sample's own, its end, then -1
        mask    [U, B] weights of the tokens; zero leaves one out
        reduce  "sum" or "mean" over a sample's own tokens that count
        """
        return self._run_teacher_forced(self.h, loss, y, mask, reduce)[2]

    def _run_teacher_forced(
        self, h: Tensor, loss: LossLike, y: Any, mask: Any, reduce: str
    ) -> tuple[DecoderSweep, Judge, Tensor]:
        """The decoder's run beside y from the encoder's h, and the loss of each sample."""
        net = self.network
        if isinstance(loss, Tensor):
            raise KindError(
                "the loss of a decoder is a name, a Loss or a function of (y_hat, y); got a tensor."
            )
        y, layout = net.check_targets(y, self.layout.rows.B, h.device)
        mask = None if mask is None else torch.as_tensor(mask)[: len(y)]
        run = net.teacher_forced_sweep(layout, y, net.encoder_output(self.layout, h, layout))
        pre = net.pre_outputs(run.x[layout.rows.B :], run.c, layout.rows)
        judge = Judge.of(net.decoder, layout, loss, y, mask, reduce, pre)
        return run, judge, judge.sample_losses(pre)

    def costates(
        self, loss: LossLike, y: Any = None, *, mask: Tensor | None = None, reduce: str = "sum"
    ) -> Recorded:
        """lam_t = dL/dx_t of each sample's own loss, for every layer and direction of the encoder, then dL/ds_t for the
        decoder: `select(module="encoder")`, `select(module="decoder")`. Arguments as in `loss`. Differentiable."""
        refuse_transforms()
        net, again = self.network, torch.is_grad_enabled()
        with torch.enable_grad():
            if not self.h.requires_grad and net.training and net.encoder.dropout:
                raise InputError(
                    "this run was made without gradients (torch.no_grad), and what was dropped in it is not known: run the "
                    "network with gradients, or after net.eval()."
                )
            levels = (
                self.levels
                if self.h.requires_grad
                else net.encoder.run(self.layout, self.u_rows, self.x0)
            )
            h = levels[-1].y
            run, judge, value = self._run_teacher_forced(h, loss, y, mask, reduce)
            if not value.requires_grad:
                raise InputError(
                    "the loss does not depend on what the decoder says: it has no costates."
                )
            s, g = torch.autograd.grad(value.sum(), [run.run.x, h], create_graph=again)
        value, rows = value if again else value.detach(), judge.layout.rows
        on = torch.ones_like(s[:, 0], dtype=torch.bool)
        on[: rows.B] = False
        if judge.weight is not None:
            on[rows.B :] = judge.weight != 0
        with torch.set_grad_enabled(again):
            found, states = run.run.costate(s, None, on), net.decoder.n
            at = LayerRun(judge.layout, run, net.hidden, "decoder", 0, 0, "forward")
            decoder = Costates(at, found.mantissa[:, :states], found.exponent, value)
        where = lambda layer, direction: ("encoder", 0, layer, direction)
        encoder = costates_through_layers(
            self.layout, levels, g, net.encoder.last_state_gradients(None), value, again, where
        )
        return Recorded([*encoder, decoder], value)

    def decode(self, beam: int = 1, limit: int | None = None, normalise: float = 0.0) -> Decoded:
        """What the network says to each sample, by itself: greedily, or the best that a beam search finds.

        beam       hypotheses that are kept after each step, ended or not, those of the largest log-probability; 1 is greedy
        limit      tokens at most, the end among them; if not given, one more than twice the sample's own steps
        normalise  compare log-probability / length^normalise: 0 the sums over tokens, 1 their means
        """
        net, n = self.network, self.layout.lengths.to(self.h.device)
        if limit is not None:
            check_positive(limit=limit)
        with torch.no_grad():
            memory, step = net.encoder_output(self.layout, self.h, None), net.make_step()

            def say(token: Tensor, s: Tensor, sample: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                s, c, alpha = step(net.E(token), s, memory.of(sample))
                return s, net.pre_outputs(s, c), alpha

            most = 2 * n + 1 if limit is None else torch.full_like(n, limit)
            return decoding.decode(
                say, net.first_state(memory), net.outputs - 1, most, beam, normalise
            )


class EncoderDecoder(SequenceNet):
    """An encoder that reads a sequence, and a recurrent decoder that writes another, token by token.

    cell       of the encoder, or a list of them, one for each layer; decoder: that of the decoder, the encoder's last if
               not given; both as in co.Stack
    hidden     units of the decoder, and of each layer of the encoder in each direction
    outputs    the tokens, the last of which is the end
    layers, bidirectional, residual, x0: of the encoder, as in co.Stack; dropout: between its layers; engine: its own, too, for
               the decoder steps by torch's own operations
    attention  the decoder looks at all h_j again for every token; without, at `end` alone
    embedding  entries of the embedding of a token, `hidden` if not given
    deep       hidden layers of the decoder's readout, as in co.Network
    bias, structure, activation, options: of encoder and decoder, as far as their cells have them

    Parameters: encoder.*, decoder.* (W, R, b, V, b_o), and beside those of the recurrences the embeddings E, and S, C, W_a, U_a,
    v_a, which begin as torch.nn's do. BPTT and Penalised take it like a Network; `net(u)` has read u, and its `loss`,
    `costates` and `decode` let the decoder run.
    """

    readout = "sequence"
    output = "softmax"
    why_indivisible = "a decoder begins where the whole input has been read"

    def __init__(
        self,
        cell: CellLike | Sequence[CellLike] = "gru",
        *,
        inputs: int,
        hidden: int,
        outputs: int,
        decoder: CellLike | None = None,
        layers: int = 1,
        bidirectional: bool = False,
        residual: bool = False,
        dropout: float = 0.0,
        attention: bool = True,
        embedding: int | None = None,
        deep: int | Sequence[int] = (),
        activation: Activation | None = None,
        x0: str = "zero",
        bias: bool = True,
        structure: str | None = None,
        engine: str = "auto",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        m = hidden if embedding is None else embedding
        check_positive(inputs=inputs, hidden=hidden, layers=layers, embedding=m)
        if layers > MAX_LAYERS:
            raise InputError(f"layers must be at most {MAX_LAYERS:,}; got {layers:,}.")
        if not isinstance(outputs, int) or isinstance(outputs, bool) or outputs < 2:
            raise InputError(
                f"outputs is the number of tokens, one at least and the end; got {brief(outputs)}."
            )
        check_positive(outputs=outputs)
        kinds: list[Any] = list(cell) if isinstance(cell, list | tuple) else [cell] * layers
        if isinstance(cell, list | tuple) and layers not in (1, len(cell)):
            raise InputError(f"there are {len(cell)} cells and layers={layers}; leave out layers=.")
        if not kinds:
            raise KindError("an encoder is made of a list of cells, from the input up; got none.")
        last = kinds[-1] if decoder is None else decoder
        if decoder is None and isinstance(last, nn.Module):
            raise InputError(
                "a module is one recurrence: its weights would be those of encoder and decoder. Give decoder=."
            )
        options |= {} if activation is None else {"activation": activation}
        own = lambda *of: {
            name: y for name, y in options.items() if any(name in option_names(kind) for kind in of)
        }
        if unknown := options.keys() - own(*kinds, last):
            raise KindError(
                f"neither encoder nor decoder has an option {', '.join(sorted(unknown))}."
            )
        check_dtype_and_device(dtype, device)
        make: dict[str, Any] = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        common = {"structure": structure, "bias": bias, **make}
        self.inputs, self.hidden, self.outputs, self.attention = inputs, hidden, outputs, attention
        self.encoder = Layers(
            kinds, inputs=inputs, hidden=hidden, bidirectional=bidirectional, residual=residual, dropout=dropout, x0=x0,
            engine=engine, **{"activation": None, **own(*kinds)}, **common,
        )  # fmt: skip
        self.dropout = self.encoder.dropout
        E = self.encoder.widths[-1]
        self.decoder = Network(
            make_cell(last, m + E, hidden), inputs=m + E, hidden=hidden, outputs=outputs, readout="every", output="softmax",
            deep=deep, **own(last), **common,
        )  # fmt: skip
        if self.decoder.cell is not None and self.decoder.cell.given:
            raise Unsupported(
                f"cell '{self.decoder.cell.name}' is given data by the steps of a whole sequence, and a decoder does not know "
                "how long its own will be. Use another cell for the decoder."
            )
        self.E = nn.Embedding(
            outputs, m, **make
        )  # the last is the beginning: no step reads the end
        self.S = nn.Linear(E, self.decoder.n, bias, **make)
        self.C = nn.Linear(E, outputs, bias=False, **make)
        if attention:
            self.W_a = nn.Linear(self.decoder.visible_width, hidden, bias, **make)
            self.U_a = nn.Linear(E, hidden, bias=False, **make)
            self.v_a = nn.Linear(hidden, 1, bias=False, **make)

    @property
    def V(self) -> nn.Parameter:
        """The decoder's readout."""
        return self.decoder.V

    @property
    def like(self) -> Tensor:
        return self.decoder.V

    def readout_extras(self) -> tuple[str, ...]:
        return ("an answer that is a sequence",)

    @property
    def engine(self) -> Choice:
        return STEPWISE

    def extra_repr(self) -> str:
        kinds = ", ".join(m.name for m, *_ in self.encoder.by_layer)
        words = [w for w in ("bidirectional", "residual") if getattr(self.encoder, w)]
        words += [] if self.attention else ["no attention"]
        sizes = f"inputs={self.inputs}, hidden={self.hidden}, outputs={self.outputs}"
        return ", ".join([f"[{kinds}] to {self.decoder.name}", *words, sizes])

    def reset_parameters(self) -> None:
        for part in (*self.encoder, *self.children()):
            if part is not self.encoder:
                part.reset_parameters()

    def run(self, batch: Batch, called: bool = False) -> DecoderRun:
        """What has read u; x0 [B, n] or [n], where the encoder begins."""
        if not called and self._must_be_called(batch):
            return self(batch.u, batch.lengths, batch.x0)
        refuse_wrapper_around(self)
        layout, rows_u = lay_out(batch.u, batch.lengths, self.inputs, self.like)
        return DecoderRun(
            self, layout, rows_u, batch.x0, self.encoder.run(layout, rows_u, batch.x0)
        )

    def encoder_output(self, layout: Layout, h: Tensor, order: Layout | None) -> EncoderOutput:
        """What the decoder reads of step rows h, its samples in the order of the rows it will run over."""
        rows, ahead = layout.rows, h.shape[1] // (1 + self.encoder.bidirectional)
        sort = lambda y: y if order is None else order.sort(y)
        last = rows.last(pad(h, (0, 0, rows.B, 0)))
        ends = [
            last[:, :ahead],
            h[: rows.B, ahead:],
        ]  # the reverse direction ends at the first step
        end = sort(layout.unsort(torch.cat(ends, 1)))
        if not self.attention:
            return EncoderOutput(end)
        h = sort(layout.padded(h).transpose(0, 1)).contiguous()
        bar = None
        if not rows.uniform:
            there = layout.mask[1:].T.to(h.device)
            bar = sort(h.new_zeros(there.shape).masked_fill(~there, -torch.inf))
        return EncoderOutput(end, h, self.U_a(h), bar)

    def first_state(self, memory: EncoderOutput) -> Tensor:
        """s_0"""
        return torch.tanh(self.S(memory.end))

    def attend(self, s: Tensor, memory: EncoderOutput) -> tuple[Tensor, Tensor]:
        """c_t [n, E] and alpha_t [n, T] from s_{t-1}"""
        if memory.h is None:
            return memory.end, s.new_zeros(len(s), 0)
        e = self.v_a(torch.tanh(memory.keys + self.W_a(self.decoder.visible_state(s))[:, None]))[
            ..., 0
        ]
        alpha = torch.softmax(e if memory.bar is None else e + memory.bar, 1)
        return (alpha[:, None] @ memory.h)[:, 0], alpha

    def make_step(self) -> Callable[[Tensor, Tensor, EncoderOutput], tuple[Tensor, Tensor, Tensor]]:
        """(E y_{t-1}, s_{t-1}, memory) -> s_t, c_t, alpha_t; weights that are the same at every step are made once."""
        net = self.decoder
        if net.cell is None:
            f: Callable[..., Tensor] = net.call_step
            input_weights = None
        else:
            taken = net.effective_weights()
            f, input_weights = taken.step_function(), taken.input_weights

        def step(e: Tensor, s: Tensor, memory: EncoderOutput) -> tuple[Tensor, Tensor, Tensor]:
            c, alpha = self.attend(s, memory)
            drive = net.drive(torch.cat([e, c], 1), input_weights)
            return f(*(y for y in drive if y is not None), s), c, alpha

        return step

    def teacher_forced_sweep(
        self, layout: Layout, y: Tensor, memory: EncoderOutput
    ) -> DecoderSweep:
        """The decoder's run beside y [U, B], which it hears one step late."""
        step, n = self.make_step(), self.decoder.n
        late = layout.flat(torch.cat([torch.full_like(y[:1], self.outputs - 1), y[:-1]]))

        def both(e: Tensor, x: Tensor) -> Tensor:
            return torch.cat(step(e, x[:, :n], memory.of(slice(len(x))))[:2], 1)

        x0 = pad(self.first_state(memory), (0, memory.end.shape[1]))
        return DecoderSweep(StepFunctionRun.run(both, layout.rows, (self.E(late),), x0), n)

    def pre_outputs(self, s: Tensor, c: Tensor, rows: Rows | None = None) -> Tensor:
        """a = V s + C c + b_o"""
        net = self.decoder
        return net.pre_outputs(
            rows, net.visible_state(s), net.V, net.b_o, None, net.extra_weights()
        ) + self.C(c)  # type: ignore[arg-type]

    def check_targets(self, y: Any, B: int, device: torch.device) -> tuple[Tensor, Layout]:
        """y [U, B], checked, without steps that are padding for all, and how its samples lie in rows."""
        K = self.outputs - 1
        if y is None:
            raise InputError(
                "a decoder learns from what it should have said: pass y, tokens [U, B]."
            )
        y = tensor_of("y", y).to(device)
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise KindError(f"y must hold tokens, whole numbers; got {y.dtype}.")
        if y.dim() != 2 or y.shape[1] != B:
            raise InputError(
                f"y has shape {list(y.shape)}; expected tokens [U, {B}], time-major, for {B} samples."
            )
        y = y.long()
        t, n = torch.arange(len(y), device=device)[:, None], (y == K).long().cumsum(0).eq(0).sum(0)
        right = torch.where(t < n, (y >= 0) & (y < K), torch.where(t == n, y == K, y == -1)).all(
            0
        ) & (n < len(y))
        if not right.all():
            j = int((~right).nonzero()[0, 0])
            raise InputError(
                f"sample {j} of y is {y[:, j].tolist()}; expected its tokens, each in 0..{K - 1}, then the end, {K}, then -1."
            )
        lengths = (n + 1).tolist()
        return y[: max(lengths)], Layout.of(lengths, max(lengths), B)

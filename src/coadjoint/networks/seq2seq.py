"""Sequence to sequence: an encoder reads u, a decoder writes y, token by token.

h_1..h_T = y^L of the encoder, a stack of recurrences over u
end  = y^L after the last step of each direction
s_0  = tanh(S end + b_s)
e_tj = v_a . tanh(W_a s_{t-1} + U_a h_j + b_a)
c_t  = sum_j alpha_tj h_j,  alpha_t = softmax of e_t over the steps of the sample
s_t  = f(W r(s_{t-1}), R [E y_{t-1}; c_t] + b, s_{t-1}, p)
a_t  = V s_t + C c_t + b_o,  y_hat_t = softmax(a_t)

Bahdanau, Cho & Bengio (ICLR 2015); without attention c_t = end (Cho et al. 2014, Sutskever et al.
2014). Tokens are 0..K-1, and K is the end; y_0, the beginning, has its own embedding. Under teacher
forcing y_{t-1} is the target; when the network decodes, it is the token it has written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..cells.activations import Activation
from ..cells.parameters import check_dtype_and_device
from ..errors import InputError, KindError, Unsupported, brief
from ..objectives.batch import Batch
from ..sweeps.engines import Choice
from ..sweeps.layout import Layout, lay_out, tensor_of
from ..sweeps.rows import Rows
from ..sweeps.step_run import StepFunctionRun
from ..sweeps.wrappers import refuse_wrapper_around
from .decoder_run import DecoderRun, DecoderSweep, EncoderOutput
from .interface import SequenceNet, check_positive
from .layer_stack import SWITCHES, CellLike, Layers, make_cell, option_names
from .network import Network
from .readout import TensorOptions
from .text import compact_repr, dtype_texts, layers_text, output_text, sizes_text

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

MAX_LAYERS = 1000
STEPWISE = Choice(
    "autograd",
    "a decoder takes one step at a time; each layer of `net.encoder` has an engine.",
)
# (E y_{t-1}, s_{t-1}, encoder output) -> s_t, c_t, alpha_t
AttentionStep = Callable[[Tensor, Tensor, EncoderOutput], tuple[Tensor, Tensor, Tensor]]


class EncoderDecoder(SequenceNet):
    """An encoder that reads a sequence, and a recurrent decoder that writes another one in tokens.

    cell       of the encoder, or a list of cells, one for each layer, as in co.Stack
    hidden     units of the decoder, and of each layer of the encoder in each direction
    outputs    the number of tokens, the last of which is the end
    decoder    the cell of the decoder; default: that of the encoder's top layer
    layers, bidirectional, residual, dense, x0
               of the encoder, as in co.Stack
    dropout    between the layers of the encoder
    attention  the decoder attends to all h_j for every token; otherwise it reads only `end`
    embedding  entries of the embedding of a token; default `hidden`
    deep       widths of hidden layers in the decoder's readout, as in co.Network
    engine     of the encoder; the decoder steps by torch operations
    bias, structure, activation, options
               of encoder and decoder, as far as their cells have them

    Parameters: encoder.* and decoder.* (W, R, b, V, b_o); the embeddings E, and S, C, W_a, U_a and
    v_a, which are drawn as in torch.nn. BPTT and Penalised take it like a Network. `net(u)` runs
    the encoder; `loss`, `costates` and `decode` of that run let the decoder run.

    Example:
        >>> import torch, coadjoint as co
        >>> net = co.EncoderDecoder("gru", inputs=3, hidden=8, outputs=5)  # 0..3, and 4, the end
        >>> run = net(torch.zeros(6, 2, 3))
        >>> decoded = run.decode(beam=2, limit=4)
        >>> decoded.tokens.shape[1], decoded.log_probability.shape
        (2, torch.Size([2]))
    """

    readout = "sequence"
    output = "softmax"
    why_indivisible = "a decoder begins after the entire input has been read"

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
        dense: bool = False,
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
        **options: object,
    ) -> None:
        super().__init__()
        embedding_width = hidden if embedding is None else embedding
        check_positive(inputs=inputs, hidden=hidden, layers=layers, embedding=embedding_width)
        if not isinstance(outputs, int) or isinstance(outputs, bool) or outputs < 2:
            raise InputError(
                "outputs is the number of tokens, including the end token, so at least 2; got "
                f"{brief(outputs)}."
            )
        check_positive(outputs=outputs)  # refuses a number that is too large
        encoder_cells = _encoder_cells(cell, layers)
        decoder_cell = encoder_cells[-1] if decoder is None else decoder
        if decoder is None and isinstance(decoder_cell, nn.Module):
            raise InputError(
                "a module has one set of weights, which encoder and decoder would share. "
                "Give decoder=."
            )
        if activation is not None:
            options["activation"] = activation
        encoder_options = _options_of(encoder_cells, options)
        decoder_options = _options_of([decoder_cell], options)
        unknown = options.keys() - encoder_options.keys() - decoder_options.keys()
        if unknown:
            raise KindError(
                f"neither encoder nor decoder has an option {', '.join(sorted(unknown))}."
            )
        check_dtype_and_device(dtype, device)
        make: TensorOptions = {"dtype": dtype or torch.get_default_dtype(), "device": device}
        self.inputs = inputs
        self.hidden = hidden
        self.outputs = outputs
        self.attention = attention
        self.encoder = Layers(
            encoder_cells,
            inputs=inputs,
            hidden=hidden,
            bidirectional=bidirectional,
            residual=residual,
            dense=dense,
            dropout=dropout,
            activation=encoder_options.pop("activation", None),
            x0=x0,
            bias=bias,
            structure=structure,
            engine=engine,
            **make,
            **encoder_options,
        )
        self.dropout = self.encoder.dropout
        encoder_width = self.encoder.widths[-1]
        decoder_inputs = embedding_width + encoder_width
        self.decoder = Network(
            make_cell(decoder_cell, decoder_inputs, hidden),
            inputs=decoder_inputs,
            hidden=hidden,
            outputs=outputs,
            readout="every",
            output="softmax",
            deep=deep,
            structure=structure,
            bias=bias,
            **make,
            **decoder_options,
        )
        if self.decoder.cell is not None and self.decoder.cell.given:
            raise Unsupported(
                f"cell '{self.decoder.cell.name}' is given data for the steps of an entire "
                "sequence, but a decoder does not know how long its own will be. Use another cell "
                "for the decoder."
            )
        # No step reads the end, so its embedding serves as that of the beginning, y_0.
        self.E = nn.Embedding(outputs, embedding_width, **make)
        self.S = nn.Linear(encoder_width, self.decoder.n, bias, **make)
        self.C = nn.Linear(encoder_width, outputs, bias=False, **make)
        if attention:
            self.W_a = nn.Linear(self.decoder.visible_width, hidden, bias, **make)
            self.U_a = nn.Linear(encoder_width, hidden, bias=False, **make)
            self.v_a = nn.Linear(hidden, 1, bias=False, **make)

    @property
    def V(self) -> nn.Parameter:
        """The weights of the decoder's readout."""
        return self.decoder.V

    @property
    def like(self) -> Tensor:
        """V, whose type and device are the network's."""
        return self.decoder.V

    def readout_extras(self) -> tuple[str, ...]:
        """What makes the readout more than a = V h + b_o, in words for an error."""
        return ("an output that is a sequence",)

    @property
    def engine(self) -> Choice:
        """The decoder's engine, which is always "autograd"."""
        return STEPWISE

    def extra_repr(self) -> str:
        """The text between the brackets of repr(net)."""
        first = [directions[0] for directions in self.encoder.by_layer]
        names, options = layers_text([each.name for each in first], [each.cell for each in first])
        words = [f"{names} to {self.decoder.name}", *options]
        words += [name for name in SWITCHES if getattr(self.encoder, name)]
        if not self.attention:
            words.append("no attention")
        words += [sizes_text(self.inputs, [self.hidden], self.outputs)]
        words += [output_text(self.output), *dtype_texts(self), f"engine={str(self.engine)!r}"]
        return ", ".join(words)

    __repr__ = compact_repr

    def reset_parameters(self) -> None:
        """Draw all parameters again, as the constructor does; a learned x0 becomes zero."""
        self.encoder.reset_parameters()
        for module in self.children():
            if isinstance(module, Network | nn.Embedding | nn.Linear):
                module.reset_parameters()

    def run(self, batch: Batch, called: bool = False) -> DecoderRun:
        """The run of the encoder, from which the decoder begins. x0 [B, n] or [n] is the encoder's.

        called: by `forward`, so that torch's hooks have fired already.
        """
        if not called and self._must_be_called(batch):
            decoder_run: DecoderRun = self(batch.u, batch.lengths, batch.x0)
            return decoder_run
        refuse_wrapper_around(self)
        layout, u_rows = lay_out(batch.u, batch.lengths, self.inputs, self.like)
        encoder_layers = self.encoder.run(layout, u_rows, batch.x0)
        return DecoderRun(self, layout, u_rows, batch.x0, encoder_layers)

    def encoder_output(self, layout: Layout, h: Tensor, order: Layout | None) -> EncoderOutput:
        """What the decoder reads of the encoder's outputs h [N, E].

        layout  that of h
        order   the layout of the decoder's rows, by which samples are sorted; None: user's order
        """
        rows = layout.rows
        # rows.last() takes state rows, which begin with the B rows of x_0. The reverse direction
        # ends at the first step of the sequence.
        at_last = rows.last(pad(h, (0, 0, rows.B, 0)))
        at_first = h[: rows.B]
        parts: list[Tensor] = []
        column = 0
        for width, is_reverse in self.encoder.output_parts():
            rows_at_end = at_first if is_reverse else at_last
            parts.append(rows_at_end[:, column : column + width])
            column += width
        end = _sort(order, layout.unsort(torch.cat(parts, 1)))
        if not self.attention:
            return EncoderOutput(end)
        h = _sort(order, layout.padded(h).transpose(0, 1)).contiguous()
        padding = None
        if not rows.uniform:
            exists = layout.mask[1:].T.to(h.device)
            padding = _sort(order, h.new_zeros(exists.shape).masked_fill(~exists, -torch.inf))
        return EncoderOutput(end, h, self.U_a(h), padding)

    def first_state(self, encoded: EncoderOutput) -> Tensor:
        """s_0 = tanh(S end + b_s), [m, n]."""
        return torch.tanh(self.S(encoded.end))

    def attend(self, s: Tensor, encoded: EncoderOutput) -> tuple[Tensor, Tensor]:
        """The context c_t [m, E] and the attention alpha_t [m, T] from s_{t-1} [m, n].

        c_t = sum_j alpha_tj h_j,
        alpha_t = softmax over j of v_a . tanh(W_a s_{t-1} + U_a h_j + b_a).
        Without attention, c_t is `encoded.end`, and alpha_t has no columns.
        """
        if encoded.h is None:
            return encoded.end, s.new_zeros(len(s), 0)
        query = self.W_a(self.decoder.visible_state(s))[:, None]
        energy = self.v_a(torch.tanh(encoded.keys + query))[..., 0]
        if encoded.padding is not None:
            energy = energy + encoded.padding
        alpha = torch.softmax(energy, 1)
        return (alpha[:, None] @ encoded.h)[:, 0], alpha

    def make_step(self) -> AttentionStep:
        """One step of the decoder: (E y_{t-1}, s_{t-1}, encoder output) -> s_t, c_t, alpha_t.

        The decoder's effective weights are computed here, once for all steps.
        """
        net = self.decoder
        advance: Callable[..., Tensor] = net.call_step
        input_weights = None
        if net.cell is not None:
            weights = net.effective_weights()
            advance = weights.step_function()
            input_weights = weights.input_weights

        def step(token: Tensor, s: Tensor, encoded: EncoderOutput) -> tuple[Tensor, Tensor, Tensor]:
            """s_t, c_t and alpha_t; token is the embedding E y_{t-1}."""
            c, alpha = self.attend(s, encoded)
            drive = net.drive(torch.cat([token, c], 1), input_weights)
            return advance(*(part for part in drive if part is not None), s), c, alpha

        return step

    def teacher_forced_sweep(
        self, layout: Layout, y: Tensor, encoded: EncoderOutput
    ) -> DecoderSweep:
        """The decoder's run along the targets y [U, B], of which step t reads y_{t-1}.

        layout   that of the targets
        encoded  the encoder's output, with samples in the order of the layout's rows
        """
        step = self.make_step()
        n = self.decoder.n
        beginning = torch.full_like(y[:1], self.outputs - 1)  # y_0 is written as the end token
        previous = layout.flat(torch.cat([beginning, y[:-1]]))

        def state_and_context(token: Tensor, x: Tensor) -> Tensor:
            """(E y_{t-1}, (s_{t-1}, c_{t-1})) -> (s_t, c_t) of the samples that still run."""
            # Rows are sorted by length: the samples that still run are the first ones.
            s, c, _ = step(token, x[:, :n], encoded.select(slice(len(x))))
            return torch.cat([s, c], 1)

        x0 = pad(self.first_state(encoded), (0, encoded.end.shape[1]))
        run = StepFunctionRun.run(state_and_context, layout.rows, (self.E(previous),), x0)
        return DecoderSweep(run, n)

    def pre_outputs(self, s: Tensor, c: Tensor, rows: Rows | None = None) -> Tensor:
        """The pre-outputs a = V s + C c + b_o, V s with hidden layers in between if `deep`.

        rows  those of s and c if they are step rows; None if they belong to a single step
        """
        net = self.decoder
        h = net.visible_state(s)
        by_context: Tensor = self.C(c)
        return net.pre_outputs(rows, h, net.V, net.b_o, None, net.extra_weights()) + by_context

    def check_targets(
        self, y: ArrayLike | None, B: int, device: torch.device
    ) -> tuple[Tensor, Layout]:
        """The targets [U, B] without steps that are padding for all samples, and their layout.

        Refused unless each column holds tokens, then the end, then -1.
        """
        end = self.outputs - 1
        if y is None:
            raise InputError("a decoder is trained on target sequences: pass y, tokens [U, B].")
        y = tensor_of("y", y).to(device)
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise KindError(f"y must hold tokens, which are whole numbers; got {y.dtype}.")
        if y.dim() != 2 or y.shape[1] != B:
            raise InputError(
                f"y has shape {list(y.shape)}; expected tokens [U, {B}], time-major, for {B} "
                "samples."
            )
        y = y.long()
        # A sample is right if it holds tokens before `length`, the end there, and -1 after it.
        position = torch.arange(len(y), device=device)[:, None]
        length = (y == end).long().cumsum(0).eq(0).sum(0)  # tokens before the first end
        is_token = (y >= 0) & (y < end)
        is_end_or_padding = torch.where(position == length, y == end, y == -1)
        is_right = torch.where(position < length, is_token, is_end_or_padding).all(0)
        is_right = is_right & (length < len(y))  # otherwise it has no end
        if not is_right.all():
            j = int((~is_right).nonzero()[0, 0])  # the first wrong one
            raise InputError(
                f"sample {j} of y is {y[:, j].tolist()}; expected its tokens, each in "
                f"0..{end - 1}, then the end, {end}, then -1."
            )
        lengths = (length + 1).tolist()
        return y[: max(lengths)], Layout.of(lengths, max(lengths), B)


def _encoder_cells(cell: CellLike | Sequence[CellLike], layers: int) -> list[CellLike]:
    """The cell of each layer of the encoder: one cell `layers` times, or a list as it is."""
    if layers > MAX_LAYERS:
        raise InputError(f"layers must be at most {MAX_LAYERS:,}; got {layers:,}.")
    if not isinstance(cell, list | tuple):
        return [cell] * layers  # type: ignore[list-item]
    if layers not in (1, len(cell)):
        raise InputError(f"there are {len(cell)} cells but layers={layers}; leave out layers=.")
    if not cell:
        raise KindError("an encoder takes a list of cells, from the input up; got an empty list.")
    return list(cell)


def _options_of(cells: Sequence[CellLike], options: dict[str, object]) -> dict[str, Any]:
    """The options that at least one of the cells has."""
    known = {name for cell in cells for name in option_names(cell)}
    return {name: value for name, value in options.items() if name in known}


def _sort(order: Layout | None, y: Tensor) -> Tensor:
    """The samples y [B, ...] in the order of a layout's rows; None: as they are."""
    return y if order is None else order.sort(y)

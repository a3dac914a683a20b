"""DecoderRun: the run of an EncoderDecoder, its loss, costates and decoded tokens.

networks/seq2seq.py has the equations.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import InputError, KindError
from ..objectives.losses import LossLike
from ..sweeps.costates import Costates
from ..sweeps.layout import HasLayout, Layout
from ..sweeps.run import RunView
from ..sweeps.step_run import StepFunctionRun
from . import decoding
from .decoding import Decoded
from .interface import check_positive, holds_source
from .judge import Judge
from .layers import Layer, LayerRun, Recorded, costates_through_layers, refuse_transforms
from .sampling import Sampling

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from .network import Network
    from .seq2seq import EncoderDecoder


class EncoderOutput(NamedTuple):
    """What a decoder reads of the encoder, for m samples in some order."""

    end: Tensor  # y^L after the last step of each direction, [m, E]
    h: Tensor | None = None  # y^L of all steps, [m, T, E]; None without attention
    keys: Tensor | None = None  # U_a h, [m, T, A]
    padding: Tensor | None = None  # [m, T], -inf where a sample has no step; None if all have

    def select(self, index: Tensor | slice) -> EncoderOutput:
        """The same for some of the m samples: their numbers, or a slice of them."""
        return EncoderOutput(
            self.end[index],
            None if self.h is None else self.h[index],
            None if self.keys is None else self.keys[index],
            None if self.padding is None else self.padding[index],
        )


@dataclass(frozen=True, eq=False)
class DecoderSweep(RunView):
    """A run of the decoder, seen without the contexts that its rows hold behind the states.

    Row t of the inner run is (s_t, c_t). No step reads the context c_t of the row before, so the
    loss's gradient at c_t stops there and is not a part of the costate of s_t.
    """

    run: StepFunctionRun
    n: int  # entries of s

    @property
    def x(self) -> Tensor:
        """The decoder's states s, [B + N, n]."""
        return self.run.x[:, : self.n]

    @property
    def last(self) -> Tensor:
        """Each sample's last state, [B, n]."""
        return self.run.last[:, : self.n]

    @property
    def c(self) -> Tensor:
        """The contexts c_1, c_2, ... in step rows, [N, E]."""
        return self.run.x[self.run.rows.B :, self.n :]

    def pull(self, lam: Tensor) -> Tensor:
        """J_t' lam_t for all steps at once, J_t = ds_t/ds_{t-1}: state rows to step rows."""
        # The inner run's rows are (s_t, c_t): zeros stand for the costates of the contexts.
        context_width = self.run.x.shape[1] - self.n
        return self.run.pull(pad(lam, (0, context_width)))[:, : self.n]


class TeacherForced(NamedTuple):
    """The decoder's run with the targets as its inputs, and the loss."""

    sweep: DecoderSweep
    judge: Judge
    loss: Tensor  # [B]


@dataclass(frozen=True, eq=False)
class DecoderRun(HasLayout):
    """One run of an EncoderDecoder. The encoder has read u; the decoder runs when it is needed.

    u          [T, B, inputs]
    a          [U, B, outputs], the pre-outputs of greedy decoding
    alignment  [U, B, T], its attention at each token
    lengths    [B], the steps of each input

    Example:
        >>> import torch, coadjoint as co
        >>> net = co.EncoderDecoder("gru", inputs=3, hidden=8, outputs=5)
        >>> run = net(torch.zeros(6, 2, 3))
        >>> y = torch.tensor([[0, 1], [4, 2], [-1, 4]])  # 4 is the end, -1 padding
        >>> run.loss("cross-entropy", y).shape
        torch.Size([2])
        >>> run.costates("cross-entropy", y)
        <costates of encoder, call 0, layer 0, forward; decoder, call 0, layer 0, forward>
    """

    network: EncoderDecoder
    layout: Layout
    u_rows: Tensor  # [N, inputs]
    x0: Tensor | None
    encoder_layers: list[Layer]

    def __repr__(self) -> str:
        return f"<DecoderRun of {self.layout.rows.B} samples, T = {self.layout.rows.T}>"

    @property
    def u(self) -> Tensor:
        """The inputs, [T, B, inputs]; padding is zero."""
        return self.layout.padded(self.u_rows)

    @property
    def h(self) -> Tensor:
        """The encoder's outputs h_1, ..., h_T in step rows, [N, E]."""
        return self.encoder_layers[-1].y

    @property
    def states(self) -> Tensor:
        """The states of the encoder's layers side by side, [T + 1, B, n]."""
        runs = [direction.run for layer in self.encoder_layers for direction in layer.directions]
        return torch.cat([self.layout.padded_states(run.x) for run in runs], 2)

    @functools.cached_property
    def greedy(self) -> Decoded:
        """The result of greedy decoding."""
        return self.decode()

    @property
    def a(self) -> Tensor:
        """The pre-outputs of greedy decoding, [U, B, outputs]."""
        return self.greedy.a

    @property
    def alignment(self) -> Tensor:
        """The attention of greedy decoding, [U, B, T]."""
        return self.greedy.alignment

    def loss(
        self,
        loss: LossLike,
        y: ArrayLike | None = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
    ) -> Tensor:
        """The loss of each sample under teacher forcing, [B].

        loss    a name, a Loss or a function of (y_hat, y) on the tokens that count
        y       [U, B] tokens: those of each sample, the end, then -1
        mask    [U, B] weights of the tokens; a token of weight zero does not count
        reduce  "sum" or "mean" over a sample's tokens that count
        """
        return self._run_teacher_forced(self.h, loss, y, mask, reduce).loss

    def _run_teacher_forced(
        self,
        h: Tensor,
        loss: LossLike,
        y: ArrayLike | None,
        mask: ArrayLike | None,
        reduce: str,
    ) -> TeacherForced:
        """The decoder's run along the targets y, from the encoder's outputs h in step rows, [N, E].

        Arguments as in `loss`.
        """
        net = self.network
        if isinstance(loss, Tensor):
            raise KindError(
                "the loss of a decoder is a name, a Loss or a function of (y_hat, y); got a tensor."
            )
        targets, layout = net.check_targets(y, self.layout.rows.B, h.device)
        # The targets lack the last steps that are padding for all samples; so must the mask.
        weights = None if mask is None else torch.as_tensor(mask)[: len(targets)]
        encoded = net.encoder_output(self.layout, h, layout)
        sweep = net.teacher_forced_sweep(layout, targets, encoded)
        s = sweep.x[layout.rows.B :]  # without s_0, which has no output
        a_rows = net.pre_outputs(s, sweep.c, layout.rows)
        judge = Judge.of(net.decoder, layout, loss, targets, weights, reduce, a_rows)
        return TeacherForced(sweep, judge, judge.sample_losses(a_rows))

    def costates(
        self,
        loss: LossLike,
        y: ArrayLike | None = None,
        *,
        mask: Tensor | None = None,
        reduce: str = "sum",
        hold: str | None = None,
    ) -> Recorded:
        """lam_t = dL/dx_t for all layers and directions of the encoder, dL/ds_t of the decoder.

        Choose by `select(module="encoder")` or `select(module="decoder")`. Arguments as in `loss`.
        They are differentiable if gradients are enabled, for penalties. With hold="source", the
        loss's derivative by what the readout reads, states and contexts of the decoder, is a
        constant in their derivatives; what the decoder sends to the encoder is not.
        """
        held = holds_source(hold)
        refuse_transforms()
        net = self.network
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            layers = self._layers_with_graph()
            h = layers[-1].y
            forced = self._run_teacher_forced(h, loss, y, mask, reduce)
            if not forced.loss.requires_grad:
                raise InputError(
                    "the loss does not depend on the decoder's outputs, so it has no costates."
                )
            by_decoder, by_h = _loss_gradients(forced, h, create_graph, held)
        value = forced.loss if create_graph else forced.loss.detach()
        with torch.set_grad_enabled(create_graph):
            decoder = _decoder_costates(forced, by_decoder, value, net.decoder)
        # The decoder reads the encoder's last states as rows of h, so they have no other source.
        encoder = costates_through_layers(
            self.layout,
            layers,
            by_h,
            net.encoder.last_state_gradients(layers, None),
            value,
            create_graph,
            lambda layer, direction: ("encoder", 0, layer, direction),
        )
        return Recorded([*encoder, decoder], value, self)

    def _layers_with_graph(self) -> list[Layer]:
        """The encoder's layers; they are run again if this run was made without gradients."""
        net = self.network
        if self.h.requires_grad:
            return self.encoder_layers
        if net.training and net.encoder.dropout:
            raise InputError(
                "this run was made without gradients (torch.no_grad), so its dropout masks are "
                "lost. Run the network with gradients, or after net.eval()."
            )
        return net.encoder.run(self.layout, self.u_rows, self.x0)

    def decode(
        self,
        beam: int = 1,
        limit: int | None = None,
        normalise: float = 0.0,
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int = 0,
    ) -> Decoded:
        """The tokens that the network writes for each sample when it reads its own output.

        beam       the number of hypotheses kept after each step, by log-probability; 1 is greedy
        limit      the largest number of tokens, the end included; default 2 T + 1, twice the T
                   steps of a sample and the end
        normalise  compare log-probability / length^normalise: 0 sums over tokens, 1 takes means
        temperature, top_k, top_p  any of them draws tokens at random instead of searching for the
                   best: see `networks.sampling`; the temperature is then 1 if it is not given
        seed       of these draws, without effect on a search; what is drawn for a sample also
                   depends on its place in the batch
        """
        net = self.network
        lengths = self.layout.lengths.to(self.h.device)
        if limit is not None:
            check_positive(limit=limit)
        draws = any(option is not None for option in (temperature, top_k, top_p))
        if draws and (beam != 1 or normalise != 0):
            raise InputError(
                "decode either searches (beam, normalise) or draws tokens (temperature, top_k, "
                "top_p): give one kind."
            )
        sampling = Sampling(1.0 if temperature is None else temperature, top_k, top_p)
        with torch.no_grad():
            encoded = net.encoder_output(self.layout, self.h, None)
            step = net.make_step()

            def write(token: Tensor, s: Tensor, sample: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                """One step: (y_{t-1}, s_{t-1}, samples) of m hypotheses -> s_t, a_t, alpha_t."""
                s, c, alpha = step(net.E(token), s, encoded.select(sample))
                return s, net.pre_outputs(s, c), alpha

            limits = 2 * lengths + 1 if limit is None else torch.full_like(lengths, limit)
            end = net.outputs - 1  # the last token
            first = net.first_state(encoded)
            if draws:
                return decoding.draw_tokens(write, first, end, limits, sampling, seed)
            return decoding.decode(write, first, end, limits, beam, normalise)


def _loss_gradients(
    forced: TeacherForced, h: Tensor, create_graph: bool, held: bool
) -> tuple[Tensor, Tensor]:
    """The loss's direct gradient by the decoder's rows (s_t, c_t), and its gradient by h.

    create_graph: they can be differentiated again; held: the first one is a constant to that.
    """
    rows = forced.sweep.run.x
    total = forced.loss.sum()
    if not held:
        by_rows, by_h = torch.autograd.grad(total, [rows, h], create_graph=create_graph)
        return by_rows, by_h
    (by_rows,) = torch.autograd.grad(total, rows, retain_graph=True)
    # The loss reads h by these rows alone.
    (by_h,) = torch.autograd.grad(rows, h, by_rows, create_graph=create_graph, retain_graph=True)
    return by_rows, by_h


def _decoder_costates(forced: TeacherForced, s: Tensor, loss: Tensor, decoder: Network) -> Costates:
    """The costates of the decoder's states.

    s       the loss's gradient by the rows (s_t, c_t), [B + N, n + E]
    loss    of each sample, [B]
    decoder  whose units and slots they are
    """
    sweep, judge, _ = forced
    B = judge.layout.rows.B
    # The states that the loss reads: not s_0, and not at tokens of weight zero.
    has_loss = torch.ones_like(s[:, 0], dtype=torch.bool)
    has_loss[:B] = False
    if judge.weight is not None:
        has_loss[B:] = judge.weight != 0
    costate = sweep.run.costate(s, None, has_loss)  # of (s_t, c_t); only s_t is returned
    names = decoder.slot_names
    place = ("decoder", 0, 0, "forward")
    run = LayerRun(judge.layout, sweep, decoder.hidden, *place, slot_names=names)
    return Costates(run, costate.mantissa[:, : sweep.n], costate.exponent, loss)

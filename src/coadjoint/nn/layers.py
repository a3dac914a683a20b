"""The layers and directions of a module, each of them one sweep over flat rows.

A projected state h = W_hr m is read by W_hh W_hr, so that a sweep carries m itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from ..errors import Unsupported
from ..networks import layers as network_layers
from ..sweeps import engines
from ..sweeps.affine import affine
from ..sweeps.checks import answers_late
from ..sweeps.engines import Choice
from ..sweeps.run import SweepRun
from ..sweeps.step_run import StepFunctionRun
from . import layer_norm
from .captured import CapturedModules
from .frame import (
    DirectionWeights,
    Frame,
    SweepInputs,
    drive_of,
    find_formula,
    merge_biases,
    reset_bias,
    run_sweep,
    split_base_and_side,
    with_own_gradient,
    zero_of,
)


class LayersOutput(NamedTuple):
    """What the layers of a module return."""

    h: Tensor  # the rows of the output, [N, directions hidden]
    last: list[Tensor]  # h_n (and c_n), each [layers directions, B, .]
    layers: list[network_layers.Layer]  # for a recording; empty without one


class DirectionOutput(NamedTuple):
    """What a layer returns in one direction."""

    h: Tensor  # of each step, [N, .]
    last: list[Tensor]  # h_T (and c_T), each [B, .]
    run: network_layers.DirectionRun | None  # for a recording


class LayeredModule(nn.RNNBase):
    """torch's module of layers, run by sweeps; RNNModule adds arguments and calls."""

    slots = 1  # parts of the state: 2 for h and c
    weight_hh_l0: Tensor
    recurrent_dropout: float
    zoneout: tuple[float, ...]  # for each slot
    layer_norm: bool
    peephole: bool
    _engine: str  # as the user has named it
    recordings: CapturedModules

    @property
    def suffixes(self) -> list[str]:
        """The ends of the parameters' names for each layer in each direction, as "_l0_reverse"."""
        directions = ("", "_reverse") if self.bidirectional else ("",)
        layers = range(self.num_layers)
        return [f"_l{layer}{direction}" for layer in layers for direction in directions]

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the parts of the state; with projections h = W_hr m, and m is its part."""
        return ("m" if self.proj_size else "h", "c")[: self.slots]

    @property
    def engine(self) -> Choice:
        """The name of the engine that runs this module on its present device; `.why` says why.

        Assign a name to choose another, or "auto".
        """
        if self.layer_norm:
            return Choice("autograd", "layer_norm=True is not elementwise over units")
        cell, _ = find_formula(self.mode, self.peephole)
        like = self.weight_hh_l0
        return engines.resolve(self._engine, cell, like.device.type, like.dtype)

    @engine.setter
    def engine(self, name: str) -> None:
        """Choose an engine by name, or "auto"; a deprecated name stands for its successor.

        With layer_norm=True only torch's own operations can run ("autograd", which "auto" chooses).
        """
        self._engine = engines.current_name(name)
        if self.layer_norm and self._engine not in ("auto", "autograd"):
            raise Unsupported(
                f"engine '{name}' generates its code from an elementwise formula, but "
                "layer_norm=True is not one. Use engine='autograd'."
            )

    @property
    def _has_plain_steps(self) -> bool:
        """Whether a step is that of torch.nn, and nobody has chosen an engine."""
        return (
            self._engine == "auto"
            and not self.layer_norm
            and not self.peephole
            and not self.proj_size
            and not self.recurrent_dropout
            and not any(self.zoneout)
        )

    def _empty_batch(self, u: Tensor) -> LayersOutput:
        """Outputs of the right shape for an empty batch, with a gradient of zero."""
        zero = zero_of(self, u)
        directions = 1 + self.bidirectional
        hidden = self.proj_size or self.hidden_size
        last = []
        for n in (hidden, self.hidden_size)[: self.slots]:  # h_n may be projected, c_n is not
            last.append(zero.new_zeros(self.num_layers * directions, 0, n) + zero)
        return LayersOutput(zero.new_zeros(0, directions * hidden) + zero, last, [])

    def _is_replayable(self, frame: Frame, u: Tensor) -> bool:
        """Tell whether this call may be replayed as a CUDA graph.

        It may on a GPU, with samples of equal length, if nothing is drawn at random and no costates
        are recorded. The steps of layer_norm=True are torch's own, and are not captured.
        """
        if not answers_late(u) or frame.rows is None or not frame.rows.uniform:
            return False
        if frame.is_recorded or self.layer_norm:
            return False
        draws = self.dropout > 0 or self.recurrent_dropout > 0 or max(self.zoneout) > 0
        return not (self.training and draws)

    def _replay(
        self, frame: Frame, u: Tensor, states: list[Tensor], weights: dict[str, Tensor]
    ) -> LayersOutput:
        """The output of _run_layers, by a CUDA graph from the third call of one shape on."""

        def compute(data: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor]:
            # The data are u and the states; the values are those of the weights.
            named = dict(zip(weights, values, strict=True))
            out = self._run_layers(frame, data[0], list(data[1:]), named)
            return [out.h, *out.last]

        key = (frame.T, frame.B, self.training, self._engine, tuple(self.zoneout))
        h, *last = self.recordings(key, compute, [u, *states], list(weights.values()))
        return LayersOutput(h, last, [])

    def _run_layers(
        self, frame: Frame, u: Tensor, states: list[Tensor], weights: dict[str, Tensor]
    ) -> LayersOutput:
        """Run all layers, one above the other.

        u: the input's step rows [N, inputs]. states: [h_0] or [h_0, c_0], each [layers directions,
        B, .], or empty for zeros. weights: all parameters by name.
        """
        last: list[list[Tensor]] = []  # h_T (and c_T) of each layer and direction
        recorded: list[network_layers.Layer] = []
        directions = 1 + self.bidirectional
        second_stream = self._second_stream(frame, u)
        for layer in range(self.num_layers):
            heads: list[Tensor] = []  # h of each direction, in the order of time
            runs: list[network_layers.DirectionRun] = []
            if second_stream:
                second_stream.wait_stream(torch.cuda.current_stream(u.device))
            for direction in range(directions):
                number = layer * directions + direction
                start = [y[number] for y in states]
                direction_weights = DirectionWeights.find(weights, self.suffixes[number])
                reverse = direction == 1
                aside = reverse and second_stream is not None
                with torch.cuda.stream(second_stream) if aside else nullcontext():
                    swept_u = frame.reverse_time(u) if direction else u
                    out = self._run_direction(frame, swept_u, start, direction_weights, reverse)
                    heads.append(frame.reverse_time(out.h) if direction else out.h)
                last.append(out.last)
                if out.run is not None:
                    runs.append(out.run)
            if second_stream:
                torch.cuda.current_stream(u.device).wait_stream(second_stream)
            is_top = layer + 1 == self.num_layers
            u = frame.join_directions(heads, is_top)  # the input of the next layer
            if frame.is_recorded:
                recorded.append(network_layers.Layer(runs, u))
            if not is_top:
                u = dropout(u, self.dropout, self.training)
        stacked = [torch.stack(y) for y in zip(*last, strict=True)]
        if frame.rows is None:  # torch.compile may make a stack of one a view of the states
            stacked = [frame.copy_out(y) for y in stacked]
        return LayersOutput(u, stacked, recorded)

    def _second_stream(self, frame: Frame, u: Tensor) -> torch.cuda.Stream | None:
        """A second CUDA stream for the second direction in a CUDA graph, so that both run at once.

        None outside a graph, and where the engine says that they may not overlap.
        """
        if frame.rows is None or not self.bidirectional or not u.is_cuda:
            return None
        if not torch.cuda.is_current_stream_capturing():
            return None
        may_overlap = getattr(engines.load(self.engine), "may_overlap", None)
        cell, _ = find_formula(self.mode, self.peephole)
        if may_overlap is None or not may_overlap(cell, self.hidden_size, frame.B, u):
            return None
        return torch.cuda.Stream(u.device)

    def _run_direction(
        self,
        frame: Frame,
        u: Tensor,
        start: list[Tensor],
        weights: DirectionWeights,
        reverse: bool,
    ) -> DirectionOutput:
        """Run one layer in one direction, by one sweep.

        u: step rows [N, .], already reversed in time if `reverse`. start: [h_0] or [h_0, c_0], each
        [B, .], or empty for zeros.
        """
        d = self.hidden_size
        b = merge_biases(self.mode, weights.bias_ih, weights.bias_hh)
        x0 = list(start) if start else [u.new_zeros(frame.B, d)] * self.slots
        if frame.is_recorded:  # so that costates can be pulled through u to the layer below
            u = network_layers.require_gradient(u)
        mask = None
        run: SweepRun | None
        if self.layer_norm:
            normalised = self._run_normalised(frame, u, b, torch.cat(x0, 1), weights)
            run = normalised
            x = normalised.x
            end = normalised.last
            drive = normalised.drive
        else:
            inputs, mask = self._sweep_inputs(frame, u, b, start, x0, weights)
            x, end, run = run_sweep(self._engine, frame, inputs)
            drive = drive_of(inputs)
        h = x[frame.B :, :d]
        last = [end[:, i * d : (i + 1) * d] for i in range(self.slots)]
        project = weights.weight_hr
        if project is not None:  # the sweep carries m, and h = W_hr m
            h = affine(frame.rows, h, project, None)
            last[0] = last[0] @ project.t()
        direction_run = None
        if frame.is_recorded:
            assert run is not None
            direction_run = network_layers.DirectionRun(
                run, drive, d, reverse, project, mask, slot_names=self.slot_names
            )
        return DirectionOutput(h, last, direction_run)

    def _run_normalised(
        self, frame: Frame, u: Tensor, b: Tensor | None, x0: Tensor, weights: DirectionWeights
    ) -> StepFunctionRun:
        """Run a sweep with layer normalisation, step by step: base = gain_ih LN(R u) + b.

        u: step rows [N, .]; b: the merged biases; x0 [B, n].
        """
        assert frame.rows is not None
        Ru = affine(frame.rows, u, weights.weight_ih, None)
        base = layer_norm.normalise(self.mode, Ru, weights.gain_ih)
        if b is not None:
            base = base + b
        step = layer_norm.normalised_step(self.mode, weights)
        return StepFunctionRun.run(step, frame.rows, (base,), x0, checked=False)

    def _sweep_inputs(
        self,
        frame: Frame,
        u: Tensor,
        b: Tensor | None,
        start: list[Tensor],
        x0: list[Tensor],
        weights: DirectionWeights,
    ) -> tuple[SweepInputs, Tensor | None]:
        """Return what the sweep reads, and the mask of recurrent dropout on h, [B, d], or None.

        u: step rows [N, .]; b: the merged biases; start: [h_0] or [h_0, c_0] as the user gave them,
        or empty. x0: the same or zeros, which this method changes to what the sweep begins with.
        """
        W_hh = weights.weight_hh
        masked = self.recurrent_dropout > 0 and self.training
        zoneout = max(self.zoneout) > 0
        cell, name = find_formula(self.mode, self.peephole, masked, zoneout)
        base, side = split_base_and_side(cell, affine(frame.rows, u, weights.weight_ih, b))
        if self.peephole:
            p = self._peephole_weights(weights)
        else:
            p = reset_bias(self.mode, W_hh, weights.bias_hh)
        W = W_hh
        if weights.weight_hr is not None:
            W = W_hh @ weights.weight_hr
            # m_0 is unknown, but the first step reads no more of it than W_hh h_0, which is added.
            if start:
                first = base[: frame.B] + start[0] @ W_hh.t()
                base = torch.cat([first, base[frame.B :]])
            x0[0] = u.new_zeros(frame.B, self.hidden_size)
        mask = None
        if masked or zoneout:
            side, mask = self._draw_noise(frame, side, base, masked, zoneout)
        if mask is not None:  # the cell has one more slot, the masked copy of h that W reads
            x0.append(mask * x0[0])
        return SweepInputs(cell, name, base, side, W, torch.cat(x0, 1), p), mask

    def _peephole_weights(self, weights: DirectionWeights) -> Tensor | None:
        """The parameters p of the peephole cell: one vector of three weights for each unit."""
        parts = (weights.weight_pi, weights.weight_pf, weights.weight_po)
        return torch.cat([with_own_gradient(part) for part in parts if part is not None])

    def _draw_noise(
        self, frame: Frame, side: Tensor | None, like: Tensor, masked: bool, zoneout: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return side [N, .] with the noise that the cell reads, and the dropout mask on h, [B, d].

        side: without the noise. like: a step array, for N, type and device. masked, zoneout: which
        noise there is; the mask is None without recurrent dropout.
        """
        d = self.hidden_size
        entries = [] if side is None else [side]
        if zoneout:
            # p, for each slot: how likely a unit keeps its old value. Out of training, the noise
            # (1 to keep it) has its mean, p.
            for p in self.zoneout:
                mean = like.new_full((len(like), d), p)
                entries.append(torch.bernoulli(mean) if self.training else mean)
        mask = None
        if masked:
            mask = dropout(like.new_ones(frame.B, d), self.recurrent_dropout)
            entries.append(frame.repeat_over_steps(mask))
        return torch.cat(entries, 1), mask

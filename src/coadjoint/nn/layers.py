"""What RNN, LSTM and GRU share: layers and directions, each of them one sweep over flat rows.

A projected state h = W_hr m is read by W_hh W_hr, so that a sweep carries m itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from torch.nn.utils.rnn import PackedSequence

from ..errors import InputError, KindError, Unsupported, choose, real
from ..networks import layers
from ..networks.initialisers import identity_, orthogonal_
from ..sweeps import engines
from ..sweeps.affine import affine
from ..sweeps.engines import Choice
from ..sweeps.layout import Layout, check_dense
from ..sweeps.pointers import refuse_if_without_memory
from ..sweeps.rows import Rows, uniform_rows
from ..sweeps.run import StepFunctionRun
from ..sweeps.torch_internals import autocast_is_on, exclude_from_compile
from . import layer_norm, recording
from .frame import (
    Frame,
    check_input,
    check_probability,
    check_weights,
    find_formula,
    merge_biases,
    reset_bias,
    run_sweep,
    seen_as_operators,
    split_base_and_side,
    with_own_gradient,
)
from .replay import CapturedModules

INITIALISERS = {"torch": None, "orthogonal": orthogonal_, "identity": identity_}
PEEPHOLES = ("weight_pi", "weight_pf", "weight_po")
NORMS = ("gain_ih", "gain_hh", "gain_c", "shift_c")
NAMES = (
    "weight_ih",
    "weight_hh",
    "bias_ih",
    "bias_hh",
    "weight_hr",
    *PEEPHOLES,
    *NORMS,
)  # of a layer's parameters


class RNNModule(nn.RNNBase):
    """What RNN, LSTM and GRU share: torch's module of layers, run by sweeps.

    engine             "auto" or a name (docs/engines.md); `module.engine` says which runs, `module.engine.why` why
    recurrent_dropout  W reads m h, with one mask m for all steps of a sample (in training)
    zoneout            the state keeps its value with this probability, in each unit and step; an LSTM takes (for h, for c)
    layer_norm         of W h and R u (and of an LSTM's c): not elementwise, so on engine "autograd"
    init               of the recurrent weights: "torch", or "orthogonal" or "identity" for each gate
    """

    recordable = True  # by co.record
    weight_hh_l0: Tensor
    torch_class: type[nn.RNNBase]
    arguments: tuple[str, ...] = (
        "input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional",
    )  # fmt: skip
    slots = 1
    norms: tuple[str, ...] = ("gain_ih", "gain_hh")

    def __init__(
        self, mode: str, *args: Any, engine: str = "auto", recurrent_dropout: float = 0.0,
        zoneout: float | Sequence[float] = 0.0, layer_norm: bool = False, init: str = "torch", peephole: bool = False,
        forget_bias: float | None = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(mode, *args, **kwargs)
        check_weights(self.weight_hh_l0)
        self.recurrent_dropout = check_probability("recurrent_dropout", recurrent_dropout)
        each = tuple(zoneout) if isinstance(zoneout, Sequence) else (zoneout,) * self.slots
        if len(each) != self.slots:
            raise InputError(
                f"zoneout is one probability or {self.slots}, for each part of the state; got {zoneout!r}."
            )
        self.zoneout = tuple(check_probability("zoneout", p) for p in each)
        if forget_bias is not None:
            real("forget_bias", forget_bias)
        self.layer_norm, self.peephole, self.forget_bias = layer_norm, peephole, forget_bias
        self.init = choose("init", init, INITIALISERS)
        if mode != "LSTM" and (peephole or forget_bias is not None):
            raise InputError(
                "peephole and forget_bias are arguments of an LSTM: RNN and GRU have no memory c and no forget gate."
            )
        noisy = self.recurrent_dropout > 0 or max(self.zoneout) > 0
        for wrong, reason, out in (
            (
                self.proj_size and noisy,
                "a projected state has no units that a mask could meet",
                "Leave out proj_size",
            ),
            (
                layer_norm and (noisy or peephole or self.proj_size),
                "layer_norm=True has equations of its own",
                "Leave it out",
            ),
            (
                forget_bias is not None and not self.bias,
                "forget_bias is a bias, and bias=False has none",
                "Leave it out",
            ),
        ):
            if wrong:
                raise Unsupported(
                    f"these options cannot be had together: {reason}. {out}, or the others."
                )
        make: dict[str, Any] = {
            "device": self.weight_hh_l0.device,
            "dtype": self.weight_hh_l0.dtype,
        }
        extra = [*(PEEPHOLES if peephole else ()), *(self.norms if layer_norm else ())]
        for suffix in self.suffixes:
            for name in extra:
                size = (
                    self.weight_hh_l0.shape[0]
                    if name in ("gain_ih", "gain_hh")
                    else self.hidden_size
                )
                self.register_parameter(name + suffix, nn.Parameter(torch.empty(size, **make)))
        self._weight_names = [
            n + suffix for suffix in self.suffixes for n in NAMES if hasattr(self, n + suffix)
        ]
        self._captured = CapturedModules()
        self.engine = engine
        _ = self.engine
        self._set_extras()
        for masked in (False, self.recurrent_dropout > 0):  # known before torch.compile looks on
            find_formula(mode, peephole, masked, max(self.zoneout) > 0)

    @property
    def suffixes(self) -> list[str]:
        """Of the parameters of each layer in each direction."""
        return [
            f"_l{k}{s}"
            for k in range(self.num_layers)
            for s in ("", "_reverse")[: 1 + self.bidirectional]
        ]

    @property
    def engine(self) -> Choice:
        """The engine that runs this module where it is now; `.why` says why. Assign a name to ask for another."""
        if self.layer_norm:
            return Choice("autograd", "layer_norm=True is not elementwise over units")
        return engines.resolve(
            self._engine, find_formula(self.mode, self.peephole)[0], self.weight_hh_l0.device.type
        )

    @engine.setter
    def engine(self, name: str) -> None:
        self._engine = engines.current_name(name)
        if self.layer_norm and self._engine not in ("auto", "autograd"):
            raise Unsupported(
                f"engine '{name}' takes its code from an elementwise formula, and layer_norm=True is not one. Use engine='autograd'."
            )

    def reset_parameters(self) -> None:
        """As torch.nn does, then what `init` and `forget_bias` ask for."""
        super().reset_parameters()
        if hasattr(self, "init"):
            self._set_extras(again=True)

    @torch.no_grad()
    def _set_extras(self, again: bool = False) -> None:
        """Set what torch.nn has not: the extras, drawn after its own so that a seed gives both libraries the same weights."""
        bound = self.hidden_size**-0.5
        for name, parameter in self.named_parameters():
            if name.startswith("gain"):
                parameter.fill_(1.0)
            elif name.startswith("shift"):
                parameter.zero_()
            elif name.startswith(PEEPHOLES) and not again:
                parameter.uniform_(-bound, bound)
        rule = INITIALISERS[self.init]
        for suffix in self.suffixes:
            if rule is not None:
                for block in getattr(self, "weight_hh" + suffix).split(self.hidden_size):
                    rule(block)
            if self.bias and self.forget_bias is not None:
                for name, value in (("bias_ih", self.forget_bias), ("bias_hh", 0.0)):
                    getattr(self, name + suffix)[self.hidden_size : 2 * self.hidden_size] = value

    def flatten_parameters(self) -> None:
        """Nothing to do: there are no cuDNN buffers here."""

    @property
    def options(self) -> dict[str, Any]:
        """torch.nn's arguments."""
        return {name: getattr(self, name) for name in self.arguments}

    @property
    def extras(self) -> dict[str, Any]:
        """The arguments torch.nn does not have, where they are not as torch.nn would have them."""
        zoneout = self.zoneout if max(self.zoneout) > 0 else 0.0
        found = {
            "recurrent_dropout": self.recurrent_dropout,
            "zoneout": zoneout,
            "layer_norm": self.layer_norm,
            "peephole": self.peephole,
        }
        return {name: value for name, value in found.items() if value}

    def to_torch(self) -> nn.RNNBase:
        """torch.nn's module with these weights."""
        if extras := self.extras:
            raise Unsupported(
                f"torch.nn.{self.torch_class.__name__} has no {', '.join(extras)}: this module has no counterpart there."
            )
        W = self.weight_hh_l0
        made = self.torch_class(**self.options, device=W.device, dtype=W.dtype)
        made.load_state_dict(self.state_dict())
        for name, parameter in self.named_parameters():
            made.get_parameter(name).requires_grad_(parameter.requires_grad)
        return made.train(self.training)

    @classmethod
    def from_torch(cls, module: nn.RNNBase, **extras: Any) -> Any:
        """This module with the weights of torch.nn's; extras: engine=, recurrent_dropout=, zoneout=, ..."""
        if not isinstance(module, cls.torch_class):
            raise KindError(
                f"expected a torch.nn.{cls.torch_class.__name__}; got {type(module).__name__}."
            )
        W = module.weight_hh_l0
        options = {name: getattr(module, name) for name in cls.arguments}
        made = cls(**options, **extras, device=W.device, dtype=W.dtype)
        made.load_state_dict(module.state_dict(), strict=not extras)
        for name, parameter in module.named_parameters():
            made.get_parameter(name).requires_grad_(parameter.requires_grad)
        return made.train(module.training)

    def extra_repr(self) -> str:
        more = {
            **self.extras,
            "init": self.init,
            "forget_bias": self.forget_bias,
            "engine": self._engine,
        }
        usual = {"init": "torch", "forget_bias": None, "engine": "auto"}
        return super().extra_repr() + "".join(
            f", {n}={v!r}" for n, v in more.items() if v != usual.get(n, ())
        )

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As torch.nn's: (output, h_n), of an LSTM (output, (h_n, c_n))."""
        by_steps = self.layer_norm or self._engine == "autograd"
        if torch.compiler.is_dynamo_compiling() and (by_steps or isinstance(input, PackedSequence)):
            return self._outside_compile(input, hx)
        frame, u, states, packed = self._arrange(input, hx)
        W = self.weight_hh_l0
        held = {name: getattr(self, name) for name in self._weight_names}
        if frame.rows is not None:
            refuse_if_without_memory(
                [("the input", u), *(("hx", y) for y in states), *held.items()]
            )
        compute = self._run_layers
        if frame.B == 0:
            compute = self._empty_batch
        elif self._is_replayable(frame, u):
            compute = self._replay
        if autocast_is_on():
            with torch.autocast(W.device.type, enabled=False):
                h, last, levels = compute(
                    frame, u.to(W.dtype), [y.to(W.dtype) for y in states], held
                )
        else:
            h, last, levels = compute(frame, u, states, held)
        single = packed is None and input.dim() == 2
        if packed is None:
            h = h.unflatten(0, (frame.T, frame.B))
            h = h.transpose(0, 1) if self.batch_first else h
            h = h.squeeze(0 if self.batch_first else 1) if single else h
        elif packed.unsorted_indices is not None:
            last = [y.index_select(1, packed.unsorted_indices) for y in last]
        if single:
            last = [y.squeeze(1) for y in last]
        if frame.is_recorded:
            order = None if packed is None else packed.sorted_indices
            layout = Layout(frame.rows, None if order is None else np.array(order.tolist()))  # type: ignore[arg-type]
            recording.note_call(self, recording.Call(layout, h, last, levels))
        output = h if packed is None else PackedSequence(h, *packed[1:])
        return output, (tuple(last) if len(last) > 1 else last[0])

    @exclude_from_compile
    def _outside_compile(self, input: Any, hx: Any) -> Any:
        """What torch.compile is not asked to look into."""
        return self.forward(input, hx)

    def _arrange(
        self, input: Any, hx: Any
    ) -> tuple[Frame, Tensor, list[Tensor], PackedSequence | None]:
        """-> (frame, the input's rows [N, inputs], [h_0, c_0] each [layers, B, .] or none, the input if it is packed)"""
        name = self.torch_class.__name__
        packed = input if isinstance(input, PackedSequence) else None
        u: Any = input if packed is None else packed.data
        if not isinstance(u, Tensor):
            raise KindError(
                f"{name}: expected a tensor or a PackedSequence; got {type(input).__name__}."
            )
        W = self.weight_hh_l0
        check_input(u, W)
        if packed is None and u.dim() not in (2, 3):
            raise ValueError(
                f"{name}: Expected input to be 2D or 3D, got {u.dim()}D tensor instead"
            )
        single = packed is None and u.dim() == 2
        u = u.unsqueeze(0 if self.batch_first else 1) if single else u
        states = self._check_states(hx, single)
        if packed is not None and packed.sorted_indices is not None:
            states = [y.index_select(1, packed.sorted_indices) for y in states]
        self._check_shapes(u, states, None if packed is None else packed.batch_sizes)
        check_weights(W)
        if packed is not None:
            rows = Rows(packed.batch_sizes.tolist())
            return Frame(rows.T, rows.B, rows), u, states, packed
        u = u.transpose(0, 1) if self.batch_first else u
        T, B = u.shape[:2]
        if T == 0:
            raise InputError(
                f"{name}: Expected sequence length to be larger than 0 in RNN; got an input of no steps."
            )
        u = u.flatten(0, 1)
        by_steps = self.layer_norm or self._engine == "autograd"
        operator = seen_as_operators(u, W) and not by_steps
        return Frame(T, B, None if operator or B == 0 else uniform_rows(T, B)), u, states, None

    def _check_states(self, hx: Any, single: bool) -> list[Tensor]:
        """h_0 (and c_0), each [layers, B, .]; none if not given."""
        if hx is None:
            return []
        states = list(hx) if self.slots > 1 and isinstance(hx, tuple | list) else [hx]
        if len(states) != self.slots or not all(isinstance(y, Tensor) for y in states):
            what = "a tuple (h_0, c_0)" if self.slots > 1 else "a tensor"
            raise KindError(
                f"{self.torch_class.__name__}: hx must be {what}; got {type(hx).__name__}."
            )
        dim = 2 if single else 3
        for y in states:
            check_dense("hx", y)
            if y.dim() != dim:
                kind = "unbatched 2-D" if single else "batched 3-D"
                raise RuntimeError(
                    f"For {kind} input, hx should also be {dim}-D but got {y.dim()}-D tensor"
                )
        return [y.unsqueeze(1) for y in states] if single else states

    def _check_shapes(self, u: Tensor, states: list[Tensor], sizes: Tensor | None) -> None:
        """torch.nn's checks, in its words."""
        self.check_input(u, sizes)
        expected = self.get_expected_hidden_size(u, sizes)
        sizes_of = [expected, (*expected[:2], self.hidden_size)]
        for i, y in enumerate(states):
            which = (
                f"Expected hidden[{i}] size {{}}, got {{}}"
                if self.slots > 1
                else "Expected hidden size {}, got {}"
            )
            self.check_hidden_size(y, sizes_of[i], which)
            if y.device != u.device or (y.dtype != u.dtype and not autocast_is_on()):
                raise InputError(
                    f"hx is {str(y.dtype)[6:]} on {y.device} but the input is {str(u.dtype)[6:]} on {u.device}; use hx.to(input)."
                )

    def _empty_batch(
        self, frame: Frame, u: Tensor, states: list[Tensor], held: dict[str, Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        """An empty batch has outputs of the right shape and a gradient of zero."""
        zero = sum(p.sum() for p in self.parameters()) * u.sum() * 0
        D, H = 1 + self.bidirectional, self.proj_size or self.hidden_size
        last = [
            zero.new_zeros(self.num_layers * D, 0, n) + zero
            for n in (H, self.hidden_size)[: self.slots]
        ]
        return zero.new_zeros(0, D * H) + zero, last, None

    def _is_replayable(self, frame: Frame, u: Tensor) -> bool:
        """May a call be replayed as a CUDA graph? On a GPU, where nothing is drawn and nobody asks for costates."""
        if (
            not u.is_cuda
            or frame.rows is None
            or not frame.rows.uniform
            or frame.is_recorded
            or self.layer_norm
        ):
            return False
        return not (
            self.training
            and (self.dropout > 0 or self.recurrent_dropout > 0 or max(self.zoneout) > 0)
        )

    def _replay(
        self, frame: Frame, u: Tensor, states: list[Tensor], held: dict[str, Tensor]
    ) -> tuple[Tensor, list[Tensor], Any]:
        """The layers by a CUDA graph, from the third call of one shape on."""

        def compute(data: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor]:
            h, last, _ = self._run_layers(
                frame, data[0], list(data[1:]), dict(zip(held, weights, strict=True))
            )
            return [h, *last]

        key = frame.T, frame.B, self.training, self._engine
        h, *last = self._captured(key, compute, [u, *states], list(held.values()))
        return h, last, None

    def _run_layers(
        self, frame: Frame, u: Tensor, states: list[Tensor], held: dict[str, Tensor]
    ) -> tuple[Tensor, list[Tensor], list[Any]]:
        """-> (the rows of the output, [h_n, c_n], what each layer and direction leaves to a recording)"""
        last: list[list[Tensor]] = []
        levels: list[layers.Layer] = []
        D, beside = 1 + self.bidirectional, self._second_stream(frame, u) if frame.rows else None
        for layer in range(self.num_layers):
            heads: list[Tensor] = []
            here: list[Any] = []
            if beside:
                beside.wait_stream(torch.cuda.current_stream(u.device))
            for direction in range(D):
                start = [y[layer * D + direction] for y in states]
                suffix = self.suffixes[layer * D + direction]
                w = {name: held.get(name + suffix) for name in NAMES}
                with torch.cuda.stream(beside) if direction and beside else nullcontext():
                    h, ends, piece = self._run_direction(
                        frame, frame.reverse_time(u) if direction else u, start, w, direction == 1
                    )
                    heads.append(frame.reverse_time(h) if direction else h)
                last.append(ends)
                here.append(piece)
            if beside:
                torch.cuda.current_stream(u.device).wait_stream(beside)
            top = layer + 1 == self.num_layers
            u = frame.join_directions(heads, top)
            if frame.is_recorded:
                levels.append(layers.Layer(here, u))
            if not top:
                u = dropout(u, self.dropout, self.training)
        ends = [torch.stack(y) for y in zip(*last, strict=True)]
        if frame.rows is None:
            ends = [frame.copy_out(y) for y in ends]
        return u, ends, levels

    def _second_stream(self, frame: Frame, u: Tensor) -> torch.cuda.Stream | None:
        """A second stream for the second direction, in a CUDA graph: recorded so, they run at once."""
        if not (self.bidirectional and u.is_cuda and torch.cuda.is_current_stream_capturing()):
            return None
        engine = engines.load(self.engine)
        shares = getattr(engine, "may_overlap", None)
        alone = shares is None or not shares(
            find_formula(self.mode, self.peephole)[0], self.hidden_size, frame.B, u
        )
        return None if alone else torch.cuda.Stream(u.device)

    def _run_direction(
        self, frame: Frame, u: Tensor, start: list[Tensor], w: dict[str, Any], turned: bool
    ) -> tuple[Tensor, list[Tensor], layers.DirectionRun | None]:
        """One sweep -> (h of each step [N, .], [h_T, c_T], piece)"""
        R, W_h, hh, project = w["weight_ih"], w["weight_hh"], w["bias_hh"], w["weight_hr"]
        d, B = self.hidden_size, frame.B
        b = merge_biases(self.mode, w["bias_ih"], hh)
        x0 = list(start) if start else [u.new_zeros(B, d)] * self.slots
        masks: list[Tensor] = []
        u = layers.require_gradient(u) if frame.is_recorded else u
        if self.layer_norm:
            base = layer_norm.normalise(self.mode, affine(frame.rows, u, R, None), w["gain_ih"])
            base = base if b is None else base + b
            assert frame.rows is not None
            found: Any = StepFunctionRun.run(
                layer_norm.normalised_step(self.mode, w),
                frame.rows,
                (base,),
                torch.cat(x0, 1),
                checked=False,
            )
            x, end, drive = found.x, found.last, [base]
        else:
            noise = self.recurrent_dropout > 0 and self.training, max(self.zoneout) > 0
            cell, name = find_formula(self.mode, self.peephole, *noise)
            v = affine(frame.rows, u, R, b)
            base, side = split_base_and_side(cell, v)
            p = (
                torch.cat([with_own_gradient(w[n]) for n in PEEPHOLES])
                if self.peephole
                else reset_bias(self.mode, W_h, hh)
            )
            W = W_h
            if project is not None:  # m_0 is unknown, but only W_hh h_0 is asked of it
                W = W_h @ project
                if start:
                    base = torch.cat([base[:B] + start[0] @ W_h.t(), base[B:]])
                x0[0] = u.new_zeros(B, d)
            if any(noise):
                side, masks = self._draw_noise(frame, side, base, *noise)
                x0 = [*x0, *(m * x0[0] for m in masks)]
            x, end, found = run_sweep(
                cell, name, self._engine, frame, base, side, W, torch.cat(x0, 1), p
            )
            drive = [base] if side is None else [base, side]
        h = x[B:, :d]
        ends = [end[:, i * d : (i + 1) * d] for i in range(self.slots)]
        if project is not None:
            h = affine(frame.rows, h, project, None)
            ends[0] = ends[0] @ project.t()
        piece = (
            layers.DirectionRun(found, drive, d, turned, project, *masks)
            if frame.is_recorded
            else None
        )
        return h, ends, piece

    def _draw_noise(
        self, frame: Frame, side: Tensor | None, like: Tensor, masked: bool, kept: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """-> (side with the cell's given entries, [the mask on h of each sample] if there is one)"""
        d, entries, masks = self.hidden_size, [] if side is None else [side], []
        for p in self.zoneout if kept else ():
            k = like.new_full((len(like), d), p)
            entries.append(torch.bernoulli(k) if self.training else k)
        if masked:
            masks = [dropout(like.new_ones(frame.B, d), self.recurrent_dropout)]
            entries += [frame.repeat_over_steps(m) for m in masks]
        return torch.cat(entries, 1), masks

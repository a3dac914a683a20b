"""What RNN, LSTM and GRU share: arguments, weights, conversion from and to torch.nn, and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import InputError, KindError, Unsupported, choose, real
from ..networks.initialisers import identity_, orthogonal_
from ..sweeps.layout import Layout, check_dense
from ..sweeps.rows import Rows, uniform_rows
from ..sweeps.torch_internals import autocast_is_on, exclude_from_compile, nothing_intervenes
from . import recording
from .captured import CapturedModules
from .frame import (
    NORMS,
    PEEPHOLES,
    DirectionWeights,
    Frame,
    check_input,
    check_memory,
    check_probability,
    check_weights,
    find_formula,
    is_seen_as_operators,
)
from .layers import LayeredModule, LayersOutput
from .one_step import step_of_layers

INITIALISERS = {"torch": None, "orthogonal": orthogonal_, "identity": identity_}

Module = TypeVar("Module", bound="RNNModule")
Hidden = Tensor | tuple[Tensor, ...]  # h, of an LSTM (h, c)


class RNNModule(LayeredModule):
    """What RNN, LSTM and GRU share: torch's module of layers, run by sweeps.

    engine             "auto" or a name (docs/engines.md); `module.engine` tells which one runs,
                       `module.engine.why` the reason
    recurrent_dropout  W reads m h, with one mask m for all steps of a sample (in training)
    zoneout            the state keeps its value with this probability, in each unit and step; an
                       LSTM also takes a pair, for h and for c
    layer_norm         of W h and R u (and of an LSTM's c): not elementwise, so on engine "autograd"
    init               of the recurrent weights: "torch", or "orthogonal" or "identity" per gate
    """

    recordable = True  # by co.record
    torch_class: type[nn.RNNBase]
    arguments: tuple[str, ...] = (
        "input_size",
        "hidden_size",
        "num_layers",
        "bias",
        "batch_first",
        "dropout",
        "bidirectional",
    )
    norms: tuple[str, ...] = NORMS[:2]  # the parameters of layer_norm=True

    def __init__(
        self,
        mode: str,
        *args: Any,
        engine: str = "auto",
        recurrent_dropout: float = 0.0,
        zoneout: float | Sequence[float] = 0.0,
        layer_norm: bool = False,
        init: str = "torch",
        peephole: bool = False,
        forget_bias: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(mode, *args, **kwargs)
        check_weights(self.weight_hh_l0)
        self.recurrent_dropout = check_probability("recurrent_dropout", recurrent_dropout)
        self.zoneout = self._check_zoneout(zoneout)
        if forget_bias is not None:
            real("forget_bias", forget_bias)
        self.layer_norm = layer_norm
        self.peephole = peephole
        self.forget_bias = forget_bias
        self.init = choose("init", init, INITIALISERS)
        self._refuse_combinations()
        self._register_extras()
        self._weight_names = self._find_weight_names()
        self.recordings = CapturedModules()
        self.engine = engine
        _ = self.engine  # an engine that cannot run here is refused now
        self._set_extras()
        # Made here, because torch.compile cannot trace how formulas are made; with the mask of
        # recurrent dropout (in training) and without.
        for masked in (False, self.recurrent_dropout > 0):
            find_formula(mode, peephole, masked, max(self.zoneout) > 0)

    def _check_zoneout(self, zoneout: float | Sequence[float]) -> tuple[float, ...]:
        """`zoneout` as one probability for each part of the state, h (and c), or an error."""
        by_slot = tuple(zoneout) if isinstance(zoneout, Sequence) else (zoneout,) * self.slots
        if len(by_slot) != self.slots:
            raise InputError(
                f"zoneout must be one probability, or {self.slots}, one for each part of the "
                f"state; got {zoneout!r}."
            )
        return tuple(check_probability("zoneout", p) for p in by_slot)

    def _refuse_combinations(self) -> None:
        """Refuse options that do not go together."""
        lstm_only = self.peephole or self.forget_bias is not None
        if self.mode != "LSTM" and lstm_only:
            raise InputError(
                "peephole and forget_bias are arguments of an LSTM: RNN and GRU have no memory c "
                "and no forget gate."
            )
        noisy = self.recurrent_dropout > 0 or max(self.zoneout) > 0
        if self.proj_size and noisy:
            raise combination_error(
                "a projected state has no units that a mask could apply to", "proj_size"
            )
        if self.layer_norm and (noisy or self.peephole or self.proj_size):
            raise combination_error("layer_norm=True uses different equations", "layer_norm")
        if self.forget_bias is not None and not self.bias:
            raise combination_error(
                "forget_bias is a bias, but bias=False leaves out all biases", "forget_bias"
            )

    def _register_extras(self) -> None:
        """Add the parameters that torch.nn does not have, without values (see _set_extras)."""
        W = self.weight_hh_l0
        names: list[str] = []
        if self.peephole:
            names += PEEPHOLES
        if self.layer_norm:
            names += self.norms
        for suffix in self.suffixes:
            for name in names:
                # An entry for each gate and unit, or for each unit.
                size = len(W) if name in ("gain_ih", "gain_hh") else self.hidden_size
                values = torch.empty(size, device=W.device, dtype=W.dtype)
                self.register_parameter(name + suffix, nn.Parameter(values))

    def _find_weight_names(self) -> list[str]:
        """The names of all parameters, direction by direction."""
        names = []
        for suffix in self.suffixes:
            for name in DirectionWeights._fields:
                if hasattr(self, name + suffix):
                    names.append(name + suffix)
        return names

    def reset_parameters(self) -> None:
        """Draw all parameters as torch.nn does, then set those that our arguments concern."""
        super().reset_parameters()
        if hasattr(self, "init"):  # torch.nn calls this before our arguments are known
            self._set_extras(again=True)

    @torch.no_grad()
    def _set_extras(self, again: bool = False) -> None:
        """Set our extra parameters, and apply `init` and `forget_bias`.

        They are drawn after torch.nn's own, so that one seed leads to the same weights in both
        libraries. again: torch.nn has just drawn the peephole weights with the others.
        """
        bound = self.hidden_size**-0.5  # as torch.nn draws its weights
        for name, parameter in self.named_parameters():
            if name.startswith("gain"):
                parameter.fill_(1.0)
            elif name.startswith("shift"):
                parameter.zero_()
            elif name.startswith(PEEPHOLES) and not again:
                parameter.uniform_(-bound, bound)
        initialise = INITIALISERS[self.init]
        for suffix in self.suffixes:
            if initialise is not None:  # gate by gate
                for block in getattr(self, "weight_hh" + suffix).split(self.hidden_size):
                    initialise(block)
            if self.bias and self.forget_bias is not None:
                # The second of torch's gates i, f, g, o. torch adds both biases: one is zero.
                forget_gate = slice(self.hidden_size, 2 * self.hidden_size)
                getattr(self, "bias_ih" + suffix)[forget_gate] = self.forget_bias
                getattr(self, "bias_hh" + suffix)[forget_gate] = 0.0

    def flatten_parameters(self) -> None:
        """Do nothing: there are no cuDNN buffers here."""

    @property
    def options(self) -> dict[str, object]:
        """The values of those of this module's arguments that torch.nn has too."""
        return read_options(self, self.arguments)

    @property
    def extras(self) -> dict[str, object]:
        """The arguments that torch.nn does not have, by name, where they change the equations."""
        extras: dict[str, object] = {}
        if self.recurrent_dropout:
            extras["recurrent_dropout"] = self.recurrent_dropout
        if max(self.zoneout) > 0:
            extras["zoneout"] = self.zoneout
        if self.layer_norm:
            extras["layer_norm"] = self.layer_norm
        if self.peephole:
            extras["peephole"] = self.peephole
        return extras

    def to_torch(self) -> nn.RNNBase:
        """torch.nn's module with these weights; refused if torch.nn lacks one of the options."""
        if extras := self.extras:
            raise Unsupported(
                f"torch.nn.{self.torch_class.__name__} has no {', '.join(extras)}: this module "
                "has no counterpart in torch."
            )
        like = {"device": self.weight_hh_l0.device, "dtype": self.weight_hh_l0.dtype}
        module = self.torch_class(**self.options, **like)  # type: ignore[arg-type]
        module.load_state_dict(self.state_dict())
        copy_requires_grad(self, module)
        return module.train(self.training)

    @classmethod
    def from_torch(cls: type[Module], module: nn.RNNBase, **extras: Any) -> Module:
        """Make a module of ours with the options and weights of torch.nn's `module`.

        extras: arguments that torch.nn does not have, engine=, recurrent_dropout=, zoneout=, ...
        """
        if not isinstance(module, cls.torch_class):
            raise KindError(
                f"expected a torch.nn.{cls.torch_class.__name__}; got {type(module).__name__}."
            )
        like = {"device": module.weight_hh_l0.device, "dtype": module.weight_hh_l0.dtype}
        options = read_options(module, cls.arguments)
        ours = cls(**options, **extras, **like)  # type: ignore[arg-type]
        # Extras may add parameters that torch.nn's module does not have.
        ours.load_state_dict(module.state_dict(), strict=not extras)
        copy_requires_grad(module, ours)
        return ours.train(module.training)

    def extra_repr(self) -> str:
        """The arguments to print: torch.nn's, and ours where they are not the default."""
        shown = self.extras
        if self.init != "torch":
            shown["init"] = self.init
        if self.forget_bias is not None:
            shown["forget_bias"] = self.forget_bias
        if self._engine != "auto":
            shown["engine"] = self._engine
        text = super().extra_repr()
        for name, value in shown.items():
            text += f", {name}={value!r}"
        return text

    def forward(
        self, input: Tensor | PackedSequence, hx: Hidden | None = None
    ) -> tuple[Tensor | PackedSequence, Hidden]:
        """As torch.nn's: (output, h_n), of an LSTM (output, (h_n, c_n))."""
        if nothing_intervenes() and self._has_plain_steps and not recording.active_tapes:
            after_one_step = step_of_layers(self, self._weight_names, input, hx)
            if after_one_step is not None:
                return after_one_step
        packed = input if isinstance(input, PackedSequence) else None
        # Kept from torch.compile: single steps, which it would unroll, and packed sequences, whose
        # rows depend on values.
        if torch.compiler.is_dynamo_compiling() and (self._runs_by_steps or packed is not None):
            return self._outside_compile(input, hx)
        frame, u, states = self._arrange(input, hx)
        W = self.weight_hh_l0
        weights = {name: getattr(self, name) for name in self._weight_names}
        if frame.rows is not None:
            check_memory(u, states, weights.items())
        compute = self._replay if self._is_replayable(frame, u) else self._run_layers
        if frame.B == 0:
            h, last, layers = self._empty_batch(u.to(W.dtype))
        elif autocast_is_on():  # sweeps run in the type of the weights
            with torch.autocast(W.device.type, enabled=False):
                full_states = [y.to(W.dtype) for y in states]
                h, last, layers = compute(frame, u.to(W.dtype), full_states, weights)
        else:
            h, last, layers = compute(frame, u, states, weights)
        if packed is not None:
            last = reorder(last, packed.unsorted_indices)
            output: Tensor | PackedSequence = PackedSequence(h, *packed[1:])
        else:
            assert isinstance(input, Tensor)
            h = h.unflatten(0, (frame.T, frame.B))
            if self.batch_first:
                h = h.transpose(0, 1)
            if input.dim() == 2:  # a single sequence
                h = h.squeeze(0 if self.batch_first else 1)
                last = [y.squeeze(1) for y in last]
            output = h
        if frame.is_recorded:
            self._note_call(frame, packed, LayersOutput(h, last, layers))
        return output, (tuple(last) if len(last) > 1 else last[0])

    def _note_call(self, frame: Frame, packed: PackedSequence | None, out: LayersOutput) -> None:
        """Add this call to the tapes that record in this thread."""
        assert frame.rows is not None
        order = None  # of the samples in the rows; None: the user's
        if packed is not None and packed.sorted_indices is not None:
            order = np.array(packed.sorted_indices.tolist())
        call = recording.Call(Layout(frame.rows, order), out.h, out.last, out.layers)
        recording.note_call(self, call)

    @exclude_from_compile
    def _outside_compile(
        self, input: Tensor | PackedSequence, hx: Hidden | None
    ) -> tuple[Tensor | PackedSequence, Hidden]:
        """The same as `forward`, run as it is where torch.compile would trace it."""
        return self.forward(input, hx)

    @property
    def _runs_by_steps(self) -> bool:
        """Whether each step is torch's own operations, not a part of one sweep by a formula."""
        return self.layer_norm or self._engine == "autograd"

    def _arrange(
        self, input: Tensor | PackedSequence, hx: Hidden | None
    ) -> tuple[Frame, Tensor, list[Tensor]]:
        """Check the arguments and return the frame, the input's rows [N, inputs] and the states.

        These are [h_0] or [h_0, c_0], each [layers directions, B, .]; empty if hx is None.
        """
        if isinstance(input, PackedSequence):
            return self._arrange_packed(input, hx)
        name = self.torch_class.__name__
        if not isinstance(input, Tensor):
            raise KindError(
                f"{name}: expected a tensor or a PackedSequence; got {type(input).__name__}."
            )
        W = self.weight_hh_l0
        check_input(input, W)
        if input.dim() not in (2, 3):
            raise ValueError(
                f"{name}: Expected input to be 2D or 3D, got {input.dim()}D tensor instead"
            )
        u = input
        single = u.dim() == 2  # one sequence without the axis of samples
        if single:
            u = u.unsqueeze(0 if self.batch_first else 1)
        states = self._check_states(hx, single)
        self._check_shapes(u, states, None)
        check_weights(W)
        if self.batch_first:
            u = u.transpose(0, 1)
        T, B = u.shape[:2]
        if T == 0:
            raise InputError(
                f"{name}: Expected sequence length to be larger than 0 in RNN; got an input of no "
                "steps."
            )
        u = u.flatten(0, 1)
        is_one_operator = is_seen_as_operators(u, W) and not self._runs_by_steps
        rows = None if is_one_operator or B == 0 else uniform_rows(T, B)
        return Frame(T, B, rows), u, states

    def _arrange_packed(
        self, packed: PackedSequence, hx: Hidden | None
    ) -> tuple[Frame, Tensor, list[Tensor]]:
        """Return the same as _arrange for a PackedSequence, whose data are rows already."""
        W = self.weight_hh_l0
        if not isinstance(packed.data, Tensor):
            raise KindError(
                f"{self.torch_class.__name__}: expected a PackedSequence of a tensor; got one of "
                f"{type(packed.data).__name__}."
            )
        check_input(packed.data, W)
        states = reorder(self._check_states(hx, single=False), packed.sorted_indices)
        self._check_shapes(packed.data, states, packed.batch_sizes)
        check_weights(W)
        rows = Rows(packed.batch_sizes.tolist())
        return Frame(rows.T, rows.B, rows), packed.data, states

    def _check_states(self, hx: Hidden | None, single: bool) -> list[Tensor]:
        """h_0 (and c_0), each [layers directions, B, .]; an empty list if hx is None.

        single: for an input of one sequence, whose states have no axis of samples.
        """
        if hx is None:
            return []
        parts = list(hx) if self.slots > 1 and isinstance(hx, tuple | list) else [hx]
        states = [y for y in parts if isinstance(y, Tensor)]
        if len(parts) != self.slots or len(states) != self.slots:
            expected = "a tuple (h_0, c_0)" if self.slots > 1 else "a tensor"
            raise KindError(
                f"{self.torch_class.__name__}: hx must be {expected}; got {type(hx).__name__}."
            )
        dim = 2 if single else 3
        for y in states:
            check_dense("hx", y)
            if y.dim() != dim:
                kind = "unbatched 2-D" if single else "batched 3-D"
                raise RuntimeError(
                    f"For {kind} input, hx should also be {dim}-D but got {y.dim()}-D tensor"
                )
        if single:
            return [y.unsqueeze(1) for y in states]
        return states

    def _check_shapes(self, u: Tensor, states: list[Tensor], sizes: Tensor | None) -> None:
        """Refuse wrong shapes and types of u and of h_0 (and c_0), in torch.nn's words.

        sizes: the batch_sizes of a PackedSequence; None for a tensor.
        """
        self.check_input(u, sizes)
        expected = self.get_expected_hidden_size(u, sizes)  # of h_0, which may be projected
        expected_sizes = [expected, (*expected[:2], self.hidden_size)]
        for i, y in enumerate(states):
            message = "Expected hidden size {}, got {}"
            if self.slots > 1:
                message = f"Expected hidden[{i}] size {{}}, got {{}}"
            self.check_hidden_size(y, expected_sizes[i], message)
            if y.device != u.device or (y.dtype != u.dtype and not autocast_is_on()):
                raise InputError(
                    f"hx is {str(y.dtype)[6:]} on {y.device} but the input is {str(u.dtype)[6:]} "
                    f"on {u.device}; use hx.to(input)."
                )


def read_options(module: nn.Module, names: Sequence[str]) -> dict[str, object]:
    """The values of these attributes, which are named as the arguments are."""
    return {name: getattr(module, name) for name in names}


def reorder(states: list[Tensor], indices: Tensor | None) -> list[Tensor]:
    """The states [layers directions, B, .] with their samples in the order `indices`.

    As they are if `indices` is None.
    """
    if indices is None:
        return states
    return [y.index_select(1, indices) for y in states]


def combination_error(reason: str, option: str) -> Unsupported:
    """The error for options that cannot be combined; `option` is the one that others exclude."""
    return Unsupported(
        f"these options cannot be combined: {reason}. Leave out {option}, or the others."
    )


def copy_requires_grad(source: nn.Module, target: nn.Module) -> None:
    """Set requires_grad of the parameters of `target` as in `source`, by name."""
    for name, parameter in source.named_parameters():
        target.get_parameter(name).requires_grad_(parameter.requires_grad)

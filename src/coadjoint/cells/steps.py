"""Steps: cells that a formula over units cannot express, as they multiply matrices more than once.

Each is a module (u_t, x) -> x with its own parameters; a network takes it by name, or as a module:

    net = co.Network("gated-feedback", inputs=3, hidden=16, outputs=2, layers=2)
    net = co.Network(co.cells.steps.GatedFeedback(3, 16, layers=2), inputs=3, hidden=16, outputs=2)

They run on the autograd engine; costates and penalties are those of any network. W is recurrent and
R reads the input. All parameters are drawn uniformly from +-1/sqrt(hidden), as torch.nn does,
unless a step says otherwise. Step itself is in step_type, UnICORNN of several layers in
unicornn_layers.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..errors import InputError, KindError, choose
from .activations import Activation, activation_function, activation_name
from .parameters import ParameterOptions
from .step_type import Step as Step
from .step_type import new_parameter as new_parameter
from .unicornn_layers import UnICORNNLayers as UnICORNNLayers


class ResetBefore(Step):
    """The GRU whose reset gate acts before the product.

    r, k = sigmoid(W h + R u + b)             one W, R, b for each gate; order r, k, n
    n    = tanh(W_n (r * h) + R_n u + b_n)
    h'   = (1 - k) * n + k * h

    Cho et al., Learning phrase representations using RNN encoder-decoder, EMNLP (2014), who leave
    out b. Cell "gru" is torch's variant: r * (W_n h).
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(inputs, hidden)
        make: ParameterOptions = {"dtype": dtype, "device": device}
        self.W = new_parameter(3 * hidden, hidden, **make)
        self.R = new_parameter(3 * hidden, inputs, **make)
        self.b = new_parameter(3 * hidden, **make) if bias else None
        self.reset_parameters()

    def blocks(self) -> list[Tensor]:
        """W of the gates r and k, and of the new content n: three [hidden, hidden]."""
        return list(self.W.split(self.hidden))

    def forward(self, u: Tensor, h: Tensor) -> Tensor:
        """The new h from u and h, by the equations of the class."""
        d = self.hidden
        v_gates, v_n = linear(u, self.R, self.b).split([2 * d, d], -1)
        r, k = torch.sigmoid(linear(h, self.W[: 2 * d]) + v_gates).chunk(2, -1)
        n = torch.tanh(linear(r * h, self.W[2 * d :]) + v_n)
        return (1 - k) * n + k * h


class MixedLSTM(Step):
    """The LSTM whose output mixes the memory of all units.

    i, f, o = sigmoid(W h + R u + b)          one W, R, b for each gate; order i, f, o, n
    n       = tanh(W_n h + R_n u + b_n)
    c'      = f * c + i * n
    h'      = o * tanh(U c')

    Perez Jensen, Deep Learning (lecture notes, 2024), section 5.1, which leaves out b. Its G, F,
    H and V are [W R] of i, f, o and n; z is c, zeta is h. With U = 1 it is cell "lstm".
    """

    slots = 2
    slot_names = ("h", "c")
    state = "2"

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(inputs, hidden)
        make: ParameterOptions = {"dtype": dtype, "device": device}
        self.W = new_parameter(4 * hidden, hidden, **make)
        self.R = new_parameter(4 * hidden, inputs, **make)
        self.U = new_parameter(hidden, hidden, **make)
        self.b = new_parameter(4 * hidden, **make) if bias else None
        self.reset_parameters()

    def blocks(self) -> list[Tensor]:
        """W of the gates i, f, o and of the new content n, and U: five [hidden, hidden]."""
        return [*self.W.split(self.hidden), self.U]

    def forward(self, u: Tensor, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The new (h, c) from u and (h, c), by the equations of the class."""
        h, c = x
        a = linear(h, self.W) + linear(u, self.R, self.b)
        gates, content = a.split([3 * self.hidden, self.hidden], -1)
        i, f, o = torch.sigmoid(gates).chunk(3, -1)
        c = f * c + i * torch.tanh(content)
        return o * torch.tanh(linear(c, self.U)), c


class DeepTransition(Step):
    """A multilayer perceptron between one state and the next.

    y_1 = phi(W h + R u + b)                        [width]
    y_l = phi(W_l y_{l-1} + b_l)    l = 2..depth    [width], the last one [hidden]
    h'  = y_depth

    With shortcut=True the last layer also sees the state: phi(W_L y_{L-1} + S h + b_L), so that
    the path from h to h' need not grow with the depth; the authors' code passes h to every layer
    after the first, the same for depth 2. depth = 1 is the Elman cell; width is `hidden` if not
    given.

    Pascanu, Gulcehre, Cho & Bengio, How to construct deep recurrent neural networks, ICLR (2014):
    DT-RNN and DT(S)-RNN.
    """

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        depth: int = 2,
        width: int | None = None,
        activation: Activation = "tanh",
        shortcut: bool = False,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(inputs, hidden, depth=depth, width=hidden if width is None else width)
        if shortcut and depth == 1:
            raise InputError(
                "shortcut=True skips the layers between W and the new state, but depth=1 has none."
            )
        make: ParameterOptions = {"dtype": dtype, "device": device}
        self.phi = activation_function(activation)
        widths = [*[width or hidden] * (depth - 1), hidden]  # of y_1, ..., y_depth
        self.W = new_parameter(widths[0], hidden, **make)
        self.R = new_parameter(widths[0], inputs, **make)
        self.b = new_parameter(widths[0], **make) if bias else None
        self.rest = nn.ModuleList()
        for below, above in itertools.pairwise(widths):
            self.rest.append(nn.Linear(below, above, bias, **make))
        self.S = new_parameter(hidden, hidden, **make) if shortcut else None
        self.reset_parameters()

    def blocks(self) -> list[Tensor]:
        """W, the matrices between the layers, and S if there is a shortcut."""
        matrices: list[Tensor] = [self.W]
        for layer in self.rest:
            assert isinstance(layer, nn.Linear)
            matrices.append(layer.weight)
        if self.S is not None:
            matrices.append(self.S)
        return matrices

    def extra_repr(self) -> str:
        """The sizes and the options, for torch's repr."""
        phi = activation_name(self.phi)
        own = f"depth={len(self.rest) + 1}, activation={phi!r}, shortcut={self.S is not None}"
        return f"{super().extra_repr()}, {own}"

    def forward(self, u: Tensor, h: Tensor) -> Tensor:
        """The new h from u and h, by the equations of the class."""
        a = linear(h, self.W) + linear(u, self.R, self.b)
        for layer in self.rest:  # a is the argument of phi in y_1, then in y_2, ...
            a = layer(self.phi(a))
        if self.S is not None:
            a = a + linear(h, self.S)
        return self.phi(a)


# The units of a layer of gated feedback. All have the same arguments, whether they use them or not:
# gates  after their sigmoid
# v      R y + b of the new content, y being the layer below
# s      the previous states of all layers, through their global gates and U
# h, c   the layer's own previous state; c only of the lstm
def tanh_unit(
    gates: list[Tensor], v: Tensor, s: Tensor, h: Tensor, c: Tensor | None
) -> tuple[Tensor, ...]:
    """The new (h,) of a unit without gates, h' = tanh(v + s).

    v is the input from the layer below, s that from the previous states of all layers; the other
    arguments are for other units.
    """
    return (torch.tanh(v + s),)


def gru_unit(
    gates: list[Tensor], v: Tensor, s: Tensor, h: Tensor, c: Tensor | None
) -> tuple[Tensor, ...]:
    """The new (h,) of a GRU unit with gates r, k: h' = (1 - k) tanh(v + r s) + k h.

    v is the input from the layer below, s that from the previous states of all layers; c is for
    other units.
    """
    r, k = gates
    return ((1 - k) * torch.tanh(v + r * s) + k * h,)


def lstm_unit(
    gates: list[Tensor], v: Tensor, s: Tensor, h: Tensor, c: Tensor | None
) -> tuple[Tensor, ...]:
    """The new (h, c) of an LSTM unit with gates i, f, o: c' = f c + i tanh(v + s), h' = o tanh(c').

    v is the input from the layer below, s that from the previous states of all layers.
    """
    assert c is not None
    i, f, o = gates
    c = f * c + i * torch.tanh(v + s)
    return o * torch.tanh(c), c


# How many gates a unit has, and its function.
UNITS: dict[str, tuple[int, Callable[..., tuple[Tensor, ...]]]] = {
    "tanh": (0, tanh_unit),
    "gru": (2, gru_unit),
    "lstm": (3, lstm_unit),
}


class FeedbackLayer(nn.Module):
    """One layer of gated feedback.

    R, b               read the layer below, or u: rows of the gates, then of the new content
    W                  of the gates: reads its own layer
    U                  of the new content: reads all layers, each through its global gate
    g_below, g_states  of the global gates: read the layer below, and all states
    """

    def __init__(
        self, below: int, hidden: int, layers: int, unit: str, bias: bool, make: ParameterOptions
    ) -> None:
        # `below` is the width of the layer below, `make` the dtype and device of parameters.
        super().__init__()
        d = hidden
        gates, self.new_state = UNITS[unit]
        self.gates = gates
        self.R = new_parameter((gates + 1) * d, below, **make)
        self.b = new_parameter((gates + 1) * d, **make) if bias else None
        self.W = new_parameter(gates * d, d, **make) if gates else None
        self.U = new_parameter(d, layers * d, **make)
        self.g_below = new_parameter(layers, below, **make)
        self.g_states = new_parameter(layers, layers * d, **make)

    def forward(self, y: Tensor, states: Tensor, h: Tensor, c: Tensor | None) -> tuple[Tensor, ...]:
        """The new h (and c) of this layer.

        y       the new state of the layer below, or u
        states  the previous states of all layers [B, layers, hidden]
        h, c    the previous state of this layer
        """
        # The global gates, [B, layers]: how much of each layer's state enters this layer.
        g = torch.sigmoid(linear(y, self.g_below) + linear(states.flatten(-2), self.g_states))
        s = linear((g[..., None] * states).flatten(-2), self.U)
        *gates, v = linear(y, self.R, self.b).chunk(self.gates + 1, -1)
        if self.W is not None:  # the unit has gates
            products = linear(h, self.W).chunk(self.gates, -1)
            gates = [torch.sigmoid(a + z) for a, z in zip(gates, products, strict=True)]
        return self.new_state(gates, v, s, h, c)


class GatedFeedback(Step):
    """Stacked layers; each reads the previous states of all layers through global reset gates.

    y        = h'_{j-1}, the new state of the layer below; u for j = 1
    g_ij     = sigmoid(w_ij . y + u_ij . (all h))       one number for each pair of layers: from i to j
    s        = sum_i g_ij U_ij h_i
    tanh     h'_j = tanh(R y + b + s)
    gru      r, k = sigmoid(R y + W h_j + b);  n = tanh(R_n y + b_n + r * s);  h'_j = (1 - k) * n + k * h_j
    lstm     i, f, o = sigmoid(R y + W h_j + b);  c'_j = f * c_j + i * tanh(R_c y + b_c + s);  h'_j = o * tanh(c'_j)

    The gates of a unit read its own layer; only the new content reads the others. The state has the
    top layer first, for the readout: h_L, ..., h_1, and for lstm then c_L, ..., c_1.

    Chung, Gulcehre, Cho & Bengio, Gated feedback recurrent neural networks, ICML (2015), who leave
    out b.
    """  # noqa: E501  -- a table of equations

    state = "layers; lstm: 2 layers"

    def __init__(
        self,
        inputs: int,
        hidden: int,
        *,
        layers: int = 2,
        unit: str = "tanh",
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(inputs, hidden, layers=layers)
        self.unit = choose("unit", unit, UNITS)
        self.layers = layers
        self.slots = 2 * layers if unit == "lstm" else layers
        make: ParameterOptions = {"dtype": dtype, "device": device}
        self.levels = nn.ModuleList()
        for below in (inputs, *[hidden] * (layers - 1)):  # the width that each layer reads
            self.levels.append(FeedbackLayer(below, hidden, layers, unit, bias, make))
        self.reset_parameters()

    def blocks(self) -> list[Tensor]:
        """U from each layer to each, and W of each gate, all [hidden, hidden]."""
        d = self.hidden
        matrices: list[Tensor] = []
        for level in self.levels:
            assert isinstance(level, FeedbackLayer)
            matrices += level.U.split(d, 1)
            if level.W is not None:
                matrices += level.W.split(d)
        return matrices

    @property
    def slot_names(self) -> tuple[str, ...]:
        """h2 h1, and for lstm c2 c1: the top layer first."""
        slots = "hc" if self.unit == "lstm" else "h"
        return tuple(f"{slot}{j}" for slot in slots for j in range(self.layers, 0, -1))

    def extra_repr(self) -> str:
        """The sizes and the kind of unit, for torch's repr."""
        return f"{super().extra_repr()}, layers={self.layers}, unit={self.unit!r}"

    def forward(self, u: Tensor, x: Tensor | tuple[Tensor, ...]) -> Tensor:
        """The new state [B, slots hidden], by the equations of the class."""
        parts = self.state_parts(x)
        h = parts[: self.layers]  # the top layer first
        c = parts[self.layers :]
        states = torch.stack(h, -2)
        y = u
        new: list[tuple[Tensor, ...]] = []  # (h,) or (h, c) of each layer, the top layer first
        # From the bottom up: the layer's place in h and c counts down to 0.
        for level, place in zip(self.levels, reversed(range(self.layers)), strict=True):
            new.insert(0, level(y, states, h[place], c[place] if c else None))
            y = new[0][0]  # the layer's new h, which the next one reads
        # h of all layers, then c of all layers
        return torch.cat([part for slot in zip(*new, strict=True) for part in slot], -1)


STEPS: dict[str, type[Step]] = {
    "gru-before": ResetBefore,
    "lstm-mixed": MixedLSTM,
    "gated-feedback": GatedFeedback,
    "deep-transition": DeepTransition,
    "unicornn-layers": UnICORNNLayers,
}

COMMON_OPTIONS = ("inputs", "hidden", "bias", "dtype", "device")  # those that all steps take


def options(name: str) -> dict[str, object]:
    """The options of a step and their defaults, apart from those that all steps take.

    Example:
        >>> from coadjoint.cells import steps
        >>> steps.options("gated-feedback")
        {'layers': 2, 'unit': 'tanh'}
    """
    arguments = inspect.signature(STEPS[choose("step", name, STEPS)]).parameters
    return {key: arguments[key].default for key in arguments if key not in COMMON_OPTIONS}


def named(name: str, inputs: int, hidden: int, **given: Any) -> Step:
    """The step of that name; `given` holds options of its class, bias, dtype and device.

    Example:
        >>> from coadjoint.cells import steps
        >>> steps.named("gated-feedback", inputs=2, hidden=3).slots
        2
    """
    known = options(name)
    unknown = [option for option in given if option not in (*known, *COMMON_OPTIONS)]
    if unknown:
        raise KindError(
            f"cell '{name}' has no option {', '.join(unknown)}; "
            f"its options: {', '.join(known) or 'none'}."
        )
    return STEPS[name](inputs, hidden, **given)

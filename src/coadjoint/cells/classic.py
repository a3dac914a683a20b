"""Classic cells: Elman, leaky and rate networks, LSTM, GRU and their relatives.

The docstring of a formula holds its equations and, in the last paragraph, its paper; W is recurrent
and R reads the input throughout (other libraries swap the letters).
"""
# ruff: noqa: D205, D403, D415  -- docstrings that are equations

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .activations import Activation, activation_function
from .cell import FIRST, Cell, Fields, cell
from .nodes import Node
from .primitives import held, sigmoid, tanh
from .transport import cached_by_options


@cached_by_options
def elman(activation: Activation = "tanh") -> Cell:
    """The simple recurrent network; `activation` is sigma."""
    sigma = activation_function(activation)

    @cell(slots="h")
    def elman(z: Node, v: Node, x: Fields, p: Fields) -> Node:
        """h' = sigma(W h + R u + b)

        Elman, Cognitive Science 14 (1990)
        """
        return sigma(z + v)

    return elman


@cached_by_options
def leaky(activation: Activation = "tanh") -> Cell:
    """Leaky integrator units; `activation` is sigma."""
    sigma = activation_function(activation)

    @cell(slots="h", parameters={"leak": 0.5})
    def leaky(z: Node, v: Node, x: Fields, p: Fields) -> Node:
        """h' = (1 - leak) h + leak sigma(W h + R u + b), one leak for each unit

        Jaeger et al., Neural Networks 20 (2007)
        """
        return (1 - p.leak) * x.h + p.leak * sigma(z + v)

    return leaky


@cached_by_options
def rate(activation: Activation = "tanh", noise: float = 0.0) -> Cell:
    """Firing-rate units; for Dale's law give the network structure="dale".

    activation  sigma
    noise       the standard deviation of n at each step. It is drawn anew for every run in training
                mode, by torch's own generator (torch.manual_seed), and left out by net.eval().
    """
    sigma = activation_function(activation)
    # With n as an entry of v, z and v have entries by name: z.x, v.x, v.n. Else they are bare.
    gates = "x" if noise else None
    given = "n" if noise else ""
    data = functools.partial(gaussian, noise) if noise else None

    @cell(
        slots="x",
        gates=gates,
        parameters={"tau": 0.1},
        reads=lambda x: sigma(x.x),
        given=given,
        data=data,
    )
    def rate(z: Any, v: Any, x: Fields, p: Fields) -> Node:  # entries by name, or bare nodes
        """x' = (1 - tau) x + tau (W sigma(x) + R u + b) + n, one tau for each unit; process noise n
        if noise > 0

        Sompolinsky et al., PRL 61 (1988)
        """
        stays: Node = (1 - p.tau) * x.x
        if noise:
            argument: Node = z.x + v.x
            n: Node = v.n
            return stays + p.tau * argument + n
        total: Node = z + v
        return stays + p.tau * total

    return rate


def gaussian(std: float, t: Tensor, d: int, training: bool) -> Tensor:
    """Independent N(0, std^2) for d units at the steps t, [len(t), d]; zero outside training."""
    if training:
        return std * torch.randn(len(t), d)
    return torch.zeros(len(t), d)


@cell(slots="h c", gates="i f g o")
def lstm(z: Fields, v: Fields, x: Fields, p: Fields) -> tuple[Node, Node]:
    """c' = f c + i g, h' = o tanh(c'); i, f, o sigmoid, g tanh of W h + R u + b; torch's gate order

    Hochreiter & Schmidhuber, Neural Computation 9 (1997); forget gate by Gers et al. (2000)
    """
    i = sigmoid(z.i + v.i)
    f = sigmoid(z.f + v.f)
    g = tanh(z.g + v.g)
    o = sigmoid(z.o + v.o)
    c = f * x.c + i * g
    return o * tanh(c), c


@cached_by_options
def lstm_1997(truncated: bool = False) -> Cell:
    """The LSTM of the first paper, without a forget gate.

    truncated  as in the paper no error goes back through W: only the memory carries it to earlier
               steps, while W itself still learns by delta_t h_{t-1}'. The result is not a gradient
               of the loss; second derivatives are those of the step with h held constant.
    """
    reads = (lambda x: held(x.h)) if truncated else FIRST
    name = "lstm-1997-truncated" if truncated else "lstm-1997"

    @cell("h c", "i g o", reads=reads, name=name)
    def lstm_1997(z: Fields, v: Fields, x: Fields, p: Fields) -> tuple[Node, Node]:
        """c' = c + i g, h' = o s(c'); i, o sigmoid of W h + R u + b, g = 2 s of it,
        s(a) = 2 sigmoid(a) - 1 = tanh(a/2): no forget gate, and the squashing functions of the
        paper, 4 sigmoid - 2 and 2 sigmoid - 1

        Hochreiter & Schmidhuber, Neural Computation 9 (1997)
        """
        # 2 s(a) = 2 tanh(a/2)
        c = x.c + sigmoid(z.i + v.i) * 2 * tanh((z.g + v.g) / 2)
        return sigmoid(z.o + v.o) * tanh(c / 2), c

    return lstm_1997


@cell(slots="h", gates="r u n", parameters={"b_n": 0.0})
def gru(z: Fields, v: Fields, x: Fields, p: Fields) -> Node:
    """h' = (1 - u) n + u h, n = tanh(v_n + r (z_n + b_n)); r, u sigmoid; torch's order and its
    reset after the product; b_n is torch's b_hn; the other recurrent biases are part of b

    Cho et al., EMNLP (2014)
    """
    r = sigmoid(z.r + v.r)
    u = sigmoid(z.u + v.u)
    n = tanh(v.n + r * (z.n + p.b_n))
    return (1 - u) * n + u * x.h


@cell(slots="h c", gates="i f g o", parameters={"pi": 0.0, "pf": 0.0, "po": 0.0})
def peephole(z: Fields, v: Fields, x: Fields, p: Fields) -> tuple[Node, Node]:
    """The lstm whose gates see the memory: i and f also p_i c and p_f c, o also p_o c'

    Gers & Schmidhuber, IJCNN (2000)
    """
    i = sigmoid(z.i + v.i + p.pi * x.c)
    f = sigmoid(z.f + v.f + p.pf * x.c)
    c = f * x.c + i * tanh(z.g + v.g)
    return sigmoid(z.o + v.o + p.po * c) * tanh(c), c


@cached_by_options
def scrn(alpha: float = 0.95, learned: bool = False, activation: Activation = "sigmoid") -> Cell:
    """The structurally constrained network: a slow context s beside the hidden state h.

    alpha       how much of the context stays at each step
    learned     alpha = sigmoid(beta), one for each unit and trained; otherwise it is fixed
    activation  sigma
    """
    sigma = activation_function(activation)
    if not 0 < alpha < 1:
        raise InputError(f"alpha must lie between 0 and 1; got {alpha}.")

    def weights(
        W: Tensor, R: Tensor, b: Tensor | None, p: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """W, R and b as the formula takes them, with s' written out.

        The cell's h' reads s', but W multiplies the previous state, before s' is known. By
        P s' = P alpha s + P (1 - alpha) (B u + b_s), one part goes to W and the other to R and b.

        W [d, 2 d] is W_h beside P; the rows of R and b are those of h, then those of s.
        """
        d = len(W)
        W_h, P = W.split(d, 1)
        stays: Tensor | float = alpha
        enters: Tensor | float = 1 - alpha
        if learned:
            stays = sigmoid(p["beta"])
            enters = sigmoid(-p["beta"])  # 1 - alpha, but not zero before alpha is one

        def add_context(y: Tensor) -> Tensor:
            """R or b with P (1 - alpha) times its rows of s, y[d:], added to those of h, y[:d]."""
            return torch.cat([y[:d] + (P * enters) @ y[d:], y[d:]])

        # Autograd adds up the gradient of P in the order of these lines: it decides the last bits.
        new_W = torch.cat([W_h, P * stays], 1)
        new_R = add_context(R)
        new_b = None if b is None else add_context(b)
        return new_W, new_R, new_b

    # beta begins where sigmoid(beta) = alpha
    parameters = {"beta": math.log(alpha / (1 - alpha))} if learned else {}
    name = "scrn-learned" if learned else "scrn"

    @cell("h s", "h", parameters, reads="h s", inputs="s", shows="h s", weights=weights, name=name)
    def scrn(z: Fields, v: Fields, x: Fields, p: Fields) -> tuple[Node, Node]:
        """s' = alpha s + (1 - alpha) (B u + b_s), h' = sigma(W h + P s' + A u + b_h); R holds A
        and B, W holds W and P; the readout reads h and s

        Mikolov et al., arXiv:1412.7753 (2014)
        """
        stays: Node | float = alpha
        enters: Node | float = 1 - alpha
        if learned:
            stays = sigmoid(p.beta)
            enters = sigmoid(-p.beta)  # 1 - alpha, but not zero before alpha is one
        # `weights` has put P s' into W, R and b, and so into z.h + v.h; v.s is B u + b_s.
        return sigma(z.h + v.h), stays * x.s + enters * v.s

    return scrn

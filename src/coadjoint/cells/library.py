"""The cells that come with the package, and CELLS, their names.

Each is a formula over the functions of cells.formula, as its paper has it; W is recurrent and R reads the input throughout
(other libraries swap the letters).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, KindError, choose, real
from . import structures
from .activations import Activation, activation_function
from .cell import FIRST, Cell, Uniform, cell
from .formula import cos, exp, expm1, held, relu, sigmoid, sign, sin, softplus, sqrt, step, tanh
from .transport import remember_origin


def cached_by_options(make: Callable[..., Cell]) -> Callable[..., Cell]:
    """One cell for the same options, however they are given: what is compiled for a cell is kept with it."""
    signature, known = inspect.signature(make), dict[Any, Cell]()

    @functools.wraps(make)
    def of(*args: Any, **options: Any) -> Cell:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        key = tuple(bound.arguments.values())
        if key not in known:
            known[key] = remember_origin(make(*key), of, *key)
        return known[key]

    return of


@cached_by_options
def elman(activation: Activation = "tanh") -> Cell:
    sigma = activation_function(activation)

    @cell(slots="h")
    def elman(z, v, x, p):
        """h' = sigma(W h + R u + b)

        Elman, Cognitive Science 14 (1990)"""
        return sigma(z + v)

    return elman


@cached_by_options
def leaky(activation: Activation = "tanh") -> Cell:
    sigma = activation_function(activation)

    @cell(slots="h", parameters={"leak": 0.5})
    def leaky(z, v, x, p):
        """h' = (1 - leak) h + leak sigma(W h + R u + b), one leak for each unit

        Jaeger et al., Neural Networks 20 (2007)"""
        return (1 - p.leak) * x.h + p.leak * sigma(z + v)

    return leaky


@cached_by_options
def rate(activation: Activation = "tanh", noise: float = 0.0) -> Cell:
    """noise: the standard deviation of n at each step; drawn anew for every run in training mode by torch's own generator
    (torch.manual_seed), and left out by net.eval(). For Dale's law give the network a structure="dale"."""
    sigma = activation_function(activation)
    more: dict[str, Any] = {}
    if noise:
        more = {"gates": "x", "given": "n", "data": functools.partial(gaussian, noise)}

    @cell(slots="x", parameters={"tau": 0.1}, reads=lambda x: sigma(x.x), **more)
    def rate(z, v, x, p):
        """x' = (1 - tau) x + tau (W sigma(x) + R u + b) + n, one tau for each unit; process noise n if it is asked for

        Sompolinsky et al., PRL 61 (1988)"""
        if noise:
            return (1 - p.tau) * x.x + p.tau * (z.x + v.x) + v.n
        return (1 - p.tau) * x.x + p.tau * (z + v)

    return rate


def gaussian(std: float, t: Tensor, d: int, training: bool) -> Tensor:
    """Independent N(0, std^2) for each unit at the steps t; zero outside training."""
    return std * torch.randn(len(t), d) if training else torch.zeros(len(t), d)


@cell(slots="h c", gates="i f g o")
def lstm(z, v, x, p):
    """c' = f c + i g, h' = o tanh(c'); i, f, o sigmoid, g tanh of W h + R u + b; torch's gate order

    Hochreiter & Schmidhuber, Neural Computation 9 (1997); forget gate by Gers et al. (2000)"""
    i, f, g, o = sigmoid(z.i + v.i), sigmoid(z.f + v.f), tanh(z.g + v.g), sigmoid(z.o + v.o)
    c = f * x.c + i * g
    return o * tanh(c), c


@cached_by_options
def lstm_1997(truncated: bool = False) -> Cell:
    """truncated: as in the paper no error goes back through W: the memory alone carries it to earlier steps, and W itself still
    learns by delta_t h_{t-1}'. That is no gradient of the loss; its own derivatives are those of the step with h held."""
    reads, name = (
        ((lambda x: held(x.h)), "lstm-1997-truncated") if truncated else (FIRST, "lstm-1997")
    )

    @cell("h c", "i g o", reads=reads, name=name)
    def lstm_1997(z, v, x, p):
        """c' = c + i g, h' = o s(c'); i, o sigmoid of W h + R u + b, g = 2 s of it, s(a) = 2 sigmoid(a) - 1 = tanh(a/2): no forget
        gate, and the squashing functions of the paper, 4 sigmoid - 2 and 2 sigmoid - 1

        Hochreiter & Schmidhuber, Neural Computation 9 (1997)"""
        c = x.c + sigmoid(z.i + v.i) * 2 * tanh((z.g + v.g) / 2)
        return sigmoid(z.o + v.o) * tanh(c / 2), c

    return lstm_1997


@cell(slots="h", gates="r u n", parameters={"b_n": 0.0})
def gru(z, v, x, p):
    """h' = (1 - u) n + u h, n = tanh(v_n + r (z_n + b_n)); r, u sigmoid; torch's order and its reset after the product;
    b_n is torch's b_hn; the other recurrent biases are part of b

    Cho et al., EMNLP (2014)"""
    r, u = sigmoid(z.r + v.r), sigmoid(z.u + v.u)
    n = tanh(v.n + r * (z.n + p.b_n))
    return (1 - u) * n + u * x.h


@cell(slots="h c", gates="i f g o", parameters={"pi": 0.0, "pf": 0.0, "po": 0.0})
def peephole(z, v, x, p):
    """The lstm whose gates see the memory: i and f also p_i c and p_f c, o also p_o c'

    Gers & Schmidhuber, IJCNN (2000)"""
    i, f = sigmoid(z.i + v.i + p.pi * x.c), sigmoid(z.f + v.f + p.pf * x.c)
    c = f * x.c + i * tanh(z.g + v.g)
    return sigmoid(z.o + v.o + p.po * c) * tanh(c), c


@cached_by_options
def scrn(alpha: float = 0.95, learned: bool = False, activation: Activation = "sigmoid") -> Cell:
    """learned: alpha = sigmoid(beta), one for each unit; otherwise it is fixed."""
    sigma = activation_function(activation)
    if not 0 < alpha < 1:
        raise InputError(f"alpha must lie between 0 and 1; got {alpha}.")

    def shares(p: Mapping[str, Any]) -> tuple[Any, Any]:
        """alpha and 1 - alpha, neither of which is zero before the other is one."""
        return (sigmoid(p["beta"]), sigmoid(-p["beta"])) if learned else (alpha, 1 - alpha)

    def weights(
        W: Tensor, R: Tensor, b: Tensor | None, p: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """P s' = P alpha s + P (1 - alpha) (B u + b_s): one part goes to W, the other to the input."""
        d, (keep, enter) = len(W), shares(p)
        Wh, P = W.split(d, 1)
        onto = lambda y: torch.cat([y[:d] + (P * enter) @ y[d:], y[d:]])
        return torch.cat([Wh, P * keep], 1), onto(R), None if b is None else onto(b)

    table = {"beta": math.log(alpha / (1 - alpha))} if learned else {}

    name = "scrn-learned" if learned else "scrn"

    @cell("h s", "h", table, reads="h s", inputs="s", shows="h s", weights=weights, name=name)
    def scrn(z, v, x, p):
        """s' = alpha s + (1 - alpha) (B u + b_s), h' = sigma(W h + P s' + A u + b_h); R holds A and B, W holds W and P; the
        readout reads h and s

        Mikolov et al., arXiv:1412.7753 (2014)"""
        keep, enter = shares({"beta": p.beta} if learned else {})
        return sigma(z.h + v.h), keep * x.s + enter * v.s

    return scrn


@cached_by_options
def antisymmetric(
    eps: float = 0.01, gamma: float = 0.01, gated: bool = False, activation: Activation = "tanh"
) -> Cell:
    sigma, structure = (
        activation_function(activation),
        functools.partial(structures.Skew, gamma=gamma),
    )
    if gated:

        @cell(slots="h", gates="h", inputs="g", structure=structure, name="antisymmetric-gated")
        def gated_antisymmetric(z, v, x, p):
            """h' = h + eps sigmoid(W h + R_g u + b_g) sigma(W h + R u + b), W = M - M' - gamma I for both

            Chang et al., ICLR (2019)"""
            return x.h + eps * sigmoid(z.h + v.g) * sigma(z.h + v.h)

        return gated_antisymmetric

    @cell(slots="h", structure=structure)
    def antisymmetric(z, v, x, p):
        """h' = h + eps sigma(W h + R u + b), W = M - M' - gamma I

        Chang et al., ICLR (2019)"""
        return x.h + eps * sigma(z + v)

    return antisymmetric


@cell(slots="h", parameters={"c": Uniform(-0.01, 0.01)}, structure=structures.Orthogonal)
def exponential(z, v, x, p):
    """h' = modrelu(W h + R u + b), modrelu(a) = sign(a) relu(|a| + c), one c for each unit; W = exp(A), A = M - M', begins at
    the Cayley initialisation and stays orthogonal; the paper has no b

    Lezcano-Casado & Martinez-Rubio, ICML (2019)"""
    a = z + v
    s = sign(a)
    return s * relu(s * a + p.c)


@cached_by_options
def lipschitz(
    eps: float = 0.03, beta: float = 0.75, gamma: float = 0.001, activation: Activation = "tanh"
) -> Cell:
    sigma, structure = (
        activation_function(activation),
        functools.partial(structures.Skew, beta, gamma),
    )

    @cell(slots="h", gates="a h", structure=structure)
    def lipschitz(z, v, x, p):
        """h' = h + eps (A h + sigma(W h + R u + b)); A = (1 - beta)(M + M') + beta (M - M') - gamma I, and W likewise of its
        own M; both stand in W, A first

        Erichson et al., ICLR (2021)"""
        return x.h + eps * (z.a + sigma(z.h + v.h))

    return lipschitz


@cached_by_options
def cornn(
    dt: float = 0.042, gamma: float = 2.7, eps: float = 4.7, activation: Activation = "tanh"
) -> Cell:
    sigma = activation_function(activation)

    @cell(slots="y z", reads="y z")
    def cornn(z, v, x, p):
        """z' = z + dt (sigma(W y + W_z z + R u + b) - gamma y - eps z), y' = y + dt z'

        Rusch & Mishra, ICLR (2021)"""
        new = x.z + dt * (sigma(z + v) - gamma * x.y - eps * x.z)
        return x.y + dt * new, new

    return cornn


@cached_by_options
def unicornn(eps: float = 0.03, alpha: float = 0.9, activation: Activation = "tanh") -> Cell:
    sigma = activation_function(activation)

    @cell(slots="y z", parameters={"w": Uniform(0.0, 1.0), "c": Uniform(-0.1, 0.1)}, reads=None)
    def unicornn(z, v, x, p):
        """z' = z - e (sigma(w y + R u + b) + alpha y), y' = y + e z', e = eps sigmoid(c); w and c for each unit, no W

        Rusch & Mishra, ICML (2021)"""
        e = eps * sigmoid(p.c)
        new = x.z - e * (sigma(p.w * x.y + (z + v)) + alpha * x.y)
        return x.y + e * new, new

    return unicornn


@cached_by_options
def inverse(k: int = 1, activation: Activation = "tanh") -> Cell:
    """k: how many steps with W^-1, then as many with W."""
    sigma = activation_function(activation)
    if not isinstance(k, int) or k < 1:
        raise InputError(f"k must be a number of steps, at least 1; got {k!r}.")

    def turn(t: Tensor, d: int, training: bool) -> Tensor:
        """1 at the steps that take W, 0 at those that take its inverse."""
        return ((t - 1) // k % 2)[:, None].expand(-1, d)

    @cell(
        slots="h", gates="w i", inputs="h", given="m", structure=structures.WithInverse, data=turn
    )
    def inverse(z, v, x, p):
        """h' = sigma(W^-1 h + R u + b) for k steps, then sigma(W h + R u + b) for k steps, and so on"""
        return sigma(v.m * z.w + (1 - v.m) * z.i + v.h)

    return inverse


@cell(slots="h", gates="g h", reads=None)
def mingru(z, v, x, p):
    """h' = (1 - g) h + g (R u + b), g = sigmoid(R_g u + b_g): linear in h

    Feng et al., arXiv:2410.01201 (2024)"""
    a = z.g + v.g
    keep = sigmoid(-a)  # 1 - g, which as a difference would be zero long before it is
    return keep * x.h + sigmoid(a) * (z.h + v.h)


@cell(slots="h", gates="f i h", reads=None)
def minlstm(z, v, x, p):
    """h' = f/(f + i) h + i/(f + i) (R u + b), f and i sigmoid of their own R u + b: linear in h

    Feng et al., arXiv:2410.01201 (2024)"""
    # log(f/i), also where both are zero to the last digit
    odds = softplus(-(z.i + v.i)) - softplus(-(z.f + v.f))
    return sigmoid(odds) * x.h + sigmoid(-odds) * (z.h + v.h)


def ring(area: Tensor) -> Tensor:
    """nu of units whose |L|^2 is `area`, kept off 0 and 1, where it ends."""
    return torch.log(-torch.log(area.clamp(1e-6, 1 - 1e-6)) / 2)


FADES_AT_ONCE = 7.0  # nu above which |L| = exp(-exp(nu)) is zero
NEVER_FADES = -37.0  # nu below which 1 - |L|^2 is 2 exp(nu) to the last digit of a double


def at_most(high: float, a: Any) -> Any:
    """The lesser of both, by a switch: a formula has no branches, and high - relu(high - a) would
    lose digits of a."""
    over = step(a - high)
    return (1 - over) * a + over * high


def input_gain(nu: Any) -> Any:
    """sqrt(1 - |L|^2) = sqrt(1 - exp(-2 exp(nu))), exact with its derivatives where |L| is nearly 1.

    A root is infinitely steep at 0, so that its slopes would leave the range. Below NEVER_FADES it is
    proportional to exp(nu / 2): the root stops there, and that factor goes on."""
    under = step(NEVER_FADES - nu)
    within = (1 - under) * nu + under * NEVER_FADES
    beneath = under * (nu - NEVER_FADES)
    return sqrt(-expm1(-2 * exp(within))) * exp(beneath / 2)


@cell(
    slots="re im", gates="re im", reads=None, shows="re im",
    parameters={"nu": Uniform(0.0, 1.0, ring), "theta": Uniform(0.0, 2 * math.pi)},
)  # fmt: skip
def lru(z, v, x, p):
    """x' = L x + sqrt(1 - |L|^2) (R u + b), complex, L = exp(-exp(nu) + i theta) for each unit: linear in x; L begins uniform
    on the unit disc; the readout takes Re(C x), its V being (Re C, -Im C), and D u with skip=True

    Orvieto et al., ICML (2023)"""
    # further up exp(nu) overflows, and infinity times |L| = 0 is no number
    nu = at_most(FADES_AT_ONCE, p.nu)
    size, gain = exp(-exp(nu)), input_gain(nu)
    re, im = size * cos(p.theta), size * sin(p.theta)
    new_re = re * x.re - im * x.im + gain * (z.re + v.re)
    new_im = im * x.re + re * x.im + gain * (z.im + v.im)
    return new_re, new_im


@cached_by_options
def noisy(base: Cell, dropout: bool, zoneout: bool) -> Cell:
    """`base` under noise that comes as data.

    dropout  W reads r = m h instead of h; with one mask m for all steps of a sample: Gal & Ghahramani (2016)
    zoneout  a slot s keeps its value where k_s is 1: s' = k_s s + (1 - k_s) s_new.  Krueger et al. (2017)
    """
    keep = {s: f"k_{s}" for s in base.slots} if zoneout else {}
    given = (*keep.values(), *(("m",) if dropout else ()))
    reads = "r" if dropout else base.reads

    @cell(
        " ".join((*base.slots, *(("r",) if dropout else ()))),
        " ".join(base.gates),
        base.parameters,
        reads,
        " ".join(given),
        " ".join(base.inputs),
        " ".join(base.shows),
        base.structure,
        base.weights,
    )
    def noisy(z, v, x, p):
        entries = lambda y, names: {n: getattr(y, n) for n in names}
        new = base._call(
            entries(z, base.gates), entries(v, (*base.gates, *base.inputs)), entries(x, base.slots),
            entries(p, base.parameters),
        )  # fmt: skip
        if zoneout:
            pairs = [
                (getattr(v, keep[s]), getattr(x, s), y)
                for s, y in zip(base.slots, new, strict=True)
            ]
            new = [k * old + (1 - k) * y for k, old, y in pairs]
        return (*new, v.m * new[0]) if dropout else tuple(new)

    return replace(noisy, name=f"{base.name}{' dropout' * dropout}{' zoneout' * zoneout}")


CELLS: dict[str, Cell | Callable[..., Cell]] = {  # a cell, or a function of its options
    "elman": elman,
    "leaky": leaky,
    "rate": rate,
    "lstm": lstm,
    "lstm-1997": lstm_1997,
    "peephole": peephole,
    "gru": gru,
    "scrn": scrn,
    "scrn-learned": functools.partial(scrn, learned=True),
    "antisymmetric": antisymmetric,
    "antisymmetric-gated": functools.partial(antisymmetric, gated=True),
    "exponential": exponential,
    "lipschitz": lipschitz,
    "cornn": cornn,
    "unicornn": unicornn,
    "inverse": inverse,
    "mingru": mingru,
    "minlstm": minlstm,
    "lru": lru,
}


def options(name: str) -> dict[str, Any]:
    """The options of a cell of the table and what they are if they are not given."""
    make = CELLS[choose("cell", name, CELLS)]
    if isinstance(make, Cell):
        return {}
    taken = make.keywords if isinstance(make, functools.partial) else {}
    found = inspect.signature(make).parameters
    return {n: o.default for n, o in found.items() if n not in taken}


FIXED_ACTIVATION = tuple(
    name for name in CELLS if "activation" not in options(name)
)  # cells whose equations name their activations


def named(name: str, activation: Activation | None = None, **given: Any) -> Cell:
    """The cell of that name with its options; `activation` for those that leave it open."""
    known = options(name)
    if name in FIXED_ACTIVATION and activation is not None:
        raise InputError(
            f"cell '{name}' fixes its activations by its equations; leave out activation={activation!r}."
        )
    unknown = [n for n in given if n not in known]
    if unknown:
        has = ", ".join(n for n in known if n != "activation") or "none"
        raise KindError(f"cell '{name}' has no option {', '.join(unknown)}; its options: {has}.")
    for option, value in given.items():
        if isinstance(known[option], float):
            real(f"option {option} of cell '{name}'", value)
    make, given = CELLS[name], given | ({} if activation is None else {"activation": activation})
    if isinstance(make, Cell):
        return make
    try:
        return make(**given)
    except TypeError as e:
        if "unhashable" in str(e):
            raise KindError(
                f"activation must be a name or a function; got {type(activation).__name__}."
            ) from e
        raise

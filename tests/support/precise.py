"""The cells in 50 digits, with two derivatives and bounds on the rounding error.

They are written again from the papers for mpmath, whose numbers do not overflow, and so that no
digit is lost: 1 - sigmoid(a) is sigmoid(-a). A number carries two directions and their product, so
a mixed second derivative is exact, and with each of these the error that the same operations would
make in float32 or float64.
"""

from __future__ import annotations

import contextlib

import mpmath as mp
import torch

DIGITS = 50


class Rounded:
    """A value, and how far a computed one may be from it."""

    eps = tiny = mp.mpf(0)

    def __init__(self, value, error=0):
        self.value, self.error = mp.mpf(value), mp.mpf(error)

    def rounded(self):
        size = abs(self.value)
        underflows = 0 < size < self.tiny
        lost = self.tiny if underflows else self.eps * size
        return Rounded(self.value, self.error + lost)

    def __add__(self, other):
        return Rounded(self.value + other.value, self.error + other.error).rounded()

    def __mul__(self, other):
        error = self.error * (abs(other.value) + other.error) + abs(self.value) * other.error
        return Rounded(self.value * other.value, error).rounded()

    def __neg__(self):
        return Rounded(-self.value, self.error)


@contextlib.contextmanager
def precision(dtype):
    """50 digits, and errors as they are made in this type."""
    info = torch.finfo(dtype)
    Rounded.eps, Rounded.tiny = mp.mpf(info.eps), mp.mpf(info.tiny)
    with mp.workdps(DIGITS):
        yield


class Number:
    """y + d1 e1 + d2 e2 + d12 e1 e2, with e1 e1 = e2 e2 = 0."""

    def __init__(self, *parts):
        zero = Rounded(0)
        self.parts = (*parts, *[zero] * (4 - len(parts)))

    @property
    def at(self):
        return self.parts[0].value

    def through(self, value, slope, bend, third, lost=0):
        """f of this number, by f and its derivatives at its value; lost: what a slope may have lost
        of its digits before it is rounded, as 1 - q q does where q is nearly 1."""
        y, d1, d2, d12 = self.parts
        eps, moved = Rounded.eps, y.error
        value = Rounded(value, abs(slope) * moved).rounded()
        slope = Rounded(slope, abs(bend) * moved + lost * eps).rounded()
        bend = Rounded(bend, abs(third) * moved + 2 * lost * eps).rounded()
        return Number(value, slope * d1, slope * d2, slope * d12 + bend * d1 * d2)

    def __add__(self, other):
        return Number(*(a + b for a, b in zip(self.parts, number(other).parts, strict=True)))

    def __neg__(self):
        return Number(*(-a for a in self.parts))

    def __sub__(self, other):
        return self + -number(other)

    def __rsub__(self, other):
        return number(other) - self

    def __mul__(self, other):
        (a, a1, a2, a12), (b, b1, b2, b12) = self.parts, number(other).parts
        both = a12 * b + a1 * b2 + a2 * b1 + a * b12
        return Number(a * b, a1 * b + a * b1, a2 * b + a * b2, both)

    __radd__, __rmul__ = __add__, __mul__


def number(y):
    return y if isinstance(y, Number) else Number(Rounded(y))


def logistic(y):
    return 1 / (1 + mp.exp(-y))


def sigmoid(a):
    """Its slope is q - q q."""
    y = a.at
    q, slope = logistic(y), logistic(y) * logistic(-y)
    return a.through(q, slope, -slope * mp.tanh(y / 2), slope, lost=q)


def tanh(a):
    """Its slope is 1 - q q."""
    y = a.at
    slope = mp.sech(y) ** 2
    return a.through(mp.tanh(y), slope, -2 * mp.tanh(y) * slope, 6 * slope, lost=1)


def softplus(a):
    y = a.at
    q, bend = logistic(y), logistic(y) * logistic(-y)
    return a.through(mp.log1p(mp.exp(y)), q, bend, bend, lost=q)


def relu(a):
    return a if a.at > 0 else number(0)


def power_of_e(y):
    """mpmath would need as many digits as y has; so far below 1, no product of ours comes back into
    any range."""
    return mp.exp(y) if y > -(10**6) else mp.mpf(0)


def exp(a):
    y = power_of_e(a.at)
    return a.through(y, y, y, y)


def sqrt(a):
    y = mp.sqrt(a.at)
    return a.through(y, 1 / (2 * y), -1 / (4 * y**3), 3 / (8 * y**5))


def cos(a):
    sine, cosine = mp.sin(a.at), mp.cos(a.at)
    return a.through(cosine, -sine, -cosine, sine)


def sin(a):
    sine, cosine = mp.sin(a.at), mp.cos(a.at)
    return a.through(sine, cosine, -sine, -cosine)


def one_minus_exp(a):
    """1 - e^a"""
    e = power_of_e(a.at)
    return a.through(-mp.expm1(a.at) if e else 1, -e, -e, -e)


def lstm(a, v, x, p):
    c = sigmoid(a["f"]) * x["c"] + sigmoid(a["i"]) * tanh(a["g"])
    return sigmoid(a["o"]) * tanh(c), c


def lstm_1997(a, v, x, p):
    c = x["c"] + sigmoid(a["i"]) * 2 * tanh(a["g"] * 0.5)
    return sigmoid(a["o"]) * tanh(c * 0.5), c


def peephole(a, v, x, p):
    i, f = sigmoid(a["i"] + p["pi"] * x["c"]), sigmoid(a["f"] + p["pf"] * x["c"])
    c = f * x["c"] + i * tanh(a["g"])
    return sigmoid(a["o"] + p["po"] * c) * tanh(c), c


def gru(a, v, x, p):
    """As torch has it, whose 1 - u is a difference: what that loses is small beside u h."""
    u, n = sigmoid(a["u"]), tanh(v["n"] + sigmoid(a["r"]) * (a["n"] + p["b_n"]))
    return ((1 - u) * n + u * x["h"],)


def exponential(a, v, x, p):
    """modrelu"""
    a, c = a["z"], p["c"]
    if a.at == 0:
        return (number(0),)
    sign = 1 if a.at > 0 else -1
    return (sign * relu(sign * a + c),)


def cornn(a, v, x, p, dt=0.042, gamma=2.7, eps=4.7):
    z = x["z"] + dt * (tanh(a["z"]) - gamma * x["y"] - eps * x["z"])
    return x["y"] + dt * z, z


def unicornn(a, v, x, p, eps=0.03, alpha=0.9):
    e = eps * sigmoid(p["c"])
    z = x["z"] - e * (tanh(p["w"] * x["y"] + a["z"]) + alpha * x["y"])
    return x["y"] + e * z, z


def minlstm(a, v, x, p):
    """f / (f + i) = sigmoid(log f - log i), log sigmoid(a) = -softplus(-a)"""
    odds = softplus(-a["i"]) - softplus(-a["f"])
    return (sigmoid(odds) * x["h"] + sigmoid(-odds) * a["h"],)


def lru(a, v, x, p):
    rate = exp(p["nu"])
    size, enters = exp(-rate), sqrt(one_minus_exp(-2 * rate))
    re, im = size * cos(p["theta"]), size * sin(p["theta"])
    new_re = re * x["re"] - im * x["im"] + enters * a["re"]
    new_im = im * x["re"] + re * x["im"] + enters * a["im"]
    return new_re, new_im


def scrn(a, v, x, p):
    return sigmoid(a["h"]), 0.95 * x["s"] + (1 - number(0.95)) * v["s"]


def scrn_learned(a, v, x, p):
    return sigmoid(a["h"]), sigmoid(p["beta"]) * x["s"] + sigmoid(-p["beta"]) * v["s"]


def gated_antisymmetric(a, v, x, p):
    gate = sigmoid(a["h"] + v["g"])
    return (x["h"] + 0.01 * gate * tanh(a["h"] + v["h"]),)


# (a, v, x, p) -> the slots; a: the arguments z + v of the gates, or z alone where v is kept apart
CELLS = {
    "elman": lambda a, v, x, p: (tanh(a["z"]),),
    "leaky": lambda a, v, x, p: ((1 - p["leak"]) * x["h"] + p["leak"] * tanh(a["z"]),),
    "rate": lambda a, v, x, p: ((1 - p["tau"]) * x["x"] + p["tau"] * a["z"],),
    "lstm": lstm,
    "lstm-1997": lstm_1997,
    "peephole": peephole,
    "gru": gru,
    "scrn": scrn,
    "scrn-learned": scrn_learned,
    "antisymmetric": lambda a, v, x, p: (x["h"] + 0.01 * tanh(a["z"]),),
    "antisymmetric-gated": gated_antisymmetric,
    "exponential": exponential,
    "lipschitz": lambda a, v, x, p: (x["h"] + 0.03 * (a["a"] + tanh(a["h"])),),
    "cornn": cornn,
    "unicornn": unicornn,
    "inverse": lambda a, v, x, p: (tanh(v["m"] * a["w"] + (1 - v["m"]) * a["i"] + v["h"]),),
    "mingru": lambda a, v, x, p: (sigmoid(-a["g"]) * x["h"] + sigmoid(a["g"]) * a["h"],),
    "minlstm": minlstm,
    "lru": lru,
}

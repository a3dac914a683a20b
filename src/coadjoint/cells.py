"""Cells: formulas x_t = f(z_t, v_t, x_{t-1}, p), elementwise over units.

    z_t = W r(x_{t-1})     what the network says to itself     one entry for each gate
    v_t = R u_t + b        what the input says                 one entry for each gate
    x_t                    the state                           one entry for each slot
    p                      per-unit parameters, trained        (time constants, a second bias)

v may also hold data that comes with each step and is no gate: a mask, noise (`given`).

f and the read r are written once, over the functions of `coadjoint.formula`; every derivative and every engine
takes its code from them. Throughout, W is recurrent and R reads the input (other libraries swap the letters).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .errors import InputError, KindError, choose
from .formula import DEAR, Node, add, depends, node, pull, relu, sigmoid, softplus, substitute, symbol, tanh, walk

FIRST = "first slot"


class Fields:
    """The entries of z, v, x or p by name: z.i, x.h, p.tau."""

    def __init__(self, kind: str, entries: Mapping[str, Any]) -> None:
        self.__dict__.update(entries)
        self.__dict__["_kind"] = kind

    def __getattr__(self, name: str) -> Any:
        names = ", ".join(n for n in self.__dict__ if n != "_kind") or "none"
        raise InputError(f"this cell has no {self._kind}.{name}; its {self._kind} has: {names}.")


@dataclass(frozen=True, eq=False)
class Cell:
    """One formula and what follows from it. Made by `@cell`."""

    name: str
    formula: Callable[..., Any]
    slots: tuple[str, ...]
    gates: tuple[str, ...]
    parameters: Mapping[str, float]
    reads: str | Callable[..., Any] | None
    equations: str = ""
    anonymous: bool = field(default=False)  # one gate without a name: z and v are passed bare
    given: tuple[str, ...] = ()  # entries of v beside the gates

    def __post_init__(self) -> None:
        _ = self.next, self.read  # a formula that cannot be recorded is refused where it is written

    def __deepcopy__(self, memo: Any) -> Cell:
        return self  # nothing in it changes

    def __repr__(self) -> str:
        return f"<cell {self.name}: slots {' '.join(self.slots)}>"

    @functools.cached_property
    def x(self) -> tuple[Node, ...]:
        return tuple(symbol(f"x.{s}") for s in self.slots)

    @functools.cached_property
    def p(self) -> tuple[Node, ...]:
        return tuple(symbol(f"p.{n}") for n in self.parameters)

    @functools.cached_property
    def a(self) -> tuple[Node, ...]:
        """The arguments a = z + v of the gates where z and v meet only in that sum, else z alone."""
        return tuple(symbol(f"a.{g}") for g in self.gates)

    @functools.cached_property
    def v(self) -> tuple[Node, ...]:
        """v of the gates where it is used apart from z, and what is given."""
        return tuple(symbol(f"v.{g}") for g in (*self.side, *self.given))

    @functools.cached_property
    def next(self) -> tuple[Node, ...]:
        """x_t, an expression in a, v, x, p for each slot."""
        return self._recorded[0]

    @functools.cached_property
    def side(self) -> tuple[str, ...]:
        """The gates where z and v do not meet in one sum; these keep an array of v."""
        return self._recorded[1]

    @functools.cached_property
    def read(self) -> tuple[Node, ...]:
        """r(x), what W multiplies."""
        return self._read(dict(zip(self.slots, self.x, strict=True)))

    @functools.cached_property
    def read_slot(self) -> int | None:
        """The slot that W reads, when r only picks one."""
        return self.x.index(self.read[0]) if len(self.read) == 1 and self.read[0] in self.x else None

    @functools.cached_property
    def kept(self) -> tuple[Node, ...]:
        """The transcendental values inside x_t that are not x_t itself: an engine may keep them for the other loops."""
        moving = depends(self.next, (*self.a, *self.v, *self.x))
        return tuple(n for n in walk(self.next) if n.op in DEAR and n in moving and n not in self.next)

    @functools.cached_property
    def needs_a(self) -> bool:
        """Do derivatives read the arguments a, or only the states and the values kept?"""
        known = frozenset(n for n in (*self.next, *self.kept) if n.args)
        bars = tuple(symbol(f"lam.{s}") for s in self.slots)
        grads = pull(self.next, bars, (*self.a, *self.v, *self.x, *self.p))
        return any(n in self.a for n in walk(grads, known))

    @functools.cached_property
    def _recorded(self) -> tuple[tuple[Node, ...], tuple[str, ...]]:
        z = {g: symbol(f"z.{g}") for g in self.gates}
        v = {g: symbol(f"v.{g}") for g in (*self.gates, *self.given)}
        out = self._call(
            z, v, dict(zip(self.slots, self.x, strict=True)), dict(zip(self.parameters, self.p, strict=True))
        )
        if not all(isinstance(o, Node | int | float) for o in out):
            kinds = ", ".join(type(o).__name__ for o in out)
            raise KindError(f"the formula of cell '{self.name}' returns {kinds}; expected an expression for each slot.")
        out = [node(o) for o in out]
        nodes, side = walk(out), []
        replaced: dict[Node, Node] = {}
        for g, a in zip(self.gates, self.a, strict=True):
            total = add(z[g], v[g])
            users = {n for n in nodes if z[g] in n.args or v[g] in n.args}
            if users <= {total} and z[g] not in out and v[g] not in out:
                replaced |= {total: a}
            else:
                replaced |= {z[g]: a}
                side.append(g)
        return tuple(substitute(out, replaced)), tuple(side)

    def _call(
        self, z: Mapping[str, Any], v: Mapping[str, Any], x: Mapping[str, Any], p: Mapping[str, Any]
    ) -> list[Any]:
        bare = self.anonymous
        out = self.formula(
            z[self.gates[0]] if bare else Fields("z", z),
            v[self.gates[0]] if bare else Fields("v", v),
            Fields("x", x),
            Fields("p", p),
        )
        out = list(out) if isinstance(out, tuple | list) else [out]
        if len(out) != len(self.slots):
            raise InputError(
                f"cell '{self.name}' has slots {' '.join(self.slots)} but its formula returns {len(out)} values."
            )
        return out

    def _read(self, x: Mapping[str, Any]) -> tuple[Any, ...]:
        if self.reads is None:
            return ()
        if callable(self.reads):
            out = self.reads(Fields("x", x))
            return tuple(out) if isinstance(out, tuple | list) else (out,)
        names = self.slots[:1] if self.reads == FIRST else self.reads.split()
        return tuple(x[choose("slot", n, self.slots)] for n in names)

    def step(self, base: Tensor, side: Tensor | None, W: Tensor | None, x: Tensor, p: Mapping[str, Tensor]) -> Tensor:
        """One step on tensors, by calling the formula itself, with z = W r(x), v = base; for the gates in `side`,
        z = W r(x) + base and v = side. The autograd engine runs this."""
        slots = dict(zip(self.slots, x.chunk(len(self.slots), -1), strict=True))
        r = self._read(slots)
        count, d = len(self.gates), x.shape[-1] // len(self.slots)
        z = dict(
            zip(
                self.gates,
                (torch.cat(r, -1) @ W.T if W is not None else torch.zeros_like(base)).chunk(count, -1),
                strict=True,
            )
        )
        v = dict(zip(self.gates, base.chunk(count, -1), strict=True))
        if side is not None:
            z |= {g: z[g] + v[g] for g in self.side}
            names = (*self.side, *self.given)
            v |= dict(zip(names, side.chunk(len(names), -1), strict=True))
        out = self._call(z, v, slots, p)
        return torch.cat([torch.as_tensor(o, dtype=x.dtype, device=x.device).expand(len(x), d) for o in out], -1)


def cell(
    slots: str = "h",
    gates: str | None = None,
    parameters: Mapping[str, float] | None = None,
    reads: str | Callable[..., Any] | None = FIRST,
    given: str = "",
) -> Callable[[Callable[..., Any]], Cell]:
    """Make a cell of a formula f(z, v, x, p).

    slots       names of the parts of the state, "h c"; the readout reads the first
    gates       names of the entries of z and v, "i f g o"; without it z and v are single values
    parameters  per-unit parameters and their initial values, {"tau": 0.1}; they are trained
    reads       what W multiplies: names of slots (the first, if not given), a formula of x, or None for no W
    given       names of entries of v that are no gates but data of each step, "mask"; z and v are then entries by name

    The formula returns the new value of each slot. Where z and v of a gate are used only as `z.g + v.g`, write just
    that sum: the engines then keep one array instead of two.
    """
    names, data = tuple((gates or "z").split()), tuple(given.split())
    table = MappingProxyType(dict(parameters or {}))
    kinds = (("slots", slots.split()), ("gates", (*names, *data)), ("parameters", tuple(table)))
    for kind, entries in kinds:
        if (
            len(set(entries)) != len(entries)
            or not all(e.isidentifier() for e in entries)
            or (kind != "parameters" and not entries)
        ):
            raise InputError(f"{kind} must be different identifiers separated by spaces; got {' '.join(entries)!r}.")

    def make(formula: Callable[..., Any]) -> Cell:
        doc = (formula.__doc__ or "").strip()
        bare = gates is None and not data
        return Cell(formula.__name__, formula, tuple(slots.split()), names, table, reads, doc, bare, data)

    return make


def identity(a: Any) -> Any:
    return a


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": tanh,
    "sigmoid": sigmoid,
    "relu": relu,
    "identity": identity,
    "softplus": softplus,
}
Activation = str | Callable[[Any], Any]


def activation_function(activation: Activation) -> Callable[[Any], Any]:
    if callable(activation):
        return activation
    return ACTIVATIONS[choose("activation", activation, ACTIVATIONS)]


@functools.cache
def elman(activation: Activation = "tanh") -> Cell:
    sigma = activation_function(activation)

    @cell(slots="h")
    def elman(z, v, x, p):
        """h' = sigma(W h + R u + b).  Elman, Cognitive Science 14 (1990)."""
        return sigma(z + v)

    return elman


@functools.cache
def leaky(activation: Activation = "tanh") -> Cell:
    sigma = activation_function(activation)

    @cell(slots="h", parameters={"leak": 0.5})
    def leaky(z, v, x, p):
        """h' = (1 - leak) h + leak sigma(W h + R u + b), one leak for each unit.  Jaeger et al., Neural Networks 20 (2007)."""
        return (1 - p.leak) * x.h + p.leak * sigma(z + v)

    return leaky


@functools.cache
def rate(activation: Activation = "tanh") -> Cell:
    sigma = activation_function(activation)

    @cell(slots="x", parameters={"tau": 0.1}, reads=lambda x: sigma(x.x))
    def rate(z, v, x, p):
        """x' = (1 - tau) x + tau (W sigma(x) + R u + b), one tau for each unit.  Sompolinsky et al., PRL 61 (1988)."""
        return (1 - p.tau) * x.x + p.tau * (z + v)

    return rate


@cell(slots="h c", gates="i f g o")
def lstm(z, v, x, p):
    """c' = f c + i g, h' = o tanh(c'); i, f, o sigmoid, g tanh of W h + R u + b; torch's gate order.
    Hochreiter & Schmidhuber (1997), forget gate by Gers et al. (2000)."""
    i, f, g, o = sigmoid(z.i + v.i), sigmoid(z.f + v.f), tanh(z.g + v.g), sigmoid(z.o + v.o)
    c = f * x.c + i * g
    return o * tanh(c), c


@cell(slots="h", gates="r u n", parameters={"b_n": 0.0})
def gru(z, v, x, p):
    """h' = (1 - u) n + u h, n = tanh(v_n + r (z_n + b_n)); r, u sigmoid; torch's order and its reset after the product.
    b_n is torch's b_hn; the other recurrent biases are part of b.  Cho et al. (2014)."""
    r, u = sigmoid(z.r + v.r), sigmoid(z.u + v.u)
    n = tanh(v.n + r * (z.n + p.b_n))
    return (1 - u) * n + u * x.h


@cell(slots="h c", gates="i f g o", parameters={"pi": 0.0, "pf": 0.0, "po": 0.0})
def peephole(z, v, x, p):
    """The lstm whose gates see the memory: i and f also p_i c and p_f c, o also p_o c'.  Gers & Schmidhuber (2000)."""
    i, f = sigmoid(z.i + v.i + p.pi * x.c), sigmoid(z.f + v.f + p.pf * x.c)
    c = f * x.c + i * tanh(z.g + v.g)
    return sigmoid(z.o + v.o + p.po * c) * tanh(c), c


@functools.cache
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
    )
    def noisy(z, v, x, p):
        entries = lambda y, names: {n: getattr(y, n) for n in names}
        new = base._call(
            entries(z, base.gates), entries(v, base.gates), entries(x, base.slots), entries(p, base.parameters)
        )
        if zoneout:
            pairs = [(getattr(v, keep[s]), getattr(x, s), y) for s, y in zip(base.slots, new, strict=True)]
            new = [k * old + (1 - k) * y for k, old, y in pairs]
        return (*new, v.m * new[0]) if dropout else tuple(new)

    return replace(noisy, name=f"{base.name}{' dropout' * dropout}{' zoneout' * zoneout}")


CELLS: dict[str, Callable[[Activation], Cell]] = {
    "elman": elman,
    "leaky": leaky,
    "rate": rate,
    "lstm": lambda activation: lstm,
    "gru": lambda activation: gru,
    "peephole": lambda activation: peephole,
}
FIXED = ("lstm", "gru", "peephole")  # cells whose equations name their activations


def named(name: str, activation: Activation | None = None) -> Cell:
    """The cell of that name; `activation` (tanh, if not given) for those that leave it open."""
    choose("cell", name, CELLS)
    if name in FIXED and activation is not None:
        raise InputError(f"cell '{name}' fixes its activations by its equations; leave out activation={activation!r}.")
    try:
        return CELLS[name](activation or "tanh")
    except TypeError as e:
        if "unhashable" in str(e):
            raise KindError(f"activation must be a name or a function; got {type(activation).__name__}.") from e
        raise

"""Cells: formulas x_t = f(z_t, v_t, x_{t-1}, p), elementwise over units.

    z_t = W r(x_{t-1})     what the network says to itself     one entry for each gate
    v_t = R u_t + b        what the input says                 one entry for each gate
    x_t                    the state                           one entry for each slot
    p                      per-unit parameters, trained        (time constants, a second bias)

v may also hold an entry that no product goes with (`inputs`), and data that comes with each step: a mask, noise (`given`).
A gate whose formula leaves out v has no rows in R and b.

f and the read r are written once, over the functions of `cells.formula`; every derivative and every engine
takes its code from them. Throughout, W is recurrent and R reads the input (other libraries swap the letters).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import InputError, KindError, check_kind, choose, real
from .formula import EXPENSIVE, Node, add, as_node, dependent_nodes, pull, substitute, symbol, walk
from .transport import Portable

FIRST = "first slot"
# Names of attributes until 0.7, and what they are called now.
RENAMED = {"beside": "side_entries", "enters": "driven_entries", "kept": "saved_nodes"}


@dataclass(frozen=True)
class Uniform:
    """Where a per-unit parameter begins: a function of numbers drawn uniformly from low..high."""

    low: float
    high: float
    of: Callable[[Tensor], Tensor] | None = None

    def __call__(self, d: int, generator: torch.Generator | None = None) -> Tensor:
        where = None if generator is None else generator.device
        drawn = self.low + (self.high - self.low) * torch.rand(
            d, generator=generator, dtype=torch.float64, device=where
        )
        return drawn if self.of is None else self.of(drawn)

    def __str__(self) -> str:
        return (
            f"{self.low:g}..{self.high:g}"
            if self.of is None
            else f"{self.of.__name__} of {self.low:g}..{self.high:g}"
        )


Initial = float | Uniform


class Weights(Protocol):
    """(W, R, b, p) as they are trained -> (W, R, b) as the formula takes them."""

    def __call__(
        self, W: Tensor, R: Tensor, b: Tensor | None, p: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


class Fields:
    """The entries of z, v, x or p by name: z.i, x.h, p.tau."""

    def __init__(self, kind: str, entries: Mapping[str, Any]) -> None:
        self.__dict__.update(entries)
        self.__dict__["_kind"] = kind

    def __getattr__(self, name: str) -> Any:
        names = ", ".join(n for n in self.__dict__ if n != "_kind") or "none"
        raise InputError(f"this cell has no {self._kind}.{name}; its {self._kind} has: {names}.")


@dataclass(frozen=True, eq=False)
class Cell(Portable):
    """One formula and what follows from it. Made by `@cell`."""

    name: str
    formula: Callable[..., Any]
    slots: tuple[str, ...]
    gates: tuple[str, ...]
    parameters: Mapping[str, Initial]
    reads: str | Callable[..., Any] | None
    equations: str = ""
    anonymous: bool = field(default=False)  # one gate without a name: z and v are passed bare
    given: tuple[str, ...] = ()  # entries of v that are data
    paper: str = ""
    inputs: tuple[str, ...] = ()  # entries of v that are made by R and b, and have no product
    shows: tuple[str, ...] = ()  # the slots that the readout reads; the first, if empty
    structure: Callable[..., nn.Module] | None = None  # a parametrisation of W for d units
    weights: Weights | None = None
    data: Callable[[Tensor, int, bool], Tensor] | None = (
        None  # (t [N], d, training) -> what is given, [N, given d]
    )

    def __post_init__(self) -> None:
        _ = self.next, self.read  # a formula that cannot be recorded is refused where it is written

    def __copy__(self) -> Cell:
        return self  # nothing in it changes

    def __deepcopy__(self, memo: Any) -> Cell:
        return self

    @property
    def _function(self) -> Callable[..., Any]:
        return self.formula

    def _reduce_without_place(self, protocol: Any) -> Any:
        raise InputError(
            f"cell '{self.name}' cannot be pickled: a cell of one's own is pickled by its import path, and this one is not "
            f"at the top level of module {self.formula.__module__}. Define it there, outside of functions and classes."
        )

    if not TYPE_CHECKING:  # mypy would take any name for an attribute of this class

        def __getattr__(self, name: str) -> object:
            if name not in RENAMED:
                raise AttributeError(f"'Cell' object has no attribute {name!r}")
            new = RENAMED[name]
            warnings.warn(
                f"Cell.{name} is now Cell.{new}; the old name goes in 1.0.",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(self, new)

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
        """v of the gates where it is used apart from z, of the inputs, and what is given."""
        return tuple(symbol(f"v.{g}") for g in self.side_entries)

    @property
    def side_entries(self) -> tuple[str, ...]:
        return (*self.side, *self.inputs, *self.given)

    @functools.cached_property
    def driven_entries(self) -> tuple[str, ...]:
        """The entries of v that R and b make, in the order of their rows."""
        return (*(g for g in self.gates if g not in self._traced[2]), *self.inputs)

    @functools.cached_property
    def next(self) -> tuple[Node, ...]:
        """x_t, an expression in a, v, x, p for each slot."""
        return self._traced[0]

    @functools.cached_property
    def side(self) -> tuple[str, ...]:
        """The gates where z and v do not meet in one sum; these keep an array of v."""
        return self._traced[1]

    @functools.cached_property
    def read(self) -> tuple[Node, ...]:
        """r(x), what W multiplies."""
        return self._read(dict(zip(self.slots, self.x, strict=True)))

    @functools.cached_property
    def read_slot(self) -> int | None:
        """The slot that W reads, when r only picks one."""
        return (
            self.x.index(self.read[0]) if len(self.read) == 1 and self.read[0] in self.x else None
        )

    @functools.cached_property
    def saved_nodes(self) -> tuple[Node, ...]:
        """The transcendental values inside x_t that are not x_t itself: an engine may keep them for the other loops."""
        moving = dependent_nodes(self.next, (*self.a, *self.v, *self.x))
        return tuple(
            n for n in walk(self.next) if n.op in EXPENSIVE and n in moving and n not in self.next
        )

    @functools.cached_property
    def needs_a(self) -> bool:
        """Do derivatives read the arguments a, or only the states and the values kept?"""
        known = frozenset(n for n in (*self.next, *self.saved_nodes) if n.args)
        bars = tuple(symbol(f"lam.{s}") for s in self.slots)
        grads = pull(self.next, bars, (*self.a, *self.v, *self.x, *self.p))
        return any(n in self.a for n in walk(grads, known))

    @functools.cached_property
    def _traced(self) -> tuple[tuple[Node, ...], tuple[str, ...], tuple[str, ...]]:
        """x_t, the gates where v is apart from z, the gates without v."""
        z = {g: symbol(f"z.{g}") for g in self.gates}
        v = {g: symbol(f"v.{g}") for g in (*self.gates, *self.inputs, *self.given)}
        out = self._call(
            z,
            v,
            dict(zip(self.slots, self.x, strict=True)),
            dict(zip(self.parameters, self.p, strict=True)),
        )
        if not all(isinstance(o, Node | int | float) for o in out):
            kinds = ", ".join(type(o).__name__ for o in out)
            raise KindError(
                f"the formula of cell '{self.name}' returns {kinds}; expected an expression for each slot."
            )
        out = [as_node(o) for o in out]
        nodes, side = walk(out), []
        replaced: dict[Node, Node] = {}
        deaf = tuple(g for g in self.gates if z[g] in nodes and v[g] not in nodes)
        for g, a in zip(self.gates, self.a, strict=True):
            total = add(z[g], v[g])
            users = {n for n in nodes if z[g] in n.args or v[g] in n.args}
            if g not in deaf and users <= {total} and z[g] not in out and v[g] not in out:
                replaced |= {total: a}
            else:
                replaced |= {z[g]: a}
                side += [] if g in deaf else [g]
        return tuple(substitute(out, replaced)), tuple(side), deaf

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

    def step(
        self,
        base: Tensor,
        side: Tensor | None,
        W: Tensor | None,
        x: Tensor,
        p: Mapping[str, Tensor],
    ) -> Tensor:
        """One step on tensors, by calling the formula itself, with z = W r(x), v = base; for the gates in `side`,
        z = W r(x) + base and v = side. The autograd engine runs this."""
        slots = dict(zip(self.slots, x.chunk(len(self.slots), -1), strict=True))
        r = self._read(slots)
        count, d = len(self.gates), x.shape[-1] // len(self.slots)
        z = dict(
            zip(
                self.gates,
                (torch.cat(r, -1) @ W.T if W is not None else torch.zeros_like(base)).chunk(
                    count, -1
                ),
                strict=True,
            )
        )
        v = dict(zip(self.gates, base.chunk(count, -1), strict=True))
        if side is not None:
            z |= {g: z[g] + v[g] for g in self.side}
            v |= dict(zip(self.side_entries, side.chunk(len(self.side_entries), -1), strict=True))
        out = self._call(z, v, slots, p)
        return torch.cat(
            [torch.as_tensor(o, dtype=x.dtype, device=x.device).expand(len(x), d) for o in out], -1
        )


def cell(
    slots: str = "h",
    gates: str | None = None,
    parameters: Mapping[str, Initial] | None = None,
    reads: str | Callable[..., Any] | None = FIRST,
    given: str = "",
    inputs: str = "",
    shows: str = "",
    structure: Callable[..., nn.Module] | None = None,
    weights: Weights | None = None,
    data: Callable[[Tensor, int, bool], Tensor] | None = None,
    name: str = "",
) -> Callable[[Callable[..., Any]], Cell]:
    """Make a cell of a formula f(z, v, x, p).

    slots       names of the parts of the state, "h c"
    gates       names of the entries of z and v, "i f g o"; without it z and v are single values
    parameters  per-unit parameters and their initial values, {"tau": 0.1}, or where they are drawn; they are trained
    reads       what W multiplies: names of slots (the first, if not given), a formula of x, or None for no W
    given       names of entries of v that are no gates but data of each step, "mask"; z and v are then entries by name
    inputs      names of entries of v that are made of the input like those of gates, and have no product
    shows       names of the slots that the readout reads; the first, if not given
    structure   (units=d) -> a parametrisation of W for d units (co.parametrisations)
    weights     (W, R, b, p) as they are trained -> (W, R, b) as the formula takes them
    data        (t [N], d, training) -> what is given at the steps t of d units, [N, given d], where a Network makes it
    name        that of the function, if not given

    The formula returns the new value of each slot. Where z and v of a gate are used only as `z.g + v.g`, write just
    that sum: the engines then keep one array instead of two. Its docstring has the equations and, in a paragraph of its
    own at the end, the paper.
    """
    for word, value in (
        ("slots", slots),
        ("gates", gates or ""),
        ("given", given),
        ("inputs", inputs),
        ("shows", shows),
    ):
        check_kind(word, value, str, "names separated by spaces")
    check_kind("gates", gates, (str, type(None)), "names separated by spaces")
    check_kind(
        "parameters", parameters, (Mapping, type(None)), "a dict of names and where they begin"
    )
    for entry, begin in (parameters or {}).items():
        check_kind("the name of a parameter", entry, str, "a text")
        if not isinstance(begin, Uniform):
            real(f"where parameter {entry} begins", begin)
    names, extra, apart = tuple((gates or "z").split()), tuple(given.split()), tuple(inputs.split())
    table = MappingProxyType(dict(parameters or {}))
    kinds = (
        ("slots", slots.split()),
        ("gates", (*names, *apart, *extra)),
        ("parameters", tuple(table)),
    )
    for kind, entries in kinds:
        if (
            len(set(entries)) != len(entries)
            or not all(e.isidentifier() for e in entries)
            or (kind != "parameters" and not entries)
        ):
            raise InputError(
                f"{kind} must be different identifiers separated by spaces; got {' '.join(entries)!r}."
            )
    for slot in shows.split():
        choose("slot", slot, slots.split())

    def make(formula: Callable[..., Any]) -> Cell:
        equations, _, paper = inspect.cleandoc(formula.__doc__ or "").rpartition("\n\n")
        return Cell(
            name or formula.__name__, formula, tuple(slots.split()), names, table, reads, equations or paper,
            gates is None and not extra and not apart, extra, paper if equations else "", apart, tuple(shows.split()),
            structure, weights, data,
        )  # fmt: skip

    return make

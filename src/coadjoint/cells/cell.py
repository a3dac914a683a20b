"""Cells: formulas x_t = f(z_t, v_t, x_{t-1}, p), elementwise over units.

    z_t = W r(x_{t-1})     the recurrent input                 one entry for each gate
    v_t = R u_t + b        the external input                  one entry for each gate
    x_t                    the state                           one entry for each slot
    p                      per-unit parameters, trained        (time constants, a second bias)

v may also hold entries that have no recurrent product (`inputs`), and data that comes with each
step, a mask or noise (`given`). A gate whose formula leaves out v has no rows in R and b.

f and the read r are written once, with torch's functions or those of `cells.primitives`; every
derivative and every engine takes its code from them. Throughout, W is recurrent and R reads the
input (other libraries swap the letters).
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from ..errors import InputError, KindError, check_kind, choose, real
from .formula import (
    EXPENSIVE,
    Node,
    add,
    as_node,
    dependent_nodes,
    pull,
    substitute,
    symbol,
    walk,
)
from .parameters import Initial, Uniform
from .transport import Portable

__all__ = ["FIRST", "Cell", "Fields", "Initial", "Uniform", "Weights", "cell"]

FIRST = "first slot"
# Names of attributes until 0.7, and what they are called now.
RENAMED = {"beside": "side_entries", "enters": "driven_entries", "kept": "saved_nodes"}


class Weights(Protocol):
    """A map from (W, R, b, p) as they are trained to (W, R, b) as the formula takes them."""

    def __call__(  # noqa: D102
        self, W: Tensor, R: Tensor, b: Tensor | None, p: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...


class Fields:
    """The entries of z, v, x or p by name: z.i, x.h, p.tau.

    They are nodes while a formula is recorded, and tensors on the autograd engine.
    """

    def __init__(self, kind: str, entries: Mapping[str, object]) -> None:
        """Make the entries attributes; `kind` is the letter z, v, x or p, for the error."""
        self.__dict__.update(entries)
        self.__dict__["_kind"] = kind

    def __getattr__(self, name: str) -> Node:
        """Refuse a name that is not among the entries: Python calls this only for those."""
        names = ", ".join(n for n in self.__dict__ if n != "_kind") or "none"
        raise InputError(f"this cell has no {self._kind}.{name}; its {self._kind} has: {names}.")


@dataclass(frozen=True, eq=False)
class Cell(Portable):
    """One step of a recurrence, x_t = f(z_t, v_t, x_{t-1}, p), and the expressions it records.

    Cells are made by `co.cell`, whose arguments are these fields.

    Example:
        >>> import coadjoint as co
        >>> lstm = co.cells.named("lstm")
        >>> isinstance(lstm, co.Cell), lstm.slots, lstm.gates
        (True, ('h', 'c'), ('i', 'f', 'g', 'o'))
    """

    name: str
    formula: Callable[..., object]
    slots: tuple[str, ...]
    gates: tuple[str, ...]
    parameters: Mapping[str, Initial]
    reads: str | Callable[..., object] | None
    equations: str = ""
    anonymous: bool = False  # one gate without a name: z and v are passed bare
    given: tuple[str, ...] = ()  # entries of v that are data
    paper: str = ""
    inputs: tuple[str, ...] = ()  # entries of v that R and b make, without a recurrent product
    shows: tuple[str, ...] = ()  # the slots that the readout reads; the first, if empty
    structure: Callable[..., nn.Module] | None = None  # a parametrisation of W for d units
    weights: Weights | None = None
    # (t [N], d, training) -> the entries that are `given`, [N, given d]
    data: Callable[[Tensor, int, bool], Tensor] | None = None

    def __post_init__(self) -> None:
        # Record f and r now: one that cannot be recorded is then refused where it is written.
        _ = self.next, self.read

    def __copy__(self) -> Cell:
        return self  # a cell never changes

    def __deepcopy__(self, memo: object) -> Cell:
        return self  # a cell never changes

    @property
    def _function(self) -> Callable[..., object]:
        """The function that the cell was made of; a pickle looks the cell up where it is."""
        return self.formula

    def _reduce_without_place(self, protocol: object) -> NoReturn:
        """Refuse to pickle a cell that has no import path."""
        raise InputError(
            f"cell '{self.name}' cannot be pickled: a user's cell is pickled by its import path, "
            f"but this one is not at the top level of module {self.formula.__module__}. Define "
            "it there, outside functions and classes."
        )

    if not TYPE_CHECKING:  # mypy would take any name for an attribute of this class

        def __getattr__(self, name: str) -> object:
            """Find an attribute under the name that it had before 0.7, with a warning."""
            if name not in RENAMED:
                raise AttributeError(f"'Cell' object has no attribute {name!r}")
            new = RENAMED[name]
            warnings.warn(
                f"Cell.{name} is now Cell.{new}; the old name will be removed in 1.0.",
                DeprecationWarning,
                stacklevel=2,
            )
            return getattr(self, new)

    def __repr__(self) -> str:
        return f"<cell {self.name}: slots {' '.join(self.slots)}>"

    @functools.cached_property
    def x(self) -> tuple[Node, ...]:
        """The symbols of the previous state, one for each slot."""
        return tuple(symbol(f"x.{slot}") for slot in self.slots)

    @functools.cached_property
    def p(self) -> tuple[Node, ...]:
        """The symbols of the per-unit parameters, in the order of `parameters`."""
        return tuple(symbol(f"p.{name}") for name in self.parameters)

    @functools.cached_property
    def a(self) -> tuple[Node, ...]:
        """The symbols of the gates' arguments: a = z + v where z and v meet only in that sum.

        For the gates in `side`, and those without v, a = z alone.
        """
        return tuple(symbol(f"a.{gate}") for gate in self.gates)

    @functools.cached_property
    def v(self) -> tuple[Node, ...]:
        """The symbols of `side_entries`, the entries of v that are not summed into a."""
        return tuple(symbol(f"v.{name}") for name in self.side_entries)

    @property
    def side_entries(self) -> tuple[str, ...]:
        """The names of the entries of v that have their own array, instead of a sum a = z + v.

        They are the gates in `side`, then `inputs`, then `given`.
        """
        return (*self.side, *self.inputs, *self.given)

    @functools.cached_property
    def driven_entries(self) -> tuple[str, ...]:
        """The names of the entries of v = R u + b, in the order of the rows of R and b."""
        without_v = self._traced[2]
        return (*(gate for gate in self.gates if gate not in without_v), *self.inputs)

    @functools.cached_property
    def next(self) -> tuple[Node, ...]:
        """x_t, an expression in a, v, x and p for each slot."""
        return self._traced[0]

    @functools.cached_property
    def side(self) -> tuple[str, ...]:
        """The gates that use z and v other than as z + v; v then has its own array."""
        return self._traced[1]

    @functools.cached_property
    def read(self) -> tuple[Node, ...]:
        """r(x), the vector that W multiplies; empty for a cell without W."""
        return self._read(dict(zip(self.slots, self.x, strict=True)))

    @functools.cached_property
    def read_slot(self) -> int | None:
        """The number of the slot that W reads, where r only picks one; else None."""
        picks_one = len(self.read) == 1 and self.read[0] in self.x
        return self.x.index(self.read[0]) if picks_one else None

    @functools.cached_property
    def saved_nodes(self) -> tuple[Node, ...]:
        """The expensive values inside x_t, which an engine may keep for the loops that follow.

        Values that are x_t itself are left out: they are kept in any case. So are those of p
        alone, which are computed once before a loop.
        """
        moving = dependent_nodes(self.next, (*self.a, *self.v, *self.x))
        saved = []
        for node in walk(self.next):
            if node.op in EXPENSIVE and node in moving and node not in self.next:
                saved.append(node)
        return tuple(saved)

    @functools.cached_property
    def needs_a(self) -> bool:
        """Whether derivatives read the arguments a, not only the states and `saved_nodes`."""
        known = frozenset(node for node in (*self.next, *self.saved_nodes) if node.args)
        costates = tuple(symbol(f"lam.{slot}") for slot in self.slots)
        gradients = pull(self.next, costates, (*self.a, *self.v, *self.x, *self.p))
        # The walk does not look inside known values: it meets an a only where one is read itself.
        return any(node in self.a for node in walk(gradients, known))

    @functools.cached_property
    def _traced(self) -> tuple[tuple[Node, ...], tuple[str, ...], tuple[str, ...]]:
        """Record the formula: x_t for each slot; the gates in `side`; the gates without v.

        In x_t the symbol a stands for z + v, or for z alone in the two kinds of gates named.
        """
        z = {gate: symbol(f"z.{gate}") for gate in self.gates}
        v = {name: symbol(f"v.{name}") for name in (*self.gates, *self.inputs, *self.given)}
        x = dict(zip(self.slots, self.x, strict=True))
        p = dict(zip(self.parameters, self.p, strict=True))
        returned = self._call(z, v, x, p)
        if not all(isinstance(value, Node | int | float) for value in returned):
            kinds = ", ".join(type(value).__name__ for value in returned)
            raise KindError(
                f"the formula of cell '{self.name}' returns {kinds}; "
                "expected an expression for each slot."
            )
        outputs = [as_node(value) for value in returned]
        nodes = walk(outputs)
        side: list[str] = []
        without_v: list[str] = []
        replaced: dict[Node, Node] = {}
        for gate, a in zip(self.gates, self.a, strict=True):
            # Only a formula that uses z without v leaves v out; without W, z may be missing.
            has_v = z[gate] not in nodes or v[gate] in nodes
            total = add(z[gate], v[gate])
            users = {n for n in nodes if z[gate] in n.args or v[gate] in n.args}
            returned_bare = z[gate] in outputs or v[gate] in outputs
            if has_v and users <= {total} and not returned_bare:  # z and v meet only in the sum
                replaced[total] = a
                continue
            replaced[z[gate]] = a
            if has_v:
                side.append(gate)
            else:
                without_v.append(gate)
        return tuple(substitute(outputs, replaced)), tuple(side), tuple(without_v)

    def _call(
        self,
        z: Mapping[str, object],
        v: Mapping[str, object],
        x: Mapping[str, object],
        p: Mapping[str, object],
    ) -> list[Any]:
        """The formula's value for each slot: nodes if it is called with nodes, else tensors.

        z, v, x, p  their entries by name
        """
        if self.anonymous:  # its formula takes z and v themselves, not entries by name
            gate = self.gates[0]
            returned = self.formula(z[gate], v[gate], Fields("x", x), Fields("p", p))
        else:
            named = (Fields("z", z), Fields("v", v), Fields("x", x), Fields("p", p))
            returned = self.formula(*named)
        values = list(returned) if isinstance(returned, tuple | list) else [returned]
        if len(values) != len(self.slots):
            raise InputError(
                f"cell '{self.name}' has slots {' '.join(self.slots)} "
                f"but its formula returns {len(values)} values."
            )
        return values

    def _read(self, x: Mapping[str, Any]) -> tuple[Any, ...]:
        """r(x), what W multiplies, from the slots by name (nodes or tensors); () without W."""
        if self.reads is None:
            return ()
        if callable(self.reads):
            returned = self.reads(Fields("x", x))
            return tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        names = self.slots[:1] if self.reads == FIRST else self.reads.split()
        return tuple(x[choose("slot", name, self.slots)] for name in names)

    def step(
        self,
        base: Tensor,
        side: Tensor | None,
        W: Tensor | None,
        x: Tensor,
        p: Mapping[str, Tensor],
    ) -> Tensor:
        """One step on tensors, x [B, slots d] -> [B, slots d], by calling the formula itself.

        base  [B, gates d], v of the gates that use it only as z + v
        side  [B, entries d], v of `side_entries`; None if there are none
        W     None for a cell that has none

        z = W r(x) and v = base; for the gates in `self.side`, z = W r(x) + base and v = side.
        The autograd engine runs this.
        """
        count = len(self.gates)
        d = x.shape[-1] // len(self.slots)
        slots = dict(zip(self.slots, x.chunk(len(self.slots), -1), strict=True))
        if W is None:
            products = torch.zeros_like(base)
        else:
            products = torch.cat(self._read(slots), -1) @ W.T
        z = dict(zip(self.gates, products.chunk(count, -1), strict=True))
        v = dict(zip(self.gates, base.chunk(count, -1), strict=True))
        if side is not None:
            z |= {g: z[g] + v[g] for g in self.side}
            v |= dict(zip(self.side_entries, side.chunk(len(self.side_entries), -1), strict=True))
        new = self._call(z, v, slots, p)
        # A formula may return a number, or one value for all samples.
        parts = [torch.as_tensor(y, dtype=x.dtype, device=x.device) for y in new]
        return torch.cat([y.expand(len(x), d) for y in parts], -1)


def cell(
    slots: str = "h",
    gates: str | None = None,
    parameters: Mapping[str, Initial] | None = None,
    reads: str | Callable[..., object] | None = FIRST,
    given: str = "",
    inputs: str = "",
    shows: str = "",
    structure: Callable[..., nn.Module] | None = None,
    weights: Weights | None = None,
    data: Callable[[Tensor, int, bool], Tensor] | None = None,
    name: str = "",
) -> Callable[[Callable[..., object]], Cell]:
    """Make a cell of a formula f(z, v, x, p), by a decorator.

    slots       names of the parts of the state, "h c"
    gates       names of the entries of z and v, "i f g o"; without it z and v are single values
    parameters  per-unit parameters, which are trained, and their initial values: {"tau": 0.1},
                or a `Uniform` from which they are drawn
    reads       what W multiplies: names of slots (by default the first), a formula of x, or None
                for a cell without W
    given       names of entries of v that are data of each step, "mask"; z and v are then entries
                by name
    inputs      names of entries of v that R and b make, without a recurrent product
    shows       names of the slots that the readout reads; by default the first
    structure   (units=d) -> a parametrisation of W for d units (see co.cells.structures)
    weights     (W, R, b, p) as they are trained -> (W, R, b) as the formula takes them
    data        (t [N], d, training) -> the `given` entries at the steps t of d units, [N, given d];
                a Network calls it
    name        the cell's name; by default that of the function

    The formula returns the new value of each slot. It is written with + - * / ** and torch.tanh,
    torch.sigmoid, torch.exp, ... (or co.tanh, co.sigmoid, ...). Where z and v of a gate are used
    only as `z.g + v.g`, write just that sum: the engines then keep one array instead of two. The
    docstring of the formula holds the equations and, in a last paragraph, the paper.

    Example:
        >>> import torch
        >>> import coadjoint as co
        >>> @co.cell(parameters={"leak": 0.5})
        ... def leaky(z, v, x, p):
        ...     return (1 - p.leak) * x.h + p.leak * torch.tanh(z + v)
        >>> leaky
        <cell leaky: slots h>
        >>> net = co.Network(leaky, inputs=1, hidden=3, outputs=2)
        >>> net.p["leak"]
        Parameter containing:
        tensor([0.5000, 0.5000, 0.5000], requires_grad=True)
    """
    texts = {"slots": slots, "gates": gates or "", "given": given, "inputs": inputs, "shows": shows}
    for word, value in texts.items():
        check_kind(word, value, str, "names separated by spaces")
    # once more, as `gates or ""` above hides 0 and other empty values
    check_kind("gates", gates, (str, type(None)), "names separated by spaces")
    _check_parameters(parameters)
    slot_names = tuple(slots.split())
    gate_names = tuple((gates or "z").split())
    given_names = tuple(given.split())
    input_names = tuple(inputs.split())
    table = MappingProxyType(dict(parameters or {}))
    _check_names("slots", slot_names)
    _check_names("gates", (*gate_names, *input_names, *given_names))
    if table:
        _check_names("parameters", tuple(table))
    for slot in shows.split():
        choose("slot", slot, slot_names)

    def make(formula: Callable[..., object]) -> Cell:
        equations, paper = _parse_docstring(formula)
        return Cell(
            name=name or formula.__name__,
            formula=formula,
            slots=slot_names,
            gates=gate_names,
            parameters=table,
            reads=reads,
            equations=equations,
            anonymous=gates is None and not given_names and not input_names,
            given=given_names,
            paper=paper,
            inputs=input_names,
            shows=tuple(shows.split()),
            structure=structure,
            weights=weights,
            data=data,
        )

    return make


def _check_parameters(parameters: Mapping[str, Initial] | None) -> None:
    """Refuse anything but a number or a `Uniform` for each name, or None for no parameters."""
    check_kind("parameters", parameters, (Mapping, type(None)), "a dict of initial values by name")
    for name, initial in (parameters or {}).items():
        check_kind("the name of a parameter", name, str, "a text")
        if not isinstance(initial, Uniform):
            real(f"the initial value of parameter {name}", initial)


def _check_names(kind: str, names: Sequence[str]) -> None:
    """Refuse names that are not identifiers, names that appear twice, and none at all."""
    are_identifiers = all(name.isidentifier() for name in names)
    if not names or not are_identifiers or len(set(names)) != len(names):
        raise InputError(
            f"{kind} must be different identifiers separated by spaces; got {' '.join(names)!r}."
        )


def _parse_docstring(formula: Callable[..., object]) -> tuple[str, str]:
    """The equations and the paper: a docstring's last paragraph, if it has more than one."""
    text = inspect.cleandoc(formula.__doc__ or "")
    equations, _, paper = text.rpartition("\n\n")
    return (equations, paper) if equations else (text, "")

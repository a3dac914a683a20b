"""Nodes: the scalar expressions that a cell's formula records.

A formula called with `Node`s returns `Node`s: `z + v` records an addition, `tanh(z + v)` an
operation on its result. Equal expressions are one object, so common subexpressions are shared.
The functions `add` to `power` simplify while they record: x + 0 is x, and 2 * 3 is 6.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ..errors import KindError, brief


class Node:
    """One scalar expression.

    op     "input", "const", "add", "sub", "mul", "div", "neg", "power" or the name of a primitive
    args   the expressions that the operation is applied to
    value  the name of an input, the number of a constant, the exponent of a power
    order  how many nodes were made before this one
    """

    __slots__ = ("args", "op", "order", "value")
    op: str
    args: tuple[Node, ...]
    value: Any
    order: int
    interned: ClassVar[dict[tuple[object, ...], Node]] = {}

    def __new__(cls, op: str, args: tuple[Node, ...] = (), value: object = None) -> Node:
        """The one node of these values: equal expressions are the same object."""
        key = (op, args, value)
        node = cls.interned.get(key)
        if node is None:
            node = object.__new__(cls)
            node.op = op
            node.args = args
            node.value = value
            node.order = len(cls.interned)
            cls.interned[key] = node
        return node

    def __add__(self, other: Scalar) -> Node:
        return add(self, as_node(other))

    def __radd__(self, other: Scalar) -> Node:
        return add(as_node(other), self)

    def __sub__(self, other: Scalar) -> Node:
        return sub(self, as_node(other))

    def __rsub__(self, other: Scalar) -> Node:
        return sub(as_node(other), self)

    def __mul__(self, other: Scalar) -> Node:
        return mul(self, as_node(other))

    def __rmul__(self, other: Scalar) -> Node:
        return mul(as_node(other), self)

    def __truediv__(self, other: Scalar) -> Node:
        return div(self, as_node(other))

    def __rtruediv__(self, other: Scalar) -> Node:
        return div(as_node(other), self)

    def __neg__(self) -> Node:
        return neg(self)

    def __pow__(self, exponent: Scalar) -> Node:
        return power(self, exponent)

    def __bool__(self) -> bool:
        raise KindError(
            "a cell's formula cannot branch on a value: it is recorded once and used for every "
            "value. Use relu, step, sign or abs; or pass a step function, which runs on the "
            "autograd engine."
        )

    def _refuse_order(self, _: object) -> bool:
        """Refuse <, <=, > and >=, with the error of bool(node): a formula cannot branch."""
        return bool(self)

    __lt__ = __le__ = __gt__ = __ge__ = _refuse_order

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: object,
        args: tuple[Node, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Node:
        """torch.tanh(node) records the same as tanh(node)."""
        name = getattr(func, "__name__", str(func))
        if name in PRIMITIVES and len(args) == 1 and not kwargs:
            return apply_primitive(name, args[0])
        # tanh_slope and sigmoid_slope are not for users
        known = sorted(name for name in PRIMITIVES if "_" not in name)
        raise KindError(
            f"torch's '{name}' is not one of the functions a cell's formula may use: "
            f"{', '.join(known)}, + - * / and **. A step function on the autograd engine may use "
            "anything."
        )

    def __repr__(self) -> str:
        if self.op in ("input", "const"):
            return str(self.value)
        return f"{self.op}({', '.join(map(repr, self.args))})"


Scalar = Node | float | int
Value = TypeVar("Value", Node, Tensor, float)  # what a primitive can be applied to


def as_node(value: Scalar) -> Node:
    """A number as a constant node; a node as it is."""
    if isinstance(value, Node):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Node("const", (), float(value))
    raise KindError(
        f"a cell's formula takes numbers and its own z, v, x, p; got {type(value).__name__}."
    )


def symbol(name: str) -> Node:
    """An input of an expression, known by its name."""
    return Node("input", (), name)


ZERO = as_node(0.0)
ONE = as_node(1.0)


def is_const(node: Node) -> bool:
    """Whether `node` is a number."""
    return node.op == "const"


def add(a: Node, b: Node) -> Node:
    """Record a + b."""
    if is_const(a) and is_const(b):
        return as_node(a.value + b.value)
    if a is ZERO:
        return b
    if b is ZERO:
        return a
    if b.op == "neg":
        return sub(a, b.args[0])
    if a.op == "neg":
        return sub(b, a.args[0])
    # the older argument first, so that a + b and b + a are one node
    return Node("add", (a, b) if a.order <= b.order else (b, a))


def sub(a: Node, b: Node) -> Node:
    """Record a - b."""
    if is_const(a) and is_const(b):
        return as_node(a.value - b.value)
    if a is b:
        return ZERO
    if b is ZERO:
        return a
    if a is ZERO:
        return neg(b)
    if b.op == "neg":
        return add(a, b.args[0])
    return Node("sub", (a, b))


def neg(a: Node) -> Node:
    """Record -a."""
    if is_const(a):
        return as_node(-a.value)
    if a.op == "neg":
        return a.args[0]
    return Node("neg", (a,))


def mul(a: Node, b: Node) -> Node:
    """Record a * b; constants and signs are moved to the front."""
    if is_const(a) and is_const(b):
        return as_node(a.value * b.value)
    if is_const(b):
        a, b = b, a  # from here on a constant is a
    if a is ZERO:
        return ZERO
    if a is ONE:
        return b
    if is_const(a) and a.value == -1:
        return neg(b)
    if is_const(a) and b.op == "mul" and is_const(b.args[0]):
        return mul(as_node(a.value * b.args[0].value), b.args[1])
    if a.op == "neg":
        return neg(mul(a.args[0], b))
    if b.op == "neg":
        return neg(mul(a, b.args[0]))
    # a constant first, else the older argument, so that a * b and b * a are one node
    return Node("mul", (a, b) if is_const(a) or a.order <= b.order else (b, a))


def div(a: Node, b: Node) -> Node:
    """Record a / b."""
    if is_const(a) and is_const(b):
        return as_node(a.value / b.value)
    if a is ZERO or b is ONE:
        return a
    return Node("div", (a, b))


def power(a: Node, exponent: Scalar) -> Node:
    """Record a ** exponent for a fixed exponent.

    Exponents 1 to 8 become products, at most four, which round better than pow.
    """
    if isinstance(exponent, Node) or not math.isfinite(exponent):
        raise KindError("a formula's exponent must be a finite number.")
    if exponent == 0:
        return ONE
    if exponent == int(exponent) and 0 < exponent <= 8:
        half = power(a, int(exponent) // 2)  # a^n = (a^(n // 2))^2, times a if n is odd
        square = mul(half, half)
        return mul(square, a) if exponent % 2 else square
    if is_const(a):
        return as_node(a.value**exponent)
    return Node("power", (a,), float(exponent))


@dataclass(frozen=True)
class Primitive:
    """A function q = F(a) that formulas may use.

    run    F on a tensor, or into the tensor `out`
    slope  dF/da as an expression of q and a: written through q where that is exact and never
           overflows. A slope that is itself a primitive differentiates in one operation:
           tanh_slope(q) = 1 - q^2 has the slope -2q.
    """

    run: Callable[..., Tensor]
    slope: Callable[[Node, Node], Node]


PRIMITIVES: dict[str, Primitive] = {}  # filled by cells.primitives


def apply_primitive(name: str, a: Value) -> Value:
    """A primitive of a Node is a Node; of a number, a number; of a tensor, a tensor."""
    if isinstance(a, Node):
        if is_const(a):
            return as_node(apply_primitive(name, a.value))
        return Node(name, (a,))
    if isinstance(a, Tensor):
        return PRIMITIVES[name].run(a)
    if not isinstance(a, numbers.Real):
        raise KindError(
            f"{name} takes a tensor, a number or an expression of a cell's formula; got {brief(a)}."
        )
    return float(PRIMITIVES[name].run(torch.tensor(float(a), dtype=torch.float64)))


def walk(outputs: Iterable[Node], given: frozenset[Node] = frozenset()) -> list[Node]:
    """The nodes that `outputs` need, arguments first; nodes in `given` are leaves."""
    order: dict[Node, None] = {}
    stack = [(node, False) for node in reversed(list(outputs))]
    while stack:
        node, arguments_done = stack.pop()
        if node in order:
            continue
        if arguments_done or node in given or not node.args:
            order[node] = None
        else:
            # An explicit stack: a long formula would exceed Python's limit of recursion.
            stack.append((node, True))
            stack.extend((argument, False) for argument in reversed(node.args))
    return list(order)

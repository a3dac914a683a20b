"""Formulas: scalar expressions that differentiate themselves and run on tensors.

A cell is written once, as a Python function of scalars. Called with `Node`s it records an expression; `pull` and
`push` differentiate an expression in reverse and in forward mode, any number of times, and `Program` runs
expressions on tensors without allocating. Equal expressions are one object, so common subexpressions are shared.
"""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..errors import KindError, brief


class Node:
    """One scalar expression: an operation, its arguments and, for leaves and powers, a value."""

    __slots__ = ("args", "op", "order", "value")
    op: str
    args: tuple[Node, ...]
    value: Any
    order: int
    interned: ClassVar[dict[tuple[Any, ...], Node]] = {}

    def __new__(cls, op: str, args: tuple[Node, ...] = (), value: Any = None) -> Node:
        key = (op, args, value)
        node = cls.interned.get(key)
        if node is None:
            node = object.__new__(cls)
            node.op, node.args, node.value, node.order = op, args, value, len(cls.interned)
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

    def __pow__(self, n: Scalar) -> Node:
        return power(self, n)

    def __bool__(self) -> bool:
        raise KindError(
            "a cell's formula cannot branch on a value: it is recorded once and holds for all of them. "
            "Use relu, step, sign or abs; or pass a step function, which runs on the autograd engine."
        )

    __lt__ = __le__ = __gt__ = __ge__ = lambda self, _: bool(self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Node:
        """torch.tanh(node) records what tanh(node) does."""
        name = getattr(func, "__name__", str(func))
        if name in PRIMITIVES and len(args) == 1 and not kwargs:
            return apply_primitive(name, args[0])
        raise KindError(
            f"torch's '{name}' is not one of the functions a cell's formula may use: "
            f"{', '.join(sorted(n for n in PRIMITIVES if '_' not in n))}, + - * / and **. "
            "A step function on the autograd engine may use anything."
        )

    def __repr__(self) -> str:
        if self.op in ("input", "const"):
            return str(self.value)
        return f"{self.op}({', '.join(map(repr, self.args))})"


Scalar = Node | float | int


def as_node(value: Scalar) -> Node:
    if isinstance(value, Node):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Node("const", (), float(value))
    raise KindError(
        f"a cell's formula takes numbers and its own z, v, x, p; got {type(value).__name__}."
    )


def symbol(name: str) -> Node:
    return Node("input", (), name)


ZERO, ONE = as_node(0.0), as_node(1.0)


def is_const(n: Node) -> bool:
    return n.op == "const"


def add(a: Node, b: Node) -> Node:
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
    return Node("add", (a, b) if a.order <= b.order else (b, a))


def sub(a: Node, b: Node) -> Node:
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
    if is_const(a):
        return as_node(-a.value)
    return a.args[0] if a.op == "neg" else Node("neg", (a,))


def mul(a: Node, b: Node) -> Node:
    if is_const(a) and is_const(b):
        return as_node(a.value * b.value)
    if is_const(b):
        a, b = b, a
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
    return Node("mul", (a, b) if is_const(a) or a.order <= b.order else (b, a))


def div(a: Node, b: Node) -> Node:
    if is_const(a) and is_const(b):
        return as_node(a.value / b.value)
    if a is ZERO or b is ONE:
        return a
    return Node("div", (a, b))


def power(a: Node, n: Scalar) -> Node:
    if isinstance(n, Node) or not math.isfinite(n):
        raise KindError("a formula's exponent must be a finite number.")
    if n == 0:
        return ONE
    if n == int(n) and 0 < n <= 8:
        half = power(a, int(n) // 2) if n > 1 else ONE
        return mul(mul(half, half), a if n % 2 else ONE)
    return as_node(a.value**n) if is_const(a) else Node("power", (a,), float(n))


@dataclass(frozen=True)
class Primitive:
    """q = F(a). `slope(q, a)` is dF/da, written through q where that is exact and never overflows.

    A slope that is itself a primitive differentiates in one operation: tanh_slope(q) = 1 - q^2 has slope -2q.
    """

    run: Callable[..., Tensor]
    slope: Callable[[Node, Node], Node]


PRIMITIVES: dict[str, Primitive] = {}
EXPENSIVE = (
    "tanh",
    "sigmoid",
    "softplus",
    "exp",
    "expm1",
    "log",
    "log1p",
    "sqrt",
    "sin",
    "cos",
    "erf",
    "atan",
)  # worth an array rather than a second call


def apply_primitive(name: str, a: Any) -> Any:
    """A primitive of a Node is a Node; of a number, a number; of a tensor, a tensor."""
    if isinstance(a, Node):
        return as_node(apply_primitive(name, a.value)) if is_const(a) else Node(name, (a,))
    if isinstance(a, Tensor):
        return PRIMITIVES[name].run(a)
    if not isinstance(a, numbers.Real):
        raise KindError(
            f"{name} is taken of a tensor, a number or what a cell's formula is made of; got {brief(a)}."
        )
    return float(PRIMITIVES[name].run(torch.tensor(float(a), dtype=torch.float64)))


class PrimitiveFunction(functools.partial[Any]):
    """A primitive as formulas call it. It is pickled by its name in this module."""

    def __reduce__(self) -> str:
        return str(self.args[0])


def define_primitive(
    name: str, run: Callable[..., Tensor], slope: Callable[[Node, Node], Node]
) -> Callable[[Any], Any]:
    PRIMITIVES[name] = Primitive(run, slope)
    function = PrimitiveFunction(apply_primitive, name)
    function.__doc__ = f"{name}(a), in a cell's formula or on a tensor."
    return function


def _relu(a: Tensor, *, out: Tensor | None = None) -> Tensor:
    return torch.relu(a) if out is None else torch.clamp_min(a, 0, out=out)


def _softplus(a: Tensor, *, out: Tensor | None = None) -> Tensor:
    """log(1 + e^a): linear past a = 40, where e^-a is below the last digit of a double."""
    if out is None:
        return torch.nn.functional.softplus(a, 1.0, 40.0)
    return torch.nn.functional.softplus(a, 1.0, 40.0, out=out)  # type: ignore[call-arg]


def _step(a: Tensor, *, out: Tensor | None = None) -> Tensor:
    return torch.heaviside(a.detach(), a.new_zeros(()), out=out)


def _held(a: Tensor, *, out: Tensor | None = None) -> Tensor:
    return a.detach() if out is None else out.copy_(a)


@functools.cache
def _one(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones((), dtype=dtype, device=device)


def _tanh_slope(q: Tensor, *, out: Tensor | None = None) -> Tensor:
    return torch.addcmul(_one(q.dtype, q.device), q, q, value=-1, out=out)


def _sigmoid_slope(q: Tensor, *, out: Tensor | None = None) -> Tensor:
    return torch.addcmul(q, q, q, value=-1, out=out)


tanh = define_primitive("tanh", torch.tanh, lambda q, a: Node("tanh_slope", (q,)))
sigmoid = define_primitive("sigmoid", torch.sigmoid, lambda q, a: Node("sigmoid_slope", (q,)))
relu = define_primitive("relu", _relu, lambda q, a: Node("step", (q,)))
softplus = define_primitive("softplus", _softplus, lambda q, a: sigmoid(a))
exp = define_primitive("exp", torch.exp, lambda q, a: q)
expm1 = define_primitive("expm1", torch.expm1, lambda q, a: exp(a))  # q + 1 would lose a small e^a
log = define_primitive("log", torch.log, lambda q, a: 1 / a)
log1p = define_primitive("log1p", torch.log1p, lambda q, a: 1 / (1 + a))
sqrt = define_primitive("sqrt", torch.sqrt, lambda q, a: 0.5 / q)
sin = define_primitive("sin", torch.sin, lambda q, a: Node("cos", (a,)))
cos = define_primitive("cos", torch.cos, lambda q, a: -sin(a))
erf = define_primitive("erf", torch.erf, lambda q, a: (2 / math.sqrt(math.pi)) * exp(-(a * a)))
atan = define_primitive("atan", torch.atan, lambda q, a: 1 / (1 + a * a))
abs = define_primitive("abs", torch.abs, lambda q, a: Node("sign", (a,)))
sign = define_primitive("sign", torch.sign, lambda q, a: ZERO)
step = define_primitive("step", _step, lambda q, a: ZERO)
held = define_primitive(
    "held", _held, lambda q, a: ZERO
)  # a, and no derivative goes through it: torch's detach
define_primitive("tanh_slope", _tanh_slope, lambda q, a: -2 * a)
define_primitive("sigmoid_slope", _sigmoid_slope, lambda q, a: 1 - 2 * a)


def local_slopes(n: Node) -> list[tuple[Node, Node]]:
    """[(argument, d n / d argument)] of one operation."""
    if n.op == "add":
        return [(n.args[0], ONE), (n.args[1], ONE)]
    if n.op == "sub":
        return [(n.args[0], ONE), (n.args[1], as_node(-1))]
    if n.op == "neg":
        return [(n.args[0], as_node(-1))]
    if n.op == "mul":
        a, b = n.args
        return [(a, 2 * a)] if a is b else [(a, b), (b, a)]
    if n.op == "div":
        a, b = n.args
        return [(a, 1 / b), (b, -(n / b))]
    if n.op == "power":
        return [(n.args[0], n.value * power(n.args[0], n.value - 1))]
    return [(n.args[0], PRIMITIVES[n.op].slope(n, n.args[0]))]


def walk(outputs: Iterable[Node], given: frozenset[Node] = frozenset()) -> list[Node]:
    """The nodes that `outputs` need, arguments first; nodes in `given` are leaves."""
    order: dict[Node, None] = {}
    stack = [(n, False) for n in reversed(list(outputs))]
    while stack:
        n, ready = stack.pop()
        if n in order:
            continue
        if ready or n in given or not n.args:
            order[n] = None
        else:
            stack.append((n, True))
            stack.extend((a, False) for a in reversed(n.args))
    return list(order)


def dependent_nodes(outputs: Iterable[Node], leaves: Iterable[Node]) -> set[Node]:
    """The nodes below `outputs` that depend on one of `leaves`."""
    found = set(leaves)
    for n in walk(outputs):
        if any(a in found for a in n.args):
            found.add(n)
    return found


class LinearSums:
    """Sums of directions times slopes, with the slopes gathered: (l c1) c2 is kept as l (c1 c2) and l c1 + l c2 as
    l (c1 + c2), so that the slopes can be computed for all times at once and one product is left in the loop."""

    def __init__(self) -> None:
        self.parts: dict[Node, tuple[Node, Node]] = {}

    def times(self, direction: Node, slope: Node) -> Node:
        base, before = self.parts.get(direction, (direction, ONE))
        product = mul(base, mul(before, slope))
        if product is not base and product is not ZERO:
            self.parts[product] = (base, mul(before, slope))
        return product

    def plus(self, one: Node, other: Node) -> Node:
        base, slope = self.parts.get(one, (one, ONE))
        base2, slope2 = self.parts.get(other, (other, ONE))
        return (
            self.times(base, add(slope, slope2))
            if base is base2 and base is not ZERO
            else add(one, other)
        )


def pull(outputs: Sequence[Node], seeds: Sequence[Node], wrt: Sequence[Node]) -> list[Node]:
    """Reverse mode: sum_i seeds_i * d outputs_i / d w, for each w."""
    linear, bar = LinearSums(), dict.fromkeys(walk(outputs), ZERO)
    live = dependent_nodes(outputs, wrt)
    for o, s in zip(outputs, seeds, strict=True):
        bar[o] = add(bar[o], s)
    for n in reversed(walk(outputs)):
        if n in live and bar[n] is not ZERO and n not in wrt and n.args:
            for a, slope in local_slopes(n):
                if a in live:
                    bar[a] = linear.plus(bar[a], linear.times(bar[n], slope))
    return [bar.get(w, ZERO) for w in wrt]


def push(outputs: Sequence[Node], directions: Mapping[Node, Node]) -> list[Node]:
    """Forward mode: sum_w d outputs_i / d w * directions_w, for each output."""
    linear, dot = LinearSums(), dict(directions)
    for n in walk(outputs, frozenset(directions)):
        if n not in dot:
            dot[n] = (
                functools.reduce(
                    linear.plus,
                    (
                        linear.times(dot[a], slope)
                        for a, slope in local_slopes(n)
                        if dot[a] is not ZERO
                    ),
                    ZERO,
                )
                if n.args
                else ZERO
            )
    return [dot[o] for o in outputs]


def substitute(outputs: Sequence[Node], replacement: Mapping[Node, Node]) -> list[Node]:
    """The expressions with some of their nodes replaced."""
    env = dict(replacement)
    for n in walk(outputs, frozenset(replacement)):
        if n not in env:
            build: Callable[..., Node] | None = {
                "add": add,
                "sub": sub,
                "mul": mul,
                "div": div,
                "neg": neg,
            }.get(n.op)  # type: ignore[assignment]
            args = tuple(env[a] for a in n.args)
            env[n] = (
                build(*args)
                if build
                else apply_primitive(n.op, *args)
                if n.op in PRIMITIVES
                else Node(n.op, args, n.value)
            )
    return [env[o] for o in outputs]


def loop_invariants(
    outputs: Sequence[Node], moving: Iterable[Node], given: frozenset[Node] = frozenset()
) -> list[Node]:
    """The largest subexpressions that do not depend on `moving`: what can be computed before a loop over it."""
    nodes = walk(outputs, given)
    found = dependent_nodes(outputs, moving)
    edge = [a for n in nodes if n in found and n not in given for a in n.args if a not in found]
    edge += [o for o in outputs if o not in found]
    return [n for n in dict.fromkeys(edge) if n.args]


def evaluate_nodes(outputs: Sequence[Node], values: Mapping[Node, Tensor]) -> list[Any]:
    """The expressions at `values`, plainly: one torch operation for each node."""
    env: dict[Node, Any] = dict(values)
    for n in walk(outputs, frozenset(values)):
        if n not in env:
            env[n] = n.value if is_const(n) else torch_operation(n)(*(env[a] for a in n.args))
    return [env[o] for o in outputs]


def torch_operation(n: Node) -> Callable[..., Any]:
    """The torch function that computes one node from its arguments."""
    if n.op in ARITHMETIC:
        return ARITHMETIC[n.op]
    if n.op == "power":
        return functools.partial(_power, n.value)
    if n.op == "input":
        raise KindError(
            f"the value of '{n.value}' is missing."
        )  # an author's mistake, not a user's
    return PRIMITIVES[n.op].run


def _power(exponent: float, a: Tensor, **out: Tensor) -> Tensor:
    return torch.pow(a, exponent, **out)


ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
}

"""Formulas: scalar expressions that differentiate themselves and run on tensors.

A cell is written once, as a Python function of scalars. Called with `Node`s it records an
expression. `pull` and `push` differentiate an expression in reverse and in forward mode, any number
of times, and `evaluate_nodes` runs expressions on tensors (`program.Program` does it without
allocating).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import KindError
from .nodes import (
    ONE,
    PRIMITIVES,
    ZERO,
    Node,
    Scalar,
    add,
    apply_primitive,
    as_node,
    div,
    is_const,
    mul,
    neg,
    power,
    sub,
    symbol,
    walk,
)
from .primitives import (
    abs,
    atan,
    cos,
    erf,
    exp,
    expm1,
    held,
    log,
    log1p,
    relu,
    sigmoid,
    sign,
    sin,
    softplus,
    sqrt,
    step,
    tanh,
)

__all__ = [
    "EXPENSIVE",
    "ONE",
    "PRIMITIVES",
    "ZERO",
    "LinearSums",
    "Node",
    "Scalar",
    "abs",
    "add",
    "apply_primitive",
    "as_node",
    "atan",
    "cos",
    "dependent_nodes",
    "div",
    "erf",
    "evaluate_nodes",
    "exp",
    "expm1",
    "held",
    "is_const",
    "local_slopes",
    "log",
    "log1p",
    "loop_invariants",
    "mul",
    "neg",
    "power",
    "pull",
    "push",
    "relu",
    "sigmoid",
    "sign",
    "sin",
    "softplus",
    "sqrt",
    "step",
    "sub",
    "substitute",
    "symbol",
    "tanh",
    "torch_operation",
    "walk",
]

# Primitives that cost more than an array: an engine keeps their values for the other loops.
EXPENSIVE = (
    "tanh", "sigmoid", "softplus", "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "erf",
    "atan",
)  # fmt: skip


def local_slopes(node: Node) -> list[tuple[Node, Node]]:
    """The derivatives of one operation: [(argument, d node / d argument)]."""
    if node.op == "add":
        return [(node.args[0], ONE), (node.args[1], ONE)]
    if node.op == "sub":
        return [(node.args[0], ONE), (node.args[1], as_node(-1))]
    if node.op == "neg":
        return [(node.args[0], as_node(-1))]
    if node.op == "mul":
        a, b = node.args
        return [(a, 2 * a)] if a is b else [(a, b), (b, a)]
    if node.op == "div":
        a, b = node.args
        return [(a, 1 / b), (b, -(node / b))]
    a = node.args[0]
    if node.op == "power":  # node.value is the exponent
        return [(a, node.value * power(a, node.value - 1))]
    return [(a, PRIMITIVES[node.op].slope(node, a))]


def dependent_nodes(outputs: Iterable[Node], leaves: Iterable[Node]) -> set[Node]:
    """The nodes below `outputs` that depend on one of `leaves`, and the leaves themselves."""
    dependent = set(leaves)
    for node in walk(outputs):  # arguments come before the nodes that use them
        if any(argument in dependent for argument in node.args):
            dependent.add(node)
    return dependent


class LinearSums:
    """Sums of directions times slopes, with the slopes gathered.

    (l c1) c2 is kept as l (c1 c2), and l c1 + l c2 as l (c1 + c2). The slopes c can then be
    computed for all time steps at once, and one product per direction l is left in the loop.
    """

    def __init__(self) -> None:
        self.parts: dict[Node, tuple[Node, Node]] = {}  # product -> (direction, slope)

    def times(self, direction: Node, slope: Node) -> Node:
        """The product direction * slope; of a direction that is itself l c, l (c slope)."""
        base, base_slope = self.parts.get(direction, (direction, ONE))
        total_slope = mul(base_slope, slope)
        product = mul(base, total_slope)
        if product is not base and product is not ZERO:  # these two are not products any more
            self.parts[product] = (base, total_slope)
        return product

    def plus(self, one: Node, other: Node) -> Node:
        """The sum one + other; of l c1 and l c2, multiples of the same l, l (c1 + c2)."""
        base, slope = self.parts.get(one, (one, ONE))
        other_base, other_slope = self.parts.get(other, (other, ONE))
        if base is other_base and base is not ZERO:
            return self.times(base, add(slope, other_slope))
        return add(one, other)


def pull(outputs: Sequence[Node], seeds: Sequence[Node], wrt: Sequence[Node]) -> list[Node]:
    """Reverse mode: sum_i seeds_i * d outputs_i / d w, for each w in `wrt`."""
    sums = LinearSums()
    nodes = walk(outputs)
    live = dependent_nodes(outputs, wrt)
    bar = dict.fromkeys(nodes, ZERO)  # bar[node] = sum_i seeds_i * d outputs_i / d node
    for output, seed in zip(outputs, seeds, strict=True):
        bar[output] = add(bar[output], seed)
    for node in reversed(nodes):
        is_inner = node in live and node not in wrt and bool(node.args)
        if not is_inner or bar[node] is ZERO:
            continue
        for argument, slope in local_slopes(node):
            if argument in live:
                bar[argument] = sums.plus(bar[argument], sums.times(bar[node], slope))
    return [bar.get(w, ZERO) for w in wrt]


def push(outputs: Sequence[Node], directions: Mapping[Node, Node]) -> list[Node]:
    """Forward mode: sum_w d outputs_i / d w * directions_w, for each output.

    directions  the change of each node w that changes; all other inputs are constant
    """
    sums = LinearSums()
    dot = dict(directions)  # dot[node] = sum_w d node / d w * directions_w
    for node in walk(outputs, frozenset(directions)):
        if node in dot:
            continue
        dot[node] = ZERO
        if not node.args:
            continue
        for argument, slope in local_slopes(node):
            if dot[argument] is not ZERO:
                dot[node] = sums.plus(dot[node], sums.times(dot[argument], slope))
    return [dot[output] for output in outputs]


def substitute(outputs: Sequence[Node], replacement: Mapping[Node, Node]) -> list[Node]:
    """The expressions with some of their nodes replaced: `replacement` maps old nodes to new."""
    new = dict(replacement)
    for node in walk(outputs, frozenset(replacement)):
        if node not in new:
            new[node] = _rebuild(node, tuple(new[argument] for argument in node.args))
    return [new[output] for output in outputs]


def _rebuild(node: Node, args: tuple[Node, ...]) -> Node:
    """The same operation on other arguments, simplified as when it is recorded."""
    if node.op in RECORD:
        return RECORD[node.op](*args)
    if node.op in PRIMITIVES:
        return apply_primitive(node.op, args[0])
    # a power, whose value is the exponent; or an input or a constant, which has no arguments
    return Node(node.op, args, node.value)


RECORD: dict[str, Callable[..., Node]] = {
    "add": add,
    "sub": sub,
    "mul": mul,
    "div": div,
    "neg": neg,
}


def loop_invariants(
    outputs: Sequence[Node], moving: Iterable[Node], given: frozenset[Node] = frozenset()
) -> list[Node]:
    """The largest subexpressions that do not depend on `moving`.

    They can be computed before a loop that changes `moving`. Values of nodes in `given` are at
    hand already, so what is inside them is not needed.
    """
    dependent = dependent_nodes(outputs, moving)
    invariants: dict[Node, None] = {}  # in the order of first use
    for node in walk(outputs, given):
        if node in dependent and node not in given:
            invariants |= dict.fromkeys(a for a in node.args if a not in dependent)
    invariants |= dict.fromkeys(output for output in outputs if output not in dependent)
    return [node for node in invariants if node.args]  # inputs and constants need no computation


def evaluate_nodes(outputs: Sequence[Node], values: Mapping[Node, Tensor]) -> list[Any]:
    """The expressions at `values`, by one torch operation for each node.

    An output is a tensor, or a float where it is a constant.
    """
    known: dict[Node, Any] = dict(values)
    for node in walk(outputs, frozenset(values)):
        if node in known:
            continue
        if is_const(node):
            known[node] = node.value
        else:
            known[node] = torch_operation(node)(*(known[argument] for argument in node.args))
    return [known[output] for output in outputs]


def torch_operation(node: Node) -> Callable[..., Tensor]:
    """The torch function that computes one node from the tensors of its arguments."""
    if node.op in ARITHMETIC:
        return ARITHMETIC[node.op]
    if node.op == "power":
        return functools.partial(_power, node.value)
    if node.op == "input":  # a mistake of the caller, not of a user
        raise KindError(f"the value of '{node.value}' is missing.")
    return PRIMITIVES[node.op].run


def _power(exponent: float, a: Tensor, **out: Tensor) -> Tensor:
    """The power a ** exponent; the exponent comes first, for functools.partial."""
    return torch.pow(a, exponent, **out)


ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "neg": torch.neg,
}

"""Programs: expressions as torch operations that allocate nothing, and as source text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .formula import Node, is_const, torch_operation, walk

Operation = Callable[..., Any]  # a torch function that takes `out`
Column = Sequence[Tensor]  # views of one array, one for each time step or block of rows


def write_code(
    outputs: Sequence[Node],
    names: Mapping[Node, str],
    spelling: Mapping[str, str],
    statement: str,
    mark: str = "t",
) -> tuple[list[str], list[str]]:
    """The expressions as straight-line source code: statements, and the text of each output.

    names      the names of the nodes whose values are variables of the code already
    spelling   how an operation is written, "add": "({0} + {1})"; "const" and "power" have {value}
               as well
    statement  how a value is given a name, "const float {0} = {1};"
    mark       how new names begin; a number follows: t0, t1, ...
    """
    text = dict(names)
    lines: list[str] = []
    for node in walk(outputs, frozenset(names)):
        if node in text:
            continue
        arguments = [text[argument] for argument in node.args]
        expression = spelling[node.op].format(*arguments, value=repr(node.value))
        if is_const(node):
            text[node] = expression
        else:
            text[node] = f"{mark}{len(lines)}"
            lines.append(statement.format(text[node], expression))
    return lines, [text[output] for output in outputs]


@dataclass(frozen=True)
class Instruction:
    """One torch operation: run(*inputs, out=output)."""

    run: Operation
    inputs: tuple[Node, ...]
    output: Node


def _minus_addcmul(a: Tensor, b: Tensor, c: Tensor, *, out: Tensor) -> Tensor:
    """The difference a - b c, in one operation."""
    return torch.addcmul(a, b, c, value=-1, out=out)


def _copy(a: Tensor, *, out: Tensor) -> Tensor:
    """The identity, as an operation that writes to `out`."""
    return out.copy_(a)


class Program:
    """Straight-line torch code for `outputs`; nodes in `given` are arrays at hand.

    A sum with a product in it that is used nowhere else becomes one addcmul.
    """

    def __init__(self, outputs: Sequence[Node], given: frozenset[Node] = frozenset()) -> None:
        self.outputs = tuple(outputs)
        nodes = walk(outputs, given)
        self.leaves = [node for node in nodes if node in given or node.op == "input"]
        self.constants = [node for node in nodes if is_const(node)]
        leaves = {*self.leaves, *self.constants}
        inner = [node for node in nodes if node not in leaves]
        uses = count_uses(inner, outputs)
        self.code: list[Instruction] = []
        fused: set[Node] = set()
        # From the outputs down, so that a sum is met before the product that it takes in.
        for node in reversed(inner):
            if node in fused:
                continue
            product = product_to_fuse(node, leaves, uses)
            if product is None:
                self.code.append(Instruction(torch_operation(node), node.args, node))
            else:
                fused.add(product)
                self.code.append(addcmul(node, product))
        self.code.reverse()
        for output in dict.fromkeys(self.outputs):
            if output in leaves:  # nothing computes it, but it must be written to its target
                self.code.append(Instruction(_copy, (output,), output))

    def assign_buffers(self) -> tuple[int, dict[Node, int]]:
        """How many buffers the intermediates need, and the number of each node's buffer.

        The buffer of a value that is not read again is used for a later one, even for the result
        of the instruction that reads it last. Outputs need none: they are written to targets.
        """
        last_use: dict[Node, int] = {}
        for i, instruction in enumerate(self.code):
            last_use |= dict.fromkeys(instruction.inputs, i)
        buffer_of: dict[Node, int] = {}
        free: list[int] = []
        count = 0
        for i, instruction in enumerate(self.code):
            for node in dict.fromkeys(instruction.inputs):
                if node in buffer_of and last_use[node] == i:
                    free.append(buffer_of[node])
            if instruction.output not in self.outputs:
                if not free:
                    free.append(count)
                    count += 1
                buffer_of[instruction.output] = free.pop()
        return count, buffer_of

    def bind(
        self,
        columns: Mapping[Node, Column],
        targets: Sequence[Column],
        scratch: Callable[[], Column],
    ) -> Callable[[int], None]:
        """run(i): compute entry i of each target from entry i of each column.

        columns  for each leaf, its tensors at i = 0, 1, ...
        targets  for each output, the tensors it is written to
        scratch  makes a column for intermediates, which may be overwritten

        All entries are written with `out=`: nothing is allocated while running.
        """
        count, buffer_of = self.assign_buffers()
        buffers = [scratch() for _ in range(count)]
        place: dict[Node, Column] = {node: buffers[i] for node, i in buffer_of.items()}
        written: set[Node] = set()
        copies: list[tuple[Column, Column]] = []
        for output, target in zip(self.outputs, targets, strict=True):
            if output in written:  # the same expression as an earlier output
                copies.append((place[output], target))
            else:
                written.add(output)
                place[output] = target
        like = targets[0][0] if targets else next(iter(columns.values()))[0]
        length = max((len(target) for target in targets), default=0)
        # a constant is the same tensor at every i
        fixed = {c: [like.new_tensor(c.value)] * length for c in self.constants}

        def source(node: Node) -> Column:
            """Where the value of a node is read: a column at hand, a constant or a result."""
            if node in columns:
                return columns[node]
            return fixed[node] if node in fixed else place[node]

        code: list[tuple[Operation, tuple[Column, ...], Column]] = []
        for instruction in self.code:
            inputs = tuple(map(source, instruction.inputs))
            code.append((instruction.run, inputs, place[instruction.output]))
        code += [(_copy, (first,), target) for first, target in copies]
        return bound_code(code)


def count_uses(nodes: Sequence[Node], outputs: Sequence[Node]) -> dict[Node, int]:
    """How often each node is an argument of `nodes`, or an output."""
    uses: dict[Node, int] = {}
    for node in nodes:
        for argument in node.args:
            uses[argument] = uses.get(argument, 0) + 1
    for output in outputs:
        uses[output] = uses.get(output, 0) + 1
    return uses


def product_to_fuse(node: Node, leaves: set[Node], uses: Mapping[Node, int]) -> Node | None:
    """The product that a sum or difference can absorb as one addcmul, or None.

    addcmul(a, b, c) is a + b c or a - b c. So the product must not be used elsewhere, nor have a
    constant factor, and in a difference it must be what is subtracted.
    """
    if node.op not in ("add", "sub"):
        return None
    for argument in reversed(node.args):
        if argument.op == "mul" and argument not in leaves and uses[argument] == 1:
            fits = node.op == "add" or argument is node.args[1]
            return argument if fits and not any(map(is_const, argument.args)) else None
    return None


def addcmul(node: Node, product: Node) -> Instruction:
    """The sum or difference `node` and its product as one operation, other +- a b."""
    other = node.args[0] if product is node.args[1] else node.args[1]
    run = torch.addcmul if node.op == "add" else _minus_addcmul
    return Instruction(run, (other, *product.args), node)


def bound_code(
    code: Sequence[tuple[Operation, tuple[Column, ...], Column]],
) -> Callable[[int], None]:
    """A function run(i) that applies each (operation, inputs, output) of `code` at entry i.

    It runs once for each time step, so it is written for speed.
    """
    if len(code) == 1:  # the most frequent case, without the loop
        operation, inputs, out = code[0]
        if len(inputs) == 1:
            first = inputs[0]
            return lambda i: operation(first[i], out=out[i])
        if len(inputs) == 2:
            first, second = inputs
            return lambda i: operation(first[i], second[i], out=out[i])

    # One, two and three inputs are written out: that is faster than a loop over the inputs.
    rows: list[tuple[int, Operation, Column, Column, Column, Column]] = []
    for operation, inputs, out in code:
        # padded to three with inputs that are not used
        first, second, third = (*inputs, inputs[0], inputs[0])[:3]
        rows.append((len(inputs), operation, first, second, third, out))

    def run(i: int) -> None:
        for count, operation, first, second, third, out in rows:
            if count == 2:
                operation(first[i], second[i], out=out[i])
            elif count == 3:
                operation(first[i], second[i], third[i], out=out[i])
            else:
                operation(first[i], out=out[i])

    return run

"""Programs: expressions as torch operations that allocate nothing, and as source text for compilers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .formula import Node, is_const, torch_operation, walk


def write_code(
    outputs: Sequence[Node],
    names: Mapping[Node, str],
    spelling: Mapping[str, str],
    statement: str,
    mark: str = "t",
) -> tuple[list[str], list[str]]:
    """The expressions as straight-line source code -> (statements, the name or literal of each output).

    names      what the nodes at hand are called
    spelling   how an operation is written, "add": "({0} + {1})"; "const" and "power" have {value} too
    statement  how a value is given a name, "const float {0} = {1};"; the names are `mark` and a number
    """
    text, lines = dict(names), list[str]()
    for n in walk(outputs, frozenset(names)):
        if n not in text:
            said = spelling[n.op].format(*(text[a] for a in n.args), value=repr(n.value))
            if is_const(n):
                text[n] = said
            else:
                text[n] = f"{mark}{len(lines)}"
                lines.append(statement.format(text[n], said))
    return lines, [text[o] for o in outputs]


@dataclass(frozen=True)
class Instruction:
    run: Callable[..., Any]
    inputs: tuple[Node, ...]
    output: Node


def _minus_addcmul(a: Tensor, b: Tensor, c: Tensor, *, out: Tensor) -> Tensor:
    return torch.addcmul(a, b, c, value=-1, out=out)


def _copy(a: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(a)


class Program:
    """Straight-line torch code for `outputs`, nodes in `given` being arrays at hand.

    A sum with a product in it that is used nowhere else becomes one addcmul.
    """

    def __init__(self, outputs: Sequence[Node], given: frozenset[Node] = frozenset()) -> None:
        self.outputs = tuple(outputs)
        nodes = walk(outputs, given)
        self.leaves = [n for n in nodes if n in given or n.op == "input"]
        self.constants = [n for n in nodes if is_const(n)]
        leaf = {*self.leaves, *self.constants}
        uses: dict[Node, int] = {}
        for n in nodes:
            for a in n.args if n not in leaf else ():
                uses[a] = uses.get(a, 0) + 1
        for o in outputs:
            uses[o] = uses.get(o, 0) + 1
        self.code: list[Instruction] = []
        fused: set[Node] = set()
        for n in reversed([n for n in nodes if n not in leaf]):
            if n in fused:
                continue
            inner = (
                next(
                    (
                        m
                        for m in reversed(n.args)
                        if m.op == "mul" and m not in leaf and uses[m] == 1
                    ),
                    None,
                )
                if n.op in ("add", "sub")
                else None
            )
            if (
                inner is not None
                and (n.op == "add" or inner is n.args[1])
                and not any(map(is_const, inner.args))
            ):
                other = n.args[0] if inner is n.args[1] else n.args[1]
                fused.add(inner)
                run = torch.addcmul if n.op == "add" else _minus_addcmul
                self.code.append(Instruction(run, (other, *inner.args), n))
            else:
                self.code.append(Instruction(torch_operation(n), n.args, n))
        self.code.reverse()
        for o in dict.fromkeys(o for o in outputs if o in leaf):
            self.code.append(Instruction(_copy, (o,), o))

    def assign_buffers(self) -> tuple[int, dict[Node, int]]:
        """How many buffers the intermediates need when a dead one is used again, and which node uses which."""
        last = {a: i for i, c in enumerate(self.code) for a in c.inputs}
        inner = [c.output for c in self.code if c.output not in self.outputs]
        home: dict[Node, int] = {}
        free: list[int] = []
        count = 0
        for i, c in enumerate(self.code):
            for a in dict.fromkeys(c.inputs):
                if a in home and last[a] == i:
                    free.append(home[a])
            if c.output in inner:
                if not free:
                    free.append(count)
                    count += 1
                home[c.output] = free.pop()
        return count, home

    def bind(
        self,
        columns: Mapping[Node, Sequence[Tensor]],
        targets: Sequence[Sequence[Tensor]],
        scratch: Callable[[], Sequence[Tensor]],
    ) -> Callable[[int], None]:
        """run(i): compute entry i of each target from entry i of each column.

        A column is a list of views, one for each time step or block of rows; `scratch()` makes one that may be
        overwritten. All entries are written with `out=`: nothing is allocated while running.
        """
        count, home = self.assign_buffers()
        buffers = [scratch() for _ in range(count)]
        first: dict[Node, Sequence[Tensor]] = {}
        copies: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        for o, target in zip(self.outputs, targets, strict=True):
            if o in first:
                copies.append((first[o], target))
            else:
                first[o] = target
        like = targets[0][0] if targets else next(iter(columns.values()))[0]
        length = max(len(t) for t in targets) if targets else 0
        fixed = {c: [like.new_tensor(c.value)] * length for c in self.constants}

        def read(n: Node) -> Sequence[Tensor]:
            if n in columns:
                return columns[n]
            if n in fixed:
                return fixed[n]
            return first[n] if n in first else buffers[home[n]]

        code: list[tuple[int, Any, Any, Any, Any, Any]] = []
        for c in self.code:
            out = first[c.output] if c.output in first else buffers[home[c.output]]
            ins = [read(a) for a in c.inputs]
            a, b, third = [*ins, None, None][:3]
            code.append((len(ins), c.run, a, b, third, out))
        code += [(1, _copy, source, None, None, target) for source, target in copies]

        if len(code) == 1 and code[0][0] < 3:  # the most frequent case, without the loop
            n, f, a, b, _, out = code[0]
            return (
                (lambda i: f(a[i], out=out[i])) if n == 1 else (lambda i: f(a[i], b[i], out=out[i]))
            )

        def run(i: int) -> None:
            for n, f, a, b, c, out in code:
                if n == 2:
                    f(a[i], b[i], out=out[i])
                elif n == 3:
                    f(a[i], b[i], c[i], out=out[i])
                else:
                    f(a[i], out=out[i])

        return run

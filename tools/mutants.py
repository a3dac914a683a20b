"""Faults by rule: does the test-suite notice a wrong term, sign, transpose, step, mask, path or scale?

Each mutant is one rule applied at one place of the source's syntax tree. It is copied to a temporary directory and the
tests run against the copy: first those that are about its file, then, if it survived, others that ought to notice. A
mutant is killed when a test fails, or when it runs past its time (a fault may loop for ever); time is the processor's, so
that a busy machine kills nothing. The tests that killed are run once more without a mutation: one that fails then, kills
nothing.

    python tools/mutants.py            a sample spread over files and rules; exit code 1 if one survives
    python tools/mutants.py --all      every mutant
    python tools/mutants.py --list     what would be run;  --only ID  one of them;  --count N  another sample size

The tables below name files, functions and pieces of source. A row that no longer fits the source is an error (exit code 2,
and tests/house/test_mutants.py): a table that has gone stale hides what it was made to show.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
FAILED = "mutants: failed: "  # what a line begins with that names a test
COPIED = (
    "src",
    "tests",
    "tools",
    "docs",
    "examples",
    "benchmarks",
    "README.md",
    "CHANGELOG.md",
    "Makefile",
    "pyproject.toml",
)
KERNEL = ("test_kernel.py", "test_errors.py")
SLOW = (
    "test_formula.py", "test_cells.py", "test_losses.py", "test_penalties.py", "test_network.py", "test_gradients.py",
    "test_identities.py", "test_scale_free.py", "test_derivatives.py", "test_zeros.py", "test_learning.py",
)  # fmt: skip

# What is mutated: files, and the parts of them, all if None.
SCOPE: dict[str, set[str] | None] = {
    "cells.py": None,
    "formula.py": None,
    "penalties.py": None,
    "losses.py": None,
    "gradients.py": None,
    "layout.py": {"Layout"},
    "costates.py": None,
    "readout.py": {"Readout.seen", "Readout.answer", "Readout.read_at"},
    "recurrence.py": {
        "formula_step", "Recurrence.shown", "Recurrence.recurrent", "Recurrence.drive", "Recurrence.advance",
        "Recurrence.sweep", "Recurrence._call_step", "Recurrence.start",
    },
    "network.py": {"Trajectory", "Network.looked_at", "Network.read_out", "Network.forward"},
    "sweeps/__init__.py": {"Swept"},
    "sweeps/derivatives.py": None,
    "sweeps/eager.py": None,
    "sweeps/reference.py": None,
    "sweeps/pointwise.py": None,
    "sweeps/rows.py": None,
    "sweeps/autograd.py": None,
    "sweeps/chunks.py": None,
    "sweeps/scan.py": None,
    "batch.py": None,
    "curriculum.py": None,
    "curvature.py": None,
    "decoding.py": None,
    "diagnostics.py": None,
    "directions.py": None,
    "files.py": None,
    "hessian_free.py": None,
    "influence.py": None,
    "initialisers.py": None,
    "nn.py": None,
    "online.py": None,
    "optimisers.py": None,
    "parametrisations.py": None,
    "recording.py": None,
    "reservoir.py": None,
    "ridge.py": None,
    "runs.py": None,
    "segments.py": None,
    "seq2seq.py": None,
    "stack.py": None,
    "steps.py": None,
    "streams.py": None,
    "training.py": None,
    "tasks/data.py": None,
    "tasks/digits.py": None,
    "tasks/music.py": None,
    "tasks/synthetic.py": None,
    "tasks/task.py": None,
    "tasks/transduction.py": None,
    "tasks/readers/arrays.py": None,
    "tasks/readers/parquet.py": None,
    "tasks/readers/parsing.py": None,
    "tasks/readers/recording.py": None,
    "tasks/readers/table.py": None,
    "tasks/readers/ts.py": None,
}  # fmt: skip

# What is not mutated, and why.
GPU = "runs on a GPU: `make test-gpu`"
DOOR = "words, pages and arguments; what they ask for is tested where it is done"
SPEED = "a matter of speed: what it makes is compared with the other engines"
OUTSIDE: dict[str, str] = {
    "__init__.py": "names",
    "__main__.py": "names",
    "tasks/__init__.py": "names",
    "tasks/readers/__init__.py": "names",
    "bench.py": "measures, and computes nothing that is used",
    "charts.py": DOOR,
    "cli.py": DOOR,
    "compare.py": DOOR,
    "config.py": DOOR,
    "display.py": DOOR,
    "errors.py": DOOR,
    "report.py": DOOR,
    "schemas.py": DOOR,
    "settings.py": DOOR,
    "transport.py": DOOR,
    "wrappers.py": DOOR,
    "tasks/readers/source.py": DOOR,
    "graphs.py": GPU,
    "sweeps/checks.py": GPU,
    "sweeps/cuda.py": GPU,
    "sweeps/kernels.py": GPU,
    "sweeps/triton.py": GPU,
    "sweeps/compiler.py": SPEED,
    "sweeps/cpu.py": SPEED,
    "sweeps/memory.py": SPEED,
    "sweeps/opaque.py": SPEED,
    "sweeps/pointers.py": DOOR,
    "sweeps/stepwise.py": SPEED,
}

# The tests of a file's mutants: those that are about it, and others that ought to notice. KERNEL and SLOW if it is not here.
TESTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "batch.py": (
        ("test_gradients.py",),
        ("test_training.py", "test_segments.py", "test_tasks.py", "test_learning.py"),
    ),
    "curriculum.py": (("test_learning.py",), ("test_optimisers.py",)),
    "curvature.py": (("test_curvature.py",), ("test_hessian_free.py", "test_optimisers.py")),
    "decoding.py": (("test_seq2seq.py",), ()),
    "diagnostics.py": (("test_diagnostics.py",), ("test_learning.py",)),
    "directions.py": (("test_directions.py",), ("test_optimisers.py",)),
    "files.py": (("test_runs.py",), ("test_online.py",)),
    "hessian_free.py": (("test_hessian_free.py",), ("test_optimisers.py",)),
    "influence.py": (("test_gradients.py",), ("test_online.py",)),
    "initialisers.py": (("test_initialisers.py",), ("test_learning.py", "test_reservoir.py")),
    "nn.py": (("test_nn.py",), ("test_recording.py", "test_extras.py")),
    "online.py": (("test_online.py",), ()),
    "optimisers.py": (("test_optimisers.py",), ("test_directions.py", "test_training.py")),
    "parametrisations.py": (("test_parametrisations.py",), ("test_cells.py",)),
    "recording.py": (("test_recording.py",), ("test_stack.py", "test_nn.py")),
    "reservoir.py": (("test_reservoir.py",), ()),
    "ridge.py": (("test_reservoir.py",), ("test_learning.py",)),
    "runs.py": (("test_runs.py",), ("test_training.py", "test_online.py")),
    "segments.py": (("test_segments.py",), ("test_memory.py",)),
    "seq2seq.py": (("test_seq2seq.py",), ()),
    "stack.py": (("test_stack.py",), ("test_seq2seq.py",)),
    "steps.py": (("test_steps.py",), ("test_initialisers.py",)),
    "streams.py": (("test_online.py",), ()),
    "sweeps/chunks.py": (("test_segments.py",), (*KERNEL,)),
    "sweeps/scan.py": (("test_scan.py",), ("test_cells.py",)),
    "tasks/data.py": (("test_data.py",), ("test_tasks.py", "test_readers.py")),
    "tasks/digits.py": (("test_tasks.py",), ()),
    "tasks/music.py": (("test_tasks.py",), ("test_data.py",)),
    "tasks/synthetic.py": (("test_tasks.py",), ()),
    "tasks/task.py": (("test_tasks.py",), ("test_training.py", "test_data.py")),
    "tasks/transduction.py": (("test_tasks.py",), ("test_seq2seq.py",)),
    "tasks/readers/arrays.py": (("test_readers.py",), ("test_data.py",)),
    "tasks/readers/parquet.py": (("test_readers.py",), ("test_data.py",)),
    "tasks/readers/parsing.py": (("test_readers.py",), ("test_data.py",)),
    "tasks/readers/recording.py": (("test_readers.py",), ("test_data.py", "test_tasks.py")),
    "tasks/readers/table.py": (("test_readers.py",), ("test_data.py",)),
    "tasks/readers/ts.py": (("test_readers.py",), ("test_data.py",)),
    "training.py": (("test_training.py",), ("test_runs.py", "test_optimisers.py", "test_learning.py")),
}

# Code that only words an error, or only prepares one.
WORDING = {
    "__repr__", "extra_repr", "__getattr__", "__bool__", "__torch_function__", "check", "_time", "_raise", "no_vmap",
    "_same_shape", "check_penalty", "named", "watched", "blamed", "blame", "first_fault", "go_on", "describe", "environment",
    "processor", "revision", "unkept", "refuse", "name_of", "interrupted", "say",
}  # fmt: skip

GROWTH = (
    "how many steps share an exponent is a matter of speed: a block that leaves the safe range is done again, shorter"
)
BLOCKS = "the exponent a block shares is a matter of speed: one that does not suit is refused and found step by step"
UNASKED = "a gradient that nobody asks for is computed and dropped, or None is given where nothing is asked for"
# Mutants that no test can kill because they mean the same: (file, rule or function, a piece of 'line before -> line after') -> why.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("sweeps/eager.py", "_scaled", "hi - begin == size"): GROWTH,
    ("sweeps/eager.py", "_scaled", "size = min(2 * size, 64)"): GROWTH,
    ("sweeps/eager.py", "_scaled.run", "new = torch.where(new == NONE, k[hi], new) ->"): BLOCKS,
    ("sweeps/eager.py", "_scaled.run", "new = torch.maximum(mine, "): BLOCKS,
    ("sweeps/eager.py", "_scaled.run", "mine[:n] = "): BLOCKS,
    ("sweeps/eager.py", "one", "torch.where(new == NONE, k[t], new)"): "a row of zeros may have any exponent",
    ("sweeps/eager.py", "one", "torch.where(new == NONE, k[(t - 1)], new)"): "a row of zeros may have any exponent",
    ("sweeps/eager.py", "Loop.__init__", " size = max("): "how many steps are prepared at once is a matter of speed",
    ("sweeps/eager.py", "flushed", "set_flush_denormal(True) -> pass"): "denormals cost time and change nothing here",
    ("sweeps/eager.py", "skip-branch", "W if e.through else None -> W = W"): "a product that goes nowhere costs time alone",
    ("sweeps/eager.py", "skip-branch", "else None -> slots, out, W = len(cell.slots), e.out, W"): "likewise",
    ("sweeps/derivatives.py", "skip-branch", "if ((t is not None))"): UNASKED,
    ("sweeps/derivatives.py", "skip-branch", "if (need["): UNASKED,
    ("sweeps/derivatives.py", "skip-branch", "if ((W is not None)) else None"): UNASKED,
    ("sweeps/derivatives.py", "skip-statement", "mark_non_differentiable(k)"): "integers have no gradient anyway",
    ("sweeps/pointwise.py", "pulled", "frozenset(uniform), self.uniform)"): "`summed` is only asked about the outputs",
    ("cells.py", "Cell.step", "self.side} -> pass"): "base is 0 for a gate that has a side array",
    ("cells.py", "Cell.step", "z |= {g: z[g] for"): "base is 0 for a gate that has a side array",
    ("cells.py", "Cell.step", "z |= {g: (z[g] - v[g])"): "base is 0 for a gate that has a side array",
    ("sweeps/rows.py", "skip-branch", "if self.uniform: -> if False:"): "samples of one length take the general path",
    ("network.py", "flip-sign", "h - torch.zeros_like(h)"): "minus zero",
    ("network.py", "skip-branch", "if (every and (not isinstance(loss, Tensor)))"): "s is never None there",
    ("gradients.py", "Stream.advance", "self.t += 1"): "only words an error",
    ("losses.py", "_huber", "torch.where(e < delta"): "both sides and their slopes agree at e = delta",
    ("formula.py", "order", "stack"): "any order with arguments first will do",
    ("formula.py", "Program.__init__", "for m in n.args if m.op"): "which of two products is fused is a matter of speed",
    ("formula.py", "skip-branch", "a.order <= b.order"): "sums and products commute; the order only helps sharing",
    ("formula.py", "comparison", "a.order <= b.order"): "sums and products commute; the order only helps sharing",
    ("formula.py", "add", "if b is ZERO: -> if False:"): "x + 0 is computed instead of x",
    ("sweeps/scan.py", "parts", "turns = ((len(A) == 1))"): "complex numbers are scanned as the matrices they are, slower",
    ("seq2seq.py", "skip-branch", '"dtype": (dtype), "device"'): "whatever is made takes torch's default for None",
}  # fmt: skip

SHAPES = {"new_empty", "new_zeros", "new_full", "empty", "zeros", "split", "chunk", "unflatten", "expand", "isinstance"}
PAIRS = {
    frozenset(p.split())
    for p in (
        "lam mu", "nu m", "lam delta", "mu nu", "glam gdelta", "into_a into_x", "z v", "base side", "g ga", "dg dga",
        "s s_last", "ds dlast", "dlam ddelta", "begin fresh", "x last", "tape.a tape.v",
    )
}  # fmt: skip


class Replaced(NamedTuple):
    """A file's text with one piece of it replaced."""

    before: str
    begin: int
    end: int
    by: str

    def __str__(self) -> str:
        return self.before[: self.begin] + self.by + self.before[self.end :]


@dataclass(frozen=True)
class Mutant:
    file: str
    line: int
    rule: str
    name: str  # file.function.rule.number
    removed: str
    added: str
    text: Replaced = field(compare=False)  # the whole mutated file

    @property
    def diff(self) -> str:
        return f"  {self.file}:{self.line}\n    - {self.removed}\n    + {self.added}"

    @functools.cached_property
    def equivalent(self) -> tuple[str, str, str] | None:
        """The key in EQUIVALENT that this mutant falls under."""
        function = self.name.removesuffix(f".{self.rule}.{self.name.rsplit('.', 1)[1]}")
        for file, where, piece in EQUIVALENT:
            here = self.file == file and (self.rule == where or function.endswith("." + where))
            if here and piece in f"{self.removed} -> {self.added}":
                return file, where, piece
        return None


Edit = tuple[ast.AST, str]  # the node that is replaced, and by what
Rule = Callable[["Place"], Iterator[Edit]]
RULES: dict[str, Rule] = {}


def rule(f: Rule) -> Rule:
    RULES[f.__name__.replace("_", "-")] = f
    return f


class Source:
    """A file's text, and where the nodes of its tree lie in it."""

    def __init__(self, path: Path) -> None:
        self.text, self.tree = path.read_text(), ast.parse(path.read_text())
        self.lines = self.text.splitlines(keepends=True)
        self.starts = [0, *itertools.accumulate(map(len, self.lines))]

    def span(self, node: Any) -> tuple[int, int]:
        at = lambda line, byte: self.starts[line - 1] + len(self.lines[line - 1].encode()[:byte].decode())
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)


@dataclass(frozen=True)
class Place:
    """A node of the tree, with what surrounds it."""

    node: ast.AST
    parents: tuple[ast.AST, ...]  # nearest last
    source: Source

    def text(self, node: ast.AST) -> str:
        lo, hi = self.source.span(node)
        found = self.source.text[lo:hi]
        return (
            f"({found})" if isinstance(node, ast.BinOp | ast.UnaryOp | ast.IfExp | ast.Compare | ast.BoolOp) else found
        )

    @property
    def in_shape(self) -> bool:
        return any(isinstance(p, ast.Call) and called(p) in SHAPES for p in self.parents)


def called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def is_function(node: ast.AST, *names: str) -> bool:
    """A call of one of these, by its bare name: a formula's add(a, b), not a list's x.add(a, b)."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def is_list(node: ast.AST) -> bool:
    return isinstance(node, ast.List | ast.ListComp | ast.Tuple) or is_text(node)


def arithmetic(place: Place, *ops: type[ast.operator]) -> ast.BinOp | None:
    n = place.node
    ok = isinstance(n, ast.BinOp) and isinstance(n.op, ops) and not (is_list(n.left) or is_list(n.right))
    return n if ok and not place.in_shape else None  # type: ignore[return-value]


@rule
def drop_term(place: Place) -> Iterator[Edit]:
    """a + b -> a, b;  plus(a, b) -> plus(a), plus(b);  t - 1 -> t"""
    if n := arithmetic(place, ast.Add, ast.Sub):
        yield n, place.text(n.left)
        if not isinstance(n.right, ast.Constant):
            yield n, place.text(n.right) if isinstance(n.op, ast.Add) else f"(-{place.text(n.right)})"
    elif is_function(place.node, "plus", "add") and len(place.node.args) == 2:
        for i, arg in enumerate(place.node.args):
            yield arg, "None" if called(place.node) == "plus" else ("ZERO" if i else "node(0.0)")


@rule
def flip_sign(place: Place) -> Iterator[Edit]:
    """a + b -> a - b, a - b -> a + b, -a -> a, add -> sub"""
    if n := arithmetic(place, ast.Add, ast.Sub):
        sign = "-" if isinstance(n.op, ast.Add) else "+"
        yield n, f"({place.text(n.left)} {sign} {place.text(n.right)})"
    n = place.node
    minus = isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.USub) and not place.in_shape
    outer = place.parents[-1] if place.parents else None
    axis = isinstance(outer, ast.Call) or (
        isinstance(outer, ast.Subscript) and place.text(outer.value).endswith("shape")
    )
    axis = axis and minus and isinstance(n.operand, ast.Constant)
    if minus and not axis and not any(isinstance(p, ast.Slice) for p in place.parents[-2:]):
        yield place.node, place.text(place.node.operand)
    if isinstance(place.node, ast.Call) and called(place.node) == "add_":
        yield place.node.func, place.text(place.node.func)[:-4] + "sub_"


@rule
def factor_one(place: Place) -> Iterator[Edit]:
    """a * b -> a, b;  a / b -> a;  x.mul_(y) -> x"""
    if n := arithmetic(place, ast.Mult):
        yield n, place.text(n.left)
        yield n, place.text(n.right)
    if n := arithmetic(place, ast.Div):
        yield n, place.text(n.left)
    if isinstance(place.node, ast.Call) and called(place.node) in ("mul", "times") and len(place.node.args) == 2:
        yield place.node, place.text(place.node.args[0])
        yield place.node, place.text(place.node.args[1])


@rule
def transpose(place: Place) -> Iterator[Edit]:
    """X.T -> X, X @ Y -> Y @ X"""
    n = place.node
    if isinstance(n, ast.Attribute) and n.attr == "T" and not place.text(n.value).endswith(("rows", "self", "plan")):
        yield n, place.text(n.value)
    if isinstance(n, ast.Call) and called(n) == "t" and isinstance(n.func, ast.Attribute) and not n.args:
        yield n, place.text(n.func.value)
    if isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult):
        yield n, f"({place.text(n.right)} @ {place.text(n.left)})"
    if isinstance(n, ast.Attribute) and n.attr == "W" and isinstance(place.parents[-1], ast.BinOp):
        yield n, f"{place.text(n)}.T"
    if isinstance(n, ast.Name) and n.id == "W" and isinstance(place.parents[-1], ast.BinOp | ast.Call):
        outer = place.parents[-1]
        if isinstance(outer, ast.BinOp) or called(outer) in ("mm", "addmm_"):
            yield n, "W.T"


@rule
def step(place: Place) -> Iterator[Edit]:
    """t for t - 1: x[1:] <-> x[:-1], rows.prev(x) -> x[rows.B :], before(x) -> states(x)[1:], x[t] -> x[t - 1]"""
    n = place.node
    if isinstance(n, ast.Slice):
        text = place.text(n)
        for one, other in (
            ("1:", ":-1"),
            (":-1", "1:"),
            ("1:-1", ":-2"),
            (": rows.B", "-rows.B :"),
            ("rows.B :", ": -rows.B"),
        ):
            if text == one:
                yield n, other
    if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and len(n.args) == 1:
        rows, y = place.text(n.func.value), place.text(n.args[0])
        if n.func.attr == "prev":
            yield n, f"{y}[{rows}.B :]"
        if n.func.attr == "prev_back":
            yield n, f"pad({y}, (0, 0, {rows}.B, 0))"
        if n.func.attr == "before":
            yield n, f"{rows}.states({y})[1:]"
    if isinstance(n, ast.Attribute) and n.attr == "before" and not isinstance(place.parents[-1], ast.Call):
        yield n, f"(lambda y: {place.text(n.value)}.states(y)[1:])"
    if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Name) and n.slice.id == "t":
        yield n.slice, "t - 1"


@rule
def order(place: Place) -> Iterator[Edit]:
    """reversed(x) -> x; insert(0, y) -> append(y)"""
    n = place.node
    if isinstance(n, ast.Call) and called(n) == "reversed":
        yield n, place.text(n.args[0])
    if isinstance(n, ast.Call) and called(n) == "insert" and isinstance(n.func, ast.Attribute):
        yield n, f"{place.text(n.func.value)}.append({place.text(n.args[1])})"


@rule
def forget_mask(place: Place) -> Iterator[Edit]:
    """where(c, a, b) -> a; a & b -> a, b; ~a -> a; masked_fill(m, 0) -> nothing"""
    n = place.node
    if isinstance(n, ast.Call) and called(n) == "where" and len(n.args) == 3:
        yield n, place.text(n.args[1])
        yield n.args[0], f"~{place.text(n.args[0])}"
    if isinstance(n, ast.BinOp) and isinstance(n.op, ast.BitAnd):
        yield n, place.text(n.left)
        yield n, place.text(n.right)
    if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Invert):
        yield n, place.text(n.operand)
    if (
        isinstance(n, ast.Call)
        and called(n) in ("masked_fill", "clamp", "clamp_min")
        and isinstance(n.func, ast.Attribute)
    ):
        yield n, place.text(n.func.value)
    if (
        isinstance(n, ast.Call)
        and called(n) in ("sort", "unsort")
        and place.text(n.func).startswith(("layout", "self"))
    ):
        yield n, place.text(n.args[0])


@rule
def drop_path(place: Place) -> Iterator[Edit]:
    """None for one of the results of a backward or jvp, one entry less in a table of paths, a detach() left out"""
    n = place.node
    inside = next((p.name for p in reversed(place.parents) if isinstance(p, ast.FunctionDef)), "")
    if isinstance(n, ast.Return) and isinstance(n.value, ast.Tuple) and inside in ("backward", "jvp"):
        for e in n.value.elts:
            if place.text(e) != "None":
                yield e, "None"
    if isinstance(n, ast.Tuple) and len(n.elts) > 1 and all(isinstance(e, ast.Tuple) for e in n.elts):
        for e in n.elts:
            rest = ", ".join(place.text(o) for o in n.elts if o is not e)
            yield n, f"({rest},)"
    if isinstance(n, ast.Call) and called(n) in ("read_pull", "unscaled", "linked", "_of") and len(n.args) > 1:
        yield n, place.text(n.args[1])
    if (
        isinstance(n, ast.Call)
        and called(n) in ("last", "last_back")
        and len(n.args) == 1
        and "rows" in place.text(n.func)
    ):
        y = place.text(n.args[0])
        yield n, f"{y}[: rows.B]" if called(n) == "last" else f"pad({y}, (0, 0, 0, rows.N))"


@rule
def wrong_scale(place: Place) -> Iterator[Edit]:
    """scale(y, k) -> y; mean -> sum; a square, a logarithm, an absolute value left out; max -> min"""
    n = place.node
    if not isinstance(n, ast.Call):
        return
    if called(n) in ("scale", "pow2") and len(n.args) == 2:
        yield (
            n,
            place.text(n.args[0])
            if called(n) == "scale"
            else f"pow2(-({place.text(n.args[0])}), {place.text(n.args[1])})",
        )
    if isinstance(n.func, ast.Attribute):
        text = place.text(n.func)
        for one, other in (("mean", "sum"), ("amax", "amin"), ("maximum", "minimum")):
            if n.func.attr == one:
                yield n.func, text.removesuffix(one) + other
        if n.func.attr in ("square", "abs", "exp", "sqrt") and not n.args and text != f"torch.{n.func.attr}":
            yield n, place.text(n.func.value)
        if n.func.attr == "sum" and len(n.args) == 1 and place.text(n.args[0]) in ("0", "-1", "(-1)"):
            yield n.func, text.removesuffix("sum") + "mean"
    if called(n) in ("max", "min") and isinstance(n.func, ast.Name) and len(n.args) == 2:
        yield n.func, "min" if called(n) == "max" else "max"
    if called(n) == "mean" and isinstance(n.func, ast.Name) and len(n.args) == 2:
        yield n, f"torch.where({place.text(n.args[1])}, {place.text(n.args[0])}, 0).sum(0)"


@rule
def drop_bound(place: Place) -> Iterator[Edit]:
    """max(a, b) -> a, b; min likewise"""
    n = place.node
    if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id in ("max", "min") and len(n.args) == 2:
        for arg in n.args:
            if not isinstance(arg, ast.Constant):
                yield n, place.text(arg)


@rule
def swap_arguments(place: Place) -> Iterator[Edit]:
    """f(nu, m) -> f(m, nu), return mu, nu -> return nu, mu, for arguments of one kind"""
    n = place.node
    of_return = isinstance(n, ast.Tuple) and isinstance(place.parents[-1], ast.Return)
    args = n.args if isinstance(n, ast.Call) else n.elts if of_return else []  # type: ignore[attr-defined]
    for one, other in itertools.pairwise(args):
        a, b = place.text(one), place.text(other)
        if frozenset((a, b)) in PAIRS:
            whole = place.text(n)
            i = whole.index(f"{a}, {b}") if f"{a}, {b}" in whole else -1
            if i >= 0:
                yield n, f"{whole[:i]}{b}, {a}{whole[i + len(a) + len(b) + 2 :]}"


@rule
def skip_branch(place: Place) -> Iterator[Edit]:
    """if c: -> if False:, (a if c else b) -> one of them, (c and d) -> one of them"""
    n = place.node
    if isinstance(n, ast.If):
        yield n.test, "False"
    if isinstance(n, ast.IfExp):
        test = n.test
        none = (
            isinstance(test, ast.Compare)
            and isinstance(test.comparators[0], ast.Constant)
            and test.comparators[0].value is None
        )
        if not (none and isinstance(test.ops[0], ast.IsNot)):  # type: ignore[attr-defined]
            yield n, place.text(n.body)
        if not (none and isinstance(test.ops[0], ast.Is)):  # type: ignore[attr-defined]
            yield n, place.text(n.orelse)
    if isinstance(n, ast.BoolOp):
        for v in n.values:
            rest = f" {'and' if isinstance(n.op, ast.And) else 'or'} ".join(
                place.text(o) for o in n.values if o is not v
            )
            yield n, f"({rest})"


@rule
def comparison(place: Place) -> Iterator[Edit]:
    """< -> <=, > -> >=, == -> !=, and back"""
    n = place.node
    if (
        isinstance(n, ast.Compare)
        and len(n.ops) == 1
        and not any(isinstance(p, ast.comprehension) for p in place.parents[-1:])
    ):
        turned = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="}.get(
            type(n.ops[0])
        )
        if turned:
            yield n, f"{place.text(n.left)} {turned} {place.text(n.comparators[0])}"


@rule
def skip_statement(place: Place) -> Iterator[Edit]:
    """A call for its effect, or x += y, left out"""
    n = place.node
    quiet = (
        "append",
        "insert",
        "__init__",
        "choose",
        "check_like",
        "save_for_backward",
        "set_materialize_grads",
        "check",
    )
    if isinstance(n, ast.Expr) and isinstance(n.value, ast.Call) and called(n.value) not in quiet:
        yield n, "pass"
    if isinstance(n, ast.AugAssign):
        yield n, "pass"


def only_raises(body: list[ast.stmt]) -> bool:
    if len(body) == 1 and isinstance(body[0], ast.If) and not body[0].orelse:
        return only_raises(body[0].body)
    return isinstance(body[-1], ast.Raise)


def places(node: ast.AST, source: Source, parents: tuple[ast.AST, ...] = ()) -> Iterator[Place]:
    """Every place worth a mutant: not annotations, messages, imports, nor what only guards an error."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.FunctionDef) and node.name in WORDING:
        return
    if isinstance(node, ast.Call) and called(node) in WORDING:
        return
    yield Place(node, parents, source)
    for part, value in ast.iter_fields(node):
        if part in ("annotation", "returns", "decorator_list", "type_comment", "defaults", "kw_defaults"):
            continue
        if isinstance(node, ast.If | ast.For) and only_raises(node.body) and part != "orelse":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from places(child, source, (*parents, node))


def generate(root: Path) -> list[Mutant]:
    return [m for file in SCOPE for m in mutants_of(root, file)]


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """All of one file."""
    found: dict[tuple[str, int, int, str], Mutant] = {}
    numbers: Counter[str] = Counter()
    scope = SCOPE[file]
    source = Source(root / "coadjoint" / file)
    for place in places(source.tree, source):
        around = (*place.parents, place.node)
        owner = [p.name for p in around if isinstance(p, ast.FunctionDef | ast.ClassDef)]
        if scope is not None and not {".".join(owner[:i]) for i in (1, 2)} & scope:
            continue
        if isinstance(place.node, ast.If) and only_raises(place.node.body):
            continue
        for name, make in RULES.items():
            for target, new in make(place):
                (lo, hi), (first, last) = source.span(target), source.span(around[1])
                key, text = (file, lo, hi, new), source.text
                if key in found or not changes(text[first:last], text[first:lo] + new + text[hi:last]):
                    continue
                base = ".".join([file.removesuffix(".py").replace("/", "."), *owner, name])
                numbers[base] += 1
                begin, end = text.rfind("\n", 0, lo) + 1, text.find("\n", hi)
                line = lambda s: re.sub(r"\s+", " ", s).strip()
                found[key] = Mutant(
                    file,
                    target.lineno,  # type: ignore[attr-defined]
                    name,
                    f"{base}.{numbers[base]}",
                    line(text[begin:end]),
                    line(text[begin:lo] + new + text[hi:end]),
                    Replaced(text, lo, hi, new),
                )
    return list(found.values())


def changes(before: str, after: str) -> bool:
    """Is `after` a program, and another one?"""
    try:
        return ast.dump(ast.parse(after)) != dumped(before)
    except SyntaxError:
        return False


@functools.lru_cache(maxsize=4)
def dumped(text: str) -> str:
    return ast.dump(ast.parse(text))


def stale(root: Path) -> list[str]:
    """Rows of the tables that no longer fit the source, each in a sentence."""
    package = root / "coadjoint"
    modules = {str(path.relative_to(package)) for path in package.rglob("*.py")}
    wrong = [f"SCOPE or OUTSIDE: there is no {file}" for file in sorted({*SCOPE, *OUTSIDE} - modules)]
    wrong += [f"{file} is neither in SCOPE nor in OUTSIDE" for file in sorted(modules - {*SCOPE, *OUTSIDE})]
    wrong += [f"{file} is in both SCOPE and OUTSIDE" for file in sorted({*SCOPE} & {*OUTSIDE})]
    wrong += [f"TESTS: {file} is not in SCOPE" for file in sorted({*TESTS} - {*SCOPE})]
    here = {file: Source(package / file) for file in SCOPE if file in modules}
    for file, parts in SCOPE.items():
        names = set() if file not in here else set(defined(here[file].tree))
        wrong += [f"SCOPE of {file}: there is no {part}" for part in sorted((parts or set()) - names)]
    for name in sorted({name for first, then in TESTS.values() for name in (*first, *then)} | {*KERNEL, *SLOW}):
        if not (PROJECT / "tests" / name).exists():
            wrong.append(f"the tests: there is no {name}")
    texts = "\n".join(source.text for source in here.values())
    for word in sorted(WORDING):
        if not re.search(rf"\b{word}\b", texts):
            wrong.append(f"WORDING: nothing is called {word}")
    for pair in sorted(" ".join(sorted(p)) for p in PAIRS):
        a, b = map(re.escape, pair.split())
        if not re.search(rf"\b{a}, {b}\b|\b{b}, {a}\b", texts):
            wrong.append(f"PAIRS: {pair} are nowhere side by side")
    for file in sorted({file for file, _, _ in EQUIVALENT} & {*here}):
        used = {m.equivalent for m in mutants_of(root, file)}
        wrong += [
            f"EQUIVALENT: no mutant falls under {key}" for key in EQUIVALENT if key[0] == file and key not in used
        ]
    wrong += [f"EQUIVALENT: {key[0]} is not in SCOPE" for key in EQUIVALENT if key[0] not in SCOPE]
    return wrong


def defined(tree: ast.AST, outer: str = "") -> Iterator[str]:
    """The names of functions and classes, with those inside as class.method."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield outer + node.name
            yield from defined(node, f"{outer}{node.name}.")


def sample(mutants: list[Mutant], count: int) -> list[Mutant]:
    """A fixed choice, spread over files and, within each, over rules: by turns, in the order of a hash of the name."""
    rank = lambda m: hashlib.sha256(m.name.encode()).hexdigest()
    groups: dict[str, dict[str, list[Mutant]]] = {}
    for m in sorted(mutants, key=rank):
        groups.setdefault(m.file, {}).setdefault(m.rule, []).append(m)
    weight = {
        "sweeps/derivatives.py": 4,
        "sweeps/eager.py": 4,
        "formula.py": 3,
        "network.py": 2,
        "gradients.py": 2,
        "penalties.py": 2,
    }
    turns = {file: _by_turns(list(rules.values())) for file, rules in groups.items()}
    chosen: list[Mutant] = []
    while len(chosen) < count and turns:
        for file in list(turns):
            for _ in range(weight.get(file, 1)):
                m = next(turns[file], None)
                if m is None:
                    turns.pop(file, None)
                    break
                chosen.append(m)
    return chosen[:count]


def _by_turns(lists: list[list[Mutant]]) -> Iterator[Mutant]:
    for i in range(max(map(len, lists))):
        yield from (group[i] for group in lists if i < len(group))


class Failures:
    """A plugin of pytest that says what failed, by its whole name."""

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            print(f"\n{FAILED}{report.nodeid}", flush=True)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            print(f"\n{FAILED}{report.nodeid}", flush=True)


def child(project: Path, root: Path, tests: Sequence[str], log: Path, seconds: int, all_of_them: bool) -> None:
    """In a process of its own: tests of the project on the package below `root`; up to the first that fails, or all."""
    os.setpgrp()  # what the tests start ends with them
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    os.environ["PYTHONPATH"] = str(root)  # for the processes that tests start
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(project)
    sys.path.insert(0, str(root))
    try:
        import coadjoint
    except Exception as e:
        print(f"{FAILED}import: {type(e).__name__}: {e}", flush=True)
        os._exit(1)
    if not Path(coadjoint.__file__).resolve().is_relative_to(root.resolve()):
        print(f"another package was imported: {coadjoint.__file__}", flush=True)
        os._exit(9)
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", *([] if all_of_them else ["-x"])]
    code = pytest.main([*options, *(f"tests/{f}" for f in tests)], plugins=[Failures()])
    sys.stdout.flush()
    os._exit(int(code))


class Work(NamedTuple):
    """What is to be tested: a mutant, or a name for the source as it is."""

    what: Any
    stages: Sequence[Sequence[str]]  # tests; the next stage is for what survives one
    seconds: float  # of the processor, for each
    taken: float = 0.0


@dataclass
class Run:
    """One test run under way."""

    work: Work
    process: Any
    log: Path
    folder: tempfile.TemporaryDirectory[str]
    deadline: float  # far beyond the processor's time: for tests that wait for ever
    began: float


class Runner:
    """Runs tests in forked processes, so that torch and pytest are loaded once."""

    def __init__(self, project: Path, jobs: int) -> None:
        import pytest  # noqa: F401
        import torch

        torch.set_num_threads(1)
        x = torch.zeros(2)
        torch.func.jvp(torch.tanh, (x,), (x,))  # loads what forward mode needs; no backward before a fork
        assert "coadjoint" not in sys.modules
        self.project, self.jobs = project, jobs

    def start(self, work: Work) -> Run:
        folder = tempfile.TemporaryDirectory()
        root, log = Path(folder.name) / "src", Path(folder.name) / "log"
        shutil.copytree(self.project / "src", root, ignore=shutil.ignore_patterns("__pycache__"))
        if isinstance(work.what, Mutant):
            (root / "coadjoint" / work.what.file).write_text(str(work.what.text))
        all_of_them = not isinstance(work.what, Mutant)
        arguments = (self.project, root, work.stages[0], log, math.ceil(work.seconds), all_of_them)
        process = multiprocessing.get_context("fork").Process(target=child, args=arguments)
        process.start()
        now = time.perf_counter()
        return Run(work, process, log, folder, now + 30 * work.seconds, now)

    def run(self, work: Sequence[Work]) -> Iterator[tuple[Any, str, str, float]]:
        """-> (what, killed | timeout | survived, by what, seconds taken), as they end."""
        todo = list(reversed(work))
        running: list[Run] = []
        try:
            while todo or running:
                while todo and len(running) < self.jobs:
                    running.append(self.start(todo.pop()))
                multiprocessing.connection.wait([r.process.sentinel for r in running], timeout=1)
                for r in [r for r in running if not r.process.is_alive() or time.perf_counter() > r.deadline]:
                    running.remove(r)
                    outcome, by = self.end(r)
                    taken = r.work.taken + time.perf_counter() - r.began
                    if outcome == "survived" and r.work.stages[1:]:
                        todo.append(r.work._replace(stages=r.work.stages[1:], taken=taken))
                    else:
                        yield r.work.what, outcome, by, taken
        finally:
            for r in running:
                end_group(r.process)

    def end(self, r: Run) -> tuple[str, str]:
        late = r.process.is_alive()
        if late:
            end_group(r.process)
        r.process.join()
        code = r.process.exitcode
        text = r.log.read_text() if r.log.exists() else ""
        r.folder.cleanup()
        if late or code == -signal.SIGXCPU:
            return "timeout", "ran out of time"
        if code in (4, 5, 9):
            raise RuntimeError(f"the tests could not be run: {text[-500:]}")
        found = re.findall(rf"^{FAILED}(?:tests/)?(.+)$", text, re.M)
        by = "\n".join(found) if found else f"exit code {code}"
        return ("killed", by) if code else ("survived", "")


def end_group(process: Any) -> None:
    """A process that is alive, and those it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description="mutation tests of coadjoint's derivatives")
    parser.add_argument("--all", action="store_true", help="every mutant instead of a sample")
    parser.add_argument("--count", type=int, default=280, help="size of the sample")
    parser.add_argument(
        "--only", action="append", metavar="ID", help="these mutants alone (an ID or the beginning of one)"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument(
        "--quick", action="store_true", help="a file's own tests alone, without the others that ought to notice"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=600, help="the processor's time for the tests of one mutant")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # the project as it is now, whatever happens to it meanwhile
        for part in COPIED:
            if (PROJECT / part).is_dir():
                shutil.copytree(PROJECT / part, Path(folder) / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(PROJECT / part, folder)
        return mutate(Path(folder), options)


def mutate(project: Path, options: argparse.Namespace) -> int:
    wrong = stale(project / "src")
    if wrong:
        print("these rows of the tables no longer fit the source; mend or remove them:", *wrong, sep="\n  ")
        return 2
    everything = generate(project / "src")
    if options.only:
        chosen = [m for m in everything if any(m.name == o or m.name.startswith(o) for o in options.only)]
    else:
        chosen = everything if options.all else sample(everything, options.count)
    if options.list:
        for m in chosen:
            print(f"{m.name}{'  (equivalent)' if m.equivalent else ''}\n{m.diff}")
        print(f"{len(chosen)} of {len(everything)} mutants; by rule: {dict(Counter(m.rule for m in chosen))}")
        return 0
    same = [m for m in chosen if m.equivalent]
    began, runner = time.perf_counter(), Runner(project, options.jobs)
    ((_, outcome, by, _),) = runner.run([Work("nothing", [KERNEL], options.seconds)])
    if outcome != "survived":
        print(f"{KERNEL} fails without a mutation: {by}")
        return 2
    work = []
    for m in chosen:
        own, others = TESTS.get(m.file, (KERNEL, SLOW))
        stages = [own] if options.quick or not others else [own, others]
        if not m.equivalent:
            work.append(Work(m, stages, options.seconds))
    results = {m: (outcome, by) for m, outcome, by, _ in shown(runner.run(work), len(work))}
    innocent = unmoved(runner, results, options.seconds)
    for m, (_, by) in results.items():
        if by in innocent:
            print(f"{by} fails without a mutation, and killed {m.name}")
    return max(report(results, same, time.perf_counter() - began), 2 if innocent else 0)


def unmoved(runner: Runner, results: dict[Mutant, tuple[str, str]], seconds: float) -> set[str]:
    """Of the tests that killed a mutant, those that fail without one as well."""
    by_file: dict[str, list[str]] = {}
    for _, by in results.values():
        if "::" in by and by not in by_file.setdefault(by.split("::")[0], []):
            by_file[by.split("::")[0]].append(by)
    work = [Work(file, [tests], seconds) for file, tests in by_file.items()]
    failed: set[str] = set()
    for file, outcome, by, _ in runner.run(work):
        if outcome != "survived":
            known = set(by.split("\n")) & set(by_file[file])
            failed |= known or set(by_file[file])
    return failed


def report(results: dict[Mutant, tuple[str, str]], same: list[Mutant], seconds: float) -> int:
    survivors = sorted((m for m, (o, _) in results.items() if o == "survived"), key=lambda m: (m.file, m.line))
    for m in survivors:
        print(f"survived  {m.name}\n{m.diff}")
    for m in same:
        print(f"equivalent  {m.name}: {EQUIVALENT[m.equivalent]}\n{m.diff}")
    rules = Counter(m.rule for m in results)
    alive = Counter(m.rule for m in survivors)
    print("killed by rule: " + ", ".join(f"{r} {n - alive[r]}/{n}" for r, n in sorted(rules.items())))
    late = sum(o == "timeout" for o, _ in results.values())
    print(
        f"{len(results) + len(same)} mutants, {len(results) - len(survivors)} killed"
        + (f" ({late} of them by running out of time)" if late else "")
        + f", {len(survivors)} survived, {len(same)} equivalent, in {seconds:.0f} s"
    )
    return 1 if survivors else 0


def shown(results: Iterator[tuple[Any, str, str, float]], total: int) -> Iterator[tuple[Any, str, str, float]]:
    """Results as they come: with a bar on a terminal, a line each otherwise."""
    if not sys.stdout.isatty():
        for i, (m, outcome, by, taken) in enumerate(results, 1):
            print(f"{i}/{total}  {outcome:8} {taken:4.0f} s  {m.name}  {by}", flush=True)
            yield m, outcome, by, taken
        return
    from rich.progress import Progress

    with Progress(auto_refresh=False) as bar:  # no second thread in a process that forks
        task, survived = bar.add_task("mutants", total=total), 0
        for result in results:
            survived += result[1] == "survived"
            bar.update(task, advance=1, description=f"mutants, {survived} survived", refresh=True)
            yield result


if __name__ == "__main__":
    sys.exit(main())

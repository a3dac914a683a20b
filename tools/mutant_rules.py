"""The rules of tools/mutants.py: each looks at one place of a syntax tree and proposes edits."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutant_tables import PAIRS, SHAPES, WORDING

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
        def at(line, byte):
            return self.starts[line - 1] + len(self.lines[line - 1].encode()[:byte].decode())

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
            f"({found})"
            if isinstance(node, ast.BinOp | ast.UnaryOp | ast.IfExp | ast.Compare | ast.BoolOp)
            else found
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
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def is_list(node: ast.AST) -> bool:
    return isinstance(node, ast.List | ast.ListComp | ast.Tuple) or is_text(node)


def arithmetic(place: Place, *ops: type[ast.operator]) -> ast.BinOp | None:
    n = place.node
    ok = (
        isinstance(n, ast.BinOp)
        and isinstance(n.op, ops)
        and not (is_list(n.left) or is_list(n.right))
    )
    return n if ok and not place.in_shape else None  # type: ignore[return-value]


@rule
def drop_term(place: Place) -> Iterator[Edit]:
    """a + b -> a, b;  plus(a, b) -> plus(a), plus(b);  t - 1 -> t"""
    if n := arithmetic(place, ast.Add, ast.Sub):
        yield n, place.text(n.left)
        if not isinstance(n.right, ast.Constant):
            yield (
                n,
                place.text(n.right) if isinstance(n.op, ast.Add) else f"(-{place.text(n.right)})",
            )
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
    if (
        isinstance(place.node, ast.Call)
        and called(place.node) in ("mul", "times")
        and len(place.node.args) == 2
    ):
        yield place.node, place.text(place.node.args[0])
        yield place.node, place.text(place.node.args[1])


@rule
def transpose(place: Place) -> Iterator[Edit]:
    """X.T -> X, X @ Y -> Y @ X"""
    n = place.node
    if (
        isinstance(n, ast.Attribute)
        and n.attr == "T"
        and not place.text(n.value).endswith(("rows", "self", "plan"))
    ):
        yield n, place.text(n.value)
    if (
        isinstance(n, ast.Call)
        and called(n) == "t"
        and isinstance(n.func, ast.Attribute)
        and not n.args
    ):
        yield n, place.text(n.func.value)
    if isinstance(n, ast.BinOp) and isinstance(n.op, ast.MatMult):
        yield n, f"({place.text(n.right)} @ {place.text(n.left)})"
    if isinstance(n, ast.Attribute) and n.attr == "W" and isinstance(place.parents[-1], ast.BinOp):
        yield n, f"{place.text(n)}.T"
    if (
        isinstance(n, ast.Name)
        and n.id == "W"
        and isinstance(place.parents[-1], ast.BinOp | ast.Call)
    ):
        outer = place.parents[-1]
        if isinstance(outer, ast.BinOp) or called(outer) in ("mm", "addmm_"):
            yield n, "W.T"


@rule
def step(place: Place) -> Iterator[Edit]:
    """t for t - 1: x[1:] <-> x[:-1], rows.prev(x) -> x[rows.B :], before(x) -> states(x)[1:], x[t]
    -> x[t - 1]
    """
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
        if n.func.attr == "prev_transposed":
            yield n, f"pad({y}, (0, 0, {rows}.B, 0))"
        if n.func.attr == "before":
            yield n, f"{rows}.states({y})[1:]"
    if (
        isinstance(n, ast.Attribute)
        and n.attr == "before"
        and not isinstance(place.parents[-1], ast.Call)
    ):
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
    """None for one of the results of a backward or jvp, one entry less in a table of paths, a
    detach() left out
    """
    n = place.node
    inside = next((p.name for p in reversed(place.parents) if isinstance(p, ast.FunctionDef)), "")
    if (
        isinstance(n, ast.Return)
        and isinstance(n.value, ast.Tuple)
        and inside in ("backward", "jvp")
    ):
        for e in n.value.elts:
            if place.text(e) != "None":
                yield e, "None"
    if (
        isinstance(n, ast.Tuple)
        and len(n.elts) > 1
        and all(isinstance(e, ast.Tuple) for e in n.elts)
    ):
        for e in n.elts:
            rest = ", ".join(place.text(o) for o in n.elts if o is not e)
            yield n, f"({rest},)"
    if (
        isinstance(n, ast.Call)
        and called(n) in ("read_pull", "unscaled", "linked", "_of")
        and len(n.args) > 1
    ):
        yield n, place.text(n.args[1])
    if (
        isinstance(n, ast.Call)
        and called(n) in ("last", "last_transposed")
        and len(n.args) == 1
        and "rows" in place.text(n.func)
    ):
        y = place.text(n.args[0])
        yield n, f"{y}[: rows.B]" if called(n) == "last" else f"pad({y}, (0, 0, 0, rows.N))"


@rule
def wrong_scale(place: Place) -> Iterator[Edit]:
    """scale(y, k) -> y; mean -> sum; a square, a logarithm, an absolute value left out;
    max -> min
    """
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
        if (
            n.func.attr in ("square", "abs", "exp", "sqrt")
            and not n.args
            and text != f"torch.{n.func.attr}"
        ):
            yield n, place.text(n.func.value)
        if (
            n.func.attr == "sum"
            and len(n.args) == 1
            and place.text(n.args[0]) in ("0", "-1", "(-1)")
        ):
            yield n.func, text.removesuffix("sum") + "mean"
    if called(n) in ("max", "min") and isinstance(n.func, ast.Name) and len(n.args) == 2:
        yield n.func, "min" if called(n) == "max" else "max"
    if called(n) == "mean" and isinstance(n.func, ast.Name) and len(n.args) == 2:
        yield n, f"torch.where({place.text(n.args[1])}, {place.text(n.args[0])}, 0).sum(0)"


@rule
def drop_bound(place: Place) -> Iterator[Edit]:
    """max(a, b) -> a, b; min likewise"""
    n = place.node
    if (
        isinstance(n, ast.Call)
        and isinstance(n.func, ast.Name)
        and n.func.id in ("max", "min")
        and len(n.args) == 2
    ):
        for arg in n.args:
            if not isinstance(arg, ast.Constant):
                yield n, place.text(arg)


@rule
def swap_arguments(place: Place) -> Iterator[Edit]:
    """f(nu, m) -> f(m, nu), return mu, nu -> return nu, mu, for arguments of one kind"""
    n = place.node
    of_return = isinstance(n, ast.Tuple) and isinstance(place.parents[-1], ast.Return)
    # type: ignore[attr-defined]
    args = n.args if isinstance(n, ast.Call) else n.elts if of_return else []
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
        turned = {
            ast.Lt: "<=",
            ast.LtE: "<",
            ast.Gt: ">=",
            ast.GtE: ">",
            ast.Eq: "!=",
            ast.NotEq: "==",
        }.get(type(n.ops[0]))
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


def for_types_alone(node: ast.AST) -> bool:
    """if TYPE_CHECKING: what it guards is never run, whatever it says."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def places(node: ast.AST, source: Source, parents: tuple[ast.AST, ...] = ()) -> Iterator[Place]:
    """Every place worth a mutant: not annotations, messages, imports, nor what only guards an
    error.
    """
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.FunctionDef) and node.name in WORDING:
        return
    if isinstance(node, ast.Call) and called(node) in WORDING:
        return
    if not for_types_alone(node):
        yield Place(node, parents, source)
    for part, value in ast.iter_fields(node):
        if for_types_alone(node) and part != "orelse":
            continue
        if part in (
            "annotation",
            "returns",
            "decorator_list",
            "type_comment",
            "defaults",
            "kw_defaults",
        ):
            continue
        if isinstance(node, ast.If | ast.For) and only_raises(node.body) and part != "orelse":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from places(child, source, (*parents, node))

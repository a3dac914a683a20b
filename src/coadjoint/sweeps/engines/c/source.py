"""A cell's formula as C: elementwise loops, put together with the templates that all cells share.

vectors.h       vectors of numbers and the functions a formula may use, threads
product.h       a product with a packed matrix
loops.h         the three loops over time
dense.h         the tangents of dense layers
points.h        one elementwise loop over rows
affine.h        y_i M' + b for all rows
row_products.h  sums over rows of products, the gradients by weights
per_sample.h    what is computed once for each sample
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import torch

from ....cells.cell import Cell
from ....cells.formula import (
    EXPENSIVE,
    ZERO,
    Node,
    add,
    loop_invariants,
    pull,
    symbol,
    walk,
)
from ....cells.program import write_code
from ...pointwise import Pointwise
from ..expressions import (
    AdjointStep,
    adjoint_step,
    hoisted_terms,
    input_groups,
    tangent_step,
)

FUNCTIONS = (
    "tanh", "sigmoid", "softplus", "exp", "expm1", "log", "log1p", "sqrt", "sin", "cos", "erf",
    "atan", "relu", "sign", "step",
)  # fmt: skip  # those of vectors.h, where their names end with an underscore
OPERATIONS = {name: name + "_({0})" for name in FUNCTIONS} | {
    "add": "({0} + {1})",
    "sub": "({0} - {1})",
    "mul": "({0} * {1})",
    "div": "({0} / {1})",
    "neg": "(-{0})",
    "const": "all({value})",
    "power": "power_({0}, {value})",
    "abs": "magnitude({0})",
    "held": "({0})",
    "tanh_slope": "((1 - {0}) * (1 + {0}))",
    "sigmoid_slope": "({0} * (1 - {0}))",
}


class Array(NamedTuple):
    """An array of a loop: its name in C, and the nodes that each row holds side by side.

    uniform    it has one row, the same for all
    optional   it may be missing, and counts as zeros then
    """

    name: str
    nodes: tuple[Node, ...]
    uniform: bool = False
    optional: bool = False

    def place(self) -> str:
        """The address of unit j of row i as a C expression; a null pointer if it is missing."""
        place = f"{self.name} + j"
        if not self.uniform:
            place = f"{self.name} + i * {len(self.nodes)} * d + j"
        if self.optional or not self.nodes:
            return f"{self.name} ? {place} : 0"
        return place

    def load(self, entry: int) -> str:
        """The vector of n values of its node number `entry` as a C expression; zeros if missing."""
        value = f"get({self.name} + {entry} * d, n)"
        return f"{self.name} ? {value} : all(0)" if self.optional else value


def elementwise_loop(
    name: str,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    skip: frozenset[tuple[str, int]] = frozenset(),
) -> str:
    """The C function `name` that computes the outputs' nodes from the inputs' nodes, row by row.

    In C: m rows of d units; `{name}_at` computes units j .. j + n - 1 of row i, as one vector of
    n <= L numbers.

    skip: (array name, entry) of outputs that are not written.
    """
    names: dict[Node, str] = {}  # of the C variables that hold the inputs
    for array in inputs:
        for i, node in enumerate(array.nodes):
            names[node] = f"{array.name}{i}"
    targets: list[tuple[Array, int]] = []
    nodes: list[Node] = []
    for array in outputs:
        for i, node in enumerate(array.nodes):
            if (array.name, i) not in skip:
                targets.append((array, i))
                nodes.append(node)
    needed = {n for n in walk(nodes, frozenset(names)) if n in names}  # inputs that are loaded
    lines, results = write_code(nodes, names, OPERATIONS, "const vec {0} = {1};")
    body = []
    for array in inputs:
        for i, node in enumerate(array.nodes):
            if node in needed:
                body.append(f"const vec {names[node]} = {array.load(i)};")
    body += lines
    for (array, i), result in zip(targets, results, strict=True):
        body.append(f"put({array.name} + {i} * d, {result}, n);")
    arrays = (*inputs, *outputs)
    parameters = [f"const real *{array.name}" for array in inputs]
    parameters += [f"real *{array.name}" for array in outputs]
    listed = ", ".join(parameters)
    passed = ", ".join(array.place() for array in arrays)
    # If every array has one node and a row of its own for each i, the m rows lie end to end: they
    # are taken for one row of m d units, so that no vector is cut short at the end of each row.
    is_one_row = all(len(y.nodes) <= 1 and not (y.uniform and y.nodes) for y in arrays)
    return f"""
INLINE void {name}_at(long d, long n, {listed}) {{
    {(chr(10) + "    ").join(body)}
}}
static void {name}(long m, long d, {listed}) {{
    {"d *= m, m = m > 0;" if is_one_row else ""}
    for (long i = 0; i < m; i++) {{
        long j = 0;
        for (; j + L <= d; j += L) {name}_at(d, L, {passed});
        if (j < d) {name}_at(d, d - j, {passed});
    }}
}}
"""


@functools.cache
def read_template(name: str) -> str:
    """The text of a file in this folder."""
    return files(__package__).joinpath(name).read_text()


def is_costly(node: Node) -> bool:
    """Whether a term has a function or a power in it, which cost more than passing its value."""
    return any(n.op in (*EXPENSIVE, "power") for n in walk([node]))


@functools.cache
def costly_parameter_terms(cell: Cell) -> tuple[Node, ...]:
    """Costly terms of a cell's steps that depend on its parameters p alone.

    They are computed once before a loop over time and passed to it beside p.
    """
    back = adjoint_step(cell)
    along = tangent_step(cell)
    outputs = (*cell.next, *cell.saved_nodes, *back.into_a, *back.into_x, *along.out)
    moving = (*back.lam, *back.rbar, *along.mu, *along.nu, *cell.a, *cell.v, *cell.x)
    parameter_terms, _ = hoisted_terms(cell, outputs, moving, frozenset())
    return tuple(n for n in parameter_terms if is_costly(n))


def _defines(cell: Cell, back: AdjointStep, dtype: torch.dtype) -> str:
    """The macros that loops.h expects of a cell, as lines of C. back: its adjoint step."""
    slot = -1 if cell.read_slot is None else cell.read_slot
    counts = {
        "REAL_IS_DOUBLE": int(dtype == torch.float64),
        "SLOTS": len(cell.slots),
        "GATES": len(cell.gates),
        "READS": len(cell.read),
        "KEPT": len(cell.saved_nodes),
        "SIDE": len(cell.v),
        "READ_SLOT": slot,
        "NEEDS_A": int(cell.needs_a),
        "INTO_READ": int(_enters_read_slot(cell, back)),
    }
    return "".join(f"#define {name} {value}\n" for name, value in counts.items())


def _enters_read_slot(cell: Cell, back: AdjointStep) -> bool:
    """Whether f_x' lam enters the slot that W reads, so that the product is added to it."""
    slot = cell.read_slot
    return slot is not None and bool(cell.read) and back.into_x[slot] is not ZERO


def next_nodes(cell: Cell) -> tuple[Node, ...]:
    """The nodes of x_t where a loop reads it (as y) instead of computing it again.

    A next state that is only a copy of an input has no formula: a symbol stands for it in y, and
    the input itself is read.
    """
    return tuple(n if n.args else symbol(f"y.{i}") for i, n in enumerate(cell.next))


def cell_source(cell: Cell, dtype: torch.dtype) -> str:
    """The cell's three loops over time in C: macros, templates, and six elementwise loops.

    The names of arrays and the order of arguments are those of the declarations in loops.h.
    """
    back = adjoint_step(cell)
    along = tangent_step(cell)
    parameters = (*cell.p, *costly_parameter_terms(cell))
    y = Array("y", next_nodes(cell))
    q = Array("q", cell.saved_nodes)
    inputs = [Array("a", cell.a), Array("v", cell.v), Array("x", cell.x)]
    inputs.append(Array("p", parameters, uniform=True))
    saved = [y, q, *inputs]
    lam = Array("lam", back.lam)
    sa = Array("sa", back.sa, optional=True)
    delta = Array("delta", tuple(map(add, back.into_a, back.sa)))
    mu = Array("mu", along.mu)
    nu = Array("nu", along.nu)
    g = Array("g", along.g, optional=True)
    out = Array("out", tuple(map(add, along.out, along.g)))
    x = Array("x", cell.x)
    rbar = Array("rbar", back.rbar)
    held = Array("held", back.so_far)  # f_x' lam, from `pull`
    total = Array("into", tuple(map(add, back.so_far, back.through_read)))  # held + r' rbar
    skip: frozenset[tuple[str, int]] = frozenset()
    if cell.read and cell.read_slot is not None and not _enters_read_slot(cell, back):
        skip = frozenset({("into", cell.read_slot)})  # the product with W writes it
    loops = [
        elementwise_loop("next", inputs, [Array("y", cell.next), q]),
        elementwise_loop("pull", [*saved, lam, sa], [delta, Array("into", back.into_x)], skip),
        elementwise_loop("push", [*saved, mu, nu, g], [out]),
        elementwise_loop("read", [x], [Array("r", cell.read)]),
        elementwise_loop("read_pull", [x, rbar, held], [total]),
        elementwise_loop("read_push", [x, mu], [Array("r", along.through_read)]),
    ]
    templates = "".join(map(read_template, ("vectors.h", "product.h", "loops.h")))
    return _defines(cell, back, dtype) + templates + "".join(loops)


@functools.cache
def dense_bend(cell: Cell) -> Node:
    """psi''(a) nu lam of x_t = psi(a_t): the gradient by a of <lam_t, psi'(a_t) nu_t>."""
    (bend,) = pull(tangent_step(cell).out, adjoint_step(cell).lam, cell.a)
    return bend


def dense_source(cell: Cell, dtype: torch.dtype) -> str:
    """The loops of dense layers in C, as those of a cell x_t = psi(a_t), and their tangents."""
    along = tangent_step(cell)
    saved = [Array("y", next_nodes(cell)), Array("q", cell.saved_nodes), Array("a", cell.a)]
    inputs = [*saved, Array("x", cell.x), Array("mu", along.mu), Array("nu", along.nu)]
    inputs.append(Array("lam", adjoint_step(cell).lam))
    bend = dense_bend(cell)
    skip = frozenset({("bend", 0)} if bend is ZERO else ())
    outputs = [Array("out", along.out), Array("bend", (bend,), optional=True)]
    loop = elementwise_loop("push_and_bend", inputs, outputs, skip)
    return cell_source(cell, dtype) + read_template("dense.h") + loop


def per_sample_source(dtype: torch.dtype) -> str:
    """What is computed once for each sample in C, for one type of number."""
    text = f"#define REAL_IS_DOUBLE {int(dtype == torch.float64)}\n" + read_template("vectors.h")
    return text + read_template("per_sample.h")


def row_products_source(dtype: torch.dtype) -> str:
    """Products over rows in C, for one type of number."""
    text = f"#define REAL_IS_DOUBLE {int(dtype == torch.float64)}\n"
    names = ("vectors.h", "product.h", "affine.h", "row_products.h")
    return text + "".join(map(read_template, names))


class PointwiseSource(NamedTuple):
    """A Pointwise as C, and the terms that it is given beside its inputs."""

    text: str
    uniform_terms: tuple[Node, ...]  # costly, made of the uniform inputs alone


def pointwise_source(
    op: Pointwise, present: tuple[bool, ...], dtype: torch.dtype
) -> PointwiseSource:
    """The elementwise loop of `op` in C.

    Terms that are the same for all rows and costly are not computed in each: the caller computes
    them beforehand, and passes them in the array `once`.

    present: for each array of op.known and op.inputs, whether it is given (input_groups).
    """
    inputs: list[Array] = []
    with_rows: set[Node] = set()  # input nodes that differ from row to row
    for i, ((name, nodes), given) in enumerate(zip(input_groups(op), present, strict=True)):
        if not given:
            continue
        if name is None:
            # Saved values. One that is only a copy of an input is that input's node, and the input
            # is read instead. A symbol that no formula has takes the place of the copy.
            nodes = tuple(n if n.args else symbol(f"copy.{i}.{j}") for j, n in enumerate(nodes))
        inputs.append(Array(f"in{i}_", nodes, uniform=name in op.uniform))
        if name not in op.uniform:
            with_rows.update(nodes)
    outputs: list[Array] = []
    for i, (name, nodes) in enumerate(op.outputs):
        if name in op.nonzero_outputs:
            outputs.append(Array(f"out{i}_", nodes))
    output_nodes = [n for array in outputs for n in array.nodes]
    invariants = loop_invariants(output_nodes, with_rows, frozenset(with_rows))
    uniform_terms = tuple(n for n in invariants if is_costly(n))
    inputs.append(Array("once", uniform_terms, uniform=True))
    # For points.h: the arguments of a thread that begins at row lo.
    shifted = []
    for i, array in enumerate((*inputs, *outputs)):
        shift = "" if array.uniform else f" + (lo) * {len(array.nodes)} * d"
        shifted.append(f"y[{i}]{shift}")
    text = f"#define REAL_IS_DOUBLE {int(dtype == torch.float64)}\n" + read_template("vectors.h")
    text += elementwise_loop("points", inputs, outputs)
    text += f"#define SHIFTED(lo) {', '.join(shifted)}\n" + read_template("points.h")
    return PointwiseSource(text, uniform_terms)

"""The engine of compiled loops: C made from the cell's formula, by the system's compiler.

Each thread takes some of the samples through all time steps; a step is one product with W, by a kernel of our own, and
one elementwise loop. vectors.h has the vectors and their functions, loops.h the product and the three loops.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....cells.cell import Cell
from ....cells.formula import (
    EXPENSIVE,
    ZERO,
    Node,
    add,
    evaluate_nodes,
    loop_invariants,
    symbol,
    walk,
)
from ....cells.program import write_code
from ....errors import Unsupported
from ...memory import empty
from ...plan import Saved, SweepPlan
from ...pointers import pointers
from ...pointwise import Pointwise
from ...rows import Link, Rows
from ..expressions import adjoint_step, hoisted_terms, tangent_step
from . import compiler

OPERATIONS = {
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
    **{
        name: name + "_({0})"
        for name in (
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
            "relu",
            "sign",
            "step",
        )
    },
}
WORK_PER_THREAD = 10_000_000  # operations that are worth a thread
MOST_THREADS = 64  # threads
FIELDS = ctypes.c_int64 * 21  # struct sweep
ARRAY_NAMES = (
    "starts", "p", "W", "v", "a", "x", "q", "base", "s", "s_last", "k_last", "link", "lam", "delta", "k",
)  # fmt: skip  # the arrays of struct sweep
CPU = torch.device("cpu")


def refusal(device: str) -> str | None:
    if device != "cpu":
        return f"runs on the CPU, and the data is on {device}. Use engine='auto'."
    missing = compiler.compiler_setup().refusal
    return missing and f"{missing}. Install gcc or clang, set $CC, or use engine='eager'."


def describe() -> str:
    """What compiles the loops."""
    found, flags, refusal = compiler.compiler_setup()
    return f"{os.path.basename(found.command[0])} {' '.join(flags)}" if found else str(refusal)


class Array(NamedTuple):
    """An array of a loop: its name in C, the nodes that a row holds side by side, and where it lies.

    each: "row", or "unit": the same for all rows; optional: may be missing, and is zero then."""

    name: str
    nodes: tuple[Node, ...]
    each: str = "row"
    optional: bool = False


def elementwise_loop(
    name: str,
    inputs: Sequence[Array],
    outputs: Sequence[Array],
    skip: frozenset[tuple[str, int]] = frozenset(),
) -> str:
    """The elementwise loop that computes the outputs' nodes from the inputs', in C. skip: entries not to be written."""
    names = {n: f"{y.name}{i}" for y in inputs for i, n in enumerate(y.nodes)}
    targets = [(y, i, n) for y in outputs for i, n in enumerate(y.nodes) if (y.name, i) not in skip]
    wanted = {n for n in walk([n for *_, n in targets], frozenset(names)) if n in names}
    lines, found = write_code([n for *_, n in targets], names, OPERATIONS, "const vec {0} = {1};")
    loads = []
    for y in inputs:
        for i, n in enumerate(y.nodes):
            if n in wanted:
                value = f"get({y.name} + {i} * d, n)"
                loads.append(
                    f"const vec {names[n]} = {f'{y.name} ? {value} : all(0)' if y.optional else value};"
                )
    stores = [
        f"put({y.name} + {i} * d, {text}, n);"
        for (y, i, _), text in zip(targets, found, strict=True)
    ]
    taken = "long d, long n, " + ", ".join(
        [*(f"const real *{y.name}" for y in inputs), *(f"real *{y.name}" for y in outputs)]
    )
    everything = (*inputs, *outputs)
    flat = all(len(y.nodes) <= 1 and (y.each == "row" or not y.nodes) for y in everything)

    def at(y: Array) -> str:
        place = f"{y.name} + j" if y.each == "unit" else f"{y.name} + i * {len(y.nodes)} * d + j"
        return f"{y.name} ? {place} : 0" if y.optional or not y.nodes else place

    passed = ", ".join(map(at, everything))
    return f"""
INLINE void {name}_at({taken}) {{
    {(chr(10) + "    ").join([*loads, *lines, *stores])}
}}
static void {name}({taken.replace("long d, long n", "long m, long d")}) {{
    {"d *= m, m = m > 0;" if flat else ""}
    for (long i = 0; i < m; i++) {{
        long j = 0;
        for (; j + L <= d; j += L) {name}_at(d, L, {passed});
        if (j < d) {name}_at(d, d - j, {passed});
    }}
}}
"""


@functools.cache
def read_template(name: str) -> str:
    return files(__package__).joinpath(name).read_text()


class CompiledLoops(NamedTuple):
    """The compiled loops of a cell."""

    forward: Any
    adjoint: Any
    tangent: Any
    once: tuple[Node, ...]  # made of the parameters alone, and handed over beside them
    dtype: torch.dtype


@functools.cache
def costly_parameter_terms(cell: Cell) -> tuple[Node, ...]:
    """What the loops need, is made of the parameters alone and is dear."""
    b, f = adjoint_step(cell), tangent_step(cell)
    outputs = (*cell.next, *cell.saved_nodes, *b.into_a, *b.into_x, *f.out)
    moving = (*b.lam, *b.rbar, *f.mu, *f.nu, *cell.a, *cell.v, *cell.x)
    once, _ = hoisted_terms(cell, outputs, moving, frozenset())
    return tuple(n for n in once if is_costly(n))


def is_costly(n: Node) -> bool:
    return any(m.op in (*EXPENSIVE, "power") for m in walk([n]))


def cell_source(cell: Cell, dtype: torch.dtype) -> str:
    """The cell's loops in C."""
    b, f, once = adjoint_step(cell), tangent_step(cell), costly_parameter_terms(cell)
    slot = -1 if cell.read_slot is None else cell.read_slot
    known = [Array("y", tuple(n if n.args else symbol(f"y.{i}") for i, n in enumerate(cell.next)))]
    known += [
        Array("q", cell.saved_nodes),
        Array("a", cell.a),
        Array("v", cell.v),
        Array("x", cell.x),
    ]
    known += [Array("p", (*cell.p, *once), "unit")]
    reads = bool(cell.read)
    into_read = slot >= 0 and reads and b.into_x[slot] is not ZERO
    counts = {
        "REAL_IS_DOUBLE": int(dtype == torch.float64),
        "SLOTS": len(cell.slots),
        "GATES": len(cell.gates),
        "READS": len(cell.read),
        "KEPT": len(cell.saved_nodes),
        "SIDE": len(cell.v),
        "READ_SLOT": slot,
        "NEEDS_A": int(cell.needs_a),
        "INTO_READ": int(into_read),
    }
    skip = frozenset({("into", slot)} if reads and slot >= 0 and not into_read else ())
    delta = Array("delta", tuple(map(add, b.into_a, b.sa)))
    loops = [
        elementwise_loop("next", known[2:], [Array("y", cell.next), Array("q", cell.saved_nodes)]),
        elementwise_loop(
            "pull",
            [*known, Array("lam", b.lam), Array("sa", b.sa, optional=True)],
            [delta, Array("into", b.into_x)],
            skip,
        ),
        elementwise_loop(
            "push",
            [*known, Array("mu", f.mu), Array("nu", f.nu), Array("g", f.g, optional=True)],
            [Array("out", tuple(map(add, f.out, f.g)))],
        ),
    ]
    x, rbar, held = Array("x", cell.x), Array("rbar", b.rbar), Array("held", b.so_far)
    loops += [
        elementwise_loop("read", [x], [Array("r", cell.read)]),
        elementwise_loop(
            "read_pull", [x, rbar, held], [Array("into", tuple(map(add, b.so_far, b.through_read)))]
        ),
        elementwise_loop("read_push", [x, Array("mu", f.mu)], [Array("r", f.through_read)]),
    ]
    defined = "".join(f"#define {name} {value}\n" for name, value in counts.items())
    return defined + read_template("vectors.h") + read_template("loops.h") + "".join(loops)


@functools.cache
def compiled_loops(cell: Cell, dtype: torch.dtype) -> CompiledLoops:
    if dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"engine 'cpu' computes in float32 or float64; got {str(dtype)[6:]}.")
    lib = compiler.library(cell_source(cell, dtype))
    return CompiledLoops(lib.forward, lib.adjoint, lib.tangent, costly_parameter_terms(cell), dtype)


class CompiledPointwise(NamedTuple):
    """A compiled Pointwise: its loop, and what it is given beside its inputs."""

    run: Any
    once: tuple[Node, ...]  # made of the uniform inputs alone and dear


@functools.cache
def compiled_pointwise(
    op: Pointwise, present: tuple[bool, ...], dtype: torch.dtype
) -> CompiledPointwise:
    """present: which of op.known and op.inputs are given."""
    inputs: list[Array] = []
    taken: set[Node] = set()  # what has rows
    for i, ((name, nodes), given) in enumerate(
        zip([*((None, y) for y in op.known), *op.inputs], present, strict=True)
    ):
        if given:  # a known state that is only a copy has no name of its own
            nodes = tuple(
                n if name or n.args else symbol(f"copy.{i}.{j}") for j, n in enumerate(nodes)
            )
            inputs.append(Array(f"in{i}_", nodes, "unit" if name in op.uniform else "row"))
            taken |= set() if name in op.uniform else set(nodes)
    outputs = [
        Array(f"out{i}_", nodes)
        for i, (name, nodes) in enumerate(op.outputs)
        if name in op.nonzero_outputs
    ]
    flat = [n for y in outputs for n in y.nodes]
    once = tuple(n for n in loop_invariants(flat, taken, frozenset(taken)) if is_costly(n))
    arrays = [*inputs, Array("once", once, "unit"), *outputs]
    moved = lambda i, y: f"y[{i}]" + ("" if y.each == "unit" else f" + (lo) * {len(y.nodes)} * d")
    shifted = ", ".join(moved(i, y) for i, y in enumerate(arrays))
    text = f"#define REAL_IS_DOUBLE {int(dtype == torch.float64)}\n" + read_template("vectors.h")
    text += (
        elementwise_loop("points", arrays[: len(inputs) + 1], outputs)
        + f"#define SHIFTED(lo) {shifted}\n"
        + read_template("points.h")
    )
    run = compiler.library(text).run
    run.argtypes, run.restype = [ctypes.c_int64] * 3 + [ctypes.c_void_p], None
    return CompiledPointwise(run, once)


def pointwise(
    op: Pointwise,
    rows: Rows | None,
    at_hand: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
) -> list[Tensor]:
    """The outputs of `op` that are not identically zero, row by row."""
    groups = [*((None, y) for y in op.known), *op.inputs]
    given = [
        (*group, y) for group, y in zip(groups, (*at_hand, *tensors), strict=True) if y is not None
    ]
    like, width = next(
        (y, len(nodes)) for name, nodes, y in given if name is not None and name not in op.uniform
    )
    d, count = like.shape[1] // width, like.shape[0]
    run, once = compiled_pointwise(
        op, tuple(y is not None for y in (*at_hand, *tensors)), like.dtype
    )
    extra = like.new_empty(0)
    if once:
        fixed = {
            n: part
            for name, nodes, y in given
            if name in op.uniform
            for n, part in zip(nodes, y.split(d), strict=True)
        }
        extra = torch.cat(
            [torch.as_tensor(y, dtype=like.dtype).expand(d) for y in evaluate_nodes(once, fixed)]
        )
    outputs = [
        empty((count, d * len(nodes)), like)
        for name, nodes in op.outputs
        if name in op.nonzero_outputs
    ]
    arrays = [*(y for *_, y in given), extra, *outputs]
    entries = sum(y.shape[-1] for y in arrays) // d
    threads = max(
        1,
        min(
            torch.get_num_threads(),
            MOST_THREADS,
            count,
            20 * count * d * entries // WORK_PER_THREAD,
        ),
    )
    names, sizes = op.expected_sizes([(name, nodes) for name, nodes, _ in given], count, d)
    names.insert(len(given), "once")
    sizes.insert(len(given), len(once) * d)
    found = pointers(names, arrays, sizes, [like.dtype] * len(arrays), CPU)
    run(count, d, threads, (ctypes.c_void_p * len(arrays))(*found.addresses))
    return outputs


def run(
    sweep: Any,
    plan: SweepPlan,
    loops: CompiledLoops,
    p: Tensor | None,
    d: int,
    flags: tuple[int, int],
    arrays: Sequence[Tensor | None],
) -> None:
    """Calls a loop. flags: scaled, and keep: is there a row of lam or mu for every state? arrays: those of struct sweep after
    p, handed over as pointers to their contiguous values."""
    cell, rows, once = plan.cell, plan.rows, loops.once
    if once and p is not None:
        values = dict(zip(cell.p, p.chunk(len(cell.p)), strict=True))
        p = torch.cat(
            [p, *(torch.as_tensor(y, dtype=p.dtype) for y in evaluate_nodes(once, values))]
        )
    starts = None if rows.uniform else torch.tensor(rows.starts)
    work = rows.N * d * (2 * d * len(cell.gates) * max(1, len(cell.read)) + 100)
    threads = max(1, min(torch.get_num_threads(), MOST_THREADS, work // WORK_PER_THREAD))
    sizes = array_sizes(plan, loops, d, bool(flags[1]))
    found = pointers(ARRAY_NAMES, (starts, p, *arrays), sizes, array_dtypes(loops.dtype), CPU)
    if sweep(FIELDS(rows.T, rows.B, d, threads, *flags, *found.addresses)):
        raise MemoryError("no memory for the sweep's weights.")


def array_sizes(plan: SweepPlan, loops: CompiledLoops, d: int, keep: bool) -> tuple[int, ...]:
    """How many values the arrays of struct sweep have."""
    cell, B, N = plan.cell, plan.rows.B, plan.rows.N
    gates, slots = len(cell.gates) * d, len(cell.slots) * d
    return (
        plan.rows.T + 1,
        (len(cell.p) + len(loops.once)) * d,
        gates * len(cell.read) * d,
        N * len(cell.v) * d,
        N * gates,
        (B + N) * slots,
        N * len(cell.saved_nodes) * d,
        N * gates,
        (B + N) * slots,
        B * slots,
        B,
        N,
        (B + N if keep else 2 * B) * slots,
        N * gates,
        B + N,
    )


@functools.cache
def array_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The types of the arrays of struct sweep."""
    integers = {"starts": torch.int64, "k_last": torch.int32, "k": torch.int32}
    return tuple(integers.get(name, dtype) for name in ARRAY_NAMES)


@torch.no_grad()
def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    cell, rows, loops = plan.cell, plan.rows, compiled_loops(plan.cell, base.dtype)
    d = x0.shape[1] // len(cell.slots)
    x = empty((rows.B + rows.N, x0.shape[1]), base)
    x[: rows.B] = x0
    q = empty((rows.N, d * len(cell.saved_nodes)), base) if cell.saved_nodes else None
    a = base.clone() if W is None and cell.needs_a else empty(base.shape, base)
    run(loops.forward, plan, loops, p, d, (0, 1), (W, v, a, x, q, base, *[None] * 7))
    return x, a, q


@torch.no_grad()
def adjoint(
    plan: SweepPlan, saved: Saved, W: Tensor | None, s: Tensor | None, s_last: Tensor | None, sa: Tensor | None,
    link: Link | None, scaled: bool, keep: bool, k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    cell, rows, loops = plan.cell, plan.rows, compiled_loops(plan.cell, saved.x.dtype)
    n = saved.x.shape[1]
    lam, delta = (
        empty(saved.x.shape if keep else (2 * rows.B, n), saved.x),
        empty(saved.a.shape, saved.x),
    )
    k = torch.empty(rows.B + rows.N, dtype=torch.int32) if scaled else None
    W, factor = W if adjoint_step(cell).uses_W else None, None if link is None else link.factor
    arrays = (W, saved.v, saved.a, saved.x, saved.q, sa, s, s_last, k_last, factor, lam, delta, k)
    run(loops.adjoint, plan, loops, saved.p, n // len(cell.slots), (scaled, keep), arrays)
    return lam, delta, k


@torch.no_grad()
def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None,
) -> tuple[Tensor, Tensor]:
    cell, loops, W = (
        plan.cell,
        compiled_loops(plan.cell, saved.x.dtype),
        W if tangent_step(plan.cell).uses_W else None,
    )
    mu, nu = empty(saved.x.shape, saved.x), empty(saved.a.shape, saved.x)
    factor, d = None if link is None else link.factor, saved.x.shape[1] // len(cell.slots)
    arrays = (W, saved.v, saved.a, saved.x, saved.q, ga, g, None, None, factor, mu, nu, None)
    run(loops.tangent, plan, loops, saved.p, d, (0, 1), arrays)
    return mu, nu

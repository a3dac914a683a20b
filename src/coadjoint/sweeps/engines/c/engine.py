"""Engine `cpu`: compiled loops, in C made from the cell's formula by the system's compiler.

Each thread takes some of the samples through all time steps; a step is one product with W, by our
own kernel, and one elementwise loop.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ....cells.cell import Cell
from ....cells.formula import ZERO, Node, evaluate_nodes
from ....errors import Unsupported
from ...functions import without_graph
from ...memory import empty
from ...plan import Saved, SweepPlan
from ...pointers import pointers
from ...rows import Link
from ...weights import is_by_step
from ..expressions import adjoint_step, tangent_step
from . import compiler
from .points import pointwise
from .source import cell_source, costly_parameter_terms, dense_bend, dense_source
from .threads import thread_count

__all__ = [
    "adjoint",
    "dense_tangent",
    "forward",
    "forward_from_inputs",
    "layer_gradients",
    "pointwise",
    "refusal",
    "takes_biases",
    "tangent",
]

# The arrays of struct sweep in loops.h, after its numbers. Each loop uses some of them: the
# tangent has g for s, ga for base, mu for lam and nu for delta; the adjoint has sa for base. The
# costates and rates are of dense_tangent alone, and the last three of forward_from_inputs.
ARRAY_NAMES = (
    "starts", "p", "W", "v", "a", "x", "q", "base", "s", "s_last", "k_last", "link", "lam",
    "delta", "k", "costates", "rates", "u", "R", "b",
)  # fmt: skip
NUMBERS = 9  # T, B, d, threads, scaled, keep, W_step, shared, width
FIELDS = ctypes.c_int64 * (NUMBERS + len(ARRAY_NAMES))
CPU = torch.device("cpu")
takes_biases = True  # `forward` takes base with a row for each step
Sweep = Callable[[ctypes.Array[ctypes.c_int64]], int]  # returns 1 if there is no memory


def refusal(device: str) -> str | None:
    """Why it cannot run on a device, as the end of a sentence; None if it can."""
    if device != "cpu":
        return f"runs on the CPU, but the data is on {device}. Use engine='auto'."
    missing = compiler.compiler_setup().refusal
    if missing is None:
        return None
    return f"{missing}. Install gcc or clang, set $CC, or use engine='eager'."


def describe() -> str:
    """The compiler and its flags in words, or why there is none."""
    working, flags, refusal = compiler.compiler_setup()
    if working is None:
        return str(refusal)
    return f"{os.path.basename(working.command[0])} {' '.join(flags)}"


class CompiledLoops(NamedTuple):
    """The compiled loops of a cell."""

    forward: Sweep
    adjoint: Sweep
    tangent: Sweep
    parameter_terms: tuple[Node, ...]  # made of the parameters alone, and passed beside them
    dtype: torch.dtype


@functools.cache
def compiled_loops(cell: Cell, dtype: torch.dtype) -> CompiledLoops:
    """Compile the loops of a cell, or load those that were compiled before."""
    if dtype not in (torch.float32, torch.float64):
        raise Unsupported(f"engine 'cpu' computes in float32 or float64; got {str(dtype)[6:]}.")
    lib = compiler.library(cell_source(cell, dtype))
    terms = costly_parameter_terms(cell)
    return CompiledLoops(lib.forward, lib.adjoint, lib.tangent, terms, dtype)


def run(
    sweep: Sweep,
    plan: SweepPlan,
    loops: CompiledLoops,
    p: Tensor | None,
    d: int,
    flags: tuple[int, int],
    arrays: Sequence[Tensor | None],
) -> None:
    """Call a compiled loop over time, which writes its results into some of the arrays.

    loops    what `sweep` is one of
    flags    (scaled, keep); scaled: lam has exponents; keep: lam or mu has a row for every state
    arrays   those of struct sweep after p, see ARRAY_NAMES; None where the loop needs none, and
             nothing at all for the last ones
    """
    arrays = (*arrays, *[None] * (len(ARRAY_NAMES) - 2 - len(arrays)))
    cell = plan.cell
    rows = plan.rows
    if loops.parameter_terms and p is not None:  # the loop reads these terms after p
        known = dict(zip(cell.p, p.chunk(len(cell.p)), strict=True))
        values = evaluate_nodes(loops.parameter_terms, known)
        p = torch.cat([p, *(torch.as_tensor(y, dtype=p.dtype) for y in values)])
    starts = None if rows.uniform else torch.tensor(rows.starts)
    # For each unit of each step row: the product with W, and about 100 operations of the formula.
    work = rows.N * d * (2 * d * len(cell.gates) * max(1, len(cell.read)) + 100)
    W = arrays[0]
    base = arrays[5]
    by_step = W is not None and is_by_step(W)
    shared = base is not None and len(base) != rows.N  # a bias for each step
    threads = thread_count(work, by_step=by_step)  # they share the samples
    u = arrays[ARRAY_NAMES.index("u") - 2]
    inputs = 0 if u is None else u.shape[1]
    sizes = array_sizes(plan, loops, d, bool(flags[1]), by_step, shared, inputs)
    dtypes = array_dtypes(loops.dtype)
    # `held` keeps the tensors alive as long as their addresses are used.
    held = pointers(ARRAY_NAMES, (starts, p, *arrays), sizes, dtypes, CPU)
    W_step = len(cell.gates) * d * len(cell.read) * d if by_step else 0
    if sweep(FIELDS(rows.T, rows.B, d, threads, *flags, W_step, shared, inputs, *held.addresses)):
        raise MemoryError("not enough memory for the sweep's weights.")


def array_sizes(
    plan: SweepPlan,
    loops: CompiledLoops,
    d: int,
    keep: bool,
    by_step: bool,
    shared: bool,
    inputs: int,
) -> tuple[int, ...]:
    """How many values the arrays of struct sweep have, in the order of ARRAY_NAMES.

    keep: lam has a row for every state; otherwise two states take turns. by_step: W has a matrix
    for each step. shared: base has a row for each step. inputs: the width of u.
    """
    cell = plan.cell
    B = plan.rows.B
    N = plan.rows.N
    gates = len(cell.gates) * d
    slots = len(cell.slots) * d
    states = (B + N) * slots
    return (
        plan.rows.T + 1,  # starts
        (len(cell.p) + len(loops.parameter_terms)) * d,  # p
        gates * len(cell.read) * d * (plan.rows.T if by_step else 1),  # W
        N * len(cell.v) * d,  # v
        N * gates,  # a
        states,  # x
        N * len(cell.saved_nodes) * d,  # q
        plan.rows.T * gates if shared else N * gates,  # base
        states,  # s
        B * slots,  # s_last
        B,  # k_last
        N,  # link
        states if keep else 2 * B * slots,  # lam
        N * gates,  # delta
        B + N,  # k
        states,  # costates
        B + N,  # rates
        N * inputs,  # u
        gates * inputs,  # R
        gates,  # b
    )


@functools.cache
def array_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The types of the arrays of struct sweep, in the order of ARRAY_NAMES; dtype: of real ones."""
    integers = {"starts": torch.int64, "k_last": torch.int32, "k": torch.int32}
    return tuple(integers.get(name, dtype) for name in ARRAY_NAMES)


@without_graph
def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward loop of Engine, in C. Where no derivative reads a, it is not written.

    base may have one row for each step, [T, g d], which its samples share, if W is by step.
    """
    loops = compiled_loops(plan.cell, x0.dtype)
    x, a, q, d = arrays_of_forward(plan, x0)
    if W is None and plan.cell.needs_a:  # a is base; where no derivative reads it, it stays unset
        a = base.clone()
    run(loops.forward, plan, loops, p, d, (0, 1), (W, v, a, x, q, base))  # not scaled
    return x, a, q


@without_graph
def forward_from_inputs(
    plan: SweepPlan,
    u: Tensor,
    R: Tensor,
    b: Tensor | None,
    v: Tensor | None,
    W: Tensor | None,
    x0: Tensor,
    p: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward loop with base = R u + b, which is never written: u [N, .], R [g d, .], b [g d].

    With the bits of `forward` and affine_rows.
    """
    loops = compiled_loops(plan.cell, x0.dtype)
    x, a, q, d = arrays_of_forward(plan, x0)
    sources = (*[None] * 10, u, R, b)  # of ARRAY_NAMES, from base on
    run(loops.forward, plan, loops, p, d, (0, 1), (W, v, a, x, q, *sources))  # not scaled
    return x, a, q


def arrays_of_forward(plan: SweepPlan, x0: Tensor) -> tuple[Tensor, Tensor, Tensor | None, int]:
    """(x, a, q) of a forward sweep, of which only x0 is set, and d."""
    cell = plan.cell
    rows = plan.rows
    d = x0.shape[1] // len(cell.slots)
    x = empty((rows.B + rows.N, x0.shape[1]), x0)
    x[: rows.B] = x0
    a = empty((rows.N, d * len(cell.gates)), x0)
    q = empty((rows.N, d * len(cell.saved_nodes)), x0) if cell.saved_nodes else None
    return x, a, q, d


@without_graph
def adjoint(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    s: Tensor | None,
    s_last: Tensor | None,
    sa: Tensor | None,
    link: Link | None,
    scaled: bool,
    keep: bool,
    k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The adjoint loop of Engine, in C.

    keep: where lam is read at the first step alone, it has two states' rows, which take turns.
    """
    cell = plan.cell
    rows = plan.rows
    loops = compiled_loops(cell, saved.x.dtype)
    width = saved.x.shape[1]
    lam_rows = rows.B + rows.N if keep else 2 * rows.B
    lam = empty((lam_rows, width), saved.x)
    delta = empty(saved.a.shape, saved.x)
    k = torch.empty(rows.B + rows.N, dtype=torch.int32) if scaled else None
    if not adjoint_step(cell).uses_W:  # what W reads is constant: nothing comes back through it
        W = None
    factor = None if link is None else link.factor
    # In the order of ARRAY_NAMES, after p: sa stands for base.
    sources = (sa, s, s_last, k_last, factor)
    arrays = (W, saved.v, saved.a, saved.x, saved.q, *sources, lam, delta, k)
    run(loops.adjoint, plan, loops, saved.p, width // len(cell.slots), (scaled, keep), arrays)
    return lam, delta, k


@without_graph
def tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor | None,
    g: Tensor | None,
    ga: Tensor | None,
    link: Link | None,
) -> tuple[Tensor, Tensor]:
    """The tangent loop of Engine, in C."""
    cell = plan.cell
    loops = compiled_loops(cell, saved.x.dtype)
    d = saved.x.shape[1] // len(cell.slots)
    mu = empty(saved.x.shape, saved.x)
    nu = empty(saved.a.shape, saved.x)
    if not tangent_step(cell).uses_W:  # what W reads is constant: no direction goes through it
        W = None
    factor = None if link is None else link.factor
    # In the order of ARRAY_NAMES, after p: g stands for s, ga for base, mu for lam, nu for delta.
    sources = (ga, g, None, None, factor)
    arrays = (W, saved.v, saved.a, saved.x, saved.q, *sources, mu, nu)
    run(loops.tangent, plan, loops, saved.p, d, (0, 1), arrays)  # not scaled, all states kept
    return mu, nu


class CompiledDense(NamedTuple):
    """What is compiled for dense layers beside the three loops."""

    tangent: Sweep
    layer_gradients: Callable[[ctypes.Array[ctypes.c_int64]], None]


@functools.cache
def compiled_dense(cell: Cell, dtype: torch.dtype) -> CompiledDense:
    """Compile the loops of layers x_t = psi(a_t), or load those that were compiled before."""
    lib = compiler.library(dense_source(cell, dtype))
    lib.layer_gradients.restype = None
    return CompiledDense(lib.dense_tangent, lib.layer_gradients)


@without_graph
def dense_tangent(
    plan: SweepPlan,
    saved: Saved,
    W: Tensor,
    lam: Tensor,
    k: Tensor,
    first: Tensor | None,
    s: Tensor | None,
    rates: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The loop of sweeps.dense.dense_tangent, in C."""
    cell = plan.cell
    loops = compiled_loops(cell, lam.dtype)
    m = empty(lam.shape, lam)
    bend = None if dense_bend(cell) is ZERO else empty(saved.a.shape, lam)
    # In the order of ARRAY_NAMES, after p: first stands for s_last, m for lam, the bend for delta.
    sources = (None, s, first, None, None)
    arrays = (W, None, saved.a, saved.x, saved.q, *sources, m, bend, k, lam, rates)
    sweep = compiled_dense(cell, lam.dtype).tangent
    run(sweep, plan, loops, None, lam.shape[1], (0, 1), arrays)  # not scaled, all states kept
    return m, bend


LAYER_ARRAYS = ("delta", "x", "lam_delta", "m", "by_W", "by_b")  # those of struct layers in dense.h
LAYER_FIELDS = ctypes.c_int64 * (4 + len(LAYER_ARRAYS))


@without_graph
def layer_gradients(
    plan: SweepPlan, delta: Tensor, x: Tensor, lam_delta: Tensor | None, m: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of sweeps.dense.layer_gradients, in C: each thread takes some of the layers."""
    rows = plan.rows
    d = delta.shape[1]
    by_W = empty((rows.T, d, d), delta)
    by_b = empty((rows.T, d), delta)
    count = rows.N * d
    sizes = (count, count, count, count, rows.T * d * d, rows.T * d)
    arrays = (delta, x, lam_delta, m, by_W, by_b)
    held = pointers(LAYER_ARRAYS, arrays, sizes, [delta.dtype] * len(arrays), CPU)
    work = 2 * count * d * (1 if m is None else 2)
    threads = thread_count(work, rows.T, by_step=True)
    run_layers = compiled_dense(plan.cell, delta.dtype).layer_gradients
    run_layers(LAYER_FIELDS(rows.T, rows.B, d, threads, *held.addresses))
    return by_W, by_b

"""The engine on an NVIDIA GPU: the three loops as persistent kernels, made from the cell's formula.

source writes a kernel, geometry chooses how the network lies on the chip, driver has it compiled and launches it. float32 is
float32 throughout: plain multiply-adds with W in registers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ....cells.cell import Cell
from ....cells.formula import Node, walk
from ....cells.program import write_code
from ...plan import Saved, SweepPlan
from ...pointers import pointers
from ...pointwise import Pointwise
from ...rows import NO_EXPONENT, Link, Rows, exponent
from ..eager import fused
from .driver import (
    ARRAYS,
    launch_kernel,
    load_function,
    load_kernel,
    nvrtc,
    processor_count,
    shared_memory_limit,
)
from .geometry import TRAFFIC, Geometry, choose_geometry
from .source import FUNCTIONS, MARK, OPERATIONS, POINTWISE_HEAD, SOURCES


def refusal(device: str) -> str | None:
    if device != "cuda":
        return f"runs on an NVIDIA GPU, and the data is on {device}. Use engine='auto' or move the network with .to('cuda')."
    if torch.version.cuda is None:
        return "needs an NVIDIA GPU and torch built for CUDA. Use engine='auto'."
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 or higher. Use engine='auto'."
    try:
        nvrtc()
    except OSError:
        return "needs NVRTC, CUDA's run-time compiler, and it was not found. Use engine='auto'."
    return None


def describe() -> str:
    """What compiles the kernels."""
    return f"NVRTC of CUDA {torch.version.cuda}" if refusal("cuda") is None else "NVRTC not found"


def explain(cell: Cell, hidden: int, batch: int, dtype: torch.dtype = torch.float32) -> str:
    """How a network lies on the GPU."""
    count = processor_count(0)
    g = choose_geometry(cell, hidden, batch, dtype.itemsize, count, shared_memory_limit(0))
    if g is None:
        return f"W does not fit the registers of {count} multiprocessors: a product for each step"
    by_steps = [
        name for name in SOURCES if exceeds_traffic(name, cell, hidden, batch, dtype.itemsize, g)
    ]
    where = "W in registers" + (
        " and shared memory of one multiprocessor"
        if g.parts == 1
        else f" of {g.parts} multiprocessors"
    )
    text = f"{where}, {g.groups} groups of {g.rows * g.blocks} samples"
    text += f" in {g.blocks} items a step" if g.blocks > 1 else ""
    return text + (f"; a product for each step of {', '.join(by_steps)}" if by_steps else "")


INTEGER_ARRAYS = dict.fromkeys(("K", "TOPS", "KS", "KEND", "KLAST", "NOW", "LEN"), torch.int32) | {
    "STARTS": torch.int64
}


def array_sizes(cell: Cell, rows: Rows, d: int, parts: int) -> dict[str, int]:
    """How many values the arrays of a sweep have."""
    B, N = rows.B, rows.N
    gates, slots = len(cell.gates) * d, len(cell.slots) * d
    step = dict.fromkeys(("A", "DEL", "NU", "BASE", "SA"), N * gates)
    state = dict.fromkeys(("X", "LAM", "MU", "SRC"), (B + N) * slots)
    return (
        step
        | state
        | {
            "Q": N * len(cell.saved_nodes) * d,
            "V": N * len(cell.v) * d,
            "W": gates * len(cell.read) * d,
            "PAR": len(cell.p) * d,
            "LAST": B * slots,
            "LINK": N,
            "K": B + N,
            "KS": B + N,
            "KEND": B,
            "KLAST": B,
            "TOPS": N * parts,
            "NOW": B * parts,
            "LEN": B,
            "STARTS": 1 if rows.uniform else rows.T + 1,
        }
    )


@functools.lru_cache(64)
def _uniform_positions(T: int, B: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(1, dtype=torch.int64, device=device), torch.full(
        (B,), T, dtype=torch.int32, device=device
    )


def row_positions(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """(the first row of each state, the samples' lengths)"""
    if rows.uniform:
        return _uniform_positions(rows.T, rows.B, device)
    starts = torch.tensor([0, *(rows.B + n for n in rows.starts[:-1])], dtype=torch.int64)
    return starts.to(device), rows.lengths.to(torch.int32).to(device)


class Launch:
    """One sweep: its geometry, its arrays, its launch."""

    def __init__(self, plan: SweepPlan, like: Tensor, d: int, g: Geometry) -> None:
        self.plan, self.like, self.d, self.geometry = plan, like, d, g
        self.exchanged = bool(plan.cell.read) and (g.parts > 1 or g.blocks > 1)

    def array(self, rows: int, columns: int, exchanged: bool = False) -> Tensor:
        y = self.like.new_empty(rows, columns)
        if exchanged:
            y.view(torch.int64 if y.dtype == torch.float64 else torch.int32).fill_(MARK[y.dtype])
        return y

    def run(self, name: str, options: tuple[bool, ...], **arrays: Tensor | None) -> None:
        rows = self.plan.rows
        starts, lengths = row_positions(rows, self.like.device)
        arrays |= {"STARTS": starts, "LEN": lengths}
        expected = array_sizes(self.plan.cell, rows, self.d, self.geometry.parts)
        dtypes = [INTEGER_ARRAYS.get(n, self.like.dtype) for n in ARRAYS]
        given = [arrays.get(n) for n in ARRAYS]
        found = pointers(ARRAYS, given, [expected[n] for n in ARRAYS], dtypes, self.like.device)
        pack = (ctypes.c_longlong * (len(ARRAYS) + 1))(*found.addresses, rows.B)
        self.launch(name, options, pack)

    def launch(self, name: str, options: tuple[bool, ...], pack: Any) -> None:
        g, device = self.geometry, self.like.get_device()
        function, shared = load_kernel(
            name,
            self.plan.cell,
            g,
            self.d,
            self.like.dtype,
            self.plan.rows.uniform,
            device,
            *options,
        )
        launch_kernel(function, g.groups * g.parts, 32 * g.warps, shared, pack, device, g.parts > 1)


@torch.no_grad()
def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    cell, rows = plan.cell, plan.rows
    run = make_launch("forward", plan, base, x0.shape[1])
    if run is None:
        return fused.forward(plan, base, v, W, x0, p)
    x = run.array(rows.B + rows.N, x0.shape[1], run.exchanged)
    x[: rows.B] = x0
    a = run.array(rows.N, base.shape[1])
    q = run.array(rows.N, run.d * len(cell.saved_nodes)) if cell.saved_nodes else None
    run.run("forward", (), X=x, A=a, Q=q, BASE=base, V=v, W=W, PAR=p)
    return x, a, q


@torch.no_grad()
def adjoint(
    plan: SweepPlan, saved: Saved, W: Tensor | None, s: Tensor | None, s_last: Tensor | None, sa: Tensor | None,
    link: Link | None, scaled: bool, keep: bool, k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    rows, x = plan.rows, saved.x
    run = make_launch("adjoint", plan, x, x.shape[1])
    if run is None:
        return fused.adjoint(plan, saved, W, s, s_last, sa, link, scaled, keep, k_last)
    lam = run.array(rows.B + rows.N, x.shape[1])
    delta = run.array(rows.N, saved.a.shape[1], run.exchanged)
    k = tops = end = None
    if scaled:
        k = torch.empty(rows.B + rows.N, dtype=torch.int32, device=x.device)
        if run.geometry.parts > 1:
            tops = torch.full(
                (rows.N * run.geometry.parts,), -1, dtype=torch.int32, device=x.device
            )
        k_last = (
            torch.zeros(rows.B, dtype=torch.int32, device=x.device) if k_last is None else k_last
        )
        if s_last is not None:
            e = exponent(s_last)
            end = torch.where(e == NO_EXPONENT, NO_EXPONENT, e + k_last).int()
    options = (s is not None, s_last is not None, sa is not None, link is not None, scaled)
    run.run(
        "adjoint", options, LAM=lam, DEL=delta, K=k, TOPS=tops, X=x, A=saved.a, Q=saved.q, V=saved.v, W=W,
        PAR=saved.p, SRC=s, LAST=s_last, SA=sa, KLAST=k_last, KEND=end,
        KS=exponent(s).int() if scaled and s is not None else None,
        LINK=None if link is None else link.factor,
    )  # fmt: skip
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
    rows, x = plan.rows, saved.x
    run = make_launch("tangent", plan, x, x.shape[1])
    if run is None:
        return fused.tangent(plan, saved, W, g, ga, link)
    mu, nu = (
        run.array(rows.B + rows.N, x.shape[1], run.exchanged),
        run.array(rows.N, saved.a.shape[1]),
    )
    mu[: rows.B] = 0 if g is None else g[: rows.B]
    run.run(
        "tangent", (g is not None, ga is not None, link is not None), MU=mu, NU=nu, X=x, A=saved.a, Q=saved.q,
        V=saved.v, W=W, PAR=saved.p, SRC=g, SA=ga, LINK=None if link is None else link.factor,
    )  # fmt: skip
    return mu, nu


@functools.cache
def pointwise_kernel(
    op: Pointwise, present: tuple[bool, ...], d: int, dtype: torch.dtype, device: int
) -> ctypes.c_void_p:
    """A Pointwise as one kernel. present: which of op.known and op.inputs are given."""
    groups = [*((None, y) for y in op.known), *op.inputs]
    given = [(name, nodes) for (name, nodes), there in zip(groups, present, strict=True) if there]
    outputs = [nodes for name, nodes in op.outputs if name in op.nonzero_outputs]
    names: dict[Node, str] = {}
    for i, (name, nodes) in enumerate(given):
        start = "" if name in op.uniform else f"row * {len(nodes) * d} + "
        names |= {
            n: f"a.y[{i}][{start}{j * d} + unit]"
            for j, n in enumerate(nodes)
            if name is not None or n.args
        }
    flat = [n for nodes in outputs for n in nodes]
    used = [n for n in walk(flat, frozenset(names)) if n in names]
    loads = [f"const real l{i} = {names[n]};" for i, n in enumerate(used)]
    lines, results = write_code(
        flat, {n: f"l{i}" for i, n in enumerate(used)}, OPERATIONS, "const real {0} = {1};"
    )
    found, stores = iter(results), list[str]()
    for i, nodes in enumerate(outputs):
        stores += [
            f"a.y[{len(given) + i}][row * {len(nodes) * d} + {j * d} + unit] = {next(found)};"
            for j in range(len(nodes))
        ]
    body = "".join(f"    {line}\n" for line in (*loads, *lines, *stores))
    text = f"typedef {'double' if dtype == torch.float64 else 'float'} real;\n#define D {d}\n{FUNCTIONS}"
    text += f"struct Args {{ real* y[{len(given) + len(outputs)}]; long long rows; }};\n{POINTWISE_HEAD}{body}  }}\n}}\n"
    return load_function(text, "points", device, 0)


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
    d, count, device = like.shape[1] // width, like.shape[0], like.get_device()
    function = pointwise_kernel(
        op, tuple(y is not None for y in (*at_hand, *tensors)), d, like.dtype, device
    )
    outputs = [
        like.new_empty(count, d * len(nodes))
        for name, nodes in op.outputs
        if name in op.nonzero_outputs
    ]
    arrays = [*(y for *_, y in given), *outputs]
    names, expected = op.expected_sizes([(name, nodes) for name, nodes, _ in given], count, d)
    found = pointers(names, arrays, expected, [like.dtype] * len(arrays), like.device)
    pack = (ctypes.c_longlong * (len(found.addresses) + 1))(*found.addresses, count)
    grid = min(-(-count * d // 256), processor_count(device) * 16)
    launch_kernel(function, grid, 256, 0, pack, device)
    return outputs


def exceeds_traffic(name: str, cell: Cell, d: int, B: int, size: int, g: Geometry) -> bool:
    """Would the parts of the groups read more of each other's work at a step than a product of its own takes?"""
    inner = d * len(cell.gates if name == "adjoint" else cell.read)
    return g.parts > 1 and B * g.parts * inner * size > TRAFFIC


def may_overlap(cell: Cell, d: int, B: int, like: Tensor) -> bool:
    """May two such sweeps run at once? Not where the blocks of one wait for each other: they might wait for room that the
    other holds."""
    size, device = like.element_size(), like.get_device()
    g = choose_geometry(cell, d, B, size, processor_count(device), shared_memory_limit(device))
    return (
        g is None
        or g.parts == 1
        or all(exceeds_traffic(name, cell, d, B, size, g) for name in ("forward", "adjoint"))
    )


def make_launch(name: str, plan: SweepPlan, like: Tensor, n: int) -> Launch | None:
    """The sweep as one kernel; None where W does not fit the chip, or its parts would read each other's work for longer
    than a product takes."""
    cell, rows, d = plan.cell, plan.rows, n // len(plan.cell.slots)
    g = choose_geometry(
        cell,
        d,
        rows.B,
        like.element_size(),
        processor_count(like.get_device()),
        shared_memory_limit(like.get_device()),
    )
    if g is None or exceeds_traffic(name, cell, d, rows.B, like.element_size(), g):
        return None
    return Launch(plan, like, d, g)

"""The engine on a GPU: three persistent kernels, made from the cell's formula (see kernels.py).

The time loop is inside the kernel. The samples are split over groups of programs, the units over the programs of a
group, so that each program's part of W fits on its multiprocessor; float32 is float32 throughout.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..cells import Cell
from . import kernels
from .compiler import kept
from .cuda import INTEGERS, sizes, where
from .derivatives import Plan, Tape
from .kernels import Shape
from .pointers import pointers
from .rows import NONE, Link, exponent

ON_CHIP = 1 << 17  # bytes of W that a program keeps in registers
ROWS = 4  # samples of an item


def refusal(device: str) -> str | None:
    try:
        import triton
    except ImportError:
        return "needs the package triton, and it is not installed. Use engine='auto'."
    if device == "cpu" and triton.knobs.runtime.interpret:
        return None
    if device != "cuda":
        return f"runs on a GPU, and the data is on {device}. Use engine='auto' or move the network with .to('cuda')."
    return None


@dataclass(frozen=True)
class Geometry:
    """How a network lies on the chip."""

    units: int  # of a program
    parts: int  # programs of a group
    groups: int
    shape: Shape
    warps: int
    block: int  # rows of W that are read at a time, where it is not resident


@functools.cache
def geometry(cell: Cell, d: int, B: int, dtype: torch.dtype, uniform: bool, processors: int) -> Geometry:
    width, columns = _power_of_two(d), len(cell.gates) * max(1, len(cell.read))
    fitting = ON_CHIP // (dtype.itemsize * width * columns)
    units = min(width, 1 << max(0, fitting.bit_length() - 1))
    parts = -(-d // units)
    resident = not cell.read or (parts <= processors and units >= min(4, width))
    if not cell.read:
        units, parts = width, 1
    elif not resident:
        units = max(16, _power_of_two(-(-d // processors)))
        parts = -(-d // units)
    warps = 4 if width * units * columns <= 1 << 14 or not cell.read else 8
    groups = min(B, max(1, processors // parts)) if cell.read else B
    rows = -(-B // groups)
    blocks = -(-rows // (ROWS if columns < 3 else 2))  # more would not fit the registers
    blocks = blocks if resident else max(2, blocks)  # a state that waits in memory is asked for one item ahead
    rows = -(-rows // blocks)
    groups = -(-B // (rows * blocks))
    block = width if resident else min(width, 64)
    shape = Shape(
        rows, blocks, parts > 1, resident, uniform, max(1, 32 * warps // block),
        3 if blocks == 1 and parts == 1 and resident else 1, dtype == torch.float64,
    )  # fmt: skip
    return Geometry(units, parts, groups, shape, warps, block)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@functools.cache
def built(name: str, cell: Cell, shape: Shape, *options: bool) -> Any:
    """A kernel, from the source that kernels.py writes."""
    source = kernels.PRELUDE + getattr(kernels, name)(cell, shape, *options)
    return getattr(load(source), name)


@functools.cache
def load(source: str) -> ModuleType:
    """Triton reads a kernel's source from its file."""
    path = kept(source, ".py", lambda out: out.write_text(source))
    spec = importlib.util.spec_from_file_location(f"kernel_{path.stem[:32]}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


class Launch:
    """One sweep: its geometry, its arrays, its launches."""

    def __init__(self, plan: Plan, like: Tensor, n: int) -> None:
        self.plan, self.like = plan, like
        self.d = n // len(plan.cell.slots)
        rows = plan.rows
        self.geometry = geometry(plan.cell, self.d, rows.B, like.dtype, rows.uniform, processors(like.device))
        self.exchanged = self.geometry.shape.split or not self.geometry.shape.on_chip

    def array(self, rows: int, columns: int, exchanged: bool) -> Tensor:
        y = self.like.new_empty(rows, columns)
        if exchanged:
            double = y.dtype == torch.float64
            y.view(torch.int64 if double else torch.int32).fill_(kernels.MARK64 if double else kernels.MARK32)
        return y

    def run(self, name: str, options: tuple[bool, ...], **arrays: Tensor | None) -> None:
        """arrays: by the names of cuda.sizes, in the order of the kernel's arguments."""
        g, rows = self.geometry, self.plan.rows
        kernel = built(name, self.plan.cell, g.shape, *options)
        starts, lengths = where(rows, self.like.device)
        more = {"launch_cooperative_grid": True} if g.parts > 1 else {}
        expected, kinds = sizes(self.plan.cell, rows, self.d, g.parts), INTEGERS | {"TOPS": self.like.dtype}
        dtypes = [kinds.get(n, self.like.dtype) for n in arrays]
        found = pointers(list(arrays), list(arrays.values()), [expected[n] for n in arrays], dtypes, self.like.device)
        given = [self.like if y is None else y for y in found.held]
        kernel[(g.groups * g.parts,)](
            *given, rows.B, starts, lengths,
            D=self.d, DP=_power_of_two(self.d), U=g.units, P=g.parts, PP=_power_of_two(g.parts), KC=g.block,
            WIDE=32 * g.warps, num_warps=g.warps, **more,
        )  # fmt: skip


@torch.no_grad()
def forward(
    plan: Plan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    cell, rows = plan.cell, plan.rows
    run = Launch(plan, base, x0.shape[1])
    x = run.array(rows.B + rows.N, x0.shape[1], run.exchanged)
    x[: rows.B] = x0
    a = run.array(rows.N, base.shape[1], False)
    q = run.array(rows.N, run.d * len(cell.kept), False) if cell.kept else None
    run.run("forward", (), X=x, A=a, Q=q, BASE=base, V=v, W=None if W is None else W.t(), PAR=p)
    return x, base.clone() if W is None else a, q


@torch.no_grad()
def adjoint(
    plan: Plan, tape: Tape, W: Tensor | None, s: Tensor | None, s_last: Tensor | None, sa: Tensor | None,
    link: Link | None, scaled: bool, keep: bool, k_last: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    rows, x = plan.rows, tape.x
    run = Launch(plan, x, x.shape[1])
    lam = run.array(rows.B + rows.N, x.shape[1], False)
    delta = run.array(rows.N, tape.a.shape[1], run.exchanged)
    k = tops = ks = end = now = None
    if scaled:
        k = torch.empty(rows.B + rows.N, dtype=torch.int32, device=x.device)
        now = torch.empty(
            rows.B * run.geometry.parts, dtype=torch.int32, device=x.device
        )  # each program's own copy of k
        tops = run.array(rows.N, run.geometry.parts, True) if run.geometry.parts > 1 else None
        k_last = torch.zeros(rows.B, dtype=torch.int32, device=x.device) if k_last is None else k_last
        if s is not None:
            ks = exponent(s).int()
        if s_last is not None:
            e = exponent(s_last)
            end = torch.where(e == NONE, NONE, e + k_last).int()
    options = (s is not None, s_last is not None, sa is not None, link is not None, scaled)
    run.run(
        "adjoint", options, LAM=lam, DEL=delta, K=k, TOPS=tops, NOW=now, X=x, A=tape.a, Q=tape.q, V=tape.v, W=W, PAR=tape.p,
        SRC=s, LAST=s_last, SA=sa, LINK=None if link is None else link.factor, KS=ks, KEND=end, KLAST=k_last,
    )  # fmt: skip
    return lam, delta, k


@torch.no_grad()
def tangent(
    plan: Plan, tape: Tape, W: Tensor | None, g: Tensor | None, ga: Tensor | None, link: Link | None
) -> tuple[Tensor, Tensor]:
    rows, x = plan.rows, tape.x
    run = Launch(plan, x, x.shape[1])
    mu, nu = run.array(rows.B + rows.N, x.shape[1], run.exchanged), run.array(rows.N, tape.a.shape[1], False)
    mu[: rows.B] = 0 if g is None else g[: rows.B]
    run.run(
        "tangent", (g is not None, ga is not None, link is not None), MU=mu, NU=nu, X=x, A=tape.a, Q=tape.q, V=tape.v,
        W=None if W is None else W.t(), PAR=tape.p, SRC=g, SA=ga, LINK=None if link is None else link.factor,
    )  # fmt: skip
    return mu, nu

"""Engine `cuda` on an NVIDIA GPU: the three loops as persistent kernels.

source writes a kernel from the cell's formula, geometry chooses how the network lies on the chip,
driver has it compiled and launches it. float32 is float32 throughout: plain multiply-adds with W
in registers.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ....cells.cell import Cell
from ...plan import Saved, SweepPlan
from ...pointers import pointers
from ...pointwise import Pointwise
from ...rows import NO_EXPONENT, Link, Rows, exponent
from ...weights import is_by_step
from ..eager import fused
from ..expressions import input_groups
from .driver import (
    ARRAYS,
    Arguments,
    choose_architecture,
    cluster_counts,
    known_architectures,
    launch_kernel,
    load_function,
    load_kernel,
    nvrtc,
    processor_count,
    shared_memory_limit,
)
from .geometry import Geometry, choose_geometry
from .points import pointwise_source
from .source import MARK, passes_on

INTEGER_ARRAYS = {
    "K": torch.int32,
    "TOPS": torch.int32,
    "KS": torch.int32,
    "KEND": torch.int32,
    "KLAST": torch.int32,
    "LEN": torch.int32,
    "STARTS": torch.int64,
}


def refusal(device: str) -> str | None:
    """Why it cannot run on a device, as the end of a sentence; None if it can."""
    if device != "cuda":
        return (
            f"runs on an NVIDIA GPU, but the data is on {device}. Use engine='auto' or move the "
            "network with .to('cuda')."
        )
    if torch.version.cuda is None:
        return "needs an NVIDIA GPU and torch built for CUDA. Use engine='auto'."
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return "needs a GPU of compute capability 8.0 or higher. Use engine='auto'."
    try:
        library = nvrtc()
    except OSError:
        return "needs NVRTC, CUDA's run-time compiler, but it was not found. Use engine='auto'."
    if torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
        if choose_architecture(capability, known_architectures(library)) is None:
            return (
                f"needs a newer CUDA: NVRTC of {torch.version.cuda} cannot compile for compute "
                f"capability {capability[0]}.{capability[1]}. Use engine='auto'."
            )
    return None


def describe() -> str:
    """The compiler of the kernels in words, or that there is none."""
    return f"NVRTC of CUDA {torch.version.cuda}" if refusal("cuda") is None else "NVRTC not found"


def explain(cell: Cell, hidden: int, batch: int, dtype: torch.dtype = torch.float32) -> str:
    """How a network of `hidden` units lies on the first GPU, in words."""
    size = dtype.itemsize
    processors = processor_count(0)
    limit = shared_memory_limit(0)
    clusters = cluster_counts(0)
    layouts = {}
    for backwards, loops in ((False, "forward and tangent"), (True, "adjoint")):
        g = choose_geometry(cell, hidden, batch, size, processors, limit, backwards, clusters)
        layouts[loops] = describe_geometry(g)
    texts = list(dict.fromkeys(layouts.values()))
    if len(texts) == 1:
        return texts[0]
    return "; ".join(f"{loops}: {text}" for loops, text in layouts.items())


def describe_geometry(g: Geometry | None) -> str:
    """How a network lies on the chip in a loop, in words; None: a product for each step."""
    if g is None:
        return "a product for each step"
    text = "W in registers and shared memory of one multiprocessor"
    if g.parts > 1:
        place = "registers and shared memory" if g.tensor else "registers"
        text = f"W in {place} of {g.parts} multiprocessors"
    text += f", {g.groups} groups of {g.rows * g.blocks} samples"
    if g.blocks > 1:
        text += f" in {g.blocks} items a step"
    if g.cluster > 1:
        text += f", clusters of {g.cluster}"
    return f"{text}, tensor cores" if g.tensor else text


def array_sizes(cell: Cell, rows: Rows, d: int, parts: int) -> dict[str, int]:
    """How many values the arrays of a sweep have, by their names in struct Args.

    parts: blocks of a group, each of which writes its largest exponent at a step (TOPS).
    """
    B = rows.B
    N = rows.N
    gates = len(cell.gates) * d
    slots = len(cell.slots) * d
    step_arrays = dict.fromkeys(("A", "DEL", "NU", "BASE", "SA"), N * gates)
    step_arrays["ALONG"] = (B + N) * d
    state_arrays = dict.fromkeys(("X", "LAM", "MU", "SRC"), (B + N) * slots)
    others = {
        "Q": N * len(cell.saved_nodes) * d,
        "V": N * len(cell.v) * d,
        "W": gates * len(cell.read) * d,
        "PAR": len(cell.p) * d,
        "LAST": B * slots,
        "LINK": N,
        "K": B + N,  # exponents of lam
        "KS": B + N,  # of the sources of all states
        "KEND": B,  # of the sources of last states
        "KLAST": B,  # k_last
        "TOPS": N * parts,
        "LEN": B,  # lengths of the samples
        "STARTS": 1 if rows.uniform else rows.T + 1,  # first rows of the states
    }
    return step_arrays | state_arrays | others


@functools.cache  # without a limit: a CUDA graph may read them as long as the process runs
def _uniform_positions(T: int, B: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row_positions of B samples of T steps, kept: the starts (a dummy), and the lengths."""
    starts = torch.zeros(1, dtype=torch.int64, device=device)  # not read: kernels compute t B
    return starts, torch.full((B,), T, dtype=torch.int32, device=device)


def row_positions(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor]:
    """(the first row of each state in state arrays [T + 1], the samples' lengths [B])."""
    if rows.uniform:
        return _uniform_positions(rows.T, rows.B, device)
    starts = torch.tensor([0, *(rows.B + n for n in rows.starts[:-1])], dtype=torch.int64)
    return starts.to(device), rows.lengths.to(torch.int32).to(device)


class Launch:
    """One sweep as a kernel: its geometry, its arrays, its launch.

    like: a tensor of the type and on the device of the sweep.
    exchanged: what W multiplies passes through memory, from block to block or from item to item.
    """

    def __init__(self, plan: SweepPlan, like: Tensor, d: int, g: Geometry) -> None:
        """Find out whether values are exchanged: by several blocks of a group, or several items."""
        self.plan = plan
        self.like = like
        self.d = d
        self.geometry = g
        self.exchanged = bool(plan.cell.read) and (g.parts > 1 or g.blocks > 1)

    def array(self, rows: int, columns: int, exchanged: bool = False) -> Tensor:
        """An array without values; one that blocks exchange is filled with the bits MARK.

        An entry that still has them was not written yet, and its readers wait.
        """
        y = self.like.new_empty(rows, columns)
        if exchanged:
            bits = torch.int64 if y.dtype == torch.float64 else torch.int32
            y.view(bits).fill_(MARK[y.dtype])
        return y

    def run(self, name: str, options: tuple[bool, ...], **arrays: Tensor | None) -> None:
        """Launch the kernel `name` with these arrays, by their names in struct Args.

        options: which of the optional arrays there are, as the function in SOURCES takes them.
        """
        rows = self.plan.rows
        starts, lengths = row_positions(rows, self.like.device)
        arrays |= {"STARTS": starts, "LEN": lengths}
        sizes = array_sizes(self.plan.cell, rows, self.d, self.geometry.parts)
        expected = [sizes[n] for n in ARRAYS]
        dtypes = [INTEGER_ARRAYS.get(n, self.like.dtype) for n in ARRAYS]
        given = [arrays.get(n) for n in ARRAYS]
        # `held` keeps the tensors alive as long as their addresses are used.
        held = pointers(ARRAYS, given, expected, dtypes, self.like.device)
        arguments = (ctypes.c_longlong * (len(ARRAYS) + 1))(*held.addresses, rows.B)
        self.launch(name, options, arguments)

    def launch(self, name: str, options: tuple[bool, ...], arguments: Arguments) -> None:
        """Compile the kernel, if that was not done before, and launch it."""
        g = self.geometry
        cell = self.plan.cell
        uniform = self.plan.rows.uniform
        device = self.like.get_device()
        function, shared = load_kernel(
            name, cell, g, self.d, self.like.dtype, uniform, device, *options
        )
        grid = g.groups * g.parts
        launch_kernel(function, grid, 32 * g.warps, shared, arguments, device, g.parts > 1)


def make_launch(
    name: str, plan: SweepPlan, W: Tensor | None, like: Tensor, width: int
) -> Launch | None:
    """The sweep as one kernel; None where one product for each step is faster, or W does not fit.

    name: 'forward', 'adjoint' or 'tangent'. like: a tensor of the sweep. width: columns of a state
    array.
    """
    if W is not None and is_by_step(W):  # a kernel keeps one W on the chip
        return None
    cell = plan.cell
    B = plan.rows.B
    d = width // len(cell.slots)
    g = device_geometry(cell, d, B, like, name == "adjoint")
    return None if g is None else Launch(plan, like, d, g)


def device_geometry(cell: Cell, d: int, B: int, like: Tensor, backwards: bool) -> Geometry | None:
    """How B samples of d units lie on the device of the tensor `like`, in numbers of its type."""
    device = like.get_device()
    processors = processor_count(device)
    limit = shared_memory_limit(device)
    size = like.element_size()
    clusters = cluster_counts(device)
    return choose_geometry(cell, d, B, size, processors, limit, backwards, clusters)


def may_overlap(cell: Cell, d: int, B: int, like: Tensor) -> bool:
    """Whether two sweeps of B samples and d units may run at once on a GPU.

    Not where the blocks of one wait for each other: those that run might wait for others that
    have no room because of the second sweep.
    """
    layouts = [device_geometry(cell, d, B, like, backwards) for backwards in (False, True)]
    return all(g is None or g.parts == 1 for g in layouts)


@torch.no_grad()
def forward(
    plan: SweepPlan, base: Tensor, v: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The forward loop of Engine as one kernel, or by `fused` (make_launch)."""
    cell = plan.cell
    rows = plan.rows
    launch = make_launch("forward", plan, W, base, x0.shape[1])
    if launch is None:  # W does not fit on the chip, or a product for each step is faster
        return fused.forward(plan, base, v, W, x0, p)
    x = launch.array(rows.B + rows.N, x0.shape[1], launch.exchanged)
    x[: rows.B] = x0
    a = launch.array(rows.N, base.shape[1])
    q = None
    if cell.saved_nodes:
        q = launch.array(rows.N, launch.d * len(cell.saved_nodes))
    launch.run("forward", (), X=x, A=a, Q=q, BASE=base, V=v, W=W, PAR=p)
    return x, a, q


@torch.no_grad()
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
    """The adjoint loop of Engine as one kernel, or by `fused` (make_launch).

    keep is not used: the kernel writes all of lam.
    """
    rows = plan.rows
    x = saved.x
    launch = make_launch("adjoint", plan, W, x, x.shape[1])
    if launch is None:  # W does not fit on the chip, or a product for each step is faster
        return fused.adjoint(plan, saved, W, s, s_last, sa, link, scaled, keep, k_last)
    parts = launch.geometry.parts
    lam = launch.array(rows.B + rows.N, x.shape[1])
    delta = launch.array(rows.N, saved.a.shape[1], launch.exchanged)
    # tops: the largest exponent of each block's part of lam_t, which blocks exchange. Kernels add
    # 4096 to it, so that it is never negative: -1 means not written yet.
    # k_sources, k_end: the exponents of the sources s and s_last 2^k_last.
    k = tops = k_sources = k_end = None
    if scaled:
        k = torch.empty(rows.B + rows.N, dtype=torch.int32, device=x.device)
        if parts > 1:
            tops = torch.full((rows.N * parts,), -1, dtype=torch.int32, device=x.device)
        if k_last is None:
            k_last = torch.zeros(rows.B, dtype=torch.int32, device=x.device)
        if s_last is not None:
            k_mantissa = exponent(s_last)
            is_zero = k_mantissa == NO_EXPONENT
            k_end = torch.where(is_zero, NO_EXPONENT, k_mantissa + k_last).int()
        if s is not None:
            k_sources = exponent(s).int()
    launch.run(
        "adjoint",
        (s is not None, s_last is not None, sa is not None, link is not None, scaled),
        LAM=lam,
        DEL=delta,
        K=k,
        TOPS=tops,
        X=x,
        A=saved.a,
        Q=saved.q,
        V=saved.v,
        W=W,
        PAR=saved.p,
        SRC=s,
        LAST=s_last,
        SA=sa,
        KLAST=k_last,
        KEND=k_end,
        KS=k_sources,
        LINK=None if link is None else link.factor,
    )
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
    """The tangent loop of Engine as one kernel, or by `fused` (make_launch)."""
    rows = plan.rows
    x = saved.x
    launch = make_launch("tangent", plan, W, x, x.shape[1])
    if launch is None:  # W does not fit on the chip, or a product for each step is faster
        return fused.tangent(plan, saved, W, g, ga, link)
    along = None  # the slot of link_t mu_{t-1} that W reads
    cell = plan.cell
    d = launch.d
    if link is not None and passes_on(cell, launch.geometry, d, x.element_size()):
        along = launch.array(rows.B + rows.N, d, exchanged=True)
    mu = launch.array(rows.B + rows.N, x.shape[1], launch.exchanged and along is None)
    nu = launch.array(rows.N, saved.a.shape[1])
    mu[: rows.B] = 0 if g is None else g[: rows.B]  # mu_0
    if along is not None and link is not None and cell.read_slot is not None:
        read = mu[: rows.B, cell.read_slot * d : (cell.read_slot + 1) * d]
        along[: rows.B] = link.factor[: rows.B] * read
    launch.run(
        "tangent",
        (g is not None, ga is not None, link is not None),
        MU=mu,
        NU=nu,
        ALONG=along,
        X=x,
        A=saved.a,
        Q=saved.q,
        V=saved.v,
        W=W,
        PAR=saved.p,
        SRC=g,
        SA=ga,
        LINK=None if link is None else link.factor,
    )
    return mu, nu


@functools.cache
def pointwise_kernel(
    op: Pointwise, present: tuple[bool, ...], d: int, dtype: torch.dtype, device: int
) -> ctypes.c_void_p:
    """The kernel of an operation, loaded.

    present: for each array of op.known and op.inputs, whether it is given (input_groups).
    """
    return load_function(pointwise_source(op, present, d, dtype), "points", device, 0)


def pointwise(
    op: Pointwise,
    rows: Rows | None,
    at_hand: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
) -> list[Tensor]:
    """Run `op` as one kernel: its outputs [rows, m d] that are not identically zero, in order.

    rows: not needed here; it belongs to the interface of engines.
    at_hand, tensors: the values of op.known and op.inputs, None where one is missing.
    """
    groups = []
    given = []
    for group, y in zip(input_groups(op), (*at_hand, *tensors), strict=True):
        if y is not None:
            groups.append(group)
            given.append(y)
    # The first input that has rows tells their number and that of the units.
    for (name, nodes), y in zip(groups, given, strict=True):
        if name is not None and name not in op.uniform:
            like = y
            d = y.shape[1] // len(nodes)
            break
    count = like.shape[0]
    device = like.get_device()
    present = tuple(y is not None for y in (*at_hand, *tensors))
    function = pointwise_kernel(op, present, d, like.dtype, device)
    outputs = []
    for name, nodes in op.outputs:
        if name in op.nonzero_outputs:
            outputs.append(like.new_empty(count, d * len(nodes)))
    arrays = [*given, *outputs]
    names, expected = op.expected_sizes(groups, count, d)
    # `held` keeps the tensors alive as long as their addresses are used.
    held = pointers(names, arrays, expected, [like.dtype] * len(arrays), like.device)
    arguments = (ctypes.c_longlong * (len(arrays) + 1))(*held.addresses, count)
    # Blocks of 256 threads, one thread for each number; 16 for each multiprocessor fill the chip,
    # and the kernel's loop does the rest.
    grid = min(-(-count * d // 256), processor_count(device) * 16)
    launch_kernel(function, grid, 256, 0, arguments, device)
    return outputs

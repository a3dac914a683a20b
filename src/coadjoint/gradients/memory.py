"""Predict the memory that a gradient takes at its peak, and keep allocations from fragmenting."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..errors import KindError, Unsupported, brief, check_kind, whole_number
from ..networks.network import Network
from ..objectives.penalties import Penalty
from ..sweeps.engines.eager.fused import STEPS_PER_COPY
from ..sweeps.layout import Layout
from ..sweeps.rows import ROWS_PER_CHUNK, Rows
from ..sweeps.slopes import step_map
from ..sweeps.torch_internals import TorchDispatchMode, storage_address, tree_leaves
from .segment_norms import AllSteps, CostateNorms, SeenEntries, TrajectoryWithoutStates
from .segment_parts import Segments, segment_steps
from .temporal import CHUNK as GRAM_STEPS

if TYPE_CHECKING:
    from .method import Method

OVERHEAD_BYTES = 3.5e6  # about what BLAS and Python take for themselves
M_MMAP_THRESHOLD = -3  # as in malloc.h
BYTES_PER_STEP = 44  # entries of Python's own lists
ACCELERATOR_BYTES = 70e6  # workspaces of cuBLAS, and what is rounded up
ACCELERATOR_MARGIN = 1.08


class PeakBytes(TorchDispatchMode):
    """Inside, count the bytes of tensors alive (`now`) and their maximum so far (`most`)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(
        self,
        op: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operation of torch and count the storages of its results."""
        out = op(*args, **(kwargs or {}))
        for y in tree_leaves(out):
            if isinstance(y, Tensor):
                self.add(y.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, unless it is counted already, until it is freed."""
        key = storage_address(storage)
        size = storage.nbytes()
        if key not in self.alive:
            self.alive.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.remove, key, size)

    def remove(self, key: int, size: int) -> None:
        """Stop counting a storage."""
        self.alive.discard(key)
        self.now -= size


def steady() -> None:
    """Give arrays of 1 MB or more their own pages, for the rest of this process.

    glibc would otherwise learn from the first of them to put them on its heap, where they leave
    holes: half as much memory again for a penalty over 100,000 steps. With other C libraries this
    does nothing.
    """
    if hasattr(os, "confstr"):  # not on Windows, which cannot open the C library as None
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 1 << 20)


def predict(net: Network, T: int, B: int, method: Method) -> int:
    """Predict the peak bytes of a gradient besides the network and its batch.

    The arrays that are alive at the same time are counted: those of engine 'cpu', or on a GPU those
    of engines 'cuda' and 'eager', with a margin. Arrays that a penalty makes from whole costates
    are not. Samples of different lengths need less for the sweeps, and a copy of the batch.

    Args:
        net: A co.Network with a cell.
        T: The steps of the samples.
        B: The number of samples.
        method: BPTT or Penalised, with or without segments.
    """
    check_kind("the network", net, Network, "a co.Network")
    whole_number("T", T)
    whole_number("B", B)
    if not hasattr(method, "segments"):
        raise KindError(f"method must be like co.BPTT() or co.Penalised(...); got {brief(method)}.")
    if net.cell is None:
        raise Unsupported(
            "memory is counted from a cell's formula, but this network runs a step function."
        )
    G: Penalty | None = getattr(method, "penalty", None)
    item = net.V.element_size()
    n = net.slots * net.hidden
    weights = sum(p.numel() for p in net.parameters())
    width = row_widths(net)
    steps = T
    if method.segments is not None:
        steps = min(T, segment_steps(Rows([B] * T), method.segments))
    segments = math.ceil(T / steps)
    # The bytes of one entry in each row that is swept at once. On a CPU the last segment may be
    # shorter, and its arrays are allocated beside those of a full one, which are kept for later.
    swept = (steps + T % steps) * B * item
    if is_on_accelerator(net):
        swept = steps * B * item
    store = segments * B * n * item if segments > 1 else 0  # one state for each segment
    if G is None:
        entries = width["plain"]
        if method.segments is None and net.readout == "every":
            entries += n  # V' dL/da beside its sum
        sums = weights * (8 + 2 * item)  # 8 bytes each as a sum in float64, and twice as a gradient
        peak: float = store + swept * entries + sums
    else:
        # Two sums in float64, as terms of the costates' own derivatives are summed apart, and three
        # times as a gradient.
        sums = weights * (16 + 3 * item)
        second_adjoint = swept * width["second"] + sums
        if method.segments is None:
            peak = second_adjoint
            with contextlib.suppress(Unsupported):  # a penalty of whole costates is not counted
                peak += int(T * B * penalty_bytes(net, G))
        else:
            # The peak is in one of two passes. The first stores states and costates of each segment
            # and runs the penalty. The second also stores tangents, and the penalty's derivatives
            # by the 1-norm and the 2-norm of each costate.
            costates = 2 * store + swept * width["costates"] + T * B * penalty_bytes(net, G)
            peak = max(costates, 3 * store + second_adjoint + 2 * T * B * item)
    return with_overhead(net, B, peak + BYTES_PER_STEP * T)


def is_on_accelerator(net: Network) -> bool:
    """Tell whether the network's arrays are on another device than the CPU."""
    return net.V.device.type != "cpu"


def with_overhead(net: Network, B: int, peak: float) -> int:
    """Add what is not counted array by array, for B samples.

    On a GPU: the steps of a loop before they are copied, the rows of a chunk in float64
    (sweeps.chunks), rounding by the allocator, and the workspaces of matrix products.
    """
    if not is_on_accelerator(net):
        return int(peak + OVERHEAD_BYTES)
    cell = net.cell
    assert cell is not None
    entries = net.hidden * (len(cell.gates) + len(cell.slots))
    chunk = 8 * ROWS_PER_CHUNK * entries
    made = entries + net.hidden * len(cell.saved_nodes)
    waiting = STEPS_PER_COPY * B * made * net.V.element_size()
    return int(ACCELERATOR_MARGIN * (peak + waiting) + chunk + ACCELERATOR_BYTES)


def predict_look(net: Network, T: int, B: int, segments: Segments) -> int:
    """Predict the peak bytes of a run over B samples without derivatives, besides its inputs.

    segments: as in BPTT. With readout "every" the outputs of all steps are kept.
    """
    steps = swept_steps(T, B, segments)
    item = net.V.element_size()
    outputs = 3 * T * B * net.outputs if net.readout == "every" else 0
    return with_overhead(net, B, item * (steps * B * row_widths(net)["look"] + outputs))


def predict_probe(net: Network, T: int, B: int, segments: Segments) -> int:
    """Predict the peak bytes of a look at the costates and components of a gradient (Temporal)."""
    steps = swept_steps(T, B, segments)
    item = net.V.element_size()
    store = 0
    if steps < T:  # states and costates where segments begin
        store = 2 * math.ceil(T / steps) * B * net.slots * net.hidden * item
    grams = 3 * 8 * min(GRAM_STEPS, steps) * B * B
    norms = 6 * T * B * item
    components = steps * B * (item * row_widths(net)["probe"] + 8 * row_widths(net)["scaled"])
    sums = sum(p.numel() for p in net.parameters()) * (8 + 2 * item)
    return with_overhead(net, B, store + grams + norms + components + sums)


def swept_steps(T: int, B: int, segments: Segments) -> int:
    """Return how many time steps of B samples are swept at once."""
    if segments is None:
        return T
    return min(T, segment_steps(Rows([B] * T), segments))


class RunMemory(NamedTuple):
    """Predicted peaks of the parts of a training run, in bytes."""

    standing: int  # the network, its optimiser's state, its best weights and a batch
    gradient: int
    look: int  # at held-out data
    probe: int  # of costates
    recorded: int  # the part of a gradient that stays reserved as a CUDA graph

    @property
    def peak(self) -> int:
        """The peak of the run: its parts come one after the other, beside what is recorded."""
        return self.standing + max(self.gradient, self.recorded + max(self.look, self.probe))


def predict_run(
    net: Network, T: int, method: Method, batch: int, probes: int, tests: int
) -> RunMemory:
    """Predict the memory of a training run on sequences of T steps.

    Args:
        net: A co.Network with a cell.
        T: The steps of the samples.
        method: BPTT or Penalised. With segments, looks are in segments, and of `batch` samples.
        batch: The samples of a gradient.
        probes: The sequences whose costates each validation examines.
        tests: The held-out sequences that are looked at, at once without segments.
    """
    item = net.V.element_size()
    looked_at = tests if method.segments is None else min(tests, batch)
    weights = sum(p.numel() for p in net.parameters()) * item
    held = max(batch, probes, looked_at)
    # The weights, their gradient, two states of the optimiser, the best weights, and a copy of one;
    # a batch, as it is drawn and in rows.
    standing = 6 * weights + 2 * T * held * (net.inputs + net.outputs) * item
    gradient = predict(net, T, batch, method)
    is_recorded = net.V.device.type == "cuda" and method.segments is None
    return RunMemory(
        standing,
        gradient,
        predict_look(net, T, looked_at, method.segments),
        predict_probe(net, T, probes, method.segments),
        gradient if is_recorded else 0,
    )


def row_widths(net: Network) -> dict[str, int]:
    """Return how many numbers are alive at once for each row (a sample at a step), by pass.

    "plain" is the adjoint of the loss, "costates" the costates in segments, and "second" the time
    just before the second adjoint. "look" is a run without derivatives, and "probe" the costates
    with what components are made of; "scaled" are numbers in float64 beside those.
    """
    on_accelerator = is_on_accelerator(net)
    cell = net.cell
    assert cell is not None
    d = net.hidden
    n = d * len(cell.slots)
    g = d * len(cell.gates)
    side = d * len(cell.side_entries)
    own = d * len(cell.parameters)  # the derivative by p, the cell's own parameters
    read = d * len(cell.read) if cell.read_slot is None else 0  # r(x), unless it is a part of x
    saved = n + d * len(cell.saved_nodes) + side
    # On a CPU the pages of an array a that nobody needs are never touched.
    if cell.needs_a or net.W is None or on_accelerator:
        saved += g
    kept_lam = n + own + side if own or side else 0  # lam is kept for p and v
    source = 0  # arrays of the loss's derivative at every step
    turned = 0  # the same with its second derivative
    if net.readout == "every":
        # V' dL/da, h, and 6 arrays as wide as the outputs around the loss; with the second
        # derivative twice as many of these.
        source = n + d + 6 * net.outputs
        turned = 2 * n + d + 12 * net.outputs
    # The sources of the second adjoint: by a, v, x and p, where they are not zero.
    bends = step_map(cell).pushed(("a", "x")).pulled(("x",), ("a", "v", "x", "p")).nonzero_outputs
    bend_widths = {"a": g, "v": side, "x": 2 * n, "p": own}
    bent = sum(width for name, width in bend_widths.items() if name in bends)
    if read and "x" not in bends:  # r' depends on x, even if the derivatives of the step do not
        bent += 2 * n
    lam_mu_g = 3 * n
    delta_nu = 2 * g
    m = n  # mu_{t-1}, scaled as lam_t is
    plain = saved + g + read + kept_lam + source
    if on_accelerator:  # the inputs of the loop, and all of lam
        plain = saved + 2 * g + n + own + side + read + source
    return {
        "look": saved + g,
        "probe": saved + n + g + side,
        "scaled": 3 * max(g, side) + (g if side else 0),
        "plain": plain,
        "costates": saved + n + g + source,
        "second": saved + lam_mu_g + delta_nu + m + bent + read + turned,
    }


def penalty_bytes(net: Network, G: Penalty) -> float:
    """Measure the bytes of a penalty's graph and norms per costate, on a short sequence of ones."""
    T = 1024  # long enough that what does not grow with T hardly counts
    B = 4
    dtype = net.V.dtype
    layout = Layout.of(None, T, B)
    with PeakBytes() as peak, torch.enable_grad():
        size = torch.ones(T + 1, B, dtype=dtype).requires_grad_()
        size_1 = torch.ones(T + 1, B, dtype=dtype).requires_grad_()
        norms = AllSteps(size, size_1, torch.zeros(T + 1, B, dtype=torch.int32))
        loss = torch.ones(B, dtype=dtype).requires_grad_()
        trajectory = TrajectoryWithoutStates(net, layout, loss, G.name)
        seen = SeenEntries.of(net, G.part)
        objective = G(CostateNorms(trajectory, G.name, norms, loss, seen)).sum() + loss.sum()
        torch.autograd.grad(objective, [size, size_1, loss], allow_unused=True)
    most: int = peak.most
    return most / ((T + 1) * B)

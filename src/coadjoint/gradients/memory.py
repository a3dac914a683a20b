"""Memory: the peak of a gradient, predicted before it is taken, and allocations that do not fragment."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import weakref
from typing import Any

import torch
from torch import Tensor

from ..errors import KindError, Unsupported, brief, check_kind, whole_number
from ..networks.network import Network
from ..sweeps.layout import Layout
from ..sweeps.rows import Rows
from ..sweeps.slopes import step_map
from ..sweeps.torch_internals import TorchDispatchMode, storage_address, tree_leaves
from .segment_parts import AllSteps, CostateNorms, TrajectoryWithoutStates
from .segments import segment_steps


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most = 0, 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        for y in tree_leaves(out):
            if isinstance(y, Tensor):
                self.see(y.untyped_storage())
        return out

    def see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage_address(storage), storage.nbytes()
        if key not in self.alive:
            self.alive.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


def steady() -> None:
    """Arrays of 1 MB or more get pages of their own and give them back when they go, for this process from here on.

    glibc would learn from the first ones to put them on its heap, where they leave holes: half as much memory again for a
    penalty over 100,000 steps. Elsewhere this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if hasattr(os, "confstr") else None
    if mallopt is not None:
        mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


OVERHEAD_BYTES = 3.5e6  # bytes that BLAS and Python take for themselves, about


def predict(net: Network, T: int, B: int, method: Any) -> int:
    """The most bytes that a gradient takes beside the network and its batch, for B samples of T steps.

    Arrays of engine 'cpu' are counted by what is alive at the same time; method is BPTT or Penalised, with segments or
    without. What a penalty of whole costates adds of its own is not counted; samples of different lengths need less for
    the sweeps, and a copy of the batch.
    """
    check_kind("the network", net, Network, "a co.Network")
    whole_number("T", T)
    whole_number("B", B)
    if not hasattr(method, "segments"):
        raise KindError(f"method must be like co.BPTT() or co.Penalised(...); got {brief(method)}.")
    if net.cell is None:
        raise Unsupported(
            "memory is counted from a cell's formula, and this network runs a step function."
        )
    item, rows, segments = net.V.element_size(), T * B, getattr(method, "segments", None)
    steps = T if segments is None else min(T, segment_steps(Rows([B] * T), segments))
    parts, rest = math.ceil(T / steps), T % steps
    swept = (
        (steps + rest) * B * item
    )  # of one entry in a row; arrays of the last, shorter segment are kept apart
    store = parts * B * net.slots * net.hidden * item if parts > 1 else 0
    weights = sum(p.numel() for p in net.parameters())
    width = widths(net)
    found: list[float] = []
    if getattr(method, "penalty", None) is None:
        kept = (
            net.slots * net.hidden if segments is None and net.readout == "every" else 0
        )  # V' dL/da beside its sum
        found.append(store + swept * (width["plain"] + kept) + weights * (8 + 2 * item))
    else:
        second = swept * width["second"] + weights * (16 + 3 * item)
        if segments is None:
            with contextlib.suppress(Unsupported):
                second += int(rows * of_penalty(net, method.penalty))
            found.append(second)
        else:
            scalars = rows * of_penalty(net, method.penalty)
            found += [
                2 * store + swept * width["costates"] + scalars,
                3 * store + second + 2 * rows * item,
            ]
    return int(max(found) + 44 * T + OVERHEAD_BYTES)  # 44: a step's entries in Python's lists


def widths(net: Network) -> dict[str, int]:
    """Entries in a row that are alive at once: in the adjoint, in the costates, before the second adjoint."""
    cell, d, every = net.cell, net.hidden, net.readout == "every"
    assert cell is not None
    n, g, side, own = (
        d * len(y) for y in (cell.slots, cell.gates, cell.side_entries, cell.parameters)
    )
    formula = d * len(cell.read) if cell.read_slot is None else 0
    a = g if cell.needs_a or net.W is None else 0  # otherwise its pages are never touched
    saved = n + a + d * len(cell.saved_nodes) + side
    back = n + own + side if own or side else 0  # lam is kept for p and v
    source = n + d + 6 * net.outputs if every else 0
    bends = step_map(cell).pushed(("a", "x")).pulled(("x",), ("a", "v", "x", "p")).nonzero_outputs
    bent = sum(w for name, w in (("a", g), ("v", side), ("x", 2 * n), ("p", own)) if name in bends)
    if formula and "x" not in bends:
        bent += 2 * n
    turned = 2 * n + d + 12 * net.outputs if every else 0
    return {
        "plain": saved + g + formula + back + source,
        "costates": saved + n + g + source,
        "second": saved + 3 * n + 2 * g + n + bent + formula + turned,  # lam, mu, g; delta, nu; m
    }


def of_penalty(net: Network, G: Any) -> float:
    """Bytes of a penalty's own graph for one costate, with the norms it is made of: found on a short sequence of ones."""
    T, B, dtype = 1024, 4, net.V.dtype
    layout = Layout.of(None, T, B)
    with PeakBytes() as live, torch.enable_grad():
        one = lambda: torch.ones(T + 1, B, dtype=dtype).requires_grad_()
        at = AllSteps(one(), one(), torch.zeros(T + 1, B, dtype=torch.int32))
        loss = torch.ones(B, dtype=dtype).requires_grad_()
        lam = CostateNorms(TrajectoryWithoutStates(net, layout, loss, G.name), G.name, at, loss)
        torch.autograd.grad(
            G(lam).sum() + loss.sum(), [at.size, at.size_1, loss], allow_unused=True
        )
    return live.most / ((T + 1) * B)

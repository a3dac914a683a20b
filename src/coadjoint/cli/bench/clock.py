"""Clocks: contenders take turns, so that a busy machine disturbs all alike, and medians count."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

TURN_MS, ALL_TURNS_MS = (
    50.0,
    3000.0,
)  # milliseconds: of one turn, and of all turns of a slow contender
INSIDE = (True, False)  # JAX multiplies the inputs inside the scan, or before it


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Whether cuDNN and cuBLAS may round products of float32 to tf32; afterwards as before."""
    backends: Any = (torch.backends.cudnn, torch.backends.cuda.matmul)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch has a second name for the same switch
        before = [b.allow_tf32 for b in backends]
        for b in backends:
            b.allow_tf32 = on
        try:
            yield
        finally:
            for b, value in zip(backends, before, strict=True):
                b.allow_tf32 = value


def relative_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    """The largest relative difference of two gradients, over the parameters they share."""
    found = 0.0
    for name in set(a) & set(b):
        x, y = (
            np.asarray(g.cpu() if isinstance(g, Tensor) else g, dtype=np.float64)
            for g in (a[name], b[name])
        )
        difference, size = float(np.linalg.norm(x - y)), float(np.linalg.norm(y))
        found = max(found, difference / size if size > 0 else difference)
        if not np.isfinite(difference):
            return float("inf")
    return found


def time_calls(run: Callable[[], object], calls: int, device: str) -> float:
    """Milliseconds of one call, from `calls` in a row; on a GPU between two events."""
    if device == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / calls
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return 1e3 * (time.perf_counter() - began) / calls


def time_in_turns(
    runs: Mapping[Any, Callable[[], object]],
    rounds: int,
    device: str,
    tick: Callable[[float], None] = lambda share: None,
) -> dict[Any, list[float]]:
    """Milliseconds of a call, for each turn of each contender. In every round each has one turn, of as many calls as
    fill it; one that is slow sits out the later rounds."""
    one = {key: max(time_calls(run, 1, device), 1e-3) for key, run in runs.items()}
    calls = {key: max(1, min(20, int(TURN_MS / ms))) for key, ms in one.items()}
    turns = {key: min(rounds, max(3, int(ALL_TURNS_MS / ms))) for key, ms in one.items()}
    times: dict[Any, list[float]] = {key: [] for key in runs}
    for i in range(rounds):
        for key, run in runs.items():
            if i < turns[key]:
                times[key].append(time_calls(run, calls[key], device))
        tick((i + 1) / rounds)
    return times


def best_time(run: Callable[[], object], device: str, turns: int = 5) -> float:
    """Milliseconds of a call in its best turn: what the machine can do."""
    run()
    calls = max(1, min(1000, int(TURN_MS / max(time_calls(run, 1, device), 1e-4))))
    return min(time_calls(run, calls, device) for _ in range(turns))


def first_line(error: Exception) -> str:
    return str(error).split("\n")[0][:200]


def finite_or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None


def format_ms(ms: float | None) -> str:
    return (
        "" if ms is None else f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
    )

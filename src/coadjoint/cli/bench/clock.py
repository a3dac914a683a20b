"""Clocks: contenders take turns, so that a busy machine disturbs all alike, and medians count."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

TURN_MS = 50.0  # of one turn
ALL_TURNS_MS = 3000.0  # of all turns of a slow contender
MOST_CALLS = 20  # in one turn
FEWEST_TURNS = 3  # enough for a median
WAIT_SECONDS = 0.002  # between two looks at whether the contender before still works
MOST_WAITS = 100
SAME_GRADIENT = 0.05  # gradients further apart than this, tf32 or not, are of different functions
INSIDE = (True, False)  # JAX multiplies the inputs inside the scan, or before it

Key = TypeVar("Key", bound=Hashable)


@contextlib.contextmanager
def tf32(on: bool) -> Iterator[None]:
    """Let cuDNN and cuBLAS round products of float32 to tf32, or not; afterwards as before."""
    cudnn = torch.backends.cudnn
    cublas = torch.backends.cuda.matmul
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer torch has a second name for the same switch
        cudnn_before = cudnn.allow_tf32
        cublas_before = cublas.allow_tf32
        cudnn.allow_tf32 = on
        cublas.allow_tf32 = on
        try:
            yield
        finally:
            cudnn.allow_tf32 = cudnn_before
            cublas.allow_tf32 = cublas_before


def relative_difference(a: Mapping[str, object], b: Mapping[str, object]) -> float:
    """The largest ||x - y|| / ||y|| of two gradients, over the parameters they share.

    a, b: {parameter: gradient x or y}. Infinite if a gradient is not finite. Where y is 0, the
    difference itself counts.
    """
    largest = 0.0
    for name in set(a) & set(b):
        x = _float64(a[name])
        y = _float64(b[name])
        difference = float(np.linalg.norm(x - y))
        size = float(np.linalg.norm(y))
        if not np.isfinite(difference):
            return float("inf")
        largest = max(largest, difference / size if size > 0 else difference)
    return largest


def _float64(array: object) -> np.ndarray:
    """A tensor, or an array of JAX, as a numpy array in float64."""
    if isinstance(array, Tensor):
        array = array.cpu()
    return np.asarray(array, dtype=np.float64)


def time_calls(run: Callable[[], object], calls: int, device: str) -> float:
    """Milliseconds of one call, the mean of `calls` in a row."""
    if device == "cuda":
        return _time_on_gpu(run, calls)
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return 1e3 * (time.perf_counter() - began) / calls


def _time_on_gpu(run: Callable[[], object], calls: int) -> float:
    """Milliseconds of one call, the mean of `calls`, by the GPU's own clock.

    A call returns before the GPU has finished, so events are recorded on the GPU instead.
    """
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / calls


def ignore_progress(share: float) -> None:
    """Report nothing; share: of the rounds that are done."""


def wait_until_idle() -> None:
    """Wait while threads of the contender before still work, after it has returned its result.

    XLA's do, for some 20 ms after a large gradient: on one pinned core they would take the time of
    whoever is next.
    """
    for _ in range(MOST_WAITS):
        begin = time.process_time()
        time.sleep(WAIT_SECONDS)
        if time.process_time() - begin < 0.1 * WAIT_SECONDS:
            return


def time_in_turns(
    runs: Mapping[Key, Callable[[], object]],
    rounds: int,
    device: str,
    tick: Callable[[float], None] = ignore_progress,
    turn_ms: float | None = None,
    all_turns_ms: float = ALL_TURNS_MS,
) -> dict[Key, list[float]]:
    """Milliseconds of a call, for each turn of each contender.

    In every round each contender has one turn, with as many calls as fill turn_ms (by default
    TURN_MS). One that has used all_turns_ms sits out the later rounds. tick: told the share of the
    rounds that are done.
    """
    turn_ms = TURN_MS if turn_ms is None else turn_ms
    calls: dict[Key, int] = {}
    turns: dict[Key, int] = {}
    times: dict[Key, list[float]] = {}
    for key, run in runs.items():
        ms = max(time_calls(run, 1, device), 1e-3)  # a clock may say 0, which cannot divide
        calls[key] = max(1, min(MOST_CALLS, int(turn_ms / ms)))
        turns[key] = min(rounds, max(FEWEST_TURNS, int(all_turns_ms / ms)))
        times[key] = []
    for i in range(rounds):
        for key, run in runs.items():
            if i < turns[key]:
                if device == "cpu":
                    wait_until_idle()
                times[key].append(time_calls(run, calls[key], device))
        tick((i + 1) / rounds)
    return times


def fastest_fifth(times: Sequence[float]) -> float:
    """The time that a fifth of the turns stay below: longer ones may have been disturbed."""
    return sorted(times)[len(times) // 5]


def best_time(run: Callable[[], object], device: str, turns: int = 5) -> float:
    """Milliseconds of a call in its best turn: what the machine can do."""
    run()  # warms up
    ms = max(time_calls(run, 1, device), 1e-4)  # a clock may say 0, which cannot divide
    calls = max(1, min(1000, int(TURN_MS / ms)))
    return min(time_calls(run, calls, device) for _ in range(turns))


def first_line(error: Exception) -> str:
    """The first line of an error, cut to 200 characters."""
    return str(error).split("\n")[0][:200]


def finite_or_none(value: float) -> float | None:
    """The value for JSON, which has no NaN and no infinity: None for those."""
    return value if np.isfinite(value) else None


def format_ms(ms: float | None) -> str:
    """Milliseconds in three digits: "123", "12.3", "1.23" or "0.0123"; "" for None."""
    if ms is None:
        return ""
    if ms < 0.1:
        return f"{ms:.4f}"
    if ms >= 100:
        return f"{ms:.0f}"
    if ms >= 10:
        return f"{ms:.1f}"
    return f"{ms:.2f}"

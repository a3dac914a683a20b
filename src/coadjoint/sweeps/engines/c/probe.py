"""Is engine `cpu` faster than `eager` here? Measured once for a compiler, and kept beside its code.

A compiler may make slow loops of good C. Engine "auto" then runs `eager` in their place. The answer
is measured on one small case for each type of number, and stored in the cache of compiled code by
compiler, flags, processor and the text of the loops. So every run on a machine has the same engine,
and a resumed run has the bits of one that was never stopped. A system that cannot keep the answer
runs `cpu`. Only a clear loss counts: an answer near 1 could be another one if it were measured
again.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from ....cells import library
from ...functions import without_graph
from ...plan import Engine, Saved, SweepPlan
from ...rows import uniform_rows
from .. import eager
from . import compiler, engine
from .source import cell_source

CLEARLY = 1.5  # times as long as `eager`: then `cpu` is not chosen
CASE = (10, 32, 128)  # T, B, d of an elman: most of its time is the product with W
TURNS = 7  # of each engine, of which the best counts
TYPES = (torch.float32, torch.float64)


class Speed(NamedTuple):
    """Milliseconds of a forward and an adjoint sweep."""

    compiled: float
    eager: float


def sweep_function(engine: Engine, dtype: torch.dtype) -> Callable[[], None]:
    """A forward and an adjoint sweep of the case by an engine, as a function to be timed."""
    T, B, d = CASE
    cell = library.named("elman")
    plan = SweepPlan(cell, uniform_rows(T, B), engine, checked=False)
    base = torch.sin(torch.arange(T * B * d, dtype=dtype, device="cpu")).view(T * B, d)
    W = torch.cos(torch.arange(d * d, dtype=dtype, device="cpu")).view(d, d) / d
    x0 = base.new_zeros(B, d)
    s_last = base[:B]

    @without_graph
    def sweeps() -> None:
        x, a, q = engine.forward(plan, base, None, W, x0, None)
        saved = Saved(a, None, x, None, q)
        engine.adjoint(plan, saved, W, None, s_last, None, None, False, False)

    return sweeps


def measure(dtype: torch.dtype) -> Speed:
    """Time both engines in turns, with one thread: the best of each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        runs = [sweep_function(engine, dtype), sweep_function(eager, dtype)]
        best = [float("inf"), float("inf")]
        for turn in range(TURNS + 1):
            for i, run in enumerate(runs):
                began = time.perf_counter()
                run()
                if turn:  # the first compiles, and warms up
                    best[i] = min(best[i], 1e3 * (time.perf_counter() - began))
    finally:
        torch.set_num_threads(threads)
    return Speed(*best)


@functools.cache
def kept_speed(dtype: torch.dtype) -> Speed | None:
    """The speed that was measured here first; None where it cannot be kept, or for other types."""
    working, flags, _ = compiler.compiler_setup()
    if working is None or dtype not in TYPES or compiler.cache_is_temporary():
        return None
    source = cell_source(library.named("elman"), dtype)
    recipe = "\0".join(("speed", source, working.identity, *flags, compiler.processor()))

    def make(out: Path) -> None:
        # In a thread of its own, where no mode of torch is on: neither a default device, nor
        # autocast, nor a trace of operations on tensors without values.
        with ThreadPoolExecutor(1) as alone:
            speed = alone.submit(measure, dtype).result()
        out.write_text(json.dumps(speed._asdict()))

    try:
        return Speed(**json.loads(compiler.cached_file(recipe, ".json", make).read_text()))
    except (OSError, TypeError, ValueError):  # a full disk, or a file that others have touched
        return None


def describe(dtype: torch.dtype) -> str | None:
    """What was measured, in words; None if nothing was."""
    speed = kept_speed(dtype)
    if speed is None:
        return None
    return (
        f"{speed.compiled:.2g} ms where engine 'eager' takes {speed.eager:.2g} "
        f"({str(dtype)[6:]}, measured once)"
    )


def slowness(dtype: torch.dtype) -> str | None:
    """Why `eager` runs instead, as the end of a sentence; None unless `cpu` is clearly slower."""
    speed = kept_speed(dtype)
    if speed is None or speed.compiled <= CLEARLY * speed.eager:
        return None
    return (
        f"is slow here: its compiled loops take {describe(dtype)}. Another compiler may make them "
        "faster ($CC); engine='cpu' runs them all the same."
    )

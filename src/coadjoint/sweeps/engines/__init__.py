"""The only sequential code: forward, adjoint and tangent, one file for each engine.

rows         where time steps lie in flat arrays
pointwise    what is parallel over time: slopes, bends
pointers     how arrays reach compiled code: ordinary tensors with the memory it will read, or not at all
derivatives  the three loops as operations that differentiate any number of times
reference    an engine: the definition
eager        an engine: torch's own operations on a CPU, nothing allocated inside the loops
cpu          an engine: loops in C, made from the cell's formula by the system's compiler
cuda         an engine: persistent kernels on an NVIDIA GPU, made from the cell's formula by NVRTC
scan         an engine: linear recurrences by a parallel scan, on any device
stepwise     an engine: a product and a fused operation for each step, where W is too large for a chip
autograd     any step function, by torch's own differentiation
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from ...cells.cell import Cell
from ...errors import Unsupported, choose
from ..plan import Engine

MODULES = {  # where each engine's three loops live
    "reference": "reference",
    "eager": "eager",
    "cpu": "c.engine",
    "scan": "scan",
    "stepwise": "stepwise",
    "cuda": "cuda.engine",
}
ENGINES = (*MODULES, "autograd")
PREFERRED = {"cpu": ("cpu", "eager"), "cuda": ("scan", "cuda", "stepwise")}  # the fastest first
REPLACED = {"triton": "stepwise"}  # engines of the past, and what runs in their place


class Choice(str):
    """The name of the engine that runs, and why it does."""

    why: str

    def __new__(cls, name: str, why: str) -> Choice:
        choice = super().__new__(cls, name)
        choice.why = why
        return choice


def load(name: str) -> Engine | None:
    """The engine's three loops; None for 'autograd', which has none of its own."""
    if name == "autograd":
        return None
    engine: Any = importlib.import_module(f".{MODULES[name]}", __name__)
    return engine


def resolve(name: str, cell: Cell | None, device: str) -> Choice:
    """The engine for a request. A request by name is honoured or refused, never swapped."""
    if name in REPLACED:
        say(f"engine '{name}' no longer exists: engine '{REPLACED[name]}' runs in its place.")
        name = REPLACED[name]
    choose("engine", name, [*ENGINES, "auto"])
    if cell is None:
        if name in ("auto", "autograd"):
            return Choice("autograd", "a step function is differentiated by torch, step by step")
        raise Unsupported(
            f"engine '{name}' takes its code from a cell's formula, and this network runs a step function. Use engine='autograd' or write the cell with @co.cell."
        )
    if name != "auto":
        refusal = refused(name, device) or declined(name, cell)
        if refusal is not None:
            raise Unsupported(f"engine '{name}' {refusal}")
        return Choice(name, "asked for by name")
    missing, other = "", ""  # the last engine that cannot run here, or not this cell
    for candidate in PREFERRED.get(device, ("reference",)):
        refusal, decline = refused(candidate, device), declined(candidate, cell)
        if refusal is None and decline is None:
            why = f"the cell is a formula and the data is on {device}"
            if missing:
                say(f"engine '{candidate}' runs: {missing}")
            return Choice(candidate, "; ".join(filter(None, (why, missing or other))))
        if refusal is not None:
            missing = f"engine '{candidate}' {refusal}"
        else:
            other = f"engine '{candidate}' {decline}"
    raise AssertionError("the last engine of each list runs everywhere")


@functools.cache
def refused(name: str, device: str) -> str | None:
    """Why an engine cannot run here, as the end of a sentence; None if it can."""
    engine = load(name)
    return None if engine is None else engine.refusal(device)


@functools.cache
def declined(name: str, cell: Cell) -> str | None:
    """Why an engine cannot run this cell, as the end of a sentence; None if it can. Most run any."""
    declines = getattr(load(name), "declines", None)
    return None if declines is None else declines(cell)


@functools.cache  # once
def say(line: str) -> None:
    logging.getLogger("coadjoint").warning(line)

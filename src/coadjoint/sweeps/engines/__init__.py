"""The engines: the three loops over flat arrays, one file or folder for each way of running them.

    forward  ->  x_t          adjoint  <-  lam_t          tangent  ->  mu_t

An engine sees a cell's formula and rows. How sweeps are differentiated is in
differentiable.py. Which engine runs is decided here (resolve, PREFERRED).

reference    the definition
eager/       torch's own operations, on any device
c/           engine `cpu`: loops in C, made from the cell's formula by the system's compiler
cuda/        persistent kernels on an NVIDIA GPU, made from the cell's formula by NVRTC
scan         linear recurrences by a parallel scan, on any device
expressions  the formulas of one step, which eager, c and cuda share
opaque       a sweep as one operator, for torch.compile

Engine `autograd` has no loops of its own: torch differentiates a step function (sweeps/run.py: Stepped).
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
    "cuda": "cuda.engine",
}
ENGINES = (*MODULES, "autograd")
PREFERRED = {"cpu": ("cpu", "eager"), "cuda": ("scan", "cuda", "eager")}  # the fastest first
REPLACED = {
    "stepwise": "eager",
    "triton": "eager",
}  # engines of the past, and what runs in their place


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


def current_name(name: str) -> str:
    """The name of an engine as it is now, or 'auto'. A name of the past gives what replaced it, and says so once."""
    if isinstance(name, str) and name in REPLACED:
        warn_once(f"engine '{name}' is deprecated: engine '{REPLACED[name]}' runs in its place.")
        return REPLACED[name]
    return choose("engine", name, [*ENGINES, "auto"])


def resolve(name: str, cell: Cell | None, device: str) -> Choice:
    """The engine for a request. A request by name is honoured or refused, never swapped."""
    name = current_name(name)
    if cell is None:
        if name in ("auto", "autograd"):
            return Choice("autograd", "a step function is differentiated by torch, step by step")
        raise Unsupported(
            f"engine '{name}' takes its code from a cell's formula, and this network runs a step function. Use engine='autograd' or write the cell with @co.cell."
        )
    if name != "auto":
        refusal = device_refusal(name, device) or cell_refusal(name, cell)
        if refusal is not None:
            raise Unsupported(f"engine '{name}' {refusal}")
        return Choice(name, "asked for by name")
    missing, other = "", ""  # the last engine that cannot run here, or not this cell
    for candidate in PREFERRED.get(device, ("reference",)):
        refusal, decline = device_refusal(candidate, device), cell_refusal(candidate, cell)
        if refusal is None and decline is None:
            why = f"the cell is a formula and the data is on {device}"
            if missing:
                warn_once(f"engine '{candidate}' runs: {missing}")
            return Choice(candidate, "; ".join(filter(None, (why, missing or other))))
        if refusal is not None:
            missing = f"engine '{candidate}' {refusal}"
        else:
            other = f"engine '{candidate}' {decline}"
    raise AssertionError("the last engine of each list runs everywhere")


@functools.cache
def device_refusal(name: str, device: str) -> str | None:
    """Why an engine cannot run here, as the end of a sentence; None if it can."""
    engine = load(name)
    return None if engine is None else engine.refusal(device)


@functools.cache
def cell_refusal(name: str, cell: Cell) -> str | None:
    """Why an engine cannot run this cell, as the end of a sentence; None if it can. Most run any."""
    cell_refusal = getattr(load(name), "cell_refusal", None)
    return None if cell_refusal is None else cell_refusal(cell)


@functools.cache  # once
def warn_once(line: str) -> None:
    logging.getLogger("coadjoint").warning(line)

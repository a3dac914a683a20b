"""The engines: the three loops over flat arrays, one file or folder for each way of running them.

    forward  ->  x_t          adjoint  <-  lam_t          tangent  ->  mu_t

An engine sees a cell's formula and rows. How sweeps are differentiated is in differentiable.py.
Which engine runs is decided here (resolve, PREFERRED).

reference      the definition
eager/         torch's own operations, on any device
c/             engine `cpu`: loops in C, made from the cell's formula by the system's compiler
cuda/          persistent kernels on an NVIDIA GPU, made from the cell's formula by NVRTC
scan           linear recurrences by a parallel scan, on any device
parallel_scan  the scan itself, over several kinds of numbers
expressions    the formulas of one step, which eager, c and cuda share
denormals      denormal numbers as zeros, for eager and scan on a CPU
opaque         a sweep as one operator, for torch.compile

Engine `autograd` has no loops here: torch differentiates a step function (sweeps/run.py: Stepped).
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import cast

import torch

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
PROBES = {"cpu": "c.probe"}  # modules that know whether an engine is slow here
# The fastest first. The last engine of each list runs any cell.
PREFERRED = {"cpu": ("cpu", "eager"), "cuda": ("scan", "cuda", "eager")}
REPLACED = {"stepwise": "eager", "triton": "eager"}  # deprecated names, and what runs instead


class Choice(str):
    """The name of the engine that runs, and why it does."""

    why: str

    def __new__(cls, name: str, why: str) -> Choice:
        """Make the string `name` with the reason `why`, in __new__ because a str is immutable."""
        choice = super().__new__(cls, name)
        choice.why = why
        return choice


@functools.cache
def load(name: str) -> Engine | None:
    """Import the module with an engine's three loops; None for 'autograd', which has no module."""
    if name == "autograd":
        return None
    return cast(Engine, importlib.import_module(f".{MODULES[name]}", __name__))


def current_name(name: str) -> str:
    """Check the name of an engine, or 'auto'. A deprecated name is replaced, with a warning."""
    if isinstance(name, str) and name in REPLACED:
        warn_once(f"engine '{name}' is deprecated: engine '{REPLACED[name]}' runs in its place.")
        return REPLACED[name]
    return choose("engine", name, [*ENGINES, "auto"])


def resolve(
    name: str, cell: Cell | None, device: str, dtype: torch.dtype = torch.float32
) -> Choice:
    """The engine for a request: a name, or 'auto'. One asked for by name runs or is refused.

    cell: None for a step function, which has no formula.
    device: the type of the device where the data is, "cpu" or "cuda" for instance.
    dtype: of the numbers; one engine may be the faster in float32, and another one in float64.
    """
    name = current_name(name)
    if cell is None:
        if name in ("auto", "autograd"):
            return Choice("autograd", "a step function is differentiated by torch, step by step")
        raise Unsupported(
            f"engine '{name}' generates its code from a cell's formula, but this network runs a "
            "step function. Use engine='autograd' or write the cell with @co.cell."
        )
    if name == "auto":
        return choose_engine(cell, device, dtype)
    refusal = device_refusal(name, device) or cell_refusal(name, cell)
    if refusal is not None:
        raise Unsupported(f"engine '{name}' {refusal}")
    return Choice(name, "requested by name")


def choose_engine(cell: Cell, device: str, dtype: torch.dtype) -> Choice:
    """The fastest engine that runs this cell on this device, and why a faster one does not."""
    missing = ""  # the last engine that cannot run here
    unsuited = ""  # the last engine that cannot run this cell
    # The fastest first; a device without a list (mps, ...) gets the engine that runs anywhere.
    for name in PREFERRED.get(device, ("reference",)):
        of_device = device_refusal(name, device) or slowness(name, dtype)
        of_cell = cell_refusal(name, cell)
        if of_device is not None:
            missing = f"engine '{name}' {of_device}"
        elif of_cell is not None:
            unsuited = f"engine '{name}' {of_cell}"
        else:
            break
    else:
        raise AssertionError("the last engine of each list runs everywhere")
    if missing:  # something could be installed; nothing helps an unsuited cell
        warn_once(f"using engine '{name}': {missing}")
    reasons = [f"the cell is a formula and the data is on {device}"]
    if missing or unsuited:
        reasons.append(missing or unsuited)
    return Choice(name, "; ".join(reasons))


@functools.cache
def device_refusal(name: str, device: str) -> str | None:
    """Why an engine cannot run on a device, as the end of a sentence; None if it can."""
    engine = load(name)
    return None if engine is None else engine.refusal(device)


@functools.cache
def cell_refusal(name: str, cell: Cell) -> str | None:
    """Why an engine cannot run a cell, as the end of a sentence; None if it can, as most do."""
    refusal = getattr(load(name), "cell_refusal", None)
    return None if refusal is None else refusal(cell)


@functools.cache
def slowness(name: str, dtype: torch.dtype) -> str | None:
    """Why 'auto' passes over an engine that could run, as the end of a sentence; None if not."""
    if name not in PROBES:
        return None
    probe = importlib.import_module(f".{PROBES[name]}", __name__)
    reason: str | None = probe.slowness(dtype)
    return reason


@functools.cache
def warn_once(line: str) -> None:
    """Log a warning the first time this line is given."""
    logging.getLogger("coadjoint").warning(line)

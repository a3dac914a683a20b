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
triton       an engine: persistent kernels in Triton, for other GPUs
autograd     any step function, by torch's own differentiation
"""

from __future__ import annotations

import functools
import importlib
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cells import Cell
from ..errors import Unsupported, choose
from . import derivatives
from .autograd import Costate, Stepped
from .derivatives import Engine, Plan, Tape
from .rows import Link, Rows, scale

ENGINES = ("reference", "eager", "cpu", "scan", "stepwise", "cuda", "triton", "autograd")
PREFERRED = {"cpu": ("cpu", "eager"), "cuda": ("scan", "cuda", "triton", "stepwise")}  # the fastest first


class Choice(str):
    """The name of the engine that runs, and why it does."""

    why: str

    def __new__(cls, name: str, why: str) -> Choice:
        choice = super().__new__(cls, name)
        choice.why = why
        return choice


def load(name: str) -> Engine | None:
    """The engine's three loops; None for 'autograd', which has none of its own."""
    return None if name == "autograd" else importlib.import_module(f".{name}", __name__)


def resolve(name: str, cell: Cell | None, device: str) -> Choice:
    """The engine for a request. A request by name is honoured or refused, never swapped."""
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


@dataclass(frozen=True, eq=False)
class Swept:
    """A run of a formula: its states, and its costates and tangents by the three loops."""

    plan: Plan
    tape: Tape
    W: Tensor | None
    last: Tensor  # [B, n]

    @staticmethod
    def run(plan: Plan, base: Tensor, side: Tensor | None, W: Tensor | None, x0: Tensor, p: Tensor | None) -> Swept:
        tape, last = derivatives.forward(plan, base, side, W, x0, p)
        return Swept(plan, tape, W, last)

    @property
    def x(self) -> Tensor:
        return self.tape.x

    def costate(
        self, s: Tensor | None, s_last: Tensor | None, declared: Tensor | None, unit: Tensor | None = None
    ) -> Costate:
        """Arguments as in derivatives.costate."""
        mantissa, delta, k = derivatives.costate(self.plan, self.tape, self.W, s, s_last, declared, unit)
        return Costate(mantissa, k, lambda: (delta, *self._side(mantissa)))

    def _side(self, lam: Tensor) -> tuple[Tensor | None, ...]:
        """f_v' lam, if there is a v"""
        rows, tape = self.plan.rows, self.tape
        if tape.v is None:
            return ()
        op = derivatives.next_of(self.plan.cell).pulled(("x",), ("v",))
        known = (tape.x[rows.B :], tape.q)
        return (op(known, tape.a, tape.v, rows.prev(tape.x), tape.p, lam[rows.B :], rows=rows)["v"],)

    def pull(self, lam: Tensor, frozen: bool = False) -> Tensor:
        """J_t' lam_t for all steps at once, from state rows to step rows; frozen: everything but W held constant."""
        cell, rows, tape = self.plan.cell, self.plan.rows, self.tape
        if frozen:
            tape = Tape(*(None if y is None else y.detach() for y in tape))  # type: ignore[arg-type]
        xprev = rows.prev(tape.x)
        op = derivatives.next_of(cell).pulled(("x",), ("a", "x"))
        back = op((tape.x[rows.B :], tape.q), tape.a, tape.v, xprev, tape.p, lam[rows.B :])
        through = None
        if self.W is not None and back["a"] is not None:
            through = derivatives.read_pull(cell, xprev, back["a"] @ self.W)
        total = derivatives.plus(back["x"], through)
        return torch.zeros_like(xprev) if total is None else total

    def push(
        self,
        base: Tensor | None,
        side: Tensor | None,
        W: Tensor | None = None,
        x0: Tensor | None = None,
        p: Tensor | None = None,
    ) -> Tensor:
        """The tangent mu [B + N, n] for directions of what went into the sweep."""
        return derivatives.push(self.plan, self.tape, self.W, base, side, W, x0, p)[0]


__all__ = [
    "ENGINES",
    "Choice",
    "Engine",
    "Link",
    "Plan",
    "Rows",
    "Stepped",
    "Swept",
    "Tape",
    "load",
    "resolve",
    "scale",
]

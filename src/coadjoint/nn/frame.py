"""One layer in one direction as a sweep over flat rows: its formula, its weights as the formula takes them, its rows.

torch's two biases are one here, but for the GRU's b_hn, which stands inside the reset.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..cells import library
from ..cells.cell import Cell
from ..cells.parameters import DTYPES
from ..errors import InputError, Unsupported
from ..networks.recurrence import formula_step
from ..sweeps import engines
from ..sweeps.engines import opaque
from ..sweeps.layout import check_dense
from ..sweeps.plan import SweepPlan
from ..sweeps.pointers import is_traced, unusual_kind
from ..sweeps.functions import vmap_error
from ..sweeps.rows import Rows
from ..sweeps.run import FormulaRun, StepFunctionRun
from ..sweeps.torch_internals import is_batched
from . import recording

FORMULAS = {
    "RNN_TANH": library.elman("tanh"),
    "RNN_RELU": library.elman("relu"),
    "LSTM": library.lstm,
    "GRU": library.gru,
}
HALF = (
    "the weights are {}; sweeps run in float32 or float64, for half precision loses what derivatives live on. Keep the "
    "module in float32 and use torch.autocast around the model: these modules then compute and return float32."
)


def find_formula(
    mode: str, peephole: bool = False, dropout: bool = False, zoneout: bool = False
) -> tuple[Cell, str]:
    """The cell of a module, and its name in compiled programs."""
    name = mode + " peephole" * peephole + " dropout" * dropout + " zoneout" * zoneout
    if name not in opaque.CELLS_BY_NAME:
        base = library.peephole if peephole else FORMULAS[mode]
        opaque.CELLS_BY_NAME[name] = (
            library.noisy(base, dropout, zoneout) if dropout or zoneout else base
        )
        _ = opaque.CELLS_BY_NAME[
            name
        ].side  # before torch.compile looks on: it does not enter the lock of a cached property
    return opaque.CELLS_BY_NAME[name], name


for mode in FORMULAS:
    find_formula(mode)


def merge_biases(mode: str, ih: Tensor | None, hh: Tensor | None) -> Tensor | None:
    """b, of torch's two."""
    if ih is None or hh is None:
        return None
    return ih + (
        pad(hh[: 2 * len(hh) // 3], (0, len(hh) // 3)) if mode == "GRU" else with_own_gradient(hh)
    )


def with_own_gradient(y: Tensor) -> Tensor:
    """y, whose gradient shares its memory with no other parameter's."""
    if seen_as_operators(y):
        return opaque.with_own_gradient(y)
    return y * 1 if torch.is_grad_enabled() else y


def seen_as_operators(*tensors: Tensor) -> bool:
    """Does torch write operations down (torch.compile, torch.export, make_fx) or imagine them (FakeTensorMode)? Then a sweep
    is one operator to it, without rows."""
    return torch.compiler.is_compiling() or is_traced(*tensors)


def reset_bias(mode: str, W: Tensor, hh: Tensor | None) -> Tensor | None:
    """p of the GRU: the bias inside its reset."""
    if mode != "GRU":
        return None
    d = len(W) // 3
    return W.new_zeros(d) if hh is None else hh[2 * d :]


def split_base_and_side(cell: Cell, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """(base, side) of v = R u + b: a gate where v is used apart from z has nothing in base."""
    if not cell.side:
        return v, None
    gates = dict(zip(cell.gates, v.chunk(len(cell.gates), 1), strict=True))
    base = [torch.zeros_like(y) if g in cell.side else y for g, y in gates.items()]
    return torch.cat(base, 1), torch.cat([gates[g] for g in cell.side], 1)


class Frame:
    """T steps of B samples: as rows, or, where torch.compile looks on, as the two numbers alone."""

    def __init__(self, T: int, B: int, rows: Rows | None) -> None:
        self.T, self.B, self.rows = T, B, rows
        self.is_recorded = rows is not None and bool(recording.active_tapes)

    def reverse_time(self, y: Tensor) -> Tensor:
        """A step array with the time of each sample reversed; its own inverse."""
        if self.rows is None:
            return y.unflatten(0, (self.T, self.B)).flip(0).flatten(0, 1)
        return self.rows.reverse_time(y)

    def join_directions(self, heads: list[Tensor], top: bool) -> Tensor:
        """h of each direction side by side. top: it is the module's output, which its user may change."""
        if len(heads) > 1:
            return torch.cat(heads, 1)
        return self.copy_out(heads[0]) if top else heads[0]

    def copy_out(self, y: Tensor) -> Tensor:
        """A copy, so that whoever changes it leaves the sweep's states alone; inductor takes torch's own copies for spare."""
        return (
            y.clone(memory_format=torch.contiguous_format)
            if self.rows is not None
            else opaque.with_own_gradient(y)
        )

    def repeat_over_steps(self, y: Tensor) -> Tensor:
        """What samples have, [B, .], for each of their steps."""
        if self.rows is None or self.rows.uniform:
            return y.expand(self.T, *y.shape).flatten(0, 1)
        return y.index_select(0, self.rows.sample.to(y.device))


def run_sweep(
    cell: Cell,
    name: str,
    engine: str,
    frame: Frame,
    base: Tensor,
    side: Tensor | None,
    W: Tensor,
    x0: Tensor,
    p: Tensor | None,
) -> tuple[Tensor, Tensor, FormulaRun | StepFunctionRun | None]:
    """-> (x [B + N, n], the last state of each sample, the run)"""
    rows = frame.rows
    if rows is None:
        x = opaque.sweep(base, side, W, x0, p, name, engine)[0]
        return x, x[-frame.B :], None
    found: FormulaRun | StepFunctionRun
    sweep = engines.load(engines.resolve(engine, cell, base.device.type))
    if sweep is None:
        drive = (base,) if side is None else (base, side)
        found = StepFunctionRun.run(formula_step(cell, W, p), rows, drive, x0, checked=False)
    else:
        found = FormulaRun.run(SweepPlan(cell, rows, sweep, checked=False), base, side, W, x0, p)
    return found.x, found.last, found


def check_weights(W: Tensor) -> None:
    if W.dtype not in DTYPES:
        raise Unsupported(HALF.format(str(W.dtype)[6:]))


def check_input(input: Tensor, W: Tensor) -> None:
    """What torch's own checks leave out."""
    check_dense("the input", input)
    if is_batched(input):
        raise vmap_error()
    if torch.jit.is_tracing():
        raise Unsupported(
            "torch.jit.trace sees torch's own operations, and a sweep is none. Use torch.export, or to_torch()."
        )
    if input.layout is not torch.strided:
        kind, way_out = unusual_kind(input) or ("", "")
        raise Unsupported(f"the input is {kind}; expected a dense tensor. {way_out}")
    if input.device != W.device:
        raise InputError(
            f"the input is on {input.device} but the module is on {W.device}; move one of them with .to()."
        )


def check_probability(name: str, p: Any) -> float:
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
        raise InputError(f"{name} must be a probability, 0 <= p < 1; got {p!r}.")
    return float(p)

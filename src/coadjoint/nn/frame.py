"""One layer in one direction as a sweep over flat rows: its formula, weights and rows.

torch's two biases are merged into one, except the GRU's b_hn, which the reset gate multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..cells import classic
from ..cells.cell import Cell
from ..cells.noise import noisy
from ..cells.parameters import DTYPES
from ..errors import InputError, Unsupported
from ..networks.effective_weights import formula_step
from ..sweeps import engines
from ..sweeps.engines import opaque
from ..sweeps.functions import vmap_error
from ..sweeps.layout import check_dense
from ..sweeps.plan import SweepPlan
from ..sweeps.pointers import is_traced, refuse_if_without_memory, unusual_kind
from ..sweeps.rows import Rows
from ..sweeps.run import FormulaRun
from ..sweeps.step_run import StepFunctionRun
from ..sweeps.torch_internals import is_batched
from . import recording

FORMULAS = {
    "RNN_TANH": classic.elman("tanh"),
    "RNN_RELU": classic.elman("relu"),
    "LSTM": classic.lstm,
    "GRU": classic.gru,
}
HALF_PRECISION = (
    "the weights are {}; sweeps run in float32 or float64, because derivatives lose too many "
    "digits in half precision. Keep the module in float32 and use torch.autocast around the model: "
    "these modules then compute and return float32."
)


class DirectionWeights(NamedTuple):
    """The parameters of a layer in one direction, by torch.nn's names and those of our options."""

    weight_ih: Tensor
    weight_hh: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None
    weight_hr: Tensor | None  # with proj_size
    weight_pi: Tensor | None  # with peephole=True
    weight_pf: Tensor | None
    weight_po: Tensor | None
    gain_ih: Tensor | None  # with layer_norm=True
    gain_hh: Tensor | None
    gain_c: Tensor | None
    shift_c: Tensor | None

    @staticmethod
    def find(weights: Mapping[str, Tensor], suffix: str) -> DirectionWeights:
        """The weights whose names end with this suffix, as _l0 in weight_ih_l0.

        They are None where the module does not have them.
        """
        optional = [weights.get(name + suffix) for name in DirectionWeights._fields[2:]]
        weight_ih = weights["weight_ih" + suffix]
        weight_hh = weights["weight_hh" + suffix]
        return DirectionWeights(weight_ih, weight_hh, *optional)


PEEPHOLES = ("weight_pi", "weight_pf", "weight_po")
NORMS = ("gain_ih", "gain_hh", "gain_c", "shift_c")


def find_formula(
    mode: str, peephole: bool = False, dropout: bool = False, zoneout: bool = False
) -> tuple[Cell, str]:
    """The cell of a module with these options, and its name in compiled programs.

    dropout, zoneout: whether the cell reads the noise of recurrent dropout and of zoneout. Cells
    are made once.
    """
    name = mode + " peephole" * peephole + " dropout" * dropout + " zoneout" * zoneout
    if name not in opaque.CELLS_BY_NAME:
        cell = classic.peephole if peephole else FORMULAS[mode]
        if dropout or zoneout:
            cell = noisy(cell, dropout, zoneout)
        # Computed now: torch.compile cannot enter the lock of a cached property.
        _ = cell.side
        opaque.CELLS_BY_NAME[name] = cell
    return opaque.CELLS_BY_NAME[name], name


for known_mode in FORMULAS:
    find_formula(known_mode)


def merge_biases(mode: str, ih: Tensor | None, hh: Tensor | None) -> Tensor | None:
    """The formula's bias b = b_ih + b_hh; of a GRU without b_hn, the last third of b_hh.

    That one is not merged because the reset gate multiplies it (see reset_bias).
    """
    if ih is None or hh is None:
        return None
    if mode == "GRU":
        return ih + pad(hh[: 2 * len(hh) // 3], (0, len(hh) // 3))
    return ih + with_own_gradient(hh)


def with_own_gradient(y: Tensor) -> Tensor:
    """`y` by an operation that gives its gradient memory of its own.

    The gradients of the terms of a sum would otherwise be one tensor for two parameters.
    """
    if is_seen_as_operators(y):  # torch.compile would remove a product with 1
        copied: Tensor = opaque.with_own_gradient(y)
        return copied
    return y * 1 if torch.is_grad_enabled() else y


def is_seen_as_operators(*tensors: Tensor) -> bool:
    """Tell whether torch is tracing: writing operations down, or inferring their shapes alone.

    It does so in torch.compile, torch.export, make_fx and FakeTensorMode. A sweep is then one
    operator to it, without rows.
    """
    return torch.compiler.is_compiling() or is_traced(*tensors)


def reset_bias(mode: str, W: Tensor, hh: Tensor | None) -> Tensor | None:
    """The formula's own parameter p: of a GRU the bias b_hn, which the reset gate multiplies.

    None for other cells. hh: torch's bias_hh, None without biases; W: weight_hh.
    """
    if mode != "GRU":
        return None
    d = len(W) // 3  # b_hn is the last of three blocks
    return W.new_zeros(d) if hh is None else hh[2 * d :]


def split_base_and_side(cell: Cell, v: Tensor) -> tuple[Tensor, Tensor | None]:
    """Split v = R u + b [N, gates d] into base, to be added to W r(x), and side, which is not.

    side holds the gates that the formula reads apart from W r(x), as the GRU's candidate; their
    part of base is zero. None if there are no such gates.
    """
    if not cell.side:
        return v, None
    gates = dict(zip(cell.gates, v.chunk(len(cell.gates), 1), strict=True))
    side = torch.cat([gates[name] for name in cell.side], 1)
    for name in cell.side:
        gates[name] = torch.zeros_like(gates[name])
    return torch.cat(list(gates.values()), 1), side


class Frame:
    """T steps of B samples: as rows, or as the two numbers alone where torch.compile traces."""

    def __init__(self, T: int, B: int, rows: Rows | None) -> None:
        """With rows None where torch traces, or for an empty batch."""
        self.T = T
        self.B = B
        self.rows = rows
        self.is_recorded = rows is not None and bool(recording.active_tapes)

    def reverse_time(self, y: Tensor) -> Tensor:
        """A step array [N, .] with the time of each sample reversed; its own inverse."""
        if self.rows is None:  # all samples have T steps
            reversed_y: Tensor = y.unflatten(0, (self.T, self.B)).flip(0).flatten(0, 1)
            return reversed_y
        return self.rows.reverse_time(y)

    def join_directions(self, heads: list[Tensor], top: bool) -> Tensor:
        """The h of one or two directions side by side, [N, directions hidden].

        top: this is the module's output, which a user may change in place, so it is a copy.
        """
        if len(heads) > 1:
            return torch.cat(heads, 1)
        return self.copy_out(heads[0]) if top else heads[0]

    def copy_out(self, y: Tensor) -> Tensor:
        """A copy, so that whoever changes it in place leaves the sweep's states alone."""
        if self.rows is not None:
            return y.clone(memory_format=torch.contiguous_format)
        # torch.compile's inductor removes copies that it takes for superfluous, but not this one.
        copy: Tensor = opaque.with_own_gradient(y)
        return copy

    def repeat_over_steps(self, y: Tensor) -> Tensor:
        """Values of the samples, [B, .], repeated for each of their steps, [N, .]."""
        if self.rows is None or self.rows.uniform:
            return y.expand(self.T, *y.shape).flatten(0, 1)
        return y.index_select(0, self.rows.sample.to(y.device))


class SweepInputs(NamedTuple):
    """What a forward sweep of a cell reads."""

    cell: Cell
    name: str  # of the cell in compiled programs
    base: Tensor  # R u + b, to be added to W r(x), [N, gates d]
    side: Tensor | None  # what the formula reads apart from that, [N, .]
    W: Tensor
    x0: Tensor  # [B, n]
    p: Tensor | None  # the formula's own parameters


def drive_of(inputs: SweepInputs) -> tuple[Tensor, ...]:
    """The inputs of a sweep that are step arrays, and so depend on the layer's input."""
    return (inputs.base,) if inputs.side is None else (inputs.base, inputs.side)


def run_sweep(
    engine_name: str, frame: Frame, inputs: SweepInputs
) -> tuple[Tensor, Tensor, FormulaRun | StepFunctionRun | None]:
    """Sweep forward; return all states x [B + N, n], each sample's last state [B, n], and the run.

    The run, for costates, is None where torch traces: the sweep is then one operator.
    """
    cell, name, base, side, W, x0, p = inputs
    rows = frame.rows
    if rows is None:
        x = opaque.sweep(base, side, W, x0, p, name, engine_name)[0]
        return x, x[-frame.B :], None
    engine = engines.load(engines.resolve(engine_name, cell, base.device.type, base.dtype))
    run: FormulaRun | StepFunctionRun
    if engine is None:  # engine 'autograd': no formula, but torch's own derivatives of a step
        step = formula_step(cell, W, p)
        run = StepFunctionRun.run(step, rows, drive_of(inputs), x0, checked=False)
    else:
        plan = SweepPlan(cell, rows, engine, checked=False)
        run = FormulaRun.run(plan, base, side, W, x0, p)
    return run.x, run.last, run


def check_weights(W: Tensor) -> None:
    """Refuse weights that are not float32 or float64, such as those in half precision."""
    if W.dtype not in DTYPES:
        raise Unsupported(HALF_PRECISION.format(str(W.dtype)[6:]))  # without "torch."


def check_input(input: Tensor, W: Tensor) -> None:
    """Refuse inputs that torch's own checks let through but sweeps cannot read.

    W: a weight of the module, for its device.
    """
    check_dense("the input", input)
    if is_batched(input):
        raise vmap_error()
    if torch.jit.is_tracing():  # type: ignore[attr-defined]
        raise Unsupported(
            "torch.jit.trace sees only torch's own operations, but a sweep is not one of them. "
            "Use torch.export, or to_torch()."
        )
    if input.layout is not torch.strided:
        kind, way_out = unusual_kind(input) or ("", "")
        raise Unsupported(f"the input is {kind}; expected a dense tensor. {way_out}")
    if input.device != W.device:
        raise InputError(
            f"the input is on {input.device} but the module is on {W.device}; move one of them "
            "with .to()."
        )


def check_memory(
    u: Tensor, states: Sequence[Tensor], weights: Iterable[tuple[str, Tensor]]
) -> None:
    """Refuse inputs, states and weights that keep their values elsewhere, such as DTensor."""
    named_states = [("hx", y) for y in states]
    refuse_if_without_memory([("the input", u), *named_states, *weights])


def zero_of(module: nn.Module, u: Tensor) -> Tensor:
    """A scalar 0 that depends on every parameter and on u, so that they have gradients of zero."""
    total: Tensor = sum(p.sum() for p in module.parameters()) * u.sum() * 0
    return total


def check_probability(name: str, p: object) -> float:
    """`p`, if 0 <= p < 1; otherwise an error."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
        raise InputError(f"{name} must be a probability, 0 <= p < 1; got {p!r}.")
    return float(p)

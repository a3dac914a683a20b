"""Recurrence: one recurrent layer, x_t = f(W r(x_{t-1}), R u_t + b, x_{t-1}, p), and the sweep that runs it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..cells import library, steps, structures
from ..cells.activations import Activation
from ..cells.cell import Cell, Uniform
from ..cells.parameters import check_dtype_and_device, parameter
from ..cells.transport import PicklableModule
from ..errors import MAX_COUNT, InputError, KindError, Unsupported, brief, choose
from ..sweeps import engines
from ..sweeps.affine import affine
from ..sweeps.engines import Choice
from ..sweeps.layout import Layout, check_dense, check_like, nonfinite_error
from ..sweeps.plan import SweepPlan, require_finite
from ..sweeps.rows import Rows
from ..sweeps.run import FormulaRun, StepFunctionRun, SweepRun

WeightAndBias = tuple[Tensor, Tensor | None]
InputWeights = tuple[WeightAndBias, WeightAndBias | None]
# What the inputs say to each step: (base, side) for a formula, (u,) for a step function.
Drive = tuple[Tensor | None, ...]


def check_positive(**sizes: Any) -> None:
    for name, value in sizes.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name} must be a positive integer; got {brief(value)}.")
        if int(value) > MAX_COUNT:
            raise InputError(f"{name} must be at most {MAX_COUNT:,}; got {brief(value)}.")


class EffectiveWeights:
    """The weights of a recurrence as its formula takes them: W with its structure and mask, and what the cell's own
    `weights` make of W, R and b.

    W         [gates d, reads d]; None if the cell has none
    R, b      rows of all that enters, gates and inputs
    input_weights  (base, side): (R, b) of what is added to W r(x), and of what enters beside it, None if nothing does
    p         the cell's own parameters side by side; None if it has none
    x0        where states begin if they are not told
    """

    def __init__(self, of: Recurrence) -> None:
        assert of.cell is not None
        self.of, self.cell = of, of.cell
        W: Tensor | None = of.W  # looked up once: a structured W is made anew each time
        if W is not None and of.mask is not None:
            W = W * of.mask
        R: Tensor = of.R
        b: Tensor | None = of.b
        if of.cell.weights is not None:
            assert W is not None
            W, R, b = of.cell.weights(W, R, b, dict(of.p.items()))
        self.W, self.R, self.b = W, R, b

    @property
    def x0(self) -> Tensor:
        return self.of.x0

    @property
    def p(self) -> Tensor | None:
        """Each times one, so that its gradient is not a part of another's memory."""
        own = self.of.p
        return torch.cat([y * 1 for y in own.values()]) if len(own) else None

    @property
    def input_weights(self) -> InputWeights:
        """(base, side): the weights and biases that make the drive of the inputs."""
        cell, d = self.cell, self.of.hidden
        if cell.driven_entries == cell.gates and not cell.side:
            return (self.R, self.b), None
        place = {name: i * d for i, name in enumerate(cell.driven_entries)}

        def of(y: Tensor, names: Sequence[str | None]) -> Tensor:
            none = y.new_zeros(d, *y.shape[1:])
            return torch.cat([none if n is None else y[place[n] : place[n] + d] for n in names])

        def pick(names: Sequence[str | None]) -> WeightAndBias:
            return of(self.R, names), None if self.b is None else of(self.b, names)

        together = [g if g in place and g not in cell.side else None for g in cell.gates]
        apart = [*cell.side, *cell.inputs]
        return pick(together), pick(apart) if apart else None

    def step_function(self) -> Callable[..., Tensor]:
        """(base_t, side_t, x_{t-1}) -> x_t, by torch's own operations; side_t is left out where there is none."""
        return formula_step(self.cell, self.W, self.p)


class Recurrence(PicklableModule):
    """The recurrent part of a Network, a layer of a Stack; arguments as in Network.

    Parameters: W (recurrent), R (input), b, x0 if learned, and the cell's own under `p`; a step function has its own."""

    W: nn.Parameter | None
    R: nn.Parameter
    b: nn.Parameter | None
    x0: Tensor
    mask: Tensor | None

    def __init__(
        self,
        cell: str | Cell | nn.Module | Callable[..., Any] = "elman",
        *,
        inputs: int,
        hidden: int,
        activation: Activation | None = None,
        x0: str | Tensor = "zero",
        bias: bool = True,
        mask: Tensor | None = None,
        structure: str | nn.Module | None = None,
        engine: str = "auto",
        slots: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_positive(inputs=inputs, hidden=hidden)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_dtype_and_device(dtype, device)
        self.inputs, self.hidden = inputs, hidden
        make: dict[str, Any] = {"dtype": dtype, "device": device}
        self.cell: Cell | None = None
        self.step: Any = None
        if isinstance(cell, str) and cell in steps.STEPS:
            given = options if activation is None else {**options, "activation": activation}
            self.step = cell = steps.named(cell, inputs, hidden, bias=bias, **given, **make)
            activation, options = None, {}
        elif isinstance(cell, str):
            choose("cell", cell, (*library.CELLS, *steps.STEPS))
            self.cell = library.named(cell, activation, **options)
        elif isinstance(cell, Cell):
            self.cell = cell
            if cell.given and cell.data is None:
                raise Unsupported(
                    f"cell '{cell.name}' is given data at each step ({', '.join(cell.given)}), and a Network has only inputs. Use co.nn, or make it a gate that reads an input."
                )
        elif callable(cell):
            self.step = cell
        else:
            raise KindError(
                f"cell must be a name, a cell made with @co.cell, a torch cell module or a step function; got {type(cell).__name__}."
            )
        if not isinstance(cell, str) and (activation is not None or options):
            names = ", ".join((["activation"] if activation is not None else []) + [*options])
            raise InputError(
                f"{names}= belongs to a cell given by name; a formula or a step function has its own."
            )
        self.engine = engine
        self.p = nn.ParameterDict()
        if slots is not None:
            check_positive(slots=slots)
        if self.cell is None:
            self.slots = (
                slots or getattr(cell, "slots", None) or (2 if isinstance(cell, nn.LSTMCell) else 1)
            )
            if mask is not None or structure is not None:
                what = "mask" if mask is not None else "structure"
                raise InputError(f"{what}= acts on W; a step function holds its own weights.")
        else:
            if slots is not None:
                raise InputError(
                    f"slots= belongs to a step function; cell '{self.cell.name}' has {len(self.cell.slots)}."
                )
            self.slots = len(self.cell.slots)
            gates, reads, enters = (
                len(self.cell.gates),
                len(self.cell.read),
                len(self.cell.driven_entries),
            )
            self.W = parameter(gates * hidden, reads * hidden, **make) if reads else None
            self.R = parameter(enters * hidden, inputs, **make)
            self.b = parameter(enters * hidden, **make) if bias else None
            for name in self.cell.parameters:
                self.p[name] = parameter(hidden, **make)
            if mask is not None:
                check_dense("mask", mask)
                if self.W is None or tuple(mask.shape) != tuple(self.W.shape):
                    raise InputError(
                        f"mask has shape {list(mask.shape)}; expected that of W, {list(self.W.shape) if self.W is not None else 'none: this cell has no W'}."
                    )
                mask = mask.to(**make)
        self.register_buffer("mask", mask)
        self.visible_slots = (
            [self.cell.slots.index(s) for s in self.cell.shows]
            if self.cell and self.cell.shows
            else [0]
        )
        self.visible_width = len(self.visible_slots) * hidden
        n = self.n = self.slots * hidden
        if isinstance(x0, Tensor):
            check_dense("x0", x0)
            if tuple(x0.shape) != (n,):
                raise InputError(f"x0 has shape {list(x0.shape)}; expected [{n}] (hidden x slots).")
            if not x0.is_meta and not torch.isfinite(x0).all():
                raise InputError("x0 holds NaN or inf.")
            self.register_buffer("x0", x0.detach().clone().to(**make))
        elif choose("x0", x0, ("zero", "learned")) == "learned":
            self.x0 = parameter(n, **make)
        else:
            self.register_buffer("x0", torch.zeros(n, **make), persistent=False)
        if self.cell is not None and (structure is not None or self.cell.structure is not None):
            self._structure(structure)
        Recurrence.reset_parameters(self)
        engines.resolve(self._engine, self.cell, self.x0.device.type)

    @property
    def name(self) -> str:
        """The cell's, or that of the step function."""
        if self.cell is not None:
            return self.cell.name
        return getattr(self.step, "__name__", type(self.step).__name__)

    @property
    def engine(self) -> Choice:
        """The engine that runs this network where it is now; `.why` says why. Assign a name to ask for another."""
        return engines.resolve(self._engine, self.cell, self.x0.device.type)

    @engine.setter
    def engine(self, name: str) -> None:
        self._engine = engines.current_name(name)

    def _structure(self, given: str | nn.Module | None) -> None:
        """Give W its structure: the one that is asked for, or the cell's own."""
        assert self.cell is not None
        if self.W is None:
            raise InputError(f"structure= acts on W, and cell '{self.cell.name}' has none.")
        with torch.no_grad():  # the identity has every structure, or nearly
            self.W.copy_(torch.eye(self.hidden).repeat(*(n // self.hidden for n in self.W.shape)))
        if given is None:
            assert self.cell.structure is not None
            module = self.cell.structure(units=self.hidden)
        else:
            module = structures.structure(given, self.hidden)
        parametrize.register_parametrization(self, "W", module.to(self.x0.device))

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(hidden); a structured W and the cell's own parameters begin where their definition says, x0 at
        zero."""
        bound = 1 / math.sqrt(self.hidden)
        with torch.no_grad():
            for name in ("W", "R", "b"):
                if isinstance(getattr(self, name, None), nn.Parameter):
                    getattr(self, name).uniform_(-bound, bound)
            for name, initial in self.cell.parameters.items() if self.cell is not None else ():
                if not isinstance(initial, Uniform):
                    self.p[name].fill_(initial)
            if isinstance(self.x0, nn.Parameter):
                self.x0.zero_()
            if self.mask is not None and isinstance(self.W, nn.Parameter):
                self.W.mul_(self.mask)
        self.draw_own_parameters()

    def draw_own_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw what a structure of W and the cell's own parameters draw: their raw parameters, where the definition says."""
        with torch.no_grad():
            if parametrize.is_parametrized(self, "W"):
                structure: Any = self.parametrizations["W"]  # type: ignore[index]
                raw, bound = list(structure.parameters(recurse=False)), 1 / math.sqrt(self.hidden)
                if hasattr(structure[0], "begin"):
                    structure[0].begin(*raw, generator=generator)
                else:
                    for M in raw:
                        M.uniform_(-bound, bound, generator=generator)
            for name, initial in self.cell.parameters.items() if self.cell is not None else ():
                if isinstance(initial, Uniform):
                    self.p[name].copy_(initial(self.hidden, generator))

    def refuse_if_indivisible(self, what: str) -> None:
        """Refuse `what`, which takes a sequence apart, where that is not the same."""
        if self.cell is not None and self.cell.given:
            raise Unsupported(
                f"{what}: cell '{self.cell.name}' is given data by the steps of a whole sequence ({', '.join(self.cell.given)}). "
                "Use BPTT or Penalised without segments."
            )

    def visible_state(self, x: Tensor) -> Tensor:
        """The slots that others read."""
        if self.visible_slots == list(range(self.slots)):
            return x
        return torch.cat(
            [x[..., i * self.hidden : (i + 1) * self.hidden] for i in self.visible_slots], -1
        )

    def visible_state_transpose(self, bar: Tensor) -> Tensor:
        """The transpose of `visible_state`: [..., wide] -> [..., n]."""
        if self.slots == 1:
            return bar
        parts = dict(zip(self.visible_slots, bar.split(self.hidden, -1), strict=True))
        none = torch.zeros_like(parts[self.visible_slots[0]])
        return torch.cat([parts.get(i, none) for i in range(self.slots)], -1)

    def effective_weights(self) -> EffectiveWeights:
        """The weights as the formula takes them; of a cell, not of a step function."""
        return EffectiveWeights(self)

    def drive(
        self,
        u: Tensor,
        input_weights: InputWeights | None,
        rows: Rows | None = None,
        given: Tensor | None = None,
    ) -> tuple[Tensor | None, ...]:
        """What the inputs say to each step: (base, side) for a formula, (u,) for a step function. given: the data that the
        cell is given at each step, nothing for a change of the input."""
        if input_weights is None:
            return (u,)
        base, side = (None if w is None else affine(rows, u, *w) for w in input_weights)
        assert self.cell is not None
        if self.cell.given:
            given = (
                u.new_zeros(len(u), len(self.cell.given) * self.hidden) if given is None else given
            )
            side = given if side is None else torch.cat([side, given], 1)
        return base, side

    def input_gradient_rows(self, delta: Tensor, side: Tensor | None) -> Tensor:
        """What reaches the rows of R and b: columns of delta [N, gates d], and of v's own [N, beside d]."""
        cell, d = self.cell, self.hidden
        assert cell is not None
        if cell.driven_entries == cell.gates and not cell.side:
            return delta
        assert side is not None or not cell.side_entries
        found = {g: delta[:, i * d : (i + 1) * d] for i, g in enumerate(cell.gates)}
        found |= {
            n: side[:, i * d : (i + 1) * d]
            for i, n in enumerate(cell.side_entries)
            if side is not None
        }
        return torch.cat([found[n] for n in cell.driven_entries], 1)

    def advance(self, u: Tensor, x: Tensor) -> Tensor:
        """One step from u [B, inputs] and x [B, n], by torch's own operations."""
        self.refuse_if_indivisible("one step at a time")
        if self.cell is None:
            return self.call_step(u, x)
        taken = self.effective_weights()
        drive = self.drive(u, taken.input_weights)
        return taken.step_function()(*(d for d in drive if d is not None), x)

    def sweep(
        self, layout: Layout, u: Tensor, start: Tensor
    ) -> tuple[SweepRun, Drive, InputWeights | None]:
        """Run over step rows u from [B, n] states: the run, what drove its steps, and the weights that made it."""
        x0 = layout.sort(start)
        if self.cell is None:
            return StepFunctionRun.run(self.call_step, layout.rows, (u,), x0), (u,), None
        taken, given = self.effective_weights(), None
        if self.cell.data is not None:
            given = self.cell.data(layout.rows.time, self.hidden, self.training).to(u)
        input_weights = taken.input_weights
        drive = self.drive(u, input_weights, layout.rows, given)
        base, side = drive
        assert base is not None
        engine = engines.load(self.engine)
        if engine is None:
            inputs = (base,) if side is None else (base, side)
            return (
                StepFunctionRun.run(taken.step_function(), layout.rows, inputs, x0),
                inputs,
                input_weights,
            )
        plan = SweepPlan(self.cell, layout.rows, engine)
        if u.is_cuda:
            require_finite(plan, u, lambda: nonfinite_error(layout, u))
        return FormulaRun.run(plan, base, side, taken.W, x0, taken.p), drive, input_weights

    def call_step(self, u: Tensor, x: Tensor) -> Tensor:
        state = tuple(x.split(self.hidden, -1)) if self.slots > 1 else x
        out = self.step(u, state)
        out = torch.cat(tuple(out), -1) if isinstance(out, tuple | list) else out
        if not isinstance(out, Tensor) or out.shape != x.shape:
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise InputError(
                f"the step function returned {got}; expected a state shaped like the one it received, {list(x.shape)} (or its {self.slots} parts)."
            )
        return out

    def initial_state(self, x0: Tensor | None, B: int) -> Tensor:
        n = self.n
        if x0 is None:
            return self.x0.expand(B, n)
        check_like("x0", x0, self.x0)
        if tuple(x0.shape) not in ((n,), (B, n)):
            raise InputError(
                f"x0 has shape {list(x0.shape)}; expected [{B}, {n}] or [{n}] (B, hidden x slots)."
            )
        if not torch.isfinite(x0).all():
            raise InputError("x0 holds NaN or inf.")
        return x0.expand(B, n)


def formula_step(cell: Cell, W: Tensor | None, p: Tensor | None) -> Callable[..., Tensor]:
    parameters = (
        dict(zip(cell.parameters, p.chunk(len(cell.parameters)), strict=True))
        if p is not None
        else {}
    )

    def step(base: Tensor, *rest: Tensor) -> Tensor:
        *side, x = rest
        return cell.step(base, side[0] if side else None, W, x, parameters)

    return step

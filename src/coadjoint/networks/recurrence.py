"""Recurrence: one recurrent layer and the sweep that runs it.

x_t = f(W r(x_{t-1}), R u_t + b, x_{t-1}, p)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..cells import library, steps, structures
from ..cells.activations import Activation
from ..cells.cell import Cell, Initial, Uniform
from ..cells.parameters import check_dtype_and_device, parameter
from ..cells.transport import PicklableModule
from ..errors import InputError, KindError, Unsupported, choose
from ..sweeps import engines
from ..sweeps.affine import affine
from ..sweeps.checks import answers_late
from ..sweeps.engines import Choice
from ..sweeps.layout import Layout, check_dense, check_like, nonfinite_error
from ..sweeps.plan import SweepPlan, require_finite
from ..sweeps.rows import Rows
from ..sweeps.run import FormulaRun, SweepRun
from ..sweeps.step_run import StepFunctionRun, is_pure
from .effective_weights import EffectiveWeights, InputWeights
from .interface import check_positive
from .readout import TensorOptions
from .text import compact_repr

# What the inputs add to each step: (base, side) for a formula, (u,) for a step function.
Drive = tuple[Tensor | None, ...]
StepFunction = Callable[..., object]  # (u_t, x) -> x, by the user or a torch cell module


def resolve_cell(
    cell: str | Cell | nn.Module | StepFunction,
    inputs: int,
    hidden: int,
    activation: Activation | None,
    bias: bool,
    options: Mapping[str, object],
    make: TensorOptions,
) -> tuple[Cell | None, StepFunction | None]:
    """(formula, None) or (None, step function) for the argument `cell` of a network.

    options, activation, bias  of a cell given by name; others refuse the first two
    make                       the type and the device of a step function's parameters
    """
    if isinstance(cell, str):
        if cell in steps.STEPS:
            step_options = dict(options)
            if activation is not None:
                step_options["activation"] = activation
            return None, steps.named(cell, inputs, hidden, bias=bias, **step_options, **make)
        choose("cell", cell, (*library.CELLS, *steps.STEPS))
        return library.named(cell, activation, **options), None
    if not isinstance(cell, Cell) and not callable(cell):
        raise KindError(
            "cell must be a name, a cell made with @co.cell, a torch cell module or a step "
            f"function; got {type(cell).__name__}."
        )
    if isinstance(cell, Cell) and cell.given and cell.data is None:
        raise Unsupported(
            f"cell '{cell.name}' is given data at each step ({', '.join(cell.given)}), but a "
            "Network has only inputs. Use co.nn, or write it as a gate that reads an input."
        )
    if activation is not None or options:
        names = [*(["activation"] if activation is not None else []), *options]
        raise InputError(
            f"{', '.join(names)}= belongs to a cell given by name; a formula or a step function "
            "has its own."
        )
    if isinstance(cell, Cell):
        return cell, None
    return None, cell


class Recurrence(PicklableModule):
    """The recurrent part of a Network, or a layer of a Stack; arguments as in Network.

    visible_slots  the slots of the state that others read; visible_width is their number of entries
    n              the number of entries of the state: slots times hidden

    Parameters: W (recurrent), R (input), b, x0 if learned, and those of the cell under `p`. A step
    function has its own.
    """

    W: nn.Parameter | None
    R: nn.Parameter
    b: nn.Parameter | None
    x0: Tensor
    mask: Tensor | None
    cell: Cell | None
    step: StepFunction | None

    __repr__ = compact_repr

    def __init__(
        self,
        cell: str | Cell | nn.Module | StepFunction = "elman",
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
        **options: object,
    ) -> None:
        super().__init__()
        check_positive(inputs=inputs, hidden=hidden)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_dtype_and_device(dtype, device)
        self.inputs = inputs
        self.hidden = hidden
        make: TensorOptions = {"dtype": dtype, "device": device}
        self.cell, self.step = resolve_cell(cell, inputs, hidden, activation, bias, options, make)
        self.engine = engine
        self.p = nn.ParameterDict()
        if slots is not None:
            check_positive(slots=slots)
        if self.cell is None:
            self.slots = slots or self._slots_of_step()
            if mask is not None or structure is not None:
                name = "mask" if mask is not None else "structure"
                raise InputError(f"{name}= acts on W, but a step function holds its own weights.")
        else:
            if slots is not None:
                raise InputError(
                    f"slots= belongs to a step function; cell '{self.cell.name}' has "
                    f"{len(self.cell.slots)}."
                )
            self.slots = len(self.cell.slots)
            self._make_weights(self.cell, bias, make)
        self.register_buffer("mask", None if mask is None else self._checked_mask(mask, make))
        self.visible_slots = [0]
        if self.cell is not None and self.cell.shows:
            self.visible_slots = [self.cell.slots.index(slot) for slot in self.cell.shows]
        if getattr(self.step, "shows_all", False):
            self.visible_slots = list(range(self.slots))
        self.visible_width = len(self.visible_slots) * hidden
        self.n = self.slots * hidden
        self._make_x0(x0, make)
        if self.cell is not None and (structure is not None or self.cell.structure is not None):
            self._add_structure(self.cell, structure)
        Recurrence.reset_parameters(self)  # not that of a subclass, which is not complete yet
        _ = self.engine  # refuses one that cannot run

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots; those of a step function without names are numbers, or "h"."""
        if self.cell is not None:
            return self.cell.slots
        names: tuple[str, ...] | None = getattr(self.step, "slot_names", None)
        if names is not None and len(names) == self.slots:
            return names
        if isinstance(self.step, nn.LSTMCell):
            return ("h", "c")
        return ("h",) if self.slots == 1 else tuple(map(str, range(self.slots)))

    def _slots_of_step(self) -> int:
        """The number of parts of a step function's state: its `slots`, 2 of an LSTMCell, or 1."""
        slots: int | None = getattr(self.step, "slots", None)
        return slots or (2 if isinstance(self.step, nn.LSTMCell) else 1)

    def _make_weights(self, cell: Cell, bias: bool, make: TensorOptions) -> None:
        """Create W, R, b and the per-unit parameters of a cell; `reset_parameters` fills them."""
        d = self.hidden
        driven = len(cell.driven_entries) * d
        read = len(cell.read) * d
        self.W = parameter(len(cell.gates) * d, read, **make) if read else None
        self.R = parameter(driven, self.inputs, **make)
        self.b = parameter(driven, **make) if bias else None
        for name in cell.parameters:
            self.p[name] = parameter(d, **make)

    def _checked_mask(self, mask: Tensor, make: TensorOptions) -> Tensor:
        """The mask in the type and on the device of W; refused unless it has the shape of W."""
        check_dense("mask", mask)
        if self.W is None or tuple(mask.shape) != tuple(self.W.shape):
            expected = "none: this cell has no W" if self.W is None else list(self.W.shape)
            raise InputError(f"mask has shape {list(mask.shape)}; expected that of W, {expected}.")
        return mask.to(**make)

    def _make_x0(self, x0: str | Tensor, make: TensorOptions) -> None:
        """Register x0 [n]: a buffer if it is zero or given, a parameter if it is learned."""
        n = self.n
        if isinstance(x0, Tensor):
            check_dense("x0", x0)
            if tuple(x0.shape) != (n,):
                raise InputError(f"x0 has shape {list(x0.shape)}; expected [{n}] (hidden x slots).")
            if not x0.is_meta and not torch.isfinite(x0).all():
                raise InputError("x0 holds NaN or inf.")
            self.register_buffer("x0", x0.detach().clone().to(**make))
        elif choose("x0", x0, ("zero", "learned")) == "learned":
            self.x0 = parameter(n, **make)
        else:  # zeros need not be saved with the weights
            self.register_buffer("x0", torch.zeros(n, **make), persistent=False)

    def _add_structure(self, cell: Cell, structure: str | nn.Module | None) -> None:
        """Parametrise W by the given structure, or by the cell's own."""
        if self.W is None:
            raise InputError(f"structure= acts on W, but cell '{cell.name}' has no W.")
        rows, columns = self.W.shape
        # register_parametrization maps the current W back to a raw parameter, so W must have the
        # structure already. Nearly every structure contains the identity.
        identity = torch.eye(self.hidden).repeat(rows // self.hidden, columns // self.hidden)
        with torch.no_grad():
            self.W.copy_(identity)
        if structure is None:
            assert cell.structure is not None
            module = cell.structure(units=self.hidden)
        elif structure == structures.FREE:
            module = structures.Free(cell.structure, cell.name, self.hidden)
        else:
            module = structures.structure(structure, self.hidden)
        parametrize.register_parametrization(self, "W", module.to(self.x0.device))

    @property
    def name(self) -> str:
        """The name of the cell or of the step function."""
        if self.cell is not None:
            return self.cell.name
        return getattr(self.step, "__name__", type(self.step).__name__)

    @property
    def engine(self) -> Choice:
        """The engine in use on the present device, and `.why`. Assign a name to request another."""
        x0 = self.x0
        return engines.resolve(self._engine, self.cell, x0.device.type, x0.dtype)

    @engine.setter
    def engine(self, name: str) -> None:
        self._engine = engines.current_name(name)

    def _initial_values(self) -> Mapping[str, Initial]:
        """How the per-unit parameters of the cell begin, by name."""
        return {} if self.cell is None else self.cell.parameters

    def reset_parameters(self) -> None:
        """Draw W, R and b uniformly from +-1/sqrt(hidden), as torch.nn does.

        A structured W and the cell's own parameters begin as their definitions say, x0 at zero.
        """
        bound = 1 / math.sqrt(self.hidden)
        with torch.no_grad():
            for name in ("W", "R", "b"):
                value = getattr(self, name, None)
                if isinstance(value, nn.Parameter):
                    value.uniform_(-bound, bound)
            for name, initial in self._initial_values().items():
                if not isinstance(initial, Uniform):
                    self.p[name].fill_(initial)
            if isinstance(self.x0, nn.Parameter):
                self.x0.zero_()
            if self.mask is not None and isinstance(self.W, nn.Parameter):
                self.W.mul_(self.mask)
        self.draw_own_parameters()

    def draw_own_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the raw parameters of a structured W and the random per-unit parameters."""
        with torch.no_grad():
            if parametrize.is_parametrized(self, "W"):
                self._draw_structure(generator)
            for name, initial in self._initial_values().items():
                if isinstance(initial, Uniform):
                    self.p[name].copy_(initial(self.hidden, generator))
            draw_units = getattr(self.step, "draw_units", None)  # some steps of this package
            if draw_units is not None:
                draw_units(generator)

    def _draw_structure(self, generator: torch.Generator | None) -> None:
        """Draw the raw matrices of a structured W by the rule of its structure, `begin`.

        A parametrisation without that rule, such as one of torch's, is drawn from +-1/sqrt(hidden).
        """
        structure = self.get_submodule("parametrizations.W")
        assert isinstance(structure, parametrize.ParametrizationList)
        raw = list(structure.parameters(recurse=False))
        draw = getattr(structure[0], "begin", None)
        if draw is not None:
            draw(*raw, generator=generator)
            return
        bound = 1 / math.sqrt(self.hidden)
        for M in raw:
            M.uniform_(-bound, bound, generator=generator)

    def refuse_if_indivisible(self, what: str) -> None:
        """Refuse the method `what` if the cell needs data that depend on an entire sequence."""
        if self.cell is not None and self.cell.given:
            raise Unsupported(
                f"{what}: cell '{self.cell.name}' is given data for the steps of an entire "
                f"sequence ({', '.join(self.cell.given)}). Use BPTT or Penalised without segments."
            )

    def visible_state(self, x: Tensor) -> Tensor:
        """The slots of x that others read: [..., n] -> [..., visible_width]."""
        if self.visible_slots == list(range(self.slots)):
            return x
        d = self.hidden
        return torch.cat([x[..., i * d : (i + 1) * d] for i in self.visible_slots], -1)

    def visible_state_transpose(self, bar: Tensor) -> Tensor:
        """The transpose of `visible_state`, [..., visible_width] -> [..., n]: dL/dx from dL/dh.

        Slots that are not visible become zero.
        """
        if self.slots == 1:
            return bar
        by_slot = dict(zip(self.visible_slots, bar.split(self.hidden, -1), strict=True))
        zeros = torch.zeros_like(by_slot[self.visible_slots[0]])
        return torch.cat([by_slot.get(i, zeros) for i in range(self.slots)], -1)

    def effective_weights(self) -> EffectiveWeights:
        """The weights as the formula takes them; only for a cell, not for a step function."""
        return EffectiveWeights(self)

    def drive(
        self,
        u: Tensor,
        input_weights: InputWeights | None,
        rows: Rows | None = None,
        given: Tensor | None = None,
    ) -> Drive:
        """What the inputs add to each step: (base, side) of a formula, (u,) of a step function.

        base = R_base u + b_base, side = R_side u + b_side or None.

        u      [N, inputs]
        rows   by whose chunks the products R u are formed; None: all at once
        given  the data that some cells take at each step beside u, [N, given d]; None stands for
               zeros, as when u is a change of the input
        """
        if input_weights is None:
            return (u,)
        base_weights, side_weights = input_weights
        base = affine(rows, u, *base_weights)
        side = None if side_weights is None else affine(rows, u, *side_weights)
        assert self.cell is not None
        if self.cell.given:
            if given is None:
                given = u.new_zeros(len(u), len(self.cell.given) * self.hidden)
            side = given if side is None else torch.cat([side, given], 1)
        return base, side

    def input_gradient_rows(self, delta: Tensor, side: Tensor | None) -> Tensor:
        """The gradient by R u + b, whose rows are those of R and b: [N, driven_entries d].

        delta  the gradient by the gates, [N, gates d]
        side   the gradient by the side entries, [N, side_entries d]; None if there are none
        """
        cell = self.cell
        d = self.hidden
        assert cell is not None
        if cell.driven_entries == cell.gates and not cell.side:
            return delta  # the rows of R and b are those of the gates
        assert side is not None or not cell.side_entries
        by_entry: dict[str, Tensor] = {}
        for i, gate in enumerate(cell.gates):
            by_entry[gate] = delta[:, i * d : (i + 1) * d]
        if side is not None:  # replaces gates that the inputs reach beside W r(x)
            for i, entry in enumerate(cell.side_entries):
                by_entry[entry] = side[:, i * d : (i + 1) * d]
        return torch.cat([by_entry[entry] for entry in cell.driven_entries], 1)

    def advance(self, u: Tensor, x: Tensor) -> Tensor:
        """One step from u [B, inputs] and x [B, n], in torch operations."""
        self.refuse_if_indivisible("one step at a time")
        if self.cell is None:
            return self.call_step(u, x)
        weights = self.effective_weights()
        drive = self.drive(u, weights.input_weights)
        return weights.step_function()(*(part for part in drive if part is not None), x)

    def sweep(
        self, layout: Layout, u: Tensor, start: Tensor
    ) -> tuple[SweepRun, Drive, InputWeights | None]:
        """Run over step rows u from the states `start` [B, n].

        Returns the run, the drive of its steps, and the weights that made the drive.
        """
        x0 = layout.sort(start)
        if self.cell is None:
            run = StepFunctionRun.run(
                self.call_step, layout.rows, (u,), x0, pure=is_pure(self.step)
            )
            return run, (u,), None
        weights = self.effective_weights()
        given = None
        if self.cell.data is not None:
            given = self.cell.data(layout.rows.time, self.hidden, self.training).to(u)
        input_weights = weights.input_weights
        base, side = self.drive(u, input_weights, layout.rows, given)
        assert base is not None
        engine = engines.load(self.engine)
        if engine is None:  # "autograd": the formula runs as a step function
            drive = (base,) if side is None else (base, side)
            run = StepFunctionRun.run(weights.step_function(), layout.rows, drive, x0)
            return run, drive, input_weights
        plan = SweepPlan(self.cell, layout.rows, engine)
        if answers_late(
            u
        ):  # lay_out has checked u on a CPU; here the check does not wait for the GPU
            require_finite(plan, u, lambda: nonfinite_error(layout, u))
        swept = FormulaRun.run(plan, base, side, weights.W, x0, weights.p)
        return swept, (base, side), input_weights

    def call_step(self, u: Tensor, x: Tensor) -> Tensor:
        """One step of the step function, [B, n] -> [B, n]; it sees the state in `slots` parts."""
        assert self.step is not None
        state = tuple(x.split(self.hidden, -1)) if self.slots > 1 else x
        out = self.step(u, state)
        if isinstance(out, tuple | list):
            out = torch.cat(tuple(out), -1)
        if not isinstance(out, Tensor) or out.shape != x.shape:
            got = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise InputError(
                f"the step function returned {got}; expected a state shaped like the one it "
                f"received, {list(x.shape)} (or its {self.slots} parts)."
            )
        return out

    def initial_state(self, x0: Tensor | None, B: int) -> Tensor:
        """The first states [B, n]: x0 [B, n] or [n] if given, else the network's own."""
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
